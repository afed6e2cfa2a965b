"""Evaluations of several sets with several samples: under every layout, beside training, after a resume."""

import json
import math
import time
from collections import Counter
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import ClassVar

import pytest

from realhf import (
    DPO,
    DatasetConfig,
    Evaluation,
    FunctionCall,
    HostFunction,
    Reward,
    RewardLimits,
    RolloutLog,
    SamplingConfig,
    UnitTests,
    graph_of,
)
from realhf.cli.check import derived_counts
from realhf.cli.main import main
from realhf.distributed.world import World
from realhf.execution_plan import ExecutionPlan
from realhf.runtime.checkpointer import newest_checkpoint
from realhf.runtime.compile.program import compile_evaluation, compile_program
from realhf.runtime.doubts.rules import warnings_of
from realhf.runtime.evaluations import evaluate, first_and_last
from realhf.runtime.trainer import Trainer
from tests.cli_tools import TIMED, read_jsonl
from tests.runtime.tiny import make_experiment, role, some_reward, write_task

STEPS = 2
MAX_SECONDS = 60.0
CALLS = ("actor_generate", "ref_forward", "actor_train")
ALONE = {"eval/actor_generate": "d1@3"}
"""A layout of evaluations on a rank that does nothing else."""
OF_ONE_SET = {"eval/many/actor_generate": "t2@2-3", "eval/many/reward_forward": "d2@2-3"}
CASES = [
    (("p2@2-3", "d1@0", "t2@0-1"), {}),
    pytest.param(("t2@0-1",) * 3, {}, marks=pytest.mark.slow),
    pytest.param(("d2@0-1",) * 3, ALONE, marks=pytest.mark.slow),
    pytest.param(("d2@0-1",) * 3, {}, marks=pytest.mark.slow),
    pytest.param(("t2@0-1",) * 3, OF_ONE_SET, marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    return write_task(tmp_path_factory.mktemp("task"))


class Lengths:
    """A reward of answers by their length, which votes by the first character."""

    def __call__(self, completions, answer):
        return [len(text) % 3 / 2 for text in completions]

    def answer_of(self, completion):
        return completion[:1] or None


def _sets(task):
    data = DatasetConfig(str(task / "data.jsonl"))
    warm = SamplingConfig(max_new_tokens=6, temperature=0.8)
    return {
        "greedy": DatasetConfig(str(task / "data.jsonl"), max_rows=5),
        "many": Evaluation(data, samples=4, sampling=warm, max_rows=7, function=Lengths()),
        "as_trained": Evaluation(data, samples=2, max_rows=3),
    }


def _experiment(task, **changes):
    settings = {"steps": STEPS, "eval_dataset": _sets(task), "eval_every": 1} | changes
    return make_experiment("grpo", task, **settings)


def _plan(layouts, own):
    entries = dict(zip(CALLS, layouts, strict=True)) | own
    return ExecutionPlan.from_dict({"calls": {name: {"layout": at} for name, at in entries.items()}})


def _run(world, task, layouts, own, out):
    program = compile_program(_experiment(task), _plan(layouts, own), world_size=world.size)
    Trainer(program, world, out=out, quiet=True).run()


def _answers(out):
    return {str(path.relative_to(out)): read_jsonl(path) for path in sorted((out / "evals").rglob("*.jsonl"))}


def _metrics(out):
    measured = (*TIMED, "realloc")
    return [{name: x for name, x in step.items() if not name.startswith(measured)}
            for step in read_jsonl(out / "metrics.jsonl")]


@pytest.fixture(scope="module")
def alone(task, tmp_path_factory) -> Path:
    """Return the directory of a run in one process."""
    out = tmp_path_factory.mktemp("run") / "out"
    _run(World(), task, ("d1@0",) * 3, {}, out)
    return out


def test_every_answer_of_every_evaluation_is_kept(alone, task):
    found = _answers(alone)
    names = ("as_trained", "greedy", "many")
    assert list(found) == [f"evals/{name}/step_{step}.jsonl" for name in names for step in range(STEPS + 1)]
    data = read_jsonl(task / "data.jsonl")
    for name, rows, samples in (("greedy", range(5), 1), ("many", [i * 40 // 7 for i in range(7)], 4),
                                ("as_trained", (0, 13, 26), 2)):
        answers = found[f"evals/{name}/step_1.jsonl"]
        expected = [(row, sample) for row in rows for sample in range(samples)]
        assert [(answer["dataset_row"], answer["sample"]) for answer in answers] == expected
        for answer in answers:
            row = data[answer["dataset_row"]]
            assert (answer["set"], answer["prompt"], answer["answer"]) == (name, row["prompt"], row["answer"])
            ended = answer["length"] - answer["finished"]
            assert ended <= (6 if name == "many" else 7) and (answer["finished"] or ended == answer["length"])
    for answer in found["evals/many/step_1.jsonl"]:
        assert answer["score"] == len(answer["completion"]) % 3 / 2
        assert answer["final_answer"] == (answer["completion"][:1] or None)


def test_the_last_answers_are_one_to_each_prompt(alone):
    last = read_jsonl(alone / "eval.jsonl")
    assert Counter(row["set"] for row in last) == {"greedy": 5, "many": 7, "as_trained": 3}
    assert all(row.keys() == {"set", "prompt", "answer", "completion", "score"} for row in last)
    firsts = [a for a in read_jsonl(alone / f"evals/many/step_{STEPS}.jsonl") if a["sample"] == 0]
    assert [row["completion"] for row in last if row["set"] == "many"] == [a["completion"] for a in firsts]


def test_metrics_are_those_of_the_answers(alone):
    steps = read_jsonl(alone / "metrics.jsonl")
    assert len(steps) == STEPS + 1
    for step, metrics in enumerate(steps):
        answers = read_jsonl(alone / f"evals/many/step_{step}.jsonl")
        prompts = [answers[i : i + 4] for i in range(0, len(answers), 4)]
        right = [[answer["score"] > 0.5 for answer in prompt] for prompt in prompts]
        for k in (1, 2, 4):
            subsets = [any(chosen) for prompt in right for chosen in combinations(prompt, k)]
            assert metrics[f"eval/many/pass@{k}"] == pytest.approx(sum(subsets) / len(subsets))
        best = [max(answer["score"] for answer in prompt) for prompt in prompts]
        assert metrics["eval/many/best@4"] == pytest.approx(sum(best) / 7)
        scores = [answer["score"] for answer in answers]
        assert metrics["eval/many/mean@4"] == metrics["eval/many/score"] == pytest.approx(sum(scores) / 28)
        lengths = [answer["length"] for answer in answers]
        assert metrics["eval/many/response_length/mean"] == pytest.approx(sum(lengths) / 28)
        cut = [not answer["finished"] for answer in answers]
        assert metrics["eval/many/response_length/clip_ratio"] == pytest.approx(sum(cut) / 28)
        votes = [_majority(prompt) for prompt in prompts]
        assert metrics["eval/many/majority@4"] == pytest.approx(sum(votes) / 7)
        greedy = [answer["score"] for answer in read_jsonl(alone / f"evals/greedy/step_{step}.jsonl")]
        assert metrics["eval/greedy/score"] == pytest.approx(sum(greedy) / 5)
        assert "eval/greedy/pass@1" not in metrics


def _majority(prompt):
    votes = Counter(answer["final_answer"] for answer in prompt if answer["final_answer"] is not None)
    if not votes:
        return sum(answer["score"] for answer in prompt) / len(prompt)
    means = []
    for vote, count in votes.items():
        if count == max(votes.values()):
            means.append(sum(a["score"] for a in prompt if a["final_answer"] == vote) / count)
    return sum(means) / len(means)


def test_samples_of_a_prompt_differ(alone):
    answers = read_jsonl(alone / "evals/many/step_1.jsonl")
    by_prompt = Counter(answer["dataset_row"] for answer in answers)
    different = {(answer["dataset_row"], answer["completion"]) for answer in answers}
    assert len(different) > 3 * len(by_prompt)


def test_the_summary_has_the_first_and_last_values_of_all_sets(alone):
    summary = json.loads((alone / "summary.json").read_text())
    first, *_, last = read_jsonl(alone / "metrics.jsonl")
    assert summary["eval_metric"] == "eval/greedy/score"
    assert summary["eval_first"] == first["eval/greedy/score"]
    assert summary["eval_last"] == last["eval/greedy/score"]
    assert summary["evals"] == {
        name: {"first": first[name], "last": last[name]} for name in first if name.startswith("eval/")}


@pytest.mark.parametrize(("layouts", "own"), CASES, ids=str)
@pytest.mark.slow
def test_a_plan_does_not_change_answers(pool, task, alone, tmp_path, layouts, own):
    out = tmp_path / "out"
    pool.run(_run, task, layouts, own, out)
    assert _answers(out) == _answers(alone)
    assert read_jsonl(out / "eval.jsonl") == read_jsonl(alone / "eval.jsonl")
    for ours, expected in zip(_metrics(out), _metrics(alone), strict=True):
        assert ours == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.slow
def test_evaluations_draw_the_same_numbers_each_time_and_leave_training_alone(task, alone, tmp_path):
    still = _experiment(task)
    still.actor = type(still.actor)(**{**vars(still.actor), "optimizer": type(still.actor.optimizer)(lr=0.0)})
    Trainer(compile_program(still, None, world_size=1), World(), quiet=True, out=tmp_path / "still").run()
    found = _answers(tmp_path / "still")
    for name in ("greedy", "many", "as_trained"):
        assert found[f"evals/{name}/step_0.jsonl"] == found[f"evals/{name}/step_2.jsonl"]
    without = compile_program(_experiment(task, eval_dataset=None), None, world_size=1)
    Trainer(without, World(), quiet=True, out=tmp_path / "without").run()
    steps = _metrics(alone)[1:]
    trained = [{name: x for name, x in step.items() if not name.startswith("eval/")} for step in steps]
    assert _metrics(tmp_path / "without") == trained


@pytest.mark.slow
def test_a_resumed_run_has_every_answer_once(task, tmp_path):
    def run(out, start=None):
        experiment = _experiment(task, steps=3, checkpoint_every=1, keep_checkpoints=3)
        checkpoint = None if start is None else newest_checkpoint(World(), [start])
        program = compile_program(experiment, None, world_size=1)
        Trainer(program, World(), out=out, checkpoint=checkpoint, quiet=True).run()

    run(tmp_path / "whole")
    expected = _answers(tmp_path / "whole")
    assert len(expected) == 3 * 4
    run(tmp_path / "branch", tmp_path / "whole/checkpoints/step_2")
    assert _answers(tmp_path / "branch") == expected
    late = tmp_path / "whole/evals/many/step_9.jsonl"  # An evaluation after the last checkpoint.
    late.write_text("{}\n")
    run(tmp_path / "whole", tmp_path / "whole/checkpoints/step_1")
    assert _answers(tmp_path / "whole") == expected


@dataclass(frozen=True)
class _Begun:
    """A call of training that writes a file when a step has begun."""

    directory: Path

    def __call__(self, batch, context):
        (self.directory / f"begun_{context.step}").touch()
        return {}


@dataclass(frozen=True)
class _Waits:
    """A reward of evaluations that waits until training has begun the next step."""

    directory: Path
    __name__: ClassVar[str] = "some_reward"

    def __call__(self, completions, **columns):
        number = len(list(self.directory.glob("evaluated_*")))
        deadline = time.monotonic() + MAX_SECONDS
        while number < STEPS and not (self.directory / f"begun_{number + 1}").exists():
            assert time.monotonic() < deadline, "the next step has not begun"
            time.sleep(0.01)
        (self.directory / f"evaluated_{number}").touch()
        return some_reward(None, completions, columns["completion_ids"], None)


def _run_beside(world, task, marks, layouts, own, out):
    """Run training, which evaluates by a reward that waits for the next step if `marks` is a directory."""
    function = some_reward if marks is None else _Waits(marks)
    held_out = Evaluation(DatasetConfig(str(task / "data.jsonl")), samples=2, max_rows=4, function=function)
    experiment = _experiment(task, eval_dataset=held_out)
    if marks is not None:
        begun = FunctionCall("begun", "host", ("sequence_ids",), work=HostFunction(_Begun(marks)))
        graph = experiment.graph().add(begun)
        experiment.graph = lambda: graph
    program = compile_program(experiment, _plan(layouts, own), world_size=world.size)
    Trainer(program, world, out=out, quiet=True).run()


@pytest.mark.slow
def test_an_evaluation_runs_beside_training_on_ranks_of_its_own(pool, task, tmp_path):
    marks = tmp_path / "marks"
    marks.mkdir()
    out = tmp_path / "beside"
    layouts = ("d3@0-2", "d1@0", "d2@0-1")
    pool.run(_run_beside, task, marks, layouts, ALONE, out)
    plain = tmp_path / "plain"
    pool.run(_run_beside, task, None, layouts, {}, plain)
    events = read_jsonl(out / "timeline.jsonl")
    for step in range(STEPS):
        evaluated = [e for e in events if e["step"] == step and e["name"] == "eval/reward_forward"]
        trained = [e for e in events if e["step"] == step + 1 and e["name"] == "actor_generate"]
        assert {e["rank"] for e in evaluated} == {3} and {e["rank"] for e in trained} >= {0, 1, 2}
        assert min(e["start"] for e in trained) < max(e["end"] for e in evaluated)
    assert _answers(out) == _answers(plain) and len(_answers(out)) == STEPS + 1
    assert _metrics(out) == _metrics(plain)
    saved = ExecutionPlan.load(str(out / "plan.yaml")).calls  # With it, a resumed run continues.
    assert str(saved["eval/actor_generate"].layout) == "d1@3" and "eval/reward_forward" not in saved


def _run_to_resume(world, task, out, start):
    experiment = _experiment(task, steps=3, checkpoint_every=1, keep_checkpoints=3)
    checkpoint = None if start is None else newest_checkpoint(world, [start])
    program = compile_program(experiment, _plan(("d3@0-2", "d1@0", "d2@0-1"), ALONE), world_size=world.size)
    Trainer(program, world, out=out, checkpoint=checkpoint, quiet=True).run()


@pytest.mark.slow
def test_a_run_with_evaluations_beside_it_continues_bit_for_bit(pool, task, tmp_path):
    pool.run(_run_to_resume, task, tmp_path / "whole", None)
    pool.run(_run_to_resume, task, tmp_path / "branch", tmp_path / "whole/checkpoints/step_1")
    assert _answers(tmp_path / "branch") == _answers(tmp_path / "whole")
    assert _metrics(tmp_path / "branch") == _metrics(tmp_path / "whole")


def test_what_is_refused(task):
    def refused(own=None, **changes):
        plan = None if own is None else _plan(("d1@0",) * 3, own)
        with pytest.raises(ValueError) as error:
            compile_program(_experiment(task, **changes), plan, world_size=2)
        return str(error.value)

    data = str(task / "data.jsonl")
    assert refused(eval_dataset={"a": DatasetConfig(data), "b": DatasetConfig("nowhere.jsonl")}) == (
        "eval_dataset.b.path 'nowhere.jsonl': there is no such file")
    assert refused(eval_dataset={"b": DatasetConfig(data, prompt_key="x")}).startswith(
        f"eval_dataset.b {data} line 1: there is no column 'x'")
    for name in ("eval/actor_train", "eval/nothing/actor_generate"):
        assert refused(own={name: "d1@0"}).startswith(f"calls.{name}: the experiment has no such call")
    assert refused(own={"eval/actor_generate": "d1@7"}).startswith(
        "calls.eval/actor_generate.layout d1@7 uses rank 7, but there are 2 ranks")
    assert refused(own={"eval/actor_generate": "t8@0-7"}).startswith("calls.eval/actor_generate")
    greedy = SamplingConfig(max_new_tokens=4, temperature=0.0)
    assert "sampling.temperature is 0.0: it must be above 0" in refused(
        sampling=greedy, eval_dataset=Evaluation(DatasetConfig(data), samples=2))
    pairs = task / "pairs.jsonl"
    pairs.write_text('{"prompt": "1", "chosen": "2", "rejected": "3", "answer": "2"}\n')
    several = Evaluation(DatasetConfig(str(pairs)), samples=2)
    dpo = DPO(actor=role(task), dataset=DatasetConfig(str(pairs)), eval_dataset={"a": several})
    with pytest.raises(ValueError, match=r"eval_dataset.a.samples is 2: it must be 1, as rows are pref"):
        compile_program(dpo, None, world_size=1)


def test_a_plan_of_training_serves_an_evaluation_alone(task):
    """Entries of calls that only training has are left out, and no role is trained."""
    plan = _plan(("d2@0-1", "d1@0", "t2@0-1"), ALONE)
    program = compile_evaluation(_experiment(task), plan, world_size=4)
    assert program.roles.keys() == {"actor"} and program.roles["actor"].optimizer is None
    assert {str(one.plan["actor_generate"].layout) for one in program.evaluations} == {"d1@3"}
    assert str(program.homes["actor"]) == "d1@3"
    assert any("3 ranks (0, 1, 2) have no call" in text for text in warnings_of(program, None, {}))
    others = ExecutionPlan.from_dict({"calls": {"actor_train": {"layout": "d1@0"}}})
    with pytest.raises(ValueError, match=r"^calls.actor_generate is missing"):
        compile_evaluation(_experiment(task), others, world_size=1)


def test_the_first_and_last_values_without_evaluations():
    found = first_and_last({}, [])
    assert found == {
        "eval_metric": None, "eval_first": None, "eval_last": None, "eval_steps": None, "evals": {}}


def test_the_evaluation_before_the_first_step_can_be_left_out(task, alone, tmp_path, capsys):
    """Everything else stays as it is: sampled tokens, later evaluations, and what is printed about them."""
    program = compile_program(_experiment(task, eval_at_start=False), None, world_size=1)
    assert derived_counts(program, num_rows=40)["evaluations"] == 2
    Trainer(program, World(), out=tmp_path / "run").run()
    assert _metrics(tmp_path / "run") == _metrics(alone)[1:]
    assert not list((tmp_path / "run" / "evals").rglob("step_0.jsonl"))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    first = read_jsonl(tmp_path / "run" / "metrics.jsonl")[0]["eval/greedy/score"]
    assert summary["eval_steps"] == [1, 2] and summary["eval_first"] == first
    err = capsys.readouterr().err
    assert "before step 1" not in err
    last = summary["eval_last"]
    assert f"held-out greedy/score: {first:.3f} after step 1, {last:.3f} after step 2\n" in err


def test_held_out_rows_that_nothing_evaluates_are_named(task):
    experiment = make_experiment("grpo", task)
    experiment.eval_graph = lambda: None
    program = compile_program(experiment, None, world_size=1)
    warned = [sentence for sentence in warnings_of(program, None, {}) if "nothing evaluates" in sentence]
    assert warned == [
        "eval_dataset is given, and nothing evaluates it: give eval_function, which scores the answers"]


def brief(completion_ids):
    return [-float(len(ids)) for ids in completion_ids]


def near(completions, target, level):
    return [float(text == right) for text, right in zip(completions, target, strict=True)]


def test_columns_of_another_name_are_kept_with_the_answers(task, tmp_path):
    rows = [{"prompt": "1+1=", "target": "2", "level": "x" * 500, "unread": 0} for _ in range(6)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    held_out = DatasetConfig(str(path), max_rows=2)
    experiment = _experiment(
        task, steps=1, batch_size=2, dataset=DatasetConfig(str(path)), eval_dataset=held_out)
    experiment.reward_function = near
    experiment.rollouts = RolloutLog(max_characters=100)
    program = compile_program(experiment, None, world_size=1)
    out = tmp_path / "run"
    Trainer(program, World(), quiet=True, out=out).run()
    for name in ("eval.jsonl", "evals/step_1.jsonl"):
        for row in read_jsonl(out / name):
            assert row["columns"].keys() == {"target", "level"} and row["columns"]["target"] == "2"
            assert "400 characters left out" in row["columns"]["level"]
    assert main(["rollouts", str(out), "--eval", "--where", "target == '2'"]) == 0
    experiment.reward_function = [near, odd]
    experiment.dataset = DatasetConfig(str(task / "data.jsonl"))
    with pytest.raises(ValueError, match="no column 'target'; its .*; it is read by reward function near$"):
        compile_program(experiment, None, world_size=1)


def odd(completion_ids):
    return [float(sum(ids) % 2) for ids in completion_ids]


def _by_name(batch, context):
    """Return scores of a call that knows several rewards; one fails, and one does not apply everywhere."""
    lengths = [len(ids) for ids in batch["sequence_ids"].split()]
    named = [{"even": float(n % 2 == 0), "long": None if n < 12 else float(n)} for n in lengths]
    scores = [math.nan if i == 0 else float(i) for i in range(len(lengths))]
    return {"score": scores, "completion": [str(n) for n in lengths], "reward_scores": named}


def test_scores_by_reward_and_failed_rewards(task, tmp_path):
    data = DatasetConfig(str(task / "data.jsonl"))
    experiment = _experiment(task, steps=1, eval_dataset={"a": Evaluation(data, samples=2, max_rows=6)})
    graph = experiment.eval_graph()
    outputs = ("score", "completion", "reward_scores")
    work = HostFunction(_by_name)
    scored = FunctionCall("reward_forward", "host", ("sequence_ids",), outputs, work=work)
    experiment.eval_graph = lambda: graph_of(graph["actor_generate"], scored)
    program = compile_program(experiment, None, world_size=1)
    last = Trainer(program, World(), quiet=True, out=tmp_path).run().metrics[-1]
    answers = read_jsonl(tmp_path / "evals/a/step_1.jsonl")
    assert [answer["score"] for answer in answers] == [None, *map(float, range(1, 12))]
    named = [answer["scores"] for answer in answers]
    assert last["eval/a/even"] == pytest.approx(sum(one["even"] for one in named) / 12)
    long = [one["long"] for one in named if one["long"] is not None]
    assert 0 < len(long) < 12 and last["eval/a/long"] == pytest.approx(sum(long) / len(long))
    assert last["eval/a/score"] == sum(range(12)) / 11
    pairs = [(named[i], named[i + 1]) for i in range(0, 12, 2)]
    assert last["eval/a/mean@2"] == last["eval/a/even"]  # The first reward decides.
    assert last["eval/a/pass@2"] == sum(max(one["even"], two["even"]) for one, two in pairs) / 6


def _strict(line):
    """Return a JSON text that has neither NaN nor infinity."""
    return json.loads(line, parse_constant=pytest.fail)


@pytest.mark.parametrize("samples", [1, 2])
def test_an_outage_of_the_reward_leaves_an_evaluation_without_a_score(samples, task, tmp_path, capsys):
    """The first evaluation has no score; in the second one a reward fails on half of the answers."""
    calls = []

    def away(completions):
        calls.append(len(completions))
        if sum(calls) <= 2 * 6 * samples:  # A call with all samples, and one with each.
            raise ConnectionError("the judge is away")
        return [float("nan") if i % 2 else 0.75 for i in range(len(completions))]

    data = DatasetConfig(str(task / "data.jsonl"))
    sets = {"away": Evaluation(data, samples=samples, max_rows=6, function=away),
            "near": Evaluation(data, max_rows=3)}
    experiment = _experiment(task, steps=1, eval_dataset=sets)
    experiment.reward_limits = RewardLimits(on_failure="drop")
    Trainer(compile_program(experiment, None, world_size=1), World(), out=tmp_path).run()
    first, last = map(_strict, (tmp_path / "metrics.jsonl").read_text().splitlines())
    of_away = [{name for name in step if name.startswith("eval/away/")} for step in (first, last)]
    lengths = {"eval/away/response_length/mean", "eval/away/response_length/clip_ratio"}
    assert of_away[0] == {"eval/away/failed", *lengths} and first["eval/away/failed"] == 1.0
    assert last["eval/away/failed"] == 0.5 and last["eval/away/score"] == 0.75
    assert last.get("eval/away/pass@1", 1.0) == 1.0 and "eval/away/pass@2" not in last
    summary = _strict((tmp_path / "summary.json").read_text())
    assert summary["eval_metric"] == "eval/away/score" and summary["eval_steps"] == [1, 1]
    assert summary["eval_first"] == summary["eval_last"] == 0.75
    err = capsys.readouterr().err
    sentence = "the reward of every sample of eval_dataset.away has failed: it has no score"
    assert err.count(f"realhf: warning: evaluation before step 1: {sentence}") == err.count(sentence) == 1
    assert "nan" not in err.replace("it returned nan", "")


def test_an_evaluation_alone_without_a_score(task, tmp_path, capsys):
    def away(completions):
        raise ConnectionError("the judge is away")

    data = DatasetConfig(str(task / "data.jsonl"))
    experiment = _experiment(task, eval_dataset=Evaluation(data, max_rows=4))
    experiment.reward_function = away
    experiment.reward_limits = RewardLimits(on_failure="drop")
    summary = evaluate(compile_evaluation(experiment, None, world_size=1), World(), out=tmp_path)
    assert _strict((tmp_path / "summary.json").read_text())["metrics"]["eval/failed"] == 1.0
    assert summary["eval_metric"] is None and "eval/score" not in summary["metrics"]
    assert "the reward of every sample of eval_dataset has failed: it has no score" in capsys.readouterr().err


def test_metrics_that_are_not_finite_are_left_out_with_a_warning(task, tmp_path, capsys):
    def odd_metrics(batch, context):
        return {}, {"odd/nan": math.nan, "odd/often": math.inf if context.step else 0.0, "odd/known": 2.0}

    experiment = _experiment(task, eval_dataset=None)
    call = FunctionCall("odd", "host", ("sequence_ids",), (), work=HostFunction(odd_metrics))
    graph = experiment.graph().add(call)
    experiment.graph = lambda: graph
    Trainer(compile_program(experiment, None, world_size=1), World(), out=tmp_path).run()
    for step in map(_strict, (tmp_path / "metrics.jsonl").read_text().splitlines()):
        assert step["odd/known"] == 2.0 and "odd/nan" not in step and "odd/often" not in step
    err = capsys.readouterr().err
    for name, value in (("odd/nan", "nan"), ("odd/often", "inf")):
        sentence = f"{name} is {value} in step 1: a metric is left out where it is not a finite number"
        assert err.count(f"realhf: warning: {sentence}") == err.count(name) == 1


def test_one_of_several_rewards_decides_which_answers_are_right(task, tmp_path):
    """A small reward for brevity changes the score, and not the share of right answers."""
    data = DatasetConfig(str(task / "data.jsonl"))
    rewards = [Reward(brief, weight=0.3), Reward(odd)]
    sets = {
        "first": Evaluation(data, samples=2, max_rows=6),
        "odd": Evaluation(data, samples=2, max_rows=6, correct_by="odd")}
    experiment = _experiment(task, steps=1, eval_dataset=sets)
    experiment.reward_function = rewards
    program = compile_program(experiment, None, world_size=1)
    last = Trainer(program, World(), quiet=True, out=tmp_path).run().metrics[-1]
    for name, decides in (("first", "brief"), ("odd", "odd")):
        rows = read_jsonl(tmp_path / f"evals/{name}/step_1.jsonl")
        values = [row["scores"][decides] for row in rows]
        known = [values[i : i + 2] for i in range(0, 12, 2)]
        prefix = f"eval/{name}"
        assert last[f"{prefix}/mean@2"] == pytest.approx(sum(values) / 12)
        assert last[f"{prefix}/best@2"] == pytest.approx(sum(map(max, known)) / 6)
        assert last[f"{prefix}/pass@2"] == sum(max(pair) > 0.5 for pair in known) / 6
        totals = [0.3 * row["scores"]["brief"] + row["scores"]["odd"] for row in rows]
        assert last[f"{prefix}/score"] == pytest.approx(sum(totals) / 12)
    experiment.eval_dataset = Evaluation(data, correct_by="even")
    with pytest.raises(ValueError, match="eval_dataset.correct_by is 'even': its rewards are brief, odd"):
        compile_program(experiment, None, world_size=1)


@pytest.mark.parametrize(("factor", "says"), [
    (0.5, "the highest value is 0.5, so that no sample counts as right"),
    (10.0, "samples with values from 5 to 10 all count as right"), (1.0, None)])
def test_a_limit_by_which_no_answer_is_right_or_every_one(task, capsys, factor, says):
    """It is said once. Lengths of answers give 0, half the factor and the factor."""

    def scaled(completions):
        return [factor * (len(text) % 3) / 2 for text in completions]

    sets = Evaluation(DatasetConfig(str(task / "data.jsonl")), samples=2, max_rows=12)
    experiment = _experiment(task, steps=2, eval_dataset=sets, reward_function=scaled)
    Trainer(compile_program(experiment, None, world_size=1), World()).run()
    said = [line for line in capsys.readouterr().err.splitlines() if "correct_above" in line]
    place = "after step 1" if factor < 1 else "before step 1"  # An untrained model may know no right answer.
    start = f"realhf: warning: evaluation {place}: eval_dataset: by correct_above 0.5 of reward "
    assert said == [f"{start}scaled, {says}: set Evaluation.correct_above"] * (says is not None)


def test_a_reward_may_say_which_of_its_values_are_right(task, tmp_path):
    """A program that passes three of four tests is not right, although its share is above one half."""
    @dataclass
    class Shares:
        correct_above: ClassVar[float] = UnitTests.correct_above

        def __call__(self, completions):
            return [(1 + len(text) % 4) / 4 for text in completions]

    data = DatasetConfig(str(task / "data.jsonl"))
    sets = {
        "shares": Evaluation(data, samples=2, max_rows=12),
        "chosen": Evaluation(data, samples=2, max_rows=12, correct_above=0.6)}
    experiment = _experiment(task, steps=1, eval_dataset=sets, reward_function=Shares())
    last = Trainer(compile_program(experiment, None, world_size=1), World(), quiet=True, out=tmp_path)
    metrics = last.run().metrics[-1]
    for name, legal in (("shares", {1.0}), ("chosen", {0.75, 1.0})):
        scores = [row["score"] for row in read_jsonl(tmp_path / f"evals/{name}/step_1.jsonl")]
        assert {0.75, 1.0} <= set(scores)
        assert metrics[f"eval/{name}/pass@1"] == pytest.approx(sum(x in legal for x in scores) / 24)


def test_held_out_losses_of_several_sets(task):
    data = str(task / "data.jsonl")
    sets = {"a": DatasetConfig(data, max_rows=4), "b": Evaluation(DatasetConfig(data), max_rows=9)}
    experiment = make_experiment("sft", task, steps=1, eval_dataset=sets)
    experiment.reward_function = None
    result = Trainer(compile_program(experiment, None, world_size=1), World(), quiet=True).run()
    last = result.metrics[-1]
    for name in ("a", "b"):
        assert last[f"eval/{name}/perplexity"] == pytest.approx(math.exp(last[f"eval/{name}/loss"]))
    assert last["eval/a/loss"] != last["eval/b/loss"]
    assert result.summary["eval_metric"] == "eval/a/loss"
