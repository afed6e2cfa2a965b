"""ReaL's Metropolis search for plans, written from its description, as a baseline for ours.

It is a Markov chain over plans (Mei et al. 2024). The chain starts at the fastest option of every call,
proposes a random candidate for one random call, and accepts it with probability
min(1, exp(beta (cost before - cost after))). The cost is the step's seconds, plus a large penalty if memory
is exceeded. Many chains run side by side at different temperatures, which makes the baseline stronger than a
single chain.

Shapes: K chains, U units (calls, or calls that must share a layout).
"""

import time
from typing import NamedTuple

import numpy as np

from realhf.planner.search_space import SearchSpace

_COLDEST, _HOTTEST = 3000.0, 10.0  # beta, relative to 1 / (seconds of the first plan).
_PENALTY = 10.0  # Added for a plan that does not fit, relative to the seconds of the first plan.


class Walked(NamedTuple):
    """The best plan that fits, or None if no chain found one."""

    chosen: np.ndarray | None
    step_seconds: float
    num_plans: int


def metropolis(space: SearchSpace, *, cpu_seconds: float, num_chains: int = 64, seed: int = 0) -> Walked:
    """Search for so many seconds of this process's CPU time, with the costs that our own search uses."""
    began = time.process_time()
    random = np.random.default_rng(seed)
    sizes = np.array([len(unit.candidates) for unit in space.groups])
    now_KU = np.zeros((num_chains, len(sizes)), dtype=int)  # Candidate 0 is the fastest.
    scale = float(space.exact_periods(now_KU[:1])[0])
    beta_K = np.geomspace(_HOTTEST, _COLDEST, num_chains) / scale
    best, best_seconds, num_plans = now_KU[0], np.inf, 0
    cost_K = np.full(num_chains, np.inf)
    next_KU = now_KU
    while True:
        # The random number is drawn first, so that reallocations, the most expensive part of the costs, need
        # not be computed for plans that cost too much without them.
        most_K = cost_K - np.log(1 - random.random(num_chains)) / beta_K
        over_K = space.memory.excess(next_KU)
        fine_K = np.where(over_K > 0, _PENALTY * scale * (1 + over_K / space.capacity), 0.0)
        after_K = space.periods(next_KU) + fine_K
        maybe = np.flatnonzero(after_K <= most_K)
        if len(maybe):
            after_K[maybe] = space.exact_periods(next_KU[maybe]) + fine_K[maybe]
        accepted_K = after_K <= most_K
        fitting_K = np.where(accepted_K & (over_K <= 0), after_K, np.inf)
        if fitting_K.min() < best_seconds:  # No chain rejects a plan that is better than all before.
            best, best_seconds = next_KU[fitting_K.argmin()], float(fitting_K.min())
        now_KU = np.where(accepted_K[:, None], next_KU, now_KU)
        cost_K = np.where(accepted_K, after_K, cost_K)
        num_plans += num_chains
        if time.process_time() - began >= cpu_seconds:
            return Walked(best if np.isfinite(best_seconds) else None, best_seconds, num_plans)
        unit_K = random.integers(len(sizes), size=num_chains)
        next_KU = now_KU.copy()
        next_KU[np.arange(num_chains), unit_K] = random.integers(sizes[unit_K])
