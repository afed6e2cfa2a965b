"""Journal: brings all ranks' records of a step to rank 0, which writes them down while the run goes on."""

import dataclasses
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any

from realhf.dist import tags
from realhf.dist.group import Outbox, Pending, World
from realhf.runtime.executor import StepRecord
from realhf.runtime.progress import Progress
from realhf.runtime.recorder import Recorder, merge_metrics

_PATIENCE_SECONDS = 2.0  # For the record of a finished step when a later one has failed.


class Journal:
    """What is known of the steps so far; `history` and `scores` are complete on rank 0 after `finish`.

    No rank waits here for another: rank 0 collects in a thread, the others leave their records in the outbox.
    A step is written as soon as its last record has come, be it that a later step fails.
    """

    def __init__(
        self, world: World, outbox: Outbox, recorder: Recorder | None, progress: Progress | None
    ) -> None:
        self._world, self._outbox = world, outbox
        self._recorder, self._progress = recorder, progress
        self._thread = ThreadPoolExecutor(1, "journal")
        self._running: list[Future[None]] = []
        self._sent = Pending()
        self._previous_end: float | None = None
        self.history: list[dict[str, float]] = []
        self.scores: list[float] = []

    def add(
        self,
        step: int,
        record: StepRecord | None,
        evaluation: StepRecord | None = None,
        *,
        answers: Sequence[Mapping[str, Any]] = (),
        pauses: bool = False,
    ) -> None:
        """This rank's records of a step and of the evaluation behind it, as far as there are any.

        `answers` are the evaluation's, on rank 0. `pauses`: the next step does not follow at once.
        """
        mine = (record, evaluation)
        if self._world.rank == 0:
            self._running.append(self._thread.submit(self._write, step, mine, answers, pauses))
            self._forget_what_is_done()
        else:
            documents = [r and dataclasses.asdict(r) for r in mine]
            self._sent = self._world.control.send_json(documents, [0], tag=tags.RECORD)
            self._outbox.add(self._sent)

    def finish(self) -> None:
        """Returns when everything is written."""
        wait(self._running, return_when=FIRST_EXCEPTION)
        self._forget_what_is_done()
        self._thread.shutdown()

    def abandon(self) -> None:
        """When the run has failed: gives what is known of finished steps a last chance to be written."""
        if self._world.rank != 0:
            self._running.append(self._thread.submit(self._sent.wait))
        wait(self._running, timeout=_PATIENCE_SECONDS)

    def _forget_what_is_done(self) -> None:
        """Raises what the thread has raised."""
        while self._running and self._running[0].done():
            self._running.pop(0).result()

    def _write(
        self,
        step: int,
        mine: tuple[StepRecord | None, StepRecord | None],
        answers: Sequence[Mapping[str, Any]],
        pauses: bool,
    ) -> None:
        control, peers = self._world.control, range(1, self._world.size)
        theirs = [control.recv_json(rank, tag=tags.RECORD) for rank in peers]
        steps, evaluations = (  # One record per rank, or none.
            [own, *(StepRecord(**documents[i]) for documents in theirs)] if own is not None else []
            for i, own in enumerate(mine)
        )
        # What the evaluation has reallocated the next step need not: it counts for this step.
        reallocs = [StepRecord([], [e for e in r.events if e["kind"] == "realloc"]) for r in evaluations]
        metrics: dict[str, float] = {}
        if steps:
            metrics = self._step(step, steps)
        if evaluations:
            metrics = {**merge_metrics(reallocs), "eval/score": self._evaluation(step, answers), **metrics}
        if steps:
            self.history.append(metrics)
        if pauses:
            self._previous_end = None
        if self._recorder is not None:
            self._recorder.step(step, metrics, [*steps, *reallocs])

    def _step(self, step: int, records: Sequence[StepRecord]) -> dict[str, float]:
        metrics = merge_metrics(records)
        events = [event for record in records for event in record.events]
        end = max(event["end"] for event in events)
        start = self._previous_end
        if start is None:  # Reallocations may have begun before, ahead of this step.
            start = min(event["start"] for event in events if event["kind"] != "realloc")
        metrics["timing_s/step"] = end - start
        metrics["perf/tokens_per_s"] = metrics.pop("perf/trained_tokens", 0.0) / metrics["timing_s/step"]
        self._previous_end = end
        if self._progress is not None:
            self._progress.step(step, metrics)
        return metrics

    def _evaluation(self, step: int, answers: Sequence[Mapping[str, Any]]) -> float:
        score = float(sum(row["score"] for row in answers) / len(answers))
        self.scores.append(score)
        if self._recorder is not None:
            self._recorder.evaluation(answers)
        if self._progress is not None:
            self._progress.evaluation(step, score)
        return score
