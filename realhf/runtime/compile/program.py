"""Compiles an experiment and a plan into a Program, and checks both before the run. Free of torch."""

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from realhf.data.dataset import DatasetConfig
from realhf.data.rows import count_rows
from realhf.distributed.tags import FIRST_INPUT
from realhf.execution_plan import ExecutionPlan, home_layouts
from realhf.experiment import Experiment, Role, resolved_roles
from realhf.graph import DataflowGraph
from realhf.layout import Layout
from realhf.realloc.links import Links
from realhf.runtime.compile import checks
from realhf.runtime.compile.actions import (
    Action,
    adapters_of,
    compile_parts,
    complete_plan,
    parameter_specs,
)
from realhf.runtime.compile.checks import ending_with_turns
from realhf.runtime.compile.eval_program import (
    EvaluationProgram,
    compile_evaluations,
    evaluation_graphs,
    evaluation_homes,
    legal_names,
)
from realhf.runtime.compile.step_trial import PartCount, count_parts


def described(experiment: Experiment) -> dict[str, Any]:
    """Return the experiment's fields as JSON, and as `hub` the commits of models and data sets there."""
    commits = experiment.hub_commits()
    return to_json(experiment) | ({"hub": commits} if commits else {})


def to_json(config: Any) -> dict[str, Any]:
    """Return the fields of an experiment, or roles by name, as JSON; values that are no config are named."""

    def form(value: Any) -> Any:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__name__)}"

    return json.loads(json.dumps(config, default=form))


def leaves(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of every field that is not a mapping."""
    for name, value in fields.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


PredictedMemory = Mapping[str, Mapping[int, Mapping[str, float]]]
"""Call -> rank -> bytes by part, as the planner counts them."""


@dataclass(frozen=True)
class Program:
    """An experiment and a plan that fit each other, compiled into actions for all ranks."""

    experiment: Experiment
    roles: Mapping[str, Role]
    graph: DataflowGraph
    plan: ExecutionPlan
    homes: Mapping[str, Layout]
    num_ranks: int
    offloaded: frozenset[str]
    """Frozen roles whose weights stay in host memory while no call needs them."""
    parts: Mapping[str, tuple[Action, ...]]
    """The actions of each part of a step."""
    evaluations: tuple[EvaluationProgram, ...] = ()
    """The sets of held-out rows, each with a graph of its own."""
    links: Links | None = None
    """The links for which reallocations are scheduled; None if they are unknown."""
    peak_flops: Mapping[str, float] = field(default_factory=dict)
    """Dtype -> FLOP/s of a device, as far as a cluster or profile file tells."""
    predicted_memory: PredictedMemory = field(default_factory=dict)
    """The memory that the planner counts for the calls of a step; empty if it is unknown."""
    predicted: Mapping[str, Any] = field(default_factory=dict)
    """What the planner predicts of a step, as JSON: its seconds and those of its calls, and its timeline; or
    why it predicts nothing (`missing`). Only rank 0 has it."""

    counts: Mapping[str, PartCount] = field(default_factory=dict)
    """How often each part of a step runs in the whole run; empty without training."""

    @property
    def num_runs(self) -> dict[str, int]:
        """The number of runs of each call of a step in the whole run."""
        return _runs_of_calls(self.experiment, self.graph, self.counts)

    @property
    def actions(self) -> tuple[Action, ...]:
        """The actions of all parts, and then those of the evaluations."""
        lists = [*self.parts.values(), *(evaluation.actions for evaluation in self.evaluations)]
        return tuple(action for actions in lists for action in actions)

    @property
    def adapter_sizes(self) -> dict[str, tuple[int, int]]:
        """Return for each role with adapters the number of their parameters and of its model's."""
        specs = parameter_specs(self.roles)
        with_adapters = (name for name, role in self.roles.items() if role.lora is not None)
        return {name: (specs[adapters_of(name)].numel, specs[name].numel) for name in with_adapters}


def _runs_of_calls(
    experiment: Experiment, graph: DataflowGraph, counts: Mapping[str, PartCount]
) -> dict[str, int]:
    return {call: counts[part].runs for part, calls in experiment.parts(graph).items() for call in calls}


def compile_program(experiment: Experiment, plan: ExecutionPlan | None, *, world_size: int) -> Program:
    """Check everything that can be known before the first step, and compile the actions.

    Without a plan, every call is split over all ranks by dp. Raises ValueError at the first fault.
    """
    checks.check_numbers(experiment)
    experiment = with_steps(experiment)
    roles = experiment.roles()
    eval_sets = evaluation_graphs(experiment)
    checks.check_role_names(roles)
    graph = experiment.graph()
    checks.check_graph(experiment, graph, roles)
    graph = experiment.seeded(graph)
    if plan is None:
        plan = ExecutionPlan.single(graph, Layout.parse(f"d{world_size}@0-{world_size - 1}"))
    plan = complete_plan(plan, graph, {})
    plan.check(graph, world_size=world_size, also=legal_names(eval_sets), absent=experiment.absent_calls())
    homes = home_layouts(graph, plan, roles)
    offloaded = _offloaded_roles(graph, plan)
    checks.check_roles(roles)
    counts = count_parts(experiment, graph)
    roles = resolved_roles(roles, graph, _runs_of_calls(experiment, graph, counts))
    checks.check_plan(graph, plan, roles, offloaded)
    checks.check_rows(experiment.dataset, "dataset", graph)
    datasets = {"dataset": (experiment.dataset, graph)}
    checks.check_data(experiment, roles, datasets | _datasets(eval_sets))
    checks.check_step(experiment, graph, roles)
    graph = ending_with_turns(graph, roles, experiment.tokenizer_dir())
    graph = plan.with_rows_and_caches(graph)
    parts = compile_parts(
        graph, plan, roles, homes, parameter_specs(roles), experiment.parts(graph),
        in_rounds=experiment.num_rounds > 1)
    program = Program(
        experiment, roles, graph, plan, homes, world_size, offloaded, parts, counts=counts)
    return with_evaluations(program, eval_sets)


def compile_evaluation(experiment: Experiment, plan: ExecutionPlan | None, *, world_size: int) -> Program:
    """Return a program that only evaluates, with frozen roles. Raises ValueError at the first fault.

    Without a plan, every call is split over all ranks by dp.
    """
    eval_sets = evaluation_graphs(experiment)
    if not eval_sets:
        raise ValueError("eval_dataset is not set, or the experiment does not evaluate it")
    used = {call.role for eval_set in eval_sets for call in eval_set.graph.calls}
    roles = {name: _frozen(role) for name, role in experiment.roles().items() if name in used}
    checks.check_role_names(roles)
    if plan is None:
        everywhere = Layout.parse(f"d{world_size}@0-{world_size - 1}")
        graphs = [eval_set.graph for eval_set in eval_sets]
        plan = ExecutionPlan(
            {n: call for g in graphs for n, call in ExecutionPlan.single(g, everywhere).calls.items()})
    legal = {*legal_names(eval_sets), *(call.name for call in experiment.graph().calls)}
    if unknown := [name for name in plan.calls if name not in legal]:
        there_are = ", ".join(call.name for call in eval_sets[0].graph.calls)
        raise ValueError(f"calls.{unknown[0]}: the evaluation has no such call; its calls are {there_are}")
    homes = evaluation_homes(eval_sets, plan)
    checks.check_roles(roles)
    roles = resolved_roles(roles, eval_sets[0].graph, {})
    checks.check_data(experiment, roles, _datasets(eval_sets))
    offloaded = frozenset[str]().union(*(_offloaded_roles(eval_set.graph, plan) for eval_set in eval_sets))
    program = Program(experiment, roles, eval_sets[0].graph, plan, homes, world_size, offloaded, {})
    return with_evaluations(program, eval_sets)


def with_steps(experiment: Experiment) -> Experiment:
    """Return the experiment with the number of its steps, if it has that of its epochs instead."""
    epochs = experiment.dataset_epochs
    if epochs is None:
        return experiment
    if not 0 < epochs < math.inf:
        raise ValueError(f"dataset_epochs is {epochs}: it must be above 0")
    steps = math.ceil(epochs * count_rows(experiment.dataset) / experiment.batch_size)
    if experiment.steps not in (steps, Experiment.steps):
        raise ValueError(
            f"steps is {experiment.steps} and dataset_epochs {epochs:g}, which are {steps} steps: set one of "
            "them (`--dataset-epochs None` leaves the latter out)")
    return replace(experiment, steps=steps)


def _frozen(role: Role) -> Role:
    """Return the role without optimizer and without fresh adapters, which change nothing.

    Roles of Megatron-Core get the native engine, which evaluates as well and runs anywhere.
    """
    lora = role.lora if role.lora is not None and role.lora.adapter is not None else None
    engine = "native" if role.engine == "megatron" else role.engine
    return replace(role, optimizer=None, lora=lora, follows=None, engine=engine)


def _datasets(eval_sets: Sequence[EvaluationProgram]) -> dict[str, tuple[DatasetConfig, DataflowGraph]]:
    return {eval_set.field: (eval_set.evaluation.dataset, eval_set.graph) for eval_set in eval_sets}


def with_evaluations(program: Program, eval_sets: Sequence[EvaluationProgram]) -> Program:
    """Return the program with its evaluations, after checking and compiling them."""
    tokenizer = program.experiment.tokenizer_dir()
    eval_sets = [
        replace(eval_set, graph=ending_with_turns(eval_set.graph, program.roles, tokenizer))
        for eval_set in eval_sets]
    first_tag = FIRST_INPUT + len(program.actions)  # An action has at most one tag.
    evaluations = compile_evaluations(
        eval_sets, program.plan, program.roles, program.homes, world_size=program.num_ranks,
        offloaded=program.offloaded, first_tag=first_tag)
    return replace(program, evaluations=evaluations)


def _offloaded_roles(graph: DataflowGraph, plan: ExecutionPlan) -> frozenset[str]:
    """Return the roles that have a call planned with `offload`."""
    calls = [call for call in graph.calls if call.role is not None and call.name in plan.calls]
    return frozenset(call.role for call in calls if call.role is not None and plan[call.name].offload)
