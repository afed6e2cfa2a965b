"""Estimated seconds of reallocations, compared with the schedules that carry them out."""

import random
from dataclasses import replace

import pytest

from realhf.cluster import Cluster
from realhf.layout import ParallelStrategy
from realhf.models.lora import LoraConfig, adapter_spec
from realhf.models.model_config import MegatronConfig, ModelConfig
from realhf.models.param_spec import model_spec
from realhf.planner.links import ContiguousLayout
from realhf.planner.reallocation import MovedModel, estimate_movement
from realhf.realloc.links import Links
from realhf.realloc.schedule import make_schedule

DENSE = ("llama-7b", "llama-70b", "llama-3.2-1b", "qwen2.5-0.5b", "qwen2.5-7b", "qwen3-32b", "gemma-2-9b",
         "gpt2")
EXPERTS = ("qwen3-30b-a3b", "qwen3-235b-a22b", "mixtral-8x7b", "deepseek-v3", "olmoe-1b-7b",
           "qwen1.5-moe-a2.7b")
QUICK = ("llama-3.2-1b", "qwen2.5-0.5b", "qwen2.5-7b", "mixtral-8x7b", "qwen1.5-moe-a2.7b")
MOST = 1.35


def divisors(number):
    return [n for n in range(1, number + 1) if number % n == 0]


def meshes(rng, num_devices):
    """Return the ranks of a source and of a target: equal, apart, growing, shrinking, or anywhere."""
    sizes = divisors(num_devices)
    small, large = sorted(rng.choice(sizes) for _ in range(2))
    movement = rng.choice(["colocated", "disjoint", "growing", "shrinking", "anywhere"])
    if movement == "colocated":
        first = rng.randrange(num_devices // large) * large
        return range(first, first + large), range(first, first + large)
    if movement == "disjoint" and num_devices > 1:
        small, large = (min(size, num_devices // 2) for size in (small, large))
        return range(small), range(num_devices - large, num_devices)
    if movement == "anywhere":
        firsts = [rng.randrange(num_devices - size + 1) for size in (small, large)]
        return range(firsts[0], firsts[0] + small), range(firsts[1], firsts[1] + large)
    return (range(small), range(large)) if movement == "growing" else (range(large), range(small))


def placed(rng, config, ranks, per_host):
    """Return a random legal layout on these ranks; one with experts has ep more often than not."""
    for _ in range(300):
        tp = rng.choice([n for n in divisors(len(ranks)) if n <= per_host])
        pp = rng.choice([n for n in divisors(len(ranks) // tp) if n <= min(16, config.num_layers)])
        replicas = len(ranks) // tp // pp
        cp = rng.choice([1, 1, 1, *divisors(replicas)[:2]])
        dp = replicas // cp
        ep = rng.choice(divisors(dp)[-3:]) if config.moe else 1
        layout = ContiguousLayout(ParallelStrategy(pp=pp, dp=dp, cp=cp, tp=tp, ep=ep), ranks.start)
        try:
            config.check_layout(layout.as_layout)
        except ValueError:
            continue
        return layout
    return None


def movement(seed, names, clusters):
    """Return a random movement: model, cluster, source, target, and whether the source is sharded."""
    rng = random.Random(seed)
    while True:
        config = ModelConfig.load(rng.choice(names))
        cluster = Cluster.load(rng.choice(clusters))
        ranges = meshes(rng, cluster.num_devices)
        source, target = (placed(rng, config, ranks, cluster.devices_per_host) for ranks in ranges)
        if source is None or target is None or (config.moe and 1 == source.strategy.ep == target.strategy.ep):
            continue
        return config, cluster, source, target, source.strategy.num_replicas > 1 and rng.random() < 0.8


def ratios(config, cluster, source, target, sharded, *, lora=None):
    """Return the estimated seconds relative to the schedule's, without and with latencies; none if nothing
    moves, for both alike."""
    spec = model_spec(config) if lora is None else adapter_spec(config, lora)
    links = Links.of_cluster(cluster)
    ours = estimate_movement(
        links, MovedModel(config, lora, spec.section_numel), source, target, itemsize=2, sharded=sharded)
    schedule = make_schedule(
        spec, source=source.as_layout, target=target.as_layout, itemsize=2, links=links, sharded=sharded)
    if not schedule.bundles:
        assert ours == (0.0, 0)
        return []
    waiting = links.latency_seconds
    with_latency = ours.seconds + ours.num_waves * waiting, schedule.seconds + schedule.num_waves * waiting
    return [ours.seconds / schedule.seconds, with_latency[0] / with_latency[1]]


def are_near(found):
    return all(1 / MOST < ratio < MOST for ratio in found)


@pytest.mark.slow
def test_estimates_are_near_the_schedules():
    clusters = ("h100-1x8", "h100-2x8", "h100-8x8", "cpu-laptop")
    found = [ratios(*movement(seed, QUICK[:3] if seed % 2 else QUICK[3:], clusters)) for seed in range(40)]
    assert all(map(are_near, found)), found
    assert sum(map(bool, found)) >= 25


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(120))
def test_estimates_of_large_models_are_near_the_schedules(seed):
    names = EXPERTS if seed % 2 else DENSE
    found = ratios(*movement(seed, names, ("h100-1x8", "h100-2x8", "h100-8x8", "h100-16x8")))
    assert are_near(found), found


def test_narrow_ports_of_hosts_bound_estimates_and_schedules_alike():
    found = []
    for seed, port in ((1, 60e9), (6, 25e9), (9, 25e9), (14, 60e9)):
        config, cluster, *layouts = movement(seed, QUICK[:3] if seed % 2 else QUICK[3:], ("h100-2x8",))
        narrow = replace(cluster, host_bandwidth_bytes_per_second=port)
        found.append(ratios(config, narrow, *layouts))
    assert all(map(are_near, found)), found


def test_adapters_are_moved_alone():
    found = []
    for seed in range(8):
        config, cluster, source, target, sharded = movement(seed, QUICK[:3], ("h100-2x8",))
        found.append(ratios(config, cluster, source, target, sharded, lora=LoraConfig(rank=16)))
    assert all(map(are_near, found)), found
    assert sum(map(bool, found)) >= 4


def test_experts_are_not_free():
    """The attention stays where it is, and all experts move."""
    config = ModelConfig.load("qwen1.5-moe-a2.7b")
    cluster = Cluster.load("h100-1x8")
    source, target = (ContiguousLayout(ParallelStrategy.parse(text), 0) for text in ("d4e4", "d4"))
    found = ratios(config, cluster, source, target, sharded=False)
    assert found and are_near(found), found


def test_far_apart_costs_as_much_as_side_by_side():
    model = MovedModel(ModelConfig.load("qwen2.5-7b"), None, 1 << 24)
    links = Links.of_cluster(Cluster.load("h100-16x8"))
    source = ContiguousLayout(ParallelStrategy.parse("d2t4"), 0)
    near, far = (ContiguousLayout(ParallelStrategy.parse("d8"), first) for first in (8, 96))
    costs = {estimate_movement(links, model, source, target, itemsize=2) for target in (near, far)}
    costs |= {estimate_movement(links, model, source._replace(first_rank=40), far, itemsize=2)}
    assert len(costs) == 1


def test_a_rank_receives_what_it_lacks_by_hand():
    """Two ranks of one host, each with half of the columns, both want everything."""
    config = ModelConfig("llama", 1024, 256, 512, 2, 4, 4, 64)
    links = replace(Links.on_one_host(), device=1e9)
    spec = model_spec(config)
    split = sum(param.numel for param in spec.params if param.split_dim is not None)
    halves, whole = (ContiguousLayout(ParallelStrategy.parse(text), 0) for text in ("t2", "d2"))
    ours = estimate_movement(links, MovedModel(config, None, spec.section_numel), halves, whole, itemsize=4)
    assert ours.seconds == pytest.approx(4 * split / 2 / 1e9, rel=0.03)


@pytest.mark.parametrize(("first", "second"), [("p4v2", "p4"), ("t2p4v4", "p8"), ("d2p4v2", "p8")])
def test_interleaved_chunks_move(first, second):
    config = MegatronConfig.load("llama-3.2-1b")
    cluster = Cluster.load("h100-1x8")
    layouts = [ContiguousLayout(ParallelStrategy.parse(text), 0) for text in (first, second)]
    for source, target in (layouts, layouts[::-1]):
        found = ratios(config, cluster, source, target, sharded=False)
        assert found and are_near(found), found
