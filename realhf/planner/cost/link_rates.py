"""Seconds of messages and collectives, from the links of a cluster and the share of them that is reached."""

import math
from typing import Any

from realhf.cluster import Cluster, Link
from realhf.planner.cost.efficiencies import Efficiencies
from realhf.planner.cost.rank_groups import Span


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
