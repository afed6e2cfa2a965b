"""Seconds of a reallocation, estimated quickly enough for thousands of calls in a search.

A schedule of `realloc.schedule` takes within a few percent of the time that the busiest port needs. This
module therefore adds up the loads of ports, by rank and by host, in and out. A model is treated as a
rectangle, layers by tensor-parallel width, in which every rank holds a smaller rectangle.
"""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from realhf.cluster import Cluster
from realhf.layout import DeviceMesh, Layout, ParallelStrategy

_OVER_BOUND = 1.04  # Time of schedules relative to the bound (benchmarks/realloc_schedule.py).
_MAX_PARTS = 16  # With more parts of a source, no single one is a bottleneck between hosts.


class ContiguousLayout(NamedTuple):
    """A layout on a range of ranks. It is quick to make, compare and hash."""

    strategy: ParallelStrategy
    first_rank: int

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.strategy.num_ranks)

    @property
    def as_layout(self) -> Layout:
        return Layout(self.strategy, DeviceMesh(tuple(self.ranks)))


def transfer_seconds(
    cluster: Cluster, source: ContiguousLayout, target: ContiguousLayout, *, num_bytes: float,
    sharded: bool = False, section_share: float = 1.0,
) -> float:  # fmt: skip
    """Return the seconds to move a model of `num_bytes` from one layout to another.

    With `sharded` the source is the optimizer's copy, of which each replica has a part in every section of a
    rank's layers. `section_share` is the fraction of the model that is in a section.
    """
    held = _rectangles(source, sharded=sharded, section_share=section_share)
    wanted = _rectangles(target)
    at = np.arange(len(wanted)) + target.first_rank - source.first_rank
    here = np.zeros_like(wanted)  # The parts of the source that ranks of the target hold.
    inside = (at >= 0) & (at < len(held))
    here[inside] = held[at[inside]]
    missing = _area(wanted) - _overlap(here, wanted)
    if missing.max() <= 1e-9:
        return 0.0
    device = cluster.intra_host.bandwidth_bytes_per_second
    grid = _Grid(np.concatenate([held, wanted]))
    lacked = np.zeros_like(grid.areas, dtype=bool)  # Cells that some rank lacks.
    for pair in np.unique(np.concatenate([wanted, here], axis=1), axis=0):
        lacked |= grid.covered(pair[None, :4]) & ~grid.covered(pair[None, 4:])
    parts, replicas = np.unique(held, axis=0, return_counts=True)
    seconds = float(missing.max()) / device
    for part, count in zip(parts, replicas, strict=True):
        seconds = max(seconds, grid.area(part, lacked) / count / device)
    crossing = _between_hosts(cluster, source, target, held, wanted, grid)
    latency = cluster.link(within_host=not crossing).latency_seconds
    return _OVER_BOUND * max(seconds, crossing) * num_bytes + latency


class _Grid:
    """The cells into which the edges of rectangles split the model."""

    def __init__(self, rectangles: np.ndarray) -> None:
        self._rows, self._columns = (np.unique(rectangles[:, [i, i + 1]]) for i in (0, 2))
        self.areas = np.diff(self._rows)[:, None] * np.diff(self._columns)

    def covered(self, rectangles: np.ndarray) -> np.ndarray:
        """Return which cells lie in any of the rectangles."""
        cells = np.zeros(self.areas.shape, dtype=bool)
        for rectangle in rectangles:
            cells[self._inside(rectangle)] = True
        return cells

    def area(self, rectangle: np.ndarray, cells: np.ndarray) -> float:
        """Return the area of the given cells that lie in the rectangle."""
        inside = self._inside(rectangle)
        return float(self.areas[inside][cells[inside]].sum())

    def _inside(self, rectangle: np.ndarray) -> tuple[slice, slice]:
        first, last = self._rows.searchsorted(rectangle[:2])
        begin, end = self._columns.searchsorted(rectangle[2:])
        return slice(first, last), slice(begin, end)

    def pieces(self, rectangle: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the rectangle in pieces, split between layers."""
        low, high, left, right = rectangle
        rows = self._rows[(self._rows >= low) & (self._rows <= high)]
        for first, last in itertools.pairwise(rows):
            yield np.array([first, last, left, right])


def _rectangles(placed: ContiguousLayout, *, sharded: bool = False, section_share: float = 1.0) -> np.ndarray:
    """Return one row per rank: first layer, last, first column, last, as fractions of the model.

    Parts of replicas that lie in several sections are treated as columns of all layers.
    """
    s = placed.strategy
    pp, replica, tp = np.indices((s.pp, s.num_replicas, s.tp)).reshape(3, -1)
    low, height = pp / s.pp, 1 / s.pp
    left, width = tp / s.tp, 1 / s.tp
    if sharded and height * width > section_share:
        left, width = left + replica / (s.tp * s.num_replicas), width / s.num_replicas
    elif sharded:
        low, height = low + replica / (s.pp * s.num_replicas), height / s.num_replicas
    return np.round(np.stack([low, low + height, left, left + width], axis=1), 9)


def _area(a: np.ndarray) -> np.ndarray:
    return (a[:, 1] - a[:, 0]) * (a[:, 3] - a[:, 2])


def _overlap(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    height = np.minimum(a[:, 1], b[:, 1]) - np.maximum(a[:, 0], b[:, 0])
    width = np.minimum(a[:, 3], b[:, 3]) - np.maximum(a[:, 2], b[:, 2])
    return np.clip(height, 0, None) * np.clip(width, 0, None)


def _between_hosts(
    cluster: Cluster, source: ContiguousLayout, target: ContiguousLayout, held: np.ndarray,
    wanted: np.ndarray, grid: _Grid,
) -> float:  # fmt: skip
    """Return the seconds per byte of the model on the busiest port between hosts; 0 when nothing crosses."""
    per_host = cluster.devices_per_host
    nic = cluster.link(within_host=False).bandwidth_bytes_per_second
    port = cluster.host_port_bytes_per_second

    def on_host(placed: ContiguousLayout, rectangles: np.ndarray, host: int) -> np.ndarray:
        """Rectangles of the ranks on a host."""
        start = max(0, host * per_host - placed.first_rank)
        return rectangles[start : max(0, (host + 1) * per_host - placed.first_rank)]

    seconds = 0.0
    leaving = np.zeros(grid.areas.shape, dtype=bool)
    seen: set[tuple[bytes, bytes]] = set()
    for host in sorted(cluster.count_by_host(target.ranks)):
        want, have = on_host(target, wanted, host), on_host(source, held, host)
        if (key := (want.tobytes(), have.tobytes())) in seen:
            continue
        seen.add(key)
        lacking = grid.covered(want) & ~grid.covered(have)
        leaving |= lacking
        seconds = max(seconds, float(grid.areas[lacking].sum()) / min(len(want) * nic, port))
    if not leaving.any():
        return 0.0
    hosts = sorted(cluster.count_by_host(source.ranks))
    seconds = max(seconds, float(grid.areas[leaving].sum()) / (len(hosts) * port))
    parts = np.unique(held, axis=0)
    for part in parts if len(parts) <= _MAX_PARTS else ():
        holding = [int((on_host(source, held, h) == part).all(axis=1).sum()) for h in hosts]
        near = [on_host(target, wanted, h) for h, count in zip(hosts, holding, strict=True) if count]
        alone = total = 0.0
        most = sum(holding)
        for piece in grid.pieces(part):
            leaves = grid.area(piece, leaving)
            # Its holders can send it, and so can ranks of their hosts that want it.
            also = sum(int((_overlap(w, np.broadcast_to(piece, w.shape)) > 1e-9).sum()) for w in near)
            total = total + leaves
            alone = alone + (0.0 if also else leaves)
            most = max(most, sum(holding) + also)
        most = min(most, per_host * len(near))
        seconds = max(seconds, alone / sum(holding) / nic, total / most / nic)
    return seconds
