"""Totals of a run: tokens, seconds and the spread within groups, also when it was resumed."""

import json
from statistics import fmean, pstdev

import pytest

from realhf import RolloutLog
from realhf.distributed.world import World
from realhf.runtime.checkpointer import newest_checkpoint
from realhf.runtime.compile.program import compile_program
from realhf.runtime.trainer import Trainer
from tests.cli_tools import read_jsonl
from tests.runtime.tiny import make_experiment, write_task


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return write_task(tmp_path_factory.mktemp("task"))


def _run(task, out, *, kind="grpo", start=None, **changes):
    settings = {"rollouts": RolloutLog(prompts_per_step=6), "eval_dataset": None, "checkpoint_every": 1}
    experiment = make_experiment(kind, task, **(settings | changes))
    world = World()
    checkpoint = None if start is None else newest_checkpoint(world, [start])
    program = compile_program(experiment, None, world_size=1)
    Trainer(program, world, out=out, quiet=True, checkpoint=checkpoint).run()
    return json.loads((out / "summary.json").read_text()), read_jsonl(out / "metrics.jsonl")


@pytest.mark.parametrize("kind", ["grpo", pytest.param("ppo", marks=pytest.mark.slow)])
def test_tokens_and_spread_are_those_of_the_answers(task, tmp_path, kind):
    """Every answer is in rollouts.jsonl. A prompt has a token for each character; PPO trains two models."""
    changes = {"epochs": 2, "steps": 2} if kind == "ppo" else {"steps": 2}
    summary, metrics = _run(task, tmp_path / "run", kind=kind, **changes)
    epochs = changes.get("epochs", 1)
    answers = read_jsonl(tmp_path / "run" / "rollouts.jsonl")
    for step, record in enumerate(metrics, start=1):
        of_step = [answer for answer in answers if answer["step"] == step]
        assert len(of_step) == 24
        generated = sum(answer["length"] for answer in of_step)
        trained = epochs * (generated + sum(len(answer["prompt"]) for answer in of_step))
        assert (record["tokens/generated"], record["tokens/trained"]) == (generated, trained)
        per_second = generated / record["timing_s/actor_generate"]
        assert record["perf/generated_tokens_per_s"] == pytest.approx(per_second)
        slowest = max(record.get(f"timing_s/{call}", 0.0) for call in ("actor_train", "critic_train"))
        assert record["perf/trained_tokens_per_s"] == pytest.approx(trained / slowest)
        groups: dict[int, list[float]] = {}
        for answer in of_step:
            groups.setdefault(answer["prompt_number"], []).append(answer["score"])
        assert record["reward/group_std"] == pytest.approx(fmean(map(pstdev, groups.values())), rel=1e-4)
    totals = {what: sum(record[f"tokens/{what}"] for record in metrics) for what in ("generated", "trained")}
    assert summary["tokens"] == totals


def test_the_summary_of_a_resumed_run_counts_all_parts(task, tmp_path):
    whole, of_whole = _run(task, tmp_path / "whole", steps=3)
    first = tmp_path / "whole" / "checkpoints" / "step_2"
    resumed, of_resumed = _run(task, tmp_path / "again", steps=3, start=first)
    assert resumed["tokens"] == whole["tokens"] and resumed["steps"] == 3
    before = of_whole[1]["perf/run_seconds"]
    assert 0 < of_whole[0]["perf/run_seconds"] < before < of_whole[2]["perf/run_seconds"] <= whole["seconds"]
    assert of_resumed[1]["perf/run_seconds"] == before < of_resumed[2]["perf/run_seconds"]
    assert resumed["seconds"] > before + of_resumed[2]["timing_s/step"]


def test_equal_scores_have_no_spread_whatever_their_value(task, tmp_path):
    experiment = make_experiment("grpo", task, steps=1, eval_dataset=None)
    experiment.reward_function = _constant
    Trainer(compile_program(experiment, None, world_size=1), World(), quiet=True, out=tmp_path / "run").run()
    (record,) = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert record["reward/group_std"] == 0.0


def _constant(completions):
    return [0.7] * len(completions)
