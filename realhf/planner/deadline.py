"""The moment at which work on a plan ends."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class OutOfTime(Exception):
    """The deadline has passed, when a share of the work under way was done."""

    def __init__(self, share: float = 0.0) -> None:
        super().__init__()
        self.share = share


@contextmanager
def part_of_work(index: int, count: int) -> Iterator[None]:
    """Let OutOfTime have the share of the whole work, of which this context does a part: of `count` equal
    parts that with this index."""
    try:
        yield
    except OutOfTime as error:
        raise OutOfTime((index + error.share) / count) from None


class Deadline:
    """A moment of a clock, until which phases of planning work.

    A phase calls `check` between steps that take about a tenth of a second: after each strategy of a call,
    reallocation, count of a plan's memory, and batch of plans.
    """

    def __init__(self, seconds: float = math.inf, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._began = clock()
        self._end = self._began + seconds

    @property
    def spent(self) -> float:
        """Seconds since the beginning."""
        return self.clock() - self._began

    @property
    def left(self) -> float:
        """Seconds until the deadline; below 0 after it."""
        return self._end - self.clock()

    def check(self) -> None:
        """Raise OutOfTime if the deadline has passed."""
        if self.left <= 0:
            raise OutOfTime

    def part(self, seconds: float) -> "Deadline":
        """Return a deadline of its own, so many seconds from now, or this one if that comes first."""
        return Deadline(min(seconds, self.left), self.clock)

    @contextmanager
    def sooner(self, seconds: float) -> Iterator[None]:
        """Let the deadline be so many seconds from now in this context, unless it comes first anyway."""
        end = self._end
        self._end = min(end, self.clock() + seconds)
        try:
            yield
        finally:
            self._end = end

    def lift(self) -> None:
        """Let there be no deadline from now on."""
        self._end = math.inf

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Let there be no deadline in this context."""
        end = self._end
        self.lift()
        try:
            yield
        finally:
            self._end = end
