"""LimitedCall: calls a function, plain or `async`, within a time limit, once or many times in parallel."""

import asyncio
import functools
import inspect
import os
import queue
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

_LOCK = threading.Lock()
Arguments = dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """The result of a call: what it has returned, or the error that it has raised."""

    value: Any = None
    error: BaseException | None = None

    def unwrap(self) -> Any:
        """Return the value, or raise the error."""
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

    `setting` names the limit in messages. All `async` functions share one event loop, as open connections
    belong to one; it runs in a thread.
    """

    def __init__(
        self, function: Callable[..., Any], *, seconds: float | None,
        setting: str = "reward_limits.timeout_seconds",
    ) -> None:
        self._function = function
        self._seconds = seconds
        self._setting = setting

    def __call__(self, **arguments: Any) -> Any:
        """Return the function's answer. Raises TimeoutError, and what the function raises."""
        if self._seconds is None or is_async(self._function):
            answer = self._function(**arguments)
        else:
            answer = self._in_thread(arguments)
        return self._run(self._awaited(answer)) if inspect.isawaitable(answer) else answer

    def each(
        self, arguments: Sequence[Callable[[], Arguments]], *, concurrency: int, retries: int
    ) -> list[Outcome]:
        """Call the function once for each of `arguments`, up to `concurrency` times at once.

        Return the outcomes in this order. A call that fails is made again up to `retries` times, with new
        arguments.
        """
        return self._run(self._each(arguments, concurrency, retries))

    def _run(self, work: Any) -> Any:
        """Run a coroutine that returns an outcome, or a list of them, in the event loop."""
        future = asyncio.run_coroutine_threadsafe(work, _event_loop())
        try:
            result = future.result()
        except BaseException:
            future.cancel()
            raise
        return result.unwrap() if isinstance(result, Outcome) else result

    async def _awaited(self, answer: Awaitable[Any]) -> Outcome:
        try:
            return await asyncio.wait_for(_outcome(answer), self._seconds)
        except TimeoutError:
            return Outcome(error=self._timeout())

    async def _each(
        self, arguments: Sequence[Callable[[], Arguments]], concurrency: int, retries: int
    ) -> list[Outcome]:
        free = asyncio.Semaphore(concurrency)

        async def with_retries(make: Callable[[], Arguments]) -> Outcome:
            async with free:
                for _ in range(retries):
                    outcome = await self._call(make())
                    if outcome.error is None or not isinstance(outcome.error, Exception):
                        return outcome
                return await self._call(make())

        return list(await asyncio.gather(*(with_retries(make) for make in arguments)))

    async def _call(self, arguments: Arguments) -> Outcome:
        if is_async(self._function):
            return await self._awaited(self._function(**arguments))
        outcome = await self._awaited(_in_new_thread(functools.partial(self._function, **arguments)))
        if outcome.error is None and inspect.isawaitable(outcome.value):
            return await self._awaited(outcome.value)
        return outcome

    def _in_thread(self, arguments: Arguments) -> Any:
        result: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        start_thread(functools.partial(self._function, **arguments), result.put)
        try:
            outcome = result.get(timeout=self._seconds)
        except queue.Empty as error:
            raise self._timeout() from error
        return outcome.unwrap()

    def _timeout(self) -> TimeoutError:
        return TimeoutError(f"it has not returned within {self._seconds:g} s ({self._setting})")


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
