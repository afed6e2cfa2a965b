"""RewardLimits: what a run does when a reward function raises, takes too long or returns no finite number.

LimitedCall calls a function, plain or `async`, within these limits, once or many times at once.
"""

import asyncio
import functools
import inspect
import math
import os
import queue
import random
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from realhf.errors import UserError
from realhf.signals import can_interrupt, time_limit
from realhf.user_input.field_types import check_types, require

Arguments = dict[str, Any]
_LOCK = threading.Lock()
_MAX_WAIT_SECONDS = 60.0
"""Longest wait before a call is made again, unless the service asks for a longer one."""
_MAX_ASKED_SECONDS = 600.0
"""Longest wait that a service may ask for."""


class ServiceError(UserError):
    """A failure of a service that is away, or refuses to answer now, whatever the samples are.

    `wait_seconds` is the time after which it wants to be asked again, if it has named one. With `is_final`,
    it would refuse again.
    """

    def __init__(self, sentence: str, *, wait_seconds: float = 0.0, is_final: bool = False) -> None:
        super().__init__(sentence)
        self.wait_seconds = wait_seconds
        self.is_final = is_final


@dataclass(frozen=True)
class RewardLimits:
    """Settings for failures of a reward function."""

    timeout_seconds: float | None = 1800.0
    """Longest time of a call with all samples of a rank, or with one sample if the reward has a
    `concurrency`. The limit interrupts Python code, waits and system calls; it replaces what the function
    has set by `signal.alarm`, and the function's own alarm replaces it. With a `concurrency`, calls run in
    threads, and one that never returns keeps its thread. None: no limit."""
    retries: int = 0
    """How often a call that has failed is made again."""
    retry_seconds: float = 1.0
    """The wait before a call is made again, which doubles each time, up to a minute; a random part of up to
    half of it is left out. If a service asks for a longer wait (`Retry-After`), it gets up to ten minutes."""
    on_failure: Literal["stop", "drop"] = "stop"
    """`stop` ends the run with a sentence. `drop` leaves the samples that fail, and the groups that they
    belong to, out of the step; the metric `reward/failed` is their share."""
    max_failed_steps: int = 3
    """With `drop`: how many steps in a row may have no sample left, as all have failed. Such a step changes
    no weights. The next one ends the run."""

    def __post_init__(self) -> None:
        check_types(self, "reward_limits.")
        if self.timeout_seconds is not None:
            require(
                self.timeout_seconds > 0, "reward_limits.timeout_seconds", self.timeout_seconds,
                "be above 0, or None for no limit")
        for name in ("retries", "retry_seconds", "max_failed_steps"):
            value = getattr(self, name)
            require(value >= 0, f"reward_limits.{name}", value, "not be negative")

    def wait_seconds(self, error: BaseException, failures: int) -> float | None:
        """Return how long to wait after a call has failed so often; None if it is not made again."""
        if failures > self.retries or not isinstance(error, Exception):
            return None
        asked = 0.0
        if isinstance(error, ServiceError):
            if error.is_final:
                return None
            asked = min(error.wait_seconds, _MAX_ASKED_SECONDS)
        longest = min(self.retry_seconds * 2.0 ** min(failures - 1, 30), _MAX_WAIT_SECONDS)
        return max(asked, longest * random.SystemRandom().uniform(0.5, 1.0))


@dataclass(frozen=True)
class Outcome:
    """The result of a call: what it has returned, or the error that it has raised."""

    value: Any = None
    error: BaseException | None = None

    def unwrap(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.value


def outcome_of(function: Callable[[], Any]) -> Outcome:
    """Call the function, and keep what it returns or raises, `sys.exit` included."""
    try:
        return Outcome(function())
    except BaseException as error:
        return Outcome(error=error)


def start_thread(function: Callable[[], Any], done: Callable[[Outcome], Any]) -> None:
    """Call a function in a thread of its own, which does not keep the process alive, and then `done`."""
    threading.Thread(target=lambda: done(outcome_of(function)), name="reward", daemon=True).start()


def run_together(functions: Sequence[Callable[[], Any]], *, here: Sequence[bool]) -> list[Outcome]:
    """Call functions at the same time, each in a thread, and return their outcomes in the same order.

    Functions whose entry in `here` is true run in this thread instead, one after another.
    """
    done: list[queue.SimpleQueue[Outcome]] = [queue.SimpleQueue() for _ in functions]
    if len(functions) > 1:
        for function, stays, result in zip(functions, here, done, strict=True):
            if not stays:
                start_thread(function, result.put)
    for function, stays, result in zip(functions, here, done, strict=True):
        if stays or len(functions) == 1:
            result.put(outcome_of(function))
    return [result.get() for result in done]


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether a function, or an object's `__call__`, is `async`."""
    called = getattr(function, "__call__", None)  # noqa: B004 - the method itself is wanted.
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)


class LimitedCall:
    """Calls a function, which may be `async`, within a time limit in seconds (None: no limit).

    `setting` names the limit in messages; `limits` say how often and when a call that fails is made again.
    All `async` functions share one event loop, as open connections belong to one; it runs in a thread. Plain
    functions run in the thread that calls them, if it can be interrupted, or in one of their own.
    """

    def __init__(
        self, function: Callable[..., Any], *, seconds: float | None, limits: RewardLimits,
        setting: str = "reward_limits.timeout_seconds",
    ) -> None:
        self._function = function
        self._seconds = seconds
        self._limits = limits
        self._setting = setting

    def once(self, arguments: Arguments, *, at_most: float = math.inf) -> Any:
        """Return the function's answer. Raises TimeoutError, and what the function raises.

        `at_most` are the seconds that the caller has left for it.
        """
        seconds = at_most if self._seconds is None else min(self._seconds, at_most)
        limit = None if seconds == math.inf else seconds
        if limit is None or is_async(self._function):
            answer = self._function(**arguments)
        elif can_interrupt():
            with time_limit(limit, functools.partial(self._timeout, limit)):
                answer = self._function(**arguments)
        else:
            answer = self._in_thread(arguments, limit)
        return self._run(self._awaited(answer, limit)) if inspect.isawaitable(answer) else answer

    def repeated(self, make: Callable[[], Arguments]) -> Any:
        """Return the function's answer; if the call fails, make it again, with new arguments."""
        failures = 0
        while True:
            try:
                return self.once(make())
            except BaseException as error:
                failures += 1
                wait_seconds = self._limits.wait_seconds(error, failures)
                if wait_seconds is None:
                    raise
            time.sleep(wait_seconds)

    def each(self, arguments: Sequence[Callable[[], Arguments]], *, concurrency: int) -> list[Outcome]:
        """Call the function once for each of `arguments`, up to `concurrency` times at once.

        Return the outcomes in this order. A call that fails is made again, with new arguments.
        """
        return self._run(self._each(arguments, concurrency))

    def _run(self, work: Any) -> Any:
        """Run a coroutine that returns an outcome, or a list of them, in the event loop."""
        future = asyncio.run_coroutine_threadsafe(work, _event_loop())
        try:
            result = future.result()
        except BaseException:
            future.cancel()
            raise
        return result.unwrap() if isinstance(result, Outcome) else result

    async def _awaited(self, answer: Awaitable[Any], seconds: float | None) -> Outcome:
        try:
            return await asyncio.wait_for(_outcome(answer), seconds)
        except TimeoutError:
            return Outcome(error=self._timeout(seconds))

    async def _each(self, arguments: Sequence[Callable[[], Arguments]], concurrency: int) -> list[Outcome]:
        free = asyncio.Semaphore(concurrency)

        async def with_retries(make: Callable[[], Arguments]) -> Outcome:
            failures = 0
            async with free:
                while True:
                    outcome = await self._call(make())
                    if outcome.error is None:
                        return outcome
                    failures += 1
                    wait_seconds = self._limits.wait_seconds(outcome.error, failures)
                    if wait_seconds is None:
                        return outcome
                    await asyncio.sleep(wait_seconds)

        return list(await asyncio.gather(*(with_retries(make) for make in arguments)))

    async def _call(self, arguments: Arguments) -> Outcome:
        if is_async(self._function):
            return await self._awaited(self._function(**arguments), self._seconds)
        called = _in_new_thread(functools.partial(self._function, **arguments))
        outcome = await self._awaited(called, self._seconds)
        if outcome.error is None and inspect.isawaitable(outcome.value):
            return await self._awaited(outcome.value, self._seconds)
        return outcome

    def _in_thread(self, arguments: Arguments, seconds: float) -> Any:
        result: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        start_thread(functools.partial(self._function, **arguments), result.put)
        try:
            outcome = result.get(timeout=seconds)
        except queue.Empty as error:
            raise self._timeout(seconds) from error
        return outcome.unwrap()

    def _timeout(self, seconds: float | None) -> TimeoutError:
        return TimeoutError(f"it has not returned within {seconds or 0.0:.4g} s ({self._setting})")


async def _outcome(answer: Awaitable[Any]) -> Outcome:
    """Wait for an answer, and keep what it raises, even a `sys.exit`, which would end the event loop."""
    try:
        return Outcome(await answer)
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        return Outcome(error=error)


async def _in_new_thread(function: Callable[[], Any]) -> Any:
    """Call a plain function in a thread of its own and return its answer."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Outcome] = loop.create_future()

    def keep(outcome: Outcome) -> None:
        if not future.done():  # The time limit may have cancelled it.
            future.set_result(outcome)

    start_thread(function, lambda outcome: loop.call_soon_threadsafe(keep, outcome))
    return (await future).unwrap()


def _event_loop() -> asyncio.AbstractEventLoop:
    """Return this process's event loop for rewards, which runs in a thread."""
    with _LOCK:
        return _started_loop(os.getpid())


@functools.cache
def _started_loop(pid: int) -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="async rewards", daemon=True).start()
    return loop
