"""Transfer: seconds of a reallocation, quickly enough to be asked thousands of times in a search.

What `realloc.schedule` achieves is within a few percent of what the busiest port must carry, so that is
counted here: by rank, by host, and out of the hosts that hold the source. Parameters are taken as a
rectangle, layers by tensor-parallel width, of which every rank holds a smaller one.
"""

from typing import NamedTuple

import numpy as np

from realhf.cluster import Cluster
from realhf.layout import ParallelStrategy

_OVER_BOUND = 1.04  # What schedules take, as a multiple of the bound (benchmarks/realloc_schedule.py).


class Placed(NamedTuple):
    """A strategy on contiguous ranks."""

    strategy: ParallelStrategy
    first_rank: int

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.strategy.num_ranks)


def transfer_seconds(
    cluster: Cluster, source: Placed, target: Placed, *, num_bytes: float, sharded: bool = False
) -> float:
    """Seconds to move a model of `num_bytes`; with `sharded` from the optimizer's copy, whose dp replicas
    have a part each (contiguous in the order of layers)."""
    held, wanted = _rectangles(source, sharded=sharded), _rectangles(target)
    at = np.arange(len(target.ranks)) + target.first_rank - source.first_rank
    here = (at >= 0) & (at < len(held))
    overlap = np.zeros(len(wanted))
    overlap[here] = _overlap(held[at[here]], wanted[here])
    areas = (wanted[:, 1] - wanted[:, 0]) * (wanted[:, 3] - wanted[:, 2])
    missing = (areas - overlap) * num_bytes
    if missing.max() <= 0:
        return 0.0
    inside, outside = cluster.intra_host, cluster.inter_host
    seconds = float(missing.max()) / inside.bandwidth_bytes_per_second
    lacking, leaving = _between_hosts(cluster, source, target, held, wanted)
    if lacking:
        hosts, counts = np.unique([cluster.host_of(r) for r in target.ranks], return_counts=True)
        nic, port = outside.bandwidth_bytes_per_second, cluster.host_port_bytes_per_second
        into = {int(host): min(count * nic, port) for host, count in zip(hosts, counts, strict=True)}
        for host, area in lacking.items():
            seconds = max(seconds, area * num_bytes / into[host])
        senders = {cluster.host_of(rank) for rank in source.ranks}
        per_host = min(len(source.ranks) // len(senders) * nic, port)
        seconds = max(seconds, leaving * num_bytes / (len(senders) * per_host))
    latency = max(inside.latency_seconds, outside.latency_seconds if lacking else 0.0)
    return _OVER_BOUND * seconds + latency


def _rectangles(placed: Placed, *, sharded: bool = False) -> np.ndarray:
    """(first layer, last, first column, last) as shares of the whole, by rank."""
    s = placed.strategy
    pp, dp, cp, tp = np.indices((s.pp, s.dp, s.cp, s.tp)).reshape(4, -1)
    low, height = pp / s.pp, 1 / s.pp
    if sharded:
        low, height = low + dp / (s.pp * s.dp), 1 / (s.pp * s.dp)
    return np.stack([low, low + height, tp / s.tp, (tp + 1) / s.tp], axis=1)


def _overlap(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    height = np.minimum(a[:, 1], b[:, 1]) - np.maximum(a[:, 0], b[:, 0])
    width = np.minimum(a[:, 3], b[:, 3]) - np.maximum(a[:, 2], b[:, 2])
    return np.clip(height, 0, None) * np.clip(width, 0, None)


def _between_hosts(
    cluster: Cluster, source: Placed, target: Placed, held: np.ndarray, wanted: np.ndarray
) -> tuple[dict[int, float], float]:
    """Host -> share of the model that its target ranks want and none of its ranks holds; and what some host
    lacks, which must leave the source's hosts once."""
    hosts = {cluster.host_of(rank) for rank in target.ranks}
    if len(hosts | {cluster.host_of(rank) for rank in source.ranks}) == 1:
        return {}, 0.0
    rows, columns = (
        np.unique(np.round(np.concatenate([held[:, [i, i + 1]], wanted[:, [i, i + 1]]]), 9)) for i in (0, 2)
    )
    areas = np.diff(rows)[:, None] * np.diff(columns)
    lacking, leaving = {}, np.zeros(areas.shape, dtype=bool)
    for host in sorted(hosts):
        first = host * cluster.devices_per_host
        ranks = range(first, first + cluster.devices_per_host)
        want = _covered(wanted, target, ranks, rows, columns)
        have = _covered(held, source, ranks, rows, columns)
        leaving |= want & ~have
        if (area := float(areas[want & ~have].sum())) > 1e-9:
            lacking[host] = area
    return lacking, float(areas[leaving].sum())


def _covered(
    rectangles: np.ndarray, placed: Placed, ranks: range, rows: np.ndarray, columns: np.ndarray
) -> np.ndarray:
    """Cells of the grid that some of these ranks have."""
    start, stop = (min(max(r - placed.first_rank, 0), len(rectangles)) for r in (ranks.start, ranks.stop))
    covered = np.zeros((len(rows) - 1, len(columns) - 1), dtype=bool)
    for low, high, left, right in np.unique(np.round(rectangles[start:stop], 9), axis=0):
        first, last = np.searchsorted(rows, (low, high))
        begin, end = np.searchsorted(columns, (left, right))
        covered[first:last, begin:end] = True
    return covered
