"""Tensors in memory that other processes on this host can map and read without messages."""

import math
import mmap
import os
import weakref
from bisect import bisect_right
from collections.abc import Mapping
from typing import Any

import torch

_ENABLED = hasattr(os, "memfd_create")


class SharedMemory:
    """An allocator of shared tensors, which describes them so that other processes can map them."""

    def __init__(self) -> None:
        self._blocks: dict[int, tuple[int, str]] = {}  # Length in bytes and path, by address.

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat tensor of zeros; its memory is freed when no process uses it any more."""
        num_bytes = numel * dtype.itemsize
        if not num_bytes or not _ENABLED:
            return torch.zeros(numel, dtype=dtype)
        file = os.memfd_create("realhf")
        os.ftruncate(file, num_bytes)
        block = mmap.mmap(file, num_bytes)
        # The system fills its pages with zeros on first access. The tensor's storage keeps the block alive.
        tensor = torch.frombuffer(block, dtype=dtype)
        address = tensor.data_ptr()
        self._blocks[address] = num_bytes, f"/proc/{os.getpid()}/fd/{file}"
        weakref.finalize(block, self._release, address, file)
        return tensor

    def _release(self, address: int, file: int) -> None:
        del self._blocks[address]
        os.close(file)

    def describe(self, tensor: torch.Tensor) -> dict[str, Any] | None:
        """Return a JSON description by which others map the tensor, or None if it is not in this memory."""
        starts = sorted(self._blocks)
        number = bisect_right(starts, tensor.data_ptr()) - 1
        if tensor.device.type != "cpu" or number < 0:
            return None
        length, path = self._blocks[starts[number]]
        offset = tensor.data_ptr() - starts[number]
        if offset >= length:
            return None
        return {
            "path": path, "length": length, "offset": offset,
            "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape),
            "stride": list(tensor.stride()),
        }  # fmt: skip


class Mapped:
    """The shared tensors of other processes, mapped from their descriptions."""

    def __init__(self) -> None:
        self._blocks: dict[str, torch.Tensor] = {}

    def tensor(self, description: Mapping[str, Any]) -> torch.Tensor:
        """Return the tensor itself, not a copy. Raises OSError if this process may not read that memory."""
        path = description["path"]
        if path not in self._blocks:
            file = os.open(path, os.O_RDWR)
            try:
                block = mmap.mmap(file, description["length"])
                self._blocks[path] = torch.frombuffer(block, dtype=torch.uint8)
            finally:
                os.close(file)
        dtype = getattr(torch, description["dtype"])
        shape = description["shape"]
        extent = 1 + sum((n - 1) * s for n, s in zip(shape, description["stride"], strict=True))
        size = extent * dtype.itemsize if math.prod(shape) else 0
        flat = self._blocks[path][description["offset"] :][:size].view(dtype)
        return flat.as_strided(shape, description["stride"])
