"""Search for the plan with the shortest step among those enumerated, and a lower bound over them.

Local search finds a good plan. Branch and bound then raises the lower bound or finds a better plan: it
decides a mesh for every call group, those with the most work first, and a candidate on each mesh. Three trees
take turns, which differ in the order of these decisions; all bounds hold, so the highest counts. The search
is anytime: the least bound among the plans that are not explored yet holds for every plan.

The bound of an unfinished plan assumes that calls whose choice is open take their least time on devices of
their own, that the step is no shorter than the sum of all device seconds over the number of devices, and that
calls between two others need their share of all devices there. That last bound is this: if some calls read
what call a makes, and call b reads what they make, they all run between the end of a and the start of b. All
devices together need their device seconds for that, so b starts at least these over the number of devices
after a has ended. If the next a waits for b, as generation waits for new weights, then the step takes at
least as long as a, these calls and b.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import networkx as nx
import numpy as np

from realhf.planner.call_group import OPEN, CallGroup
from realhf.planner.deadline import OutOfTime
from realhf.planner.links import ContiguousLayout
from realhf.planner.search_space import SearchSpace
from realhf.planner.step_time import Dependencies

_CHILDREN = 12_000  # The number of plans to evaluate at once.
_TURNS = (0, 2, 1, 2)  # The trees that take turns: 0 has the lowest bound, 2 the highest of three.
_BEAM = 24  # The width of a beam search.
_BEAM_CHECKS = 32  # The complete plans whose exact memory a beam search counts.
_NEW_MOVES = 3  # The most reallocations of unfinished plans that an expansion prices.
_MOST_NODES = 1_000_000  # Above this, the least promising plans are dropped and their bound is kept.
ReportProgress = Callable[[float, float, float], None]
"""Called with the best step seconds, the lower bound and the seconds spent."""
_LARGE = 0.1  # The share of all device seconds from which a call group is decided first.
_EXACT = 24  # The number of promising changes that local search evaluates with reallocations.
_EXACT_AT_ONCE = 6  # Those of them that are evaluated together.
_STARTS = 3  # The number of plans with a common layout that are improved,
_MOST_CHECKED = 512  # and the most whose memory is counted exactly to find them.
_PENALTY = 1e6  # Seconds that rank all plans that do not fit after those that do.
SAME = 1e-9  # Relative difference below which two times are equal.


def gap_of(step_seconds: float, lower_bound_seconds: float) -> float:
    """Return the share of a step by which the best plan may be shorter; 1: there is no bound."""
    return (step_seconds - lower_bound_seconds) / step_seconds


@dataclass(frozen=True)
class SearchResult:
    """The best plan found (one candidate per call group) and the lower bound over the plans enumerated."""

    chosen: tuple[int, ...]
    step_seconds: float
    lower_bound_seconds: float
    num_expanded: int

    @property
    def gap(self) -> float:
        return gap_of(self.step_seconds, self.lower_bound_seconds)


@dataclass(frozen=True)
class NoPlan:
    """A search that has found no plan that fits, which counts as False.

    `is_proved` says whether none of those enumerated fits; otherwise the search ended before that was known.
    """

    is_proved: bool
    seconds: float

    def __bool__(self) -> bool:
        return False


def search(
    space: SearchSpace, *, time_limit: float, gap: float = 0.0, starts: Sequence[Sequence[int]] = (),
    max_iterations: int | None = None, progress: ReportProgress | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> SearchResult | NoPlan:
    """Return the best plan found within `time_limit` seconds, or sooner when its gap is at most `gap`, or
    when there is a plan and `should_stop` returns True.

    The gap is the distance to the lower bound over the plans enumerated, which are those of the space; it
    says nothing about others. The result is the same every time unless `time_limit`, the space's deadline or
    `should_stop` ends the search.
    """
    spent = space.deadline.part(np.inf)
    local = LocalSearch(space)
    trees: list[_Tree] = []
    with space.deadline.sooner(time_limit), suppress(OutOfTime):
        for start in starts:
            local.improve(np.array(start))
        local.start_from_common_layouts()
        for start in local.starts():
            if local.best_score == np.inf:
                local.improve(np.array(start))
        for decisions in _orders(space):
            trees.append(_Tree(space, local, decisions))
        _search_trees(
            space, trees, local, gap=gap, max_iterations=max_iterations, progress=progress,
            should_stop=should_stop)
        if local.best is not None:
            local.polish()
    if local.best is None:
        return NoPlan(any(tree.bound == np.inf for tree in trees), spent.spent)
    bound = max((tree.bound for tree in trees), default=0.0)
    chosen = tuple(local.best.tolist())
    return SearchResult(chosen, local.best_score, bound, sum(t.num_expanded for t in trees))


def _search_trees(
    space: SearchSpace, trees: Sequence["_Tree"], local: "LocalSearch", *, gap: float,
    max_iterations: int | None, progress: ReportProgress | None, should_stop: Callable[[], bool] | None,
) -> None:
    """Let the trees take turns until one is finished, or another limit ends the search."""
    clock = space.deadline.part(np.inf)
    num_iterations = 0
    while not any(tree.is_finished(gap) for tree in trees):
        space.deadline.check()
        if progress is not None:
            progress(local.best_score, max(tree.bound for tree in trees), clock.spent)
        if max_iterations is not None and num_iterations >= max_iterations:
            return
        if should_stop is not None and local.best is not None and should_stop():
            return
        by_bound = sorted(trees, key=lambda tree: tree.bound)
        tree = by_bound[min(_TURNS[num_iterations % len(_TURNS)], len(trees) - 1)]
        tree.expand()
        tree.search_beam()
        num_iterations += 1


# Local search


def least_device_seconds(space: SearchSpace) -> np.ndarray:
    return np.array([group.device_seconds.min() for group in space.groups])


def large_groups(space: SearchSpace) -> list[int]:
    """Return the indices of the groups with a large share of all device seconds, the largest first."""
    least = least_device_seconds(space)
    order = np.argsort(-least, kind="stable").tolist()
    return [index for index in order if least[index] >= _LARGE * least.sum()]


def leanest(space: SearchSpace) -> np.ndarray:
    """Return the plan that exceeds the devices' memory least, as far as local search finds it."""
    local = LocalSearch(space)
    scored = [local.improve(np.array(start)) for start in local.starts()]
    return min(scored, key=lambda plan_and_score: plan_and_score[1])[0]


class LocalSearch:
    """Improves plans by changing the candidate of one call group at a time, as long as that helps.

    `allowed` has for each group the candidates among which local search chooses.
    """

    def __init__(self, space: SearchSpace, allowed: Sequence[np.ndarray] | None = None) -> None:
        """Set up the search; without `allowed`, it chooses among a few candidates of each mesh."""
        self._space = space
        self._groups = space.groups
        self.best: np.ndarray | None = None
        self.best_score = np.inf
        self._refined_score = np.inf
        self._allowed = allowed or [group.few_per_mesh() for group in space.groups]

    def starts(self) -> list[list[int]]:
        """Return three plans to start from: the fastest candidates, the smallest ones, and those with the
        least device seconds."""
        fastest = [0] * len(self._groups)
        by_memory = [np.lexsort((g.seconds.sum(axis=1), g.resting + g.running)) for g in self._groups]
        leanest = [int(order[0]) for order in by_memory]
        frugal = [int(np.argmin(group.device_seconds)) for group in self._groups]
        return [fastest, leanest, frugal]

    def start_from_common_layouts(self) -> None:
        """Improve plans in which all groups share a layout, except that one large group may have another.

        They are tried in the order of the seconds that they take if memory is no limit. In those that fit,
        each group has the leanest options of the common layout.
        """
        layouts = [_by_layout(group) for group in self._groups]
        common = [layout for layout in layouts[0] if all(layout in others for others in layouts)]
        if not common:
            return
        fastest, lean = (np.array([[options[layout][i] for options in layouts] for layout in common])
                         for i in (0, 1))
        plans = []
        seconds = []
        for index in large_groups(self._space):
            open_plans = fastest.copy()
            open_plans[:, index] = OPEN
            may_help = self._space.quick_periods(open_plans) < self.best_score
            for fast, slow in zip(fastest[may_help], lean[may_help], strict=True):
                candidates = np.append(self._allowed[index], fast[index])
                left = self._work_left(fast, self.best_score, [index])
                candidates = candidates[self._work(index, candidates) < left]
                seconds.append(self._space.periods(_changed(fast, index, candidates), exact=False))
                plans.append(_changed(slow, index, candidates))
        if plans:
            self._start_from(np.concatenate(plans), np.concatenate(seconds))

    def _start_from(self, plans: np.ndarray, seconds: np.ndarray) -> None:
        """Improve the first few plans that fit, in the order of these lower bounds."""
        order = np.argsort(seconds, kind="stable")
        order = order[: np.searchsorted(seconds[order], self.best_score)]
        order = order[self._space.memory.excess(plans[order], exact=False) <= 0][:_MOST_CHECKED]
        num_improved = 0
        for row in order.tolist():
            if num_improved == _STARTS or seconds[row] >= self.best_score:
                break
            if self._space.memory.excess(plans[[row]])[0] <= 0:
                self.improve(plans[row])
                num_improved += 1

    def offer(self, chosen: np.ndarray, score: float) -> None:
        """Keep a plan that fits if it is the best so far."""
        if score < self.best_score * (1 - SAME):
            self.best = chosen.copy()
            self.best_score = score

    def improve(
        self, chosen: np.ndarray, allowed: Sequence[np.ndarray] | None = None
    ) -> tuple[np.ndarray, float]:
        """Return the plan in which local search from this one ends, and its score."""
        allowed = self._allowed if allowed is None else allowed
        score = self._exact(chosen[None])[0]
        before = np.inf
        try:
            while score < before * (1 - SAME):
                before = score
                for index, candidates in enumerate(allowed):
                    chosen, score = self._best_of(chosen, score, index, candidates)
        except OutOfTime:
            if score < _PENALTY:
                self.offer(chosen, score)
            raise
        if score < np.inf and self._space.memory.excess(chosen[None])[0] <= 0:
            self.offer(chosen, score)
        return chosen, score

    def _best_of(
        self, chosen: np.ndarray, score: float, index: int, candidates: np.ndarray
    ) -> tuple[np.ndarray, float]:
        """Return the best plan in which the group with this index has one of these candidates, or `chosen`
        if none is better."""
        candidates = candidates[self._work(index, candidates) < self._work_left(chosen, score, [index])]
        plans = _changed(chosen, index, candidates)
        rough = self._rough(plans, below=score)
        promising = np.argsort(rough, kind="stable")[:_EXACT]
        for start in range(0, len(promising), _EXACT_AT_ONCE):
            rows = promising[start : start + _EXACT_AT_ONCE]
            rows = rows[rough[rows] < score * (1 - SAME)]
            if not len(rows):
                break
            better = self._best_exact(plans[rows], below=score * (1 - SAME))
            if better is not None:
                chosen = plans[rows[better[0]]]
                score = better[1]
        return chosen, score

    def _best_exact(self, plans: np.ndarray, *, below: float) -> tuple[int, float] | None:
        """Return the row of the best plan and its score; None if that is not below the given one.

        The memory of plans is counted in the order of their seconds, if only one that fits can be better.
        """
        if below >= _PENALTY:
            scores = self._exact(plans)
            best = int(np.argmin(scores))
            return (best, scores[best]) if scores[best] < below else None
        return best_fitting(self._space, plans, self._space.bounds(plans), below=below)

    def refine(self) -> None:
        """Improve the best plan with all candidates to choose from, unless that has been done."""
        if self.best is None or self.best_score >= self._refined_score:
            return
        everything = [np.arange(len(group.candidates)) for group in self._groups]
        self.improve(self.best, everything)
        self._refined_score = self.best_score

    def _work(self, index: int, candidates: np.ndarray) -> np.ndarray:
        """Return the device seconds of candidates of the group with this index."""
        work: np.ndarray = self._groups[index].device_seconds[candidates]
        return work

    def _work_left(self, chosen: np.ndarray, seconds: float, changing: Sequence[int]) -> float:
        """Return the device seconds that the changing groups may take in a step that is no longer."""
        others = [index for index in range(len(chosen)) if index not in changing]
        taken = sum(float(self._work(index, chosen[index])) for index in others)
        return seconds * self._space.problem.cluster.num_devices - taken

    def polish(self) -> None:
        """Improve the best plan once more with all candidates to choose from.

        Every group then takes the candidate with the least device seconds that keeps the step as short.
        """
        self.refine()
        for index, group in enumerate(self._groups):
            assert self.best is not None
            best = self.best
            plans = _changed(best, index, np.arange(len(group.candidates)))
            longest = self.best_score * (1 + SAME)
            as_short = self._rough(plans, below=longest) <= longest
            leaner = np.flatnonzero(as_short & (group.device_seconds < group.device_seconds[best[index]]))
            leaner = leaner[np.argsort(group.device_seconds[leaner], kind="stable")][:_EXACT]
            good = leaner[self._exact(plans[leaner]) <= self.best_score * (1 + SAME)]
            self.best = plans[good[0]] if len(good) else best

    def _rough(self, plans: np.ndarray, *, below: float) -> np.ndarray:
        """Return scores that leave out reallocations and long cycles, and so never exceed the exact ones.

        Those above `below` leave out memory, too.
        """
        scores = self._space.periods(plans, exact=False)
        rows = np.flatnonzero(scores <= below)
        if len(rows):
            of_ranks = self._space.memory.rank_bytes(plans[rows])
            scores[rows] = self._space.periods(plans[rows], exact=False, of_ranks=of_ranks)
            is_left = scores[rows] <= below
            rows = rows[is_left]
            excess = self._space.memory.excess(plans[rows], exact=False, of_ranks=of_ranks.of(is_left))
            scores[rows] = self._penalized(scores[rows], excess)
        return scores

    def _exact(self, plans: np.ndarray) -> np.ndarray:
        return self._penalized(self._space.exact_periods(plans), self._space.memory.excess(plans))

    def _penalized(self, seconds: np.ndarray, excess: np.ndarray) -> np.ndarray:
        """Return step times, with a penalty that ranks all plans that fit above all that do not."""
        excess = np.maximum(0.0, excess) / self._space.capacity
        return seconds + np.where(excess > 0, _PENALTY * (1 + excess), 0.0)


def best_fitting(
    space: SearchSpace, plans: np.ndarray, bounds: np.ndarray, *, below: float, most_plans: int | None = None
) -> tuple[int, float] | None:
    """Return the row of the best plan that fits, and its seconds per step; None if none is below the limit.

    `bounds` are lower bounds of their seconds. Memory is counted in their order, for `most_plans` at most.
    """
    best = None
    for row in np.argsort(bounds, kind="stable")[:most_plans].tolist():
        if bounds[row] >= below:
            break
        if space.memory.excess(plans[[row]])[0] <= 0:
            seconds = float(space.exact_periods(plans[[row]])[0])
            if seconds < below:
                best = (row, seconds)
                below = seconds
    return best


def _by_layout(group: CallGroup) -> dict[ContiguousLayout, tuple[int, int]]:
    """Return each layout of a group with its fastest candidate and the one that needs least memory."""
    memory = group.resting + group.running + sum(group.copied, start=np.zeros(1))
    found: dict[ContiguousLayout, tuple[int, int]] = {}
    for i, candidate in enumerate(group.candidates):
        fastest, leanest = found.get(candidate.layout, (i, i))
        found[candidate.layout] = (fastest, i if memory[i] < memory[leanest] else leanest)
    return found


def _changed(plans: np.ndarray, index: int, candidates: np.ndarray) -> np.ndarray:
    """Return plans, or copies of one plan, each with one of these candidates of the group with this
    index."""
    plans = np.broadcast_to(plans, (len(candidates), plans.shape[-1])).copy()
    plans[:, index] = candidates
    return plans


# Trees of unfinished plans


class _Decision(NamedTuple):
    """The next decision of a tree: about a group's mesh, or about its candidate on that mesh."""

    group_index: int
    is_candidate: bool


def _orders(space: SearchSpace) -> list[list[_Decision]]:
    """Return up to three orders of decisions, all with the groups with the most work first.

    The first decides all meshes and then all candidates, which soon shows how calls share the devices. The
    others decide large groups wholly before the rest, which soon shows how much memory is left; one of them
    then decides those that need memory between their calls before those that do not.
    """
    order = np.argsort(-least_device_seconds(space), kind="stable").tolist()
    large = large_groups(space)
    small = [index for index in order if index not in large]
    resting = [index for index in small if _always_rests(space.groups[index])]
    others = [index for index in small if index not in resting]
    orders = (_decisions([order]), _decisions([large, resting, others]), _decisions([large, small]))
    return [decisions for i, decisions in enumerate(orders) if decisions not in orders[:i]]


def _always_rests(group: CallGroup) -> bool:
    """Return whether a group needs memory between its calls, whichever candidate it has."""
    return bool((group.resting + sum(group.copied)).min() > 0)


def _decisions(parts: Sequence[Sequence[int]]) -> list[_Decision]:
    """Return the decisions about groups, part by part: first the meshes of a part, then its candidates."""
    return [
        _Decision(index, is_candidate)
        for part in parts for is_candidate in (False, True) for index in part]


class _Tree:
    """The unfinished plans of branch and bound: for each group a candidate, a mesh or OPEN."""

    def __init__(self, space: SearchSpace, local: LocalSearch, decisions: Sequence[_Decision]) -> None:
        """Set up a tree in which plans are decided in this order.

        Reallocations of unfinished plans are all priced only if all meshes are decided before any candidate:
        otherwise too many pairs of layouts come up, of which those of the most promising plans are priced.
        """
        self._meshes_first = not any(d.is_candidate for d in decisions[: len(decisions) // 2])
        self._space = space
        self._local = local
        self._groups = space.open_groups
        num_devices = space.problem.cluster.num_devices
        self._work = [  # Seconds of every choice, if its work were spread over all devices.
            np.append(group.device_seconds[:-1], least)[:, None] / num_devices
            for group, least in zip(self._groups, least_device_seconds(space), strict=True)]
        self._between = tables_between(find_calls_between(space.needs), space.groups, num_devices)
        self._decisions = decisions
        self._leaf_depth = len(decisions)
        self._choices = np.full((1, len(self._groups)), OPEN)
        self._bounds = self._bound(self._choices, np.zeros(1))
        self._least_dropped = np.inf
        self.num_expanded = 0

    @property
    def bound(self) -> float:
        """Lower bound of the seconds per step over all plans of the space.

        Plans that are shorter than the best one by a share of `SAME` may have been discarded.
        """
        return min(float(self._bounds.min(initial=np.inf)), self._least_dropped, self._goal)

    def is_finished(self, gap: float) -> bool:
        goal = self._local.best_score * (1 - max(gap, SAME))
        return not len(self._choices) or self.bound >= goal

    def expand(self) -> None:
        """Replace the most promising plans, all at one depth, with their children."""
        depths = self._depths
        depth = int(depths[self._most_promising(depths)])
        level = np.flatnonzero(depths == depth)
        taken = level[np.argsort(self._bounds[level], kind="stable")[: self._width(depth)]]
        children, bounds = self._children(self._choices[taken], self._bounds[taken], depth)
        self._keep(np.setdiff1d(np.arange(len(depths)), taken))
        self.num_expanded += len(taken)
        if depth + 1 == self._leaf_depth:
            self._offer(children, bounds)
        else:
            self._choices = np.concatenate([self._choices, children])
            self._bounds = np.concatenate([self._bounds, bounds])
        self._keep(self._bounds < self._goal)
        if len(self._choices) > _MOST_NODES:
            order = np.argsort(self._bounds, kind="stable")
            self._least_dropped = min(self._least_dropped, self._bounds[order[_MOST_NODES // 2]])
            self._keep(order[: _MOST_NODES // 2])

    def _width(self, depth: int) -> int:
        """Return the number of plans to expand at once, so that their children stay below `_CHILDREN`."""
        decision = self._decisions[depth]
        group = self._groups[decision.group_index]
        num_meshes = len(group.by_mesh)
        num_children = len(group.candidates) / num_meshes if decision.is_candidate else num_meshes
        return max(1, int(_CHILDREN / num_children))

    def search_beam(self) -> None:
        """Complete the most promising plans by a beam search, and improve the outcome by local search."""
        if not len(self._choices):
            return
        depths = self._depths
        first_depth = int(depths[self._most_promising(depths)])
        rows = np.flatnonzero(depths == first_depth)
        rows = rows[np.argsort(self._bounds[rows], kind="stable")[:_BEAM]]
        choices, bounds = self._choices[rows], self._bounds[rows]
        for depth in range(first_depth, self._leaf_depth):
            if not len(choices):
                return
            choices, bounds = self._children(choices, bounds, depth, most_plans=_BEAM_CHECKS)
            rows = np.argsort(bounds, kind="stable")[:_BEAM]
            choices, bounds = choices[rows], bounds[rows]
        self._offer(choices, bounds)
        if len(choices):
            self._local.improve(choices[0])
        self._local.refine()

    def _offer(self, plans: np.ndarray, seconds: np.ndarray) -> None:
        for i in np.argsort(seconds, kind="stable"):
            self._local.offer(plans[i], seconds[i])

    @property
    def _depths(self) -> np.ndarray:
        """Number of decisions that have been made in each plan."""
        return (self._choices != OPEN).sum(axis=1) + self._space.is_decided(self._choices).sum(axis=1)

    def _most_promising(self, depths: np.ndarray) -> int:
        return int(np.lexsort((-depths, self._bounds))[0])

    @property
    def _goal(self) -> float:
        return self._local.best_score * (1 - SAME)

    def _keep(self, rows: np.ndarray) -> None:
        self._choices, self._bounds = self._choices[rows], self._bounds[rows]

    def _children(
        self, choices: np.ndarray, bounds: np.ndarray, depth: int, *, most_plans: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return every plan with every mesh, or every candidate on its mesh, for the group of this
        decision, if it may still become the best.

        If this completes the plans, return only the best one that fits, among the first `most_plans`.
        """
        index, decides_candidate = self._decisions[depth]
        group = self._groups[index]
        if decides_candidate:
            next_choices = [group.by_mesh[mesh] for mesh in group.mesh_index(choices[:, index])]
        else:
            next_choices = [group.mesh_choices] * len(choices)
        counts = [len(of_plan) for of_plan in next_choices]
        children = np.repeat(choices, counts, axis=0)
        children[:, index] = np.concatenate(next_choices)
        bounds = self._bound(children, np.repeat(bounds, counts))
        alive = bounds < self._goal
        children, bounds = children[alive], bounds[alive]
        is_complete = depth + 1 == self._leaf_depth
        if len(children) and (is_complete or decides_candidate):
            order = np.argsort(bounds, kind="stable")
            children, bounds = children[order], bounds[order]
            in_beam = most_plans is not None
            most_new = np.inf if is_complete or self._meshes_first else 0 if in_beam else _NEW_MOVES
            moving = self._space.moving(children, most_new=most_new)
            of_ranks = self._space.memory.rank_bytes(children) if is_complete else None
            bounds = np.maximum(bounds, self._space.periods(
                children, moving=moving, exact=is_complete, of_ranks=of_ranks))
            rows = np.flatnonzero(bounds < self._goal)
            children, bounds = children[rows], bounds[rows]
            if is_complete:
                best = best_fitting(self._space, children, bounds, below=self._goal, most_plans=most_plans)
                rows = np.array([] if best is None else [best[0]], int)
                children = children[rows]
                bounds = np.array([] if best is None else [best[1]])
        return children, bounds

    def _bound(self, choices: np.ndarray, bounds: np.ndarray) -> np.ndarray:
        """Return lower bounds over all completions of unfinished plans; infinity for those that cannot fit.

        Each bound costs more than the one before, and is computed only where the plan may still become the
        best: all work spread over all devices; calls between two others; cycles of one step; memory; cycles
        of two steps.
        """
        for tables in (self._work, self._between):
            columns = zip(tables, choices.T, strict=True)
            seconds = np.sum([table[choice] for table, choice in columns], axis=0)
            bounds = np.maximum(bounds, seconds.max(axis=1, initial=0.0))
        rest = np.flatnonzero(bounds < self._goal)
        bounds[rest] = np.maximum(bounds[rest], self._space.quick_periods(choices[rest]))
        rest = rest[bounds[rest] < self._goal]
        of_ranks = self._space.memory.rank_bytes(choices[rest])
        fits = self._space.memory.excess(choices[rest], exact=False, of_ranks=of_ranks) <= 0
        bounds[rest[~fits]] = np.inf
        rest = rest[fits]
        in_memory = self._space.periods(choices[rest], exact=False, of_ranks=of_ranks.of(fits))
        bounds[rest] = np.maximum(bounds[rest], in_memory)
        return bounds


# Calls between two others


class CallsBetween(NamedTuple):
    """The positions of the call before, of the calls inside, and of the call after."""

    before: int
    inside: tuple[int, ...]
    after: int


def find_calls_between(needs: Dependencies) -> list[CallsBetween]:
    """Return all pairs of calls of a step that have two calls or more between them."""
    num_calls = len(needs.data)
    same_step = nx.DiGraph()
    same_step.add_nodes_from(range(num_calls))
    same_step.add_edges_from((j, i) for i, j in np.argwhere(np.isfinite(needs.data)).tolist())
    same_step.add_edges_from((j, i) for i, j, lag, _ in needs.weights if lag == 0)
    return [between for between in _all_calls_between(needs, same_step) if len(between.inside) > 1]


def _all_calls_between(needs: Dependencies, same_step: nx.DiGraph) -> Iterator[CallsBetween]:
    next_step = {(i, j) for i, j, lag, _ in needs.weights if lag == 1}
    next_step |= {(i, j) for i, j in np.argwhere(np.isfinite(needs.late_data)).tolist()}
    for before, after in sorted(next_step):
        inside = nx.descendants(same_step, before) & nx.ancestors(same_step, after)
        yield CallsBetween(before, tuple(sorted(inside)), after)


def tables_between(
    all_between: list[CallsBetween], groups: list[CallGroup], num_devices: int
) -> list[np.ndarray]:
    """Return for each group the seconds that each choice adds to each CallsBetween, (choices, rows)."""
    tables = []
    for group in groups:
        width = (group.stop - group.first) / num_devices
        values = np.zeros((len(group.candidates), len(all_between)))
        for column, between in zip(values.T, all_between, strict=True):
            for seconds, call in zip(group.seconds.T, group.calls, strict=True):
                at_ends = call in (between.before, between.after)
                column += seconds * (width * (call in between.inside) + at_ends)
        by_mesh = [values[on_mesh].min(axis=0) for on_mesh in group.by_mesh]
        tables.append(np.concatenate([values, by_mesh, values.min(axis=0, keepdims=True)]))
    return tables
