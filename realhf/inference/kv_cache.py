"""KVCache: keys and values of one rank's layers in blocks, and attention of the newest tokens over them.

Attention reads the blocks in place and treats each block separately; it reads a shared block, or several
joined ones, once for all rows that share it. The partial results are combined by log-sum-exp (Dao et al.
2023, "Flash-Decoding"; for shared prefixes, Hydragen, arXiv:2402.05099).

Shape suffixes: B rows, T tokens of all rows end to end, N query heads, K key-value heads, G queries per
key-value head, D head dim; P blocks (joined blocks count as one), L tokens in a block, S rows that share a
block, M blocks of a row, X partial results of all blocks and rows.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from realhf.inference.block_tables import BlockSet, Decoding
from realhf.nn.attention import AttentionKind, attention_with_lse
from realhf.nn.transformer import Transformer


class KVCache:
    """A paged cache of keys and values: of each local layer, both of `shape` (blocks, tokens in a block, kv
    heads, head_dim).

    With `value_dim`, the values are the first dims of the keys and are not stored separately.
    """

    def __init__(
        self, num_layers: int, shape: tuple[int, int, int, int], *, value_dim: int | None = None,
        dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        parts = 1 if value_dim else 2
        self.layers = [_zeros((parts, *shape), dtype, device) for _ in range(num_layers)]
        self._value_dim = value_dim

    @classmethod
    def of(cls, model: Transformer, num_blocks: int, block_size: int) -> "KVCache":
        """Return an empty cache for the layers of the model's pipeline stage."""
        heads, dim, value_dim = model.cache_heads
        return cls(
            len(model.blocks), (num_blocks, block_size, heads, dim), value_dim=value_dim,
            dtype=model.flat.dtype, device=model.flat.device)

    def grow(self, num_blocks: int) -> None:
        """Add empty blocks, so that there are `num_blocks` in all. Each layer is copied in turn."""
        for i, old in enumerate(self.layers):
            shape = (old.shape[0], num_blocks, *old.shape[2:])
            self.layers[i] = _zeros(shape, old.dtype, old.device)
            self.layers[i][:, : old.shape[1]] = old

    def write(self, layer: int, cache_positions_T: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> None:
        """Write keys and values at cache positions: block * block size + offset in the block."""
        news = (k_TKD, v_TKD) if self._value_dim is None else (k_TKD,)
        for cached, new in zip(self.layers[layer].flatten(1, 2), news, strict=True):
            cached.index_copy_(0, cache_positions_T, new)

    def read(self, layer: int, cache_positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values at these cache positions: k_TKD, v_TKD."""
        k_TKD, *others = self.layers[layer].flatten(1, 2).index_select(1, cache_positions_T)
        return k_TKD, others[0] if others else k_TKD[..., : self._value_dim]

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy shared blocks for rows that are about to write to them."""
        device = self.layers[0].device
        sources_P = torch.tensor(sources, device=device)
        targets_P = torch.tensor(targets, device=device)
        for layer in self.layers:
            layer.index_copy_(1, targets_P, layer.index_select(1, sources_P))

    def attention(self, layer: int, q_BND: Tensor, kind: AttentionKind, decoding: Decoding) -> Tensor:
        """Compute grouped-query attention of each row's newest token over its cached positions: out_BND."""
        num_rows, num_heads, dim = q_BND.shape
        num_kv_heads = self.layers[layer].shape[3]
        q_BKGD = q_BND.view(num_rows, num_kv_heads, num_heads // num_kv_heads, dim)
        parts = [self._part(layer, q_BKGD, kind, blocks) for blocks in decoding.sets]
        outs, lses = zip(*parts, strict=True)
        out_XKGD, lse_XKG = (x[0] if len(x) == 1 else torch.cat(x) for x in (outs, lses))
        parts_BM = decoding.parts_BM
        if parts_BM.shape[1] == 1:
            return out_XKGD.index_select(0, parts_BM[:, 0]).flatten(1, 2)
        lse_BMKG, out_BMKGD = (
            x.index_select(0, parts_BM.flatten()).unflatten(0, parts_BM.shape) for x in (lse_XKG, out_XKGD))
        if decoding.missing_BM is not None:
            lse_BMKG.masked_fill_(decoding.missing_BM[:, :, None, None], -torch.inf)
        out_BMKGD = out_BMKGD.to(lse_BMKG.dtype).mul_(lse_BMKG.softmax(1)[..., None])
        return out_BMKGD.sum(1).flatten(1, 2).to(q_BND.dtype)

    def _part(
        self, layer: int, q_BKGD: Tensor, kind: AttentionKind, blocks: BlockSet
    ) -> tuple[Tensor, Tensor]:
        """Return the partial results of a set's blocks and rows: out (P * S, K, G, D) and log-sum-exp."""
        cached = self.layers[layer]
        if blocks.joined > 1:
            cached = cached[:, blocks.blocks].unflatten(1, (-1, blocks.joined)).flatten(2, 3)
            k, *others = cached[:, :, : blocks.width].transpose(2, 3)
        else:
            k, *others = cached[:, blocks.blocks, : blocks.width].transpose(2, 3)
        v = others[0] if others else k
        num_sharers = blocks.rows_PS.shape[1]
        group = q_BKGD.shape[2]
        mask = blocks.mask(kind.window, group, q_BKGD.dtype)
        q = q_BKGD.index_select(0, blocks.rows_PS.flatten())
        if num_sharers > 1:  # Sharers take the dim of positions, together with query groups.
            q = q.unflatten(0, blocks.rows_PS.shape).transpose(1, 2).flatten(2, 3)
        out, lse = attention_with_lse(q, k, v, kind, mask)
        if num_sharers > 1:
            out, lse = (
                x.unflatten(2, (num_sharers, group)).transpose(1, 2).flatten(0, 1) for x in (out, lse))
        return out if others else out[..., : self._value_dim], lse


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros, because what follows a row's end is multiplied by probability zero and must be finite.

    On a CPU they come from numpy, whose pages take neither memory nor time before they are written to.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)
