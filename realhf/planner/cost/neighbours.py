"""Seconds of calls while calls on other ranks of their hosts use the same cores.

The cost of a call is that with its ranks' hosts for itself. Where processes share cores, calls that run at
the same time on other ranks slow each other down: cores are shared evenly among all that could be busy.
"""

import numpy as np

from realhf.cluster import Cluster
from realhf.planner.cost.throughput import NEVER, Dependencies, delays

_STEPS = 12  # Steps that the ranks walk through; the later half counts.


def seconds_with_neighbours(
    cluster: Cluster, needs: Dependencies, seconds: np.ndarray, first: np.ndarray, stop: np.ndarray,
    *, moving: np.ndarray, busy: np.ndarray,
) -> np.ndarray:
    """Return how long each call of one plan takes in the steady state, shape (N,).

    Arguments are as in throughput.py, for one plan. Calls keep `seconds` where devices share no cores.
    """
    if cluster.cores_per_host is None:
        return seconds
    shares = (first[:, None] < stop) & (first < stop[:, None])
    waits = delays(needs, shares, moving, busy)
    hosts = np.arange(cluster.num_hosts)[:, None] * cluster.devices_per_host
    on_host = np.minimum(stop, hosts + cluster.devices_per_host) - np.maximum(first, hosts)
    used_cores = np.clip(on_host, 0, cluster.cores_per_host)
    starts, ends = _walk(seconds, used_cores, waits, cluster.cores_per_host)
    return (ends - starts)[_STEPS // 2 :].mean(axis=0)


def _walk(
    seconds: np.ndarray, used_cores: np.ndarray, waits: tuple[np.ndarray, np.ndarray], num_cores: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return when the calls of each step start and end, shape (steps, N) each."""
    starts, ends = (np.full((_STEPS, len(seconds)), np.inf) for _ in range(2))
    left = np.zeros(len(seconds))
    steps = np.zeros(len(seconds), dtype=int)  # The step of each call that runs, or that is to start next.
    now = 0.0
    while np.isinf(ends[-1]).any():
        ready = np.full(len(seconds), np.inf)
        for i, step in enumerate(steps):
            if step < _STEPS and np.isinf(starts[step, i]):
                ready[i] = _ready(ends, waits, step, i)
        for i in np.flatnonzero(ready <= now).tolist():
            starts[steps[i], i] = now
            left[i] = seconds[i]
        running = np.array([step < _STEPS and starts[step, i] < np.inf for i, step in enumerate(steps)])
        wanted = (used_cores * running).sum(axis=1, keepdims=True)
        speed = np.where(used_cores > 0, np.minimum(1.0, num_cores / np.maximum(wanted, 1)), 1.0).min(axis=0)
        until = min(
            np.where(running, left / speed, np.inf).min(), np.where(ready > now, ready, np.inf).min() - now)
        left -= np.where(running, until * speed, 0.0)
        now += until
        for i in np.flatnonzero(running & (left <= 1e-12)).tolist():
            ends[steps[i], i] = now
            steps[i] += 1
    return starts, ends


def _ready(ends: np.ndarray, waits: tuple[np.ndarray, np.ndarray], step: int, call: int) -> float:
    """Return when a call can start; infinity while a call that it waits for has not ended."""
    same, before = waits
    waited = [ends[step][same[call] > NEVER] + same[call][same[call] > NEVER]]
    if step:
        waited.append(ends[step - 1][before[call] > NEVER] + before[call][before[call] > NEVER])
    return float(np.concatenate([*waited, [0.0]]).max())
