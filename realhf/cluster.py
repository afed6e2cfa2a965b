"""Cluster: the machines that a plan is made for, read from plans/clusters/*.yaml."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import yaml

from realhf.shipped import resolve


@dataclass(frozen=True)
class Link:
    """A class of wires: seconds before the first byte arrives, and bytes per second in each direction."""

    latency_seconds: float
    bandwidth_bytes_per_second: float


@dataclass(frozen=True)
class Cluster:
    """Hosts, their devices and what joins them. Ranks fill one host after the other.

    `peak_flops` maps a dtype name (`bfloat16`, `float32`) to FLOP/s of one device; `intra_host` and
    `inter_host` describe the port of one device inside its host and towards other hosts.
    """

    num_hosts: int
    devices_per_host: int
    device_memory_bytes: float
    host_memory_bytes: float
    memory_bandwidth_bytes_per_second: float
    peak_flops: Mapping[str, float]
    intra_host: Link
    inter_host: Link

    def __post_init__(self) -> None:
        for name in ("num_hosts", "devices_per_host"):
            if not isinstance(value := getattr(self, name), int) or value < 1:
                raise ValueError(f"{name} is {value!r}: it must be a whole number of at least 1")
        positive = {f"peak_flops.{dtype}": flops for dtype, flops in self.peak_flops.items()}
        for name in ("device_memory_bytes", "host_memory_bytes", "memory_bandwidth_bytes_per_second"):
            positive[name] = getattr(self, name)
        for name in ("intra_host", "inter_host"):
            positive[f"{name}.latency_seconds"] = getattr(self, name).latency_seconds
            positive[f"{name}.bandwidth_bytes_per_second"] = getattr(self, name).bandwidth_bytes_per_second
        for name, value in positive.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise ValueError(f"{name} is {value!r}: it must be a number above 0")

    @property
    def num_devices(self) -> int:
        return self.num_hosts * self.devices_per_host

    def host(self, rank: int) -> int:
        return rank // self.devices_per_host

    @classmethod
    def from_dict(cls, document: Any) -> "Cluster":
        _check_names(document, cls)
        values = dict(document)
        for name in ("intra_host", "inter_host"):
            _check_names(values[name], Link, name)
            values[name] = Link(**values[name])
        if not isinstance(values["peak_flops"], dict) or not values["peak_flops"]:
            raise ValueError("peak_flops must map dtype names to FLOP/s, for example {bfloat16: 9.9e14}")
        return cls(**values)

    @classmethod
    def load(cls, name: str) -> "Cluster":
        """Reads a cluster file, or a shipped one by its short name. ValueErrors name file and field."""
        path = resolve(name, kind="plans/clusters", suffix=".yaml")
        try:
            return cls.from_dict(yaml.safe_load(path.read_text()))
        except (ValueError, OSError, yaml.YAMLError) as error:
            raise ValueError(f"cluster {path}: {' '.join(str(error).split())}") from error


def _check_names(document: Any, cls: type, where: str = "") -> None:
    """Whether a mapping (the whole document or its field `where`) has exactly the fields of the class."""
    legal, prefix = [f.name for f in fields(cls)], where and f"{where}."
    if not isinstance(document, dict):
        raise ValueError(f"{where or 'the cluster'} is {document!r}: it must give {', '.join(legal)}")
    for name in document:
        if name not in legal:
            raise ValueError(f"{prefix}{name} is not a field: legal are {', '.join(legal)}")
    for name in legal:
        if name not in document:
            raise ValueError(f"{prefix}{name} is missing")
