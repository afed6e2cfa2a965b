"""Computes how long calls take beside calls on other ranks, if processes share the cores of a host.

Plans are priced without this. It is for comparing the predicted seconds of calls with those of a run.
"""

from collections.abc import Mapping

import numpy as np

from realhf.cluster import Cluster
from realhf.execution_plan import ExecutionPlan
from realhf.planner import step_time
from realhf.planner.problem import Problem
from realhf.planner.rates import Rates
from realhf.planner.step_time import contiguous_layouts, dependencies, have_common_ranks, times_of_plan

_STEPS = 12  # Steps that the ranks walk through; the later half counts.


def seconds_beside_others(
    problem: Problem, rates: Rates, plan: ExecutionPlan, call_seconds: Mapping[str, float]
) -> dict[str, float]:
    """Return the seconds of every call of a plan in the steady state; alone, calls take `call_seconds`."""
    needs = dependencies(problem, rates)
    moving = step_time.moving_seconds(rates, problem, needs, contiguous_layouts(problem, plan))
    seconds, first, stop = times_of_plan(problem, rates, plan, call_seconds)
    shares = have_common_ranks(first, stop)
    waits = step_time._waits(needs, np.zeros_like(seconds), shares, moving, needs.busy(moving, first, stop))
    taken = among_neighbours(
        problem.cluster, seconds[0], first[0], stop[0], (waits[0][..., 0], waits[1][..., 0]))
    return dict(zip((call.name for call in problem.calls), taken.tolist(), strict=True))


def among_neighbours(
    cluster: Cluster, seconds: np.ndarray, first: np.ndarray, stop: np.ndarray,
    waits: tuple[np.ndarray, np.ndarray],
) -> np.ndarray:
    """Return how long each call of one plan takes in the steady state beside those on other ranks, (N,).

    Calls that run at the same time on other ranks of their hosts slow each other down. `waits` has the
    seconds from the end of call j until call i of the same step can start, and until call i of the next
    step can, (N, N) each; -inf where it does not wait. Calls keep `seconds` where no cores are shared.
    """
    num_cores = cluster.cores_per_host
    if num_cores is None:
        return seconds
    hosts = np.arange(cluster.num_hosts)[:, None] * cluster.devices_per_host
    on_host = np.minimum(stop, hosts + cluster.devices_per_host) - np.maximum(first, hosts)
    starts, ends = _walk(seconds, np.clip(on_host, 0, num_cores), waits, num_cores)
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
    same, before = (each[call] for each in waits)
    waited = [ends[step][np.isfinite(same)] + same[np.isfinite(same)]]
    if step:
        waited.append(ends[step - 1][np.isfinite(before)] + before[np.isfinite(before)])
    return float(np.concatenate([*waited, [0.0]]).max())
