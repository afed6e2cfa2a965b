"""Checkpointer: saves the state of a run while it goes on, and restores it."""

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from realhf.checkpoint.names import METRICS, checkpoint_name, find_checkpoints, rank_name, samples_name
from realhf.checkpoint.run_state import (
    FileEntry,
    Manifest,
    SavedTensors,
    Snapshot,
    check_file,
    sync_directory,
    tensor_name,
    write_file,
)
from realhf.dist import tags
from realhf.dist.world import World
from realhf.errors import UserError, one_line, warn
from realhf.models.region import Region
from realhf.realloc.pieces import Piece
from realhf.runtime.compile.actions import role_of
from realhf.runtime.compile.experiment_json import described
from realhf.runtime.compile.program import Program
from realhf.runtime.execute.inputs import RankState
from realhf.runtime.weights.home_state import HomeState
from realhf.runtime.weights.model_store import ModelStore
from realhf.steps.step_runner import StepRunner
from realhf.user_input.files import open_regular, read_bytes

_UNFINISHED = ".part"
_REMOVED = ".removed"
_JUNK = (AttributeError, AssertionError, LookupError, SafetensorError, TypeError, ValueError, OverflowError)
"""Errors of readers that get other values than those which were saved."""
_PATIENCE_SECONDS = 3.0
"""Time that a failed run waits for a checkpoint to be complete."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint, whose files have been checked."""

    path: Path
    manifest: Manifest

    def is_of(self, program: Program, world: World) -> bool:
        """Return whether it was saved under the program's plan, on as many ranks; if so, resume is exact."""
        return self.manifest.plan == program.plan.to_dict() and self.manifest.num_ranks == world.size


def newest_checkpoint(world: World, candidates: Sequence[Path]) -> Checkpoint | None:
    """Return the first undamaged checkpoint of rank 0's candidates; None if there are no candidates.

    Every rank calls this and checks a share of the files. Rank 0 prints which checkpoints are damaged.
    Raises UserError if all are.
    """
    paths = world.control.all_gather_json([str(path) for path in candidates])[0]
    for path in paths:
        directory = Path(path)
        fault = ""
        manifest = None
        try:
            manifest = Manifest.load(directory)
            for name in list(manifest.files)[world.rank :: world.size]:
                check_file(directory, name, manifest)
        except ValueError as error:
            fault = str(error)
        faults = [fault for fault in world.control.all_gather_json(fault) if fault]
        if not faults and manifest is not None:
            return Checkpoint(directory, manifest)
        if world.rank == 0:
            why = one_line(faults[0])
            warn(f"checkpoint {path} is not used: {why}")
    if paths:
        raise UserError(
            f"{Path(paths[0]).parent} has no undamaged checkpoint: "
            "restore the files, or remove its checkpoints to begin anew")
    return None


class Checkpointer:
    """The checkpoints of a run, in RUN/checkpoints.

    `save` copies this rank's tensors to host memory, which is allocated once, and returns; a thread writes
    the copy. A directory gets its final name when all ranks have written their files, so a checkpoint is
    either complete or not there. If one cannot be written, the run goes on with the earlier ones.
    """

    def __init__(self, program: Program, state: RankState, run: StepRunner, directory: Path) -> None:
        """Every rank calls this; `directory` is RUN/checkpoints."""
        self._program = program
        self._state = state
        self._world = state.world
        self._run = run
        self._directory = directory
        self._experiment = described(program.experiment)
        self._snapshot: Snapshot | None = None
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None
        self._every_steps, self._every_seconds = program.experiment.checkpoint_period()
        self._saved_at = time.monotonic()
        self._files = [rank_name(rank) for rank in range(self._world.size)]
        if self._world.rank == 0:
            self._clean()
        self.is_on = (self._every_steps > 0 or self._every_seconds > 0) and self._is_shared()

    def _clean(self) -> None:
        """Remove unfinished checkpoints of a killed run. Raises UserError if the directory cannot be made."""
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{self._directory} cannot be made: {error.strerror}") from error
        for path in self._directory.iterdir():
            if path.suffix in (_UNFINISHED, _REMOVED):
                shutil.rmtree(path, ignore_errors=True)  # A worker of that run may still write into it.

    def _is_shared(self) -> bool:
        """Return whether all ranks see the directory."""
        if self._world.size == self._world.ranks_per_host:
            return True
        trial = self._directory / f"{time.time_ns()}{_UNFINISHED}"
        name = self._world.control.all_gather_json(str(trial))[0]
        if self._world.rank == 0:
            trial.mkdir()
        self._world.control.barrier()
        seen = self._world.control.all_gather_json(Path(name).is_dir())
        blind = [rank for rank, sees in enumerate(seen) if not sees]
        if self._world.rank == 0:
            trial.rmdir()
            if blind:
                warn(
                    f"rank {blind[0]} does not see {self._directory}, so there are no checkpoints: "
                    "put --out on a disk that all hosts share")
        return not blind

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is due after this step, by this rank's clock."""
        if not self.is_on:
            return False
        if self._every_steps:
            return step % self._every_steps == 0
        return time.monotonic() - self._saved_at >= self._every_seconds

    def save(self, step: int, journal: "Future[int] | None") -> None:
        """Begin to save the state after this step; every rank calls this.

        On rank 0, `journal` is the size of metrics.jsonl once the step is in it. If an earlier checkpoint is
        still being written, wait for it first.
        """
        self.finish()
        self._saved_at = time.monotonic()
        self._state.models.reallocations.wait_for_followers()
        states = self._state.models.home_states()
        if self._snapshot is None:
            self._snapshot = Snapshot(self._boxes_to_write(states))
        with ExitStack() as stack:
            copies = [(role_of(state.name), state.layout) for state in states if state.tensors]
            stack.enter_context(self._state.models.engines.in_use(*copies))
            self._snapshot.take()
        counts = {state.name: state.counts for state in states if state.optimizer is not None}
        in_flight = self._state.models.reallocations.in_flight
        mine = {
            "counts": counts, "in_flight": in_flight, "host_state": self._state.context.state,
            "cache_limits": self._state.models.engines.cache_limits()}
        replicated = {"versions": self._state.models.versions.to_json(), "run": self._run.to_json()}
        shared = json.loads(json.dumps(replicated))  # A copy: the run goes on.
        samples = self._state.samples.pack()
        self._writing = self._thread.submit(self._write, step, states, mine, shared, samples, journal)

    def _boxes_to_write(self, states: list[HomeState]) -> dict[str, tuple[Region, tuple[Piece, ...]]]:
        """Return the boxes that this rank writes, by name in its file, each with the tensors that hold it."""
        return {
            tensor_name(state.name, kind, param, region): (region, state.tensors[kind][param])
            for state in states for param, region, rank in state.pieces() if rank == self._world.rank
            for kind in state.kinds
        }

    def _write(
        self, step: int, states: list[HomeState], mine: dict[str, Any], shared: Mapping[str, Any],
        samples: bytes, journal: "Future[int] | None",
    ) -> None:
        """Write this rank's files; on rank 0, complete the checkpoint. `shared` is equal on all ranks."""
        directory = self._directory / (checkpoint_name(step) + _UNFINISHED)
        assert self._snapshot is not None
        control = self._world.control
        about: dict[str, Any] = {"fault": "", "entries": {}, "mine": mine, "digest": shared["run"]["digest"]}
        try:
            directory.mkdir(parents=True, exist_ok=True)
            name = self._files[self._world.rank]
            entries = {name: self._snapshot.write(directory / name)}
            if samples:
                name = samples_name(self._world.rank)
                entries[name] = write_file(directory / name, [samples])
            about["entries"] = {name: [file.num_bytes, file.sha256] for name, file in entries.items()}
        except OSError as error:
            about["fault"] = f"{error.filename or directory} cannot be written: {error.strerror}"
        if self._world.rank != 0:
            control.send_json(about, [0], tag=tags.CHECKPOINT).wait()
            return
        peers = range(1, self._world.size)
        ranks = [about, *(control.recv_json(rank, tag=tags.CHECKPOINT) for rank in peers)]
        fault = next((rank["fault"] for rank in ranks if rank["fault"]), "")
        if any(rank["digest"] != about["digest"] for rank in ranks):
            fault = "step() differs between ranks"
        assert journal is not None
        history = journal.result()
        try:
            if not fault:
                self._complete(step, directory, states, ranks, shared, history)
        except OSError as error:
            fault = f"{error.filename or directory} cannot be written: {error.strerror}"
        if fault:
            shutil.rmtree(directory, ignore_errors=True)
            warn(f"there is no checkpoint of step {step}: {fault}; the run goes on")
        else:
            self._remove_old(step)

    def _complete(
        self, step: int, directory: Path, states: list[HomeState], ranks: list[dict[str, Any]],
        shared: Mapping[str, Any], history: int,
    ) -> None:
        """Write the manifest, and give the directory its final name."""
        files = {name: FileEntry(*entry) for rank in ranks for name, entry in rank["entries"].items()}
        with open_regular(self._directory.parent / METRICS) as metrics:
            files[METRICS] = write_file(directory / METRICS, [metrics.read(history)])
        counts: dict[str, Sequence[int]] = {}
        for rank in ranks:
            counts |= rank["mine"].pop("counts")
        Manifest(
            step=step, num_ranks=self._world.size, experiment=self._experiment,
            plan=self._program.plan.to_dict(), files=files,
            sets={s.name: s.describe(self._files, counts.get(s.name, (0, 0))) for s in states},
            versions=shared["versions"], run=shared["run"], ranks=tuple(rank["mine"] for rank in ranks),
        ).save(directory)
        sync_directory(directory)
        final = self._directory / checkpoint_name(step)
        if final.exists():
            remove(final)
        directory.rename(final)
        sync_directory(self._directory)

    def _remove_old(self, newest: int) -> None:
        """Remove the checkpoints that are not to be kept, but none later than `newest`: those are damaged."""
        experiment = self._program.experiment
        always = experiment.keep_checkpoint_every
        earlier = [(step, path) for step, path in find_checkpoints(self._directory).items() if step <= newest]
        for step, path in earlier[experiment.keep_checkpoints :]:
            if not always or step % always:
                try:
                    remove(path)
                except OSError as error:
                    warn(f"the old checkpoint {path} cannot be removed: {error.strerror}")

    def finish(self) -> None:
        """Wait until the last checkpoint is written. Raises the exception of its thread, if there was one."""
        if self._writing is not None:
            with self._world.activity.doing("waits for a checkpoint to be written"):
                self._writing.result()
            self._writing = None

    def abandon(self) -> None:
        """Wait shortly for the last checkpoint to be written; for runs that have failed."""
        if self._writing is not None:
            wait([self._writing], timeout=_PATIENCE_SECONDS)


def restore(checkpoint: Checkpoint, program: Program, state: RankState, run: StepRunner) -> None:
    """Read the state of a checkpoint; every rank calls this, before the first step.

    Under the same plan the run continues bit for bit. Raises UserError if the state is not one that this
    version of realhf writes.
    """
    try:
        _restore(checkpoint, program, state, run)
    except UserError:
        raise
    except _JUNK as error:
        raise UserError(_is_junk(checkpoint, error)) from error


def _is_junk(checkpoint: Checkpoint, error: Exception) -> str:
    what = f"checkpoint {checkpoint.path} has right checksums, but its state is not that of such a run"
    return f"{what} ({type(error).__name__}: {error})"


def _restore(checkpoint: Checkpoint, program: Program, state: RankState, run: StepRunner) -> None:
    manifest = checkpoint.manifest
    models = state.models
    run.restore(manifest.run)
    _restore_samples(checkpoint, program, state)
    for home in models.home_states():
        saved = manifest.sets[home.name]
        copy = (role_of(home.name), home.layout)
        if state.world.rank in home.layout:
            with models.engines.in_use(copy, written=copy):
                home.read(SavedTensors(checkpoint.path, home.name, saved))
        if home.optimizer is not None:
            home.optimizer.state_was_read(saved.num_steps, saved.num_skipped)
    if not checkpoint.is_of(program, state.world):
        models.versions.outdate_sharded()
        for rank in manifest.ranks:
            state.context.state |= rank["host_state"]
        return
    mine = manifest.ranks[state.world.rank]
    models.engines.restore_cache_limits(mine.get("cache_limits", {}))
    state.context.state |= mine["host_state"]
    models.versions.restore(manifest.versions, program.actions, models.start)
    models.reallocations.finish_all_but(mine["in_flight"])


def _restore_samples(checkpoint: Checkpoint, program: Program, state: RankState) -> None:
    """Read this rank's samples; under another plan, read those of all ranks and keep a share."""
    rank = state.world.rank
    is_same = checkpoint.is_of(program, state.world)
    savers = [rank] if is_same else range(checkpoint.manifest.num_ranks)
    for name in map(samples_name, savers):
        if (entry := checkpoint.manifest.files.get(name)) is not None:
            state.samples.unpack(read_bytes(checkpoint.path / name, most=entry.num_bytes))
    if not is_same:
        layouts = {call.name: program.plan[call.name].layout for call in program.graph.calls}
        state.samples.deal(layouts, rank, group_size=program.experiment.group_size)


def check_continuable(
    checkpoint: Checkpoint, program: Program, state: RankState, run: StepRunner
) -> None:
    """Raise UserError on all ranks if the checkpoint is of other models or of another step program."""
    _check_models(checkpoint, state.models)
    saved = checkpoint.manifest.run
    old = checkpoint.manifest.experiment.get("group_size")
    new = program.experiment.group_size
    try:
        if old != new and saved["ledger"]["kept_until"]:  # Its sample ids mean other prompts now.
            raise UserError(f"group_size is {old} in the checkpoint and {new} now: use {old}")
        run.require_continuable(saved)
    except UserError as error:
        raise UserError(f"checkpoint {checkpoint.path}: {error}") from error
    except _JUNK as error:
        raise UserError(_is_junk(checkpoint, error)) from error


def _check_models(checkpoint: Checkpoint, store: ModelStore) -> None:
    """Raise UserError if the checkpoint is of other models."""
    states = store.home_states()
    names = sorted(state.name for state in states)
    if names != sorted(checkpoint.manifest.sets):
        have = ", ".join(sorted(checkpoint.manifest.sets))
        raise UserError(
            f"checkpoint {checkpoint.path} holds the trained parameters of {have}; "
            f"the experiment trains {', '.join(names)}")
    for state in states:
        if fault := state.difference(checkpoint.manifest.sets[state.name]):
            raise UserError(f"checkpoint {checkpoint.path} is of another model: {fault}")


def remove(path: Path) -> None:
    """Rename a checkpoint, so that no run reads it any more, and remove it."""
    gone = path.with_name(path.name + _REMOVED)
    path.rename(gone)
    shutil.rmtree(gone)
