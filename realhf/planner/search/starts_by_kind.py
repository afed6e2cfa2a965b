"""Plans on hosts of one kind alone, from which the search on several kinds begins."""

from collections.abc import Callable
from dataclasses import replace

from realhf.layout import DeviceMesh, Layout
from realhf.planner.search.search_space import SearchSpace
from realhf.planner.search.tree_search import search
from realhf.planner.workload.problem import Problem


def starts_by_kind(
    space: SearchSpace, *, time_limit: float, gap: float, max_iterations: int | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> list[list[int]]:  # fmt: skip
    """Return a plan on each kind of hosts that has one, found in an equal share of the time; none if there
    is one kind. Each search has the other limits to itself (see `search`)."""
    kinds = space.problem.cluster.ranks_by_kind
    if len(kinds) == 1:
        return []
    starts = []
    for ranks, _ in kinds:
        if (problem := _alone(space.problem, ranks)) is None:
            continue
        alone = SearchSpace(problem, space.rates.at(ranks))
        if not all(group.candidates for group in alone.groups):
            continue
        found = search(
            alone, time_limit=time_limit / len(kinds), gap=gap, max_iterations=max_iterations,
            should_stop=should_stop)
        if found is not None:
            starts.append(_located(space, alone, found.chosen, ranks.start))
    return starts


def _alone(problem: Problem, ranks: range) -> Problem | None:
    """Return the problem on the hosts with these ranks only, None if a call is pinned to other hosts."""
    if any(rank not in ranks for layout in problem.pins.values() for rank in layout.ranks):
        return None
    index = problem.cluster.kind_index(ranks)
    assert index is not None
    pins = {
        name: Layout(layout.strategy, DeviceMesh(tuple(rank - ranks.start for rank in layout.ranks)))
        for name, layout in problem.pins.items()}
    return replace(problem, cluster=problem.cluster.kinds[index], pins=pins)


def _located(space: SearchSpace, alone: SearchSpace, chosen: tuple[int, ...], first_rank: int) -> list[int]:
    """Return a plan for hosts of one kind as candidates of the whole space, in which their first rank is
    `first_rank`."""
    located = []
    for whole, group, index in zip(space.groups, alone.groups, chosen, strict=True):
        layout, variants = group.candidates[index]
        layout = layout._replace(first_rank=layout.first_rank + first_rank)
        plans = [variant.call_plan for variant in variants]
        located.append(next(
            i for i, other in enumerate(whole.candidates)
            if other.layout == layout and [variant.call_plan for variant in other.variants] == plans))
    return located
