"""Rewards that look at the text of an answer: ExactMatch, RegexMatch and FormatReward."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import regex

from realhf.user_input.field_types import check_types, require

THINKING_ENDS = "</think>"
NEARLY_ONE = 1 - 1e-9
"""Rewards with shares, such as of tests that pass, say by `correct_above` that no share but 1 is right."""
PATTERN_SECONDS = 5.0
"""Longest time of a user's regular expression for one text."""


def text_of(completion: Any) -> str:
    """Return the text of a completion, which may be a list of chat messages. Its lines end in "\\n" alone."""
    if isinstance(completion, str):
        return completion.replace("\r\n", "\n")
    return "".join(_content(message) for message in completion).replace("\r\n", "\n")


def _content(message: Mapping[str, Any]) -> str:
    """Return the text of a message, whose content may be a list of parts."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text") or "") for part in content)


def after_thinking(text: str) -> str:
    """Return what follows the last `</think>` of a text: thinking is no part of the answer."""
    return text.rpartition(THINKING_ENDS)[2]


class UserPattern:
    """A regular expression that a user has written, with a limit of time for each text.

    A dot matches line ends. The time for a text that does not match may be exponential in its length.
    """

    def __init__(self, pattern: str, name: str) -> None:
        """Compile the pattern of a field. Raises ValueError if it is none."""
        self._name = name
        try:
            self._pattern = regex.compile(pattern, regex.DOTALL)
        except regex.error as error:
            raise ValueError(f"{name} is {pattern!r}: it must be a regular expression ({error})") from error

    @property
    def num_groups(self) -> int:
        return int(self._pattern.groups)

    def is_in(self, text: str, *, whole: bool = False) -> bool:
        """Return whether the pattern matches somewhere in a text, or with `whole` all of it."""
        find = self._pattern.fullmatch if whole else self._pattern.search
        with self._explained(text):
            return find(text, timeout=PATTERN_SECONDS) is not None

    def last(self, text: str) -> str | None:
        """Return the first group of the last match, or the whole match without groups; None: no match."""
        with self._explained(text):
            matches = list(self._pattern.finditer(text, timeout=PATTERN_SECONDS))
        return matches[-1][1 if self.num_groups else 0] if matches else None

    @contextmanager
    def _explained(self, text: str) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            raise TimeoutError(
                f"{self._name} has taken more than {PATTERN_SECONDS:g} s for a text of {len(text)} "
                "characters: avoid repetitions within repetitions, such as (a+)+") from error


@dataclass(frozen=True)
class ExactMatch:
    """A reward of 1 if the answer is the text in a column, else 0.

    Spaces at both ends do not count, nor does what comes before a `</think>`. The reward does not apply to
    rows in which the column is null.
    """

    answer_key: str = "answer"  # The column with the right answer.
    extract: str | None = None
    """A regular expression, such as `<answer>(.*?)</answer>`. The answer is the first group of its last match
    in the completion, or the whole match without groups. None: the whole completion is the answer."""
    ignore_case: bool = False
    looks_for: ClassVar[tuple[str, ...]] = (THINKING_ENDS,)
    __name__: ClassVar[str] = "exact_match"

    def __post_init__(self) -> None:
        check_types(self, "ExactMatch.")
        self._pattern  # noqa: B018 - checks it.

    @property
    def column_names(self) -> tuple[str, ...]:
        return (self.answer_key,)

    @cached_property
    def _pattern(self) -> UserPattern | None:
        return None if self.extract is None else UserPattern(self.extract, "ExactMatch.extract")

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        answers = [self.answer_of(text_of(completion)) for completion in completions]
        return [None if right is None else float(answer == (self._normal(text_of(str(right))) or None))
                for answer, right in zip(answers, columns[self.answer_key], strict=True)]

    def answer_of(self, completion: str) -> str | None:
        """Return the answer of a text; None if there is none, or an empty one."""
        given = after_thinking(text_of(completion))
        text = given if self._pattern is None else self._pattern.last(given)
        return None if text is None else self._normal(text) or None

    def _normal(self, text: str) -> str:
        return text.strip().casefold() if self.ignore_case else text.strip()


@dataclass(frozen=True)
class RegexMatch:
    """A reward of 1 if a regular expression is found in the completion, else 0. A dot matches line ends."""

    pattern: str
    whole: bool = False  # Whether it must match the whole completion, apart from spaces at both ends.
    __name__: ClassVar[str] = "regex_match"

    def __post_init__(self) -> None:
        check_types(self, "RegexMatch.")
        self._compiled  # noqa: B018 - checks it.

    @cached_property
    def _compiled(self) -> UserPattern:
        return UserPattern(self.pattern, "RegexMatch.pattern")

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float]:
        texts = [text_of(completion).strip() for completion in completions]
        return [float(self._compiled.is_in(text, whole=self.whole)) for text in texts]

    def answer_of(self, completion: str) -> str | None:
        """Return the first group of the last match, or the whole match without groups; None: no match."""
        return self._compiled.last(completion)


@dataclass(frozen=True)
class FormatReward:
    """A reward of 1 if a completion consists of sections like `<think>...</think><answer>...</answer>`.

    Each tag occurs once, in this order, with nothing but spaces between the sections and around them.
    """

    tags: tuple[str, ...] = ("think", "answer")
    opened: bool = False  # Whether the prompt has already written the first opening tag.
    __name__: ClassVar[str] = "format"

    def __post_init__(self) -> None:
        check_types(self, "FormatReward.")
        named = bool(self.tags) and all(re.fullmatch(r"[\w-]+", tag) for tag in self.tags)
        require(named, "FormatReward.tags", self.tags, "have the names of tags, without brackets")

    @property
    def looks_for(self) -> tuple[str, ...]:
        opening = self.tags[1:] if self.opened else self.tags
        return (*(f"<{tag}>" for tag in opening), *(f"</{tag}>" for tag in self.tags))

    def doubt(self, prompt: str) -> str | None:
        """Return what seems wrong if a prompt reads so to the model; None: nothing."""
        first = f"<{self.tags[0]}>"
        is_open = prompt.rstrip().endswith(first)
        if is_open == self.opened:
            return None
        ends = "ends" if is_open else "does not end"
        return f"the first prompt {ends} with {first}, and FormatReward.opened is {self.opened}"

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float]:
        return [float(self._is_sound(text_of(completion).strip())) for completion in completions]

    def _is_sound(self, text: str) -> bool:
        """Return whether a text consists of the sections."""
        if self.opened:
            text = f"<{self.tags[0]}>{text}"
        once = all(text.count(f"<{tag}>") == text.count(f"</{tag}>") == 1 for tag in self.tags)
        sections = r"\s*".join(f"<{tag}>.*</{tag}>" for tag in self.tags)
        return once and re.fullmatch(sections, text, re.DOTALL) is not None

    def answer_of(self, completion: str) -> str | None:
        """Return the text of the last section; None without one."""
        begin = f"<{self.tags[-1]}>"
        # A regular expression would look for the end anew behind each of many beginnings.
        *complete, _ = completion.split(f"</{self.tags[-1]}>")
        sections = [before.partition(begin)[2] for before in complete if begin in before]
        return sections[-1].strip() if sections else None
