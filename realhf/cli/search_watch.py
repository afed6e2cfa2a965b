"""Shows a search for a plan while it runs, and lets signals end it early. Free of torch."""

import math
import signal
import sys
import time
from types import FrameType, TracebackType
from typing import Any, Self

from rich.console import Console
from rich.status import Status

from realhf.signals import end_by_signal
from realhf.user_input.units import format_seconds

_REPORT_SECONDS = 5.0
"""Seconds between two lines about the search if standard error is not a terminal."""


class SearchWatch:
    """A context that shows a search on standard error: live on a terminal, else as a line every few seconds.

    The first plan is shown at once. From then on, the first signal ends the search with the best plan so far,
    and the message goes on with `then`, such as "the run begins with". A second signal, or one before there
    is a plan, ends the command.
    """

    def __init__(self, *signals: signal.Signals, then: str = "") -> None:
        self._signals = signals
        self._then = then
        self._before: dict[signal.Signals, Any] = {}
        self._has_plan = False
        self._requested: signal.Signals | None = None
        self._is_announced = False
        self._what = ""
        self._last = -math.inf
        self._status: Status | None = None

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._take) for number in self._signals}
        if sys.stderr.isatty():
            self._status = Status("searching: no plan yet", console=Console(stderr=True))
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def begin(self, what: str) -> None:
        """Begin a search, and show its name."""
        self._what = f" {what}"
        self._last = time.monotonic()

    def progress(self, best: float, bound: float, seconds: float) -> None:
        """Show the best step seconds so far (infinite: there is no plan yet) and the lower bound."""
        is_first = not self._has_plan and math.isfinite(best)
        self._has_plan |= is_first
        if self._status is not None:
            self._status.update(self._state(best, bound, seconds))
        elif is_first or time.monotonic() - self._last >= _REPORT_SECONDS:
            self._last = time.monotonic()
            print(f"realhf: {self._state(best, bound, seconds)}", file=sys.stderr, flush=True)

    def should_stop(self) -> bool:
        """Return whether a signal has asked for the end of the search; announce it the first time."""
        if self._requested is not None and not self._is_announced:
            self._is_announced = True
            ended = f"the search is ended by {self._requested.name}: {self._then} the best plan so far"
            if self._status is not None:
                self._status.console.print(f"realhf: {ended}", highlight=False)
            else:
                print(f"realhf: {ended}", file=sys.stderr, flush=True)
        return self._requested is not None

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self._has_plan and self._requested is None:
            self._requested = signal.Signals(number)
            return
        if self._status is not None:
            self._status.stop()
        more = "; no plan is taken" if self._has_plan else " before there was a plan"
        end_by_signal(signal.Signals(number), more)

    def _state(self, best: float, bound: float, seconds: float) -> str:
        if not math.isfinite(best):
            proven = f"no plan yet, lower bound {format_seconds(bound)}"
        else:
            gap = f"gap {1 - bound / best:.1%}"
            proven = f"best {format_seconds(best)} per step, lower bound {format_seconds(bound)}, {gap}"
        return f"searching{self._what} for {seconds:.1f} s: {proven}"
