"""Measure what the planner needs about a machine, for the models of an experiment."""

import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

from realhf.calls import longest_response
from realhf.data.batch import Packed
from realhf.data.loader import load_tokenizer, make_loader
from realhf.dist.world import World
from realhf.errors import UserError
from realhf.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.model_config import ModelConfig
from realhf.planner.profile import SHAPE, ModelTables, Profile, Table, shape_of
from realhf.profiling.clock import Clock
from realhf.profiling.machine import measure_cluster, measure_links
from realhf.profiling.models import Bench, Model, Sizes
from realhf.profiling.surroundings import describe, measure_memory
from realhf.runtime.program import Program


def measure(world: World, program: Program) -> Profile:
    """Return the profile. Every rank must call this, and all get the same profile."""
    machine = describe(world)
    memory = measure_memory(world)
    sizes = _sizes(program, world)
    clock = Clock(world)
    shapes = _models(program)
    links = measure_links(clock, sizes)
    calls = dict[str, Table]()
    models: list[ModelTables] = []
    for number, model in enumerate(shapes, start=1):
        for strategy in _strategies(model.config, world):
            _say(world, f"model shape {number} of {len(shapes)} in {model.dtype}, split as {strategy}")
            bench = Bench(clock, model, strategy, sizes)
            shape = dict(zip(SHAPE, shape_of(model.config), strict=True))
            models.append(ModelTables(
                shape, model.dtype, strategy.tp, bench.tables(), strategy.ep, bench.noise))
            calls = {**bench.calls(), **calls}
    _say(world, "the machine")
    cluster = measure_cluster(clock, sorted({model.dtype for model in shapes}))
    return Profile(time.strftime("%Y-%m-%d %H:%M"), machine, cluster, links, calls, models, memory)


def _say(world: World, what: str) -> None:
    if world.rank == 0:
        print(f"realhf: measuring {what}", file=sys.stderr, flush=True)


def _sizes(program: Program, world: World) -> Sizes:
    """Return the sizes of the experiment, as expected, or from the first step's batch of its dataset."""
    experiment = program.experiment
    answer = experiment.expected.prompt_tokens
    samples = experiment.batch_size * experiment.group_size
    if world.rank == 0 and answer is None:
        loader = make_loader(
            experiment.dataset, keys=program.graph.inputs, group_size=experiment.group_size,
            seed=experiment.seed, tokenizer=load_tokenizer(experiment.tokenizer_dir()),
        )  # fmt: skip
        batch = loader.batch(range(experiment.batch_size))
        columns = [column for column in batch.fields.values() if isinstance(column, Packed)]
        answer = max((statistics.fmean(column.lengths) for column in columns), default=1.0)
    prompt = round(world.control.all_gather_json(answer)[0])
    tokens = prompt + longest_response(program.graph)
    return Sizes(prompt, tokens, samples, experiment.group_size)


def _models(program: Program) -> list[Model]:
    found: dict[Any, Model] = {}
    for name, role in program.roles.items():
        if role.engine != "native":
            raise UserError(f"{name}.engine is {role.engine}: only native ones are measured")
        key = (shape_of(role.config()), role.weights_dtype)
        known = found.get(key)
        calls = (*(known.calls if known else ()), *program.graph.of_role(name))
        found[key] = Model(known.config if known else role.config(), role.weights_dtype, calls)
    return list(found.values())


def _strategies(config: ModelConfig, world: World) -> Iterator[ParallelStrategy]:
    """Yield the legal splits of a block over ranks of one host: tp, or ep, by powers of two."""
    sizes = [2**i for i in range(world.ranks_per_host.bit_length()) if world.ranks_per_host % 2**i == 0]
    splits = [ParallelStrategy(tp=size) for size in sizes]
    splits += [ParallelStrategy(dp=size, ep=size) for size in sizes[1:]]
    for strategy in splits:
        try:
            config.check_layout(Layout(strategy, DeviceMesh(tuple(range(strategy.num_ranks)))))
        except ValueError:
            continue
        yield strategy
