"""The plan with the least largest regret over ranges of lengths and efficiencies."""

import random
from dataclasses import replace

import numpy as np
import pytest

from realhf.execution_plan import ExecutionPlan
from realhf.planner.deadline import Deadline
from realhf.planner.efficiencies import Efficiencies
from realhf.planner.lengths import geometric
from realhf.planner.make import make_plan
from realhf.planner.memory_account import check_memory
from realhf.planner.problem import Workload
from realhf.planner.ranges import RANGES, STANDS, Change, _with_other_layouts, robust_plan
from realhf.planner.rates import Rates
from realhf.planner.reserves import standing_of
from realhf.planner.step_time import predict
from tests.planner.problems import random_problem
from tests.samples import marked


@pytest.mark.parametrize("seed", marked(range(6), quick=[1]))
def test_the_regret_is_that_of_searches_under_each_change(seed):
    """The step under each change is the prediction, and a search there finds no better one."""
    problem = random_problem(random.Random(seed), num_calls=2)
    usual = Efficiencies(matmul=0.7, attention=0.5, memory=0.8, link=0.8, step_seconds=1e-3)
    rates = Rates(problem.cluster, usual)
    planned = make_plan(problem, rates, time_limit=30.0, max_iterations=20, explain=False)
    begun = []
    robust = robust_plan(planned, time_limit=60.0, gap=0.001, begin=begun.append)
    assert [*robust.changes][1:] == begun and len(begun) == 2 * len(RANGES)
    for change, (first, mine, best) in zip(robust.changes, robust.seconds, strict=True):
        changed = change.of(problem, rates)
        assert predict(*changed, planned.plan).step_seconds == pytest.approx(first)
        assert predict(*changed, robust.priced.plan).step_seconds == pytest.approx(mine)
        found = make_plan(*changed, time_limit=30.0, gap=0.001, explain=False).result
        assert best <= found.step_seconds * 1.002 and best >= found.lower_bound_seconds * (1 - 1e-9)
    assert robust.regret <= robust.first_regret + 1e-4
    assert robust.is_first == (robust.priced.plan is planned.plan)
    for name, (low, high) in robust.stands.items():
        assert RANGES[name][0] <= low <= 1 <= high <= RANGES[name][1]
    assert robust.lower_bound_seconds <= robust.priced.step_seconds * (1 + 1e-9)
    saved = ExecutionPlan.from_dict(robust.priced.plan.to_dict())
    assert saved.predicted["step_seconds"] == pytest.approx(robust.seconds[0][1], rel=1e-4)


def test_changes_are_what_they_say():
    problem = random_problem(random.Random(0), num_calls=3)
    rates = Rates(problem.cluster, Efficiencies(matmul=0.5, link=0.5, memory=0.5))
    slower = Change("products", 0.8).of(problem, rates)[1].efficiencies
    assert (slower.matmul, slower.link, slower.memory) == (pytest.approx(0.4), 0.5, 0.5)
    work = Workload(64, 10, 100, 1000, samples_per_prompt=8, alike=0.3)
    workloads = dict.fromkeys(problem.workloads, work)
    changed, same = Change("response_tokens", 2.0).of(replace(problem, workloads=workloads), rates)
    longer = next(iter(changed.workloads.values()))
    whole = geometric(100, 1000).survival
    twice = np.repeat(whole, 2)[:1000]  # Each length is doubled, and cut off at the same limit.
    assert longer.response_tokens == pytest.approx(twice.sum(), rel=0.01)
    assert longer.max_new_tokens == longer.lengths.limit == 1000 and same is rates
    alike = Change("length_correlation", 4.0).of(replace(problem, workloads=workloads), rates)[0]
    assert {work.alike for work in alike.workloads.values()} == {1.0}


def test_the_choice_stands_where_it_is_within_a_hundredth():
    problem = random_problem(random.Random(4), num_calls=3)
    rates = Rates(problem.cluster, Efficiencies(matmul=0.7, memory=0.8, link=0.8))
    planned = make_plan(problem, rates, time_limit=20.0, max_iterations=3, explain=False)
    robust = robust_plan(planned, time_limit=10.0, gap=0.05, begin=lambda change: None)
    by_change = dict(zip(robust.changes, robust.seconds, strict=True))
    for name, ends in robust.stands.items():
        for end, stands in zip(RANGES[name], ends, strict=True):
            _, mine, best = by_change[Change(name, end)]
            assert (stands == end) == (mine <= best * (1 + STANDS + 1e-9))
    assert robust.sentences[1].startswith("it stays within 1% of the best found ")


def test_nothing_is_claimed_about_ranges_without_searches_in_them():
    """In no time no search under a change ends; then the answer says so, and which limit suffices."""
    problem = random_problem(random.Random(4), num_calls=3)
    rates = Rates(problem.cluster, Efficiencies(matmul=0.7, memory=0.8, link=0.8))
    planned = make_plan(problem, rates, time_limit=20.0, max_iterations=3, explain=False)
    robust = robust_plan(planned, time_limit=1e-3, gap=0.05, begin=lambda change: None)
    assert robust.num_whole == 0 and robust.num_plans == 1 and robust.is_first
    said = " ".join(robust.sentences)
    assert "longer than the best" not in said and "it stays within" not in said
    assert f"0 of {2 * len(RANGES)} searches under a change found a plan in time" in said
    assert float(said.rsplit("--time-limit ", 1)[1]) >= 2 * len(RANGES)
    stopped = robust_plan(
        planned, time_limit=20.0, gap=0.05, begin=lambda change: None, should_stop=lambda: True)
    assert stopped.num_whole == 0 and stopped.sentences[0] == (
        "too little is known about these ranges: this is a choice among 1 plan")


@pytest.mark.parametrize("seed", marked(range(8), quick=[4]))
def test_a_plan_is_improved_under_a_change_without_new_layouts(seed):
    """Local search ends with a plan that fits, no slower than the one it began with, and above the bound."""
    problem = random_problem(random.Random(seed), num_calls=3)
    rates = Rates(problem.cluster, Efficiencies(matmul=0.7, memory=0.8, link=0.8))
    planned = make_plan(problem, rates, time_limit=20.0, max_iterations=3, explain=False)
    for change in (Change("products", 0.8), Change("links", 0.5)):
        changed = change.of(problem, rates)
        found = _with_other_layouts(planned, *changed, Deadline(20.0))
        seconds = predict(*changed, found).step_seconds
        whole = make_plan(
            *changed, time_limit=20.0, max_iterations=3, explain=False, start=planned.plan).result
        before = predict(*changed, planned.plan).step_seconds
        assert whole.lower_bound_seconds * (1 - 1e-9) <= seconds <= before
        assert whole.step_seconds <= before * (1 + 1e-9)
        assert check_memory(problem, found).fits
        assert _with_other_layouts(planned, *changed, Deadline(0.0)) is planned.plan


@pytest.mark.parametrize("seed", marked(range(12), quick=[2]))
def test_the_choice_over_ranges_has_the_reserves_of_the_choice_without_them(seed):
    """Unless those would cost more than the slack under some change."""
    slack = 0.1
    problem = random_problem(random.Random(seed), num_calls=2, memory=1.6e9)
    rates = Rates(problem.cluster)
    try:
        planned = make_plan(problem, rates, time_limit=20.0, max_iterations=3, slack=slack, explain=False)
    except ValueError:
        return  # Nothing fits.
    robust = robust_plan(planned, time_limit=60.0, gap=0.2, slack=slack, begin=lambda change: None)
    mine, first = (standing_of(problem, plan, 0.0)[:2] for plan in (robust.priced.plan, planned.plan))
    assert mine <= first or robust.regret < robust.first_regret
    assert 1 + robust.regret <= (1 + robust.first_regret) * (1 + slack) * (1 + 1e-9)
    assert robust.is_first or mine != first or robust.regret < robust.first_regret
