"""The prediction for a given plan agrees with the planner that found it."""

import random
from pathlib import Path

import pytest

from realhf.layout import Layout
from realhf.plan import CallPlan, ExecutionPlan
from realhf.planner.make import make_plan
from realhf.planner.rates import Rates
from realhf.planner.step_time import predict
from tests.planner.problems import random_problem
from tests.samples import drawn


@pytest.mark.parametrize("seed", drawn(range(6), 2))
def test_the_planner_and_the_prediction_agree(seed: int):
    problem = random_problem(random.Random(seed), num_calls=3)
    rates = Rates(problem.cluster)
    planned = make_plan(problem, rates, time_limit=5.0, gap=0.01)
    predicted = predict(problem, rates, planned.plan)
    assert predicted.step_seconds == pytest.approx(planned.result.step_seconds)
    for call in problem.model_calls:
        seconds = planned.plan[call.name].predicted["seconds"]
        assert predicted.calls[call.name].seconds == pytest.approx(seconds, rel=1e-5)


def test_found_plans_survive_their_files(tmp_path: Path):
    problem = random_problem(random.Random(2), num_calls=4)
    plan = make_plan(problem, Rates(problem.cluster), time_limit=5.0, gap=0.1).plan
    plan.save(tmp_path / "plan.yaml")
    again = ExecutionPlan.load(str(tmp_path / "plan.yaml"))
    assert again == plan and again.num_ranks <= problem.cluster.num_devices
    assert 0 < again.predicted["lower_bound_seconds"] <= again.predicted["step_seconds"]
    for call in problem.model_calls:
        assert again[call.name].predicted["seconds"] > 0


@pytest.mark.parametrize("seed", drawn(range(20), 4))
def test_plans_may_leave_out_plain_python(seed: int):
    problem = random_problem(random.Random(seed), num_calls=4)
    rates = Rates(problem.cluster)
    planned = make_plan(problem, rates, time_limit=5.0, gap=0.1)
    model_calls = {call.name: planned.plan[call.name] for call in problem.model_calls}
    on_rank_0 = {call.name: CallPlan(Layout.parse("d1@0")) for call in problem.graph.calls} | model_calls
    expected = predict(problem, rates, ExecutionPlan(on_rank_0))
    assert predict(problem, rates, ExecutionPlan(model_calls)).step_seconds == expected.step_seconds
