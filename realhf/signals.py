"""Signals: none is lost, and none raises an exception in the middle of other code. Free of torch."""

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any, Self

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""The signals with which terminals and supervisors end a command."""


class SignalPipe:
    """A context in which signals become bytes in a socket, in the order in which they come.

    Python's own handler in C writes them, so none waits for the main thread, which may be in C code for long.
    (A Python handler that raises an exception would lose a signal that comes during a destructor, and leave a
    traceback.) Processes that are forked meanwhile are ended by these signals, as any program is.
    """

    def __init__(self, signals: Sequence[signal.Signals]) -> None:
        self._signals = signals
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self.receiver, self._sender = socket.socketpair()
        self._sender.setblocking(False)
        with blocked(self._signals):
            self._wakeup_before = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
            self._before = {number: signal.signal(number, _ignore) for number in self._signals}
        os.register_at_fork(after_in_child=self._leave_in_child)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with blocked(self._signals):
            signal.set_wakeup_fd(self._wakeup_before)
            for number, handler in self._before.items():
                signal.signal(number, handler)
            self._before = {}
        self._sender.close()  # The receiver reads to its end.

    def read(self) -> list[signal.Signals]:
        """Wait for signals and return them, without those for which other code has set a handler meanwhile.

        Raises EOFError when the context has been left.
        """
        if not (numbers := self.receiver.recv(64)):
            raise EOFError
        ours = [signal.Signals(number) for number in numbers if number in self._signals]
        return [number for number in ours if signal.getsignal(number) is _ignore]

    def _leave_in_child(self) -> None:
        if self._before:
            signal.set_wakeup_fd(-1)
            for number in self._before:
                signal.signal(number, signal.SIG_DFL)


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


def end_by_signal(number: signal.Signals, more: str = "") -> None:
    """Say which signal has ended this process, and end it, without waiting for anything."""
    with suppress(OSError):  # The terminal may be gone.
        os.write(sys.stderr.fileno(), f"realhf: ended by {number.name}{more}\n".encode())
    os._exit(1)


def _end_at_signal(pipe: SignalPipe) -> None:
    with suppress(EOFError):
        while True:
            for number in pipe.read():
                end_by_signal(number)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing in the main thread: the pipe has the signal."""
