"""Search: the plan with the shortest step of those enumerated, and a lower bound over them.

A good plan comes from local search. Branch and bound then raises the bound, or finds a better one: units get
their meshes first, largest work first, then one of the candidates on them. The bound of an unfinished plan
lets what is open take its least time on devices of its own, and counts that all device seconds must find
room. It is anytime: the least bound of what has not been looked at holds for every plan.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from realhf.planner.evaluate import Space

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
class Found:
    """The best plan found, one candidate per unit. `lower_bound_seconds` holds over the plans enumerated."""

    chosen: tuple[int, ...]
    step_seconds: float
    lower_bound_seconds: float
    search_seconds: float
    num_expanded: int

    @property
    def gap(self) -> float:
        return (self.step_seconds - self.lower_bound_seconds) / self.step_seconds


def search(
    space: Space, *, time_limit: float, gap: float = 0.0, starts: Sequence[Sequence[int]] = (),
    max_rounds: int | None = None, progress: Progress | None = None,
) -> Found | None:  # fmt: skip
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
    return Found(
        tuple(local.best.tolist()), local.best_score, min(tree.bound, local.best_score),
        time.monotonic() - began, tree.num_expanded,
    )  # fmt: skip


def leanest(space: Space) -> np.ndarray:
    """The plan that exceeds the devices' memory least, as far as local search finds."""
    local = LocalSearch(space)
    return min((local.improve(np.array(start)) for start in local.starts()), key=lambda found: found[1])[0]


class LocalSearch:
    """Improves plans by changing the candidate of one unit at a time, as long as that helps."""

    def __init__(self, space: Space, ways: Sequence[np.ndarray] | None = None) -> None:
        """`ways`: of each unit, the candidates that may be tried."""
        self._space = space
        self._num = len(space.units)
        self.best: np.ndarray | None = None
        self.best_score = np.inf
        self._ways = ways or [unit.varied() for unit in space.units]

    def starts(self) -> list[list[int]]:
        """Everything everywhere in its fastest way; in the leanest way; each call on a part of its own."""
        units = self._space.units
        fastest = [0] * self._num
        leanest = [int(np.lexsort((u.seconds.sum(axis=1), u.resting + u.running))[0]) for u in units]
        frugal = [int(np.argmin(u.area)) for u in units]
        return [fastest, leanest, frugal]

    def offer(self, chosen: np.ndarray, score: float) -> None:
        """A plan that fits: kept if it is the best so far."""
        if score < self.best_score * (1 - _SAME):
            self.best, self.best_score = chosen.copy(), score

    def improve(self, chosen: np.ndarray) -> tuple[np.ndarray, float]:
        """Where this plan leads to, and its score."""
        score = self._exact(chosen[None])[0]
        while True:
            before = score
            for u in range(self._num):
                chosen, score = self._best_of(chosen, score, u)
            if score >= before * (1 - _SAME):
                break
        if score < np.inf and self._space.overflow(self._space.units, chosen[None])[0] <= 0:
            self.offer(chosen, score)
        return chosen, score

    def _best_of(self, chosen: np.ndarray, score: float, unit: int) -> tuple[np.ndarray, float]:
        """The best plan in which one unit has another candidate, if it is better than `chosen`."""
        plans = self._changed(chosen, unit, self._ways[unit])
        rough = self._rough(plans)
        promising = np.argsort(rough, kind="stable")[:_EXACT]
        promising = promising[rough[promising] < score * (1 - _SAME)]
        if not len(promising):
            return chosen, score
        exact = self._exact(plans[promising])
        best = int(np.argmin(exact))
        return (plans[promising[best]], exact[best]) if exact[best] < score * (1 - _SAME) else (chosen, score)

    def _changed(self, chosen: np.ndarray, unit: int, ways: np.ndarray) -> np.ndarray:
        """The plan with each of these candidates of a unit."""
        plans = np.repeat(chosen[None], len(ways), axis=0)
        plans[:, unit] = ways
        return plans

    def polish(self) -> None:
        """Improves the best plan once more, with all candidates to choose from."""
        assert self.best is not None
        self._ways = [np.arange(len(unit.candidates)) for unit in self._space.units]
        self.improve(self.best)

    def tidy(self) -> None:
        """Gives every unit of the best plan the candidate with the least device time, of those that keep the
        step as short."""
        if self.best is None:
            return
        for u, unit in enumerate(self._space.units):
            plans = self._changed(self.best, u, np.arange(len(unit.candidates)))
            rough = self._rough(plans)
            as_short = rough <= self.best_score * (1 + _SAME)
            leaner = np.flatnonzero(as_short & (unit.area < unit.area[self.best[u]]))
            leaner = leaner[np.argsort(unit.area[leaner], kind="stable")][:_EXACT]
            exact = self._exact(plans[leaner]) if len(leaner) else np.array([])
            if len(good := leaner[exact <= self.best_score * (1 + _SAME)]):
                self.best = plans[good[0]]

    def _rough(self, plans: np.ndarray) -> np.ndarray:
        """Scores without reallocations, and without cycles of many steps: never more than the exact ones."""
        return self._scores(plans, self._space.periods(self._space.units, plans, exact=False))

    def _exact(self, plans: np.ndarray) -> np.ndarray:
        return self._scores(plans, self._space.exact_periods(plans))

    def _scores(self, plans: np.ndarray, seconds: np.ndarray) -> np.ndarray:
        """Period, plus a penalty that makes every plan that fits better than all that do not."""
        over = np.maximum(0.0, self._space.overflow(self._space.units, plans)) / self._space.capacity
        return seconds + np.where(over > 0, 1e6 * (1 + over), 0.0)


class _Tree:
    """Unfinished plans, best bound first. A unit's choice is open, one of its meshes, or a candidate."""

    def __init__(self, space: Space, local: LocalSearch) -> None:
        self._space, self._local = space, local
        self._units = [unit.with_meshes() for unit in space.units]
        self._sizes = [len(unit.candidates) for unit in space.units]
        self._devices = space.problem.cluster.num_devices
        self._least_area = np.array([unit.area.min() for unit in self._units])
        self._order = np.argsort(-self._least_area, kind="stable")
        self._plans = np.full((1, len(self._units)), _OPEN)
        self._depths, self._bounds = np.zeros(1, dtype=int), self._bound(self._plans, np.zeros(1))
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
        plans, bounds = self._plans[taken], self._bounds[taken]
        left = np.ones(len(self._plans), dtype=bool)
        left[taken] = False
        self._keep(left)
        self.num_expanded, self.num_rounds = self.num_expanded + len(plans), self.num_rounds + 1
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
        unit = self._space.units[int(self._order[depth % len(self._units)])]
        ways = len(unit.by_mesh) if depth < len(self._units) else len(unit.candidates) / len(unit.by_mesh)
        return max(1, int(_CHILDREN / ways))

    def dive(self) -> None:
        """Completes the most promising plans by a beam search, and improves what comes out."""
        if not len(self._plans):
            return
        at = np.lexsort((-self._depths, self._bounds))[0]
        plans, bounds = self._plans[[at]], self._bounds[[at]]
        for depth in range(int(self._depths[at]), self._leaf_depth):
            if not len(plans):
                return
            plans, bounds = self._children(plans, bounds, depth)
            best = np.argsort(bounds, kind="stable")[:_BEAM]
            plans, bounds = plans[best], bounds[best]
        self._offer(plans, bounds)
        if len(plans):
            self._local.improve(plans[0])

    def _offer(self, plans: np.ndarray, seconds: np.ndarray) -> None:
        for i in np.argsort(seconds, kind="stable"):
            self._local.offer(plans[i], seconds[i])

    @property
    def _leaf_depth(self) -> int:
        return 2 * len(self._units)

    @property
    def _goal(self) -> float:
        return self._local.best_score * (1 - _SAME)

    def _keep(self, chosen: np.ndarray) -> None:
        self._plans, self._bounds = self._plans[chosen], self._bounds[chosen]
        self._depths = self._depths[chosen]

    def _children(
        self, plans: np.ndarray, bounds: np.ndarray, depth: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Every plan with every choice for the unit of this depth, if it can still be the best."""
        unit = int(self._order[depth % len(self._units)])
        if depth < len(self._units):
            ways = self._sizes[unit] + np.arange(len(self._space.units[unit].by_mesh))
            counts = np.full(len(plans), len(ways))
            picks = np.tile(ways, len(plans))
        else:
            groups = [self._space.units[unit].by_mesh[i] for i in plans[:, unit] - self._sizes[unit]]
            counts, picks = np.array([len(group) for group in groups]), np.concatenate(groups)
        children = np.repeat(plans, counts, axis=0)
        children[:, unit] = picks
        bounds = self._bound(children, np.repeat(bounds, counts), decided=unit)
        alive = bounds < self._goal
        children, bounds = children[alive], bounds[alive]
        if depth >= len(self._units) and len(children):
            last = depth + 1 == self._leaf_depth
            moving = self._space.moving(children)
            exact = self._space.periods(self._units, children, moving=moving, exact=last)
            bounds = np.maximum(bounds, exact)
            alive = bounds < self._goal
            if last:
                alive &= self._space.overflow(self._units, children) <= 0
            children, bounds = children[alive], bounds[alive]
        return children, bounds

    def _bound(self, plans: np.ndarray, bounds: np.ndarray, *, decided: int | None = None) -> np.ndarray:
        """Lower bounds of everything that unfinished plans can become; infinity where they cannot fit."""
        none = np.zeros((len(plans), len(self._space.calls)))
        bounds = np.maximum(bounds, self._areas(plans, none) / self._devices)
        rest = np.flatnonzero(bounds < self._goal)
        fits = self._space.overflow(self._units, plans[rest]) <= 0
        bounds[rest[~fits]] = np.inf
        rest = rest[fits]
        if len(rest):
            kept = plans[rest]
            least = self._space.least_seconds(self._units, kept)
            periods = self._space.periods(self._units, kept, least=least, exact=False)
            crowded = self._areas(kept, least) / self._devices
            bounds[rest] = np.maximum.reduce([bounds[rest], periods, crowded])
        return bounds

    def _areas(self, plans: np.ndarray, least: np.ndarray) -> np.ndarray:
        """Device seconds of unfinished plans."""
        area = np.zeros(len(plans))
        for u, unit in enumerate(self._units):
            pick = plans[:, u]
            seconds = np.maximum(unit.seconds[pick], least[:, list(unit.calls)]).sum(axis=1)
            here = seconds * (unit.stop[pick] - unit.first[pick])
            area += np.where(pick < 0, self._least_area[u], here)
        return area
