"""The period of a plan is compared with ranks that walk through many steps, one call after the other."""

import random

import numpy as np
import pytest

from realhf.planner.make import simulate
from realhf.planner.rates import Rates
from realhf.planner.search_space import SearchSpace
from realhf.planner.step_time import first_starts
from tests.planner.problems import random_problem, ranks_and_seconds
from tests.samples import drawn

NUM_STEPS = 400
ALL_CYCLES = 60  # A multiple of the length of any pattern of up to six steps.


def walk(space, chosen):
    """Return the end of every step when each rank runs its calls in graph order and waits for inputs and
    weights.

    A rank that only sends weights does so after training, and one that receives them before it uses them;
    both lose a part of their time.
    """
    by_call = ranks_and_seconds(space, chosen)
    moving = space.moving(np.array([chosen]))[0]
    arrived, sends, receives = {}, {}, {}  # By trainer, by (trainer, rank), by user.
    sending, receiving = space.needs.busy_shares
    for (user, trainer, _), amount in zip(space.needs.weights, moving, strict=True):
        alone = max(0.0, amount - arrived.get(trainer, 0.0))
        arrived[trainer] = max(amount, arrived.get(trainer, 0.0))
        receives[user] = receives.get(user, 0.0) + receiving * alone
        for rank in {*by_call[trainer][0]} - {*by_call[user][0]}:
            sends[trainer, rank] = sends.get((trainer, rank), 0.0) + sending * alone
    free, ends = {}, {}
    finished = []
    for step in range(NUM_STEPS):
        for i in range(len(space.calls)):
            ranks, seconds = by_call[i]
            start = max([0.0, *(free[rank] + receives.get(i, 0.0) for rank in ranks if rank in free)])
            for j in range(len(space.calls)):
                if np.isfinite(space.needs.data[i, j]):
                    start = max(start, ends[step, j] + space.needs.data[i, j])
            start += space.needs.receiving[i]
            for (user, trainer, lag), amount in zip(space.needs.weights, moving, strict=True):
                if user == i and step >= lag:
                    start = max(start, ends[step - lag, trainer] + amount)
            ends[step, i] = start + seconds
            free |= {rank: start + seconds + sends.get((i, rank), 0.0) for rank in ranks}
        finished.append(max(free.values()))
    return finished, ends


@pytest.mark.parametrize("seed", drawn(range(40), 5))
def test_period_is_what_ranks_need_that_walk(seed):
    rng = random.Random(seed)
    problem = random_problem(rng, num_calls=rng.randint(1, 6))
    space = SearchSpace(problem, Rates(problem.cluster))
    for _ in range(5):
        chosen = [rng.randrange(len(group.candidates)) for group in space.groups]
        finished, _ = walk(space, chosen)
        walked = (finished[-1] - finished[-1 - ALL_CYCLES]) / ALL_CYCLES
        period = space.exact_periods(np.array([chosen]))[0]
        assert walked == pytest.approx(period, rel=1e-9)
        assert finished[-1] >= (NUM_STEPS - len(space.calls)) * period * (1 - 1e-9)
        bound = space.periods(np.array([chosen]), exact=False)[0]
        assert bound <= period * (1 + 1e-12)


@pytest.mark.parametrize("seed", range(10))
def test_first_starts_are_those_of_ranks_that_walk(seed):
    rng = random.Random(seed)
    problem = random_problem(rng, num_calls=rng.randint(2, 6))
    space = SearchSpace(problem, Rates(problem.cluster))
    chosen = [rng.randrange(len(group.candidates)) for group in space.groups]
    _, ends = walk(space, chosen)
    plans = np.array([chosen])
    seconds, first, stop = (array[0] for array in space.call_times(plans))
    shares = (first[:, None] < stop) & (first < stop[:, None])
    times = space.call_times(plans)
    busy = space.needs.busy(space.moving(plans), times.first, times.stop)[0]
    starts = first_starts(space.needs, seconds, shares, space.moving(plans)[0], busy, num_steps=5)
    for step in range(5):
        for i in range(len(seconds)):
            assert starts[step, i] + seconds[i] == pytest.approx(ends[step, i])


@pytest.mark.parametrize("seed", range(10))
def test_simulated_devices_do_one_thing_at_a_time(seed):
    rng = random.Random(seed)
    problem = random_problem(rng, num_calls=rng.randint(2, 6))
    space = SearchSpace(problem, Rates(problem.cluster))
    simulation = simulate(space, np.array([rng.randrange(len(group.candidates)) for group in space.groups]))
    period = simulation.step_seconds
    for rank in range(problem.cluster.num_devices):
        here = [a for a in simulation.timeline
                if a.kind != "realloc" and a.first_rank <= rank < a.first_rank + a.num_ranks]  # fmt: skip
        busy = sorted((a.start, a.end) for a in here)
        for (_, end), (start, _) in zip(busy, busy[1:], strict=False):
            assert start >= end - 1e-9 * period
        if busy:  # The next step begins here when this one is over.
            assert busy[-1][1] <= busy[0][0] + period * (1 + 1e-9)
        share = sum(end - start for start, end in busy) / period
        assert simulation.idle[rank] == pytest.approx(1 - share, abs=1e-9)
