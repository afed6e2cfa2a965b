"""The search space: times and memory of many plans at once, computed on arrays.

Calls that must share a layout form a call group, and a plan picks one candidate for each group. Shapes: K
plans, U call groups, N calls in graph order. Plans are an integer array `chosen` of shape (K, U) with a
choice for each group: a candidate, or in an unfinished plan a mesh or OPEN (see `CallGroup`). Unfinished
plans need groups from `CallGroup.with_open_choices`.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from realhf.graph import FunctionCall
from realhf.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.plan import CallPlan
from realhf.planner.call_group import OPEN, CallGroup, find_call_groups, placeholder_ranks
from realhf.planner.model_states import available_bytes, shard_of
from realhf.planner.problem import ModelRole, Problem
from realhf.planner.rates import Rates
from realhf.planner.throughput import NEVER, Dependencies, periods
from realhf.planner.transfer import ContiguousLayout, transfer_seconds

SAMPLE_BYTES = 40  # Bytes per token of samples between calls: ids and a few float columns.


class HostCall(NamedTuple):
    """A call in plain Python, by its position in graph order.

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

    def of_plans(self, indices: np.ndarray) -> "Loads":
        return Loads(*(array[indices] for array in self))

    def fullest(self) -> np.ndarray:
        """Return the bytes on the fullest rank of each plan: all that rests there and its largest call.

        The first rank of some mesh is always among the fullest ranks.
        """
        first, stop, resting, running = (array.T.copy() for array in self)  # (U, K): summing over U is fast.
        fullest = np.zeros(len(self.first))
        for rank in first:
            covers = (first <= rank) & (rank < stop)
            fullest = np.maximum(fullest, (resting * covers).sum(axis=0) + (running * covers).max(axis=0))
        return fullest


class PossibleAlias(NamedTuple):
    """A group's copy of a role that might share memory with another copy in some plans (a mask over K)."""

    group: int
    role: str
    copy_bytes: np.ndarray  # By candidate.
    plans: np.ndarray


class SearchSpace:
    """The call groups of a problem, with the methods that compute the times and memory of plans."""

    def __init__(self, problem: Problem, rates: Rates) -> None:
        self.problem = problem
        self.rates = rates
        self.calls = problem.graph.order
        self.needs = dependencies(problem, rates)
        self.capacity = available_bytes(problem.cluster)
        self.groups = find_call_groups(problem, rates)
        self._home_of = {role: u for u, group in enumerate(self.groups) for role in group.homes}
        self._moved: dict[tuple[int, ContiguousLayout, ContiguousLayout], float] = {}
        self._group_of = {call: u for u, group in enumerate(self.groups) for call in group.calls}
        self._host_calls = [self._host_call(i) for i, call in enumerate(self.calls) if call.role is None]

    def _host_call(self, position: int) -> HostCall:
        call = self.calls[position]
        anchor, is_split = host_anchor(self.problem, call)
        group = None if anchor is None else self._group_of[self.calls.index(self.problem.graph[anchor])]
        return HostCall(position, group, is_split, self.problem.workloads[call.name].seconds)

    def call_plans(self, chosen: Sequence[int]) -> dict[str, CallPlan]:
        """Return the CallPlan of every call; `host_anchor` decides where calls in plain Python run."""
        plans: dict[str, CallPlan] = {}
        for group, pick in zip(self.groups, chosen, strict=True):
            candidate = group.candidates[pick]
            layout = candidate.layout.as_layout
            for i, variant in zip(group.calls, candidate.variants, strict=True):
                predicted = {"seconds": float(f"{variant.cost.seconds:.6g}")}
                plans[self.calls[i].name] = replace(variant.call_plan, layout=layout, predicted=predicted)
        for call in self.calls:
            if call.role is None:
                anchor, split = host_anchor(self.problem, call)
                heads = plans[anchor].layout.heads if anchor is not None else (0,)
                heads = heads if split else heads[:1]
                plans[call.name] = CallPlan(Layout(ParallelStrategy(dp=len(heads)), DeviceMesh(heads)))
        return {call.name: plans[call.name] for call in self.calls}

    def timed(self, groups: Sequence[CallGroup], chosen: np.ndarray) -> CallTimes:
        """Return the times and ranks of every call.

        Where the layout of a plain Python call's group is undecided, so are its ranks.
        """
        seconds, first, stop = (np.zeros((len(chosen), len(self.calls))) for _ in range(3))
        for group, pick in zip(groups, chosen.T, strict=True):
            seconds[:, group.calls] = group.seconds[pick]
            first[:, group.calls] = group.first[pick, None]
            stop[:, group.calls] = group.stop[pick, None]
        for owner, call in enumerate(self._host_calls, start=len(groups)):
            i = call.position
            if call.anchor is None:
                seconds[:, i] = call.seconds
                stop[:, i] = 1  # It runs on rank 0.
                continue
            group = groups[call.anchor]
            choice = chosen[:, call.anchor]
            is_decided = group.is_candidate(choice)
            candidate = np.where(is_decided, choice, 0)
            head = group.heads[candidate]
            nowhere = placeholder_ranks(owner)
            if call.is_split:
                seconds[:, i] = np.where(is_decided, call.seconds / group.replicas[candidate], 0.0)
            else:
                seconds[:, i] = call.seconds
            first[:, i] = np.where(is_decided, head, nowhere.start)
            last_stop = group.stop[candidate] if call.is_split else head + 1
            stop[:, i] = np.where(is_decided, last_stop, nowhere.stop)
        return CallTimes(seconds, first, stop)

    def periods(
        self, groups: Sequence[CallGroup], chosen: np.ndarray, *, moving: np.ndarray | None = None,
        min_seconds: np.ndarray | float = 0.0, exact: bool = True,
    ) -> np.ndarray:  # fmt: skip
        """Return the seconds per step of plans whose calls take at least `min_seconds`.

        The result is a lower bound without `exact`, or where choices are open.
        """
        seconds, first, stop = self.timed(groups, chosen)
        seconds = np.maximum(seconds, min_seconds)
        shares = (first[:, :, None] < stop[:, None, :]) & (first[:, None, :] < stop[:, :, None])
        return periods(self.needs, seconds, shares, moving=moving, exact=exact)

    def moving(self, chosen: np.ndarray) -> np.ndarray:
        """Return the seconds of each reallocation, shape (K, number of `needs.weights`).

        Reallocations with an end whose choice is open take 0 seconds.
        """
        out = np.zeros((len(chosen), len(self.needs.weights)))
        is_decided = self.is_decided(chosen)
        for column, (user, trainer, _) in enumerate(self.needs.weights):
            ends = [self._group_of[trainer], self._group_of[user]]
            for k in np.flatnonzero(is_decided[:, ends].all(axis=1)):
                source, target = (self.groups[u].candidates[chosen[k, u]].layout for u in ends)
                if (key := (trainer, source, target)) not in self._moved:
                    role = self.problem.model_role(self.calls[trainer])
                    self._moved[key] = reallocation_seconds(self.rates, role, source, target)
                out[k, column] = self._moved[key]
        return out

    def is_decided(self, chosen: np.ndarray) -> np.ndarray:
        """Return which choices are candidates of their groups, rather than meshes or open; shape (K, U)."""
        columns = [group.is_candidate(choice) for group, choice in zip(self.groups, chosen.T, strict=True)]
        return np.stack(columns, axis=1)

    def exact_periods(self, chosen: np.ndarray) -> np.ndarray:
        return self.periods(self.groups, chosen, moving=self.moving(chosen))

    def overflow(self, groups: Sequence[CallGroup], chosen: np.ndarray) -> np.ndarray:
        """Return the bytes by which the fullest rank of each plan exceeds its memory; at most 0 if all fits.

        The result is a lower bound where choices are open: a copy counts only once it is certain that it does
        not share the memory of its role's home.
        """
        loads, aliases = self._loads(groups, chosen)
        fullest = loads.fullest()
        tight = np.flatnonzero(fullest > self.capacity)
        if len(tight):
            for alias in aliases:
                u = alias.group
                rows = tight[alias.plans[tight]]
                is_shared = self._aliases(u, alias.role, chosen[rows])
                loads.resting[rows, u] -= np.where(is_shared, alias.copy_bytes[chosen[rows, u]], 0.0)
            fullest[tight] = loads.of_plans(tight).fullest()
        return fullest - self.capacity

    def call_lower_bounds(self, groups: Sequence[CallGroup], chosen: np.ndarray) -> np.ndarray:
        """Return lower bounds of the seconds of calls, shape (K, N), where only a group's mesh is chosen.

        The bounds follow from the memory that the resting parts of other groups leave free. They are 0 for
        all other calls.
        """
        loads, aliases = self._loads(groups, chosen)
        for alias in aliases:
            copy_bytes = alias.copy_bytes[chosen[:, alias.group]]
            loads.resting[:, alias.group] -= np.where(alias.plans, copy_bytes, 0.0)
        bounds = np.zeros((len(chosen), len(self.calls)))
        for u, group in enumerate(groups):
            rows = np.flatnonzero(group.mesh_index(chosen[:, u]) >= 0)
            if not len(rows):
                continue
            choice = chosen[rows, u]
            copies = loads.resting[rows, u] - group.resting[choice]
            free = self.capacity - copies - _beside(loads.of_plans(rows), u)
            needs, seconds = group.tiers
            mesh = group.mesh_index(choice)
            tier = np.maximum((needs[mesh] <= free[:, None]).sum(axis=1) - 1, 0)
            bounds[rows[:, None], group.calls] = seconds[mesh, tier]
        return bounds

    def _loads(
        self, groups: Sequence[CallGroup], chosen: np.ndarray
    ) -> tuple[Loads, list[PossibleAlias]]:
        """Return the loads of every group, and the copies that are counted in them although they might share
        the memory of their role's home."""
        loads = Loads(*(
            np.stack([getattr(g, name)[pick] for g, pick in zip(groups, chosen.T, strict=True)], axis=1)
            for name in Loads._fields
        ))  # fmt: skip
        first, stop, resting, _ = loads
        is_decided = self.is_decided(chosen)
        aliases = []
        for u, group in enumerate(groups):
            for role, copy_bytes in zip(group.copies, group.copied, strict=True):
                home = self._home_of[role]
                on_same_ranks = (first[:, home] <= first[:, u]) & (stop[:, u] <= stop[:, home])
                twins = self._twins(u, role)
                for v in twins:
                    on_same_ranks |= (first[:, v] == first[:, u]) & (stop[:, v] == stop[:, u])
                all_decided = is_decided[:, [u, home, *twins]].all(axis=1)
                has_meshes = (chosen[:, [u, home]] != OPEN).all(axis=1)
                is_counted = has_meshes & (all_decided | ~on_same_ranks)
                resting[:, u] += np.where(is_counted, copy_bytes[chosen[:, u]], 0.0)
                aliases.append(PossibleAlias(u, role, copy_bytes, is_counted & on_same_ranks))
        return loads, aliases

    def _aliases(self, group: int, role: str, chosen: np.ndarray) -> np.ndarray:
        """Return for each plan whether a group's copy of a role shares the memory of another one.

        It does if every rank holds the same shard in the role's home, or if an earlier group has a copy of
        the role in the same layout.
        """
        home = self._home_of[role]
        twins = self._twins(group, role)
        is_shared = np.zeros(len(chosen), dtype=bool)
        for k, row in enumerate(chosen.tolist()):
            mine, at_home, *others = (self.groups[u].candidates[row[u]].layout for u in (group, home, *twins))
            is_shared[k] = _same_shards(mine, at_home) or mine in others
        return is_shared

    def _twins(self, group: int, role: str) -> list[int]:
        """Return the earlier groups that have copies of the same role."""
        return [v for v, other in enumerate(self.groups[:group]) if role in other.copies]


def _beside(loads: Loads, group: int) -> np.ndarray:
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
def _same_shards(here: ContiguousLayout, home: ContiguousLayout) -> bool:
    """Return whether every rank has the same shard of a model in both layouts."""
    if here == home:
        return True
    alike = all(getattr(here.strategy, axis) == getattr(home.strategy, axis) for axis in ("pp", "tp", "ep"))
    if not alike or here.first_rank < home.first_rank or here.ranks.stop > home.ranks.stop:
        return False
    mine, other = here.as_layout, home.as_layout
    return all(shard_of(mine, rank) == shard_of(other, rank) for rank in here.ranks)


def reallocation_seconds(
    rates: Rates, role: ModelRole, source: ContiguousLayout, target: ContiguousLayout
) -> float:
    """Return the seconds to move the trained parameters of a role to another layout."""
    spec = role.trained_spec
    seconds = transfer_seconds(
        rates.cluster, source, target, num_bytes=spec.numel * role.itemsize,
        sharded=source.strategy.num_replicas > 1, section_share=spec.section_numel / spec.numel)
    return seconds / rates.assume.link


def host_anchor(problem: Problem, call: FunctionCall) -> tuple[str | None, bool]:
    """Return the model call on whose result ranks a plain Python call runs, and whether it is split over
    them.

    A call that can be split runs where its inputs are. Any other runs where a call waits for its outputs.
    Without such a model call it runs on rank 0.
    """
    graph = problem.graph
    before = [p.name for key in call.inputs if (p := graph.producer(key)) is not None and p.role is not None]
    after = [c.name for c in graph.order if c.role is not None and set(c.inputs) & set(call.outputs)]
    if before and getattr(call.work, "splittable", False):
        return before[0], True
    return next(iter([*after, *before]), None), False


def dependencies(problem: Problem, rates: Rates) -> Dependencies:
    """Return the dependencies among the calls, in graph order."""
    graph = problem.graph
    calls = problem.graph.order
    index = {call.name: i for i, call in enumerate(calls)}
    data = np.full((len(calls), len(calls)), NEVER)
    for i, call in enumerate(calls):
        work = problem.workloads[call.name]
        for producer in filter(None, map(graph.producer, call.inputs)):
            data[i, index[producer.name]] = rates.samples(work.num_samples * work.tokens * SAMPLE_BYTES)
    weights = []
    for j, trainer in enumerate(calls):
        for i, user in enumerate(calls):
            if trainer.kind != "train_step" or user.role is None or user.kind == "train_step":
                continue
            if user.role == trainer.role or problem.model_role(user).follows == trainer.role:
                weights.append((i, j, 0 if j < i else 1))
    return Dependencies(data, tuple(weights))
