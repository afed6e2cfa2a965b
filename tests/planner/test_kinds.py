"""Clusters with two kinds of hosts: prices by kind, memory by rank, and the search against all plans."""

import random
from dataclasses import replace

import numpy as np
import pytest

from realhf.cluster import Cluster, Link, join_kinds
from realhf.execution_plan import CallPlan, ExecutionPlan
from realhf.graph import DataflowGraph, FunctionCall
from realhf.layout import Layout
from realhf.models.model_config import ModelConfig
from realhf.planner.candidates import find_meshes
from realhf.planner.links import ContiguousLayout
from realhf.planner.make import heuristic, make_plan, starts_by_kind
from realhf.planner.memory_account import check_memory
from realhf.planner.problem import ModelRole, Problem, Workload
from realhf.planner.rates import Rates
from realhf.planner.reallocation import reallocation_seconds
from realhf.planner.reasons import change, current_values
from realhf.planner.search import search
from realhf.planner.search_space import SearchSpace
from realhf.planner.shared_cores import SharedCores
from realhf.planner.step_time import predict
from tests.planner.problems import random_problem
from tests.planner.test_search import agrees

FAST = Cluster(
    1, 2, 4e9, 1e12, 2e12, {"float32": 4e13}, Link(1e-6, 1e11), Link(1e-5, 2e10), host_memory=Link(1e-5, 1e9),
    accelerator="h100",
)
SLOW = replace(
    FAST, peak_flops={"float32": 5e12}, memory_bandwidth_bytes_per_second=5e11, intra_host=Link(2e-6, 2e10),
    inter_host=Link(1e-5, 5e9), accelerator="a100",
)
CONFIG = ModelConfig("llama", 1000, 256, 768, 4, 4, 2, 64)


def mixed_problems(seeds):
    """Yield random problems on two kinds of hosts that differ in speed, links and memory."""
    for seed in seeds:
        rng = random.Random(seed)
        hosts, per_host = rng.choice([(1, 1), (1, 2), (2, 1)])
        kinds = []
        for base in rng.sample([FAST, SLOW], 2):
            memory = (1.48e9 + 10 ** rng.uniform(6.5, 8.3)) / 0.95
            kind = replace(base, num_hosts=hosts, devices_per_host=per_host)
            kinds.append(replace(kind, device_memory_bytes=memory))
        problem = random_problem(rng, num_calls=rng.randint(1, 3))
        yield seed, replace(problem, cluster=join_kinds(kinds))


def train_and_score(cluster, **pins):
    """Return a problem in which one model trains, and another one scores samples at the same time."""
    train = FunctionCall("train", "train_step", ("prompts",), (), "a")
    score = FunctionCall("score", "forward", ("prompts",), ("scores",), "b")
    roles = {"a": ModelRole(CONFIG, "float32", True), "b": ModelRole(CONFIG, "float32")}
    work = Workload(64, 200, 100, 100)
    graph = DataflowGraph((score, train), ("prompts",))
    layouts = {name: Layout.parse(layout) for name, layout in pins.items()}
    return Problem(graph, roles, {"train": work, "score": work}, cluster, layouts)


@pytest.mark.slow
def test_search_finds_the_best_of_all_plans():
    solved = []
    for seed, problem in mixed_problems(range(60)):
        space = SearchSpace(problem, Rates(problem.cluster))
        if 0 < np.prod([len(group.candidates) for group in space.groups]) <= 3000:
            solved.append(agrees(seed, space))
    assert sum(solved) >= 15 and not all(solved)


def test_the_search_counts_the_memory_of_each_rank_as_the_check_does():
    fitting, on_smaller = [], 0
    for seed, problem in mixed_problems(range(100, 140)):
        space = SearchSpace(problem, Rates(problem.cluster))
        if not all(group.candidates for group in space.groups):
            continue
        rng = random.Random(seed)
        for _ in range(4):
            chosen = np.array([[rng.randrange(len(group.candidates)) for group in space.groups]])
            check = check_memory(problem, space.memory.least_plan(chosen[0]))
            (excess,) = space.memory.excess(chosen)
            fitting.append(check.fits)
            assert (excess <= 0) == check.fits, seed
            worst = check.fullest
            assert excess <= worst.excess_bytes + 1, seed
            assert excess > 0 or excess == pytest.approx(worst.excess_bytes, abs=1), seed
            (hosts,) = (kind for ranks, kind in problem.cluster.ranks_by_kind if worst.rank in ranks)
            assert worst.hosts == hosts
            on_smaller += hosts.device_memory_bytes < problem.cluster.device_memory_bytes
    assert any(fitting) and not all(fitting) and on_smaller


def test_calls_cost_what_they_cost_on_hosts_of_their_kind_alone():
    cluster = join_kinds([FAST, SLOW])
    problem = train_and_score(cluster)
    mixed = SearchSpace(problem, Rates(cluster))
    for ranks, kind in cluster.ranks_by_kind:
        alone = SearchSpace(replace(problem, cluster=kind), Rates(kind))
        for group, of_kind in zip(mixed.groups, alone.groups, strict=True):
            here = [c for c in group.candidates if c.layout.first_rank in ranks]
            assert {c.layout.ranks.stop - 1 in ranks for c in here} == {True}
            found = [
                (str(c.layout.strategy), c.layout.first_rank - ranks.start, [v.cost for v in c.variants])
                for c in here
            ]
            expected = [
                (str(c.layout.strategy), c.layout.first_rank, [v.cost for v in c.variants])
                for c in of_kind.candidates
            ]
            assert found == expected


def test_meshes_are_on_hosts_of_one_kind():
    cluster = Cluster.load("h100-a100-4x8")
    meshes = find_meshes(cluster)
    assert len(meshes) == 2 * len(find_meshes(replace(Cluster.load("h100-8x8"), num_hosts=2)))
    assert all(mesh.stop <= 16 or mesh.start >= 16 for mesh in meshes)


@pytest.mark.parametrize("fast_first", [True, False])
def test_the_fast_kind_trains(fast_first):
    cluster = join_kinds([FAST, SLOW] if fast_first else [SLOW, FAST])
    problem = train_and_score(cluster)
    planned = make_plan(problem, Rates(cluster), time_limit=10.0, explain=False)
    fast = {0, 1} if fast_first else {2, 3}
    assert {*planned.plan["train"].layout.ranks} <= fast
    rule = planned.heuristic
    for group, index in zip(planned.space.groups, rule.chosen, strict=True):
        assert {*group.candidates[index].layout.ranks} == fast
    assert planned.result.lower_bound_seconds <= planned.result.step_seconds <= rule.seconds
    again = predict(problem, Rates(cluster), planned.plan)
    assert again.step_seconds == pytest.approx(planned.result.step_seconds)


@pytest.mark.slow
def test_a_plan_is_no_worse_than_on_either_kind_alone():
    for seed in range(3):
        rng = random.Random(seed)
        problem = random_problem(rng, num_calls=4)
        cluster = join_kinds([replace(FAST, num_hosts=2), replace(SLOW, num_hosts=2)])
        problem = replace(problem, cluster=cluster)
        space = SearchSpace(problem, Rates(cluster))
        starts = starts_by_kind(space, time_limit=3.0, gap=0.0)
        seconds = space.exact_periods(np.array(starts))
        for (ranks, kind), start, found in zip(cluster.ranks_by_kind, starts, seconds, strict=True):
            for group, index in zip(space.groups, start, strict=True):
                assert {*group.candidates[index].layout.ranks} <= {*ranks}
            alone = search(SearchSpace(replace(problem, cluster=kind), Rates(kind)), time_limit=3.0)
            assert found == pytest.approx(alone.step_seconds, rel=0.05)
        whole = make_plan(problem, Rates(cluster), time_limit=3.0, gap=0.01, explain=False)
        assert whole.result.step_seconds <= seconds.min() * (1 + 1e-9)


def test_a_kind_with_too_little_memory_is_left_out():
    """The fast devices have room for the reserve only, so that everything runs on the slow ones."""
    small = replace(FAST, device_memory_bytes=1.36e9 / 0.95)
    cluster = join_kinds([small, SLOW])
    problem = train_and_score(cluster)
    planned = make_plan(problem, Rates(cluster), time_limit=10.0, explain=False)
    assert {rank for call in ("train", "score") for rank in planned.plan[call].layout.ranks} <= {2, 3}
    there = ExecutionPlan({name: CallPlan(Layout.parse("d2@0-1")) for name in ("train", "score")})
    check = check_memory(problem, there)
    assert not check.fits and check.fullest.rank in (0, 1)
    assert check_memory(replace(problem, cluster=SLOW), there).fits
    assert heuristic(planned.space) is not None


def test_reallocations_between_kinds_have_the_slower_links():
    fast, slow = (replace(kind, num_hosts=2) for kind in (FAST, SLOW))
    mixed = join_kinds([fast, slow])
    role = ModelRole(CONFIG, "float32", True)

    def seconds(cluster, source, target):
        ends = [ContiguousLayout(lay.strategy, lay.ranks[0]) for lay in map(Layout.parse, (source, target))]
        return reallocation_seconds(Rates(cluster), role, *ends)

    for source, target in (("t2@0-1", "d2@2-3"), ("t2@0-1", "d2@0-1")):
        assert seconds(mixed, source, target) == seconds(fast, source, target) > 0
    for source, target in (("t2@4-5", "d2@6-7"), ("t2@4-5", "d2@4-5")):
        moved = [f"{text[:2]}@{int(text[3]) - 4}-{int(text[5]) - 4}" for text in (source, target)]
        assert seconds(mixed, source, target) == seconds(slow, *moved) > 0
    whole = replace(slow, num_hosts=4)
    assert seconds(mixed, "t2@0-1", "d2@4-5") == seconds(whole, "t2@0-1", "d2@4-5")


def test_a_pin_lies_on_hosts_of_one_kind():
    sentence = r"--pin train=d2@1-2: a layout is planned on hosts of one kind, here on ranks 0-1 or 2-3"
    with pytest.raises(ValueError, match=sentence):
        train_and_score(join_kinds([FAST, SLOW]), train="d2@1-2")
    train_and_score(join_kinds([FAST, SLOW]), train="d2@2-3")


def test_changes_name_the_kind():
    problem = train_and_score(join_kinds([FAST, SLOW]))
    values = current_values(problem)
    assert values["hosts.0.count"] == 1 and values["hosts.1.inter_host.bandwidth"] == 5e9
    changed, rates = change(problem, Rates(problem.cluster), {"hosts.1.device_memory": "8 GB"})
    assert [kind.device_memory_bytes for kind in changed.cluster.kinds] == [4e9, 8e9]
    assert rates.cluster == changed.cluster and rates.efficiencies == Rates(changed.cluster).efficiencies
    with pytest.raises(ValueError, match="unknown 'num_hosts'"):
        change(problem, Rates(problem.cluster), {"num_hosts": 2})


def test_kinds_have_efficiencies_of_their_own():
    cluster = join_kinds([FAST, SLOW])
    rates = Rates(cluster)
    assert rates.at(range(0, 2)).efficiencies == Rates(FAST).efficiencies
    assert rates.at(range(2, 4)).efficiencies == Rates(SLOW).efficiencies
    given = replace(Rates(FAST).efficiencies, memory=0.5)
    assert Rates(cluster, given).at(range(2, 4)).efficiencies == given


def test_shared_cores_are_those_of_the_kind():
    cpu = replace(FAST, device_type="cpu", accelerator="cpu", cores_per_host=1)
    cluster = join_kinds([cpu, replace(cpu, cores_per_host=2)])
    seconds, first = np.array([[6.0], [6.0]]), np.array([[0], [2]])
    assert SharedCores(cluster).busiest_host(seconds, first, first + 1).tolist() == [6.0, 3.0]
