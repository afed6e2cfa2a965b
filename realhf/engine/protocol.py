"""Engine: what the runtime asks of whatever holds a role's parameters on a rank and runs its calls."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from realhf.data.batch import Batch
from realhf.dist.activity import Report, no_report
from realhf.graph import FunctionCall

Metrics = dict[str, float]
DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}
Shards = dict[str, torch.Tensor]
"""Parameter name -> this rank's region of it, always the same memory."""
@dataclass(frozen=True)
class CallResult:
    """Output columns (at least on the layout's heads) and metrics (the same on the last pipeline stage)."""

    batch: Batch
    metrics: Metrics


class Engine(Protocol):
    """A role's part on this rank under one layout. With an optimizer it can be trained, else it is frozen.

    An engine is made as `(spec, layout, world, dtype=..., optimizer=..., memory=..., lora=...,
    adapter_memory=...)`, by all ranks of the layout in the same order. What `spec.held_by` says of a rank
    lies end to end in `flat`, which is `memory` where that is given. With `lora` there are adapters (in
    `adapter_memory`), and they are what is trained.
    """

    @property
    def flat(self) -> torch.Tensor:
        """The memory of the parameters, without the adapters."""

    @property
    def adapter_flat(self) -> torch.Tensor:
        """The memory of the adapters."""

    def shards(self) -> Shards:
        """The parameters, for reallocation; without the adapters."""

    def adapter_shards(self) -> Shards:
        """The adapters."""

    def optimizer_shards(self) -> Shards:
        """Parameter name -> the rows of the optimizer's copy that this replica owns."""

    def export_shards(self) -> Shards:
        """What is exported of this rank: its part of the model, of its adapters, or of both as one model."""

    def load_base(self, directory: Path | None, *, seed: int) -> None:
        """Weights from a Hugging Face directory; what it lacks, or everything, is drawn from `seed`. Without
        adapters. Raises ValueError that names the file."""

    def load_adapters(self, *, seed: int) -> None:
        """The adapters' first values, when the weights beneath are there; with the optimizer's copy of what
        is trained."""

    def run(
        self, call: FunctionCall, minibatches: Sequence[Batch],
        *, micro_batch_tokens: int, recompute: bool = False, gather: bool = True, report: Report = no_report,
    ) -> CallResult:  # fmt: skip
        """Does the call's work on this rank's share of the samples, one Batch per mini-batch.

        With `recompute` a train step keeps only every layer's input for the backward pass. After one on
        several replicas without `gather` only `optimizer_shards` are up to date.
        """
