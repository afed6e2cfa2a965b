"""Routes: the hops, from rank to rank, by which each bundle reaches all of its receivers.

A bundle is all boxes of parameters that the same ranks hold and the same ranks lack. A placement (see
param_spec) lists which ranks hold which regions of a parameter. Parameters of all layers share placements, so
overlaps are computed once per pair of placements, not per layer.

Ranks are grouped by host, for each bundle: its holders; the receivers on a host with a holder ("served"); the
receivers on hosts without one ("crossing"). Each element of a bundle is sent once to a host without a holder:
each receiver there gets a part and sends it to the others, and parts may be forwarded to further such hosts.
Served receivers get the bundle from the holders on their host. Where these cannot send every copy, the
receivers get stripes and forward them to one another (see multicast). No rank receives what it does not want.

Who sends an element is decided in three steps: `Router._multicast` lists the ranks that may send a bundle,
`spread` says how much of it each of them sends, and `Multicast.hops` says which elements. If ranks 0
and 1 hold a bundle of 100 elements, ranks 2 and 3 want it, and rank 0 already sends 20 others, then rank 0
sends 90 and rank 1 sends 110.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, groupby

import numpy as np

from realhf.models.param_spec import Placement, Region, boxes_between, overlap, region_size
from realhf.realloc.links import Hops, Links
from realhf.realloc.multicast import Demand, Domain, Multicast, Sender, fill, least_seconds, spread

Ranks = tuple[int, ...]
Box = tuple[int, Region]
"""A box of the parameter with this number, in global indices."""
_MIN_TEAM = 4
_MAX_TEAM = 32
"""Least and largest size of a team, in which each domain sends to all others."""
_MAX_HOPS = 600_000
"""Teams shrink, down to the least size, where there would be more hops than this."""
_SMALL = 1e-3
"""A bundle is small, and not split, if a holder sends at most this share of what some rank receives."""


# Bundles


@dataclass
class Bundle:
    """Boxes that all `receivers` lack and each of `holders` can send, laid end to end.

    They are in the order of the table of parameters. A position is the index of an element in the bundle.
    """

    holders: Ranks
    receivers: Ranks
    boxes: list[Box] = field(default_factory=list)

    @cached_property
    def _edges(self) -> np.ndarray:
        """Return the position at which each box starts, and the end of the last one."""
        return np.cumsum([0, *(region_size(region) for _, region in self.boxes)])

    @cached_property
    def _rows(self) -> np.ndarray:
        """Return the number of elements in one row of each box."""
        return np.array([region_size(region[1:]) for _, region in self.boxes])

    @property
    def size(self) -> int:
        return int(self._edges[-1])

    def snap(self, positions: np.ndarray, *, tolerance: int) -> np.ndarray:
        """Round positions to the nearest start of a row, in boxes whose rows are at most `tolerance` long."""
        boxes = np.minimum(self._edges.searchsorted(positions, side="right"), len(self.boxes)) - 1
        starts = self._edges[boxes]
        rows = self._rows[boxes]
        snapped = starts + (2 * (positions - starts) + rows) // (2 * rows) * rows
        return np.where((rows <= tolerance) & (positions < self.size), snapped, positions)

    def between(self, start: int, stop: int) -> Iterator[Box]:
        """Yield the elements at positions [start, stop) as boxes."""
        index = int(self._edges.searchsorted(start, side="right")) - 1
        while start < stop:
            param, region = self.boxes[index]
            first, end = self._edges[index : index + 2].tolist()
            last = min(stop, end)
            for box in boxes_between(region, start - first, last - first):
                yield param, box
            start = last
            index += 1


def make_bundles(source: Sequence[Placement], target: Sequence[Placement]) -> list[Bundle]:
    """Group what the target's ranks lack by who holds and who lacks it, given a placement per parameter."""
    bundles: dict[tuple[Ranks, Ranks], Bundle] = {}
    missing: dict[tuple[int, int], list[tuple[Bundle, Region]]] = {}
    for param, (held, wanted) in enumerate(zip(source, target, strict=True)):
        key = (id(held), id(wanted))
        if key not in missing:
            missing[key] = [
                (bundles.setdefault((holders, receivers), Bundle(holders, receivers)), region)
                for region, holders, receivers in _missing(held, wanted)
            ]
        for bundle, region in missing[key]:
            bundle.boxes.append((param, region))
    return list(bundles.values())


def _missing(source: Placement, target: Placement) -> list[tuple[Region, Ranks, Ranks]]:
    """Cut a parameter into boxes where held or wanted regions end; return those that some rank lacks.

    Each box comes with the ranks that hold it and the ranks that lack it. Held regions may overlap, because
    stages or tensor-parallel ranks that hold the same parameter can split it at different elements.
    """
    boxes = []
    for held, holders in disjoint(source):
        has_it = set(holders)
        for wanted, takers in target:
            shared = overlap(held, wanted)
            if shared is not None and (receivers := tuple(rank for rank in takers if rank not in has_it)):
                boxes.append((shared, holders, receivers))
    return sorted(boxes)


def disjoint(placement: Placement) -> Iterator[tuple[Region, Ranks]]:
    """Cut the regions of a placement where others end; yield each box once, with all ranks that hold it."""
    open_boxes: list[tuple[Region, Ranks]] = []
    for region, ranks in sorted(placement):
        # Regions come in the order of their first rows, so boxes that end before this one meet no others.
        yield from (pair for pair in open_boxes if pair[0][0][1] <= region[0][0])
        uncovered = [region]
        still_open: list[tuple[Region, Ranks]] = []
        for box, owners in open_boxes:
            if box[0][1] <= region[0][0]:
                continue
            shared = overlap(box, region)
            if shared is None:
                still_open.append((box, owners))
                continue
            still_open.append((shared, tuple(sorted({*owners, *ranks}))))
            still_open += ((part, owners) for part in _without(box, shared))
            uncovered = [part for box in uncovered for part in _without(box, shared)]
        open_boxes = [*still_open, *((part, ranks) for part in uncovered)]
    yield from open_boxes


def _without(box: Region, hole: Region) -> Iterator[Region]:
    """Yield the part of a box outside another one, as boxes."""
    shared = overlap(box, hole)
    if shared is None:
        yield box
        return
    for dim, ((start, stop), (first, last)) in enumerate(zip(box, shared, strict=True)):
        for low, high in ((start, first), (last, stop)):
            if low < high:
                yield (*shared[:dim], (low, high), *box[dim + 1 :])


# Routes


class _Hosts:
    """The holders and receivers of a bundle by host; see the module for `served` and `crossing`."""

    def __init__(self, bundle: Bundle, devices_per_host: int) -> None:
        self.holders, receivers = (
            {host: list(on_host) for host, on_host in groupby(ranks, key=lambda r: r // devices_per_host)}
            for ranks in (bundle.holders, bundle.receivers)
        )
        self.served = {host: ranks for host, ranks in receivers.items() if host in self.holders}
        self.crossing = {host: ranks for host, ranks in receivers.items() if host not in self.holders}


class Router:
    """Finds the hops of all bundles over given links."""

    def __init__(self, bundles: Sequence[Bundle], links: Links) -> None:
        self._bundles = bundles
        self._links = links
        self._sizes = np.array([bundle.size for bundle in bundles], dtype=float)
        self._ranks = np.unique(np.concatenate([(*bundle.holders, *bundle.receivers) for bundle in bundles]))
        hosts = self._ranks // links.devices_per_host
        _, self._host, present = np.unique(hosts, return_inverse=True, return_counts=True)
        self._sending = np.full(len(self._ranks), links.sending)
        self._nic = np.minimum(links.nic, links.host / present[self._host])
        self._hosts = [_Hosts(bundle, links.devices_per_host) for bundle in bundles]
        self._lacking = np.zeros(len(self._ranks))
        for bundle in bundles:
            self._lacking[self._ids(bundle.receivers)] += bundle.size
        small = _SMALL * float(self._lacking.max())
        self._small = [len(b.receivers) * b.size <= small * len(b.holders) for b in bundles]
        self._entering = {
            (index, host): Demand(self._ids(receivers), bundles[index].size)
            for index, hosts in enumerate(self._hosts) for host, receivers in hosts.crossing.items()}
        """Bundle and host without a holder -> how much of the bundle each receiver there gets first."""
        self._crossing_in = np.zeros(len(self._ranks))
        spread(list(self._entering.values()), bandwidth=self._nic, load=self._crossing_in)

    @property
    def can_relay(self) -> bool:
        """Whether some bundle has receivers on a holder's host, which could relay it to other hosts."""
        return any(hosts.served and hosts.crossing for hosts in self._hosts)

    def bound_seconds(self, hops: Hops, *, itemsize: int) -> tuple[float, str]:
        """Return a lower bound, for routes that bring ranks only what they want, and the ports that prove it.

        Each bundle must leave its holders once; further copies may come from any rank that has it. The load
        of `hops` tells which ports are likely to prove the bound.
        """
        sending: list[Demand] = []
        crossing_out: list[Demand] = []
        for bundle, hosts in zip(self._bundles, self._hosts, strict=True):
            everyone = self._ids((*bundle.holders, *bundle.receivers))
            sending.append(Demand(self._ids(bundle.holders), bundle.size))
            sending.append(Demand(everyone, (len(bundle.receivers) - 1) * bundle.size))
            if hosts.crossing:
                near = [rank for ranks in hosts.served.values() for rank in ranks]
                crossing_out.append(Demand(self._ids((*bundle.holders, *near)), bundle.size))
                crossing_out.append(Demand(everyone, (len(hosts.crossing) - 1) * bundle.size))
        links = self._links
        per_host = links.devices_per_host
        crossing = self._load(hops.select(hops.source // per_host != hops.target // per_host))
        nics = np.full(len(self._ranks), links.nic)
        receiving = (float(self._lacking.max()) / links.device, np.array([self._lacking.argmax()]))
        cases = [(*receiving, "receive")]
        for demands, load, bandwidth, host_bandwidth, verb in (
            (sending, self._load(hops), self._sending, np.inf, "send"),
            (crossing_out, crossing, nics, links.host, "send to other hosts"),
            (list(self._entering.values()), self._crossing_in, nics, links.host, "receive from other hosts"),
        ):
            bound = least_seconds(
                demands, load=load, bandwidth=bandwidth, host=self._host, host_bandwidth=host_bandwidth)
            cases.append((*bound, verb))
        seconds, ports, verb = max(cases, key=lambda case: case[0])
        names = ", ".join(str(rank) for rank in self._ranks[ports][:8]) + (", ..." if len(ports) > 8 else "")
        return seconds * itemsize, f"what rank{'s' * (len(ports) > 1)} {names} must {verb}"

    def route(self, *, forward: bool, relay: bool) -> Hops:
        """Return the hops of all bundles. With `forward`, receivers forward on their host or among hosts
        without a holder; with `relay`, those on a holder's host also send to other hosts."""
        crossing = self._cross_hosts(forward=forward, relay=relay)
        outside = Hops.concat([crossing, self._gather(crossing)])
        multicasts = []
        for index, hosts in enumerate(self._hosts):
            for host, receivers in hosts.served.items():
                senders = [Sender(rank, depth=0) for rank in hosts.holders[host]]
                domains = [Domain([receiver], [1.0]) for receiver in receivers]
                multicasts.append(self._multicast(index, senders, domains, forward=forward))
        inside = self._make_hops(multicasts, bandwidth=self._sending, load=self._load(outside))
        return Hops.concat([outside, inside])

    def _gather(self, crossing: Hops) -> Hops:
        """Return the hops by which receivers share what came from other hosts with those on their host."""
        hosts = crossing.target // self._links.devices_per_host
        keys = zip(crossing.bundle.tolist(), hosts.tolist(), strict=True)
        receivers = [self._hosts[bundle].crossing[host] for bundle, host in keys]
        num_receivers = np.array([len(ranks) for ranks in receivers], dtype=int)
        copies = crossing.select(np.repeat(np.arange(len(crossing)), num_receivers))
        targets = np.array(list(chain.from_iterable(receivers)), dtype=np.int64)
        hops = replace(copies, source=copies.target, target=targets, depth=copies.depth + 1)
        return hops.select(hops.source != hops.target)

    def _cross_hosts(self, *, forward: bool, relay: bool) -> Hops:
        """Return the hops that bring every bundle once to each host that has receivers and no holder."""
        multicasts = []
        for index, hosts in enumerate(self._hosts):
            if not hosts.crossing:
                continue
            senders = [Sender(rank, depth=0) for rank in self._bundles[index].holders]
            if relay and not self._small[index]:
                senders += [Sender(rank, depth=2) for ranks in hosts.served.values() for rank in ranks]
            domains = []
            for host, receivers in hosts.crossing.items():
                if self._small[index]:
                    domains.append(Domain([receivers[index % len(receivers)]], [1.0]))
                else:
                    domains.append(Domain(receivers, self._entering[index, host].share.tolist()))
            multicasts.append(self._multicast(index, senders, domains, forward=forward))
        return self._make_hops(multicasts, bandwidth=self._nic, load=np.zeros(len(self._ranks)))

    def _multicast(
        self, index: int, senders: list[Sender], domains: list[Domain], *, forward: bool
    ) -> Multicast:
        """Return the multicast of a bundle.

        The senders must send one copy. With `forward`, domains may send the others, unless it is small.
        """
        size = self._bundles[index].size
        sending = [sender.rank for sender in senders]
        may_forward = forward and not self._small[index]
        forwarding = [rank for domain in domains for rank in domain.ranks] if may_forward else []
        others = Demand(self._ids((*sending, *forwarding)), (len(domains) - 1) * size)
        return Multicast(index, size, senders, domains, Demand(self._ids(sending), size), others)

    def _make_hops(self, multicasts: list[Multicast], *, bandwidth: np.ndarray, load: np.ndarray) -> Hops:
        """Return the hops of all multicasts, spread evenly over ports that have a `load` already."""
        demands = [demand for cast in multicasts for demand in (cast.first_copy, cast.other_copies)]
        spread(demands, bandwidth=bandwidth, load=load)
        # Each rank of a domain gets a part from every domain of its team and sends it to its whole domain.
        forwarding = [cast for cast in multicasts if len(cast.other_copies.ports) > len(cast.senders)]
        per_member = sum(len(domain.ranks) ** 2 for cast in forwarding for domain in cast.domains)
        max_team = min(_MAX_TEAM, max(_MIN_TEAM, _MAX_HOPS // max(1, per_member)))
        tables = []
        for cast in sorted(multicasts, key=lambda cast: -cast.other_copies.amount):
            # Hops follow the shares only approximately, so each is balanced against the actual load.
            others = cast.other_copies
            load[others.ports] -= others.share
            others.share = fill(load[others.ports], bandwidth[others.ports], others.amount)
            hops = Hops.of(list(cast.hops(max_team=max_team)))
            load[cast.first_copy.ports] -= cast.first_copy.share
            load += self._load(hops)
            tables.append(hops)
        return Hops.concat(tables)

    def _load(self, hops: Hops) -> np.ndarray:
        """Return how many elements each rank sends."""
        load = np.zeros(len(self._ranks))
        np.add.at(load, self._ids(hops.source), self._sizes[hops.bundle] * hops.fraction)
        return load

    def _ids(self, ranks: Sequence[int] | np.ndarray) -> np.ndarray:
        return np.searchsorted(self._ranks, ranks)
