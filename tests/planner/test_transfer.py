"""Estimated seconds of reallocations, compared with the schedules that carry them out."""

import random

import pytest

from realhf.cluster import Cluster
from realhf.layout import ParallelStrategy
from realhf.model_config import ModelConfig
from realhf.param_spec import model_spec
from realhf.planner.transfer import ContiguousLayout, transfer_seconds
from realhf.realloc.links import Links
from realhf.realloc.schedule import make_schedule

SPEC = model_spec(ModelConfig.load("qwen2.5-7b"))


def _placed(rng, cluster):
    size = rng.choice([n for n in (1, 2, 4, 8, 16, 32) if n <= cluster.num_devices])
    first = rng.randrange(0, cluster.num_devices // size) * size
    tp = rng.choice([n for n in (1, 2, 4) if n <= min(size, cluster.devices_per_host)])
    pp = rng.choice([n for n in (1, 2, 4) if size // tp % n == 0])
    return ContiguousLayout(ParallelStrategy(tp=tp, pp=pp, dp=size // tp // pp), first)


@pytest.mark.parametrize("seed", range(60))
def test_cost_is_near_the_schedule(seed):
    rng = random.Random(seed)
    cluster = Cluster.load(rng.choice(["h100-1x8", "h100-2x8", "h100-8x8"]))
    source, target = _placed(rng, cluster), _placed(rng, cluster)
    sharded = source.strategy.dp > 1 and rng.random() < 0.5
    cost = transfer_seconds(
        cluster, source, target, num_bytes=SPEC.numel * 2, sharded=sharded,
        section_share=SPEC.section_numel / SPEC.numel)
    schedule = make_schedule(
        SPEC, source=source.as_layout, target=target.as_layout, itemsize=2, links=Links.of_cluster(cluster),
        sharded=sharded,
    )  # fmt: skip
    whole = SPEC.numel * 2 / cluster.intra_host.bandwidth_bytes_per_second
    if schedule.seconds < 0.05 * whole:
        assert cost < 0.1 * whole
    else:  # The embedding, the head and uneven rows are not spread as evenly as layers.
        assert schedule.seconds / 1.35 < cost < 1.35 * schedule.seconds, (source, target, sharded)
