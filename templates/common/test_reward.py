"""Tests of the reward function, to run before every training: `pytest test_reward.py`."""

import json
from pathlib import Path

from reward import right_answer

ROWS = Path(__file__).parent / "train.jsonl"


def rewards(*completions, answer):
    return right_answer(["1,3="] * len(completions), list(completions), [answer] * len(completions))


def test_the_right_answer_has_the_highest_reward():
    assert rewards("3", " 3\n", "4", "", answer="3") == [1.0, 1.0, 0.0, 0.0]


def test_an_answer_that_goes_on_has_less():
    assert rewards("33", "3,", "13", answer="3") == [0.5, 0.5, 0.0]


def test_answers_in_chats_count_like_text():
    chat = [{"role": "assistant", "content": "3"}]
    assert rewards(chat, answer="3") == [1.0]


def test_every_row_has_an_answer_with_the_highest_reward():
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    answers = [str(row["answer"]) for row in rows]
    assert right_answer([row["prompt"] for row in rows], answers, answers) == [1.0] * len(rows)
