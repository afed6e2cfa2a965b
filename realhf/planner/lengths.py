"""Lengths: distributions of lengths in tokens, and the rows of a round of generation that follow from one.

A response that reaches the limit is cut off there, so all responses that would be longer count as that long.

With several rounds, one in each step, a response gets an equal part of the limit in each. In the steady state
a round therefore has rows of all ages: those of age a have been through a rounds, and their responses are
longer than the tokens of a rounds.
"""

import math
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

_TAIL_DEVIATIONS = 2.3263478740408408  # Standard deviations of a normal variable at its 0.99 quantile.
_WIDEST = 6.0  # The largest standard deviation of the logarithm that is tried.
_NUM_NODES = 512  # A log-normal survival is computed at this many lengths, and interpolated in between.

USUALLY_ALIKE = 0.3
"""How alike the lengths of responses to one prompt are where no run has measured it (see `alike_share`)."""


class Lengths:
    """A distribution of whole numbers of tokens.

    `survival` has the fraction of sequences with at least t tokens, for t from 1 to the limit.
    """

    def __init__(self, survival: np.ndarray) -> None:
        self.survival = np.asarray(survival, dtype=float)
        self.survival.flags.writeable = False
        self._hash = hash(self.survival.tobytes())

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Lengths) and np.array_equal(self.survival, other.survival))

    @property
    def limit(self) -> int:
        """The most tokens that a sequence can have."""
        return len(self.survival)

    @cached_property
    def mean(self) -> float:
        return float(self.survival.sum())

    @cached_property
    def squared_mean(self) -> float:
        return float((self.survival * (2 * np.arange(self.limit) + 1)).sum())

    def sums_from(self, least: int) -> tuple[float, float]:
        """Return the mean length and the mean squared length if sequences below `least` tokens count 0."""
        if least > self.limit:
            return 0.0, 0.0
        survival = self.survival[least - 1 :].copy()
        tokens = np.arange(least, self.limit + 1)
        first = survival[0]
        survival[0] = 0.0
        return (
            float(first * least + survival.sum()),
            float(first * least**2 + (survival * (2 * tokens - 1)).sum()))

    @property
    def all_equal(self) -> bool:
        return bool(self.survival[-1] == 1.0)

    def scaled(self, factor: float) -> "Lengths":
        """Return the distribution of lengths that are all `factor` times as long.

        A length between two whole numbers is rounded up in some sequences and down in the others, so that
        the mean stays.
        """
        up_to = np.append(0.0, np.cumsum(self.survival))
        nodes = np.minimum(np.arange(max(1, math.ceil(self.limit * factor - 1e-9)) + 1) / factor, self.limit)
        survival = np.diff(np.interp(nodes, np.arange(self.limit + 1), up_to)) * factor
        return Lengths(np.round(survival, 12))

    def draw(self, rng: np.random.Generator, shape: int | tuple[int, ...]) -> np.ndarray:
        return np.searchsorted(-self.survival, -rng.random(shape))


@lru_cache(maxsize=64)
def geometric(mean: float, limit: int) -> Lengths:
    """Return lengths with this mean of sequences that end with the same chance after each token.

    If the mean is the limit, all lengths are equal.
    """
    if mean >= limit:
        return Lengths(np.ones(limit))
    if mean <= 1:
        return Lengths(np.array([max(mean, 0.0)]))
    steps = np.arange(limit)
    low, high = 0.0, 1.0  # Bisection on the probability that a response continues.
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if (middle**steps).sum() < mean else (low, middle)
    return Lengths(low**steps)


@lru_cache(maxsize=64)
def long_tail(mean: float, p99: float, limit: int) -> Lengths:
    """Return log-normal lengths with this mean, of which 99 % are at most `p99` tokens.

    The mean is that of the lengths after they have been cut off at the limit. Raises ValueError if no
    log-normal distribution has both.
    """
    low, high = 0.0, 0.0
    while _log_normal(p99, high, limit).sum() > mean:  # The mean falls as the distribution gets wider.
        low, high = high, high + 0.05
        if high > _WIDEST:
            raise ValueError(f"no long-tailed distribution has mean {mean:g} and 0.99 quantile {p99:g}")
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if _log_normal(p99, middle, limit).sum() > mean else (low, middle)
    return Lengths(_log_normal(p99, low, limit))


def _log_normal(p99: float, deviation: float, limit: int) -> np.ndarray:
    """Return the survival of log-normal lengths, given the standard deviation of their logarithm."""
    if deviation == 0:
        return (np.arange(limit) < p99).astype(float)
    nodes = np.unique(np.geomspace(1, limit, _NUM_NODES).astype(int))
    standard = (np.log(nodes / p99) / deviation + _TAIL_DEVIATIONS) / math.sqrt(2)
    # The probability that a length exceeds each node.
    exceeds = np.array([math.erfc(x) / 2 for x in standard.tolist()])
    return np.interp(np.arange(limit), np.append(0, nodes), np.append(1.0, exceeds))


def alike_share(groups: Sequence[Sequence[int]]) -> float:
    """Return how alike the lengths in a group are: 1 if they are equal, 0 if they are drawn independently.

    This is the intraclass correlation of their logarithms (Fisher 1925, one-way analysis of variance). It is
    0 if no two groups have two lengths each.
    """
    logs = [np.log(np.maximum(1, group)) for group in groups if len(group) > 1]
    if len(logs) < 2:
        return 0.0
    sizes = np.array([len(group) for group in logs])
    means = np.array([group.mean() for group in logs])
    total = sizes.sum()
    within = sum(float(((group - group.mean()) ** 2).sum()) for group in logs) / (total - len(logs))
    between = float(sizes @ (means - sizes @ means / total) ** 2) / (len(logs) - 1)
    usual = (total - (sizes**2).sum() / total) / (len(logs) - 1)  # The size of a group, if all are equal.
    variance = between + (usual - 1) * within
    return float(np.clip((between - within) / variance, 0.0, 1.0)) if variance > 0 else 0.0


def observed(lengths: Sequence[int], limit: int | None = None) -> Lengths:
    """Return the distribution of some lengths, at least one; longer ones than the limit are cut off."""
    longest = max(lengths) if limit is None else limit
    counts = np.bincount(np.clip(lengths, 1, longest), minlength=longest + 1)
    return Lengths(1 - np.cumsum(counts)[:longest] / len(lengths))


class RoundStatistics(NamedTuple):
    """The mean rows of a round. `ages` has the rows of each age at the start, per sample of a batch.

    The other arrays have an entry for each token that a row can get in the round: the fraction of rows that
    get it, and the mean number of tokens that these had before the round.
    """

    ages: np.ndarray
    survival: np.ndarray
    history: np.ndarray

    @property
    def num_rows(self) -> float:
        """Rows at the start, per sample of a batch."""
        return float(self.ages.sum())


@lru_cache(maxsize=64)
def steady_round(lengths: Lengths, num_rounds: int) -> RoundStatistics:
    """Return the statistics of a round in the steady state, for responses of these lengths."""
    alive = lengths.survival
    if num_rounds == 1:
        return RoundStatistics(np.ones(1), alive, np.zeros(len(alive)))
    num_tokens = -(-len(alive) // num_rounds)
    by_age = np.pad(alive, (0, num_rounds * num_tokens - len(alive))).reshape(num_rounds, num_tokens)
    ages = by_age[:, 0]
    running = by_age.sum(axis=0)
    had = num_tokens * np.arange(num_rounds)
    share = np.minimum(running / ages.sum(), 1.0)  # (Rounding may make it larger.)
    return RoundStatistics(ages, share, had @ by_age / np.maximum(running, 1e-30))
