"""MathAnswer: a reward for right mathematical answers, as the library math-verify compares them."""

from __future__ import annotations

import importlib.util
import logging
import queue
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar

from realhf.errors import UserError
from realhf.job_process import CannotStart, JobEnded, JobProcess, serve
from realhf.rewards.answers import THINKING_ENDS, after_thinking, text_of
from realhf.user_input.field_types import check_types, require

_MEMORY_BYTES = 2 << 30
_ANCHOR = re.compile(r"\$|\\boxed|\\\(|\\\[")
_WORD = re.compile(r"[A-Za-z]{2,}")
_BOX = "\\boxed{"
_UNUSUAL = (
    (re.compile(r"\\(?:boxed|fbox)\s*\{"), r"\\boxed{"),
    (re.compile(r"</?answer>"), " "),
    (re.compile(r"(?<=\d)(?:\\[,;:! ]|[~\u00a0\u2009\u202f])(?=\d{3}(?!\d))"), ""),  # Between thousands.
    (re.compile("~"), " "),
    (re.compile(r"(?<=\d)\.(?=\s*\})"), ""),  # A full stop within the box.
)
"""Ordinary forms of answers that the library does not read, each with a form that it reads."""


@dataclass(frozen=True)
class MathAnswer:
    r"""A reward of 1 for a completion with the right answer, else 0, as math-verify decides.

    The right answer is in a column: a number, text with LaTeX such as `$\frac{1}{2}$` or `\boxed{7}`, or a
    solution that ends like `#### 72` (GSM8K). Answers are compared in processes of their own, which end if a
    comparison takes too long; such an answer counts as wrong. Several boxed answers are right together, or if
    the last one is; what comes before a `</think>` does not count. The package math-verify must be installed.
    """

    answer_key: str = "answer"  # The column with the right answer.
    anchored: bool = False
    r"""Whether only LaTeX in `\boxed{}` or after words like `the answer is` counts. Otherwise plain numbers
    and expressions count as well, and if nothing is boxed, the last one in the text is the answer."""
    unparsed_gold: float | None = None
    """The reward if the right answer cannot be parsed; None: the reward does not apply."""
    timeout_seconds: float = 10.0  # Longest time of a comparison, counted on the processor.
    processes: int = 2  # Most processes that compare at the same time.
    looks_for: ClassVar[tuple[str, ...]] = (THINKING_ENDS,)
    __name__: ClassVar[str] = "math_answer"

    def __post_init__(self) -> None:
        check_types(self, "MathAnswer.")
        require(self.timeout_seconds > 0, "MathAnswer.timeout_seconds", self.timeout_seconds, "be above 0")
        require(self.processes >= 1, "MathAnswer.processes", self.processes, "be at least 1")

    @property
    def column_names(self) -> tuple[str, ...]:
        return (self.answer_key,)

    def __call__(
        self, completions: Sequence[Any], log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        jobs = [{"text": after_thinking(text_of(completion)), "gold": None if gold is None else str(gold)}
                for completion, gold in zip(completions, columns[self.answer_key], strict=True)]
        results = self._workers.answers(jobs)
        if log_metric is not None:
            log_metric("math_answer/timeout", sum(result is None for result in results) / len(results))
        return [self._reward(result) for result in results]

    def answer_of(self, completion: str) -> str | None:
        """Return the answer of a text in a form that is the same for equal numbers; None without one."""
        result = self._workers.answers([{"text": after_thinking(text_of(completion))}])[0]
        return None if result is None else result["answer"]

    def _reward(self, result: dict[str, Any] | None) -> float | None:
        if result is None:  # The process has ended.
            return 0.0
        right = result.get("right")
        return self.unparsed_gold if right is None else float(right)

    @cached_property
    def _workers(self) -> _Workers:
        if importlib.util.find_spec("math_verify") is None:
            raise UserError("MathAnswer needs the package math-verify: pip install math-verify")
        return _Workers(self.processes, self.timeout_seconds, anchored=self.anchored)


class _Workers:
    """Processes that compare answers. They start when they are needed, and end with this process."""

    def __init__(self, count: int, seconds: float, *, anchored: bool) -> None:
        self._anchored = anchored
        self._count = count
        self._free: queue.SimpleQueue[JobProcess] = queue.SimpleQueue()
        for _ in range(count):
            self._free.put(JobProcess(
                __name__, main="compare_answers", seconds=seconds, memory_bytes=_MEMORY_BYTES))

    def answers(self, jobs: Sequence[dict[str, Any]]) -> list[dict[str, Any] | None]:
        """Return the result of each job; None if its process ended over it."""
        jobs = [job | {"anchored": self._anchored} for job in jobs]
        if len(jobs) == 1:
            return [self._answer(jobs[0])]
        with ThreadPoolExecutor(min(self._count, len(jobs)), thread_name_prefix="math") as pool:
            return list(pool.map(self._answer, jobs))

    def _answer(self, job: dict[str, Any]) -> dict[str, Any] | None:
        worker = self._free.get()
        try:
            return dict(worker.answer(job))
        except JobEnded:
            return None
        except CannotStart as error:
            raise UserError(
                "MathAnswer cannot start: see what `python -c 'import math_verify'` says") from error
        finally:
            self._free.put(worker)


def compare_answers() -> None:
    """Parse and compare answers until standard input ends. A process of `_Workers` runs this."""
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    serve(partial(_answer, math_verify))


def _answer(math_verify: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Return the text's answer and, under `right`, whether it is the job's (None: that cannot be parsed)."""
    answers = _parse(math_verify, job["text"], anchored=job["anchored"])
    result: dict[str, Any] = {"answer": _normal_form(answers)}
    if job.get("gold") is not None:
        gold = _parse_gold(math_verify, job["gold"])
        result["right"] = _is_right(math_verify, gold, answers, job) if gold else None
    return result


def _is_right(math_verify: Any, gold: list[Any], answers: list[Any], job: dict[str, Any]) -> bool:
    """Return whether the answers are right: all boxed ones together, or else the last one alone."""
    if answers and math_verify.verify(gold, answers, timeout_seconds=None):
        return True
    boxes = _usual(job["text"]).split(_BOX)
    if len(boxes) < 3:
        return False
    last = _parse(math_verify, _BOX + boxes[-1], anchored=job["anchored"])
    return bool(last) and bool(math_verify.verify(gold, last, timeout_seconds=None))


def _usual(text: str) -> str:
    """Return a text with unusual forms of answers replaced."""
    for pattern, usual in _UNUSUAL:
        text = pattern.sub(usual, text)
    return text


def _parse(math_verify: Any, text: str, *, anchored: bool = False) -> list[Any]:
    """Return the answer at the end of a text, a boxed one first, as the library parses it."""
    text = _usual(text)
    latex = math_verify.LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=not anchored)
    kinds = [latex] if anchored else [latex, math_verify.ExprExtractionConfig()]
    return list(math_verify.parse(text, extraction_config=kinds, parsing_timeout=None))


def _parse_gold(math_verify: Any, text: str) -> list[Any]:
    """Return the right answer: text with LaTeX, a number, or a solution that ends like `#### 72`."""
    text = text.rsplit("####", maxsplit=1)[-1].strip()
    is_formula = not _ANCHOR.search(text) and not _WORD.search(re.sub(r"\\[A-Za-z]+", "", text))
    parsed = _parse(math_verify, f"${text}$") if is_formula else []  # Else (1, 2) would be read as 2.
    return parsed or _parse(math_verify, text)


def _normal_form(answers: list[Any]) -> str | None:
    """Return a text that is the same for equal numbers, such as 0.5 and 1/2; None without an answer."""
    if not answers:
        return None
    import sympy  # type: ignore[import-untyped]

    value = answers[0]
    if isinstance(value, sympy.Basic) and value.is_number:
        value = sympy.nsimplify(value.doit(), rational=True)
    return str(value)
