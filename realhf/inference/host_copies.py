"""Copies between the host and the device for which neither of them waits."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_NUM_BUFFERS = 3  # A step's buffer is written again three steps later, when its copy has usually ended.
_ALIGNMENT = 16  # Bytes; kernels load several numbers at a time.


class StepUpload:
    """Sends all numbers of a step to the device in one copy.

    The copies start from a ring of pinned buffers. The host waits for the last copy from a buffer before it
    writes to it again. While rows decode, that copy has ended: the tokens of a later step have been read.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ring = [torch.empty(0, dtype=torch.uint8)] * (0 if device.type == "cpu" else _NUM_BUFFERS)
        self._next = 0
        self._copied: list[torch.cuda.Event | None] = [None] * len(self._ring)
        """The ends of the last copies from the buffers."""

    def __call__(self, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
        """Return the arrays as tensors on the device; a CPU shares the arrays' memory."""
        if not self._ring:
            return [torch.from_numpy(array) for array in arrays]
        padded_sizes = (-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays)
        *starts, stop = accumulate(padded_sizes, initial=0)
        num_bytes = max(_ALIGNMENT, stop)
        number = self._next
        self._next = (number + 1) % len(self._ring)
        buffer = self._buffer(number, num_bytes)
        on_host = buffer.numpy()
        for start, array in zip(starts, arrays, strict=True):
            on_host[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        on_device = buffer[:num_bytes].to(self._device, non_blocking=True)
        copied = self._copied[number] = torch.cuda.Event()
        copied.record()
        return [
            on_device[start : start + array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
            for start, array in zip(starts, arrays, strict=True)
        ]

    def _buffer(self, number: int, num_bytes: int) -> Tensor:
        """Return a buffer of the ring, of at least so many bytes, that no copy reads any more."""
        copied = self._copied[number]
        if copied is not None and not copied.query():
            copied.synchronize()
        if len(self._ring[number]) < num_bytes:
            size = 1 << (num_bytes - 1).bit_length()
            self._ring[number] = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
        return self._ring[number]
