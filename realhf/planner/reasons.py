"""Why a call has its layout: what limits it, what the runner-up costs, and what would make that one better.

The runner-up of a call group is its best other layout while all other groups keep theirs. Where its step is
longer, three things may have changed: the seconds of the group's calls, reallocations, and which calls share
ranks and so wait for each other. Each gets its share of the difference, averaged over the orders in which
the three can change (Shapley 1953), so that the shares add up to it.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from realhf.layout import Layout
from realhf.plan import ExecutionPlan
from realhf.planner.cost.throughput import have_common_ranks, step_periods
from realhf.planner.memory.memory_account import MemoryAccount
from realhf.planner.search.call_group import Candidate
from realhf.planner.search.candidates import Variant
from realhf.planner.search.search_space import SearchSpace
from realhf.planner.sensitivity import WIDEST, Sensitivity, TippingPoint
from realhf.user_input.units import format_bytes, format_seconds

_SAME = 1e-3  # Relative difference below which two steps count as equally long.
_PROMISING = 16  # The most plans of a group that are evaluated with reallocations.
_CAUSES = ("calls", "reallocation", "waiting")


@dataclass(frozen=True)
class RunnerUp:
    """The best other layout of a call group, and the seconds that each cause adds to the step with it."""

    layout: Layout
    step_seconds: float
    longer: float
    causes: Mapping[str, float]
    because: str
    tipping_points: tuple[TippingPoint, ...]
    tried: tuple[str, ...]

    @property
    def text(self) -> str:
        if self.longer < _SAME:
            return f"{self.layout} would do as well, with more device time"
        return f"{self.layout} would make the step {self.longer:.1%} longer ({self.because})"

    @property
    def outlook(self) -> str | None:
        """Return what would have to change for this layout to be better; None if nothing was tried."""
        if self.tipping_points:
            return f"it would be better with {', or with '.join(map(str, self.tipping_points))}"
        if not self.tried:
            return None
        *names, last = self.tried
        tried = f"{', '.join(names)} or {last}" if names else last
        return f"it would be no better with {tried} from x 1/{WIDEST:g} to x {WIDEST:g}"


@dataclass(frozen=True)
class TooLarge:
    """A layout with which the step would be shorter, if devices had more memory."""

    layout: Layout
    options: str
    shorter: float
    lacking_bytes: float
    device_memory_bytes: float | None
    """That of all devices, if they are of one kind."""

    @property
    def text(self) -> str:
        with_more = f"with {format_bytes(self.lacking_bytes)} more per device"
        if self.device_memory_bytes is not None:
            with_more += f" (device_memory {format_bytes(self.device_memory_bytes)})"
        shorter = f"would make the step {self.shorter:.1%} shorter"
        return f"{self.layout}{self.options} {shorter} {with_more}"


@dataclass(frozen=True)
class Reason:
    """Why a call has its layout. `share` is the part of its seconds that `limit` takes."""

    limit: str
    share: float
    status: str | None
    runner_up: RunnerUp | None = None
    too_large: TooLarge | None = None

    @property
    def lines(self) -> list[str]:
        """Return the sentences for people, at most three."""
        parts = [f"{self.share:.0%} {self.limit}", self.status]
        others = []
        if self.runner_up is not None:
            parts.append(self.runner_up.text)
            others.append(self.runner_up.outlook)
        if self.too_large is not None:
            others.append(self.too_large.text)
        return ["; ".join(filter(None, parts)), *filter(None, others)]

    def document(self) -> dict[str, Any]:
        """Return the reason as JSON."""

        def plain(value: RunnerUp | TooLarge | None) -> dict[str, Any] | None:
            return None if value is None else asdict(value) | {"layout": str(value.layout)}

        return {
            "limit": self.limit, "share": self.share, "status": self.status,
            "runner_up": plain(self.runner_up), "too_large": plain(self.too_large)}


def find_reasons(space: SearchSpace, chosen: np.ndarray) -> dict[str, Reason]:
    """Return for each call on a model why it has its layout in a plan (one candidate per call group)."""
    step_seconds = float(space.exact_periods(chosen[None])[0])
    sensitivity = Sensitivity(space)
    reasons = {}
    for group_index, group in enumerate(space.groups):
        candidate = group.candidates[chosen[group_index]]
        alternatives = _Alternatives(sensitivity, space, chosen, step_seconds, group_index)
        for i, variant in zip(group.calls, candidate.variants, strict=True):
            cost = variant.cost
            share = cost.seconds_by_cause[cost.limit] / cost.seconds
            reasons[space.calls[i].name] = Reason(
                cost.limit, share, alternatives.status, alternatives.runner_up, alternatives.too_large)
    return reasons


class _Alternatives:
    """The plans in which one call group has another layout, with and without enough memory."""

    def __init__(
        self, sensitivity: Sensitivity, space: SearchSpace, chosen: np.ndarray, step_seconds: float,
        group_index: int,
    ) -> None:
        self._space = space
        self._sensitivity = sensitivity
        self._chosen = chosen
        self._step_seconds = step_seconds
        self._group_index = group_index
        candidates = space.groups[group_index].candidates
        layout = candidates[chosen[group_index]].layout
        others = np.array([i for i, c in enumerate(candidates) if c.layout != layout], dtype=int)
        plans = np.repeat(chosen[None], len(others), axis=0)
        plans[:, group_index] = others
        bounds = space.periods(plans, exact=False) if len(others) else np.zeros(0)
        order = np.argsort(bounds, kind="stable")
        self._plans, self._bounds = plans[order], bounds[order]

    @property
    def status(self) -> str | None:
        """Return in words why there is no runner-up; None if there is one."""
        names = [self._space.calls[i].name for i in self._space.groups[self._group_index].calls]
        if any(name in self._space.problem.pins for name in names):
            return "pinned"
        if self.runner_up is not None:
            return None
        return "no other layout fits beside the rest of this plan" if len(self._plans) else "the only layout"

    @cached_property
    def runner_up(self) -> RunnerUp | None:
        if (best := self._best(fits=True)) is None:
            return None
        plan, seconds = best
        longer = seconds / self._step_seconds - 1
        causes = explain_difference(self._space, self._chosen, plan)
        is_longer = longer >= _SAME
        tried = self._sensitivity.keys if is_longer else ()
        points = self._sensitivity.tipping_points(self._chosen, plan) if is_longer else ()
        possible = [name for name in _CAUSES if name != "reallocation" or self._space.needs.weights]
        because = self._because(plan, max(possible, key=lambda name: causes[name]))
        return RunnerUp(self._layout(plan), seconds, longer, causes, because, points, tried)

    @cached_property
    def too_large(self) -> TooLarge | None:
        """The fastest layout that lacks memory, if the step would be shorter with it."""
        best = self._best(fits=False, limit=self._step_seconds * (1 - _SAME))
        if best is None:
            return None
        plan, seconds = best
        account = MemoryAccount(self._space.problem)
        counted = account.of_plan(ExecutionPlan(self._space.call_plans(plan.tolist())))
        lacking = counted.excess(account.available)
        needed = _device_memory(self._space, plan)
        changed = _changed_options(*(self._candidate(p).variants for p in (self._chosen, plan)))
        return TooLarge(self._layout(plan), changed, 1 - seconds / self._step_seconds, lacking, needed)

    def _best(self, *, fits: bool, limit: float = math.inf) -> tuple[np.ndarray, float] | None:
        """Return the best plan that fits, or does not, with its seconds per step if they are below the limit.

        Memory is counted only where the lower bound of the step leaves it a chance.
        """
        best, num_left = None, _PROMISING
        for plan, bound in zip(self._plans, self._bounds, strict=True):
            if bound >= limit or not num_left:
                break
            if (self._space.excess_bytes(plan[None])[0] <= 0) == fits:
                num_left -= 1
                seconds = float(self._space.exact_periods(plan[None])[0])
                if seconds < limit:
                    best, limit = (plan, seconds), seconds
        return best

    def _candidate(self, plan: np.ndarray) -> Candidate:
        return self._space.groups[self._group_index].candidates[plan[self._group_index]]

    def _layout(self, plan: np.ndarray) -> Layout:
        return self._candidate(plan).layout.as_layout

    def _because(self, plan: np.ndarray, cause: str) -> str:
        """Return the sentence about the largest cause of the difference between two plans."""
        space = self._space
        both = np.stack([self._chosen, plan])
        seconds, first, stop = space.call_times(both)
        own = space.groups[self._group_index].calls
        if cause == "calls":
            before, after = (format_seconds(float(row[own].sum())) for row in seconds)
            subject = "its calls take" if len(own) > 1 else "it takes"
            return f"{subject} {after} instead of {before}"
        if cause == "reallocation":
            moving = space.moving(both)
            column = int(np.argmax(moving[1] - moving[0]))
            user, trainer, _ = space.needs.weights[column]
            before, after = (format_seconds(float(value)) for value in moving[:, column])
            what = f"reallocation of {space.calls[trainer].role} for {space.calls[user].name}"
            return f"{what} takes {after} instead of {before}"
        shares = have_common_ranks(first, stop)
        new = (shares[1] & ~shares[0])[own].any(axis=0)
        new[own] = False
        names = [space.calls[i].name for i in np.flatnonzero(new)]
        others = " and ".join(names) or "other calls"
        return f"it would take turns with {others}"


def explain_difference(space: SearchSpace, before: np.ndarray, after: np.ndarray) -> dict[str, float]:
    """Return the seconds per step that calls, reallocations and waiting add from one plan to another."""
    both = np.stack([before, after])
    seconds, first, stop = space.call_times(both)
    moving = space.moving(both)
    mixes = list(itertools.product((0, 1), repeat=len(_CAUSES)))
    a, b, c = (np.array(column) for column in zip(*mixes, strict=True))
    of_mixes = step_periods(
        space.problem.cluster, space.needs, seconds[a], first[c], stop[c], moving=moving[b])
    of_mix = dict(zip(mixes, of_mixes.tolist(), strict=True))
    causes = dict.fromkeys(_CAUSES, 0.0)
    orders = list(itertools.permutations(range(len(_CAUSES))))
    for order in orders:
        mix = [0] * len(_CAUSES)
        for cause in order:
            earlier = of_mix[tuple(mix)]
            mix[cause] = 1
            causes[_CAUSES[cause]] += (of_mix[tuple(mix)] - earlier) / len(orders)
    return causes


def _changed_options(before: Sequence[Variant], after: Sequence[Variant]) -> str:
    """Return the options that are switched on or off, as words that follow a layout."""
    old, new = ({name for v in variants for name in v.call_plan.options} for variants in (before, after))
    words = [f" with {name}" for name in sorted(new - old)]
    return "".join(words + [f" without {name}" for name in sorted(old - new)])


def _device_memory(space: SearchSpace, plan: np.ndarray) -> float | None:
    """Return the least memory of a device with which a plan fits, to three digits; None if devices are of
    several kinds.

    The need of a plan may grow with the memory, as a cache leaves a share of it free.
    """
    layouts = ExecutionPlan(space.call_plans(plan.tolist()))
    problem = space.problem
    if len(problem.cluster.kinds) > 1:
        return None

    def fits(memory: float) -> bool:
        cluster = replace(problem.cluster, device_memory_bytes=memory)
        account = MemoryAccount(replace(problem, cluster=cluster))
        return account.of_plan(layouts).excess(account.available) <= 0

    low = problem.cluster.device_memory_bytes
    high = 2 * low
    while not fits(high):
        high *= 2
    while high / low > 1 + 1e-3:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high
