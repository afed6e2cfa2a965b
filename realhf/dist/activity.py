"""Activity: what the main thread of a process does at the moment, for the other ranks to know."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class Activity:
    """What the main thread of this process does, as its heartbeat tells the others."""

    def __init__(self) -> None:
        self.doing = "the start"
        self.waits_for: tuple[int, ...] | None = None
        """The ranks that the main thread waits for; None while it works."""
        self.num_waits = 0
        self._thread = threading.get_ident()

    @contextmanager
    def waiting(self, ranks: Sequence[int]) -> Iterator[None]:
        """Mark that the main thread waits for these ranks. In other threads it does nothing."""
        if threading.get_ident() != self._thread or self.waits_for is not None:
            yield
            return
        self.num_waits += 1
        self.waits_for = tuple(ranks)
        try:
            yield
        finally:
            self.waits_for = None
