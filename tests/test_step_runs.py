"""Step programs of users: dynamic sampling, and ranks that take different ways."""

import json
import time

import pytest

from realhf.cli.main import main
from tests.cli_tools import ForkedCommand, write_experiment, write_plan

DYNAMIC = """
from dataclasses import dataclass
from realhf import GRPO


@dataclass
class Dynamic(GRPO):
    max_rounds: int = 2

    def parts(self, graph):
        sample = ("actor_generate", "reward_forward", "advantages")
        return {"sample": sample, "train": [call.name for call in graph.order if call.name not in sample]}

    def step(self, run):
        pool = run.pool("informative")
        pool.drop(max_age=0)
        for _ in range(self.max_rounds):
            if len(pool) >= self.batch_size:
                break
            samples = run.prompts(self.batch_size)
            run("sample", samples)
            pool.add(samples, where="advantages")
        run.log("pool/size", len(pool))
        run("train", pool.take(self.batch_size))


def often_equal(prompts, completions, completion_ids, answer):
    # Two prompts of three give all of their samples the same reward.
    return [sum(ids) / 9 if int(a) % 3 == 0 else 1.0 for ids, a in zip(completion_ids, answer)]


experiment = Dynamic(**{**vars(experiment), "filter_groups": True, "reward_function": often_equal})
"""
DIFFERENT = """
import os
from dataclasses import dataclass
from realhf import GRPO


@dataclass
class Different(GRPO):
    def parts(self, graph):
        train = ("actor_train", "ref_forward")
        return {"sample": [c.name for c in graph.order if c.name not in train], "train": train}

    def step(self, run):
        samples = run.prompts(self.batch_size)
        run("sample", samples)
        if run.number < 2 or os.environ.get("RANK") == "0":
            run("train", samples)
        else:
            run("sample", samples)


experiment = Different(**vars(experiment))
"""


def metrics_of(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_dynamic_sampling_fills_the_batch_or_says_how_much_is_missing(num_ranks, tmp_path):
    path = write_experiment(tmp_path, steps=4, batch_size=4, eval_dataset=None, body=DYNAMIC)
    assert main(["run", str(path), "--out", str(tmp_path / "one")]) == 0
    steps = metrics_of(tmp_path / "one")
    assert len(steps) == 4
    for step in steps:
        assert step["pool/informative/missing"] == max(0, 4 - step["pool/size"])
        assert step["actor/grad_norm"] > 0
    assert {step["pool/informative/missing"] > 0 for step in steps} == {True, False}
    assert any(step["reward/zero_std_groups"] > 0 for step in steps)
    if num_ranks == 1:
        return
    layouts = {"actor_generate": "d2@0-1", "reward_forward": "d2@0-1", "advantages": "d1@1",
               "ref_forward": "d1@0", "actor_train": "t2@0-1"}
    plan = write_plan(tmp_path, layouts)
    words = ("run", path, "--out", tmp_path / "two", "--plan", plan, "--nproc", 2)
    with ForkedCommand(*words) as command:
        code, _, said = command.finish()
    assert code == 0, said
    for ours, expected in zip(metrics_of(tmp_path / "two"), steps, strict=True):
        for name in ("reward/mean", "actor/loss", "actor/grad_norm", "pool/size"):
            assert ours[name] == pytest.approx(expected[name], rel=1e-9)


RANDOM = """
import random
from dataclasses import dataclass
from realhf import GRPO


@dataclass
class Random(GRPO):
    def step(self, run):
        run.state["x"] = random.random()
        run("step", run.prompts(self.batch_size))


experiment = Random(**vars(experiment))
"""


@pytest.mark.slow
def test_a_short_run_whose_ranks_differ_fails_and_leaves_no_checkpoint(tmp_path):
    path = write_experiment(tmp_path, steps=2, eval_dataset=None, body=RANDOM)
    out = tmp_path / "run"
    with ForkedCommand("run", path, "--out", out, "--nproc", 2) as command:
        code, _, said = command.finish()
    assert code == 2 and "step() differs between ranks" in said, said
    assert not list((out / "checkpoints").glob("step_?"))


@pytest.mark.slow
def test_ranks_that_take_different_ways_end_with_a_sentence(tmp_path):
    path = write_experiment(tmp_path, steps=5, eval_dataset=None, body=DIFFERENT)
    began = time.monotonic()
    with ForkedCommand("run", path, "--out", tmp_path / "run", "--nproc", 2) as command:
        code, _, said = command.finish()
    assert code == 2, said
    assert time.monotonic() - began < 60
    assert "step() differs between ranks in operation" in said
    assert "rank 0 does `run part train on" in said and "rank 1 does `run part sample" in said
