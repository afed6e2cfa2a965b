"""Groups of ranks on hosts, and the seconds of their messages and collectives.

They follow from the links of a cluster, and the share of their bandwidth that is reached.
"""

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

from realhf.cluster import Cluster, Link
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
    """A group of `size` ranks, with `per_host` of them on each host."""

    size: int
    per_host: int

    @property
    def hosts(self) -> int:
        return -(-self.size // self.per_host)


class RankGroups(NamedTuple):
    """The rank groups of a strategy on contiguous ranks, with `per_host` of the ranks on each host."""

    tp: Span
    replicas: Span
    expert_replicas: Span
    cp: Span
    ep: Span
    stages_meet_in_host: bool

    @property
    def within(self) -> str:
        """The name under which communication inside a block is reported."""
        axes = (("tensor", self.tp), ("context", self.cp), ("expert", self.ep))
        used = [name for name, span in axes if span.size > 1]
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
    return RankGroups(
        tp=Span(s.tp, math.gcd(s.tp, per_host)),
        replicas=Span(replicas, min(replicas, near)),
        # The ranks of a cp group have the same experts, and next to it are groups with other experts.
        expert_replicas=Span(experts, min(experts, max(min(s.cp, near), near // s.ep))),
        cp=Span(s.cp, min(s.cp, near)),
        ep=Span(s.ep, max(1, min(s.ep, near // s.cp))),
        stages_meet_in_host=s.num_ranks <= per_host)


class LinkRates:
    """The links of one cluster."""

    def __init__(self, cluster: Cluster, efficiencies: Efficiencies) -> None:
        self.cluster = cluster
        self.efficiencies = efficiencies

    def all_reduce(self, num_bytes: Any, span: Span) -> Any:
        """Return the seconds of a sum, for a number of bytes or an array of them, as in other collectives."""
        return self.all_gather(num_bytes, span) + self.reduce_scatter(num_bytes, span)

    def reduce_scatter(self, num_bytes: Any, span: Span) -> Any:
        return self.all_gather(num_bytes, span)

    def all_gather(self, num_bytes: Any, span: Span) -> Any:
        """Return the seconds until every member has all `num_bytes`, of which it receives (n - 1) / n.

        On several hosts the members of a host share their ports: data from outside arrives once per host,
        (hosts - 1) / hosts of it, over the ports of all its members (as NCCL's rings over all NICs).
        """
        n = span.size
        if n == 1:
            return 0.0
        inside = (n - 1) / n if span.per_host > 1 else 0.0
        outside = (1 - 1 / span.hosts) / span.per_host
        outside *= self.cluster.slowdown(span.hosts, in_ring=True)
        return self._exchange(num_bytes, inside, outside, num_latencies=math.ceil(math.log2(n)))

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
        exchange = self._exchange(num_bytes, inside, outside * self.cluster.slowdown(span.hosts))
        return exchange + (n - 2) * self.efficiencies.message_seconds

    def _exchange(self, num_bytes: Any, inside: float, outside: float, *, num_latencies: int = 1) -> Any:
        """Return the seconds in which a device sends these fractions of some bytes inside its host and to
        others."""
        near = self.cluster.link(within_host=True)
        far = self.cluster.link(within_host=False)
        slope = max(inside / self._bandwidth(near), outside / self._bandwidth(far))
        return num_bytes * slope + num_latencies * (far if outside else near).latency_seconds

    def send(self, num_bytes: float, *, within_host: bool) -> float:
        slowdown = self.cluster.slowdown(self.cluster.num_hosts)
        return self._exchange(num_bytes, float(within_host), 0.0 if within_host else slowdown)

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

    def _bandwidth(self, link: Link) -> float:
        return link.bandwidth_bytes_per_second * self.efficiencies.link
