"""The passes of a generation on a CPU: the newest tokens of rows attend to a cache block by block.

A CPU reads blocks in place, one by one. A shared block, or several joined ones, it reads once for all rows
that share it. It combines the partial results by log-sum-exp (Dao et al. 2023, "Flash-Decoding"; for shared
prefixes, Hydragen, arXiv:2402.05099). On a GPU, kernels attend to pages instead (forward_batch.py).

Shape suffixes: B running rows in order of their slots, N query heads, K key-value heads, G queries per key-
value head, D head dim; P blocks of a set (joined blocks count as one), L tokens in a block, S rows that
share a block, M blocks of the row that has most, X partial results of all blocks and rows. For pieces of
prompts: T tokens, L all tokens so far of the sequence that is continued.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from realhf.attention.dense import attention_with_lse, masked_attention
from realhf.attention.interface import AttentionKind
from realhf.inference.forward_batch import prefill
from realhf.inference.kv_cache import BlockTables, Integers, KVCache
from realhf.inference.scheduler import Chunk
from realhf.models.kv_blocks import DENSE
from realhf.nn.attention import Segment


@dataclass(frozen=True)
class BlockSet:
    """A set of blocks, and for each of them the rows (by number in the batch) whose tokens attend to it.

    `joined` adjacent blocks that have the same rows count as one large block.
    """

    blocks: slice | Tensor
    joined: int
    rows_PS: Tensor  # Where a block has fewer than S rows, the last entries are arbitrary.
    counts_PS: Tensor  # Tokens of the row from the start of the block on.
    fewest: int  # The least of these counts, over the entries that have a row; `most` is the largest.
    most: int
    size: int  # Tokens that fit in a block.
    _masks: dict[int | None, Tensor | None] = field(default_factory=dict)

    @property
    def width(self) -> int:
        """No block has a token from this offset on."""
        return min(self.most, self.size)

    def with_advance(self) -> "BlockSet":
        """Return the set after every row has got another token."""
        return replace(
            self, counts_PS=self.counts_PS + 1, fewest=self.fewest + 1, most=self.most + 1, _masks={})

    def mask(self, window: int | None, group: int, dtype: torch.dtype) -> Tensor | None:
        """Return the additive mask of a decoding step, (P, 1, S * group or 1, L) for L tokens of a block, or
        None if everything is visible. All layers of an attention kind share it."""
        if window not in self._masks:
            self._masks[window] = self._new_mask(window, group, dtype)
        return self._masks[window]

    def _new_mask(self, window: int | None, group: int, dtype: torch.dtype) -> Tensor | None:
        sees_all_before = window is None or window >= self.most
        if self.fewest >= self.width and sees_all_before:
            return None
        counts_PS1 = self.counts_PS[:, :, None]
        at_L = torch.arange(self.width, device=counts_PS1.device)
        visible_PSL = at_L < counts_PS1
        if window is not None:
            visible_PSL &= at_L >= counts_PS1 - window
        if self.rows_PS.shape[1] > 1:
            visible_PSL = visible_PSL.repeat_interleave(group, dim=1)
        # The mask is finite, so that a block without visible tokens gets a weight of 0 instead of NaN.
        return (~visible_PSL).to(dtype).mul_(torch.finfo(dtype).min / 2)[:, None]


@dataclass(frozen=True)
class Decoding:
    """A new token of every running row: where it is written, and what it attends to.

    Attention to one block yields a partial result for each of its rows. All partial results form one list, in
    the order of sets, blocks and rows. Row b has those at the indices parts_BM[b], except where missing_BM.
    """

    slots: Integers
    positions_B: Tensor
    cache_positions_B: Tensor
    sets: tuple[BlockSet, ...]
    parts_BM: Tensor
    missing_BM: Tensor | None


class DecodingSteps:
    """The decoding of the rows in block tables, step by step.

    While no row starts, stops or gets a block, each step follows from the one before.
    """

    def __init__(self, tables: BlockTables) -> None:
        self._tables = tables
        self._last: Decoding | None = None
        self._num_changes = -1
        """The changes that the tables had before the last step."""

    def advance(self) -> Decoding:
        """Add one token to every running row, none of which may be `full`."""
        slots, lens, cache_positions = self._tables.advance()
        positions_B, cache_positions_B = map(torch.from_numpy, (lens, cache_positions))
        if self._last is None or self._num_changes != self._tables.num_changes:
            self._last = Decoding(slots, positions_B, cache_positions_B, *self._attended(slots))
        else:
            sets = tuple(blocks.with_advance() for blocks in self._last.sets)
            self._last = Decoding(
                slots, positions_B, cache_positions_B, sets, self._last.parts_BM, self._last.missing_BM)
        self._num_changes = self._tables.num_changes
        return self._last

    def _attended(self, slots: Integers) -> tuple[tuple[BlockSet, ...], Tensor, Tensor | None]:
        """Return the `sets`, `parts_BM` and `missing_BM` of Decoding for the rows in these slots."""
        tables = self._tables
        counts_B = tables.counts[slots]
        index_M = np.arange(counts_B.max())
        missing_BM = index_M >= counts_B[:, None]
        is_shared_BM = index_M < tables.num_shared[slots, None]
        is_own_BM = ~(is_shared_BM | missing_BM)
        parts_BM = np.zeros(missing_BM.shape, np.int64)
        unshared, parts_N = self._block_set(slots, is_own_BM, np.zeros_like(slots))
        parts_BM[is_own_BM] = parts_N
        sets: tuple[BlockSet, ...] = (unshared,)
        if is_shared_BM.any():
            shared, parts_N = self._block_set(slots, is_shared_BM, tables.ordinals[slots], joins=True)
            parts_BM[is_shared_BM] = len(unshared.rows_PS) + parts_N
            missing_BM |= is_shared_BM & (index_M % shared.joined > 0)
            order_BM = np.argsort(missing_BM, axis=1, kind="stable")[:, : (~missing_BM).sum(1).max()]
            parts_BM = np.take_along_axis(parts_BM, order_BM, 1)
            missing_BM = np.take_along_axis(missing_BM, order_BM, 1)
            sets = (unshared, shared)
        missing = torch.from_numpy(missing_BM) if missing_BM.any() else None
        return sets, torch.from_numpy(parts_BM), missing

    def _block_set(
        self, slots: Integers, chosen_BM: NDArray[np.bool_], ordinals_B: Integers, *, joins: bool = False
    ) -> tuple[BlockSet, Integers]:
        """Return the chosen blocks of the rows in these slots, and the indices of their partial results.

        `ordinals_B` number the rows that use the same blocks. With `joins`, adjacent blocks are joined where
        possible.
        """
        tables = self._tables
        row_N, index_N = np.nonzero(chosen_BM)
        block_N = tables.table[slots[row_N], index_N]
        num_sharers = int(ordinals_B.max()) + 1
        rows_PS = np.full((tables.num_blocks, num_sharers), -1, np.int64)
        rows_PS[block_N, ordinals_B[row_N]] = row_N
        numbers = np.zeros(tables.num_blocks, np.int64)  # The index of each block in its rows.
        numbers[block_N] = index_N
        used = np.unique(block_N)
        first, stop = (int(used[0]), int(used[-1]) + 1) if len(used) else (0, 0)
        joined = 1
        blocks: slice | Tensor = torch.from_numpy(used)
        if len(used) >= DENSE * (stop - first):
            blocks = slice(first, stop)
            used = np.arange(first, stop)
            joined = _num_joined(rows_PS[blocks], numbers[blocks]) if joins else 1
        parts_N = np.searchsorted(used, block_N) // joined * num_sharers + ordinals_B[row_N]
        used = used[::joined]
        rows_PS = rows_PS[used]
        counts_PS = tables.lens[slots[rows_PS]] - numbers[used, None] * tables.block_size
        valid = counts_PS[rows_PS >= 0] if len(row_N) else np.zeros(1)
        block_set = BlockSet(
            blocks, joined, torch.from_numpy(np.maximum(rows_PS, 0)), torch.from_numpy(counts_PS),
            fewest=int(valid.min()), most=int(valid.max()), size=tables.block_size * joined)
        return block_set, parts_N


def _num_joined(rows_PS: Integers, numbers_P: Integers) -> int:
    """Return how many adjacent blocks can be joined, so that joined blocks have the same rows in order.

    If all prompts have equally many shared blocks, it is that number.
    """
    is_used: NDArray[np.bool_] = np.any(rows_PS >= 0, axis=1)
    continues = (rows_PS[1:] == rows_PS[:-1]).all(1) & (numbers_P[1:] == numbers_P[:-1] + 1)
    continues |= ~(is_used[:-1] | is_used[1:])
    begins = np.flatnonzero(np.append(True, ~continues))
    offsets = numbers_P[begins] * is_used[begins]
    return int(np.gcd.reduce(np.concatenate((begins, offsets, [len(rows_PS)]))))


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


class Decode(Segment):
    """A new token of every running row, attended to block by block."""

    def __init__(self, decoding: Decoding) -> None:
        super().__init__(decoding.positions_B, decoding.positions_B + 1, decoding.cache_positions_B)
        self.decoding = decoding

    def attend(
        self, cache: KVCache, layer: int, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, *, kind: AttentionKind
    ) -> Tensor:
        attention = BlockAttention(kind, value_dim=cache.value_dim)
        return attention.decode(q_TND, cache.layers[layer], self.decoding)


class ChunkedPrefill(Segment):
    """The next `num_tokens` of a sequence whose final length is `longest`, as a CPU computes them.

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
        kv = (x.flatten(0, 1).index_select(0, self._cache_positions_L) for x in cache.pages(layer))
        q, k, v = (y.transpose(0, 1)[None] for y in (q_TND, *kv))
        return masked_attention(q, k, v, visible_TL, kind)[0].transpose(0, 1)


def cpu_segments(rows: DecodingSteps | None, chunks: Sequence[Chunk], *, page_size: int) -> Iterator[Segment]:
    """Yield the segments of a pass on a CPU: the new tokens of `rows`, if any, then the chunks."""
    if rows is not None:
        yield Decode(rows.advance())
    for chunk in chunks:
        if chunk.start > 0:
            positions_L = torch.tensor(chunk.cache_positions(page_size))
            yield ChunkedPrefill(positions_L, num_tokens=len(chunk.tokens), longest=len(chunk.prompt.tokens))
    if fresh := [chunk for chunk in chunks if chunk.start == 0]:
        yield prefill(fresh, page_size=page_size, device=torch.device("cpu"))
