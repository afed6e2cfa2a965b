"""Our side of generate.py, train.py and grpo_step.py: see sides.py for how it is spoken to."""

import json
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from limits import measure_limits
from sides import Desk, Measured, memory_bytes, reward

from realhf import GRPO, DatasetConfig, OptimizerConfig, Role, SamplingConfig
from realhf.algorithms.policy_loss import PolicyLoss, PolicyLossConfig
from realhf.algorithms.sft import CrossEntropy
from realhf.data.batch import Batch, Packed
from realhf.dist.group import World
from realhf.engine.native import NativeEngine
from realhf.engine.work import Generate, TrainStep
from realhf.graph import FunctionCall
from realhf.layout import Layout, even_split
from realhf.model_config import ModelConfig
from realhf.param_spec import model_spec
from realhf.plan import CallPlan, ExecutionPlan
from realhf.runtime.check import Program, compile_program
from realhf.runtime.executor import StepRecord
from realhf.runtime.trainer import Trainer

GENERATED = ("sequence_ids", "response_mask", "gen_logprobs", "finished")


def engine_of(settings: dict[str, Any]) -> NativeEngine:
    """Trainable when the settings have the fields of an optimizer."""
    optimizer = OptimizerConfig(**settings["optimizer"]) if "optimizer" in settings else None
    spec = model_spec(ModelConfig.load(settings["model"]))
    engine = NativeEngine(
        spec, Layout.parse("d1@0"), World(), dtype=settings["dtype"], optimizer=optimizer)
    engine.load(Path(settings["model"]), seed=0)
    return engine


def generate(desk: Desk) -> None:
    """Prompts, each `group` times, in one call."""
    settings, base = desk.settings, memory_bytes("VmRSS")
    engine = engine_of(settings)
    prompts = json.loads(Path(settings["data"]).read_text())
    index, count = settings.get("part", (0, 1))
    prompts = prompts[slice(*even_split(len(prompts), count, index))]
    prompts = [torch.tensor(prompt) for prompt in prompts for _ in range(settings["group"])]
    batch = Batch(list(range(len(prompts))), {"prompt_ids": Packed.of(prompts)})
    num_prompt_tokens = sum(map(len, prompts))
    desk.answer(base_bytes=base)
    for number, request in enumerate(desk.requests()):
        if request["do"] == "limits":
            desk.answer(**measure_limits(settings["dtype"]))
            continue
        sampling = SamplingConfig(max_new_tokens=request["max_new_tokens"])
        call = FunctionCall(
            "actor_generate", "generate", ("prompt_ids",), GENERATED, role="actor",
            work=Generate(sampling, seed=number, max_rows=settings["rows"] // count))
        with Measured() as measured:
            made = engine.run(call, [batch], micro_batch_tokens=4096).batch
        desk.answer(tokens=len(made["sequence_ids"].values) - num_prompt_tokens, **measured.cost)


def train(desk: Desk) -> None:
    """Optimizer steps of the causal language model's loss, every time on the same sequences."""
    settings, base = desk.settings, memory_bytes("VmRSS")
    rows = [torch.tensor(row) for row in json.loads(Path(settings["data"]).read_text())]
    mask = [(torch.arange(len(row)) > 0).float() for row in rows]
    columns = {"sequence_ids": Packed.of(rows), "response_mask": Packed.of(mask)}
    batch = Batch(list(range(len(rows))), columns)
    engine = engine_of(settings)
    work = TrainStep(CrossEntropy())
    call = FunctionCall("actor_train", "train_step", tuple(columns), role="actor", work=work)
    desk.answer(base_bytes=base)
    for request in desk.requests():
        if request["do"] == "limits":
            desk.answer(**measure_limits(settings["dtype"]))
            continue
        with Measured() as measured:
            metrics = engine.run(call, [batch], micro_batch_tokens=settings["micro_batch"]).metrics
        desk.answer(loss=metrics["loss"], grad_norm=metrics["grad_norm"], **measured.cost)


class Paced(Trainer):
    """Takes a step when it is asked for one, and lets the other rank take it, too."""

    def pace(self, desk: Desk, other: Connection | None) -> None:
        self._desk, self._other = desk, other
        self._requests = desk.requests()

    def _step(self, step: int) -> StepRecord:
        if next(self._requests, None) is None:
            raise SystemExit  # Nobody asks any more.
        with Measured() as measured:
            if self._other is not None:
                self._other.send(None)
            record = super()._step(step)
            if self._other is not None:
                self._other.recv()
        lengths = [value for name, value, _ in record.metrics if name == "response_length/mean"]
        calls = [event for event in record.events if event["kind"] != "move"]
        seconds = {event["name"]: event["end"] - event["start"] for event in calls}
        self._desk.answer(response_length=lengths[0], calls=seconds, **measured.cost)
        return record


class Led(Trainer):
    """The other rank's: takes a step when the first one does."""

    def follow(self, leader: Connection) -> None:
        self._leader = leader

    def _step(self, step: int) -> StepRecord:
        try:
            self._leader.recv()
        except EOFError:  # It has ended.
            raise SystemExit from None
        record = super()._step(step)
        self._leader.send(None)
        return record


def grpo(desk: Desk) -> None:
    """Steps of a GRPO experiment by the runtime in `ranks` processes; with a batch in the settings, its
    loss. Memory and CPU seconds are those of the first."""
    settings, base = desk.settings, memory_bytes("VmRSS")
    if "batch" in settings:
        return _policy_loss(desk)
    ranks, other, store = settings.get("ranks", 1), None, None
    if ranks == 2:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        other, theirs = Pipe()
        get_context("spawn").Process(target=_follow, args=(settings, store.port, theirs), daemon=True).start()
    torch.set_num_threads(settings["threads"] // ranks)
    trainer = Paced(_program(settings), World(size=ranks, store=store), quiet=True)
    trainer.pace(desk, other)
    desk.answer(base_bytes=base)
    trainer.run()


def _follow(settings: dict[str, Any], port: int, leader: Connection) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    trainer = Led(_program(settings), World(rank=1, size=2, store=store), quiet=True)
    trainer.follow(leader)
    trainer.run()


def _program(settings: dict[str, Any]) -> Program:
    ranks = settings.get("ranks", 1)
    experiment = GRPO(
        actor=Role(
            settings["model"], dtype=settings["dtype"], optimizer=OptimizerConfig(**settings["optimizer"])),
        dataset=DatasetConfig(settings["data"], shuffle=False), reward_function=reward,
        sampling=SamplingConfig(max_new_tokens=settings["max_new_tokens"]),
        batch_size=settings["prompts"], group_size=settings["group"], steps=settings["steps"],
    )  # fmt: skip
    layout = Layout.parse(f"d{ranks}@0-{ranks - 1}" if ranks > 1 else "d1@0")
    calls = {call.name: CallPlan(layout) for call in experiment.graph().calls if call.kind != "host"}
    calls["actor_train"] = CallPlan(layout, micro_batch_tokens=settings["micro_batch"])
    return compile_program(experiment, ExecutionPlan(calls), world_size=ranks)


def _policy_loss(desk: Desk) -> None:
    """Loss and gradient norm of the policy loss on given samples."""
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
    engine, work = engine_of(settings), TrainStep(PolicyLoss(PolicyLossConfig()))
    call = FunctionCall("actor_train", "train_step", tuple(columns), role="actor", work=work)
    desk.answer()
    for _ in desk.requests():
        metrics = engine.run(call, [batch], micro_batch_tokens=settings["micro_batch"]).metrics
        desk.answer(loss=metrics["loss"], grad_norm=metrics["grad_norm"])


KINDS = {"generate": generate, "train": train, "grpo": grpo}

if __name__ == "__main__":
    at_desk = Desk()
    torch.set_num_threads(at_desk.settings["threads"])
    at_desk.serve(KINDS[at_desk.settings["kind"]])
