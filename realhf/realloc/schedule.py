"""Schedule: what every rank sends to whom in which round, when a model moves from one Layout to another.

All ranks compute the same Schedule from the same arguments, without torch. Every parcel is cut into the same
number of slices; slice i makes its first hop in round i, its next ones later, so that in every round all
ports carry the same mixture and none idles. A slice is handed on two rounds after it was sent: while one
round is on the wire, the next can be packed.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from realhf.layout import Layout
from realhf.param_spec import ModelSpec, Placement
from realhf.realloc.links import Links
from realhf.realloc.multicast import ONE, Leg
from realhf.realloc.parcels import Cell, Parcel, find_cells, make_parcels
from realhf.realloc.routes import Routed, Router
from realhf.region import Region

HOP_ROUNDS = 2
"""A rank hands on in round r + HOP_ROUNDS what it got in round r."""
STAGING_BYTES = 256 << 20
"""Default cap on a rank's memory for what is on its way."""
_ROUND = 0.48  # of the staging memory: two rounds are on their way, cuts are rounded to whole rows
_LEAST_LATENCY = 1e-5  # as a part of the whole movement: keeps slices from becoming dust
_ROUTES = ((False, False), (True, False), (True, True))  # (forward, relay), from few hops to many
_GOOD_ENOUGH = 1.04  # times the bound: then simpler routes are preferred to those with more hops


_PORTS = (
    "rank {} sends", "rank {} receives", "rank {} sends to other hosts", "rank {} receives from other hosts",
    "host {} sends", "host {} receives",
)  # fmt: skip


class Transfer(NamedTuple):
    """`region` of parameter `name`, in global indices, goes from rank `source` to rank `target`.

    `forwarded`: the source did not hold it from the start, it got it in an earlier round.
    """

    source: int
    target: int
    name: str
    region: Region
    forwarded: bool


@dataclass(frozen=True)
class Schedule:
    """Every element that a target rank wants comes once: by a transfer or from itself (`local_copies`).

    `bound_seconds` is what the busiest port needs at least, under any schedule in which ranks receive only
    what they want; `limit` says what proves it. `compute_seconds` is the time that it took to find all this.
    """

    spec: ModelSpec
    links: Links
    itemsize: int
    parcels: Sequence[Parcel]
    cells: Sequence[list[Cell]]
    legs: np.ndarray
    num_slices: int
    bound_seconds: float
    limit: str
    compute_seconds: float = field(compare=False)
    _known_cuts: dict[int, dict[int, np.ndarray]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def needed_bytes(self) -> int:
        """Bytes that each rank of the target lacks, summed over ranks: all that is ever received."""
        return self.itemsize * sum(parcel.size * len(parcel.takers) for parcel in self.parcels)

    @cached_property
    def num_rounds(self) -> int:
        if not len(self.legs):
            return 0
        return self.num_slices + HOP_ROUNDS * int(self.legs[:, 5].max())

    @property
    def over_bound(self) -> float:
        """Return scheduled over least seconds, both computed for the same links; 1.0 when nothing moves."""
        return self.seconds / self.bound_seconds if self.parcels else 1.0

    @cached_property
    def seconds(self) -> float:
        """Sum over rounds of the time that the busiest port of the round needs; latencies overlap."""
        by_stage = self._port_seconds / max(1, self.num_slices)
        total, busiest = 0.0, dict[int, float]()
        for number in range(self.num_rounds):
            active = [0 <= number - HOP_ROUNDS * stage < self.num_slices for stage in range(len(by_stage))]
            key = sum(on << stage for stage, on in enumerate(active))
            if key not in busiest:
                busiest[key] = float(by_stage[active].sum(axis=0).max(initial=0.0))
            total += busiest[key]
        return total

    @property
    def busiest(self) -> str:
        """What the schedule keeps busy longest."""
        if not len(self.legs):
            return "nothing moves"
        last = int(self.legs[:, 1:3].max())
        ports = [(what, rank) for what in _PORTS[:4] for rank in range(last + 1)]
        num_hosts = last // self.links.devices_per_host + 1
        ports += [(what, host) for what in _PORTS[4:] for host in range(num_hosts)]
        what, number = ports[int(self._port_seconds.sum(axis=0).argmax())]
        return what.format(number)

    @cached_property
    def _port_seconds(self) -> np.ndarray:
        """Time on every port, by stage: shape (stages, ports)."""
        per_host, links = self.links.devices_per_host, self.links
        if not len(self.legs):
            return np.zeros((0, 0))
        parcel, source, target, start, stop, stage = self.legs.T
        sizes = np.array([p.size for p in self.parcels], dtype=float) * self.itemsize
        amount = sizes[parcel] * (stop - start) / ONE
        crossing = np.where(source // per_host != target // per_host, amount, 0.0)
        last = int(self.legs[:, 1:3].max())
        ranks, hosts = last + 1, last // per_host + 1
        table = np.zeros((int(stage.max()) + 1, 4 * ranks + 2 * hosts))
        ports = [
            (source, amount / links.sending), (ranks + target, amount / links.device),
            (2 * ranks + source, crossing / links.nic), (3 * ranks + target, crossing / links.nic),
            (4 * ranks + source // per_host, crossing / links.host),
            (4 * ranks + hosts + target // per_host, crossing / links.host),
        ]  # fmt: skip
        for port, seconds in ports:
            np.add.at(table, (stage, port), seconds)
        return table

    def _cuts(self, parcel: int) -> dict[int, np.ndarray]:
        """By position (of ONE) of a leg's end: where it lies on the parcel's line in each slice.

        At the start of a row, where rows are small against a slice.
        """
        if parcel not in self._known_cuts:
            line, legs = self.parcels[parcel], self.legs[self.legs[:, 0] == parcel]
            positions = np.unique(legs[:, 3:5])
            edges = line.size * np.arange(self.num_slices + 1, dtype=np.int64) // max(1, self.num_slices)
            starts, lengths = edges[:-1], np.diff(edges)
            at = starts + lengths * positions[:, None] // ONE
            table = line.snap(at, tolerance=line.size // self.num_slices >> 7)
            self._known_cuts[parcel] = dict(zip(positions.tolist(), table, strict=True))
        return self._known_cuts[parcel]

    def legs_of(self, rank: int) -> np.ndarray:
        """The legs that start or end at a rank."""
        return self.legs[(self.legs[:, 1] == rank) | (self.legs[:, 2] == rank)]

    def transfers(self, rank: int | None = None) -> Iterator[tuple[int, Transfer]]:
        """(round, transfer) of one rank or of all, slice by slice and in the same order everywhere."""
        legs = (self.legs if rank is None else self.legs_of(rank)).tolist()
        for piece in range(self.num_slices):
            for parcel, source, target, start, stop, stage in legs:
                cuts = self._cuts(parcel)
                first, last = int(cuts[start][piece]), int(cuts[stop][piece])
                forwarded = stage > 0 and source not in self.parcels[parcel].holders
                for param, region in self.parcels[parcel].between(first, last):
                    name = self.spec.params[param].name
                    yield piece + HOP_ROUNDS * stage, Transfer(source, target, name, region, forwarded)

    def local_copies(self, rank: int) -> Iterator[tuple[str, Region]]:
        """What the rank holds already of what it wants."""
        mine: dict[int, list[Region]] = {}
        for param, cells in zip(self.spec.params, self.cells, strict=True):
            if id(cells) not in mine:
                mine[id(cells)] = [cell.region for cell in cells if rank in cell.local]
            for region in mine[id(cells)]:
                yield param.name, region

    @cached_property
    def port_bytes(self) -> tuple[dict[int, int], dict[int, int]]:
        """Bytes that each rank sends and receives in all."""
        sent, received = dict[int, int](), dict[int, int]()
        lengths: dict[int, dict[int, int]] = {}
        for leg in map(Leg._make, self.legs.tolist()):
            if leg.parcel not in lengths:
                lengths[leg.parcel] = {at: int(cuts.sum()) for at, cuts in self._cuts(leg.parcel).items()}
            ends = lengths[leg.parcel]
            amount = self.itemsize * (ends[leg.stop] - ends[leg.start])
            sent[leg.source] = sent.get(leg.source, 0) + amount
            received[leg.target] = received.get(leg.target, 0) + amount
        return sent, received

    @property
    def staging_bytes(self) -> int:
        """What a rank needs at most for two rounds on their way."""
        sent, received = self.port_bytes
        busiest = max((sent.get(r, 0) + received.get(r, 0) for r in (*sent, *received)), default=0)
        return -(-2 * busiest // self.num_slices) if busiest else 0


def make_schedule(
    spec: ModelSpec,
    *,
    source: Layout,
    target: Layout,
    itemsize: int,
    sharded: bool = False,
    links: Links | None = None,
    forward: bool = True,
    staging_bytes: int = STAGING_BYTES,
) -> Schedule:
    """The schedule that moves a model from `source` to `target`; the two may share any or no ranks.

    Elements have `itemsize` bytes. With `sharded`, the source is the optimizer's copy, one part on each
    replica. Without `links`, all devices are alike and on one host; without `forward`, ranks send only what
    they held from the start.
    """
    return schedule_placements(
        spec, spec.placements(source, sharded=sharded), spec.placements(target), itemsize=itemsize,
        links=links or Links.on_one_host(), forward=forward,
        staging_bytes=staging_bytes,
    )  # fmt: skip


def schedule_placements(
    spec: ModelSpec, source: Sequence[Placement], target: Sequence[Placement], *, itemsize: int,
    links: Links, forward: bool = True, staging_bytes: int = STAGING_BYTES,
) -> Schedule:  # fmt: skip
    """Like `make_schedule`, between any placements of the parameters, given in table order."""
    started = time.perf_counter()
    found: dict[tuple[int, int], list[Cell]] = {}
    cells = []
    for pair in zip(source, target, strict=True):
        key = (id(pair[0]), id(pair[1]))
        if key not in found:
            found[key] = find_cells(*pair)
        cells.append(found[key])
    parcels = make_parcels(cells)
    router = Router(parcels, links)
    bound, tried = (0.0, "nothing moves"), list[Schedule]()
    for options in _ROUTES[: 1 + forward * (1 + router.can_relay)] if parcels else ():
        routed = router.route(forward=options[0], relay=options[1])
        bound = max(bound, router.bound_seconds(routed, itemsize=itemsize), key=lambda b: b[0])
        slices = _num_slices(routed, router, itemsize, staging_bytes)
        tried.append(Schedule(spec, links, itemsize, parcels, cells, routed.legs, slices, *bound, 0.0))
        if tried[-1].seconds <= _GOOD_ENOUGH * bound[0]:
            break
    no_legs = np.zeros((0, 6), dtype=np.int64)
    nothing = Schedule(spec, links, itemsize, parcels, cells, no_legs, 0, *bound, 0.0)
    latency = links.latency_seconds
    best = min(tried, key=lambda s: s.seconds + s.num_rounds * latency, default=nothing)
    elapsed = time.perf_counter() - started
    return replace(best, bound_seconds=bound[0], limit=bound[1], compute_seconds=elapsed, _known_cuts={})


def moves_nothing(spec: ModelSpec, *, source: Layout, target: Layout) -> bool:
    """Whether every rank of `target` holds all that it wants under `source`."""
    placements = zip(spec.placements(source), spec.placements(target), strict=True)
    pairs = {(id(held), id(wanted)): (held, wanted) for held, wanted in placements}
    return not any(cell.takers for pair in pairs.values() for cell in find_cells(*pair))


def _num_slices(routed: Routed, router: Router, itemsize: int, staging_bytes: int) -> int:
    """Enough for the staging cap; more when parcels are handed on, as many as pay for their latency.

    With s slices and h more hops, s + 2h rounds take (s + 2h) * (load / s + latency): least at the square
    root.
    """
    if not len(routed.legs):
        return 0
    port_seconds, rank_elements = router.busiest(routed)
    hops = int(routed.legs[:, 5].max())
    latency = max(router.links.latency_seconds, port_seconds * itemsize * _LEAST_LATENCY)
    for_hops = math.sqrt(HOP_ROUNDS * hops * port_seconds * itemsize / latency)
    for_staging = math.ceil(rank_elements * itemsize / (_ROUND * staging_bytes))
    return max(1, min(max(parcel.size for parcel in router.parcels), max(for_staging, round(for_hops))))
