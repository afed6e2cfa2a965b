"""The process from which the launcher's workers are forked.

It has imported what all workers need, so they start sooner than programs of their own and share the memory of
the libraries. The launcher sends it orders, and it tells the launcher which workers have ended. When the
launcher is gone, it ends them.
"""

import ctypes
import faulthandler
import importlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn

from realhf.cli.job import WORKER_NAME
from realhf.errors import catch_exits
from realhf.signals import ENDING, SignalPipe, end_with_parent

PRELOAD = (
    "realhf.cli.worker",
    "torch.fx.experimental.symbolic_shapes",  # The first backward pass imports it.
    "transformers.models.auto.tokenization_auto",
)
"""What all workers import. None of it may ask for devices: CUDA cannot be used in a fork of a process that
has initialized it."""
_PR_SET_NAME = 15  # From Linux's prctl.h.


class Channel:
    """One end of a socket over which JSON objects travel, one per line."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._rest = b""

    def fileno(self) -> int:
        return self._connection.fileno()

    def close(self) -> None:
        self._connection.close()

    def send(self, message: dict[str, Any]) -> None:
        """Send an object; do nothing if the other end is gone, which `receive` reports."""
        with suppress(OSError):
            self._connection.sendall(f"{json.dumps(message)}\n".encode())

    def receive(self) -> list[dict[str, Any]]:
        """Wait for data, and return the complete objects. Raises EOFError if the other end is gone."""
        try:
            received = self._connection.recv(1 << 16)
        except ConnectionError:
            received = b""
        if not received:
            raise EOFError
        *lines, self._rest = (self._rest + received).split(b"\n")
        return [json.loads(line) for line in lines]


class ForkServer:
    """Forks workers, and waits for them.

    Orders are {"start": [environment variables of each worker], "argv": [words]} and {"signal": number}; the
    answers are {"ready": true} and {"rank": number, "code": exit code, below 0 for a signal} of each worker.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._ranks: dict[int, int] = {}
        """Process id -> rank of the workers that have not been waited for."""
        self._store = 0

    def run(self, listener: socket.socket) -> None:
        """Carry out orders until the launcher is gone, and then end the workers.

        Their store listens on `listener`; when it has ended, so have they, and this process.
        """
        self._store = self.fork(_keep_store, listener, name="realhf store")
        listener.close()
        self._channel.send({"ready": True})
        with SignalPipe([signal.SIGCHLD]) as pipe, suppress(EOFError):
            while True:
                sources: list[Any] = [self._channel, pipe.receiver]
                ready, _, _ = select.select(sources, [], [])
                if pipe.receiver in ready:
                    pipe.read()
                    self._reap()
                if self._channel in ready:
                    for order in self._channel.receive():
                        self._carry_out(order)
        self._send(signal.SIGKILL)
        os.kill(self._store, signal.SIGKILL)

    def _carry_out(self, order: dict[str, Any]) -> None:
        if "signal" in order:
            self._send(order["signal"])
            return
        for variables in order["start"]:
            rank = variables["RANK"]
            pid = self.fork(_work, order["argv"], variables, name=f"{WORKER_NAME}{rank}")
            self._ranks[pid] = int(rank)

    def _send(self, number: int) -> None:
        for pid in self._ranks:
            if number == signal.SIGKILL:
                _kill_group(pid)
            else:
                os.kill(pid, number)  # It cannot be another process: nobody has waited for this one.

    def _reap(self) -> None:
        if os.waitpid(self._store, os.WNOHANG)[0]:
            print("realhf: the process with the workers' store has ended", file=sys.stderr, flush=True)
            self._send(signal.SIGKILL)
            os._exit(1)
        for pid in list(self._ranks):
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            _kill_group(pid)  # What it has started, and left behind.
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            self._channel.send({"rank": self._ranks.pop(pid), "code": code})

    def fork(self, run: Callable[..., NoReturn], *arguments: Any, name: str) -> int:
        """Run a function in a new process, which has its own group and ends with this one; return its id."""
        parent = os.getpid()
        if pid := os.fork():
            return pid
        try:
            os.setpgid(0, 0)
            end_with_parent()
            if sys.platform == "linux":
                ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
            self._channel.close()
            if os.getppid() == parent:
                run(*arguments)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)


def serve(control_fd: int, store_fd: int) -> NoReturn:
    """Be the fork server of a launcher, which has blocked ENDING here: workers save after these signals.

    `control_fd` is the socket to the launcher, and `store_fd` the one on which the workers' store listens.
    """
    server = ForkServer(Channel(socket.socket(fileno=control_fd)))
    end_with_parent()
    for module in PRELOAD:
        importlib.import_module(module)
    end_with_parent(False)  # The end of the channel tells.
    server.run(socket.socket(fileno=store_fd))
    os._exit(0)


def _keep_store(listener: socket.socket) -> NoReturn:
    """Hold the store over which the workers meet. It lives through their restarts."""
    host, port = listener.getsockname()
    store = importlib.import_module("torch.distributed").TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60),
        master_listen_fd=listener.detach())
    parent = os.getppid()
    while store is not None and os.getppid() == parent:
        time.sleep(1.0)
    os._exit(0)


def _work(argv: Sequence[str], variables: dict[str, str]) -> NoReturn:
    """Be a worker that executes `realhf` with these arguments, and end the process with its exit code.

    It leaves ENDING to the launcher, which has them, too, if they are sent to all processes of a job.
    """
    SignalPipe(ENDING).__enter__()
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.environ.update(variables)
    faulthandler.enable()  # A crash in native code shows the Python lines that led to it.
    catch_exits()
    sys.argv = ["realhf", *argv]
    try:
        code = importlib.import_module("realhf.cli.main").main()
        # Pools end, and other threads are waited for, as at the end of processes of multiprocessing.
        threading._shutdown()  # type: ignore[attr-defined]
    except BaseException:
        traceback.print_exc()
        code = 1
    with suppress(OSError):  # The reader of a pipe may have ended.
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)  # It may not have a group yet.
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
