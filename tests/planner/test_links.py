"""Seconds of collectives and messages, against rings and exchanges whose bytes are counted host by host."""

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from realhf.cluster import Cluster, Link
from realhf.execution_plan import CallPlan, ExecutionPlan
from realhf.graph import DataflowGraph, FunctionCall
from realhf.layout import Layout
from realhf.models.model_config import ModelConfig
from realhf.models.param_spec import model_spec
from realhf.planner.call_cost import call_cost
from realhf.planner.efficiencies import Efficiencies
from realhf.planner.links import Span, rank_groups
from realhf.planner.make import make_plan, price
from realhf.planner.problem import ModelRole, Problem, Workload
from realhf.planner.rates import Rates
from realhf.planner.search_space import SearchSpace
from tests.planner.problems import random_problem

PER_HOST = 8
NO_TIME = Link(1e-30, 1e30)
LAYOUTS = ("d64@0-63", "d8t8@0-63", "d4t2p8@0-63", "d2t16p2@0-63", "d4c4t4@0-63", "d32t2e16@0-63",
           "d16c2t2e4@0-63", "d16e16@0-15", "t16@0-15", "d2c8@0-15")


def cluster(**changes):
    h100 = replace(Cluster.load("h100-8x8"), intra_host=NO_TIME, inter_host=NO_TIME)
    return replace(h100, **changes)


def members(layout):
    """Return the groups of each kind, from the ranks' places in the layout."""
    grid = layout.grid  # (pp, dp, cp, tp)
    pp, dp, cp, tp = grid.shape
    ep = layout.ep
    by_expert = grid.reshape(pp, dp // ep, ep, cp, tp).transpose(0, 2, 4, 1, 3)
    return {
        "tp": grid.reshape(-1, tp),
        "cp": np.moveaxis(grid, 2, -1).reshape(-1, cp),
        "ep": np.moveaxis(grid, 1, -1).reshape(-1, ep),
        "replicas": np.moveaxis(grid, 3, 1).reshape(pp * tp, dp * cp),
        "expert_replicas": by_expert.reshape(pp * ep * tp, -1)}


def ring(ranks, sent):
    """Walk a ring in which each rank passes on what it got last until all have everything; count the parts
    that leave each host."""
    held = {rank: {rank} for rank in ranks}
    newest = {rank: rank for rank in ranks}
    for _ in range(len(ranks) - 1):
        passed = {ranks[(i + 1) % len(ranks)]: newest[rank] for i, rank in enumerate(ranks)}
        for i, rank in enumerate(ranks):
            sent[rank // PER_HOST] += rank // PER_HOST != ranks[(i + 1) % len(ranks)] // PER_HOST
        newest = passed
        for rank, part in passed.items():
            held[rank].add(part)
    assert all(parts == set(ranks) for parts in held.values())


def leaving(groups, *, by_index):
    """Return the most parts of 1 / n that leave a host if every group gathers, in one ring or, `by_index`, in
    one ring for each index of a member on its host."""
    sent = Counter()
    for ranks in groups.tolist():
        by_host = {}
        for rank in ranks:
            by_host.setdefault(rank // PER_HOST, []).append(rank)
        rings = list(zip(*by_host.values(), strict=True)) if by_index else [ranks]
        for members in rings:
            ring(list(members), sent)
    return max(sent.values(), default=0)


@pytest.mark.parametrize("text", LAYOUTS)
def test_the_port_of_a_host_carries_what_rings_of_all_groups_send(text):
    layout = Layout.parse(text)
    rates = Rates(cluster(host_bandwidth_bytes_per_second=1e9), Efficiencies())
    spans = rank_groups(layout.strategy, PER_HOST)
    for kind, groups in members(layout).items():
        size = groups.shape[1]
        counted, flat = (leaving(groups, by_index=by_index) / size for by_index in (True, False))
        seconds = rates.all_gather(1e9, getattr(spans, kind))
        assert seconds == pytest.approx(counted, abs=1e-12), kind
        assert seconds <= flat + 1e-12 <= 2 * seconds + 1e-9, kind
        assert rates.all_reduce(1e9, getattr(spans, kind)) == pytest.approx(2 * counted, abs=1e-12)


@pytest.mark.parametrize("text", LAYOUTS)
def test_the_port_of_a_host_carries_the_messages_of_all_exchanges(text):
    layout = Layout.parse(text)
    rates = Rates(cluster(host_bandwidth_bytes_per_second=1e9), Efficiencies())
    spans = rank_groups(layout.strategy, PER_HOST)
    for kind in ("cp", "ep"):
        sent = Counter()
        for ranks in members(layout)[kind].tolist():
            for source in ranks:
                others = [rank for rank in ranks if rank // PER_HOST != source // PER_HOST]
                sent[source // PER_HOST] += len(others) / len(ranks)
        exchanged = rates.all_to_all(1e9, getattr(spans, kind))
        assert exchanged == pytest.approx(max(sent.values()), abs=1e-12), kind


@pytest.mark.parametrize("text", ["d8p8@0-63", "t2p2@0-3", "t2p8@0-15", "d2t16p2@0-63", "p16@0-15"])
def test_all_ranks_of_a_stage_send_to_the_next_one_at_once(text):
    layout = Layout.parse(text)
    rates = Rates(cluster(host_bandwidth_bytes_per_second=1e9), Efficiencies())
    groups = rank_groups(layout.strategy, min(PER_HOST, len(layout.ranks)))
    sent = Counter()
    stages = layout.grid.reshape(layout.pp, -1)
    for here, there in zip(stages[:-1].ravel(), stages[1:].ravel(), strict=True):
        sent[here // PER_HOST] += here // PER_HOST != there // PER_HOST
    seconds = rates.send(
        1e9, within_host=groups.stages_meet_in_host, num_sending=groups.num_sending)
    assert seconds == pytest.approx(max(sent.values()), abs=1e-12)


def test_a_sum_over_64_ranks_takes_as_long_as_the_ports_of_their_hosts():
    """7/8 of 1 GB enter each of 8 hosts, at 400 GB/s (the eight links of a DGX H100) or at 25 GB/s."""
    h100 = Cluster.load("h100-8x8")
    assert h100.host_port_bytes_per_second == 8 * 50e9
    seconds = {}
    for port in (None, 400e9, 25e9):
        rates = Rates(replace(h100, host_bandwidth_bytes_per_second=port), Efficiencies())
        seconds[port] = rates.all_gather(1e9, Span(64, 8)) - 6 * h100.inter_host.latency_seconds
    assert seconds[None] == seconds[400e9] == pytest.approx(max(7 / 8 / 400, 63 / 64 / 450))
    assert seconds[25e9] == pytest.approx(7 / 8 / 25)


@pytest.mark.parametrize(("strategy", "groups"), [("d8t8", 8), ("d16t4", 4), ("d64", 1)])
def test_gradients_of_all_groups_of_replicas_share_the_ports(strategy, groups):
    """With tp inside hosts, tp groups sum gradients at once, each (hosts - 1) / hosts of its shard."""
    role = ModelRole(ModelConfig.load("llama-7b"), trainable=True)
    call = FunctionCall("train", "train_step", ("x",), (), role="actor")
    seconds = {}
    for port in (1e30, 1e9):
        rates = Rates(cluster(host_bandwidth_bytes_per_second=port), Efficiencies())
        call_plan = CallPlan(Layout.parse(f"{strategy}@0-63"), 4096)
        cost = call_cost(rates, call, role, Workload(64, 1024, 1024, 1024), call_plan, per_host=PER_HOST)
        seconds[port] = cost.seconds_by_cause.get("data parallel", 0.0)
    bytes_of_group = 4 * role.spec.numel / groups
    assert seconds[1e9] == pytest.approx(groups * 7 / 8 * bytes_of_group / 1e9, rel=1e-3)
    assert seconds[1e30] < 1e-6


def test_only_ports_take_time_in_the_rates_of_ports():
    rates = Rates(Cluster.load("h100-8x8"))
    role = ModelRole(ModelConfig.load("llama-7b"), trainable=True)
    call = FunctionCall("train", "train_step", ("x",), (), role="actor")
    work = Workload(64, 1024, 1024, 1024)
    for text, crosses in (("d8@0-7", False), ("d8t8@0-63", True)):
        plan = CallPlan(Layout.parse(text), 4096)
        cost = call_cost(rates.ports, call, role, work, plan, per_host=PER_HOST)
        assert (cost.seconds > 1e-6) == crosses
    sent = 4 * role.spec.numel * 7 / 8  # Of 8 groups, an eighth each.
    assert cost.seconds == pytest.approx(sent / (0.8 * 400e9), rel=1e-3)


def planned_pair(port, layouts):
    """Return the plan of two models that train at the same time in these layouts, on three hosts."""
    config = ModelConfig("llama", 4096, 512, 1536, 4, 8, 4, 64)
    calls = tuple(FunctionCall(f"{role}_train", "train_step", ("x",), (), role=role) for role in "ab")
    problem = Problem(
        DataflowGraph(calls, ("x",)), {role: ModelRole(config, trainable=True) for role in "ab"},
        {call.name: Workload(64, 0, 512) for call in calls},
        replace(Cluster.load("h100-8x8"), num_hosts=3, host_bandwidth_bytes_per_second=port),
        {call.name: Layout.parse(text) for call, text in zip(calls, layouts, strict=True)})
    return make_plan(problem, Rates(problem.cluster), time_limit=20.0)


def test_calls_that_train_beside_each_other_share_the_port_of_their_common_host():
    """Each has four ranks on host 1, from which it sends half of its gradients (4 bytes) and, beside the
    other's, of its new weights (2 bytes); samples add little."""
    numel = model_spec(ModelConfig("llama", 4096, 512, 1536, 4, 8, 4, 64)).numel
    traffic = (4 + 2) * numel / 2 / (0.8 * 1e8)
    ports = planned_pair(1e8, ("d8@4-11", "d8@12-19")).ports
    alone = planned_pair(1e8, ("d8@0-7", "d8@12-19"))
    period = alone.result.step_seconds
    assert alone.ports == (pytest.approx(traffic, rel=0.03), period, period)
    assert ports.busiest_seconds == pytest.approx(2 * traffic, rel=0.03)
    assert ports.most_seconds == pytest.approx(period + traffic, rel=0.03)
    assert period <= ports.least_seconds == max(period, ports.busiest_seconds) <= ports.most_seconds
    wide = planned_pair(1e15, ("d8@4-11", "d8@12-19"))
    assert wide.ports.most_seconds == pytest.approx(wide.result.step_seconds, rel=1e-3)


@pytest.mark.parametrize("seed", [0, 3])
def test_estimates_of_shared_ports_are_in_order(seed):
    """Random plans, in which weights also move beside calls."""
    rng = random.Random(seed)
    met = 0
    for _ in range(6):
        problem = random_problem(rng, num_calls=5)
        cluster = replace(
            problem.cluster, num_hosts=4, devices_per_host=2, host_bandwidth_bytes_per_second=1e7)
        space = SearchSpace(replace(problem, cluster=cluster), Rates(cluster))
        for _ in range(4):
            chosen = np.array([rng.randrange(len(group.candidates)) for group in space.groups])
            priced = price(space.problem, space.rates, ExecutionPlan(space.call_plans(chosen.tolist())))
            ports = priced.ports
            assert priced.step_seconds <= ports.least_seconds <= ports.most_seconds
            assert ports.busiest_seconds <= ports.least_seconds
            met += ports.most_seconds > 1.001 * priced.step_seconds
    assert met
