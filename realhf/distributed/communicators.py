"""Communicators: connections over NCCL, which a watcher observes, and aborts when the run cannot go on.

Over gloo, a message raises an error when its connection is lost. Over NCCL, a kernel waits for a dead peer
for ever, and so does the host as soon as it waits for the device. Only another thread can end that wait.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from realhf.distributed.gloo import is_local
from realhf.layout import DeviceMesh

NCCL_SETTINGS = {
    # A failed or late operation must not end the process: the watcher ends it, with a sentence.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # Operations of several communicators run in the order in which the host has posted them (from NCCL 2.26).
    "NCCL_LAUNCH_ORDER_IMPLICIT": "1",
    "NCCL_LAUNCH_RACE_FATAL": "1",
}
"""Environment variables of a worker, unless the user has set them; they are read when NCCL starts."""
_NUM_MARKS = 1 << 14
"""More operations than can wait on a stream at a time; after this many, the marks begin again at 0."""


def set_nccl_environment() -> None:
    """Set NCCL_SETTINGS in this process; ranks of one machine find each other over its loopback interface."""
    if is_local():
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    for name, value in NCCL_SETTINGS.items():
        os.environ.setdefault(name, value)


@dataclass(frozen=True)
class Operation:
    """An operation that this rank has posted to a group; `number` counts them.

    `place` is the call that has posted it, with its step, and `since` the time of time.monotonic then.
    """

    name: str
    ranks: tuple[int, ...]
    purpose: str
    number: int
    place: str
    since: float = field(default_factory=time.monotonic)

    def __str__(self) -> str:
        return f"{self.name} {self.number} of ranks {DeviceMesh(self.ranks)} ({self.purpose})"


class _DeviceLane:
    """The operations for which one stream waits. After each, the device writes its number to host memory.

    The watcher reads that number without a call to CUDA, in which it could wait for another thread that waits
    for the device. (Works are not kept, as they would keep their tensors.)
    """

    @torch.inference_mode(False)  # Generation may make the lane, and training marks the same one.
    def __init__(self, device: str) -> None:
        self._numbers = torch.arange(_NUM_MARKS, device=device)
        self._passed = torch.zeros((), dtype=torch.int64, device="cpu", pin_memory=device == "cuda")
        self._count = 0
        self._open: deque[Operation] = deque()

    def add(self, operation: Operation, work: Any) -> None:
        self.unfinished()
        self._count += 1
        self._open.append(operation)

    def mark(self) -> None:
        """Let the current stream write the number of operations so far, once it has passed all of them."""
        self._passed.copy_(self._numbers[self._count % _NUM_MARKS], non_blocking=True)

    def unfinished(self) -> list[Operation]:
        num_open = (self._count - int(self._passed)) % _NUM_MARKS
        while len(self._open) > num_open:
            self._open.popleft()
        return list(self._open)


class _HostLane:
    """Operations whose works tell whether they are complete, for tests where a CPU pretends to use NCCL."""

    def __init__(self) -> None:
        self._open: list[tuple[Operation, Any]] = []

    def add(self, operation: Operation, work: Any) -> None:
        self.unfinished()
        if work is not None:
            self._open.append((operation, work))

    def mark(self) -> None:
        """Do nothing: the works tell."""

    def unfinished(self) -> list[Operation]:
        self._open = [(operation, work) for operation, work in self._open if not work.is_completed()]
        return [operation for operation, _ in self._open]


class Communicators:
    """The communicators of a process over NCCL, and the operations that have not completed."""

    def __init__(self) -> None:
        self._backends: list[Any] = []
        self._lanes: dict[int, _DeviceLane | _HostLane] = {}
        """Stream -> the operations for which it waits."""
        self._lock = threading.Lock()
        self._chain: torch.cuda.Stream | None = None
        self.fault = ""
        """Why all communicators have been aborted; empty as long as they work."""

    def __bool__(self) -> bool:
        return bool(self._backends)

    def add(self, backend: Any) -> None:
        """Take a communicator into the list of those that `abort` ends."""
        self._backends.append(backend)

    def note(self, operation: Operation, work: Any = None) -> None:
        """Remember an operation until it has completed. On CUDA the current stream waits for its `work`."""
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return  # The code that replays the graph notes the whole graph as one operation.
        lane = self._lane()
        with self._lock:
            lane.add(operation, work)
        lane.mark()  # Without the lock, as the host may wait here, and the watcher must not.

    def _lane(self) -> _DeviceLane | _HostLane:
        """Return the lane of the current stream."""
        if not torch.cuda.is_available():
            return self._lanes.setdefault(0, _HostLane())
        stream = torch.cuda.current_stream().cuda_stream
        if stream not in self._lanes:
            self._lanes[stream] = _DeviceLane("cuda")
        return self._lanes[stream]

    def unfinished(self) -> list[Operation]:
        """Return the oldest unfinished operation of each communicator, in the order of their posts."""
        with self._lock:
            operations = [operation for lane in list(self._lanes.values()) for operation in lane.unfinished()]
        oldest: dict[tuple[str, tuple[int, ...]], Operation] = {}
        for operation in sorted(operations, key=lambda operation: operation.since):
            oldest.setdefault((operation.purpose, operation.ranks), operation)
        return list(oldest.values())

    @contextmanager
    def in_order(self) -> Iterator[bool]:
        """Let operations of the block begin only when all earlier ones, of any communicator, have completed.

        On CUDA, posts form a chain on a stream of their own, beside which computation goes on, and this
        yields True: the block must then wait for its work, which makes that stream wait and not the host.
        Operations in a CUDA graph are not in the chain: a stream must `join` the chain before the replay.
        """
        if not torch.cuda.is_available() or torch.cuda.is_current_stream_capturing():
            yield False
            return
        if self._chain is None:
            self._chain = torch.cuda.Stream()
        self._chain.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._chain):
            yield True

    def join(self) -> None:
        """Let the current stream wait for all posts so far."""
        if self._chain is not None:
            torch.cuda.current_stream().wait_stream(self._chain)

    def failure(self) -> str:
        """Return what is wrong with a communicator that has failed, or an empty string."""
        for backend in self._backends:
            if (error := backend.get_error().name) != "SUCCESS":
                return f"NCCL reports {error} (its own messages say more)"
        return ""

    def abort(self, fault: str) -> None:
        """End all operations of all communicators, so that a host which waits for them goes on.

        From then on every use of a group raises PeerError with `fault`. Aborting may itself hang, so it has a
        thread of its own.
        """
        if not self.fault:
            self.fault = fault
            threading.Thread(target=self._abort, name="abort", daemon=True).start()

    def _abort(self) -> None:
        for backend in self._backends:
            with suppress(RuntimeError):
                backend.abort()
