"""Call groups: calls that must share a layout, with all their candidate layouts as arrays.

A candidate is a layout with one variant for each call of the group. A choice is a number in an array of
plans: the index of a candidate, or of a mesh, or OPEN.
"""

import copy
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import networkx as nx
import numpy as np

from realhf.cluster import Cluster
from realhf.execution_plan import CallPlan
from realhf.graph import FunctionCall
from realhf.layout import Layout, ParallelStrategy
from realhf.planner.candidates import (
    PLACES,
    HeldBytes,
    RowAxis,
    Variant,
    find_meshes,
    find_variants,
    is_no_worse,
)
from realhf.planner.communicator_memory import CommunicatorBytes, CommunicatorMemory
from realhf.planner.deadline import Deadline, OutOfTime, part_of_work
from realhf.planner.links import ContiguousLayout, ranks_per_host
from realhf.planner.problem import Problem
from realhf.planner.rates import Rates

OPEN = -1
"""The choice of a group about which nothing is decided yet."""
_LEVELS = 128  # The amounts of room for which meshes have the least seconds of a generation.


def placeholder_ranks(owner: int) -> range:
    """Return the ranks below 0 that stand for those of an owner (a group or a call) while they are undecided.

    They overlap neither a device nor the placeholder of another owner.
    """
    return range(-owner - 1, -owner)


class Candidate(NamedTuple):
    """A layout that a call group can take, with one variant for each call of the group."""

    layout: ContiguousLayout
    variants: tuple[Variant, ...]


class RowTable:
    """Seconds and bytes of a generation of a group by the numbers of its rows (see `RowAxis`).

    `variants` has the row of the tables for each candidate. A mesh, whose candidates differ in both, has the
    least seconds of any of them for each of `_LEVELS` amounts of room.
    """

    def __init__(
        self, column: int, variants: np.ndarray, axes: Sequence[RowAxis], by_mesh: Sequence[np.ndarray]
    ) -> None:
        """Set up the table of the call in this column of the group."""
        self.column = column
        self._variants = variants
        self._seconds = np.stack([axis.seconds_G for axis in axes])
        self._num_bytes = np.stack([axis.by_place_GP for axis in axes])
        self._most = float(self._num_bytes[np.isfinite(self._num_bytes)].max(initial=1.0))
        self._by_mesh = by_mesh

    @cached_property
    def _enough(self) -> np.ndarray:
        """The bytes at each place with which each variant takes its least seconds."""
        fastest = self._seconds.argmin(axis=1)  # With the rows of this index, or fewer.
        enough: np.ndarray = self._num_bytes[np.arange(len(fastest)), np.maximum(0, fastest - 1)]
        return enough

    @cached_property
    def _least(self) -> np.ndarray:
        """The least seconds in each mesh, and of all candidates, at each place and level of room."""
        known: dict[bytes, np.ndarray] = {}
        parts = [np.unique(self._variants[part]) for part in self._by_mesh]
        parts.append(np.arange(len(self._seconds)))
        for some in parts:
            if some.tobytes() not in known:
                known[some.tobytes()] = self._least_of(some)
        return np.stack([known[some.tobytes()] for some in parts])

    def _least_of(self, variants: np.ndarray) -> np.ndarray:
        """Return the least seconds of some variants at each place and level of room, (PLACES, _LEVELS)."""
        seconds = self._seconds[variants]
        with_room = np.broadcast_to(
            np.append(seconds[:, 1:], seconds[:, -1:], axis=1)[..., None], (*seconds.shape, PLACES))
        level = np.ceil(self._num_bytes[variants] / self._most * _LEVELS - 1).clip(0, _LEVELS)
        place = np.broadcast_to(np.arange(PLACES), with_room.shape)
        least = np.full((PLACES, _LEVELS + 1), seconds[:, 0].min(initial=np.inf))
        np.minimum.at(least, (place, level.astype(int)), with_room)
        least_with: np.ndarray = np.minimum.accumulate(least[:, :_LEVELS], axis=1)
        return least_with

    def least_seconds(self, choices: np.ndarray, place: np.ndarray, room: np.ndarray) -> np.ndarray:
        """Return the least seconds of the rows that fit in `room` bytes at a place, for some choices; or 0
        where these are not more than without a limit.

        If so many rows fit, and the next number does not, there may be any number of rows in between.
        """
        least = np.zeros(len(choices))
        is_candidate = (choices >= 0) & (choices < len(self._variants))
        of_one = np.flatnonzero(is_candidate)
        variant = self._variants[choices[of_one]]
        is_limited = room[of_one] < self._enough[variant, place[of_one]]
        of_one = of_one[is_limited]
        variant = variant[is_limited]
        fits = self._num_bytes[variant, :, place[of_one]] <= room[of_one, None]
        index = np.minimum(fits.sum(axis=1), fits.shape[1] - 1)
        least[of_one] = self._seconds[variant, index]
        of_mesh = np.flatnonzero(~is_candidate)
        level = np.ceil(room[of_mesh] / self._most * _LEVELS - 1).clip(0, _LEVELS - 1).astype(int)
        mesh = np.where(choices[of_mesh] < 0, -1, choices[of_mesh] - len(self._variants))
        least[of_mesh] = self._least[mesh, place[of_mesh], level]
        return least


class CallGroup:
    """Calls that share a layout, and the candidates for it as arrays with one entry per candidate.

    A role in `homes` keeps its parameters, gradients and optimizer in this group's layout. A role in `copies`
    lives in another group's layout, and this group holds a copy of its weights.

    A choice for the group is the index of a candidate; or, if only the mesh is decided, one of
    `mesh_choices`; or OPEN. The arrays of `with_open_choices` have an entry for each of them.

    `seconds` has one column per call. Bytes are those of the fullest rank: `resting` are always held for the
    roles in `homes`, `copied` for each role in `copies`, and `running` only while a call of the group runs.
    Arrays that begin with `least_` are for the bounds of memory_bounds.py: the least of a rank at each of the
    `PLACES`. `communicators` are their least bytes.
    """

    def __init__(
        self, calls: Mapping[int, FunctionCall], candidates: Sequence[Candidate], *, homes: Sequence[str]
    ) -> None:
        self.calls = list(calls)
        self._call_plans: dict[int, list[CallPlan]] = {}
        roles = {call.role: column for column, call in enumerate(calls.values()) if call.role is not None}
        self.homes = tuple(role for role in roles if role in homes)
        self.copies = tuple(role for role in roles if role not in homes)
        self.candidates = sorted(candidates, key=lambda c: sum([v.cost.seconds for v in c.variants]))
        # Candidates on meshes of one shape have the same variants.
        distinct = {id(c.variants): (c.layout.strategy, c.variants) for c in self.candidates}
        numbers = {key: number for number, key in enumerate(distinct)}
        rows = np.array([numbers[id(c.variants)] for c in self.candidates], int)
        strategies = [strategy for strategy, _ in distinct.values()]
        shape = (len(distinct), len(self.calls))
        variants = [v for _, some in distinct.values() for v in some]

        def column(values: list[Any], dtype: type = float) -> np.ndarray:
            return np.array(values, dtype)[rows]

        def table(values: list[Any], *last: int) -> np.ndarray:
            return np.array(values, float).reshape(*shape, *last)[rows]

        self.first = np.array([c.layout.first_rank for c in self.candidates])
        self.stop = self.first + column([s.num_ranks for s in strategies], int)
        self.seconds = table([v.cost.seconds for v in variants])
        self.running = table([v.call_bytes for v in variants]).max(axis=1)
        # The first rank of the last pipeline stage, which owns the results.
        self.result_first = self.stop - column([s.num_ranks // s.pp for s in strategies], int)
        self.replicas = column([s.dp for s in strategies], int)
        self.is_sharded = column([s.num_replicas > 1 for s in strategies], bool)
        of_homes = [roles[role] for role in self.homes]
        of_copies = [roles[role] for role in self.copies]
        self.resting = table([v.home_bytes for v in variants])[:, of_homes].sum(axis=1)
        self.copied = list(table([v.copy_bytes for v in variants]).T[of_copies])
        communicators = table([v.communicators for v in variants], len(CommunicatorBytes._fields))
        self.communicators = CommunicatorBytes(*communicators.max(axis=1).T)
        held = table([v.by_place for v in variants], len(HeldBytes._fields), PLACES)
        home, copied, running = (held[:, :, i] for i in range(len(HeldBytes._fields)))
        self.least_resting = home[:, of_homes].sum(axis=1)
        self.least_running = running.max(axis=1)
        self.least_copied = [copied[:, number] for number in of_copies]
        self.row_tables = []
        for number in range(len(self.calls)):
            axes = [some[number].rows for _, some in distinct.values()]
            if any(axis is not None for axis in axes):
                known = [axis for axis in axes if axis is not None]
                self.row_tables.append(RowTable(number, rows, known, self.by_mesh))

    def call_plans(self, index: int) -> list[CallPlan]:
        """Return the plan of each call under a candidate."""
        if index not in self._call_plans:
            candidate = self.candidates[index]
            layout = candidate.layout.as_layout
            self._call_plans[index] = [replace(v.call_plan, layout=layout) for v in candidate.variants]
        return self._call_plans[index]

    @cached_property
    def device_seconds(self) -> np.ndarray:
        """Device seconds of each candidate: its time multiplied by its number of ranks."""
        return self.seconds.sum(axis=1) * (self.stop - self.first)

    @cached_property
    def by_mesh(self) -> list[np.ndarray]:
        """Indices of the candidates on each mesh; the meshes are in the order of their fastest candidate."""
        indices: dict[range, list[int]] = {}
        for i, candidate in enumerate(self.candidates):
            indices.setdefault(candidate.layout.ranks, []).append(i)
        return [np.array(on_mesh) for on_mesh in indices.values()]

    @property
    def mesh_choices(self) -> np.ndarray:
        """The choices that decide only the mesh, in the order of `by_mesh`."""
        return len(self.candidates) + np.arange(len(self.by_mesh))

    def is_mesh(self, choice: np.ndarray) -> np.ndarray:
        """Return which choices decide only the mesh."""
        return choice >= len(self.candidates)

    def mesh_index(self, mesh_choice: np.ndarray) -> np.ndarray:
        """Return the indices in `by_mesh` of choices that decide only the mesh."""
        return mesh_choice - len(self.candidates)

    def is_candidate(self, choice: np.ndarray) -> np.ndarray:
        """Return which choices are candidates, rather than meshes or open."""
        return (choice >= 0) & (choice < len(self.candidates))

    def few_per_mesh(self) -> np.ndarray:
        """Return a few candidates of each mesh: the fastest, and slower ones that need less memory."""
        few = []
        for on_mesh in self.by_mesh:
            copied = sum(array[on_mesh] for array in self.copied)
            memory = self.resting[on_mesh] + self.running[on_mesh] + copied
            least = np.inf
            for i in np.lexsort((memory, self.seconds[on_mesh].sum(axis=1))):
                if memory[i] < least * 0.95:
                    few.append(on_mesh[i])
                    least = memory[i]
        return np.array(few)

    def with_open_choices(self, owner: int) -> "CallGroup":
        """Return a copy whose arrays have one more, optimistic entry for each mesh, in the order of
        `by_mesh`, and a last one for the OPEN choice.

        Each stands for several candidates: it takes the least time of each call and the least memory. The
        last one is on the placeholder ranks of `owner`, the group's number, and takes no memory.
        """
        extended_group = copy.copy(self)
        extended_group.__dict__.pop("device_seconds", None)
        nowhere = placeholder_ranks(owner)

        def extended(array: np.ndarray, last: np.ndarray | float = 0.0) -> np.ndarray:
            by_mesh = [array[on_mesh].min(axis=0) for on_mesh in self.by_mesh]
            return np.concatenate([array, by_mesh, np.broadcast_to(last, (1, *array.shape[1:]))])

        extended_group.first = extended(self.first, nowhere.start)
        extended_group.stop = extended(self.stop, nowhere.stop)
        extended_group.seconds = extended(self.seconds, self.seconds.min(axis=0))
        extended_group.is_sharded = extended(self.is_sharded).astype(bool)
        extended_group.communicators = CommunicatorBytes(*map(extended, self.communicators))
        for prefix in ("", "least_"):
            for name in (f"{prefix}resting", f"{prefix}running"):
                setattr(extended_group, name, extended(getattr(self, name)))
            copied = [extended(array) for array in getattr(self, f"{prefix}copied")]
            setattr(extended_group, f"{prefix}copied", copied)
        return extended_group


class _Shape(NamedTuple):
    """The properties of a mesh on which the price of a call depends."""

    kind: int  # The index of the kind of hosts.
    size: int
    per_host: int  # See `ranks_per_host`.


_ByShape = dict[_Shape, list[Candidate]]
"""The candidates of a call group on meshes of each shape, as if these began at rank 0."""


class _GroupMeshes(NamedTuple):
    """The meshes that a call group may use, and the communicators of those of each shape."""

    meshes: list[range]
    communicators: dict[_Shape, list[CommunicatorMemory]]


def _shape(cluster: Cluster, mesh: range) -> _Shape:
    kind = cluster.kind_index(mesh)
    assert kind is not None, "meshes and pins are on hosts of one kind"
    return _Shape(kind, len(mesh), ranks_per_host(cluster, mesh))


def find_call_groups(problem: Problem, rates: Rates, deadline: Deadline) -> tuple[list[CallGroup], bool]:
    """Return the calls joined into groups that must share a layout, in the order in which ranks run them;
    and whether they have candidates on all meshes.

    Meshes of one shape are enumerated after those of another, for all groups: pinned ones first, then by
    size, where that of all ranks is followed by a half of them, a quarter, and so on, and then by the others.
    When the deadline passes, shapes are missing. Raises OutOfTime, with the share of those on the shape under
    way, if it passes before each group has a candidate.
    """
    calls = problem.calls
    positions = {call.name: i for i, call in enumerate(calls)}
    ties = nx.Graph()
    ties.add_nodes_from(i for i, call in enumerate(calls) if call.role is not None)
    for names in problem.together:
        nx.add_path(ties, [i for i, call in enumerate(calls) if call.name in names])
    owners = {}
    for role in problem.roles:
        of_role = [positions[call.name] for call in problem.graph.of_role(role)]
        training = [i for i in of_role if calls[i].kind == "train_step"]
        nx.add_path(ties, training)
        if of_role:  # Of a role that is only read, all weights are read copies (see memory_account.py).
            owners[role] = (training or of_role)[0]
    communicators: dict[tuple[int, int, int], CommunicatorMemory] = {}
    members = [{i: calls[i] for i in sorted(tied)} for tied in nx.connected_components(ties)]
    members.sort(key=list)
    pins = [_pinned(problem, list(tied.values())) for tied in members]
    places = [_group_meshes(problem, pin, communicators) for pin in pins]
    found: list[_ByShape] = [{} for _ in members]
    is_whole = True
    try:
        for shape in _in_order(places, pins):
            of_shape: list[list[Candidate] | None] = []
            for number, (tied, place, pin) in enumerate(zip(members, places, pins, strict=True)):
                with part_of_work(number, len(members)):
                    of_shape.append(
                        _candidates_on(problem, rates, list(tied.values()), shape, place, pin, deadline)
                        if shape in place.communicators else None)
            for by_shape, candidates in zip(found, of_shape, strict=True):
                if candidates is not None:
                    by_shape[shape] = candidates
    except OutOfTime:
        if not all(any(by_shape.values()) for by_shape in found):
            raise
        is_whole = False
    kept = _without_useless_cp(found)
    groups = []
    for tied, (meshes, _), by_shape in zip(members, places, kept, strict=True):
        candidates = [
            Candidate(layout._replace(first_rank=mesh.start), variants)
            for mesh in meshes for layout, variants in by_shape.get(_shape(problem.cluster, mesh), ())]
        homes = [role for role, owner in owners.items() if owner in tied]
        groups.append(CallGroup(tied, candidates, homes=homes))
    return groups, is_whole


def _in_order(places: Sequence[_GroupMeshes], pins: Sequence[Layout | None]) -> list[_Shape]:
    """Return the shapes of all meshes in the order in which they are enumerated."""
    pinned = {shape for place, pin in zip(places, pins, strict=True) if pin for shape in place.communicators}
    shapes = {shape for place in places for shape in place.communicators}
    largest = {kind: max(s.size for s in shapes if s.kind == kind) for kind in {s.kind for s in shapes}}

    def order(shape: _Shape) -> tuple[bool, bool, int, int]:
        halves = largest[shape.kind] / shape.size
        return shape not in pinned, not math.log2(halves).is_integer(), -shape.size, shape.per_host

    return sorted(shapes, key=order)


def _group_meshes(
    problem: Problem, pin: Layout | None, known: dict[tuple[int, int, int], CommunicatorMemory]
) -> _GroupMeshes:
    """Return the meshes of a group: all of the cluster, or the pinned one.

    `known` are the communicators of meshes by kind of host, size and first rank; what they count serves all
    groups.
    """
    cluster = problem.cluster
    meshes = find_meshes(cluster) if pin is None else [range(pin.ranks[0], pin.ranks[-1] + 1)]
    placements: dict[_Shape, list[CommunicatorMemory]] = {}
    for mesh in meshes:
        shape = _shape(cluster, mesh)
        first = mesh.start % cluster.devices_per_host
        place = (shape.kind, len(mesh), first if first + len(mesh) > cluster.devices_per_host else 0)
        if place not in known:
            known[place] = CommunicatorMemory(cluster.kinds[shape.kind], len(mesh), first_rank=place[2])
        of_shape = placements.setdefault(shape, [])
        if known[place] not in of_shape:
            of_shape.append(known[place])
    return _GroupMeshes(meshes, placements)


def _candidates_on(
    problem: Problem, rates: Rates, calls: Sequence[FunctionCall], shape: _Shape, place: _GroupMeshes,
    pin: Layout | None, deadline: Deadline,
) -> list[Candidate]:
    """Return the candidates of a group on meshes of a shape, as if these began at rank 0."""
    there = replace(problem, cluster=problem.cluster.kinds[shape.kind], pins={})
    mesh = next(mesh for mesh in place.meshes if _shape(problem.cluster, mesh) == shape)
    return _candidates(
        there, rates.at(mesh), calls, place.communicators[shape], shape.per_host,
        only=None if pin is None else pin.strategy, deadline=deadline)


def _candidates(
    problem: Problem, rates: Rates, calls: Sequence[FunctionCall],
    communicators: Sequence[CommunicatorMemory], per_host: int, *, only: ParallelStrategy | None,
    deadline: Deadline,
) -> list[Candidate]:
    """Return the candidates of a group on a mesh with these communicators (one for each placement on
    hosts), `per_host` of its ranks on each host, as if it began at rank 0."""
    of_calls = []
    for number, call in enumerate(calls):
        with part_of_work(number, len(calls)):
            of_calls.append(find_variants(
                problem, rates, call, communicators, per_host=per_host, only=only, deadline=deadline))
    return [
        Candidate(ContiguousLayout(strategy, 0), variants)
        for strategy in of_calls[0]
        for variants in itertools.product(*(of_call.get(strategy, ()) for of_call in of_calls))]


def _without_useless_cp(groups: Sequence[_ByShape]) -> list[_ByShape]:
    """Return the candidates of all groups except those with cp > 1 that are better in no group than cp = 1.

    Both have the same pp and tp and no ep, hence the same shard on every rank, and the one with cp = 1 has
    no group of ranks that the other one lacks. So no reallocation, memory or call beside them tells them
    apart, with one exception: groups with equal layouts share communicators, and copies of weights. So a
    strategy that serves one group stays in all, and if it serves none, all groups change to cp = 1 at once.
    """
    useful: dict[_Shape, set[ParallelStrategy]] = {}
    for by_shape in groups:
        for shape, candidates in by_shape.items():
            useful.setdefault(shape, set()).update(_useful_strategies(candidates))
    return [
        {shape: [c for c in candidates if c.layout.strategy in useful[shape]]
         for shape, candidates in by_shape.items()}
        for by_shape in groups]


def _useful_strategies(candidates: Sequence[Candidate]) -> set[ParallelStrategy]:
    """Return the strategies with a candidate that is no worse than all those with cp = 1 instead."""
    without_cp: dict[tuple[int, int], list[tuple[float, ...]]] = {}
    for (strategy, _), variants in candidates:
        if strategy.cp == strategy.ep == 1:
            without_cp.setdefault((strategy.pp, strategy.tp), []).append(_costs(variants))

    def is_useless(candidate: Candidate) -> bool:
        s = candidate.layout.strategy
        if s.cp == 1 or s.ep > 1:
            return False
        costs = _costs(candidate.variants)
        return any(is_no_worse(other, costs) for other in without_cp.get((s.pp, s.tp), ()))

    return {candidate.layout.strategy for candidate in candidates if not is_useless(candidate)}


def _costs(variants: Sequence[Variant]) -> tuple[float, ...]:
    return tuple(itertools.chain(*(variant.costs for variant in variants)))


def check_pins(problem: Problem) -> None:
    """Raise ValueError, which names the pin, if a call cannot have the layout that the user has fixed."""
    for call in problem.model_calls:
        _pinned(problem, [call])


def _pinned(problem: Problem, calls: Sequence[FunctionCall]) -> Layout | None:
    """Return the layout that the user has fixed for these calls, if any.

    Raises ValueError if the calls cannot all have it.
    """
    pins = {name: problem.pins[name] for call in calls if (name := call.name) in problem.pins}
    if not pins:
        return None
    (name, layout), *others = pins.items()
    if any(other != layout for _, other in others):
        raise ValueError(f"--pin: {' and '.join(pins)} must share a layout: pin them alike")
    if layout.ranks != tuple(range(layout.ranks[0], layout.ranks[0] + len(layout.ranks))):
        raise ValueError(f"--pin {name}={layout}: plans are made of contiguous ranks")
    for call in calls:
        try:
            problem.model_role(call).config.check_layout(layout)
        except ValueError as error:
            raise ValueError(f"--pin {name}={layout}: call {call.name}: {error}") from error
        max_dp = problem.workloads[call.name].most_replicas(call.kind)
        if layout.dp > max_dp:
            complaint = f"the {max_dp} samples of call {call.name} cannot be split over dp={layout.dp}"
            raise ValueError(f"--pin {name}={layout}: {complaint}")
    return layout
