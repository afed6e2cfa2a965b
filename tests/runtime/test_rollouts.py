"""rollouts.jsonl of real runs: its contents under several plans, with lag, with filters, after a kill."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from realhf import DAPO, Distillation, PolicyLossConfig, RolloutLog
from realhf.data.order import row_order
from realhf.dist.world import World
from realhf.plan import ExecutionPlan
from realhf.runtime.checkpointer import newest_checkpoint
from realhf.runtime.compile.program import compile_program
from realhf.runtime.records.rollout_file import merged
from realhf.runtime.trainer import Trainer
from tests.cli_tools import read_jsonl
from tests.runtime.test_invariance import ROLE_CALLS
from tests.runtime.tiny import common, make_experiment, role, some_reward, write_task

LOG = RolloutLog(prompts_per_step=2, follow_rows=1)
SPLIT = {"grpo": ("d2@0-1", "t2@2-3", "p2@1-2"), "ppo": ("d2@2-3", "d2@0-1", "t2@0-1", "p2@2-3", "d2@0-1",
                                                         "d2@2-3")}  # fmt: skip


def build(kind: str, directory: Path, **changes):
    settings = {"rollouts": LOG, "eval_dataset": None, "checkpoint_every": 0} | changes
    if kind == "dapo":
        return DAPO(
            actor=role(directory), reward_function=coarse_reward, max_rounds=3, group_size=2,
            loss=PolicyLossConfig(average="prompt"), **common(directory) | settings)
    return make_experiment(kind, directory, **settings)


def coarse_reward(completions, answer):
    return [float(len(text) > 5 and text[0] in "0123") for text in completions]


def train(world, experiment, out: Path, layouts: tuple[str, ...] | None = None, start: Path | None = None):
    plan = None
    if layouts is not None:
        calls = ROLE_CALLS["ppo" if len(layouts) == 6 else "grpo"]
        chosen = dict(zip(calls, layouts, strict=True))
        if "reward_forward" not in chosen:
            chosen |= {"reward_forward": "d2@2-3", "advantages": "d1@1"}
        plan = ExecutionPlan.from_dict({"calls": {c: {"layout": layout} for c, layout in chosen.items()}})
    checkpoint = None if start is None else newest_checkpoint(world, [start])
    program = compile_program(experiment, plan, world_size=world.size)
    Trainer(program, world, out=out, checkpoint=checkpoint, quiet=True).run()


def train_kind(world, kind: str, directory: Path, out: Path, layouts: tuple[str, ...], changes: dict):
    train(world, build(kind, directory, **changes), out, layouts)


def rollouts(out: Path) -> list[dict]:
    return read_jsonl(out / "rollouts.jsonl")


def test_kept_answers_are_those_of_the_run(tmp_path):
    """Prompts, scores, advantages and the followed row, each found again without the collector."""
    directory = write_task(tmp_path)
    out = tmp_path / "run"
    train(World(), build("grpo", directory, steps=5, batch_size=20), out)
    data = read_jsonl(directory / "data.jsonl")
    found = rollouts(out)
    followed = {line["dataset_row"] for line in found if line["followed"]}
    assert len(followed) == 1
    for step in range(1, 6):
        lines = [line for line in found if line["step"] == step]
        prompts = {line["prompt_number"] for line in lines}
        assert len({line["prompt_number"] for line in lines if not line["followed"]}) in (1, 2)
        assert [line["sample"] for line in lines] == [4 * p + i for p in sorted(prompts) for i in range(4)]
        assert prompts <= set(range(20 * (step - 1), 20 * step))
    for line in found:
        row = data[line["dataset_row"]]
        assert (line["prompt"], line["columns"]) == (row["prompt"], {"answer": row["answer"]})
        (index,) = row_order(40, start=line["prompt_number"], count=1, seed=0, shuffle=True)
        assert index == line["dataset_row"] and 1 <= line["length"] <= 7
    where = row_order(40, start=0, count=100, seed=0, shuffle=True)
    expected = [1 + i // 20 for i, row in enumerate(where) if row in followed]
    assert [line["step"] for line in found if line["followed"]][::4] == expected and len(expected) >= 2
    for i in range(0, len(found), 4):
        scores = [line["score"] for line in found[i : i + 4]]
        mean = sum(scores) / 4
        deviation = (sum((s - mean) ** 2 for s in scores) / 4) ** 0.5
        advantages = [line["advantage"] for line in found[i : i + 4]]
        assert advantages == pytest.approx([(s - mean) / (deviation + 1e-6) for s in scores], abs=1e-4)
    text = sum(0.1 * len(line["completion"]) for line in found)
    assert text <= sum(line["score"] for line in found) <= text + len(found)  # See `some_reward`.
    assert some_reward([""], ["ab"], [[5, 4]], [""]) == [pytest.approx(2 / 7 + 0.2)]


@pytest.mark.parametrize("kind", ["grpo", pytest.param("ppo", marks=pytest.mark.slow)])
def test_every_plan_keeps_the_same(pool, tmp_path, kind):
    directory = write_task(tmp_path)
    train(World(), build(kind, directory), tmp_path / "one")
    pool.run(train_kind, kind, directory, tmp_path / "split", SPLIT[kind], {})
    found = rollouts(tmp_path / "split")
    assert found == rollouts(tmp_path / "one")
    assert len({line["step"] for line in found}) == 3
    assert all(line["completion"] and line["advantage"] is not None for line in found)


def test_with_a_reward_model_the_answers_are_decoded(tmp_path):
    directory = write_task(tmp_path)
    train(World(), build("ppo", directory, steps=1), tmp_path / "run")
    for line in rollouts(tmp_path / "run"):
        assert set(line["completion"]) <= set("0123456789+= abc") and line["prompt"].endswith("=")
        assert isinstance(line["score"], float) and line["columns"] == {}
        assert line["finished"] or line["length"] == 7


@pytest.mark.parametrize("rounds", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_with_lag_an_answer_is_kept_in_the_step_that_trains_on_it_also_after_a_resume(tmp_path, rounds):
    directory = write_task(tmp_path)
    lag = {"max_lag": 1, "rounds": rounds, "steps": 4, "checkpoint_every": 1, "keep_checkpoints": 4}
    out = tmp_path / "run"
    train(World(), build("grpo", directory, **lag), out)
    found = rollouts(out)
    assert {line["step"] for line in found} == {1, 2, 3, 4}
    for line in found:
        assert line["prompt_number"] // 6 == line["step"] - 1
        trained = 2 * (line["step"] - 1)  # Two mini-batches are two updates of the weights.
        assert 0 <= line["versions"][0] <= line["versions"][1] <= max(trained, 0)
        assert line["advantage"] is not None
    assert any(line["versions"][1] < line["step"] - 1 for line in found)
    killed = tmp_path / "killed"
    shutil.copytree(out, killed)
    with (killed / "rollouts.jsonl").open("a") as file:
        file.write('{"step": 2, "followed": false, "sam')
    train(World(), build("grpo", directory, **lag), killed, start=killed / "checkpoints/step_2")
    assert rollouts(killed) == found
    branch = tmp_path / "branch"
    train(World(), build("grpo", directory, **lag), branch, start=out / "checkpoints/step_3")
    assert rollouts(branch) == found


def test_groups_that_a_filter_drops_are_kept_without_advantages(tmp_path):
    directory = write_task(tmp_path)
    out = tmp_path / "run"
    train(World(), build("dapo", directory), out)
    groups: dict[tuple, list] = {}
    for line in rollouts(out):
        groups.setdefault((line["step"], line["prompt_number"]), []).append(line)
    assert len(groups) > 3 * 2
    kinds = set()
    for lines in groups.values():
        differ = len({line["score"] for line in lines}) > 1
        assert len(lines) == 2 and all(("advantage" in line) == differ for line in lines)
        kinds.add(differ)
    assert kinds == {True, False}


def test_without_scores_the_answers_that_train_are_kept(tmp_path):
    directory = write_task(tmp_path)
    teachers = (role(directory, trainable=False),)
    settings = common(directory) | {"rollouts": LOG, "eval_dataset": None, "checkpoint_every": 0}
    train(World(), Distillation(actor=role(directory), teachers=teachers, **settings), tmp_path / "run")
    lines = rollouts(tmp_path / "run")
    assert {line["step"] for line in lines} == {1, 2, 3}
    assert not any("score" in line for line in lines)
    assert all(line["completion"] and line["length"] and line["prompt"].endswith("=") for line in lines)


def test_every_and_off(tmp_path):
    directory = write_task(tmp_path)
    log = RolloutLog(prompts_per_step=1, follow_rows=0, every=2)
    train(World(), build("grpo", directory, rollouts=log, steps=4), tmp_path / "run")
    assert [line["step"] for line in rollouts(tmp_path / "run")] == [1] * 4 + [2] * 4 + [4] * 4
    off = replace(log, prompts_per_step=0)
    train(World(), build("grpo", directory, rollouts=off, steps=1), tmp_path / "off")
    train(World(), build("sft", directory, steps=1), tmp_path / "sft")
    assert not any((tmp_path / name / "rollouts.jsonl").exists() for name in ("off", "sft"))


def test_ranks_are_joined_by_sample_and_scores_by_name_are_kept():
    fragments = [
        {"sample": 9, "prompt_number": 4, "score": 0.5, "rewards": {"exact": 1.0, "format": None}},
        {"sample": 8, "prompt_number": 4, "length": 3, "finished": True},
        {"prompt_number": 4, "prompt": "1+1=", "dataset_row": 7, "followed": True, "columns": {}},
        {"sample": 9, "prompt_number": 4, "length": 2, "finished": False},
        {"sample": 99, "prompt_number": 49, "advantage": 1.0},
    ]
    lines = merged(fragments)
    assert [line["sample"] for line in lines] == [8, 9]
    assert all(line["prompt"] == "1+1=" and line["followed"] for line in lines)
    assert lines[1]["rewards"] == {"exact": 1.0, "format": None} and "score" not in lines[0]
    assert json.loads(json.dumps(lines)) == lines
