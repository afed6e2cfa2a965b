"""The choice among plans that are nearly as fast: one with reserves of memory, and simpler layouts.

The fastest plan found may fill its devices to the last gigabyte for a third of a percent. Among plans whose
step is little longer, `preferred` looks for one that comes first in this order: more free memory up to
`ENOUGH_FREE`, fewer layouts, fewer hosts, fewer communicators, a shorter step. It changes the candidate of
one call group at a time, as local search does.
"""

import math
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from realhf.execution_plan import ExecutionPlan
from realhf.planner.deadline import OutOfTime
from realhf.planner.links import ContiguousLayout
from realhf.planner.memory_account import MemoryAccount
from realhf.planner.problem import Problem
from realhf.planner.search import SAME
from realhf.planner.search_space import SearchSpace
from realhf.planner.shard import available_bytes
from realhf.planner.step_time import contiguous_layouts
from realhf.user_input.units import format_bytes, format_seconds

ENOUGH_FREE = 0.1
"""Above this share of what plans may use of a device, more free memory makes no plan better than another."""
_LEVEL = 0.02  # Shares of free memory that differ by less count as equal.
_MOST_COUNTED = 24  # The most candidates of a group that are counted exactly, in each of two orders.


class Simplicity(NamedTuple):
    """The figures of how simple a plan is; smaller is better."""

    num_layouts: int
    num_hosts: int
    num_communicators: int  # Kinds of groups of ranks, in all layouts.


class Standing(NamedTuple):
    """The place of a plan in the order; smaller is better."""

    lacking_levels: int
    simplicity: Simplicity
    step_seconds: float


@dataclass(frozen=True)
class Preference:
    """A plan that is preferred to the fastest one that was found, and how both stand."""

    chosen: tuple[int, ...]
    fastest: tuple[int, ...]
    step_seconds: float
    fastest_seconds: float
    more_free_bytes: float  # On the fullest device; 0 where the fastest plan has enough.
    simplicity: Simplicity
    fastest_simplicity: Simplicity

    @property
    def sentence(self) -> str:
        """Return what the longer step is for."""
        more = self.more_free_bytes
        gains = [f"{format_bytes(more)} more free memory"] if more > 0 else []
        names = ("layouts", "hosts", "kinds of communicators")
        for name, mine, theirs in zip(names, self.simplicity, self.fastest_simplicity, strict=True):
            gains += [f"{mine} {name} instead of {theirs}"] if mine < theirs else []
        return (
            f"the fastest plan found takes {format_seconds(self.fastest_seconds)}; this one is "
            f"{self.step_seconds / self.fastest_seconds - 1:.1%} longer and has {', '.join(gains)}")


def preferred(
    space: SearchSpace, fastest: np.ndarray, *, slack: float, time_limit: float,
    should_stop: Callable[[], bool] | None = None,
) -> Preference | None:
    """Return a plan that is preferred to the fastest one and takes at most `slack` longer, as a fraction.

    Any plan that turns out to be faster on the way becomes the fastest one. The result is None if that is the
    given one, and is itself preferred. The search ends after the time limit, or when `should_stop` returns
    True.
    """
    with space.deadline.lifted():
        seconds = float(space.exact_periods(fastest[None])[0])
        standing = before = _standing(space, fastest, seconds)
    given = chosen = fastest
    limit = seconds * (1 + slack)
    with space.deadline.sooner(time_limit), suppress(OutOfTime):
        for num_reasons in (1, 2):  # Memory comes first; simpler layouts take what it leaves of the slack.
            is_better = True
            while is_better:
                is_better = False
                for index in range(len(space.groups)):
                    for plan in _promising(space, chosen, index, limit):
                        if should_stop is not None and should_stop():
                            break
                        seconds = float(space.exact_periods(plan[None])[0])
                        if seconds > limit or space.memory.excess(plan[None])[0] > 0:
                            continue
                        new = _standing(space, plan, seconds)
                        if seconds < before.step_seconds * (1 - SAME):
                            fastest = plan
                            before = new
                            limit = seconds * (1 + slack)
                        if standing.step_seconds > limit or _comes_before(new, standing, num_reasons):
                            chosen = plan
                            standing = new
                            is_better = True
    if standing[:2] == before[:2]:
        chosen = fastest
        standing = before
    if chosen is given:
        return None
    more = 0.0
    if standing.lacking_levels < before.lacking_levels:
        free, fastest_free = (_free_bytes(space, plan) for plan in (chosen, fastest))
        more = free - fastest_free
    return Preference(
        tuple(chosen.tolist()), tuple(fastest.tolist()), standing.step_seconds, before.step_seconds, more,
        standing.simplicity, before.simplicity)


def _comes_before(new: Standing, old: Standing, num_reasons: int) -> bool:
    if new[:num_reasons] != old[:num_reasons]:
        return new[:num_reasons] < old[:num_reasons]
    return new.step_seconds < old.step_seconds * (1 - SAME)


def standing_of(problem: Problem, plan: ExecutionPlan, seconds: float) -> Standing:
    """Return the place of a plan that takes so many seconds per step."""
    free = -MemoryAccount(problem).excess(plan) / available_bytes(problem.cluster)
    layouts = contiguous_layouts(problem, plan).values()
    return Standing(_lacking_levels(free), _simplicity_of(problem, {*layouts}), seconds)


def _standing(space: SearchSpace, chosen: np.ndarray, seconds: float) -> Standing:
    free = _free_bytes(space, chosen) / space.capacity
    return Standing(_lacking_levels(free), _simplicity(space, chosen), seconds)


def _lacking_levels(free: float) -> int:
    """Return how much a share of free memory lacks to be enough."""
    return max(0, math.ceil((ENOUGH_FREE - free) / _LEVEL - SAME))


def _free_bytes(space: SearchSpace, chosen: np.ndarray) -> float:
    """Return the bytes that a plan, with its rows, leaves on its fullest rank."""
    account = space.memory.account
    counted = account.of_plan(ExecutionPlan(space.call_plans(chosen.tolist())))
    return -counted.excess(account.available)


def _simplicity(space: SearchSpace, chosen: np.ndarray) -> Simplicity:
    layouts = {group.candidates[i].layout for group, i in zip(space.groups, chosen.tolist(), strict=True)}
    return _simplicity_of(space.problem, layouts)


def _simplicity_of(problem: Problem, layouts: Collection[ContiguousLayout]) -> Simplicity:
    per_host = problem.cluster.devices_per_host
    hosts = {rank // per_host for layout in layouts for rank in (*layout.ranks[::per_host], layout.ranks[-1])}
    axes = [(s.tp, s.num_replicas, s.cp, s.pp, s.ep) for s in (layout.strategy for layout in layouts)]
    return Simplicity(len(layouts), len(hosts), sum(size > 1 for sizes in axes for size in sizes))


def _promising(space: SearchSpace, chosen: np.ndarray, index: int, limit: float) -> list[np.ndarray]:
    """Return plans with other candidates of one group that may be within the limit: first the simplest ones,
    then those that need least memory."""
    group = space.groups[index]
    plans = np.repeat(chosen[None], len(group.candidates), axis=0)
    plans[:, index] = np.arange(len(group.candidates))
    seconds = space.periods(plans, exact=False)
    rows = np.flatnonzero(seconds <= limit)
    rows = rows[rows != chosen[index]]
    simplicity = {row: _simplicity(space, plans[row]) for row in rows.tolist()}
    simplest = sorted(rows.tolist(), key=lambda row: (simplicity[row], seconds[row]))
    memory = group.resting + group.running + sum(group.copied, start=np.zeros(1))
    leanest = sorted(rows.tolist(), key=lambda row: memory[row])
    order = dict.fromkeys((*simplest[:_MOST_COUNTED], *leanest[:_MOST_COUNTED]))
    return [plans[row] for row in order]
