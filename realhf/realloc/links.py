"""Links: the bandwidths that limit a movement."""

from dataclasses import dataclass, field

from realhf.cluster import Cluster
from realhf.units import format_bytes

_UNLIMITED = 1 << 30


@dataclass(frozen=True)
class Links:
    """What limits a movement, in bytes per second in each direction.

    Everything that a device sends or receives passes its `device` port; what goes to or comes from another
    host also passes the device's `nic` and the port of its `host`. Ranks fill hosts of `devices_per_host` in
    order. With `pulled`, receivers copy out of the senders' memory, so that to send costs nothing inside a
    host. `origin` says who knows them.
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
        """What a device can send."""
        return self.device * (_UNLIMITED if self.pulled else 1)

    @property
    def about(self) -> str:
        """Say in words how fast they are taken to be, and who says so."""
        rates = [f"{format_bytes(rate)}/s" for rate in (self.device, self.nic, self.host)]
        between = f"{rates[1]} per rank and {rates[2]} per host between hosts"
        return f"{self.origin} links: {rates[0]} per rank, {between}"

    @classmethod
    def of_cluster(cls, cluster: Cluster, *, origin: str = "the cluster's") -> "Links":
        """Return the links of a cluster. Processes on CPUs copy out of each other's memory."""
        links = cluster.intra_host, cluster.outward
        device, nic = (link.bandwidth_bytes_per_second for link in links)
        latency = max(link.latency_seconds for link in links)
        port, pulled = cluster.host_port_bytes_per_second, cluster.device_type == "cpu"
        return cls(cluster.devices_per_host, device, nic, port, latency, pulled, origin)

    @classmethod
    def on_one_host(cls) -> "Links":
        """Equal devices without latency, as fast as NVLink; only what is in seconds depends on that."""
        return cls(_UNLIMITED, 450e9, 450e9, 450e9 * _UNLIMITED, latency_seconds=0.0)

    @classmethod
    def of_hosts(cls, devices_per_host: int, *, cuda: bool) -> "Links":
        """Hosts of which no more is known: wired like H100s, or of processes that share one card."""
        if cuda:
            return cls(devices_per_host, 450e9, 50e9, 50e9 * devices_per_host, latency_seconds=1e-5)
        return cls(devices_per_host, 4e9, 1e9, 1e9, latency_seconds=3e-4, pulled=True)
