"""Pinned plans against the bound that a search without pins prints: none is ever shorter."""

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest

from realhf.cluster import Cluster, Link
from realhf.execution_plan import ExecutionPlan
from realhf.graph import DataflowGraph, FunctionCall
from realhf.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.models.model_config import ModelConfig
from realhf.planner.candidates import COMPLETE, find_meshes, find_strategies, pins_outside
from realhf.planner.make import make_plan
from realhf.planner.memory_account import check_memory
from realhf.planner.problem import ModelRole, Problem, Workload
from realhf.planner.rates import Rates
from realhf.planner.search import search
from realhf.planner.search_space import SearchSpace
from realhf.planner.shard import FRAGMENTATION
from tests.planner.problems import (
    random_lagged_problem,
    random_pins,
    random_problem,
)
from tests.samples import marked

PINS_PER_PROBLEM = 12
EARLY = 4  # Iterations after which searches with pins stop; their plans are only upper bounds anyway.


def draw_problem(seed):
    """Return a random problem with or without lag, with memory from too little to plenty."""
    rng = random.Random(seed)
    memory = 1.56e9 + 10 ** rng.uniform(6.5, 8.3)  # 1.56e9 bytes are set aside.
    num_calls = rng.randint(2, 4)
    if rng.random() < 0.3:
        lag = rng.randint(1, 2)
        rounds = rng.choice([lag, lag + 1])
        return rng, random_lagged_problem(rng, num_calls=num_calls, lag=lag, rounds=rounds, memory=memory)
    return rng, random_problem(rng, num_calls=num_calls, memory=memory)


def space_with(problem, rates, pins):
    """Return the space of a problem with pins; None if they contradict each other or fit no device."""
    try:
        space = SearchSpace(replace(problem, pins=pins), rates)
    except ValueError:
        return None
    return space if all(group.candidates for group in space.groups) else None


def located(free, space, chosen):
    """Return a plan of a space with pins as candidates of the space without."""
    indices = []
    for group, index, whole in zip(space.groups, chosen, free.groups, strict=True):
        same = [i for i in range(len(whole.candidates)) if whole.call_plans(i) == group.call_plans(index)]
        indices.append(same[0])
    return indices


def compare_pins(problem, rng):
    """Return the seconds of plans with random pins, relative to the bound without pins."""
    rates = Rates(problem.cluster)
    free = space_with(problem, rates, {})
    found = free and search(free, time_limit=60.0, gap=0.02, max_iterations=200)
    ratios = []
    for _ in range(PINS_PER_PROBLEM):
        pins = random_pins(rng, problem)
        if pins_outside(replace(problem, pins=pins)):
            assert problem.cluster.num_devices > COMPLETE
            continue
        space = space_with(problem, rates, pins)
        pinned = space and search(space, time_limit=60.0, max_iterations=EARLY)
        if not pinned:
            continue
        if not found:  # Few plans fit, and the search has not come upon any. This one is among its plans.
            assert free, pins
            start = located(free, space, pinned.chosen)
            found = search(free, time_limit=60.0, gap=0.02, starts=[start], max_iterations=200)
        assert pinned.step_seconds >= found.lower_bound_seconds * (1 - 1e-9), pins
        ratios.append(pinned.step_seconds / found.lower_bound_seconds)
    return ratios


@pytest.mark.parametrize(
    ("most_devices", "num_pins"), marked([(4, 12), (4, 300), (9, 600)], quick=[0]))
@pytest.mark.slow
def test_no_pinned_plan_beats_the_bound(most_devices, num_pins):
    ratios = []
    for seed in itertools.count():
        rng, problem = draw_problem(seed)
        if problem.cluster.num_devices <= most_devices:
            ratios += compare_pins(problem, rng)
        if len(ratios) >= num_pins:
            break
    assert min(ratios) < 1.001  # Some random pins are as good as the best plan.


@pytest.mark.parametrize(
    ("seeds", "most_pins", "least"),
    marked([(range(25), 60, 1), (range(120), 60, 8), (range(150, 600), 400, 40)], quick=[0]))
@pytest.mark.slow
def test_the_best_of_all_pins_is_the_best_plan(seeds, most_pins, least):
    """With every legal layout of every call pinned in turn, the best is what the search finds without pins.

    So nothing that is left out before the search could have been better.
    """
    compared = 0
    for seed in seeds:
        _, problem = draw_problem(seed)
        if problem.cluster.num_devices > 3 or len(problem.model_calls) > 2:
            continue
        calls = problem.model_calls
        layouts = [legal_layouts(problem, call) for call in calls]
        if math.prod(map(len, layouts)) > most_pins:
            continue
        rates = Rates(problem.cluster)
        best = np.inf
        for pinned in itertools.product(*layouts):
            pins = {call.name: layout for call, layout in zip(calls, pinned, strict=True)}
            if (space := space_with(problem, rates, pins)) and (found := search(space, time_limit=60.0)):
                best = min(best, found.step_seconds)
        space = space_with(problem, rates, {})
        found = space and search(space, time_limit=60.0)
        assert (found.step_seconds if found else np.inf) == pytest.approx(best, rel=2e-9), seed
        compared += 1
    assert compared >= least


def legal_layouts(problem, call):
    """Return all legal layouts of a call on contiguous ranks, by trying every product of sizes."""
    devices = problem.cluster.num_devices
    sizes = range(1, devices + 1)
    layouts = []
    max_dp = problem.workloads[call.name].most_replicas(call.kind)
    for first, stop in itertools.combinations(range(devices + 1), 2):
        mesh = DeviceMesh(tuple(range(first, stop)))
        for pp, dp, cp, tp in itertools.product(sizes, repeat=4):
            if pp * dp * cp * tp != stop - first or dp > max_dp:
                continue
            for ep in (n for n in sizes if dp % n == 0):
                layout = Layout(ParallelStrategy(pp, dp, cp, tp, ep), mesh)
                try:
                    problem.model_role(call).config.check_layout(layout)
                except ValueError:
                    continue
                layouts.append(layout)
    return layouts


def test_small_clusters_have_all_legal_layouts():
    for seed in range(30):
        _, problem = draw_problem(seed)
        for call in problem.model_calls if problem.cluster.num_devices <= COMPLETE else ():
            config = problem.model_role(call).config
            max_dp = problem.workloads[call.name].most_replicas(call.kind)
            enumerated = {
                Layout(strategy, DeviceMesh(tuple(mesh)))
                for mesh in find_meshes(problem.cluster)
                for strategy in find_strategies(config, len(mesh), cluster=problem.cluster, max_dp=max_dp)
            }
            assert enumerated == set(legal_layouts(problem, call)), seed


@pytest.mark.parametrize(("seeds", "least"), marked([(range(12), 3), (range(12, 40), 8)], quick=[0]))
@pytest.mark.slow
def test_pinning_the_plan_that_was_found_changes_nothing(seeds, least):
    compared = 0
    for seed in seeds:
        _, problem = draw_problem(seed)
        if problem.cluster.num_devices > 4:
            continue
        try:
            planned = make_plan(problem, Rates(problem.cluster), time_limit=60.0)
        except ValueError:  # Nothing fits.
            continue
        pins = {call.name: planned.plan[call.name].layout for call in problem.model_calls}
        again = make_plan(replace(problem, pins=pins), Rates(problem.cluster), time_limit=60.0)
        assert again.result.step_seconds == pytest.approx(planned.result.step_seconds, rel=1e-8), seed
        compared += 1
    assert compared >= least


def scoring_and_training(memory, pins):
    """Return a problem on two devices; a mini-batch has one sample, which dp cannot split."""
    link = Link(1e-6, 3e9)
    calls = (FunctionCall("score", "forward", ("prompts",), ("scores",), "actor"),
             FunctionCall("train", "train_step", ("scores",), (), "actor"))
    work = Workload(2, 2000, 2000, 2000)
    role = ModelRole(ModelConfig("llama", 1000, 256, 768, 3, 4, 2, 64), "float32", trainable=True)
    return Problem(
        DataflowGraph(calls, ("prompts",)), {"actor": role},
        {"score": work, "train": replace(work, minibatches=2)},
        Cluster(1, 2, memory, 1e12, 1e11, {"float32": 1e12}, link, link), pins)


def test_a_layout_that_serves_one_call_stays_for_those_that_may_share_it():
    """Training is fastest with cp here. Scoring is faster with dp, which takes communicators of its own, and
    memory is just enough for one layout."""
    pins = dict.fromkeys(("score", "train"), Layout.parse("c2@0-1"))

    def solved(memory, pins):
        problem = scoring_and_training(memory, pins)
        space = SearchSpace(problem, Rates(problem.cluster))
        found = search(space, time_limit=60.0)
        return found, check_memory(problem, ExecutionPlan(space.call_plans(found.chosen)))

    plenty, _ = solved(9e9, {})
    pinned, shared = solved(9e9, pins)
    memory = 9e9 + (shared.fullest.excess_bytes + 64) / (1 - FRAGMENTATION)
    tight, check = solved(memory, {})
    assert -(2**20) < check.fullest.excess_bytes <= 0
    assert plenty.step_seconds < pinned.step_seconds
    assert tight.step_seconds == pytest.approx(pinned.step_seconds, rel=1e-9)
