"""The task of examples/real_model.py: word problems of one step, as rows of chat messages, and two rewards.

A problem adds a number or takes one away: "Mia has 11 shells and finds 3 more. How many shells does Mia have
now?" No question appears twice. Every chat begins with a worked example, which shows the form of an answer.
"""

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

NUM_TRAIN = 4000
NUM_HELD_OUT = 100
LARGEST = 12
MOST_WORDS = 15
_BEGINNING = (
    {"role": "system", "content": "Answer in one short line."},
    {"role": "user", "content": "Kim has 14 cards and finds 3 more. How many cards does Kim have now?"},
    {"role": "assistant", "content": "14 + 3 = 17 cards."},
)
_NAMES = ("Ada", "Ben", "Carl", "Eva", "Finn", "Hugo", "Ida", "Leo", "Mia", "Nora", "Rosa", "Tom")
_THINGS = ("apples", "books", "coins", "marbles", "nuts", "pens", "plums", "shells", "stamps", "stones")
_GAINS = ("finds {} more", "buys {} more", "gets {} more")
_LOSSES = ("loses {}", "sells {}", "gives away {}")
_NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?")
_SHORT_LINE = re.compile(r"[^\n]*\d(?: \w+)?\.?")


def problems(seed: int) -> Iterator[dict[str, object]]:
    """Yield rows without end: `prompt`, a list of messages, and `answer`."""
    rng = random.Random(seed)
    seen: set[str] = set()
    while True:
        question, answer = _problem(rng)
        if question not in seen:
            seen.add(question)
            yield {"prompt": [*_BEGINNING, {"role": "user", "content": question}], "answer": str(answer)}


def _problem(rng: random.Random) -> tuple[str, int]:
    """Return a question about numbers from 2 to LARGEST, and its answer, which is not negative."""
    name = rng.choice(_NAMES)
    thing = rng.choice(_THINGS)
    first = rng.randint(2, LARGEST)
    second = rng.randint(2, LARGEST)
    if rng.random() < 0.5:
        event = rng.choice(_GAINS)
        answer = first + second
    else:
        first, second = max(first, second), min(first, second)
        event = rng.choice(_LOSSES)
        answer = first - second
    told = f"{name} has {first} {thing} and {event.format(second)}."
    return f"{told} How many {thing} does {name} have now?", answer


def write_rows(directory: Path, *, seed: int = 0) -> None:
    """Write train.jsonl and held_out.jsonl, which have no question in common."""
    rows = problems(seed)
    directory.mkdir(parents=True)
    for name, count in (("held_out", NUM_HELD_OUT), ("train", NUM_TRAIN)):
        lines = [json.dumps(next(rows)) + "\n" for _ in range(count)]
        (directory / f"{name}.jsonl").write_text("".join(lines))


def right(completions: list, answer: list[str], **_: object) -> list[float]:
    """Return 1 for each completion whose last number is the answer, else 0."""
    texts = _texts(completions)
    return [float(_last_number(text) == float(number)) for text, number in zip(texts, answer, strict=True)]


def brief(completions: list, **_: object) -> list[float]:
    """Return 1 for each completion that is one short line with a number at its end, else 0.

    One word (the things that are counted) and a full stop may follow the number.
    """
    texts = [text.strip() for text in _texts(completions)]
    return [
        float(len(text.split()) <= MOST_WORDS and _SHORT_LINE.fullmatch(text) is not None) for text in texts
    ]


REWARDS = {right: 1.0, brief: 0.2}
"""Each reward function with its weight in the score."""


def _last_number(text: str) -> float | None:
    """Return the last number of a text; None if it has none."""
    numbers = _NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None


def _texts(completions: list) -> list[str]:
    """Return the text of each completion, which is a list with one message."""
    return [messages[0]["content"] for messages in completions]
