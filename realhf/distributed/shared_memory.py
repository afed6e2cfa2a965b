"""Tensors in memory that other processes on this host can map and read without messages."""

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
        if not numel or not _ENABLED:
            return torch.zeros(numel, dtype=dtype)
        file = os.memfd_create("realhf")
        path = f"/proc/{os.getpid()}/fd/{file}"
        # The system fills its pages with zeros on first access.
        tensor = torch.from_file(path, shared=True, size=numel, dtype=dtype)
        address = tensor.data_ptr()
        self._blocks[address] = tensor.nbytes, path
        weakref.finalize(tensor.untyped_storage(), self._release, address, file)
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
        }


class Mapped:
    """The shared tensors of other processes, mapped from their descriptions."""

    def __init__(self) -> None:
        self._blocks: dict[str, torch.Tensor] = {}

    def tensor(self, description: Mapping[str, Any]) -> torch.Tensor:
        """Return the tensor itself, not a copy. Raises RuntimeError if this process may not read it."""
        path = description["path"]
        if path not in self._blocks:
            length = description["length"]
            self._blocks[path] = torch.from_file(path, shared=True, size=length, dtype=torch.uint8)
        dtype = getattr(torch, description["dtype"])
        storage = self._blocks[path].untyped_storage()
        offset = description["offset"] // dtype.itemsize
        return torch.empty(0, dtype=dtype).set_(storage, offset, description["shape"], description["stride"])
