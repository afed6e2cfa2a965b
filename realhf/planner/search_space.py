"""The search space: times and memory of many plans at once, computed on arrays.

Calls that must share a layout form a call group. A plan, `chosen`, has the index of one candidate for each
group. While a search builds plans, it decides for each group a mesh first and then a candidate, so arrays of
unfinished plans hold `choices`: a candidate, a mesh or OPEN (see `CallGroup`).

Shapes: K plans, U call groups, N calls in the order in which ranks run them. `plans` and `choices` are
(K, U).
"""

import gc
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from realhf.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.plan import CallPlan
from realhf.planner.call_group import CallGroup, find_call_groups, placeholder_ranks
from realhf.planner.memory_account import MemoryAccount
from realhf.planner.memory_bounds import MemoryBounds
from realhf.planner.problem import Problem
from realhf.planner.rates import Rates
from realhf.planner.reallocation import arrivals
from realhf.planner.shard import available_bytes
from realhf.planner.step_time import (
    CallTimes,
    dependencies,
    have_common_ranks,
    host_anchor,
    one_step_periods,
    step_periods,
)


class HostCall(NamedTuple):
    """A call in plain Python, by its position among all calls.

    It runs on the ranks that have the results of the call group `anchor`, or on rank 0 without one. If it is
    split over these ranks, `seconds` has its time by their number.
    """

    position: int
    anchor: int | None
    is_split: bool
    seconds: np.ndarray


class SearchSpace:
    """The call groups of a problem, with the methods that compute the times and memory of plans."""

    def __init__(self, problem: Problem, rates: Rates) -> None:
        self.problem = problem
        self.rates = rates
        self.calls = problem.calls
        self.needs = dependencies(problem, rates)
        self.capacity = available_bytes(problem.cluster)
        gc.disable()  # Python's collector would visit all candidates again and again while they are made.
        try:
            self.groups = find_call_groups(problem, rates)
        finally:
            gc.enable()
        self.memory = MemoryBounds(MemoryAccount(problem), self.groups, [call.name for call in self.calls])
        self._known_moves: dict[tuple[object, ...], tuple[float, ...]] = {}
        self._group_of = {call: u for u, group in enumerate(self.groups) for call in group.calls}
        self._host_calls = [self._host_call(i) for i, call in enumerate(self.calls) if call.role is None]

    @cached_property
    def open_groups(self) -> list[CallGroup]:
        """The groups with array entries for all choices, not only for candidates."""
        return [group.with_open_choices(u) for u, group in enumerate(self.groups)]

    def _host_call(self, position: int) -> HostCall:
        call = self.calls[position]
        anchor, is_split = host_anchor(self.problem, call)
        group = None if anchor is None else self._group_of[self.calls.index(self.problem.graph[anchor])]
        numbers = np.array([1])
        if is_split and group is not None:
            numbers = np.unique(self.groups[group].replicas).astype(int)
        seconds = np.zeros(1 + max(numbers, default=1))
        seconds[numbers] = [self.problem.workloads[call.name].seconds_on(n) for n in numbers.tolist()]
        return HostCall(position, group, is_split, seconds)

    def call_plans(self, chosen: Sequence[int]) -> dict[str, CallPlan]:
        """Return the CallPlan of every call; `host_anchor` decides where calls in plain Python run."""
        plans: dict[str, CallPlan] = {}
        for group, index in zip(self.groups, chosen, strict=True):
            candidate = group.candidates[index]
            layout = candidate.layout.as_layout
            for i, variant in zip(group.calls, candidate.variants, strict=True):
                predicted = {"seconds": float(f"{variant.cost.seconds:.6g}")}
                plans[self.calls[i].name] = replace(variant.call_plan, layout=layout, predicted=predicted)
        for call in self.calls:
            if call.role is None:
                anchor, is_split = host_anchor(self.problem, call)
                ranks = plans[anchor].layout.result_ranks if anchor is not None else (0,)
                ranks = ranks if is_split else ranks[:1]
                plans[call.name] = CallPlan(Layout(ParallelStrategy(dp=len(ranks)), DeviceMesh(ranks)))
        return {call.name: plans[call.name] for call in self.problem.graph.order}

    def call_times(self, choices: np.ndarray) -> CallTimes:
        """Return the times and ranks of every call.

        The ranks of a plain Python call are undecided if the layout of its group is.
        """
        seconds, first, stop = (np.zeros((len(choices), len(self.calls))) for _ in range(3))
        for group, choice in zip(self.open_groups, choices.T, strict=True):
            seconds[:, group.calls] = group.seconds[choice]
            first[:, group.calls] = group.first[choice, None]
            stop[:, group.calls] = group.stop[choice, None]
        for owner, call in enumerate(self._host_calls, start=len(self.groups)):
            i = call.position
            if call.anchor is None:
                seconds[:, i] = call.seconds[1]
                stop[:, i] = 1  # It runs on rank 0.
                continue
            group = self.groups[call.anchor]
            choice = choices[:, call.anchor]
            is_decided = group.is_candidate(choice)
            candidate = np.where(is_decided, choice, 0)
            result_first = group.result_first[candidate]
            nowhere = placeholder_ranks(owner)
            if call.is_split:
                seconds[:, i] = np.where(is_decided, call.seconds[group.replicas[candidate]], 0.0)
            else:
                seconds[:, i] = call.seconds[1]
            first[:, i] = np.where(is_decided, result_first, nowhere.start)
            call_stop = group.stop[candidate] if call.is_split else result_first + 1
            stop[:, i] = np.where(is_decided, call_stop, nowhere.stop)
        return CallTimes(seconds, first, stop)

    def periods(
        self, choices: np.ndarray, *, moving: np.ndarray | None = None, exact: bool = True
    ) -> np.ndarray:
        """Return the seconds per step of plans: lower bounds without `exact`, or where choices are open."""
        seconds, first, stop = self.call_times(choices)
        return step_periods(
            self.problem.cluster, self.needs, seconds, first, stop, moving=moving, exact=exact)

    def quick_periods(self, choices: np.ndarray) -> np.ndarray:
        """Return lower bounds of the seconds per step that take less time to compute than `periods`."""
        seconds, first, stop = self.call_times(choices)
        return one_step_periods(self.needs, seconds, have_common_ranks(first, stop))

    def moving(self, choices: np.ndarray) -> np.ndarray:
        """Return the seconds from the end of training until each copy of the weights is complete, shape (K,
        number of `needs.weights`).

        Reallocations with an end whose choice is open take 0 seconds.
        """
        seconds = np.zeros((len(choices), len(self.needs.weights)))
        is_decided = self.is_decided(choices)
        for trainer, numbers in self.needs.copies.items():
            home = self._group_of[trainer]
            users = [self.needs.weights[number][0] for number in numbers]
            groups = [self._group_of[user] for user in users]
            for k in np.flatnonzero(is_decided[:, [home, groups[0]]].all(axis=1)):
                layouts = tuple(
                    self.groups[u].candidates[choices[k, u]].layout if is_decided[k, u] else None
                    for u in (home, *groups))
                if (key := (trainer, *layouts)) not in self._known_moves:
                    copies = list(zip((self.calls[user] for user in users), layouts[1:], strict=True))
                    assert layouts[0] is not None, "the home is decided"
                    self._known_moves[key] = arrivals(
                        self.rates, self.problem, self.calls[trainer], layouts[0], copies)
                seconds[k, numbers] = self._known_moves[key]
        return seconds

    def is_decided(self, choices: np.ndarray) -> np.ndarray:
        """Return which choices are candidates of their groups, rather than meshes or open; shape (K, U)."""
        columns = [group.is_candidate(choice) for group, choice in zip(self.groups, choices.T, strict=True)]
        return np.stack(columns, axis=1)

    def exact_periods(self, plans: np.ndarray) -> np.ndarray:
        return self.periods(plans, moving=self.moving(plans))
