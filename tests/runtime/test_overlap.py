"""Steps follow one another without a barrier: ranks that have done their part of one begin the next."""

import json
import time

import pytest

from realhf import FunctionCall, HostFunction
from realhf.plan import ExecutionPlan
from realhf.runtime.check import compile_program
from realhf.runtime.trainer import Trainer
from tests.runtime.tiny import make_experiment, write_task

SLEEP_SECONDS = 1.0
STEPS = 3
MODEL, HOST = "d2@1-2", "d1@3"
LAYOUTS = {
    "actor_generate": MODEL,
    "reward_forward": "d1@2",
    "ref_forward": "t2@1-2",
    "group_advantages": "d1@1",
    "actor_train": MODEL,
    "slow": HOST,
}


def _sleep(batch, context):
    time.sleep(SLEEP_SECONDS)
    return {}


def _run(world, task, out):
    """Steps whose last call runs long on a rank of its own; rank 0 has nothing to do."""
    experiment = make_experiment("grpo", task, eval_dataset=None, steps=STEPS)
    call = FunctionCall("slow", "host", ("prompt", "sequence_ids"), work=HostFunction(_sleep))
    graph = experiment.graph()
    inputs = [] if "prompt" in graph.inputs else ["prompt"]
    graph = graph.add(call, inputs=inputs)
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
            assert calls[step + 1, "actor_generate", rank]["start"] < slow["end"] - SLEEP_SECONDS / 4
        assert slow["end"] <= calls[step + 1, "slow", 3]["start"]
    # A step's time is from the end of the one before.
    first = min(event["start"] for event in events if event["kind"] != "realloc")
    last = max(event["end"] for event in events)
    assert sum(step["timing_s/step"] for step in metrics) == pytest.approx(last - first)
    assert metrics[-1]["timing_s/step"] < SLEEP_SECONDS * 1.5
