"""Predicted seconds of a given plan: of each call, of reallocations, and of a step in the steady state."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from realhf.graph import FunctionCall
from realhf.layout import Layout
from realhf.plan import CallPlan, ExecutionPlan
from realhf.planner.cost.call_cost import CallCost, call_cost
from realhf.planner.cost.dependencies import dependencies, moving_seconds
from realhf.planner.cost.neighbours import seconds_with_neighbours
from realhf.planner.cost.parameter_boxes import ContiguousLayout
from realhf.planner.cost.rank_groups import ranks_per_host
from realhf.planner.cost.rates import Rates
from realhf.planner.cost.throughput import step_periods
from realhf.planner.workload.problem import Problem

_RANK_0 = Layout.parse("d1@0")


@dataclass(frozen=True)
class Prediction:
    """Seconds of a step in the steady state, and the cost of each call alone.

    `call_seconds` are those of calls among their neighbours, with which they may share cores.
    """

    step_seconds: float
    calls: Mapping[str, CallCost]
    call_seconds: Mapping[str, float]


def predict(problem: Problem, rates: Rates, plan: ExecutionPlan) -> Prediction:
    """Return the prediction for a plan whose layouts are on contiguous ranks."""
    costs = {
        call.name: cost_of(problem, rates, call, plan[call.name], plan[call.name].layout.ranks)
        for call in problem.model_calls}
    alone = {name: cost.seconds for name, cost in costs.items()}
    step, among_others = _step_and_call_seconds(problem, rates, plan, alone)
    return Prediction(step, costs, {name: among_others[name] for name in costs})


def cost_of(
    problem: Problem, rates: Rates, call: FunctionCall, call_plan: CallPlan, ranks: Collection[int]
) -> CallCost:
    """Return the cost of a call alone on some ranks."""
    return call_cost(
        rates.at(ranks), call, problem.model_role(call), problem.workloads[call.name], call_plan,
        per_host=ranks_per_host(problem.cluster, ranks))


def step_seconds(
    problem: Problem, rates: Rates, plan: ExecutionPlan, call_seconds: Mapping[str, float]
) -> float:
    """Return the seconds of a step in the steady state if calls take `call_seconds`."""
    return _step_and_call_seconds(problem, rates, plan, call_seconds)[0]


def _step_and_call_seconds(
    problem: Problem, rates: Rates, plan: ExecutionPlan, call_seconds: Mapping[str, float]
) -> tuple[float, dict[str, float]]:
    """Return the seconds of a step, and of each call among its neighbours.

    Calls in plain Python that the plan leaves out run on rank 0, as in a run.
    """
    left_out = {call.name: CallPlan(_RANK_0) for call in problem.graph.calls if call.role is None}
    plan = ExecutionPlan({**left_out, **plan.calls})
    calls = problem.calls
    needs = dependencies(problem, rates)
    layouts = [plan[call.name].layout for call in calls]
    ranges = [ContiguousLayout(layout.strategy, layout.ranks[0]) for layout in layouts]
    moving = moving_seconds(rates, problem, needs, dict(enumerate(ranges)))
    first = np.array([[min(layout.ranks) for layout in layouts]])
    stop = np.array([[max(layout.ranks) + 1 for layout in layouts]])
    host = {
        call.name: problem.workloads[call.name].seconds_on(plan[call.name].layout.dp)
        for call in calls if call.role is None}
    seconds = np.array([[{**host, **call_seconds}[call.name] for call in calls]])
    step = float(step_periods(problem.cluster, needs, seconds, first, stop, moving=moving)[0])
    among_others = seconds_with_neighbours(
        problem.cluster, needs, seconds[0], first[0], stop[0], moving=moving[0],
        busy=needs.busy(moving, first, stop)[0])
    return step, dict(zip((call.name for call in calls), among_others.tolist(), strict=True))
