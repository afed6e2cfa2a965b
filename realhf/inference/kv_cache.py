"""KVCache: keys and values of one rank's layers, in blocks of tokens.

Shape suffixes: T tokens, K key-value heads, D head dim; P blocks, which kernels call pages, L tokens in one.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from realhf.devices.pinned import upload
from realhf.nn.transformer import Transformer


class KVCache:
    """A paged cache of keys and values. Each local layer has two tensors of `shape` (blocks, tokens in a
    block, kv heads, head_dim).

    With `value_dim`, the values are the first dims of the keys and are not stored separately.
    """

    def __init__(
        self, num_layers: int, shape: tuple[int, int, int, int], *, value_dim: int | None = None,
        dtype: torch.dtype, device: torch.device,
    ) -> None:
        num_tensors = 1 if value_dim else 2
        self.layers = [_zeros((num_tensors, *shape), dtype, device) for _ in range(num_layers)]
        self.value_dim = value_dim

    @classmethod
    def of(cls, model: Transformer, num_blocks: int, block_size: int) -> "KVCache":
        """Return an empty cache for the layers of the model's pipeline stage."""
        heads, dim, value_dim = model.cache_heads
        return cls(
            len(model.blocks), (num_blocks, block_size, heads, dim), value_dim=value_dim,
            dtype=model.flat.dtype, device=model.flat.device)

    @property
    def num_blocks(self) -> int:
        return self.layers[0].shape[1]

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self.layers[0].shape[2]

    def grow(self, num_blocks: int) -> None:
        """Add empty blocks, so that there are `num_blocks` in all. Each layer is copied in turn."""
        for i, old in enumerate(self.layers):
            shape = (old.shape[0], num_blocks, *old.shape[2:])
            self.layers[i] = _zeros(shape, old.dtype, old.device)
            self.layers[i][:, : old.shape[1]] = old

    def write(self, layer: int, cache_positions_T: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> None:
        """Write keys and values at cache positions: block * block size + offset in the block."""
        news = (k_TKD, v_TKD) if self.value_dim is None else (k_TKD,)
        for cached, new in zip(self.layers[layer].flatten(1, 2), news, strict=True):
            cached.index_copy_(0, cache_positions_T, new)

    def pages(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a layer: k_PLKD, v_PLKD."""
        k_PLKD, *others = self.layers[layer]
        return k_PLKD, others[0] if others else k_PLKD[..., : self.value_dim]

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy shared blocks for rows that are about to write to them."""
        device = self.layers[0].device
        pairs_2P = upload(np.array((sources, targets), np.int64), device)
        for layer in self.layers:
            layer.index_copy_(1, pairs_2P[1], layer.index_select(1, pairs_2P[0]))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros, because values after a row's end are multiplied by probability zero and must be finite.

    On a CPU they come from numpy, whose pages take neither memory nor time before they are written to.
    """
    if device.type != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)
