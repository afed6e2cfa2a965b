"""OffloadedWeights: weights of frozen roles that stay in host memory while no call needs them."""

import torch

_BLOCK_BYTES = 1 << 28
"""Bytes of an allocation of the host copy: a power of two, to which torch rounds pinned memory up."""


class OffloadedWeights:
    """A flat tensor of weights whose device memory exists only while it is in use.

    Views of the tensor stay valid, but new ones can be made only while it is in use. Until they are first
    written, the weights are undefined.
    """

    def __init__(self, flat: torch.Tensor) -> None:
        self._flat = flat
        self._storage = flat.untyped_storage()
        self.num_bytes = self._storage.nbytes()
        self._host_copy: list[torch.Tensor] = []
        """The weights block by block, once they have been written."""
        self._num_users = 0
        self._storage.resize_(0)

    def load(self) -> None:
        """Copy the weights to the device, unless they are there; every `load` needs a `release`.

        On CUDA the host does not wait: later work on the current stream sees the weights.
        """
        self._num_users += 1
        if self._num_users == 1:
            self._storage.resize_(self.num_bytes)
            for block, copy in zip(self._blocks(), self._host_copy, strict=False):
                block.copy_(copy, non_blocking=True)

    def release(self, *, written: bool = False) -> None:
        """Free the device memory if this was the last user; `written` saves changed weights first."""
        if written:
            pins = self._flat.is_cuda
            blocks = self._blocks()
            self._host_copy = self._host_copy or [
                torch.empty_like(block, device="cpu", pin_memory=pins) for block in blocks]
            for block, copy in zip(blocks, self._host_copy, strict=True):
                copy.copy_(block)
        self._num_users -= 1
        if self._num_users == 0:
            self._storage.resize_(0)

    def _blocks(self) -> tuple[torch.Tensor, ...]:
        """Return the weights on the device in blocks, which share no allocation on the host."""
        return self._flat.split(_BLOCK_BYTES // self._flat.itemsize)
