"""Evaluations: runs the evaluations of a program on this rank, and joins what all ranks have found."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from realhf.data.loader import Loader, MixedLoader, make_loader
from realhf.dist.group import Outbox
from realhf.dist.world import World
from realhf.evaluation.metrics import (
    ScoredAnswer,
    known_values,
    length_metrics,
    mean,
    named_scores,
    sample_metrics,
)
from realhf.runtime.compile.actions import dataset_layout
from realhf.runtime.compile.checks import row_faults_of
from realhf.runtime.compile.eval_program import EvaluationProgram
from realhf.runtime.compile.program import Program
from realhf.runtime.compile.warnings import check_lengths
from realhf.runtime.execute.executor import Executor
from realhf.runtime.execute.host_context import HostContext
from realhf.runtime.records.recorder import merge_metrics
from realhf.runtime.records.step_record import StepRecord
from realhf.runtime.weights.model_store import ModelStore

_PART = "evaluation"
"""Name of the only part of an evaluation's graph."""
_EVAL = "eval/"


@dataclass
class SetRecord:
    """The part of a set's evaluation that one rank has, as JSON values: metrics, events and answers."""

    record: StepRecord = field(default_factory=StepRecord)
    answers: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> "SetRecord":
        """Return what `to_json` has written."""
        return cls(StepRecord(**document["record"]), document["answers"])

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class EvaluationReport:
    """The result of an evaluation of all sets: metrics, whose names begin with `eval/`, and the answers by
    set. `events` are those of all ranks, with the names of the sets before those of calls."""

    metrics: Mapping[str, float]
    answers: Mapping[str, Sequence[Mapping[str, Any]]]
    events: Sequence[dict[str, Any]]


class Evaluations:
    """The evaluations of a program. Every rank constructs it, and runs it at the same places of the run."""

    def __init__(self, program: Program, world: World, context: HostContext) -> None:
        """Read the rows on the ranks that need them."""
        self._program = program
        self._world = world
        self._context = context
        self._sets = program.evaluations
        self.loaders = {one.name: self._make_loader(one) for one in self._sets}
        """The rows of each set on the ranks that hold them, and on rank 0."""
        self._prompts: dict[str, list[int]] = {}
        self._executors: dict[str, Executor] = {}
        self._outboxes: list[Outbox] = []

    def _make_loader(self, one: EvaluationProgram) -> Loader | MixedLoader | None:
        if self._world.rank != 0 and self._world.rank not in dataset_layout(one.graph, one.plan):
            return None
        loader = make_loader(
            one.evaluation.dataset, keys=one.graph.inputs, tokenizer=self._context.tokenizer,
            group_size=one.group_size, seed=self._program.experiment.seed,
            row_faults=row_faults_of(one.graph))
        check_lengths(self._program.roles, one.graph, loader)
        return loader

    def count_prompts(self) -> dict[str, int]:
        """Return the number of prompts of each set. All ranks call this, before `start`."""
        mine = [len(loader or ()) for loader in self.loaders.values()]
        counts = self._world.control.all_gather_json(mine)
        for one, sizes in zip(self._sets, zip(*counts, strict=True), strict=True):
            self._prompts[one.name] = one.evaluation.chosen_rows(max(sizes))
        return {name: len(prompts) for name, prompts in self._prompts.items()}

    def start(self, store: ModelStore) -> None:
        """Prepare to run on these models."""
        for one in self._sets:
            loader = self.loaders[one.name]
            # Each has an outbox of its own, so that no rank waits for one that evaluates another set.
            self._outboxes.append(Outbox())
            self._executors[one.name] = Executor(
                self._world, {_PART: one.actions}, one.plan, store, self._context,
                read=None if loader is None else loader.batch, is_evaluation=True,
                outbox=self._outboxes[-1], group_size=one.group_size)

    def run(self) -> list[SetRecord]:
        """Evaluate all sets; return what this rank has of each."""
        activity = self._world.activity
        found = []
        for one in self._sets:
            of_set = f" of {one.name}" if one.name else ""
            activity.step = f"evaluation{of_set} after step {self._context.step}"
            prompts = self._prompts[one.name]
            executor = self._executors[one.name]
            self._context.answers = []
            executor.begin_step()
            executor.run(_PART, prompts, updates=self._context.updates)
            executor.forget(prompts)
            found.append(SetRecord(executor.take_record(), self._context.answers))
        return found

    def wait(self) -> None:
        """Wait until all messages have been received."""
        for outbox in self._outboxes:
            outbox.wait()


def report(sets: Sequence[EvaluationProgram], by_rank: Sequence[Sequence[SetRecord]]) -> EvaluationReport:
    """Return the result of an evaluation from the records of all ranks, which have one for each set."""
    metrics: dict[str, float] = {}
    answers: dict[str, list[dict[str, Any]]] = {}
    events: list[dict[str, Any]] = []
    for one, records in zip(sets, zip(*by_rank, strict=True), strict=True):
        if of_set := [answer for record in records for answer in record.answers]:
            answers[one.name] = of_set
        found = _metrics_of_answers(one, of_set)
        found |= merge_metrics([StepRecord(record.record.metrics) for record in records])
        metrics |= {one.prefix + name.removeprefix(_EVAL): value for name, value in found.items()}
        events += [_named(event, one) for record in records for event in record.record.events]
    return EvaluationReport(metrics, answers, events)


def _metrics_of_answers(one: EvaluationProgram, answers: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    if not answers:
        return {}
    evaluation = one.evaluation
    decides = evaluation.correct_by or next(iter(answers[0].get("scores", ())), None)
    prompts = [[_scored(answer, decides) for answer in group] for group in _by_prompt(answers)]
    metrics = sample_metrics(prompts, samples=evaluation.samples, correct_above=evaluation.correct_above)
    metrics["score"] = mean(known_values(answer["score"] for answer in answers))
    if "scores" in answers[0]:
        metrics = named_scores([answer["scores"] for answer in answers]) | metrics
    return metrics | length_metrics(answers)


def _scored(answer: Mapping[str, Any], decides: str | None) -> ScoredAnswer:
    """Return the answer with the value of the reward that decides; without names, with its score.

    A majority compares what the reward has found in the answer, or else the stripped text.
    """
    value = answer["score"] if decides is None else answer["scores"][decides]
    text = answer["completion"]
    vote = answer["final_answer"] if "final_answer" in answer else text.strip()
    return ScoredAnswer(math.nan if value is None else value, vote)


def _by_prompt(answers: Sequence[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    """Yield the answers to each prompt, which have rising numbers."""
    group: list[Mapping[str, Any]] = []
    for answer in answers:
        if group and answer["sample"] <= group[-1]["sample"]:
            yield group
            group = []
        group.append(answer)
    if group:
        yield group


def _named(event: dict[str, Any], one: EvaluationProgram) -> dict[str, Any]:
    """Return an event with the name of the set before that of its call; reallocations are of roles."""
    return event if event["kind"] == "realloc" else {**event, "name": one.prefix + event["name"]}


def main_metric(names: Sequence[str], sets: Sequence[EvaluationProgram]) -> str | None:
    """Return the main metric of the first set: its score, else its loss, else the first that it has."""
    prefix = sets[0].prefix if sets else _EVAL
    own = [name for name in names if name.startswith(prefix)] or list(names)
    return next((name for name in (f"{prefix}score", f"{prefix}loss", *own) if name in names), None)


def first_and_last(
    evaluations: Sequence[Mapping[str, float]], sets: Sequence[EvaluationProgram]
) -> dict[str, Any]:
    """Return the first and the last value of the main metric, and those of all metrics of all sets."""
    names = list(dict.fromkeys(name for evaluation in evaluations for name in evaluation))
    values = {name: [e[name] for e in evaluations if name in e] for name in names}
    ends = {name: {"first": found[0], "last": found[-1]} for name, found in values.items()}
    main = main_metric(list(evaluations[0]) if evaluations else [], sets)
    return {
        "eval_metric": main,
        "eval_first": ends[main]["first"] if main else None,
        "eval_last": ends[main]["last"] if main else None,
        "evals": ends,
    }
