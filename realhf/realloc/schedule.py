"""Schedule: what each rank sends to which rank in which wave, to move a model from one Layout to another.

All ranks compute the same Schedule from the same arguments, without torch. Every bundle is split into the
same number of slices. Slice i makes its first hop in wave i and its next hops in later waves, so that every
wave loads the ports alike and none is idle. A rank forwards a slice two waves after it was sent, so that
the next wave can be packed while one is in flight.
"""

import hashlib
import json
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from realhf.layout import Layout
from realhf.models.param_spec import ModelSpec, Region, overlap, region_size
from realhf.realloc.links import ONE, Hops, Links
from realhf.realloc.routes import Bundle, Router, make_bundles

HOP_WAVES = 2
"""A rank forwards in wave r + HOP_WAVES the elements that it received in wave r."""
STAGING_BYTES = 256 << 20
"""Default cap on a rank's memory for messages in flight."""
LARGE_BYTES = 1 << 20
"""A box of at least this size has a message of its own, so that it needs no packing if it is contiguous in
memory. Smaller boxes to one peer share a message per wave."""
_WAVE_SHARE = 0.48
"""Share of the staging memory for one wave: two are in flight, and rounding to whole rows enlarges some."""
_MIN_LATENCY = 1e-5
"""Assumed least latency of a wave, as a share of the whole reallocation; it limits the number of slices."""
_ROUTES = ((False, False), (True, False), (True, True))
"""Settings of (forward, relay) in the order tried, from few hops to many."""
GOOD_ENOUGH = 1.04
"""A schedule within this factor of the bound is taken, and routes with more hops are not tried."""
_RANK_PORTS = (
    "rank {} sends", "rank {} receives", "rank {} sends to other hosts", "rank {} receives from other hosts"
)
_HOST_PORTS = ("host {} sends", "host {} receives")


class Transfer(NamedTuple):
    """One box of parameter `name`, in global indices, that rank `source` sends to rank `target`.

    `forwarded` means that the source received the box in an earlier wave.
    """

    source: int
    target: int
    name: str
    region: Region
    forwarded: bool


class Message(NamedTuple):
    """Boxes, in global indices, that one rank sends to or receives from a peer, end to end.

    `forwarded` has the meaning that it has in Transfer.
    """

    peer: int
    sending: bool
    forwarded: bool
    boxes: list[tuple[str, Region]]


@dataclass(frozen=True, eq=False)
class Schedule:
    """A plan that brings each target rank every element that it wants, by one transfer or one local copy.

    With `sharded`, the source is the optimizer's copy. Staging memory is at most `max_staging_bytes`.
    `bound_seconds` is a lower bound for any schedule in which ranks receive only what they want; `limit`
    names the ports that prove it. `compute_seconds` is the time that `make_schedule` took.
    """

    spec: ModelSpec
    source: Layout
    target: Layout
    sharded: bool
    itemsize: int
    links: Links
    max_staging_bytes: int
    bundles: Sequence[Bundle]
    hops: Hops
    bound_seconds: float = 0.0
    limit: str = "nothing moves"
    compute_seconds: float = 0.0

    @property
    def needed_bytes(self) -> int:
        """Bytes that the ranks of the target lack, summed over ranks; no rank receives more."""
        return self.itemsize * sum(bundle.size * len(bundle.receivers) for bundle in self.bundles)

    @property
    def max_hops(self) -> int:
        """Most hops in a row by which an element reaches a receiver; 0 when nothing moves."""
        return 1 + int(self.hops.depth.max(initial=-1))

    @cached_property
    def num_slices(self) -> int:
        """Number of slices (see `slices_for`); each has at least one element of the largest bundle."""
        if not len(self.hops):
            return 0
        sent = np.bincount(self.hops.source, self._hop_bytes, self._num_ranks)
        received = np.bincount(self.hops.target, self._hop_bytes, self._num_ranks)
        enough = slices_for(
            float(self._port_seconds.sum(axis=0).max()), float(np.max(sent + received)),
            latency_seconds=self.links.latency_seconds, num_hops=self.max_hops,
            staging_bytes=self.max_staging_bytes)
        return min(max(bundle.size for bundle in self.bundles), enough)

    @cached_property
    def digest(self) -> str:
        """The digest of everything that decides which messages ranks exchange; all ranks need the same."""
        hops = self.hops
        about = (self.itemsize, self.sharded, self.num_slices, *(
            (bundle.holders, bundle.receivers, bundle.boxes) for bundle in self.bundles))
        digest = hashlib.sha256(json.dumps(about, default=int).encode())
        for column in (hops.bundle, hops.source, hops.target, hops.start, hops.stop, hops.depth):
            digest.update(column.astype(np.int64).tobytes())
        return digest.hexdigest()[:16]

    @property
    def num_waves(self) -> int:
        """Number of waves: one per slice, and HOP_WAVES more for every further hop."""
        return self.num_slices + HOP_WAVES * max(0, self.max_hops - 1)

    @property
    def over_bound(self) -> float:
        """Ratio of `seconds` to `bound_seconds`, both computed for the same links; 1.0 when nothing moves."""
        return self.seconds / self.bound_seconds if self.bundles else 1.0

    @cached_property
    def seconds(self) -> float:
        """Sum over waves of the time that the busiest port of the wave needs; latencies overlap."""
        starts = HOP_WAVES * np.arange(self.max_hops)
        stops = starts + self.num_slices
        total = 0.0
        for first, last in pairwise(np.unique([starts, stops]).tolist()):
            active = (starts <= first) & (first < stops)
            busiest = self._port_seconds[active].sum(axis=0).max(initial=0.0)
            total += (last - first) / self.num_slices * float(busiest)
        return total

    @property
    def busiest(self) -> str:
        """Name the port that the schedule keeps busy longest."""
        if not len(self.hops):
            return "nothing moves"
        num_hosts = -(-self._num_ranks // self.links.devices_per_host)
        ports = [port.format(rank) for port in _RANK_PORTS for rank in range(self._num_ranks)]
        ports += [port.format(host) for port in _HOST_PORTS for host in range(num_hosts)]
        return ports[int(self._port_seconds.sum(axis=0).argmax())]

    @property
    def _num_ranks(self) -> int:
        return 1 + max(int(ranks.max(initial=-1)) for ranks in (self.hops.source, self.hops.target))

    @cached_property
    def _hop_bytes(self) -> np.ndarray:
        bundle_bytes = np.array([bundle.size for bundle in self.bundles], dtype=float) * self.itemsize
        return bundle_bytes[self.hops.bundle] * self.hops.fraction

    @cached_property
    def _port_seconds(self) -> np.ndarray:
        """Return the seconds that each port is busy, by depth of hops, with shape (depths, ports)."""
        links = self.links
        source = self.hops.source
        target = self.hops.target
        source_host = source // links.devices_per_host
        target_host = target // links.devices_per_host
        amount = self._hop_bytes
        crossing = np.where(source_host != target_host, amount, 0.0)
        ranks = self._num_ranks
        hosts = -(-ranks // links.devices_per_host)
        table = np.zeros((self.max_hops, 4 * ranks + 2 * hosts))
        for port, seconds in (
            (source, amount / links.sending),
            (ranks + target, amount / links.device),
            (2 * ranks + source, crossing / links.nic),
            (3 * ranks + target, crossing / links.nic),
            (4 * ranks + source_host, crossing / links.host),
            (4 * ranks + hosts + target_host, crossing / links.host),
        ):
            np.add.at(table, (self.hops.depth, port), seconds)
        return table

    @cached_property
    def _offsets(self) -> list[dict[int, np.ndarray]]:
        """Return, for each bundle, where its hops start and stop in each slice, in elements of the bundle.

        The keys are the hops' own starts and stops, in units of 1 / ONE of a slice. Where rows are short
        against a slice, the offsets are rounded to starts of rows.
        """
        offsets = []
        for index, bundle in enumerate(self.bundles):
            hops = self.hops.select(self.hops.bundle == index)
            ends = np.unique([hops.start, hops.stop])
            edges = bundle.size * np.arange(self.num_slices + 1, dtype=np.int64) // self.num_slices
            exact = edges[:-1] + np.diff(edges) * ends[:, None] // ONE
            table = bundle.snap(exact, tolerance=bundle.size // self.num_slices >> 7)
            offsets.append(dict(zip(ends.tolist(), table, strict=True)))
        return offsets

    def transfers(self, rank: int | None = None) -> Iterator[tuple[int, Transfer]]:
        """Yield (wave, transfer) of one rank or of all, slice by slice, in the same order on every rank."""
        hops = self.hops
        if rank is not None:
            hops = hops.select((hops.source == rank) | (hops.target == rank))
        rows = list(hops)
        for slice_index in range(self.num_slices):
            for index, source, target, start, stop, depth in rows:
                bundle = self.bundles[index]
                offsets = self._offsets[index]
                forwarded = depth > 0 and source not in bundle.holders
                boxes = bundle.between(int(offsets[start][slice_index]), int(offsets[stop][slice_index]))
                for param, region in boxes:
                    name = self.spec.params[param].name
                    transfer = Transfer(source, target, name, region, forwarded)
                    yield slice_index + HOP_WAVES * depth, transfer

    def messages(self, rank: int) -> list[list[Message]]:
        """Return the messages of a rank, by wave; sender and receiver list them in the same order.

        Each rank starts with the peers that follow it, so that not all ranks send to one port first.
        """
        waves: list[dict[Any, Message]] = [{} for _ in range(self.num_waves)]
        for wave_index, (source, target, name, region, forwarded) in self.transfers(rank):
            sending = source == rank
            peer = target if sending else source
            is_large = region_size(region) * self.itemsize >= LARGE_BYTES
            key = (peer, sending, forwarded, (name, region) if is_large else None)
            message = waves[wave_index].setdefault(key, Message(peer, sending, forwarded, []))
            message.boxes.append((name, region))
        return [sorted(by_key.values(), key=lambda m: (m.peer <= rank, m.peer)) for by_key in waves]

    def local_copies(self, rank: int) -> Iterator[tuple[str, Region]]:
        """Yield the regions that a rank wants and holds already, with their parameters' names."""
        held_boxes = self.spec.boxes_held_by(self.source, rank, sharded=self.sharded)
        for name, wanted in self.spec.boxes_held_by(self.target, rank).items():
            for held_box in held_boxes.get(name, ()):
                for wanted_box in wanted:
                    if (region := overlap(held_box, wanted_box)) is not None:
                        yield name, region

    @cached_property
    def port_bytes(self) -> tuple[Counter[int], Counter[int]]:
        """Return the bytes that each rank sends in all, and those that it receives."""
        sent = Counter[int]()
        received = Counter[int]()
        sums = [{end: int(row.sum()) for end, row in offsets.items()} for offsets in self._offsets]
        for hop in self.hops:
            amount = self.itemsize * (sums[hop.bundle][hop.stop] - sums[hop.bundle][hop.start])
            sent[hop.source] += amount
            received[hop.target] += amount
        return sent, received

    @property
    def staging_bytes(self) -> int:
        """Largest staging memory that a rank needs for two waves in flight."""
        sent, received = self.port_bytes
        busiest = max((sent + received).values(), default=0)
        return -(-2 * busiest // self.num_slices) if busiest else 0


def slices_for(
    load_seconds: float, staged_bytes: float, *, latency_seconds: float, num_hops: int,
    staging_bytes: int = STAGING_BYTES,
) -> int:
    """Return the number of slices: enough for the cap on staging, and more where bundles are forwarded.

    The busiest port works `load_seconds`, and a rank sends and receives at most `staged_bytes`. With s slices
    and h extra hops, the s + 2h waves take (s + 2h) * (load / s + latency) seconds, which is smallest at
    s = sqrt(2h * load / latency).
    """
    latency = max(latency_seconds, load_seconds * _MIN_LATENCY)
    for_hops = math.sqrt(HOP_WAVES * (num_hops - 1) * load_seconds / latency)
    for_staging = math.ceil(staged_bytes / (_WAVE_SHARE * staging_bytes))
    return max(1, for_staging, round(for_hops))


def make_schedule(
    spec: ModelSpec, *, source: Layout, target: Layout, itemsize: int, sharded: bool = False,
    links: Links | None = None, forward: bool = True, staging_bytes: int = STAGING_BYTES,
) -> Schedule:
    """Return the schedule that moves a model from `source` to `target`, which may share any or no ranks.

    Elements have `itemsize` bytes. With `sharded`, the source is the optimizer's copy, one part on each
    replica. Without `links`, all devices are alike and on one host. Without `forward`, ranks send only what
    they held from the start.
    """
    started = time.perf_counter()
    links = links or Links.on_one_host()
    bundles = make_bundles(spec.placements(source, sharded=sharded), spec.placements(target))
    schedule = Schedule(spec, source, target, sharded, itemsize, links, staging_bytes, bundles, Hops.of())
    if bundles:
        schedule = _best_schedule(schedule, forward=forward)
    return replace(schedule, compute_seconds=time.perf_counter() - started)


def _best_schedule(empty: Schedule, *, forward: bool) -> Schedule:
    """Try several kinds of routes; return the fastest schedule with the highest bound of all tries."""
    router = Router(empty.bundles, empty.links)
    bound = (0.0, "")
    tried: list[Schedule] = []
    for forwards, relays in _ROUTES[: 1 + forward * (1 + router.can_relay)]:
        hops = router.route(forward=forwards, relay=relays)
        bound = max(bound, router.bound_seconds(hops, itemsize=empty.itemsize), key=lambda b: b[0])
        tried.append(replace(empty, hops=hops))
        if tried[-1].seconds <= GOOD_ENOUGH * bound[0]:
            break
    latency = empty.links.latency_seconds
    best = min(tried, key=lambda s: s.seconds + s.num_waves * latency)
    return replace(best, bound_seconds=bound[0], limit=bound[1])


def moves_nothing(spec: ModelSpec, *, source: Layout, target: Layout) -> bool:
    """Return whether every rank of `target` already holds all that it wants under `source`."""
    return not make_bundles(spec.placements(source), spec.placements(target))
