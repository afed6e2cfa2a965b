"""Segments of a forward pass: tokens that attend in the same way, and whose keys and values are cached.

Shape suffixes: T tokens, L all tokens so far of the sequence that is continued, B rows of a decoding step, N
query heads, K key-value heads, D head dim, X columns of a table of BlockTables.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from realhf.attention.interface import Sequences
from realhf.inference.block_tables import BlockTables, Decoding
from realhf.inference.kv_cache import KVCache
from realhf.nn.attention import AttentionKind, masked_attention, packed_attention
from realhf.nn.packed import Segment, token_positions


class Decode(Segment):
    """A new token of every running row."""

    def __init__(self, decoding: Decoding) -> None:
        super().__init__(decoding.positions_B, decoding.positions_B + 1, decoding.cache_positions_B)
        self.decoding = decoding

    def attend(
        self, cache: KVCache, layer: int, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, *, kind: AttentionKind
    ) -> Tensor:
        return cache.attention(layer, q_TND, kind, self.decoding)


class DecodeByTable(Segment):
    """A variant of `Decode` that can be recorded and replayed with other contents.

    It consists of tensors alone, whose shapes do not depend on the rows' exact lengths. It reads all blocks
    of each row, those after its newest token included.
    """

    def __init__(self, numbers_BX: Tensor, block_size: int) -> None:
        """`numbers_BX` is the table that BlockTables.advance_by_table returns."""
        position_B, cache_positions_B = numbers_BX[:, 0], numbers_BX[:, 1]
        super().__init__(position_B, position_B + 1, cache_positions_B)
        inside = torch.arange(block_size, device=numbers_BX.device)
        self._cache_positions_BL = (numbers_BX[:, 2:, None] * block_size + inside).flatten(1)

    def attend(
        self, cache: KVCache, layer: int, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, *, kind: AttentionKind
    ) -> Tensor:
        k, v = (
            x.unflatten(0, self._cache_positions_BL.shape).transpose(1, 2)
            for x in cache.read(layer, self._cache_positions_BL.flatten()))
        distance_BL = self.position_T[:, None] - torch.arange(k.shape[2], device=k.device)
        visible_BL = (distance_BL >= 0) & (distance_BL < (kind.window or k.shape[2]))
        q_BKGD = q_TND.unflatten(1, (k.shape[1], -1))  # Query groups take the dim of positions.
        return masked_attention(q_BKGD, k, v, visible_BL[:, None, None], kind).flatten(1, 2)


def next_tokens(tables: BlockTables, device: torch.device) -> Segment:
    """Return a segment with one new token of every running row.

    On a CPU it is attended to block by block; on a GPU by tables, which takes fewer kernels.
    """
    if device.type == "cpu":
        return Decode(tables.advance())
    numbers_BX = torch.from_numpy(tables.advance_by_table(*tables.size())).to(device)
    return DecodeByTable(numbers_BX, tables.block_size)


class ChunkedPrefill(Segment):
    """The next `num_tokens` of a sequence whose final length is `longest`.

    `cache_positions_L` belong to all its tokens so far, these included.
    """

    def __init__(self, cache_positions_L: Tensor, *, num_tokens: int, longest: int) -> None:
        self._cache_positions_L = cache_positions_L
        self._position_L = torch.arange(len(cache_positions_L), device=cache_positions_L.device)
        position_T = self._position_L[-num_tokens:]
        length_T = torch.full_like(position_T, longest)
        super().__init__(position_T, length_T, cache_positions_L[-num_tokens:], longest=longest)

    def attend(
        self, cache: KVCache, layer: int, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, *, kind: AttentionKind
    ) -> Tensor:
        distance_TL = self.position_T[:, None] - self._position_L
        visible_TL = (distance_TL >= 0) & (distance_TL < (kind.window or len(self._position_L)))
        q, k, v = (y.transpose(0, 1)[None] for y in (q_TND, *cache.read(layer, self._cache_positions_L)))
        return masked_attention(q, k, v, visible_TL, kind)[0].transpose(0, 1)


class Prefill(Segment):
    """The first `seq_lens` tokens of several sequences, whose final lengths are `whole_lens`."""

    from_cache = False

    def __init__(
        self, seq_lens: Sequence[int], cache_positions_T: Tensor, *, whole_lens: Sequence[int]
    ) -> None:
        row_T, position_T, _ = token_positions(seq_lens, cache_positions_T.device)
        length_T = torch.tensor(whole_lens, device=cache_positions_T.device)[row_T]
        super().__init__(position_T, length_T, cache_positions_T, longest=max(whole_lens))
        self._at = Sequences.of(seq_lens, cache_positions_T.device)

    def attend(
        self, cache: KVCache, layer: int, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, *, kind: AttentionKind
    ) -> Tensor:
        return packed_attention(q_TND, k_TKD, v_TKD, self._at, kind)
