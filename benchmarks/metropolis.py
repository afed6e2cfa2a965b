"""Metropolis: ReaL's search for plans, written from its description, as a baseline for ours.

A Markov chain over plans (Mei et al. 2024): it starts at the fastest option of every call, proposes a random
candidate for one random call, and accepts it with probability min(1, exp(beta (cost before - cost after))).
The cost is the step's seconds, plus a large penalty where memory overflows. Many chains run side by side,
each at another temperature, which makes the baseline stronger than one chain at one.

Shapes: K chains, U units (calls, or calls that must share a layout).
"""

import time
from typing import NamedTuple

import numpy as np

from realhf.planner.space import Space

_COLDEST, _HOTTEST = 3000.0, 10.0  # beta, in one over the seconds of the first plan.
_PENALTY = 10.0  # Of a plan that does not fit, in seconds of the first plan.


class Walked(NamedTuple):
    """The best plan that fits, None where no chain came by one."""

    chosen: np.ndarray | None
    step_seconds: float
    num_plans: int


def metropolis(space: Space, *, cpu_seconds: float, num_chains: int = 64, seed: int = 0) -> Walked:
    """Walks for so many seconds of this process's CPU time, with the costs that our own search uses."""
    began, random = time.process_time(), np.random.default_rng(seed)
    sizes = np.array([len(unit.candidates) for unit in space.units])
    now_KU = np.zeros((num_chains, len(sizes)), dtype=int)  # Candidates are in order of time: 0 is fastest.
    scale = float(space.exact_periods(now_KU[:1])[0])
    beta_K = np.geomspace(_HOTTEST, _COLDEST, num_chains) / scale
    best, best_seconds, num_plans = None, np.inf, 0
    cost_K = np.full(num_chains, np.inf)
    next_KU, rows = now_KU, np.arange(num_chains)
    while True:
        seconds_K, over_K = space.exact_periods(next_KU), space.overflow(space.units, next_KU)
        fitting_K = np.where(over_K <= 0, seconds_K, np.inf)
        if fitting_K.min() < best_seconds:
            best, best_seconds = next_KU[fitting_K.argmin()].copy(), float(fitting_K.min())
        penalty_K = _PENALTY * scale * (1 + np.maximum(over_K, 0) / space.capacity)
        after_K = seconds_K + np.where(over_K > 0, penalty_K, 0.0)
        with np.errstate(over="ignore"):
            accepted = random.random(num_chains) < np.exp(np.minimum(0.0, beta_K * (cost_K - after_K)))
        now_KU, cost_K = np.where(accepted[:, None], next_KU, now_KU), np.where(accepted, after_K, cost_K)
        num_plans += num_chains
        if time.process_time() - began >= cpu_seconds:
            return Walked(best, best_seconds, num_plans)
        unit_K, next_KU = random.integers(len(sizes), size=num_chains), now_KU.copy()
        next_KU[rows, unit_K] = random.integers(sizes[unit_K])
