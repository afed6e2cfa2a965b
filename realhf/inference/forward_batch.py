"""Segments of a forward pass: tokens that attend in the same way, and whose keys and values are cached.

A token's cache position (`places`) is block * block_size + offset in the block.

Shape suffixes: T tokens, L all tokens so far of the sequence that is continued, B rows of a decoding step, N
query heads, K key-value heads, D head dim, X columns of a table of BlockTables.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from realhf.inference.block_tables import BlockTables, Decoding
from realhf.inference.kv_cache import KVCache, Visible
from realhf.nn.attention import AttentionKind, masked_attention, packed_attention
from realhf.nn.packed import token_places


class Segment(ABC):
    """Tokens of one pass that attend in the same way."""

    from_cache = True
    """Whether the tokens attend to cached keys and values; else they attend to one another."""
    longest = 0
    """Final length of the longest sequence; 0 if its length has been checked before."""

    @property
    @abstractmethod
    def places(self) -> tuple[Tensor, Tensor]:
        """Return each token's position, and the final length of its sequence: position_T, length_T."""

    @abstractmethod
    def attend(
        self, cache: KVCache, layer: int, kind: AttentionKind, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor,
        k_cached: Tensor, v_cached: Tensor,
    ) -> Tensor:  # fmt: skip
        """Write `k_cached` and `v_cached` to the cache and return out_TND."""


@dataclass(frozen=True)
class Decode(Segment):
    """A new token of every running row."""

    decoding: Decoding

    @property
    def places(self) -> tuple[Tensor, Tensor]:
        return self.decoding.positions_B, self.decoding.positions_B + 1

    @cached_property
    def _visible(self) -> Visible:
        return Visible(self.decoding)

    def attend(
        self, cache: KVCache, layer: int, kind: AttentionKind, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor,
        k_cached: Tensor, v_cached: Tensor,
    ) -> Tensor:  # fmt: skip
        cache.write(layer, k_cached, v_cached, self.decoding.places_B)
        return cache.attention(layer, q_TND, kind, self._visible)


@dataclass(frozen=True)
class DecodeByTable(Segment):
    """A variant of `Decode` that can be recorded and replayed with other contents.

    It consists of tensors alone, whose shapes do not depend on the rows' exact lengths. It reads all of each
    row's `places_BL`.
    """

    positions_B: Tensor
    places_B: Tensor
    places_BL: Tensor  # Cache positions of each row's tokens; arbitrary after its newest token.

    @classmethod
    def of(cls, numbers_BX: Tensor, block_size: int) -> Self:
        """Build the segment from the table that BlockTables.advance_by_table returns."""
        inside = torch.arange(block_size, device=numbers_BX.device)
        places_BL = (numbers_BX[:, 2:, None] * block_size + inside).flatten(1)
        return cls(numbers_BX[:, 0], numbers_BX[:, 1], places_BL)

    @property
    def places(self) -> tuple[Tensor, Tensor]:
        return self.positions_B, self.positions_B + 1

    def attend(
        self, cache: KVCache, layer: int, kind: AttentionKind, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor,
        k_cached: Tensor, v_cached: Tensor,
    ) -> Tensor:  # fmt: skip
        cache.write(layer, k_cached, v_cached, self.places_B)
        k, v = (
            x.unflatten(0, self.places_BL.shape).transpose(1, 2)
            for x in cache.read(layer, self.places_BL.flatten()))
        distance_BL = self.positions_B[:, None] - torch.arange(k.shape[2], device=k.device)
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
    return DecodeByTable.of(numbers_BX, tables.block_size)


@dataclass(frozen=True)
class ChunkedPrefill(Segment):
    """The next `num_tokens` of a sequence whose final length is `longest`.

    `places_L` are the cache positions of all its tokens so far, these included.
    """

    places_L: Tensor
    num_tokens: int
    longest: int

    @property
    def places(self) -> tuple[Tensor, Tensor]:
        return self._position_T, torch.full_like(self._position_T, self.longest)

    @property
    def _position_T(self) -> Tensor:
        return self._position_L[-self.num_tokens :]

    @cached_property
    def _position_L(self) -> Tensor:
        return torch.arange(len(self.places_L), device=self.places_L.device)

    def attend(
        self, cache: KVCache, layer: int, kind: AttentionKind, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor,
        k_cached: Tensor, v_cached: Tensor,
    ) -> Tensor:  # fmt: skip
        cache.write(layer, k_cached, v_cached, self.places_L[-self.num_tokens :])
        distance_TL = self._position_T[:, None] - self._position_L
        visible_TL = (distance_TL >= 0) & (distance_TL < (kind.window or len(self.places_L)))
        q, k, v = (y.transpose(0, 1)[None] for y in (q_TND, *cache.read(layer, self.places_L)))
        return masked_attention(q, k, v, visible_TL, kind)[0].transpose(0, 1)


class Prefill(Segment):
    """The first `seq_lens` tokens of several sequences."""

    from_cache = False

    def __init__(
        self, seq_lens: Sequence[int], places_T: Tensor, *, whole_lens: Sequence[int] | None = None
    ) -> None:
        """`whole_lens` are the final lengths of the sequences; None means that these are `seq_lens`."""
        self._seq_lens = list(seq_lens)
        self._places_T = places_T
        row_T, position_T, length_T = token_places(seq_lens, places_T.device)
        if whole_lens is not None:
            length_T = torch.tensor(whole_lens, device=places_T.device)[row_T]
        self._token_places = position_T, length_T
        self.longest = max(whole_lens or seq_lens, default=0)

    @property
    def places(self) -> tuple[Tensor, Tensor]:
        return self._token_places

    def attend(
        self, cache: KVCache, layer: int, kind: AttentionKind, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor,
        k_cached: Tensor, v_cached: Tensor,
    ) -> Tensor:  # fmt: skip
        cache.write(layer, k_cached, v_cached, self._places_T)
        return packed_attention(q_TND, k_TKD, v_TKD, self._seq_lens, kind)
