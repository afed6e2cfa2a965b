"""Joins the calls that must share a layout into groups, and finds the candidates of each group."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import networkx as nx

from realhf.cluster import Cluster
from realhf.graph import FunctionCall
from realhf.layout import Layout, ParallelStrategy
from realhf.planner.cost.parameter_boxes import ContiguousLayout
from realhf.planner.cost.rank_groups import ranks_per_host
from realhf.planner.cost.rates import Rates
from realhf.planner.memory.communicator_memory import CommunicatorMemory
from realhf.planner.search.call_group import CallGroup, Candidate
from realhf.planner.search.candidates import Variant, find_variants, is_no_worse
from realhf.planner.search.enumeration import find_meshes
from realhf.planner.workload.problem import Problem


class _Choice(NamedTuple):
    """A strategy for a call group on a mesh of some shape, with one variant for each call of the group."""

    strategy: ParallelStrategy
    variants: tuple[Variant, ...]


class _Shape(NamedTuple):
    """The properties of a mesh on which the price of a call depends."""

    kind: int  # The index of the kind of hosts.
    size: int
    per_host: int  # See `ranks_per_host`.


_ByShape = dict[_Shape, list[_Choice]]


class _MeshChoices(NamedTuple):
    """The meshes that a call group may use, and its choices on those of each shape."""

    meshes: list[range]
    by_shape: _ByShape


def _shape(cluster: Cluster, mesh: range) -> _Shape:
    kind = cluster.kind_index(mesh)
    assert kind is not None, "meshes and pins are on hosts of one kind"
    return _Shape(kind, len(mesh), ranks_per_host(cluster, mesh))


def find_call_groups(problem: Problem, rates: Rates) -> list[CallGroup]:
    """Return the calls joined into groups that must share a layout, in the order in which ranks run them."""
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
        owners[role] = (training or of_role)[0]
    communicators: dict[tuple[int, int, int], CommunicatorMemory] = {}
    members = [{i: calls[i] for i in sorted(tied)} for tied in nx.connected_components(ties)]
    members.sort(key=list)
    choices = [_mesh_choices(problem, rates, list(tied.values()), communicators) for tied in members]
    kept = _without_useless_cp([of_group.by_shape for of_group in choices])
    groups = []
    for tied, (meshes, _), by_shape in zip(members, choices, kept, strict=True):
        candidates = [
            Candidate(ContiguousLayout(strategy, mesh.start), variants)
            for mesh in meshes for strategy, variants in by_shape[_shape(problem.cluster, mesh)]]
        homes = [role for role, owner in owners.items() if owner in tied]
        groups.append(CallGroup(tied, candidates, homes=homes))
    return groups


def _mesh_choices(
    problem: Problem, rates: Rates, calls: Sequence[FunctionCall],
    known: dict[tuple[int, int, int], CommunicatorMemory],
) -> _MeshChoices:  # fmt: skip
    """Return the meshes of a group, all of the cluster or the pinned one, and its choices there.

    `known` are the communicators of meshes by kind of host, size and first rank; what they count serves all
    groups.
    """
    if (layout := _pinned(problem, calls)) is not None:
        meshes = [range(layout.ranks[0], layout.ranks[-1] + 1)]
    else:
        meshes = find_meshes(problem.cluster)
    only = None if layout is None else layout.strategy
    cluster = problem.cluster
    placements: dict[_Shape, list[CommunicatorMemory]] = {}
    shapes = [_shape(cluster, mesh) for mesh in meshes]
    for mesh, shape in zip(meshes, shapes, strict=True):
        first = mesh.start % cluster.devices_per_host
        place = (shape.kind, len(mesh), first if first + len(mesh) > cluster.devices_per_host else 0)
        if place not in known:
            known[place] = CommunicatorMemory(cluster.kinds[shape.kind], len(mesh), first_rank=place[2])
        of_shape = placements.setdefault(shape, [])
        if known[place] not in of_shape:
            of_shape.append(known[place])
    choices = {}
    for shape, communicators in placements.items():
        there = replace(problem, cluster=cluster.kinds[shape.kind], pins={})
        mesh = meshes[shapes.index(shape)]
        choices[shape] = _choices(there, rates.at(mesh), calls, communicators, shape.per_host, only=only)
    return _MeshChoices(meshes, choices)


def _choices(
    problem: Problem, rates: Rates, calls: Sequence[FunctionCall],
    communicators: Sequence[CommunicatorMemory], per_host: int, *, only: ParallelStrategy | None,
) -> list[_Choice]:  # fmt: skip
    """Return the choices of a group on a mesh with these communicators (one for each placement on
    hosts), `per_host` of its ranks on each host."""
    of_calls = [
        find_variants(problem, rates, call, communicators, per_host=per_host, only=only) for call in calls]
    return [
        _Choice(strategy, variants)
        for strategy in of_calls[0]
        for variants in itertools.product(*(of_call.get(strategy, ()) for of_call in of_calls))]


def _without_useless_cp(groups: Sequence[_ByShape]) -> list[_ByShape]:
    """Return the choices of all groups except those with cp > 1 that are better in no group than cp = 1.

    Both have the same pp and tp and no ep, hence the same shard on every rank, and the one with cp = 1 has
    no group of ranks that the other one lacks. So no reallocation, memory or call beside them tells them
    apart, with one exception: groups with equal layouts share communicators, and copies of weights. So a
    strategy that serves one group stays in all, and if it serves none, all groups change to cp = 1 at once.
    """
    useful: dict[_Shape, set[ParallelStrategy]] = {}
    for by_shape in groups:
        for shape, choices in by_shape.items():
            useful.setdefault(shape, set()).update(_useful_strategies(choices))
    return [
        {shape: [c for c in choices if c.strategy in useful[shape]] for shape, choices in by_shape.items()}
        for by_shape in groups]


def _useful_strategies(choices: Sequence[_Choice]) -> set[ParallelStrategy]:
    """Return the strategies with a choice that is no worse than all those with cp = 1 instead."""
    without_cp: dict[tuple[int, int], list[tuple[float, ...]]] = {}
    for strategy, variants in choices:
        if strategy.cp == strategy.ep == 1:
            without_cp.setdefault((strategy.pp, strategy.tp), []).append(_costs(variants))

    def is_useless(choice: _Choice) -> bool:
        s = choice.strategy
        if s.cp == 1 or s.ep > 1:
            return False
        costs = _costs(choice.variants)
        return any(is_no_worse(other, costs) for other in without_cp.get((s.pp, s.tp), ()))

    return {choice.strategy for choice in choices if not is_useless(choice)}


def _costs(variants: Sequence[Variant]) -> tuple[float, ...]:
    return tuple(itertools.chain(*(variant.costs for variant in variants)))


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
