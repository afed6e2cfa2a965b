"""StopSignals: turns SIGTERM and SIGINT into a request to save and stop. Free of torch."""

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

_DELAY_SECONDS = 1.0
"""Time after which SIGTERM is announced: a launcher also sends it to end workers that have lost a peer. The
answer to SIGINT, which a person sends, comes at once."""


class StopSignals:
    """A context in which the first signal asks the run to stop, and a second ends the process.

    Before `begin` there is nothing to save, and the first signal ends the run by KeyboardInterrupt. A second
    signal ends it at once, even if the main thread waits for other ranks: Python's handler in C writes the
    numbers of signals to a socket, to which a thread listens.
    """

    def __init__(self, *signals: signal.Signals) -> None:
        self._signals = signals
        self.requested: str | None = None
        """Name of the signal that has asked the run to stop."""
        self._answer: Callable[[], str] | None = None
        self._has_begun = False
        self._is_over = threading.Event()
        self._before: dict[signal.Signals, Any] = {}
        self._ends: tuple[socket.socket, socket.socket] | None = None

    def __enter__(self) -> Self:
        receiver, sender = socket.socketpair()
        sender.setblocking(False)
        self._ends = (receiver, sender)
        self._wakeup_before = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, self._in_main_thread) for number in self._signals}
        threading.Thread(target=self._listen, args=(receiver,), name="signals", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        assert self._ends is not None
        for end in self._ends[::-1]:  # The listener ends when the sender is closed.
            end.close()

    def begin(self, answer: Callable[[], str] | None) -> None:
        """Let signals stop the run after a step from now on, because a first step begins.

        `answer` returns what this process then tells the user; with None it tells nothing.
        """
        self._answer = answer
        self._has_begun = True

    def _in_main_thread(self, number: int, frame: FrameType | None) -> None:
        """End a run that has not begun; otherwise the listener acts on the signal."""
        if not self._has_begun:
            raise KeyboardInterrupt(f"ended by {signal.Signals(number).name} before the first step")

    def _listen(self, receiver: socket.socket) -> None:
        while numbers := _received(receiver):
            for number in numbers:
                if number in self._signals:
                    self._take(signal.Signals(number))

    def _take(self, number: signal.Signals) -> None:
        if self.requested is not None:
            os._exit(128 + number)
        self.requested = number.name
        if self._has_begun and self._answer is not None:
            threading.Thread(target=self._tell, args=(number, self._answer), daemon=True).start()

    def _tell(self, number: signal.Signals, answer: Callable[[], str]) -> None:
        delay = _DELAY_SECONDS if number == signal.SIGTERM else 0.0
        if not self._is_over.wait(delay):
            print(f"realhf: {answer()}", file=sys.stderr, flush=True)


def _received(receiver: socket.socket) -> bytes:
    try:
        return receiver.recv(64)
    except OSError:  # It has been closed.
        return b""
