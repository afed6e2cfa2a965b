"""The search space: times and memory of many plans at once, computed on arrays.

Calls that must share a layout form a call group, and a plan picks one candidate for each group. Shapes: K
plans, U call groups, N calls in graph order. Plans are an integer array `chosen` of shape (K, U). It holds
the index of each group's candidate. Where only the mesh of a group is chosen, or where the choice is still
open (-1), it is the index of a candidate that `CallGroup.with_open_choices` appends.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from realhf.graph import FunctionCall
from realhf.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.plan import CallPlan
from realhf.planner.call_group import CallGroup, find_call_groups
from realhf.planner.model_states import available_bytes, shard_of
from realhf.planner.problem import ModelRole, Problem
from realhf.planner.rates import Rates
from realhf.planner.throughput import NEVER, Dependencies, periods
from realhf.planner.transfer import ContiguousLayout, transfer_seconds

PossibleAlias = tuple[int, str, np.ndarray, np.ndarray]
"""A group, a role of which it has a copy, the copy's bytes by candidate, and the plans (a mask over K) in
which the copy might share memory with another one."""
SAMPLE_BYTES = 40  # Bytes per token of samples between calls: ids and a few float columns.


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
        self._on_host = [self._host_call(i) for i, call in enumerate(self.calls) if call.role is None]

    def _host_call(self, number: int) -> tuple[int, int | None, bool, float]:
        """Return for a call in plain Python: its number, the call group on whose result ranks it runs (None
        for rank 0), whether it is split over them, and its seconds when it is not split."""
        call = self.calls[number]
        anchor, split = host_anchor(self.problem, call)
        group = None if anchor is None else self._group_of[self.calls.index(self.problem.graph[anchor])]
        return number, group, split, self.problem.workloads[call.name].seconds

    def call_plans(self, chosen: Sequence[int]) -> dict[str, CallPlan]:
        """Return the CallPlan of every call; `host_anchor` decides where calls in plain Python run."""
        plans: dict[str, CallPlan] = {}
        for group, pick in zip(self.groups, chosen, strict=True):
            candidate = group.candidates[pick]
            layout = candidate.layout.as_layout
            for i, variant in zip(group.calls, candidate.variants, strict=True):
                predicted = {"seconds": float(f"{variant.cost.seconds:.6g}")}
                plans[self.calls[i].name] = replace(variant.how, layout=layout, predicted=predicted)
        for call in self.calls:
            if call.role is None:
                anchor, split = host_anchor(self.problem, call)
                heads = plans[anchor].layout.heads if anchor is not None else (0,)
                heads = heads if split else heads[:1]
                plans[call.name] = CallPlan(Layout(ParallelStrategy(dp=len(heads)), DeviceMesh(heads)))
        return {call.name: plans[call.name] for call in self.calls}

    def timed(
        self, groups: Sequence[CallGroup], chosen: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the seconds, the first rank and the stop rank of every call, each of shape (K, N)."""
        seconds, first, stop = (np.zeros((len(chosen), len(self.calls))) for _ in range(3))
        for group, pick in zip(groups, chosen.T, strict=True):
            seconds[:, group.calls] = group.seconds[pick]
            first[:, group.calls] = group.first[pick, None]
            stop[:, group.calls] = group.stop[pick, None]
        for number, (call, anchor, split, amount) in enumerate(self._on_host, start=len(groups)):
            if anchor is None:
                seconds[:, call] = amount
                stop[:, call] = 1  # It runs on rank 0.
                continue
            group = groups[anchor]
            pick = chosen[:, anchor]
            is_open = (pick < 0) | (pick >= len(group.candidates))
            decided = np.where(is_open, 0, pick)
            head = group.heads[decided]
            shared = amount / group.replicas[decided] if split else amount
            seconds[:, call] = np.where(is_open, 0.0 if split else amount, shared)
            first[:, call] = np.where(is_open, -2 * number - 2, head)
            stop[:, call] = np.where(is_open, -2 * number - 1, group.stop[decided] if split else head + 1)
        return seconds, first, stop

    def periods(
        self, groups: Sequence[CallGroup], chosen: np.ndarray, *, moving: np.ndarray | None = None,
        least: np.ndarray | float = 0.0, exact: bool = True,
    ) -> np.ndarray:  # fmt: skip
        """Return the seconds per step of plans whose calls take at least `least` seconds.

        The result is a lower bound without `exact`, or where choices are open.
        """
        seconds, first, stop = self.timed(groups, chosen)
        seconds = np.maximum(seconds, least)
        shares = (first[:, :, None] < stop[:, None, :]) & (first[:, None, :] < stop[:, :, None])
        return periods(self.needs, seconds, shares, moving=moving, exact=exact)

    def moving(self, chosen: np.ndarray) -> np.ndarray:
        """Return the seconds of each reallocation, shape (K, number of `needs.weights`).

        Reallocations with an end whose choice is open take 0 seconds.
        """
        out = np.zeros((len(chosen), len(self.needs.weights)))
        is_decided = self.is_decided(chosen)
        for number, (user, trainer, _) in enumerate(self.needs.weights):
            ends = [self._group_of[trainer], self._group_of[user]]
            for k in np.flatnonzero(is_decided[:, ends].all(axis=1)):
                source, target = (self.groups[u].candidates[chosen[k, u]].layout for u in ends)
                if (key := (trainer, source, target)) not in self._moved:
                    role = self.problem.model_role(self.calls[trainer])
                    self._moved[key] = reallocation_seconds(self.rates, role, source, target)
                out[k, number] = self._moved[key]
        return out

    def is_decided(self, chosen: np.ndarray) -> np.ndarray:
        """Return which choices are candidates of their groups, rather than meshes or open; shape (K, U)."""
        return (chosen >= 0) & (chosen < [len(group.candidates) for group in self.groups])

    def exact_periods(self, chosen: np.ndarray) -> np.ndarray:
        return self.periods(self.groups, chosen, moving=self.moving(chosen))

    def overflow(self, groups: Sequence[CallGroup], chosen: np.ndarray) -> np.ndarray:
        """Return the bytes by which the fullest rank of each plan exceeds its memory; at most 0 if all fits.

        The result is a lower bound where choices are open: a copy counts only once it is certain that it does
        not share the memory of its role's home.
        """
        first, stop, resting, running, aliases = self._loads(groups, chosen)
        most = _fullest(first, stop, resting, running)
        if len(tight := np.flatnonzero(most > self.capacity)):
            for u, role, values, might in aliases:
                rows = tight[might[tight]]
                same = self._aliases(u, role, chosen[rows])
                resting[rows, u] -= np.where(same, values[chosen[rows, u]], 0.0)
            most[tight] = _fullest(first[tight], stop[tight], resting[tight], running[tight])
        return most - self.capacity

    def least_seconds(self, groups: Sequence[CallGroup], chosen: np.ndarray) -> np.ndarray:
        """Return lower bounds of the seconds of calls, shape (K, N), where only a group's mesh is chosen.

        The bounds follow from the memory that the resting parts of other groups leave free. They are 0 for
        all other calls.
        """
        first, stop, resting, _, aliases = self._loads(groups, chosen)
        for u, _, values, might in aliases:
            resting[:, u] -= np.where(might, values[chosen[:, u]], 0.0)
        least = np.zeros((len(chosen), len(self.calls)))
        for u, group in enumerate(groups):
            rows = np.flatnonzero(chosen[:, u] >= len(group.candidates))
            if not len(rows):
                continue
            pick = chosen[rows, u]
            copies = resting[rows, u] - group.resting[pick]
            others, starts, stops = (array[rows].T.copy() for array in (resting, first, stop))  # (U, rows)
            others[u] = 0.0
            beside = np.zeros(len(rows))
            for v in range(len(groups)):  # A group's fullest rank is its own first rank, or another's.
                at = np.maximum(starts[v], starts[u])
                at = np.where(at < stops[u], at, starts[u])
                covers = (starts <= at) & (at < stops)
                beside = np.maximum(beside, (others * covers).sum(axis=0))
            needs, seconds = group.tiers
            mesh = pick - len(group.candidates)
            left = self.capacity - copies - beside
            tier = np.maximum((needs[mesh] <= left[:, None]).sum(axis=1) - 1, 0)
            least[rows[:, None], group.calls] = seconds[mesh, tier]
        return least

    def _loads(
        self, groups: Sequence[CallGroup], chosen: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, list[PossibleAlias]]:
        """Return first rank, stop rank, resting bytes and running bytes of every group, shape (K, U) each.

        The last result lists the copies that are counted although they might share the memory of their role's
        home.
        """
        first, stop, resting, running = (
            np.stack([getattr(g, name)[pick] for g, pick in zip(groups, chosen.T, strict=True)], axis=1)
            for name in ("first", "stop", "resting", "running")
        )
        is_decided = self.is_decided(chosen)
        aliases = []
        for u, group in enumerate(groups):
            for role, values in zip(group.copies, group.copied, strict=True):
                home = self._home_of[role]
                equal = (first[:, home] <= first[:, u]) & (stop[:, u] <= stop[:, home])
                twins = self._twins(u, role)
                for v in twins:
                    equal |= (first[:, v] == first[:, u]) & (stop[:, v] == stop[:, u])
                decided = (is_decided[:, [u, home, *twins]]).all(axis=1)
                known = (chosen[:, [u, home]] >= 0).all(axis=1) & (decided | ~equal)
                resting[:, u] += np.where(known, values[chosen[:, u]], 0.0)
                aliases.append((u, role, values, known & equal))
        return first, stop, resting, running, aliases

    def _aliases(self, group: int, role: str, chosen: np.ndarray) -> np.ndarray:
        """Return for each plan whether a group's copy of a role shares the memory of another one.

        It does if every rank holds the same shard in the role's home, or if an earlier group has a copy of
        the role in the same layout.
        """
        home = self._home_of[role]
        twins = self._twins(group, role)
        here, there = self.groups[group].candidates, self.groups[home].candidates
        same = np.zeros(len(chosen), dtype=bool)
        for k, row in enumerate(chosen.tolist()):
            mine = here[row[group]].layout
            same[k] = _same_shards(mine, there[row[home]].layout) or any(
                self.groups[v].candidates[row[v]].layout == mine for v in twins
            )
        return same

    def _twins(self, group: int, role: str) -> list[int]:
        """Return the earlier groups that have copies of the same role."""
        return [v for v, other in enumerate(self.groups[:group]) if role in other.copies]


def _fullest(first: np.ndarray, stop: np.ndarray, resting: np.ndarray, running: np.ndarray) -> np.ndarray:
    """Return the bytes on the fullest rank of each plan: all that rests there, and the largest call on it.

    The first rank of some mesh is always among the fullest ranks.
    """
    most = np.zeros(len(first))
    first, stop, resting, running = (array.T.copy() for array in (first, stop, resting, running))
    for at in first:  # The arrays are transposed to (U, K), since sums over the first axis are fast.
        covers = (first <= at) & (at < stop)
        most = np.maximum(most, (resting * covers).sum(axis=0) + (running * covers).max(axis=0))
    return most


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
