"""The seconds in which rewards score the samples of a step, on the rank that takes longest."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from realhf.planner.workload.lengths import Lengths, geometric, long_tail
from realhf.planner.workload.slowest_replica import Rollout, decode_steps

_UNITS = 100  # The mean time of an answer is counted in so many units.
_LONGEST = 50  # Without a time limit, no answer takes longer than so many times the 0.99 quantile.


@dataclass(frozen=True)
class ScoringTime:
    """The seconds in which an answer is scored, and how many are scored at once on a rank.

    Without `p99_seconds`, all answers take equally long. No answer takes longer than `limit_seconds`.
    """

    mean_seconds: float
    p99_seconds: float | None = None
    limit_seconds: float | None = None
    at_once: int = 1

    def of_slowest(self, num_samples: float, num_ranks: int) -> float:
        """Return the expected seconds of the slowest of some ranks, which share the samples."""
        return _of_slowest(self, max(1.0, num_samples / num_ranks), num_ranks)

    @property
    def _lengths(self) -> Lengths:
        if self.p99_seconds is None:
            return geometric(_UNITS, _UNITS)
        p99 = self.p99_seconds / self.mean_seconds * _UNITS
        limit = _LONGEST * p99 if self.limit_seconds is None else (
            self.limit_seconds / self.mean_seconds * _UNITS)
        return long_tail(_UNITS, p99, max(1, round(limit)))


@lru_cache(maxsize=1024)
def _of_slowest(time: ScoringTime, num_samples: float, num_ranks: int) -> float:
    slots = min(float(time.at_once), num_samples)
    steps = decode_steps(Rollout(time._lengths, 1, num_samples, slots, num_ranks, False, 1))
    return steps.of_slowest(np.ones(len(steps.rows_K)))[0] * time.mean_seconds / _UNITS
