"""Routes: how the elements of each parcel reach all who lack them, as legs from rank to rank.

Inside a host, or on a cluster of one host, a parcel goes from its holders straight to its takers; where the
holders cannot send every copy, takers get stripes and hand them on to one another. To a host without a
holder every element crosses once, in stripes over the takers there, who then gather; such hosts may also hand
stripes on to further hosts. Ranks receive nothing that they do not want.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from realhf.cluster import Cluster
from realhf.realloc.balance import Demand, fill, least_seconds, spread
from realhf.realloc.parcels import Parcel

ONE = 1 << 22
"""A whole parcel, or slice of one; positions on it are integers."""
_UNLIMITED = 1 << 30
_STEPS = 512
_MAX_HOMES = 32
"""So many domains at most hand a parcel on, else the number of legs would grow as their square."""
_SMALL = 1e-3
"""Parcels of which a holder would send no more than this part of what the busiest rank receives go uncut."""
Shares = Sequence[tuple[int, float]]
"""Ranks, each with its weight."""


@dataclass(frozen=True)
class Wires:
    """What limits a movement, in bytes per second in each direction.

    Everything that a device sends or receives passes its `device` port; what goes to or comes from another
    host also passes the device's `nic` and the port of its `host`. Ranks fill hosts of `devices_per_host` in
    order. With `pulled`, receivers copy out of the senders' memory, so that to send costs nothing inside a
    host.
    """

    devices_per_host: int
    device: float
    nic: float
    host: float
    latency_seconds: float
    pulled: bool = False

    @property
    def sending(self) -> float:
        """What a device can send."""
        return self.device * (_UNLIMITED if self.pulled else 1)

    @classmethod
    def of_cluster(cls, cluster: Cluster) -> "Wires":
        links = cluster.intra_host, cluster.inter_host
        device, nic = (link.bandwidth_bytes_per_second for link in links)
        latency = max(link.latency_seconds for link in links)
        return cls(cluster.devices_per_host, device, nic, cluster.host_port_bytes_per_second, latency)

    @classmethod
    def on_one_host(cls) -> "Wires":
        """Equal devices without latency, as fast as NVLink; only what is in seconds depends on that."""
        return cls(_UNLIMITED, 450e9, 450e9, 450e9 * _UNLIMITED, latency_seconds=0.0)

    @classmethod
    def of_hosts(cls, devices_per_host: int, *, cuda: bool) -> "Wires":
        """Hosts of which no more is known: wired like H100s, or of processes that share one card."""
        if cuda:
            return cls(devices_per_host, 450e9, 50e9, 50e9 * devices_per_host, latency_seconds=1e-5)
        return cls(devices_per_host, 4e9, 1e9, 1e9, latency_seconds=3e-4, pulled=True)


class Leg(NamedTuple):
    """Part [start, stop) of ONE of a parcel goes from `source` to `target`.

    It has all that it needs when the legs of earlier stages have arrived; holders start at stage 0.
    """

    parcel: int
    source: int
    target: int
    start: int
    stop: int
    stage: int


class Router:
    """Plans the legs of all parcels over given wires."""

    def __init__(self, parcels: Sequence[Parcel], wires: Wires) -> None:
        self.parcels, self.wires = parcels, wires
        ranks = sorted({rank for p in parcels for rank in (*p.holders, *p.takers)})
        self._index = {rank: i for i, rank in enumerate(ranks)}
        self.ranks = np.array(ranks, dtype=int)
        self.host = self.ranks // wires.devices_per_host
        _, self._host_number, present = np.unique(self.host, return_inverse=True, return_counts=True)
        self.device = np.full(len(ranks), wires.sending)
        self.nic = np.minimum(wires.nic, wires.host / present[self._host_number])
        self._by_host = [_Hosts(parcel, wires.devices_per_host) for parcel in parcels]
        self._lacking = np.zeros(len(ranks))
        for parcel in parcels:
            self._lacking[self._ids(parcel.takers)] += parcel.size
        most = _SMALL * float(self._lacking.max(initial=0.0))
        self._small = [len(p.takers) * p.size <= most * len(p.holders) for p in parcels]

    def busiest(self, routed: "Routed") -> tuple[float, float]:
        """Seconds per byte of an element on the busiest port; elements in and out of the busiest rank."""
        loads = [
            (self._lacking, self.wires.device), (routed.sent, self.wires.sending),
            (routed.crossing_in, self.wires.nic), (routed.crossing_out, self.wires.nic),
            (np.bincount(self._host_number, weights=routed.crossing_in), self.wires.host),
            (np.bincount(self._host_number, weights=routed.crossing_out), self.wires.host),
        ]  # fmt: skip
        seconds = max(float(load.max(initial=0.0)) / bandwidth for load, bandwidth in loads)
        return seconds, float((self._lacking + routed.sent).max(initial=0.0))

    def bound_seconds(self, routed: "Routed", *, itemsize: int) -> tuple[float, str]:
        """A lower bound on any movement in which ranks receive only what they want, and what proves it."""
        lacking = self._lacking
        demands, crossing_in, crossing_out = list[Demand](), list[Demand](), list[Demand]()
        for parcel, hosts in zip(self.parcels, self._by_host, strict=True):
            everyone = self._ids((*parcel.holders, *parcel.takers))
            demands.append(Demand(self._ids(parcel.holders), parcel.size))
            demands.append(Demand(everyone, (len(parcel.takers) - 1) * parcel.size))
            if hosts.crossing:
                near = [r for host in hosts.served for r in hosts.served[host]]
                crossing_out.append(Demand(self._ids((*parcel.holders, *near)), parcel.size))
                crossing_out.append(Demand(everyone, (len(hosts.crossing) - 1) * parcel.size))
                crossing_in += [Demand(self._ids(takers), parcel.size) for takers in hosts.crossing.values()]
        w, cards = self.wires, np.full(len(self.ranks), self.wires.nic)
        cases = [
            (float(lacking.max()) / w.device, np.array([lacking.argmax()]), "receive"),
            self._cut(demands, routed.sent, self.device, np.inf, "send"),
            self._cut(crossing_out, routed.crossing_out, cards, w.host, "send to other hosts"),
            self._cut(crossing_in, routed.crossing_in, cards, w.host, "receive from other hosts"),
        ]
        seconds, ports, what = max(cases, key=lambda case: case[0])
        names = ", ".join(str(rank) for rank in self.ranks[ports][:8]) + (", ..." if len(ports) > 8 else "")
        return seconds * itemsize, f"what rank{'s' * (len(ports) > 1)} {names} must {what}"

    def _cut(
        self, demands: list[Demand], load: np.ndarray, bandwidth: np.ndarray, host_bandwidth: float, what: str
    ) -> tuple[float, np.ndarray, str]:
        host = self._host_number
        cut = least_seconds(demands, load=load, bandwidth=bandwidth, host=host, host_bandwidth=host_bandwidth)
        return *cut, what

    def route(self, *, forward: bool, relay: bool) -> "Routed":
        """The legs. With `forward` takers hand on what they got, with `relay` also to other hosts."""
        width = len(self.ranks)
        routed = Routed([], np.zeros(width), np.zeros(width), np.zeros(width))
        self._cross_hosts(routed, forward=forward, relay=relay)
        routed.sent += routed.crossing_out
        for leg in list(routed.legs):
            others = self._by_host[leg.parcel].crossing[leg.target // self.wires.devices_per_host]
            routed.legs += [leg._replace(source=leg.target, target=to, stage=leg.stage + 1)
                            for to in others if to != leg.target]  # fmt: skip
            amount = self.parcels[leg.parcel].size * (leg.stop - leg.start) / ONE
            routed.sent[self._index[leg.target]] += (len(others) - 1) * amount
        jobs = []
        for number, hosts in enumerate(self._by_host):
            for host, takers in hosts.served.items():
                suppliers = [(rank, 0) for rank in hosts.holders[host]]
                may_forward = forward and not self._small[number]
                jobs.append(self._job(number, suppliers, [((taker, 1.0),) for taker in takers], may_forward))
        self._run(jobs, routed.legs, bandwidth=self.device, load=routed.sent)
        return routed

    def _cross_hosts(self, routed: "Routed", *, forward: bool, relay: bool) -> None:
        """Brings every parcel once to each host that has takers and no holder."""
        gates = {
            (number, host): Demand(self._ids(takers), self.parcels[number].size)
            for number, hosts in enumerate(self._by_host) for host, takers in hosts.crossing.items()
        }  # fmt: skip
        spread(list(gates.values()), bandwidth=self.nic, load=routed.crossing_in)
        jobs = []
        for number, hosts in enumerate(self._by_host):
            if not hosts.crossing:
                continue
            suppliers = [(rank, 0) for rank in self.parcels[number].holders]
            if relay and not self._small[number]:
                suppliers += [(rank, 2) for takers in hosts.served.values() for rank in takers]
            domains: list[Shares] = []
            for host, takers in hosts.crossing.items():
                weights = gates[number, host].share
                assert weights is not None
                if self._small[number]:
                    domains.append(((takers[number % len(takers)], 1.0),))
                else:
                    domains.append(tuple(zip(takers, weights.tolist(), strict=True)))
            jobs.append(self._job(number, suppliers, domains, forward and not self._small[number]))
        self._run(jobs, routed.legs, bandwidth=self.nic, load=routed.crossing_out)

    def _job(
        self, number: int, suppliers: "list[tuple[int, int]]", domains: "list[Shares]", forward: bool
    ) -> "_Job":
        """One copy must come from a supplier; the other domains' may also come from domains that have it."""
        size, first = self.parcels[number].size, [rank for rank, _ in suppliers]
        step = -(-len(domains) // _MAX_HOMES)
        homes = list(range(number % step, len(domains), step)) if forward else []
        onward = [rank for i in homes for rank, _ in domains[i]]
        rest = Demand(self._ids((*first, *onward)), (len(domains) - 1) * size)
        return _Job(number, size, suppliers, domains, homes, Demand(self._ids(first), size), rest)

    def _run(self, jobs: "list[_Job]", legs: list[Leg], *, bandwidth: np.ndarray, load: np.ndarray) -> None:
        spread([demand for job in jobs for demand in (job.first, job.rest)], bandwidth=bandwidth, load=load)
        for job in sorted(jobs, key=lambda job: -job.rest.amount):
            # Legs keep to the shares as far as they can; what they miss, the next jobs make up for.
            assert job.first.share is not None and job.rest.share is not None
            load[job.rest.ports] -= job.rest.share
            job.rest.share = fill(load[job.rest.ports], bandwidth[job.rest.ports], job.rest.amount)
            made = list(job.legs())
            load[job.first.ports] -= job.first.share
            for leg in made:
                load[self._index[leg.source]] += job.size * (leg.stop - leg.start) / ONE
            legs += made

    def _ids(self, ranks: Sequence[int]) -> np.ndarray:
        return np.array([self._index[rank] for rank in ranks], dtype=int)


class _Hosts:
    """A parcel's ranks by host."""

    def __init__(self, parcel: Parcel, devices_per_host: int) -> None:
        self.holders: dict[int, list[int]] = {}
        takers: dict[int, list[int]] = {}
        for rank in parcel.holders:
            self.holders.setdefault(rank // devices_per_host, []).append(rank)
        for rank in parcel.takers:
            takers.setdefault(rank // devices_per_host, []).append(rank)
        self.served = {host: ranks for host, ranks in takers.items() if host in self.holders}
        """Takers on hosts that have a holder,"""
        self.crossing = {host: ranks for host, ranks in takers.items() if host not in self.holders}
        """and on those that have none."""


@dataclass
class Routed:
    """Legs, and per rank how many elements it sends in all, and to and from other hosts."""

    legs: list[Leg]
    sent: np.ndarray
    crossing_out: np.ndarray
    crossing_in: np.ndarray


@dataclass
class _Job:
    """Brings a parcel to every domain once; a domain is entered through its ranks, by weight.

    Suppliers are (rank, stage from which it can send). They serve groups of domains; within a group each
    domain gets a stripe from them, as wide as it can hand on, and the others get it from there.
    """

    parcel: int
    size: int
    suppliers: list[tuple[int, int]]
    domains: list[Shares]
    homes: list[int]
    first: Demand
    rest: Demand

    def legs(self) -> Iterator[Leg]:
        assert self.first.share is not None and self.rest.share is not None
        num = len(self.suppliers)
        give = self.first.share + self.rest.share[:num]
        forwards = self._forwards(self.rest.share[num:].tolist())
        order = sorted(range(len(self.domains)), key=lambda i: -sum(forwards[i]))  # groups that can do alike
        copies = float(give.sum()) / self.size
        low = min(len(self.domains), max(1, int(copies + 0.01)))
        upper = 0 if copies - low < 0.01 or low == len(self.domains) else round((copies - low) * ONE)
        for start, stop, num_groups in ((0, upper, low + 1), (upper, ONE, low)):
            if start < stop:
                supply = _Supply(self.suppliers, give.tolist(), total=num_groups * (stop - start))
                for group in range(num_groups):
                    yield from self._serve(_hand(order, num_groups, group), forwards, supply, start, stop)

    def _forwards(self, shares: list[float]) -> list[list[float]]:
        """What each rank of each domain is to hand on."""
        found, of = [[0.0] * len(domain) for domain in self.domains], iter(shares)
        for i in self.homes:
            found[i] = [next(of) for _ in self.domains[i]]
        return found

    def _serve(
        self, members: list[int], forwards: list[list[float]], supply: "_Supply", start: int, stop: int
    ) -> Iterator[Leg]:
        """Brings [start, stop) to a group of domains."""
        stripes = _cut(start, stop, [sum(forwards[i]) for i in members])
        own, foreign = dict[int, Shares](), dict[int, Shares]()
        for i, (left, right) in zip(members, stripes, strict=True):
            own[i], foreign[i] = _entries(self.domains[i], forwards[i], right - left, stop - start)
        for home, (left, right) in zip(members, stripes, strict=True):
            gates = {
                i: _gates((own if i == home else foreign)[i], left, right) for i in members if left < right
            }
            for rank, first, last in gates.get(home, ()):
                for sender, begin, end, stage in supply.take(first, last):
                    yield Leg(self.parcel, sender, rank, begin, end, stage)
                    for other in members:
                        for to, a, b in gates[other] if other != home else ():
                            if max(begin, a) < min(end, b):
                                yield Leg(self.parcel, rank, to, max(begin, a), min(end, b), stage + 1)


def _hand(items: list[int], num_hands: int, hand: int) -> list[int]:
    """What one of them gets when items are dealt to hands to and fro, so that each gets as good ones."""
    rows = (items[at : at + num_hands] for at in range(0, len(items), num_hands))
    places = (hand if number % 2 == 0 else num_hands - 1 - hand for number in itertools.count())
    return [row[place] for row, place in zip(rows, places, strict=False) if place < len(row)]


class _Supply:
    """Hands out senders: each in turn until it has sent its part of `total`."""

    def __init__(
        self, suppliers: Sequence[tuple[int, int]], amounts: Sequence[float], *, total: int
    ) -> None:
        ends = [stop for _, stop in _cut(0, total, amounts)]
        self._queue = [(rank, end, stage) for (rank, stage), end in zip(suppliers, ends, strict=True)]
        self._at = self._number = 0

    def take(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """(sender, start, stop, stage) pieces that cover [start, stop)."""
        while start < stop:
            rank, end, stage = self._queue[self._number]
            if end <= self._at:
                self._number += 1
                continue
            length = min(stop - start, end - self._at)
            yield rank, start, start + length, stage
            start, self._at = start + length, self._at + length


def _entries(domain: Shares, forwards: list[float], stripe: int, whole: int) -> tuple[Shares, Shares]:
    """A domain's weights for its own stripe, which the same ranks hand on, and for the rest of the whole."""
    weights = np.array([weight for _, weight in domain])
    weights = weights if weights.sum() > 0 else np.ones(len(domain))
    room = weights * (whole / weights.sum())
    wanted = np.array(forwards) * (stripe / sum(forwards)) if sum(forwards) > 0 else room * (stripe / whole)
    own = np.minimum(wanted, room)
    own += (room - own) * ((stripe - own.sum()) / max(whole - own.sum(), 1e-9))
    ranks = [rank for rank, _ in domain]
    rest = np.maximum(room - own, 0.0)
    return list(zip(ranks, own.tolist(), strict=True)), list(zip(ranks, rest.tolist(), strict=True))


def _gates(domain: Shares, start: int, stop: int) -> list[tuple[int, int, int]]:
    """(rank, start, stop): by which rank of a domain each part comes in."""
    parts = _cut(start, stop, [weight for _, weight in domain])
    return [(rank, a, b) for (rank, _), (a, b) in zip(domain, parts, strict=True) if a < b]


def _cut(start: int, stop: int, weights: Sequence[float]) -> list[tuple[int, int]]:
    """[start, stop) in parts proportional to the weights; equal ones when all are 0."""
    total = sum(weights)
    if total <= 0:
        weights, total = [1.0] * len(weights), float(len(weights))
    steps = _STEPS * len(weights)  # coarse enough to make one cut of those that differ by rounding only
    parts = [round(x / total * steps) / steps for x in accumulate(weights, initial=0.0)]
    edges = [start + round((stop - start) * part) for part in parts]
    edges[-1] = stop
    return list(zip(edges, edges[1:], strict=False))
