"""Recorder and EvaluationFiles: write metrics, events and samples of a run into its directory, on rank 0."""

import json
import os
import shutil
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isnan
from pathlib import Path
from typing import Any, TextIO

from realhf.checkpoint.names import METRICS
from realhf.errors import UserError
from realhf.execution_plan import ExecutionPlan
from realhf.runtime.compile.eval_program import SHOWN
from realhf.runtime.records.about import ABOUT
from realhf.runtime.records.digest_file import DIGESTS, DigestFile
from realhf.runtime.records.pictures import draw_pictures
from realhf.runtime.records.rollout_file import ROLLOUTS, RolloutFile, merged
from realhf.runtime.records.step_record import StepRecord
from realhf.runtime.records.trackers import Ending, Trackers
from realhf.user_input.files import read_json_lines

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
        max_digest_bytes: int = 0, track: Sequence[str] = (),
    ) -> None:
        """`track` names the trackers that get the metrics.

        rollouts.jsonl has at most `max_rollout_bytes`, and digests.jsonl about `max_digest_bytes`; with 0
        they are not written.
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
            self._digests = self._open_digests(max_digest_bytes, earlier)

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

    def _open_digests(self, max_bytes: int, earlier: Path | None) -> DigestFile | None:
        """Continue digests.jsonl after the last step of the history, if digests are written."""
        path = self.directory / DIGESTS
        if not max_bytes:
            path.unlink(missing_ok=True)
            return None
        if earlier is not None and (earlier / DIGESTS).is_file() and not path.exists():
            shutil.copyfile(earlier / DIGESTS, path)
        last = self.history[-1]["step"] if self.history else 0
        return DigestFile(path, max_bytes=max_bytes, last_step=last)

    def start(
        self, config: Mapping[str, Any], plan: ExecutionPlan, about: Mapping[str, Any] | None = None
    ) -> None:
        """Write the settings, and begin to track the run. Raises UserError if that is impossible."""
        with _explained(self.directory):
            (self.directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
            plan.save(self.directory / "plan.yaml")
            if about is not None:
                (self.directory / ABOUT).write_text(json.dumps(about) + "\n")
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
            if self._digests is not None:
                self._digests.add(step, [piece for record in records for piece in record.digests])
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
            if self._digests is not None:
                self._digests.close()
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
