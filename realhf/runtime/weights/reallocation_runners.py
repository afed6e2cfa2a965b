"""Runners: carry out reallocations beside computation, in a thread on CPUs and on a second stream on GPUs.

NCCL wants one thread that posts, in an order that is equal on all ranks. So on CUDA the main thread posts
reallocations too, at their place among the calls, and only the device works on them meanwhile.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

from realhf.realloc.execute import Reallocator, ReallocStats
from realhf.realloc.pieces import Shards
from realhf.runtime.compile.actions import Reallocate, role_of

_T = TypeVar("_T")
_R = TypeVar("_R", covariant=True)

LoadShards = Callable[[], AbstractContextManager[tuple[Shards | None, Shards | None]]]
"""Returns a context in which this rank's shards of a reallocation's source and target are on the device."""


@dataclass(frozen=True)
class FinishedReallocation:
    """A reallocation in which this rank took part; `start` is in Unix seconds."""

    action: Reallocate
    stats: ReallocStats
    start: float
    ended: Callable[[], float]
    """Returns the time of its end; on CUDA the host waits for it."""
    arrived: Callable[[], float] = lambda: 0.0
    """Returns the Unix time from which the call that needs the weights had them; 0 if the host waited."""

    def event(self, rank: int) -> dict[str, Any]:
        """Return the event of a StepRecord."""
        return {
            "rank": rank, "name": role_of(self.action.target_set), "kind": "realloc", "start": self.start,
            "transfer": f"{self.action.source}->{self.action.target}", "sent_bytes": self.stats.bytes_sent,
            "received_bytes": self.stats.bytes_received, "senders": list(self.stats.senders),
            "over_bound": self.stats.over_bound, "end": self.ended(),
        }  # fmt: skip


class InFlight(Protocol[_R]):
    """A task that has been submitted.

    Work that follows `result` sees the task's effects. `result` may be called again, and raises what the task
    has raised.
    """

    def result(self) -> _R: ...


class ThreadRunner:
    """A thread in which tasks run."""

    waits_for_ranks = False
    """Whether a reallocation starts only when all of its ranks have come to it."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "realloc")
        self._failure: Exception | None = None

    def submit(self, task: Callable[[], _T]) -> InFlight[_T]:
        """Run a task after the earlier tasks."""
        return self._pool.submit(task)

    def reallocate(
        self, action: Reallocate, reallocator: Reallocator, load: LoadShards
    ) -> InFlight[FinishedReallocation]:
        """Load the shards and move the parameters, after the earlier tasks."""

        def task() -> FinishedReallocation:
            if self._failure is not None:  # The ranks are out of step, so later messages would be mixed up.
                raise self._failure
            start = time.time()
            try:
                with load() as (source, target):
                    stats = reallocator.run(source, target)
            except Exception as error:
                self._failure = error
                raise
            end = time.time()
            return FinishedReallocation(action, stats, start, lambda: end)

        return self.submit(task)


@dataclass
class PostedTask(Generic[_T]):
    """A task whose work on the device has been posted."""

    value: _T
    posted_at: float
    """Unix time in seconds."""
    ended_at: float = 0.0
    """Unix time of the end; 0 if events tell it."""
    begin: torch.cuda.Event | None = None
    end: torch.cuda.Event | None = None
    asked: torch.cuda.Event | None = None
    """Where the stream that needs the results began to wait for them."""
    asked_at: float = 0.0
    """Unix time at which `result` was called first."""

    def result(self) -> _T:
        """Return the value. On CUDA the current stream waits for the work, and the host does not."""
        if self.end is not None:
            if self.asked is None:
                self.asked = torch.cuda.Event(enable_timing=True)
                self.asked.record()
                self.asked_at = time.time()
            torch.cuda.current_stream().wait_event(self.end)
        return self.value

    def ended(self) -> float:
        """Return the Unix time at which the work ended; the host waits for the device until then."""
        if self.begin is None or self.end is None:
            return self.ended_at
        self.end.synchronize()
        return self.posted_at + self.begin.elapsed_time(self.end) / 1000

    def arrived(self) -> float:
        """Return the Unix time from which the stream that needed the results had them; see `ended`."""
        if self.asked is None or self.end is None:
            return self.ended_at
        self.asked.synchronize()
        self.end.synchronize()
        return self.asked_at + max(0.0, self.asked.elapsed_time(self.end) / 1000)


@dataclass
class _PostedReallocation:
    """A reallocation that has been posted, with the shards that stay on the device until it has ended."""

    action: Reallocate
    start: float
    task: PostedTask[ReallocStats]
    shards: ExitStack

    def result(self) -> FinishedReallocation:
        stats = self.task.result()
        self.shards.close()
        return FinishedReallocation(self.action, stats, self.start, self.task.ended, self.task.arrived)


class StreamRunner:
    """A CUDA stream beside that of the calls, on which the caller's thread posts tasks.

    On a CPU, where the tests use it, a task has ended when `submit` returns.
    """

    waits_for_ranks = True

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def submit(self, task: Callable[[], _T]) -> PostedTask[_T]:
        """Post a task, whose work begins after the work so far on the current stream and on this one."""
        now = time.time()
        if self._stream is None:
            return PostedTask(task(), now, time.time())
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            value = task()
            end.record()
        return PostedTask(value, now, begin=begin, end=end)

    def reallocate(
        self, action: Reallocate, reallocator: Reallocator, load: LoadShards
    ) -> InFlight[FinishedReallocation]:
        """Load the shards on the stream of the calls, wait for the other ranks, and post the messages.

        The host waits, because a device that waited for a busy rank could do nothing else. The shards stay
        loaded until `result` is called.
        """
        start = time.time()
        with ExitStack() as stack:
            source, target = stack.enter_context(load())
            reallocator.wait_until_ready()
            task = self.submit(lambda: reallocator.post(source, target))
            return _PostedReallocation(action, start, task, stack.pop_all())


Runner = ThreadRunner | StreamRunner
"""Runs tasks and reallocations one after the other, in the order in which they are submitted."""


def make_runner(device: torch.device) -> Runner:
    """Return the runner of a rank with this device."""
    return StreamRunner(device) if device.type == "cuda" else ThreadRunner()
