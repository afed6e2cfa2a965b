"""Gloo: connections between processes over TCP, and the port on which each process waits for them."""

import ctypes
import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import lru_cache
from ipaddress import ip_address
from typing import Any

import torch.distributed as dist

_DROP_ALL = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
"""A program of the kernel's packet filter: return 0 bytes of each packet."""
_SO_ATTACH_FILTER = 26  # Both from Linux's asm-generic/socket.h.
_SO_DETACH_FILTER = 27


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
        found = socket.socket(fileno=os.dup(number))
        if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return found
        found.close()
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
