"""ScaleRL: its settings, and runs that drop prompts and insert a phrase, against a plain simulation."""

import json
import math
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from realhf import (
    DatasetConfig,
    FunctionCall,
    HostFunction,
    Interruption,
    PassRateLimit,
    SamplingConfig,
    ScaleRL,
    scalerl_actor,
)
from realhf.algorithms.pass_rates import CountPasses, WantedPrompts
from realhf.checkpoint.run_state import Manifest
from realhf.data.batch import Batch
from realhf.execution_plan import ExecutionPlan
from realhf.runtime.checkpointer import newest_checkpoint
from realhf.runtime.compile.program import compile_program
from realhf.runtime.trainer import Trainer
from tests.cli_tools import untimed
from tests.runtime.test_lag import assert_close
from tests.runtime.tiny import role, write_task
from tests.samples import marked

STEPS, ROWS, BATCH = 7, 8, 3
LAGS = {"none": (0, None), "2": (2, None), "2 on one mesh": (2, 3)}
"""max_lag and rounds."""
PLANS = {
    "shared": {"actor_generate": "d2@0-1", "actor_train": "t2@0-1", "count_passes": "d1@1"},
    "disjoint": {"actor_generate": "d1@0", "advantages": "d1@1", "actor_train": "d1@1"},
}


def passes(answer: str) -> bool:
    return int(answer) % 3 == 0


def graded(prompts: list, completions: list, completion_ids: list, answer: list) -> list[float]:
    """Return 1 for every answer to some prompts, and less, by the tokens, for those to others."""
    return [1.0 if passes(a) else sum(ids) % 7 / 8 for ids, a in zip(completion_ids, answer, strict=True)]


@dataclass
class Kept:
    """A host function that keeps what was trained."""

    batches: list = field(default_factory=list)

    def __call__(self, batch: Any, context: Any) -> dict:
        rows = zip(batch["sequence_ids"].split(), batch["response_mask"].split(), strict=True)
        responses = [tokens[mask.tolist().index(1) :].tolist() for tokens, mask in rows]
        masks = [mask[mask.tolist().index(1) :].tolist() for mask in batch["response_mask"].split()]
        self.batches.append((batch["dataset_row"][::2], responses, masks))
        return {}


def scalerl(directory: Path, kept: Kept, *, max_lag: int, rounds: int | None, **changes: Any) -> ScaleRL:
    experiment = ScaleRL(
        actor=role(directory), reward_function=graded, steps=STEPS, batch_size=BATCH, group_size=2,
        dataset=DatasetConfig(str(directory / "data.jsonl"), max_rows=ROWS, shuffle=False),
        sampling=SamplingConfig(max_new_tokens=9), interruption=Interruption(4, phrase="1=", end="a"),
        max_lag=max_lag, rounds=rounds, work_stealing=False, checkpoint_every=1, keep_checkpoints=STEPS,
        **changes)
    inputs = ("sequence_ids", "response_mask", "dataset_row")
    graph = experiment.graph().add(FunctionCall("record", "host", inputs, work=HostFunction(kept)))
    experiment.graph = lambda: graph
    return experiment


def run(
    world: Any, lag: str, plan: str | None, directory: Path, out: Path | None = None,
    start: Path | None = None,
) -> tuple[list, list[dict]] | None:
    kept = Kept()
    max_lag, rounds = LAGS[lag]
    experiment = scalerl(directory, kept, max_lag=max_lag, rounds=rounds)
    layouts = PLANS[plan] if plan else {"actor_generate": "d1@0", "actor_train": "d1@0"}
    calls = {call: {"layout": layout} for call, layout in layouts.items()}
    program = compile_program(experiment, ExecutionPlan.from_dict({"calls": calls}), world_size=4)
    checkpoint = None if start is None else newest_checkpoint(world, [start])
    result = Trainer(program, world, out=out, checkpoint=checkpoint, quiet=True).run()
    return (kept.batches, result.metrics) if world.rank == 0 else None


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    return write_task(tmp_path_factory.mktemp("task"))


def expected_rows(directory: Path, *, max_lag: int) -> list[list[int]]:
    """Return the rows of each trained batch, if prompts are dropped as soon as all of their samples pass."""
    answers = [json.loads(line)["answer"] for line in (directory / "data.jsonl").read_text().splitlines()]
    trained: list[list[int]] = []
    begun: list[list[int]] = []
    drawn = count()
    for _ in range(STEPS + max_lag):
        dropped = {row for batch in trained for row in batch if passes(answers[row])}
        if len(begun) < STEPS:
            begun.append([])
            while len(begun[-1]) < BATCH:
                row = next(drawn) % ROWS
                begun[-1] += [] if row in dropped else [row]
        if len(begun) > len(trained) + max_lag or len(begun) == STEPS > len(trained):
            trained.append(begun[len(trained)])
    return trained


@pytest.mark.parametrize("lag", marked(LAGS, quick=[1]))
def test_prompts_with_a_high_pass_rate_are_not_drawn_again(pool, task, lag):
    batches, metrics = pool.run(run, lag, None, task)[0]
    expected = expected_rows(task, max_lag=LAGS[lag][0])
    assert [rows for rows, *_ in batches] == expected
    last = {row for batch in expected[-2:] for row in batch}
    assert last < set(range(ROWS)) and metrics[-1]["prompts/dropped"] == ROWS - len(last)
    inserted = 0
    for _, responses, masks in batches:
        for tokens, mask in zip(responses, masks, strict=True):
            if 0.0 in mask:
                inserted += 1
                assert mask[4:6] == [0.0, 0.0] and mask.count(0.0) == 2
                assert tokens[4:6] == [2 + 1, 2 + 11]  # The characters 1 and =.
    assert inserted > 5


@pytest.mark.parametrize("lag", ["2", pytest.param("2 on one mesh", marks=pytest.mark.slow)])
@pytest.mark.parametrize("plan", marked(PLANS, quick=[1]))
@pytest.mark.slow
def test_a_plan_changes_nothing(pool, task, plan, lag):
    batches, metrics = pool.run(run, lag, plan, task)[0]
    expected, expected_metrics = pool.run(run, lag, None, task)[0]
    assert batches == expected
    assert_close(metrics, expected_metrics)


@pytest.mark.parametrize(
    ("plan", "step"), marked([(None, 2), ("disjoint", 2), ("disjoint", 4)], quick=[0]))
@pytest.mark.slow
def test_a_run_continues_with_its_pass_rates(pool, task, tmp_path, plan, step):
    """The same plan gives the same bits."""
    pool.run(run, "2", plan, task, tmp_path / "whole")
    expected = untimed(tmp_path / "whole/metrics.jsonl")
    start = tmp_path / f"whole/checkpoints/step_{step}"
    rates = Manifest.load(start).run["state"]["pass_rates"]
    assert any(passed == total > 0 for passed, total in rates.values())
    again = tmp_path / f"again_{step}"
    pool.run(run, "2", plan, task, again, start)
    assert untimed(again / "metrics.jsonl") == expected
    ends = [
        Manifest.load(out / f"checkpoints/step_{STEPS}").run["state"]["pass_rates"]
        for out in (tmp_path / "whole", again)]
    assert ends[0] == ends[1] != rates


def test_the_published_settings():
    experiment = ScaleRL()
    assert (experiment.batch_size, experiment.group_size, experiment.max_lag) == (48, 16, 8)
    assert (experiment.num_rounds, experiment.cache_on_update) == (8, "keep")
    assert (experiment.baseline, experiment.normalize) == ("group_mean", "batch")
    assert experiment.filter_groups
    assert (experiment.loss.objective, experiment.loss.average) == ("cispo", "prompt")
    assert experiment.pass_rate_limit == PassRateLimit(0.9, 1.0)
    actor = scalerl_actor("x", dtype="float32")
    optimizer = actor.optimizer
    assert optimizer == experiment.actor.optimizer
    assert (optimizer.lr, optimizer.warmup_steps, optimizer.eps) == (5e-7, 100, 1e-15)
    assert (optimizer.weight_decay, optimizer.schedule) == (0.01, "constant")
    assert (actor.model, actor.dtype, actor.float32_head) == ("x", "float32", True)
    assert (experiment.actor.dtype, experiment.actor.float32_head) == ("bfloat16", True)


def test_the_parts_of_a_step(task):
    experiment = scalerl(task, Kept(), max_lag=2, rounds=None)
    assert experiment.parts(experiment.graph()) == {
        "select": ("wanted_prompts",), "rollout": ("actor_generate",), "score": ("reward_forward", "record"),
        "train": ("advantages", "count_passes", "actor_train")}
    without = ScaleRL(actor=role(task), reward_function=graded, pass_rate_limit=None)
    assert list(without.parts(without.graph())) == ["rollout", "score", "train"]
    with pytest.raises(ValueError, match="max_draws is 0: it must be at least 1"):
        ScaleRL(actor=role(task), reward_function=graded, max_draws=0).graph()


def test_pass_rates_count_all_visits():
    score = torch.tensor([1.0, 0.5, 2.0, math.nan, 1.0, 0.0])
    batch = Batch(list(range(6)), {"dataset_row": [7, 7, 3, 3, 7, 7], "score": score})
    assert CountPasses(1.0)(batch, None) == {"decision": {"7": [2, 4], "3": [1, 1]}}
    context = SimpleNamespace(run_state={"pass_rates": {"3": [9, 10], "7": [89, 100]}})
    wanted = WantedPrompts(PassRateLimit(0.9))(Batch([0, 1, 2], {"dataset_row": [7, 3, 5]}), context)
    assert wanted == {"keep": [True, False, True]}
    with pytest.raises(ValueError, match="max_pass_rate is 0: it must be above 0 and at most 2"):
        PassRateLimit(0)
