"""Tensors in memory that the other processes of this host can map and read without a message."""

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
    """Hands out tensors of one process, and describes them so that others find them."""

    def __init__(self) -> None:
        self._blocks: dict[int, tuple[int, str]] = {}  # address -> length in bytes, path

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor; its memory goes back when nobody here and nowhere else uses it any more."""
        num_bytes = numel * dtype.itemsize
        if not num_bytes or not _ENABLED:
            return torch.zeros(numel, dtype=dtype)
        file = os.memfd_create("realhf")
        os.ftruncate(file, num_bytes)
        block = mmap.mmap(file, num_bytes)
        # Its pages are zeros when they are first touched. The tensor's storage keeps the block.
        tensor = torch.frombuffer(block, dtype=dtype)
        address = tensor.data_ptr()
        self._blocks[address] = num_bytes, f"/proc/{os.getpid()}/fd/{file}"
        weakref.finalize(block, self._release, address, file)
        return tensor

    def _release(self, address: int, file: int) -> None:
        del self._blocks[address]
        os.close(file)

    def describe(self, tensor: torch.Tensor) -> dict[str, Any] | None:
        """Where others find the tensor, as JSON; None when it is not in this memory."""
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
    """Another process's tensors, by their descriptions."""

    def __init__(self) -> None:
        self._blocks: dict[str, torch.Tensor] = {}

    def tensor(self, description: Mapping[str, Any]) -> torch.Tensor:
        """The tensor itself, not a copy. Raises OSError where this process may not see the other's memory."""
        path, length = description["path"], description["length"]
        if path not in self._blocks:
            file = os.open(path, os.O_RDWR)
            try:
                self._blocks[path] = torch.frombuffer(mmap.mmap(file, length), dtype=torch.uint8)
            finally:
                os.close(file)
        dtype, shape = getattr(torch, description["dtype"]), description["shape"]
        extent = 1 + sum((n - 1) * s for n, s in zip(shape, description["stride"], strict=True))
        size = extent * dtype.itemsize if math.prod(shape) else 0
        flat = self._blocks[path][description["offset"] :][:size].view(dtype)
        return flat.as_strided(shape, description["stride"])
