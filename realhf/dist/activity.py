"""Activity: what a process does at the moment, for its peers and for a person who watches the run."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

Report = Callable[[str], None]
"""A function that is told, often, how far a call is on this rank, in words for a person."""


def no_report(_: str) -> None:
    """Tell nobody."""


def prefixed(report: Report, prefix: str) -> Report:
    """Return a report whose texts all begin so."""
    return lambda text: report(prefix + text)


class Activity:
    """Written by the main thread, which walks through the steps; other threads may read it at any time."""

    def __init__(self, step: str = "the start") -> None:
        self.step = step
        """The part of the run, such as "step 3/60"."""
        self.waits_for: tuple[int, ...] | None = None
        """The ranks that the main thread waits for; None while it works."""
        self.num_waits = 0
        self._now: tuple[str, float] | None = None
        """What is being done, and since when (seconds of time.monotonic)."""
        self._note = ""
        self._thread = threading.get_ident()

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Say what is being done while the block runs."""
        self._note = ""
        self._now = (what, time.monotonic())
        try:
            yield
        finally:
            self._now = None

    def note(self, text: str) -> None:
        """Say how far it is."""
        self._note = text

    @contextmanager
    def waiting(self, ranks: Sequence[int]) -> Iterator[None]:
        """Mark that the main thread waits for these ranks. In other threads this does nothing."""
        if threading.get_ident() != self._thread or self.waits_for is not None:
            yield
            return
        self.num_waits += 1
        self.waits_for = tuple(ranks)
        try:
            yield
        finally:
            self.waits_for = None

    @property
    def place(self) -> str:
        """Where in the run the main thread is, without how long it has been there."""
        now = self._now
        return self.step if now is None else f"{now[0]} ({self.step})"

    def __str__(self) -> str:
        """Return one line; an empty one while nothing is being done that takes long."""
        now, note = self._now, self._note
        if now is None:
            return ""
        what, since = now
        return f"{self.step}: {what}, {time.monotonic() - since:.0f} s" + (f": {note}" if note else "")
