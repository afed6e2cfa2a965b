"""Communicators: connections over NCCL, which a watcher aborts when a peer has died.

Over gloo a lost connection ends a message with an error. Over NCCL a kernel waits for a dead peer for ever,
and so does the host as soon as it waits for the device. Only another thread can end that.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

NCCL_SETTINGS = {
    # A failed or late operation must not end the process: the watcher does, with a sentence.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # Operations of several communicators run in the order in which the host has posted them (from NCCL 2.26).
    "NCCL_LAUNCH_ORDER_IMPLICIT": "1",
    "NCCL_LAUNCH_RACE_FATAL": "1",
}
"""Environment variables of a worker, unless the user has set them; they are read when NCCL starts."""


def set_nccl_environment() -> None:
    """Set NCCL_SETTINGS in this process."""
    for name, value in NCCL_SETTINGS.items():
        os.environ.setdefault(name, value)


class Communicators:
    """The communicators of a process over NCCL, and their newest works."""

    def __init__(self) -> None:
        self._backends: list[Any] = []
        self._newest: dict[int, Any] = {}
        """Index of a communicator -> the last work posted to it. (A work keeps its output in memory.)"""
        self._lock = threading.Lock()
        self._chain: torch.cuda.Stream | None = None
        self.fault = ""
        """Why all communicators have been aborted; empty as long as they work."""

    def __bool__(self) -> bool:
        return bool(self._backends)

    def add(self, backend: Any) -> None:
        """Take a communicator into the list of those that `abort` ends."""
        self._backends.append(backend)

    def watch(self, backend: Any, work: Any) -> None:
        """Take a work that has been posted. An error of a communicator is one of its newest work, too."""
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return  # The events of a graph under construction cannot be asked.
        with self._lock:
            self._newest[id(backend)] = work

    @contextmanager
    def in_order(self) -> Iterator[bool]:
        """Let what the block posts begin after all earlier posts have completed, of any communicator.

        On CUDA, posts form a chain on a stream of their own, so that computation goes on beside it. Yields
        whether there is one: the block then waits for its work, which is a wait of that stream. Operations in
        a CUDA graph are no part of the chain: the stream must `join` it before the graph is replayed.
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
        """Return what is wrong with a work that has failed, or an empty string; forget completed works."""
        with self._lock:
            works = dict(self._newest)
        for key, work in works.items():
            if (error := work.exception()) is not None:
                return str(error).partition("\n")[0]
            if work.is_completed():
                with self._lock:
                    if self._newest.get(key) is work:
                        del self._newest[key]
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
