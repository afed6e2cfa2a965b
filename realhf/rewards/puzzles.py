"""ReasoningGym: a reward by the scorers of the library reasoning-gym."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from realhf.errors import UserError
from realhf.rewards.answers import NEARLY_ONE, THINKING_ENDS, ExactMatch, text_of
from realhf.user_input.field_types import check_types


@dataclass(frozen=True)
class ReasoningGym:
    """The score that reasoning-gym's own scorer of a dataset gives to an answer.

    Each row has the library's entry in two columns: the `answer`, and the `metadata`, an object whose
    `source_dataset` names the dataset. The reward does not apply to rows without metadata, such as those of
    other parts of a mixture. The package reasoning-gym must be installed.
    """

    answer_key: str = "answer"
    metadata_key: str = "metadata"
    question_key: str | None = None  # The column with the entry's question, for scorers that read it.
    extract: str | None = "<answer>(.*?)</answer>"
    """A regular expression whose last match in the completion is the answer; None: all of it is."""
    looks_for: ClassVar[tuple[str, ...]] = (THINKING_ENDS,)
    correct_above: ClassVar[float] = NEARLY_ONE
    __name__: ClassVar[str] = "reasoning_gym"

    def __post_init__(self) -> None:
        check_types(self, "ReasoningGym.")
        self._reader  # noqa: B018 - checks the expression.

    @property
    def column_names(self) -> tuple[str, ...]:
        question = () if self.question_key is None else (self.question_key,)
        return (self.answer_key, self.metadata_key, *question)

    @functools.cached_property
    def _reader(self) -> ExactMatch:
        return ExactMatch(extract=self.extract)

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """Return the reward of each completion; None for rows without metadata."""
        answers = columns[self.answer_key]
        metadata = columns[self.metadata_key]
        questions = [""] * len(answers) if self.question_key is None else columns[self.question_key]
        scores: list[float | None] = []
        for completion, *entry in zip(completions, answers, metadata, questions, strict=True):
            if entry[1] is None:
                scores.append(None)
                continue
            fields = dict(zip(("answer", "metadata", "question"), entry, strict=True))
            score = _scorer_of(self._dataset(entry[1]))
            scores.append(float(score(answer=self.answer_of(text_of(completion)), entry=fields)))
        return scores

    def answer_of(self, completion: str) -> str | None:
        return self._reader.answer_of(completion)

    def _dataset(self, metadata: Any) -> str:
        """Return the name of an entry's dataset. Raises UserError."""
        name = metadata.get("source_dataset") if isinstance(metadata, Mapping) else None
        if not isinstance(name, str):
            raise UserError(
                f"ReasoningGym: column {self.metadata_key!r} has {str(metadata)[:80]!r}: "
                "it must be an object with a source_dataset")
        return name


@functools.cache
def _scorer_of(name: str) -> Callable[..., float]:
    """Return the library's scorer of a dataset. Raises UserError."""
    try:
        import reasoning_gym
    except ImportError as error:
        raise UserError("ReasoningGym needs the package reasoning-gym: pip install reasoning-gym") from error
    try:
        return reasoning_gym.get_score_answer_fn(name)
    except ValueError as error:
        raise UserError(f"ReasoningGym: {error}") from error
