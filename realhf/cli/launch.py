"""Starts local workers, and ends with them. Free of torch.

Torch's elastic launcher does the same for several hosts (torchrun), but the processes of its rendezvous read
pickles from a port that is open to the network. Here nothing listens but the workers' store, on the loopback
interface, and no object is unpickled.
"""

import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from realhf.cli.fork_server import Channel
from realhf.cli.job import ASK_TO_STOP, LOCAL_LAUNCHER
from realhf.errors import UserError
from realhf.signals import ENDING, SignalPipe, blocked

_SERVE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from realhf.cli.fork_server import serve; "
    "serve(*map(int, sys.argv[2:]))")
_GRACE_SECONDS = 0.1
"""Time after the first failure in which other workers may fail for reasons of their own."""


def launch(
    argv: Sequence[str], num_ranks: int, *, restarts: int = 0, run_id: str = "local",
    directory: str | None = None,
) -> int:
    """Run a command on `num_ranks` local workers, which start again up to `restarts` times if one fails.

    `run_id` tells the directory of this run from those of others. Workers start in `directory`, by default
    the working directory. Return 0 if all workers succeed, 2 if one ended with 2 (wrong input of the user),
    else 1. The first of ENDING that comes asks the workers to save and end; a second one ends them at once.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_ranks)))
    with SignalPipe(ENDING) as signals:
        run = _LocalRun(argv, num_ranks, signals, _open_store_port(), run_id, directory)
        code = 1
        try:
            if run.wait_for_server():
                for restart in range(restarts + 1):
                    run.start(restart)
                    code = run.wait()
                    if code == 0 or run.interrupted is not None or run.is_lost:
                        break
        finally:
            run.end()
    if code and run.interrupted is not None:
        print(f"realhf: ended by {run.interrupted.name}", file=sys.stderr, flush=True)
    return code


class _LocalRun:
    """The workers of a launcher, and the server that forks them.

    `interrupted` is the first signal that has asked this process to end; `is_lost` says that the server has
    ended by itself.
    """

    def __init__(
        self, argv: Sequence[str], num_ranks: int, signals: SignalPipe, listener: socket.socket, run_id: str,
        directory: str | None,
    ) -> None:
        self._argv = list(argv)
        self._num_ranks = num_ranks
        self._signals = signals
        self._run_id = run_id
        self._port = listener.getsockname()[1]
        self.interrupted: signal.Signals | None = None
        self.is_lost = False
        ours, theirs = socket.socketpair()
        descriptors = [theirs.fileno(), listener.fileno()]
        with blocked(ENDING):  # So the server never gets them.
            self._server = subprocess.Popen(
                [sys.executable, "-P", "-c", _SERVE, json.dumps(sys.path), *map(str, descriptors)],
                stdin=subprocess.DEVNULL, pass_fds=descriptors, start_new_session=True, cwd=directory)
        theirs.close()
        listener.close()
        self._channel = Channel(ours)
        self._sources: list[Any] = [signals.receiver, self._channel]

    def start(self, restart: int) -> None:
        """Start all workers, for the first time or again."""
        size = str(self._num_ranks)
        shared = {
            LOCAL_LAUNCHER: "1", "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._port),
            "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": self._run_id,
            "TORCHELASTIC_RESTART_COUNT": str(restart)}
        ranks = map(str, range(self._num_ranks))
        workers = [{**shared, "RANK": rank, "LOCAL_RANK": rank} for rank in ranks]
        self._channel.send({"start": workers, "argv": self._argv})

    def wait_for_server(self) -> bool:
        """Return whether the server can fork workers; if not, a signal has come first, or it has ended."""
        ready, _, _ = select.select(self._sources, [], [])
        if self._signals.receiver in ready:
            self.interrupted = next(iter(self._signals.read()), None)
            return self.interrupted is None and self.wait_for_server()
        return self._receive() is not None

    def wait(self) -> int:
        """Wait until all workers have ended; return the exit code.

        If one fails, end the others and say why.
        """
        codes: dict[int, int] = {}
        causes: dict[int, int] = {}
        deadline = math.inf
        is_killed = False
        while len(codes) < self._num_ranks:
            seconds = None if is_killed or deadline == math.inf else max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select(self._sources, [], [], seconds)
            if self._signals.receiver in ready and self._take_signals():
                deadline = 0.0
            if self._channel in ready:
                if (answers := self._receive()) is None:
                    return 1
                codes.update(ended := {answer["rank"]: answer["code"] for answer in answers})
                if not is_killed:
                    causes.update({rank: code for rank, code in ended.items() if code})
            # Asked to end, workers that train still save. Others die by the signal, and the run cannot go on.
            is_saving = self.interrupted is not None and {0, 1, 2}.issuperset(codes.values())
            has_failed = bool(causes) and not is_saving
            if has_failed and deadline == math.inf:
                deadline = time.monotonic() + _GRACE_SECONDS
            if not is_killed and time.monotonic() >= deadline:
                is_killed = True
                self._channel.send({"signal": int(signal.SIGKILL)})
        if self.interrupted is None:
            for rank, code in causes.items():
                _say_why(rank, code)
        if is_killed and self.interrupted is not None:
            return 1
        return 0 if not causes else 2 if 2 in causes.values() else 1

    def end(self) -> None:
        """End the server, and with it the store."""
        self._server.kill()
        self._server.wait()
        self._channel.close()

    def _receive(self) -> list[dict[str, int]] | None:
        """Return the server's answers; None if it has ended."""
        try:
            return self._channel.receive()
        except EOFError:
            self.is_lost = True
            if (code := self._server.wait()) < 0:  # Otherwise it has said why.
                ended = f"the process that forks workers was ended by {signal.Signals(-code).name}"
                print(f"realhf: {ended}", file=sys.stderr, flush=True)
            return None

    def _take_signals(self) -> bool:
        """Ask the workers to save and end; or return True if they have been asked before."""
        for number in self._signals.read():
            if self.interrupted is not None:
                return True
            self.interrupted = number
            self._channel.send({"signal": int(ASK_TO_STOP)})
        return False


def _say_why(rank: int, code: int) -> None:
    """Say how a worker has ended that cannot have said it itself."""
    if code < 0:
        ended = f"was ended by {signal.Signals(-code).name}; the run stops"
        if code == -signal.SIGKILL:
            ended += " (from outside: the system does so when memory runs out)"
    elif code in (1, 2):  # Our own workers say why they end with these.
        return
    else:
        ended = f"ended with exit code {code} and without a word: something has called os._exit"
    print(f"realhf: the worker of rank {rank} {ended}", file=sys.stderr, flush=True)


def _open_store_port() -> socket.socket:
    """Return a socket on which the workers' store listens: on a free port, for this machine alone.

    Raises UserError if no connection can be made to it.
    """
    try:
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        with socket.create_connection(listener.getsockname()):
            return listener
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(
            f"local workers meet on a free TCP port of localhost, and none can be opened ({reason}): "
            "set up the loopback interface (ip link set lo up) or run one process (--nproc 1)") from error
