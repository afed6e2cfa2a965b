"""Job: the order that the command line gives to a worker."""

import os
from dataclasses import dataclass
from pathlib import Path

from realhf.runtime.program import Program


@dataclass(frozen=True)
class Job:
    """A program to run, and its output: `out` is a run directory, or the file of a profile."""

    program: Program
    name: str
    """Name of the experiment file without its suffix; run directories are named after it."""
    out: Path | None
    timeout_seconds: float
    traceback: bool = False
    """Whether errors are shown with the Python lines that led to them."""


def is_worker() -> bool:
    """Return whether torchrun or our own launcher has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ
