"""A plan that stays good if the planner's figures are off: least largest regret over stated ranges.

Each quantity of `RANGES` is set to both of its ends while the others stay as they are. Under each of these
changes the fastest plan is searched. Every plan found is then priced under every change, and its regret is
how much longer its step takes than that of the best one there. The plan with the least largest regret is
chosen (Savage 1951). Its layouts and options stay as they are under all changes, and limits of lengths, too,
so that its memory does.
"""

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from realhf.execution_plan import ExecutionPlan
from realhf.planner.deadline import Deadline
from realhf.planner.lengths import Lengths
from realhf.planner.make import Planned, PricedPlan, TooLittleTime, make_plan, price
from realhf.planner.memory_account import check_memory
from realhf.planner.problem import Problem, Workload
from realhf.planner.profiled_rates import ProfiledRates
from realhf.planner.rates import Rates
from realhf.planner.reserves import standing_of
from realhf.planner.search import SAME
from realhf.planner.search_space import SearchSpace
from realhf.planner.step_time import predict
from realhf.user_input.units import format_seconds

RANGES: Mapping[str, tuple[float, float]] = {
    "response_tokens": (0.5, 2.0),
    "length_correlation": (0.0, 2.0),
    "products": (0.8, 1.2),
    "memory_bandwidth": (0.8, 1.2),
    "links": (0.5, 1.2),
    "host_times": (0.5, 2.0)}
"""Quantity -> factors of its range: the mean length of responses (their limit stays), how alike those of a
prompt are (at most 1), the speed of products and attention, that of memory and of links, and the times of
launches, steps and rows. Where a profile has measured the machine, only the first two."""
_EFFICIENCIES = {
    "products": ("matmul", "grouped_matmul", "attention"), "memory_bandwidth": ("memory",),
    "links": ("link",),
    "host_times": ("launch_seconds", "pass_seconds", "step_seconds", "row_seconds", "call_seconds")}
STANDS = 0.01
"""The choice stands as long as its step is longer than the best found by at most this fraction."""
_BISECTIONS = 5
_MOST_NEIGHBOURS = 24  # The layouts of a call that are tried without a search of its own.


class Change(NamedTuple):
    """One quantity multiplied by a factor; 1: as expected."""

    quantity: str
    factor: float

    def __str__(self) -> str:
        return f"{self.quantity} x {self.factor:g}" if self.factor != 1 else "as expected"

    def of(self, problem: Problem, rates: Rates) -> tuple[Problem, Rates]:
        """Return the problem and the rates under the change."""
        if self.factor == 1:
            return problem, rates
        if (fields := _EFFICIENCIES.get(self.quantity)) is not None:
            now = rates.efficiencies
            return problem, rates.with_efficiencies(
                replace(now, **{name: getattr(now, name) * self.factor for name in fields}))
        workloads = {name: self._work(work) for name, work in problem.workloads.items()}
        return replace(problem, workloads=workloads), rates

    def _work(self, work: Workload) -> Workload:
        if self.quantity == "length_correlation":
            return replace(work, alike=min(1.0, work.alike * self.factor))
        whole = work.lengths
        survival = np.zeros(whole.limit)
        scaled = whole.scaled(self.factor).survival[: whole.limit]
        survival[: len(scaled)] = scaled
        lengths = Lengths(survival)
        turns = None if work.turns is None else work.turns.scaled(lengths.mean / work.response_tokens)
        return replace(work, response_lengths=lengths, response_tokens=lengths.mean, turns=turns)


@dataclass(frozen=True)
class Robust:
    """The plan with the least largest regret, beside the one that was found without ranges.

    `seconds` has, for each of `changes`, the steps of the latter, of this one, and of the best found.
    """

    priced: PricedPlan
    lower_bound_seconds: float
    is_first: bool
    changes: Sequence[Change]
    seconds: Sequence[tuple[float, float, float]]
    stands: Mapping[str, tuple[float, float]]
    num_plans: int
    """The plans that were compared."""
    num_whole: int
    """The changes with a search of their own; under the others, layouts of one call at a time were tried."""
    more_seconds: float | None
    """The time limit with which every change has a search of its own; None if no lack of time is known."""

    @property
    def regret(self) -> float:
        """The largest regret of this plan over the ranges."""
        return max(mine / best - 1 for _, mine, best in self.seconds)

    @property
    def first_regret(self) -> float:
        """The largest regret of the plan that was found without ranges."""
        return max(first / best - 1 for first, _, best in self.seconds)

    @property
    def sentences(self) -> list[str]:
        """Return how good the plan is over the ranges, where it stays nearly the best, and what was left out.

        If most changes had no search of their own, nothing is said about ranges.
        """
        num_searches = len(self.changes) - 1
        missing = []
        if self.num_whole < num_searches:
            more = f", such as --time-limit {self.more_seconds:g}" if self.more_seconds else " (--time-limit)"
            missing.append(
                f"{self.num_whole} of {num_searches} searches under a change found a plan in time; under the "
                f"other changes, layouts of one call at a time were tried: give them more time{more}")
        if self.num_whole < num_searches / 2:
            plans = f"{self.num_plans} plan{'s' * (self.num_plans > 1)}"
            return [f"too little is known about these ranges: this is a choice among {plans}", *missing]
        if self.is_first:
            first = "the plan without ranges is also the choice over them: its step is at most "
            first += f"{self.regret:.1%} longer than the best found under each change"
        else:
            first = f"chosen over these ranges: its step is at most {self.regret:.1%} longer than the best "
            first += f"found under each change, that of the plan without ranges up to {self.first_regret:.1%}"
        part = [f"{name} x {low:.2g} to x {high:.2g}" for name, (low, high) in self.stands.items()
                if (low, high) != RANGES[name]]
        where = f"for {', '.join(part)}, and in the other ranges" if part else "in all of these ranges"
        return [first, f"it stays within {STANDS:.0%} of the best found {where}", *missing]

    def document(self) -> dict[str, Any]:
        """Return what `realhf plan --robust --json` adds."""
        names = ("first_seconds", "step_seconds", "best_found_seconds")
        rows = [
            {"quantity": change.quantity, "factor": change.factor, **dict(zip(names, row, strict=True))}
            for change, row in zip(self.changes, self.seconds, strict=True)]
        return {
            "is_first": self.is_first, "largest_regret": self.regret,
            "first_largest_regret": self.first_regret, "changes": rows,
            "num_plans": self.num_plans, "num_whole_searches": self.num_whole,
            "stands": {name: list(ends) for name, ends in self.stands.items()}}

    def render(self, *, columns: int) -> Group:
        """Return a table of the changes and the sentences, for people."""
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("range", no_wrap=True)
        for title in ("without ranges", "this plan", "best found"):
            table.add_column(title, justify="right", no_wrap=True)
        for change, row in zip(self.changes, self.seconds, strict=True):
            table.add_row(str(change), *map(format_seconds, row))
        lines = [
            part for line in self.sentences
            for part in textwrap.wrap(line, columns, subsequent_indent="    ", break_on_hyphens=False)]
        return Group(table, *map(Text, ["", *lines]))


def changes_of(rates: Rates) -> list[Change]:
    """Return the changes that are tried: none, and both ends of each range."""
    known = [name for name in RANGES if name not in _EFFICIENCIES or not isinstance(rates, ProfiledRates)]
    ends = [Change(name, factor) for name in known for factor in RANGES[name]]
    return [Change(known[0], 1.0), *ends]


def robust_plan(
    planned: Planned, *, time_limit: float, gap: float, begin: Callable[[Change], None], slack: float = 0.0,
    should_stop: Callable[[], bool] | None = None,
) -> Robust:
    """Return the plan with the least largest regret among the given one and the fastest under each change.

    Each search begins with the given plan's layouts, and gets an equal part of the time that those before it
    have left; `begin` is told before each. If it has too little time for layouts of its own, those of the
    given plan's search are tried instead, for one call at a time. With `slack`, a plan with more reserves or
    simpler layouts is preferred to others, here as without changes, if its largest regret is higher by at
    most this fraction of a step.
    """
    problem = planned.problem
    rates = planned.rates
    changes = changes_of(rates)
    deadline = Deadline(time_limit)
    plans = [planned.plan]
    num_whole = 0
    more_seconds = None
    for number, change in enumerate(changes[1:]):
        if should_stop is not None and should_stop():
            break
        begin(change)
        changed = change.of(problem, rates)
        part = deadline.part(deadline.left / (len(changes) - 1 - number))
        try:
            found = make_plan(
                *changed, time_limit=part.left, gap=gap, slack=slack, explain=False, should_stop=should_stop,
                parts=len(changes) - 1, start=planned.plan).plan
            num_whole += 1
        except ValueError as error:  # None that fits was found in time.
            if isinstance(error, TooLittleTime):
                more_seconds = max(error.limit_seconds, more_seconds or 0.0)
            found = _with_other_layouts(planned, *changed, part)
        if check_memory(problem, found).fits:
            plans.append(found)
    prices = _SecondsUnderChanges(problem, rates, plans)
    table = np.array([prices.under(change) for change in changes])
    best = table.min(axis=1, keepdims=True)
    regrets = (table / best - 1).max(axis=0)
    chosen = _preferred(problem, plans, regrets, table[0], slack)
    stands = {
        name: (prices.reach(chosen, name, low), prices.reach(chosen, name, high))
        for name, (low, high) in RANGES.items() if any(change.quantity == name for change in changes)}
    priced = planned if chosen == 0 else _with_predictions(price(problem, rates, plans[chosen]))
    rows = [(float(row[0]), float(row[chosen]), float(row.min())) for row in table]
    bound = min(planned.result.lower_bound_seconds, float(table[0].min()))
    num_plans = len({_without_predictions(plan) for plan in plans})
    return Robust(priced, bound, chosen == 0, changes, rows, stands, num_plans, num_whole, more_seconds)


def _preferred(
    problem: Problem, plans: Sequence[ExecutionPlan], regrets: np.ndarray, seconds: np.ndarray, slack: float
) -> int:
    """Return the index of the plan to choose; the first one if it is as good as that."""
    if slack > 0:
        standings = [standing_of(problem, plan, 0.0)[:2] for plan in plans]
        within = np.flatnonzero(1 + regrets <= (1 + regrets.min()) * (1 + slack) * (1 + SAME)).tolist()
        first = min(standings[i] for i in within)
        among = [i for i in within if standings[i] == first]
    else:
        among = list(range(len(plans)))
    chosen = min(among, key=lambda i: (round(float(regrets[i]), 4), float(seconds[i])))
    return 0 if 0 in among and regrets[0] <= regrets[chosen] + 1e-4 else chosen


def _with_other_layouts(
    planned: Planned, problem: Problem, rates: Rates, deadline: Deadline
) -> ExecutionPlan:
    """Return the plan in which local search under a change ends, or the best so far when the time is over.

    It begins with the given plan, and changes the candidate of one call group at a time among those of the
    given plan's search, whose seconds as expected say which are tried first.
    """
    space = planned.space
    chosen = planned.result.chosen
    plan = planned.plan
    seconds = predict(problem, rates, plan).step_seconds
    is_better = True
    while is_better:
        is_better = False
        for index in range(len(space.groups)):
            for other in _neighbours(space, chosen, index):
                if deadline.left <= 0:
                    return plan
                if space.memory.excess(np.array([other]))[0] > 0:
                    continue
                tried = ExecutionPlan(space.call_plans(other))
                if (takes := predict(problem, rates, tried).step_seconds) < seconds * (1 - SAME):
                    chosen = other
                    plan = tried
                    seconds = takes
                    is_better = True
    return plan


def _neighbours(space: SearchSpace, chosen: tuple[int, ...], index: int) -> list[tuple[int, ...]]:
    """Return plans that differ in the layout of one call group: the fastest few as expected."""
    candidates = space.groups[index].candidates
    plans = np.repeat(np.array([chosen]), len(candidates), axis=0)
    plans[:, index] = np.arange(len(candidates))
    found: dict[object, tuple[int, ...]] = {candidates[chosen[index]].layout: chosen}
    for row in np.argsort(space.periods(plans, exact=False), kind="stable").tolist():
        if len(found) > _MOST_NEIGHBOURS:
            break
        found.setdefault(candidates[row].layout, tuple(plans[row].tolist()))
    return [plan for plan in found.values() if plan != chosen]


class _SecondsUnderChanges:
    """The seconds per step of some plans under changes."""

    def __init__(self, problem: Problem, rates: Rates, plans: Sequence[ExecutionPlan]) -> None:
        self._problem = problem
        self._rates = rates
        self._plans = plans

    def under(self, change: Change) -> list[float]:
        changed = change.of(self._problem, self._rates)
        return [predict(*changed, plan).step_seconds for plan in self._plans]

    def reach(self, chosen: int, quantity: str, end: float) -> float:
        """Return the factor, from 1 towards an end of the range, up to which the chosen plan stands."""
        def stands(factor: float) -> bool:
            seconds = self.under(Change(quantity, factor))
            return seconds[chosen] <= min(seconds) * (1 + STANDS + SAME)

        if stands(end):
            return end
        if not stands(1.0):
            return 1.0
        holds = 1.0
        fails = end
        for _ in range(_BISECTIONS):
            middle = (holds + fails) / 2 if end == 0 else math.sqrt(holds * fails)
            if stands(middle):
                holds = middle
            else:
                fails = middle
        return holds


def _without_predictions(plan: ExecutionPlan) -> str:
    return repr({name: replace(call_plan, predicted={}) for name, call_plan in plan.calls.items()})


def _with_predictions(priced: PricedPlan) -> PricedPlan:
    """Return a plan that was found under a change with what is predicted without it."""
    calls = {}
    for name, call_plan in priced.plan.calls.items():
        cost = priced.costs.get(name)
        predicted = {} if cost is None else {"seconds": float(f"{cost.seconds:.6g}")}
        calls[name] = replace(call_plan, predicted=predicted)
    whole = {"step_seconds": float(f"{priced.step_seconds:.6g}")}
    return replace(priced, plan=ExecutionPlan(calls, whole))
