"""RewardCall: what reaches a reward function, what may come back, and what is said about anything else."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from realhf.data.batch import Batch, Packed
from realhf.data.loader import load_tokenizer
from realhf.errors import UserError
from realhf.rewards.scoring import RewardCall, reward_columns
from tests.runtime.tiny import CHARACTERS, write_task


@pytest.fixture(scope="module")
def context(tmp_path_factory):
    return SimpleNamespace(tokenizer=load_tokenizer(str(write_task(tmp_path_factory.mktemp("task")))), step=1)


def _batch(texts=(("1+1=", "2"), ("2+2=", "44"), ("9+0=", "9")), **columns):
    """Samples 10, 11, ... of (prompt, response), each response closed by <eos> (token 1)."""
    ids = {c: i for i, c in enumerate(CHARACTERS, start=2)}
    sequences = [torch.tensor([ids[c] for c in prompt + answer] + [1]) for prompt, answer in texts]
    masks = [torch.tensor([0.0] * len(p) + [1.0] * (len(a) + 1)) for p, a in texts]
    fields = {"sequence_ids": Packed.of(sequences), "response_mask": Packed.of(masks)}
    fields |= {"prompt": [prompt for prompt, _ in texts], **columns}
    return Batch([10 + i for i in range(len(texts))], fields)


def _call(function, batch, context):
    return RewardCall(function, reward_columns(function))(batch, context)


def test_arguments_are_what_trl_passes(context):
    seen = {}

    def reward(completions, answer, *, level, prompts, completion_ids, bonus=1.0, **kwargs):
        seen.update(locals())
        return [0.5, 1, 0]

    assert set(reward_columns(reward)) == {"answer", "level"}
    columns = _call(reward, _batch(answer=["2", "4", "9"], level=[1, 2, 3]), context)
    assert seen["prompts"] == ["1+1=", "2+2=", "9+0="] and seen["completions"] == ["2", "44", "9"]
    assert seen["answer"] == ["2", "4", "9"] and seen["level"] == [1, 2, 3] and seen["bonus"] == 1.0
    digit = {d: CHARACTERS.index(d) + 2 for d in "249"}
    assert seen["completion_ids"] == [[digit["2"], 1], [digit["4"], digit["4"], 1], [digit["9"], 1]]
    assert columns["score"].tolist() == [0.5, 1.0, 0.0] and columns["completion"] == ["2", "44", "9"]


class _Scorer:
    """A callable object, as some users write them."""

    def __call__(self, prompts, completions, completion_ids, answer):
        return [float(c == a) for c, a in zip(completions, answer, strict=True)]


def test_a_callable_object_is_a_reward_function(context):
    assert reward_columns(_Scorer()) == ("answer",)
    assert _call(_Scorer(), _batch(answer=["2", "4", "9"]), context)["score"].tolist() == [1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    "scores",
    [
        [True, False, True],
        [np.float32(1), np.int64(0), np.bool_(True)],
        np.array([1.0, 0.0, 1.0]),
        torch.tensor([1.0, 0.0, 1.0]),
        (1, 0, 1),
    ],
)
def test_any_kind_of_number_is_accepted(scores, context):
    result = _call(lambda prompts, completions, completion_ids: scores, _batch(), context)
    assert result["score"].tolist() == [1.0, 0.0, 1.0] and result["score"].is_floating_point()


def test_no_samples_do_not_reach_the_function(context):
    def reward(prompts, completions, completion_ids):
        raise AssertionError("called without samples")

    empty = _batch().select([])
    result = _call(reward, empty, context)
    assert result["completion"] == [] and len(result["score"]) == 0


@pytest.mark.parametrize(
    "scores, part",
    [
        ([1.0, float("nan"), 0.0], "nan for sample 11 with the prompt '2+2='"),
        ([1.0, 0.0, float("inf")], "inf for sample 12"),
        ([None, 1.0, 1.0], "None for sample 10"),
        ([1.0, "good", 1.0], "'good' for sample 11"),
        ([1.0, [1.0, 2.0], 1.0], "[1.0, 2.0] for sample 11"),
        ([1.0, 2.0], "2 values for 3 samples (10 to 12)"),
        (None, "NoneType for 3 samples"),
        (1.0, "float for 3 samples"),
    ],
)
def test_wrong_answers_name_function_and_sample(scores, part, context):
    def my_reward(prompts, completions, completion_ids):
        return scores

    with pytest.raises(UserError) as error:
        _call(my_reward, _batch(), context)
    text = str(error.value)
    assert text.startswith("reward function ") and f"my_reward returned {part}" in text and "\n" not in text
    assert text.endswith(("list with one number per completion", "must be a finite number"))


def test_a_raising_function_is_named_with_its_sample_and_line(context):
    def my_reward(prompts, completions, completion_ids):
        return [1.0 / (len(c) - 2) for c in completions]

    with pytest.raises(UserError) as error:
        _call(my_reward, _batch(), context)
    line = my_reward.__code__.co_firstlineno + 1
    for part in ("my_reward", "ZeroDivisionError", "sample 11 with the prompt '2+2='", f"{__file__}:{line}"):
        assert part in str(error.value)
    assert isinstance(error.value.__cause__, ZeroDivisionError)


def test_a_function_that_fails_on_several_samples_only_names_their_range(context):
    def my_reward(prompts, completions, completion_ids):
        if len(prompts) > 1:
            raise RuntimeError("too many")
        return [0.0]

    with pytest.raises(UserError, match="my_reward raised RuntimeError: too many .* on samples 10 to 12"):
        _call(my_reward, _batch(), context)
