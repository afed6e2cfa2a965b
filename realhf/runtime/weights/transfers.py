"""Transfers: run beside computation, in a thread between CPUs and on a stream between GPUs.

NCCL wants one thread that posts, in an order that is equal on all ranks. So on CUDA the main thread posts
transfers too, at their place among the calls, and only the device works on them meanwhile.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

_T = TypeVar("_T")
_R = TypeVar("_R", covariant=True)


class Running(Protocol[_R]):
    """A transfer under way; what follows `result` sees its effects. `result` raises what it has raised."""

    def result(self) -> _R: ...


class Transfers(Protocol):
    """A runner of tasks, one after the other."""

    posts: bool
    """Whether tasks run in the caller's thread and return before the device has done what they post."""

    def submit(self, task: Callable[[], _T]) -> Running[_T]: ...


class TransferThread:
    """A thread that runs tasks one after the other."""

    posts = False

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "realloc")

    def submit(self, task: Callable[[], _T]) -> Running[_T]:
        """Run a task after the earlier tasks."""
        return self._pool.submit(task)


@dataclass
class Posted(Generic[_T]):
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


class PostingStream:
    """A CUDA stream beside that of the calls, on which the caller's thread posts tasks.

    On a CPU, where the tests use it, a task has ended when `submit` returns.
    """

    posts = True

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def submit(self, task: Callable[[], _T]) -> Posted[_T]:
        """Post a task, whose work begins after the work so far on the current stream and on this one."""
        now = time.time()
        if self._stream is None:
            return Posted(task(), now, time.time())
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            value = task()
            end.record()
        return Posted(value, now, begin=begin, end=end)


def make_transfers(device: torch.device) -> Transfers:
    """Return the runner of transfers of a rank with this device."""
    return PostingStream(device) if device.type == "cuda" else TransferThread()
