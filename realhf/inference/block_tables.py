"""BlockTables: the host's record of which blocks of a KV cache hold the tokens of the running rows.

A row is a sample that is being decoded. A token's cache position is block * block_size + offset in the block.

Shape suffixes: B running rows in order of their slots, P blocks of a set (joined blocks count as one), S rows
that share a block, M blocks of the row that has most.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from realhf.inference.step_inputs import RowPages
from realhf.models.kv_blocks import DENSE

Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]


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

    def with_next_tokens(self) -> "BlockSet":
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


class BlockTables:
    """The blocks of each row in order. Rows of the same prompt may share their first blocks."""

    def __init__(self, *, num_slots: int, num_blocks: int, block_size: int, blocks_per_row: int) -> None:
        self.num_slots = num_slots
        self.num_blocks = num_blocks
        self.block_size = block_size
        """Tokens in a block."""
        self.lens = np.zeros(num_slots, np.int64)
        """Cached tokens of the row in each slot."""
        self._is_running = np.zeros(num_slots, bool)
        self._table = np.zeros((num_slots, blocks_per_row), np.int64)
        self._counts = np.zeros(num_slots, np.int64)
        self._num_shared = np.zeros(num_slots, np.int64)
        self._ordinals = np.zeros(num_slots, np.int64)
        self._last: Decoding | None = None
        """The last step; None if a row has started, stopped or got a block since then."""

    def start(
        self, slot: int, blocks: Sequence[int], *, length: int, num_shared: int = 0, ordinal: int = 0
    ) -> None:
        """Start a row that has `length` tokens in these blocks.

        It is number `ordinal` among the rows that share its first `num_shared` blocks.
        """
        self._last = None
        self._is_running[slot] = True
        self.lens[slot] = length
        self._counts[slot] = len(blocks)
        self._num_shared[slot] = num_shared
        self._ordinals[slot] = ordinal
        self._table[slot, : len(blocks)] = blocks

    def append(self, slot: int, block: int) -> None:
        """Give the row another block."""
        self._last = None
        self._table[slot, self._counts[slot]] = block
        self._counts[slot] += 1

    def stop(self, slot: int) -> list[int]:
        """End the row and return its blocks, of which the first may have other users."""
        self._last = None
        self._is_running[slot] = False
        return self._table[slot, : self._counts[slot]].tolist()

    def sharing(self, slot: int) -> tuple[int, int]:
        """Return how many of the row's blocks are shared, and its number among the rows that share them."""
        return int(self._num_shared[slot]), int(self._ordinals[slot])

    def full(self) -> list[int]:
        """Return the slots of the rows whose next token needs another block."""
        return np.flatnonzero(self._is_running & (self.lens == self._counts * self.block_size)).tolist()

    def running(self) -> Integers:
        """Return the slots that have rows."""
        return np.flatnonzero(self._is_running)

    @property
    def blocks_per_row(self) -> int:
        """The most blocks that a row may have."""
        return self._table.shape[1]

    def advance_pages(self, num_rows: int, num_pages: int) -> RowPages[NDArray[Any]]:
        """Add one token to every running row, none of which may be `full`.

        Returns `num_rows` rows, with tables of `num_pages` pages. Those beyond the running rows are padding,
        and write to page 0.
        """
        slots, lens, cache_positions = self._next_tokens()
        count = len(slots)
        rows: RowPages[NDArray[Any]] = RowPages(
            np.zeros(num_rows, np.int64), np.zeros(num_rows, np.int64), np.ones(num_rows, np.int32),
            np.zeros((num_rows, num_pages), np.int32))
        rows.position_B[:count] = lens
        rows.cache_position_B[:count] = cache_positions
        rows.lens_B[:count] = lens + 1
        rows.table_BM[:count, : self._table.shape[1]] = self._table[slots]
        return rows

    def _next_tokens(self) -> tuple[Integers, Integers, Integers]:
        """Add one token to every running row; return slots, positions and cache positions of the tokens."""
        slots = self.running()
        lens = self.lens[slots]
        blocks = self._table[slots, lens // self.block_size]
        self.lens[slots] += 1
        return slots, lens, blocks * self.block_size + lens % self.block_size

    def advance(self) -> Decoding:
        """Add one token to every running row, none of which may be `full`."""
        slots, lens, cache_positions = self._next_tokens()
        positions_B, cache_positions_B = map(torch.from_numpy, (lens, cache_positions))
        if self._last is None:
            self._last = Decoding(slots, positions_B, cache_positions_B, *self._attended(slots))
        else:
            sets = tuple(blocks.with_next_tokens() for blocks in self._last.sets)
            self._last = Decoding(
                slots, positions_B, cache_positions_B, sets, self._last.parts_BM, self._last.missing_BM)
        return self._last

    def _attended(self, slots: Integers) -> tuple[tuple[BlockSet, ...], Tensor, Tensor | None]:
        """Return the `sets`, `parts_BM` and `missing_BM` of Decoding for the rows in these slots."""
        counts_B = self._counts[slots]
        table_BM = self._table[slots, : counts_B.max()]
        index_M = np.arange(table_BM.shape[1])
        missing_BM = index_M >= counts_B[:, None]
        is_shared_BM = index_M < self._num_shared[slots, None]
        is_own_BM = ~(is_shared_BM | missing_BM)
        parts_BM = np.zeros_like(table_BM)
        unshared, parts_N = self._block_set(slots, is_own_BM, np.zeros_like(slots))
        parts_BM[is_own_BM] = parts_N
        sets: tuple[BlockSet, ...] = (unshared,)
        if is_shared_BM.any():
            shared, parts_N = self._block_set(slots, is_shared_BM, self._ordinals[slots], joins=True)
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
        row_N, index_N = np.nonzero(chosen_BM)
        block_N = self._table[slots[row_N], index_N]
        num_sharers = int(ordinals_B.max()) + 1
        rows_PS = np.full((self.num_blocks, num_sharers), -1, np.int64)
        rows_PS[block_N, ordinals_B[row_N]] = row_N
        numbers = np.zeros(self.num_blocks, np.int64)  # The index of each block in its rows.
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
        counts_PS = self.lens[slots[rows_PS]] - numbers[used, None] * self.block_size
        valid = counts_PS[rows_PS >= 0] if len(row_N) else np.zeros(1)
        block_set = BlockSet(
            blocks, joined, torch.from_numpy(np.maximum(rows_PS, 0)), torch.from_numpy(counts_PS),
            fewest=int(valid.min()), most=int(valid.max()), size=self.block_size * joined)
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
