"""BlockTables: in which blocks of a KV cache the tokens of the running rows lie, as the host keeps the books.

Shape suffixes: B running rows in order of their slots, P blocks of a set, joined ones as one, S rows that
share one, M blocks of the row that has most.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_DENSE = 0.5  # Of a range of blocks so many must be in use, or else those are picked out and copied.
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class BlockSet:
    """Some blocks, and for each of them the rows (numbers in the batch) whose tokens attend to it. `joined`
    neighbours that have the same rows count as one large block."""

    blocks: slice | Tensor
    joined: int
    rows_PS: Tensor  # Where there are fewer rows, or none, any number stands.
    counts_PS: Tensor  # Tokens that the row has from the block's first one on.
    fewest: int  # Of these counts, where there is a row.
    most: int
    width: int  # Behind so many tokens all of the blocks are empty, or end.


@dataclass(frozen=True)
class Decoding:
    """One new token of every running row: where it goes, and what it attends to.

    What the tokens find in one block is a part of the result; row b's parts are at parts_BM of all parts, in
    the order of sets, blocks and rows, unless they are missing_BM.
    """

    slots: Integers
    positions_B: Tensor
    places_B: Tensor  # block * block_size + place in the block
    sets: tuple[BlockSet, ...]
    parts_BM: Tensor
    missing_BM: Tensor | None


class BlockTables:
    """The rows' blocks in order. The first ones of a row may be shared with rows of the same prompt."""

    def __init__(
        self, *, num_slots: int, num_blocks: int, block_size: int, blocks_per_row: int, max_sharers: int
    ) -> None:
        self.block_size = block_size
        """Tokens in a block."""
        self.lens = np.zeros(num_slots, np.int64)
        """Tokens of every slot's row in the cache."""
        self._is_running = np.zeros(num_slots, bool)
        self._table = np.zeros((num_slots, blocks_per_row), np.int64)
        self._counts = np.zeros(num_slots, np.int64)
        self._num_shared, self._ordinals = np.zeros_like(self._counts), np.zeros_like(self._counts)
        self._starts = np.zeros(num_blocks, np.int64)
        # The slots of a block's rows, -1 for none; of one that is not shared, and of those that are.
        self._owners = np.full((num_blocks, 1), -1, np.int64)
        self._sharers = np.full((num_blocks, max(1, max_sharers)), -1, np.int64)
        self._parts: tuple[tuple[_Users, ...], Tensor, Tensor | None] | None = None

    def start(
        self, slot: int, blocks: Sequence[int], *, length: int, num_shared: int = 0, ordinal: int = 0
    ) -> None:
        """A row begins with `length` tokens in these blocks; of those that share the first `num_shared`
        blocks it is number `ordinal`."""
        count, self._parts = len(blocks), None
        self.lens[slot], self._is_running[slot], self._counts[slot] = length, True, count
        self._num_shared[slot], self._ordinals[slot] = num_shared, ordinal
        self._table[slot, :count] = blocks
        self._starts[list(blocks)] = np.arange(count) * self.block_size
        self._sharers[list(blocks[:num_shared]), ordinal] = slot
        self._owners[list(blocks[num_shared:]), 0] = slot

    def append(self, slot: int, block: int) -> None:
        """The row goes on in another block."""
        self._parts = None
        self._table[slot, self._counts[slot]] = block
        self._starts[block] = self._counts[slot] * self.block_size
        self._owners[block, 0] = slot
        self._counts[slot] += 1

    def stop(self, slot: int) -> list[int]:
        """The row ends; its blocks, of which the first may have other users."""
        self._parts = None
        blocks, shared = self._table[slot, : self._counts[slot]], self._num_shared[slot]
        self._sharers[blocks[:shared], self._ordinals[slot]] = -1
        self._owners[blocks[shared:], 0] = -1
        self._is_running[slot] = False
        return blocks.tolist()

    def full(self) -> list[int]:
        """Slots of the rows whose next token needs another block."""
        return np.flatnonzero(self._is_running & (self.lens == self._counts * self.block_size)).tolist()

    def running(self) -> Integers:
        """Slots that have rows."""
        return np.flatnonzero(self._is_running)

    def size(self) -> tuple[int, int]:
        """Running rows, and blocks of the one that has most."""
        slots = self.running()
        return len(slots), int(self._counts[slots].max())

    @property
    def largest_size(self) -> tuple[int, int]:
        """That they can have."""
        return self._table.shape[0], self._table.shape[1]

    def advance_by_table(self, num_rows: int, num_blocks: int) -> Integers:
        """Every running row gets one more token; nobody is `full`. Of `num_rows` rows position and place of
        the token, and `num_blocks` blocks: any behind the row's own. Rows that are lacking write to a block
        that the tables do not have, the next one behind theirs."""
        slots, lens, places = self._next_tokens()
        spare = len(self._starts)
        numbers = np.full((num_rows, 2 + num_blocks), spare, np.int64)
        numbers[:, 0], numbers[:, 1] = 0, spare * self.block_size
        numbers[: len(slots)] = np.column_stack((lens, places, self._table[slots, :num_blocks]))
        return numbers

    def _next_tokens(self) -> tuple[Integers, Integers, Integers]:
        """The running rows' slots, and positions and places of their next tokens, which are then there."""
        slots = self.running()
        lens = self.lens[slots]
        places = self._table[slots, lens // self.block_size] * self.block_size + lens % self.block_size
        self.lens[slots] += 1
        return slots, lens, places

    def advance(self) -> Decoding:
        """Every running row gets one more token; nobody is `full`."""
        slots, lens, places = self._next_tokens()
        if self._parts is None:
            self._parts = self._new_parts(slots)
        users, parts_BM, missing_BM = self._parts
        sets = tuple(some.at(lens + 1, block_size=self.block_size) for some in users)
        return Decoding(slots, torch.from_numpy(lens), torch.from_numpy(places), sets, parts_BM, missing_BM)

    def _new_parts(self, slots: Integers) -> "tuple[tuple[_Users, ...], Tensor, Tensor | None]":
        """What of a Decoding stays the same until a row starts, stops or gets a block."""
        counts = self._counts[slots]
        row_of = np.zeros(len(self.lens) + 1, np.int64)  # (-1 is the last one)
        row_of[slots] = np.arange(len(slots))
        table_BM = self._table[slots, : counts.max()]
        at_M, shared_B = np.arange(table_BM.shape[1]), self._num_shared[slots]
        own, own_places = self._users(self._owners, row_of, joined=1)
        users: tuple[_Users, ...] = (own,)
        parts_BM, missing_BM = own_places[table_BM], at_M >= counts[:, None]
        if shared_B.any():
            joined, is_shared_BM = self._joined(), at_M < shared_B[:, None]
            shared, shared_places = self._users(self._sharers, row_of, joined=joined)
            sharers, before = self._sharers.shape[1], len(own.rows_PS)
            shared_parts_BM = before + shared_places[table_BM] * sharers + self._ordinals[slots][:, None]
            parts_BM = np.where(is_shared_BM, shared_parts_BM, parts_BM)
            missing_BM |= is_shared_BM & (at_M % joined > 0)
            order_BM = np.argsort(missing_BM, axis=1, kind="stable")[:, : (~missing_BM).sum(1).max()]
            parts_BM = np.take_along_axis(parts_BM, order_BM, 1)
            missing_BM = np.take_along_axis(missing_BM, order_BM, 1)
            users = (own, shared)
        parts_BM = np.where(missing_BM, 0, parts_BM)
        missing = torch.from_numpy(missing_BM) if missing_BM.any() else None
        return users, torch.from_numpy(parts_BM), missing

    def _joined(self) -> int:
        """How many neighbours among the shared blocks always have the same rows, one behind the other: as
        many as all prompts have, if all have equally many. (Not where few of the blocks are in use.)"""
        is_used: NDArray[np.bool_] = np.any(self._sharers >= 0, axis=1)
        used = np.flatnonzero(is_used)
        first, last = int(used[0]), int(used[-1])
        rows, numbers = self._sharers[first : last + 1], self._starts[first : last + 1] // self.block_size
        if len(used) < _DENSE * len(rows):
            return 1
        goes_on = (rows[1:] == rows[:-1]).all(1) & (numbers[1:] == numbers[:-1] + 1)
        goes_on |= ~(is_used[first:last] | is_used[first + 1 : last + 1])
        begins = np.flatnonzero(np.append(True, ~goes_on))
        behind_others = numbers[begins] * is_used[first + begins]
        return int(np.gcd.reduce(np.concatenate((begins, behind_others, [len(rows)]))))

    def _users(
        self, slots_PS: Integers, row_of: Integers, *, joined: int
    ) -> "tuple[_Users, Integers]":
        """The blocks that have such users (-1 for none), and every block's place among them."""
        used = np.flatnonzero((slots_PS >= 0).any(1))
        first, stop = (int(used[0]), int(used[-1]) + 1) if len(used) else (0, 0)
        places = np.zeros(len(slots_PS), np.int64)
        if len(used) >= _DENSE * (stop - first):
            used = np.arange(first, stop)
            blocks: slice | Tensor = slice(first, stop)
        else:
            blocks = torch.from_numpy(used)
        places[used] = np.arange(len(used)) // joined
        used = used[::joined]
        has_PS = slots_PS[used] >= 0
        return _Users(blocks, joined, row_of[slots_PS[used]], has_PS, self._starts[used, None]), places


@dataclass(frozen=True)
class _Users:
    """Some blocks and their rows, of which there may be fewer (has_PS)."""

    blocks: slice | Tensor
    joined: int
    rows_PS: Integers
    has_PS: NDArray[np.bool_]
    starts_P1: Integers  # Tokens of a row before each block.

    def at(self, lens: Integers, *, block_size: int) -> BlockSet:
        """When the rows have so many tokens."""
        counts_PS = lens[self.rows_PS] - self.starts_P1
        theirs = counts_PS[self.has_PS]
        fewest, most = (int(theirs.min()), int(theirs.max())) if len(theirs) else (0, 0)
        rows, counts = torch.from_numpy(self.rows_PS), torch.from_numpy(counts_PS)
        width = min(most, block_size * self.joined)
        return BlockSet(self.blocks, self.joined, rows, counts, fewest, most, width)
