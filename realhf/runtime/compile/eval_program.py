"""Compiles evaluations, finds their layouts, and adds calls that collect scored samples. Free of torch."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import isnan
from typing import Any

from realhf.calls import Generate, HostFunction, response_keys
from realhf.data.dataset import DATASET_ROW, LOADER_KEYS, column_of, reads_pairs
from realhf.execution_plan import CallPlan, ExecutionPlan
from realhf.experiment import Evaluation, Experiment, Role, metric_prefix, set_field
from realhf.graph import DataflowGraph, FunctionCall
from realhf.layout import Layout
from realhf.runtime.compile import checks
from realhf.runtime.compile.actions import Action, compile_actions, complete_plan, parameter_specs
from realhf.steps.rollout_log import RolloutLog

_PLAN = "eval/"
"""Beginning of the names under which a plan has layouts of evaluations: `eval/<call>` for all sets, and
`eval/<set>/<call>` for one set."""
_CORRECT_ABOVE = 0.5
"""A sample is right if its reward is above this, unless the evaluation or the reward say otherwise."""
RECORD = "eval_record"
"""The call that collects the samples."""
SHOWN = ("prompt", "answer", "ground_truth", "completion", "score")
"""Fields of a sample that eval.jsonl has."""
REWARD_SCORES = "reward_scores"
"""Key of the scores by reward: a dict for each sample."""
REWARD_EXTRA = "reward_extra"
"""Key of the values that rewards have passed to `log_extra`: a dict for each sample."""
_FIELD_OF_KEY = {REWARD_SCORES: "scores", REWARD_EXTRA: "extra"}
"""Key -> field of a sample, where their names differ."""


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
        functions = [work.function for work in self.graph.works(HostFunction)]
        return {
            reward.label: reward for function in functions for reward in getattr(function, "rewards", ())}

    @property
    def deciding(self) -> str | None:
        """The name of the reward that decides which samples are right; None if it is known only later."""
        return self.evaluation.correct_by or next(iter(self.rewards), None)

    @property
    def has_environment(self) -> bool:
        """Whether samples are rollouts, whose environments reward them."""
        return any(work.environment is not None for work in self.graph.works(Generate))

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
    """Return the sets with their graphs, extended by a call that collects the scored samples.

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
            graph, rows, samples_per_prompt=eval_set.group_size, takes_all=not eval_set.reads_pairs,
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
            whole = complete_plan(evaluation_plan(eval_set, plan), eval_set.graph, homes, offloaded=offloaded)
            whole.check(eval_set.graph, world_size=world_size)
            checks.check_plan(eval_set.graph, whole, roles, offloaded)
        graph = whole.with_rows_and_caches(eval_set.graph)
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
        planned = evaluation_plan(eval_set, plan)
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


def evaluation_plan(eval_set: EvaluationProgram, plan: ExecutionPlan) -> ExecutionPlan:
    """Return the plan of those calls of a set that a plan has, by their names in the set's graph.

    If some calls have a plan for evaluations alone, host calls without one run on the first rank of the first
    such plan, so that no other rank waits for them.
    """
    own_plans = _own_plans(eval_set, plan)
    calls: dict[str, CallPlan] = {}
    for call in eval_set.graph.order:
        if call.name in own_plans:
            calls[call.name] = own_plans[call.name]
        elif call.kind == "host" and own_plans:
            first = next(iter(own_plans.values())).layout
            calls[call.name] = CallPlan(Layout.parse(f"d1@{first.ranks[0]}"))
        elif call.name in plan.calls:
            # The cache of a plan is for the samples of a step.
            calls[call.name] = replace(plan.calls[call.name], kv_cache_gib=None)
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


NONE_IS_RIGHT = "so that no sample counts as right"


def doubt_of_limit(
    values: Iterable[float | None], correct_above: float, *, is_chosen: bool
) -> str | None:
    """Return in words why `correct_above` seems not to tell right samples, judged by values of a reward.

    Return None if nothing is wrong with it. If the user has chosen it, it may be far below the highest value.
    """
    known = sorted(set(known_values(values)))
    right = [value for value in known if value > correct_above]
    if known and not right and (len(known) > 1 or known[0] > 0):
        return f"the highest value is {known[-1]:g}, {NONE_IS_RIGHT}"
    if len(right) > 1 and not is_chosen and (right[-1] > 1 or len(right) == len(known)):
        return f"samples with values from {right[0]:g} to {right[-1]:g} all count as right"
    return None


def known_values(values: Iterable[float | None]) -> list[float]:
    """Return the values that are neither None nor NaN."""
    return [value for value in values if value is not None and not isnan(value)]


def with_record(
    graph: DataflowGraph, rows: Sequence[Mapping[str, Any]],
    *, samples_per_prompt: int, takes_all: bool, log: RolloutLog,
) -> DataflowGraph:
    """Return the graph with a last call that collects the samples, if it scores samples.

    `rows` are those of the dataset. Without `takes_all`, only the first sample of each prompt is taken. `log`
    says how long the values of columns may be.
    """
    if graph.producer("score") is None:
        return graph
    shown = [key for key in ("answer", "ground_truth") if all(key in row for row in rows)]
    columns = [key for key in graph.inputs if key not in (*LOADER_KEYS, *shown)]
    names = response_keys(graph)
    mask = None if names is None or graph.producer(names.mask) is None else names.mask
    finished = None if names is None or graph.producer(names.finished) is None else names.finished
    by_reward = [key for key in _FIELD_OF_KEY if graph.producer(key) is not None]
    collect = CollectSamples(
        samples_per_prompt, takes_all=takes_all, shown=("prompt", *shown), columns=(*shown, *columns),
        mask=mask, finished=finished, answer_of=_answer_of(graph), log=log)
    lengths = () if mask is None or finished is None else (mask, finished)
    keys = ("prompt", *shown, *columns, DATASET_ROW, "completion", "score", *by_reward, *lengths)
    record = FunctionCall(RECORD, inputs=keys, work=HostFunction(collect))
    from_dataset = [key for key in ("prompt", *shown, DATASET_ROW) if graph.producer(key) is None]
    return graph.add(record, inputs=[key for key in from_dataset if key not in graph.inputs])


def _answer_of(graph: DataflowGraph) -> Any:
    """Return the method by which a reward extracts the answer from a completion, if there is one."""
    methods = (getattr(work.function, "answer_of", None) for work in graph.works(HostFunction))
    return next((method for method in methods if callable(method)), None)


@dataclass(frozen=True)
class CollectSamples:
    """A host function that hands on the scored samples of an evaluation as `context.scored_samples`.

    A sample is a dict: the row of its prompt in the file, the number of the sample among the prompt's, the
    prompt's columns `shown`, completion and score, and a dict of the columns that calls read. If they are
    known, it also has: scores by reward, values that rewards have logged, length in tokens, whether it ended
    by itself, and the final answer in it.
    """

    samples_per_prompt: int
    takes_all: bool = False
    """Whether all samples of a prompt are taken; else the first is, as the samples of a pair have the same
    prompt, and so the same greedy response."""
    shown: tuple[str, ...] = ("prompt",)
    columns: tuple[str, ...] = ()  # Keys of the columns of the dataset that calls read.
    mask: str | None = None  # Keys of the response mask, and of whether the response has ended.
    finished: str | None = None
    answer_of: Any = None
    log: RolloutLog = RolloutLog()

    def __call__(self, batch: Any, context: Any) -> dict[str, Any]:
        indices = [i for i, sample in enumerate(batch.ids) if self.takes_all or not self._number(sample)]
        batch = batch.select(indices)
        samples: list[dict[str, Any]] = [
            {"dataset_row": row, "sample": self._number(sample)}
            for row, sample in zip(batch[DATASET_ROW], batch.ids, strict=True)]
        for key in (*self.shown, "completion", "score", *_FIELD_OF_KEY):
            if key in batch.fields:
                self._add(samples, _FIELD_OF_KEY.get(key, key), batch[key])
        if self.columns:
            rows = zip(*(batch[key] for key in self.columns), strict=True)
            names = [column_of(key) for key in self.columns]
            self._add(samples, "columns", [
                dict(zip(names, map(self.log.shortened_value, row), strict=True)) for row in rows])
        if self.mask is not None and self.finished is not None:
            self._add(samples, "length", batch[self.mask].response_lengths())
            self._add(samples, "finished", [bool(ended) for ended in batch[self.finished].tolist()])
        if self.answer_of is not None:
            final_answers = [self.answer_of(text) for text in batch["completion"]]
            texts = [None if answer is None else str(answer) for answer in final_answers]
            self._add(samples, "final_answer", texts)
        context.scored_samples = samples
        return {}

    def _number(self, sample: int) -> int:
        return sample % self.samples_per_prompt

    def _add(self, samples: list[dict[str, Any]], key: str, column: Any) -> None:
        values = column if isinstance(column, list) else column.tolist()
        for sample, value in zip(samples, values, strict=True):
            sample[key] = value
