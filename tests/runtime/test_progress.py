"""Output during a long call: which call it is, how long it has run and how far it is."""

import re
import time
from dataclasses import replace

import pytest
from rich.console import Console

from realhf import DatasetConfig, Evaluation
from realhf.dist.activity import Activity
from realhf.dist.world import World
from realhf.plan import ExecutionPlan
from realhf.runtime.compile.program import compile_program
from realhf.runtime.records.progress import Progress, without_signal
from realhf.runtime.trainer import Trainer
from tests.runtime.tiny import make_experiment, write_task


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return write_task(tmp_path_factory.mktemp("task"))


def _constant_reward(completions):
    return [0.25] * len(completions)


class _Noting(Activity):
    """An Activity that keeps every line it would show, without the seconds."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def doing(self, what):
        self.lines.append(f"{self.step}: {what}")
        return super().doing(what)

    def note(self, text):
        super().note(text)
        self.lines.append(re.sub(r", \d+ s", "", str(self)))


def _lines(task, **changes):
    world = World()
    world.activity = _Noting()
    experiment = make_experiment("grpo", task, steps=1, **changes)
    Trainer(compile_program(experiment, None, world_size=1), world, quiet=True).run()
    return world.activity.lines


def test_calls_say_how_far_they_are(task):
    lines = _lines(task, eval_dataset=None, max_rows=5)
    generated = [line.split(": ", 2)[2] for line in lines if ": actor_generate: " in line]
    pattern = re.compile(r"(\d+) of 24 samples of this rank have ended, (\d+) tokens")
    counts = [tuple(map(int, pattern.fullmatch(line).groups())) for line in generated]
    assert counts == sorted(counts) and counts[0][0] == 0 and len(counts) > 24 / 5
    assert counts[-1][1] <= 24 * 7
    trained = [line for line in lines if ": actor_train: " in line]
    assert trained == [
        f"step 1/1: actor_train: mini-batch {i} of 2, {what}" for i in (1, 2)
        for what in ("micro-batch 1 of 1", "optimizer step")]
    assert "step 1/1: ref_forward: micro-batch 1 of 1" in lines


def test_transformers_engine_says_it_too(task):
    experiment = make_experiment("grpo", task)
    actor = type(experiment.actor)(**{**vars(experiment.actor), "engine": "transformers"})
    lines = _lines(task, actor=actor, eval_dataset=None, max_rows=20)
    last = "20 of 24 samples of this rank have ended, 4 have 1 tokens of at most 7"
    assert any(line.endswith(last) for line in lines)


def test_an_evaluation_is_named(task):
    lines = _lines(task)
    assert any(line.startswith("evaluation after step 0: actor_generate: ") for line in lines[:6])


@pytest.fixture
def program(task):
    return compile_program(make_experiment("grpo", task), None, world_size=1)


def test_plain_lines_come_only_in_long_steps(capsys, program):
    activity = Activity(step="step 1/3")
    shown = Progress(program, activity, patience_seconds=0.6)
    shown.start([], held_out={})
    head = len(capsys.readouterr().err.splitlines())
    with activity.doing("actor_generate"):
        activity.note("3 of 24 samples")
        for _ in range(5):  # Steps that end in time: there is nothing to add.
            shown.step(1, {"timing_s/step": 0.05})
        quick = capsys.readouterr().err.splitlines()
        time.sleep(1.5)
    shown.stop()
    slow = capsys.readouterr().err.splitlines()
    time.sleep(0.7)
    assert head > 0 and [line.partition(":")[0] for line in quick] == ["step 1/3"] * 5
    assert set(slow) <= {f"step 1/3: actor_generate, {n} s: 3 of 24 samples" for n in (0, 1, 2, 3)}
    assert 1 <= len(slow) <= 3
    assert capsys.readouterr().err == ""


def test_every_so_many_steps_have_a_line(task, capsys):
    program = compile_program(make_experiment("grpo", task, steps=5, log_every=2), None, world_size=1)
    shown = Progress(program, Activity())
    shown.start([], held_out={})
    capsys.readouterr()
    for step in range(1, 6):
        shown.step(step, {"timing_s/step": 0.05})
    shown.stop()
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["step 2/5", "step 4/5"]


def test_several_rewards_are_shown_by_name_and_noise_as_0(tmp_path, program, capsys):
    metrics = {"actor/loss": -3e-9, "reward/mean": 0.3412345, "reward/right/mean": 0.41,
               "reward/right/std": 1.0, "reward/brief/mean": -0.07, "timing_s/step": 1e-5}  # fmt: skip
    shown = Progress(program, Activity())
    shown.start([], held_out={})
    capsys.readouterr()
    shown.step(1, metrics)
    shown.step(2, {"reward/mean": 0.5, "reward/right/mean": 0.5})  # A single one is the reward itself.
    shown.stop()
    assert capsys.readouterr().err.splitlines() == [
        "step 1/3: reward 0.3412, right 0.41, brief -0.07, loss 0, seconds 1e-05", "step 2/3: reward 0.5"]
    with (tmp_path / "terminal").open("w+") as terminal:
        shown = Progress(program, Activity())
        shown._console = Console(file=terminal, force_terminal=True, width=100, highlight=False)
        shown.start([], held_out={})
        shown.step(1, metrics)
        shown.stop()
        terminal.seek(0)
        text = terminal.read()
    assert re.search("reward.*right.*brief.*loss.*seconds", text) and re.search("-0.07.* 0 .*1e-05", text)


def test_a_terminal_shows_it_live(tmp_path, program):
    activity = Activity(step="step 1/3")
    shown = Progress(program, activity)
    with (tmp_path / "terminal").open("w+") as terminal:
        shown._console = Console(file=terminal, force_terminal=True, width=100, highlight=False)
        shown.start([], held_out={})
        with activity.doing("reward_forward"):
            time.sleep(1.5)  # It is drawn anew four times a second.
        shown.stop()
        terminal.seek(0)
        assert "step 1/3: reward_forward, 1 s" in terminal.read()


def test_an_evaluation_of_several_sets_has_a_line_for_each(task, capsys):
    data = DatasetConfig(str(task / "data.jsonl"), max_rows=5)
    sets = {"one": data, "two": Evaluation(data, samples=2, max_rows=3)}
    for held_out, counted, lines in [
        (data, "40 training prompts, 5 held out", ["held out, after step 0: score 0.500"]),
        (sets, "40 training prompts, 8 held out (one 5, two 3)",
         ["held out, after step 0:", "  one: score 0.500, length 3.000", "  two: score 0.250, pass@2 1.000"]),
    ]:  # fmt: skip
        program = compile_program(make_experiment("grpo", task, eval_dataset=held_out), None, world_size=1)
        metrics = {"eval/score": 0.5} if held_out is data else {
            "eval/one/score": 0.5, "eval/one/response_length/mean": 3.0, "eval/two/score": 0.25,
            "eval/two/mean@2": 0.25, "eval/two/pass@2": 1.0}  # fmt: skip
        shown = Progress(program, Activity())
        shown.start(range(40), held_out={"": 5} if held_out is data else {"one": 5, "two": 3})
        assert counted in capsys.readouterr().err
        shown.evaluation(0, metrics)
        shown.stop()
        assert capsys.readouterr().err.splitlines() == lines


PLACES = {
    "actor_generate": "d1@1", "reward_forward": "d1@1", "ref_forward": "d1@0", "advantages": "d1@1",
    "actor_train": "d2@0-1",
}  # fmt: skip


def _watched(world, task):
    """Return what rank 0 shows of itself while rank 1 generates."""
    real, world.activity = world.activity, _Noting()
    try:
        plan = ExecutionPlan.from_dict({"calls": {name: {"layout": place} for name, place in PLACES.items()}})
        experiment = make_experiment("grpo", task, steps=1, eval_dataset=None)
        program = compile_program(experiment, plan, world_size=4)
        Trainer(program, world, quiet=True).run()
    finally:
        noted, world.activity = world.activity, real
    return noted.lines


def test_a_rank_says_for_whom_it_waits(pool, task):
    lines, *_ = pool.run(_watched, task)
    assert "step 1/1: waits for actor_generate on 1, for ref_forward" in lines
    assert lines[-1] == "step 1/1: waits for the other ranks"


def test_a_run_without_a_learning_signal_warns_once(task, capsys):
    """Every answer has reward 0.25: GRPO's advantages are 0 in every step."""
    experiment = make_experiment("grpo", task, steps=5, eval_dataset=None)
    experiment.reward_function = _constant_reward
    experiment.sampling = replace(experiment.sampling, ignore_eos=True)
    Trainer(compile_program(experiment, None, world_size=1), World()).run()
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if "warning" in line] == [
        "realhf: warning: in 3 steps the answers to each prompt all had the same reward (mean 0.25): nothing "
        "is learned from them; 100% of the answers were cut off at sampling.max_new_tokens; "
        "`realhf rollouts` shows them"]


def test_a_single_step_with_a_signal_is_enough():
    """Also, an algorithm that does not compare groups has no such metric."""
    without = {"reward/zero_std_groups": 1.0, "response_length/clip_ratio": 0.5, "reward/mean": 0.0}
    assert "50% of the answers" in without_signal([("1", without)] * 3)
    assert without_signal([("1", without), ("2", without | {"reward/zero_std_groups": 0.9})]) is None
    assert without_signal([("1", {"reward/mean": 0.0})] * 3) is None
