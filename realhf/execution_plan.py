"""ExecutionPlan: the layout and the micro-batching of every call, read from and written to YAML."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import inf
from pathlib import Path
from typing import Any

from realhf.errors import shown
from realhf.graph import DataflowGraph
from realhf.layout import Layout
from realhf.user_input.field_types import is_whole, require
from realhf.user_input.shipped import dump_yaml, load_yaml
from realhf.user_input.suggest import did_you_mean

OPTIONS = ("recompute", "offload")
"""Options that a plan can switch on for a call; both save memory and cost time."""


@dataclass(frozen=True)
class CallPlan:
    """The layout and the options of one call."""

    layout: Layout
    micro_batch_tokens: int = 16384  # The most tokens in one forward or backward pass on a rank.
    max_rows: int | None = None  # The most sequences that a rank generates at once; None: the experiment's.
    kv_cache_gib: float | None = None
    """GiB of a rank for keys and values of a generation, at most the experiment's; None: the experiment's, or
    enough for `max_rows` sequences of full length. With less, sequences wait or are computed again."""
    ring: int | None = None
    """Slices of a host call's environments that take turns; None: as many as the experiment says."""
    recompute: bool = False  # Keep only each block's input in a train step, and compute the block again.
    offload: bool = False  # Keep the frozen role's weights in host memory except while the call runs.
    predicted: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        counts = {"micro_batch_tokens": self.micro_batch_tokens, "max_rows": self.max_rows, "ring": self.ring}
        for name, num in counts.items():
            if num is not None and not is_whole(num):
                require(False, name, shown(num), "be a whole number of at least 1")
        gib = self.kv_cache_gib
        is_number = isinstance(gib, int | float) and not isinstance(gib, bool)
        is_legal = gib is None or (is_number and 0 < gib < inf)
        if not is_legal:
            require(False, "kv_cache_gib", shown(gib), "be a number of GiB above 0")
        for name in OPTIONS:
            if not isinstance(value := getattr(self, name), bool):
                require(False, name, shown(value), "be true or false")

    @property
    def options(self) -> tuple[str, ...]:
        """Return the names of the options that are switched on."""
        return tuple(name for name in OPTIONS if getattr(self, name))


@dataclass(frozen=True)
class ExecutionPlan:
    """The CallPlan of every call. `predicted` holds the planner's figures for the whole step, if any."""

    calls: Mapping[str, CallPlan]
    predicted: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, call: str) -> CallPlan:
        return self.calls[call]

    @property
    def num_ranks(self) -> int:
        """Size of the smallest world that has every rank of the plan."""
        return 1 + max(max(call.layout.ranks) for call in self.calls.values())

    def check(
        self, graph: DataflowGraph, *, world_size: int, also: Sequence[str] = (),
        absent: Mapping[str, str] | None = None,
    ) -> None:
        """Raise ValueError unless every call has a layout on ranks that exist; `also`: more legal names.

        `absent` says of calls that the experiment could have why it has them not.
        """
        names = [call.name for call in graph.calls]
        if unknown := [name for name in self.calls if name not in names and name not in also]:
            where = f"calls.{unknown[0]}: the experiment has no such call"
            there_are = f"its calls are {', '.join(names)}"
            if len(unknown) > 1:
                others = f"nor {' and '.join(unknown[1:])}"
                raise ValueError(f"{where}, {others}; {there_are}: is the plan for another algorithm?")
            if (why := (absent or {}).get(unknown[0])) is not None:
                raise ValueError(f"{where}, as {why}, or remove {unknown[0]} from the plan; {there_are}")
            raise ValueError(f"{where}{did_you_mean(unknown[0], names)}; {there_are}")
        for call in graph.calls:
            where = f"calls.{call.name}"
            if call.name not in self.calls:
                raise ValueError(
                    f"{where} is missing: the plan must give every call of the experiment a layout")
            layout = self[call.name].layout
            if beyond := [rank for rank in layout.ranks if rank >= world_size]:
                there_are = f"there are {world_size} ranks (0 to {world_size - 1})"
                raise ValueError(f"{where}.layout {layout} uses rank {beyond[0]}, but {there_are}")
            if call.kind == "host" and layout.strategy.num_ranks != layout.dp:
                raise ValueError(f"{where}.layout {layout.strategy}: a host call can be split over dp only")
            for name, what in (("max_rows", "rows"), ("kv_cache_gib", "a cache")):
                if getattr(self[call.name], name) is not None and call.kind != "generate":
                    why = f"the call's kind is {call.kind}; only a generate call has {what}"
                    raise ValueError(f"{where}.{name}: {why}")
            if self[call.name].ring is not None and not getattr(call.work, "asks", ()):
                raise ValueError(f"{where}.ring: only a host call that asks others has environments in one")
            if self[call.name].recompute and call.kind != "train_step":
                why = "only a train_step keeps what it could recompute"
                raise ValueError(f"{where}.recompute: the call's kind is {call.kind}; {why}")

    def with_rows_and_caches(self, graph: DataflowGraph) -> DataflowGraph:
        """Return the graph with the plan's `max_rows` and `kv_cache_gib` in its generating calls.

        The planner has counted the memory of these rows, so the calls may take all free memory for them if
        nobody says how much. A cache is at most that of the experiment.
        """
        changed = []
        for call in graph.calls:
            if (rows := self[call.name].max_rows) is not None:
                call = call.with_work(max_rows=rows, takes_free_memory=True)
            if (gib := self[call.name].kv_cache_gib) is not None:
                call = call.with_work(kv_cache_gib=min(gib, getattr(call.work, "kv_cache_gib", None) or gib))
            changed.append(call)
        return graph.replace(*changed)

    @classmethod
    def single(cls, graph: DataflowGraph, layout: Layout, **fields: Any) -> "ExecutionPlan":
        """Return the plan that runs every call in one layout, and host calls on its first rank."""
        first = Layout.parse(f"d1@{layout.ranks[0]}")
        return cls({c.name: CallPlan(first if c.kind == "host" else layout, **fields) for c in graph.calls})

    @classmethod
    def from_dict(cls, document: Any) -> "ExecutionPlan":
        entries = document.get("calls") if isinstance(document, dict) else None
        if not isinstance(entries, dict) or not entries:
            raise ValueError("calls is missing: a plan is a mapping `calls: {call name: {layout: d2t4@0-7}}`")
        _refuse_unknown(document, ("calls", "predicted"))
        calls = {}
        for name, entry in entries.items():
            entry = entry if isinstance(entry, dict) else {}
            _refuse_split_layout(entry, f"calls.{name}")
            _refuse_unknown(entry, [part.name for part in fields(CallPlan)], f"calls.{name} has an ")
            if "layout" not in entry:
                raise ValueError(f"calls.{name}.layout is missing: write for example {{layout: d2t4@0-7}}")
            try:
                layout = Layout.parse(entry["layout"])
                if layout.form:
                    why = "the weights of a generation belong to the experiment (generation_weights)"
                    raise ValueError(f"layout ends in /{layout.form}: leave it out, as {why}")
                calls[name] = CallPlan(**{**entry, "layout": layout})
            except ValueError as error:
                raise ValueError(f"calls.{name}: {error}") from error
        return cls(calls, document.get("predicted", {}))

    def to_dict(self) -> dict[str, Any]:
        """Return the document of the plan, without fields that are unset, switched off or not predicted."""
        calls = {}
        for name, call in self.calls.items():
            entry = {field: value for field, value in vars(call).items() if value not in (None, False, {})}
            calls[name] = entry | {"layout": str(call.layout)}
        return {"calls": calls, **({"predicted": dict(self.predicted)} if self.predicted else {})}

    @classmethod
    def load(cls, name: str) -> "ExecutionPlan":
        """Load a plan file, or a shipped plan by its short name. UserErrors name the file and the field."""
        return load_yaml(name, cls.from_dict, kind="plans", what="plan")

    def save(self, path: Path) -> None:
        path.write_text(dump_yaml(self.to_dict()))


def home_layouts(graph: DataflowGraph, plan: ExecutionPlan, roles: Iterable[str]) -> dict[str, Layout]:
    """Return the home of each role, the layout that owns its parameters.

    It is the layout in which the role trains, or else that of its first call.
    Raises ValueError when a role has no call, or trains in two layouts.
    """
    homes: dict[str, Layout] = {}
    for role in roles:
        calls = graph.using(role)
        if not calls:
            raise ValueError(f"role {role!r} has no call in the graph")
        training = [call for call in calls if call.kind == "train_step" and call.role == role]
        layouts = {plan[call.name].layout for call in training}
        if len(layouts) > 1:
            where = " and ".join(f"{call.name} at {plan[call.name].layout}" for call in training)
            raise ValueError(f"role {role!r} has two homes: {where}; a role must train in one layout")
        homes[role] = plan[(training or calls)[0].name].layout
    return homes


def _refuse_unknown(entry: Mapping[str, Any], legal: Sequence[str], prefix: str = "") -> None:
    if unknown := sorted(map(str, set(entry) - set(legal))):
        meant = did_you_mean(unknown[0], legal)
        raise ValueError(f"{prefix}unknown field {unknown[0]!r}{meant}: legal are {', '.join(legal)}")


def _refuse_split_layout(entry: Mapping[str, Any], where: str) -> None:
    """Raise ValueError for `{layout: d2@0,1}`, which YAML reads as a layout `d2@0` and a field `1`."""
    ranks = [str(name) for name, value in entry.items() if value is None and str(name)[:1].isdigit()]
    if ranks and isinstance(entry.get("layout"), str):
        whole = ",".join([entry["layout"], *ranks])
        raise ValueError(f"{where}.layout has commas: put it in quotes, {{layout: \"{whole}\"}}")
