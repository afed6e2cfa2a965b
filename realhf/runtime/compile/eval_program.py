"""Compiles the evaluations of an experiment, and finds their layouts in the plan. Free of torch."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from realhf.data.dataset import reads_pairs
from realhf.evaluation.sets import Evaluation, metric_prefix, set_field
from realhf.experiment import Experiment, Role
from realhf.graph import DataflowGraph
from realhf.layout import Layout
from realhf.plan import CallPlan, ExecutionPlan
from realhf.runtime.compile import checks
from realhf.runtime.compile.actions import Action, compile_actions, complete_plan, parameter_specs
from realhf.runtime.compile.kept_answers import REWARD_SCORES, with_record

_PLAN = "eval/"
"""Beginning of the names under which a plan has layouts of evaluations: `eval/<call>` for all sets, and
`eval/<set>/<call>` for one."""


@dataclass(frozen=True)
class EvaluationProgram:
    """A set of held-out rows, and the graph, the plan and the actions with which it is evaluated."""

    name: str  # Empty for a single set.
    evaluation: Evaluation
    graph: DataflowGraph
    plan: ExecutionPlan = ExecutionPlan({})
    actions: tuple[Action, ...] = ()

    @property
    def prefix(self) -> str:
        """The beginning of the names of its metrics."""
        return metric_prefix(self.name)

    @property
    def field(self) -> str:
        """Its name in messages."""
        return set_field(self.name)

    @property
    def group_size(self) -> int:
        """Samples of each prompt: two of a pair, else those of the evaluation."""
        return 2 if self.reads_pairs else self.evaluation.samples

    @property
    def reads_pairs(self) -> bool:
        """Whether the rows are preference pairs."""
        return reads_pairs(self.graph.inputs)


def evaluation_graphs(experiment: Experiment) -> list[EvaluationProgram]:
    """Return the sets with their graphs, which keep scored answers. Raises ValueError about the first fault
    of a graph, or of the rows that it reads."""
    sets = []
    for name, (evaluation, graph) in experiment.eval_graphs().items():
        one = EvaluationProgram(name, evaluation, graph)
        checks.check_inputs(graph)
        checks.check_evaluation(graph)
        if one.reads_pairs and evaluation.samples > 1:
            raise ValueError(
                f"{one.field}.samples is {evaluation.samples}: it must be 1, as rows are preference pairs: "
                "their prompts get one answer")
        _check_deciding_reward(one)
        rows = checks.check_rows(evaluation.dataset, one.field, graph)
        with_answers = with_record(
            graph, rows, samples_per_prompt=one.group_size, keeps_all=not one.reads_pairs)
        sets.append(replace(one, graph=with_answers))
    return sets


def _check_deciding_reward(one: EvaluationProgram) -> None:
    """Raise ValueError if `correct_by` is not the name of a reward of the set."""
    functions = [call.work.function for call in one.graph.of_kind("host")]
    names = [reward.label for function in functions for reward in getattr(function, "rewards", ())]
    others = not names and one.graph.producer(REWARD_SCORES) is not None  # They are known by name, but later.
    if (name := one.evaluation.correct_by) is not None and name not in names and not others:
        there_are = f"its rewards are {', '.join(names)}" if names else "it has no reward functions"
        raise ValueError(f"{one.field}.correct_by is {name!r}: {there_are}")


def legal_names(sets: Sequence[EvaluationProgram]) -> list[str]:
    """Return the names of calls that a plan may have for evaluations."""
    names = []
    for one in sets:
        for call in one.graph.calls:
            names += [call.name, *_names(one, call.name)]
    return names


def _names(one: EvaluationProgram, call: str) -> list[str]:
    """Return the names under which a plan has a layout of its own for a call of a set, the first counts."""
    return [f"{_PLAN}{one.name}/{call}"] * bool(one.name) + [f"{_PLAN}{call}"]


def compile_evaluations(
    sets: Sequence[EvaluationProgram], plan: ExecutionPlan, roles: Mapping[str, Role],
    homes: Mapping[str, Layout], *, world_size: int, offloaded: Collection[str], first_tag: int,
) -> tuple[EvaluationProgram, ...]:  # fmt: skip
    """Return the sets with their plans and actions, whose tags begin with `first_tag`.

    Raises ValueError if the plan does not suit them.
    """
    compiled = []
    for one in sets:
        own = _own(one, plan)
        with _naming_own(one, own):
            whole = complete_plan(
                _plan_of(one, plan, own), one.graph, homes, offloaded=offloaded)
            whole.check(one.graph, world_size=world_size)
            checks.check_plan(one.graph, whole, roles, offloaded)
        graph = with_max_rows(one.graph, whole)
        actions = compile_actions(graph, whole, roles, homes, parameter_specs(roles), first_tag=first_tag)
        first_tag += len(actions)
        compiled.append(replace(one, graph=graph, plan=whole, actions=actions))
    return tuple(compiled)


def evaluation_homes(sets: Sequence[EvaluationProgram], plan: ExecutionPlan) -> dict[str, Layout]:
    """Return the home of each role in a program without training: the layout of its first call.

    Raises ValueError if the plan has none for it.
    """
    homes: dict[str, Layout] = {}
    for one in sets:
        planned = _plan_of(one, plan, _own(one, plan))
        for call in one.graph.order:
            if call.role is not None and call.role not in homes:
                if call.name not in planned.calls:
                    raise ValueError(f"calls.{call.name} is missing: the plan must give it a layout")
                homes[call.role] = planned[call.name].layout
    return homes


def _own(one: EvaluationProgram, plan: ExecutionPlan) -> dict[str, CallPlan]:
    """Return what the plan says of a set's calls for evaluations alone."""
    return {
        call.name: plan.calls[found[0]] for call in one.graph.calls
        if (found := [name for name in _names(one, call.name) if name in plan.calls])}


def _plan_of(one: EvaluationProgram, plan: ExecutionPlan, own: Mapping[str, CallPlan]) -> ExecutionPlan:
    """Return what the plan says of a set's calls, by their names in the set's graph.

    In a set with layouts of its own, other host calls run on the first rank of the first of these, so that no
    other rank waits for them.
    """
    calls: dict[str, CallPlan] = {}
    for call in one.graph.order:
        if call.name in own:
            calls[call.name] = own[call.name]
        elif call.kind == "host" and own:
            first = next(iter(own.values())).layout
            calls[call.name] = CallPlan(Layout.parse(f"d1@{first.ranks[0]}"))
        elif call.name in plan.calls:
            calls[call.name] = plan.calls[call.name]
    return ExecutionPlan(calls)


@contextmanager
def _naming_own(one: EvaluationProgram, own: Mapping[str, CallPlan]) -> Iterator[None]:
    """Name the calls in errors about a plan as the plan does."""
    try:
        yield
    except ValueError as error:
        text = str(error)
        call = text.removeprefix("calls.").partition(".")[0].partition(":")[0]
        if text.startswith("calls.") and call in own:
            text = f"calls.{_PLAN}{text.removeprefix('calls.')}"
        raise ValueError(text) from error


def with_max_rows(graph: DataflowGraph, plan: ExecutionPlan) -> DataflowGraph:
    """Return the graph with the plan's `max_rows` in its generating calls, which get the memory for it."""
    limited = [(call, rows) for call in graph.calls if (rows := plan[call.name].max_rows) is not None]
    return graph.replace(*(
        replace(c, work=replace(c.work, max_rows=rows, takes_free_memory=True)) for c, rows in limited))
