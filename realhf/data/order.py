"""The order in which a run uses the rows of its data, and the ids of prompts and samples. Imports no torch.

A row is an entry of a data set. A prompt is a row at its place in a run, and its id counts these places from
0, so that a row that comes again is another prompt; the order is a function of that number. A sample is one
of the `group_size` answers to a prompt (of preference pairs: the chosen and the rejected completion). The
samples of a prompt are a group and have consecutive ids.
"""

import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

_BLOCK = 1000
"""Number of prompts in a block of a mixture. All blocks have equally many prompts of each part."""
_MANY_EPOCHS = 50
"""In so many, a row is drawn with replacement except with a chance of exp(-50)."""
_MIN_ORDERS = 8
_MAX_ORDER_BYTES = 128 << 20
_MIXTURE = 0x6D6978
"""Keeps the random numbers of mixtures apart from those of epochs."""


def row_order(
    num_rows: int, *, start: int, count: int, seed: int, shuffle: bool, replacement: bool = False
) -> list[int]:
    """Return the row indices from `start` to `start + count` of an endless run, shuffled anew each epoch.

    With `replacement`, each is drawn from all rows, so that an epoch may have a row twice or not at all.
    """
    if not shuffle:
        return [i % num_rows for i in range(start, start + count)]
    order: list[int] = []
    while count > 0:
        offset = start % num_rows
        part = _epoch_order(num_rows, seed, start // num_rows, replacement)[offset : offset + count]
        order += part.tolist()
        start += len(part)
        count -= len(part)
    return order


class _EpochOrders:
    """A cache of the epochs' orders that were used last: eight, or more if they are small.

    It holds several because the parts of a mixture take turns.
    """

    def __init__(self) -> None:
        self._orders: OrderedDict[tuple[int, int, int, bool], NDArray[np.integer]] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def __call__(self, num_rows: int, seed: int, epoch: int, replacement: bool) -> NDArray[np.integer]:
        key = (num_rows, seed, epoch, replacement)
        with self._lock:
            if key not in self._orders:
                kind = np.int32 if num_rows < 2**31 else np.int64
                order: NDArray[np.integer] = np.arange(num_rows, dtype=kind)
                generator = np.random.default_rng([seed, epoch])
                if replacement:
                    order = generator.integers(num_rows, size=num_rows, dtype=kind)
                else:
                    generator.shuffle(order)
                self._orders[key] = order
                self._num_bytes += self._orders[key].nbytes
            self._orders.move_to_end(key)
            while len(self._orders) > _MIN_ORDERS and self._num_bytes > _MAX_ORDER_BYTES:
                self._num_bytes -= self._orders.popitem(last=False)[1].nbytes
            return self._orders[key]


_epoch_order = _EpochOrders()


class NoRowError(Exception):
    """All rows of a data set are left out."""


class SkippingOrder:
    """The order of the rows of a large data set in which some are left out, which turns out as they come up.

    A row that is left out is skipped: the prompt gets the next row of the epoch's order. So every other row
    comes up once in each epoch. A position counts the rows of all epochs, skipped ones included.
    """

    def __init__(
        self, num_rows: int, has: Callable[[int], bool], *, seed: int, shuffle: bool,
        replacement: bool = False,
    ) -> None:
        """`has` says whether a row is not left out; each row is asked about once."""
        self._num_rows = num_rows
        self._has = has
        self._seed = seed
        self._shuffle = shuffle
        self._replacement = replacement
        self._first = 0
        """The prompt that the first entry of `_positions` belongs to."""
        self._positions = array("q")
        self._next = 0
        """The position at which the search for the next prompt's row begins."""
        self._earlier: dict[int, int] = {}
        """Prompt -> position, of the prompts before `_first` that a resumed run still uses."""
        self._is_there = np.full(num_rows, -1, np.int8)  # -1: not known yet.

    def __getitem__(self, prompt: int) -> int:
        """Return the row of a prompt, by its number. Raises NoRowError if all are left out."""
        return self._row_at(self._position(prompt))

    def state(self, prompts: Collection[int], *, next_prompt: int) -> dict[str, Any]:
        """Return as JSON what is needed to go on from `next_prompt`, and to find the rows of `prompts` again.

        All of the prompts are before `next_prompt`.
        """
        start = self._position(next_prompt - 1) + 1 if next_prompt else 0
        return {
            "prompt": next_prompt, "position": start,
            "earlier": [[prompt, self._position(prompt)] for prompt in sorted(prompts)]}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._first = state["prompt"]
        self._next = state["position"]
        self._positions = array("q")
        self._earlier = {prompt: position for prompt, position in state["earlier"]}

    def _position(self, prompt: int) -> int:
        if prompt < self._first:
            return self._earlier[prompt]
        while self._first + len(self._positions) <= prompt:
            self._positions.append(self._next_position())
            self._next = self._positions[-1] + 1
        return self._positions[prompt - self._first]

    def _next_position(self) -> int:
        epochs = _MANY_EPOCHS if self._replacement else 2  # A whole one is among these.
        for position in range(self._next, self._next + epochs * self._num_rows):
            row = self._row_at(position)
            if self._is_there[row] < 0:
                self._is_there[row] = self._has(row)
            if self._is_there[row]:
                return position
        raise NoRowError

    def _row_at(self, position: int) -> int:
        (row,) = row_order(
            self._num_rows, start=position, count=1, seed=self._seed, shuffle=self._shuffle,
            replacement=self._replacement)
        return row


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


def mixture_counts(prompt: int, counts: tuple[int, ...], *, seed: int) -> list[int]:
    """Return how many of the prompts before `prompt` are from each part of a mixture."""
    block, offset = divmod(prompt, _BLOCK)
    parts, _ = _block(block, counts, seed)
    before = np.bincount(parts[:offset], minlength=len(counts)).tolist()
    return [block * count + number for count, number in zip(counts, before, strict=True)]


@lru_cache(maxsize=8)
def _block(block: int, counts: tuple[int, ...], seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the part of each prompt of a block, and how many prompts before it have the same part."""
    parts = np.repeat(np.arange(len(counts)), counts)
    parts = np.random.default_rng([seed, block, _MIXTURE]).permutation(parts)
    earlier = np.zeros(len(parts), np.int64)
    for part, count in enumerate(counts):
        earlier[parts == part] = np.arange(count)
    return parts, earlier


# Ids


def prompt_of(sample: int, group_size: int) -> int:
    return sample // group_size


def samples_of(prompts: Iterable[int], group_size: int) -> list[int]:
    return [prompt * group_size + i for prompt in prompts for i in range(group_size)]


def groups_of(samples: Sequence[int], group_size: int) -> list[list[int]]:
    """Return the places in `samples` of each group, in order of first appearance.

    Filters may have dropped some samples of a group. A `group_size` that divides that of the prompts gives
    parts of their groups.
    """
    groups: dict[int, list[int]] = {}
    for i, sample in enumerate(samples):
        groups.setdefault(prompt_of(sample, group_size), []).append(i)
    return list(groups.values())
