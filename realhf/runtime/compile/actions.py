"""Compiles a graph and a plan into a list of actions, which every rank executes in the same order."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

import networkx as nx

from realhf.calls import Generate, HostFunction
from realhf.distributed.tags import FIRST_INPUT
from realhf.engine.hf_factory import class_spec
from realhf.execution_plan import CallPlan, ExecutionPlan
from realhf.experiment import Role
from realhf.graph import DataflowGraph, FunctionCall
from realhf.layout import Layout
from realhf.models.lora import adapter_spec
from realhf.models.model_config import ModelConfig, ModuleConfig, TransformersConfig
from realhf.models.modules import module_spec
from realhf.models.param_spec import ModelSpec, is_sharded, model_spec
from realhf.realloc.schedule import moves_nothing

RANK_0 = Layout.parse("d1@0")
"""Layout of host calls without an entry in the plan, and of the call that records an evaluation."""


@dataclass(frozen=True)
class Reallocate:
    """Copies a parameter set (see ParameterSet) from one layout to another. Sets go by their names.

    With a `follow_rate`, the target set follows the source set: it becomes follow_rate * source +
    (1 - follow_rate) * target. With `sharded`, the source is the optimizer's copy, of which every replica has
    a part. With `ahead`, the copy is for the next step, so it may run while other calls do.
    """

    source_set: str
    source: Layout
    target_set: str
    target: Layout
    follow_rate: float | None = None
    sharded: bool = False
    ahead: bool = False


@dataclass(frozen=True)
class Send:
    """Sends those outputs of one producer (None: the dataset) that a call reads, without waiting.

    They go from the result ranks of the producer's layout to ranks of the call's layout.
    """

    call: FunctionCall
    producer: str | None
    source: Layout
    keys: tuple[str, ...]
    target: Layout
    tag: int


@dataclass(frozen=True)
class Receive:
    """Receives the inputs of a call and distributes the samples among the ranks of its layout.

    With `filtered`, some inputs may lack samples, and only those that all inputs have are received.
    """

    call: FunctionCall
    sends: tuple[Send, ...]
    target: Layout
    tag: int
    filtered: bool = False


@dataclass(frozen=True)
class Redistribute:
    """Distributes the unfinished samples of a generating call anew among the ranks of its layout."""

    call: FunctionCall
    layout: Layout
    tag: int


@dataclass(frozen=True)
class Ask:
    """Lets a host call, the asker, ask a forward call while it runs: on its own rank, if that is in the
    forward call's layout, and else by messages to a rank of it.

    All questions of an asker have one tag, so that a rank can answer several calls in the order in which
    they are asked.
    """

    asker: str
    asking: Layout
    call: FunctionCall
    layout: Layout
    tag: int

    def answering(self, rank: int) -> int:
        """Return the rank that answers a rank of the asker."""
        ranks = self.layout.ranks
        return rank if rank in ranks else ranks[self.asking.ranks.index(rank) % len(ranks)]

    def far(self, rank: int) -> list[int]:
        """Return the other ranks that this one answers."""
        return [one for one in self.asking.ranks if one != rank and self.answering(one) == rank]


@dataclass(frozen=True)
class Run:
    """Runs a call on the ranks of its layout; a host call also on the other ranks that answer its questions.

    A call that is asked runs with its asker, and does nothing of its own.
    """

    call: FunctionCall
    layout: Layout
    asks: tuple[Ask, ...] = ()
    is_asked: bool = False


Action = Reallocate | Send | Receive | Redistribute | Run
_ADAPTERS = ".lora"


@dataclass(frozen=True)
class ParameterSet:
    """Parameters of a role that move as a unit: its weights (named as the role) or its adapters.

    The weights of role actor are the set "actor"; its adapters are the set "actor.lora".
    """

    name: str
    role: str
    trained: bool
    follows: str | None = None  # The role whose weights the set follows as a moving average.
    follow_rate: float = 0.0  # Share of the followed weights in each update.
    weights_source: tuple[str | bool, ...] = ()  # Frozen weights of one source are equal; () for adapters.
    engine: str = "native"

    @property
    def is_adapters(self) -> bool:
        return self.name != self.role

    def is_sharded(self, home: Layout) -> bool:
        """Return whether train steps update only the optimizer's copy, of which each replica has a part.

        Megatron-Core's optimizer gathers the parts itself.
        """
        return self.trained and self.engine != "megatron" and is_sharded(home)

    def layout_of(self, call: FunctionCall, layout: Layout) -> Layout:
        """Return the layout of the copy with which a call runs; only the native engine generates."""
        if call.kind != "generate":
            return layout
        if isinstance(call.work, Generate) and call.work.generation_weights == "int8":
            return replace(layout, form="int8")
        return replace(layout, form="native") if self.engine == "megatron" else layout


def parameter_sets(roles: Mapping[str, Role]) -> dict[str, ParameterSet]:
    """Return the parameter sets of all roles, by name. The weights under adapters are frozen."""
    sets: dict[str, ParameterSet] = {}
    for name, role in roles.items():
        trained = role.optimizer is not None
        sets[name] = ParameterSet(
            name, name, trained and role.lora is None, role.follows, role.follow_rate, role.weights_source,
            role.engine)
        if role.lora is not None:
            sets[adapters_of(name)] = ParameterSet(adapters_of(name), name, trained)
    return sets


def parameter_specs(roles: Mapping[str, Role]) -> dict[str, ModelSpec]:
    specs: dict[str, ModelSpec] = {}
    for name, role in roles.items():
        config = role.config()
        specs[name] = spec_of(config)
        if (lora := role.resolved_lora()) is not None:
            specs[adapters_of(name)] = adapter_spec(config, lora)
    return specs


def spec_of(config: ModelConfig) -> ModelSpec:
    """Return the parameter table of a native model, of a transformers class or of a user's module."""
    if isinstance(config, ModuleConfig):
        return module_spec(config)
    return class_spec(config) if isinstance(config, TransformersConfig) else model_spec(config)


def role_of(set_name: str) -> str:
    return set_name.removesuffix(_ADAPTERS)


def adapters_of(role: str) -> str:
    return role + _ADAPTERS


def complete_plan(
    plan: ExecutionPlan, graph: DataflowGraph, homes: Mapping[str, Layout], *, offloaded: Collection[str] = ()
) -> ExecutionPlan:
    """Return the plan with omitted calls added: host calls on rank 0, others at the home of their role."""
    calls = dict(plan.calls)
    for call in graph.calls:
        layout = RANK_0 if call.kind == "host" else homes.get(call.role or "")
        if layout is not None:
            calls.setdefault(call.name, CallPlan(layout, offload=call.role in offloaded))
    return ExecutionPlan(calls, plan.predicted)


def dataset_layout(graph: DataflowGraph, plan: ExecutionPlan) -> Layout:
    """Return the layout of the dataset: the first result rank of the first call that reads from it."""
    keys = set(graph.inputs)
    readers = (plan[call.name].layout for call in graph.order if not keys.isdisjoint(call.inputs))
    return Layout.parse(f"d1@{next(readers, RANK_0).result_ranks[0]}")


def compile_actions(
    graph: DataflowGraph, plan: ExecutionPlan, roles: Mapping[str, Role], homes: Mapping[str, Layout],
    specs: Mapping[str, ModelSpec], *, first_tag: int = FIRST_INPUT,
) -> tuple[Action, ...]:
    """Return the actions of a graph whose only part has all of its calls, see `compile_parts`."""
    parts = {"step": [call.name for call in graph.order]}
    return compile_parts(graph, plan, roles, homes, specs, parts, first_tag=first_tag)["step"]


def compile_parts(
    graph: DataflowGraph, plan: ExecutionPlan, roles: Mapping[str, Role], homes: Mapping[str, Layout],
    specs: Mapping[str, ModelSpec], parts: Mapping[str, Sequence[str]], *, first_tag: int = FIRST_INPUT,
    in_rounds: bool = False,
) -> dict[str, tuple[Action, ...]]:
    """Return the actions of each part, with its calls in topological order. `specs` are `parameter_specs`.

    At its beginning, a part sends the inputs that other parts have made. The outputs of a call are sent right
    after the call and received just before the call that reads them, so that no rank waits for a busy one.
    Right after a train step, the changed weights are sent to later calls of the part, and ahead to where the
    next run of each part needs them. With `in_rounds`, generating calls continue their unfinished samples.

    There is no deadlock: an action waits only for earlier actions and for ranks that have not reached it yet,
    and every rank executes the parts in the same order.
    """
    tags = count(first_tag)
    filtered = _filtered_calls(graph)
    receives = {call.name: _receive(call, graph, plan, tags, filtered) for call in graph.order}
    asks: list[Ask] = []
    for call in graph.order:
        if isinstance(call.work, HostFunction) and call.work.asks:
            tag = next(tags)
            asks += [
                Ask(call.name, plan[call.name].layout, graph[name], plan[name].layout, tag)
                for name in call.work.asks]
    compiler = _PartCompiler(graph, plan, homes, specs, parameter_sets(roles), receives, asks)
    members = {part: [call for call in graph.order if call.name in names] for part, names in parts.items()}
    compiled = {}
    for part, calls in members.items():
        redistribute_tags = {
            call.name: next(tags) for call in calls if in_rounds and call.kind == "generate"}
        compiled[part] = compiler.actions(calls, list(members.values()), redistribute_tags)
    return compiled


def outside_producers(part: Sequence[Action]) -> list[Send]:
    """Return the sends of a part whose samples come from other parts or the dataset."""
    inside = {action.call.name for action in part if isinstance(action, Run)}
    return [action for action in part if isinstance(action, Send) and action.producer not in inside]


def _filtered_calls(graph: DataflowGraph) -> set[str]:
    """Return the calls that filter samples, and all calls that depend on them."""
    filters = {c.name for c in graph.calls if isinstance(c.work, HostFunction) and c.work.filters}
    return filters.union(*(nx.descendants(graph.nx_graph, name) for name in filters))


@dataclass(frozen=True)
class _PartCompiler:
    """Compiles the parts of one graph under one plan."""

    graph: DataflowGraph
    plan: ExecutionPlan
    homes: Mapping[str, Layout]
    specs: Mapping[str, ModelSpec]
    sets: Mapping[str, ParameterSet]
    receives: Mapping[str, Receive]
    asks: Sequence[Ask] = ()

    def actions(
        self, calls: Sequence[FunctionCall], all_parts: Sequence[Sequence[FunctionCall]],
        redistribute_tags: Mapping[str, int],
    ) -> tuple[Action, ...]:
        """Return the actions of a part; generating calls with a tag continue unfinished samples."""
        names = {call.name for call in calls}
        sends = [send for call in calls for send in self.receives[call.name].sends]
        actions: list[Action] = [send for send in sends if send.producer not in names]
        for role in dict.fromkeys(role for call in calls for role in call.roles):
            for params in self.sets.values():
                if params.role == role:
                    actions += self._reallocations(params.name, calls)
        for i, call in enumerate(calls, start=1):
            layout = self.plan[call.name].layout
            actions.append(self.receives[call.name])
            if (tag := redistribute_tags.get(call.name)) is not None:
                actions.append(Redistribute(call, layout, tag))
            asks = tuple(ask for ask in self.asks if ask.asker == call.name)
            actions.append(Run(call, self._copy_of(call), asks, self._is_asked(call)))
            actions += [send for send in sends if send.producer == call.name]
            for name in self._updated_by(call):
                actions += self._after_update(name, call, calls[i:], all_parts)
        return tuple(actions)

    def _copy_of(self, call: FunctionCall) -> Layout:
        """Return the layout of the copy of the weights with which a call runs."""
        layout = self.plan[call.name].layout
        return layout if call.role is None else self.sets[call.role].layout_of(call, layout)

    def _is_asked(self, call: FunctionCall) -> bool:
        return any(ask.call.name == call.name for ask in self.asks)

    def _users(self, call: FunctionCall) -> list[FunctionCall]:
        """Return the calls whose weights are needed when a call runs: its own, or those of what it asks."""
        asked = [ask.call for ask in self.asks if ask.asker == call.name]
        return asked if self._is_asked(call) or asked else [call]

    def _updated_by(self, call: FunctionCall) -> list[str]:
        if call.kind != "train_step":
            return []
        return [
            params.name for params in self.sets.values()
            if params.follows == call.role or (params.role == call.role and params.trained)]

    def _after_update(
        self, name: str, train: FunctionCall, later: Sequence[FunctionCall],
        all_parts: Sequence[Sequence[FunctionCall]],
    ) -> list[Reallocate]:
        """Return the reallocations of a set that a train step has just changed."""
        actions: list[Reallocate] = []
        if self.sets[name].follows is not None:
            assert train.role is not None, "only models are trained"
            home = self.homes[train.role]
            actions += _copies(self.sets[train.role], home, [home], self.specs[name])
            actions.append(
                Reallocate(train.role, home, name, self.homes[name], self.sets[name].follow_rate))
        actions += self._reallocations(name, later)
        if not any(name in self._updated_by(call) for call in later):
            actions += self._reallocations(name, *all_parts, ahead=True)
        return actions

    def _reallocations(
        self, name: str, *parts: Sequence[FunctionCall], ahead: bool = False
    ) -> list[Reallocate]:
        """Return the copies of a set to the layouts of the calls of each part, up to its next update."""
        role = self.sets[name].role
        users: list[FunctionCall] = []
        for calls in parts:
            updates = (i for i, call in enumerate(calls, start=1) if name in self._updated_by(call))
            users += [user for call in calls[: next(updates, len(calls))] for user in self._users(call)]
        layouts = dict.fromkeys(self._copy_of(call) for call in users if role in call.roles)
        return _copies(self.sets[name], self.homes[role], list(layouts), self.specs[name], ahead=ahead)


def _copies(
    params: ParameterSet, home: Layout, layouts: list[Layout], spec: ModelSpec, *, ahead: bool = False
) -> list[Reallocate]:
    """Return the reallocations that update the copies in these layouts.

    The first copy of a set that trains on several replicas is made from the optimizer's shards. A later copy
    is made from an earlier one if nothing has to move between them, so that it costs nothing; a copy of
    weights in int8 always from the optimizer's.
    """
    name = params.name
    if not params.is_sharded(home):
        return [Reallocate(name, home, name, layout, ahead=ahead) for layout in layouts if layout != home]
    copies: list[Reallocate] = []
    for layout in layouts:
        whole = [] if _is_int8(params, layout) else [copy.target for copy in copies]
        equal = (
            target for target in whole
            if not _is_int8(params, target) and moves_nothing(spec, source=target, target=layout))
        earlier = next(equal, None)
        copies.append(
            Reallocate(name, earlier or home, name, layout, sharded=earlier is None, ahead=ahead))
    return copies


def _is_int8(params: ParameterSet, layout: Layout) -> bool:
    return layout.form == "int8" and not params.is_adapters


def _receive(
    call: FunctionCall, graph: DataflowGraph, plan: ExecutionPlan, tags: Iterator[int],
    filtered: Collection[str],
) -> Receive:
    by_producer: dict[str | None, list[str]] = {}
    for key in call.inputs:
        producer = graph.producer(key)
        by_producer.setdefault(None if producer is None else producer.name, []).append(key)
    layouts = {p: dataset_layout(graph, plan) if p is None else plan[p].layout for p in by_producer}
    target = plan[call.name].layout
    sends = [Send(call, p, layouts[p], tuple(keys), target, next(tags)) for p, keys in by_producer.items()]
    return Receive(call, tuple(sends), target, next(tags), not by_producer.keys().isdisjoint(filtered))
