"""StopSignals: turns SIGTERM and SIGINT into a request to save and stop. Free of torch."""

import os
import signal
import socket
import sys
import threading
from types import FrameType, TracebackType
from typing import Any, Self

_DELAY_SECONDS = 1.0
"""Time after which a signal is announced; a launcher also sends it to end workers that have lost a peer."""


class StopSignals:
    """A context in which the first signal asks the run to stop, and a second ends the process.

    A second signal ends it at once, even if the main thread waits for other ranks: Python's handler in C
    writes the numbers of signals to a socket, to which a thread listens.
    """

    def __init__(self, *signals: signal.Signals, announces: bool) -> None:
        """Take the signals to handle; `announces`: this process tells the user what happens."""
        self._signals = signals
        self.requested: str | None = None
        """Name of the signal that has asked the run to stop."""
        self._announces = announces
        self._is_over = threading.Event()
        self._before: dict[signal.Signals, Any] = {}
        self._ends: tuple[socket.socket, socket.socket] | None = None

    def __enter__(self) -> Self:
        receiver, sender = socket.socketpair()
        sender.setblocking(False)
        self._ends = (receiver, sender)
        self._wakeup_before = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, self._ignore) for number in self._signals}
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

    def _ignore(self, number: int, frame: FrameType | None) -> None:
        """Do nothing in the main thread: the listener acts on the signal."""

    def _listen(self, receiver: socket.socket) -> None:
        while numbers := _received(receiver):
            for number in numbers:
                if number in self._signals:
                    self._take(signal.Signals(number))

    def _take(self, number: signal.Signals) -> None:
        if self.requested is not None:
            os._exit(128 + number)
        self.requested = number.name
        if self._announces:
            threading.Thread(target=self._announce, daemon=True).start()

    def _announce(self) -> None:
        if not self._is_over.wait(_DELAY_SECONDS):
            print(
                "realhf: the run saves a checkpoint after this step or the next and ends; "
                "a second ends it at once", file=sys.stderr, flush=True)


def _received(receiver: socket.socket) -> bytes:
    try:
        return receiver.recv(64)
    except OSError:  # It has been closed.
        return b""
