"""Links: the bandwidths that limit a reallocation."""

from dataclasses import dataclass, field

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
