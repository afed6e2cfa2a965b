"""Compiles an experiment and a plan into a Program, and checks both before the run. Free of torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from realhf.calls import HostFunction
from realhf.data.dataset import reads_pairs
from realhf.dist.tags import FIRST_INPUT
from realhf.experiment import Experiment, Role
from realhf.graph import DataflowGraph, FunctionCall
from realhf.layout import Layout
from realhf.plan import ExecutionPlan, home_layouts
from realhf.realloc.links import Links
from realhf.resolved_roles import resolved_roles
from realhf.runtime import checks
from realhf.runtime.actions import (
    Action,
    adapters_of,
    compile_actions,
    compile_parts,
    complete_plan,
    parameter_specs,
)


@dataclass(frozen=True)
class Program:
    """An experiment and a plan that fit each other, compiled into actions for all ranks."""

    experiment: Experiment
    roles: Mapping[str, Role]
    graph: DataflowGraph
    eval_graph: DataflowGraph | None
    plan: ExecutionPlan
    homes: Mapping[str, Layout]
    num_ranks: int
    offloaded: frozenset[str]
    """Frozen roles whose weights stay in host memory while no call needs them."""
    parts: Mapping[str, tuple[Action, ...]]
    """The actions of each part of a step."""
    eval_actions: tuple[Action, ...]
    links: Links | None = None
    """The links for which reallocations are scheduled; None: they are unknown."""
    peak_flops: Mapping[str, float] = field(default_factory=dict)
    """Dtype -> FLOP/s of a device, as far as a cluster or profile file tells."""

    @property
    def actions(self) -> tuple[Action, ...]:
        """The actions of all parts, and then those of the evaluation."""
        return (*(action for part in self.parts.values() for action in part), *self.eval_actions)

    @property
    def eval_group_size(self) -> int:
        """Samples of each prompt in an evaluation: two of a pair, else one."""
        return 1 if self.eval_graph is None else samples_per_prompt(self.eval_graph)

    @property
    def adapter_sizes(self) -> dict[str, tuple[int, int]]:
        """Return for each role with adapters the number of their parameters and of its model's."""
        specs = parameter_specs(self.roles)
        with_adapters = (name for name, role in self.roles.items() if role.lora is not None)
        return {name: (specs[adapters_of(name)].numel, specs[name].numel) for name in with_adapters}


def compile_program(experiment: Experiment, plan: ExecutionPlan | None, *, world_size: int) -> Program:
    """Check everything that can be known before the first step, and compile the actions.

    Without a plan, every call is split over all ranks by dp. Raises ValueError at the first fault.
    """
    checks.check_numbers(experiment)
    roles = experiment.roles()
    eval_graph = _eval_graph(experiment)
    checks.check_role_names(roles)
    graph = experiment.graph()
    checks.check_graph(experiment, graph, roles)
    graph = experiment.seeded(graph)
    if plan is None:
        plan = ExecutionPlan.single(graph, Layout.parse(f"d{world_size}@0-{world_size - 1}"))
    plan = complete_plan(plan, graph, {})
    plan.check(graph, world_size=world_size, also=_names(eval_graph))
    homes = home_layouts(graph, plan, roles)
    offloaded = _offloaded_roles(graph, plan)
    checks.check_roles(roles)
    roles = resolved_roles(experiment, roles, graph)
    checks.check_plan(graph, plan, roles, offloaded)
    checks.check_data(experiment, roles, graph, eval_graph)
    checks.check_step(experiment, graph, roles)
    graph = _with_max_rows(graph, plan)
    parts = compile_parts(
        graph, plan, roles, homes, parameter_specs(roles), experiment.parts(graph),
        in_rounds=experiment.num_rounds > 1)
    program = Program(experiment, roles, graph, None, plan, homes, world_size, offloaded, parts, ())
    return program if eval_graph is None else _with_evaluation(program, eval_graph)


def _with_evaluation(program: Program, graph: DataflowGraph) -> Program:
    """Return the program with the evaluation's graph, after checking and compiling it."""
    roles = program.roles
    plan = complete_plan(program.plan, graph, program.homes, offloaded=program.offloaded)
    plan.check(graph, world_size=program.num_ranks, also=_names(program.graph))
    checks.check_plan(graph, plan, roles, program.offloaded)
    graph = _with_max_rows(graph, plan)
    first_tag = FIRST_INPUT + len(program.actions)  # An action has at most one tag.
    actions = compile_actions(
        graph, plan, roles, program.homes, parameter_specs(roles), first_tag=first_tag)
    return replace(program, eval_graph=graph, plan=plan, eval_actions=actions)


def _names(graph: DataflowGraph | None) -> list[str]:
    return [] if graph is None else [call.name for call in graph.calls]


def _offloaded_roles(graph: DataflowGraph, plan: ExecutionPlan) -> frozenset[str]:
    """Return the roles that have a call planned with `offload`."""
    return frozenset(call.role for call in graph.calls if call.role is not None and plan[call.name].offload)


def _eval_graph(experiment: Experiment) -> DataflowGraph | None:
    """Return the evaluation's graph; if it scores answers, with a last call on rank 0 that keeps them for
    eval.jsonl."""
    graph = experiment.eval_graph() if experiment.eval_dataset is not None else None
    if graph is None:
        return None
    checks.check_inputs(graph)
    checks.check_evaluation(graph)
    rows = checks.check_rows(experiment, "eval_dataset", graph)
    if graph.producer("score") is None:
        return experiment.seeded(graph)
    shown = ["prompt", *(key for key in ("answer", "ground_truth") if all(key in row for row in rows))]
    keys = (*shown, "completion", "score")
    keep = KeepAnswers(samples_per_prompt(graph))
    record = FunctionCall("eval_record", "host", keys, work=HostFunction(keep))
    return experiment.seeded(graph).add(record, inputs=[key for key in shown if key not in graph.inputs])


def _with_max_rows(graph: DataflowGraph, plan: ExecutionPlan) -> DataflowGraph:
    """Return the graph with the plan's `max_rows` in its generating calls."""
    limited = [(call, rows) for call in graph.calls if (rows := plan[call.name].max_rows) is not None]
    return graph.replace(*(replace(c, work=replace(c.work, max_rows=rows)) for c, rows in limited))


def samples_per_prompt(eval_graph: DataflowGraph) -> int:
    """Return the samples of each prompt in an evaluation: two of a pair, else one."""
    return 2 if reads_pairs(eval_graph.inputs) else 1


@dataclass(frozen=True)
class KeepAnswers:
    """A host function that keeps the scored answers of an evaluation, one for each prompt.

    The samples of a pair have the same prompt, and so the same greedy answer.
    """

    samples_per_prompt: int

    def __call__(self, batch: Any, context: Any) -> dict[str, Any]:
        firsts = [i for i, sample in enumerate(batch.ids) if sample % self.samples_per_prompt == 0]
        batch = batch.select(firsts)
        columns = [x if isinstance(x, list) else x.tolist() for x in batch.fields.values()]
        context.answers = [dict(zip(batch.fields, row, strict=True)) for row in zip(*columns, strict=True)]
        return {}
