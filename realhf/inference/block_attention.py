"""BlockAttention: attention of the newest tokens over blocks of a cache, as a CPU computes it fastest.

It reads the blocks in place, one by one. A shared block, or several joined ones, it reads once for all rows
that share it. It combines the partial results by log-sum-exp (Dao et al. 2023, "Flash-Decoding"; for shared
prefixes, Hydragen, arXiv:2402.05099).

Shape suffixes: B rows, N query heads, K key-value heads, G queries per key-value head, D head dim; P blocks
(joined blocks count as one), L tokens in a block, S rows that share a block, M blocks of a row, X partial
results of all blocks and rows.
"""

import torch
from torch import Tensor

from realhf.attention.dense import attention_with_lse
from realhf.attention.interface import AttentionKind
from realhf.inference.block_tables import BlockSet, Decoding


class BlockAttention:
    """The decoding of one kind of layer."""

    def __init__(self, kind: AttentionKind, *, value_dim: int | None) -> None:
        """With `value_dim`, the values are the first dims of the keys."""
        self._kind = kind
        self._value_dim = value_dim

    def decode(self, q_BND: Tensor, cached: Tensor, decoding: Decoding) -> Tensor:
        """Compute grouped-query attention of each row's newest token over its cached positions: out_BND.

        `cached` are the keys, and perhaps values, of one layer: (1 or 2, blocks, L, K, D).
        """
        num_rows, num_heads, dim = q_BND.shape
        num_kv_heads = cached.shape[3]
        q_BKGD = q_BND.view(num_rows, num_kv_heads, num_heads // num_kv_heads, dim)
        partials = [self._partial(cached, q_BKGD, blocks) for blocks in decoding.sets]
        outs, lses = zip(*partials, strict=True)
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

    def _partial(self, cached: Tensor, q_BKGD: Tensor, blocks: BlockSet) -> tuple[Tensor, Tensor]:
        """Return the partial results of a set's blocks and rows: out (P * S, K, G, D) and log-sum-exp."""
        if blocks.joined > 1:
            cached = cached[:, blocks.blocks].unflatten(1, (-1, blocks.joined)).flatten(2, 3)
            k, *others = cached[:, :, : blocks.width].transpose(2, 3)
        else:
            k, *others = cached[:, blocks.blocks, : blocks.width].transpose(2, 3)
        v = others[0] if others else k
        num_sharers = blocks.rows_PS.shape[1]
        group = q_BKGD.shape[2]
        mask = blocks.mask(self._kind.window, group, q_BKGD.dtype)
        q = q_BKGD.index_select(0, blocks.rows_PS.flatten())
        if num_sharers > 1:  # Sharers take the dim of positions, together with query groups.
            q = q.unflatten(0, blocks.rows_PS.shape).transpose(1, 2).flatten(2, 3)
        out, lse = attention_with_lse(q, k, v, self._kind, mask)
        if num_sharers > 1:
            out, lse = (
                x.unflatten(2, (num_sharers, group)).transpose(1, 2).flatten(0, 1) for x in (out, lse))
        return out if others else out[..., : self._value_dim], lse
