"""Output during a long call: which call it is, how long it has run and how far it is."""

import json
import math
import re
import time
from dataclasses import replace

import pytest
from rich.console import Console

from realhf import DPO, DatasetConfig, Distillation, Evaluation, PairwiseRewardModel
from realhf.distributed.process import WatchedProcess
from realhf.distributed.world import World
from realhf.execution_plan import ExecutionPlan
from realhf.runtime.compile.program import compile_program
from realhf.runtime.records.progress import Progress, fault_of, shown_columns
from realhf.runtime.trainer import Trainer
from tests.runtime.tiny import make_experiment, role, write_task


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return write_task(tmp_path_factory.mktemp("task"))


def _constant_reward(completions):
    return [0.25] * len(completions)


class _Noting(WatchedProcess):
    """An WatchedProcess that keeps every line it would show, without the seconds."""

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
    world.process = _Noting()
    experiment = make_experiment("grpo", task, steps=1, **changes)
    Trainer(compile_program(experiment, None, world_size=1), world, quiet=True).run()
    return world.process.lines


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
    assert any(line.startswith("evaluation: actor_generate: ") for line in lines[:6])


@pytest.fixture
def program(task):
    return compile_program(make_experiment("grpo", task), None, world_size=1)


def test_plain_lines_come_only_in_long_steps(capsys, program):
    process = WatchedProcess(step="step 1/3")
    shown = Progress(program, process, patience_seconds=0.6)
    shown.start([], held_out={})
    head = len(capsys.readouterr().err.splitlines())
    with process.doing("actor_generate"):
        process.note("3 of 24 samples")
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
    shown = Progress(program, WatchedProcess())
    shown.start([], held_out={})
    capsys.readouterr()
    for step in range(1, 6):
        shown.step(step, {"timing_s/step": 0.05})
    shown.stop()
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["step 2/5", "step 4/5"]


def test_several_rewards_are_shown_by_name_and_a_policy_gradient_without_its_loss(program, capsys):
    metrics = {"actor/loss": -3e-9, "actor/pg_loss": -3e-9, "reward/mean": 0.3412345,
               "reward/right/mean": 0.41, "reward/right/std": 1.0, "reward/brief/mean": -0.07,
               "reward/group_std": 1e-17,
               "response_length/clip_ratio": 0.25, "perf/generated_tokens_per_s": 12345.6,
               "timing_s/step": 1e-5}
    shown = Progress(program, WatchedProcess())
    shown.start([], held_out={})
    capsys.readouterr()
    shown.step(1, metrics)
    shown.step(2, {"reward/mean": 0.5, "reward/right/mean": 0.5})  # A single one is the reward itself.
    shown.step(3, {"student/loss": 2.5e-7, "critic/loss": 1.0, "critic/vf_loss": 1.0, "actor/loss": 0.25})
    shown.stop()
    assert capsys.readouterr().err.splitlines() == [
        "step 1/3: reward 0.3412, right 0.41, brief -0.07, spread 0, cut off 25%, "
        "generated tokens/s 12,346, seconds 1e-05",
        "step 2/3: reward 0.5",
        "step 3/3: student loss 2.5e-07, loss 0.25, value loss 1"]


GRPO_STEP = {
    "reward/mean": 0.3412, "reward/right_answer/mean": 0.3, "reward/brief/mean": 0.4,
    "reward/group_std": 0.2345, "actor/ref_kl": 0.00123, "response_length/mean": 123.4,
    "response_length/clip_ratio": 0.25,
    "actor/entropy": 1.234, "actor/grad_norm": 0.5678, "perf/generated_tokens_per_s": 23456.0,
    "perf/trained_tokens_per_s": 3456.0, "timing_s/step": 31.42}


@pytest.mark.parametrize(("width", "shown", "left_out"), [
    (140, ["right_answer", "brief", "entropy", "grad", "generated", "trained", "seconds"], []),
    (80, ["reward", "spread", "KL", "length", "cut off", "generated", "seconds"], ["brief", "grad"]),
    (40, ["reward", "spread", "KL", "seconds"], ["generated", "entropy", "length"]),
])
def test_a_narrow_terminal_shows_what_tells_most(tmp_path, program, width, shown, left_out):
    with (tmp_path / "terminal").open("w+") as terminal:
        progress = Progress(program, WatchedProcess())
        progress._console = Console(file=terminal, force_terminal=True, width=width, highlight=False)
        progress.start([], held_out={})
        progress.step(1, GRPO_STEP)
        progress.stop()
        terminal.seek(0)
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.read())
    lines = text.splitlines()
    rows = [number for number, line in enumerate(lines) if line.strip().startswith("1/3")]
    table = lines[rows[-1] - 3 : rows[-1] + 1]
    assert max(len(line.rstrip()) for line in table) <= width and not any("…" in line for line in table)
    assert all(any(title in line for line in table) for title in shown)
    assert not any(title in line for line in table for title in left_out)


def test_a_terminal_shows_it_live(tmp_path, program):
    process = WatchedProcess(step="step 1/3")
    shown = Progress(program, process)
    with (tmp_path / "terminal").open("w+") as terminal:
        shown._console = Console(file=terminal, force_terminal=True, width=100, highlight=False)
        shown.start([], held_out={})
        shown.step(1, {"timing_s/step": 90.0})
        with process.doing("reward_forward"):
            time.sleep(1.5)  # It is drawn anew four times a second.
        shown.stop()
        terminal.seek(0)
        text = terminal.read()
        assert "step 1/3: reward_forward, 1 s" in text and "2 steps left, about 3 min 0 s" in text


def test_an_evaluation_of_several_sets_has_a_line_for_each(task, capsys):
    data = DatasetConfig(str(task / "data.jsonl"), max_rows=5)
    sets = {"one": data, "two": Evaluation(data, samples=2, max_rows=3)}
    for held_out, counted, lines in [
        (data, "40 training prompts, 5 held out", ["held out, before step 1: score 0.500"]),
        (sets, "40 training prompts, 8 held out (one 5, two 3)",
         ["held out, before step 1:", "  one: score 0.500, length 3.000",
          "  two: score 0.250, pass@2 1.000"]),
    ]:
        program = compile_program(make_experiment("grpo", task, eval_dataset=held_out), None, world_size=1)
        metrics = {"eval/score": 0.5} if held_out is data else {
            "eval/one/score": 0.5, "eval/one/response_length/mean": 3.0, "eval/two/score": 0.25,
            "eval/two/mean@2": 0.25, "eval/two/pass@2": 1.0}
        shown = Progress(program, WatchedProcess())
        shown.start(range(40), held_out={"": 5} if held_out is data else {"one": 5, "two": 3})
        assert counted in capsys.readouterr().err
        shown.evaluation(0, metrics, metrics)
        shown.stop()
        assert capsys.readouterr().err.splitlines() == lines


PLACES = {
    "actor_generate": "d1@1", "reward_forward": "d1@1", "ref_forward": "d1@0", "advantages": "d1@1",
    "actor_train": "d2@0-1",
}


def _watched(world, task):
    """Return what rank 0 shows of itself while rank 1 generates."""
    real, world.process = world.process, _Noting()
    try:
        plan = ExecutionPlan.from_dict({"calls": {name: {"layout": place} for name, place in PLACES.items()}})
        experiment = make_experiment("grpo", task, steps=1, eval_dataset=None)
        program = compile_program(experiment, plan, world_size=4)
        Trainer(program, world, quiet=True).run()
    finally:
        noted, world.process = world.process, real
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
        "realhf: warning: in 3 steps the samples of each prompt all had the same reward (mean 0.25): nothing "
        "is learned from them; 100% of the responses were cut off at sampling.max_new_tokens; "
        "`realhf rollouts` shows them"]


def test_faults_are_named_by_what_all_steps_have_in_common():
    """A single step with a signal is enough. An algorithm that compares no groups has another metric."""
    equal = {"reward/zero_std_groups": 1.0, "response_length/clip_ratio": 0.5, "reward/mean": 0.0}
    assert "50% of the responses" in fault_of([equal] * 3)[1]
    assert fault_of([equal, equal | {"reward/zero_std_groups": 0.9}, equal]) is None
    assert fault_of([{"reward/mean": 0.0}] * 3) is None
    alone = {"reward/std": 1e-17, "reward/mean": 0.7, "actor/grad_norm": 0.3}
    assert "all samples had the same reward (0.7)" in fault_of([alone] * 3)[1]
    assert fault_of([alone, alone | {"reward/std": 0.1}]) is None
    still = {"actor/loss": 0.3, "actor/grad_norm": 0.0, "critic/grad_norm": 0.1}
    assert fault_of([still] * 3) == ("still", "in 3 steps the gradient of actor was 0: nothing is learned")
    assert fault_of([still, still | {"actor/grad_norm": 1e-9}]) is None
    cut = {"reward/zero_std_groups": 0.1, "response_length/clip_ratio": 1.0}
    assert "no response ended by itself" in fault_of([cut] * 3)[1]
    assert fault_of([cut] * 3, may_end=False) is None
    assert fault_of([cut, cut | {"response_length/clip_ratio": 0.99}]) is None
    boxed = {"reward/a/mean": 0.5, "reward/a/std": 0.1, "reward/boxed/mean": 0.0, "reward/boxed/std": 0.0}
    sentence = "in 3 steps reward boxed was 0 for every sample: it teaches nothing"
    assert fault_of([boxed] * 3) == ("constant", sentence)
    assert fault_of([boxed, boxed | {"reward/boxed/std": 0.2}]) is None


def _last_line(experiment, capsys):
    Trainer(compile_program(experiment, None, world_size=1), World()).run()
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("step 1/1: ")]
    return dict(part.rsplit(" ", 1) for part in line.removeprefix("step 1/1: ").split(", "))


def _pairs(task):
    path = task / "pairs.jsonl"
    rows = [json.loads(line) for line in (task / "data.jsonl").read_text().splitlines()]
    path.write_text("".join(json.dumps(
        {"prompt": row["prompt"], "chosen": row["answer"], "rejected": "0"}) + "\n" for row in rows))
    return {"dataset": DatasetConfig(str(path)), "steps": 1, "batch_size": 4}


@pytest.mark.slow
def test_every_kind_of_training_shows_what_it_learns(task, capsys):
    """The values beside the titles are checked for two kinds by what else is known of a first step."""
    shown = _last_line(make_experiment("grpo", task, steps=1, eval_dataset=None), capsys)
    assert {"reward", "spread", "KL to ref", "cut off", "generated tokens/s"} <= set(shown)
    assert "loss" not in shown
    shown = _last_line(make_experiment("ppo", task, steps=1, eval_dataset=None), capsys)
    assert {"reward", "spread", "value loss"} <= set(shown) and "loss" not in shown
    shown = _last_line(make_experiment("sft", task, steps=1, eval_dataset=None), capsys)
    assert set(shown) == {"loss", "grad norm", "trained tokens/s", "seconds"}
    shown = _last_line(DPO(actor=role(task), **_pairs(task)), capsys)
    assert float(shown["loss"]) == pytest.approx(math.log(2), abs=1e-4) and shown["margin"] == "0"
    assert {"accuracy", "margin"} <= set(shown)
    shown = _last_line(PairwiseRewardModel(reward=role(task, head="score"), **_pairs(task)), capsys)
    assert {"loss", "accuracy", "margin"} <= set(shown)
    one_step = {"dataset": DatasetConfig(str(task / "data.jsonl")), "steps": 1, "batch_size": 4}
    for variant in ("sampled", "top_k"):
        teacher = role(task, trainable=False)
        experiment = Distillation(actor=role(task), teachers=(teacher,), variant=variant, top_k=4, **one_step)
        shown = _last_line(experiment, capsys)
        assert "KL to teacher" in shown and "loss" not in shown


def test_no_column_is_shown_twice():
    names = [column.title for column in shown_columns(GRPO_STEP)]
    assert len(names) == len(set(names))
