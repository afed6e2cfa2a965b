"""Bounds from calls between two others: none exceeds a step, and the calls between two are found."""

import random

import numpy as np
import pytest

from realhf.planner.rates import Rates
from realhf.planner.search_space import SearchSpace
from realhf.planner.step_time import Dependencies
from realhf.planner.tree_search import find_calls_between, seconds_between, tables_between
from tests.planner.problems import random_lagged_problem, random_problem
from tests.planner.test_memory_account import unfinished
from tests.samples import marked


@pytest.mark.parametrize("seeds", marked([range(15), range(150)], quick=[0]))
def test_no_bound_exceeds_the_step_of_a_plan(seeds):
    """Whole plans and unfinished ones, with and without lag."""
    ratios = []
    for seed in seeds:
        rng = random.Random(seed)
        if seed % 3:
            problem = random_problem(rng, num_calls=rng.randint(4, 6))
        else:
            problem = random_lagged_problem(rng, num_calls=rng.randint(4, 6), lag=1, rounds=1 + seed % 2)
        space = SearchSpace(problem, Rates(problem.cluster))
        all_between = find_calls_between(space.needs)
        if not all_between:
            continue
        devices = problem.cluster.num_devices
        tables = tables_between(all_between, space.groups, devices)
        for _ in range(20):
            plan = [rng.randrange(len(group.candidates)) for group in space.groups]
            period = space.exact_periods(np.array([plan]))[0]
            begun = np.array([plan, *(unfinished(rng, space, plan) for _ in range(3))])
            by_table = sum(table[choice] for table, choice in zip(tables, begun.T, strict=True)).max(axis=1)
            by_call = seconds_between(all_between, *space.call_times(begun), devices)
            assert by_call[0] >= by_table[0] * (1 - 1e-9)  # Calls in plain Python are in no table.
            ratios += (np.maximum(by_table, by_call) / period).tolist()
    assert max(ratios) <= 1 + 1e-9 and len(ratios) > 3 * len(seeds)
    assert np.quantile(ratios, 0.9) > 0.5


def test_calls_between_generation_and_training_are_found():
    """Calls 1 and 2 read what call 0 makes, call 3 reads theirs, and call 0 waits for what call 3 trains."""
    data = np.full((5, 5), -np.inf)
    for i, j in ((1, 0), (2, 0), (3, 1), (3, 2), (4, 0)):
        data[i, j] = 0.0
    needs = Dependencies(data, np.full((5, 5), -np.inf), ((0, 3, 1), (4, 3, 1)), np.zeros(5))
    (between,) = find_calls_between(needs)
    assert between == (0, (1, 2), 3)
    seconds, first = np.array([[5.0, 2.0, 3.0, 7.0, 100.0]]), np.zeros((1, 5), int)
    stop = np.array([[4, 4, 2, 4, 4]])
    found = seconds_between([between], seconds, first, stop, 4)[0]
    assert found == pytest.approx(5 + (2 * 4 + 3 * 2) / 4 + 7)
