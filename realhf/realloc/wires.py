"""Wires: the bandwidths that limit a movement."""

from dataclasses import dataclass

from realhf.cluster import Cluster

_UNLIMITED = 1 << 30


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
