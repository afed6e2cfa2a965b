"""Plans of experts beside the planner's (benchmarks/expert_plans.py)."""

from dataclasses import replace

import pytest

from benchmarks import expert_plans
from realhf.execution_plan import ExecutionPlan
from realhf.planner.memory_account import check_memory
from realhf.planner.step_time import predict
from tests.samples import drawn

CASES = {case.name: case for case in expert_plans.CASES}


@pytest.mark.parametrize("name", drawn(CASES, 4))
def test_an_expert_gives_every_call_a_layout_and_generation_as_many_rows_as_fit(name):
    case = CASES[name]
    problem = case.problem()
    plan = expert_plans.expert_plan(case, problem)
    assert {*plan.calls} == {call.name for call in problem.model_calls} == {*case.layouts}
    priced = expert_plans.price(problem, expert_plans.Rates(problem.cluster), plan)
    assert priced.step_seconds == predict(problem, priced.rates, plan).step_seconds
    assert priced.memory.fits
    rows = plan["actor_generate"].max_rows
    more = replace(plan["actor_generate"], max_rows=rows + 1)
    larger = check_memory(problem, ExecutionPlan({**plan.calls, "actor_generate": more}))
    assert rows == 512 or larger.by_call["actor_generate"].excess_bytes > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if "1024" not in name])
def test_no_expert_is_faster_than_the_planner(name):
    expert, ours = expert_plans.compared(CASES[name], time_limit=60.0)
    assert ours.step_seconds <= expert.step_seconds * 1.01
    assert ours.result.lower_bound_seconds <= expert.step_seconds
