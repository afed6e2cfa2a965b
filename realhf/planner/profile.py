"""The profile of a machine that `realhf profile` measured.

A profile is a YAML file. It describes the machine as a cluster, and has tables of links, of calls, and of
model shapes. A table has seconds at points of one or two quantities; `LINKS`, `CALLS` and `OF_MODEL` list the
tables and their axes. Any table may be missing. Where devices share cores, seconds are those of a device with
a core of its own.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from realhf.calls import Output
from realhf.cluster import Cluster
from realhf.errors import shown
from realhf.models.model_config import ModelConfig
from realhf.planner.problem import ITEMSIZE
from realhf.user_input.field_types import check_fields
from realhf.user_input.shipped import dump_yaml, load_yaml

_EXPERTS = ("num_experts", "num_experts_per_token", "expert_width", "shared_width")
SHAPE = (
    "family", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size",
    "tie_word_embeddings", *_EXPERTS)
"""The fields of a ModelConfig and of its experts that tell shapes apart; those of experts are 0 in a model
without any. The number of layers is not among them, since tables are about one block."""
_COLLECTIVE = ("ranks", "bytes")
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
LINKS = {**dict.fromkeys(COLLECTIVES, _COLLECTIVE), "send": ("bytes",), "samples": ("bytes",)}
"""Tables about links: collectives and messages of tensors; `samples` is for the samples between calls."""
MEMORY = ("context_bytes", "communicator_bytes")
"""The memory of a device that is taken before any tensor is, and that of one more group of all ranks."""
CALM = ("passes", "decode")
"""The seconds of work on as many processes of a host as it has cores, relative to those on all of them."""
_AGAIN = "measure again with `realhf profile`"
_QUIET = "measure again when it is quiet"
CALLS = dict.fromkeys(("generate", "forward", "train_step"), ("samples",))
"""Tables about the time that a call takes besides its passes."""
_PASS = ("sequence_tokens", "tokens")
OF_MODEL = {
    # One block: forward without autograd, and what forward and backward with gradient accumulation take more.
    "block_forward": _PASS, "block_backward": _PASS,
    # The time of a micro-batch besides its blocks, by the number of positions that have an output.
    **{f"{output}_{way}": ("tokens",) for output in Output for way in ("forward", "backward")},
    # A decode step where every row has its own prompt, and a block of one where all rows share a prompt.
    "decode_block": ("context_tokens", "rows"), "decode_head": ("rows",),
    # The time that a pipeline stage takes in a decode step of a cohort besides its blocks and head.
    "decode_hop": ("rows",),
    "decode_shared": ("context_tokens", "rows"),
    # A block of one with weights in int8, at the shortest of the contexts.
    "decode_int8": ("rows",),
    # What a CPU does before a generation: large weights are packed.
    "packing": ("parameters",),
    "update": ("parameters",), "zero_gradients": ("parameters",)}


_CONTINUED = 4.0  # See Table.reach.
DISTURBED = 1.5
"""If whole calls take so many times longer, or shorter, than their parts, other work disturbed them."""
NOISY = 0.1  # Median noise above which a profile is hardly of use.


@dataclass(frozen=True)
class Table:
    """Seconds at points of one or two quantities; `axes` maps their names to rising values.

    Values are linear between the points. Beyond them the last axis continues as in its last interval, while
    the first of two axes stays at its end.
    """

    axes: Mapping[str, tuple[float, ...]]
    seconds: Any  # A list per axis, nested in the order of the axes.

    @property
    def reach(self) -> tuple[float, ...]:
        """The largest value of each axis at which the table is used: `_CONTINUED` times the last point on the
        last axis, and the last point itself on the first of two."""
        *across, last = self.axes.values()
        return (*(points[-1] for points in across), _CONTINUED * last[-1])

    def at(self, *point: Any) -> Any:
        """Return the seconds at one point, given as one number per axis, or at the points in one array per
        axis."""
        *across, last = self.axes.values()
        lines = [_line(last, row, point[-1]) for row in np.atleast_2d(self.seconds)]
        if not across:
            return lines[0]
        # Each line counts by how near its place is: 1 at the place itself, 0 at the places beside it.
        shares = [np.interp(point[0], across[0], unit) for unit in np.eye(len(lines))]
        return sum(share * line for share, line in zip(shares, lines, strict=True))

    def to_dict(self) -> dict[str, Any]:
        return {name: list(values) for name, values in self.axes.items()} | {"seconds": self.seconds}

    @classmethod
    def from_dict(cls, document: Any, axes: Sequence[str], where: str) -> "Table":
        content = check_fields(document, (*axes, "seconds"), where=where)
        points = {name: tuple(_numbers(content[name], f"{where}.{name}")) for name in axes}
        for name, values in points.items():
            if not values or list(values) != sorted(set(values)):
                raise ValueError(f"{where}.{name} is {list(values)}: it must hold rising numbers")
        seconds = _nested(content["seconds"], [len(v) for v in points.values()], f"{where}.seconds")
        return cls(points, seconds)


def _line(x: Sequence[float], y: np.ndarray, at: Any) -> Any:
    """Return a piecewise linear interpolation, which is never below a quarter of the least value."""
    if len(x) == 1:
        return at * 0 + y[0]
    places = np.clip(np.searchsorted(x, at, side="right") - 1, 0, len(x) - 2)
    slopes = np.diff(y) / np.diff(x)
    return np.maximum(y.min() / 4, y[places] + (at - np.take(x, places)) * slopes[places])


@dataclass(frozen=True)
class LinkTables:
    """Tables of messages inside a host, or of messages among ranks on several hosts.

    `noise` has the relative interquartile range of repeated timings, by table.
    """

    hosts: int
    tables: Mapping[str, Table]
    noise: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, document: Any, where: str) -> "LinkTables":
        content = check_fields(document, ("hosts", "tables", "noise"), optional=("noise",), where=where)
        hosts = _count(content["hosts"], f"{where}.hosts")
        tables = _tables(content["tables"], LINKS, f"{where}.tables")
        return cls(hosts, tables, _shares(content.get("noise", {}), f"{where}.noise"))


@dataclass(frozen=True)
class ModelTables:
    """Tables of one model shape in one dtype, split by tensor and expert parallelism inside a host.

    `noise` has the relative interquartile range of repeated timings, by the kind of work. `whole_calls` has,
    by their kind, the measured seconds of calls relative to what the tables add up to.
    """

    shape: Mapping[str, Any]
    dtype: str
    tp: int
    tables: Mapping[str, Table]
    ep: int = 1
    noise: Mapping[str, float] = field(default_factory=dict)
    whole_calls: Mapping[str, float] = field(default_factory=dict)

    @property
    def key(self) -> tuple[Any, ...]:
        return (*(self.shape[name] for name in SHAPE), self.dtype)

    @property
    def disturbance(self) -> float:
        """The largest factor by which whole calls took longer or shorter than their parts; 1 without any."""
        return max((_apart(ratio) for ratio in self.whole_calls.values()), default=1.0)

    @classmethod
    def from_dict(cls, document: Any, where: str) -> "ModelTables":
        legal = [f.name for f in fields(cls)]
        content = check_fields(document, legal, optional=("ep", "noise", "whole_calls"), where=where)
        shape = check_fields(content["shape"], SHAPE, optional=_EXPERTS, where=f"{where}.shape")
        for name, value in shape.items():
            if not isinstance(value, str | int):
                raise ValueError(
                    f"{where}.shape.{name} is {shown(value)}: it must be as in the model's config")
        if str(content["dtype"]) not in ITEMSIZE:
            raise ValueError(f"{where}.dtype is {shown(content['dtype'])}: legal are {', '.join(ITEMSIZE)}")
        tp, ep = (_count(content.get(name, 1), f"{where}.{name}") for name in ("tp", "ep"))
        tables = _tables(content["tables"], OF_MODEL, f"{where}.tables")
        noise = _shares(content.get("noise", {}), f"{where}.noise")
        kinds = tuple(CALLS)
        whole = check_fields(
            content.get("whole_calls", {}), kinds, optional=kinds, where=f"{where}.whole_calls")
        _numbers(list(whole.values()), f"{where}.whole_calls")
        return cls(dict.fromkeys(_EXPERTS, 0) | shape, content["dtype"], tp, tables, ep, noise, whole)


@dataclass(frozen=True)
class Profile:
    """A set of measurements with its date; `machine` describes what the timings depend on."""

    date: str
    machine: Mapping[str, Any]
    cluster: Cluster
    links: Sequence[LinkTables] = ()
    calls: Mapping[str, Table] = field(default_factory=dict)
    models: Sequence[ModelTables] = ()
    memory: Mapping[str, float] = field(default_factory=dict)
    calm: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, document: Any) -> "Profile":
        legal = [f.name for f in fields(cls)]
        content = check_fields(document, legal, optional=("memory", "calm"), whole="the profile")
        try:
            cluster = Cluster.from_dict(content["cluster"])
        except ValueError as error:
            raise ValueError(f"cluster: {error}") from error
        if "device_type" not in content["cluster"]:  # Older profiles lack it.
            raise ValueError(f"cluster.device_type is missing: {_AGAIN}")
        if isinstance(content["links"], dict):
            raise ValueError(f"links is of an older form: {_AGAIN}")
        if not isinstance(content["machine"], dict):
            raise ValueError(f"machine is {shown(content['machine'])}: it must map names to values")
        for name in ("links", "models"):
            if not isinstance(content[name], list):
                raise ValueError(f"{name} must be a list, with tables in each entry")
        links = [LinkTables.from_dict(entry, f"links[{i}]") for i, entry in enumerate(content["links"])]
        models = [ModelTables.from_dict(entry, f"models[{i}]") for i, entry in enumerate(content["models"])]
        calls = _tables(content["calls"], CALLS, "calls")
        memory = check_fields(content.get("memory", {}), MEMORY, optional=MEMORY, where="memory")
        _numbers(list(memory.values()), "memory")
        calm = check_fields(content.get("calm", {}), CALM, optional=CALM, where="calm")
        _numbers(list(calm.values()), "calm")
        return cls(str(content["date"]), content["machine"], cluster, links, calls, models, memory, calm)

    def to_dict(self) -> dict[str, Any]:
        cluster = {name: value for name, value in asdict(self.cluster).items() if value is not None}
        parts = {
            name: [vars(entry) | {"tables": _plain(entry.tables)} for entry in getattr(self, name)]
            for name in ("links", "models")}
        return {
            "date": self.date, "machine": dict(self.machine), "cluster": cluster, "links": parts["links"],
            "calls": _plain(self.calls), "models": parts["models"], "memory": dict(self.memory),
            "calm": dict(self.calm)}

    @classmethod
    def load(cls, name: str) -> "Profile":
        """Read a profile from its file. Raises UserErrors that name the file and the field."""
        return load_yaml(name, cls.from_dict, what="profile")

    def save(self, path: Path) -> None:
        path.write_text(dump_yaml(self.to_dict(), default_flow_style=None, width=110))

    def noise(self) -> tuple[float, str]:
        """Return the median noise of all timings, and a sentence about it."""
        noises = []
        for entry in self.links:
            where = f"among ranks of {entry.hosts} host{'s'[: entry.hosts > 1]}"
            noises += [(noise, f"{name} {where}") for name, noise in entry.noise.items()]
        for tables in self.models:
            where = f"in {tables.dtype} with tp={tables.tp} and ep={tables.ep}"
            noises += [(noise, f"{name} {where}") for name, noise in tables.noise.items()]
        if not noises:
            return 0.0, "the profile does not say how noisy its timings were"
        median = statistics.median(noise for noise, _ in noises)
        most, where = max(noises)
        spread = f"repeated timings vary by {median:.0%} (median of interquartile ranges)"
        text = f"{spread}, at most by {most:.0%}: {where}"
        if median > NOISY:
            busy = f"load {self.machine['load_before']}" if "load_before" in self.machine else "other work"
            text += f"; the machine was not quiet ({busy}): {_QUIET}"
        return median, text

    def disturbed(self) -> str | None:
        """Return a sentence if whole calls took much longer or shorter than what their parts add up to."""
        ratios = [(ratio, kind, entry) for entry in self.models for kind, ratio in entry.whole_calls.items()]
        if not ratios:
            return None
        ratio, kind, entry = max(ratios, key=lambda item: _apart(item[0]))
        if _apart(ratio) <= DISTURBED:
            return None
        where = f"{kind} in {entry.dtype} with tp={entry.tp} and ep={entry.ep}"
        took = f"a whole call took {ratio:.2f} times as long as its parts ({where})"
        return f"{took}; the machine was busy, or parts do not add up to calls here: {_QUIET}"

    def require_serves(self, cluster: Cluster) -> None:
        """Raise ValueError if this profile says nothing about the devices of a cluster."""
        here = self.cluster
        if (num_kinds := len(cluster.kinds)) > 1:
            theirs = f"the cluster has {num_kinds} kinds of hosts"
            raise ValueError(f"it describes one kind of hosts and {theirs}: leave --profile out")
        if here.device_type != cluster.device_type:
            theirs = f"the cluster has {cluster.device_type} devices"
            raise ValueError(f"it was measured on {here.device_type} devices, {theirs}")
        if here.accelerator_name != cluster.accelerator_name:
            theirs = f"the cluster has {cluster.accelerator_name}"
            raise ValueError(f"it was measured on {here.accelerator_name}, {theirs}")
        threads = self.machine.get("threads_per_process")
        if cluster.device_type == "cpu" and threads is not None and cluster.cores_per_host is not None:
            wanted = max(1, cluster.cores_per_host // cluster.devices_per_host)
            if threads != wanted:
                number = cluster.devices_per_host
                what = f"it was measured with {here.devices_per_host} processes of {threads} threads"
                asked = f"{number} processes on {cluster.cores_per_host} cores have {wanted}"
                how = f"measure with --nproc {number}, and without OMP_NUM_THREADS"
                raise ValueError(f"{what}, and {asked}: {how}")


@lru_cache(maxsize=256)
def shape_of(config: ModelConfig) -> tuple[Any, ...]:
    """Return the values of SHAPE."""
    experts = tuple(0 if config.moe is None else getattr(config.moe, name) for name in _EXPERTS)
    return (*(getattr(config, name) for name in SHAPE if name not in _EXPERTS), *experts)


def _apart(ratio: float) -> float:
    """Return how many times larger or smaller than 1 a ratio is."""
    return max(ratio, 1 / max(ratio, 1e-9))


def _plain(tables: Mapping[str, Table]) -> dict[str, Any]:
    return {name: table.to_dict() for name, table in tables.items()}


def _tables(document: Any, legal: Mapping[str, Sequence[str]], where: str) -> dict[str, Table]:
    content = check_fields(document, tuple(legal), optional=legal, where=where)
    return {name: Table.from_dict(entry, legal[name], f"{where}.{name}") for name, entry in content.items()}


def _count(value: Any, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{where} is {shown(value)}: it must be a whole number of at least 1")
    return value


def _shares(document: Any, where: str) -> dict[str, float]:
    if not isinstance(document, dict):
        raise ValueError(f"{where} is {shown(document)}: it must map names to numbers")
    _numbers(list(document.values()), where)
    return document


def _numbers(values: Any, where: str) -> list[float]:
    if not isinstance(values, list):
        raise ValueError(f"{where} is {shown(values)}: it must be a list of numbers")
    for i, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise ValueError(f"{where}[{i}] is {shown(value)}: it must be a number of at least 0")
    return values


def _nested(values: Any, sizes: Sequence[int], where: str) -> list[Any]:
    if not isinstance(values, list) or len(values) != sizes[0]:
        raise ValueError(f"{where} must be a list of {sizes[0]}, one entry per point of its axis")
    if len(sizes) == 1:
        return _numbers(values, where)
    return [_nested(row, sizes[1:], f"{where}[{i}]") for i, row in enumerate(values)]
