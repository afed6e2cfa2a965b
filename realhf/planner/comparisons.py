"""A plan beside others: lagged steps beside synchronous ones, and the best plan under a change."""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from rich.console import Group
from rich.table import Table
from rich.text import Text

from realhf.plan import ExecutionPlan
from realhf.planner.make import Planned, make_plan
from realhf.planner.problem import Problem
from realhf.planner.rates import Rates
from realhf.planner.reasons import change
from realhf.planner.search import ReportProgress, SearchResult, leanest, search
from realhf.planner.search_space import SearchSpace
from realhf.user_input.units import format_bytes, format_seconds

_SAME = 1e-3  # Relative difference below which two steps count as equally fast.


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
            seconds = (result.step_seconds, result.lower_bound_seconds)
            table.add_row(name, str(lag), str(rounds), *(f"{value:.3g}" for value in seconds))
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
    """Return what a change does. Raises ValueError if it is not legal."""
    problem, rates = change(planned.problem, planned.space.rates, values)
    seconds = None
    obstacle = _obstacle(problem, planned.plan)
    if obstacle is None:
        seconds, obstacle = _with_layouts(problem, rates, planned.plan, limits)
    try:
        best = make_plan(problem, rates, **limits._asdict(), explain=False)
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
    space = SearchSpace(replace(problem, pins=pins), rates)
    for group in space.groups:
        if not group.candidates:
            names = " and ".join(space.calls[i].name for i in group.calls)
            return None, f"{names} does not fit in its layout, even alone"
    result = search(space, time_limit=limits.time_limit, gap=limits.gap, should_stop=limits.should_stop)
    if result is None:
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
    table.add_row("as it is", *[_seconds(now.step_seconds)] * 2, f"{now.gap:.1%}")
    lines: list[str] = []
    for tried in changes:
        gap = ""
        if tried.best_step_seconds is not None and tried.best_lower_bound_seconds is not None:
            gap = f"{1 - tried.best_lower_bound_seconds / tried.best_step_seconds:.1%}"
        table.add_row(tried.name, _seconds(tried.step_seconds), _seconds(tried.best_step_seconds), gap)
        others = ", ".join(f"{name} {layout}" for name, layout in tried.best_layouts.items())
        remarks = [tried.obstacle, tried.best_obstacle, others and f"best with {others}"]
        if text := "; ".join(filter(None, remarks)):
            lines += textwrap.wrap(
                f"{tried.name}: {text}", columns, subsequent_indent="    ", break_on_hyphens=False)
    return Group(table, *map(Text, ["", *lines] if lines else []))


def _seconds(value: float | None) -> str:
    return "none" if value is None else format_seconds(value)
