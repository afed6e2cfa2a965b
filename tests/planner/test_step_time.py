"""Seconds of a step: periods against simulated ranks, what calls wait for, and predictions of given plans."""

import itertools
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from realhf.cluster import Cluster, Link
from realhf.execution_plan import CallPlan, ExecutionPlan
from realhf.graph import DataflowGraph, FunctionCall
from realhf.layout import Layout
from realhf.models.model_config import ModelConfig
from realhf.models.param_spec import model_spec
from realhf.planner.links import ContiguousLayout, Span
from realhf.planner.make import make_plan, simulate
from realhf.planner.problem import ModelRole, Problem, Workload
from realhf.planner.rates import Rates
from realhf.planner.reallocation import arrivals, reallocation_seconds
from realhf.planner.search_space import SearchSpace
from realhf.planner.step_time import (
    _waits,
    busy_shares,
    dependencies,
    first_starts,
    have_common_ranks,
    one_step_periods,
    periods,
    predict,
)
from realhf.realloc.links import Links
from realhf.realloc.quantise import make_int8_schedules
from realhf.realloc.schedule import make_schedule
from realhf.runtime.compile.actions import ParameterSet, _copies
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
    for (user, trainer, *_), amount in zip(space.needs.weights, moving, strict=True):
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
            for (user, trainer, lag, _), amount in zip(space.needs.weights, moving, strict=True):
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
        assert space.quick_periods(np.array([chosen]))[0] <= bound * (1 + 1e-12) <= period * (1 + 2e-12)


def longest_chains(same, before):
    """Return the longest waits between calls of two steps, by trying all chains of calls."""
    num = len(same)
    longest = np.full((num, num), -np.inf)
    for length in range(num):
        for chain in itertools.combinations(range(num), length + 1):  # Each call waits for the one before.
            waits = sum(same[after, call] for call, after in itertools.pairwise(chain))
            for j in range(num):
                longest[chain[-1], j] = max(longest[chain[-1], j], waits + before[chain[0], j])
    return longest


@pytest.mark.parametrize("seed", range(5))
def test_bounds_from_cycles_of_one_and_two_steps(seed):
    rng = random.Random(seed)
    problem = random_problem(rng, num_calls=rng.randint(2, 6))
    space = SearchSpace(problem, Rates(problem.cluster))
    plans = np.array([[rng.randrange(len(g.candidates)) for g in space.groups] for _ in range(20)])
    seconds, first, stop = space.call_times(plans)
    moving = space.moving(plans)
    shares = (first[:, :, None] < stop[:, None]) & (first[:, None] < stop[:, :, None])
    assert np.array_equal(have_common_ranks(first, stop), shares)
    quick = one_step_periods(space.needs, seconds, shares)
    busy = space.needs.busy(moving, first, stop)
    found = periods(space.needs, seconds, shares, moving=moving, busy=busy, exact=False)
    for k in range(len(plans)):
        same, before = (waits[..., k] for waits in _waits(space.needs, seconds, shares, None, None))
        assert quick[k] == pytest.approx(np.diag(longest_chains(same, before)).max(), rel=1e-12)
        same, before = (waits[..., k] for waits in _waits(space.needs, seconds, shares, moving, busy))
        step = longest_chains(same, before)
        assert found[k] == pytest.approx(max(np.diag(step).max(), (step + step.T).max() / 2), rel=1e-12)


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
    rates = Rates(problem.cluster)
    space = SearchSpace(problem, rates)
    plan = ExecutionPlan(space.call_plans([rng.randrange(len(group.candidates)) for group in space.groups]))
    simulation = simulate(problem, rates, plan, predict(problem, rates, plan).calls)
    period = simulation.step_seconds
    for rank in range(problem.cluster.num_devices):
        here = [a for a in simulation.timeline
                if a.kind != "realloc" and a.first_rank <= rank < a.first_rank + a.num_ranks]
        busy = sorted((a.start, a.end) for a in here)
        for (_, end), (start, _) in zip(busy, busy[1:], strict=False):
            assert start >= end - 1e-9 * period
        if busy:  # The next step begins here when this one is over.
            assert busy[-1][1] <= busy[0][0] + period * (1 + 1e-9)
        share = sum(end - start for start, end in busy) / period
        assert simulation.idle[rank] == pytest.approx(1 - share, abs=1e-9)


CONFIG = ModelConfig("llama", 32000, 512, 1536, 8, 8, 4, 64)
SPEC = model_spec(CONFIG)
CLUSTER = Cluster(1, 8, 80e9, 1e12, 1e12, {"float32": 1e14}, Link(1e-9, 1e9))


def calls_of(*kinds):
    """Return calls of one role that read one another's outputs."""
    calls, key = [], "prompts"
    for number, kind in enumerate(kinds):
        outputs = () if kind == "train_step" else (f"key{number}",)
        calls.append(FunctionCall(f"call{number}", kind, (key,), outputs, "actor"))
        key = outputs[0] if outputs else key
    return calls


def problem_of(*kinds, cluster=CLUSTER, pins=()):
    calls = calls_of(*kinds)
    work = Workload(8, 64, 64, 64)
    return Problem(
        DataflowGraph(tuple(calls), ("prompts",)), {"actor": ModelRole(CONFIG, "float32", trainable=True)},
        {call.name: work for call in calls}, cluster,
        {call.name: Layout.parse(text) for call, text in zip(calls, pins, strict=False)},
    )


def placed(text):
    layout = Layout.parse(text)
    return ContiguousLayout(layout.strategy, layout.ranks[0])


def scheduled(source, target, *, sharded):
    """Return the seconds of a schedule at the bandwidth that the planner assumes."""
    links = Links.of_cluster(CLUSTER)
    schedule = make_schedule(
        SPEC, source=Layout.parse(source), target=Layout.parse(target), itemsize=4, sharded=sharded,
        links=links,
    )
    return schedule.seconds / Rates(CLUSTER).efficiencies.link


def scheduled_in_int8(source, target, *, sharded):
    schedules = make_int8_schedules(
        SPEC, source=Layout.parse(source), target=Layout.parse(target), itemsize=4, sharded=sharded,
        links=Links.of_cluster(CLUSTER))
    return sum(schedule.seconds for schedule in schedules) / Rates(CLUSTER).efficiencies.link


def test_fine_tuning_pays_for_gathering_what_replicas_have_updated():
    """The only call waits in each step until its ranks have the parts of the others (ZeRO-1)."""
    space = SearchSpace(problem_of("train_step", pins=["d8@0-7"]), Rates(CLUSTER))
    for chosen in range(len(space.groups[0].candidates)):
        plan = np.array([[chosen]])
        gathered = scheduled("d8@0-7", "d8@0-7", sharded=True)
        link = 1e9 * Rates(CLUSTER).efficiencies.link
        assert gathered == pytest.approx(7 / 8 * SPEC.numel * 4 / link, rel=0.05)
        waits = space.exact_periods(plan)[0] - space.call_times(plan).seconds[0, 0]
        assert waits == pytest.approx(gathered, rel=0.06)


def test_without_replicas_nothing_is_gathered():
    space = SearchSpace(problem_of("train_step", pins=["t4@0-3"]), Rates(CLUSTER))
    plan = np.array([[0]])
    assert space.exact_periods(plan)[0] == pytest.approx(space.call_times(plan).seconds[0, 0])


@pytest.mark.parametrize("seed", range(40))
def test_copies_are_free_where_the_runtime_makes_them_of_others(seed):
    rng = random.Random(seed)
    texts = ["d8@0-7", "d2t4@0-7", "t8@0-7", "d4t2@0-7", "p2d4@0-7", "d4@0-3", "t2p2@4-7", "d2t2p2@0-7"]
    home, *users = (rng.choice(texts) for _ in range(rng.randint(2, 4)))
    kinds = [rng.choice(["forward", "generate"]) for _ in users] + ["train_step"]
    calls = calls_of(*kinds)
    problem = problem_of(*kinds)
    problem = replace(problem, workloads={  # Generation is in int8.
        name: replace(work, weights="int8") for name, work in problem.workloads.items()})
    layouts = [*users, home]
    used = [("actor", problem.model_role(call)) for call in calls]
    times = arrivals(
        Rates(CLUSTER), problem, calls[-1], placed(home), list(zip(used, map(placed, layouts), strict=True)))
    parameters = ParameterSet("actor", "actor", trained=True)
    expected, elapsed = {}, 0.0
    copies = [
        Layout.parse(f"{layout}/int8" if kind == "generate" else layout)
        for layout, kind in zip(layouts, kinds, strict=True)]
    for copy in _copies(parameters, Layout.parse(home), list(dict.fromkeys(copies)), SPEC):
        seconds = scheduled_in_int8 if copy.target.form else scheduled
        elapsed += seconds(str(copy.source), str(copy.target), sharded=copy.sharded)
        expected[copy.target] = elapsed
    # In int8 two schedules follow each other. The replica that has the embedding, half of this model, sends
    # most of the second one, and the estimate spreads it over all replicas.
    apart = 0.5 if any(layout.form for layout in copies) else 0.35
    for layout, time in zip(copies, times, strict=True):
        if layout in expected:
            assert time == pytest.approx(expected[layout], rel=apart, abs=1e-6)
        else:  # The runtime copies nothing to this layout.
            assert time == 0


def test_undecided_layouts_count_nothing():
    problem = problem_of("generate", "forward", "train_step")
    calls = problem.calls
    used = [("actor", problem.model_role(call)) for call in calls]
    home, other = placed("d4@0-3"), placed("t4@4-7")
    known, partly = (
        arrivals(Rates(CLUSTER), problem, calls[2], home, list(zip(used, layouts, strict=True)))
        for layouts in ((other, other, home), (other, None, home))
    )
    assert known[0] == known[1] > 0 and known[2] > known[1]
    assert partly == (known[0], 0.0, 0.0)


def test_what_ranks_lose_to_reallocations_by_hand():
    """A generator on other ranks: the trainer's lose the sending, the generator's the receiving."""
    needs = dependencies(problem_of("generate", "train_step"), Rates(CLUSTER))
    assert needs.weights == ((0, 1, 1, "actor"), (1, 1, 1, "actor"))
    assert needs.busy_shares == (20 / 132, 20 / 132)
    moving = np.array([[1.0, 1.5]])  # Half a second to gather at home, after one second to the generator.
    assert needs.durations(moving).tolist() == [[1.0, 0.5]]
    busy = needs.busy(moving, np.array([[0, 4]]), np.array([[4, 8]]))[0] * 132 / 20
    assert busy == pytest.approx(np.array([[1.0, 1.0], [0.5, 0.5 + 1.0]]))
    # On ranks that overlap, only those that do not receive lose time to sending.
    busy = needs.busy(moving, np.array([[0, 2]]), np.array([[4, 8]]))[0] * 132 / 20
    assert busy == pytest.approx(np.array([[1.0, 1.0], [0.5, 0.5 + 1.0]]))
    busy = needs.busy(moving, np.array([[0, 2]]), np.array([[8, 8]]))[0] * 132 / 20
    assert busy == pytest.approx(np.array([[1.0, 1.0], [0.5, 0.5]]))


def test_shares_of_processes_on_cpu():
    cpu = replace(CLUSTER, device_type="cpu")
    assert busy_shares(cpu) == (0.0, 1.0)  # The receiver copies from the sender's memory.
    assert busy_shares(replace(cpu, num_hosts=2, inter_host=Link(1e-4, 1e8))) == (1.0, 1.0)



def test_leaf_switches_by_hand():
    """Eight hosts of one device with 1 GB/s, four on a leaf whose links to the other carry 1/8 of that."""
    flat = replace(CLUSTER, num_hosts=8, devices_per_host=1, inter_host=Link(1e-9, 1e9))
    plain, leaves = Rates(flat), Rates(replace(flat, hosts_per_leaf=4, oversubscription=8.0))
    inside, outside = Span(4, 1), Span(8, 1)
    for rates in (plain, leaves):
        assert rates.all_to_all(1e9, inside) == pytest.approx(3 / 4 / 0.8, rel=1e-4)
        assert rates.all_gather(1e9, inside) == pytest.approx(3 / 4 / 0.8, rel=1e-4)
    assert leaves.all_to_all(1e9, outside) == pytest.approx(8 * plain.all_to_all(1e9, outside), rel=1e-4)
    # A ring leaves a leaf once, over links with half of what one of the four hosts can send.
    assert leaves.all_gather(1e9, outside) == pytest.approx(2 * plain.all_gather(1e9, outside))
    assert leaves.send(1e9, within_host=False) == pytest.approx(8 * plain.send(1e9, within_host=False))
    role = ModelRole(CONFIG, "float32", trainable=True)
    for target, slower in (("t2@2-3", 1), ("t2@4-5", 8)):
        near, far = (
            reallocation_seconds(rates, role, placed("t2@0-1"), placed(target)) for rates in (plain, leaves)
        )
        assert far == pytest.approx(slower * near, rel=1e-3)


def test_rails_by_hand():
    """Two hosts of four devices: of 8 parts, 3 stay in the host and 4 leave it, 3 of these on other rails."""
    cluster = replace(CLUSTER, num_hosts=2, devices_per_host=4, inter_host=Link(1e-9, 1e9))
    plain, rails = (Rates(replace(cluster, rails=flag)) for flag in (False, True))
    span = Span(8, 4)
    # The network is as slow as the host.
    assert plain.all_to_all(1e9, span) == pytest.approx(4 / 8 / 0.8, rel=1e-4)
    assert rails.all_to_all(1e9, span) == pytest.approx((3 / 8 + 4 / 8 * 3 / 4) / 0.8, rel=1e-4)
    assert rails.all_gather(1e9, span) == plain.all_gather(1e9, span)


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
