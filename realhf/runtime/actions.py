"""Compiles a graph and a plan into a list of actions, which every rank executes in the same order."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from realhf.dist.tags import FIRST_INPUT
from realhf.engine.hf_factory import class_spec
from realhf.experiment import Role
from realhf.graph import DataflowGraph, FunctionCall
from realhf.layout import Layout
from realhf.lora import adapter_spec
from realhf.model_config import ModelConfig
from realhf.param_spec import ModelSpec, is_sharded, model_spec
from realhf.plan import CallPlan, ExecutionPlan
from realhf.realloc.schedule import moves_nothing
from realhf.transformers_config import TransformersConfig

RANK_0 = Layout.parse("d1@0")
"""Layout of host calls without an entry in the plan, and of the call that records an evaluation."""


@dataclass(frozen=True)
class Reallocate:
    """Copies a parameter set (see ParameterSet) from one layout to another. Sets go by their names.

    With a `rate`, the target set follows the source set: target = rate * source + (1 - rate) * target. With
    `sharded`, the source is the optimizer's copy, of which every replica has a part. With `ahead`, the copy
    is for the next step, so it may run while other calls do.
    """

    source_set: str
    source: Layout
    target_set: str
    target: Layout
    rate: float | None = None
    sharded: bool = False
    ahead: bool = False


@dataclass(frozen=True)
class Send:
    """Sends those outputs of one producer (None: the dataset) that a call reads, without waiting.

    They go from the heads of the producer's layout to ranks of the call's layout.
    """

    call: FunctionCall
    producer: str | None
    source: Layout
    keys: tuple[str, ...]
    target: Layout
    tag: int


@dataclass(frozen=True)
class Receive:
    """Receives the inputs of a call and distributes the samples among the ranks of its layout."""

    call: FunctionCall
    sends: tuple[Send, ...]
    target: Layout
    tag: int


@dataclass(frozen=True)
class Run:
    """Runs a call on the ranks of its layout."""

    call: FunctionCall
    layout: Layout


Action = Reallocate | Send | Receive | Run
_ADAPTERS = ".lora"


@dataclass(frozen=True)
class ParameterSet:
    """Parameters of a role that move as a unit: its weights (named as the role) or its adapters.

    The weights of role actor are the set "actor"; its adapters are the set "actor.lora".
    """

    name: str
    role: str
    trained: bool
    follows: str | None = None  # The role of whose weights the set is the moving average.
    follow_rate: float = 0.0  # Share of the followed weights in each update.
    weights_source: tuple[str | bool, ...] = ()  # Frozen weights of one source are equal; () for adapters.

    @property
    def is_adapters(self) -> bool:
        return self.name != self.role


def parameter_sets(roles: Mapping[str, Role]) -> dict[str, ParameterSet]:
    """Return the parameter sets of all roles, by name. The weights under adapters are frozen."""
    sets: dict[str, ParameterSet] = {}
    for name, role in roles.items():
        trained = role.optimizer is not None
        sets[name] = ParameterSet(
            name, name, trained and role.lora is None, role.follows, role.follow_rate, role.weights_source)
        if role.lora is not None:
            sets[adapters_of(name)] = ParameterSet(adapters_of(name), name, trained)
    return sets


def parameter_specs(roles: Mapping[str, Role]) -> dict[str, ModelSpec]:
    """Return the parameter tables of all sets, by name."""
    specs: dict[str, ModelSpec] = {}
    for name, role in roles.items():
        config = role.config()
        specs[name] = spec_of(config)
        if (lora := role.resolved_lora()) is not None:
            specs[adapters_of(name)] = adapter_spec(config, lora)
    return specs


def spec_of(config: ModelConfig) -> ModelSpec:
    """Return the parameter table of a native model or of a transformers class."""
    return class_spec(config) if isinstance(config, TransformersConfig) else model_spec(config)


def role_of(set_name: str) -> str:
    """Return the role to which the parameter set of this name belongs."""
    return set_name.removesuffix(_ADAPTERS)


def adapters_of(role: str) -> str:
    """Return the name of the set of a role's adapters."""
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
    """Return the layout of the dataset: the first head of the first call that reads from it."""
    keys = set(graph.inputs)
    readers = (plan[call.name].layout for call in graph.order if not keys.isdisjoint(call.inputs))
    return Layout.parse(f"d1@{next(readers, RANK_0).heads[0]}")


def compile_actions(
    graph: DataflowGraph,
    plan: ExecutionPlan,
    roles: Mapping[str, Role],
    homes: Mapping[str, Layout],
    specs: Mapping[str, ModelSpec],
    *,
    first_tag: int = FIRST_INPUT,
) -> tuple[Action, ...]:
    """Return the actions of one step, with its calls in topological order. `specs` are `parameter_specs`.

    A call's outputs are sent directly after it and received where they are used, so that no rank waits for
    one that is busy. What a train step has changed is reallocated directly after it, ahead of the next step.

    There is no deadlock: an action waits only for earlier actions and for ranks that have not reached it yet,
    and every rank executes the actions of all steps in this order.
    """
    tags = count(first_tag)
    sets = parameter_sets(roles)
    receives = {call.name: _receive(call, graph, plan, tags) for call in graph.order}
    actions: list[Action] = []

    def send(producer: str | None) -> None:
        actions.extend(s for r in receives.values() for s in r.sends if s.producer == producer)

    send(None)
    updated_by = {
        call.name: [
            params.name for params in sets.values()
            if params.follows == call.role or (params.role == call.role and params.trained)
        ]
        for call in graph.order
        if call.kind == "train_step"
    }

    def reallocate(name: str, calls: Sequence[FunctionCall], *, ahead: bool = False) -> None:
        """Copy a set to the layouts of these calls, up to the one that next updates it."""
        role = sets[name].role
        until = next((i for i, call in enumerate(calls) if name in updated_by.get(call.name, ())), len(calls))
        layouts = dict.fromkeys(plan[call.name].layout for call in calls[: until + 1] if call.role == role)
        actions.extend(_copies(sets[name], homes[role], list(layouts), specs[name], ahead=ahead))

    for role in dict.fromkeys(call.role for call in graph.order if call.role is not None):
        for params in sets.values():
            if params.role == role:
                reallocate(params.name, graph.order)
    for i, call in enumerate(graph.order, start=1):
        actions += [receives[call.name], Run(call, plan[call.name].layout)]
        send(call.name)
        for name in updated_by.get(call.name, ()):
            if sets[name].follows is not None:
                assert call.role is not None, "only models are trained"
                home = homes[call.role]
                actions.extend(_copies(sets[call.role], home, [home], specs[name]))
                actions.append(Reallocate(call.role, home, name, homes[name], sets[name].follow_rate))
            later = graph.order[i:]
            reallocate(name, later)
            if not any(name in updated_by.get(other.name, ()) for other in later):
                reallocate(name, graph.order, ahead=True)
    return tuple(actions)


def _copies(
    params: ParameterSet, home: Layout, layouts: list[Layout], spec: ModelSpec, *, ahead: bool = False
) -> list[Reallocate]:
    """Return the reallocations that update the copies in these layouts.

    A set that trains on several replicas starts from the optimizer's shards. A later copy comes from an
    earlier one if nothing has to move between the two; this makes gathering the home copy free in some plans.
    """
    name = params.name
    if not params.trained or not is_sharded(home):
        return [Reallocate(name, home, name, layout, ahead=ahead) for layout in layouts if layout != home]
    copies: list[Reallocate] = []
    for layout in layouts:
        equal = (copy.target for copy in copies if moves_nothing(spec, source=copy.target, target=layout))
        earlier = next(equal, None)
        copies.append(
            Reallocate(name, earlier or home, name, layout, sharded=earlier is None, ahead=ahead))
    return copies


def _receive(
    call: FunctionCall, graph: DataflowGraph, plan: ExecutionPlan, tags: Iterator[int]
) -> Receive:
    by_producer: dict[str | None, list[str]] = {}
    for key in call.inputs:
        producer = graph.producer(key)
        by_producer.setdefault(None if producer is None else producer.name, []).append(key)
    layouts = {p: dataset_layout(graph, plan) if p is None else plan[p].layout for p in by_producer}
    target = plan[call.name].layout
    sends = [Send(call, p, layouts[p], tuple(keys), target, next(tags)) for p, keys in by_producer.items()]
    return Receive(call, tuple(sends), target, next(tags))
