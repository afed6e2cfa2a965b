"""FunctionCall and DataflowGraph: one step of training as a graph of calls. Free of models."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import networkx as nx

KINDS = {
    "generate": "Generate",
    "forward": "LogProbs, TopLogProbs, Values or Scores, or for a ModuleRole ForwardFunction",
    "train_step": "TrainStep, or for a ModuleRole TrainFunction",
    "host": "HostFunction",
}
"""Kinds of calls, and the classes of `realhf.calls` that describe the work of each."""


@dataclass(frozen=True)
class Work:
    """The base class of what a call does, with its settings; `realhf.calls` has the classes of each kind."""

    kind: ClassVar[str]

    @property
    def num_minibatches(self) -> int:
        """Number of parts into which the samples of a step are split, the same under every layout."""
        return 1

    @property
    def group_size(self) -> int:
        """Number of consecutive samples that the work needs together in one micro-batch."""
        return 1


W = TypeVar("W", bound=Work)


@dataclass(frozen=True)
class FunctionCall:
    """A node of the graph: work on one role (`host`: plain Python, no role), with input and output keys."""

    name: str
    kind: str = ""  # If it is not given, the work decides.
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    role: str | None = None
    work: Work | None = None
    reads: tuple[str, ...] = ()
    """Other roles, whose weights the call reads, too, in its own layout."""

    def __post_init__(self) -> None:
        if not self.kind and isinstance(self.work, Work):
            object.__setattr__(self, "kind", self.work.kind)
        if self.kind not in KINDS:
            raise ValueError(f"call {self.name!r} has kind {self.kind!r}: legal kinds are {', '.join(KINDS)}")
        if (self.role is None) != (self.kind == "host"):
            need = "has no role" if self.kind == "host" else "needs a role"
            raise ValueError(f"call {self.name!r} {need}: kind is {self.kind!r} and role is {self.role!r}")
        if self.work is not None:
            self.require_work()
        for field in ("inputs", "outputs", "reads"):
            if isinstance(getattr(self, field), str):
                what = "role" if field == "reads" else "key"
                raise ValueError(f"call {self.name!r}: {field} must be a tuple of {what} names, not a string")
            object.__setattr__(self, field, tuple(getattr(self, field)))
        for key in self.outputs:
            if key in self.inputs:
                raise ValueError(
                    f"call {self.name!r} both reads and writes the key {key!r}: rename its output")
        if self.reads and self.role is None:
            raise ValueError(f"call {self.name!r} reads roles, {', '.join(self.reads)}, and has none itself")
        if self.role in self.reads:
            raise ValueError(f"call {self.name!r} is of role {self.role!r}: reads must name other roles")

    @property
    def roles(self) -> tuple[str, ...]:
        """Return the roles whose weights the call needs: its own and those that it reads."""
        return () if self.role is None else (self.role, *self.reads)

    def require_work(self) -> Work:
        """Return the call's work. Raises ValueError unless there is one, and of the call's kind."""
        if not isinstance(self.work, Work) or self.work.kind != self.kind:
            raise ValueError(
                f"call {self.name!r} of kind {self.kind!r} has work {type(self.work).__name__}: "
                f"it must be {KINDS[self.kind]}")
        return self.work

    def work_as(self, kind: type[W]) -> W:
        """Return the call's work, which must be of this class."""
        assert isinstance(self.work, kind), f"call {self.name!r} has work {type(self.work).__name__}"
        return self.work

    def with_work(self, **settings: Any) -> "FunctionCall":
        """Return this call with other settings of its work."""
        assert self.work is not None, f"call {self.name!r} has no work"
        return replace(self, work=replace(self.work, **settings))


@dataclass(frozen=True)
class DataflowGraph:
    """The calls of one step; edges follow from key names. `inputs` are the keys that the dataset provides.

    Raises ValueError if a key has no producer or two, a name repeats, or calls are missing or form a cycle.
    """

    calls: tuple[FunctionCall, ...]
    inputs: tuple[str, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "calls", tuple(self.calls))
        object.__setattr__(self, "inputs", tuple(self.inputs))
        if not self.calls:
            raise ValueError("the graph has no calls: give it at least one FunctionCall")
        names = [call.name for call in self.calls]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two calls are named {twice[0]!r}: call names must differ")
        producer = dict.fromkeys(self.inputs, "the dataset")
        for key, by in ((key, f"call {call.name!r}") for call in self.calls for key in call.outputs):
            if key in producer:
                raise ValueError(f"key {key!r} is produced twice: by {producer[key]} and by {by}")
            producer[key] = by
        for call in self.calls:
            if missing := [key for key in call.inputs if key not in producer]:
                raise ValueError(
                    f"call {call.name!r} needs the key {missing[0]!r}, which nobody produces; there are: "
                    f"{', '.join(sorted(producer))}")
        if not nx.is_directed_acyclic_graph(self.nx_graph):
            cycle = [edge[0] for edge in nx.find_cycle(self.nx_graph)]
            raise ValueError(f"the calls form a cycle: {' -> '.join([*cycle, cycle[0]])}")

    @cached_property
    def nx_graph(self) -> nx.DiGraph:
        """Return the graph of call names; the edge A -> B has the attribute `keys`, which B reads from A."""
        graph = nx.DiGraph()
        graph.add_nodes_from(call.name for call in self.calls)
        for call in self.calls:
            for key in call.inputs:
                if (source := self.producer(key)) is not None:
                    graph.add_edge(source.name, call.name)
                    graph.edges[source.name, call.name].setdefault("keys", []).append(key)
        return graph

    def __getitem__(self, name: str) -> FunctionCall:
        return {call.name: call for call in self.calls}[name]

    def producer(self, key: str) -> FunctionCall | None:
        """Return the call that writes `key`; None if the dataset provides it."""
        return next((call for call in self.calls if key in call.outputs), None)

    @cached_property
    def order(self) -> tuple[FunctionCall, ...]:
        """Return the calls in topological order; calls that are ready together keep the user's order."""
        listed = [call.name for call in self.calls].index
        return tuple(self[name] for name in nx.lexicographical_topological_sort(self.nx_graph, key=listed))

    def of_role(self, role: str) -> tuple[FunctionCall, ...]:
        return tuple(call for call in self.order if call.role == role)

    def using(self, role: str) -> tuple[FunctionCall, ...]:
        """Return the calls that need the weights of a role, in topological order: its own come first."""
        return (*self.of_role(role), *(call for call in self.order if role in call.reads))

    def of_kind(self, kind: str) -> tuple[FunctionCall, ...]:
        return tuple(call for call in self.calls if call.kind == kind)

    def roles(self, *kinds: str) -> tuple[str, ...]:
        """Return the sorted names of the roles that have calls, of these kinds if some are given."""
        calls = [call for call in self.calls if not kinds or call.kind in kinds]
        return tuple(sorted({call.role for call in calls if call.role is not None}))

    def works(self, kind: type[W], *, role: str | None = None) -> tuple[W, ...]:
        """Return the works of this class, of one role (None: of all), in the order of their calls."""
        calls = self.calls if role is None else self.of_role(role)
        return tuple(call.work for call in calls if isinstance(call.work, kind))

    def replace(self, *calls: FunctionCall) -> "DataflowGraph":
        """Return this graph with the calls of the same names replaced by these."""
        new = {call.name: call for call in calls}
        names = [call.name for call in self.calls]
        if unknown := [name for name in new if name not in names]:
            raise ValueError(f"no call is named {unknown[0]!r}: there are {', '.join(names)}")
        return DataflowGraph(tuple(new.get(call.name, call) for call in self.calls), self.inputs)

    def add(self, *calls: FunctionCall, inputs: Sequence[str] = ()) -> "DataflowGraph":
        """Return this graph with more calls and, if needed, more dataset keys."""
        return DataflowGraph((*self.calls, *calls), (*self.inputs, *inputs))
