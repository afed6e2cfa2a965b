"""Runs of the real command line for tests: experiment files, processes in a session of their own, what a run leaves."""

import functools
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.runtime.tiny import write_task

REPO = Path(__file__).parent.parent
GRPO_PLAN = {"actor_generate": "d4@0-3", "ref_forward": "t2@2-3", "actor_train": "d2t2@0-3"}
UNTIMED = ("timing_s/", "perf/")


def write_experiment(directory: Path, kind: str = "grpo", *, name: str = "experiment", body: str = "", **changes: Any) -> Path:
    """An experiment file on the tiny float64 task, whose files are made on first use; `body` may change `experiment`."""
    if not (directory / "task").is_dir():
        (directory / "task").mkdir()
        write_task(directory / "task")
    path = directory / f"{name}.py"
    path.write_text(
        "from dataclasses import replace\n"
        "from pathlib import Path\n\n"
        "from realhf import DatasetConfig, FunctionCall, HostFunction\n"
        "from tests.runtime.tiny import make_experiment\n\n"
        f"experiment = make_experiment({kind!r}, Path({str(directory / 'task')!r}), **{changes!r})\n{body}"
    )
    return path


def write_plan(path: Path, layouts: dict[str, str]) -> Path:
    path.write_text(yaml.safe_dump({"calls": {call: {"layout": layout} for call, layout in layouts.items()}}))
    return path


def environment(**changes: str) -> dict[str, str]:
    """What a user's shell would give: nothing of torchrun's, one thread per worker."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID")}
    return inherited | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | changes


class Process:
    """A command that leads a session of its own, so that whatever it starts can be found and ended."""

    def __init__(self, *command: Any, **changes: str) -> None:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self._main = subprocess.Popen(
            list(map(str, command)), cwd=REPO, env=environment(**changes), start_new_session=True, **pipes
        )

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: Any) -> None:
        for pid in self.pids():
            with_suppressed_kill(pid)
        self._main.communicate()

    def finish(self, timeout: float = 120) -> tuple[int, str, str]:
        """Exit code, standard output, standard error."""
        out, err = self._main.communicate(timeout=timeout)
        return self._main.returncode, out, err
