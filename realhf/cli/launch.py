"""Starts local workers, and ends with them. Free of torch.

Torch's elastic launcher does the same for several hosts (torchrun), but the processes of its rendezvous read
pickles from a port that is open to the network. Here nothing listens but the workers' store, on the loopback
interface, and no object is unpickled.
"""

import ctypes
import faulthandler
import importlib
import json
import math
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, NoReturn

from realhf.checkpoint.names import find_checkpoints
from realhf.errors import UserError, catch_exits
from realhf.planner.problem import Problem
from realhf.runtime.compile.program import Program
from realhf.signals import (
    ENDING,
    SHOW_STACKS,
    SignalPipe,
    blocked,
    end_with_parent,
    end_without_teardown,
    ignore_until_later,
)

LOCAL_LAUNCHER = "REALHF_LOCAL_LAUNCHER"
"""Environment variable of workers that our own launcher has started."""
WORKER_NAME = "realhf rank "
"""With the rank behind it, the name of a process that our own launcher has forked (in `top`; `ps` shows the
command that was forked)."""
ASK_TO_STOP = signal.SIGUSR2
"""The signal by which our own launcher asks its workers to save and end. Before they train, it ends them."""
LAUNCHER_PLAN = "REALHF_PLAN"
"""Environment variable with the plan, as JSON, that the launcher has made for its workers."""


@dataclass(frozen=True)
class Job:
    """A program to run, and its output directory."""

    program: Program
    name: str
    """Name of the experiment file without its suffix; run directories are named after it."""
    out: Path | None
    timeout_seconds: float
    resume: str | None = None
    """The value of --resume; None: the run begins anew."""
    traceback: bool = False
    """Whether errors are shown with the Python lines that led to them."""
    track: tuple[str, ...] = ()
    """The trackers that get the metrics."""
    profile_steps: frozenset[int] = frozenset()
    """The steps in which torch's profiler runs."""
    started_in: str | None = None
    """The directory in which the command was started, if the experiment file changes it."""


@dataclass(frozen=True)
class ProfileJob:
    """A problem whose models are to be measured, and the file of the profile."""

    problem: Problem
    out: Path
    timeout_seconds: float
    traceback: bool = False


def resume_command(out: Path) -> str:
    """Return the command that continues this process's run in `out`."""
    words = sys.argv[1:]
    for option in ("--out", "--resume"):
        while option in words:
            index = words.index(option)
            has_value = index + 1 < len(words) and not words[index + 1].startswith("--")
            del words[index : index + 1 + has_value]
    return f"realhf {shlex.join(words)} --resume --out {shlex.quote(str(out))}"


def how_to_continue(out: Path) -> str | None:
    """Return a sentence with the last checkpoint and the command to continue; None without a checkpoint."""
    if not (checkpoints := find_checkpoints(out / "checkpoints")):
        return None
    return f"the last checkpoint is that of step {max(checkpoints)}; to continue: {resume_command(out)}"


def is_worker() -> bool:
    """Return whether torchrun or our own launcher has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


PRELOAD = (
    "realhf.cli.worker",
    "torch.fx.experimental.symbolic_shapes",  # The first backward pass imports it.
    "transformers.models.auto.tokenization_auto",
)
"""What all workers import. None of it may ask for devices: CUDA cannot be used in a fork of a process that
has initialized it."""
_PR_SET_NAME = 15  # From Linux's prctl.h.


def _send(channel: Connection, message: dict[str, Any]) -> None:
    """Send a JSON object; do nothing if the other end is gone, which `_receive` reports."""
    with suppress(OSError):
        channel.send_bytes(json.dumps(message).encode())


def _receive(channel: Connection) -> dict[str, Any]:
    """Wait for a JSON object, and return it. Raises EOFError if the other end is gone."""
    try:
        return dict(json.loads(channel.recv_bytes()))
    except ConnectionError as error:
        raise EOFError from error


class ForkServer:
    """Forks workers, and waits for them.

    Orders are {"start": [environment variables of each worker], "argv": [words]} and {"signal": number}; the
    answers are {"ready": true} and {"rank": number, "code": exit code, below 0 for a signal} of each worker.
    """

    def __init__(self, channel: Connection, main: Callable[[], int]) -> None:
        self._channel = channel
        self._main = main
        self._ranks: dict[int, int] = {}
        """Process id -> rank of the workers that have not been waited for."""
        self._store = 0

    def run(self, listener: socket.socket) -> None:
        """Carry out orders until the launcher is gone, and then end the workers.

        Their store listens on `listener`; when it has ended, so have they, and this process.
        """
        self._store = self.fork(_keep_store, listener, name="realhf store")
        listener.close()
        _send(self._channel, {"ready": True})
        with SignalPipe([signal.SIGCHLD]) as pipe, suppress(EOFError):
            while True:
                sources: list[Any] = [self._channel, pipe.receiver]
                ready, _, _ = select.select(sources, [], [])
                if pipe.receiver in ready:
                    pipe.read()
                    self._reap()
                if self._channel in ready:
                    self._carry_out(_receive(self._channel))
        self._kill(signal.SIGKILL)
        os.kill(self._store, signal.SIGKILL)

    def _carry_out(self, order: dict[str, Any]) -> None:
        if "signal" in order:
            self._kill(order["signal"])
            return
        for variables in order["start"]:
            rank = variables["RANK"]
            pid = self.fork(_work, self._main, order["argv"], variables, name=f"{WORKER_NAME}{rank}")
            self._ranks[pid] = int(rank)

    def _kill(self, number: int) -> None:
        for pid in self._ranks:
            if number == signal.SIGKILL:
                _kill_group(pid)
            else:
                os.kill(pid, number)  # It cannot be another process: nobody has waited for this one.

    def _reap(self) -> None:
        if os.waitpid(self._store, os.WNOHANG)[0]:
            print("realhf: the process with the workers' store has ended", file=sys.stderr, flush=True)
            self._kill(signal.SIGKILL)
            os._exit(1)
        for pid in list(self._ranks):
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            _kill_group(pid)  # What it has started, and left behind.
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            _send(self._channel, {"rank": self._ranks.pop(pid), "code": code})

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


def serve(main: Callable[[], int], control_fd: int, store_fd: int) -> NoReturn:
    """Be the fork server of a launcher, which has blocked ENDING here: workers save after these signals.

    Workers execute `main`, the command line. `control_fd` is the socket to the launcher, and `store_fd` the
    one on which the workers' store listens.
    """
    server = ForkServer(Connection(control_fd), main)
    end_with_parent()
    for module in PRELOAD:
        importlib.import_module(module)
    end_with_parent(False)  # The end of the channel tells.
    server.run(socket.socket(fileno=store_fd))
    os._exit(0)


def _keep_store(listener: socket.socket) -> NoReturn:
    """Hold the store over which the workers meet. It lives through their restarts."""
    host, port = listener.getsockname()
    from torch.distributed import TCPStore

    store = TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60),
        master_listen_fd=listener.detach())
    parent = os.getppid()
    while store is not None and os.getppid() == parent:
        time.sleep(1.0)
    os._exit(0)


def _work(main: Callable[[], int], argv: Sequence[str], variables: dict[str, str]) -> NoReturn:
    """Be a worker that executes the command line with these arguments, and end with its exit code.

    It leaves ENDING to the launcher, which has them, too, if they are sent to all processes of a job.
    """
    SignalPipe(ENDING).__enter__()
    ignore_until_later(SHOW_STACKS)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.environ.update(variables)
    faulthandler.enable()  # A crash in native code shows the Python lines that led to it.
    catch_exits()
    sys.argv = ["realhf", *argv]
    try:
        code = main()
    except BaseException:
        traceback.print_exc()
        code = 1
    end_without_teardown(code)


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)  # It may not have a group yet.
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


_SERVE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from realhf.cli.launch import serve; "
    "from realhf.cli.main import main; serve(main, *map(int, sys.argv[2:]))")
"""The code of the fork server's process."""
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
    with SignalPipe((*ENDING, SHOW_STACKS)) as signals:
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
        self._channel, theirs = Pipe()
        descriptors = [theirs.fileno(), listener.fileno()]
        with blocked(ENDING):  # So the server never gets them.
            self._server = subprocess.Popen(
                [sys.executable, "-P", "-c", _SERVE, json.dumps(sys.path), *map(str, descriptors)],
                stdin=subprocess.DEVNULL, pass_fds=descriptors, start_new_session=True, cwd=directory)
        theirs.close()
        listener.close()
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
        _send(self._channel, {"start": workers, "argv": self._argv})

    def wait_for_server(self) -> bool:
        """Return whether the server can fork workers; if not, a signal has come first, or it has ended."""
        ready, _, _ = select.select(self._sources, [], [])
        if self._signals.receiver in ready:
            ending = [number for number in self._signals.read() if number != SHOW_STACKS]
            self.interrupted = next(iter(ending), None)
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
                if (ended := self._receive()) is None:
                    return 1
                codes[ended["rank"]] = ended["code"]
                if ended["code"] and not is_killed:
                    causes[ended["rank"]] = ended["code"]
            # Asked to end, workers that train still save. Others die by the signal, and the run cannot go on.
            is_saving = self.interrupted is not None and {0, 1, 2}.issuperset(codes.values())
            has_failed = bool(causes) and not is_saving
            if has_failed and deadline == math.inf:
                deadline = time.monotonic() + _GRACE_SECONDS
            if not is_killed and time.monotonic() >= deadline:
                is_killed = True
                _send(self._channel, {"signal": int(signal.SIGKILL)})
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

    def _receive(self) -> dict[str, int] | None:
        """Return the server's answer; None if it has ended."""
        try:
            return _receive(self._channel)
        except EOFError:
            self.is_lost = True
            if (code := self._server.wait()) < 0:  # Otherwise it has said why.
                ended = f"the process that forks workers was ended by {signal.Signals(-code).name}"
                print(f"realhf: {ended}", file=sys.stderr, flush=True)
            return None

    def _take_signals(self) -> bool:
        """Ask the workers to save and end, or to show stacks; return True if they were to end before."""
        for number in self._signals.read():
            if number == SHOW_STACKS:
                _send(self._channel, {"signal": int(number)})
                continue
            if self.interrupted is not None:
                return True
            self.interrupted = number
            _send(self._channel, {"signal": int(ASK_TO_STOP)})
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
