"""Measure what the planner needs about a machine, for the models of an experiment."""

import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from realhf.distributed.world import World
from realhf.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.models.model_config import ModelConfig
from realhf.planner.problem import Problem
from realhf.planner.profile import SHAPE, ModelTables, Profile, Table, shape_of
from realhf.planner.profiled_rates import ProfiledRates
from realhf.profiling.clock import Clock
from realhf.profiling.machine import measure_cluster, measure_links
from realhf.profiling.models import Bench
from realhf.profiling.sizes import MeasuredModel, Sizes
from realhf.profiling.surroundings import describe, measure_memory
from realhf.profiling.whole_calls import whole_calls


def measure(world: World, problem: Problem) -> Profile:
    """Return the profile. Every rank must call this, and all get the same profile."""
    machine = describe(world)
    memory = measure_memory(world)
    sizes = _sizes(problem)
    clock = Clock(world)
    shapes = _models(problem)
    links = measure_links(clock, sizes)
    calls = dict[str, Table]()
    calm = dict[str, float]()
    splits = [(model, strategy) for model in shapes for strategy in _strategies(model.config, world)]
    models: list[ModelTables] = []
    for model, strategy in splits:
        number = shapes.index(model) + 1
        _say(world, f"model shape {number} of {len(shapes)} in {model.dtype}, split as {strategy}")
        bench = Bench(clock, model, strategy, sizes)
        shape = dict(zip(SHAPE, shape_of(model.config), strict=True))
        models.append(ModelTables(shape, model.dtype, strategy.tp, bench.tables(), strategy.ep, bench.noise))
        calls = {**bench.calls(), **calls}
        calm = calm or bench.calm()
    _say(world, "the machine")
    cluster = measure_cluster(clock, sorted({model.dtype for model in shapes}))
    date = time.strftime("%Y-%m-%d %H:%M")
    profile = Profile(date, machine, cluster, links, calls, models, memory, calm)
    rates = ProfiledRates(profile)
    whole = []
    for (model, strategy), entry in zip(splits, models, strict=True):
        _say(world, f"whole calls in {model.dtype}, split as {strategy}")
        whole.append(replace(entry, whole_calls=whole_calls(clock, model, strategy, sizes, rates)))
    return replace(profile, models=whole)


def _say(world: World, what: str) -> None:
    if world.rank == 0:
        print(f"realhf: measuring {what}", file=sys.stderr, flush=True)


def _sizes(problem: Problem) -> Sizes:
    """Return the sizes of a step, of the call with the most tokens per sequence."""
    work = max((problem.workloads[call.name] for call in problem.model_calls), key=lambda work: work.tokens)
    longest = max(work.max_new_tokens, round(work.response_tokens))
    prompt = round(work.prompt_tokens)
    return Sizes(prompt, prompt + longest, work.num_samples, work.samples_per_prompt)


def _models(problem: Problem) -> list[MeasuredModel]:
    """Return the model shapes, each with all calls on it."""
    models: dict[Any, MeasuredModel] = {}
    for name, role in problem.roles.items():
        key = (shape_of(role.config), role.dtype)
        model = models.setdefault(key, MeasuredModel(role.config, role.dtype, ()))
        models[key] = replace(model, calls=(*model.calls, *problem.graph.of_role(name)))
    return list(models.values())


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
