"""Compiles the evaluations of an experiment, and finds their layouts in the plan. Free of torch."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import isnan
from typing import Any

from realhf.data.dataset import reads_pairs
from realhf.experiment import Evaluation, Experiment, Role, metric_prefix, set_field
from realhf.graph import DataflowGraph
from realhf.layout import Layout
from realhf.plan import CallPlan, ExecutionPlan
from realhf.runtime.compile import checks
from realhf.runtime.compile.actions import Action, compile_actions, complete_plan, parameter_specs
from realhf.runtime.compile.kept_samples import REWARD_SCORES, with_record

_PLAN = "eval/"
"""Beginning of the names under which a plan has layouts of evaluations: `eval/<call>` for all sets, and
`eval/<set>/<call>` for one set."""
_CORRECT_ABOVE = 0.5
"""A sample is right if its reward is above this, unless the evaluation or the reward say otherwise."""


@dataclass(frozen=True)
class EvaluationProgram:
    """A set of held-out rows, with the graph, the plan and the actions that evaluate it."""

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
    def rewards(self) -> dict[str, Any]:
        """The rewards that are functions, by their names."""
        functions = [call.work.function for call in self.graph.of_kind("host")]
        return {
            reward.label: reward for function in functions for reward in getattr(function, "rewards", ())}

    @property
    def deciding(self) -> str | None:
        """The name of the reward that decides which samples are right; None if it is known only later."""
        return self.evaluation.correct_by or next(iter(self.rewards), None)

    @property
    def correct_above(self) -> float:
        """The limit above which a value of that reward counts as right."""
        if self.evaluation.correct_above is not None:
            return self.evaluation.correct_above
        reward = self.rewards.get(self.deciding or "")
        return float(getattr(reward and reward.function, "correct_above", _CORRECT_ABOVE))

    def doubt(self, values: Iterable[float | None]) -> str | None:
        """Return what seems wrong with the limit, judged by values of that reward; None if nothing does."""
        if self.evaluation.samples == 1:
            return None  # There is no pass@k.
        is_chosen = self.evaluation.correct_above is not None
        why = doubt_of_limit(values, self.correct_above, is_chosen=is_chosen)
        of_reward = f" of reward {self.deciding}" if self.deciding else ""
        mend = "set Evaluation.correct_above"
        return why and f"{self.field}: by correct_above {self.correct_above:g}{of_reward}, {why}: {mend}"

    @property
    def reads_pairs(self) -> bool:
        return reads_pairs(self.graph.inputs)


def evaluation_graphs(experiment: Experiment) -> list[EvaluationProgram]:
    """Return the sets with their graphs, extended by a call that keeps the scored samples.

    Raises ValueError about the first fault of a graph, or of the rows that it reads.
    """
    sets = []
    for name, (evaluation, graph) in experiment.eval_graphs().items():
        eval_set = EvaluationProgram(name, evaluation, graph)
        checks.check_inputs(graph)
        checks.check_evaluation(graph)
        if eval_set.reads_pairs and evaluation.samples > 1:
            raise ValueError(
                f"{eval_set.field}.samples is {evaluation.samples}: it must be 1, as rows are "
                "preference pairs: their prompts get one sample")
        _check_deciding_reward(eval_set)
        rows = checks.check_rows(evaluation.dataset, eval_set.field, graph)
        recorded = with_record(
            graph, rows, samples_per_prompt=eval_set.group_size, keeps_all=not eval_set.reads_pairs,
            log=experiment.rollouts)
        sets.append(replace(eval_set, graph=recorded))
    return sets


def _check_deciding_reward(eval_set: EvaluationProgram) -> None:
    """Raise ValueError unless `correct_by` names a reward of the set."""
    names = list(eval_set.rewards)
    # Rewards without functions have names, too, but these are known only later.
    others = not names and eval_set.graph.producer(REWARD_SCORES) is not None
    if (name := eval_set.evaluation.correct_by) is not None and name not in names and not others:
        there_are = f"its rewards are {', '.join(names)}" if names else "it has no reward functions"
        raise ValueError(f"{eval_set.field}.correct_by is {name!r}: {there_are}")


def legal_names(sets: Sequence[EvaluationProgram]) -> list[str]:
    """Return the names of calls that a plan may have for evaluations."""
    names = []
    for eval_set in sets:
        for call in eval_set.graph.calls:
            names += [call.name, *_names(eval_set, call.name)]
    return names


def _names(eval_set: EvaluationProgram, call: str) -> list[str]:
    """Return under which names a plan may have a call for evaluations alone; the first that it has counts."""
    return [f"{_PLAN}{eval_set.name}/{call}"] * bool(eval_set.name) + [f"{_PLAN}{call}"]


def compile_evaluations(
    sets: Sequence[EvaluationProgram], plan: ExecutionPlan, roles: Mapping[str, Role],
    homes: Mapping[str, Layout], *, world_size: int, offloaded: Collection[str], first_tag: int,
) -> tuple[EvaluationProgram, ...]:
    """Return the sets with their plans and actions, whose tags begin with `first_tag`.

    Raises ValueError if the plan does not suit them.
    """
    compiled = []
    for eval_set in sets:
        own_plans = _own_plans(eval_set, plan)
        with _naming_own(own_plans):
            whole = _plan_of(eval_set, plan, own_plans)
            whole = complete_plan(whole, eval_set.graph, homes, offloaded=offloaded)
            whole.check(eval_set.graph, world_size=world_size)
            checks.check_plan(eval_set.graph, whole, roles, offloaded)
        graph = whole.with_rows_and_free_memory(eval_set.graph)
        actions = compile_actions(graph, whole, roles, homes, parameter_specs(roles), first_tag=first_tag)
        first_tag += len(actions)
        compiled.append(replace(eval_set, graph=graph, plan=whole, actions=actions))
    return tuple(compiled)


def evaluation_homes(sets: Sequence[EvaluationProgram], plan: ExecutionPlan) -> dict[str, Layout]:
    """Return the home of each role in a program without training: the layout of the role's first call.

    Raises ValueError if the plan has none for it.
    """
    homes: dict[str, Layout] = {}
    for eval_set in sets:
        planned = _plan_of(eval_set, plan, _own_plans(eval_set, plan))
        for call in eval_set.graph.order:
            if call.role is not None and call.role not in homes:
                if call.name not in planned.calls:
                    raise ValueError(f"calls.{call.name} is missing: the plan must give it a layout")
                homes[call.role] = planned[call.name].layout
    return homes


def _own_plans(eval_set: EvaluationProgram, plan: ExecutionPlan) -> dict[str, CallPlan]:
    """Return, by call, the entries of the plan that are for evaluations alone."""
    entries = {call.name: _names(eval_set, call.name) for call in eval_set.graph.calls}
    planned = {call: [name for name in names if name in plan.calls] for call, names in entries.items()}
    return {call: plan.calls[names[0]] for call, names in planned.items() if names}


def _plan_of(
    eval_set: EvaluationProgram, plan: ExecutionPlan, own_plans: Mapping[str, CallPlan]
) -> ExecutionPlan:
    """Return the plan of a set's calls, by their names in the set's graph.

    If some calls have a plan for evaluations alone, host calls without one run on the first rank of the first
    such plan, so that no other rank waits for them.
    """
    calls: dict[str, CallPlan] = {}
    for call in eval_set.graph.order:
        if call.name in own_plans:
            calls[call.name] = own_plans[call.name]
        elif call.kind == "host" and own_plans:
            first = next(iter(own_plans.values())).layout
            calls[call.name] = CallPlan(Layout.parse(f"d1@{first.ranks[0]}"))
        elif call.name in plan.calls:
            calls[call.name] = plan.calls[call.name]
    return ExecutionPlan(calls)


@contextmanager
def _naming_own(own_plans: Mapping[str, CallPlan]) -> Iterator[None]:
    """Name calls in errors as the plan does: eval/actor_generate if the call has a plan of its own."""
    try:
        yield
    except ValueError as error:
        text = str(error)
        call = text.removeprefix("calls.").partition(".")[0].partition(":")[0]
        if text.startswith("calls.") and call in own_plans:
            text = f"calls.{_PLAN}{text.removeprefix('calls.')}"
        raise ValueError(text) from error


def doubt_of_limit(
    values: Iterable[float | None], correct_above: float, *, is_chosen: bool
) -> str | None:
    """Return in words why `correct_above` seems not to tell right samples, judged by values of a reward.

    Return None if nothing is wrong with it. If the user has chosen it, it may be far below the highest value.
    """
    known = sorted(set(known_values(values)))
    right = [value for value in known if value > correct_above]
    if known and not right and (len(known) > 1 or known[0] > 0):
        return f"the highest value is {known[-1]:g}, so that no sample counts as right"
    if len(right) > 1 and not is_chosen and (right[-1] > 1 or len(right) == len(known)):
        return f"samples with values from {right[0]:g} to {right[-1]:g} all count as right"
    return None


def known_values(values: Iterable[float | None]) -> list[float]:
    """Return the values that are neither None nor NaN."""
    return [value for value in values if value is not None and not isnan(value)]
