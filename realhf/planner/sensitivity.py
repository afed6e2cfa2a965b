"""Prices given plans under other lengths and links, and finds where another plan becomes the better one."""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from realhf.planner.changes import WORKLOAD_KEYS, change, current_values, is_measured
from realhf.planner.cost.dependencies import dependencies, moving_seconds
from realhf.planner.cost.predict import cost_of
from realhf.planner.cost.rates import Rates
from realhf.planner.cost.throughput import step_periods
from realhf.planner.search.search_space import SearchSpace
from realhf.planner.workload.problem import Problem
from realhf.user_input.units import format_bytes

WIDEST = 4.0  # Changes are tried from this fraction of a quantity to this multiple.
_FACTORS = (math.sqrt(WIDEST), WIDEST)
_BISECTIONS = 5


@dataclass(frozen=True)
class TippingPoint:
    """The least change of one quantity with which the runner-up is the better plan, as far as tried."""

    key: str
    value: float
    factor: float

    def __str__(self) -> str:
        side = "at most" if self.factor < 1 else "at least"
        return f"{self.key} {side} {format_value(self.key, self.value)} (x {self.factor:.2g})"


class Sensitivity:
    """Seconds per step of given plans if one quantity is multiplied by a factor; options stay as they are."""

    def __init__(self, space: SearchSpace) -> None:
        self._space = space
        self._values = current_values(space.problem)
        self._changed: dict[tuple[str, float], _ChangedSpace] = {}

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """The quantities that are tried: lengths, and the bandwidths of the links that there are."""
        cluster = self._space.problem.cluster
        keys = ["response_tokens"]
        links = ["intra_host.bandwidth"] * (cluster.devices_per_host > 1)
        links += ["inter_host.bandwidth"] * (cluster.num_hosts > 1)
        keys += [key for link in links for key in self._values if key.endswith(link)]
        return tuple(k for k in keys if self._values[k] and not is_measured(self._space.rates, k))

    def seconds(self, plan: np.ndarray, key: str, factor: float) -> float:
        """Return the seconds per step of a plan under one change."""
        if (key, factor) not in self._changed:
            values = {key: self._values[key] * factor}
            changed = change(self._space.problem, self._space.rates, values)
            self._changed[key, factor] = _ChangedSpace(self._space, *changed)
        return self._changed[key, factor].step_seconds(plan)

    def tipping_points(self, plan: np.ndarray, other: np.ndarray) -> tuple[TippingPoint, ...]:
        """Return, for each quantity, the least change tried with which the other plan has the shorter step.

        The nearest change comes first. Between two factors of which only the further one makes the other
        plan better, the point is found by bisection.
        """
        points = []
        for key in self.keys:
            both_ways = (self._tipping_factor(plan, other, key, way) for way in (-1, 1))
            factors = [factor for factor in both_ways if factor is not None]
            if factors:
                factor = min(factors, key=lambda factor: abs(math.log(factor)))
                points.append(TippingPoint(key, self._values[key] * factor, factor))
        return tuple(sorted(points, key=lambda point: abs(math.log(point.factor))))

    def _tipping_factor(self, plan: np.ndarray, other: np.ndarray, key: str, way: int) -> float | None:
        """Return the factor, below (way -1) or above 1, from which on the other plan is better, if any."""
        stays = 1.0
        for factor in (f**way for f in _FACTORS):
            if key in WORKLOAD_KEYS and self._values[key] * factor < 1:
                return None  # A sequence has at least a token.
            if self._is_better(other, plan, key, factor):
                break
            stays = factor
        else:
            return None
        for _ in range(_BISECTIONS):
            middle = math.sqrt(stays * factor)
            is_better = self._is_better(other, plan, key, middle)
            stays, factor = (stays, middle) if is_better else (middle, factor)
        return factor

    def _is_better(self, plan: np.ndarray, other: np.ndarray, key: str, factor: float) -> bool:
        return self.seconds(plan, key, factor) < self.seconds(other, key, factor)


class _ChangedSpace:
    """The times of a space's plans in a changed problem; costs and reallocations are remembered."""

    def __init__(self, space: SearchSpace, problem: Problem, rates: Rates) -> None:
        self._space = space
        self._problem = problem
        self._rates = rates
        self._needs = dependencies(problem, rates)
        self._seconds: dict[tuple[int, int], float] = {}
        self._moving: dict[tuple[int, ...], np.ndarray] = {}

    def step_seconds(self, plan: np.ndarray) -> float:
        space = self._space
        seconds, first, stop = space.call_times(plan[None])
        for group, index in zip(space.groups, plan, strict=True):
            candidate = group.candidates[index]
            for i, variant in zip(group.calls, candidate.variants, strict=True):
                if (i, index) not in self._seconds:
                    self._seconds[i, index] = cost_of(
                        self._problem, self._rates, space.calls[i], variant.call_plan, candidate.layout.ranks
                    ).seconds
                seconds[0, i] = self._seconds[i, index]
        return float(step_periods(
            self._problem.cluster, self._needs, seconds, first, stop, moving=self._arrivals(plan))[0])

    def _arrivals(self, plan: np.ndarray) -> np.ndarray:
        """Return the seconds until copies of weights are complete, which only another cluster changes."""
        space = self._space
        if self._problem.cluster == space.problem.cluster:
            return space.moving(plan[None])
        if (key := tuple(plan.tolist())) not in self._moving:
            layouts = {i: group.candidates[index].layout
                       for group, index in zip(space.groups, plan, strict=True) for i in group.calls}
            self._moving[key] = moving_seconds(self._rates, self._problem, self._needs, layouts)
        return self._moving[key]


def format_value(key: str, value: float) -> str:
    """Return a quantity with its unit."""
    if key.endswith("bandwidth"):
        return f"{format_bytes(value)}/s"
    return format_bytes(value) if key.endswith("memory") else f"{value:,.0f}"
