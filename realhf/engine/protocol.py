"""Engine: the interface through which the runtime holds a role's parameters on a rank and runs its calls."""

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


class Optimizer(Protocol):
    """The state of an optimizer, for checkpoints. Its regions are those of `held_by(..., sharded=True)`."""

    num_steps: int
    num_skipped: int

    @property
    def state(self) -> dict[str, Shards]:
        """This replica's tensors by kind, always the same memory: "master", "exp_avg", "exp_avg_sq"."""

    def state_was_read(self, num_steps: int, num_skipped: int) -> None:
        """Continue with these counts after `state` has been filled from a checkpoint."""


class Engine(Protocol):
    """A role's part on this rank under one layout. With an optimizer it can be trained, else it is frozen.

    All ranks of the layout construct engines in the same order, by `(spec, layout, world, dtype=...,
    optimizer=..., memory=..., lora=..., adapter_memory=...)`. The regions that `spec.held_by` assigns to a
    rank lie end to end in `flat`, which is `memory` if that is given. With `lora`, the engine trains adapters
    (in `adapter_memory`) instead of the model.
    """

    @property
    def flat(self) -> torch.Tensor:
        """Memory of the parameters, without the adapters."""

    @property
    def adapter_flat(self) -> torch.Tensor:
        """Memory of the adapters."""

    def shards(self) -> Shards:
        """Return the parameters, without the adapters, for reallocation."""

    def adapter_shards(self) -> Shards:
        """Return the parameters of the adapters."""

    def optimizer_shards(self) -> Shards:
        """Return for each parameter the rows of the optimizer's copy that this replica owns."""

    @property
    def optimizer(self) -> "Optimizer":
        """The optimizer of a trainable engine."""

    def export_shards(self) -> Shards:
        """Return this rank's tensors for export: its part of the model, the adapters, or both merged."""

    def load_base(self, directory: Path | None, *, seed: int) -> None:
        """Load the weights, without adapters, from a Hugging Face directory; draw missing weights, or all,
        from `seed`. Raises ValueError that names the file."""

    def load_adapters(self, *, seed: int) -> None:
        """Initialise the adapters, and the optimizer's copy of the trained parameters, after `load_base`."""

    def run(
        self, call: FunctionCall, minibatches: Sequence[Batch],
        *, micro_batch_tokens: int, recompute: bool = False, gather: bool = True, report: Report = no_report,
    ) -> CallResult:  # fmt: skip
        """Run the call on this rank's share of the samples, one Batch per mini-batch.

        With `recompute`, a train step keeps only every layer's input for the backward pass. After a train
        step on several replicas without `gather`, only `optimizer_shards` are up to date.
        """
