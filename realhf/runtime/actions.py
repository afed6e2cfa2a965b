"""Compiles a graph and a plan into the list of actions that every rank walks through in the same order."""

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
"""Where host calls run unless the plan says otherwise, and where results are recorded."""


@dataclass(frozen=True)
class Reallocate:
    """Brings parameters from one layout to another: a role's weights, or those of "actor.lora", the adapters
    of role actor.

    With a `rate` the target is another role that follows: target = rate * source + (1 - rate) * target. With
    `sharded`, the source is the optimizer's copy, one part on each replica. `ahead`: for the next step,
    so it may go on while other calls run.
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
    """Posts the outputs of one producer (None: the dataset) that a call reads, and waits for nobody.

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
    """Takes what was sent to a call, and deals the samples out among the ranks of its layout."""

    call: FunctionCall
    sends: tuple[Send, ...]
    target: Layout
    tag: int


@dataclass(frozen=True)
class Run:
    call: FunctionCall
    layout: Layout


Action = Reallocate | Send | Receive | Run
_ADAPTERS = ".lora"


def parameter_sets(roles: Mapping[str, Role]) -> dict[str, Role]:
    """What moves as one: the weights of every role, which are frozen under adapters, and as "actor.lora" the
    adapters of role actor."""
    sets: dict[str, Role] = {}
    for name, role in roles.items():
        sets[name] = role if role.lora is None else replace(role, optimizer=None, lora=None)
        if role.lora is not None:
            sets[name + _ADAPTERS] = role
    return sets


def parameter_specs(roles: Mapping[str, Role]) -> dict[str, ModelSpec]:
    """The parameter tables of all sets."""
    specs: dict[str, ModelSpec] = {}
    for name, role in roles.items():
        config = role.config()
        specs[name] = spec_of(config)
        if (lora := role.resolved_lora()) is not None:
            specs[name + _ADAPTERS] = adapter_spec(config, lora)
    return specs


def spec_of(config: ModelConfig) -> ModelSpec:
    """The parameter table of a model: ours, or that of a class in transformers."""
    return class_spec(config) if isinstance(config, TransformersConfig) else model_spec(config)


def role_of(parameters: str) -> str:
    """The role that a parameter set belongs to."""
    return parameters.removesuffix(_ADAPTERS)


def adapters_of(role: str) -> str:
    """The name of a role's adapters."""
    return role + _ADAPTERS


def home_layouts(graph: DataflowGraph, plan: ExecutionPlan, roles: Mapping[str, Role]) -> dict[str, Layout]:
    """Role -> the layout that owns its parameters: where it trains, else where its first call runs.

    Raises ValueError when a role has no call, or trains in two layouts.
    """
    homes: dict[str, Layout] = {}
    for role in roles:
        calls = graph.of_role(role)
        if not calls:
            raise ValueError(f"role {role!r} has no call in the graph")
        training = [call for call in calls if call.kind == "train_step"]
        layouts = {plan[call.name].layout for call in training}
        if len(layouts) > 1:
            where = " and ".join(f"{call.name} at {plan[call.name].layout}" for call in training)
            raise ValueError(f"role {role!r} has two homes: {where}; a role must train in one layout")
        homes[role] = plan[(training or calls)[0].name].layout
    return homes


def complete_plan(
    plan: ExecutionPlan, graph: DataflowGraph, homes: Mapping[str, Layout], *, offloaded: Collection[str] = ()
) -> ExecutionPlan:
    """The plan with what may be left out: host calls on rank 0, calls of roles with a home there."""
    calls = dict(plan.calls)
    for call in graph.calls:
        layout = RANK_0 if call.kind == "host" else homes.get(call.role or "")
        if layout is not None:
            calls.setdefault(call.name, CallPlan(layout, offload=call.role in offloaded))
    return ExecutionPlan(calls, plan.predicted)


def dataset_layout(graph: DataflowGraph, plan: ExecutionPlan) -> Layout:
    """Where a step's dataset rows come from: the first head of the first call that reads any."""
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
    """One step: the calls in topological order; `specs` are those of all parameter sets.

    What a call has made is sent right behind it and received where it is used, so that nobody waits for a
    rank that is busy with another call. What a train step has changed goes out right behind it, ahead of the
    next step.

    No ranks can wait for each other in a circle: over all steps, an action waits only for ranks that have yet
    to come to it and for actions that stand before it, and every rank walks through them in this order.
    """
    tags, sets = count(first_tag), parameter_sets(roles)
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
        """For the calls up to the one that next updates the parameters."""
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
                home, rate = homes[call.role], roles[name].follow_rate
                actions.extend(_copies(call.role, roles[call.role], home, [home], specs[name]))
                actions.append(Reallocate(call.role, home, name, homes[name], rate))
            later = graph.order[i:]
            reallocate(name, later)
            if not any(name in updated_by.get(other.name, ()) for other in later):
                reallocate(name, graph.order, ahead=True)
    return tuple(actions)


def _copies(
    name: str, role: Role, home: Layout, layouts: list[Layout], spec: ModelSpec, *, ahead: bool = False
) -> list[Reallocate]:
    """Brings copies of parameters in these layouts up to date, each from where least has to move.

    What trains on several replicas goes out from the optimizer's copy; its gathering is one of these
    movements, and costs nothing where an earlier one has brought the home layout all that it holds.
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
