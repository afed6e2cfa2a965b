"""A simulated step of a plan in the steady state: when each call runs where, and which devices idle."""

from dataclasses import dataclass

import numpy as np

from realhf.planner.cost.throughput import first_starts, have_common_ranks
from realhf.planner.search.search_space import SearchSpace


@dataclass(frozen=True)
class TimelineEntry:
    """A call, or the reallocation of a role for a call, on `num_ranks` ranks from `first_rank` on.

    Seconds count from the start of the first call of a step; the end may lie in the next step.
    """

    name: str
    kind: str
    first_rank: int
    num_ranks: int
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """One step of the steady state. `idle` is the fraction of the step in which each device runs no call."""

    step_seconds: float
    timeline: tuple[TimelineEntry, ...]
    idle: np.ndarray


def simulate(space: SearchSpace, chosen: np.ndarray) -> Simulation:
    """Return a step of a plan (one candidate per call group), late enough that the start has no effect."""
    plans = np.asarray(chosen)[None]
    period = float(space.exact_periods(plans)[0])
    moving = space.moving(plans)
    times = space.call_times(plans)
    busy = space.needs.busy(moving, times.first, times.stop)[0]
    durations = space.needs.durations(moving)[0]
    seconds, first, stop = (array[0] for array in times)
    shares = have_common_ranks(times.first, times.stop)[0]
    num_steps = 4 * len(space.calls) + 4
    starts = first_starts(space.needs, seconds, shares, moving[0], busy, num_steps=num_steps)[-1]
    starts = starts - starts.min()
    idle = np.ones(space.problem.cluster.num_devices)
    timeline = []
    for i, call in enumerate(space.calls):
        first_rank = int(first[i])
        num_ranks = int(stop[i]) - first_rank
        idle[first_rank : first_rank + num_ranks] -= seconds[i] / period
        end = starts[i] + seconds[i]
        timeline.append(TimelineEntry(call.name, call.kind, first_rank, num_ranks, starts[i], end))
    for (i, j, lag), arrived, amount in zip(space.needs.weights, moving[0], durations, strict=True):
        if amount > 0:
            ends = [starts[j] + seconds[j]]
            if lag and space.needs.in_place:
                ends += [starts[other] + seconds[other] for other in range(j) if shares[i, other]]
            start = max(ends) + arrived - amount - lag * period
            start += period if start < 0 else 0.0
            num_ranks = int(stop[i] - first[i])
            name = f"{space.calls[j].role} for {space.calls[i].name}"
            timeline.append(TimelineEntry(name, "realloc", int(first[i]), num_ranks, start, start + amount))
    return Simulation(period, tuple(timeline), np.clip(idle, 0.0, 1.0))
