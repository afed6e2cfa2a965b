"""Processes that share the cores of a host: costs of calls, periods of plans, and the search over them."""

import random
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.measure.shared_cores import among_neighbours
from realhf.cluster import Cluster
from realhf.execution_plan import ExecutionPlan
from realhf.planner.rates import Rates
from realhf.planner.search_space import SearchSpace
from realhf.planner.shared_cores import SharedCores
from realhf.planner.step_time import Dependencies, _waits, have_common_ranks, predict
from tests.planner.problems import random_problem, ranks_and_seconds
from tests.planner.test_search import agrees
from tests.samples import drawn, marked


def take_turns(num_stages, num_micro_batches, num_cores):
    """Return the seconds of a pipeline whose stages take 1 per micro-batch, on cores that are shared evenly.

    Each stage works on the micro-batches in order, once the stage before has passed them on.
    """
    left = np.ones((num_stages, num_micro_batches))
    now = 0.0
    while left.any():
        ready = []
        for stage, row in enumerate(left):
            undone = np.flatnonzero(row > 0)
            if len(undone) and (stage == 0 or left[stage - 1, undone[0]] == 0):
                ready.append((stage, undone[0]))
        speed = min(1.0, num_cores / len(ready))
        least = min(left[at] for at in ready)
        for at in ready:
            left[at] = 0.0 if left[at] <= least + 1e-12 else left[at] - least
        now += least / speed
    return now


@pytest.mark.parametrize("num_cores", [1, 2, 4])
@pytest.mark.parametrize(("num_stages", "num_micro_batches"), [(1, 3), (2, 4), (4, 1), (4, 4), (4, 16)])
def test_ranks_that_work_use_the_cores_of_those_that_wait(num_stages, num_micro_batches, num_cores):
    """The price is a lower bound of the time under fair sharing, and exact for one stage or enough cores."""
    alone = take_turns(num_stages, num_micro_batches, num_stages)
    assert alone == num_stages + num_micro_batches - 1
    parts = {"compute": float(num_micro_batches), "pipeline": num_stages - 1.0}
    crowding = max(1.0, num_stages / num_cores)
    seconds, by_cause = SharedCores.of_call(
        alone, parts, waiting="pipeline", crowding=[crowding], mean_share=1.0)
    taken = take_turns(num_stages, num_micro_batches, num_cores)
    assert seconds <= taken * (1 + 1e-9)
    assert seconds >= 0.65 * taken
    if crowding == 1 or num_stages == 1 or num_cores == 1:
        assert seconds == pytest.approx(taken)
    assert sum(by_cause.values()) == pytest.approx(seconds)


@pytest.mark.parametrize("num_cores", [1, 2, 4])
@pytest.mark.parametrize(("replicas", "tp"), [(2, 1), (4, 1), (2, 2), (6, 1)])
def test_the_slowest_replica_has_the_cores_for_itself_in_the_end(replicas, tp, num_cores):
    """Compare with fair sharing among the slowest replica, which takes 3 s alone, and others whose times are
    spread evenly around a mean of 1.2 s."""
    others = [2.4 * (i + 0.5) / (replicas - 1) for i in range(replicas - 1)]
    left = [time for time in (3.0, *others) for _ in range(tp)]
    taken = 0.0
    while left:
        least = min(left)
        taken += least * max(1.0, len(left) / num_cores)
        left = [each - least for each in left if each > least + 1e-12]
    mean_share = (3.0 + sum(others)) / replicas / 3.0
    seconds, by_cause = SharedCores.of_call(
        3.0, {"compute": 3.0}, waiting="pipeline", mean_share=mean_share,
        crowding=[max(1.0, k * tp / num_cores) for k in range(1, replicas + 1)])
    assert seconds == pytest.approx(taken)
    assert sum(by_cause.values()) == pytest.approx(taken)


@pytest.mark.parametrize(
    ("ranks", "num_cores", "expected"),
    [((2, 2), 2, (2.0, 4.0)), ((1, 1), 2, (1.0, 3.0)), ((1, 3), 2, (1.5, 3.5)), ((2, 2), 4, (1.0, 3.0)),
     ((1, 1), 1, (2.0, 4.0))],
)
def test_calls_on_other_ranks_use_the_same_cores(ranks, num_cores, expected):
    """Calls of 1 and of 3 s run beside each other; then comes one on all ranks.

    While both run, each gets its part of the cores that they could use.
    """
    num_ranks = sum(ranks)
    cluster = replace(Cluster.load("h100-1x8"), devices_per_host=num_ranks, cores_per_host=num_cores)
    nothing = np.full((3, 3), -np.inf)
    needs = Dependencies(nothing, nothing, (), np.zeros(3))
    first, stop = np.array([0, ranks[0], 0]), np.array([ranks[0], num_ranks, num_ranks])
    shares = have_common_ranks(first[None], stop[None])
    same, before = _waits(needs, np.zeros((1, 3)), shares, None, None)
    waits = same[..., 0], before[..., 0]
    found = among_neighbours(cluster, np.array([1.0, 3.0, 5.0]), first, stop, waits)
    assert found == pytest.approx([*expected, 5.0])


def _shared(seed, *, cores):
    problem = random_problem(random.Random(seed), num_calls=3, memory=1.6e9)
    return replace(problem, cluster=replace(problem.cluster, cores_per_host=cores))


@pytest.mark.parametrize("seed", drawn(range(20), 6))
def test_a_step_takes_at_least_as_long_as_the_cores_of_a_host_work(seed):
    problem = _shared(seed, cores=2)
    space = SearchSpace(problem, Rates(problem.cluster))
    rng = random.Random(seed)
    chosen = [rng.randrange(len(group.candidates)) for group in space.groups]
    per_host = problem.cluster.devices_per_host
    busiest = 0.0
    for host in range(problem.cluster.num_hosts):
        here = set(range(host * per_host, (host + 1) * per_host))
        calls = ranks_and_seconds(space, chosen).values()
        working = [seconds * min(2, len(here & set(ranks))) for ranks, seconds in calls]
        busiest = max(busiest, sum(working) / 2)
    period = space.exact_periods(np.array([chosen]))[0]
    uncrowded = replace(problem.cluster, cores_per_host=None)
    space.problem = replace(problem, cluster=uncrowded)
    assert period == pytest.approx(max(busiest, space.exact_periods(np.array([chosen]))[0]))


@pytest.mark.parametrize(("seeds", "least"), marked([(range(10), 2), (range(10, 40), 6)], quick=[0]))
@pytest.mark.slow
def test_the_search_finds_the_best_of_all_plans_on_shared_cores(seeds, least):
    solved = []
    for seed in seeds:
        problem = _shared(seed, cores=1 + seed % 2)
        space = SearchSpace(problem, Rates(problem.cluster))
        if 0 < np.prod([float(len(group.candidates)) for group in space.groups]) <= 20_000:
            solved.append(agrees(seed, space))
    assert sum(solved) >= least


@pytest.mark.parametrize("seed", range(6))
def test_plans_are_predicted_as_the_search_prices_them(seed):
    problem = _shared(seed, cores=2)
    rates = Rates(problem.cluster)
    space = SearchSpace(problem, rates)
    chosen = [len(group.candidates) // 2 for group in space.groups]
    plan_calls = space.call_plans(chosen)
    period = space.exact_periods(np.array([chosen]))[0]
    assert predict(problem, rates, ExecutionPlan(plan_calls)).step_seconds == pytest.approx(period)
