"""WatchedProcess: what its peers, its heartbeat and a person who watches the run see of this process."""

import faulthandler
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from realhf.distributed.communicators import Communicators, Operation

STACKS = "stacks"
"""The folder of a run directory with the stacks of its ranks, for which a signal has asked."""
_BETWEEN_STACKS_SECONDS = 5.0
_MAX_TEXT = 400
"""Most characters of an operation's text that are kept."""
RESCUE = "rescue"
"""Name of the store, and its key, by which a failing rank asks the others to save the state after a step."""
Report = Callable[[str], None]
"""A function that a call tells, time and again, in words for a person, how far it is on this rank."""


def no_report(_: str) -> None:
    """Ignore a report."""


def prefixed(report: Report, prefix: str) -> Report:
    return lambda text: report(prefix + text)


class WatchedProcess:
    """The present work of the main thread, the operations of this process, and its communicators over NCCL.

    The main thread writes it; other threads may read it at any time, and the heartbeat aborts communicators.
    """

    def __init__(self, step: str = "the start") -> None:
        self.step = step
        """Part of the run, such as "step 3/60"."""
        self.waits_for: tuple[int, ...] | None = None
        """Ranks that the main thread waits for; None while it works."""
        self.waits_in: Operation | None = None
        """The operation in which it waits, if it does so in one."""
        self.num_waits = 0
        self._now: tuple[str, float] | None = None
        """Name of the present work, and its start in seconds of time.monotonic."""
        self._note = ""
        self._thread = threading.get_ident()
        self.rescue: Callable[[int], None] | None = None
        """Writes this rank's part of the state after a step, when another rank has failed in the next one."""
        self.is_watched = False
        """Whether a Heartbeat tells this process of failures elsewhere, and calls `rescue`."""
        self.failures: Path | None = None
        """Directory in which `leave_record` writes; None until the run has one."""
        self._has_record = False
        self._shown_at = -math.inf
        self.operations = OperationLog()
        """The operations of the step program that have not been compared with those of other ranks yet."""
        self.communicators = Communicators()
        """The communicators of this process over NCCL."""

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Set the present work while the block runs; it stays if an exception ends the block."""
        self._note = ""
        self._now = (what, time.monotonic())
        yield
        self._now = None

    def leave_record(self, rank: int, why: str, trace: str = "") -> None:
        """Write what this process is doing, and the Python stacks of its threads, to a file of the rank.

        `trace` is the traceback of an exception. Only the first call writes.
        """
        if self.failures is None or self._has_record:
            return
        self._has_record = True
        path = self.failures / f"rank_{rank}.txt"
        with suppress(OSError):
            path.unlink(missing_ok=True)
        self._add_stacks(path, f"rank {rank} ends: {why}", trace)

    def show_stacks(self, rank: int) -> None:
        """Add what this process is doing, and the Python stacks of its threads, to a file of the rank.

        Nothing is written before the run has a directory, and twice within seconds, as several may ask.
        """
        if self.failures is None or time.monotonic() - self._shown_at < _BETWEEN_STACKS_SECONDS:
            return
        self._shown_at = time.monotonic()
        path = self.failures.parent / STACKS / f"rank_{rank}.txt"
        self._add_stacks(path, f"rank {rank} goes on")

    def _add_stacks(self, path: Path, what: str, trace: str = "") -> None:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as file:
                when = time.strftime("%Y-%m-%d %H:%M:%S")
                waits = "" if self.waits_for is None else f", waits for ranks {list(self.waits_for)}"
                where = "".join(f", {text} for {seconds:.0f} s" for text, seconds in self.unfinished())
                file.write(f"{when}: {what}\nlast action: {self.place}{waits}{where}\n\n{trace}\n")
                file.flush()
                faulthandler.dump_traceback(file)
                file.write("\n")

    def note(self, text: str) -> None:
        """Set how far the present work is."""
        self._note = text

    @contextmanager
    def waiting(self, ranks: Sequence[int], operation: Operation | None = None) -> Iterator[None]:
        """Mark that the main thread waits for these ranks, in an operation. Do nothing in other threads."""
        if threading.get_ident() != self._thread or self.waits_for is not None:
            yield
            return
        self.num_waits += 1
        self.waits_in = operation
        self.waits_for = tuple(ranks)
        try:
            yield
        finally:
            self.waits_for = None
            self.waits_in = None

    def unfinished(self) -> list[tuple[str, float]]:
        """Return the operations in which this rank waits, and the seconds since they were posted.

        The main thread's operation comes first, if it waits in one. Then come those of the device: of each
        communicator the oldest that has not finished, with the call that has posted it.
        """
        now = time.monotonic()
        host = self.waits_in
        on_device = self.communicators.unfinished()
        on_host = [] if host is None else [(str(host), now - host.since)]
        return on_host + [
            (f"{operation}, posted by {operation.place}", now - operation.since) for operation in on_device]

    @property
    def place(self) -> str:
        """Present work and step of the main thread, without its duration."""
        now = self._now
        return self.step if now is None else f"{now[0]} ({self.step})"

    def __str__(self) -> str:
        """Return one line about the present work, or an empty string if there is none."""
        now = self._now
        note = self._note
        if now is None:
            return ""
        what, since = now
        return f"{self.step}: {what}, {time.monotonic() - since:.0f} s" + (f": {note}" if note else "")


class OperationLog:
    """The operations of this rank since they were last taken; the main thread adds, another thread takes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._new: list[tuple[int, str, str]] = []
        self._is_used = False

    def add(self, number: int, text: str, digest: str) -> None:
        """Add an operation, with the digest of all operations so far."""
        self._is_used = True
        with self._lock:
            self._new.append((number, text[:_MAX_TEXT], digest[:16]))

    @property
    def is_used(self) -> bool:
        """Whether this rank has ever added an operation."""
        return self._is_used

    def take(self) -> list[tuple[int, str, str]]:
        """Return the operations since the last call."""
        with self._lock:
            new = self._new
            self._new = []
        return new
