"""Signals and time limits: no signal is lost, and none raises an exception amid other code. Free of torch."""

import ctypes
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""The signals with which terminals and supervisors end a command."""
SHOW_STACKS = signal.SIGUSR1
"""The signal after which every rank of a run writes the stacks of its threads into the run directory."""
_ACTIVE: list["SignalPipe"] = []
_HAS_ENDED = threading.Lock()
_PR_SET_PDEATHSIG = 1  # From Linux's prctl.h.
_DELAY_SECONDS = 1.0
"""Time after which SIGTERM is answered under torchrun, which also sends it to end workers that have lost a
peer. Other signals are answered at once."""


class SignalPipe:
    """A context in which signals become bytes in a socket, in the order in which they come.

    Python's own handler in C writes them, so none waits for the main thread, which may be in C code for long.
    (A Python handler that raises an exception would lose a signal that comes during a destructor, and leave a
    traceback.) Processes that are forked meanwhile are ended by these signals, as any program is. Signals
    that this process has been told to ignore (nohup) stay ignored, but for SIGINT, which shells let jobs in
    the background ignore.
    """

    def __init__(self, signals: Sequence[signal.Signals]) -> None:
        self._signals = signals
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self.receiver, self._sender = socket.socketpair()
        self._sender.setblocking(False)
        with blocked(self._signals):
            self._wakeup_before = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
            taken = [
                number for number in self._signals
                if number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN]
            self._before = {number: signal.signal(number, _ignore) for number in taken}
        _ACTIVE.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with blocked(self._signals):
            signal.set_wakeup_fd(self._wakeup_before)
            for number, handler in self._before.items():
                signal.signal(number, handler)
        _ACTIVE.remove(self)
        self._sender.close()  # A reader of the receiver comes to its end.

    def read(self) -> list[signal.Signals]:
        """Wait for signals and return them, without those for which other code has set a handler meanwhile.

        Raises EOFError when the context has been left.
        """
        if not (numbers := self.receiver.recv(64)):
            self.receiver.close()
            raise EOFError
        ours = []
        for number in numbers:
            if number not in self._signals:  # Python writes all signals here: this one is an outer context's.
                if self._wakeup_before >= 0:
                    os.write(self._wakeup_before, bytes([number]))
            elif signal.getsignal(number) is _ignore:
                ours.append(signal.Signals(number))
        return ours

    def leave_in_child(self) -> None:
        """Leave the context in a process that has just been forked."""
        signal.set_wakeup_fd(-1)
        for number in self._before:
            signal.signal(number, signal.SIG_DFL)
        self._sender.close()
        self.receiver.close()


def _leave_all_in_child() -> None:
    while _ACTIVE:
        _ACTIVE.pop().leave_in_child()


os.register_at_fork(after_in_child=_leave_all_in_child)


class StopSignals:
    """A context in which, from `begin` on, the first signal asks the run to stop, and a second ends it.

    Before, there is nothing to save, and signals end the process as they end other commands.
    """

    def __init__(self, *signals: signal.Signals) -> None:
        self._signals = signals
        self.requested: str | None = None
        """Name of the signal that has asked the run to stop."""
        self._answer: Callable[[], str] | None = None
        self._stack = ExitStack()
        self._is_over = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._stack.close()
        self._answer = None  # It holds the trainer, whose threads end when nobody holds it.

    def begin(self, answer: Callable[[], str] | None) -> None:
        """Take the signals from now on, because the first step begins.

        `answer` returns what this process then tells the user; with None it tells nothing.
        """
        if not self._signals:  # They end the process, as before.
            return
        self._answer = answer
        pipe = self._stack.enter_context(SignalPipe(self._signals))
        threading.Thread(target=self._listen, args=(pipe,), name="stop signals", daemon=True).start()

    def _listen(self, pipe: SignalPipe) -> None:
        with suppress(EOFError):
            while True:
                for number in pipe.read():
                    self._take(number)

    def _take(self, number: signal.Signals) -> None:
        if self.requested is not None:
            if self._answer is None:
                os._exit(1)
            end_by_signal(number)
        self.requested = number.name
        if self._answer is not None:
            threading.Thread(target=self._tell, args=(number, self._answer), daemon=True).start()

    def _tell(self, number: signal.Signals, answer: Callable[[], str]) -> None:
        delay = _DELAY_SECONDS if number == signal.SIGTERM and "TORCHELASTIC_RUN_ID" in os.environ else 0.0
        if not self._is_over.wait(delay):
            print(f"realhf: {answer()}", file=sys.stderr, flush=True)


@contextmanager
def blocked(signals: Sequence[signal.Signals]) -> Iterator[None]:
    """Let signals wait while the `with` block runs. Programs that it starts have them blocked, too."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def signals_end_the_process(*signals: signal.Signals) -> Iterator[None]:
    """End this process with a sentence and exit code 1 as soon as one of the signals comes."""
    with SignalPipe(signals) as pipe:
        listener = threading.Thread(target=_end_at_signal, args=(pipe,), name="signals", daemon=True)
        listener.start()
        yield


@contextmanager
def on_signal(number: signal.Signals, act: Callable[[], None]) -> Iterator[None]:
    """Call a function, in a thread, whenever this signal comes while the `with` block runs."""
    with SignalPipe([number]) as pipe:
        threading.Thread(target=_act_on_signals, args=(pipe, act), name="signals", daemon=True).start()
        yield


def ignore_until_later(number: signal.Signals) -> None:
    """Let this signal, which would end the process, do nothing until there is a context that takes it."""
    signal.signal(number, _ignore)


def end_by_signal(number: signal.Signals, more: str = "") -> None:
    """Say which signal has ended this process, and end it, without waiting for anything."""
    if not _HAS_ENDED.acquire(blocking=False):  # Another thread says it.
        signal.pause()
    with suppress(OSError):  # The terminal may be gone.
        os.write(sys.stderr.fileno(), f"realhf: ended by {number.name}{more}\n".encode())
    os._exit(1)


def end_without_teardown(code: int) -> NoReturn:
    """End this process, after its pools and threads that are no daemons, with an exit code.

    The interpreter is not torn down: a daemon thread that is in native code then would abort the process.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    with suppress(OSError):  # The reader of a pipe may have ended.
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def end_with_parent(ends: bool = True, *, by: signal.Signals = signal.SIGKILL) -> None:
    """Let the system (Linux) send this process a signal when its parent has ended, or no longer."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, by if ends else 0, 0, 0, 0)


def _act_on_signals(pipe: SignalPipe, act: Callable[[], None]) -> None:
    with suppress(EOFError):
        while True:
            for _ in pipe.read():
                act()


def _end_at_signal(pipe: SignalPipe) -> None:
    with suppress(EOFError):
        while True:
            for number in pipe.read():
                end_by_signal(number)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing in the main thread: the pipe has the signal."""


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
