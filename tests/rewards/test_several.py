"""Several rewards: weights, names, scores by name, metrics, and the same results under every plan."""

import json
import math
import time
from statistics import fmean, pstdev
from types import SimpleNamespace

import pytest
import torch

from realhf import GRPO, Reward, RewardLimits, Role
from realhf.algorithms.responses import rollout_metrics
from realhf.data.batch import Batch, Packed
from realhf.data.dataset import DatasetConfig
from realhf.distributed.world import World
from realhf.errors import UserError
from realhf.execution_plan import ExecutionPlan
from realhf.rewards.reward import answers_by, reward_columns, rewards_of
from realhf.rewards.scoring import RewardCall, SamplesToScore
from realhf.runtime.compile.program import compile_program
from realhf.runtime.trainer import Trainer
from tests.cli_tools import read_jsonl
from tests.runtime.tiny import make_experiment, write_task
from tests.samples import marked

TEXTS = ["a", "bb", "ccc", "dddd"]


def length(completions, **kwargs):
    return [float(len(text)) for text in completions]


def even(completions):
    """Apply to texts of even length only."""
    return [1.0 if len(text) == 2 else 0.0 if len(text) == 4 else None for text in completions]


async def graded(completions, level=None):
    return [0.5] * len(completions)


def _scored(given, limits=None, texts=TEXTS, **columns):
    call = RewardCall(given, reward_columns(given), limits)
    ids = list(range(len(texts)))
    prompts = [f"prompt {text}" for text in texts]
    return call.scored(SamplesToScore(ids, prompts, list(texts), [[1]] * len(texts), columns))


def test_the_score_is_the_weighted_sum_of_the_rewards_that_apply():
    found = _scored([length, Reward(even, weight=10.0, name="pairs"), Reward(graded, weight=-2.0)])
    assert found.totals == [1 - 1.0, 2 + 10 - 1.0, 3 - 1.0, 4 + 0 - 1.0]
    assert found.by_name == [
        {"length": 1.0, "pairs": None, "graded": 0.5}, {"length": 2.0, "pairs": 1.0, "graded": 0.5},
        {"length": 3.0, "pairs": None, "graded": 0.5}, {"length": 4.0, "pairs": 0.0, "graded": 0.5},
    ]


def test_one_function_is_a_list_of_one():
    alone = _scored(length)
    assert alone == _scored([length]) == _scored((Reward(length),))
    assert alone.by_name[3] == {"length": 4.0}


def test_a_warning_if_no_reward_applies(capsys):
    found = _scored([even, Reward(even, name="again")])
    assert found.totals == [0.0, 2.0, 0.0, 0.0] and found.by_name[0] == {"even": None, "again": None}
    assert "all reward functions returned None for 2 of 4 samples (sample 0 first)" in capsys.readouterr().err


def test_a_sample_on_which_one_reward_fails_is_dropped(capsys):
    def shaky(completions):
        return [math.nan if text == "bb" else 1.0 for text in completions]

    found = _scored([length, shaky], RewardLimits(on_failure="drop"))
    assert math.isnan(found.totals[1]) and [found.totals[i] for i in (0, 2, 3)] == [2.0, 4.0, 5.0]
    assert found.by_name[1] == {"length": 2.0, "shaky": None}
    assert "shaky failed on 1 of 4 samples (sample 1 first): it returned nan" in capsys.readouterr().err


@pytest.mark.parametrize("failure", ["raises", "hangs", "nan"])
@pytest.mark.parametrize("concurrency", marked([None, 4], quick=[1]))
def test_a_side_reward_that_fails_may_be_skipped(failure, concurrency, capsys):
    def side(completions, log_metric):
        log_metric("calls", 1.0)
        if "bb" in completions and failure == "raises":
            raise KeyError("bb")
        if "bb" in completions and failure == "hangs":
            time.sleep(1)
        return [math.nan if text == "bb" else None if text == "a" else 10.0 for text in completions]

    reward = Reward(side, weight=0.1, on_failure="skip", concurrency=concurrency,
                    timeout_seconds=0.3 if failure == "hangs" else None)
    for limits in (RewardLimits(), RewardLimits(on_failure="drop")):
        found = _scored([length, reward], limits)
        assert found.totals == [1.0, 2.0, 4.0, 5.0]
        assert [row["side"] for row in found.by_name] == [None, None, 10.0, 10.0]
        assert [row["reward/side/failed"] for row in found.metrics] == [0.0, 1.0, 0.0, 0.0]
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and "side failed on 1 of 4 samples (sample 1 first): " in said
        assert said.endswith("; it counts as None for them, and reward/side/failed is their share\n")


def test_a_sample_without_any_reward_but_a_skipped_one_is_dropped(capsys):
    def side(completions):
        return [math.nan if text in ("a", "bb") else 1.0 for text in completions]

    found = _scored([even, Reward(side, on_failure="skip")])
    assert math.isnan(found.totals[0]) and found.totals[1:] == [1.0, 1.0, 1.0]
    assert "returned None" not in capsys.readouterr().err  # `even` alone says nothing of "a".
    with pytest.raises(UserError, match="side returned nan for sample 0"):
        _scored([even, Reward(side, on_failure="stop")], RewardLimits(on_failure="drop"))
    assert math.isnan(_scored([length, Reward(side, on_failure="drop")]).totals[1])


def test_the_share_of_skipped_failures_is_logged(tmp_path):
    def side(completions, completion_ids):
        if any(sum(ids) % 3 == 0 for ids in completion_ids):
            raise ValueError("no multiples of three")
        return [5.0] * len(completions)

    experiment = make_experiment("grpo", write_task(tmp_path), steps=2)
    experiment.reward_function = [length, Reward(side, weight=0.0, on_failure="skip")]
    out = tmp_path / "run"
    Trainer(compile_program(experiment, None, world_size=1), World(), out=out, quiet=True).run()
    steps = [step for step in read_jsonl(out / "metrics.jsonl") if "reward/mean" in step]
    assert len(steps) == 2 and all("reward/failed" not in step for step in steps)
    assert all(0 < step["reward/side/failed"] < 1 and step["reward/side/mean"] == 5.0 for step in steps)
    assert all(step["reward/mean"] == step["reward/length/mean"] for step in steps)


def test_the_first_function_that_fails_is_named():
    def first(completions):
        raise KeyError("one")

    def second(completions):
        raise KeyError("two")

    with pytest.raises(UserError, match="first raised KeyError: 'one'"):
        _scored([length, Reward(first, concurrency=2), second])


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ([], "reward_function is empty: give at least one function"),
        ([length, length], "2 reward functions are named 'length': give them names by Reward"),
        ([Reward(even, name="length"), length], "2 reward functions are named 'length'"),
        (Reward(length, name="mean"), "a reward function is named 'mean': metrics reward/mean are those of"),
        (Reward(length, name="kl"), "a reward function is named 'kl': metrics reward/kl are those of"),
        ([length, 3], "reward_function is 3: it must be a function"),
        ("length", "reward_function is 'length': it must be a function"),
    ],
)
def test_wrong_lists(given, sentence):
    with pytest.raises(UserError, match=sentence):
        rewards_of(given)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"weight": math.inf}, "Reward.weight is inf: it must be a finite number"),
        ({"weight": "2"}, "Reward.weight is '2': it must be a number"),
        ({"concurrency": 0}, "Reward.concurrency is 0: it must be at least 1, or None"),
        ({"timeout_seconds": 0.0}, "Reward.timeout_seconds is 0.0: it must be above 0"),
        ({"on_failure": "ignore"}, "Reward.on_failure"),
        ({"function": Reward(length)}, "Reward.function is a Reward"),
    ],
)
def test_wrong_rewards(fields, sentence):
    with pytest.raises(ValueError, match=sentence):
        Reward(**{"function": length, **fields})


def test_columns_are_those_of_all_functions():
    def one(completions, answer, **columns):
        return [float(a == "x") + ("level" in columns) for a in answer]

    def two(completions, level):
        return [float(x) for x in level]

    assert reward_columns([one, two]) == ("answer", "level")
    assert reward_columns([two, one], ["hint", "answer"]) == ("level", "answer", "hint")
    found = _scored([one, two], answer=["x", "", "", ""], level=[1, 2, 3, 4])
    assert [row["one"] for row in found.by_name] == [2.0, 1.0, 1.0, 1.0]  # `one` is given `level`, too.
    assert [row["two"] for row in found.by_name] == [1.0, 2.0, 3.0, 4.0]


def test_an_object_may_say_which_columns_it_reads_and_what_an_answer_is():
    class Judge:
        column_names = ("gold",)
        __name__ = "judge"

        def __call__(self, completions, **columns):
            assert columns.keys() - {"prompts", "completion_ids"} == {"gold"}
            return [float(c == g) for c, g in zip(completions, columns["gold"], strict=True)]

        def answer_of(self, completion):
            return completion[:1]

    assert reward_columns([length, Judge()], ["other"]) == ("other", "gold")
    assert _scored(Judge(), gold=["a", "", "ccc", ""]).by_name[2] == {"judge": 1.0}
    assert answers_by([length, Reward(Judge(), name="mine")])("bb") == "b" and answers_by(length) is None


def _batch(score, **columns):
    count = len(score)
    mask = Packed(torch.tensor([0.0, 1, 1]).repeat(count), [3] * count)
    fields = {"score": torch.tensor(score), "response_mask": mask, "finished": torch.ones(count), **columns}
    return Batch(list(range(count)), fields)


def test_metrics_are_means_over_the_samples_to_which_a_reward_applies():
    rows = [{"a": 1.0, "b": None}, {"a": 2.0, "b": 7.0}, {"a": 4.0, "b": None}]
    metrics = rollout_metrics(_batch([1.0, 2.0, 3.0], reward_scores=rows))
    assert metrics["reward/a/mean"] == fmean([1, 2, 4]) and metrics["reward/a/std"] == pstdev([1, 2, 4])
    assert metrics["reward/b/mean"] == 7.0 and metrics["reward/b/std"] == 0.0
    assert metrics["reward/mean"] == 2.0
    none = rollout_metrics(_batch([0.0], reward_scores=[{"a": None}]))
    assert "reward/a/mean" not in none


def test_functions_may_log(tmp_path):
    """`log_metric` is averaged over samples, and `log_extra` adds columns; functions that ask get them."""

    def told(completions, log_metric, log_extra, trainer_state, **columns):
        assert columns.keys() == {"prompts", "completion_ids"}
        log_metric("told/longest", max(len(text) for text in completions))
        log_extra("first", [text[0] for text in completions])
        return [float(trainer_state.global_step)] * len(completions)

    rewards = [length, Reward(told, concurrency=2)]
    call = RewardCall(rewards, reward_columns(rewards))
    assert call.outputs == ("score", "completion", "reward_scores", "reward_metrics", "reward_extra")
    assert RewardCall(length, ()).outputs == ("score", "completion", "reward_scores")
    found = call.scored(SamplesToScore([0, 1], ["p", "q"], ["a", "bb"], [[1], [1]], {}, step=7))
    assert found.metrics == [{"told/longest": 1.0}, {"told/longest": 2.0}]
    assert found.extra == [{"first": "a"}, {"first": "b"}] and found.totals == [8.0, 9.0]
    metrics = rollout_metrics(_batch(found.totals, reward_metrics=found.metrics))
    assert metrics["told/longest"] == 1.5


def test_log_extra_needs_a_value_for_each_sample():
    def told(completions, log_extra):
        log_extra("first", [1])
        return [0.0] * len(completions)

    with pytest.raises(UserError, match=r"told passed 1 values to log_extra\('first'\) for 4 samples"):
        _scored(told)


def test_evaluations_read_the_columns_of_their_own_dataset(tmp_path):
    rows = {"train": {"prompt": "1", "answer": "2"}, "held_out": {"prompt": "1", "level": 3}}
    for name, row in rows.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    experiment = GRPO(
        actor=Role("actor"), reward_function=[length, even], eval_function=[Reward(graded, name="judge")],
        dataset=DatasetConfig(str(tmp_path / "train.jsonl")),
        eval_dataset=DatasetConfig(str(tmp_path / "held_out.jsonl")))
    assert experiment.eval_graph()["reward_forward"].inputs == (
        "prompt", "sequence_ids", "response_mask", "level")
    assert experiment.graph()["reward_forward"].inputs == (
        "prompt", "sequence_ids", "response_mask", "answer")


def odd_only(completions, completion_ids, **columns):
    """Apply to answers whose tokens sum to an odd number, and differ between samples."""
    sums = [sum(ids) for ids in completion_ids]
    return [total % 5 / 5 if total % 2 else None for total in sums]


async def noted(completions, completion_ids, answer, log_metric):
    log_metric("noted/length", sum(len(ids) for ids in completion_ids) / len(completion_ids))
    return [float(sum(ids) % 3) for ids in completion_ids]


def run_several(world, layouts, directory):
    rewards = [
        Reward(odd_only, weight=0.5), Reward(noted, name="async"),
        Reward(odd_only, weight=-0.25, name="pooled", concurrency=3),
    ]
    experiment = make_experiment("grpo", directory, steps=2)
    experiment.reward_function = rewards
    calls = {call: {"layout": layout, "micro_batch_tokens": 40} for call, layout in layouts.items()}
    program = compile_program(experiment, ExecutionPlan.from_dict({"calls": calls}), world_size=4)
    result = Trainer(program, world, quiet=True).run()
    return (result.metrics, result.summary["eval_last"]) if world.rank == 0 else None


CALLS = ("actor_generate", "ref_forward", "actor_train")
NAMES = ("reward/odd_only/mean", "reward/odd_only/std", "reward/async/mean", "reward/pooled/mean",
         "noted/length", "reward/mean", "actor/grad_norm")


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return write_task(tmp_path_factory.mktemp("task"))


@pytest.fixture(scope="module")
def reference(pool, task):
    return pool.run(run_several, dict.fromkeys(CALLS, "d1@0"), task)[0]


@pytest.mark.parametrize("layout", marked(["d2@0-1", "t2@0-1", "p2@0-1"], quick=[0]))
@pytest.mark.slow
def test_a_plan_does_not_change_the_rewards(pool, task, reference, layout):
    layouts = dict.fromkeys(CALLS, layout)
    if layout == "d2@0-1":
        layouts["reward_forward"] = "d4@0-3"
    metrics, score = pool.run(run_several, layouts, task)[0]
    assert score == pytest.approx(reference[1], rel=1e-12)
    for ours, expected in zip(metrics, reference[0], strict=True):
        assert {name: ours[name] for name in NAMES} == pytest.approx(
            {name: expected[name] for name in NAMES}, rel=1e-9)
        assert ours["reward/odd_only/mean"] == ours["reward/pooled/mean"] != ours["reward/async/mean"]


def test_the_context_of_the_run_gives_the_step():
    """`trainer_state` has the step of the run, also for calls with all samples."""
    seen = []

    def asks(completions, trainer_state):
        seen.append(trainer_state.global_step)
        return [0.0] * len(completions)

    batch = Batch([0], {
        "sequence_ids": Packed.of([torch.tensor([1, 2])]), "prompt": ["p"],
        "response_mask": Packed.of([torch.tensor([0.0, 1.0])])})
    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: "x")
    columns = RewardCall(asks, ())(batch, SimpleNamespace(tokenizer=tokenizer, step=5))
    assert seen == [5] and columns["reward_scores"] == [{"asks": 0.0}]
