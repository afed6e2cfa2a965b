"""Space: all plans of a problem, as arrays that many plans can be evaluated with at once.

Calls that must share a layout (training of one role, what the user wants together) form a unit; a plan gives
every unit one of its candidates. Shapes: K plans, U units, N calls.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from realhf.planner.memory import available_bytes
from realhf.planner.period import NEVER, Dependencies, periods
from realhf.planner.problem import Problem
from realhf.planner.rates import Rates
from realhf.planner.transfer import Placed, transfer_seconds
from realhf.planner.unit import Candidate, Unit, find_units

Doubtful = tuple[int, str, np.ndarray, np.ndarray]
"""A unit, a role of which it has a copy, the copy's bytes by candidate, and in which plans it is doubtful."""
_SAMPLE_BYTES = 40  # Per token of what calls hand on: ids and a few float columns.


class Space:
    """The units of a problem and how plans of them are timed and checked."""

    def __init__(self, problem: Problem, rates: Rates) -> None:
        self.problem, self.rates = problem, rates
        self.calls = problem.model_calls
        self.needs = dependencies(problem, rates)
        self.capacity = available_bytes(problem.cluster)
        self.units = find_units(problem, rates)
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
        least: np.ndarray | float = 0.0, exact: bool = True,
    ) -> np.ndarray:  # fmt: skip
        """Seconds per step of plans whose calls take `least` or longer; a lower bound where not `exact` or
        where choices are open."""
        seconds, first, stop = self.timed(units, chosen)
        seconds = np.maximum(seconds, least)
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
        first, stop, resting, running, doubtful = self._loads(units, chosen)
        most = _fullest(first, stop, resting, running)
        if len(tight := np.flatnonzero(most > self.capacity)):
            for u, role, values, might in doubtful:
                rows = tight[might[tight]]
                same = self._aliases(u, role, chosen[rows])
                resting[rows, u] -= np.where(same, values[chosen[rows, u]], 0.0)
            most[tight] = _fullest(first[tight], stop[tight], resting[tight], running[tight])
        return most - self.capacity

    def least_seconds(self, units: Sequence[Unit], chosen: np.ndarray) -> np.ndarray:
        """Seconds (K, N) that calls take at least in plans where only their mesh is chosen, in the memory
        that is left beside what others rest there; 0 for the other calls."""
        first, stop, resting, _, doubtful = self._loads(units, chosen)
        for u, _, values, might in doubtful:
            resting[:, u] -= np.where(might, values[chosen[:, u]], 0.0)
        least = np.zeros((len(chosen), len(self.calls)))
        for u, unit in enumerate(units):
            rows = np.flatnonzero(chosen[:, u] >= len(unit.candidates))
            if not len(rows):
                continue
            pick = chosen[rows, u]
            copies = resting[rows, u] - unit.resting[pick]
            others = resting[rows].copy()
            others[:, u] = 0.0
            beside = np.zeros(len(rows))
            for v in range(len(units)):  # The fullest of the unit's ranks is its first, or another's first.
                at = np.maximum(first[rows, v], first[rows, u])
                at = np.where(at < stop[rows, u], at, first[rows, u])[:, None]
                covers = (first[rows] <= at) & (at < stop[rows])
                beside = np.maximum(beside, (others * covers).sum(axis=1))
            needs, seconds = unit.tiers
            mesh = pick - len(unit.candidates)
            left = self.capacity - copies - beside
            tier = np.maximum((needs[mesh] <= left[:, None]).sum(axis=1) - 1, 0)
            least[rows[:, None], list(unit.calls)] = seconds[mesh, tier]
        return least

    def _loads(
        self, units: Sequence[Unit], chosen: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, list[Doubtful]]:
        """First rank and stop of every unit, bytes that rest and that run there, shape (K, U) each; and which
        copies are counted that might be the same memory as their role's home."""
        first, stop, resting, running = (np.zeros(chosen.shape) for _ in range(4))
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
        return first, stop, resting, running, doubtful

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
