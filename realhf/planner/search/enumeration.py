"""The layouts that the search enumerates: meshes of contiguous ranks, and strategies on them.

Every mesh is on hosts of one kind. On up to `COMPLETE` devices of a kind they are all legal layouts on
contiguous ranks. On more devices they are fewer:

- Meshes inside a host have a size that divides the host's number of devices, and start at a multiple of it.
  Larger ones are ranges of whole hosts. On more than 8 hosts, meshes inside a host are on the first one only;
  ranges start and end at every eighth of the cluster, and smaller ones are aligned powers of two.
- The sizes tp and tp * cp either divide the number of devices of a host or are multiples of it. On more than
  8 hosts, tp takes at most 4 hosts, and cp is 1 or fills a host with tp.
"""

import math
from collections.abc import Iterator
from functools import lru_cache

from realhf.cluster import Cluster
from realhf.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.models.model_config import ModelConfig
from realhf.planner.workload.problem import Problem

COMPLETE = 8
"""Up to this many devices of a kind have all legal layouts on contiguous ranks enumerated, with 1, 2 or 4
chunks of a stage."""
_RANGE_ENDS = 8  # Ranges of hosts begin and end at this many positions, evenly spaced.
_MOST_HOSTS = 4  # The most hosts of a tp group, where ranges end at few positions.
_SMALLEST_RANGE = 4  # Smaller ranges are aligned powers of two, down to this fraction of the spacing.
_NUM_CHUNKS = (1, 2, 4)  # Of a pipeline stage, where the engine interleaves them.


def find_meshes(cluster: Cluster) -> list[range]:
    """Return the ranges of ranks that plans may use, largest first. Each is on hosts of one kind."""
    meshes = [
        range(ranks.start + mesh.start, ranks.start + mesh.stop)
        for ranks, kind in cluster.ranks_by_kind for mesh in _meshes_on(kind)]
    return sorted(meshes, key=lambda mesh: (-len(mesh), mesh.start))


def _meshes_on(cluster: Cluster) -> list[range]:
    """Return the ranges of ranks on hosts of one kind."""
    devices = cluster.num_devices
    per_host = cluster.devices_per_host
    hosts = cluster.num_hosts
    if devices <= COMPLETE:
        return [range(first, stop) for first in range(devices) for stop in range(first + 1, devices + 1)]
    spacing = 1 << max(0, math.ceil(math.log2(hosts / _RANGE_ENDS)))
    split = devices if spacing == 1 else per_host  # Ranks of hosts that have meshes inside them.
    sizes = [n for n in _divisors(per_host) if n < per_host]
    meshes = [range(first, first + n) for n in sizes for first in range(0, split, n)]
    ends = sorted({*range(0, hosts, spacing), hosts})
    of_hosts = {(first, stop) for first in ends for stop in ends if first < stop}
    for n in (spacing >> i for i in range(1, spacing.bit_length()) if 1 << i <= _SMALLEST_RANGE):
        of_hosts |= {(first, first + n) for first in range(0, hosts - n + 1, n)}
    return [*meshes, *(range(first * per_host, stop * per_host) for first, stop in of_hosts)]


def find_strategies(
    config: ModelConfig, size: int, *, cluster: Cluster, max_dp: int
) -> Iterator[ParallelStrategy]:
    """Yield the strategies on `size` ranks that plans may use; at most `max_dp` ranks split the samples."""
    num_experts = config.moe.num_experts if config.moe else 1
    for tp in _divisors(size):
        for cp in _divisors(size // tp):
            if config.num_heads % (tp * cp) or not _is_enumerated(cluster, tp, cp):
                continue
            for dp in _divisors(size // tp // cp):
                pp = size // tp // cp // dp
                if dp > max_dp or pp > config.num_layers:
                    continue
                for ep in _divisors(dp):
                    if ep > num_experts:
                        continue
                    for vp in _NUM_CHUNKS if config.interleaves and pp > 1 else (1,):
                        strategy = ParallelStrategy(pp=pp, dp=dp, cp=cp, tp=tp, ep=ep, vp=vp)
                        if _is_legal(config, strategy):
                            yield strategy


def _is_enumerated(cluster: Cluster, tp: int, cp: int) -> bool:
    """Return whether strategies may have these sizes of tp and cp."""
    per_host = cluster.devices_per_host
    if cluster.num_devices <= COMPLETE:
        return True
    if cluster.num_hosts > _RANGE_ENDS and (tp > _MOST_HOSTS * per_host or cp not in (1, per_host // tp)):
        return False
    return all(per_host % n == 0 or n % per_host == 0 for n in (tp, tp * cp))


def pins_outside(problem: Problem) -> dict[str, Layout]:
    """Return the pinned layouts that the search would not enumerate without the pin."""
    meshes = set(find_meshes(problem.cluster))

    def is_outside(layout: Layout) -> bool:
        first, last = layout.ranks[0], layout.ranks[-1]
        kind = problem.cluster.kind_index(layout.ranks)
        return range(first, last + 1) not in meshes or kind is None or layout.vp not in _NUM_CHUNKS or (
            not _is_enumerated(problem.cluster.kinds[kind], layout.tp, layout.cp))

    return {name: layout for name, layout in problem.pins.items() if is_outside(layout)}


@lru_cache(maxsize=1 << 12)
def _divisors(number: int) -> tuple[int, ...]:
    return tuple(n for n in range(1, number + 1) if number % n == 0)


@lru_cache(maxsize=1 << 14)
def _is_legal(config: ModelConfig, strategy: ParallelStrategy) -> bool:
    try:
        config.check_layout(Layout(strategy, DeviceMesh(tuple(range(strategy.num_ranks)))))
    except ValueError:
        return False
    return True
