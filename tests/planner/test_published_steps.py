"""Published steps of another system, predicted from its layouts (benchmarks/compare/published_steps.py)."""

from dataclasses import replace

import pytest

from benchmarks.compare import published_rows, published_steps
from realhf.planner.efficiencies import EFFICIENCIES
from realhf.planner.make import make_plan
from realhf.planner.rates import Rates


@pytest.fixture(scope="module")
def rows():
    return [published_steps.predicted(row) for row in published_rows.ROWS]


@pytest.mark.slow
def test_published_steps_are_predicted(rows):
    missed = [goal for goal in published_steps.goals(rows) if not goal.met]
    assert not missed


def test_each_model_is_published_in_both_modes():
    pairs = zip(published_rows.ROWS[::2], published_rows.ROWS[1::2], strict=True)
    assert [(a.model, a.is_lagged, b.is_lagged) for a, b in pairs] == [
        (a.model, False, True) for a in published_rows.ROWS[::2]]


@pytest.mark.slow
def test_the_goals_can_be_missed(rows):
    """Devices that reach their peaks, without host time, would be far too fast, above all with experts."""
    ideal = replace(
        EFFICIENCIES["h100"], matmul=1.0, grouped_matmul=1.0, attention=1.0, memory=1.0, link=1.0,
        kernel_seconds=0.0, launch_seconds=0.0, step_seconds=0.0, row_seconds=0.0,
    )
    row = published_rows.ROWS[6]
    seconds = published_steps.step_seconds(row, published_steps.peer_seconds(row, ideal))
    assert seconds < 0.67 * row.seconds < 0.67 * 1.5 * rows[6]["predicted_seconds"]


def test_published_layouts_use_the_published_devices():
    for row in published_rows.ROWS:
        plans = published_steps.call_plans(row, published_steps.problem_for(row))
        generate, train = (plans[name].layout for name in ("actor_generate", "actor_train"))
        tp, cp, _, pp = row.train
        assert (generate.tp, train.tp, train.cp, train.pp) == (row.generation_tp, tp, cp, pp)
        assert {*generate.ranks} | {*train.ranks} == {*range(row.devices)}
        assert bool({*generate.ranks} & {*train.ranks}) != row.is_lagged


@pytest.mark.slow
def test_our_first_plan_for_experts_on_256_devices_is_as_fast_as_the_published_layouts():
    """Before any tree is searched, as the trees come too late in a short search."""
    row = next(r for r in published_rows.ROWS if r.model == "deepseek-v3" and not r.is_lagged)
    problem = published_steps.problem_for(row)
    rates = Rates(problem.cluster, path=row.path)
    planned = make_plan(problem, rates, time_limit=120, max_iterations=0, explain=False)
    parts = published_steps.peer_seconds(row)
    peers = sum(parts[call.name] for call in problem.model_calls)
    assert planned.result.step_seconds <= 1.01 * peers
