"""Deterministic runs: the settings with which kernels and collectives repeat bit for bit, and a record."""

import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

from realhf.calls import Generate
from realhf.errors import UserError
from realhf.models.kv_blocks import padded_size
from realhf.runtime.compile.program import Program
from realhf.user_input.files import read_object

RECORD = "determinism.json"
"""The file of a run directory with its surroundings."""
_CHOICES = {"NCCL_ALGO": "Ring", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Variables that are set unless the user has set them: the order in which NCCL adds, and memory with which
cuBLAS chooses the same kernels again."""
_VARIABLES = (*_CHOICES, "NCCL_PROTO", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "OMP_NUM_THREADS")


def repeat_exactly() -> None:
    """Choose deterministic kernels and collectives for this process, before it uses any.

    Kernels of torch that have no deterministic variant print a warning and run. Among them is `cumsum` of
    floats, which sampling needs; along the rows of a matrix it adds in one order. Attention has an exception
    (see `attention.interface.repeatable`).
    """
    for name, value in _CHOICES.items():
        os.environ.setdefault(name, value)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)


def surroundings(program: Program) -> dict[str, Any]:
    """Return the surroundings that decide the bits of a run, beside experiment and plan."""
    on_cuda = torch.cuda.is_available()
    rows = {
        call.name: sorted({padded_size(count) for count in range(1, call.work_as(Generate).max_rows + 1)})
        for call in program.graph.of_kind("generate")}
    return {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if on_cuda else platform.machine(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if on_cuda else None,
        "variables": {name: os.environ.get(name) for name in _VARIABLES},
        "graph_rows": rows,  # The sizes of recorded decoding steps.
    }


def record_surroundings(program: Program, out: Path) -> None:
    """Write the record into a run directory; a run that continues must have the same.

    Raises UserError that names the first difference.
    """
    path = out / RECORD
    here = surroundings(program)
    if not path.exists():
        path.write_text(json.dumps(here, indent=2) + "\n")
        return
    there = read_object(path)
    for name, value in {**here, **here["variables"]}.items():
        other = {**there, **there["variables"]}.get(name)
        if name != "variables" and other != value:
            raise UserError(
                f"{path}: {name} was {other}, and is {value} here: deterministic is true, "
                f"and the run would not repeat bit for bit; set {name} as it was")
