"""A time limit for Python code, which the kernel's timer interrupts."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_AGAIN_SECONDS = 1.0
"""Time after which code is interrupted again, if it has gone on."""


class _TimeIsOver(BaseException):
    """Raised within the code; no Exception, so that the code does not take it for an error of its own."""


def can_interrupt() -> bool:
    """Return whether the calling thread can be interrupted: Python does so in the main thread only."""
    return threading.current_thread() is threading.main_thread()


@contextmanager
def time_limit(seconds: float | None, error: Callable[[], Exception]) -> Iterator[None]:
    """Raise this error, with the traceback of the code, if the `with` block takes longer.

    None, or another thread than the main one: no limit. The limit interrupts Python code, regular
    expressions, waits and system calls, but no long computation within a library in C. Limits may be nested.
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
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except _TimeIsOver as caught:
        signal.setitimer(signal.ITIMER_REAL, 0)  # If the time was over when the block had just ended.
        if caught is not over:  # That of an outer limit.
            raise
        raise error().with_traceback(caught.__traceback__) from None
    finally:
        signal.signal(signal.SIGALRM, handler)
        if outer:
            signal.setitimer(signal.ITIMER_REAL, max(outer - (time.monotonic() - started), 1e-3))
