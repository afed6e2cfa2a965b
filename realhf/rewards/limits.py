"""RewardLimits: what a run does when a reward function raises, takes too long or returns no finite number."""

import asyncio
import inspect
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from realhf.field_types import check_types


@dataclass(frozen=True)
class RewardLimits:
    """Settings for failures of a reward function."""

    timeout_seconds: float | None = None
    """Longest time of a call with all samples of a rank. The function then runs in a thread of its own, where
    Python's `signal.alarm` does not work; one that never returns keeps its thread. None: no limit."""
    retries: int = 0
    """How often a call that has failed is made again."""
    on_failure: Literal["stop", "drop"] = "stop"
    """`stop` ends the run with a sentence. `drop` leaves the samples that fail, and the groups that they
    belong to, out of the step; the metric `reward/failed` is their share."""

    def __post_init__(self) -> None:
        check_types(self, "reward_limits.")
        if self.timeout_seconds is not None and not self.timeout_seconds > 0:
            what = f"reward_limits.timeout_seconds is {self.timeout_seconds}"
            raise ValueError(f"{what}: it must be above 0, or None for no limit")
        if self.retries < 0:
            raise ValueError(f"reward_limits.retries is {self.retries}: it must not be negative")


class LimitedCall:
    """Calls a function, which may be `async`, within a time limit in seconds (None: no limit)."""

    def __init__(self, function: Callable[..., Any], *, seconds: float | None) -> None:
        self._function = function
        self._seconds = seconds
        self._runner: asyncio.Runner | None = None

    def __call__(self, **given: Any) -> Any:
        """Return the function's answer. Raises TimeoutError, and what the function raises."""
        if self._seconds is None or inspect.iscoroutinefunction(self._function):
            answer = self._function(**given)
        else:
            answer = self._in_thread(given)
        if not inspect.isawaitable(answer):
            return answer
        if self._runner is None:  # All calls share an event loop, as open connections belong to one.
            self._runner = asyncio.Runner()
        return self._runner.run(self._awaited(answer))

    async def _awaited(self, answer: Any) -> Any:
        try:
            return await asyncio.wait_for(answer, self._seconds)
        except TimeoutError as error:
            raise self._timeout() from error

    def _in_thread(self, given: dict[str, Any]) -> Any:
        outcome: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()

        def call() -> None:
            try:
                outcome.put((True, self._function(**given)))
            except BaseException as error:
                outcome.put((False, error))

        threading.Thread(target=call, name="reward", daemon=True).start()
        try:
            succeeded, answer = outcome.get(timeout=self._seconds)
        except queue.Empty as error:
            raise self._timeout() from error
        if not succeeded:
            raise answer
        return answer

    def _timeout(self) -> TimeoutError:
        return TimeoutError(f"it has not returned within {self._seconds:g} s (reward_limits.timeout_seconds)")
