"""The time limit holds in every phase: candidates, plans on each kind of hosts, search, reasons, remedies."""

import random
import time
from dataclasses import replace

import pytest

from benchmarks.planner import SCENARIOS, VARIED, experiment_of
from realhf import OptimizerConfig
from realhf.cli.planning_problem import problem_of
from realhf.cluster import Cluster
from realhf.planner.comparisons import SearchLimits, what_if
from realhf.planner.deadline import Deadline, OutOfTime
from realhf.planner.make import TooLittleTime, make_plan
from realhf.planner.rates import Rates
from realhf.planner.search_space import SearchSpace
from tests.planner.problems import random_problem

GRAIN = 1.0  # CPU seconds by which the limit may be exceeded, also on a machine that other programs use.


def scenario(name):
    return next(case for case in [*VARIED, *SCENARIOS] if case.name == name)


def planned_within(problem, limit, **options):
    """Return the plan, or the sentence that there is none, after checking that the limit held."""
    began = time.process_time()
    try:
        found = make_plan(
            problem, Rates(problem.cluster), time_limit=limit, clock=time.process_time, **options)
    except ValueError as error:
        found = str(error)
    assert time.process_time() - began <= limit + GRAIN
    return found


def problem_for(case):
    return problem_of(experiment_of(case), case.cluster)


def test_a_deadline_by_hand():
    now = [100.0]
    deadline = Deadline(10.0, clock=lambda: now[0])
    part = deadline.part(3.0)
    now[0] = 104.0
    assert (deadline.spent, deadline.left, part.left) == (4.0, 6.0, -1.0)
    deadline.check()
    with pytest.raises(OutOfTime):
        part.check()
    with deadline.sooner(2.0):
        assert deadline.left == 2.0
        with deadline.lifted():
            now[0] = 500.0
            deadline.check()
    with pytest.raises(OutOfTime):
        deadline.check()
    assert Deadline(10.0, clock=lambda: now[0]).part(30.0).left == 10.0
    deadline.lift()
    deadline.check()


@pytest.mark.parametrize("limit", [0.2, 3.0])
def test_the_limit_holds_on_the_largest_cluster(limit):
    """PPO of 70B models on 1,024 devices, whose candidates alone take longer than the shorter limit."""
    problem = problem_for(scenario("ppo-70b-70b-h100-128x8-2k"))
    found = planned_within(problem, limit)
    if limit < 1:
        assert "no plan was found in" in found and "--time-limit" in found
    elif not isinstance(found, str):
        assert 0 <= found.result.lower_bound_seconds <= found.result.step_seconds
        assert set(found.reasons) == {call.name for call in problem.model_calls}


@pytest.mark.parametrize("name", [
    "grpo-7b-h100-8x8-2k", pytest.param("ppo-70b-70b-h100-128x8-2k", marks=pytest.mark.slow)])
def test_a_limit_that_is_too_short_names_one_that_suffices(name):
    problem = problem_for(scenario(name))
    sentence = planned_within(problem, 0.02)
    assert sentence.startswith("no plan was found in ")
    limit = float(sentence.rsplit("--time-limit ", 1)[1])
    assert 1 <= limit <= 60
    found = planned_within(problem, limit, explain=False)
    assert not isinstance(found, str) and found.memory.fits


def test_the_limit_holds_on_hosts_of_two_kinds():
    """Each kind alone has candidates and a search of its own, before those of the whole cluster."""
    case = next(case for case in VARIED if len(case.cluster.kinds) > 1)
    found = planned_within(problem_for(case), 4.0)
    assert isinstance(found, str) or found.memory.fits


def test_an_early_end_keeps_the_best_plan_so_far():
    """However early the search ends, its plan fits and its bound holds."""
    problem = problem_for(next(c for c in VARIED if c.cluster.num_devices == 8 and c.algorithm == "ppo"))
    space = SearchSpace(problem, Rates(problem.cluster))
    best = make_plan(problem, Rates(problem.cluster), time_limit=60.0, gap=0.02, explain=False)
    for limit in (1.0, 1.5, 2.5):
        found = planned_within(problem, limit)
        if not isinstance(found, str):
            assert found.memory.fits
            assert found.result.lower_bound_seconds <= best.result.step_seconds * (1 + 1e-9)
            assert found.result.step_seconds >= best.result.lower_bound_seconds * (1 - 1e-9)
    assert space.deadline.left == float("inf")


def test_a_change_takes_no_longer_than_its_limit():
    case = next(c for c in VARIED if c.cluster.num_devices == 16)
    planned = planned_within(problem_for(case), 6.0, explain=False)
    began = time.process_time()
    tried = what_if(planned, {"batch_size": "256"}, SearchLimits(2.0, 0.0))
    assert time.process_time() - began <= 2.0 + 2 * GRAIN
    assert tried.values == {"batch_size": "256"}


def test_a_limit_for_a_part_of_the_time_is_named_as_that_for_the_whole():
    """A sentence about a question names the limit of the command, of which its search has a part."""
    problem = random_problem(random.Random(1), num_calls=2)
    rates = Rates(problem.cluster)
    for parts in (1, 12):
        with pytest.raises(TooLittleTime) as raised:
            make_plan(problem, rates, time_limit=1e-4, parts=parts)
        assert raised.value.limit_seconds >= parts
        assert str(raised.value).endswith(f"such as --time-limit {raised.value.limit_seconds:g}")
    planned = make_plan(problem, rates, time_limit=20.0, max_iterations=1, explain=False)
    tried = what_if(planned, {"device_memory": "80 GB"}, SearchLimits(1e-4, 0.0))
    limit = float(tried.best_obstacle.rsplit("--time-limit ", 1)[1])
    assert limit >= 1.5  # The plan's own layouts get a third of it.
    assert what_if(planned, {"device_memory": "80 GB"}, SearchLimits(limit, 0.5)).best_obstacle is None


# No plan


def grpo(model, cluster, *, offload=False, tokens=2048):
    """Return the problem of GRPO of a shipped model."""
    case = scenario("grpo-7b-h100-1x8-2k")
    experiment = experiment_of(case)
    optimizer = OptimizerConfig(offload=offload)
    experiment.actor = replace(experiment.actor, model=model, optimizer=optimizer)
    return problem_of(experiment, cluster)


def test_remedies_are_tried_before_they_are_named():
    """A 7B model with a reference takes 2 + 4 + 12 and 2 bytes per parameter, 135 GB in all."""
    one = replace(Cluster.load("h100-1x8"), devices_per_host=1)
    sentence = planned_within(grpo("llama-7b", one), 20.0)
    assert "with actor.optimizer.offload a plan fits, of " in sentence
    found = planned_within(grpo("llama-7b", one, offload=True), 20.0)
    assert found.memory.fits and found.memory.on_host["actor optimizer"] > 80e9
    nowhere = replace(one, device_memory_bytes=20e9)
    sentence = planned_within(grpo("llama-7b", nowhere), 20.0)
    assert "a plan fits" not in sentence and "does not fit in any layout, even alone" in sentence


def test_that_no_plan_fits_is_said_only_when_it_is_proved():
    two = replace(Cluster.load("h100-1x8"), devices_per_host=2, device_memory_bytes=68e9, host_memory=None)
    problem = grpo("llama-7b", two)
    whole = planned_within(problem, 20.0)
    assert whole.startswith("no plan fits: ") and "with 4 devices a plan fits" in whole
    assert "optimizer.offload" not in whole  # There is no link to the host's memory.
    sentences = [planned_within(problem, limit) for limit in (0.01, 0.4, 0.8)]
    assert all(isinstance(sentence, str) for sentence in sentences)
    assert sentences[0].startswith("no plan was found in ")
    found_none = ("no plan was found in ", "no plan that fits was found in ", "no plan fits")
    assert all(sentence.startswith(found_none) for sentence in sentences)


@pytest.mark.slow
def test_experts_of_671b_fit_128_devices_with_the_optimizer_on_hosts():
    cluster = replace(Cluster.load("h100-128x8"), num_hosts=16)
    sentence = planned_within(grpo("deepseek-v3", cluster), 60.0)
    assert isinstance(sentence, str) and "with actor.optimizer.offload a plan fits" in sentence
