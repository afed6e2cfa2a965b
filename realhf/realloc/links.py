"""The bandwidths that limit a reallocation, and the hops from rank to rank by which elements travel."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from realhf.cluster import Cluster
from realhf.user_input.units import format_bytes

_UNLIMITED = 1 << 30


@dataclass(frozen=True)
class Links:
    """The bandwidths of ports and hosts, in bytes per second in each direction.

    Everything that a device sends or receives passes its `device` port. Traffic between hosts also passes the
    device's `nic` and the port of its `host`. Ranks fill hosts of `devices_per_host` in order. With `pulled`,
    receivers copy from the senders' memory, so that sending inside a host costs nothing. `origin` says in
    reports where the figures come from.
    """

    devices_per_host: int
    device: float
    nic: float
    host: float
    latency_seconds: float
    pulled: bool = False
    origin: str = field(default="assumed", compare=False)

    @property
    def sending(self) -> float:
        """Bytes per second that a device can send."""
        return self.device * (_UNLIMITED if self.pulled else 1)

    @property
    def about(self) -> str:
        """Describe the bandwidths and their origin in words."""
        rates = [f"{format_bytes(rate)}/s" for rate in (self.device, self.nic, self.host)]
        between = f"{rates[1]} per rank and {rates[2]} per host between hosts"
        return f"{self.origin} links: {rates[0]} per rank, {between}"

    @classmethod
    def of_cluster(cls, cluster: Cluster, *, origin: str = "the cluster's") -> "Links":
        """Return the links of a cluster. Processes on CPUs copy from each other's memory."""
        inside, outside = cluster.link(within_host=True), cluster.link(within_host=False)
        return cls(
            devices_per_host=cluster.devices_per_host,
            device=inside.bandwidth_bytes_per_second,
            nic=outside.bandwidth_bytes_per_second,
            host=cluster.host_port_bytes_per_second,
            latency_seconds=max(inside.latency_seconds, outside.latency_seconds),
            pulled=cluster.device_type == "cpu",
            origin=origin,
        )

    @classmethod
    def on_one_host(cls) -> "Links":
        """Return links of equal devices on one host, as fast as NVLink and without latency.

        A schedule's transfers do not depend on these figures; its seconds do.
        """
        return cls(_UNLIMITED, 450e9, 450e9, 450e9 * _UNLIMITED, latency_seconds=0.0)

    @classmethod
    def of_hosts(cls, devices_per_host: int, *, cuda: bool) -> "Links":
        """Return assumed links for hosts of unknown bandwidth: H100s, or CPU processes that share one NIC."""
        if cuda:
            return cls(devices_per_host, 450e9, 50e9, 50e9 * devices_per_host, latency_seconds=1e-5)
        return cls(devices_per_host, 4e9, 1e9, 1e9, latency_seconds=3e-4, pulled=True)


ONE = 1 << 22
"""Length of a whole bundle, or of a whole slice, in the units in which hops start and stop."""


class Hop(NamedTuple):
    """Part [start, stop) of a bundle, in units of 1 / ONE, that rank `source` sends to rank `target`.

    `depth` is the number of hops that must come first: 0 if a holder sends. The source has the part once all
    hops of lesser depth have arrived.
    """

    bundle: int  # Its index in the schedule.
    source: int
    target: int
    start: int
    stop: int
    depth: int


@dataclass(frozen=True, eq=False)
class Hops:
    """A table of hops: one array for each field of Hop, with one entry per hop."""

    bundle: np.ndarray
    source: np.ndarray
    target: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    depth: np.ndarray

    @classmethod
    def of(cls, hops: Sequence[Hop] = ()) -> "Hops":
        return cls(*np.array(hops, dtype=np.int64).reshape(-1, len(Hop._fields)).T.copy())

    @classmethod
    def concat(cls, tables: "Sequence[Hops]") -> "Hops":
        """Return one table of the hops of all tables, in order."""
        if not tables:
            return cls.of()
        return cls(*map(np.concatenate, zip(*(table._columns for table in tables), strict=True)))

    @property
    def _columns(self) -> list[np.ndarray]:
        return [getattr(self, name) for name in Hop._fields]

    def __len__(self) -> int:
        return len(self.bundle)

    def __iter__(self) -> Iterator[Hop]:
        return map(Hop._make, zip(*(column.tolist() for column in self._columns), strict=True))

    def select(self, chosen: np.ndarray) -> "Hops":
        """Return the hops with these indices, or those where a mask is True."""
        return Hops(*(column[chosen] for column in self._columns))

    @property
    def fraction(self) -> np.ndarray:
        """Part of its bundle that each hop carries, from 0 to 1."""
        return (self.stop - self.start) / ONE
