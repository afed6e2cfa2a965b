"""Groups of ranks on hosts, and the seconds of their messages and collectives.

They follow from the links of a cluster, and the share of their bandwidth that is reached. What a device sends
to other hosts passes its own link and then the port of its host, which all devices of the host share. Groups
of one kind exchange at the same time, so that the port carries the bytes of all of them: for example, with
tp inside hosts of 8, it carries those of 8 groups of replicas.
"""

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from realhf.cluster import Cluster, Link, join_kinds
from realhf.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.planner.efficiencies import Efficiencies


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


class Span(NamedTuple):
    """A group of `size` ranks, with `per_host` of them on each host.

    With other groups of its kind it has `beside` ranks on each host, which share the host's port; 0: it is
    alone there, or inside one host.
    """

    size: int
    per_host: int
    beside: int = 0

    @property
    def hosts(self) -> int:
        return -(-self.size // self.per_host)

    @property
    def num_sharing(self) -> int:
        """The ranks that share the port of a host."""
        return max(self.per_host, self.beside)


class RankGroups(NamedTuple):
    """The rank groups of a strategy on contiguous ranks, with `per_host` of the ranks on each host."""

    tp: Span
    replicas: Span
    expert_replicas: Span
    cp: Span
    ep: Span
    stages_meet_in_host: bool
    num_sending: int
    """The ranks of a host that send to the next pipeline stage at the same time."""

    @property
    def within(self) -> str:
        """The name under which communication inside a block is reported."""
        return _parallel(tensor=self.tp, context=self.cp, expert=self.ep)

    @property
    def within_rows(self) -> str:
        """The same in generations, where each rank of a cp group has rows of its own."""
        return _parallel(tensor=self.tp, expert=self.ep)


def _parallel(**axes: Span) -> str:
    used = [name for name, span in axes.items() if span.size > 1]
    return f"{' and '.join(used) or 'tensor'} parallel"


def ranks_per_host(cluster: Cluster, ranks: Iterable[int]) -> int:
    """Return the largest n for which no group lies on two hosts if a mesh is split into groups of n ranks.

    If the mesh begins or ends inside a host, n may be less than the mesh has on any host.
    """
    return math.gcd(*cluster.count_by_host(ranks).values())


@lru_cache(maxsize=1 << 14)
def rank_groups(strategy: ParallelStrategy, per_host: int) -> RankGroups:
    """Return the rank groups of a strategy on a mesh with `per_host` ranks on each host."""
    s = strategy
    near = max(1, per_host // s.tp)  # Number of tp groups on one host.
    replicas = s.num_replicas
    experts = s.num_expert_replicas

    def span(size: int, on_host: int) -> Span:
        return Span(size, on_host, per_host if size > on_host else 0)

    return RankGroups(
        tp=span(s.tp, math.gcd(s.tp, per_host)),
        replicas=span(replicas, min(replicas, near)),
        # The ranks of a cp group have the same experts, and next to it are groups with other experts.
        expert_replicas=span(experts, min(experts, max(min(s.cp, near), near // s.ep))),
        cp=span(s.cp, min(s.cp, near)),
        ep=span(s.ep, max(1, min(s.ep, near // s.cp))),
        stages_meet_in_host=s.num_ranks <= per_host,
        num_sending=min(per_host, s.num_ranks // s.pp))


_FREE = 1e30
"""Bytes or operations per second that take no time; its reciprocal is a latency that takes none."""


def ports_alone(cluster: Cluster) -> Cluster:
    """Return a cluster in which only the ports of hosts take time."""
    link = Link(1 / _FREE, _FREE)
    return join_kinds(
        replace(
            kind, memory_bandwidth_bytes_per_second=_FREE, peak_flops=dict.fromkeys(kind.peak_flops, _FREE),
            intra_host=link, inter_host=link, host_memory=kind.host_memory and link,
            host_bandwidth_bytes_per_second=kind.host_port_bytes_per_second, cores_per_host=None)
        for kind in cluster.kinds)


class LinkRates:
    """The links of one cluster."""

    def __init__(self, cluster: Cluster, efficiencies: Efficiencies) -> None:
        self.cluster = cluster
        self.efficiencies = efficiencies
        self._known_shares: dict[tuple[float, float, int], float] = {}

    def all_reduce(self, num_bytes: Any, span: Span) -> Any:
        """Return the seconds of a sum, for a number of bytes or an array of them, as in other collectives."""
        return self.all_gather(num_bytes, span) + self.reduce_scatter(num_bytes, span)

    def reduce_scatter(self, num_bytes: Any, span: Span) -> Any:
        return self.all_gather(num_bytes, span)

    def all_gather(self, num_bytes: Any, span: Span) -> Any:
        """Return the seconds until every member has all `num_bytes`, of which it receives (n - 1) / n.

        Data from outside arrives once per host, (hosts - 1) / hosts of it, over the links of all its members
        (as NCCL's rings over all NICs). A flat ring would bring (n - 1) / n of it.
        """
        n = span.size
        if n == 1:
            return 0.0
        inside = (n - 1) / n if span.per_host > 1 else 0.0
        outside = (1 - 1 / span.hosts) / span.per_host
        outside *= self.cluster.slowdown(span.hosts, in_ring=True)
        return self._exchange(
            num_bytes, inside, outside, num_sharing=span.num_sharing,
            num_latencies=math.ceil(math.log2(n)))

    def all_to_all(self, num_bytes: Any, span: Span) -> Any:
        """Return the seconds of an exchange in which every member sends `num_bytes` in equal parts to all.

        Each peer gets a message of its own, so that the time of messages grows with their number. With rails,
        what goes to other hosts first goes to the device of their host with the right index.
        """
        n = span.size
        if n == 1:
            return 0.0
        outside = 1 - span.per_host / n
        inside = (span.per_host - 1) / n
        inside += outside * (1 - 1 / span.per_host) if self.cluster.rails else 0.0
        outside *= self.cluster.slowdown(span.hosts)
        exchange = self._exchange(num_bytes, inside, outside, num_sharing=span.num_sharing)
        return exchange + (n - 2) * self.efficiencies.message_seconds

    def _exchange(
        self, num_bytes: Any, inside: float, outside: float, *, num_sharing: int = 1, num_latencies: int = 1
    ) -> Any:
        """Return the seconds in which each of `num_sharing` devices of a host sends these fractions of some
        bytes inside its host and to others."""
        key = (inside, outside, num_sharing)
        if key not in self._known_shares:
            self._known_shares[key] = self._seconds_per_byte(*key)
        latency = self.cluster.link(within_host=not outside).latency_seconds
        return num_bytes * self._known_shares[key] + num_latencies * latency

    def _seconds_per_byte(self, inside: float, outside: float, num_sharing: int) -> float:
        """Return the seconds of each byte of an exchange."""
        near = self.cluster.link(within_host=True)
        far = self.cluster.link(within_host=False)
        return max(
            inside / self._reached(near.bandwidth_bytes_per_second),
            outside / self._reached(far.bandwidth_bytes_per_second),
            outside * num_sharing / self._reached(self.cluster.host_port_bytes_per_second))

    def send(self, num_bytes: float, *, within_host: bool, num_sending: int = 1) -> float:
        """Return the seconds of a message, while `num_sending` devices of the host send as much."""
        slowdown = self.cluster.slowdown(self.cluster.num_hosts)
        return self._exchange(
            num_bytes, float(within_host), 0.0 if within_host else slowdown, num_sharing=num_sending)

    def sending(self, num_bytes: float) -> float:
        """Return the seconds to send samples to ranks of the call that reads them, beside other calls."""
        return self.samples(num_bytes)

    def samples(self, num_bytes: float) -> float:
        """Return the seconds in which ranks of a call deal out samples, from host memory to host memory."""
        return self.send(num_bytes, within_host=False)

    def host_copy(self, num_bytes: float) -> float:
        """Return the seconds of a copy between a device and its host's memory.

        Raises ValueError when the cluster file has no such link.
        """
        link = self.cluster.host_memory
        if link is None:
            raise ValueError("the cluster has no host_memory link")
        return link.latency_seconds + num_bytes / link.bandwidth_bytes_per_second

    def _reached(self, bytes_per_second: float) -> float:
        return bytes_per_second * self.efficiencies.link
