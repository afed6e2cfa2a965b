"""StopSignals: turns SIGTERM and SIGINT into a request to save and stop. Free of torch."""

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Self

from realhf.signals import SignalPipe, end_by_signal

_DELAY_SECONDS = 1.0
"""Time after which SIGTERM is answered under torchrun, which also sends it to end workers that have lost a
peer. Other signals are answered at once."""


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
