"""Job: what the command line tells a worker to do."""

import os
import shlex
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from realhf.checkpoint.names import find_checkpoints
from realhf.planner.problem import Problem
from realhf.runtime.compile.program import Program

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
