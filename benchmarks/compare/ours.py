"""Our side of generate.py, train.py and grpo_step.py; sides.py describes the protocol."""

import gc
import json
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.compare.libraries import touch_libraries
from benchmarks.compare.sides import Desk, Measured, memory_bytes, rewards_of
from benchmarks.measure.limits import measure_limits
from realhf import GRPO, DatasetConfig, OptimizerConfig, Reward, Role, SamplingConfig
from realhf.algorithms.policy_loss import PolicyLoss, PolicyLossConfig
from realhf.algorithms.sft import CrossEntropy
from realhf.calls import Generate, TrainStep
from realhf.data.batch import Batch, Packed
from realhf.data.micro_batch import balance
from realhf.distributed.world import World
from realhf.engine.native import NativeEngine
from realhf.execution_plan import CallPlan, ExecutionPlan
from realhf.graph import FunctionCall
from realhf.layout import Layout, even_split
from realhf.models.model_config import ModelConfig
from realhf.models.param_spec import model_spec
from realhf.runtime.compile.program import Program, compile_program
from realhf.runtime.execute.executor import StepRecord
from realhf.runtime.trainer import Trainer

GENERATED = ("sequence_ids", "response_mask", "gen_logprobs", "finished")


def engine_of(settings: dict[str, Any], world: World | None = None) -> NativeEngine:
    """Return an engine, data-parallel over all ranks; it is trainable if the settings have an optimizer."""
    optimizer = OptimizerConfig(**settings["optimizer"]) if "optimizer" in settings else None
    spec = model_spec(ModelConfig.load(settings["model"]))
    world = world or World()
    layout = Layout.parse(f"d{world.size}@0-{world.size - 1}")
    engine = NativeEngine(spec, layout, world, dtype=settings["dtype"], optimizer=optimizer)
    engine.load(Path(settings["model"]), seed=0)
    return engine


def generate(desk: Desk) -> None:
    """Generate for all prompts, each `group` times, in one call."""
    settings = desk.settings
    base = memory_bytes("VmRSS")
    engine = engine_of(settings)
    prompts = json.loads(Path(settings["data"]).read_text())
    index, count = settings.get("part", (0, 1))
    prompts = prompts[slice(*even_split(len(prompts), count, index))]
    prompts = [torch.tensor(prompt) for prompt in prompts for _ in range(settings["group"])]
    batch = Batch(list(range(len(prompts))), {"prompt_ids": Packed.of(prompts)})
    num_prompt_tokens = sum(map(len, prompts))
    gc.collect()
    gc.freeze()  # As a Trainer does.
    desk.answer(base_bytes=base)
    for number, request in enumerate(desk.requests()):
        if request["do"] == "limits":
            desk.answer(**measure_limits(settings["dtype"]))
            continue
        sampling = SamplingConfig(
            max_new_tokens=request["max_new_tokens"], ignore_eos=not settings.get("ends", True))
        call = FunctionCall(
            "actor_generate", inputs=("prompt_ids",), outputs=GENERATED, role="actor",
            work=Generate(sampling, seed=number, max_rows=settings["rows"] // count))
        with Measured() as measured:
            generated = engine.generate(call, batch).batch
        desk.answer(tokens=len(generated["sequence_ids"].values) - num_prompt_tokens, **measured.cost)


class SecondRank:
    """The second rank of a side that has two: a process that runs `follow(settings, world, leader)`."""

    def __init__(self, follow: Callable[..., None], settings: dict[str, Any]) -> None:
        ranks = settings.get("ranks", 1)
        store = None
        self._pipe: Connection | None = None
        if ranks == 2:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            self._pipe, theirs = Pipe()
            arguments = (follow, settings, store.port, theirs)
            get_context("spawn").Process(target=_join, args=arguments, daemon=True).start()
        torch.set_num_threads(settings["threads"] // ranks)
        self.world = World(size=ranks, store=store)

    def wait(self) -> int:
        """Wait until the rank has started; return the memory of both before the model is loaded."""
        base = memory_bytes("VmRSS")
        return base if self._pipe is None else base + self._pipe.recv()

    def start(self) -> None:
        if self._pipe is not None:
            self._pipe.send(None)

    def finish(self) -> dict[str, float]:
        """Wait for the second rank, and return its cost."""
        return {} if self._pipe is None else self._pipe.recv()


def _join(
    follow: Callable[..., None], settings: dict[str, Any], port: int, leader: Connection
) -> None:
    torch.set_num_threads(1)
    touch_libraries()
    world = World(rank=1, size=2, store=dist.TCPStore("127.0.0.1", port, is_master=False))
    leader.send(memory_bytes("VmRSS"))
    with suppress(EOFError):  # The leader has ended.
        follow(settings, world, leader)


def _of_both(cost: dict[str, float], theirs: dict[str, float]) -> dict[str, float]:
    return cost | {key: cost[key] + theirs.get(key, 0) for key in ("cpu_seconds", "peak_bytes")}


def train(desk: Desk) -> None:
    """Make optimizer steps of the causal language model's loss, always on the same sequences."""
    settings = desk.settings
    other = SecondRank(_train_along, desk.settings)
    base = other.wait()
    step = train_step(settings, other.world)
    desk.answer(base_bytes=base)
    for request in desk.requests():
        if request["do"] == "limits":
            torch.set_num_threads(settings["threads"])
            desk.answer(**measure_limits(settings["dtype"]))
            torch.set_num_threads(settings["threads"] // other.world.size)
            continue
        with Measured() as measured:
            other.start()
            metrics = step()
            theirs = other.finish()
        cost = _of_both(measured.cost, theirs)
        desk.answer(loss=metrics["loss"], grad_norm=metrics["grad_norm"], **cost)


def _train_along(settings: dict[str, Any], world: World, leader: Connection) -> None:
    step = train_step(settings, world)
    while True:
        leader.recv()
        with Measured() as measured:
            step()
        leader.send(measured.cost)


def train_step(settings: dict[str, Any], world: World) -> Callable[[], dict[str, float]]:
    rows = [torch.tensor(row) for row in json.loads(Path(settings["data"]).read_text())]
    rows = [rows[i] for i in balance([len(row) for row in rows], world.size)[world.rank]]
    mask = [(torch.arange(len(row)) > 0).float() for row in rows]
    columns = {"sequence_ids": Packed.of(rows), "response_mask": Packed.of(mask)}
    batch = Batch(list(range(len(rows))), columns)
    engine = engine_of(settings, world)
    gc.collect()
    gc.freeze()  # As a Trainer does.
    work = TrainStep(CrossEntropy())
    call = FunctionCall("actor_train", inputs=tuple(columns), role="actor", work=work)
    return lambda: engine.train(call, [batch], micro_batch_tokens=settings["micro_batch"])


class Stepping(Trainer):
    """A Trainer whose steps are taken without evaluations, exports and checkpoints."""

    def take_step(self, step: int) -> StepRecord:
        """Run the step program once and return what was recorded."""
        self._context.step = step
        self._executor.begin_step()
        with self._runner.one_step():
            self._program.experiment.step(self._runner)
        return self._executor.take_record()


class Paced(Stepping):
    """A Trainer that makes a step on each request, together with the other rank."""

    def pace(self, desk: Desk, other: SecondRank) -> None:
        self._desk = desk
        self._other = other
        self._requests = desk.requests()

    def _run_step(self, step: int) -> None:
        if next(self._requests, None) is None:
            raise SystemExit  # The benchmark has ended.
        with Measured() as measured:
            self._other.start()
            record = self.take_step(step)
            theirs = self._other.finish()
        lengths = [value for name, value, _ in record.metrics if name == "response_length/mean"]
        calls = [event for event in record.events if event["kind"] != "move"]
        seconds = {event["name"]: event["end"] - event["start"] for event in calls}
        self._desk.answer(response_length=lengths[0], calls=seconds, **_of_both(measured.cost, theirs))


class Led(Stepping):
    """The Trainer of the other rank, which makes a step when the first one does."""

    def follow(self, leader: Connection) -> None:
        self._leader = leader

    def _run_step(self, step: int) -> None:
        self._leader.recv()
        with Measured() as measured:
            self.take_step(step)
        self._leader.send(measured.cost)


def grpo(desk: Desk) -> None:
    """Make steps of a GRPO experiment in `ranks` processes; or compute the loss of the settings' batch."""
    settings = desk.settings
    if "batch" in settings:
        return _policy_loss(desk)
    other = SecondRank(_grpo_along, settings)
    base = other.wait()
    trainer = Paced(_program(settings), other.world, quiet=True)
    trainer.pace(desk, other)
    desk.answer(base_bytes=base)
    trainer.run()


def _grpo_along(settings: dict[str, Any], world: World, leader: Connection) -> None:
    trainer = Led(_program(settings), world, quiet=True)
    trainer.follow(leader)
    trainer.run()


def _program(settings: dict[str, Any]) -> Program:
    ranks = settings.get("ranks", 1)
    experiment = GRPO(
        actor=Role(
            settings["model"], dtype=settings["dtype"], optimizer=OptimizerConfig(**settings["optimizer"])),
        dataset=DatasetConfig(settings["data"], shuffle=False),
        reward_function=[Reward(function, weight=weight) for function, weight in rewards_of(settings)],
        sampling=SamplingConfig(max_new_tokens=settings["max_new_tokens"]),
        batch_size=settings["prompts"], group_size=settings["group"], steps=settings["steps"],
    )
    layout = Layout.parse(f"d{ranks}@0-{ranks - 1}" if ranks > 1 else "d1@0")
    calls = {call.name: CallPlan(layout) for call in experiment.graph().calls if call.kind != "host"}
    calls["actor_train"] = CallPlan(layout, micro_batch_tokens=settings["micro_batch"])
    return compile_program(experiment, ExecutionPlan(calls), world_size=ranks)


def _policy_loss(desk: Desk) -> None:
    """Compute the policy loss and its gradient norm on given samples."""
    settings = desk.settings
    rows = json.loads(Path(settings["batch"]).read_text())
    names = (*GENERATED[:3], "advantages")
    columns: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    for row in rows:
        before, after = len(row["prompt"]), len(row["completion"])
        zeros = [0.0] * before
        columns["sequence_ids"].append(torch.tensor(row["prompt"] + row["completion"]))
        columns["response_mask"].append(torch.tensor(zeros + [1.0] * after))
        columns["gen_logprobs"].append(torch.tensor(zeros + row["logprobs"]))
        columns["advantages"].append(torch.tensor(zeros + [row["advantage"]] * after))
    batch = Batch(list(range(len(rows))), {name: Packed.of(values) for name, values in columns.items()})
    engine = engine_of(settings)
    work = TrainStep(PolicyLoss(PolicyLossConfig()))
    call = FunctionCall("actor_train", inputs=tuple(columns), role="actor", work=work)
    desk.answer()
    for _ in desk.requests():
        metrics = engine.train(call, [batch], micro_batch_tokens=settings["micro_batch"])
        desk.answer(loss=metrics["loss"], grad_norm=metrics["grad_norm"])


KINDS = {"generate": generate, "train": train, "grpo": grpo}

if __name__ == "__main__":
    at_desk = Desk()
    torch.set_num_threads(at_desk.settings["threads"])
    touch_libraries()
    at_desk.serve(KINDS[at_desk.settings["kind"]])
