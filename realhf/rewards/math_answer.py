"""MathAnswer: a reward for right mathematical answers, as the library math-verify compares them."""

from __future__ import annotations

import importlib.util
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from realhf.errors import UserError
from realhf.job_process import CannotStart, JobEnded, JobProcess
from realhf.rewards.answers import THINKING_ENDS, after_thinking, text_of
from realhf.user_input.field_types import check_types, require

_WORKER = "realhf.rewards.math_worker"
_MEMORY_BYTES = 2 << 30


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
        """The columns that the reward reads."""
        return (self.answer_key,)

    def __call__(
        self, completions: Sequence[Any], log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """Return the reward of each completion."""
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
            self._free.put(JobProcess(_WORKER, seconds=seconds, memory_bytes=_MEMORY_BYTES))

    def answers(self, jobs: Sequence[dict[str, Any]]) -> list[dict[str, Any] | None]:
        """Return the result of each job; None if its process ended over it (see math_worker.py)."""
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
