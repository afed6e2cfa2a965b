"""A plan beside others: lagged steps beside synchronous ones, the best plan under a change or without some
hosts, and the best plans on several numbers of devices."""

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from rich.console import Group
from rich.table import Table
from rich.text import Text

from realhf.cluster import join_kinds
from realhf.execution_plan import ExecutionPlan
from realhf.planner.deadline import Deadline, OutOfTime
from realhf.planner.make import Planned, make_plan
from realhf.planner.problem import Problem
from realhf.planner.rates import Rates
from realhf.planner.reasons import change
from realhf.planner.report import format_gap
from realhf.planner.search import NoPlan, ReportProgress, SearchResult, leanest, search
from realhf.planner.search_space import SearchSpace
from realhf.user_input.units import format_bytes, format_seconds

_PARTS = 1.5  # The time limit over the least time that is left for the best plan under a change.
_SAME = 1e-3  # Relative difference below which two steps count as equally fast.
ENOUGH = 0.1
"""So many devices are enough if no larger number that was tried makes the step shorter by more than this."""


class LagComparison(NamedTuple):
    """The best plans that were found for one experiment with its lag and without any."""

    max_lag: int
    num_rounds: int
    lagged: SearchResult
    synchronous: SearchResult

    @property
    def faster(self) -> str:
        """Which step is shorter: `lagged`, `synchronous` or `neither`."""
        lagged = self.lagged.step_seconds
        synchronous = self.synchronous.step_seconds
        if abs(lagged - synchronous) <= _SAME * max(lagged, synchronous):
            return "neither"
        return "lagged" if lagged < synchronous else "synchronous"

    @property
    def sentence(self) -> str:
        """Return which step is faster on this cluster, and by how much."""
        with_lag = f"{format_seconds(self.lagged.step_seconds)} per step with max_lag {self.max_lag}"
        without = f"{format_seconds(self.synchronous.step_seconds)} without"
        if self.faster == "neither":
            return f"the lag makes steps neither faster nor slower on this cluster: {with_lag}, {without}"
        times = self.synchronous.step_seconds / self.lagged.step_seconds
        times = max(times, 1 / times)
        return f"{self.faster} steps are {times:.2f} x as fast on this cluster: {with_lag}, {without}"

    def document(self) -> dict[str, Any]:
        """Return what `realhf plan --json` adds for an experiment with lag."""
        return {
            "lag": self.max_lag,
            "rounds": self.num_rounds,
            "lagged_seconds": self.lagged.step_seconds,
            "synchronous_seconds": self.synchronous.step_seconds,
            "synchronous_lower_bound_seconds": self.synchronous.lower_bound_seconds,
            "faster": self.faster}

    def render(self) -> Group:
        """Return a table of both and the sentence, for people."""
        table = Table(box=None, pad_edge=False, header_style="bold")
        for title in ("steps", "lag", "rounds", "seconds", "lower bound"):
            table.add_column(title, justify="left" if title == "steps" else "right")
        rows = (
            ("synchronous", 0, 1, self.synchronous), ("lagged", self.max_lag, self.num_rounds, self.lagged))
        for name, lag, rounds, result in rows:
            bound = f"{result.lower_bound_seconds:.3g}" if result.lower_bound_seconds > 0 else "none"
            table.add_row(name, str(lag), str(rounds), f"{result.step_seconds:.3g}", bound)
        return Group(table, Text(self.sentence))


class SearchLimits(NamedTuple):
    """When a search under a change ends, and whom it tells (see `make_plan`)."""

    time_limit: float
    gap: float
    progress: ReportProgress | None = None
    should_stop: Callable[[], bool] | None = None


@dataclass(frozen=True)
class WhatIf:
    """A change, the plan's layouts under it, and the best plan found under it.

    `step_seconds` is that of the plan's layouts, with micro-batches, rows and options chosen anew. It is None
    where they cannot run, and `best_step_seconds` where no plan fits; the obstacles say why. `best_layouts`
    has the calls that the best plan runs elsewhere.
    """

    values: Mapping[str, str]
    step_seconds: float | None
    obstacle: str | None
    best_step_seconds: float | None = None
    best_lower_bound_seconds: float | None = None
    best_obstacle: str | None = None
    best_layouts: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return ", ".join(f"{key}={value}" for key, value in self.values.items())

    def document(self) -> dict[str, Any]:
        """Return what `realhf plan --json` has of this change."""
        return asdict(self)


def what_if(planned: Planned, values: Mapping[str, str], limits: SearchLimits) -> WhatIf:
    """Return what a change does, within the time limit. Raises ValueError if it is not legal."""
    return _under(planned, values, *change(planned.problem, planned.rates, values), limits)


def lost_hosts(planned: Planned, number: int, limits: SearchLimits) -> list[WhatIf]:
    """Return what it costs to lose some hosts: of each kind in turn, as long as one host is left."""
    kinds = planned.problem.cluster.kinds
    changes = []
    for index, kind in enumerate(kinds):
        fewer = [*kinds[:index], replace(kind, num_hosts=kind.num_hosts - number), *kinds[index + 1 :]] if (
            kind.num_hosts > number) else [*kinds[:index], *kinds[index + 1 :]]
        if kind.num_hosts >= number and fewer:
            cluster = join_kinds(fewer)
            name = "lost_hosts" if len(kinds) == 1 else f"hosts.{index}.lost"
            problem = replace(planned.problem, cluster=cluster)
            changes.append(_under(planned, {name: str(number)}, problem, planned.rates.on(cluster), limits))
    return changes


def _under(
    planned: Planned, values: Mapping[str, str], problem: Problem, rates: Rates, limits: SearchLimits
) -> WhatIf:
    """Return a plan's layouts, and the best plan found, in a changed problem.

    A third of the time at most is for the plan's layouts.
    """
    deadline = Deadline(limits.time_limit)
    seconds = None
    obstacle = _obstacle(problem, planned.plan)
    if obstacle is None:
        there = limits._replace(time_limit=limits.time_limit * (1 - 1 / _PARTS))
        seconds, obstacle = _with_layouts(problem, rates, planned.plan, there)
    try:
        left = limits._replace(time_limit=deadline.left)
        best = make_plan(problem, rates, **left._asdict(), explain=False, parts=_PARTS)
    except ValueError as error:
        return WhatIf(values, seconds, obstacle, best_obstacle=str(error))
    result = best.result
    if seconds is not None and seconds <= result.step_seconds:
        return WhatIf(values, seconds, None, seconds, min(seconds, result.lower_bound_seconds))
    names = [call.name for call in problem.model_calls]
    layouts = {n: str(best.plan[n].layout) for n in names if best.plan[n].layout != planned.plan[n].layout}
    return WhatIf(
        values, seconds, obstacle, result.step_seconds, result.lower_bound_seconds, best_layouts=layouts)


def _obstacle(problem: Problem, plan: ExecutionPlan) -> str | None:
    """Return why a plan's layouts do not go with the problem's devices and samples; None if they do."""
    if plan.num_ranks > (has := problem.cluster.num_devices):
        return f"the layouts need {plan.num_ranks} devices of {has}"
    for call in problem.model_calls:
        if problem.cluster.kind_index(plan[call.name].layout.ranks) is None:
            return f"{call.name} would lie on hosts of several kinds"
        most = problem.workloads[call.name].most_replicas(call.kind)
        if (dp := plan[call.name].layout.dp) > most:
            return f"{call.name} has work for {most} of its {dp} replicas"
    return None


def _with_layouts(
    problem: Problem, rates: Rates, plan: ExecutionPlan, limits: SearchLimits
) -> tuple[float | None, str | None]:
    """Return the seconds per step with a plan's layouts, or None and in words what they lack."""
    pins = {call.name: plan[call.name].layout for call in problem.model_calls}
    try:
        space = SearchSpace(replace(problem, pins=pins), rates, Deadline(limits.time_limit))
    except OutOfTime:
        return None, "the time was too short for the layouts (--time-limit)"
    for group in space.groups:
        if not group.candidates:
            names = " and ".join(space.calls[i].name for i in group.calls)
            return None, f"{names} does not fit in its layout, even alone"
    result = search(space, time_limit=limits.time_limit, gap=limits.gap, should_stop=limits.should_stop)
    if isinstance(result, NoPlan):
        if not result.is_proved:
            return None, f"no plan with the layouts was found in {format_seconds(result.seconds)}"
        with space.deadline.lifted():
            lacking = float(space.memory.excess(leanest(space)[None])[0])
        return None, f"the layouts lack {format_bytes(lacking)} per device"
    return result.step_seconds, None


def render(planned: Planned, changes: Sequence[WhatIf], *, columns: int) -> Group:
    """Return a table of the plan and of the best plans found under the changes, for people."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("what if", overflow="fold")
    for title in ("these layouts", "best found", "gap"):
        table.add_column(title, justify="right", no_wrap=True)
    now = planned.result
    gap = format_gap(now.step_seconds, now.lower_bound_seconds)
    table.add_row("as it is", *[_seconds(now.step_seconds)] * 2, gap)
    lines: list[str] = []
    for tried in changes:
        gap = ""
        if tried.best_step_seconds is not None and tried.best_lower_bound_seconds is not None:
            gap = format_gap(tried.best_step_seconds, tried.best_lower_bound_seconds)
        table.add_row(tried.name, _seconds(tried.step_seconds), _seconds(tried.best_step_seconds), gap)
        others = ", ".join(f"{name} {layout}" for name, layout in tried.best_layouts.items())
        times = None
        if tried.best_step_seconds is not None:
            times = f"a step takes {tried.best_step_seconds / now.step_seconds:.2f} x as long"
        remarks = [tried.obstacle, tried.best_obstacle, times, others and f"best with {others}"]
        if text := "; ".join(filter(None, remarks)):
            lines += textwrap.wrap(
                f"{tried.name}: {text}", columns, subsequent_indent="    ", break_on_hyphens=False)
    return Group(table, *map(Text, ["", *lines] if lines else []))


def _seconds(value: float | None) -> str:
    return "none" if value is None else format_seconds(value)


# Costs


class Expense(NamedTuple):
    """The cost of a plan if each device of the cluster, busy or idle, costs so much per hour."""

    per_device_hour: float
    num_devices: int
    step_seconds: float
    num_samples: int

    @property
    def per_step(self) -> float:
        return self.per_device_hour * self.num_devices * self.step_seconds / 3600

    def document(self) -> dict[str, float]:
        """Return what `realhf plan --json` has of the cost."""
        return {
            "per_device_hour": self.per_device_hour, "per_step": self.per_step,
            "per_1000_steps": 1000 * self.per_step, "per_1000_samples": self._per_1000_samples}

    @property
    def _per_1000_samples(self) -> float:
        return 1000 * self.per_step / self.num_samples

    def __str__(self) -> str:
        costs = f"a step costs {self.per_step:.4g}, 1,000 steps {1000 * self.per_step:.4g}"
        costs += f", 1,000 samples {self._per_1000_samples:.4g}"
        return f"{costs} ({self.num_devices} devices at {self.per_device_hour:g} per hour)"


def expense_of_step(problem: Problem, step_seconds: float, per_device_hour: float) -> Expense:
    num_samples = problem.workloads[problem.model_calls[0].name].num_samples
    return Expense(per_device_hour, problem.cluster.num_devices, step_seconds, num_samples)


# Numbers of devices


class SizedPlan(NamedTuple):
    """The best plan found on some devices; without one, the obstacle says why."""

    num_devices: int
    planned: Planned | None
    obstacle: str | None = None

    @property
    def step_seconds(self) -> float:
        return math.inf if self.planned is None else self.planned.step_seconds

    @property
    def device_seconds(self) -> float:
        return self.num_devices * self.step_seconds

    def document(self) -> dict[str, Any]:
        """Return what `realhf plan --json` has of this number of devices."""
        if self.planned is None:
            return {"num_devices": self.num_devices, "obstacle": self.obstacle}
        plan = self.planned.plan
        layouts = {call.name: str(plan[call.name].layout) for call in self.planned.problem.model_calls}
        return {
            "num_devices": self.num_devices, "step_seconds": self.step_seconds,
            "device_seconds": self.device_seconds, "gap": self.planned.result.gap,
            "lower_bound_seconds": self.planned.result.lower_bound_seconds, "layouts": layouts}


@dataclass(frozen=True)
class Sizing:
    """The best plans found on several numbers of devices, in rising order."""

    sizes: Sequence[SizedPlan]
    per_device_hour: float | None = None

    @property
    def enough(self) -> SizedPlan | None:
        """The fewest devices for which no larger number that was tried has a step shorter by `ENOUGH`."""
        for number, size in enumerate(self.sizes):
            shortest = min(other.step_seconds for other in self.sizes[number:])
            if size.planned is not None and shortest >= size.step_seconds * (1 - ENOUGH):
                return size
        return None

    @property
    def sentences(self) -> list[str]:
        """Return how many devices are enough, and how many take the fewest device seconds."""
        if (enough := self.enough) is None:
            return []
        largest = self.sizes[-1].num_devices
        if enough.num_devices == largest:
            first = f"{largest} devices, the most tried, still make the step more than {ENOUGH:.0%} shorter"
        else:
            first = f"{enough.num_devices} devices are enough: with more, up to {largest}, a step becomes "
            first += f"at most {ENOUGH:.0%} shorter"
        least = min(self.sizes, key=lambda size: size.device_seconds)
        return [first, f"{least.num_devices} devices take the fewest device seconds per step"]

    def document(self) -> dict[str, Any]:
        """Return the output of `realhf plan --devices A,B,... --json`."""
        sizes = []
        for size in self.sizes:
            sizes.append(size.document())
            if size.planned is not None and self.per_device_hour is not None:
                sizes[-1]["cost"] = self._cost(size.planned).document()
        enough = self.enough
        return {"sizes": sizes, "enough": enough and enough.num_devices, "enough_share": ENOUGH}

    def render(self, *, columns: int) -> Group:
        """Return a table and the sentences, for people."""
        table = Table(box=None, pad_edge=False, header_style="bold")
        costs = ("cost of a step",) * (self.per_device_hour is not None)
        for title in ("devices", "seconds", "device seconds", "gap", *costs):
            table.add_column(title, justify="right", no_wrap=True)
        lines = list(self.sentences)
        for size in self.sizes:
            if size.planned is None:
                table.add_row(str(size.num_devices), "none")
                lines.append(f"{size.num_devices} devices: {size.obstacle}")
                continue
            cost = [f"{self._cost(size.planned).per_step:.4g}"] if costs else []
            result = size.planned.result
            gap = format_gap(result.step_seconds, result.lower_bound_seconds)
            seconds = (f"{size.step_seconds:.3g}", f"{size.device_seconds:,.0f}")
            table.add_row(str(size.num_devices), *seconds, gap, *cost)
        wrapped = [
            part for line in lines
            for part in textwrap.wrap(line, columns, subsequent_indent="    ", break_on_hyphens=False)]
        return Group(table, *map(Text, ["", *wrapped]))

    def _cost(self, planned: Planned) -> Expense:
        assert self.per_device_hour is not None
        return expense_of_step(planned.problem, planned.step_seconds, self.per_device_hour)
