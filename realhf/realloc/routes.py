"""Routes: the hops, from rank to rank, by which each block reaches all of its receivers.

Inside a host a block goes from its holders directly to its receivers. Where the holders cannot send every
copy, receivers get stripes and forward them to one another. Every element crosses once to a host without a
holder: each receiver there gets a stripe and sends it to the others. Such hosts may also forward stripes to
further hosts. No rank receives what it does not want.
"""

from collections.abc import Sequence
from itertools import chain, groupby

import numpy as np

from realhf.realloc.balance import Demand, fill, least_seconds, spread
from realhf.realloc.blocks import Block
from realhf.realloc.links import Links
from realhf.realloc.multicast import ONE, Hop, Multicast, Shares

_MIN_TEAM = 4
_MAX_TEAM = 32
"""Least and largest size of a team, in which each domain sends to all others."""
_MAX_HOPS = 600_000
"""Teams shrink, down to the least size, where there would be more hops than this."""
_SMALL = 1e-3
"""A block is not split if a holder would send at most this share of what the busiest rank receives."""


class _Hosts:
    """The holders and receivers of a block, by host.

    `served` are the receivers on hosts that have a holder, `crossing` those on hosts that have none.
    """

    def __init__(self, block: Block, devices_per_host: int) -> None:
        self.holders, receivers = (
            {host: list(on_host) for host, on_host in groupby(ranks, key=lambda r: r // devices_per_host)}
            for ranks in (block.holders, block.receivers)
        )
        self.served = {host: ranks for host, ranks in receivers.items() if host in self.holders}
        self.crossing = {host: ranks for host, ranks in receivers.items() if host not in self.holders}


class Router:
    """A planner of the hops of all blocks over given links."""

    def __init__(self, blocks: Sequence[Block], links: Links) -> None:
        self._blocks = blocks
        self._links = links
        self._sizes = np.array([block.size for block in blocks], dtype=float)
        self._ranks = np.unique(np.concatenate([(*block.holders, *block.receivers) for block in blocks]))
        hosts = self._ranks // links.devices_per_host
        _, self._host, present = np.unique(hosts, return_inverse=True, return_counts=True)
        self._sending = np.full(len(self._ranks), links.sending)
        self._nic = np.minimum(links.nic, links.host / present[self._host])
        self._hosts = [_Hosts(block, links.devices_per_host) for block in blocks]
        self._lacking = np.zeros(len(self._ranks))
        for block in blocks:
            self._lacking[self._ids(block.receivers)] += block.size
        most = _SMALL * float(self._lacking.max())
        self._small = [len(b.receivers) * b.size <= most * len(b.holders) for b in blocks]
        self._entering = {
            (number, host): Demand(self._ids(receivers), blocks[number].size)
            for number, hosts in enumerate(self._hosts) for host, receivers in hosts.crossing.items()
        }  # fmt: skip
        """What every host without a holder lacks, by block and host."""
        self._crossing_in = np.zeros(len(self._ranks))
        spread(list(self._entering.values()), bandwidth=self._nic, load=self._crossing_in)

    @property
    def can_relay(self) -> bool:
        """Return whether receivers on a holder's host could relay a block that other hosts need."""
        return any(hosts.served and hosts.crossing for hosts in self._hosts)

    def bound_seconds(self, hops: np.ndarray, *, itemsize: int) -> tuple[float, str]:
        """Return a lower bound for routes that bring ranks only what they want, and its proof in words.

        Each block must leave its holders once; further copies may come from any rank that has it. The load
        of these hops tells which ports are likely to prove the bound.
        """
        sending: list[Demand] = []
        crossing_out: list[Demand] = []
        for block, hosts in zip(self._blocks, self._hosts, strict=True):
            everyone = self._ids((*block.holders, *block.receivers))
            sending.append(Demand(self._ids(block.holders), block.size))
            sending.append(Demand(everyone, (len(block.receivers) - 1) * block.size))
            if hosts.crossing:
                near = [rank for ranks in hosts.served.values() for rank in ranks]
                crossing_out.append(Demand(self._ids((*block.holders, *near)), block.size))
                crossing_out.append(Demand(everyone, (len(hosts.crossing) - 1) * block.size))
        links = self._links
        per_host = links.devices_per_host
        crossing = self._load(hops[hops[:, 1] // per_host != hops[:, 2] // per_host])
        nics = np.full(len(self._ranks), links.nic)
        receiving = (float(self._lacking.max()) / links.device, np.array([self._lacking.argmax()]))
        cases = [(*receiving, "receive")]
        for demands, load, bandwidth, host_bandwidth, what in (
            (sending, self._load(hops), self._sending, np.inf, "send"),
            (crossing_out, crossing, nics, links.host, "send to other hosts"),
            (list(self._entering.values()), self._crossing_in, nics, links.host, "receive from other hosts"),
        ):
            bound = least_seconds(
                demands, load=load, bandwidth=bandwidth, host=self._host, host_bandwidth=host_bandwidth)
            cases.append((*bound, what))
        seconds, ports, what = max(cases, key=lambda case: case[0])
        names = ", ".join(str(rank) for rank in self._ranks[ports][:8]) + (", ..." if len(ports) > 8 else "")
        return seconds * itemsize, f"what rank{'s' * (len(ports) > 1)} {names} must {what}"

    def route(self, *, forward: bool, relay: bool) -> np.ndarray:
        """Return the hops as rows of an array.

        If `forward`, receivers forward what they get; if `relay`, also to other hosts.
        """
        crossing = _table(self._cross_hosts(forward=forward, relay=relay))
        outside = np.concatenate([crossing, self._gather(crossing)])
        casts = []
        for number, hosts in enumerate(self._hosts):
            for host, receivers in hosts.served.items():
                senders = [(rank, 0) for rank in hosts.holders[host]]
                domains = [((receiver, 1.0),) for receiver in receivers]
                casts.append(self._multicast(number, senders, domains, forward=forward))
        inside = self._run(casts, bandwidth=self._sending, load=self._load(outside))
        return np.concatenate([outside, _table(inside)])

    def _gather(self, crossing: np.ndarray) -> np.ndarray:
        """Return the hops by which receivers share what came from other hosts with those on their host."""
        hosts = crossing[:, 2] // self._links.devices_per_host
        keys = zip(crossing[:, 0].tolist(), hosts.tolist(), strict=True)
        receivers = [self._hosts[block].crossing[host] for block, host in keys]
        hops = np.repeat(crossing, np.array([len(ranks) for ranks in receivers], dtype=int), axis=0)
        hops[:, 1] = hops[:, 2]
        hops[:, 2] = list(chain.from_iterable(receivers))
        hops[:, 5] += 1
        return hops[hops[:, 1] != hops[:, 2]]

    def _cross_hosts(self, *, forward: bool, relay: bool) -> list[Hop]:
        """Return the hops that bring every block once to each host that has receivers and no holder."""
        casts = []
        for number, hosts in enumerate(self._hosts):
            if not hosts.crossing:
                continue
            senders = [(rank, 0) for rank in self._blocks[number].holders]
            if relay and not self._small[number]:
                senders += [(rank, 2) for ranks in hosts.served.values() for rank in ranks]
            domains: list[Shares] = []
            for host, receivers in hosts.crossing.items():
                if self._small[number]:
                    domains.append(((receivers[number % len(receivers)], 1.0),))
                else:
                    weights = self._entering[number, host].share.tolist()
                    domains.append(tuple(zip(receivers, weights, strict=True)))
            casts.append(self._multicast(number, senders, domains, forward=forward))
        return self._run(casts, bandwidth=self._nic, load=np.zeros(len(self._ranks)))

    def _multicast(
        self, number: int, senders: list[tuple[int, int]], domains: Sequence[Shares], *, forward: bool
    ) -> Multicast:
        """Return the multicast of a block.

        The first copy must come from a sender. With `forward`, further copies may come from any domain,
        unless the block is small.
        """
        size = self._blocks[number].size
        sending = [rank for rank, _ in senders]
        may_forward = forward and not self._small[number]
        forwarding = [rank for domain in domains for rank, _ in domain] if may_forward else []
        rest = Demand(self._ids((*sending, *forwarding)), (len(domains) - 1) * size)
        return Multicast(number, size, senders, list(domains), Demand(self._ids(sending), size), rest)

    def _run(self, casts: list[Multicast], *, bandwidth: np.ndarray, load: np.ndarray) -> list[Hop]:
        """Return the hops of all multicasts, spread evenly over the ports, on which `load` lies already."""
        hops: list[Hop] = []
        demands = [demand for cast in casts for demand in (cast.first, cast.rest)]
        spread(demands, bandwidth=bandwidth, load=load)
        # Each rank of a domain gets a part from every domain of its team and sends it to its whole domain.
        forwarding = [cast for cast in casts if len(cast.rest.ports) > len(cast.senders)]
        per_member = sum(len(domain) ** 2 for cast in forwarding for domain in cast.domains)
        max_team = min(_MAX_TEAM, max(_MIN_TEAM, _MAX_HOPS // max(1, per_member)))
        for cast in sorted(casts, key=lambda cast: -cast.rest.amount):
            # Hops follow the shares only approximately, so each cast is balanced against the actual load.
            load[cast.rest.ports] -= cast.rest.share
            cast.rest.share = fill(load[cast.rest.ports], bandwidth[cast.rest.ports], cast.rest.amount)
            made = list(cast.hops(max_team=max_team))
            load[cast.first.ports] -= cast.first.share
            load += self._load(_table(made))
            hops += made
        return hops

    def _load(self, hops: np.ndarray) -> np.ndarray:
        """Return how many elements each rank sends."""
        amounts = self._sizes[hops[:, 0]] * (hops[:, 4] - hops[:, 3]) / ONE
        load = np.zeros(len(self._ranks))
        np.add.at(load, self._ids(hops[:, 1]), amounts)
        return load

    def _ids(self, ranks: Sequence[int] | np.ndarray) -> np.ndarray:
        return np.searchsorted(self._ranks, ranks)


def _table(hops: list[Hop]) -> np.ndarray:
    return np.array(hops, dtype=np.int64).reshape(-1, len(Hop._fields))
