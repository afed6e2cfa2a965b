"""SearchSpace: all plans of a problem, as arrays that many plans can be evaluated with at once.

Calls that must share a layout (training of one role, what the user wants together) form a group; a plan gives
every group one of its candidates. Shapes: K plans, U groups, N calls.
"""

from collections.abc import Sequence

import numpy as np

from realhf.graph import FunctionCall
from realhf.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.plan import CallPlan
from realhf.planner.call_group import CallGroup, Candidate, find_call_groups
from realhf.planner.memory_check import available_bytes
from realhf.planner.problem import Problem
from realhf.planner.rates import Rates
from realhf.planner.throughput import NEVER, Dependencies, periods
from realhf.planner.transfer import Placed, transfer_seconds

Doubtful = tuple[int, str, np.ndarray, np.ndarray]
"""A group, a role of which it has a copy, the copy's bytes by candidate, and in which plans it is doubtful."""
_SAMPLE_BYTES = 40  # Per token of what calls hand on: ids and a few float columns.


class SearchSpace:
    """The groups of a problem and how plans of them are timed and checked."""

    def __init__(self, problem: Problem, rates: Rates) -> None:
        self.problem = problem
        self.rates = rates
        self.calls = problem.graph.order
        self.needs = dependencies(problem, rates)
        self.capacity = available_bytes(problem.cluster)
        self.groups = find_call_groups(problem, rates)
        self._on_host = _host_calls(problem, self.groups)
        self._home_of = {role: u for u, group in enumerate(self.groups) for role in group.homes}
        self._moved: dict[tuple[int, Placed, Placed], float] = {}
        self._group_of = {call: u for u, group in enumerate(self.groups) for call in group.calls}

    def call_plans(self, chosen: Sequence[int]) -> dict[str, CallPlan]:
        """What a plan means for every call; plain Python runs as `host_anchor` says."""
        plans: dict[str, CallPlan] = {}
        for group, pick in zip(self.groups, chosen, strict=True):
            candidate = group.candidates[pick]
            for i, variant in zip(group.calls, candidate.variants, strict=True):
                options = variant.options
                seconds = float(f"{variant.cost.seconds:.6g}")
                plans[self.calls[i].name] = CallPlan(
                    candidate.layout, options.micro_batch_tokens, options.max_rows, options.recompute,
                    options.offload, {"seconds": seconds},
                )  # fmt: skip
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
        """Seconds and ranks (first, stop) of every call of plans `chosen` (K, U). -1 stands for a group whose
        choice is open: its calls take their least time on ranks of their own."""
        seconds, first, stop = (np.zeros((len(chosen), len(self.calls))) for _ in range(3))
        for u, group in enumerate(groups):
            open_ = chosen[:, u] < 0
            pick = chosen[:, u]
            for i, call in enumerate(group.calls):
                seconds[:, call] = np.where(open_, group.seconds[:, i].min(), group.seconds[pick, i])
                first[:, call] = np.where(open_, -2 * u - 2, group.first[pick])
                stop[:, call] = np.where(open_, -2 * u - 1, group.stop[pick])
        for number, (call, anchor, split, amount) in enumerate(self._on_host, start=len(groups)):
            if anchor is None:
                seconds[:, call] = amount
                stop[:, call] = 1  # (on rank 0)
                continue
            group = groups[anchor]
            pick = chosen[:, anchor]
            open_ = (pick < 0) | (pick >= len(group.candidates))
            decided = np.where(open_, 0, pick)
            head = group.heads[decided]
            shared = amount / group.replicas[decided] if split else amount
            seconds[:, call] = np.where(open_, 0.0 if split else amount, shared)
            first[:, call] = np.where(open_, -2 * number - 2, head)
            stop[:, call] = np.where(open_, -2 * number - 1, group.stop[decided] if split else head + 1)
        return seconds, first, stop

    def periods(
        self, groups: Sequence[CallGroup], chosen: np.ndarray, *, moving: np.ndarray | None = None,
        least: np.ndarray | float = 0.0, exact: bool = True,
    ) -> np.ndarray:  # fmt: skip
        """Seconds per step of plans whose calls take `least` or longer; a lower bound where not `exact` or
        where choices are open."""
        seconds, first, stop = self.timed(groups, chosen)
        seconds = np.maximum(seconds, least)
        shares = (first[:, :, None] < stop[:, None, :]) & (first[:, None, :] < stop[:, :, None])
        return periods(self.needs, seconds, shares, moving=moving, exact=exact)

    def moving(self, chosen: np.ndarray) -> np.ndarray:
        """Seconds of the reallocations of plans (K, number of `needs.weights`); 0 where an end is open."""
        sizes = [len(group.candidates) for group in self.groups]
        out = np.zeros((len(chosen), len(self.needs.weights)))
        for number, (i, j, _) in enumerate(self.needs.weights):
            here = self._group_of[i]
            there = self._group_of[j]
            for k, (target, source) in enumerate(chosen[:, [here, there]].tolist()):
                if 0 <= target < sizes[here] and 0 <= source < sizes[there]:
                    out[k, number] = self._seconds(j, here, target, there, source)
        return out

    def _seconds(self, trained: int, here: int, target: int, there: int, source: int) -> float:
        call = self.calls[trained]
        role = self.problem.role_of(self.calls[trained])
        ends = (self.groups[there].candidates[source].placed, self.groups[here].candidates[target].placed)
        assert call.role is not None
        key = (trained, *ends)
        if key not in self._moved:
            self._moved[key] = transfer_seconds(
                self.problem.cluster, *ends, num_bytes=role.trained_spec.numel * role.itemsize,
                sharded=ends[0].strategy.num_replicas > 1, section_share=role.section_share,
            ) / self.rates.assume.link  # fmt: skip
        return self._moved[key]

    def exact_periods(self, chosen: np.ndarray) -> np.ndarray:
        return self.periods(self.groups, chosen, moving=self.moving(chosen))

    def overflow(self, groups: Sequence[CallGroup], chosen: np.ndarray) -> np.ndarray:
        """Bytes by which the fullest rank of each plan exceeds its memory, at most 0 where all fits.

        A lower bound where choices are open: copies count as soon as it is sure that they are not the same
        memory as their role's home.
        """
        first, stop, resting, running, doubtful = self._loads(groups, chosen)
        most = _fullest(first, stop, resting, running)
        if len(tight := np.flatnonzero(most > self.capacity)):
            for u, role, values, might in doubtful:
                rows = tight[might[tight]]
                same = self._aliases(u, role, chosen[rows])
                resting[rows, u] -= np.where(same, values[chosen[rows, u]], 0.0)
            most[tight] = _fullest(first[tight], stop[tight], resting[tight], running[tight])
        return most - self.capacity

    def least_seconds(self, groups: Sequence[CallGroup], chosen: np.ndarray) -> np.ndarray:
        """Seconds (K, N) that calls take at least in plans where only their mesh is chosen, in the memory
        that is left beside what others rest there; 0 for the other calls."""
        first, stop, resting, _, doubtful = self._loads(groups, chosen)
        for u, _, values, might in doubtful:
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
            for v in range(len(groups)):  # The fullest of the group's ranks is its first, or another's first.
                at = np.maximum(starts[v], starts[u])
                at = np.where(at < stops[u], at, starts[u])
                covers = (starts <= at) & (at < stops)
                beside = np.maximum(beside, (others * covers).sum(axis=0))
            needs, seconds = group.tiers
            mesh = pick - len(group.candidates)
            left = self.capacity - copies - beside
            tier = np.maximum((needs[mesh] <= left[:, None]).sum(axis=1) - 1, 0)
            least[rows[:, None], list(group.calls)] = seconds[mesh, tier]
        return least

    def _loads(
        self, groups: Sequence[CallGroup], chosen: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, list[Doubtful]]:
        """First rank and stop of every group, bytes that rest and that run there, shape (K, U) each; and which
        copies are counted that might be the same memory as their role's home."""
        first, stop, resting, running = (np.zeros(chosen.shape) for _ in range(4))
        for u, group in enumerate(groups):
            here = chosen[:, u] >= 0
            pick = chosen[:, u]
            for array, values in ((first, group.first), (stop, group.stop)):
                array[:, u] = np.where(here, values[pick], -1)
            for array, values in ((resting, group.resting), (running, group.running)):
                array[:, u] = np.where(here, values[pick], 0.0)
        doubtful = []
        for u, group in enumerate(groups):
            for role, values in zip(group.copies, group.copied, strict=True):
                home = self._home_of[role]
                equal = (first[:, home] <= first[:, u]) & (stop[:, u] <= stop[:, home])
                known = (chosen[:, [u, home]] >= 0).all(axis=1)
                decided = np.ones(len(chosen), dtype=bool)
                for v in (home, *self._twins(u, role)):
                    if v != home:
                        equal |= (first[:, v] == first[:, u]) & (stop[:, v] == stop[:, u])
                    decided &= (chosen[:, v] < len(groups[v].candidates)) & (chosen[:, v] >= 0)
                decided &= chosen[:, u] < len(group.candidates)
                known &= decided | ~equal
                resting[:, u] += np.where(known, values[chosen[:, u]], 0.0)
                doubtful.append((u, role, values, known & equal))
        return first, stop, resting, running, doubtful

    def _aliases(self, group: int, role: str, chosen: np.ndarray) -> np.ndarray:
        """Whether a copy is the same memory as its role's home (every rank holds the same shard in both) or
        as the copy of a group before it, in the same layout."""
        home = self._home_of[role]
        twins = self._twins(group, role)
        here = self.groups[group].candidates
        there = self.groups[home].candidates
        same = np.zeros(len(chosen), dtype=bool)
        for k, row in enumerate(chosen.tolist()):
            mine = here[row[group]]
            same[k] = _same_shards(mine, there[row[home]]) or any(
                self.groups[v].candidates[row[v]].layout_key == mine.layout_key for v in twins
            )
        return same

    def _twins(self, group: int, role: str) -> list[int]:
        """Units before this one with copies of the same role."""
        return [v for v, other in enumerate(self.groups[:group]) if role in other.copies]


def _fullest(first: np.ndarray, stop: np.ndarray, resting: np.ndarray, running: np.ndarray) -> np.ndarray:
    """Bytes on the fullest rank of each plan: all that rests there, and the largest call that runs there.

    The fullest rank is the first of some mesh.
    """
    most = np.zeros(len(first))
    first, stop, resting, running = (array.T.copy() for array in (first, stop, resting, running))
    for at in first:  # (U, K): sums over the first axis are quick.
        covers = (first <= at) & (at < stop)
        most = np.maximum(most, (resting * covers).sum(axis=0) + (running * covers).max(axis=0))
    return most


def _same_shards(here: Candidate, home: Candidate) -> bool:
    if (here.mesh, here.strategy) == (home.mesh, home.strategy):
        return True
    (a, b) = (here.mesh, home.mesh)
    (mine, other) = (here.strategy, home.strategy)
    inside = b.first <= a.first and a.stop <= b.stop and (a.first - b.first) % mine.tp == 0
    return inside and mine.tp == other.tp and mine.pp == other.pp == mine.ep == other.ep == 1


def host_anchor(problem: Problem, call: FunctionCall) -> tuple[str | None, bool]:
    """Where a call in plain Python is put: the model call on whose heads it runs, and whether it is split
    over all of them. Split it runs where its data is; else where a call waits for it; else on rank 0."""
    graph = problem.graph
    before = [p.name for key in call.inputs if (p := graph.producer(key)) is not None and p.role is not None]
    after = [c.name for c in graph.order if c.role is not None and set(c.inputs) & set(call.outputs)]
    if before and getattr(call.work, "splittable", False):
        return before[0], True
    return next(iter([*after, *before]), None), False


def _host_calls(problem: Problem, groups: Sequence[CallGroup]) -> list[tuple[int, int | None, bool, float]]:
    """Of each call in plain Python: its number, the group on whose heads it runs (None: on rank 0), whether it
    is split over them, and its seconds in one piece."""
    order = problem.graph.order
    group_of = {order[i].name: u for u, group in enumerate(groups) for i in group.calls}
    found = []
    for number, call in enumerate(order):
        if call.role is None:
            name, split = host_anchor(problem, call)
            found.append((number, group_of.get(name or ""), split, problem.workloads[call.name].seconds))
    return found


def dependencies(problem: Problem, rates: Rates) -> Dependencies:
    """Of the calls in graph order."""
    graph = problem.graph
    calls = problem.graph.order
    index = {call.name: i for i, call in enumerate(calls)}
    data = np.full((len(calls), len(calls)), NEVER)
    for i, call in enumerate(calls):
        work = problem.workloads[call.name]
        for producer in filter(None, map(graph.producer, call.inputs)):
            data[i, index[producer.name]] = rates.samples(work.num_samples * work.tokens * _SAMPLE_BYTES)
    weights = []
    for j, trainer in enumerate(calls):
        for i, user in enumerate(calls):
            if trainer.kind != "train_step" or user.role is None or user.kind == "train_step":
                continue
            if user.role == trainer.role or problem.role_of(user).follows == trainer.role:
                weights.append((i, j, 0 if j < i else 1))
    return Dependencies(data, tuple(weights))
