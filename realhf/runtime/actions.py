"""Compiles a graph and a plan into a list of actions, which every rank executes in the same order."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
    """Copies a parameter set (see `parameter_sets`) from one layout to another.

    With a `rate`, the target is a role that follows the source: target = rate * source + (1 - rate) * target.
    With `sharded`, the source is the optimizer's copy, of which every replica has a part. With `ahead`, the
    copy is for the next step, so it may run while other calls do.
    """

    source_role: str
    source: Layout
    target_role: str
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


def parameter_sets(roles: Mapping[str, Role]) -> dict[str, Role]:
    """Return every set of parameters that moves as a unit, by name, as a role.

    The weights of role actor are the set "actor", frozen if the role has adapters; its adapters are the set
    "actor.lora".
    """
    sets: dict[str, Role] = {}
    for name, role in roles.items():
        sets[name] = role if role.lora is None else replace(role, optimizer=None, lora=None)
        if role.lora is not None:
            sets[name + _ADAPTERS] = role
    return sets


def parameter_specs(roles: Mapping[str, Role]) -> dict[str, ModelSpec]:
    """Return the parameter tables of all sets, by name."""
    specs: dict[str, ModelSpec] = {}
    for name, role in roles.items():
        config = role.config()
        specs[name] = spec_of(config)
        if (lora := role.resolved_lora()) is not None:
            specs[name + _ADAPTERS] = adapter_spec(config, lora)
    return specs


def spec_of(config: ModelConfig) -> ModelSpec:
    """Return the parameter table of a native model or of a transformers class."""
    return class_spec(config) if isinstance(config, TransformersConfig) else model_spec(config)


def role_of(parameters: str) -> str:
    """Return the role to which a parameter set belongs."""
    return parameters.removesuffix(_ADAPTERS)


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
            name for name, role in sets.items()
            if role.follows == call.role or (role_of(name) == call.role and role.optimizer is not None)
        ]
        for call in graph.order
        if call.kind == "train_step"
    }

    def reallocate(name: str, calls: Sequence[FunctionCall], *, ahead: bool = False) -> None:
        """Copy a set to the layouts of these calls, up to the one that next updates it."""
        role = role_of(name)
        until = next((i for i, call in enumerate(calls) if name in updated_by.get(call.name, ())), len(calls))
        layouts = dict.fromkeys(plan[call.name].layout for call in calls[: until + 1] if call.role == role)
        actions.extend(_copies(name, sets[name], homes[role], list(layouts), specs[name], ahead=ahead))

    for role in dict.fromkeys(call.role for call in graph.order if call.role is not None):
        for name in sets:
            if role_of(name) == role:
                reallocate(name, graph.order)
    for i, call in enumerate(graph.order, start=1):
        actions += [receives[call.name], Run(call, plan[call.name].layout)]
        send(call.name)
        for name in updated_by.get(call.name, ()):
            if role_of(name) != call.role:
                assert call.role is not None, "only models are trained"
                home = homes[call.role]
                actions.extend(_copies(call.role, roles[call.role], home, [home], specs[name]))
                actions.append(Reallocate(call.role, home, name, homes[name], roles[name].follow_rate))
            later = graph.order[i:]
            reallocate(name, later)
            if not any(name in updated_by.get(other.name, ()) for other in later):
                reallocate(name, graph.order, ahead=True)
    return tuple(actions)


def _copies(
    name: str, role: Role, home: Layout, layouts: list[Layout], spec: ModelSpec, *, ahead: bool = False
) -> list[Reallocate]:
    """Return the reallocations that update the copies in these layouts.

    A set that trains on several replicas starts from the optimizer's shards. A later copy comes from an
    earlier one if nothing has to move between the two; this makes gathering the home copy free in some plans.
    """
    made: list[Reallocate] = []
    if role.optimizer is None or not is_sharded(home):
        return [Reallocate(name, home, name, layout, ahead=ahead) for layout in layouts if layout != home]
    for layout in layouts:
        done = [copy.target for copy in made if moves_nothing(spec, source=copy.target, target=layout)]
        made.append(Reallocate(name, (done or [home])[0], name, layout, sharded=not done, ahead=ahead))
    return made


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
