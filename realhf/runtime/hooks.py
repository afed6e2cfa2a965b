"""Hooks: calls the user's functions between two steps, and makes all ranks do what they ask for."""

import dataclasses
import shutil
import sys
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from realhf.calls import TrainStep
from realhf.checkpoint.names import find_checkpoints
from realhf.errors import UserError, described, one_line, user_line, warn
from realhf.experiment import Experiment
from realhf.graph import FunctionCall
from realhf.runtime.checkpointer import Checkpointer
from realhf.runtime.compile.actions import role_of
from realhf.runtime.compile.program import Program
from realhf.runtime.execute.executor import Executor, RankState
from realhf.runtime.journal import Journal
from realhf.steps.hooks import StepEvent, best_step
from realhf.steps.step_runner import StepRunner

_STATE = "hooks"
"""Key of `run.state` with what hooks have set, so that checkpoints hold it."""
_BEST = "best"
"""The link in hf/ to the export of the best evaluation."""


@dataclass(frozen=True)
class Wishes:
    """The wishes of hooks after a step, on which all ranks agree."""

    changes: dict[str, float] = dataclasses.field(default_factory=dict)
    stops: str | None = None
    exports: bool = False  # The model is the best one so far.


def has_hooks(experiment: Experiment) -> bool:
    """Return whether something decides between two steps, so that ranks wait for each other there."""
    e = experiment
    settings = (e.on_step, e.on_evaluation, e.on_checkpoint, e.early_stopping, e.best_by)
    return any(setting is not None for setting in settings) or e.keep_exports > 0


class Hooks:
    """The hooks of a run. Every rank constructs it and calls `after` in every step."""

    def __init__(
        self, program: Program, state: RankState, runner: StepRunner, executor: Executor, journal: Journal,
        *, out: Path | None, checkpointer: Checkpointer | None,
    ) -> None:
        self._program = program
        self._state = state
        self._runner = runner
        self._executor = executor
        self._journal = journal
        self._out = out
        self._checkpointer = checkpointer
        self._values = dict(_values(program))
        self._changes: dict[str, float] = {}
        self.is_on = has_hooks(program.experiment)
        self._apply(runner.state.get(_STATE, {}))

    def after(self, step: int) -> Wishes:
        """Call the hooks on rank 0, once it knows the step's metrics; return what all ranks are to do."""
        if not self.is_on:
            return Wishes()
        world = self._state.world
        wishes = Wishes()
        if world.rank == 0:
            assert self._journal.last is not None
            self._journal.last.result()
            wishes = self._wishes(step)
        wishes = Wishes(**world.control.all_gather_json(dataclasses.asdict(wishes))[0])
        self._apply(wishes.changes)
        if self._changes:
            self._runner.state[_STATE] = dict(self._changes)
        if world.rank == 0 and self._out is not None:
            self._remove_exports(step, exports=wishes.exports)
        return wishes

    def last_checkpoints(self) -> None:
        """Call `on_checkpoint` about those that have been completed since the last step, on rank 0."""
        if self.is_on and self._state.world.rank == 0:
            self._about_checkpoints(self._event(self._program.experiment.steps))

    def _wishes(self, step: int) -> Wishes:
        experiment = self._program.experiment
        event = self._event(step)
        self._call("on_step", event)
        exports = False
        if step in self._journal.evaluations:
            self._call("on_evaluation", event)
            if experiment.early_stopping is not None:
                event.stops = event.stops or experiment.early_stopping.reason(event.evaluations)
            if experiment.best_by is not None:
                exports = best_step(event.evaluations, experiment.best_by) == step
        self._about_checkpoints(event)
        return Wishes(event.changes, event.stops, exports)

    def _event(self, step: int) -> StepEvent:
        evaluations = self._journal.evaluations
        history = self._journal.history
        metrics = (history[-1] if history else {}) | evaluations.get(step, {})
        return StepEvent(
            step=step, steps=self._program.experiment.steps, metrics=metrics, evaluations=dict(evaluations),
            out=self._out, values=self._values | self._changes)

    def _about_checkpoints(self, event: StepEvent) -> None:
        completed = [] if self._checkpointer is None else self._checkpointer.completed
        while completed:
            event.checkpoint = completed.pop(0)
            self._call("on_checkpoint", event)
        event.checkpoint = None

    def _call(self, name: str, event: StepEvent) -> None:
        hook = getattr(self._program.experiment, name)
        if hook is None:
            return
        try:
            hook(event)
        except UserError as error:  # The sentence is ours, as of `event.set`.
            where = user_line(error)
            raise UserError(
                f"{name} after step {event.step}: {error}" + (f" ({where})" if where else "")) from error
        except (Exception, SystemExit) as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            unknown = isinstance(error, KeyError) and "metrics" in (frame.line or "")
            known = f"; event.metrics has {', '.join(event.metrics)}" if unknown else ""
            raise UserError(f"{name} after step {event.step} raised {described(error)}{known}") from error

    def _apply(self, changes: Mapping[str, float]) -> None:
        """Change learning rates, and coefficients of losses, on this rank."""
        for name, value in changes.items():
            owner, _, field = name.rpartition(".")
            if owner in self._program.roles:
                for home in self._state.models.home_states():
                    if home.optimizer is not None and role_of(home.name) == owner:
                        home.optimizer.config = dataclasses.replace(home.optimizer.config, lr=value)
            else:
                self._executor.change_call(_with_coefficient(self._executor.call(owner), field, value))
        self._changes |= changes

    def _remove_exports(self, step: int, *, exports: bool) -> None:
        """Remove old exports: all ranks have finished theirs. Those that stay: the newest, and the best."""
        experiment = self._program.experiment
        assert self._out is not None
        known = find_checkpoints(self._out / "hf")
        best = None
        if experiment.best_by is not None and self._journal.evaluations:
            best = best_step(self._journal.evaluations, experiment.best_by)
        if experiment.keep_exports:
            for old in list(known)[experiment.keep_exports - 1 :]:
                if old not in (best, step):
                    shutil.rmtree(known[old], ignore_errors=True)
        if exports:
            link = self._out / "hf" / _BEST
            link.parent.mkdir(exist_ok=True)
            link.unlink(missing_ok=True)
            link.symlink_to(f"step_{step}")

    def summary(self) -> dict[str, Any]:
        """Return what the run's summary tells of the best evaluation."""
        metric = self._program.experiment.best_by
        if metric is None or not self._journal.evaluations:
            return {}
        step = best_step(self._journal.evaluations, metric)
        return {"best": {"step": step, "metric": metric, "value": self._journal.evaluations[step][metric]}}


def push_to_hub(experiment: Experiment, directory: Path) -> None:
    """Upload an export to the hub, under the name `push_to_hub`; warn if that fails."""
    name = experiment.push_to_hub
    if name is None:
        return
    from huggingface_hub import HfApi  # Imported here, as few runs need it.

    try:
        api = HfApi()
        api.create_repo(name, private=True, exist_ok=True)
        url = api.upload_folder(
            repo_id=name, folder_path=str(directory.resolve()), commit_message="Model of a run of realhf")
    except Exception as error:  # The library raises those of others, too.
        warn(f"push_to_hub {name}: the model is not uploaded ({described(error)}); it is in {directory}")
        return
    print(f"realhf: the model is on the hub: {one_line(str(url))}", file=sys.stderr, flush=True)


def _values(program: Program) -> Iterator[tuple[str, float]]:
    """Yield what hooks may change: learning rates, and the numbers of losses."""
    for name, role in program.roles.items():
        if role.optimizer is not None and role.optimizer.lr is not None:
            yield f"{name}.lr", role.optimizer.lr
    for call in program.graph.calls:
        if isinstance(call.work, TrainStep):
            for field, value in _coefficients(call.work.loss).items():
                yield f"{call.name}.{field}", value


def _coefficients(loss: Any) -> dict[str, float]:
    """Return the fields of a loss, or of its config, that are numbers above 0 with a fraction."""
    found = {}
    for part in (loss, getattr(loss, "config", None)):
        for field in dataclasses.fields(part) if dataclasses.is_dataclass(part) else ():
            if isinstance(value := getattr(part, field.name), float) and value > 0:
                found[field.name] = value
    return found


def _with_coefficient(call: FunctionCall, field: str, value: float) -> FunctionCall:
    loss: Any = call.work_as(TrainStep).loss
    try:
        if field in {f.name for f in dataclasses.fields(loss)}:
            return call.with_work(loss=dataclasses.replace(loss, **{field: value}))
        config = dataclasses.replace(loss.config, **{field: value})
        return call.with_work(loss=dataclasses.replace(loss, config=config))
    except ValueError as error:
        raise UserError(f"set({f'{call.name}.{field}'!r}, {value}): {error}") from error
