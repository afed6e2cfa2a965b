"""Evaluations: runs the evaluations of a program on this rank, merges the records of all ranks, and computes
the metrics of several samples of each prompt.

A score is NaN if its reward has failed. Such samples do not count.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import comb, fsum, isnan
from pathlib import Path
from typing import Any

from realhf.data.dataset import ArrayDataset
from realhf.data.loader import ArrayLoader, Loader, tokenized
from realhf.distributed import tags
from realhf.distributed.group import Outbox
from realhf.distributed.world import World
from realhf.errors import UserError, warn
from realhf.experiment import Role
from realhf.runtime.compile.actions import dataset_layout
from realhf.runtime.compile.checks import check_lengths, check_vocabulary, row_faults_of
from realhf.runtime.compile.eval_program import EvaluationProgram, known_values
from realhf.runtime.compile.program import Program
from realhf.runtime.doubts.rules import warnings_of
from realhf.runtime.execute.executor import Executor, PartsProgram, RankState
from realhf.runtime.execute.host_call import HostContext
from realhf.runtime.records.progress import Progress
from realhf.runtime.records.recorder import EvaluationFiles
from realhf.runtime.records.step_record import Event, StepRecord, finite, merge_metrics
from realhf.runtime.weights.model_store import ModelStore


@dataclass(frozen=True)
class ScoredSample:
    """A sample as the metrics see it; `vote` is its answer in a majority vote, None if it has none."""

    score: float
    vote: str | None = None


def pass_at(k: int, *, num_samples: int, num_correct: int) -> float:
    """Return the unbiased estimate of the probability that one of k samples is correct.

    It is 1 - C(n - c, k) / C(n, k) for n samples of which c are correct, the share of the subsets of size k
    that have a correct one (Chen et al. 2021, arXiv:2107.03374).
    """
    assert 1 <= k <= num_samples, "k samples are drawn without replacement"
    return 1.0 - comb(num_samples - num_correct, k) / comb(num_samples, k)


def majority_score(samples: Sequence[ScoredSample]) -> float:
    """Return the score of the most frequent answer of one prompt.

    Samples without an answer do not vote, unless none has one. The score of an answer is the mean over the
    samples that give it. If several answers are equally frequent, return the mean of their scores, so that
    the order of the samples does not matter.
    """
    votes: dict[str | None, list[float]] = {}
    for sample in samples:
        votes.setdefault(sample.vote, []).append(sample.score)
    if len(votes) > 1:
        votes.pop(None, None)
    most = max(len(scores) for scores in votes.values())
    return mean(mean(scores) for scores in votes.values() if len(scores) == most)


def pass_sizes(samples: int) -> list[int]:
    """Return the values of k for which pass@k is logged: powers of two, and the number of samples."""
    powers = [1 << i for i in range(samples.bit_length()) if 1 << i <= samples]
    return powers if powers[-1] == samples else [*powers, samples]


def sample_metrics(
    prompts: Sequence[Sequence[ScoredSample]], *, samples: int, correct_above: float
) -> dict[str, float]:
    """Return the metrics of scored samples, given as the samples of each prompt.

    `score` is the mean over all of them. With several samples per prompt there are also `mean@k` (the same),
    and the means over prompts of `pass@1`, `pass@2` and so on, `majority@k` and `best@k`, where k is the
    number of samples. A prompt with fewer than k samples does not count in pass@k. A metric for which no
    sample or prompt counts is left out.
    """
    scored = [[sample for sample in of_prompt if not isnan(sample.score)] for of_prompt in prompts]
    scored = [of_prompt for of_prompt in scored if of_prompt]
    scores = [sample.score for of_prompt in scored for sample in of_prompt]
    values = {"score": scores}
    if samples > 1:
        values[f"mean@{samples}"] = scores
        counts = [(len(of_prompt), sum(x.score > correct_above for x in of_prompt)) for of_prompt in scored]
        for k in pass_sizes(samples):
            values[f"pass@{k}"] = [pass_at(k, num_samples=n, num_correct=c) for n, c in counts if n >= k]
        values[f"majority@{samples}"] = [majority_score(of_prompt) for of_prompt in scored]
        values[f"best@{samples}"] = [max(sample.score for sample in of_prompt) for of_prompt in scored]
    return means(values)


def named_scores(scores: Sequence[Mapping[str, float | None]]) -> dict[str, float]:
    """Return name -> mean of each reward, if there are several. `scores` has name -> value for each sample.

    None and NaN do not count, and a reward without any other value is left out. A sample without a name, as
    an environment did not give the reward, counts as 0.
    """
    names = dict.fromkeys(name for by_name in scores for name in by_name)
    if len(names) < 2:
        return {}
    return means({name: known_values(by_name.get(name, 0.0) for by_name in scores) for name in names})


def length_metrics(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the mean length in tokens of responses, and the share of those that were cut off."""
    if not rows or "length" not in rows[0]:
        return {}
    return {
        "response_length/mean": mean(float(row["length"]) for row in rows),
        "response_length/clip_ratio": mean(float(not row["finished"]) for row in rows),
    }


def means(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the mean of the values of each name, without the names that have no values."""
    return {name: mean(numbers) for name, numbers in values.items() if numbers}


def mean(values: Iterable[float]) -> float:
    """Return the mean of the values, of which there must be at least one."""
    numbers = list(values)
    return fsum(numbers) / len(numbers)


_PART = "evaluation"
"""Name of the only part of an evaluation's graph."""
_EVAL = "eval/"
_FAILED = "failed"
"""The metric of a set with the share of samples whose reward has failed; it is left out if there are none."""


@dataclass
class SetRecord:
    """The part of a set's evaluation that one rank has, as JSON values: metrics, events and samples."""

    record: StepRecord = field(default_factory=StepRecord)
    samples: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> SetRecord:
        """Return the record that `to_json` has written."""
        return cls(StepRecord(**document["record"]), document["samples"])

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class EvaluationReport:
    """The result of an evaluation of all sets.

    The names of metrics begin with `eval/`, `samples` are by set, and an event of any rank has the name of
    its set before that of its call. `faults` are sentences about scores and metrics that are missing,
    `doubts` about settings of sets by which samples seem to be judged wrongly.
    """

    metrics: Mapping[str, float]
    samples: Mapping[str, Sequence[Mapping[str, Any]]]
    events: Sequence[Event]
    faults: Sequence[str] = ()
    doubts: Sequence[str] = ()


class HeldOutRows:
    """The rows of the evaluations of a program, on the ranks that need them. Every rank constructs it."""

    def __init__(self, program: Program, world: World, context: HostContext) -> None:
        self.loaders = {
            eval_set.name: _make_loader(program, world, context, eval_set)
            for eval_set in program.evaluations}
        """The rows of each set on the ranks that hold them, and on rank 0."""
        chosen: dict[str, list[int]] = {}
        for eval_set in program.evaluations if world.rank == 0 else ():
            loader = self.loaders[eval_set.name]
            assert loader is not None, "rank 0 has all loaders"
            chosen[eval_set.name] = eval_set.evaluation.chosen_rows(len(loader), loader.has)
        self.prompts: dict[str, list[int]] = world.control.all_gather_json(chosen)[0]
        """The prompts of each set, equal on all ranks."""


def _make_loader(
    program: Program, world: World, context: HostContext, eval_set: EvaluationProgram
) -> Loader | ArrayLoader | None:
    if world.rank != 0 and world.rank not in dataset_layout(eval_set.graph, eval_set.plan):
        return None
    config = eval_set.evaluation.dataset
    settings: dict[str, Any] = {
        "keys": eval_set.graph.inputs, "group_size": eval_set.group_size, "seed": program.experiment.seed}
    if isinstance(config, ArrayDataset):
        return ArrayLoader(config, **settings)
    loader = Loader(
        config, tokenizer=context.tokenizer, row_faults=row_faults_of(eval_set.graph), **settings)
    check_lengths(program.roles, eval_set.graph, loader)
    return loader


class Evaluations:
    """The evaluations of a program. Every rank constructs it, and runs it at the same places of the run."""

    def __init__(self, program: Program, state: RankState, rows: HeldOutRows) -> None:
        self._world = state.world
        self._context = state.context
        self._sets = program.evaluations
        self._prompts = rows.prompts
        self._executors: dict[str, Executor] = {}
        self._outboxes: list[Outbox] = []
        for eval_set in self._sets:
            loader = rows.loaders[eval_set.name]
            # Each set has its own outbox, so that no rank waits for one that evaluates another set.
            of_set = RankState(state.world, state.models, state.context)
            parts = PartsProgram(
                {_PART: eval_set.actions}, eval_set.plan, None if loader is None else loader.batch_of_rows,
                eval_set.group_size, is_evaluation=True, prefix=eval_set.prefix)
            self._outboxes.append(of_set.outbox)
            self._executors[eval_set.name] = Executor(of_set, parts)

    def run(self) -> list[SetRecord]:
        """Evaluate all sets; return what this rank has of each."""
        process = self._world.process
        records = []
        for eval_set in self._sets:
            of_set = f" of {eval_set.name}" if eval_set.name else ""
            after = f" after step {self._context.step}" if self._context.step else ""
            process.step = f"evaluation{of_set}{after}"
            prompts = self._prompts[eval_set.name]
            executor = self._executors[eval_set.name]
            self._context.scored_samples = []
            executor.begin_step()
            executor.run(_PART, prompts, updates=self._context.updates)
            executor.forget(prompts)
            records.append(SetRecord(executor.take_record(), self._context.scored_samples))
        return records

    def wait(self) -> None:
        """Wait until all messages have been received."""
        for outbox in self._outboxes:
            outbox.wait()


def report(sets: Sequence[EvaluationProgram], by_rank: Sequence[Sequence[SetRecord]]) -> EvaluationReport:
    """Return the result of an evaluation from the records of all ranks, which have one for each set."""
    metrics: dict[str, float] = {}
    samples: dict[str, list[dict[str, Any]]] = {}
    events: list[Event] = []
    faults: list[str] = []
    doubts: list[str] = []
    for eval_set, records in zip(sets, zip(*by_rank, strict=True), strict=True):
        if of_set := [sample for record in records for sample in record.samples]:
            samples[eval_set.name] = of_set
        # Rollouts have different rewards of their environments, so that their sum decides.
        names = () if eval_set.has_environment else (of_set or [{}])[0].get("scores", ())
        decides = eval_set.deciding or next(iter(names), None)
        scored = [[_scored(sample, decides) for sample in group] for group in _by_prompt(of_set)]
        if (doubt := eval_set.doubt(sample.score for group in scored for sample in group)) is not None:
            doubts.append(doubt)
        of_samples = _metrics_of_samples(eval_set, of_set, scored)
        of_calls, others = finite(merge_metrics([StepRecord(record.record.metrics) for record in records]))
        faults += [f"{name} of {eval_set.field} is {value}: it is left out" for name, value in others.items()]
        of_samples |= of_calls
        metrics |= {eval_set.prefix + name.removeprefix(_EVAL): value for name, value in of_samples.items()}
        events += [_named(event, eval_set) for record in records for event in record.record.events]
        if of_samples.get(_FAILED) == 1.0:
            faults.append(f"the reward of every sample of {eval_set.field} has failed: it has no score")
    return EvaluationReport(metrics, samples, events, faults, doubts)


def _metrics_of_samples(
    eval_set: EvaluationProgram, samples: Sequence[Mapping[str, Any]],
    prompts: Sequence[Sequence[ScoredSample]],
) -> dict[str, float]:
    """Return the metrics of samples, which `prompts` has by prompt with the values of the deciding reward."""
    if not samples:
        return {}
    by_prompt = sample_metrics(
        prompts, samples=eval_set.evaluation.samples, correct_above=eval_set.correct_above)
    scores = known_values(sample["score"] for sample in samples)
    metrics = means({"score": scores}) | {name: x for name, x in by_prompt.items() if name != "score"}
    if "scores" in samples[0]:
        metrics = named_scores([sample["scores"] for sample in samples]) | metrics
    if len(scores) < len(samples):
        metrics[_FAILED] = 1.0 - len(scores) / len(samples)
    return metrics | length_metrics(samples)


def _scored(sample: Mapping[str, Any], decides: str | None) -> ScoredSample:
    """Return a sample with its value by the reward `decides`, or with its score if rewards have no names.

    A majority vote compares the final answer that the reward has extracted, or else the stripped text.
    """
    value = sample["score"] if decides is None else sample["scores"].get(decides, 0.0)
    text = sample["completion"]
    vote = sample["final_answer"] if "final_answer" in sample else text.strip()
    return ScoredSample(math.nan if value is None else value, vote)


def _by_prompt(samples: Sequence[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    """Yield the samples of each prompt, which have rising numbers."""
    group: list[Mapping[str, Any]] = []
    for sample in samples:
        if group and sample["sample"] <= group[-1]["sample"]:
            yield group
            group = []
        group.append(sample)
    if group:
        yield group


def _named(event: Event, eval_set: EvaluationProgram) -> Event:
    """Return an event of a call with the name of the set before the call's; reallocations have no call."""
    return event if event["kind"] == "realloc" else {**event, "name": eval_set.prefix + event["name"]}


def main_metric(names: Sequence[str], sets: Sequence[EvaluationProgram]) -> str | None:
    """Return the main metric of the first set: its score, else its loss, else its first metric.

    A set whose rewards have all failed has none.
    """
    prefix = sets[0].prefix if sets else _EVAL
    of_set = [name for name in names if name.startswith(prefix)] or list(names)
    others = [] if f"{prefix}{_FAILED}" in names else of_set
    return next((name for name in (f"{prefix}score", f"{prefix}loss", *others) if name in names), None)


def first_and_last(
    evaluations: Mapping[int, Mapping[str, float]], sets: Sequence[EvaluationProgram]
) -> dict[str, Any]:
    """Return the first and the last value of the main metric, and those of all metrics of all sets.

    `eval_steps` are the steps that the first and the last evaluation with the main metric followed.
    """
    names = list(dict.fromkeys(name for metrics in evaluations.values() for name in metrics))
    values = {name: [metrics[name] for metrics in evaluations.values() if name in metrics] for name in names}
    ends = {name: {"first": of_metric[0], "last": of_metric[-1]} for name, of_metric in values.items()}
    main = main_metric(names, sets)
    steps = [step for step, metrics in evaluations.items() if main is None or main in metrics]
    return {
        "eval_metric": main,
        "eval_first": ends[main]["first"] if main else None,
        "eval_last": ends[main]["last"] if main else None,
        "eval_steps": [steps[0], steps[-1]] if steps else None,
        "evals": ends}


def evaluate(program: Program, world: World, *, out: Path | None = None) -> dict[str, Any]:
    """Evaluate all sets once; every rank calls this.

    Return the summary on rank 0, which writes it to `out` with the samples, and an empty one elsewhere.
    """
    started = time.time()
    experiment = program.experiment
    context = HostContext(experiment.tokenizer_dir())
    rows = HeldOutRows(program, world, context)
    if world.rank == 0:
        if (tokenizer := context.any_tokenizer) is not None:
            largest = max(tokenizer.get_vocab().values())
            check_vocabulary(program.roles, largest, tokenizer=context.tokenizer_dir)
        held_out = {name: tokenized(loader) for name, loader in rows.loaders.items()}
        for sentence in warnings_of(program, None, held_out):
            warn(sentence)
    evaluations = Evaluations(program, RankState(world, ModelStore(world, program), context), rows)
    progress = Progress(program, world.process) if world.rank == 0 else None
    if progress is not None:
        progress.watch()
    try:
        mine = evaluations.run()
        by_rank = _gather(world, mine)
        evaluations.wait()
    finally:
        if progress is not None:
            progress.stop()
    if world.rank != 0:
        return {}
    result = report(program.evaluations, by_rank)
    for sentence in (*result.faults, *result.doubts):
        warn(sentence)
    sets = {
        eval_set.name: {
            "path": str(eval_set.evaluation.dataset.path), "prompts": len(rows.prompts[eval_set.name]),
            "samples": eval_set.evaluation.samples}
        for eval_set in program.evaluations}
    summary = {
        "model": evaluated_model(next(iter(program.roles.values()))), "sets": sets,
        "metrics": dict(result.metrics),
        "eval_metric": main_metric(list(result.metrics), program.evaluations),
        "seconds": time.time() - started}
    if out is not None:
        try:
            EvaluationFiles(out).write(0, result.samples)
            program.plan.save(out / "plan.yaml")
            (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        except OSError as error:
            raise UserError(f"{error.filename or out} cannot be written: {error.strerror}") from error
    return summary


def evaluated_model(role: Role) -> str:
    """Return the model that is evaluated: that of the adapters, if the role has some."""
    return role.model if role.lora is None or role.lora.adapter is None else role.lora.adapter


def _gather(world: World, mine: list[SetRecord]) -> list[list[SetRecord]]:
    """Return the records of all ranks on rank 0."""
    if world.rank != 0:
        world.control.send_json([record.to_json() for record in mine], [0], tag=tags.RECORD).wait()
        return []
    theirs = [world.control.recv_json(rank, tag=tags.RECORD) for rank in range(1, world.size)]
    return [mine, *([SetRecord.from_json(document) for document in documents] for documents in theirs)]
