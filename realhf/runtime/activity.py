"""Activity: what this rank is doing, for a person who watches the run."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Activity:
    """Written by the thread that walks through the steps; others may read it at any time."""

    step: str = ""
    """The part of the run, such as "step 3/60"."""
    _now: tuple[str, float] | None = field(default=None, init=False)
    """What is being done, and since when (seconds of time.monotonic)."""
    _note: str = field(default="", init=False)

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Say what is being done while the block runs."""
        self._note, self._now = "", (what, time.monotonic())
        try:
            yield
        finally:
            self._now = None

    def note(self, text: str) -> None:
        """Say how far it is."""
        self._note = text

    def __str__(self) -> str:
        """One line; empty while nothing is being done that takes long."""
        now, note = self._now, self._note
        if now is None:
            return ""
        what, since = now
        return f"{self.step}: {what}, {time.monotonic() - since:.0f} s" + (f": {note}" if note else "")
