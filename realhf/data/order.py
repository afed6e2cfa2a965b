"""The order in which a run uses the rows of its data, a function of the prompt's number. Imports no torch."""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

_BLOCK = 1000
"""Number of prompts in a block of a mixture. All blocks have equally many prompts of each part."""
_MIN_ORDERS = 8
_MAX_ORDER_BYTES = 128 << 20
_MIXTURE = 0x6D6978
"""Keeps the random numbers of mixtures apart from those of epochs."""


def row_order(num_rows: int, *, start: int, count: int, seed: int, shuffle: bool) -> list[int]:
    """Return the row indices from `start` to `start + count` of an endless run, shuffled anew each epoch."""
    if not shuffle:
        return [i % num_rows for i in range(start, start + count)]
    order: list[int] = []
    while count > 0:
        offset = start % num_rows
        part = _epoch_order(num_rows, seed, start // num_rows)[offset : offset + count]
        order += part.tolist()
        start += len(part)
        count -= len(part)
    return order


class _EpochOrders:
    """A cache of the epochs' orders that were used last: eight, or more if they are small.

    It holds several because the parts of a mixture take turns.
    """

    def __init__(self) -> None:
        self._orders: OrderedDict[tuple[int, int, int], NDArray[np.integer]] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def __call__(self, num_rows: int, seed: int, epoch: int) -> NDArray[np.integer]:
        """Return the row indices of an epoch in their random order."""
        key = (num_rows, seed, epoch)
        with self._lock:
            if key not in self._orders:
                kind = np.int32 if num_rows < 2**31 else np.int64
                order: NDArray[np.integer] = np.arange(num_rows, dtype=kind)
                np.random.default_rng([seed, epoch]).shuffle(order)
                self._orders[key] = order
                self._num_bytes += self._orders[key].nbytes
            self._orders.move_to_end(key)
            while len(self._orders) > _MIN_ORDERS and self._num_bytes > _MAX_ORDER_BYTES:
                self._num_bytes -= self._orders.popitem(last=False)[1].nbytes
            return self._orders[key]


_epoch_order = _EpochOrders()


def block_counts(weights: Sequence[float]) -> tuple[int, ...]:
    """Return how many prompts of a block each part of a mixture has: its weight's share, rounded.

    Raises ValueError if a weight is not positive, or so small that its part would have no prompt.
    """
    total = sum(weights)
    if any(not weight > 0 for weight in weights) or not total < float("inf"):
        raise ValueError(f"weights are {tuple(weights)}: they must be positive numbers")
    exact = [weight / total * _BLOCK for weight in weights]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])
    for i in by_remainder[: _BLOCK - sum(counts)]:
        counts[i] += 1
    if 0 in counts:
        raise ValueError(f"weights are {tuple(weights)}: each must be at least a thousandth of their sum")
    return tuple(counts)


def mixture_position(prompt: int, counts: tuple[int, ...], *, seed: int) -> tuple[int, int]:
    """Return the part of a mixture that a prompt is from, and the number of the part's prompts before it.

    Every block of prompts has `counts` prompts of the parts, in a random order of its own.
    """
    block, offset = divmod(prompt, _BLOCK)
    parts, earlier = _block(block, counts, seed)
    part = int(parts[offset])
    return part, block * counts[part] + int(earlier[offset])


@lru_cache(maxsize=8)
def _block(block: int, counts: tuple[int, ...], seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the part of each prompt of a block, and how many prompts before it have the same part."""
    parts = np.repeat(np.arange(len(counts)), counts)
    parts = np.random.default_rng([seed, block, _MIXTURE]).permutation(parts)
    earlier = np.zeros(len(parts), np.int64)
    for part, count in enumerate(counts):
        earlier[parts == part] = np.arange(count)
    return parts, earlier
