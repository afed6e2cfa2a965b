"""OffloadedWeights: weights of frozen roles that stay in host memory while no call needs them."""

import torch


class OffloadedWeights:
    """A flat tensor of weights whose device memory exists only while it is in use.

    Views of the tensor stay valid, but new ones can be made only while it is in use. Until they are first
    written, the weights are undefined.
    """

    def __init__(self, flat: torch.Tensor) -> None:
        self._flat = flat
        self._storage = flat.untyped_storage()
        self.num_bytes = self._storage.nbytes()
        self._host_copy: torch.Tensor | None = None
        self._num_users = 0
        self._storage.resize_(0)

    def load(self) -> None:
        """Copy the weights to the device, unless they are there; every `load` needs a `release`.

        On CUDA the host does not wait: later work on the current stream sees the weights.
        """
        self._num_users += 1
        if self._num_users == 1:
            self._storage.resize_(self.num_bytes)
            if self._host_copy is not None:
                self._flat.copy_(self._host_copy, non_blocking=True)

    def release(self, *, written: bool = False) -> None:
        """Free the device memory if this was the last user; `written` saves changed weights first."""
        if written:
            if self._host_copy is None:
                self._host_copy = torch.empty_like(self._flat, device="cpu", pin_memory=self._flat.is_cuda)
            self._host_copy.copy_(self._flat)
        self._num_users -= 1
        if self._num_users == 0:
            self._storage.resize_(0)
