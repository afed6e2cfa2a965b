"""Among plans that are nearly as fast, the one with reserves of memory and simpler layouts is chosen."""

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest

from realhf.planner.make import make_plan
from realhf.planner.rates import Rates
from realhf.planner.reserves import _LEVEL, ENOUGH_FREE, preferred
from realhf.planner.search import search
from realhf.planner.search_space import SearchSpace
from tests.planner.problems import random_problem
from tests.samples import marked


def small_spaces(count):
    """Yield spaces of at most 3,000 plans with their fastest plan, in which memory is scarce."""
    for seed in itertools.count():
        rng = random.Random(seed)
        problem = random_problem(rng, num_calls=2, memory=1.56e9 + 10 ** rng.uniform(7.0, 8.3))
        if problem.cluster.num_devices > 4:
            continue
        space = SearchSpace(problem, Rates(problem.cluster))
        if not 1 < math.prod(len(group.candidates) for group in space.groups) <= 3000:
            continue
        if found := search(space, time_limit=20.0):
            yield space, np.array(found.chosen)
            count -= 1
        if not count:
            return


def place(space, chosen):
    """Return what makes a plan better or worse, apart from memory."""
    plan = space.call_plans(chosen)
    calls = [call.name for call in space.problem.model_calls]
    layouts = {str(plan[name].layout): plan[name].layout for name in calls}
    hosts = {rank // space.problem.cluster.devices_per_host for x in layouts.values() for rank in x.ranks}
    sizes = [n for x in layouts.values() for n in (x.tp, x.strategy.num_replicas, x.cp, x.pp, x.ep)]
    return len(layouts), len(hosts), sum(n > 1 for n in sizes)


@pytest.mark.parametrize("count", marked([6, 60], quick=[0]))
def test_no_plan_within_the_slack_has_more_reserves(count):
    """Beside all plans of small spaces; local search may miss the simplest layouts, but rarely."""
    missed = 0
    for space, fastest in small_spaces(count):
        plans = np.array(list(itertools.product(*(range(len(group.candidates)) for group in space.groups))))
        seconds = space.exact_periods(plans)
        fits = space.memory.excess(plans) <= 0
        least = float(seconds[fits].min())
        found = preferred(space, fastest, slack=0.05, time_limit=20.0)
        chosen = tuple(fastest.tolist()) if found is None else found.chosen

        def standing(row, space=space, plans=plans):
            plan = tuple(int(i) for i in plans[row])
            free = -space.memory.counted_excess(plan) / space.capacity
            return max(0, math.ceil((ENOUGH_FREE - free) / _LEVEL - 1e-9)), place(space, plan)

        within = np.flatnonzero(fits & (seconds <= least * 1.05 * (1 + 1e-12)))
        (row,) = np.flatnonzero((plans == np.array(chosen)).all(axis=1))
        assert row in within
        assert standing(row) <= standing(np.flatnonzero((plans == fastest).all(axis=1))[0])
        missed += standing(row) != min(map(standing, within))
        if found is not None:
            assert found.step_seconds == pytest.approx(seconds[row])
            assert "the fastest plan found takes" in found.sentence
    assert missed <= count // 6


@pytest.mark.parametrize("count", marked([1, 20], quick=[0]))
def test_a_plan_that_is_preferred_is_never_faster_than_the_fastest_one_found(count):
    """The search for reserves begins with a plan that is not the fastest, as one that a gap has ended."""
    is_any_faster = False
    for space, _ in small_spaces(count):
        plans = np.array(list(itertools.product(*(range(len(group.candidates)) for group in space.groups))))
        seconds = space.exact_periods(plans)
        seconds[space.memory.excess(plans) > 0] = np.inf
        near = np.flatnonzero(seconds <= seconds.min() * 1.3)
        for row in near[np.argsort(-seconds[near], kind="stable")][::10][:3]:
            if (found := preferred(space, plans[row], slack=0.3, time_limit=20.0)) is None:
                continue
            assert found.fastest_seconds <= min(found.step_seconds, seconds[row])
            assert found.step_seconds <= found.fastest_seconds * 1.3 * (1 + 1e-12)
            is_any_faster |= found.fastest_seconds < seconds[row]
        made = make_plan(space.problem, space.rates, time_limit=20.0, gap=0.05, slack=0.05, explain=False)
        if made.preference is not None:
            assert made.step_seconds == pytest.approx(made.preference.step_seconds)
            assert made.preference.fastest_seconds < made.step_seconds
    assert is_any_faster


def test_the_plan_says_what_its_longer_step_is_for():
    for space, _ in small_spaces(40):
        fast, safe = (
            make_plan(space.problem, space.rates, time_limit=20.0, slack=slack) for slack in (0.0, 0.3))
        assert fast.preference is None
        if safe.preference is not None and safe.preference.more_free_bytes:
            break
    lacking = [max(p.excess_bytes for p in made.memory.peaks.values()) for made in (fast, safe)]
    # As the search has found them; the micro-batches of both may since have grown.
    assert safe.preference.more_free_bytes == pytest.approx(lacking[0] - lacking[1], rel=0.05)
    assert safe.preference.fastest_seconds == pytest.approx(fast.result.step_seconds)
    assert fast.result.step_seconds < safe.result.step_seconds <= 1.3 * fast.result.step_seconds
    assert safe.result.step_seconds == pytest.approx(safe.step_seconds)
    assert "more free memory" in safe.preference.sentence
    assert replace(safe.result, step_seconds=fast.result.step_seconds).gap <= safe.result.gap
