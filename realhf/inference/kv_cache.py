"""KVCache: keys and values of one rank's layers, in blocks of tokens; and the host's records of the blocks.

BlockManager knows which blocks are free, BlockTables which blocks hold the tokens of each running row. A
row is a sample that is being decoded. A token's cache position is block * block_size + offset in the block.

Shape suffixes: T tokens, K key-value heads, D head dim; P blocks, which kernels call pages, L tokens in
one; B running rows in order of their slots, M pages of a row.
"""

import math
from bisect import insort
from collections.abc import Iterable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from realhf.devices.pinned import upload
from realhf.devices.reserved import ReservedPlanes, reserve_planes
from realhf.nn.fused import CachePlace
from realhf.nn.transformer import Transformer

Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]
HostOrDevice = TypeVar("HostOrDevice")  # NDArray on the host, Tensor on the device


class KVCache:
    """A paged cache of keys and values. Each local layer has two tensors of `shape` (blocks, tokens in a
    block, kv heads, head_dim).

    With `value_dim`, the values are the first dims of the keys and are not stored separately. What a row has
    not written is zero, or what another row has written: values after a row's end are multiplied by
    probability zero and must be finite.
    """

    def __init__(
        self, num_layers: int, shape: tuple[int, int, int, int], *, value_dim: int | None = None,
        dtype: torch.dtype, device: torch.device,
    ) -> None:
        self.value_dim = value_dim
        self._num_layers = num_layers
        self._num_tensors = 1 if value_dim else 2
        self._block_shape = shape[1:]
        self._dtype = dtype
        self._device = device
        self._num_blocks = shape[0]
        self._memory = self._reserve(shape[0])
        self._addressed = self._view()
        """The layers with all blocks for which there are addresses; recorded passes hold these shapes."""

    @classmethod
    def of(cls, model: Transformer, num_blocks: int, block_size: int) -> "KVCache":
        """Return an empty cache for the layers of the model's pipeline stage."""
        heads, dim, value_dim = model.cache_heads
        return cls(
            len(model.blocks), (num_blocks, block_size, heads, dim), value_dim=value_dim,
            dtype=model.flat.dtype, device=model.flat.device)

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def layers(self) -> list[Tensor]:
        """Each layer's tensors of all blocks."""
        return [layer[:, : self._num_blocks] for layer in self._addressed]

    @property
    def block_size(self) -> int:
        return self._block_shape[0]

    @property
    def num_bytes(self) -> int:
        """Bytes of the blocks."""
        return len(self._memory.bytes_PU) * self._num_blocks * self._block_bytes

    @property
    def mapped_bytes(self) -> int:
        """Bytes of the device apart from torch's allocator."""
        return len(self._memory.bytes_PU) * self._memory.held if self._memory.can_shrink else 0

    @property
    def can_shrink(self) -> bool:
        """Whether `resize` can give memory back."""
        return self._memory.can_shrink

    def fits_in_place(self, num_blocks: int) -> bool:
        """Return whether there are addresses for so many blocks, so that none has to move."""
        return num_blocks * self._block_bytes <= self._memory.bytes_PU.shape[1]

    def resize(self, num_blocks: int) -> None:
        """Drop the last blocks, or add empty ones, so that there are `num_blocks`. All stay where they are if
        there are addresses for so many."""
        if not self.fits_in_place(num_blocks):
            old = self._memory
            self._memory = self._reserve(num_blocks)
            self._memory.bytes_PU[:, : old.held] = old.bytes_PU[:, : old.held]
            self._addressed = self._view()
        self._memory.resize(num_blocks * self._block_bytes)
        self._num_blocks = num_blocks

    @property
    def _block_bytes(self) -> int:
        """Bytes of a block in one plane: of the keys, or the values, of one layer."""
        return math.prod(self._block_shape) * self._dtype.itemsize

    def _reserve(self, num_blocks: int) -> ReservedPlanes:
        num_planes = self._num_layers * self._num_tensors
        return reserve_planes(num_planes, num_blocks * self._block_bytes, self._device)

    def _view(self) -> list[Tensor]:
        capacity = self._memory.bytes_PU.shape[1] // self._block_bytes
        blocks_PU = self._memory.bytes_PU[:, : capacity * self._block_bytes].view(self._dtype)
        blocks = blocks_PU.unflatten(1, (capacity, *self._block_shape))
        return list(blocks.unflatten(0, (self._num_layers, self._num_tensors)))

    def place(self, layer: int, cache_positions_T: Tensor) -> CachePlace:
        """Return where a layer writes at cache positions: block * block size + offset in the block."""
        return CachePlace(self._addressed[layer].flatten(1, 2), cache_positions_T)

    def pages(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a layer: k_PLKD, v_PLKD."""
        k_PLKD, *others = self._addressed[layer]
        return k_PLKD, others[0] if others else k_PLKD[..., : self.value_dim]

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy shared blocks for rows that are about to write to them."""
        pairs_2P = upload(np.array((sources, targets), np.int64), self._device)
        for layer in self.layers:
            layer.index_copy_(1, pairs_2P[1], layer.index_select(1, pairs_2P[0]))


class BlockManager:
    """An allocator of blocks with reference counts.

    It takes shared blocks from the front and other blocks from the back, so that blocks of each kind lie
    close together.
    """

    def __init__(self, blocks: Iterable[int]) -> None:
        self._free = sorted(blocks)
        """The free blocks, rising."""
        self._users = dict.fromkeys(self._free, 0)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_blocks(self) -> int:
        return len(self._users)

    @property
    def blocks(self) -> list[int]:
        """All blocks, free or not."""
        return list(self._users)

    def grow(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._users[block] = 0
            insort(self._free, block)

    def allocate(self, count: int, *, to_share: bool = False) -> list[int]:
        """Take `count` free blocks, which then have one user each. There must be enough of them."""
        assert count <= self.num_free, f"{count} blocks wanted, {self.num_free} free"
        start = 0 if to_share else self.num_free - count
        taken = self._free[start : start + count]
        del self._free[start : start + count]
        for block in taken:
            self._users[block] = 1
        return taken if to_share else taken[::-1]

    def share(self, blocks: Iterable[int]) -> None:
        """Add one user to each block."""
        for block in blocks:
            assert self._users[block] > 0, f"block {block} is free"
            self._users[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Remove one user from each block; a block without users becomes free."""
        for block in blocks:
            assert self._users[block] > 0, f"block {block} is free"
            self._users[block] -= 1
            if self._users[block] == 0:
                insort(self._free, block)


class RowPages(NamedTuple, Generic[HostOrDevice]):
    """The new token of every row, and the pages to which it attends."""

    position_B: HostOrDevice
    cache_position_B: HostOrDevice
    lens_B: HostOrDevice  # Cached tokens, the new one included.
    table_BM: HostOrDevice  # Entries beyond a row's own pages are arbitrary.


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
        self.table = np.zeros((num_slots, blocks_per_row), np.int64)
        """The blocks of the row in each slot, of which the first `counts` are its own or shared."""
        self.counts = np.zeros(num_slots, np.int64)
        self.num_shared = np.zeros(num_slots, np.int64)
        """How many of a row's first blocks other rows share, and its number among these rows (`ordinals`)."""
        self.ordinals = np.zeros(num_slots, np.int64)
        self.num_changes = 0
        """How often a row has started, stopped or got a block."""

    def widen(self, blocks_per_row: int, *, num_blocks: int) -> None:
        """Let rows have so many blocks, of a cache that has perhaps got more."""
        self.num_changes += 1
        self.num_blocks = num_blocks
        self.table = np.pad(self.table, ((0, 0), (0, blocks_per_row - self.blocks_per_row)))

    def start(
        self, slot: int, blocks: Sequence[int], *, length: int, num_shared: int = 0, ordinal: int = 0
    ) -> None:
        """Start a row that has `length` tokens in these blocks.

        It is number `ordinal` among the rows that share its first `num_shared` blocks.
        """
        self.num_changes += 1
        self._is_running[slot] = True
        self.lens[slot] = length
        self.counts[slot] = len(blocks)
        self.num_shared[slot] = num_shared
        self.ordinals[slot] = ordinal
        self.table[slot, : len(blocks)] = blocks

    def append(self, slot: int, block: int) -> None:
        self.num_changes += 1
        self.table[slot, self.counts[slot]] = block
        self.counts[slot] += 1

    def stop(self, slot: int) -> list[int]:
        """End the row and return its blocks, of which the first may have other users."""
        self.num_changes += 1
        self._is_running[slot] = False
        return self.table[slot, : self.counts[slot]].tolist()

    def sharing(self, slot: int) -> tuple[int, int]:
        """Return how many of the row's blocks are shared, and its number among the rows that share them."""
        return int(self.num_shared[slot]), int(self.ordinals[slot])

    def full(self) -> list[int]:
        """Return the slots of the rows whose next token needs another block."""
        return np.flatnonzero(self._is_running & (self.lens == self.counts * self.block_size)).tolist()

    def running(self) -> Integers:
        return np.flatnonzero(self._is_running)

    @property
    def blocks_per_row(self) -> int:
        """The most blocks that a row may have."""
        return self.table.shape[1]

    def advance(self) -> tuple[Integers, Integers, Integers]:
        """Add one token to every running row, none of which may be `full`.

        Returns the slots of the rows, and the positions and cache positions of the tokens.
        """
        slots = self.running()
        lens = self.lens[slots]
        blocks = self.table[slots, lens // self.block_size]
        self.lens[slots] += 1
        return slots, lens, blocks * self.block_size + lens % self.block_size

    def advance_pages(self, num_rows: int, num_pages: int) -> RowPages[NDArray[Any]]:
        """Add one token to every running row, none of which may be `full`.

        Returns `num_rows` rows, with tables of `num_pages` pages. Those beyond the running rows are padding,
        and write to page 0.
        """
        slots, lens, cache_positions = self.advance()
        count = len(slots)
        rows: RowPages[NDArray[Any]] = RowPages(
            np.zeros(num_rows, np.int64), np.zeros(num_rows, np.int64), np.ones(num_rows, np.int32),
            np.zeros((num_rows, num_pages), np.int32))
        rows.position_B[:count] = lens
        rows.cache_position_B[:count] = cache_positions
        rows.lens_B[:count] = lens + 1
        width = min(num_pages, self.blocks_per_row)  # (Rows of a window are shorter than those that come.)
        rows.table_BM[:count, :width] = self.table[slots, :width]
        return rows
