"""Joins the calls that must share a layout into groups, and finds the candidates of each group."""

import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import networkx as nx

from realhf.graph import FunctionCall
from realhf.layout import Layout, ParallelStrategy
from realhf.planner.call_group import CallGroup, Candidate
from realhf.planner.candidates import Variant, find_variants, undominated
from realhf.planner.cost import ranks_per_host
from realhf.planner.dependencies import host_anchor
from realhf.planner.enumeration import find_meshes
from realhf.planner.problem import Problem
from realhf.planner.rates import Rates
from realhf.planner.transfer import ContiguousLayout


class _Choice(NamedTuple):
    """A strategy for a call group on a mesh of some shape, with one variant for each call of the group."""

    strategy: ParallelStrategy
    variants: tuple[Variant, ...]


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
    groups = []
    for group in sorted(map(sorted, nx.connected_components(ties))):
        members = {i: calls[i] for i in group}
        homes = [role for role, owner in owners.items() if owner in group]
        candidates = _candidates(problem, rates, list(members.values()), homes)
        groups.append(CallGroup(members, candidates, homes=homes))
    return groups


def _candidates(
    problem: Problem, rates: Rates, calls: Sequence[FunctionCall], homes: Sequence[str]
) -> list[Candidate]:
    """Return the candidates of a group on all meshes of the cluster, or on the pinned one."""
    if (layout := _pinned(problem, calls)) is not None:
        meshes = [range(layout.ranks[0], layout.ranks[-1] + 1)]
    else:
        meshes = find_meshes(problem.cluster)
    only = None if layout is None else layout.strategy
    noticed = _what_others_notice(problem, calls, homes)
    of_shape: dict[tuple[int, int], list[_Choice]] = {}
    candidates = []
    for mesh in meshes:
        shape = (len(mesh), ranks_per_host(problem.cluster, mesh))
        if shape not in of_shape:
            of_shape[shape] = _choices(problem, rates, calls, shape, only=only, noticed=noticed)
        for strategy, variants in of_shape[shape]:
            candidates.append(Candidate(ContiguousLayout(strategy, mesh.start), variants))
    return candidates


def _choices(
    problem: Problem, rates: Rates, calls: Sequence[FunctionCall], shape: tuple[int, int],
    *, only: ParallelStrategy | None, noticed: Callable[[_Choice], Hashable],
) -> list[_Choice]:  # fmt: skip
    """Return the choices of a group on a mesh of `size` ranks, `in_host` of them on each host (the shape).

    Of choices for which `noticed` returns the same, those are left out that another one equals or beats in
    the seconds and the memory of every call.
    """
    size, in_host = shape
    of_calls = [find_variants(problem, rates, call, size=size, in_host=in_host, only=only) for call in calls]
    choices = [
        _Choice(strategy, variants)
        for strategy in of_calls[0]
        for variants in itertools.product(*(of_call.get(strategy, ()) for of_call in of_calls))
    ]
    splits_host_calls = any(is_split for _, is_split in _host_calls_of(problem, calls))

    def costs(choice: _Choice) -> tuple[float, ...]:
        of_each = ((v.cost.seconds, v.home_bytes, v.copy_bytes, v.call_bytes) for v in choice.variants)
        return (*itertools.chain(*of_each), -choice.strategy.dp if splits_host_calls else 0)

    return undominated(choices, costs=costs, alike=noticed)


def _host_calls_of(problem: Problem, calls: Sequence[FunctionCall]) -> list[tuple[str, bool]]:
    """Return the plain Python calls that run on the ranks with the results of these calls, and whether each
    is split over them."""
    names = {call.name for call in calls}
    anchors = ((call.name, *host_anchor(problem, call)) for call in problem.calls if call.role is None)
    return [(name, is_split) for name, anchor, is_split in anchors if anchor in names]


def _what_others_notice(
    problem: Problem, calls: Sequence[FunctionCall], homes: Sequence[str]
) -> Callable[[_Choice], Hashable]:
    """Return a function that tells what the rest of a plan notices of a choice on a mesh, besides its costs.

    That is the shard on each rank if the weights move or another role or copy may share their memory; the
    last stage, where plain Python calls run; and the layout itself of a copy if the role has another one,
    since copies share their memory only if they have the same layout.
    """
    graph = problem.graph
    trained = {call.role for call in problem.calls if call.kind == "train_step"}
    roles = {call.role: problem.model_role(call) for call in calls if call.role is not None}
    sources = [role.source for role in problem.roles.values() if role.source is not None]
    num_calls = {name: len(graph.of_role(name)) for name in roles}
    has_other_copies = any(num > 2 for name, num in num_calls.items() if name not in homes)
    has_shared_shards = any(
        name in trained or role.follows in trained or num_calls[name] > 1 or sources.count(role.source) > 1
        for name, role in roles.items()
    )
    has_host_calls = bool(_host_calls_of(problem, calls))

    def noticed(choice: _Choice) -> Hashable:
        s = choice.strategy
        if has_other_copies:
            return s
        if has_shared_shards:
            return (s.pp, s.tp, s.ep, s.cp if s.ep > 1 else 1)
        return s.pp if has_host_calls else None

    return noticed


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
