"""The types in which engines and the runtime talk to each other."""

from dataclasses import dataclass, field

import torch

from realhf.data.batch import Batch

Metrics = dict[str, float]
DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}


@dataclass(frozen=True)
class CallResult:
    """Output columns (at least on the result ranks) and metrics (the same on the last pipeline stage).

    After a round of a generation, `unfinished` are the samples that go on in the next one, with the same
    columns.
    """

    batch: Batch
    metrics: Metrics
    unfinished: Batch = field(default_factory=lambda: Batch([]))
