"""Schedule: what each rank sends to which rank in which round, to move a model from one Layout to another.

All ranks compute the same Schedule from the same arguments, without torch. Every parcel is split into the
same number of slices. Slice i makes its first hop in round i and its next hops in later rounds, so that every
round loads the ports alike and none is idle. A rank forwards a slice two rounds after it was sent, so that
the next round can be packed while one is in flight.
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
"""A rank forwards in round r + HOP_ROUNDS what was sent to it in round r."""
STAGING_BYTES = 256 << 20
"""Default cap on a rank's memory for messages in flight."""
_ROUND = 0.48
"""Share of the staging memory for one round: two are in flight, and rounding to whole rows enlarges some."""
_MIN_LATENCY = 1e-5
"""Assumed least latency of a round, as a share of the whole reallocation; it limits the number of slices."""
_ROUTES = ((False, False), (True, False), (True, True))
"""Settings of (forward, relay) in the order tried, from few hops to many."""
_GOOD_ENOUGH = 1.04
"""A schedule within this factor of the bound is taken, and routes with more hops are not tried."""


_PORTS = (
    "rank {} sends", "rank {} receives", "rank {} sends to other hosts", "rank {} receives from other hosts",
    "host {} sends", "host {} receives",
)  # fmt: skip


class Transfer(NamedTuple):
    """One box of parameter `name`, in global indices, that rank `source` sends to rank `target`.

    `forwarded` means that the source received the box in an earlier round.
    """

    source: int
    target: int
    name: str
    region: Region
    forwarded: bool


@dataclass(frozen=True)
class Schedule:
    """A plan that brings each target rank every element that it wants, by one transfer or one local copy.

    `bound_seconds` is a lower bound for any schedule in which ranks receive only what they want; `limit`
    names the ports that prove it. `compute_seconds` is the time that `make_schedule` took.
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
    _known_offsets: dict[int, dict[int, np.ndarray]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def needed_bytes(self) -> int:
        """Bytes that the ranks of the target lack, summed over ranks; no rank receives more."""
        return self.itemsize * sum(parcel.size * len(parcel.takers) for parcel in self.parcels)

    @cached_property
    def num_rounds(self) -> int:
        """Number of rounds: one per slice, and HOP_ROUNDS more for every further hop."""
        if not len(self.legs):
            return 0
        return self.num_slices + HOP_ROUNDS * int(self.legs[:, 5].max())

    @property
    def over_bound(self) -> float:
        """Ratio of `seconds` to `bound_seconds`, both computed for the same links; 1.0 when nothing moves."""
        return self.seconds / self.bound_seconds if self.parcels else 1.0

    @cached_property
    def seconds(self) -> float:
        """Sum over rounds of the time that the busiest port of the round needs; latencies overlap."""
        by_stage = self._port_seconds / max(1, self.num_slices)
        before = np.concatenate([np.zeros((1, by_stage.shape[1])), by_stage.cumsum(axis=0)])
        total = 0.0
        busiest: dict[tuple[int, int], float] = {}
        for number in range(self.num_rounds):
            first = max(0, (number - self.num_slices) // HOP_ROUNDS + 1)
            stop = max(first, min(len(by_stage), number // HOP_ROUNDS + 1))
            if (first, stop) not in busiest:  # These stages are active in the round.
                busiest[first, stop] = float((before[stop] - before[first]).max(initial=0.0))
            total += busiest[first, stop]
        return total

    @property
    def busiest(self) -> str:
        """Name the port that the schedule keeps busy longest."""
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
        """Return the seconds that each port is busy, by stage, with shape (stages, ports)."""
        links = self.links
        per_host = links.devices_per_host
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

    def _offsets(self, number: int) -> dict[int, np.ndarray]:
        """Return where the legs of a parcel start and stop in each slice, in elements of the parcel.

        The keys are the legs' own starts and stops, in units of 1 / ONE of a slice. Where rows are short
        against a slice, the offsets are rounded to starts of rows.
        """
        if number not in self._known_offsets:
            parcel = self.parcels[number]
            fractions = np.unique(self.legs[self.legs[:, 0] == number, 3:5])
            edges = parcel.size * np.arange(self.num_slices + 1, dtype=np.int64) // max(1, self.num_slices)
            exact = edges[:-1] + np.diff(edges) * fractions[:, None] // ONE
            table = parcel.snap(exact, tolerance=parcel.size // self.num_slices >> 7)
            self._known_offsets[number] = dict(zip(fractions.tolist(), table, strict=True))
        return self._known_offsets[number]

    def legs_of(self, rank: int) -> np.ndarray:
        """Return the legs that start or end at a rank."""
        return self.legs[(self.legs[:, 1] == rank) | (self.legs[:, 2] == rank)]

    def transfers(self, rank: int | None = None) -> Iterator[tuple[int, Transfer]]:
        """Yield (round, transfer) of one rank or of all, slice by slice, in the same order on every rank."""
        legs = (self.legs if rank is None else self.legs_of(rank)).tolist()
        for piece in range(self.num_slices):
            for number, source, target, start, stop, stage in legs:
                parcel = self.parcels[number]
                offsets = self._offsets(number)
                forwarded = stage > 0 and source not in parcel.holders
                for param, region in parcel.between(int(offsets[start][piece]), int(offsets[stop][piece])):
                    name = self.spec.params[param].name
                    yield piece + HOP_ROUNDS * stage, Transfer(source, target, name, region, forwarded)

    def local_copies(self, rank: int) -> Iterator[tuple[str, Region]]:
        """Yield the regions that a rank wants and holds already, with their parameters' names."""
        mine: dict[int, list[Region]] = {}
        for param, cells in zip(self.spec.params, self.cells, strict=True):
            if id(cells) not in mine:
                mine[id(cells)] = [cell.region for cell in cells if rank in cell.local]
            for region in mine[id(cells)]:
                yield param.name, region

    @cached_property
    def port_bytes(self) -> tuple[dict[int, int], dict[int, int]]:
        """Return the bytes that each rank sends in all, and those that it receives."""
        sent: dict[int, int] = {}
        received: dict[int, int] = {}
        sums: dict[int, dict[int, int]] = {}
        for leg in map(Leg._make, self.legs.tolist()):
            if leg.parcel not in sums:
                offsets = self._offsets(leg.parcel).items()
                sums[leg.parcel] = {end: int(by_slice.sum()) for end, by_slice in offsets}
            amount = self.itemsize * (sums[leg.parcel][leg.stop] - sums[leg.parcel][leg.start])
            sent[leg.source] = sent.get(leg.source, 0) + amount
            received[leg.target] = received.get(leg.target, 0) + amount
        return sent, received

    @property
    def staging_bytes(self) -> int:
        """Largest staging memory that a rank needs for two rounds in flight."""
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
    """Return the schedule that moves a model from `source` to `target`, which may share any or no ranks.

    Elements have `itemsize` bytes. With `sharded`, the source is the optimizer's copy, one part on each
    replica. Without `links`, all devices are alike and on one host. Without `forward`, ranks send only what
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
    """Return the schedule between any placements of the parameters, given in the order of `spec.params`."""
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
    bound = (0.0, "nothing moves")
    tried: list[Schedule] = []
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
    return replace(best, bound_seconds=bound[0], limit=bound[1], compute_seconds=elapsed, _known_offsets={})


def moves_nothing(spec: ModelSpec, *, source: Layout, target: Layout) -> bool:
    """Return whether every rank of `target` already holds all that it wants under `source`."""
    placements = zip(spec.placements(source), spec.placements(target), strict=True)
    pairs = {(id(held), id(wanted)): (held, wanted) for held, wanted in placements}
    return not any(cell.takers for pair in pairs.values() for cell in find_cells(*pair))


def _num_slices(routed: Routed, router: Router, itemsize: int, staging_bytes: int) -> int:
    """Return the number of slices: enough for the cap on staging, and more where parcels are forwarded.

    With s slices and h extra hops, the s + 2h rounds take (s + 2h) * (load / s + latency) seconds, which is
    smallest at s = sqrt(2h * load / latency).
    """
    if not len(routed.legs):
        return 0
    port_seconds, rank_elements = router.busiest(routed)
    hops = int(routed.legs[:, 5].max())
    latency = max(router.links.latency_seconds, port_seconds * itemsize * _MIN_LATENCY)
    for_hops = math.sqrt(HOP_ROUNDS * hops * port_seconds * itemsize / latency)
    for_staging = math.ceil(rank_elements * itemsize / (_ROUND * staging_bytes))
    return max(1, min(max(parcel.size for parcel in router.parcels), max(for_staging, round(for_hops))))
