"""Local search: improves plans by changing one call group at a time, or two heavy ones."""

import itertools
from collections.abc import Sequence

import numpy as np

from realhf.planner.call_group import OPEN, CallGroup
from realhf.planner.links import ContiguousLayout
from realhf.planner.search_space import SearchSpace

_HEAVY = 0.1  # The share of all device seconds from which a call group is decided first.
_EXACT = 24  # The number of promising changes that local search evaluates with reallocations.
_EXACT_AT_ONCE = 6  # Those of them that are evaluated together.
_MOST_PAIRS = 12_000  # The number of changes of two groups that are evaluated, those with the least work.
_STARTS = 3  # The number of plans with a common layout that are improved,
_MOST_CHECKED = 512  # and the most whose memory is counted exactly to find them.
_PENALTY = 1e6  # Seconds that rank all plans that do not fit after those that do.
SAME = 1e-9  # Relative difference below which two times are equal.


def least_device_seconds(space: SearchSpace) -> np.ndarray:
    return np.array([group.device_seconds.min() for group in space.groups])


def heavy_groups(space: SearchSpace) -> list[int]:
    """Return the indices of the groups with a large share of all device seconds, the heaviest first."""
    least = least_device_seconds(space)
    order = np.argsort(-least, kind="stable").tolist()
    return [index for index in order if least[index] >= _HEAVY * least.sum()]


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
        self._allowed = allowed or [group.varied() for group in space.groups]

    def starts(self) -> list[list[int]]:
        """Return three plans to start from: the fastest candidates, the smallest ones, and those with the
        least device seconds."""
        fastest = [0] * len(self._groups)
        by_memory = [np.lexsort((g.seconds.sum(axis=1), g.resting + g.running)) for g in self._groups]
        leanest = [int(order[0]) for order in by_memory]
        frugal = [int(np.argmin(group.device_seconds)) for group in self._groups]
        return [fastest, leanest, frugal]

    def start_from_common_layouts(self) -> None:
        """Improve plans in which all groups share a layout, except that one heavy group may have another.

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
        for index in heavy_groups(self._space):
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
        order = order[self._space.excess_bytes(plans[order], exact=False) <= 0][:_MOST_CHECKED]
        num_improved = 0
        for row in order.tolist():
            if num_improved == _STARTS or seconds[row] >= self.best_score:
                break
            if self._space.excess_bytes(plans[[row]])[0] <= 0:
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
        while True:
            before = score
            for index, candidates in enumerate(allowed):
                chosen, score = self._best_of(chosen, score, index, candidates)
            if score >= before * (1 - SAME):
                break
        if score < np.inf and self._space.excess_bytes(chosen[None])[0] <= 0:
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
        seconds = self._space.exact_periods(plans)
        for row in np.argsort(seconds, kind="stable").tolist():
            if seconds[row] >= below:
                return None
            if self._space.excess_bytes(plans[[row]])[0] <= 0:
                return row, seconds[row]
        return None

    def improve_within(self, choices: np.ndarray) -> None:
        """Improve the plan of the leanest candidates that an unfinished plan leaves open."""
        allowed = []
        leanest = []
        for group, choice in zip(self._groups, choices, strict=True):
            left = group.left_by(choice)
            memory = group.resting + group.running + sum(group.copied, start=np.zeros(1))
            allowed.append(left)
            leanest.append(left[np.argmin(memory[left])])
        self.improve(np.array(leanest), allowed)

    def refine(self) -> None:
        """Improve the best plan with all candidates to choose from, also by changing two heavy groups at
        once, unless that has been done."""
        if self.best is None or self.best_score >= self._refined_score:
            return
        everything = [np.arange(len(group.candidates)) for group in self._groups]
        self.improve(self.best, everything)
        for first, second in itertools.combinations(heavy_groups(self._space), 2):
            plan = self._best_of_pair(first, second)
            if plan is not None:
                self.improve(plan, everything)
        self._refined_score = self.best_score

    def _best_of_pair(self, first: int, second: int) -> np.ndarray | None:
        """Return the best plan that differs from the best one in the groups with these two indices; None if
        it is not better."""
        assert self.best is not None
        of_first = self._allowed[first]
        of_second = self._allowed[second]
        work = self._work(first, of_first)[:, None] + self._work(second, of_second)
        rows, columns = np.nonzero(work < self._work_left(self.best, self.best_score, [first, second]))
        least = np.argsort(work[rows, columns], kind="stable")[:_MOST_PAIRS]
        rows = rows[least]
        columns = columns[least]
        plans = _changed(_changed(self.best, first, of_first[rows]), second, of_second[columns])
        rough = self._rough(plans, below=self.best_score)
        promising = np.argsort(rough, kind="stable")[:_EXACT]
        promising = promising[rough[promising] < self.best_score * (1 - SAME)]
        if not len(promising):
            return None
        better = self._best_exact(plans[promising], below=self.best_score * (1 - SAME))
        return None if better is None else plans[promising[better[0]]]

    def _work(self, index: int, candidates: np.ndarray) -> np.ndarray:
        """Return the device seconds of candidates of the group with this index."""
        work: np.ndarray = self._groups[index].device_seconds[candidates]
        return work

    def _work_left(self, chosen: np.ndarray, seconds: float, changing: Sequence[int]) -> float:
        """Return the device seconds that the changing groups may take in a step that is no longer."""
        others = [index for index in range(len(chosen)) if index not in changing]
        taken = sum(float(self._work(index, chosen[index])) for index in others)
        return seconds * self._space.problem.cluster.num_devices - taken

    def polished(self) -> np.ndarray:
        """Return the best plan, improved once more with all candidates to choose from.

        Every group then takes the candidate with the least device seconds that keeps the step as short.
        """
        assert self.best is not None
        self.refine()
        best = self.best
        for index, group in enumerate(self._groups):
            plans = _changed(best, index, np.arange(len(group.candidates)))
            longest = self.best_score * (1 + SAME)
            as_short = self._rough(plans, below=longest) <= longest
            leaner = np.flatnonzero(as_short & (group.device_seconds < group.device_seconds[best[index]]))
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
