"""For tests of the command line: experiment files, commands with all their processes, what runs leave."""

import ctypes
import functools
import json
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml

from benchmarks.measure.two_hosts import Host
from realhf.cli import launch
from realhf.cli.main import main
from realhf.signals import ENDING
from tests.pool import FORK_SERVER, MARK
from tests.runtime.tiny import HF_CONFIG, write_task

REPO = Path(__file__).parent.parent
REALHF = (sys.executable, "-m", "realhf")
GRPO_LAYOUTS = {"actor_generate": "d4@0-3", "ref_forward": "t2@2-3", "actor_train": "d2t2@0-3"}
TWO_RANKS = {"actor_generate": "d2@0-1", "ref_forward": "d1@1", "actor_train": "t2@0-1"}
_TORCHRUN = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
)


@functools.cache
def _shared() -> tempfile.TemporaryDirectory[str]:
    """A directory for what tests of several modules use; it goes with the process."""
    return tempfile.TemporaryDirectory(prefix="realhf-test-")


@functools.cache
def _task() -> Path:
    directory = Path(_shared().name, "task")
    directory.mkdir()
    return write_task(directory)


def write_experiment(
    directory: Path,
    kind: str = "grpo",
    *,
    body: str = "",
    model: dict[str, Any] | None = None,
    **settings: Any,
) -> Path:
    """A file that defines `experiment`, on the tiny float64 task.

    `body` is code that may change it; `model` are fields of the model's config.json.
    """
    task = _task()
    if model is not None:
        task = write_task(directory)
        (task / "config.json").write_text(json.dumps(HF_CONFIG | model))
    path = directory / "tiny_experiment.py"
    path.write_text(
        "from dataclasses import replace\n"
        "from pathlib import Path\n\n"
        "from realhf import DataflowGraph, FunctionCall, HostFunction\n"
        "from tests.runtime.tiny import make_experiment\n\n"
        f"experiment = make_experiment({kind!r}, Path({str(task)!r}), **{settings!r})\n{body}\n"
    )
    return path


def write_plan(directory: Path, layouts: dict[str, str]) -> Path:
    path = directory / "plan.yaml"
    path.write_text(yaml.safe_dump({"calls": {call: {"layout": layout} for call, layout in layouts.items()}}))
    return path


def make_grpo_run(directory: Path, layouts: dict[str, str] = TWO_RANKS) -> None:
    """Run GRPO on local processes, scheduled for the links of a cluster file; leave in the directory the
    experiment file, plan.yaml and `run`."""
    experiment, plan = write_experiment(directory, steps=2, model={}), write_plan(directory, layouts)
    words = ("run", experiment, "--plan", plan, "--out", directory / "run", "--seed", 3)
    with ForkedCommand(*words, "--cluster", "cpu-laptop") as command:
        code, _, err = command.finish()
    assert code == 0, err


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


TIMED = ("timing_s/", "perf/", "bubble/", "compute/device_seconds")
"""Beginnings of the names of metrics that depend on the clock."""


def untimed(path: Path) -> list[dict[str, Any]]:
    """The steps of a metrics.jsonl without what depends on the clock."""
    return [
        {k: v for k, v in step.items() if not k.startswith(TIMED)}
        for step in read_jsonl(path)
    ]


class Command:
    """A command started from the repository; all its descendants carry a mark of it in their environment."""

    def __init__(self, *words: Any, cwd: Path = REPO, **variables: str) -> None:
        self._mark = uuid.uuid4().hex
        inherited = {name: value for name, value in os.environ.items() if name not in _TORCHRUN}
        settings = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", MARK: self._mark}
        self._process = self._start([str(word) for word in words], cwd, inherited | settings | variables)

    def _start(self, words: list[str], cwd: Path, variables: dict[str, str]) -> Any:
        return subprocess.Popen(
            words, cwd=cwd, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def __enter__(self) -> "Command":
        return self

    def __exit__(self, *_: Any) -> None:
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        self._process.kill()
        self._process.communicate()

    def finish(self, timeout: float = 180) -> tuple[int, str, str]:
        """Exit code, standard output and standard error."""
        out, err = self._process.communicate(timeout=timeout)
        return self._process.returncode, out, err

    def interrupt(self, number: signal.Signals = signal.SIGINT) -> None:
        """Press Ctrl-C, or send another signal."""
        self._process.send_signal(number)

    def wait(self, timeout: float) -> int:
        """Return the exit code; raise TimeoutError if the command goes on for longer."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(str(error)) from None

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def stdout(self) -> Any:
        return self._process.stdout

    @property
    def stderr(self) -> Any:
        return self._process.stderr

    def processes(self) -> dict[int, dict[str, str]]:
        """Process id -> environment of every living process of this command."""
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                variables = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
            except OSError:  # It is not ours, or has just ended.
                continue
            if f"{MARK}={self._mark}" in variables:
                found[int(entry.name)] = dict(v.split("=", 1) for v in variables if "=" in v)
        return found

    def worker(self, rank: int) -> int:
        """Process id of the worker with this rank."""
        for pid, variables in self.processes().items():
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            if name == f"{launch.WORKER_NAME}{rank}" or variables.get("RANK") == str(rank):
                return pid
        raise ProcessLookupError(f"there is no worker of rank {rank}")


def realhf(*words: Any, **options: Any) -> Command:
    """Start `realhf WORDS`."""
    return Command(*REALHF, *words, **options)


class ForkedCommand(Command):
    """`realhf WORDS` in a process, and with workers, that are forked from one that has imported torch.

    Use `realhf` where the start itself is tested, or another environment of Python.
    """

    def _start(self, words: list[str], cwd: Path, variables: dict[str, str]) -> "_Fork":
        return _Fork(words, cwd, variables)


class _Fork:
    """A forked command, with as much of subprocess.Popen as commands use."""

    def __init__(self, words: list[str], cwd: Path, variables: dict[str, str]) -> None:
        pipes = [multiprocessing.Pipe(duplex=False) for _ in range(2)]
        ends = [end for _, end in pipes]
        self._process = FORK_SERVER.start(_be_command, words, str(cwd), variables, *ends, daemon=False)
        self.stdout, self.stderr = (os.fdopen(os.dup(pipe.fileno())) for pipe, _ in pipes)
        for both in pipes:
            for end in both:
                end.close()
        self.pid: int = self._process.pid
        self.kill = self._process.kill

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise TimeoutError(f"the command goes on after {timeout} s")
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Return what the command writes until it and its workers have ended."""
        texts = ["", ""]

        def read(index: int, stream: Any) -> None:
            if not stream.closed:
                texts[index] = stream.read()
                stream.close()

        readers = [threading.Thread(target=read, args=pair, daemon=True)
                   for pair in enumerate((self.stdout, self.stderr))]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join(timeout)
        return texts[0], texts[1]


def _be_command(
    words: list[str], cwd: str, variables: dict[str, str], out: Connection, err: Connection
) -> None:
    """Be `python -m realhf WORDS`; the server of its workers is forked, too, as it would import torch."""
    for descriptor, end in ((1, out), (2, err)):
        os.dup2(end.fileno(), descriptor)
        end.close()
    os.chdir(cwd)
    sys.path.insert(0, cwd)
    server = _ForkedServer()
    _take_environment(variables)
    sys.argv = ["realhf", *words]
    start = subprocess.Popen

    def popen(words: Any, **options: Any) -> Any:
        if launch._SERVE not in words:
            return start(words, **options)
        server.begin(options["pass_fds"], options["cwd"])
        return server

    with patch.object(launch.subprocess, "Popen", popen):
        runpy.run_module("realhf", run_name="__main__", alter_sys=True)


def _take_environment(variables: dict[str, str]) -> None:
    """Take these variables; /proc, which shows what a process has started with, gets the mark."""
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    mark = variables[MARK].encode()
    ctypes.memmove(libc.getenv(MARK.encode()), mark, len(mark))
    os.environ.clear()
    os.environ.update(variables)


class _ForkedServer:
    """The server of a launcher, with as much of subprocess.Popen as the launcher uses.

    It is forked before the launcher has done anything, and waits for `begin`.
    """

    def __init__(self) -> None:
        self._code: int | None = None
        self._channel, theirs = socket.socketpair()
        self._pid = os.fork()
        if self._pid:
            theirs.close()
            return
        try:
            self._channel.close()
            message, descriptors, _, _ = socket.recv_fds(theirs, 1 << 20, 2)
            if message:
                order = json.loads(message)
                os.setsid()
                os.chdir(order["directory"])
                signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
                _take_environment(order["variables"])
                launch.serve(main, *descriptors)
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(1)

    def begin(self, descriptors: list[int], directory: str | None) -> None:
        order = {"variables": dict(os.environ), "directory": directory or os.getcwd()}
        socket.send_fds(self._channel, [json.dumps(order).encode()], descriptors)
        self._channel.close()

    def kill(self) -> None:
        if self._code is None:
            os.kill(self._pid, signal.SIGKILL)

    def wait(self) -> int:
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        return self._code


def torchrun_on(
    hosts: Sequence[Host], *words: Any, per_host: int, rendezvous: str = "static"
) -> list[Command]:
    """One torchrun on each host, which run `words` together; the rendezvous is "static" or "c10d"."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", len(hosts)]
    torchrun += ["--nproc-per-node", per_host]
    if rendezvous == "static":
        torchrun += ["--master-addr", hosts[0].address, "--master-port", 29400]
    else:
        endpoint = f"{hosts[0].address}:29400"
        torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "test"]
    commands = []
    for i, host in enumerate(hosts):
        identity = ["--node-rank", i]
        if rendezvous == "c10d":  # All namespaces have this machine's name, so torchrun is told who it is.
            identity = ["--local-addr", host.address, "--rdzv-conf", f"is_host={int(i == 0)}"]
        variables = {"GLOO_SOCKET_IFNAME": host.interface}
        commands.append(Command(*host.inside, *torchrun, *identity, *words, **variables))
    return commands


def wait_until(condition: Any, *, seconds: float) -> bool:
    """Whether the condition came true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
