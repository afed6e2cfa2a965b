"""Space: all plans of a problem, as arrays that many plans can be evaluated with at once.

Calls that must share a layout (training of one role, what the user wants together) form a unit; a plan gives
every unit one of its candidates. Shapes: K plans, U units, N calls, C candidates of a unit.
"""

import copy
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from realhf.graph import FunctionCall
from realhf.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.planner.candidates import Mesh, Variant, find_meshes, find_variants
from realhf.planner.memory import available_bytes
from realhf.planner.period import NEVER, Dependencies, periods
from realhf.planner.problem import Problem
from realhf.planner.rates import Rates
from realhf.planner.transfer import Placed, transfer_seconds

_SAMPLE_BYTES = 40  # Per token of what calls hand on: ids and a few float columns.


@dataclass(frozen=True)
class Candidate:
    """One layout of a unit, and one variant per call of it."""

    mesh: Mesh
    strategy: ParallelStrategy
    variants: tuple[Variant, ...]

    @property
    def layout(self) -> Layout:
        return Layout(self.strategy, DeviceMesh(tuple(range(self.mesh.first, self.mesh.stop))))

    @property
    def layout_key(self) -> tuple[Mesh, ParallelStrategy]:
        return self.mesh, self.strategy

    @property
    def placed(self) -> Placed:
        return Placed(self.strategy, self.mesh.first)


class Unit:
    """Calls that share a layout, and their candidates as arrays.

    `homes` are the roles that it owns: their parameters, gradients and optimizer rest here; of the others
    (`copies`) it holds a copy.
    """

    def __init__(
        self, calls: Mapping[int, FunctionCall], candidates: Sequence[Candidate], *, homes: Sequence[str]
    ) -> None:
        self.calls = tuple(calls)
        roles = {call.role: number for number, call in enumerate(calls.values()) if call.role is not None}
        self.homes = tuple(role for role in roles if role in homes)
        self.copies = tuple(role for role in roles if role not in homes)
        self.candidates = sorted(candidates, key=lambda c: sum(v.cost.seconds for v in c.variants))
        self.first = np.array([c.mesh.first for c in self.candidates])
        self.stop = np.array([c.mesh.stop for c in self.candidates])
        self.seconds = np.array([[v.cost.seconds for v in c.variants] for c in self.candidates])
        self.running = np.array([max(v.call_bytes for v in c.variants) for c in self.candidates])
        self.resting = np.zeros(len(self.candidates))
        for role in self.homes:
            self.resting += [c.variants[roles[role]].home_bytes for c in self.candidates]
        self.copied = [
            np.array([c.variants[roles[role]].copy_bytes for c in self.candidates]) for role in self.copies
        ]

    @cached_property
    def area(self) -> np.ndarray:
        """Device seconds of each candidate."""
        return self.seconds.sum(axis=1) * (self.stop - self.first)

    @cached_property
    def by_mesh(self) -> list[np.ndarray]:
        """Candidates of each mesh that has any; meshes in the order of their fastest candidate."""
        groups: dict[Mesh, list[int]] = {}
        for i, candidate in enumerate(self.candidates):
            groups.setdefault(candidate.mesh, []).append(i)
        return [np.array(group) for group in groups.values()]

    def varied(self) -> np.ndarray:
        """A few candidates of each mesh: the fastest, and those that are slower but need less memory."""
        picks = []
        for group in self.by_mesh:
            memory = self.resting[group] + self.running[group] + sum(array[group] for array in self.copied)
            leaner, least = [], np.inf
            for i in np.lexsort((memory, self.seconds[group].sum(axis=1))):
                if memory[i] < least * 0.95:
                    leaner.append(group[i])
                    least = memory[i]
            picks += leaner
        return np.array(picks)

    def with_meshes(self) -> "Unit":
        """This unit with one more, wishful candidate per mesh behind the others, in the order of `by_mesh`:
        the least time of each call and the least memory on that mesh."""
        more, groups = copy.copy(self), self.by_mesh
        more.__dict__.pop("area", None)

        def extended(array: np.ndarray) -> np.ndarray:
            return np.concatenate([array, [array[group].min(axis=0) for group in groups]])

        for name in ("first", "stop", "seconds", "resting", "running"):
            setattr(more, name, extended(getattr(self, name)))
        more.copied = [extended(array) for array in self.copied]
        return more


class Space:
    """The units of a problem and how plans of them are timed and checked."""

    def __init__(self, problem: Problem, rates: Rates) -> None:
        self.problem, self.rates = problem, rates
        self.calls = problem.model_calls
        self.needs = dependencies(problem, rates)
        self.capacity = available_bytes(problem.cluster)
        self.units = _units(problem, rates)
        self._home_of = {role: u for u, unit in enumerate(self.units) for role in unit.homes}
        self._moved: dict[tuple[int, Placed, Placed], float] = {}
        self._unit_of = {call: u for u, unit in enumerate(self.units) for call in unit.calls}

    def timed(
        self, units: Sequence[Unit], chosen: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Seconds and ranks (first, stop) of every call of plans `chosen` (K, U). -1 stands for a unit whose
        choice is open: its calls take their least time on ranks of their own."""
        seconds, first, stop = (np.zeros((len(chosen), len(self.calls))) for _ in range(3))
        for u, unit in enumerate(units):
            open_, pick = chosen[:, u] < 0, chosen[:, u]
            for i, call in enumerate(unit.calls):
                seconds[:, call] = np.where(open_, unit.seconds[:, i].min(), unit.seconds[pick, i])
                first[:, call] = np.where(open_, -2 * u - 2, unit.first[pick])
                stop[:, call] = np.where(open_, -2 * u - 1, unit.stop[pick])
        return seconds, first, stop

    def periods(
        self, units: Sequence[Unit], chosen: np.ndarray, *, moving: np.ndarray | None = None,
        exact: bool = True,
    ) -> np.ndarray:  # fmt: skip
        """Seconds per step of plans; a lower bound where not `exact` or where choices are open."""
        seconds, first, stop = self.timed(units, chosen)
        shares = (first[:, :, None] < stop[:, None, :]) & (first[:, None, :] < stop[:, :, None])
        return periods(self.needs, seconds, shares, moving=moving, exact=exact)

    def moving(self, chosen: np.ndarray) -> np.ndarray:
        """Seconds of the reallocations of plans (K, number of `needs.weights`); 0 where an end is open."""
        sizes = [len(unit.candidates) for unit in self.units]
        out = np.zeros((len(chosen), len(self.needs.weights)))
        for number, (i, j, _) in enumerate(self.needs.weights):
            here, there = self._unit_of[i], self._unit_of[j]
            for k, (target, source) in enumerate(chosen[:, [here, there]].tolist()):
                if 0 <= target < sizes[here] and 0 <= source < sizes[there]:
                    out[k, number] = self._seconds(j, here, target, there, source)
        return out

    def _seconds(self, trained: int, here: int, target: int, there: int, source: int) -> float:
        call, role = self.calls[trained], self.problem.role_of(self.calls[trained])
        ends = (self.units[there].candidates[source].placed, self.units[here].candidates[target].placed)
        assert call.role is not None
        key = (trained, *ends)
        if key not in self._moved:
            self._moved[key] = transfer_seconds(
                self.problem.cluster, *ends, num_bytes=role.spec.numel * role.itemsize,
                sharded=ends[0].strategy.dp > 1,
            )  # fmt: skip
        return self._moved[key]

    def exact_periods(self, chosen: np.ndarray) -> np.ndarray:
        return self.periods(self.units, chosen, moving=self.moving(chosen))

    def overflow(self, units: Sequence[Unit], chosen: np.ndarray) -> np.ndarray:
        """Bytes by which the fullest rank of each plan exceeds its memory, at most 0 where all fits.

        A lower bound where choices are open: copies count as soon as it is sure that they are not the same
        memory as their role's home.
        """
        count = len(chosen)
        first, stop, resting, running = (np.zeros((count, len(units))) for _ in range(4))
        for u, unit in enumerate(units):
            here, pick = chosen[:, u] >= 0, chosen[:, u]
            for array, values in ((first, unit.first), (stop, unit.stop)):
                array[:, u] = np.where(here, values[pick], -1)
            for array, values in ((resting, unit.resting), (running, unit.running)):
                array[:, u] = np.where(here, values[pick], 0.0)
        doubtful = []
        for u, unit in enumerate(units):
            for role, values in zip(unit.copies, unit.copied, strict=True):
                home = self._home_of[role]
                inside = (first[:, home] <= first[:, u]) & (stop[:, u] <= stop[:, home])
                sizes = len(unit.candidates), len(units[home].candidates)
                decided = (chosen[:, u] < sizes[0]) & (chosen[:, home] < sizes[1])
                known = (chosen[:, u] >= 0) & (chosen[:, home] >= 0) & (decided | ~inside)
                resting[:, u] += np.where(known, values[chosen[:, u]], 0.0)
                doubtful.append((u, role, values, known & inside))
        most = _fullest(first, stop, resting, running)
        if len(tight := np.flatnonzero(most > self.capacity)):
            for u, role, values, might in doubtful:
                rows = tight[might[tight]]
                same = self._aliases(u, role, chosen[rows])
                resting[rows, u] -= np.where(same, values[chosen[rows, u]], 0.0)
            most[tight] = _fullest(first[tight], stop[tight], resting[tight], running[tight])
        return most - self.capacity

    def _aliases(self, unit: int, role: str, chosen: np.ndarray) -> np.ndarray:
        """Whether a copy is the same memory as its role's home: every rank holds the same shard in both."""
        home = self._home_of[role]
        here, there = self.units[unit].candidates, self.units[home].candidates
        ends = chosen[:, [unit, home]].tolist()
        return np.array([_same_shards(here[a], there[b]) for a, b in ends], dtype=bool)


def _fullest(first: np.ndarray, stop: np.ndarray, resting: np.ndarray, running: np.ndarray) -> np.ndarray:
    """Bytes on the fullest rank of each plan: all that rests there, and the largest call that runs there.

    The fullest rank is the first of some mesh.
    """
    most = np.zeros(len(first))
    for u in range(first.shape[1]):
        at = first[:, u, None]
        covers = (first <= at) & (at < stop)
        most = np.maximum(most, (resting * covers).sum(axis=1) + (running * covers).max(axis=1))
    return most


def _same_shards(here: Candidate, home: Candidate) -> bool:
    if (here.mesh, here.strategy) == (home.mesh, home.strategy):
        return True
    (a, b), (mine, other) = (here.mesh, home.mesh), (here.strategy, home.strategy)
    inside = b.first <= a.first and a.stop <= b.stop and (a.first - b.first) % mine.tp == 0
    return inside and mine.tp == other.tp and mine.pp == other.pp == mine.ep == other.ep == 1


def _units(problem: Problem, rates: Rates) -> list[Unit]:
    """Calls joined by what must share a layout, in graph order."""
    calls = problem.model_calls
    groups = [{i} for i in range(len(calls))]
    ties = [
        {i for i, call in enumerate(calls) if call.role == role and call.kind == "train_step"}
        for role in problem.roles
    ]
    ties += [{i for i, call in enumerate(calls) if call.name in names} for names in problem.together]
    for tie in ties:
        if touched := [group for group in groups if group & tie]:
            groups = [group for group in groups if group not in touched] + [set().union(*touched)]
    owners = {}
    for role in problem.roles:
        of_role = [i for i, call in enumerate(calls) if call.role == role]
        training = [i for i in of_role if calls[i].kind == "train_step"]
        owners[role] = (training or of_role)[0]
    known: dict[tuple[str, int, str], list[Variant]] = {}
    units = []
    moved = {call.role for call in calls if call.kind == "train_step"}
    moved |= {name for name, role in problem.roles.items() if role.follows in moved}
    for group in sorted(map(sorted, groups)):
        candidates = _candidates(problem, rates, [calls[i] for i in group], known)
        homes = [role for role, owner in owners.items() if owner in group]
        mine = calls[group[0]].role
        if len(group) == 1 and mine not in moved and sum(call.role == mine for call in calls) == 1:
            candidates = _undominated(candidates)
        units.append(Unit({i: calls[i] for i in group}, candidates, homes=homes))
    return units


def _undominated(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Candidates of a call whose parameters never move: of equal meshes, those that none beats in time and
    memory."""
    kept: dict[Mesh, list[Candidate]] = {}
    for candidate in sorted(candidates, key=lambda c: c.variants[0].cost.seconds):
        (mine,) = candidate.variants
        others = (other.variants[0] for other in kept.setdefault(candidate.mesh, []))
        if not any(o.home_bytes <= mine.home_bytes and o.call_bytes <= mine.call_bytes for o in others):
            kept[candidate.mesh].append(candidate)
    return [candidate for group in kept.values() for candidate in group]


def _candidates(
    problem: Problem, rates: Rates, calls: Sequence[FunctionCall],
    known: dict[tuple[str, int, str], list[Variant]],
) -> list[Candidate]:  # fmt: skip
    pins = {problem.pins[call.name] for call in calls if call.name in problem.pins}
    if len(pins) > 1:
        raise ValueError(f"--pin: {' and '.join(c.name for c in calls)} must share a layout: pin them alike")
    meshes = find_meshes(problem.cluster)
    only = next((layout.strategy for layout in pins), None)
    for layout in pins:
        meshes = [Mesh(layout.ranks[0], len(layout.ranks))]
        if layout.ranks != tuple(range(meshes[0].first, meshes[0].stop)):
            raise ValueError(f"--pin {calls[0].name}={layout}: plans are made of contiguous ranks")
    found = []
    for mesh in meshes:
        per_call: list[dict[ParallelStrategy, list[Variant]]] = []
        for call in calls:
            key = (call.name, mesh.size, str(only))
            if key not in known:
                per_host = problem.cluster.devices_per_host
                known[key] = find_variants(
                    problem, rates, call, size=mesh.size, per_host=per_host, only=only
                )
            by_strategy: dict[ParallelStrategy, list[Variant]] = {}
            for variant in known[key]:
                by_strategy.setdefault(variant.strategy, []).append(variant)
            per_call.append(by_strategy)
        for strategy in per_call[0]:
            options = [of_call.get(strategy, []) for of_call in per_call]
            found += [Candidate(mesh, strategy, combo) for combo in itertools.product(*options)]
    return found


def dependencies(problem: Problem, rates: Rates) -> Dependencies:
    """Between model calls; what passes through host calls takes their time."""
    calls, graph = problem.model_calls, problem.graph
    index = {call.name: i for i, call in enumerate(calls)}
    data = np.full((len(calls), len(calls)), NEVER)
    arrives: Mapping[str, dict[str, float]] = {call.name: {} for call in graph.calls}
    for call in graph.order:
        work = problem.workloads[call.name]
        hop = rates.samples(work.num_samples * work.tokens * _SAMPLE_BYTES)
        for key in call.inputs:
            producer = graph.producer(key)
            if producer is None:
                continue
            sources = arrives[producer.name] if producer.role is None else {producer.name: 0.0}
            own = problem.workloads[producer.name].seconds if producer.role is None else 0.0
            for name, seconds in sources.items():
                arrives[call.name][name] = max(arrives[call.name].get(name, 0.0), seconds + own + hop)
        if call.role is not None:
            for name, seconds in arrives[call.name].items():
                data[index[call.name], index[name]] = seconds
    weights = []
    for j, trainer in enumerate(calls):
        if trainer.kind != "train_step":
            continue
        for i, user in enumerate(calls):
            follows = problem.role_of(user).follows == trainer.role
            if (user.role == trainer.role or follows) and user.kind != "train_step":
                weights.append((i, j, 0 if j < i else 1))
    return Dependencies(data, tuple(weights))
