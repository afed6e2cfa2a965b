"""What the workers of these tests run. Importing this module patches torch: see shim.py."""

from tests.megatron import shim  # isort: skip

import contextlib
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from torch.utils._python_dispatch import TorchDispatchMode

from realhf.algorithms.sft import CrossEntropy
from realhf.calls import LogProbs, OptimizerConfig, TrainStep
from realhf.checkpoint.hf import CheckpointWriter
from realhf.cli.experiment_file import load_experiment
from realhf.distributed.world import World
from realhf.engine.base import DTYPES, Engine
from realhf.engine.megatron.engine import MegatronEngine
from realhf.engine.native import NativeEngine
from realhf.execution_plan import ExecutionPlan
from realhf.graph import FunctionCall
from realhf.layout import Layout
from realhf.models.model_config import ModelConfig
from realhf.models.param_spec import model_spec
from realhf.runtime.checkpointer import newest_checkpoint
from realhf.runtime.compile.program import compile_program
from realhf.runtime.trainer import Trainer
from tests.engine.reference import ragged_rows
from tests.engine.training import minibatch
from tests.planner.test_rates import Operators
from tests.reallocators import make_reallocator
from tests.runtime.tiny import Recorder, make_experiment, recording, role

assert shim.VERSION
ENGINES = {"native": NativeEngine, "megatron": MegatronEngine}
CALL = FunctionCall(
    "actor_train", "train_step", ("sequence_ids", "response_mask"), role="actor",
    work=TrainStep(CrossEntropy()),
)


def make_engine(
    world: World, kind: str, hf: dict[str, Any], text: str,
    *, dtype: str = "float32", head: str | None = None, **options: Any,
) -> Engine | None:
    """Return an engine with random weights; None if the rank is not in the layout."""
    layout = Layout.parse(text)
    if world.rank not in layout:
        return None
    spec = model_spec(ModelConfig.from_hf(hf, head=head))
    config = OptimizerConfig(lr=3e-3, weight_decay=0.1, max_grad_norm=0.5)
    engine = ENGINES[kind](spec, layout, world, dtype=dtype, optimizer=config, **options)
    engine.load(None, seed=0)
    return engine


def train(engine: Engine, *, steps: int, recompute: bool = False) -> list[dict[str, float]]:
    """Return the metrics of a few steps on ragged rows, of which each replica has a part."""
    dp = engine.groups.at.dp
    size = engine.groups.layout.dp
    found = []
    for seed in range(steps):
        batch = minibatch(ragged_rows(6, seed=seed)[dp::size])
        found.append(engine.train(CALL, [batch], micro_batch_tokens=16, recompute=recompute))
        if isinstance(engine, MegatronEngine):
            engine.release("gradients")
            assert "gradients" not in engine.memory()
    return found


def curve(
    world: World, kind: str, hf: dict[str, Any], text: str, options: dict[str, Any]
) -> list[dict[str, float]] | None:
    """Return the metrics of five steps, on the last pipeline stage."""
    options = dict(options)
    recompute = options.pop("recompute", False)
    engine = make_engine(world, kind, hf, text, **options)
    return None if engine is None else train(engine, steps=5, recompute=recompute)


def outputs(world: World, kind: str, hf: dict[str, Any], text: str, call: FunctionCall) -> list | None:
    """Return the columns of a forward call on ragged rows, on the last stage."""
    head = None if call.work.output == "logprobs" else "score"
    engine = make_engine(world, kind, hf, text, head=head)
    if engine is None:
        return None
    dp = engine.groups.at.dp
    batch = minibatch(ragged_rows(6, seed=0)[dp :: engine.groups.layout.dp])
    found = engine.forward(call, batch, micro_batch_tokens=16)
    return [found[name].values.tolist() for name in call.outputs] if found.fields else None


def reads_of_globals(world: World, hf: dict[str, Any], text: str) -> list[str]:
    """Return the functions of Megatron-Core's `parallel_state` that a train step calls."""
    engine = make_engine(world, "megatron", hf, text)
    called = set()

    def noting(name: str, function: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            called.add(name)
            return function(*args, **options)

        return call

    names = [name for name in vars(parallel_state) if name.startswith(("get_", "is_"))]
    originals = {name: getattr(parallel_state, name) for name in names}
    modules = [m for key, m in sys.modules.items() if key.startswith("megatron.core")]
    for name, function in originals.items():
        for module in modules:
            if getattr(module, name, None) is function:
                setattr(module, name, noting(name, function))
    train(engine, steps=1)
    return sorted(called)


def waits(world: World, hf: dict[str, Any], text: str) -> list[tuple[str, tuple[int, ...]]]:
    """Return the operations, with their ranks, in which a train step is seen to wait.

    The environment asks for torch's barriers after new groups, for which this process would wait for ever.
    """
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
    engine = make_engine(world, "megatron", hf, text)
    seen = set()
    process = world.process
    waiting = process.waiting

    def noting(ranks: Any, operation: Any = None) -> Any:
        if operation is not None:
            seen.add((operation.name, operation.ranks))
        return waiting(ranks, operation)

    process.waiting = noting  # type: ignore[method-assign]
    try:
        train(engine, steps=1)
    finally:
        del process.waiting
    return sorted(seen)


def native_state(world: World, hf: dict[str, Any], dtype: str = "float32") -> dict[str, Any] | None:
    """Return the same as `state` of the native engine on one rank."""
    return state(world, hf, "d1@0", dtype, "native")


def state(
    world: World, hf: dict[str, Any], text: str, dtype: str = "float32", kind: str = "megatron"
) -> dict[str, Any] | None:
    """Return, after two steps, this rank's pieces: of the weights, and of every tensor of the optimizer."""
    engine = make_engine(world, kind, hf, text, dtype=dtype)
    if engine is None:
        return None
    train(engine, steps=2)
    kinds = {"weights": engine.shards(), **engine.optimizer.state}
    return {
        kind: {name: [(box, x.clone()) for box, x in pieces] for name, pieces in shards.items()}
        for kind, shards in kinds.items()
    }


def moved_back(
    world: World, hf: dict[str, Any], text: str, other: str, dtype: str = "float32"
) -> list[str] | None:
    """Move trained weights to a native copy and on to a frozen megatron engine.

    Return the parameters that differ on this rank in the end.
    """
    trained = make_engine(world, "megatron", hf, text, dtype=dtype)
    if trained is not None:
        train(trained, steps=1)
    spec = model_spec(ModelConfig.from_hf(hf))
    home, away = Layout.parse(text), Layout.parse(other)
    copy = NativeEngine(spec, away, world, dtype=dtype) if world.rank in away else None
    end = MegatronEngine(spec, home, world, dtype=dtype) if trained is not None else None
    shards = [None if engine is None else engine.shards() for engine in (trained, copy, end)]
    for source, target, pair in ((home, away, shards[:2]), (away, home, shards[1:])):
        make_reallocator(spec, source, target, world, dtype=DTYPES[dtype]).run(*pair)
    if trained is None:
        return None
    changed = make_engine(world, "megatron", hf, text, dtype=dtype)
    assert not all(_equal(changed.shards()[name], pieces) for name, pieces in shards[0].items())
    return [name for name, pieces in shards[0].items() if not _equal(shards[2][name], pieces)]


def _equal(pieces: Any, others: Any) -> bool:
    return all(torch.equal(x, y) for (_, x), (_, y) in zip(pieces, others, strict=True))


def with_library(world: World, library: str, name: str, *args: Any) -> Any:
    """Run a function of this module as if a library for grouped products of experts were installed."""
    with shim.installed(library):
        return globals()[name](world, *args)


def exported(world: World, hf: dict[str, Any], text: str, directory: Path) -> list | None:
    """Train two steps and write a model directory; return the log-probs of ragged rows, on the last stage."""
    layout = Layout.parse(text)
    engine = make_engine(world, "megatron", hf, text)
    if engine is None:
        return None
    train(engine, steps=2)
    writer = CheckpointWriter(engine.model.spec, layout, world, dtype=torch.float32, leader=layout.ranks[0])
    writer.write(directory, engine.export_shards(), beside={})
    call = FunctionCall(
        "logprobs", "forward", ("sequence_ids",), ("logprobs",), role="actor", work=LogProbs())
    found = engine.forward(call, minibatch(ragged_rows(6, seed=0)), micro_batch_tokens=16)
    return found["logprobs"].values.tolist() if found.fields else None


class _Allocations(TorchDispatchMode):
    """Notes the bytes of the largest tensor that an operator makes."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        known = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in known:
            self.largest = max(self.largest, made.untyped_storage().nbytes())
        return made


def loaded(world: World, hf: dict[str, Any], text: str, directory: Path) -> tuple[int, Any] | None:
    """Load a model directory; return the bytes of the largest tensor that this makes, and the weights."""
    engine = make_engine(world, "megatron", hf, text)
    if engine is None:
        return None
    with _Allocations() as made:
        engine.load_base(directory, seed=0)
    return made.largest, dict(engine.shards())


def in_flight(world: World, hf: dict[str, Any], text: str, counts: tuple[int, ...]) -> list[int] | None:
    """Return the most passes through chunks that wait on this rank for their backward passes, by the number
    of micro-batches."""
    engine = make_engine(world, "megatron", hf, text)
    if engine is None:
        return None
    waiting = [0]

    def count(_: Any, __: Any, output: Any) -> None:
        waiting.append(waiting[-1] + 1)
        output[0].register_hook(lambda _: waiting.append(waiting[-1] - 1))

    for chunk in engine.chunks:
        chunk.decoder.layers[0].register_forward_hook(count)
    most = []
    for number in counts:
        rows = [row for seed in range(number) for row in ragged_rows(1, seed=seed)]
        engine.train(CALL, [minibatch(rows)], micro_batch_tokens=1)
        most.append(max(waiting))
        assert waiting[-1] == 0
        del waiting[1:]
    return most


def grpo(
    world: World, kind: str, layouts: tuple[str, ...], directory: Path, out: Path | None, start: Path | None
) -> tuple[list, list[dict[str, float]]] | None:
    """Run GRPO with an actor of this engine; return the sampled tokens and the metrics, on rank 0."""
    actor = replace(role(directory), engine=kind, dtype="float32")
    recorder = Recorder()
    settings = {"checkpoint_every": 1, "keep_checkpoints": 3} if out is not None else {}
    experiment = recording(make_experiment("grpo", directory, actor=actor, **settings), recorder)
    calls = ("actor_generate", "ref_forward", "actor_train")
    chosen = {call: {"layout": text} for call, text in zip(calls, layouts, strict=True)}
    program = compile_program(experiment, ExecutionPlan.from_dict({"calls": chosen}), world_size=world.size)
    checkpoint = None if start is None else newest_checkpoint(world, [start])
    result = Trainer(program, world, out=out, checkpoint=checkpoint, quiet=True).run()
    return (recorder.steps, result.metrics) if world.rank == 0 else None


def num_kernels(world: World, hf: dict[str, Any]) -> list[int]:
    """Return the numbers of operators of forward passes of models with one and two layers."""
    counts = []
    for num_layers in (1, 2):
        spec = model_spec(ModelConfig.from_hf(hf | {"num_hidden_layers": num_layers}))
        engine = MegatronEngine(spec, Layout.parse("d1@0"), world, dtype="float32")
        engine.load(None, seed=0)
        with torch.inference_mode(), Operators() as operators:
            engine.model(torch.arange(24), [12, 12])
        counts.append(len(operators.names))
    return counts


def demo(
    world: World, file: Path, directory: Path, model: str, engine: str, steps: int
) -> dict[str, Any] | None:
    """Run the demo's GRPO from a model with an actor of this engine; return the summary on rank 0."""
    with contextlib.chdir(directory):  # The example writes its task there.
        experiment = load_experiment(str(file))
        experiment.actor = replace(experiment.actor, model=model, engine=engine)
        experiment.steps = steps
        program = compile_program(experiment, ExecutionPlan.load("grpo-4"), world_size=world.size)
        result = Trainer(program, world, quiet=True).run()
    return result.summary if world.rank == 0 else None
