"""Recorder: writes metrics and events of a run into its directory, on rank 0."""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from realhf.checkpoint.names import METRICS
from realhf.errors import UserError
from realhf.plan import ExecutionPlan
from realhf.runtime.records.answer_files import AnswerFiles
from realhf.runtime.records.pictures import draw_pictures
from realhf.runtime.records.rollout_file import ROLLOUTS, RolloutFile, merged
from realhf.runtime.records.step_record import StepRecord
from realhf.runtime.records.trackers import Ending, Trackers
from realhf.user_input.files import read_json_lines

_OF_ROLES = ("realloc", "offload")
"""Kinds of events that are named after a role; the others are named after a call."""


def merge_metrics(records: Sequence[StepRecord]) -> dict[str, float]:
    """Return a step's metrics over all ranks: weighted means, slowest times, sums of bytes and tokens."""
    parts: dict[str, list[tuple[float, float]]] = {}
    for name, value, weight in (metric for record in records for metric in record.metrics):
        parts.setdefault(name, []).append((value, weight))
    merged = {name: _merged(name, part) for name, part in parts.items()}
    tokens: dict[str, int] = {}
    seconds: dict[tuple[str, int], float] = {}
    for event in (e for record in records for e in record.events if e["kind"] != "move"):
        name = event["name"]
        if event["kind"] in _OF_ROLES:
            timing = f"timing_s/{event['kind']}/{name}"
            merged[timing] = max(merged.get(timing, 0.0), event["end"] - event["start"])
        else:  # A step may run a call several times.
            run = (name, event["rank"])
            seconds[run] = seconds.get(run, 0.0) + event["end"] - event["start"]
        for name_of in ("memory_bytes", "predicted_memory_bytes"):
            if name_of in event:
                key = f"perf/{name_of}/{name}"
                merged[key] = max(merged.get(key, 0.0), float(event[name_of]))
        if event["kind"] == "realloc":
            total = f"realloc_bytes/{name}"
            merged[total] = merged.get(total, 0.0) + event["sent_bytes"]
            over = f"realloc_over_bound/{name}"
            merged[over] = max(merged.get(over, 1.0), event["over_bound"])  # Computed, not measured.
        elif event["kind"] == "train_step":
            tokens[name] = tokens.get(name, 0) + event.get("num_tokens", 0)
    for (name, _), spent in seconds.items():
        merged[f"timing_s/{name}"] = max(merged.get(f"timing_s/{name}", 0.0), spent)
    if tokens:
        merged["perf/trained_tokens"] = float(next(iter(tokens.values())))
    return merged | _bandwidths(records) | _waits(records)


def _merged(name: str, part: Sequence[tuple[float, float]]) -> float:
    """Merge the (value, weight) pairs of a metric from several ranks or runs of a call.

    The result is the weighted mean or, for names that end with "/max", the largest value.
    """
    if name.endswith("/max"):
        return max(value for value, _ in part)
    return sum(value * weight for value, weight in part) / sum(weight for _, weight in part)


def _waits(records: Sequence[StepRecord]) -> dict[str, float]:
    """Return as `bubble/<call>` the seconds that a rank of the call waited before it, as a mean over ranks.

    It waited for the call's inputs, for its weights, or for ranks that were still busy.
    """
    waits: dict[str, dict[int, float]] = {}
    for event in (event for record in records for event in record.events if "waited" in event):
        ranks = waits.setdefault(event["name"], {})
        ranks[event["rank"]] = ranks.get(event["rank"], 0.0) + event["waited"]
    return {f"bubble/{name}": sum(ranks.values()) / len(ranks) for name, ranks in waits.items()}


def _bandwidths(records: Sequence[StepRecord]) -> dict[str, float]:
    """Return each role's measured bandwidth in GB/s, as `perf/realloc_gbytes_per_s/<role>`.

    A reallocation counts for the rank that receives most: its bytes, divided by the seconds from when it and
    its senders were ready until it had received everything.
    """
    movements: dict[tuple[str, str, int], dict[int, Mapping[str, Any]]] = {}
    for record in records:
        seen = Counter[tuple[str, str]]()  # A step may repeat a transfer.
        for event in record.events:
            if event["kind"] == "realloc":
                way = event["name"], event["transfer"]
                movements.setdefault((*way, seen[way]), {})[event["rank"]] = event
                seen[way] += 1
    totals: dict[str, list[float]] = {}
    for (role, _, _), by_rank in movements.items():
        most = max(by_rank.values(), key=lambda event: (event["received_bytes"], event["end"]))
        ready = max(by_rank[rank]["start"] for rank in (most["rank"], *most["senders"]) if rank in by_rank)
        if most["received_bytes"]:
            total = totals.setdefault(role, [0.0, 0.0])
            total[0] += most["received_bytes"]
            total[1] += max(most["end"] - ready, 1e-9)
    return {f"perf/realloc_gbytes_per_s/{role}": n / s / 1e9 for role, (n, s) in totals.items()}


@contextmanager
def _explained(directory: Path) -> Iterator[None]:
    """Raise UserError if a file of a run directory cannot be written."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{error.filename or directory} cannot be written: {error.strerror}") from error


class Recorder:
    """The writer of the files of a run: metrics, timeline, rollouts, TensorBoard files, answers and summary.

    A resumed run continues the files after its checkpoint; `history` is the checkpoint's file of metrics.
    Raises UserError if something cannot be written.
    """

    def __init__(
        self, directory: Path, *, history: Path | None = None, max_rollout_bytes: int = 0,
        track: Sequence[str] = (),
    ) -> None:
        """`track` names the trackers that get the metrics.

        rollouts.jsonl has at most `max_rollout_bytes`; with 0 it is not written.
        """
        # Imported here, as it takes a second and only rank 0 needs it.
        from torch.utils.tensorboard import SummaryWriter

        self.directory = directory
        self._track = track
        self._trackers: Trackers | None = None
        self.history = [] if history is None else read_records(history)
        """The metrics of earlier steps, each with its step."""
        with _explained(directory):
            directory.mkdir(parents=True, exist_ok=True)
            self._open(SummaryWriter)
            last = self.history[-1]["step"] if self.history else -1
            earlier = None if history is None else history.absolute().parents[2]
            self._answers = AnswerFiles(directory, last=last, earlier=earlier)
            self._rollouts = self._open_rollouts(max_rollout_bytes, earlier)

    def _open(self, writer: Callable[[str], Any]) -> None:
        """Open all files, which begin with the records of earlier steps; `writer` makes TensorBoard's."""
        directory = self.directory
        last = self.history[-1]["step"] if self.history else -1
        timeline = directory / "timeline.jsonl"
        events = [e for e in read_records(timeline) if e["step"] <= last] if timeline.exists() else []
        self._metrics = _start_with(directory / METRICS, self.history)
        self._timeline = _start_with(timeline, events)
        # A killed writer may not have written its last records, so all of them are written anew.
        shutil.rmtree(directory / "tensorboard", ignore_errors=True)
        self._tensorboard = writer(str(directory / "tensorboard"))
        self._ends = {event["step"]: event["end"] for event in events}
        for record in self.history:
            self._show(record, walltime=self._ends.get(record["step"]))
        (directory / "summary.json").unlink(missing_ok=True)

    def _open_rollouts(self, max_bytes: int, earlier: Path | None) -> RolloutFile | None:
        """Continue rollouts.jsonl after the last step of the history, if rollouts are written.

        `earlier` is the directory of the run that this one continues.
        """
        last = self.history[-1]["step"] if self.history else 0
        if max_bytes:
            return RolloutFile(
                self.directory / ROLLOUTS, max_bytes=max_bytes, last_step=last,
                earlier=None if earlier is None else earlier / ROLLOUTS)
        if not last:
            (self.directory / ROLLOUTS).unlink(missing_ok=True)
        return None

    def start(self, config: Mapping[str, Any], plan: ExecutionPlan) -> None:
        """Write the settings, and begin to track the run. Raises UserError if that is impossible."""
        with _explained(self.directory):
            (self.directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
            plan.save(self.directory / "plan.yaml")
            self._trackers = Trackers(
                self._track, self.directory, config, history=self.history, times=self._ends)

    def step(self, step: int, metrics: Mapping[str, float], records: Sequence[StepRecord]) -> int:
        """Write a step; return the size of metrics.jsonl in bytes. Raises UserError if that is impossible."""
        try:
            self._metrics.write(json.dumps({"step": step, **metrics}) + "\n")
            self._metrics.flush()
            for event in (e for record in records for e in record.events):
                self._timeline.write(json.dumps({"step": step, **event}) + "\n")
            self._timeline.flush()
            if self._rollouts is not None:
                self._rollouts.add(step, merged(f for record in records for f in record.rollouts))
            self._show({"step": step, **metrics})
            if self._trackers is not None:
                self._trackers.log({"step": step, **metrics})
        except OSError as error:
            what = f"the metrics of step {step} cannot be written to {self.directory}: {error.strerror}"
            raise UserError(what) from error
        return self._metrics.tell()

    def _show(self, record: Mapping[str, float], *, walltime: float | None = None) -> None:
        for name, value in record.items():
            if name != "step":
                self._tensorboard.add_scalar(name, value, record["step"], walltime)

    def evaluation(self, step: int, answers: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """Write the answers of the evaluation after a step, by set."""
        with _explained(self.directory):
            self._answers.write(step, answers)

    def stop_tracking(self, ending: Ending) -> None:
        """Tell the trackers how the run has ended, and wait a limited time for them."""
        if self._trackers is not None:
            self._trackers.finish(ending)

    def finish(self, summary: Mapping[str, Any]) -> None:
        with _explained(self.directory):
            (self.directory / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
            self._metrics.close()
            self._timeline.close()
            self._tensorboard.close()
            if self._rollouts is not None:
                self._rollouts.close()
            draw_pictures(self.directory)
        self.stop_tracking("finished")


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the JSON objects of a file with one per line, without a last line that is incomplete."""
    return [record for _, record in read_json_lines(path)]


def _start_with(path: Path, records: Sequence[Mapping[str, Any]]) -> TextIO:
    """Replace a file by one with these records, one per line; return it for more to be added."""
    part = path.with_name(f"{path.name}.part")
    part.write_text("".join(json.dumps(record) + "\n" for record in records))
    part.replace(path)
    return path.open("a")
