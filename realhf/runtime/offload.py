"""Weights of frozen roles that lie in host memory while nobody needs them."""

import torch


class OffloadedWeights:
    """A flat tensor of weights whose device memory exists only while it is in use; views of it stay valid.

    Only then can new views be made. Before they are first written, weights have no value.
    """

    def __init__(self, flat: torch.Tensor) -> None:
        self._flat, self._storage = flat, flat.untyped_storage()
        self.num_bytes = self._storage.nbytes()
        self._at_rest: torch.Tensor | None = None
        self._num_users = 0
        self._storage.resize_(0)

    def load(self) -> None:
        """Brings the weights in, unless they are; every `load` needs a `release`.

        On CUDA the host does not wait: what comes later on the current stream finds them.
        """
        self._num_users += 1
        if self._num_users == 1:
            self._storage.resize_(self.num_bytes)
            if self._at_rest is not None:
                self._flat.copy_(self._at_rest, non_blocking=True)

    def release(self, *, written: bool = False) -> None:
        """Gives the device memory back if this was the last user; `written`: the weights are new."""
        if written:
            if self._at_rest is None:
                self._at_rest = torch.empty_like(self._flat, device="cpu", pin_memory=self._flat.is_cuda)
            self._at_rest.copy_(self._flat)
        self._num_users -= 1
        if self._num_users == 0:
            self._storage.resize_(0)
