"""Pinned host memory, from and to which a GPU copies while the host goes on."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_FULL = 0.9
"""Share of an allocation that is worth not being split further."""


def upload(numbers: NDArray[Any], device: torch.device) -> Tensor:
    """Return the numbers on the device; from a CPU's own memory, they are not copied."""
    return upload_tensor(torch.from_numpy(numbers), device)


def upload_tensor(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the host on the device; a CPU's own is not copied."""
    if device.type == "cpu":
        return tensor
    if device.type != "cuda":
        return tensor.to(device)
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    return pinned.copy_(tensor).to(device, non_blocking=True)


def run_bounds(sizes: Sequence[int]) -> list[int]:
    """Split tensors of these bytes into runs that are allocated together; return the runs' bounds.

    torch rounds pinned memory up to a power of two. A run is the longest one that fills nine tenths of that;
    if none does, the one that fills most of it.
    """
    bounds = [0]
    while bounds[-1] < len(sizes):
        totals = np.array(list(accumulate(sizes[bounds[-1] :])), np.int64)
        shares = totals / np.exp2(np.ceil(np.log2(np.maximum(totals, 1))))
        full = np.flatnonzero(shares >= _FULL)
        bounds.append(bounds[-1] + 1 + int(full[-1] if len(full) else shares.argmax()))
    return bounds
