"""Search for the plan with the shortest step among those enumerated, and a lower bound over them.

Local search finds a good plan. Branch and bound then raises the lower bound or finds a better plan: it
chooses a mesh for every call group, those with the most work first, and a candidate on each mesh. Two trees
take turns, which differ in the order of these steps; both bounds hold, so the higher one counts. The
bound of an unfinished plan assumes that calls whose choice is open take their least time on devices of their
own, and that the step is no shorter than the sum of all device seconds over the number of devices. The search
is anytime: the least bound among the plans that are not explored yet holds for every plan.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from realhf.planner.call_group import OPEN
from realhf.planner.search_space import SearchSpace

_CHILDREN = 12_000  # The number of plans to evaluate at once.
_DIVE_EVERY = 2  # The number of iterations from one beam search to the next after one that found a plan.
_MOST_PATIENCE = 16  # The same after many that did not.
_BEAM = 24  # The width of a beam search.
_DIVE_CHECKS = 32  # The complete plans whose exact memory a beam search counts.
_SETTLED = 2  # The meshes of all groups for which a beam search lets local search choose the candidates.
_HEAVY = 0.1  # The share of all device seconds from which a call group is decided first.
_MOST_NODES = 1_000_000  # Above this, the least promising plans are dropped and their bound is kept.
_EXACT = 24  # The number of promising changes that local search evaluates with reallocations.
_EXACT_AT_ONCE = 6  # Those of them that are evaluated together, before it is known whether others can be better.
_SAME = 1e-9  # Relative difference below which two times are equal.

Progress = Callable[[float, float, float], None]
"""Called with the best step seconds, the lower bound and the seconds spent."""


@dataclass(frozen=True)
class SearchResult:
    """The best plan found (one candidate per call group) and the lower bound over the plans enumerated."""

    chosen: tuple[int, ...]
    step_seconds: float
    lower_bound_seconds: float
    num_expanded: int

    @property
    def gap(self) -> float:
        return (self.step_seconds - self.lower_bound_seconds) / self.step_seconds


def search(
    space: SearchSpace, *, time_limit: float, gap: float = 0.0, starts: Sequence[Sequence[int]] = (),
    max_iterations: int | None = None, progress: Progress | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> SearchResult | None:  # fmt: skip
    """Return the best plan found within `time_limit` seconds, or sooner when its gap is at most `gap`, or
    when there is a plan and `should_stop` returns True.

    The gap is the distance to the lower bound over the plans enumerated, which are those of the space; it
    says nothing about others. The result is None when no plan that fits the devices' memory was found. It is
    the same every time unless `time_limit` or `should_stop` ends the search.
    """
    began = time.monotonic()
    local = LocalSearch(space)
    for start in starts:
        local.improve(np.array(start))
    for start in local.starts():
        if local.best_score == np.inf:
            local.improve(np.array(start))
    trees = [_Tree(space, local, steps) for steps in _orders(space)]
    num_iterations = 0
    while not any(tree.is_finished(gap) for tree in trees):
        if (spent := time.monotonic() - began) >= time_limit:
            break
        if progress is not None:
            progress(local.best_score, max(tree.bound for tree in trees), spent)
        if max_iterations is not None and num_iterations >= max_iterations:
            break
        if should_stop is not None and local.best is not None and should_stop():
            break
        tree = trees[num_iterations % len(trees)]
        tree.expand()
        tree.dive()
        num_iterations += 1
    if local.best is None:
        return None
    best = local.polished()
    bound = max(tree.bound for tree in trees)
    return SearchResult(tuple(best.tolist()), local.best_score, bound, sum(t.num_expanded for t in trees))


def leanest(space: SearchSpace) -> np.ndarray:
    """Return the plan that exceeds the devices' memory least, as far as local search finds it."""
    local = LocalSearch(space)
    scored = [local.improve(np.array(start)) for start in local.starts()]
    return min(scored, key=lambda plan_and_score: plan_and_score[1])[0]


class LocalSearch:
    """Improves plans by changing the candidate of one call group at a time, as long as that helps."""

    def __init__(self, space: SearchSpace, allowed: Sequence[np.ndarray] | None = None) -> None:
        """Set up the search; `allowed` restricts the candidates of each group."""
        self._space = space
        self.best: np.ndarray | None = None
        self.best_score = np.inf
        self._refined_score = np.inf
        self._allowed = allowed or [group.varied() for group in space.groups]

    def starts(self) -> list[list[int]]:
        """Return three plans to start from: the fastest candidates, the smallest ones, and those with the
        least device seconds."""
        groups = self._space.groups
        fastest = [0] * len(groups)
        leanest = [int(np.lexsort((u.seconds.sum(axis=1), u.resting + u.running))[0]) for u in groups]
        frugal = [int(np.argmin(u.device_seconds)) for u in groups]
        return [fastest, leanest, frugal]

    def offer(self, chosen: np.ndarray, score: float) -> None:
        """Keep a plan that fits if it is the best so far."""
        if score < self.best_score * (1 - _SAME):
            self.best, self.best_score = chosen.copy(), score

    def improve(self, chosen: np.ndarray) -> tuple[np.ndarray, float]:
        """Return the plan in which local search from this one ends, and its score."""
        score = self._exact(chosen[None])[0]
        while True:
            before = score
            for u in range(len(chosen)):
                chosen, score = self._best_of(chosen, score, u)
            if score >= before * (1 - _SAME):
                break
        if score < np.inf and self._space.excess_bytes(chosen[None])[0] <= 0:
            self.offer(chosen, score)
        return chosen, score

    def _best_of(self, chosen: np.ndarray, score: float, group: int) -> tuple[np.ndarray, float]:
        """Return the best plan in which one group has another candidate, or `chosen` if none is better."""
        plans = _changed(chosen, group, self._allowed[group])
        rough = self._rough(plans)
        promising = np.argsort(rough, kind="stable")[:_EXACT]
        for start in range(0, len(promising), _EXACT_AT_ONCE):
            rows = promising[start : start + _EXACT_AT_ONCE]
            rows = rows[rough[rows] < score * (1 - _SAME)]
            if not len(rows):
                break
            exact = self._exact(plans[rows])
            best = int(np.argmin(exact))
            if exact[best] < score * (1 - _SAME):
                chosen, score = plans[rows[best]], exact[best]
        return chosen, score

    def improve_within(self, choices: np.ndarray) -> None:
        """Improve the plan of the leanest candidates that an unfinished plan leaves open."""
        allowed = self._allowed
        groups = self._space.groups
        self._allowed = [group.left_by(choice) for group, choice in zip(groups, choices, strict=True)]
        pairs = list(zip(groups, self._allowed, strict=True))
        memory = [(g.resting + g.running + sum(g.copied, start=np.zeros(1)))[left] for g, left in pairs]
        leanest = [left[np.argmin(need)] for left, need in zip(self._allowed, memory, strict=True)]
        self.improve(np.array(leanest))
        self._allowed = allowed

    def refine(self) -> None:
        """Improve the best plan with all candidates to choose from, also by changing two heavy groups at
        once, unless that has been done."""
        if self.best is None or self.best_score >= self._refined_score:
            return
        allowed = self._allowed
        self._allowed = [np.arange(len(group.candidates)) for group in self._space.groups]
        self.improve(self.best)
        for u, v in self._pairs:
            plan = self._best_of_pair((u, allowed[u]), (v, allowed[v]))
            if plan is not None:
                self.improve(plan)
        self._allowed = allowed
        self._refined_score = self.best_score

    @cached_property
    def _pairs(self) -> list[tuple[int, int]]:
        return list(itertools.combinations(_heavy_groups(self._space), 2))

    def _best_of_pair(
        self, one: tuple[int, np.ndarray], other: tuple[int, np.ndarray]
    ) -> np.ndarray | None:
        """Return the best plan that differs from the best one in two groups, each with its candidates to
        choose from; None if it is not better."""
        assert self.best is not None
        (u, of_u), (v, of_v) = one, other
        groups = self._space.groups
        least = sum(float(g.device_seconds[i]) for g, i in zip(groups, self.best, strict=True))
        least -= float(groups[u].device_seconds[self.best[u]] + groups[v].device_seconds[self.best[v]])
        most = self.best_score * self._space.problem.cluster.num_devices - least
        work = groups[u].device_seconds[of_u][:, None] + groups[v].device_seconds[of_v]
        rows, columns = np.nonzero(work < most)
        plans = _changed(_changed(self.best, u, of_u[rows]), v, of_v[columns])
        rough = self._rough(plans)
        promising = np.argsort(rough, kind="stable")[:_EXACT]
        promising = promising[rough[promising] < self.best_score * (1 - _SAME)]
        exact = self._exact(plans[promising])
        if not len(exact) or exact.min() >= self.best_score * (1 - _SAME):
            return None
        return plans[promising[np.argmin(exact)]]

    def polished(self) -> np.ndarray:
        """Return the best plan, improved once more with all candidates to choose from.

        Every group then takes the candidate with the least device seconds that keeps the step as short.
        """
        assert self.best is not None
        self.refine()
        best = self.best
        for u, group in enumerate(self._space.groups):
            plans = _changed(best, u, np.arange(len(group.candidates)))
            as_short = self._rough(plans) <= self.best_score * (1 + _SAME)
            leaner = np.flatnonzero(as_short & (group.device_seconds < group.device_seconds[best[u]]))
            leaner = leaner[np.argsort(group.device_seconds[leaner], kind="stable")][:_EXACT]
            good = leaner[self._exact(plans[leaner]) <= self.best_score * (1 + _SAME)]
            best = plans[good[0]] if len(good) else best
        return best

    def _rough(self, plans: np.ndarray) -> np.ndarray:
        """Return scores that leave out reallocations and long cycles, and so never exceed the exact ones."""
        return self._scores(plans, self._space.periods(plans, exact=False), exact=False)

    def _exact(self, plans: np.ndarray) -> np.ndarray:
        return self._scores(plans, self._space.exact_periods(plans))

    def _scores(self, plans: np.ndarray, seconds: np.ndarray, *, exact: bool = True) -> np.ndarray:
        """Return step times, with a penalty that ranks all plans that fit above all that do not.

        Without `exact`, memory is counted by its lower bound.
        """
        excess = np.maximum(0.0, self._space.excess_bytes(plans, exact=exact)) / self._space.capacity
        return seconds + np.where(excess > 0, 1e6 * (1 + excess), 0.0)


def _changed(plans: np.ndarray, group: int, candidates: np.ndarray) -> np.ndarray:
    """Return plans, or copies of one plan, each with one of these candidates of a group."""
    plans = np.broadcast_to(plans, (len(candidates), plans.shape[-1])).copy()
    plans[:, group] = candidates
    return plans


class _Step(NamedTuple):
    """The next decision: about a group's mesh, or about its candidate, which is the last one about it."""

    group: int
    is_last: bool


def _least_device_seconds(space: SearchSpace) -> np.ndarray:
    return np.array([group.device_seconds.min() for group in space.groups])


def _heavy_groups(space: SearchSpace) -> list[int]:
    """Return the groups with a large share of all device seconds, those with the most first."""
    least = _least_device_seconds(space)
    order = np.argsort(-least, kind="stable").tolist()
    return [u for u in order if least[u] >= _HEAVY * least.sum()]


def _orders(space: SearchSpace) -> list[list[_Step]]:
    """Return two orders of steps, both with the groups with the most work first.

    One decides all meshes and then all candidates, which soon shows how calls share the devices. The other
    decides heavy groups wholly before all others, which soon shows how much memory they need.
    """
    order = np.argsort(-_least_device_seconds(space), kind="stable").tolist()
    heavy = _heavy_groups(space)
    parts = [heavy, *([u] for u in order if u not in heavy)]
    return [
        [_Step(u, is_last) for part in some for is_last in (False, True) for u in part]
        for some in ([order], parts)
    ]


class _Tree:
    """The unfinished plans of branch and bound: for each group a candidate, a mesh or OPEN."""

    def __init__(self, space: SearchSpace, local: LocalSearch, steps: Sequence[_Step]) -> None:
        """Set up a tree in which plans are decided in these steps.

        Reallocations of unfinished plans are priced only if all meshes are decided before any candidate:
        otherwise too many pairs of layouts come up.
        """
        self._prices_moves = not any(step.is_last for step in steps[: len(steps) // 2])
        self._space = space
        self._local = local
        self._groups = space.open_groups
        self._num_devices = space.problem.cluster.num_devices
        self._device_seconds = [  # Of every choice.
            np.append(group.device_seconds[:-1], least)
            for group, least in zip(self._groups, _least_device_seconds(space), strict=True)
        ]
        self._steps = steps
        self._choices = np.full((1, len(self._groups)), OPEN)
        self._bounds = self._bound(self._choices, np.zeros(1))
        self._given_up = np.inf
        self.num_expanded = self.num_iterations = 0
        self._next_dive = 1  # The iteration from which on to dive.
        self._patience = _DIVE_EVERY

    @property
    def bound(self) -> float:
        """Lower bound of the seconds per step over all plans of the space.

        Plans that are shorter than the best one by a share of `_SAME` may have been discarded.
        """
        return min(float(self._bounds.min(initial=np.inf)), self._given_up, self._goal)

    def is_finished(self, gap: float) -> bool:
        goal = self._local.best_score * (1 - max(gap, _SAME))
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
        self.num_iterations += 1
        if depth + 1 == self._leaf_depth:
            self._offer(children, bounds)
        else:
            self._choices = np.concatenate([self._choices, children])
            self._bounds = np.concatenate([self._bounds, bounds])
        self._keep(self._bounds < self._goal)
        if len(self._choices) > _MOST_NODES:
            order = np.argsort(self._bounds, kind="stable")
            self._given_up = min(self._given_up, self._bounds[order[_MOST_NODES // 2]])
            self._keep(order[: _MOST_NODES // 2])

    def _width(self, depth: int) -> int:
        """Return the number of plans to expand at once, so that their children stay below `_CHILDREN`."""
        step = self._steps[depth]
        group = self._groups[step.group]
        num_meshes = len(group.by_mesh)
        num_children = len(group.candidates) / num_meshes if step.is_last else num_meshes
        return max(1, int(_CHILDREN / num_children))

    def dive(self) -> None:
        """Complete the most promising plan by a beam search, and improve the outcome by local search.

        This is due in every few iterations, and less often while it finds nothing better.
        """
        if not len(self._choices) or self.num_iterations < self._next_dive:
            return
        before = self._local.best_score
        self._complete()
        has_found = self._local.best_score < before
        self._patience = _DIVE_EVERY if has_found else min(2 * self._patience, _MOST_PATIENCE)
        self._next_dive = self.num_iterations + self._patience

    def _complete(self) -> None:
        depths = self._depths
        row = self._most_promising(depths)
        choices, bounds = self._choices[[row]], self._bounds[[row]]
        for depth in range(int(depths[row]), self._leaf_depth):
            if not len(choices):
                return
            choices, bounds = self._children(choices, bounds, depth, most_plans=_DIVE_CHECKS)
            is_tight = self._space.estimated_excess_bytes(choices) > 0
            best = np.lexsort((bounds, is_tight))[:_BEAM]
            choices, bounds = choices[best], bounds[best]
            if depth + 1 == len(self._groups) and (choices != OPEN).all():
                for row in np.argsort(bounds, kind="stable")[:_SETTLED]:
                    self._local.improve_within(choices[row])
        self._offer(choices, bounds)
        if len(choices):
            self._local.improve(choices[0])
        self._local.refine()

    def _offer(self, plans: np.ndarray, seconds: np.ndarray) -> None:
        for i in np.argsort(seconds, kind="stable"):
            self._local.offer(plans[i], seconds[i])

    @property
    def _depths(self) -> np.ndarray:
        """Number of steps that have been decided in each plan."""
        return (self._choices != OPEN).sum(axis=1) + self._space.is_decided(self._choices).sum(axis=1)

    def _most_promising(self, depths: np.ndarray) -> int:
        return int(np.lexsort((-depths, self._bounds))[0])

    @property
    def _leaf_depth(self) -> int:
        return 2 * len(self._groups)

    @property
    def _goal(self) -> float:
        return self._local.best_score * (1 - _SAME)

    def _keep(self, rows: np.ndarray) -> None:
        self._choices, self._bounds = self._choices[rows], self._bounds[rows]

    def _children(
        self, choices: np.ndarray, bounds: np.ndarray, depth: int, *, most_plans: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return every plan with every mesh, or every candidate on its mesh, for the group of this step, if
        it may still become the best.

        If this completes the plans, return only the best one that fits, among the first `most_plans`.
        """
        u, is_last = self._steps[depth]
        group = self._groups[u]
        if is_last:
            next_choices = [group.by_mesh[mesh] for mesh in group.mesh_index(choices[:, u])]
        else:
            next_choices = [group.mesh_choices] * len(choices)
        counts = [len(of_plan) for of_plan in next_choices]
        children = np.repeat(choices, counts, axis=0)
        children[:, u] = np.concatenate(next_choices)
        bounds = self._bound(children, np.repeat(bounds, counts))
        alive = bounds < self._goal
        children, bounds = children[alive], bounds[alive]
        if is_last and len(children):
            are_finished = depth + 1 == self._leaf_depth
            moving = self._space.moving(children) if are_finished or self._prices_moves else None
            exact = self._space.periods(children, moving=moving, exact=are_finished)
            bounds = np.maximum(bounds, exact)
            rows = np.flatnonzero(bounds < self._goal)
            if are_finished:
                rows = rows[np.argsort(bounds[rows], kind="stable")]
                rows = self._best_fitting(children, rows[:most_plans])
            children, bounds = children[rows], bounds[rows]
        return children, bounds

    def _best_fitting(self, plans: np.ndarray, order: np.ndarray) -> np.ndarray:
        """Return the first row in this order whose plan fits; none if no plan does."""
        for row in order:
            if self._space.excess_bytes(plans[[row]])[0] <= 0:
                return np.array([row])
        return order[:0]

    def _bound(self, choices: np.ndarray, bounds: np.ndarray) -> np.ndarray:
        """Return lower bounds over all completions of unfinished plans; infinity for those that cannot
        fit."""
        columns = zip(self._device_seconds, choices.T, strict=True)
        work = np.sum([table[choice] for table, choice in columns], axis=0)
        bounds = np.maximum(bounds, work / self._num_devices)
        rest = np.flatnonzero(bounds < self._goal)
        excess, min_seconds = self._space.memory_limits(choices[rest])
        fits = excess <= 0
        bounds[rest[~fits]] = np.inf
        rest = rest[fits]
        if len(rest):
            kept = choices[rest]
            min_seconds = min_seconds[fits]
            crowded = self._crowded(kept, min_seconds) / self._num_devices
            bounds[rest] = np.maximum(bounds[rest], crowded)
            alive = bounds[rest] < self._goal
            rest = rest[alive]
            periods = self._space.periods(kept[alive], min_seconds=min_seconds[alive], exact=False)
            bounds[rest] = np.maximum(bounds[rest], periods)
        return bounds

    def _crowded(self, choices: np.ndarray, min_seconds: np.ndarray) -> np.ndarray:
        """Return lower bounds of the device seconds of unfinished plans whose calls take at least
        `min_seconds`."""
        total = np.zeros(len(choices))
        for group, table, choice in zip(self._groups, self._device_seconds, choices.T, strict=True):
            total += table[choice]
            longer = group.is_mesh(choice) & (min_seconds[:, group.calls] > 0).any(axis=1)
            rows = np.flatnonzero(longer)
            at = choice[rows]
            seconds = np.maximum(group.seconds[at], min_seconds[np.ix_(rows, group.calls)]).sum(axis=1)
            total[rows] += seconds * (group.stop[at] - group.first[at]) - table[at]
        return total
