"""Cluster: the machines that a plan is made for, read from plans/clusters/*.yaml.

Quantities there may have units (`80 GB`, `400 Gbit/s`, `5 us`). A plain number is in the unit of the field's
name.
"""

import contextlib
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from realhf.errors import shown
from realhf.layout import MAX_RANKS
from realhf.user_input.field_types import check_fields, is_positive, is_whole, require
from realhf.user_input.shipped import load_yaml
from realhf.user_input.units import parse

DEVICE_TYPES = ("cuda", "cpu")
ACCELERATORS = ("h100", "h200", "a100", "cpu")
_MAX_PER_HOST = 1 << 10
_ROUNDED_BYTES = 4e9
_SWITCHES = ("hosts_per_leaf", "oversubscription", "rails")
"""The fields of a file with several kinds of hosts that all hosts have in common."""


@dataclass(frozen=True)
class Link:
    """A kind of link: seconds before the first byte arrives, and bytes per second in each direction."""

    latency_seconds: float
    bandwidth_bytes_per_second: float


LINK_CLASSES = {
    "intra_host": "from one device to others in its host",
    "inter_host": "from one device to other hosts; may be left out if there is one host",
    "host_memory": "between one device and its host's memory (PCIe); without it, nothing is offloaded"}
"""The classes of links: field of a cluster -> what the link joins."""


@dataclass(frozen=True)
class Cluster:
    """Hosts, their devices and the links between them. Ranks fill one host after the other."""

    num_hosts: int
    devices_per_host: int
    device_memory_bytes: float
    host_memory_bytes: float
    memory_bandwidth_bytes_per_second: float
    peak_flops: Mapping[str, float]  # Dtype name (`bfloat16`, `float32`) -> FLOP/s of one device.
    intra_host: Link  # See LINK_CLASSES.
    inter_host: Link | None = None
    host_bandwidth_bytes_per_second: float | None = None  # From one host; None: the sum of its devices'.
    device_type: str = "cuda"  # Or `cpu`: processes on the cores of the hosts.
    host_memory: Link | None = None
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
            raise ValueError(f"device_type is {shown(self.device_type)}: legal are {', '.join(DEVICE_TYPES)}")
        if self.accelerator not in (None, *ACCELERATORS):
            raise ValueError(f"accelerator is {shown(self.accelerator)}: legal are {', '.join(ACCELERATORS)}")
        for name in ("num_hosts", "devices_per_host", "cores_per_host"):
            value = getattr(self, name)
            if name == "cores_per_host" and value is None:
                continue
            is_legal = isinstance(value, int) and value >= 1
            require(is_legal, name, shown(value), "be a whole number of at least 1")
        optional = [f.name for f in fields(Cluster) if f.default is None]
        values = {f.name: getattr(self, f.name) for f in fields(Cluster)}
        for name, value in values.items():
            if (value is None and name in optional) or name in ("device_type", "accelerator", "rails"):
                continue
            inner = asdict(value) if isinstance(value, Link) else value
            has_parts = name == "peak_flops" or isinstance(value, Link)
            parts = {f"{name}.{k}": v for k, v in inner.items()} if has_parts else {name: value}
            for where, number in parts.items():
                require(is_positive(number), where, shown(number), "be a number above 0")
        per_host = self.devices_per_host
        require(per_host <= _MAX_PER_HOST, "devices_per_host", per_host, f"be at most {_MAX_PER_HOST}")
        if self.num_devices > MAX_RANKS:
            raise ValueError(
                f"num_hosts {self.num_hosts} times devices_per_host {self.devices_per_host} is "
                f"{self.num_devices} devices: there can be at most {MAX_RANKS}")
        if not isinstance(self.rails, bool | None):
            raise ValueError(f"rails is {shown(self.rails)}: legal are true and false")
        if (self.hosts_per_leaf is None) != (self.oversubscription is None):
            raise ValueError("hosts_per_leaf and oversubscription belong together: give both or neither")
        require(
            isinstance(self.hosts_per_leaf, int | None), "hosts_per_leaf", shown(self.hosts_per_leaf),
            "be a whole number")
        require(
            self.oversubscription is None or self.oversubscription >= 1, "oversubscription",
            shown(self.oversubscription),
            "be at least 1 (1: links between leaves carry all that hosts send)")
        if self.inter_host is None and self.num_hosts > 1:
            raise ValueError(f"inter_host is missing: {self.num_hosts} hosts need the link between them")

    @property
    def accelerator_name(self) -> str:
        """Return the accelerator that the file names, or the default of the type of its devices."""
        return self.accelerator or {"cuda": "h100", "cpu": "cpu"}[self.device_type]

    @property
    def num_devices(self) -> int:
        return self.num_hosts * self.devices_per_host

    @property
    def kinds(self) -> "tuple[Cluster, ...]":
        """The hosts of each kind as a cluster of their own, in the order of their ranks."""
        return (self,)

    @property
    def ranks_by_kind(self) -> "list[tuple[range, Cluster]]":
        """The ranks of each kind of hosts, with these hosts."""
        ranks_of_kinds = []
        first = 0
        for kind in self.kinds:
            ranks_of_kinds.append((range(first, first + kind.num_devices), kind))
            first += kind.num_devices
        return ranks_of_kinds

    def kind_index(self, ranks: Collection[int]) -> int | None:
        """Return the position in `kinds` of the hosts that have all of these ranks, None if there is none."""
        for index, (of_kind, _) in enumerate(self.ranks_by_kind):
            if min(ranks) in of_kind and max(ranks) in of_kind:
                return index
        return None

    def first_devices(self, number: int) -> "Cluster":
        """Return the cluster of the first devices: some of the first host's, or those of whole hosts."""
        if number <= self.devices_per_host:
            return replace(self.kinds[0], num_hosts=1, devices_per_host=number)
        kinds = []
        for ranks, kind in self.ranks_by_kind:
            if (num_hosts := min(kind.num_hosts, (number - ranks.start) // self.devices_per_host)) > 0:
                kinds.append(replace(kind, num_hosts=num_hosts))
        return join_kinds(kinds)

    def to_dict(self) -> dict[str, Any]:
        """Return the document of a cluster file, without units."""
        return asdict(self)

    def link(self, *, within_host: bool) -> Link:
        """Return the link from a device to others in its host, or to other hosts (if that is not known, the
        one in the host)."""
        return self.intra_host if within_host else self.inter_host or self.intra_host

    def slowdown(self, num_hosts: int, *, in_ring: bool = False) -> float:
        """Return the factor by which leaf switches slow down traffic among the first hosts of a cluster.

        In a ring, only one host of each leaf sends to another leaf.
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
        return Counter(rank // self.devices_per_host for rank in ranks)

    @classmethod
    def from_dict(cls, document: Any) -> "Cluster":
        if isinstance(document, dict) and isinstance(document.get("hosts"), list):
            return _read_kinds(document)
        values = check_fields(document, _FIELDS, optional=_OPTIONAL, whole="the cluster")
        for name in LINK_CLASSES:
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


_FIELDS = [f.name for f in fields(Cluster)]
_OPTIONAL = [f.name for f in fields(Cluster) if f.default is not MISSING]


@dataclass(frozen=True)
class MixedCluster(Cluster):
    """Hosts of several kinds with equally many devices. Ranks fill those of the first kind, then of the next.

    Calls on ranks of several kinds are planned with this cluster's own figures: each is that of the slowest
    kind, but the memory is that of the largest device.
    """

    host_kinds: tuple[Cluster, ...] = ()

    @property
    def kinds(self) -> tuple[Cluster, ...]:
        return self.host_kinds

    def to_dict(self) -> dict[str, Any]:
        hosts = []
        for kind in self.host_kinds:
            figures = {k: v for k, v in asdict(kind).items() if k not in ("num_hosts", *_SWITCHES)}
            hosts.append({"count": kind.num_hosts, **figures})
        return {"hosts": hosts, **{name: getattr(self, name) for name in _SWITCHES}}


def join_kinds(kinds: Iterable[Cluster]) -> Cluster:
    """Return the cluster of all hosts of some kinds. Raises ValueError if they do not go together."""
    first, *others = kinds = tuple(kinds)
    for number, kind in enumerate(others, start=1):
        for name, what in (("devices_per_host", "equally many devices"), ("device_type", "one device type")):
            mine, theirs = getattr(kind, name), getattr(first, name)
            if mine != theirs:
                raise ValueError(
                    f"hosts[{number}].{name} is {mine}, that of hosts[0] is {theirs}: "
                    f"all hosts must have {what}")
    if not others:
        return first
    ports = [kind.host_port_bytes_per_second for kind in kinds]
    dtypes = [name for name in first.peak_flops if all(name in kind.peak_flops for kind in kinds)]
    slowest = min(kinds, key=lambda kind: max(kind.peak_flops.values()))
    links: dict[str, Any] = {
        name: _slowest_link([getattr(kind, name) for kind in kinds]) for name in LINK_CLASSES}
    return MixedCluster(
        num_hosts=sum(kind.num_hosts for kind in kinds), devices_per_host=first.devices_per_host,
        device_memory_bytes=max(kind.device_memory_bytes for kind in kinds),
        host_memory_bytes=min(kind.host_memory_bytes for kind in kinds),
        memory_bandwidth_bytes_per_second=min(kind.memory_bandwidth_bytes_per_second for kind in kinds),
        peak_flops={name: min(kind.peak_flops[name] for kind in kinds) for name in dtypes},
        host_bandwidth_bytes_per_second=min(ports) if any(
            kind.host_bandwidth_bytes_per_second is not None for kind in kinds) else None,
        device_type=first.device_type, accelerator=slowest.accelerator_name, host_kinds=kinds, **links,
        **{name: getattr(first, name) for name in _SWITCHES},
    )


def _slowest_link(links: Iterable[Link | None]) -> Link | None:
    """Return a link with the greatest latency and the least bandwidth of all; None if one is missing."""
    present = []
    for link in links:
        if link is None:
            return None
        present.append(link)
    latency = max(link.latency_seconds for link in present)
    return Link(latency, min(link.bandwidth_bytes_per_second for link in present))


def _read_kinds(document: dict[str, Any]) -> Cluster:
    """Return the cluster of a file that lists kinds of hosts."""
    common = ("inter_host", *_SWITCHES)
    values = check_fields(document, ["hosts", *common], optional=common)
    entries = values.pop("hosts")
    if not entries:
        raise ValueError("hosts is []: it must list at least one kind of hosts")
    return join_kinds(_read_kind(entry, f"hosts[{i}]", values) for i, entry in enumerate(entries))


def _read_kind(entry: Any, where: str, common: Mapping[str, Any]) -> Cluster:
    """Return the hosts of one kind. The figures of the entry replace those that all hosts have in common, and
    these replace those of the cluster file that the entry names as `like`."""
    figures = [name for name in _FIELDS if name not in ("num_hosts", *_SWITCHES)]
    has_like = isinstance(entry, dict) and "like" in entry
    optional = ["like", *(figures if has_like else (*_OPTIONAL, *common))]
    own_values = check_fields(entry, ["count", "like", *figures], optional=optional, where=where)
    count = own_values.pop("count")
    require(is_whole(count), f"{where}.count", shown(count), "be a whole number of at least 1")
    values: dict[str, Any] = {}
    if (name := own_values.pop("like", None)) is not None:
        alike = _load_like(name, where).to_dict()
        values = {field: alike[field] for field in figures}
    values |= {**common, **own_values, "num_hosts": count}
    try:
        return Cluster.from_dict(values)
    except ValueError as error:
        words = re.findall(r"\w+", str(error))
        is_common = bool(words) and words[0] in common and words[0] not in own_values
        raise ValueError(str(error) if is_common else f"{where}.{error}") from error


def _load_like(name: Any, where: str) -> Cluster:
    require(
        isinstance(name, str), f"{where}.like", shown(name), "name a cluster file, such as h100-8x8")
    try:
        alike = Cluster.load(name)
    except ValueError as error:
        raise ValueError(f"{where}.like: {error}") from error
    if len(alike.kinds) > 1:
        raise ValueError(f"{where}.like is {name!r}: that file has several kinds of hosts, it must have one")
    return alike


def host_memory_bytes() -> float:
    """Return the memory of this host, or of the container that this process runs in, in bytes.

    It is rounded down to a multiple of 4 GB, so that hosts that are nearly alike count as equal.
    """
    whole = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for limit in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        with contextlib.suppress(OSError, ValueError):  # It is that of a container; "max" is none.
            whole = min(whole, float(int(limit.read_text())))
    return whole // _ROUNDED_BYTES * _ROUNDED_BYTES or whole


def multiplies_bfloat16() -> bool:
    """Return whether this host's CPU has units that multiply bfloat16 faster than float32, as
    devices/half_precision.py finds with torch. On Intel CPUs only those of AMX are faster.

    It imports no torch, and does not know of oneDNN's settings, which may forbid these units."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    units = {"amx_bf16"} if "GenuineIntel" in text else {"avx512_bf16", "bf16"}
    return not units.isdisjoint(text.split())


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
            plain[name] = parse(f"{prefix}{name}", value, of=of)
            _require_unit(f"{prefix}{name}", plain[name], of=of)
    return plain


_LEAST = {"bytes": (1e6, "80 GB"), "bytes_per_second": (1e5, "400 Gbit/s"), "flops": (1e6, "989 TFLOP/s")}
"""What no device has less of, as a smaller number surely lacks its unit, and such a number with a unit."""


def _require_unit(name: str, value: object, *, of: str) -> None:
    """Raise ValueError if a number is so small that its unit must have been forgotten."""
    least, example = _LEAST.get(of, (0.0, ""))
    if isinstance(value, int | float) and 0 < value < least:
        unit = {"bytes": "bytes", "bytes_per_second": "bytes per second", "flops": "FLOP/s"}[of]
        raise ValueError(
            f"{name} is {value:g} {unit}, less than any device has: write the number with its unit, "
            f"such as {example}")
