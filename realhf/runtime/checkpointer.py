"""Checkpointer: saves the state of a run while it goes on, and restores it."""

import json
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
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
from realhf.data.loader import AnyLoader
from realhf.distributed import tags
from realhf.distributed.pieces import Piece
from realhf.distributed.process import RESCUE
from realhf.distributed.world import World
from realhf.errors import UserError, one_line, warn
from realhf.execution_plan import ExecutionPlan
from realhf.layout import Layout
from realhf.models.param_spec import Region
from realhf.runtime.compile.actions import RANK_0, role_of
from realhf.runtime.compile.eval_program import evaluation_plan
from realhf.runtime.compile.program import Program, described
from realhf.runtime.execute.executor import RankState
from realhf.runtime.execute.host_call import PARTS, is_in_parts
from realhf.runtime.samples.sample_store import SampleStore
from realhf.runtime.weights.model_store import HomeState, ModelStore
from realhf.steps.step_runner import StepRunner
from realhf.user_input.files import open_regular, read_bytes, read_object

_UNFINISHED = ".part"
_REMOVED = ".removed"
_JUNK = (AttributeError, AssertionError, LookupError, SafetensorError, TypeError, ValueError, OverflowError)
"""Errors of readers that get other values than those which were saved."""
_ROWS = "rows"
"""Entry of the rank that reads the data: the state of its loader."""
_PATIENCE_SECONDS = 3.0
"""Time that a failed run waits for a checkpoint to be complete."""
_RESCUE_SECONDS = 60.0
"""Time that the ranks of a failed run have to save the state after the last finished step."""
_POLL_SECONDS = 0.05
_NUM_ENDS = 3
"""Ends of steps that a rank keeps."""


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


@dataclass(frozen=True)
class StepEnd:
    """This rank's state after a step, apart from the tensors, which only updates change."""

    step: int
    mine: dict[str, Any]
    shared: dict[str, Any]  # What is equal on all ranks.
    samples: SampleStore
    updates: Mapping[str, int]
    """How often each parameter set has been updated of which this rank has a part."""
    journal: "Future[int] | None"
    """On rank 0, the size of metrics.jsonl once the step is in it."""


class Checkpointer:
    """The checkpoints of a run, in RUN/checkpoints.

    `save` copies this rank's tensors to host memory, which is allocated once, and returns; a thread writes
    the copy. A directory gets its final name when all ranks have written their files, so a checkpoint is
    either complete or not there. If one cannot be written, the run goes on with the earlier ones.

    A run that fails saves the state after its last finished step (`rescue`), unless an update of the next
    step has changed it. The rank that fails tells the others through the store; each writes its part and a
    file about it, as messages might not arrive any more, and the rank that fails completes the checkpoint.
    """

    def __init__(
        self, program: Program, state: RankState, run: StepRunner, directory: Path,
        *, loader: AnyLoader | None, data: Mapping[str, Any], sources: Mapping[str, Any],
    ) -> None:
        """Every rank calls this. `directory` is RUN/checkpoints; the rank that reads data has `loader`.

        Rank 0 has the fingerprints of the `data`, and those of code and models, the `sources`.
        """
        self._program = program
        self._data = data
        self._sources = sources
        self._loader = loader
        self._state = state
        self._world = state.world
        self._run = run
        self._directory = directory
        if self._world.size > 1:
            self._world.process.rescue = self.join_rescue
        self._experiment = described(program.experiment)
        self._snapshot: Snapshot | None = None
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None
        self._every_steps, self._every_seconds = program.experiment.checkpoint_period()
        self._saved_at = time.monotonic()
        self._saved_step = 0
        self._ends: dict[int, StepEnd] = {}
        """The ends of the last steps; another rank may be some steps behind."""
        self._joined = threading.Lock()
        """Held once this rank has begun to write its part of a rescue."""
        self.completed: list[Path] = []
        """Checkpoints that are complete, until somebody takes them out, on rank 0."""
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

    def end_step(self, step: int, journal: "Future[int] | None") -> None:
        """Note the state after this step; every rank calls this.

        On rank 0, `journal` is the size of metrics.jsonl once the step is in it.
        """
        if not self.is_on:
            return
        models = self._state.models
        counts = {state.name: state.counts for state in self._states if state.optimizer is not None}
        mine: dict[str, Any] = {
            "counts": counts, "in_flight": models.reallocations.in_flight,
            "host_states": self._state.context.states, "cache_limits": models.engines.cache_limits()}
        shared: dict[str, Any] = {"versions": models.versions.to_json(), "run": self._run.to_json()}
        if self._loader is not None:
            in_use = [prompt for prompt, _ in shared["run"]["ledger"]["kept_until"]]
            mine[_ROWS] = self._loader.state(in_use, next_prompt=shared["run"]["num_prompts"])
        mine, shared = json.loads(json.dumps([mine, shared]))  # Copies: the run goes on.
        self._ends[step] = StepEnd(
            step, mine, shared, self._state.samples.copied(), self._updates(), journal)
        for old in [end for end in self._ends if end <= step - _NUM_ENDS]:
            del self._ends[old]

    @cached_property
    def _states(self) -> list[HomeState]:
        return self._state.models.home_states()

    def _updates(self) -> dict[str, int]:
        of_sets = self._state.models.versions.to_json()["updates"]
        return {state.name: of_sets[state.name] if state.optimizer is None else state.optimizer.num_steps
                for state in self._states if state.tensors}

    def save(self, step: int) -> None:
        """Begin to save the state after this step, which has just ended; every rank calls this.

        If an earlier checkpoint is still being written, wait for it first.
        """
        self.finish()
        self._saved_at = time.monotonic()
        self._saved_step = step
        self._take_snapshot()
        end = self._ends[step]
        samples = end.samples.pack()
        self._writing = self._thread.submit(self._write, end, samples)

    def _take_snapshot(self) -> Snapshot:
        """Copy this rank's tensors to host memory."""
        self._state.models.reallocations.wait_for_followers()
        if self._snapshot is None:
            self._snapshot = Snapshot(self._boxes_to_write(self._states))
        with ExitStack() as stack:
            copies = [(role_of(state.name), state.layout) for state in self._states if state.tensors]
            stack.enter_context(self._state.models.engines.in_use(*copies))
            self._snapshot.take()
        return self._snapshot

    def _boxes_to_write(self, states: list[HomeState]) -> dict[str, tuple[Region, tuple[Piece, ...]]]:
        """Return the boxes that this rank writes, by name in its file, each with the tensors that hold it."""
        return {
            tensor_name(state.name, kind, param, region): (region, state.tensors[kind][param])
            for state in states for param, region, rank in state.pieces() if rank == self._world.rank
            for kind in state.kinds
        }

    def _write(self, end: StepEnd, samples: bytes) -> None:
        """Write this rank's files; on rank 0, complete the checkpoint."""
        directory = self._directory / (checkpoint_name(end.step) + _UNFINISHED)
        control = self._world.control
        about = self._write_part(directory, end, samples)
        if self._world.rank != 0:
            control.send_json(about, [0], tag=tags.CHECKPOINT).wait()
            return
        peers = range(1, self._world.size)
        ranks = [about, *(control.recv_json(rank, tag=tags.CHECKPOINT) for rank in peers)]
        about["history"] = _size(end.journal, None)
        if fault := self._complete(end, directory, ranks):
            warn(f"there is no checkpoint of step {end.step}: {fault}; the run goes on")

    def _write_part(self, directory: Path, end: StepEnd, samples: bytes) -> dict[str, Any]:
        """Write this rank's tensors and samples; return, as JSON, what completes the checkpoint."""
        about: dict[str, Any] = {
            "fault": "", "entries": {}, "mine": dict(end.mine), "digest": end.shared["run"]["digest"]}
        assert self._snapshot is not None
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
        return about

    def _complete(self, end: StepEnd, directory: Path, ranks: list[dict[str, Any]]) -> str:
        """Complete a checkpoint of which all ranks have written their parts; return why not, if so."""
        fault = next((rank["fault"] for rank in ranks if rank["fault"]), "")
        if not fault and any(rank["digest"] != ranks[0]["digest"] for rank in ranks):
            fault = "step() differs between ranks"
        try:
            if not fault:
                self._finish_directory(end, directory, ranks)
        except OSError as error:
            fault = f"{error.filename or directory} cannot be written: {error.strerror}"
        if fault:
            shutil.rmtree(directory, ignore_errors=True)
        else:
            self._remove_old(end.step)
            self.completed.append(self._directory / checkpoint_name(end.step))
        return fault

    def _finish_directory(self, end: StepEnd, directory: Path, ranks: list[dict[str, Any]]) -> None:
        """Write metrics and manifest, and give the directory its final name."""
        files = {name: FileEntry(*entry) for rank in ranks for name, entry in rank["entries"].items()}
        with open_regular(self._directory.parent / METRICS) as metrics:
            files[METRICS] = write_file(directory / METRICS, [metrics.read(ranks[0]["history"])])
        counts: dict[str, Sequence[int]] = {}
        for rank in ranks:
            counts |= rank["mine"].pop("counts")
        Manifest(
            step=end.step, num_ranks=self._world.size, experiment=self._experiment,
            plan=self._program.plan.to_dict(), files=files,
            sets={s.name: s.describe(self._files, counts.get(s.name, (0, 0))) for s in self._states},
            versions=end.shared["versions"], run=end.shared["run"],
            ranks=tuple(rank["mine"] for rank in ranks), data=self._data, sources=self._sources,
        ).save(directory)
        sync_directory(directory)
        final = self._directory / checkpoint_name(end.step)
        if final.exists():
            remove(final)
        directory.rename(final)
        sync_directory(self._directory)

    def rescue(self, *, leads: bool) -> None:
        """Save the state after the last finished step; a run that fails calls this, on each of its ranks.

        `leads` is false on ranks that only stop because another one does.
        """
        self._finish_writing(_RESCUE_SECONDS if leads else _PATIENCE_SECONDS)
        end = max(self._ends.values(), key=lambda end: end.step, default=None)
        # The last checkpoint may not have been written.
        is_new = end is not None and (
            end.step > self._saved_step or not (self._directory / checkpoint_name(end.step)).exists())
        if self._world.size > 1 and not self._world.process.is_watched:
            return  # Nobody would tell the other ranks.
        if not self._directory.parent.exists():  # Somebody has deleted the run.
            return
        store = self._world.store(RESCUE) if self._world.size > 1 else None
        if leads and is_new:
            assert end is not None
            if store is None or store.add("leaders", 1) == 1:
                if store is not None:
                    store.set(RESCUE, str(end.step))
                self.join_rescue(end.step)
                self._complete_rescue(end)
                return
            store.wait([RESCUE], timedelta(seconds=_PATIENCE_SECONDS))
        if store is not None and store.check([RESCUE]):
            step = int(store.get(RESCUE))
            self.join_rescue(step)
            deadline = time.monotonic() + _RESCUE_SECONDS
            while self._rescue_directory(step).exists() and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)

    def join_rescue(self, step: int) -> None:
        """Write this rank's part of the state after a step, and a file about it, once.

        Another thread than the main one may call this, while the main one waits for a rank that has failed.
        """
        if not self._joined.acquire(blocking=False):
            return
        directory = self._rescue_directory(step)
        try:
            about = self._rescued_part(step)
        except Exception as error:
            about = {"fault": f"rank {self._world.rank} failed with {type(error).__name__}: {error}"}
        with suppress(OSError):
            directory.mkdir(parents=True, exist_ok=True)
            file = directory / f"about_{self._world.rank}"
            file.with_suffix(".new").write_text(json.dumps(about))
            file.with_suffix(".new").rename(file)

    def _rescued_part(self, step: int) -> dict[str, Any]:
        """Write this rank's part of the state after a step, when that has ended here.

        The main thread may go on meanwhile. It counts an update before it changes anything, so that the copy
        is one of the step's end if there is no update more after it has been made.
        """
        deadline = time.monotonic() + _RESCUE_SECONDS
        self._finish_writing(_RESCUE_SECONDS)
        is_main = threading.current_thread() is threading.main_thread()
        while step not in self._ends and not is_main and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        end = self._ends.get(step)
        if end is None:
            return {"fault": f"rank {self._world.rank} has not ended the step"}
        if self._writing is not None and not self._writing.done():
            return {"fault": f"rank {self._world.rank} still writes an earlier one"}
        self._take_snapshot()
        if changed := [name for name, count in self._updates().items() if count != end.updates[name]]:
            return {"fault": f"{changed[0]} has been updated since"}
        about = self._write_part(self._rescue_directory(step), end, end.samples.pack())
        if self._world.rank == 0:
            about["history"] = _size(end.journal, _PATIENCE_SECONDS)
        return about

    def _rescue_directory(self, step: int) -> Path:
        return self._directory / f"{checkpoint_name(step)}.rescue{_UNFINISHED}"

    def _complete_rescue(self, end: StepEnd) -> None:
        """Wait for the parts of all ranks, or for the first that has none, and complete the checkpoint."""
        directory = self._rescue_directory(end.step)
        files = [directory / f"about_{rank}" for rank in range(self._world.size)]
        ranks: dict[Path, dict[str, Any]] = {}
        deadline = time.monotonic() + _RESCUE_SECONDS
        while len(ranks) < len(files) and not any(about["fault"] for about in ranks.values()):
            if time.monotonic() > deadline:
                late = next(rank for rank, file in enumerate(files) if file not in ranks)
                ranks[files[late]] = {"fault": f"rank {late} has not written its part"}
            for file in files:
                if file not in ranks and file.exists():
                    ranks[file] = read_object(file)
                    file.unlink()
            time.sleep(_POLL_SECONDS)
        if fault := self._complete(end, directory, [ranks[file] for file in files if file in ranks]):
            warn(f"the run fails, and there is no checkpoint of its last finished step, {end.step}: {fault}")

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
            with self._world.process.doing("waits for a checkpoint to be written"):
                self._writing.result()
            self._writing = None

    def _finish_writing(self, seconds: float) -> None:
        """Wait for the last checkpoint to be complete, or to have failed; for runs that have failed."""
        if self._writing is None:
            return
        deadline = time.monotonic() + seconds
        wait([self._writing], timeout=seconds)
        directory = self._directory / (checkpoint_name(self._saved_step) + _UNFINISHED)
        while directory.exists() and time.monotonic() < deadline:  # Other ranks have not written theirs.
            time.sleep(_POLL_SECONDS)


def _size(journal: "Future[int] | None", seconds: float | None) -> int:
    """Return the size of metrics.jsonl that a journal gives; -1, which is all of it, without one."""
    return -1 if journal is None else journal.result(timeout=seconds)


@dataclass(frozen=True)
class StartPoint:
    """The place at which a run begins: its first step, or the one after a checkpoint."""

    step: int = 1
    history: Path | None = None
    """The checkpoint's file of metrics."""


def begin(
    checkpoint: Checkpoint | None, program: Program, state: RankState, run: StepRunner,
    loader: AnyLoader | None,
) -> StartPoint:
    """Read the state of a checkpoint, if there is one, and return where the run begins. Every rank calls it.

    Under the same plan the run continues bit for bit. Raises UserError on all ranks if the checkpoint is of
    other models or of another step program, or if the state is not one that this version of realhf writes.
    """
    if checkpoint is None:
        return StartPoint()
    _check_continuable(checkpoint, program, state, run)
    try:
        _restore(checkpoint, program, state, run, loader)
    except UserError:
        raise
    except _JUNK as error:
        raise UserError(_is_junk(checkpoint, error)) from error
    return StartPoint(checkpoint.manifest.step + 1, checkpoint.path / METRICS)


def _is_junk(checkpoint: Checkpoint, error: Exception) -> str:
    what = f"checkpoint {checkpoint.path} has right checksums, but its state is not that of such a run"
    return f"{what} ({type(error).__name__}: {error})"


def _restore(
    checkpoint: Checkpoint, program: Program, state: RankState, run: StepRunner,
    loader: AnyLoader | None,
) -> None:
    manifest = checkpoint.manifest
    models = state.models
    run.restore(manifest.run)
    saved_rows = next((rank[_ROWS] for rank in manifest.ranks if _ROWS in rank), None)
    if loader is not None and saved_rows is not None and len(saved_rows) == len(loader.parts):
        loader.restore(saved_rows)  # With other parts, the rows are others, too.
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
        state.context.states |= _host_states(checkpoint, program, state.world.rank)
        return
    mine = manifest.ranks[state.world.rank]
    models.engines.restore_cache_limits(mine.get("cache_limits", {}))
    state.context.states |= {name: dict(saved) for name, saved in mine["host_states"].items()}
    models.versions.restore(manifest.versions, program.actions, models.start)
    models.reallocations.finish_all_but(mine["in_flight"])


def _host_states(checkpoint: Checkpoint, program: Program, rank: int) -> dict[str, dict[str, Any]]:
    """Return the states of the host calls that another plan puts on this rank.

    Only the ranks of a call keep its state, so that no other rank saves one that is out of date.
    """
    layouts = _host_layouts(program, program.plan)
    before = _host_layouts(program, ExecutionPlan.from_dict(checkpoint.manifest.plan))
    of_ranks = [of_rank["host_states"] for of_rank in checkpoint.manifest.ranks]
    found = {}
    for name in (name for name, layout in layouts.items() if rank in layout):
        savers = dict.fromkeys((*before[name].ranks, *range(len(of_ranks))))  # Its own ranks come first.
        if saved := [of_ranks[saver][name] for saver in savers if name in of_ranks[saver]]:
            ranks = layouts[name].ranks
            found[name] = state_of_share(saved, ranks.index(rank), len(ranks), call=name)
    return found


def _host_layouts(program: Program, plan: ExecutionPlan) -> dict[str, Layout]:
    """Return the layouts that a plan gives to the host calls of a program, by the names of their states."""
    calls = [(call.name, call.name, plan) for call in program.graph.of_kind("host")]
    for eval_set in program.evaluations:
        of_set = evaluation_plan(eval_set, plan)
        calls += [(eval_set.prefix + call.name, call.name, of_set) for call in eval_set.graph.of_kind("host")]
    return {name: there[call].layout if call in there.calls else RANK_0 for name, call, there in calls}


def state_of_share(
    saved: Sequence[dict[str, Any]], share: int, num_shares: int, *, call: str
) -> dict[str, Any]:
    """Return the state of a host call on one of `num_shares` ranks, from those that ranks have saved.

    `saved` is in the order of the old layout's ranks, and `share` is a place among the new layout's.
    Values of the form {"parts": {...}} (see `HostContext.state`) are joined over the ranks. Other values are
    those of the same place, if there are as many ranks as before. Raises UserError if there are more or fewer
    ranks and such values differ, or if ranks have saved different values of the same part.
    """
    joined: dict[str, Any] = {}
    has_places = len(saved) == num_shares
    for key in dict.fromkeys(key for of_rank in saved for key in of_rank):
        values = [of_rank[key] for of_rank in saved if key in of_rank]
        if all(map(is_in_parts, values)):
            joined[key] = {PARTS: _joined_parts(values, f"host call {call!r}: state {key!r}")}
        elif has_places:
            if key in saved[share]:
                joined[key] = saved[share][key]
        elif len(values) == len(saved) and len(set(map(_as_text, values))) == 1:
            joined[key] = values[0]
        else:
            raise UserError(
                f"host call {call!r} ran on {len(saved)} ranks, whose states differ in {key!r}: resume with "
                "a plan that has as many ranks for it, or keep what belongs to the rows of a rank in parts")
    return joined


def _joined_parts(values: Sequence[dict[str, Any]], what: str) -> dict[str, Any]:
    """Return the parts of all ranks. Raises UserError if two ranks have different ones of the same name."""
    joined: dict[str, Any] = {}
    for value in values:
        for name, part in value[PARTS].items():
            if _as_text(joined.setdefault(name, part)) != _as_text(part):
                raise UserError(
                    f"{what} has the part {name!r} from two ranks, with different values: a rank must save "
                    "only its own parts; resume with the plan of the checkpoint")
    return joined


def _as_text(value: Any) -> str:
    """Return a JSON value as text, in which NaN equals NaN and the order of keys does not matter."""
    return json.dumps(value, sort_keys=True)


def _restore_samples(checkpoint: Checkpoint, program: Program, state: RankState) -> None:
    """Read this rank's samples; under another plan, read those of all ranks and keep a share."""
    rank = state.world.rank
    is_same = checkpoint.is_of(program, state.world)
    savers = [rank] if is_same else range(checkpoint.manifest.num_ranks)
    for name in map(samples_name, savers):
        if (entry := checkpoint.manifest.files.get(name)) is not None:
            state.samples.unpack(read_bytes(checkpoint.path / name, most=entry.num_bytes, follow=False))
    if not is_same:
        layouts = {call.name: program.plan[call.name].layout for call in program.graph.calls}
        state.samples.deal(layouts, rank, group_size=program.experiment.group_size)


def _check_continuable(
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
