"""Recorder and EvaluationFiles: write metrics, events and samples of a run into its directory, on rank 0."""

import json
import os
import shutil
import socket
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import isfinite, isnan
from pathlib import Path
from typing import Any, TextIO

import torch

from realhf.checkpoint.names import METRICS
from realhf.errors import UserError
from realhf.execution_plan import ExecutionPlan
from realhf.runtime.compile.eval_program import SHOWN
from realhf.runtime.records.pictures import draw_pictures
from realhf.runtime.records.rollout_file import ROLLOUTS, RolloutFile, merged
from realhf.runtime.records.trackers import Ending, Trackers
from realhf.user_input.files import read_json_lines

_OF_CALLS = ("memory_bytes", "predicted_memory_bytes", "counted_bytes", "predicted_counted_bytes")
_OF_PROCESSES = ("process_bytes", "predicted_process_bytes")
"""Sizes in events, see MemoryMeter: those of the call, and those of the process."""
_OF_ROLES = ("realloc", "offload")
"""Kinds of events that are named after a role; the others are named after a call."""


@dataclass
class StepRecord:
    """Metrics and timed events of one rank in one step, as JSON values. Times are Unix seconds.

    `metrics` are (name, value, weight); equal names of several ranks are averaged by weight.
    """

    metrics: list[tuple[str, float, float]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    rollouts: list[dict[str, Any]] = field(default_factory=list)
    """This rank's descriptions of logged samples (see RolloutCollector)."""

    @contextmanager
    def timed(self, **event: Any) -> Iterator[dict[str, Any]]:
        """Add an event with its start, its end and the CPU seconds of this process in between."""
        event["start"] = time.time()
        cpu_start = time.process_time()
        yield event
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()  # Reallocations have their own stream.
        cpu_seconds = time.process_time() - cpu_start
        self.events.append({**event, "end": time.time(), "cpu_seconds": cpu_seconds})


def merge_metrics(records: Sequence[StepRecord]) -> dict[str, float]:
    """Return a step's metrics over all ranks: weighted means, slowest times, sums of bytes and tokens."""
    parts: dict[str, list[tuple[float, float]]] = {}
    for name, value, weight in (metric for record in records for metric in record.metrics):
        parts.setdefault(name, []).append((value, weight))
    merged = {name: _merged(name, part) for name, part in parts.items()}
    tokens: dict[str, dict[str, int]] = {}
    seconds: dict[tuple[str, int], float] = {}
    for event in (e for record in records for e in record.events if e["kind"] != "move"):
        name = event["name"]
        if event["kind"] in _OF_ROLES:
            timing = f"timing_s/{event['kind']}/{name}"
            merged[timing] = max(merged.get(timing, 0.0), event["end"] - event["start"])
        else:  # A step may run a call several times.
            run = (name, event["rank"])
            seconds[run] = seconds.get(run, 0.0) + event["end"] - event["start"]
        if "environment_waits" in event:
            waited = sum(stop - start for start, stop in event["environment_waits"])
            merged[f"environment_wait_s/{name}"] = max(merged.get(f"environment_wait_s/{name}", 0.0), waited)
        sizes = {f"perf/{size}/{name}": size for size in _OF_CALLS}
        sizes |= {f"perf/{size}": size for size in _OF_PROCESSES}
        for key, size in sizes.items():
            if size in event:
                merged[key] = max(merged.get(key, 0.0), float(event[size]))
        if event["kind"] == "realloc":
            total = f"realloc_bytes/{name}"
            merged[total] = merged.get(total, 0.0) + event["sent_bytes"]
            over = f"realloc_over_bound/{name}"
            merged[over] = max(merged.get(over, 1.0), event["over_bound"])  # Computed, not measured.
        elif "num_tokens" in event:
            of_kind = tokens.setdefault(event["kind"], {})
            of_kind[name] = of_kind.get(name, 0) + event["num_tokens"]
    for (name, _), spent in seconds.items():
        merged[f"timing_s/{name}"] = max(merged.get(f"timing_s/{name}", 0.0), spent)
    for kind, of_kind in tokens.items():
        merged |= _tokens(kind, of_kind, {name: merged[f"timing_s/{name}"] for name in of_kind})
    return merged | _bandwidths(records) | _waits(records)


def finite(metrics: Mapping[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """Return the metrics that are finite numbers, and the others: JSON has neither NaN nor infinity."""
    known = {name: value for name, value in metrics.items() if isfinite(value)}
    return known, {name: value for name, value in metrics.items() if name not in known}


def _tokens(kind: str, tokens: Mapping[str, int], seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the tokens that the calls of a kind have sampled or trained on, and how many in a second.

    The seconds are those of the calls alone. Tokens on which several roles train count once.
    """
    if kind == "generate":
        total = sum(tokens.values())
        rate = total / max(sum(seconds.values()), 1e-9)
        return {"tokens/generated": float(total), "perf/generated_tokens_per_s": rate}
    most = max(tokens, key=lambda name: (tokens[name], seconds[name]))
    rate = tokens[most] / max(seconds[most], 1e-9)
    return {"tokens/trained": float(tokens[most]), "perf/trained_tokens_per_s": rate}


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


_LAST = "eval.jsonl"
_ALL = "evals"
"""The folder with a file for each evaluation: evals/step_N.jsonl, or evals/SET/step_N.jsonl."""


@contextmanager
def _explained(directory: Path) -> Iterator[None]:
    """Raise UserError if a file of a run directory cannot be written."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{error.filename or directory} cannot be written: {error.strerror}") from error


class Recorder:
    """The writer of the files of a run: metrics, timeline, rollouts, TensorBoard files, evaluations, summary.

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
        self.directory = directory
        self._track = track
        self._trackers: Trackers | None = None
        self.history = [] if history is None else read_records(history)
        """The metrics of earlier steps, each with its step."""
        with _explained(directory):
            directory.mkdir(parents=True, exist_ok=True)
            self._open()
            last = self.history[-1]["step"] if self.history else -1
            earlier = None if history is None else history.absolute().parents[2]
            self._evaluation_files = EvaluationFiles(directory, last=last, earlier=earlier)
            self._rollouts = self._open_rollouts(max_rollout_bytes, earlier)

    def _open(self) -> None:
        """Open all files, which begin with the records of earlier steps."""
        directory = self.directory
        last = self.history[-1]["step"] if self.history else -1
        timeline = directory / "timeline.jsonl"
        events = [e for e in read_records(timeline) if e["step"] <= last] if timeline.exists() else []
        self._metrics = _start_with(directory / METRICS, self.history)
        self._timeline = _start_with(timeline, events)
        # A killed writer may not have written its last records, so all of them are written anew.
        shutil.rmtree(directory / "tensorboard", ignore_errors=True)
        self._tensorboard = _ScalarFile(directory / "tensorboard")
        self._ends = {event["step"]: event["end"] for event in events}
        for record in self.history:
            self._tensorboard.write(record, walltime=self._ends.get(record["step"]))
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
        if not (self.directory / METRICS).exists():  # The open file could still be written, in vain.
            raise UserError(f"--out {self.directory} has been deleted while the run wrote to it")
        try:
            self._metrics.write(json.dumps({"step": step, **metrics}) + "\n")
            self._metrics.flush()
            for event in (e for record in records for e in record.events):
                self._timeline.write(json.dumps({"step": step, **event}) + "\n")
            self._timeline.flush()
            if self._rollouts is not None:
                self._rollouts.add(step, merged(f for record in records for f in record.rollouts))
            self._tensorboard.write({"step": step, **metrics})
            if self._trackers is not None:
                self._trackers.log({"step": step, **metrics})
        except OSError as error:
            what = f"the metrics of step {step} cannot be written to {self.directory}: {error.strerror}"
            raise UserError(what) from error
        return self._metrics.tell()

    def evaluation(self, step: int, samples: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """Write the samples of the evaluation after a step, by set."""
        with _explained(self.directory):
            self._evaluation_files.write(step, samples)

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


class _ScalarFile:
    """A TensorBoard file of metrics. (The writer of torch has a thread, which would fail unheard.)"""

    def __init__(self, directory: Path) -> None:
        # Imported here, as it takes a second and only rank 0 needs it.
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        directory.mkdir(parents=True)
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        self._file = (directory / name).open("wb")
        self._event = Event
        self._records = RecordWriter(self._file)
        self._records.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
        self._file.flush()

    def write(self, record: Mapping[str, float], *, walltime: float | None = None) -> None:
        """Write the metrics of a step, which is the record's "step"."""
        event = self._event(wall_time=time.time() if walltime is None else walltime, step=int(record["step"]))
        for name, value in record.items():
            if name != "step":
                event.summary.value.add(tag=name, simple_value=value)
        self._records.write(event.SerializeToString())
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the JSON objects of a file with one per line, without a last line that is incomplete."""
    return [record for _, record in read_json_lines(path)]


def _start_with(path: Path, records: Sequence[Mapping[str, Any]]) -> TextIO:
    """Replace a file by one with these records, one per line; return it for more to be added."""
    part = path.with_name(f"{path.name}.part")
    part.write_text("".join(json.dumps(record) + "\n" for record in records))
    part.replace(path)
    return path.open("a")


class EvaluationFiles:
    """The writer of eval.jsonl and of evals/.

    A run that continues after the step `last` keeps the files up to it, also those of its earlier directory,
    and drops later ones, which it will write again.
    """

    def __init__(self, directory: Path, *, last: int = -1, earlier: Path | None = None) -> None:
        self._directory = directory
        if earlier is not None and earlier.resolve() != directory.resolve():
            self._copy(earlier)
        for path in self._files(directory):
            if _step_of(path) > last:
                path.unlink()

    def _copy(self, earlier: Path) -> None:
        """Copy the samples of the run that this one continues in another directory."""
        for path in [*self._files(earlier), *earlier.glob(_LAST)]:
            target = self._directory / path.relative_to(earlier)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)

    def _files(self, directory: Path) -> list[Path]:
        return [path for path in sorted((directory / _ALL).rglob("step_*.jsonl")) if _step_of(path) >= 0]

    def write(self, step: int, samples: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """Write the samples of the evaluation after a step, by set, each file at once or not at all.

        Scores of failed rewards are null. eval.jsonl gets the first sample of each prompt.
        """
        last = []
        for name, of_set in samples.items():
            documents = [{"set": name} | _without_nan(sample) for sample in of_set]
            _write_samples(self._directory / _ALL / name / f"step_{step}.jsonl", documents)
            firsts = [sample for sample in documents if sample["sample"] == 0]
            last += [_shown(sample) | ({"set": name} if name else {}) for sample in firsts]
        if last:
            _write_samples(self._directory / _LAST, last)


def _shown(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields for eval.jsonl: if no column has the usual name of an answer, all columns."""
    has_answer = "answer" in sample or "ground_truth" in sample
    names = SHOWN if has_answer else (*SHOWN, "columns")
    return {name: sample[name] for name in names if name in sample}


def _write_samples(path: Path, samples: Sequence[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    part.replace(path)


def _step_of(path: Path) -> int:
    """Return the step of a file; -1 if its name has none."""
    number = path.stem.removeprefix("step_")
    return int(number) if number.isdecimal() else -1


def _without_nan(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sample with None in place of NaN, which JSON does not have."""
    parts = {key: {name: _known(value) for name, value in row[key].items()} for key in ("scores", "extra")
             if row.get(key) is not None}
    return {**row, "score": _known(row["score"]), **parts}


def _known(value: Any) -> Any:
    return None if isinstance(value, float) and isnan(value) else value
