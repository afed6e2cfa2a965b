"""The rows of a round of generation.

With several rounds, one in each step, a response gets an equal part of the limit in each. In the steady state
a round therefore has rows of all ages: those of age a have been through a rounds, and their responses are
longer than the tokens of a rounds.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from realhf.planner.workload.lengths import Lengths


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
