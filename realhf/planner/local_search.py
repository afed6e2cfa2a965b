"""Local search: improves plans by changing one call group at a time, or two heavy ones."""

import itertools
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from realhf.planner.search_space import SearchSpace

_HEAVY = 0.1  # The share of all device seconds from which a call group is decided first.
_EXACT = 24  # The number of promising changes that local search evaluates with reallocations.
_EXACT_AT_ONCE = 6  # Those of them that are evaluated together.
_MOST_PAIRS = 12_000  # The number of changes of two groups that are evaluated, those with the least work.
_PENALTY = 1e6  # Seconds that rank all plans that do not fit after those that do.
SAME = 1e-9  # Relative difference below which two times are equal.


def least_device_seconds(space: SearchSpace) -> np.ndarray:
    return np.array([group.device_seconds.min() for group in space.groups])


def heavy_groups(space: SearchSpace) -> list[int]:
    """Return the groups with a large share of all device seconds, those with the most first."""
    least = least_device_seconds(space)
    order = np.argsort(-least, kind="stable").tolist()
    return [u for u in order if least[u] >= _HEAVY * least.sum()]


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
        if score < self.best_score * (1 - SAME):
            self.best, self.best_score = chosen.copy(), score

    def improve(self, chosen: np.ndarray) -> tuple[np.ndarray, float]:
        """Return the plan in which local search from this one ends, and its score."""
        score = self._exact(chosen[None])[0]
        while True:
            before = score
            for u in range(len(chosen)):
                chosen, score = self._best_of(chosen, score, u)
            if score >= before * (1 - SAME):
                break
        if score < np.inf and self._space.excess_bytes(chosen[None])[0] <= 0:
            self.offer(chosen, score)
        return chosen, score

    def _best_of(self, chosen: np.ndarray, score: float, group: int) -> tuple[np.ndarray, float]:
        """Return the best plan in which one group has another candidate, or `chosen` if none is better."""
        changes = self._allowed[group]
        changes = changes[self._work(group, changes) < self._work_left(chosen, score, [group])]
        plans = _changed(chosen, group, changes)
        rough = self._rough(plans, below=score)
        promising = np.argsort(rough, kind="stable")[:_EXACT]
        for start in range(0, len(promising), _EXACT_AT_ONCE):
            rows = promising[start : start + _EXACT_AT_ONCE]
            rows = rows[rough[rows] < score * (1 - SAME)]
            if not len(rows):
                break
            found = self._best_exact(plans[rows], below=score * (1 - SAME))
            if found is not None:
                chosen, score = plans[rows[found[0]]], found[1]
        return chosen, score

    def _best_exact(self, plans: np.ndarray, *, below: float) -> tuple[int, float] | None:
        """Return the number of the best plan and its score; None if that is not below the given one.

        The memory of plans is counted in the order of their seconds, if only one that fits can be better.
        """
        if below >= _PENALTY:
            scores = self._exact(plans)
            best = int(np.argmin(scores))
            return (best, scores[best]) if scores[best] < below else None
        seconds = self._space.exact_periods(plans)
        for number in np.argsort(seconds, kind="stable").tolist():
            if seconds[number] >= below:
                return None
            if self._space.excess_bytes(plans[[number]])[0] <= 0:
                return number, seconds[number]
        return None

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
        return list(itertools.combinations(heavy_groups(self._space), 2))

    def _best_of_pair(
        self, one: tuple[int, np.ndarray], other: tuple[int, np.ndarray]
    ) -> np.ndarray | None:
        """Return the best plan that differs from the best one in two groups, each with its candidates to
        choose from; None if it is not better."""
        assert self.best is not None
        (u, of_u), (v, of_v) = one, other
        work = self._work(u, of_u)[:, None] + self._work(v, of_v)
        rows, columns = np.nonzero(work < self._work_left(self.best, self.best_score, [u, v]))
        least = np.argsort(work[rows, columns], kind="stable")[:_MOST_PAIRS]
        rows = rows[least]
        columns = columns[least]
        plans = _changed(_changed(self.best, u, of_u[rows]), v, of_v[columns])
        rough = self._rough(plans, below=self.best_score)
        promising = np.argsort(rough, kind="stable")[:_EXACT]
        promising = promising[rough[promising] < self.best_score * (1 - SAME)]
        if not len(promising):
            return None
        found = self._best_exact(plans[promising], below=self.best_score * (1 - SAME))
        return None if found is None else plans[promising[found[0]]]

    def _work(self, group: int, candidates: np.ndarray) -> np.ndarray:
        work: np.ndarray = self._space.groups[group].device_seconds[candidates]
        return work

    def _work_left(self, chosen: np.ndarray, seconds: float, changing: Sequence[int]) -> float:
        """Return the device seconds that the changing groups may take in a step that is no longer."""
        others = sum(float(self._work(u, i)) for u, i in enumerate(chosen) if u not in changing)
        return seconds * self._space.problem.cluster.num_devices - others

    def polished(self) -> np.ndarray:
        """Return the best plan, improved once more with all candidates to choose from.

        Every group then takes the candidate with the least device seconds that keeps the step as short.
        """
        assert self.best is not None
        self.refine()
        best = self.best
        for u, group in enumerate(self._space.groups):
            plans = _changed(best, u, np.arange(len(group.candidates)))
            longest = self.best_score * (1 + SAME)
            as_short = self._rough(plans, below=longest) <= longest
            leaner = np.flatnonzero(as_short & (group.device_seconds < group.device_seconds[best[u]]))
            leaner = leaner[np.argsort(group.device_seconds[leaner], kind="stable")][:_EXACT]
            good = leaner[self._exact(plans[leaner]) <= self.best_score * (1 + SAME)]
            best = plans[good[0]] if len(good) else best
        return best

    def _rough(self, plans: np.ndarray, *, below: float) -> np.ndarray:
        """Return scores that leave out reallocations and long cycles, and so never exceed the exact ones.

        Those above `below` leave out memory, too.
        """
        scores = self._space.periods(plans, exact=False)
        rows = np.flatnonzero(scores <= below)
        scores[rows] = self._scores(plans[rows], scores[rows], exact=False)
        return scores

    def _exact(self, plans: np.ndarray) -> np.ndarray:
        return self._scores(plans, self._space.exact_periods(plans))

    def _scores(self, plans: np.ndarray, seconds: np.ndarray, *, exact: bool = True) -> np.ndarray:
        """Return step times, with a penalty that ranks all plans that fit above all that do not.

        Without `exact`, memory is counted by its lower bound.
        """
        excess = np.maximum(0.0, self._space.excess_bytes(plans, exact=exact)) / self._space.capacity
        return seconds + np.where(excess > 0, _PENALTY * (1 + excess), 0.0)


def _changed(plans: np.ndarray, group: int, candidates: np.ndarray) -> np.ndarray:
    """Return plans, or copies of one plan, each with one of these candidates of a group."""
    plans = np.broadcast_to(plans, (len(candidates), plans.shape[-1])).copy()
    plans[:, group] = candidates
    return plans
