"""Reward models beside reward functions: weighted sums, steps of responses, replies of a judge, and runs."""

import math
from types import SimpleNamespace

import pytest
import torch

from realhf import (
    GRPO,
    PPO,
    DatasetConfig,
    Evaluation,
    GenerativeReward,
    ModelReward,
    ProcessReward,
    ReMax,
    Reward,
    RewardLimits,
    SamplingConfig,
)
from realhf.algorithms.reward_models import JoinedRewards, JudgePrompts, ReadScores, StepScores
from realhf.data.batch import Batch, Packed
from realhf.distributed.world import World
from realhf.errors import UserError
from realhf.runtime.compile.program import compile_program
from realhf.runtime.doubts.sampling import equal_samples
from realhf.runtime.trainer import Trainer
from tests.runtime.tiny import common, role, some_reward, write_task

WORDS = ["a", "b", "\n", "\n\n", "c\n", "0", "7"]
"""Tokens by id."""
TOKENIZER = SimpleNamespace(
    decode=lambda ids, **_: "".join(WORDS[i] for i in ids),
    encode=lambda text, **_: [WORDS.index(letter) for letter in text])


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return write_task(tmp_path_factory.mktemp("task"))


def _batch(responses, prompt=(0,)):
    sequences = [torch.tensor([*prompt, *ids]) for ids in responses]
    masks = [torch.tensor([0.0] * len(prompt) + [1.0] * len(ids)) for ids in responses]
    fields = {"sequence_ids": Packed.of(sequences), "response_mask": Packed.of(masks),
              "prompt": ["a"] * len(responses)}
    return Batch(list(range(len(responses))), fields)


@pytest.mark.parametrize("reduce", ["min", "mean", "last", "product"])
def test_steps_end_with_their_text_and_with_the_response(reduce):
    """A step's value is the probability after the token that completes its end."""
    responses = [[0, 3, 1], [0, 4, 2, 1, 3], [1]]
    ends = [[1, 2], [2, 4], [0]]  # Places of tokens; "c\n" and "\n" together end a step.
    batch = _batch(responses)
    lengths = [len(ids) + 2 for ids in responses]
    values = Packed(torch.randn(sum(lengths), generator=torch.Generator().manual_seed(0)).double(), lengths)
    batch.fields["values"] = values
    function = StepScores("values", "score", "\n\n", reduce)
    found = function(batch, SimpleNamespace(tokenizer=TOKENIZER))["score"]
    for i, (score, of_steps) in enumerate(zip(found.tolist(), ends, strict=True)):
        # A response begins after one token of the prompt, and the value after token t is at t + 1.
        steps = [1 / (1 + math.exp(-float(values.split()[i][1 + end + 1]))) for end in of_steps]
        expected = {"min": min(steps), "mean": sum(steps) / len(steps), "last": steps[-1],
                    "product": math.prod(steps)}
        assert score == pytest.approx(expected[reduce], rel=1e-12)


def test_weighted_sums_of_functions_and_models(task):
    def length(completions):
        return [float(len(text)) for text in completions]

    score = role(task, head="score", trainable=False)
    models = (ModelReward(score, weight=0.5, name="helpful"), ModelReward(score, weight=-2.0, name="toxic"))
    batch = _batch([[0, 1], [0, 1, 1]])
    batch.fields |= {"reward_helpful_score": torch.tensor([1.0, 3.0]),
                     "reward_toxic_score": torch.tensor([0.25, math.nan])}
    drop = RewardLimits(on_failure="drop")
    context = SimpleNamespace(tokenizer=TOKENIZER, step=1)
    call = JoinedRewards([Reward(length, weight=0.1)], models, (), drop)
    columns = call(batch, context)
    assert columns["score"][0].item() == pytest.approx(0.1 * 2 + 0.5 * 1.0 - 2.0 * 0.25)
    assert columns["score"][1].isnan()
    assert columns["reward_scores"] == [
        {"length": 2.0, "helpful": 1.0, "toxic": 0.25}, {"length": 3.0, "helpful": 3.0, "toxic": None}]
    alone = JoinedRewards(None, models, (), drop)(batch, context)
    assert alone["score"][0].item() == pytest.approx(0.5 - 0.5)
    with pytest.raises(UserError, match="model toxic gave no score for 1 of 2 samples, first for sample 1"):
        JoinedRewards(None, models, (), RewardLimits())(batch, context)
    with pytest.raises(UserError, match="2 reward functions are named 'length'"):
        JoinedRewards([length], (ModelReward(score, name="length"),), (), drop)


def test_questions_and_replies_of_a_judge(task):
    judge = GenerativeReward(
        role(task, trainable=False), prompt="{prompt}b{completion}{level}", columns=("level",), scale=7.0)
    batch = _batch([[0, 1], [6]])
    batch.fields["level"] = ["0", "7"]
    asked = JudgePrompts(judge, "asked")(batch, SimpleNamespace(tokenizer=TOKENIZER))["asked"]
    assert [TOKENIZER.decode(ids.tolist()) for ids in asked.split()] == ["abab0", "ab77"]
    replies = _batch([[6], [0, 1], [5]])
    columns, metrics = ReadScores(judge, ("sequence_ids", "response_mask"))(
        replies, SimpleNamespace(tokenizer=TOKENIZER))
    found = columns["reward_judge_score"].tolist()
    assert found[0] == 1.0 and math.isnan(found[1]) and found[2] == 0.0
    assert metrics == {"reward/judge/failed": pytest.approx(1 / 3)}
    assert judge.score_in("I think so.\nScore: 3.5") == pytest.approx(0.5)
    assert math.isnan(judge.score_in("Score: 8")) and math.isnan(judge.score_in("Score: 3/10"))


def _experiment(task, **changes):
    score = role(task, head="score", trainable=False)
    models = (
        ModelReward(score, weight=0.5, probability=True),
        ProcessReward(score, step_end="never", reduce="last"),
        GenerativeReward(
            role(task, trainable=False), prompt="{prompt}{completion}=", pattern=r"(\d)", scale=9.0,
            sampling=SamplingConfig(max_new_tokens=5, temperature=0.0)))
    settings = common(task) | {
        "actor": role(task), "reward_function": [Reward(some_reward, weight=0.3)], "reward_models": models,
        "group_size": 4, "steps": 2, "reward_limits": RewardLimits(on_failure="drop")}
    return GRPO(**settings | changes)


def test_a_run_with_all_kinds(task):
    """A process reward model without ends of steps gives what the outcome model does, by another way."""
    program = compile_program(_experiment(task), None, world_size=1)
    assert set(program.roles) == {"actor", "reward_model", "reward_process", "reward_judge"}
    assert not list(equal_samples(program))  # The judge may be greedy.
    metrics = Trainer(program, World(), quiet=True).run().metrics
    for step in metrics:
        assert step["reward/process/mean"] == pytest.approx(step["reward/model/mean"], rel=1e-9)
        assert step["reward/process/std"] == pytest.approx(step["reward/model/std"], rel=1e-6) and step[
            "reward/process/std"] > 0
        assert 0 <= step["reward/judge/mean"] <= 1
        if not step.get("reward/judge/failed"):
            weights = {"some_reward": 0.3, "model": 0.5, "process": 1.0, "judge": 1.0}
            total = sum(weight * step[f"reward/{name}/mean"] for name, weight in weights.items())
            assert step["reward/mean"] == pytest.approx(total, rel=1e-9)
    assert metrics[-1]["eval/score"] > 0 and metrics[0]["actor/grad_norm"] > 0


def test_what_is_refused(task):
    score = role(task, head="score", trainable=False)

    def refused(sentence, kind=GRPO, **changes):
        settings = {"actor": role(task), "reward_function": some_reward,
                    "reward_models": (ModelReward(score),)}
        experiment = kind(**settings | changes)
        with pytest.raises(ValueError, match=sentence):
            (experiment.roles(), experiment.graph())

    refused("reward_models are given, and do not work beside a reward role, which can be one", reward=score)
    refused("reward_models.name is 'model': it must differ, and 2 reward models are named so",
            reward_models=(ModelReward(score), ModelReward(score)))
    refused("max_lag is 1: it must be 0 with the generative reward model", max_lag=1,
            reward_models=(GenerativeReward(role(task, trainable=False)),))
    refused("reward_models is model: it must be empty with a greedy baseline", kind=ReMax)
    for make, sentence in (
        (lambda: ModelReward(role(task, trainable=False)), "it must have head score for a ModelReward"),
        (lambda: ModelReward(role(task, head="score")), "it must be frozen: set its optimizer to None"),
        (lambda: ModelReward(score, name="my model"), "ModelReward.name is 'my model': it must have letters"),
        (lambda: GenerativeReward(role(task, trainable=False), prompt="?"), "have the field {completion}"),
        (lambda: ProcessReward(score, reduce="sum"), "ProcessReward.reduce is 'sum': it must be"),
    ):
        with pytest.raises(ValueError, match=sentence):
            make()


def test_models_alone_and_with_ppo(task):
    score = role(task, head="score", trainable=False)
    models = (ModelReward(score, name="one"), ModelReward(score, name="two", weight=0.1))
    experiment = PPO(actor=role(task), critic=role(task, head="score"), reward_models=models)
    names = [call.name for call in experiment.graph().order]
    assert {"reward_one_forward", "reward_two_forward", "reward_forward", "critic_train"} <= set(names)
    held_out = Evaluation(DatasetConfig(str(task / "held_out.jsonl")), function=some_reward)
    evaluated = GRPO(actor=role(task), reward_models=models, eval_dataset=held_out)
    assert "reward_one_forward" not in [call.name for call in evaluated.eval_graph().calls]
