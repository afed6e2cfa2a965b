"""Communicators over NCCL and gloo, and a watch over those of NCCL.

Over gloo, processes are connected by TCP, and a message raises an error when its connection is lost. Over
NCCL, a kernel waits for a dead peer for ever, and so does the host as soon as it waits for the device. Only
another thread can end that wait: a watcher observes these communicators, and aborts them when the run cannot
go on.
"""

import ctypes
import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from ipaddress import ip_address
from typing import Any, Literal

import torch
import torch.distributed as dist

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
_ORDERED_FROM = (2, 26)
"""NCCL's version from which it begins kernels in the order of their posts."""
Chain = Literal["calls", "background"]
"""The posts for which calls wait at once, or those beside which calls go on: gradients, reallocations."""
_NUM_MARKS = 1 << 14
"""More operations than can wait on a stream at a time; after this many, the marks begin again at 0."""
_DROP_ALL = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
"""A program of the kernel's packet filter: return 0 bytes of each packet."""
_SO_ATTACH_FILTER = 26  # Both from Linux's asm-generic/socket.h.
_SO_DETACH_FILTER = 27


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


# NCCL


def set_nccl_environment() -> None:
    """Set NCCL_SETTINGS in this process; ranks of one machine find each other over its loopback interface."""
    if is_local():
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    for name, value in NCCL_SETTINGS.items():
        os.environ.setdefault(name, value)


def begins_in_order() -> bool:
    """Return whether NCCL begins the kernels of several communicators in the order of their posts."""
    if os.environ.get("NCCL_LAUNCH_ORDER_IMPLICIT", "1") != "1":
        return False
    return not torch.cuda.is_available() or torch.cuda.nccl.version() >= _ORDERED_FROM


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
        self._chains: dict[Chain, torch.cuda.Stream] = {}
        self.posting: Chain = "calls"
        """The chain of the newest post."""
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
    def in_order(self, chain: Chain = "calls") -> Iterator[bool]:
        """Let operations of the block begin only when all earlier ones of their chain, of any communicator,
        have completed, and all earlier ones of the other chain have begun.

        On CUDA, a chain is a stream of its own, beside which computation goes on, and this yields True: the
        block must then wait for its work, which makes that stream wait and not the host. NCCL lets kernels
        begin in the order of their posts (NCCL_LAUNCH_ORDER_IMPLICIT); where it does not, there is only one
        chain. Operations in a CUDA graph are in none: a stream must `join` the chains before the replay.
        """
        self.posting = chain if begins_in_order() else "calls"
        if not torch.cuda.is_available() or torch.cuda.is_current_stream_capturing():
            yield False
            return
        stream = self._chains.get(self.posting)
        if stream is None:
            stream = self._chains[self.posting] = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield True

    def join(self) -> None:
        """Let the current stream wait for all posts so far."""
        for stream in self._chains.values():
            torch.cuda.current_stream().wait_stream(stream)

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


# Gloo


def gloo_backend(store: dist.Store, index: int, size: int, timeout: timedelta) -> Any:
    """Return gloo's communicator of `size` processes, of which this one has the given index."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    with _batch_threads():
        port = _port(os.getpid())
        options._devices = [port.device]
        with port.open():
            # Whoever connects to a closed port tries again only after a second.
            if store.add("open ports", 1) == size:
                store.set("all ports are open", "")
            store.wait(["all ports are open"], timeout)
            return dist.ProcessGroupGloo(store, index, size, options)


def is_local() -> bool:
    """Return whether the ranks meet at an address that only this machine can reach."""
    try:
        return ip_address(os.environ.get("MASTER_ADDR", "").replace("localhost", "127.0.0.1")).is_loopback
    except ValueError:  # It is a name.
        return False


class _Port:
    """The connection to the network that all groups of this process share, and the port on which it listens.

    Each of gloo's devices has a thread that wakes up a hundred times per second, even if no message comes. If
    each group had its own device, some dozens of groups would keep a core busy.

    The port takes connections while a group is made, and none otherwise: gloo accepts whoever comes and never
    gives the descriptor of a stranger's connection back.
    """

    def __init__(self) -> None:
        before = _open_sockets()
        self.device = _make_device()
        self._listeners = [
            listener for number in _open_sockets() - before if (listener := _listener(number)) is not None]
        self._lock = threading.Lock()
        self._num_open = 0
        self._take_connections(False)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Take connections during the `with` block."""
        with self._lock:
            self._num_open += 1
            self._take_connections(True)
        try:
            yield
        finally:
            with self._lock:
                self._num_open -= 1
                self._take_connections(self._num_open > 0)

    def _take_connections(self, takes: bool) -> None:
        """Let the kernel drop the packets of new connections, or no longer. Made ones are not affected."""
        program = struct.pack("HP", 1, ctypes.addressof(_DROP_ALL))
        for listener in self._listeners:
            with suppress(OSError):  # There is no filter to remove; or the system has none.
                if takes:
                    listener.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
                else:
                    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


@lru_cache(maxsize=1)
def _port(process: int) -> _Port:
    return _Port()


def _make_device() -> Any:
    """Return a device on the interface that the user names, on loopback in a local run, or the host's own."""
    create = dist.ProcessGroupGloo.create_device
    if interface := os.environ.get("GLOO_SOCKET_IFNAME", ""):
        return create(interface=interface, lazy_init=False)
    if is_local():
        return create(hostname=os.environ["MASTER_ADDR"], lazy_init=False)
    return dist.ProcessGroupGloo.create_default_device(lazy_init=False)


def _open_sockets() -> set[int]:
    """Return the numbers of this process's descriptors; none where the system does not list them."""
    with suppress(OSError):
        return {int(name) for name in os.listdir("/proc/self/fd")}
    return set()


def _listener(number: int) -> socket.socket | None:
    """Return another descriptor of a listening socket; None for one of another kind."""
    with suppress(OSError):
        listener = socket.socket(fileno=os.dup(number))
        if listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return listener
        listener.close()
    return None


@contextmanager
def _batch_threads() -> Iterator[None]:
    """Start threads under a policy by which they never interrupt a running thread on waking up (on Linux).

    Gloo's thread polls while another thread holds the lock of a connection. With more ranks than cores it may
    interrupt that very thread, and would then poll in vain for a whole time slice.
    """
    before = None
    with suppress(OSError, AttributeError):  # Some containers and other systems do not support it.
        before = os.sched_getscheduler(0)
        if before == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        if before is not None:
            with suppress(OSError):
                os.sched_setscheduler(0, before, os.sched_param(0))
