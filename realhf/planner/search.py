"""Search: the plan with the shortest step of those enumerated, and a lower bound over them.

A good plan comes from local search. Branch and bound then raises the bound, or finds a better one: groups get
their meshes first, largest work first, then one of the candidates on them. The bound of an unfinished plan
lets what is open take its least time on devices of its own, and counts that all device seconds must find
room. It is anytime: the least bound of what has not been looked at holds for every plan.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from realhf.planner.evaluate import SearchSpace

_OPEN = -1
_CHILDREN = 12_000  # Plans that are looked at at once.
_DIVE_EVERY = 2  # Rounds of expansion between two attempts to complete what looks best,
_BEAM = 24  # each with so many unfinished plans side by side.
_MOST_NODES = 1_000_000  # Beyond, the least promising are given up; their bound is kept.
_EXACT = 24  # In local search, how many promising changes are looked at with reallocations.
_SAME = 1e-9  # Relative difference below which two times are equal.

Progress = Callable[[float, float, float], None]
"""Called with the best step seconds, the lower bound and the seconds spent."""


@dataclass(frozen=True)
class SearchResult:
    """The best plan found, one candidate per group. `lower_bound_seconds` holds over the plans enumerated."""

    chosen: tuple[int, ...]
    step_seconds: float
    lower_bound_seconds: float
    search_seconds: float
    num_expanded: int

    @property
    def gap(self) -> float:
        return (self.step_seconds - self.lower_bound_seconds) / self.step_seconds


def search(
    space: SearchSpace, *, time_limit: float, gap: float = 0.0, starts: Sequence[Sequence[int]] = (),
    max_rounds: int | None = None, progress: Progress | None = None,
) -> SearchResult | None:  # fmt: skip
    """Return the best plan found within `time_limit` seconds, sooner when its gap is at most `gap`.

    The gap is to the lower bound over the plans enumerated, those of the space; it says nothing of others.
    None when no plan fits the devices' memory, as far as was looked. The same every time unless `time_limit`
    ends it.
    """
    began = time.monotonic()
    local = LocalSearch(space)
    for start in [*starts, *local.starts()]:
        local.improve(np.array(start))
        if local.best_score < np.inf:
            break
    tree = _Tree(space, local)
    while not tree.is_finished(gap) and (spent := time.monotonic() - began) < time_limit:
        if progress is not None:
            progress(local.best_score, tree.bound, spent)
        if max_rounds is not None and tree.num_rounds >= max_rounds:
            break
        tree.expand()
        if tree.num_rounds % _DIVE_EVERY == 1:
            tree.dive()
    if local.best is None:
        return None
    local.polish()
    local.tidy()
    return SearchResult(
        tuple(local.best.tolist()), local.best_score, min(tree.bound, local.best_score),
        time.monotonic() - began, tree.num_expanded,
    )  # fmt: skip


def leanest(space: SearchSpace) -> np.ndarray:
    """The plan that exceeds the devices' memory least, as far as local search finds."""
    local = LocalSearch(space)
    return min((local.improve(np.array(start)) for start in local.starts()), key=lambda found: found[1])[0]


class LocalSearch:
    """Improves plans by changing the candidate of one group at a time, as long as that helps."""

    def __init__(self, space: SearchSpace, ways: Sequence[np.ndarray] | None = None) -> None:
        """`ways`: of each group, the candidates that may be tried."""
        self._space = space
        self._num = len(space.groups)
        self.best: np.ndarray | None = None
        self.best_score = np.inf
        self._ways = ways or [group.varied() for group in space.groups]

    def starts(self) -> list[list[int]]:
        """Everything everywhere in its fastest way; in the leanest way; each call on a part of its own."""
        groups = self._space.groups
        fastest = [0] * self._num
        leanest = [int(np.lexsort((u.seconds.sum(axis=1), u.resting + u.running))[0]) for u in groups]
        frugal = [int(np.argmin(u.device_seconds)) for u in groups]
        return [fastest, leanest, frugal]

    def offer(self, chosen: np.ndarray, score: float) -> None:
        """A plan that fits: kept if it is the best so far."""
        if score < self.best_score * (1 - _SAME):
            self.best = chosen.copy()
            self.best_score = score

    def improve(self, chosen: np.ndarray) -> tuple[np.ndarray, float]:
        """Where this plan leads to, and its score."""
        score = self._exact(chosen[None])[0]
        while True:
            before = score
            for u in range(self._num):
                chosen, score = self._best_of(chosen, score, u)
            if score >= before * (1 - _SAME):
                break
        if score < np.inf and self._space.overflow(self._space.groups, chosen[None])[0] <= 0:
            self.offer(chosen, score)
        return chosen, score

    def _best_of(self, chosen: np.ndarray, score: float, group: int) -> tuple[np.ndarray, float]:
        """The best plan in which one group has another candidate, if it is better than `chosen`."""
        plans = self._changed(chosen, group, self._ways[group])
        rough = self._rough(plans)
        promising = np.argsort(rough, kind="stable")[:_EXACT]
        promising = promising[rough[promising] < score * (1 - _SAME)]
        if not len(promising):
            return chosen, score
        exact = self._exact(plans[promising])
        best = int(np.argmin(exact))
        return (plans[promising[best]], exact[best]) if exact[best] < score * (1 - _SAME) else (chosen, score)

    def _changed(self, chosen: np.ndarray, group: int, ways: np.ndarray) -> np.ndarray:
        """The plan with each of these candidates of a group."""
        plans = np.repeat(chosen[None], len(ways), axis=0)
        plans[:, group] = ways
        return plans

    def polish(self) -> None:
        """Improves the best plan once more, with all candidates to choose from."""
        assert self.best is not None
        self._ways = [np.arange(len(group.candidates)) for group in self._space.groups]
        self.improve(self.best)

    def tidy(self) -> None:
        """Gives every group of the best plan the candidate with the least device time, of those that keep the
        step as short."""
        if self.best is None:
            return
        for u, group in enumerate(self._space.groups):
            plans = self._changed(self.best, u, np.arange(len(group.candidates)))
            rough = self._rough(plans)
            as_short = rough <= self.best_score * (1 + _SAME)
            leaner = np.flatnonzero(as_short & (group.device_seconds < group.device_seconds[self.best[u]]))
            leaner = leaner[np.argsort(group.device_seconds[leaner], kind="stable")][:_EXACT]
            exact = self._exact(plans[leaner]) if len(leaner) else np.array([])
            if len(good := leaner[exact <= self.best_score * (1 + _SAME)]):
                self.best = plans[good[0]]

    def _rough(self, plans: np.ndarray) -> np.ndarray:
        """Scores without reallocations, and without cycles of many steps: never more than the exact ones."""
        return self._scores(plans, self._space.periods(self._space.groups, plans, exact=False))

    def _exact(self, plans: np.ndarray) -> np.ndarray:
        return self._scores(plans, self._space.exact_periods(plans))

    def _scores(self, plans: np.ndarray, seconds: np.ndarray) -> np.ndarray:
        """Period, plus a penalty that makes every plan that fits better than all that do not."""
        over = np.maximum(0.0, self._space.overflow(self._space.groups, plans)) / self._space.capacity
        return seconds + np.where(over > 0, 1e6 * (1 + over), 0.0)


class _Tree:
    """Unfinished plans, best bound first. A group's choice is open, one of its meshes, or a candidate."""

    def __init__(self, space: SearchSpace, local: LocalSearch) -> None:
        self._space = space
        self._local = local
        self._groups = [group.with_meshes() for group in space.groups]
        self._sizes = [len(group.candidates) for group in space.groups]
        self._devices = space.problem.cluster.num_devices
        self._least_device_seconds = np.array([group.device_seconds.min() for group in self._groups])
        self._order = np.argsort(-self._least_device_seconds, kind="stable")
        self._plans = np.full((1, len(self._groups)), _OPEN)
        self._depths = np.zeros(1, dtype=int)
        self._bounds = self._bound(self._plans, np.zeros(1))
        self._given_up = np.inf
        self.num_expanded = self.num_rounds = 0

    @property
    def bound(self) -> float:
        """No plan of the space takes less."""
        return min(float(self._bounds.min(initial=np.inf)), self._given_up, self._local.best_score)

    def is_finished(self, gap: float) -> bool:
        goal = self._local.best_score * (1 - max(gap, _SAME))
        return not len(self._plans) or self.bound >= goal

    def expand(self) -> None:
        """Takes the most promising plans, all at one depth, a choice further."""
        first = np.lexsort((-self._depths, self._bounds))[0] if len(self._plans) else 0
        depth = self._depths[first]
        level = np.flatnonzero(self._depths == depth)
        taken = level[np.argsort(self._bounds[level], kind="stable")[: self._width(int(depth))]]
        plans = self._plans[taken]
        bounds = self._bounds[taken]
        left = np.ones(len(self._plans), dtype=bool)
        left[taken] = False
        self._keep(left)
        self.num_expanded = self.num_expanded + len(plans)
        self.num_rounds = self.num_rounds + 1
        children, bounds = self._children(plans, bounds, int(depth))
        if depth + 1 == self._leaf_depth:
            self._offer(children, bounds)
        elif len(children):
            self._plans = np.concatenate([self._plans, children])
            self._bounds = np.concatenate([self._bounds, bounds])
            self._depths = np.concatenate([self._depths, np.full(len(children), depth + 1)])
        self._keep(self._bounds < self._goal)
        if len(self._plans) > _MOST_NODES:
            order = np.argsort(self._bounds, kind="stable")
            self._given_up = min(self._given_up, self._bounds[order[_MOST_NODES // 2]])
            self._keep(order[: _MOST_NODES // 2])

    def _width(self, depth: int) -> int:
        """How many plans are expanded at once."""
        group = self._space.groups[int(self._order[depth % len(self._groups)])]
        ways = len(group.by_mesh) if depth < len(self._groups) else len(group.candidates) / len(group.by_mesh)
        return max(1, int(_CHILDREN / ways))

    def dive(self) -> None:
        """Completes the most promising plans by a beam search, and improves what comes out."""
        if not len(self._plans):
            return
        at = np.lexsort((-self._depths, self._bounds))[0]
        plans = self._plans[[at]]
        bounds = self._bounds[[at]]
        for depth in range(int(self._depths[at]), self._leaf_depth):
            if not len(plans):
                return
            plans, bounds = self._children(plans, bounds, depth)
            best = np.argsort(bounds, kind="stable")[:_BEAM]
            plans = plans[best]
            bounds = bounds[best]
        self._offer(plans, bounds)
        if len(plans):
            self._local.improve(plans[0])

    def _offer(self, plans: np.ndarray, seconds: np.ndarray) -> None:
        for i in np.argsort(seconds, kind="stable"):
            self._local.offer(plans[i], seconds[i])

    @property
    def _leaf_depth(self) -> int:
        return 2 * len(self._groups)

    @property
    def _goal(self) -> float:
        return self._local.best_score * (1 - _SAME)

    def _keep(self, chosen: np.ndarray) -> None:
        self._plans = self._plans[chosen]
        self._bounds = self._bounds[chosen]
        self._depths = self._depths[chosen]

    def _children(
        self, plans: np.ndarray, bounds: np.ndarray, depth: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Every plan with every choice for the group of this depth, if it can still be the best."""
        group = int(self._order[depth % len(self._groups)])
        if depth < len(self._groups):
            ways = self._sizes[group] + np.arange(len(self._space.groups[group].by_mesh))
            counts = np.full(len(plans), len(ways))
            picks = np.tile(ways, len(plans))
        else:
            on_mesh = [self._space.groups[group].by_mesh[i] for i in plans[:, group] - self._sizes[group]]
            counts = np.array([len(found) for found in on_mesh])
            picks = np.concatenate(on_mesh)
        children = np.repeat(plans, counts, axis=0)
        children[:, group] = picks
        bounds = self._bound(children, np.repeat(bounds, counts), decided=group)
        alive = bounds < self._goal
        children = children[alive]
        bounds = bounds[alive]
        if depth >= len(self._groups) and len(children):
            last = depth + 1 == self._leaf_depth
            moving = self._space.moving(children)
            exact = self._space.periods(self._groups, children, moving=moving, exact=last)
            bounds = np.maximum(bounds, exact)
            alive = bounds < self._goal
            if last:
                alive &= self._space.overflow(self._groups, children) <= 0
            children = children[alive]
            bounds = bounds[alive]
        return children, bounds

    def _bound(self, plans: np.ndarray, bounds: np.ndarray, *, decided: int | None = None) -> np.ndarray:
        """Lower bounds of everything that unfinished plans can become; infinity where they cannot fit."""
        none = np.zeros((len(plans), len(self._space.calls)))
        bounds = np.maximum(bounds, self._device_seconds(plans, none) / self._devices)
        rest = np.flatnonzero(bounds < self._goal)
        fits = self._space.overflow(self._groups, plans[rest]) <= 0
        bounds[rest[~fits]] = np.inf
        rest = rest[fits]
        if len(rest):
            kept = plans[rest]
            least = self._space.least_seconds(self._groups, kept)
            periods = self._space.periods(self._groups, kept, least=least, exact=False)
            crowded = self._device_seconds(kept, least) / self._devices
            bounds[rest] = np.maximum.reduce([bounds[rest], periods, crowded])
        return bounds

    def _device_seconds(self, plans: np.ndarray, least: np.ndarray) -> np.ndarray:
        """Device seconds of unfinished plans."""
        area = np.zeros(len(plans))
        for u, group in enumerate(self._groups):
            pick = plans[:, u]
            seconds = np.maximum(group.seconds[pick], least[:, list(group.calls)]).sum(axis=1)
            here = seconds * (group.stop[pick] - group.first[pick])
            area += np.where(pick < 0, self._least_device_seconds[u], here)
        return area
