"""The search space: times and memory of many plans at once, computed on arrays.

Calls that must share a layout form a call group. A plan, `chosen`, has the index of one candidate for each
group. While a search builds plans, it decides for each group a mesh first and then a candidate, so arrays of
unfinished plans hold `choices`: a candidate, a mesh or OPEN (see `CallGroup`).

Shapes: K plans, U call groups, N calls in the order in which ranks run them. `plans` and `choices` are
(K, U).
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from realhf.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.plan import CallPlan
from realhf.planner.call_group import OPEN, CallGroup, find_call_groups, placeholder_ranks
from realhf.planner.dependencies import dependencies, host_anchor, reallocation_seconds
from realhf.planner.model_states import available_bytes, shard_of
from realhf.planner.problem import Problem
from realhf.planner.rates import Rates
from realhf.planner.throughput import periods, shared_core_seconds
from realhf.planner.transfer import ContiguousLayout


class HostCall(NamedTuple):
    """A call in plain Python, by its position among all calls.

    It runs on the ranks that have the results of the call group `anchor`, or on rank 0 without one. If it is
    split over these ranks, it takes less than `seconds`.
    """

    position: int
    anchor: int | None
    is_split: bool
    seconds: float


class CallTimes(NamedTuple):
    """The seconds, the first rank and the stop rank of every call, each of shape (K, N)."""

    seconds: np.ndarray
    first: np.ndarray
    stop: np.ndarray


class Loads(NamedTuple):
    """The first rank, the stop rank, the resting bytes and the running bytes of every group, each (K, U)."""

    first: np.ndarray
    stop: np.ndarray
    resting: np.ndarray
    running: np.ndarray

    def of_plans(self, rows: np.ndarray) -> "Loads":
        return Loads(*(array[rows] for array in self))

    def fullest(self) -> np.ndarray:
        """Return the bytes on the fullest rank of each plan: all that rests there and its largest call.

        The first rank of some mesh is always among the fullest ranks.
        """
        first, stop, resting, running = (array.T.copy() for array in self)  # (U, K): summing over U is fast.
        fullest = np.zeros(len(self.first))
        for rank in first:  # One rank of each plan.
            covers = (first <= rank) & (rank < stop)
            fullest = np.maximum(fullest, (resting * covers).sum(axis=0) + (running * covers).max(axis=0))
        return fullest


class SharableCopy(NamedTuple):
    """A group's copy of a role that, in some plans, may share its memory with another copy."""

    group: int
    role: str
    num_bytes: np.ndarray  # (K,)
    may_share: np.ndarray  # (K,)


class SearchSpace:
    """The call groups of a problem, with the methods that compute the times and memory of plans."""

    def __init__(self, problem: Problem, rates: Rates) -> None:
        self.problem = problem
        self.rates = rates
        self.calls = problem.calls
        self.needs = dependencies(problem, rates)
        self.capacity = available_bytes(problem.cluster)
        self.groups = find_call_groups(problem, rates)
        self._home_of = {role: u for u, group in enumerate(self.groups) for role in group.homes}
        self._known_moves: dict[tuple[int, ContiguousLayout, ContiguousLayout], float] = {}
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
        return HostCall(position, group, is_split, self.problem.workloads[call.name].seconds)

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
                ranks = plans[anchor].layout.heads if anchor is not None else (0,)
                ranks = ranks if is_split else ranks[:1]
                plans[call.name] = CallPlan(Layout(ParallelStrategy(dp=len(ranks)), DeviceMesh(ranks)))
        return {call.name: plans[call.name] for call in self.problem.graph.order}

    def call_times(self, choices: np.ndarray) -> CallTimes:
        """Return the times and ranks of every call.

        Where the layout of a plain Python call's group is undecided, so are its ranks.
        """
        seconds, first, stop = (np.zeros((len(choices), len(self.calls))) for _ in range(3))
        for group, choice in zip(self.open_groups, choices.T, strict=True):
            seconds[:, group.calls] = group.seconds[choice]
            first[:, group.calls] = group.first[choice, None]
            stop[:, group.calls] = group.stop[choice, None]
        for owner, call in enumerate(self._host_calls, start=len(self.groups)):
            i = call.position
            if call.anchor is None:
                seconds[:, i] = call.seconds
                stop[:, i] = 1  # It runs on rank 0.
                continue
            group = self.groups[call.anchor]
            choice = choices[:, call.anchor]
            is_decided = group.is_candidate(choice)
            candidate = np.where(is_decided, choice, 0)
            result_first = group.result_first[candidate]
            nowhere = placeholder_ranks(owner)
            if call.is_split:
                seconds[:, i] = np.where(is_decided, call.seconds / group.replicas[candidate], 0.0)
            else:
                seconds[:, i] = call.seconds
            first[:, i] = np.where(is_decided, result_first, nowhere.start)
            call_stop = group.stop[candidate] if call.is_split else result_first + 1
            stop[:, i] = np.where(is_decided, call_stop, nowhere.stop)
        return CallTimes(seconds, first, stop)

    def periods(
        self, choices: np.ndarray, *, moving: np.ndarray | None = None,
        min_seconds: np.ndarray | float = 0.0, exact: bool = True,
    ) -> np.ndarray:  # fmt: skip
        """Return the seconds per step of plans whose calls take at least `min_seconds`.

        The result is a lower bound without `exact`, or where choices are open.
        """
        seconds, first, stop = self.call_times(choices)
        seconds = np.maximum(seconds, min_seconds)
        shares = (first[:, :, None] < stop[:, None, :]) & (first[:, None, :] < stop[:, :, None])
        busy = shared_core_seconds(self.problem.cluster, seconds, first, stop)
        return np.maximum(busy, periods(self.needs, seconds, shares, moving=moving, exact=exact))

    def moving(self, choices: np.ndarray) -> np.ndarray:
        """Return the seconds of each reallocation, shape (K, number of `needs.weights`).

        Reallocations with an end whose choice is open take 0 seconds.
        """
        seconds = np.zeros((len(choices), len(self.needs.weights)))
        is_decided = self.is_decided(choices)
        for column, (user, trainer, _) in enumerate(self.needs.weights):
            ends = [self._group_of[trainer], self._group_of[user]]
            for k in np.flatnonzero(is_decided[:, ends].all(axis=1)):
                source, target = (self.groups[u].candidates[choices[k, u]].layout for u in ends)
                if (key := (trainer, source, target)) not in self._known_moves:
                    role = self.problem.model_role(self.calls[trainer])
                    self._known_moves[key] = reallocation_seconds(self.rates, role, source, target)
                seconds[k, column] = self._known_moves[key]
        return seconds

    def is_decided(self, choices: np.ndarray) -> np.ndarray:
        """Return which choices are candidates of their groups, rather than meshes or open; shape (K, U)."""
        columns = [group.is_candidate(choice) for group, choice in zip(self.groups, choices.T, strict=True)]
        return np.stack(columns, axis=1)

    def exact_periods(self, plans: np.ndarray) -> np.ndarray:
        return self.periods(plans, moving=self.moving(plans))

    def excess_bytes(self, choices: np.ndarray) -> np.ndarray:
        """Return the bytes that the fullest rank of each plan lacks; at most 0 if the plan fits.

        The result is a lower bound where choices are open: a copy counts only once it is certain that it does
        not share the memory of its role's home.
        """
        loads, copies = self._loads(choices)
        fullest = loads.fullest()
        tight = np.flatnonzero(fullest > self.capacity)
        if len(tight):
            for copy in copies:
                rows = tight[copy.may_share[tight]]  # All choices that matter here are candidates.
                is_shared = self._is_shared(copy, choices[rows])
                loads.resting[rows, copy.group] -= np.where(is_shared, copy.num_bytes[rows], 0.0)
            fullest[tight] = loads.of_plans(tight).fullest()
        return fullest - self.capacity

    def call_lower_bounds(self, choices: np.ndarray) -> np.ndarray:
        """Return lower bounds of the seconds of calls, shape (K, N), where only a group's mesh is chosen.

        The bounds follow from the memory that the resting parts of other groups leave free. They are 0 for
        all other calls.
        """
        loads, copies = self._loads(choices)
        for copy in copies:
            loads.resting[:, copy.group] -= np.where(copy.may_share, copy.num_bytes, 0.0)
        bounds = np.zeros((len(choices), len(self.calls)))
        for u, group in enumerate(self.open_groups):
            rows = np.flatnonzero(group.is_mesh(choices[:, u]))
            if not len(rows):
                continue
            mesh_choice = choices[rows, u]
            copied = loads.resting[rows, u] - group.resting[mesh_choice]
            free = self.capacity - copied - _resting_beside(loads.of_plans(rows), u)
            tier_bytes, seconds = group.tiers
            mesh = group.mesh_index(mesh_choice)
            tier = np.maximum((tier_bytes[mesh] <= free[:, None]).sum(axis=1) - 1, 0)
            bounds[rows[:, None], group.calls] = seconds[mesh, tier]
        return bounds

    def _loads(self, choices: np.ndarray) -> tuple[Loads, list[SharableCopy]]:
        """Return the loads of every group, and the copies that are counted in them although they may share
        the memory of another copy."""
        columns = list(zip(self.open_groups, choices.T, strict=True))
        loads = Loads(*(
            np.stack([getattr(group, name)[choice] for group, choice in columns], axis=1)
            for name in Loads._fields
        ))  # fmt: skip
        first, stop, resting, _ = loads
        is_decided = self.is_decided(choices)
        copies = []
        for u, (group, choice) in enumerate(columns):
            for role, copy_bytes in zip(group.copies, group.copied, strict=True):
                home = self._home_of[role]
                on_same_ranks = (first[:, home] <= first[:, u]) & (stop[:, u] <= stop[:, home])
                twins = self._twins(u, role)
                for v in twins:
                    on_same_ranks |= (first[:, v] == first[:, u]) & (stop[:, v] == stop[:, u])
                all_decided = is_decided[:, [u, home, *twins]].all(axis=1)
                has_meshes = (choices[:, [u, home]] != OPEN).all(axis=1)
                is_counted = has_meshes & (all_decided | ~on_same_ranks)
                num_bytes = copy_bytes[choice]
                resting[:, u] += np.where(is_counted, num_bytes, 0.0)
                copies.append(SharableCopy(u, role, num_bytes, is_counted & on_same_ranks))
        return loads, copies

    def _is_shared(self, copy: SharableCopy, plans: np.ndarray) -> np.ndarray:
        """Return for each plan whether a copy shares the memory of another one.

        It does if every rank holds the same shard in the role's home, or if an earlier group has a copy of
        the role in the same layout.
        """
        holders = (copy.group, self._home_of[copy.role], *self._twins(copy.group, copy.role))
        is_shared = np.zeros(len(plans), dtype=bool)
        for k, chosen in enumerate(plans.tolist()):
            layout, home, *twins = (self.groups[u].candidates[chosen[u]].layout for u in holders)
            is_shared[k] = _same_shards(layout, home) or layout in twins
        return is_shared

    def _twins(self, group: int, role: str) -> list[int]:
        """Return the earlier groups that have copies of the same role."""
        return [v for v, other in enumerate(self.groups[:group]) if role in other.copies]


def _resting_beside(loads: Loads, group: int) -> np.ndarray:
    """Return, for each plan, the resting bytes of other groups on the fullest rank of a group's mesh."""
    first, stop, resting = (array.T.copy() for array in (loads.first, loads.stop, loads.resting))
    resting[group] = 0.0
    beside = np.zeros(len(loads.first))
    for other_first in first:  # The fullest rank is the first of this mesh, or of another that begins in it.
        rank = np.maximum(other_first, first[group])
        rank = np.where(rank < stop[group], rank, first[group])
        covers = (first <= rank) & (rank < stop)
        beside = np.maximum(beside, (resting * covers).sum(axis=0))
    return beside


@lru_cache(maxsize=1 << 16)
def _same_shards(layout: ContiguousLayout, home: ContiguousLayout) -> bool:
    """Return whether every rank of a layout has the same shard of a model in its role's home."""
    if layout == home:
        return True
    axes = ("pp", "tp", "ep")
    are_alike = all(getattr(layout.strategy, axis) == getattr(home.strategy, axis) for axis in axes)
    if not are_alike or layout.first_rank < home.first_rank or layout.ranks.stop > home.ranks.stop:
        return False
    return all(shard_of(layout.as_layout, rank) == shard_of(home.as_layout, rank) for rank in layout.ranks)
