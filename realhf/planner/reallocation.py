"""Seconds of a reallocation, estimated quickly enough for thousands of calls in a search.

A schedule of `realloc.schedule` takes within a few percent of the time that the busiest port needs. This
module therefore adds up the loads of ports, by rank and by host, in and out.

Parameters that layouts split alike form a kind. A kind is a box with three axes: rows (the embedding, every
layer, and what follows the last layer), columns (the part of a tensor that a tensor-parallel rank has) and
experts. A rank holds a smaller box of each kind. The boxes that ranks hold and want split a kind into cells;
all elements of a cell have the same holders and receivers. A cell is first sent by its holders, each an equal
share, and once to every host that has no holder.

Shapes: H hosts with P ranks each, N = H * P ranks, cells of X rows, Y columns and Z experts.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from realhf.graph import FunctionCall
from realhf.layout import ParallelStrategy, even_split
from realhf.models.lora import LoraConfig
from realhf.models.model_config import ModelConfig
from realhf.planner.links import ContiguousLayout
from realhf.planner.problem import ModelRole, Problem
from realhf.planner.rates import Rates
from realhf.planner.shard import parameter_kinds
from realhf.realloc.links import Links
from realhf.realloc.schedule import GOOD_ENOUGH, HOP_WAVES, slices_for

_WHOLE = 0  # Columns of parameters that every tensor-parallel rank holds whole.
_EVEN = -1  # Columns that are split evenly, or nearly so.
_FINE = 64  # With this many units per rank, a split counts as even.
_OVER_BOUND = 1.02  # Time of schedules relative to the bound (benchmarks/measure/realloc_schedule.py).
_NOTHING = 1e-6  # The fraction of a model below which a difference is due to rounding.


class MovedModel(NamedTuple):
    """The parameters to move: all of a model, or only its adapters.

    `section_numel` is that of ModelSpec.
    """

    config: ModelConfig
    lora: LoraConfig | None
    section_numel: int
    int8_share: float = 1.0  # Bytes of a parameter that takes int8, relative to others.


# Copies of trained weights


def arrivals(
    rates: Rates, problem: Problem, trainer: FunctionCall, home: ContiguousLayout,
    copies: Sequence[tuple[tuple[str, ModelRole], ContiguousLayout | None]],
) -> tuple[float, ...]:
    """Return for each copy of trained weights how long after training it is complete. A copy is that of a
    role, which is the trained one or follows it.

    A rank makes its copies one after the other. If replicas share the optimizer, a copy costs nothing where
    ranks already have all of it from an earlier copy (runtime/compile/actions.py). Otherwise each replica has
    updated all weights, and the home is complete at once. For example, with copies that take 2 s, 3 s and
    again the first layout, the times are 2, 5 and 2 s.

    A layout that is None is not decided: that copy and later ones count 0 seconds, less than they take.
    """
    role = problem.model_role(trainer)
    complete_at: dict[tuple[str | None, ContiguousLayout, bool], float] = {}
    is_sharded = home.strategy.num_replicas > 1
    if not is_sharded:
        complete_at[trainer.role, home, False] = 0.0
    elapsed = 0.0
    times: list[float] = []
    for (copied, copy), layout in copies:
        if layout is None:
            break
        is_int8 = copy.int8 and copy.lora is None
        if (copied, layout, is_int8) not in complete_at:
            whole = [held for name, held, *int8 in complete_at if name == copied and not any(int8)]
            earlier = whole if is_sharded and not is_int8 else []
            earlier += [home] if copied != trainer.role else []  # It follows what is whole at home by then.
            if not any(covers(_moved(role), held, layout) for held in earlier):
                elapsed += reallocation_seconds(rates, copy if is_int8 else role, home, layout)
            complete_at[copied, layout, is_int8] = elapsed
        times.append(complete_at[copied, layout, is_int8])
    return (*times, *[0.0] * (len(copies) - len(times)))


def reallocation_seconds(
    rates: Rates, role: ModelRole, source: ContiguousLayout, target: ContiguousLayout
) -> float:
    """Return the seconds to move the trained parameters of a role from where it trains to another layout."""
    cluster = rates.cluster
    first = min(source.ranks[0], target.ranks[0])
    last = max(source.ranks[-1], target.ranks[-1])
    leaf = cluster.devices_per_host * (cluster.hosts_per_leaf or cluster.num_hosts)
    slowdown = 1.0 if first // leaf == last // leaf else cluster.slowdown(cluster.num_hosts)
    rates = rates.at((first, last))
    links = Links.of_cluster(rates.cluster)
    links = replace(links, nic=links.nic / slowdown, host=links.host / slowdown)
    movement = estimate_movement(
        links, _moved(role), source, target, itemsize=role.itemsize,
        sharded=source.strategy.num_replicas > 1)
    return movement.seconds / rates.efficiencies.link + movement.num_waves * links.latency_seconds


def _moved(role: ModelRole) -> MovedModel:
    """Return the parameters that training changes."""
    return MovedModel(role.config, role.lora, role.trained_spec.section_numel, role.moved_share)


# Boxes of parameters


class Kind(NamedTuple):
    """Parameters that two layouts split alike."""

    ends: np.ndarray  # ends[i] is the number of elements in the rows before row i.
    units: int  # The number of indivisible units of the column axis, `_EVEN` or `_WHOLE`.
    is_expert: bool
    is_vocabulary: bool  # Whether they are the embedding or the head.
    on_both_ends: bool  # Whether the first and the last stage hold them: an embedding that is also the head.

    def numel(self, first: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """Return the elements between two rows, which may be fractions."""
        rows = np.arange(len(self.ends))
        between: np.ndarray = np.interp(stop, rows, self.ends) - np.interp(first, rows, self.ends)
        return between


class Boxes(NamedTuple):
    """The box of every rank in a range of ranks, as a start and a stop on each axis.

    Ranks outside the layout have empty boxes. If `num_shards` replicas share an optimizer, each of them holds
    another shard of their common box.
    """

    rows: np.ndarray  # Shape (ranks, chunks, 2), as a rank may have several chunks of the layers.
    columns: np.ndarray  # Shape (ranks, 2), as fractions of all columns.
    experts: np.ndarray  # Shape (ranks, 2), as fractions of all experts.
    num_shards: int = 1


@lru_cache(maxsize=1 << 12)
def kinds_of(model: MovedModel, source: ParallelStrategy, target: ParallelStrategy) -> tuple[Kind, ...]:
    """Return the kinds of a model's parameters under two strategies."""
    config = model.config
    on_two_stages = config.tied and (source.pp > 1 or target.pp > 1)
    by_kind: dict[tuple[int, bool, bool, bool], np.ndarray] = {}
    none = np.zeros(config.num_layers + 2, np.int64)
    int8 = {} if model.int8_share == 1 else parameter_kinds(config, model.lora, int8=True)
    for (param, is_expert), counts in parameter_kinds(config, model.lora).items():
        units = _WHOLE if param.split_dim is None else param.num_units
        if units and all(units % s.tp == 0 or units >= _FINE * s.tp for s in (source, target)):
            units = _EVEN
        numel = (counts - (1 - model.int8_share) * int8.get((param, is_expert), none)) * param.numel
        is_vocabulary = units != _WHOLE and not numel[1:-1].any()
        key = (units, is_expert, is_vocabulary, is_vocabulary and on_two_stages)
        by_kind[key] = by_kind.get(key, 0) + numel
    return tuple(
        Kind(np.concatenate([[0], numel.cumsum()]).astype(float), *key) for key, numel in by_kind.items())


def boxes_of(
    model: MovedModel, kind: Kind, placed: ContiguousLayout, ranks: range, *, sharded: bool
) -> Boxes:
    """Return the boxes of a kind on a range of ranks that includes the layout's.

    With `sharded`, they are those of the optimizer's copy, each section of which is split over the replicas,
    end to end. If a rank has a single section, its replicas thus split the rows, for example 12 layers into
    0-3, 4-7 and 8-11 (of the vocabulary, the columns). If it has several, each replica has a shard of every
    section; then the boxes are those of a whole replica, with `num_shards`.
    """
    s = placed.strategy
    pp, dp, cp, tp = np.indices((s.pp, s.dp, s.cp, s.tp)).reshape(4, -1)
    num_layers = model.config.num_layers
    virtual_stages = [even_split(num_layers, s.pp * s.vp, i) for i in range(s.pp * s.vp)]
    edges = np.array(virtual_stages, float).reshape(s.vp, s.pp, 2) + 1
    edges[0, 0, 0] = 0
    edges[-1, -1, 1] = num_layers + 2
    rows = edges[:, pp].swapaxes(0, 1)
    if kind.on_both_ends:
        is_end = (pp == 0) | (pp == s.pp - 1)
        rows = np.stack([np.zeros(len(pp)), is_end.astype(float)], axis=1)[:, None]
    columns = _columns(kind.units, s.tp)[tp]
    experts = np.tile([0.0, 1.0], (len(pp), 1))
    replica = dp * s.cp + cp
    num_shards = s.num_replicas if sharded else 1
    if kind.is_expert and s.ep > 1:
        num_experts = model.config.moe.num_experts if model.config.moe else 1
        experts = np.array([even_split(num_experts, s.ep, i) for i in range(s.ep)])[dp % s.ep] / num_experts
        replica = dp // s.ep * s.cp + cp
        num_shards = s.num_expert_replicas if sharded else 1
    if sharded and kind.is_vocabulary:
        width = np.diff(columns) / num_shards
        columns = columns[:, :1] + width * np.stack([replica, replica + 1], axis=1)
        num_shards = 1
    elif sharded and s.vp == 1 and _most_elements(kind, rows, columns, experts) <= model.section_numel:
        rows = _rows_of_replica(kind, rows[:, 0], replica, num_shards)[:, None]
        num_shards = 1
    rows, columns, experts = (_spread(box, placed, ranks) for box in (rows, columns, experts))
    return Boxes(rows, columns, experts, num_shards)


def _most_elements(kind: Kind, rows: np.ndarray, columns: np.ndarray, experts: np.ndarray) -> float:
    in_rows = kind.numel(rows[..., 0], rows[..., 1]).sum(axis=1)
    return float(in_rows.max() * np.diff(columns).max() * np.diff(experts).max())


@lru_cache(maxsize=256)
def _columns(units: int, tp: int) -> np.ndarray:
    """Return the part of the columns that each tensor-parallel rank holds, as ParamSpec.region has it."""
    index = np.arange(tp)
    if units == _WHOLE:
        return np.tile([0.0, 1.0], (tp, 1))
    if units == _EVEN:
        return np.stack([index, index + 1], axis=1) / tp
    first, stop = units * index // tp, units * (index + 1) // tp
    return np.stack([first, np.maximum(first + 1, stop)], axis=1) / units


def _rows_of_replica(kind: Kind, rows: np.ndarray, replica: np.ndarray, num_replicas: int) -> np.ndarray:
    """Return the rows of each replica, in order, so that all have the same number of elements."""
    row_numbers = np.arange(len(kind.ends))
    before = np.interp(rows[:, 0], row_numbers, kind.ends)
    numel = kind.numel(*rows.T)
    start, stop = (
        np.interp(before + numel * (replica + i) / num_replicas, kind.ends, row_numbers) for i in (0, 1))
    return np.clip(np.stack([start, stop], axis=1), rows[:, :1], rows[:, 1:])


def _spread(box: np.ndarray, placed: ContiguousLayout, ranks: range) -> np.ndarray:
    """Return the boxes of a layout's ranks at their places in a range of ranks."""
    everywhere = np.zeros((len(ranks), *box.shape[1:]))
    start = placed.first_rank - ranks.start
    everywhere[start : start + len(box)] = box
    return np.round(everywhere, 9)


# Loads of ports


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
