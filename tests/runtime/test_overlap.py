"""There is no barrier between steps: ranks that have finished their part of one begin the next."""

import json
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from realhf import FunctionCall, HostFunction
from realhf.execution_plan import ExecutionPlan
from realhf.runtime.compile.program import compile_program
from realhf.runtime.trainer import Trainer
from tests.runtime.tiny import make_experiment, write_task

MAX_SECONDS = 30.0
STEPS = 3
MODEL, HOST = "d2@1-2", "d1@3"
LAYOUTS = {
    "actor_generate": MODEL,
    "reward_forward": "d1@2",
    "ref_forward": "t2@1-2",
    "advantages": "d1@1",
    "actor_train": MODEL,
    "generated": "d1@1",
    "slow": HOST,
}


@dataclass(frozen=True)
class _Generated:
    """Write a file when the step's samples have arrived."""

    directory: Path

    def __call__(self, batch, context):
        (self.directory / f"generated_{context.step}").touch()
        return {}


@dataclass(frozen=True)
class _Slow:
    """Sleep until the next step's samples have arrived."""

    directory: Path

    def __call__(self, batch, context):
        deadline = time.monotonic() + MAX_SECONDS
        while context.step < STEPS and not (self.directory / f"generated_{context.step + 1}").exists():
            assert time.monotonic() < deadline, "the next step has not begun"
            time.sleep(0.01)
        return {}


def _run(world, task, out):
    """Run steps whose last call runs long on its own rank; rank 0 has no call."""
    experiment = make_experiment("grpo", task, eval_dataset=None, steps=STEPS)
    slow = FunctionCall("slow", "host", ("prompt", "sequence_ids"), work=HostFunction(_Slow(out)))
    made = FunctionCall("generated", "host", ("sequence_ids",), work=HostFunction(_Generated(out)))
    graph = experiment.graph().add(made, slow)
    experiment.graph = lambda: graph
    plan = ExecutionPlan.from_dict({"calls": {name: {"layout": at} for name, at in LAYOUTS.items()}})
    program = compile_program(experiment, plan, world_size=4)
    Trainer(program, world, out=out, quiet=True).run()


def test_a_mesh_begins_the_next_step_while_another_is_busy(pool, tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    pool.run(_run, write_task(tmp_path), out)
    events = [json.loads(line) for line in (out / "timeline.jsonl").read_text().splitlines()]
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in metrics] == [1, 2, 3]
    assert {event["rank"] for event in events} == {1, 2, 3}  # No rows come by way of rank 0.
    calls = {(e["step"], e["name"], e["rank"]): e for e in events if e["kind"] not in ("move", "realloc")}
    for step in range(1, STEPS):
        slow = calls[step, "slow", 3]
        for rank in (1, 2):
            assert calls[step + 1, "actor_generate", rank]["start"] < slow["end"]
        assert slow["end"] <= calls[step + 1, "slow", 3]["start"]
    # A step's time is from the end of the one before.
    first = min(event["start"] for event in events if event["kind"] != "realloc")
    last = max(event["end"] for event in events)
    assert sum(step["timing_s/step"] for step in metrics) == pytest.approx(last - first)
