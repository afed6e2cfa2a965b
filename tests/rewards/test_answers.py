"""Rewards that look at the text of an answer."""

import random
import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from realhf import ExactMatch, FormatReward, RegexMatch, RemoteJudge
from realhf.rewards import answers
from realhf.rewards.answers import text_of
from realhf.rewards.reward import reward_columns

CHAT = [{"role": "assistant", "content": "<answer>4</answer>"}]


def test_exact_match_compares_with_the_column():
    reward = ExactMatch()
    assert reward_columns(reward, ["other"]) == ("answer",)
    assert reward(completions=["4", " 4\n", "4.", "x"], answer=["4", "4", "4", None]) == [1.0, 1.0, 0.0, None]
    assert reward(completions=["4"], answer=[4]) == [1.0]
    assert ExactMatch(ignore_case=True)(completions=["Paris "], answer=["PARIS"]) == [1.0]
    assert ExactMatch("gold")(completions=["a"], gold=["a"], answer=["b"]) == [1.0]


def test_exact_match_extracts_the_last_answer():
    reward = ExactMatch(extract="<answer>(.*?)</answer>")
    texts = ["<answer>3</answer> no, <answer>4</answer>", "4", CHAT, "<answer>\n4\n</answer>"]
    assert reward(completions=texts, answer=["4"] * 4) == [1.0, 0.0, 1.0, 1.0]
    assert reward.answer_of(texts[0]) == "4" and reward.answer_of("4") is None
    assert ExactMatch(extract=r"\d+").answer_of("1 and 23") == "23"


def test_thinking_and_line_ends_do_not_count():
    assert ExactMatch()(completions=["<think>4?</think>\n5", "a\r\nb"], answer=["5", "a\nb"]) == [1.0, 1.0]
    reward = ExactMatch(extract="<answer>(.*?)</answer>")
    texts = ["<think><answer>3</answer></think><answer>4</answer>", "<think><answer>4</answer></think>none"]
    assert reward(completions=texts, answer=["4"] * 2) == [1.0, 0.0]
    assert RegexMatch("a\nb", whole=True)(completions=["a\r\nb"]) == [1.0]


def test_regex_match():
    assert RegexMatch(r"\d+")(completions=["a1", "a"]) == [1.0, 0.0]
    assert RegexMatch("a.*z", whole=True)(completions=["a\nz\n", "ba z"]) == [1.0, 0.0]
    assert RegexMatch(r"= (\d+)").answer_of("1 = 2, 2 = 3") == "3"
    assert RegexMatch("x")(completions=[CHAT]) == [0.0]


@pytest.mark.parametrize(
    ("text", "sound"),
    [
        ("<think>a</think><answer>b</answer>", True),
        (" <think>\na\n</think>\n\n<answer>b</answer>\n", True),
        ("<think></think><answer></answer>", True),
        ("<think>a</think> so <answer>b</answer>", False),
        ("<answer>b</answer><think>a</think>", False),
        ("<think>a</think><answer>b</answer><answer>c</answer>", False),
        ("<think>a<think>b</think></think><answer>b</answer>", False),
        ("<think>a<answer>b</think></answer>", False),
        ("<think>a</think><answer>b", False),
        ("b", False),
    ],
)
def test_format(text, sound):
    reward = FormatReward()
    assert reward(completions=[text]) == [float(sound)]
    if text.startswith("<think>"):
        assert FormatReward(opened=True)(completions=[text.removeprefix("<think>")]) == [float(sound)]


def test_format_has_an_answer_and_a_name():
    assert FormatReward().answer_of("<think>a</think><answer> b </answer>") == "b"
    assert FormatReward(("a",))(completions=["<a>1</a>"]) == [1.0]
    assert FormatReward().__name__ == "format" and FormatReward.__name__ == "FormatReward"


def test_text_of_messages():
    messages = [{"role": "assistant", "content": "a"}, {"role": "tool", "content": None}]
    parts = [{"role": "assistant", "content": [{"type": "text", "text": "b"}]}]
    assert text_of(parts) == "b" and text_of("a\r\nb") == "a\nb"
    assert text_of("x") == "x" and text_of(messages) == "a"


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: RegexMatch("("), r"RegexMatch.pattern is '\(': it must be a regular expression"),
        (lambda: ExactMatch(extract="["), "ExactMatch.extract is"),
        (lambda: ExactMatch(3), "ExactMatch.answer_key is 3: it must be text"),
        (lambda: FormatReward(("<think>",)), "FormatReward.tags is"),
        (lambda: FormatReward(()), "FormatReward.tags is"),
    ],
)
def test_wrong_settings(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()


def test_many_beginnings_of_an_answer_take_no_time():
    """A regular expression would look for an end behind each."""
    began = time.process_time()
    assert FormatReward().answer_of("<answer>" * 50_000) is None
    assert FormatReward().answer_of("<answer>" * 50_000 + "</answer>") == "<answer>" * 49_999
    assert time.process_time() - began < 1


def test_the_last_section_is_that_of_a_regular_expression():
    rng = random.Random(0)
    for _ in range(2000):
        text = "".join(rng.choice(["<answer>", "</answer>", " a", "b\n"]) for _ in range(rng.randrange(12)))
        found = re.findall("<answer>(.*?)</answer>", text, re.DOTALL)
        assert FormatReward().answer_of(text) == (found[-1].strip() if found else None), text


SLOW = "(?:a|aa)+$"
"""A pattern that takes a time that is exponential in the length of a text of many a and a b."""


@pytest.mark.parametrize("make", [
    lambda: RegexMatch(SLOW), lambda: RegexMatch(SLOW, whole=True), lambda: ExactMatch(extract=SLOW),
    lambda: RemoteJudge("http://localhost", pattern=f"({SLOW})")])
def test_patterns_that_take_exponential_time(make, monkeypatch):
    """The limit is one for each text, and holds in threads, too."""
    monkeypatch.setattr(answers, "PATTERN_SECONDS", 0.1)
    reward = make()
    text = "a" * 60 + "b"

    def call():
        return reward.score_in(text) if isinstance(reward, RemoteJudge) else reward([text], answer=["a"])

    says = rf"{type(reward).__name__}\.\w+ has taken more than 0.1 s for a text of 61 characters"
    for run in (call, lambda: ThreadPoolExecutor(1).submit(call).result()):
        with pytest.raises(TimeoutError, match=says):
            run()
