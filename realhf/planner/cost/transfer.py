"""Seconds of a reallocation, estimated quickly enough for thousands of calls in a search.

A schedule of `realloc.schedule` takes within a few percent of the time that the busiest port needs. This
module therefore adds up the loads of ports, by rank and by host, in and out. The boxes that ranks hold and
want split each kind of parameters into cells; all elements of a cell have the same holders and receivers. A
cell is first sent by its holders, each an equal share, and once to every host that has no holder.

Shapes: H hosts with P ranks each, N = H * P ranks, cells of X rows, Y columns and Z experts.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from realhf.planner.cost.parameter_boxes import Boxes, ContiguousLayout, Kind, MovedModel, boxes_of, kinds_of
from realhf.realloc.links import Links
from realhf.realloc.schedule import GOOD_ENOUGH, HOP_WAVES, slices_for

_OVER_BOUND = 1.02  # Time of schedules relative to the bound (benchmarks/measure/realloc_schedule.py).
_NOTHING = 1e-6  # The fraction of a model below which a difference is due to rounding.


class Movement(NamedTuple):
    """The estimated schedule of a movement.

    `seconds` are those in which its busiest port works; besides, each of `num_waves` waves has a latency.
    """

    seconds: float
    num_waves: int


def estimate_movement(
    links: Links, model: MovedModel, source: ContiguousLayout, target: ContiguousLayout, *, itemsize: int,
    sharded: bool = False,
) -> Movement:
    """Return the movement of a model from one layout to another.

    With `sharded` the source is the optimizer's copy, of which each replica has a shard.
    """
    return _estimate(links, model, *_moved_together(links, source, target), itemsize, sharded)


def _moved_together(
    links: Links, source: ContiguousLayout, target: ContiguousLayout
) -> tuple[ContiguousLayout, ContiguousLayout]:
    """Return layouts between which a movement takes as long, so that many pairs have one estimate.

    The first layout is moved to the first host, and the other one with it. If they have no host in common,
    the other one is moved to the next host.
    """
    per_host = links.devices_per_host
    first, last = sorted((source, target), key=lambda placed: placed.first_rank)
    start = first.first_rank // per_host * per_host
    begin = last.first_rank - start
    next_host = -(-(first.ranks.stop - start) // per_host) * per_host
    if begin >= next_host:
        begin = next_host + begin % per_host
    moved = {first: first._replace(first_rank=first.first_rank - start)}
    moved[last] = last._replace(first_rank=begin) if last != first else moved[first]
    return moved[source], moved[target]


@lru_cache(maxsize=1 << 16)
def _estimate(
    links: Links, model: MovedModel, source: ContiguousLayout, target: ContiguousLayout, itemsize: int,
    sharded: bool,
) -> Movement:
    per_host = min(links.devices_per_host, max(source.ranks.stop, target.ranks.stop))
    num_hosts = -(-max(source.ranks.stop, target.ranks.stop) // per_host)
    ranks = range(num_hosts * per_host)
    loads = _Loads(num_hosts, per_host)
    for kind in kinds_of(model, source.strategy, target.strategy):
        held = boxes_of(model, kind, source, ranks, sharded=sharded)
        wanted = boxes_of(model, kind, target, ranks, sharded=False)
        loads.add(_Cells(kind, held, wanted, num_hosts))
    taking_part = np.zeros(len(ranks), dtype=bool)
    for placed in (source, target):
        taking_part[placed.ranks.start : placed.ranks.stop] = True
    return loads.movement(links, taking_part, itemsize=itemsize)


@lru_cache(maxsize=1 << 16)
def covers(model: MovedModel, held: ContiguousLayout, wanted: ContiguousLayout) -> bool:
    """Return whether every rank of a layout already holds all that it wants in another layout."""
    if wanted.first_rank < held.first_rank or wanted.ranks.stop > held.ranks.stop:
        return False
    for kind in kinds_of(model, held.strategy, wanted.strategy):
        have, want = (boxes_of(model, kind, placed, held.ranks, sharded=False) for placed in (held, wanted))
        is_empty = np.zeros(len(held.ranks), dtype=bool)
        is_inside = np.ones(len(held.ranks), dtype=bool)
        for outer, inner in zip(have[:3], want[:3], strict=True):
            edges = np.unique(np.concatenate([outer.ravel(), inner.ravel()]))
            wants = _inside(inner, edges)
            is_empty |= ~wants.any(axis=1)
            is_inside &= (wants <= _inside(outer, edges)).all(axis=1)
        if not (is_empty | is_inside).all():
            return False
    return True


def _inside(boxes: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Return which intervals between edges lie in which rank's box, shape (N, intervals), as 0.0 or 1.0."""
    in_chunk = (boxes[..., :1] <= edges[:-1]) & (edges[1:] <= boxes[..., 1:])
    inside = np.any(in_chunk.reshape(len(boxes), -1, len(edges) - 1), axis=1)
    return np.asarray(inside, np.float32)


class _Side(NamedTuple):
    """The cells that the ranks of a layout have."""

    in_plane: np.ndarray  # By rows and columns, shape (H, P, X * Y).
    experts: np.ndarray  # Shape (H, P, Z).

    @property
    def by_host(self) -> np.ndarray:
        """Return how many ranks of each host have each cell, shape (H, X * Y, Z)."""
        return np.matmul(self.in_plane.swapaxes(1, 2), self.experts)

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Return for each rank the sum of some values over its cells, shape (H, P).

        `values` have the shape (X * Y, Z), or (H, X * Y, Z) where they differ from host to host.
        """
        total: np.ndarray = (np.matmul(self.in_plane, values) * self.experts).sum(axis=2)
        return total


class _Cells:
    """The cells of one kind of parameters, and who holds and wants them."""

    def __init__(self, kind: Kind, held: Boxes, wanted: Boxes, num_hosts: int) -> None:
        axes = zip(held[:3], wanted[:3], strict=True)
        edges = [np.unique(np.concatenate([a.ravel(), b.ravel()])) for a, b in axes]
        rows = kind.numel(edges[0][:-1], edges[0][1:])
        plane = (rows[:, None] * np.diff(edges[1])).ravel()
        self.sizes = plane[:, None] * np.diff(edges[2])
        self.num_shards = held.num_shards
        sides = []
        for boxes in (held, wanted):
            x, y, z = (_inside(box, edge) for box, edge in zip(boxes[:3], edges, strict=True))
            in_plane = (x[:, :, None] * y[:, None, :]).reshape(num_hosts, -1, len(plane))
            sides.append(_Side(in_plane, z.reshape(num_hosts, -1, z.shape[1])))
        self.source, self.target = sides
        self.both = _Side(*(a * b for a, b in zip(self.source, self.target, strict=True)))

    def members_sums(self, values: np.ndarray) -> np.ndarray:
        """Return for each rank the sum of some values over the cells that it holds or wants, shape (H, P)."""
        return self.source.sums(values) + self.target.sums(values) - self.both.sums(values)


class _Loads:
    """The loads of the ranks' ports, in elements, each of shape (H, P).

    Inside hosts, receivers may forward what they got (`sent`), or holders send all copies (`direct_sent`).
    Between hosts, a cell may leave the hosts of its holders once, as other hosts forward it (`leaving`), or
    once for each host that lacks it (`direct_leaving`).
    """

    def __init__(self, num_hosts: int, per_host: int) -> None:
        shape = (num_hosts, per_host)
        self.received = np.zeros(shape)  # What the rank lacks.
        self.first_sent = np.zeros(shape)  # The first copies of what the rank holds, which only it can send.
        self.direct_sent = np.zeros(shape)
        self.sent = np.zeros(shape)  # All that hold or want a cell send as much of it.
        self.entering = np.zeros(shape)  # What the rank receives from other hosts.
        self.leaving = np.zeros(shape)
        self.alone_leaving = np.zeros(shape)  # What of `leaving` only holders can send.
        self.direct_leaving = np.zeros(shape)
        self.total = 0.0
        self.gathered = 0.0  # What enters a host in pieces that its ranks then exchange.

    def add(self, cells: _Cells) -> None:
        """Add the loads of one kind of parameters."""
        sizes = cells.sizes
        num_shards = cells.num_shards
        have, want, both = (side.by_host for side in (cells.source, cells.target, cells.both))
        members = np.maximum(have + want - both, 1.0)
        missing = 1 - np.minimum(1.0, have / num_shards)  # The fraction of a cell that a host lacks.
        entering = sizes * (want > 0) * missing
        lacking = np.maximum(0.0, want - both / num_shards)  # Copies.
        of_holder = (have > 0) / (num_shards if num_shards > 1 else np.maximum(have, 1.0))
        # Receivers of what a holder has, other than itself.
        receivers = want - (both / np.maximum(have, 1.0) if num_shards > 1 else both)
        inside = np.maximum(0.0, sizes * lacking - entering) / members
        leaving, direct_leaving = _leaving(cells, have, want, members, entering)
        self.total += float(sizes.sum())
        self.gathered += float(entering[want > 1].sum())
        self.received += cells.target.sums(sizes) - cells.both.sums(sizes) / num_shards
        self.first_sent += cells.source.sums(sizes * np.minimum(1.0, receivers) * of_holder)
        self.direct_sent += cells.source.sums(sizes * lacking * of_holder)
        self.sent += cells.members_sums(inside + leaving)
        self.entering += cells.target.sums(entering / np.maximum(want, 1.0))
        self.leaving += cells.members_sums(leaving)
        self.alone_leaving += cells.source.sums(leaving * (members == have))
        self.direct_leaving += cells.source.sums(direct_leaving)

    def movement(self, links: Links, taking_part: np.ndarray, *, itemsize: int) -> Movement:
        """Return the movement over these links; `taking_part` tells which ranks hold or want something."""
        if self.received.max() <= _NOTHING * self.total:
            return Movement(0.0, 0)
        present = np.maximum(1, taking_part.reshape(self.received.shape).sum(axis=1))
        of_host = np.minimum(present * links.nic, links.host)
        busiest = itemsize * max(
            self.received.max() / links.device,
            self.first_sent.max() / links.sending,
            (self.sent.sum(axis=1) / present).max() / links.sending,
            self.entering.max() / links.nic,
            self.entering.sum(axis=1).max() / links.host,
            self.entering.sum() / of_host.sum(),
            self.alone_leaving.max() / links.nic,
            (self.leaving.sum(axis=1) / of_host).max())
        direct = itemsize * max(self.direct_sent.max() / links.sending, self.direct_leaving.max() / links.nic)
        forwards = int(direct > GOOD_ENOUGH * busiest) + int(self.gathered > _NOTHING * self.total)
        staged = itemsize * float((self.sent + self.received).max())
        slices = slices_for(busiest, staged, latency_seconds=links.latency_seconds, num_hops=1 + forwards)
        return Movement(_OVER_BOUND * busiest, slices + HOP_WAVES * forwards)


def _leaving(
    cells: _Cells, have: np.ndarray, want: np.ndarray, members: np.ndarray, entering: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the elements of each cell that a rank of each host sends to other hosts, in two ways.

    Either a cell leaves once, and all ranks on holders' hosts that hold or want it share the sending. Or the
    holders send a copy to every host that lacks it.
    """
    holds = have > 0
    if cells.num_shards == 1:
        leaves = (entering > 0).any(axis=0)
        senders = np.maximum((members * holds).sum(axis=0), 1.0)
        holders = np.maximum(have.sum(axis=0), 1.0)
        return cells.sizes * leaves / senders * holds, entering.sum(axis=0) / holders * holds
    elsewhere = (want > 0).sum(axis=0) - (want > 0)
    once = cells.sizes * np.minimum(1.0, have / cells.num_shards) * (elsewhere > 0) / members
    return once, cells.sizes / cells.num_shards * elsewhere * holds
