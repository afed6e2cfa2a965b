"""BlockTables: the host's record of which blocks of a KV cache hold the tokens of the running rows.

A row is a sample that is being decoded. A token's cache position is block * block_size + offset in the block.

Shape suffixes: B running rows in order of their slots, P blocks of a set (joined blocks count as one), S rows
that share a block, M blocks of the row that has most.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_DENSE = 0.5  # A range of blocks is read in place if at least this share of it is in use; else it is copied.
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class BlockSet:
    """Some blocks, and for each of them the rows (by number in the batch) whose tokens attend to it.

    `joined` adjacent blocks that have the same rows count as one large block.
    """

    blocks: slice | Tensor
    joined: int
    rows_PS: Tensor  # Any number stands where a block has fewer rows, or none.
    counts_PS: Tensor  # Tokens of the row from the start of the block on.
    fewest: int  # Least of these counts, over the entries that have a row.
    most: int
    width: int  # Every block is empty, or ends, after this many tokens.
    _masks: dict[int | None, Tensor | None] = field(default_factory=dict)

    def mask(self, window: int | None, group: int, dtype: torch.dtype) -> Tensor | None:
        """Return the additive mask of a decoding step: (P, 1, S * group or 1, L), for L tokens of a block;
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

    Attention to one block yields a partial result for each of its rows. All partial results are listed in
    the order of sets, blocks and rows; those of row b have the indices parts_BM, except where missing_BM.
    """

    slots: Integers
    positions_B: Tensor
    cache_positions_B: Tensor
    sets: tuple[BlockSet, ...]
    parts_BM: Tensor
    missing_BM: Tensor | None


class BlockTables:
    """The blocks of each row in order. Rows of the same prompt may share their first blocks."""

    def __init__(
        self, *, num_slots: int, num_blocks: int, block_size: int, blocks_per_row: int, max_sharers: int
    ) -> None:
        self.block_size = block_size
        """Tokens in a block."""
        self.lens = np.zeros(num_slots, np.int64)
        """Cached tokens of the row in each slot."""
        self._is_running = np.zeros(num_slots, bool)
        self._table = np.zeros((num_slots, blocks_per_row), np.int64)
        self._counts = np.zeros(num_slots, np.int64)
        self._num_shared = np.zeros(num_slots, np.int64)
        self._ordinals = np.zeros(num_slots, np.int64)
        self._starts = np.zeros(num_blocks, np.int64)
        # Slots of the rows that use a block, or -1: one slot for an unshared block, several for a shared one.
        self._owners = np.full((num_blocks, 1), -1, np.int64)
        self._sharers = np.full((num_blocks, max(1, max_sharers)), -1, np.int64)
        self._parts: tuple[tuple[_Users, ...], Tensor, Tensor | None] | None = None

    def start(
        self, slot: int, blocks: Sequence[int], *, length: int, num_shared: int = 0, ordinal: int = 0
    ) -> None:
        """Start a row that has `length` tokens in these blocks.

        It is number `ordinal` among the rows that share its first `num_shared` blocks.
        """
        count = len(blocks)
        self._parts = None
        self._is_running[slot] = True
        self.lens[slot] = length
        self._counts[slot] = count
        self._num_shared[slot] = num_shared
        self._ordinals[slot] = ordinal
        self._table[slot, :count] = blocks
        self._starts[list(blocks)] = np.arange(count) * self.block_size
        self._sharers[list(blocks[:num_shared]), ordinal] = slot
        self._owners[list(blocks[num_shared:]), 0] = slot

    def append(self, slot: int, block: int) -> None:
        """Give the row another block."""
        self._parts = None
        self._table[slot, self._counts[slot]] = block
        self._starts[block] = self._counts[slot] * self.block_size
        self._owners[block, 0] = slot
        self._counts[slot] += 1

    def stop(self, slot: int) -> list[int]:
        """End the row and return its blocks, of which the first may have other users."""
        self._parts = None
        num_shared = self._num_shared[slot]
        blocks = self._table[slot, : self._counts[slot]]
        self._sharers[blocks[:num_shared], self._ordinals[slot]] = -1
        self._owners[blocks[num_shared:], 0] = -1
        self._is_running[slot] = False
        return blocks.tolist()

    def full(self) -> list[int]:
        """Return the slots of the rows whose next token needs another block."""
        return np.flatnonzero(self._is_running & (self.lens == self._counts * self.block_size)).tolist()

    def running(self) -> Integers:
        """Return the slots that have rows."""
        return np.flatnonzero(self._is_running)

    def size(self) -> tuple[int, int]:
        """Return the number of running rows, and the number of blocks of the row that has most."""
        slots = self.running()
        return len(slots), int(self._counts[slots].max())

    @property
    def largest_size(self) -> tuple[int, int]:
        """Upper bounds of `size`."""
        return self._table.shape[0], self._table.shape[1]

    def advance_by_table(self, num_rows: int, num_blocks: int) -> Integers:
        """Add one token to every running row, none of which may be `full`.

        Returns a table of `num_rows` rows: position of the new token, its cache position, and `num_blocks`
        blocks, of which those beyond the row's own are arbitrary. Padding rows write to a spare block, which
        follows the blocks that these tables know.
        """
        slots, lens, cache_positions = self._next_tokens()
        spare = len(self._starts)
        numbers = np.full((num_rows, 2 + num_blocks), spare, np.int64)
        numbers[:, 0] = 0
        numbers[:, 1] = spare * self.block_size
        numbers[: len(slots)] = np.column_stack((lens, cache_positions, self._table[slots, :num_blocks]))
        return numbers

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
        if self._parts is None:
            self._parts = self._new_parts(slots)
        users, parts_BM, missing_BM = self._parts
        sets = tuple(some.at(lens + 1, block_size=self.block_size) for some in users)
        positions_B, cache_positions_B = map(torch.from_numpy, (lens, cache_positions))
        return Decoding(slots, positions_B, cache_positions_B, sets, parts_BM, missing_BM)

    def _new_parts(self, slots: Integers) -> "tuple[tuple[_Users, ...], Tensor, Tensor | None]":
        """Return the parts of a Decoding that stay valid until a row starts, stops or gets a block."""
        counts = self._counts[slots]
        row_of = np.zeros(len(self.lens) + 1, np.int64)  # (Index -1 is the last entry.)
        row_of[slots] = np.arange(len(slots))
        table_BM = self._table[slots, : counts.max()]
        index_M = np.arange(table_BM.shape[1])
        shared_B = self._num_shared[slots]
        own, own_indices = self._users(self._owners, row_of, joined=1)
        users: tuple[_Users, ...] = (own,)
        parts_BM = own_indices[table_BM]
        missing_BM = index_M >= counts[:, None]
        if shared_B.any():
            joined = self._joined()
            is_shared_BM = index_M < shared_B[:, None]
            shared, shared_indices = self._users(self._sharers, row_of, joined=joined)
            num_sharers = self._sharers.shape[1]
            shared_parts_BM = len(own.rows_PS) + shared_indices[table_BM] * num_sharers
            shared_parts_BM += self._ordinals[slots][:, None]
            parts_BM = np.where(is_shared_BM, shared_parts_BM, parts_BM)
            missing_BM |= is_shared_BM & (index_M % joined > 0)
            order_BM = np.argsort(missing_BM, axis=1, kind="stable")[:, : (~missing_BM).sum(1).max()]
            parts_BM = np.take_along_axis(parts_BM, order_BM, 1)
            missing_BM = np.take_along_axis(missing_BM, order_BM, 1)
            users = (own, shared)
        parts_BM = np.where(missing_BM, 0, parts_BM)
        missing = torch.from_numpy(missing_BM) if missing_BM.any() else None
        return users, torch.from_numpy(parts_BM), missing

    def _joined(self) -> int:
        """Return how many adjacent shared blocks can be joined: they always have the same rows, in order.

        This is the number of shared blocks of a prompt, if all prompts have equally many; it is 1 where few
        of the blocks are in use.
        """
        is_used: NDArray[np.bool_] = np.any(self._sharers >= 0, axis=1)
        used = np.flatnonzero(is_used)
        first, last = int(used[0]), int(used[-1])
        rows = self._sharers[first : last + 1]
        numbers = self._starts[first : last + 1] // self.block_size
        if len(used) < _DENSE * len(rows):
            return 1
        continues = (rows[1:] == rows[:-1]).all(1) & (numbers[1:] == numbers[:-1] + 1)
        continues |= ~(is_used[first:last] | is_used[first + 1 : last + 1])
        begins = np.flatnonzero(np.append(True, ~continues))
        offsets = numbers[begins] * is_used[first + begins]
        return int(np.gcd.reduce(np.concatenate((begins, offsets, [len(rows)]))))

    def _users(
        self, slots_PS: Integers, row_of: Integers, *, joined: int
    ) -> "tuple[_Users, Integers]":
        """Return the blocks that have users in `slots_PS` (-1 is none), and each block's index among them."""
        used = np.flatnonzero((slots_PS >= 0).any(1))
        first, stop = (int(used[0]), int(used[-1]) + 1) if len(used) else (0, 0)
        indices = np.zeros(len(slots_PS), np.int64)
        if len(used) >= _DENSE * (stop - first):
            used = np.arange(first, stop)
            blocks: slice | Tensor = slice(first, stop)
        else:
            blocks = torch.from_numpy(used)
        indices[used] = np.arange(len(used)) // joined
        used = used[::joined]
        has_PS = slots_PS[used] >= 0
        return _Users(blocks, joined, row_of[slots_PS[used]], has_PS, self._starts[used, None]), indices


@dataclass(frozen=True)
class _Users:
    """Some blocks and the rows that use them; has_PS says which entries of rows_PS are rows."""

    blocks: slice | Tensor
    joined: int
    rows_PS: Integers
    has_PS: NDArray[np.bool_]
    starts_P1: Integers  # Tokens of a row before each block.

    def at(self, lens: Integers, *, block_size: int) -> BlockSet:
        """Return the set for rows that have `lens` tokens."""
        counts_PS = lens[self.rows_PS] - self.starts_P1
        valid = counts_PS[self.has_PS]
        fewest, most = (int(valid.min()), int(valid.max())) if len(valid) else (0, 0)
        width = min(most, block_size * self.joined)
        rows = torch.from_numpy(self.rows_PS)
        return BlockSet(self.blocks, self.joined, rows, torch.from_numpy(counts_PS), fewest, most, width)
