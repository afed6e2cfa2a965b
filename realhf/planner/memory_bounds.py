"""Memory of many plans at once, on arrays: bounds for the search, and exact figures where they decide.

The bounds never exceed what the memory account counts for any completion of an unfinished plan, so that the
search drops no plan that the check accepts. They look at the first rank of every mesh. A layout's least need
there is known by the part of its ranks, and exactly where a part begins (candidates.py). A copy of
weights that may share the memory of another one counts nothing, and of communicators only those that a layout
has for itself.

Shapes: K plans, U call groups, as in search_space.py.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from realhf.execution_plan import CallPlan, ExecutionPlan
from realhf.planner.call_group import OPEN, CallGroup
from realhf.planner.candidates import PARTS, PLACES, part_size
from realhf.planner.communicator_memory import use_of
from realhf.planner.memory_account import MemoryAccount


class _Layouts(NamedTuple):
    """A number for the layout of each choice of a group, and one that is equal where shards may be equal.

    Both are -1 for choices that are not candidates.
    """

    layout: np.ndarray
    kind: np.ndarray


class RankBytes(NamedTuple):
    """The memory of plans on the first rank of each mesh of the `groups` that are not open in all plans.

    Arrays are (ranks, groups, plans), or (ranks, plans): whether and at which place a group's mesh has the
    rank, the bytes that rest there, with those that the device lacks, and those that the group's calls add.
    """

    groups: list[int]
    covers: np.ndarray
    place: np.ndarray
    resting: np.ndarray
    running: np.ndarray

    def of(self, plans: np.ndarray) -> "RankBytes":
        """Return those of some of the plans."""
        return RankBytes(self.groups, *(array[..., plans] for array in self[1:]))


class MemoryBounds:
    """The memory of the plans of a search space."""

    def __init__(self, account: MemoryAccount, groups: Sequence[CallGroup], names: Sequence[str]) -> None:
        """Set up the bounds; `names` has the name of every call, by the positions that the groups have."""
        self.account = account
        self._groups = groups
        self._names = names
        self._capacity = float(account.available.max())  # Of the largest device.
        self._smaller = self._capacity - account.available
        self._part_bits = np.array([part_size(n).bit_length() - 1 for n in range(account.num_ranks + 1)])
        self._home_of = {role: u for u, group in enumerate(groups) for role in group.homes}
        self.layouts = _number_layouts(groups)
        self._known: dict[tuple[int, ...], float] = {}

    def excess(
        self, choices: np.ndarray, *, exact: bool = True, of_ranks: RankBytes | None = None
    ) -> np.ndarray:
        """Return the bytes that the fullest rank of each plan lacks; at most 0 if the plan fits.

        A complete plan that fits by the bounds is counted exactly, as the check does it. All other results
        are lower bounds, and without `exact` those of all plans. `of_ranks` are the plans' `rank_bytes`.
        """
        self.account.deadline.check()
        excess = self._fullest(self.rank_bytes(choices) if of_ranks is None else of_ranks) - self._capacity
        if exact:
            is_complete = np.ones(len(choices), bool)
            for group, choice in zip(self._groups, choices.T, strict=True):
                is_complete &= group.is_candidate(choice)
            for k in np.flatnonzero((excess <= 0) & is_complete):
                excess[k] = self.counted_excess(tuple(choices[k].tolist()))
        return excess

    def counted_excess(self, chosen: tuple[int, ...]) -> float:
        """Return the bytes that a plan with one row in generations lacks on its fullest rank or host, as the
        check counts them."""
        if chosen not in self._known:
            self._known[chosen] = self.account.excess(self.least_plan(chosen))
        return self._known[chosen]

    def least_plan(self, chosen: Sequence[int]) -> ExecutionPlan:
        """Return the calls on models of a plan, with one row in generations."""
        plans = dict[str, CallPlan]()
        for group, index in zip(self._groups, chosen, strict=True):
            of_group = zip(group.calls, group.call_plans(index), strict=True)
            plans |= {self._names[i]: plan for i, plan in of_group}
        return ExecutionPlan(plans)

    @cached_property
    def _open_groups(self) -> list[CallGroup]:
        return [group.with_open_choices(u) for u, group in enumerate(self._groups)]

    @cached_property
    def _heads(self) -> list[int]:
        """The number of key-value heads of each group's roles; where they differ, a negative number of its
        own."""
        roles = self.account.problem.roles
        of_groups = [
            {use_of(roles[role], trains=False).num_kv_heads for role in (*group.homes, *group.copies)}
            for group in self._groups]
        return [heads.pop() if len(heads) == 1 else -u for u, heads in enumerate(of_groups, start=1)]

    def _fullest(self, parts: RankBytes) -> np.ndarray:
        """Return a lower bound of the bytes on the fullest rank of each plan, if all devices were as large as
        the largest and the difference were in use."""
        need = parts.resting + parts.running.max(axis=1, initial=0.0)
        fullest: np.ndarray = need.max(axis=0, initial=0.0)
        return fullest

    def raise_to_rows(self, seconds: np.ndarray, choices: np.ndarray, of_ranks: RankBytes) -> None:
        """Raise the `seconds` of calls, (plans, calls), to those of the most rows of generations for which
        there may be memory, given the plans' `rank_bytes`."""
        room = self._capacity - of_ranks.resting
        for at, u in enumerate(of_ranks.groups):
            for table in self._groups[u].row_tables:
                ranks, plans = np.nonzero(of_ranks.covers[:, at])
                least = table.least_seconds(
                    choices[plans, u], of_ranks.place[ranks, at, plans], room[ranks, plans])
                np.maximum.at(seconds[:, self._groups[u].calls[table.column]], plans, least)

    def rank_bytes(self, choices: np.ndarray) -> RankBytes:
        """Return what is known of the memory of plans.

        Below, U is the number of the groups that are not open in all plans. `place` is the place of the first
        rank of each mesh in each group's mesh, or 0 outside it. `place`, `resting` and `running` have the
        shape (U, U, K), of which the first axis is that of the ranks.
        """
        columns = list(zip(self._open_groups, choices.T, strict=True))
        first = np.stack([group.first[choice] for group, choice in columns])
        stop = np.stack([group.stop[choice] for group, choice in columns])
        groups = np.flatnonzero((choices != OPEN).any(axis=0)).tolist()
        low = first[groups]
        high = stop[groups]
        smaller = np.where(low >= 0, self._smaller[np.maximum(low, 0)], 0.0)
        rank = low[:, None]
        covers = (low <= rank) & (rank < high)
        for later in range(1, len(groups)):  # Meshes that begin at the same rank need it once.
            covers[later] &= (low[:later] != low[later]).all(axis=0)
        offset = rank - low
        part = offset >> self._part_bits[high - low]
        begins_part = part << self._part_bits[high - low] == offset
        place = np.where(covers, part + PARTS * begins_part, 0)
        resting, running = (np.empty(place.shape) for _ in range(2))
        moves = np.stack([group.is_sharded[choice] for group, choice in columns])
        for at, u in enumerate(groups):
            group, choice = columns[u]
            index = choice * PLACES + place[:, at]
            resting[:, at] = group.least_resting.ravel()[index]
            running[:, at] = group.least_running.ravel()[index]
            for role, least in zip(group.copies, group.least_copied, strict=True):
                is_apart = self._is_apart(u, role, choices, first, stop)
                resting[:, at] += least.ravel()[index] * is_apart
                moves[self._home_of[role]] |= is_apart
        if self.account.problem.cluster.device_type == "cuda" and groups:
            resting += self._communicators(groups, choices, first, stop, moves)
        resting *= covers
        running *= covers
        return RankBytes(groups, covers, place, resting.sum(axis=1) + smaller, running)

    def _communicators(
        self, groups: list[int], choices: np.ndarray, first: np.ndarray, stop: np.ndarray, moves: np.ndarray
    ) -> np.ndarray:
        """Return the least bytes of these groups' communicators without those that earlier ones have.

        `moves` says whether weights certainly move from the home in a group.
        """
        layouts = [self.layouts[u].layout[choices[:, u]] for u in groups]
        by_kind = np.stack([[a[choices[:, u]] for a in self._open_groups[u].communicators] for u in groups])
        in_layout = by_kind[:, :2]  # Of layouts, and of training in them.
        added_in_layout = in_layout.copy()
        added_moving = by_kind[:, 2] * moves[groups]  # Of reallocations.
        first = first[groups]
        stop = stop[groups]
        heads = [self._heads[u] for u in groups]
        for u in range(len(layouts)):
            for v in range(u):
                are_disjoint = (stop[u] <= first[v]) | (stop[v] <= first[u])
                added_moving[u] *= are_disjoint | (added_moving[v] == 0)
                may_equal = (first[u] == first[v]) & (stop[u] == stop[v])
                may_equal &= (layouts[u] == layouts[v]) | (layouts[u] < 0) | (layouts[v] < 0)
                # Two equal layouts count as the larger of their bounds, if one has all groups of the other.
                held = in_layout[v] if heads[u] == heads[v] else np.inf
                more = in_layout[u] - np.where(may_equal, held, 0.0)
                np.minimum(added_in_layout[u], np.maximum(0.0, more), out=added_in_layout[u])
        return added_in_layout.sum(axis=1) + added_moving

    def _is_apart(
        self, group: int, role: str, choices: np.ndarray, first: np.ndarray, stop: np.ndarray
    ) -> np.ndarray:
        """Return in which plans a group's copy certainly shares no rank's memory.

        It may share that of the role's home, or of an earlier group's copy in the same layout.
        """
        home = self._home_of[role]
        mine = self.layouts[group]
        choice = choices[:, group]
        at_home = self.layouts[home].kind[choices[:, home]]
        are_disjoint = (stop[group] <= first[home]) | (stop[home] <= first[group])
        are_unlike = (mine.kind[choice] != at_home) & (mine.kind[choice] >= 0) & (at_home >= 0)
        is_apart = are_disjoint | are_unlike
        is_apart &= (choice != OPEN) & (choices[:, home] != OPEN)
        for v, other in enumerate(self._groups[:group]):
            if role in other.copies:
                layout = self.layouts[v].layout[choices[:, v]]
                is_other = (mine.layout[choice] != layout) & (mine.layout[choice] >= 0) & (layout >= 0)
                is_other |= (first[v] != first[group]) | (stop[v] != stop[group])
                is_apart &= is_other & (choices[:, v] != OPEN)
        return is_apart


def _number_layouts(groups: Sequence[CallGroup]) -> list[_Layouts]:
    layouts: dict[object, int] = {}
    kinds: dict[object, int] = {}
    numbered = []
    for group in groups:
        undecided = [-1] * (len(group.by_mesh) + 1)
        strategies = [candidate.layout.strategy for candidate in group.candidates]
        kind = [kinds.setdefault((s.pp, s.tp, s.ep, s.vp), len(kinds)) for s in strategies]
        layout = [layouts.setdefault(candidate.layout, len(layouts)) for candidate in group.candidates]
        numbered.append(_Layouts(np.array(layout + undecided), np.array(kind + undecided)))
    return numbered
