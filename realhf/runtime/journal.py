"""Journal: collects all ranks' records of a step on rank 0, which writes them while the run goes on."""

import dataclasses
import math
import time
from array import array
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any, overload

from realhf.distributed import tags
from realhf.distributed.group import Outbox, Pending
from realhf.distributed.world import World
from realhf.errors import warn
from realhf.runtime.compile.eval_program import NONE_IS_RIGHT, EvaluationProgram
from realhf.runtime.evaluations import SetRecord, report
from realhf.runtime.execute.meters import ComputeMeter
from realhf.runtime.records.progress import Progress, when
from realhf.runtime.records.recorder import Recorder
from realhf.runtime.records.step_record import StepRecord, finite, merge_metrics

_EVAL = "eval/"
"""Beginning of the names of an evaluation's metrics."""
_LEFT_OUT = "staleness/left_out"
"""The metric with the share of response tokens that `loss.max_age` leaves out."""
_MOST = 0.5
_SECONDS = "perf/run_seconds"
"""The metric with the seconds of the run so far."""
_PATIENCE_SECONDS = 2.0
"""Seconds that a failed run waits for the records of finished steps."""
_TOKENS = ("generated", "trained")


class History(Sequence[dict[str, float]]):
    """The metrics of the steps of a run, about 10 bytes for each number, as a run may have 100,000 steps.

    Steps with the same metrics share the names of these.
    """

    def __init__(self, records: Iterable[Mapping[str, float]] = ()) -> None:
        self._names: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._values: list[tuple[tuple[str, ...], array[float]]] = []
        for record in records:
            self.append(record)

    def append(self, metrics: Mapping[str, float]) -> None:
        names = tuple(metrics)
        values = array("d", (math.nan if value is None else value for value in metrics.values()))
        self._values.append((self._names.setdefault(names, names), values))

    def __len__(self) -> int:
        return len(self._values)

    @overload
    def __getitem__(self, index: int) -> dict[str, float]: ...

    @overload
    def __getitem__(self, index: slice) -> list[dict[str, float]]: ...

    def __getitem__(self, index: int | slice) -> dict[str, float] | list[dict[str, float]]:
        if isinstance(index, slice):
            return [dict(zip(*row, strict=True)) for row in self._values[index]]
        return dict(zip(*self._values[index], strict=True))


class Journal:
    """The metrics of the steps so far; `history` and `evaluations` are complete on rank 0 after `finish`.

    No rank waits for another: rank 0 collects records in a thread, the others leave theirs in the outbox. A
    step is written as soon as its last record has arrived, even if a later step fails.
    """

    def __init__(
        self, world: World, outbox: Outbox, recorder: Recorder | None, progress: Progress | None,
        meter: ComputeMeter, eval_sets: Sequence[EvaluationProgram] = (),
    ) -> None:
        self._world = world
        self._eval_sets = eval_sets
        self._outbox = outbox
        self._recorder = recorder
        self._progress = progress
        self._meter = meter
        self._thread = ThreadPoolExecutor(1, "journal")
        self._running: list[Future[Any]] = []
        self._sent = Pending()
        self._has_finished = False
        self._previous_end = -math.inf
        self._pauses = True
        """Whether something else came between the previous step and the next one."""
        earlier = [] if recorder is None else recorder.history
        steps = [record for record in earlier if record["step"] > 0]
        self.history = History({k: v for k, v in record.items() if k != "step"} for record in steps)
        """The metrics of each step."""
        evaluations = {record["step"]: _of_evaluation(record) for record in earlier}
        self.evaluations = {int(step): metrics for step, metrics in evaluations.items() if metrics}
        """The metrics of each evaluation, whose names begin with `eval/`, by the step that it follows."""
        self._seconds_before = earlier[-1].get(_SECONDS, 0.0) if earlier else 0.0
        self._started = time.monotonic()
        self._has_warned_of_lost = False
        self._not_finite: set[str] = set()
        """The metrics of which the user knows that they were not finite in some step."""
        self.last: Future[int] | None = None
        """On rank 0, gives the size of metrics.jsonl in bytes once the newest step has been written."""

    def add(
        self, step: int, record: StepRecord | None, evaluation: Sequence[SetRecord] = (), *,
        pauses: bool = False,
    ) -> None:
        """Add this rank's record of a step, if there is one, and those of an evaluation after it, by set.

        With `pauses`, something else comes before the next step, such as an export.
        """
        if self._world.rank == 0:
            self.last = self._thread.submit(self._write, step, record, evaluation, pauses)
            self._running.append(self.last)
            self._drop_finished()
        else:
            documents = [record and dataclasses.asdict(record), [of_set.to_json() for of_set in evaluation]]
            self._sent = self._world.control.send_json(documents, [0], tag=tags.RECORD)
            self._outbox.add(self._sent)

    def pause(self) -> None:
        """Do not count the time since the last step, such as that of a checkpoint, for the next step."""
        if self._world.rank == 0:
            self._running.append(self._thread.submit(setattr, self, "_pauses", True))

    def finish(self) -> None:
        """Wait until everything is written. Raises what the writing thread has raised."""
        wait(self._running, return_when=FIRST_EXCEPTION)
        self._drop_finished()
        self._thread.shutdown()
        self._has_finished = True

    def abandon(self) -> None:
        """Wait shortly for the records of finished steps to be written; for runs that have failed."""
        if self._world.rank != 0 and not self._has_finished:
            sent: Future[Any] = self._thread.submit(self._sent.wait)
            self._running.append(sent)
        wait(self._running, timeout=_PATIENCE_SECONDS)

    def _drop_finished(self) -> None:
        """Drop finished tasks. Raises what the writing thread has raised."""
        while self._running and self._running[0].done():
            self._running.pop(0).result()

    def _write(
        self, step: int, record: StepRecord | None, evaluation: Sequence[SetRecord], pauses: bool
    ) -> int:
        peers = range(1, self._world.size)
        theirs = [self._world.control.recv_json(rank, tag=tags.RECORD) for rank in peers]
        steps = [record, *(StepRecord(**of_step) for of_step, _ in theirs)] if record is not None else []
        metrics = self._step(step, steps) if steps else self._meter.totals()
        events: list[StepRecord] = []
        if evaluation:
            of_others = [[SetRecord.from_json(document) for document in documents] for _, documents in theirs]
            eval_metrics, events = self._evaluation(step, [evaluation, *of_others])
            metrics = {**eval_metrics, **metrics}
        metrics[_SECONDS] = self.seconds
        if steps:
            self.history.append(metrics)
        self._pauses = self._pauses or pauses
        return 0 if self._recorder is None else self._recorder.step(step, metrics, [*steps, *events])

    @property
    def seconds(self) -> float:
        """The seconds of the run so far: this part's, and those of earlier parts until their checkpoints."""
        return self._seconds_before + time.monotonic() - self._started

    @property
    def tokens(self) -> dict[str, int]:
        """The tokens that all steps have generated, and those on which they have trained."""
        totals = {what: sum(m.get(f"tokens/{what}", 0.0) for m in self.history) for what in _TOKENS}
        return {what: round(total) for what, total in totals.items()}

    def _step(self, step: int, records: Sequence[StepRecord]) -> dict[str, float]:
        metrics, others = finite(merge_metrics(records))
        for name, value in others.items():
            if name not in self._not_finite:
                self._not_finite.add(name)
                rule = "a metric is left out where it is not a finite number"
                warn(f"{name} is {value} in step {step}: {rule}")
        self._warn_of_lost_tokens(step, metrics)
        events = [event for record in records for event in record.events]
        now = time.time()  # A step program may run nothing in a step.
        end = max((event["end"] for event in events), default=now)
        start = self._previous_end
        if self._pauses:  # Reallocations that ran ahead of this step started before it.
            starts = [event["start"] for event in events if event["kind"] != "realloc"]
            start = max(start, min(starts, default=end))
        self._pauses = False
        metrics["timing_s/step"] = max(end - start, 1e-9)
        metrics["perf/tokens_per_s"] = metrics.get("tokens/trained", 0.0) / metrics["timing_s/step"]
        for name in [name for name in metrics if name.startswith("bubble/")]:
            metrics[name] /= metrics["timing_s/step"]
        metrics |= self._meter.add(records, metrics["timing_s/step"])
        self._previous_end = end
        if self._progress is not None:
            self._progress.step(step, metrics)
        return metrics

    def _new_doubts(self, step: int, doubts: Sequence[str]) -> list[str]:
        """Return those of an evaluation's doubts that are to be told now, once.

        Before step 1 a model may know no right answer yet, so that this says nothing about the limit.
        """
        if not self.evaluations:
            return [doubt for doubt in doubts if step or NONE_IS_RIGHT not in doubt]
        is_second = list(self.evaluations) == [0]
        return [doubt for doubt in doubts if is_second and NONE_IS_RIGHT in doubt]

    def _warn_of_lost_tokens(self, step: int, metrics: Mapping[str, float]) -> None:
        """Warn the first time that a step leaves out most of its tokens."""
        share = metrics.get(_LEFT_OUT, 0.0)
        if share > _MOST and not self._has_warned_of_lost:
            self._has_warned_of_lost = True
            warn(
                f"{share:.0%} of the response tokens are left out in step {step}, as they are older than "
                f"loss.max_age ({_LEFT_OUT}): raise it to max_lag, or train on newer answers")

    def _evaluation(
        self, step: int, by_rank: Sequence[Sequence[SetRecord]]
    ) -> tuple[dict[str, float], list[StepRecord]]:
        """Write the samples of an evaluation; return its metrics and events.

        Its reallocations count for the step, because the next step need not repeat them.
        """
        result = report(self._eval_sets, by_rank)
        for sentence in result.faults:
            warn(f"evaluation {when(step)}: {sentence}")
        for sentence in self._new_doubts(step, result.doubts):
            warn(f"evaluation {when(step)}: {sentence}")
        self.evaluations[step] = dict(result.metrics)
        if self._recorder is not None:
            self._recorder.evaluation(step, result.samples)
        if self._progress is not None:
            self._progress.evaluation(step, result.metrics, next(iter(self.evaluations.values())))
        of_ranks = [[event for of_set in of_sets for event in of_set.record.events] for of_sets in by_rank]
        records = [StepRecord([], [e for e in events if e["kind"] == "realloc"]) for events in of_ranks]
        others = [event for event in result.events if event["kind"] != "realloc"]
        return merge_metrics(records) | dict(result.metrics), [*records, StepRecord([], others)]


def _of_evaluation(record: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in record.items() if name.startswith(_EVAL)}
