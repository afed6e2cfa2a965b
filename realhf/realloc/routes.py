"""Routes: the legs, from rank to rank, by which each parcel reaches all of its takers.

Inside a host a parcel goes from its holders directly to its takers. Where the holders cannot send every copy,
takers get stripes and forward them to one another. Every element crosses once to a host without a holder:
each taker there receives a stripe and sends it to the others. Such hosts may also forward stripes to further
hosts. No rank receives what it does not want.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from realhf.realloc.balance import Demand, fill, least_seconds, spread
from realhf.realloc.links import Links
from realhf.realloc.multicast import ONE, Leg, Multicast, Shares
from realhf.realloc.parcels import Parcel

_MIN_TEAM = 4
_MAX_TEAM = 32
"""Least and largest size of a team, in which each domain sends to all others."""
_MAX_LEGS = 600_000
"""Teams shrink, down to the least size, where there would be more legs than this."""
_SMALL = 1e-3
"""A parcel is not split if a holder would send at most this share of what the busiest rank receives."""


class Router:
    """A planner of the legs of all parcels over given links."""

    def __init__(self, parcels: Sequence[Parcel], links: Links) -> None:
        self.parcels = parcels
        self.links = links
        ranks = sorted({rank for p in parcels for rank in (*p.holders, *p.takers)})
        self._index = {rank: i for i, rank in enumerate(ranks)}
        self.ranks = np.array(ranks, dtype=int)
        self.host = self.ranks // links.devices_per_host
        _, self._host_number, present = np.unique(self.host, return_inverse=True, return_counts=True)
        self.device = np.full(len(ranks), links.sending)
        self.nic = np.minimum(links.nic, links.host / present[self._host_number])
        self._by_host = [_Hosts(parcel, links.devices_per_host) for parcel in parcels]
        self._lacking = np.zeros(len(ranks))
        for parcel in parcels:
            self._lacking[self._ids(parcel.takers)] += parcel.size
        most = _SMALL * float(self._lacking.max(initial=0.0))
        self._small = [len(p.takers) * p.size <= most * len(p.holders) for p in parcels]

    @property
    def can_relay(self) -> bool:
        """Return whether a parcel that other hosts need has takers on a holder's host, which can relay it."""
        return any(hosts.served and hosts.crossing for hosts in self._by_host)

    def busiest(self, routed: "Routed") -> tuple[float, float]:
        """Return the seconds of the busiest port at one byte per element, and the busiest rank's elements.

        The elements of a rank are all that it sends and receives.
        """
        loads = [
            (self._lacking, self.links.device), (routed.sent, self.links.sending),
            (routed.crossing_in, self.links.nic), (routed.crossing_out, self.links.nic),
            (np.bincount(self._host_number, weights=routed.crossing_in), self.links.host),
            (np.bincount(self._host_number, weights=routed.crossing_out), self.links.host),
        ]  # fmt: skip
        seconds = max(float(load.max(initial=0.0)) / bandwidth for load, bandwidth in loads)
        return seconds, float((self._lacking + routed.sent).max(initial=0.0))

    def bound_seconds(self, routed: "Routed", *, itemsize: int) -> tuple[float, str]:
        """Return a lower bound for routes that bring ranks only what they want, and its proof in words.

        Each parcel must leave its holders once; further copies may come from any rank that has it.
        """
        lacking = self._lacking
        demands: list[Demand] = []
        crossing_in: list[Demand] = []
        crossing_out: list[Demand] = []
        for parcel, hosts in zip(self.parcels, self._by_host, strict=True):
            everyone = self._ids((*parcel.holders, *parcel.takers))
            demands.append(Demand(self._ids(parcel.holders), parcel.size))
            demands.append(Demand(everyone, (len(parcel.takers) - 1) * parcel.size))
            if hosts.crossing:
                near = [r for host in hosts.served for r in hosts.served[host]]
                crossing_out.append(Demand(self._ids((*parcel.holders, *near)), parcel.size))
                crossing_out.append(Demand(everyone, (len(hosts.crossing) - 1) * parcel.size))
                crossing_in += [Demand(self._ids(takers), parcel.size) for takers in hosts.crossing.values()]
        links = self.links
        nics = np.full(len(self.ranks), links.nic)
        cases = [
            (float(lacking.max()) / links.device, np.array([lacking.argmax()]), "receive"),
            self._least(demands, routed.sent, self.device, np.inf, "send"),
            self._least(crossing_out, routed.crossing_out, nics, links.host, "send to other hosts"),
            self._least(crossing_in, routed.crossing_in, nics, links.host, "receive from other hosts"),
        ]
        seconds, ports, what = max(cases, key=lambda case: case[0])
        names = ", ".join(str(rank) for rank in self.ranks[ports][:8]) + (", ..." if len(ports) > 8 else "")
        return seconds * itemsize, f"what rank{'s' * (len(ports) > 1)} {names} must {what}"

    def _least(
        self, demands: list[Demand], load: np.ndarray, bandwidth: np.ndarray, host_bandwidth: float, what: str
    ) -> tuple[float, np.ndarray, str]:
        host = self._host_number
        bound = least_seconds(
            demands, load=load, bandwidth=bandwidth, host=host, host_bandwidth=host_bandwidth)
        return *bound, what

    def route(self, *, forward: bool, relay: bool) -> "Routed":
        """Return the legs. If `forward`, takers forward what they get; if `relay`, also to other hosts."""
        width = len(self.ranks)
        routed = Routed(_table([]), np.zeros(width), np.zeros(width), np.zeros(width))
        crossing = _table(self._cross_hosts(routed, forward=forward, relay=relay))
        routed.sent += routed.crossing_out
        gathering = self._gather(crossing, routed)
        jobs = []
        for number, hosts in enumerate(self._by_host):
            for host, takers in hosts.served.items():
                suppliers = [(rank, 0) for rank in hosts.holders[host]]
                may_forward = forward and not self._small[number]
                jobs.append(self._job(number, suppliers, [((taker, 1.0),) for taker in takers], may_forward))
        inside = _table(self._run(jobs, bandwidth=self.device, load=routed.sent))
        routed.legs = np.concatenate([crossing, gathering, inside])
        return routed

    def _gather(self, crossing: np.ndarray, routed: "Routed") -> np.ndarray:
        """Return the legs by which takers share what came from other hosts with all takers on their host."""
        gathering = [_table([])]
        host = crossing[:, 2] // self.links.devices_per_host
        keys, group = np.unique(np.stack([crossing[:, 0], host], axis=1), axis=0, return_inverse=True)
        order = np.argsort(group, kind="stable")
        parts = np.split(order, np.cumsum(np.bincount(group, minlength=len(keys)))[:-1]) if len(keys) else []
        for (number, host_number), part in zip(keys.tolist(), parts, strict=True):
            takers = np.array(self._by_host[number].crossing[host_number])
            legs = crossing[part]
            copies = np.repeat(legs, len(takers), axis=0)
            copies[:, 1] = copies[:, 2]
            copies[:, 2] = np.tile(takers, len(legs))
            copies[:, 5] += 1
            gathering.append(copies[copies[:, 1] != copies[:, 2]])
            amounts = (legs[:, 4] - legs[:, 3]) * ((len(takers) - 1) * self.parcels[number].size / ONE)
            np.add.at(routed.sent, self._ids(legs[:, 2].tolist()), amounts)
        return np.concatenate(gathering)

    def _cross_hosts(self, routed: "Routed", *, forward: bool, relay: bool) -> list[Leg]:
        """Return the legs that bring every parcel once to each host that has takers and no holder."""
        entering = {
            (number, host): Demand(self._ids(takers), self.parcels[number].size)
            for number, hosts in enumerate(self._by_host) for host, takers in hosts.crossing.items()
        }  # fmt: skip
        spread(list(entering.values()), bandwidth=self.nic, load=routed.crossing_in)
        jobs = []
        for number, hosts in enumerate(self._by_host):
            if not hosts.crossing:
                continue
            suppliers = [(rank, 0) for rank in self.parcels[number].holders]
            if relay and not self._small[number]:
                suppliers += [(rank, 2) for takers in hosts.served.values() for rank in takers]
            domains: list[Shares] = []
            for host, takers in hosts.crossing.items():
                weights = entering[number, host].share
                assert weights is not None
                if self._small[number]:
                    domains.append(((takers[number % len(takers)], 1.0),))
                else:
                    domains.append(tuple(zip(takers, weights.tolist(), strict=True)))
            jobs.append(self._job(number, suppliers, domains, forward and not self._small[number]))
        return self._run(jobs, bandwidth=self.nic, load=routed.crossing_out)

    def _job(
        self, number: int, suppliers: list[tuple[int, int]], domains: list[Shares], forward: bool
    ) -> Multicast:
        """Return the multicast of a parcel.

        The first copy must come from a supplier. With `forward`, further copies may come from any domain.
        """
        size = self.parcels[number].size
        supplying = [rank for rank, _ in suppliers]
        forwarding = [rank for domain in domains for rank, _ in domain] if forward else []
        rest = Demand(self._ids((*supplying, *forwarding)), (len(domains) - 1) * size)
        return Multicast(number, size, suppliers, domains, Demand(self._ids(supplying), size), rest)

    def _run(self, jobs: list[Multicast], *, bandwidth: np.ndarray, load: np.ndarray) -> list[Leg]:
        """Return the legs of all jobs, spread evenly over the ports; add what each rank sends to `load`."""
        legs: list[Leg] = []
        spread([demand for job in jobs for demand in (job.first, job.rest)], bandwidth=bandwidth, load=load)
        # Each rank of a domain gets a part from every domain of its team and sends it to its whole domain.
        per_member = sum(len(domain) ** 2 for job in jobs if job.forwards for domain in job.domains)
        max_team = min(_MAX_TEAM, max(_MIN_TEAM, _MAX_LEGS // max(1, per_member)))
        for job in sorted(jobs, key=lambda job: -job.rest.amount):
            # The legs follow the shares only approximately, so each job is balanced against the actual load.
            assert job.first.share is not None and job.rest.share is not None
            load[job.rest.ports] -= job.rest.share
            job.rest.share = fill(load[job.rest.ports], bandwidth[job.rest.ports], job.rest.amount)
            made = list(job.legs(max_team=max_team))
            load[job.first.ports] -= job.first.share
            for leg in made:
                load[self._index[leg.source]] += job.size * (leg.stop - leg.start) / ONE
            legs += made
        return legs

    def _ids(self, ranks: Sequence[int]) -> np.ndarray:
        return np.array([self._index[rank] for rank in ranks], dtype=int)


class _Hosts:
    """The holders and takers of a parcel, by host.

    `served` are the takers on hosts that have a holder, `crossing` those on hosts that have none.
    """

    def __init__(self, parcel: Parcel, devices_per_host: int) -> None:
        self.holders: dict[int, list[int]] = {}
        takers: dict[int, list[int]] = {}
        for rank in parcel.holders:
            self.holders.setdefault(rank // devices_per_host, []).append(rank)
        for rank in parcel.takers:
            takers.setdefault(rank // devices_per_host, []).append(rank)
        self.served = {host: ranks for host, ranks in takers.items() if host in self.holders}
        self.crossing = {host: ranks for host, ranks in takers.items() if host not in self.holders}


@dataclass
class Routed:
    """Legs as rows of an array, and the elements that each rank sends in all, and to and from other hosts."""

    legs: np.ndarray
    sent: np.ndarray
    crossing_out: np.ndarray
    crossing_in: np.ndarray


def _table(legs: list[Leg]) -> np.ndarray:
    return np.array(legs, dtype=np.int64).reshape(-1, len(Leg._fields))
