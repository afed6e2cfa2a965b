"""For tests of the command line: experiment files, commands with all their processes, what runs leave."""

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.measure.two_hosts import Host
from realhf.cli.launch import WORKER_NAME
from tests.runtime.tiny import HF_CONFIG, write_task

REPO = Path(__file__).parent.parent
REALHF = (sys.executable, "-m", "realhf")
GRPO_LAYOUTS = {"actor_generate": "d4@0-3", "ref_forward": "t2@2-3", "actor_train": "d2t2@0-3"}
TWO_RANKS = {"actor_generate": "d2@0-1", "ref_forward": "d1@1", "actor_train": "t2@0-1"}
_MARK = "REALHF_TEST_COMMAND"
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
    with Command(*REALHF, "run", experiment, "--plan", plan, "--out", directory / "run", "--seed", 3,
                 "--cluster", "cpu-laptop") as command:  # fmt: skip
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
        settings = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", _MARK: self._mark}
        self._process = subprocess.Popen(
            [str(word) for word in words],
            cwd=cwd,
            env=inherited | settings | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

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

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

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
            if f"{_MARK}={self._mark}" in variables:
                found[int(entry.name)] = dict(v.split("=", 1) for v in variables if "=" in v)
        return found

    def worker(self, rank: int) -> int:
        """Process id of the worker with this rank."""
        for pid, variables in self.processes().items():
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            if name == f"{WORKER_NAME}{rank}" or variables.get("RANK") == str(rank):
                return pid
        raise ProcessLookupError(f"there is no worker of rank {rank}")


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
