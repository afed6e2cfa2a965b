"""Cluster: the machines that a plan is made for, read from plans/clusters/*.yaml.

Quantities there may have units (`80 GB`, `400 Gbit/s`, `5 us`). A plain number is in the unit of the field's
name.
"""

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any

from realhf.field_types import check_fields
from realhf.hf_fields import is_positive
from realhf.layout import MAX_RANKS
from realhf.shipped import load_yaml
from realhf.units import parse

DEVICE_TYPES = ("cuda", "cpu")
ACCELERATORS = ("h100", "h200", "a100", "cpu")
_MAX_PER_HOST = 1 << 10
_ROUNDED_BYTES = 4e9


@dataclass(frozen=True)
class Link:
    """A kind of link: seconds before the first byte arrives, and bytes per second in each direction."""

    latency_seconds: float
    bandwidth_bytes_per_second: float


@dataclass(frozen=True)
class Cluster:
    """Hosts, their devices and the links between them. Ranks fill one host after the other."""

    num_hosts: int
    devices_per_host: int
    device_memory_bytes: float
    host_memory_bytes: float
    memory_bandwidth_bytes_per_second: float
    peak_flops: Mapping[str, float]  # Dtype name (`bfloat16`, `float32`) -> FLOP/s of one device.
    intra_host: Link  # From one device to others in its host.
    inter_host: Link | None = None  # From one device to other hosts; may be left out if there is one host.
    host_bandwidth_bytes_per_second: float | None = None  # From one host; None: the sum of its devices'.
    device_type: str = "cuda"  # Or `cpu`: processes on the cores of the hosts.
    host_memory: Link | None = None  # Between one device and its host's memory (PCIe); None: no offload.
    accelerator: str | None = None
    """Whose efficiencies the planner uses, one of ACCELERATORS; None: h100 for `cuda` devices, else cpu."""
    hosts_per_leaf: int | None = None  # Hosts on one leaf switch; None: all hosts.
    oversubscription: float | None = None
    """What the hosts of a leaf can send, relative to what its links to other leaves carry."""
    rails: bool | None = None
    """Whether a device reaches only the devices of its own index on other hosts directly."""
    cores_per_host: int | None = None  # On CPU: cores that the processes of a host share; None: one for each.

    def __post_init__(self) -> None:
        if self.device_type not in DEVICE_TYPES:
            raise ValueError(f"device_type is {self.device_type!r}: legal are {', '.join(DEVICE_TYPES)}")
        if self.accelerator not in (None, *ACCELERATORS):
            raise ValueError(f"accelerator is {self.accelerator!r}: legal are {', '.join(ACCELERATORS)}")
        for name in ("num_hosts", "devices_per_host", "cores_per_host"):
            value = getattr(self, name)
            if name == "cores_per_host" and value is None:
                continue
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}: it must be a whole number of at least 1")
        optional = [f.name for f in fields(self) if f.default is None]
        for name, value in asdict(self).items():
            if (value is None and name in optional) or name in ("device_type", "accelerator", "rails"):
                continue
            has_parts = name == "peak_flops" or isinstance(getattr(self, name), Link)
            parts = {f"{name}.{k}": v for k, v in value.items()} if has_parts else {name: value}
            for where, number in parts.items():
                if not is_positive(number):
                    raise ValueError(f"{where} is {number!r}: it must be a number above 0")
        if self.devices_per_host > _MAX_PER_HOST:
            legal = f"it must be at most {_MAX_PER_HOST}"
            raise ValueError(f"devices_per_host is {self.devices_per_host}: {legal}")
        if self.num_devices > MAX_RANKS:
            what = f"num_hosts {self.num_hosts} times devices_per_host {self.devices_per_host}"
            raise ValueError(f"{what} is {self.num_devices} devices: there can be at most {MAX_RANKS}")
        if not isinstance(self.rails, bool | None):
            raise ValueError(f"rails is {self.rails!r}: legal are true and false")
        if (self.hosts_per_leaf is None) != (self.oversubscription is None):
            raise ValueError("hosts_per_leaf and oversubscription belong together: give both or neither")
        if self.hosts_per_leaf is not None and not isinstance(self.hosts_per_leaf, int):
            raise ValueError(f"hosts_per_leaf is {self.hosts_per_leaf!r}: it must be a whole number")
        if self.oversubscription is not None and self.oversubscription < 1:
            legal = "it must be at least 1 (1: links between leaves carry all that hosts send)"
            raise ValueError(f"oversubscription is {self.oversubscription!r}: {legal}")
        if self.inter_host is None and self.num_hosts > 1:
            raise ValueError(f"inter_host is missing: {self.num_hosts} hosts need the link between them")

    @property
    def accelerator_name(self) -> str:
        """Return the accelerator that the file names, or the default of the type of its devices."""
        return self.accelerator or {"cuda": "h100", "cpu": "cpu"}[self.device_type]

    @property
    def num_devices(self) -> int:
        return self.num_hosts * self.devices_per_host

    def link(self, *, within_host: bool) -> Link:
        """Return the link from a device to others in its host, or to any: the one to other hosts, if it is
        known."""
        return self.intra_host if within_host else self.inter_host or self.intra_host

    def slowdown(self, num_hosts: int, *, in_ring: bool = False) -> float:
        """Return by how much leaf switches slow down the traffic among this many hosts that fill leaves.

        Of the traffic of a ring, a leaf sends only as much to other leaves as one of its hosts.
        """
        if self.hosts_per_leaf is None or self.oversubscription is None or num_hosts <= self.hosts_per_leaf:
            return 1.0
        return max(1.0, self.oversubscription / (self.hosts_per_leaf if in_ring else 1))

    @property
    def host_port_bytes_per_second(self) -> float:
        """Return the rate at which all devices of a host together can send to other hosts, or receive."""
        ports = self.devices_per_host * self.link(within_host=False).bandwidth_bytes_per_second
        return self.host_bandwidth_bytes_per_second or ports

    def crowding(self, num_busy: int) -> float:
        """Return how many times longer work takes while so many devices of a host are busy.

        It is 1 unless they are processes that share fewer cores.
        """
        return 1.0 if self.cores_per_host is None else max(1.0, num_busy / self.cores_per_host)

    def count_by_host(self, ranks: Iterable[int]) -> Counter[int]:
        """Return how many of these ranks are on each host."""
        return Counter(rank // self.devices_per_host for rank in ranks)

    @classmethod
    def from_dict(cls, document: Any) -> "Cluster":
        optional = [f.name for f in fields(cls) if f.default is not MISSING]
        values = check_fields(document, [f.name for f in fields(cls)], optional=optional, whole="the cluster")
        for name in ("intra_host", "inter_host", "host_memory"):
            if values.get(name) is not None or name == "intra_host":
                link = check_fields(values[name], [f.name for f in fields(Link)], where=name)
                values[name] = Link(**_plain(link, f"{name}."))
        if not isinstance(values["peak_flops"], dict) or not values["peak_flops"]:
            raise ValueError("peak_flops must map dtype names to FLOP/s, for example {bfloat16: 989 TFLOP/s}")
        values["peak_flops"] = _plain(values["peak_flops"], "peak_flops.")
        return cls(**_plain(values))

    @classmethod
    def load(cls, name: str) -> "Cluster":
        """Load a cluster file, or a shipped one by its short name. UserErrors name the file and the field."""
        return load_yaml(name, cls.from_dict, kind="plans/clusters", what="cluster")


def host_memory_bytes() -> float:
    """Return the memory of this host in bytes.

    It is rounded down to a multiple of 4 GB, so that hosts that are nearly alike count as equal.
    """
    whole = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return whole // _ROUNDED_BYTES * _ROUNDED_BYTES or whole


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _plain(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values as plain numbers of bytes, seconds or FLOP/s, according to the fields' names."""
    plain = dict(values)
    units = ("bytes_per_second", "bytes", "seconds")
    for name, value in values.items():
        of = "flops" if prefix == "peak_flops." else next(filter(name.endswith, units), None)
        if of is not None:
            try:
                plain[name] = parse(value, of=of)
            except ValueError as error:
                raise ValueError(f"{prefix}{name} is {error}") from error
    return plain
