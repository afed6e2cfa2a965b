"""Predicted seconds of a given plan: of each call, of reallocations, and of a step in the steady state."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from realhf.layout import Layout
from realhf.plan import CallPlan, ExecutionPlan
from realhf.planner.cost import CallCost, call_cost
from realhf.planner.dependencies import dependencies, reallocation_seconds
from realhf.planner.problem import Problem
from realhf.planner.rates import Rates
from realhf.planner.throughput import periods, shared_core_seconds
from realhf.planner.transfer import ContiguousLayout

_RANK_0 = Layout.parse("d1@0")


@dataclass(frozen=True)
class Prediction:
    """Seconds of a step in the steady state, and the cost of each call alone."""

    step_seconds: float
    calls: Mapping[str, CallCost]


def predict(problem: Problem, rates: Rates, plan: ExecutionPlan) -> Prediction:
    """Return the prediction for a plan whose layouts are on contiguous ranks."""
    costs = {}
    for call in problem.model_calls:
        call_plan = plan[call.name]
        per_host = min(problem.cluster.count_by_host(call_plan.layout.ranks).values())
        workload = problem.workloads[call.name]
        costs[call.name] = call_cost(
            rates, call, problem.model_role(call), workload, call_plan, per_host=per_host
        )
    seconds = {name: cost.seconds for name, cost in costs.items()}
    return Prediction(step_seconds(problem, rates, plan, seconds), costs)


def step_seconds(
    problem: Problem, rates: Rates, plan: ExecutionPlan, call_seconds: Mapping[str, float]
) -> float:
    """Return the seconds of a step in the steady state if calls take `call_seconds`.

    Calls in plain Python that the plan leaves out run on rank 0, as in a run.
    """
    left_out = {call.name: CallPlan(_RANK_0) for call in problem.graph.calls if call.role is None}
    plan = ExecutionPlan({**left_out, **plan.calls})
    calls = problem.calls
    needs = dependencies(problem, rates)
    layouts = [plan[call.name].layout for call in calls]
    ranges = [ContiguousLayout(layout.strategy, layout.ranks[0]) for layout in layouts]
    shares = np.array([[bool({*a.ranks} & {*b.ranks}) for b in layouts] for a in layouts])
    moving = [
        reallocation_seconds(rates, problem.model_role(calls[j]), ranges[j], ranges[i])
        for i, j, _ in needs.weights
    ]
    host = {
        call.name: problem.workloads[call.name].seconds / plan[call.name].layout.dp
        for call in calls if call.role is None
    }  # fmt: skip
    seconds = np.array([[{**host, **call_seconds}[call.name] for call in calls]])
    period = periods(needs, seconds, shares[None], moving=np.array(moving).reshape(1, -1))[0]
    first = np.array([[layout.ranks[0] for layout in layouts]])
    stop = np.array([[layout.ranks[-1] + 1 for layout in layouts]])
    return float(max(period, shared_core_seconds(problem.cluster, seconds, first, stop)[0]))
