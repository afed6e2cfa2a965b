"""MathAnswer against the library math-verify, and its limits."""

from contextlib import suppress

import math_verify
import pytest

from realhf import MathAnswer
from realhf.rewards.reward import reward_columns
from realhf.signals import time_limit
from tests.samples import marked

PAIRS = [
    ("72", "#### 72"), ("72", r"so \boxed{72}."), ("72", "it is 73"), (r"$\frac{1}{2}$", r"\boxed{0.5}"),
    (r"\frac{1}{2}", "$1/2$"), ("0.5", r"\boxed{\frac12}"), (r"\boxed{x^2+1}", r"\boxed{1+x^2}"),
    (r"\boxed{x^2+1}", r"\boxed{2+x^2}"), ("1,234", "1234"), ("5", "no idea"), ("-3", "$-3$"), ("50%", "0.5"),
]


@pytest.fixture(scope="module")
def reward():
    return MathAnswer(processes=1)


def test_scores_are_those_of_the_library(reward):
    golds, texts = zip(*PAIRS, strict=True)
    expected = [float(math_verify.verify(math_verify.parse(gold), math_verify.parse(text)))
                for gold, text in PAIRS]
    assert set(expected) == {0.0, 1.0}
    assert reward(completions=list(texts), answer=list(golds)) == expected


def test_forms_of_the_right_answer(reward):
    golds = ["5 + 5 = 10, so\n#### 72", 72, "(1, 2)", "none of these", None, ""]
    texts = ["72", r"\boxed{72}", "$(1,2)$", "7", "7", "7"]
    assert reward(completions=texts, answer=golds) == [1.0, 1.0, 1.0, None, None, None]
    strict = MathAnswer("gold", unparsed_gold=0.0, anchored=True, processes=1)
    assert reward_columns(strict) == ("gold",)
    texts = ["72", "$72$", "the answer is $72$", r"\boxed{72}", "7"]
    assert strict(completions=texts, gold=["72"] * 4 + [""]) == [0.0, 0.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize("text", [
    r"\boxed{1234.}", r"\boxed {1234}", r"\fbox{1234}", "\\boxed{\r\n1234\r\n}", r"\boxed{1\,234}",
    r"\boxed{1{,}234}", r"\boxed{1,234}", "<answer>1234</answer>", r"\boxed{~1234~}",
    r"\boxed{\text{1234}}", r"\boxed{\boxed{1234}}", r"<think>maybe \boxed{5}</think>The answer is 1234.",
    r"\boxed{5}? No: \boxed{1234}", "1,234.\r\n",
])
def test_ordinary_forms_of_a_right_answer(reward, text):
    assert reward(completions=[text], answer=["1234"]) == [1.0]
    assert reward(completions=[text], answer=["1235"]) == [0.0]


def test_several_boxed_answers_are_right_together_or_by_the_last(reward):
    texts = [r"\boxed{1} and \boxed{2}", r"\boxed{2}, then \boxed{1}", r"\boxed{3} and \boxed{1}"]
    assert reward(completions=texts, answer=[r"$\{1, 2\}$"] * 3) == [1.0, 1.0, 0.0]
    assert reward(completions=texts, answer=["1"] * 3) == [0.0, 1.0, 1.0]


def test_equal_answers_have_one_form(reward):
    forms = {reward.answer_of(text) for text in (r"\boxed{\frac{1}{2}}", "0.5", "so it is $1/2$")}
    assert forms == {"1/2"}
    assert reward.answer_of("nothing") is None and reward.answer_of("#### 72") == "72"


@pytest.mark.slow
def test_an_answer_that_takes_too_long_is_wrong():
    reward = MathAnswer(timeout_seconds=1.0, processes=2)
    metrics = {}
    texts = [r"$9^{9^{9^{9}}}$", "5", "5", "5"]
    scores = reward(completions=texts, answer=["5"] * 4, log_metric=metrics.__setitem__)
    assert scores == [0.0, 1.0, 1.0, 1.0] and metrics == {"math_answer/timeout": 0.25}
    assert reward(completions=["5"], answer=["5"]) == [1.0]  # The process was started again.


def test_chats(reward):
    assert reward(completions=[[{"role": "assistant", "content": "72"}]], answer=["72"]) == [1.0]


def test_wrong_settings():
    with pytest.raises(ValueError, match="MathAnswer.processes is 0"):
        MathAnswer(processes=0)


@pytest.mark.parametrize("seconds", marked([0.0, 0.3, 0.6], quick=[1]))
@pytest.mark.slow
def test_an_interrupted_comparison_answers_no_later_question(seconds):
    """The first text takes all of its time; the interrupt comes at the start, or over the work."""
    reward = MathAnswer(processes=1, timeout_seconds=2.0)
    if seconds < 0.5:
        reward(completions=["5"], answer=["5"])  # Else the interrupt comes while the process starts.

    with suppress(TimeoutError), time_limit(max(seconds, 1e-4), TimeoutError):
        reward(completions=[r"$9^{9^{9^{9}}}$"], answer=["5"])
    texts = ["2", "1", "2"]
    assert [reward(completions=[text], answer=["2"]) for text in texts] == [[1.0], [0.0], [1.0]]
