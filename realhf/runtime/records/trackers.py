"""Trackers: send the metrics of a run to W&B, MLflow and trackio. Imports none of them before one is used."""

import contextlib
import contextvars
import importlib.util
import json
import os
import queue
import re
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from realhf.errors import UserError, one_line, warn
from realhf.runtime.compile.program import leaves
from realhf.user_input.files import read_object

Ending = Literal["finished", "stopped", "failed"]
"""How a run ends; a stopped one may be resumed."""
IDS = "trackers.json"
"""A file in the run directory with the id under which each tracker knows the run."""
_PROJECT = "realhf"
_PATIENCE_SECONDS = 30.0
"""Seconds that a tracker may take to send the remaining metrics after a run has ended."""
_SHORT_PATIENCE_SECONDS = 5.0
"""Seconds that it may take after a run has failed."""
_MLFLOW_FORBIDS = re.compile(r"[^\w\-. :/]", re.ASCII)
_MAX_PARAMS = 100
_MAX_METRICS = 1000
_MAX_PARAM_CHARACTERS = 6000


class Tracker(Protocol):
    """A place that shows the metrics of runs. Its methods may raise any exception."""

    id: str
    """The name or number by which the tracker finds the run again."""

    def log(self, step: int, metrics: Mapping[str, float], seconds: float | None) -> None:
        """Add the metrics of a step; `seconds` is its Unix time, None: now."""

    def finish(self, ending: Ending) -> None:
        """Send the remaining metrics and end the tracked run."""


class WandbTracker:
    """A run of Weights & Biases. WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE and the others of W&B count."""

    def __init__(self, directory: Path, config: Mapping[str, Any], run_id: str | None) -> None:
        """Begin a run, or continue the one with this id. W&B keeps its files in `directory`/wandb."""
        import wandb

        self.id = run_id or os.environ.get("WANDB_RUN_ID") or uuid.uuid4().hex[:8]
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or _PROJECT,
            name=os.environ.get("WANDB_NAME") or directory.name, id=self.id, resume="allow",
            dir=os.environ.get("WANDB_DIR") or str(directory), config=dict(config),
            settings=wandb.Settings(console="off"))
        # A resumed run logs some steps again, and W&B's own count of steps never goes back.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float], seconds: float | None) -> None:
        self._run.log({"step": step, **metrics} | ({} if seconds is None else {"_timestamp": seconds}))

    def finish(self, ending: Ending) -> None:
        self._run.finish(exit_code=int(ending == "failed"))


class MlflowTracker:
    """A run of MLflow. MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME count.

    Without a URI it is in the directory mlruns of the current directory.
    """

    def __init__(self, directory: Path, config: Mapping[str, Any], run_id: str | None) -> None:
        """Begin a run, or continue the one with this id."""
        uri = os.environ.get("MLFLOW_TRACKING_URI") or Path("mlruns").absolute().as_uri()
        if uri.startswith("file:") or "://" not in uri:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # Else MLflow refuses directories.
        with _quiet():
            from mlflow import MlflowClient
            from mlflow.entities import Metric, Param

            self._metric = Metric
            self._client = MlflowClient(tracking_uri=uri)
            if run_id is not None:
                self.id = run_id
                self._client.update_run(run_id, status="RUNNING")
                return
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or _PROJECT
            experiment = self._client.get_experiment_by_name(name)
            experiment_id = (
                experiment.experiment_id if experiment is not None else self._client.create_experiment(name))
            self.id = self._client.create_run(experiment_id, run_name=directory.name).info.run_id
            params = [
                Param(mlflow_name(key), str(value)[:_MAX_PARAM_CHARACTERS]) for key, value in leaves(config)]
            for i in range(0, len(params), _MAX_PARAMS):
                self._client.log_batch(self.id, params=params[i : i + _MAX_PARAMS])

    def log(self, step: int, metrics: Mapping[str, float], seconds: float | None) -> None:
        now = int(1000 * (time.time() if seconds is None else seconds))
        entries = [self._metric(mlflow_name(name), value, now, step) for name, value in metrics.items()]
        for i in range(0, len(entries), _MAX_METRICS):
            self._client.log_batch(self.id, metrics=entries[i : i + _MAX_METRICS])

    def finish(self, ending: Ending) -> None:
        status = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}[ending]
        self._client.set_terminated(self.id, status)


class TrackioTracker:
    """A run of trackio. TRACKIO_PROJECT, TRACKIO_DIR, TRACKIO_SPACE_ID and TRACKIO_SERVER_URL count."""

    def __init__(self, directory: Path, config: Mapping[str, Any], run_id: str | None) -> None:
        """Begin a run, or continue the one with this name, as trackio finds runs by their names."""
        with _quiet():
            import trackio

            project = os.environ.get("TRACKIO_PROJECT") or _PROJECT
            taken: set[str] = set()
            if not any(os.environ.get(f"TRACKIO_{name}") for name in ("SPACE_ID", "SERVER_URL")):
                with contextlib.suppress(ValueError):  # The project is new.
                    taken = {run.name for run in trackio.Api().runs(project)}
            self.id = run_id or _free_name(directory.name, taken)
            # In a context of its own, as trackio would otherwise end the run once more at exit.
            self._run = contextvars.copy_context().run(
                trackio.init, project=project, name=self.id, config=dict(config), embed=False,
                auto_log_gpu=False, auto_log_cpu=False, resume="allow" if run_id is not None else "never")

    def log(self, step: int, metrics: Mapping[str, float], seconds: float | None) -> None:
        self._run.log(dict(metrics), step=step)

    def finish(self, ending: Ending) -> None:
        with _quiet():
            self._run.finish()


_KINDS: Mapping[str, Any] = {"mlflow": MlflowTracker, "trackio": TrackioTracker, "wandb": WandbTracker}
"""Trackers by name, which is that of the Python package and of the extra that installs it."""


def tracker_names(values: Sequence[str]) -> tuple[str, ...]:
    """Return the trackers that `--track` names, which may be joined by commas.

    Raises UserError if one is unknown or not installed.
    """
    names = tuple(dict.fromkeys(part for value in values for part in value.split(",")))
    for name in names:
        if name not in _KINDS:
            raise UserError(f"--track {name}: legal are {', '.join(_KINDS)}, and several joined by commas")
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # Without origin it is only a directory of this name.
            raise UserError(f"--track {name}: {name} is not installed: pip install 'realhf[{name}]'")
    return names


def mlflow_name(name: str) -> str:
    """Return a name that MLflow accepts: `@` becomes `_at_`, and other illegal characters become `_`."""
    return _MLFLOW_FORBIDS.sub("_", name.replace("@", "_at_"))


class Trackers:
    """The trackers of a run, each with a thread of its own, so that a slow one delays nothing.

    If one fails, there is a warning, and the run goes on without it. A run that is resumed in its directory
    goes on as the same tracked run, in which the steps after the checkpoint come a second time.
    """

    def __init__(
        self, names: Sequence[str], directory: Path, config: Mapping[str, Any],
        *, history: Sequence[Mapping[str, float]] = (), times: Mapping[int, float] | None = None,
    ) -> None:
        """Begin or continue the tracked runs; new ones get the `history` of earlier steps, at their `times`.

        Raises UserError if one cannot begin.
        """
        path = directory / IDS
        ids = read_object(path) if path.exists() and history else {}
        self._senders: list[_Sender] = []
        for name in names:
            run_id = ids.get(name)
            try:
                tracker: Tracker = _KINDS[name](directory, config, run_id)
            except (Exception, SystemExit) as error:
                self.finish("failed")
                raise UserError(f"--track {name}: {type(error).__name__}: {error}") from error
            ids[name] = tracker.id
            self._senders.append(_Sender(name, tracker))
            for record in history if run_id is None else ():
                step = int(record["step"])
                self._senders[-1].send(step, _metrics(record), (times or {}).get(step))
        if names:
            path.write_text(json.dumps(ids) + "\n")

    def log(self, record: Mapping[str, float]) -> None:
        """Send the metrics of a step; `record` has the number of the step, too."""
        for sender in self._senders:
            sender.send(int(record["step"]), _metrics(record), None)

    def finish(self, ending: Ending) -> None:
        """End the tracked runs, after waiting a limited time for what is left. A second call does nothing."""
        senders = self._senders
        self._senders = []
        for sender in senders:
            sender.end(ending)
        deadline = time.monotonic() + (_SHORT_PATIENCE_SECONDS if ending == "failed" else _PATIENCE_SECONDS)
        for sender in senders:
            sender.wait(max(0.0, deadline - time.monotonic()))


class _Sender:
    """A thread that passes steps on to one tracker, until the tracker fails."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self._name = name
        self._tracker = tracker
        self._steps: queue.SimpleQueue[tuple[int, Mapping[str, float], float | None] | None] = (
            queue.SimpleQueue())
        self._ending: Ending = "failed"
        self._has_failed = False
        # A daemon, so that a tracker which hangs does not keep the process alive.
        self._thread = threading.Thread(target=self._serve, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def send(self, step: int, metrics: Mapping[str, float], seconds: float | None) -> None:
        if not self._has_failed:
            self._steps.put((step, metrics, seconds))

    def end(self, ending: Ending) -> None:
        self._ending = ending
        self._steps.put(None)

    def wait(self, seconds: float) -> None:
        """Wait until everything is sent. Warn if it takes longer."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            warn(f"{self._name} has not taken the last metrics in time: its run may lack some")

    def _serve(self) -> None:
        try:
            while (item := self._steps.get()) is not None:
                self._tracker.log(*item)
        except Exception as error:
            self._has_failed = True
            why = one_line(f"{type(error).__name__}: {error}")
            warn(f"{self._name} has failed, and the run goes on without it: {why}")
        try:
            self._tracker.finish("failed" if self._has_failed else self._ending)
        except Exception as error:
            if not self._has_failed:
                warn(f"{self._name} could not end its run: {one_line(f'{type(error).__name__}: {error}')}")


def _metrics(record: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in record.items() if name != "step"}


def _free_name(name: str, taken: set[str]) -> str:
    """Return the name, or if it is taken the name with the first free number."""
    number = 2
    free = name
    while free in taken:
        free = f"{name}-{number}"
        number += 1
    return free


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Redirect the output of a library to standard error, as standard output is for results."""
    with contextlib.redirect_stdout(sys.stderr):
        yield
