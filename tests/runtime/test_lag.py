"""Lagged steps: every plan gives the numbers of one process; ages, versions and use of each prompt."""

import json
import math
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from realhf import FunctionCall, HostFunction, SamplingConfig
from realhf.checkpoint.run_state import Manifest
from realhf.execution_plan import ExecutionPlan
from realhf.runtime.checkpointer import newest_checkpoint
from realhf.runtime.compile.program import compile_program
from realhf.runtime.trainer import Trainer
from tests.cli_tools import TIMED, untimed
from tests.runtime.tiny import HF_CONFIG, make_experiment, write_task
from tests.samples import marked

STEPS = 4
LAGS = {
    "1": (1, None), "2": (2, None), "4": (4, None), "1 on one mesh": (1, 2), "3 on one mesh": (3, 4),
    "3 with kept caches": (3, None, "keep"),
}
"""max_lag, rounds and cache_on_update."""
PLANS = {
    "shared": ("d2@0-1", "d2@0-1", "d2@0-1"),
    "disjoint": ("d1@0", "d1@1", "d1@1"),
    "disjoint replicas": ("d2@0-1", "t2@2-3", "d2@2-3"),
    "pipelines": ("p2@0-1", "d1@3", "p2@2-3"),
}
CALLS = ("actor_generate", "ref_forward", "actor_train")


@dataclass
class Kept:
    """A host function that keeps the ids, tokens and versions of every batch that is trained."""

    batches: list = field(default_factory=list)

    def __call__(self, batch: Any, context: Any) -> dict:
        columns = [batch[key].split() for key in ("sequence_ids", "versions", "response_mask")]
        rows = [[part.tolist() for part in row] for row in zip(*columns, strict=True)]
        self.batches.append((batch.ids, rows, dict(context.updates)))
        return {}


def lagged(directory: Path, kept: Kept, *, max_lag: int, rounds: int | None = None, **changes: Any) -> Any:
    settings = {"steps": STEPS, "sampling": SamplingConfig(max_new_tokens=9), "work_stealing": False}
    experiment = make_experiment(
        "grpo", directory, max_lag=max_lag, rounds=rounds, batch_size=4, **(settings | changes))
    inputs = ("sequence_ids", "versions", "response_mask")
    graph = experiment.graph().add(FunctionCall("record", "host", inputs, work=HostFunction(kept)))
    experiment.graph = lambda: graph
    return experiment


def run_lagged(
    world, layouts: tuple[str, ...] | None, directory: Path, max_lag: int, rounds: int | None,
    cache: str = "recompute", *, out: Path | None = None, start: Path | None = None,
) -> tuple[list, list[dict], float] | None:
    kept = Kept()
    settings = {"cache_on_update": cache, "checkpoint_every": 1, "keep_checkpoints": STEPS, "eval_every": 2}
    experiment = lagged(directory, kept, max_lag=max_lag, rounds=rounds, **settings)
    checkpoint = None if start is None else newest_checkpoint(world, [start])
    layouts = layouts or ("d1@0",) * 3
    calls = {call: {"layout": layout} for call, layout in zip(CALLS, layouts, strict=True)}
    program = compile_program(experiment, ExecutionPlan.from_dict({"calls": calls}), world_size=4)
    result = Trainer(program, world, out=out, checkpoint=checkpoint, quiet=True).run()
    return (kept.batches, result.metrics, result.summary["eval_last"]) if world.rank == 0 else None


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    return write_task(tmp_path_factory.mktemp("task"))


@pytest.fixture(scope="module")
def reference(pool, task):
    """Return the results of one process by lag."""
    return {lag: pool.run(run_lagged, None, task, *given)[0] for lag, given in LAGS.items()}


def numbers(metrics: dict) -> dict:
    """Return the metrics that do not measure time."""
    timed = (*TIMED, "realloc")
    return {name: value for name, value in metrics.items() if not name.startswith(timed)}


def assert_close(metrics: list[dict], expected_metrics: list[dict]) -> None:
    for ours, expected in zip(metrics, expected_metrics, strict=True):
        assert numbers(ours).keys() == numbers(expected).keys()
        for name, value in numbers(expected).items():
            assert math.isclose(ours[name], value, rel_tol=1e-9, abs_tol=1e-12), (name, ours[name], value)


@pytest.mark.parametrize(("lag", "plan"), marked(product(LAGS, PLANS), quick=[5]))
def test_a_plan_does_not_change_a_lagged_run(pool, task, reference, plan, lag):
    batches, metrics, score = pool.run(run_lagged, PLANS[plan], task, *LAGS[lag])[0]
    expected_batches, expected_metrics, expected_score = reference[lag]
    assert batches == expected_batches
    assert score == pytest.approx(expected_score, rel=1e-9)
    assert_close(metrics, expected_metrics)


@pytest.mark.slow
@pytest.mark.parametrize("lag", ["2", "3 with kept caches"])
def test_experts_change_nothing(pool, tmp_path, lag):
    task = write_task(tmp_path)
    experts = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 8,
        "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "norm_topk_prob": True,
    }
    (task / "config.json").write_text(json.dumps(HF_CONFIG | experts))
    expected_batches, expected_metrics, _ = pool.run(run_lagged, None, task, *LAGS[lag])[0]
    layouts = ("e2@0-1", "d1@2", "e2@2-3")
    batches, metrics, _ = pool.run(run_lagged, layouts, task, *LAGS[lag])[0]
    assert batches == expected_batches
    assert_close(metrics, expected_metrics)


@pytest.mark.parametrize("lag", LAGS)
def test_every_prompt_is_trained_once_at_the_ages_of_the_lag(reference, lag):
    max_lag, rounds, *_ = LAGS[lag]
    least = max_lag - (rounds or max_lag) + 1
    batches, metrics, _ = reference[lag]
    assert [ids for ids, *_ in batches] == [list(range(16 * n, 16 * n + 16)) for n in range(STEPS)]
    assert len(metrics) == STEPS
    oldest = []
    for number, (_, rows, updates) in enumerate(batches):
        assert updates["actor"] == number
        ages = []
        for _, versions, mask in rows:
            drawn = [version for version, m in zip(versions, mask, strict=True) if m]
            assert drawn == sorted(drawn) and not any(
                version for version, m in zip(versions, mask, strict=True) if not m)
            ages += [number - version for version in drawn]
        expected = [max(0, number - max_lag), number]
        assert number - max(ages) >= expected[0] - 0 and min(ages) >= min(least, number)
        assert metrics[number]["staleness/max"] == max(ages)
        assert metrics[number]["staleness/mean"] == pytest.approx(sum(ages) / len(ages))
        oldest.append(max(ages))
    assert oldest == [min(number, max_lag) for number in range(STEPS)]


def run_from(world, layouts, directory: Path, given: tuple, out: Path, start: Path | None = None) -> None:
    run_lagged(world, layouts, directory, *given, out=out, start=start)


CONTINUED = ("4", "1", "3 with kept caches", "8", "3 on one mesh")


@pytest.fixture(scope="module")
def whole(pool, task, tmp_path_factory):
    """Return a function that gives the directory of a lagged run that keeps all its checkpoints."""
    found = {}

    def run(lag: str) -> Path:
        if lag not in found:
            found[lag] = tmp_path_factory.mktemp("whole")
            pool.run(run_from, PLANS["disjoint"], task, LAGS.get(lag, (8, None)), found[lag])
        return found[lag]

    return run


@pytest.mark.parametrize(("lag", "step"), marked(product(CONTINUED, (2, 1, 3)), quick=[0]))
@pytest.mark.slow
def test_a_lagged_run_continues_from_any_step(pool, task, whole, tmp_path, lag, step):
    """The same plan gives the same bits."""
    start = whole(lag) / f"checkpoints/step_{step}"
    assert any(name.startswith("samples_") for name in Manifest.load(start).files)
    pool.run(run_from, PLANS["disjoint"], task, LAGS.get(lag, (8, None)), tmp_path / "again", start)
    assert untimed(tmp_path / "again/metrics.jsonl") == untimed(whole(lag) / "metrics.jsonl")


@pytest.mark.parametrize("lag", marked(CONTINUED, quick=[0]))
@pytest.mark.slow
def test_a_lagged_run_continues_under_another_plan(pool, task, whole, tmp_path, lag):
    """The numbers are the same to summation order."""
    start = whole(lag) / "checkpoints/step_2"
    plan = PLANS["disjoint replicas"]
    pool.run(run_from, plan, task, LAGS.get(lag, (8, None)), tmp_path / "other", start)
    assert_close(untimed(tmp_path / "other/metrics.jsonl"), untimed(whole(lag) / "metrics.jsonl"))


def generate_after_training(world, directory: Path) -> list | None:
    """Return the versions of tokens that are drawn after the train step of the same part, by step."""
    experiment = make_experiment("grpo", directory, steps=3, batch_size=2, eval_dataset=None)
    graph = experiment.graph()
    first = graph["actor_generate"]
    outputs = ("new_ids", "new_mask", "new_logprobs", "new_ended", "new_versions")
    again = FunctionCall("again", "generate", first.inputs, outputs, "actor", first.work)
    seen = []

    def keep(batch: Any, context: Any) -> dict:
        drawn = batch["new_versions"].values[batch["new_mask"].values.bool()]
        seen.append((drawn.unique().tolist(), context.updates["actor"]))
        return {}

    record = FunctionCall("record", "host", ("new_versions", "new_mask"), work=HostFunction(keep))
    experiment.graph = lambda: graph.add(again, record)
    calls = {call: {"layout": "d1@0"} for call in (*CALLS, "again")}
    program = compile_program(experiment, ExecutionPlan.from_dict({"calls": calls}), world_size=4)
    Trainer(program, world, quiet=True).run()
    return seen if world.rank == 0 else None


def test_versions_count_the_train_steps_of_the_same_part(pool, task):
    assert pool.run(generate_after_training, task)[0] == [([1], 1), ([2], 2), ([3], 3)]
