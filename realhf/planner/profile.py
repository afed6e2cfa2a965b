"""The profile of a machine that `realhf profile` measured, and the rates that look times up in it.

A profile is a YAML file. It describes the machine as a cluster, and has tables of links and calls, and
tables per model shape, dtype and tensor-parallel size. A table has seconds at points of one or two
quantities; `LINKS`, `CALLS` and `OF_MODEL` list the tables and their axes. Any table may be missing.
"""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from realhf.cluster import Cluster
from realhf.field_types import check_fields
from realhf.model_config import ModelConfig
from realhf.planner.problem import ITEMSIZE, ModelRole
from realhf.planner.rates import Cost, Rates, SharedPrompts, Span
from realhf.shipped import load_yaml

SHAPE = (
    "family", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size",
    "tie_word_embeddings",
)  # fmt: skip
"""The fields of a ModelConfig that tell shapes apart. The number of layers is not among them,
since tables are about one block."""
OUTPUTS = ("logprobs", "values", "scores")
_COLLECTIVE = ("ranks", "bytes")
LINKS = {
    "all_reduce": _COLLECTIVE, "all_gather": _COLLECTIVE, "reduce_scatter": _COLLECTIVE, "send": ("bytes",),
    "samples": ("bytes",),
}  # fmt: skip
"""Tables about links: collectives and messages of tensors; `samples` is for the samples between calls."""
CALLS = dict.fromkeys(("generate", "forward", "train_step"), ("samples",))
"""Tables about the time that a call takes besides its passes."""
_PASS = ("sequence_tokens", "tokens")
OF_MODEL = {
    # One block: forward without autograd, and what forward and backward with gradient accumulation take more.
    "block_forward": _PASS, "block_backward": _PASS,
    # The time of a micro-batch besides its blocks, by the number of positions that have an output.
    **{f"{output}_{way}": ("tokens",) for output in OUTPUTS for way in ("forward", "backward")},
    # A decode step where every row has its own prompt, and a block of one where all rows share a prompt.
    "decode_block": ("context_tokens", "rows"), "decode_head": ("rows",),
    "decode_shared": ("context_tokens", "rows"),
    "update": ("parameters",), "zero_gradients": ("parameters",),
}  # fmt: skip


@dataclass(frozen=True)
class Table:
    """Seconds at points of one or two quantities. `axes` maps their names to rising values.

    Values are linear between the points. Beyond them the last axis continues as in its last interval, while
    the first of two axes stays at its end.
    """

    axes: Mapping[str, tuple[float, ...]]
    seconds: Any  # A list per axis, nested in the order of the axes.

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
        given = check_fields(document, (*axes, "seconds"), where=where)
        points = {name: tuple(_numbers(given[name], f"{where}.{name}")) for name in axes}
        for name, values in points.items():
            if not values or list(values) != sorted(set(values)):
                raise ValueError(f"{where}.{name} is {list(values)}: it must hold rising numbers")
        seconds = _nested(given["seconds"], [len(v) for v in points.values()], f"{where}.seconds")
        return cls(points, seconds)


def _line(x: Sequence[float], y: np.ndarray, at: Any) -> Any:
    """Return a piecewise linear interpolation, which is never below a quarter of the least value."""
    if len(x) == 1:
        return at * 0 + y[0]
    places = np.clip(np.searchsorted(x, at, side="right") - 1, 0, len(x) - 2)
    slopes = np.diff(y) / np.diff(x)
    return np.maximum(y.min() / 4, y[places] + (at - np.take(x, places)) * slopes[places])


@dataclass(frozen=True)
class ModelTables:
    """Tables of one model shape in one dtype under one tensor-parallel size."""

    shape: Mapping[str, Any]
    dtype: str
    tp: int
    tables: Mapping[str, Table]

    @property
    def key(self) -> tuple[Any, ...]:
        return (*(self.shape[name] for name in SHAPE), self.dtype, self.tp)

    @classmethod
    def from_dict(cls, document: Any, where: str) -> "ModelTables":
        given = check_fields(document, [f.name for f in fields(cls)], where=where)
        shape = check_fields(given["shape"], SHAPE, where=f"{where}.shape")
        for name, value in shape.items():
            if not isinstance(value, str | int):
                shown = textwrap.shorten(repr(value), 60)
                raise ValueError(f"{where}.shape.{name} is {shown}: it must be as in the model's config")
        if str(given["dtype"]) not in ITEMSIZE:
            raise ValueError(f"{where}.dtype is {given['dtype']!r}: legal are {', '.join(ITEMSIZE)}")
        if not isinstance(tp := given["tp"], int) or isinstance(tp, bool) or tp < 1:
            raise ValueError(f"{where}.tp is {tp!r}: it must be a whole number of at least 1")
        return cls(shape, given["dtype"], tp, _tables(given["tables"], OF_MODEL, f"{where}.tables"))


@dataclass(frozen=True)
class Profile:
    """A set of measurements with its date; `machine` describes what the timings depend on."""

    date: str
    machine: Mapping[str, Any]
    cluster: Cluster
    links: Mapping[str, Table] = field(default_factory=dict)
    calls: Mapping[str, Table] = field(default_factory=dict)
    models: Sequence[ModelTables] = ()

    @classmethod
    def from_dict(cls, document: Any) -> "Profile":
        if isinstance(document, dict) and "wires" in document and "links" not in document:
            document = {**document, "links": document["wires"]}  # Older profiles call the links so.
            del document["wires"]
        legal = ("date", "machine", "cluster", "links", "calls", "models")
        given = check_fields(document, legal, whole="the profile")
        try:
            cluster = Cluster.from_dict(given["cluster"])
        except ValueError as error:
            raise ValueError(f"cluster: {error}") from error
        if "device_type" not in given["cluster"]:  # Older profiles lack it.
            raise ValueError("cluster.device_type is missing: measure again with `realhf profile`")
        if not isinstance(given["models"], list):
            raise ValueError("models must be a list of tables per model shape")
        models = [ModelTables.from_dict(entry, f"models[{i}]") for i, entry in enumerate(given["models"])]
        links = _tables(given["links"], LINKS, "links")
        calls = _tables(given["calls"], CALLS, "calls")
        return cls(str(given["date"]), given["machine"], cluster, links, calls, models)

    def to_dict(self) -> dict[str, Any]:
        cluster = {name: value for name, value in asdict(self.cluster).items() if value is not None}
        models = [vars(model) | {"tables": _plain(model.tables)} for model in self.models]
        return {
            "date": self.date, "machine": dict(self.machine), "cluster": cluster,
            "links": _plain(self.links), "calls": _plain(self.calls), "models": models,
        }  # fmt: skip

    @classmethod
    def load(cls, name: str) -> "Profile":
        """Read a profile from its file. Raises UserErrors that name the file and the field."""
        return load_yaml(name, cls.from_dict, what="profile")

    def save(self, path: Path) -> None:
        path.write_text(yaml.safe_dump(self.to_dict(), sort_keys=False, default_flow_style=None, width=110))


class ProfiledRates(Rates):
    """Rates from the tables of a profile.

    Whatever was not measured (a shape, dtype, tp size or number of ranks) comes from the roofline of
    `cluster`, which is the profile's own unless another is given. The backward pass of a block includes the
    accumulation of its gradients, and that of a head the rest of a micro-batch.
    """

    def __init__(self, profile: Profile, cluster: Cluster | None = None) -> None:
        super().__init__(cluster or profile.cluster)
        self._profile = profile
        self._links = profile.links
        self._calls = profile.calls
        self._models = {tables.key: tables.tables for tables in profile.models}

    def on(self, cluster: Cluster) -> "ProfiledRates":
        return ProfiledRates(self._profile, cluster)

    def call_seconds(self, kind: str, *, samples: float) -> float:
        table = self._calls.get(kind)
        return super().call_seconds(kind, samples=samples) if table is None else table.at(samples)

    def all_reduce(self, num_bytes: Any, span: Span) -> Any:
        return self._collective("all_reduce", num_bytes, span)

    def reduce_scatter(self, num_bytes: Any, span: Span) -> Any:
        return self._collective("reduce_scatter", num_bytes, span)

    def all_gather(self, num_bytes: Any, span: Span) -> Any:
        return self._collective("all_gather", num_bytes, span)

    def _collective(self, name: str, num_bytes: Any, span: Span) -> Any:
        table = self._links.get(name)
        if table is None or span.hosts > 1 or span.size not in table.axes["ranks"]:
            return getattr(super(), name)(num_bytes, span)
        return table.at(span.size, num_bytes)

    def send(self, num_bytes: float, *, within_host: bool) -> float:
        if within_host and "send" in self._links:
            return self._links["send"].at(num_bytes)
        return super().send(num_bytes, within_host=within_host)

    def samples(self, num_bytes: float) -> float:
        table = self._links.get("samples")
        return super().samples(num_bytes) if table is None else table.at(num_bytes)

    def block(
        self, role: ModelRole, tp: Span, ep: Span, *, tokens: float, squared: float, backward: bool = False
    ) -> Cost:
        table = self._of(role, tp, "block_backward" if backward else "block_forward", ep)
        if table is None:
            return super().block(role, tp, ep, tokens=tokens, squared=squared, backward=backward)
        seconds = table.at(squared / max(tokens, 1.0), tokens)
        if role.lora is not None:  # The table was measured without adapters.
            block = partial(super().block, tokens=tokens, squared=squared, backward=backward)
            seconds *= block(role, tp, ep).compute / block(replace(role, lora=None), tp, ep).compute
        communication = 0.0
        if tp.size > 1:
            communication = 2 * self.all_reduce(tokens * role.config.hidden_size * role.itemsize, tp)
        communication = min(communication, seconds / 2)
        return Cost(seconds - communication, communication)

    def head(
        self, role: ModelRole, tp: Span, *, tokens: float, output: str, backward: bool = False
    ) -> Cost:
        table = self._of(role, tp, f"{output}_{'backward' if backward else 'forward'}")
        if table is None:
            return super().head(role, tp, tokens=tokens, output=output, backward=backward)
        head = partial(super().head, tp=tp, tokens=tokens, output=output, backward=backward)
        return Cost(table.at(tokens) + _widening(lambda role: head(role).compute, role))

    def decode_block(
        self, role: ModelRole, tp: Span, ep: Span, *, rows: np.ndarray, context: np.ndarray,
        shared: SharedPrompts | None = None, longest: np.ndarray | None = None, is_alone: bool | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
        own, alike = (self._of(role, tp, name, ep) for name in ("decode_block", "decode_shared"))
        if own is None:
            return super().decode_block(
                role, tp, ep, rows=rows, context=context, shared=shared, longest=longest, is_alone=is_alone)
        seconds = own.at(context, rows)
        if shared is not None and alike is not None:
            # The time is linear in the number of prompts, from one per row down to one in all.
            prompt = np.full_like(context, shared.tokens)
            most = np.maximum(0.0, own.at(prompt, rows) - alike.at(prompt, rows))
            seconds -= most * (rows - shared.prompts) / np.maximum(1.0, rows - 1)
        communication = np.zeros_like(seconds)
        if tp.size > 1:
            least = 2 * self.all_reduce(0.0, tp)
            communication = np.minimum(least, seconds / 2)
        return seconds - communication, communication

    def decode_head(self, role: ModelRole, tp: Span, *, rows: np.ndarray) -> np.ndarray:
        table = self._of(role, tp, "decode_head")
        head = partial(super().decode_head, tp=tp, rows=rows)
        return head(role) if table is None else table.at(rows) + _widening(head, role)

    def accumulate(self, role: ModelRole, params: float) -> float:
        measured = self._of(role, Span(1, 1), "block_backward") is not None
        return 0.0 if measured else super().accumulate(role, params)

    def update(self, role: ModelRole, *, owned: float) -> float:
        """Return the seconds of an optimizer step.

        The step was measured without gradients and then also sets them to zero; after a backward pass it does
        not.
        """
        step, zero = (self._of(role, Span(1, 1), name) for name in ("update", "zero_gradients"))
        if step is None or zero is None:
            return super().update(role, owned=owned)
        return max(0.0, step.at(owned) - zero.at(owned))

    def _of(self, role: ModelRole, tp: Span, name: str, ep: Span | None = None) -> Table | None:
        if tp.hosts > 1 or (ep is not None and ep.size > 1):
            return None
        return self._models.get((*shape_of(role.config), role.dtype, tp.size), {}).get(name)


def _widening(seconds: Callable[[ModelRole], Any], role: ModelRole) -> Any:
    """Return how much longer a head in float32 takes, by the roofline: tables are about heads in the model's
    dtype."""
    return seconds(role) - seconds(replace(role, float32_head=False)) if role.widens_head else 0.0


@lru_cache(maxsize=256)
def shape_of(config: ModelConfig) -> tuple[Any, ...]:
    return tuple(getattr(config, name) for name in SHAPE)


def _plain(tables: Mapping[str, Table]) -> dict[str, Any]:
    return {name: table.to_dict() for name, table in tables.items()}


def _tables(document: Any, legal: Mapping[str, Sequence[str]], where: str) -> dict[str, Table]:
    given = check_fields(document, tuple(legal), optional=legal, where=where)
    return {name: Table.from_dict(entry, legal[name], f"{where}.{name}") for name, entry in given.items()}


def _numbers(values: Any, where: str) -> list[float]:
    if not isinstance(values, list):
        raise ValueError(f"{where} is {textwrap.shorten(repr(values), 60)}: it must be a list of numbers")
    for i, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise ValueError(f"{where}[{i}] is {value!r}: it must be a number of at least 0")
    return values


def _nested(values: Any, sizes: Sequence[int], where: str) -> list[Any]:
    if not isinstance(values, list) or len(values) != sizes[0]:
        raise ValueError(f"{where} must be a list of {sizes[0]}, one entry per point of its axis")
    if len(sizes) == 1:
        return _numbers(values, where)
    return [_nested(row, sizes[1:], f"{where}[{i}]") for i, row in enumerate(values)]
