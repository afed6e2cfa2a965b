"""One step of training as a dataflow graph: FunctionCall, DataflowGraph. Knows nothing of models."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import networkx as nx

KINDS = ("generate", "forward", "train_step", "host")


@dataclass(frozen=True)
class FunctionCall:
    """A node of the graph: one kind of work on one role, with named input and output keys.

    `work` says what exactly is to be done; the engine of the role (or, for `host`, the runtime) reads it,
    the graph does not. A `host` call is plain Python and has no role.
    """

    name: str
    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...] = ()
    role: str | None = None
    work: Any = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"call {self.name!r} has kind {self.kind!r}: legal kinds are {', '.join(KINDS)}")
        if (self.role is None) != (self.kind == "host"):
            need = "has no role" if self.kind == "host" else "needs a role"
            raise ValueError(f"call {self.name!r} {need}: kind is {self.kind!r} and role is {self.role!r}")
        for field in ("inputs", "outputs"):
            if isinstance(getattr(self, field), str):
                raise ValueError(f"call {self.name!r}: {field} must be a tuple of key names, not a string")
            object.__setattr__(self, field, tuple(getattr(self, field)))
        for key in self.outputs:
            if key in self.inputs:
                raise ValueError(
                    f"call {self.name!r} both reads and writes the key {key!r}: rename its output"
                )


@dataclass(frozen=True)
class DataflowGraph:
    """The calls of one step; edges follow from key names.

    `inputs` are the keys that the dataset brings. Raises ValueError when a key has no producer or two, when
    two calls share a name, when the calls form a cycle, or when there is no call at all.
    """

    calls: tuple[FunctionCall, ...]
    inputs: tuple[str, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "calls", tuple(self.calls))
        object.__setattr__(self, "inputs", tuple(self.inputs))
        if not self.calls:
            raise ValueError("the graph has no calls: give it at least one FunctionCall")
        names = [call.name for call in self.calls]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two calls are named {name!r}: call names must differ")
        self._check_edges()

    def _check_edges(self) -> None:
        producer: dict[str, str] = {key: "the dataset" for key in self.inputs}
        for call in self.calls:
            for key in call.outputs:
                if key in producer:
                    raise ValueError(
                        f"key {key!r} is produced twice: by {producer[key]} and by call {call.name!r}"
                    )
                producer[key] = f"call {call.name!r}"
        for call in self.calls:
            for key in call.inputs:
                if key not in producer:
                    needs = f"call {call.name!r} needs the key {key!r}, which nobody produces"
                    raise ValueError(f"{needs}; there are: {', '.join(sorted(producer))}")
        if not nx.is_directed_acyclic_graph(self.nx_graph):
            cycle = [edge[0] for edge in nx.find_cycle(self.nx_graph)]
            raise ValueError(f"the calls form a cycle: {' -> '.join([*cycle, cycle[0]])}")

    @cached_property
    def nx_graph(self) -> nx.DiGraph:
        """Calls as nodes; an edge A -> B carries in `keys` the keys that B reads from A."""
        graph = nx.DiGraph()
        graph.add_nodes_from(call.name for call in self.calls)
        for call in self.calls:
            for key in call.inputs:
                source = self.producer(key)
                if source is not None:
                    graph.add_edge(source.name, call.name)
                    graph.edges[source.name, call.name].setdefault("keys", []).append(key)
        return graph

    def __getitem__(self, name: str) -> FunctionCall:
        return {call.name: call for call in self.calls}[name]

    def producer(self, key: str) -> FunctionCall | None:
        """The call that writes `key`; None when the dataset brings it."""
        return next((call for call in self.calls if key in call.outputs), None)

    @cached_property
    def order(self) -> tuple[FunctionCall, ...]:
        """The calls in topological order; among calls that are ready together, as the user listed them."""
        position = {call.name: i for i, call in enumerate(self.calls)}
        names = nx.lexicographical_topological_sort(self.nx_graph, key=lambda name: position[name])
        return tuple(self[name] for name in names)

    def of_role(self, role: str) -> tuple[FunctionCall, ...]:
        return tuple(call for call in self.order if call.role == role)

    def replace(self, *calls: FunctionCall) -> "DataflowGraph":
        """This graph with calls of the same names exchanged for these."""
        new = {call.name: call for call in calls}
        names = [call.name for call in self.calls]
        for name in new:
            if name not in names:
                raise ValueError(f"no call is named {name!r}: there are {', '.join(names)}")
        return DataflowGraph(tuple(new.get(call.name, call) for call in self.calls), self.inputs)

    def add(self, *calls: FunctionCall, inputs: Sequence[str] = ()) -> "DataflowGraph":
        """This graph with more calls and, if need be, more dataset keys."""
        return DataflowGraph((*self.calls, *calls), (*self.inputs, *inputs))
