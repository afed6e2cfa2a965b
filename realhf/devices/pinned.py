"""Copies through pinned host memory, which a GPU reads and writes while the host goes on."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_FULL = 0.9
"""A run that fills at least this share of its allocation is long enough."""


def upload(numbers: NDArray[Any], device: torch.device) -> Tensor:
    """Return the numbers on the device; on a CPU, without a copy."""
    return upload_tensor(torch.from_numpy(numbers), device)


def upload_tensor(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the host on the device; on a CPU, the tensor itself."""
    if device.type == "cpu":
        return tensor
    if device.type != "cuda":
        return tensor.to(device)
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    return pinned.copy_(tensor).to(device, non_blocking=True)


class Download:
    """A tensor on its way to the host."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = tensor
        if tensor.device.type != "cpu":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    @property
    def is_here(self) -> bool:
        """Whether the host has had the tensor all along."""
        return self._event is None

    def wait(self) -> NDArray[Any]:
        """Return the numbers, after waiting for the work that made them."""
        if self._event is not None:
            self._event.synchronize()
        return self.arrived()

    def arrived(self) -> NDArray[Any]:
        """Return the numbers of a copy that has ended, as a later one has been waited for."""
        numbers: NDArray[Any] = self._host.numpy()
        return numbers


def run_bounds(sizes: Sequence[int]) -> list[int]:
    """Split tensors of these sizes in bytes into runs, each for one allocation; return the runs' bounds.

    torch rounds pinned memory up to a power of two. Each run is the longest that fills nine tenths of its
    power of two, or the one that fills most of it if none fills so much.
    """
    bounds = [0]
    while bounds[-1] < len(sizes):
        totals = np.array(list(accumulate(sizes[bounds[-1] :])), np.int64)
        shares = totals / np.exp2(np.ceil(np.log2(np.maximum(totals, 1))))
        full = np.flatnonzero(shares >= _FULL)
        bounds.append(bounds[-1] + 1 + int(full[-1] if len(full) else shares.argmax()))
    return bounds
