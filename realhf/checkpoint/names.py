"""Names of checkpoints of runs and of the files in them. Free of torch."""

import re
from pathlib import Path

MANIFEST = "manifest.json"
CHECKSUM = "manifest.sha256"
"""A file with the manifest's checksum, as `sha256sum` writes it."""
METRICS = "metrics.jsonl"
"""The history of metrics, in a run directory and in a checkpoint."""
_STEP = re.compile(r"step_(\d+)")


def checkpoint_name(step: int) -> str:
    return f"step_{step}"


def find_checkpoints(directory: Path) -> dict[int, Path]:
    """Return the complete checkpoints in a directory by step, the newest first."""
    checkpoints = {}
    for path in directory.glob("step_*"):
        if (step := step_of(path)) is not None and path.is_dir():
            checkpoints[step] = path
    return dict(sorted(checkpoints.items(), reverse=True))


def step_of(path: Path) -> int | None:
    """Return the step in the name of a checkpoint's directory; None if it has another name."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else None


def rank_name(rank: int) -> str:
    """Return the name of the file of the tensors that a rank writes."""
    return f"rank_{rank:05d}.safetensors"


def samples_name(rank: int) -> str:
    """Return the name of the file of the samples that a rank holds between two steps."""
    return f"samples_{rank:05d}.safetensors"
