"""A time limit for Python code, which the kernel's timer interrupts."""

import faulthandler
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_AGAIN_SECONDS = 1.0
"""Time after which code is interrupted again, if it has gone on."""
_STUCK_SECONDS = 60.0
"""Time after the limit at which the process ends, as the code is stuck in a library in C."""


class _TimeIsOver(BaseException):
    """Raised within the code; no Exception, so that the code does not take it for an error of its own."""


def can_interrupt() -> bool:
    """Return whether the calling thread can be interrupted: Python does so in the main thread only."""
    return threading.current_thread() is threading.main_thread()


@contextmanager
def time_limit(seconds: float | None, error: Callable[[], Exception]) -> Iterator[None]:
    """Raise this error, with the traceback of the code, if the `with` block takes longer.

    None, or another thread than the main one: no limit. The limit interrupts Python code, regular
    expressions, waits and system calls, but no computation within a library in C: if that does not return
    within another minute, the process ends with the Python lines of its threads. Limits may be nested.
    """
    outer, _ = signal.getitimer(signal.ITIMER_REAL)
    if seconds is None or not can_interrupt() or 0 < outer <= seconds:
        yield
        return
    over = _TimeIsOver()

    def interrupt(*_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_SECONDS)
        raise over

    started = time.monotonic()
    handler = signal.signal(signal.SIGALRM, interrupt)
    _set_timers(seconds)
    try:
        try:
            yield
        finally:
            _stop_timers()
    except _TimeIsOver as caught:
        _stop_timers()  # If the time was over when the block had just ended.
        if caught is not over:  # That of an outer limit.
            raise
        raise error().with_traceback(caught.__traceback__) from None
    finally:
        signal.signal(signal.SIGALRM, handler)
        if outer:
            _set_timers(max(outer - (time.monotonic() - started), 1e-3))


def _set_timers(seconds: float) -> None:
    if sys.__stderr__ is not None:  # The C code of faulthandler needs no main thread that listens.
        faulthandler.dump_traceback_later(seconds + _STUCK_SECONDS, exit=True, file=sys.__stderr__)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def _stop_timers() -> None:
    signal.setitimer(signal.ITIMER_REAL, 0)
    faulthandler.cancel_dump_traceback_later()
