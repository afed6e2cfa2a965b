"""A worker: the only process of a run, or one of several that torchrun started."""

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from realhf.checkpoint.names import find_checkpoints
from realhf.cli.launch import ASK_TO_STOP, LOCAL_LAUNCHER, Job, ProfileJob, how_to_continue, resume_command
from realhf.data.light_tokenizer import panics_as_errors
from realhf.distributed.communicators import set_nccl_environment
from realhf.distributed.failures import FailureBoard, Heartbeat, silence_over_nccl, write_error_file
from realhf.distributed.group import PeerError
from realhf.distributed.process import WatchedProcess
from realhf.distributed.world import World, open_store, own_device
from realhf.errors import UserError
from realhf.execution_plan import ExecutionPlan
from realhf.profiling.measure import measure
from realhf.runtime.checkpointer import Checkpoint, newest_checkpoint
from realhf.runtime.compile.equal_programs import require_equal_programs
from realhf.runtime.evaluations import evaluate as run_evaluations
from realhf.runtime.execute.determinism import record_surroundings, repeat_exactly
from realhf.runtime.records.run_directory import (
    RunDirectory,
    find_restarted,
    find_resumption,
    new_run_directory,
)
from realhf.runtime.trainer import Trainer
from realhf.signals import ENDING, SHOW_STACKS, StopSignals, on_signal

_M_TRIM_THRESHOLD = -1  # Both constants are from glibc's malloc.h.
_M_MMAP_THRESHOLD = -3
_GRACE_SECONDS = 3.0
"""Seconds that a worker which lost a peer waits, so that the peer's own sentence comes first."""
_START_SECONDS = 120.0
"""Shortest timeout of the start, where some ranks import and read data more slowly than others."""
_REPORT_SECONDS = 10.0
"""Timeout of the connection to the store over which a failure is reported."""
_PLAN = "realhf/plan"
"""Key of the plan that rank 0 has made, in the run's store."""
_OTHER_PLAN = ", under another plan: results are the same up to the order of floating-point sums"


@dataclass(frozen=True)
class Place:
    """The position of this process among those of the run."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    ranks_per_host: int = 1
    host: int = 0

    @classmethod
    def from_environment(cls) -> "Place":
        """Return the place that torchrun's variables describe; without them this is the only process."""
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            return cls()
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
        return cls(*(int(os.environ[name]) for name in names))

    def connect(self, timeout_seconds: float) -> FailureBoard:
        """Return the run's failure board on a new connection."""
        store = open_store(rank=self.rank, size=self.size, timeout_seconds=timeout_seconds)
        return FailureBoard(store, rank=self.rank, size=self.size, host=self.host)


def train(job: Job) -> int:
    """Train on all ranks and return the exit code."""
    begun: Path | None = None
    with _reporting(job) as worker:
        world = worker.connect(job.timeout_seconds)
        require_equal_programs(world, job.program)
        run = _OpenRun.of(job, world)
        if run.checkpoint is not None and _is_finished(job, world, run.out, run.checkpoint):
            return 0
        if run.checkpoint is not None and world.rank == 0:
            _say(_continues(job, world, run.out, run.checkpoint))
        stop_signals = StopSignals(*_stop_signals(job, world))
        with on_signal(SHOW_STACKS, lambda: worker.show_stacks(world)), stop_signals as stop:
            trainer = Trainer(
                job.program, world, out=run.out, checkpoint=run.checkpoint, stop=stop, track=job.track,
                profile_steps=job.profile_steps)
            begun = run.begin()
            result = trainer.run()
        if result.stopped_after is None:
            return 0
        if world.rank == 0:
            _say(_ended(job, run.out, step=result.stopped_after, by=stop.requested))
        return 1
    if begun is not None and (text := how_to_continue(begun)) is not None:
        _say(text)
    return worker.code


@dataclass(frozen=True)
class _OpenRun:
    """The directory of a run, which rank 0 has claimed, and the checkpoint after which the run goes on."""

    out: Path
    claimed: RunDirectory | None
    checkpoint: Checkpoint | None

    @classmethod
    def of(cls, job: Job, world: World) -> "_OpenRun":
        claimed: RunDirectory | None = None
        candidates: list[Path] = []
        if world.rank == 0:
            claimed, candidates = _claim_directory(job)
            if job.program.experiment.deterministic:
                record_surroundings(job.program, claimed.path)
        out = Path(world.control.all_gather_json(str(claimed.path) if claimed is not None else "")[0])
        world.process.failures = out / "failures"
        return cls(out, claimed, newest_checkpoint(world, candidates))

    def begin(self) -> Path:
        """Note that the steps begin; return the directory, in which there is now something to continue."""
        if self.claimed is not None:
            self.claimed.begin()
        return self.out


def _continues(job: Job, world: World, out: Path, checkpoint: Checkpoint) -> str:
    """Return the sentence that a run goes on."""
    restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    number = f" (restart {restart} after a failure)" if restart else ""
    how = "" if checkpoint.is_of(job.program, world) else _OTHER_PLAN
    return f"continues {out} after step {checkpoint.manifest.step}{number}{how}"


def _ended(job: Job, out: Path, *, step: int, by: str | None) -> str:
    """Return the sentence that a signal has ended a run; our own launcher prints how to continue."""
    after = f"after step {step} of {job.program.experiment.steps}"
    if LOCAL_LAUNCHER in os.environ:
        return f"ended {after}"
    saved = find_checkpoints(out / "checkpoints")
    how = f"to continue: {resume_command(out)}" if saved else "there is no checkpoint"
    return f"ended by {by or 'a signal'} {after}; {how}"


def _say(sentence: str) -> None:
    print(f"realhf: {sentence}", file=sys.stderr, flush=True)


def evaluate(job: Job, *, show: Callable[[Mapping[str, Any], Path], None]) -> int:
    """Evaluate a model on all ranks and return the exit code; rank 0 shows the summary by `show`."""
    with _reporting(job) as worker:
        world = worker.connect(job.timeout_seconds)
        require_equal_programs(world, job.program)
        out = None
        if world.rank == 0:
            out = RunDirectory(_out_of(job), stem=job.name).path
        summary = run_evaluations(job.program, world, out=out)
        if out is not None:
            show(summary, out)
    return worker.code


def compute(job: Job) -> int:
    """Run the graphs of the held-out rows once on all ranks, and return the exit code."""
    with _reporting(job) as worker:
        world = worker.connect(job.timeout_seconds)
        require_equal_programs(world, job.program)
        run_evaluations(job.program, world)
    return worker.code


def profile(job: ProfileJob) -> int:
    """Measure the machine on all ranks and return the exit code."""
    with _reporting(job) as worker:
        world = worker.connect(job.timeout_seconds)
        measured = measure(world, job.problem)
        if world.rank == 0:
            measured.save(job.out)
            _say(f"wrote {job.out}: {measured.noise()[1]}")
            if disturbed := measured.disturbed():
                _say(disturbed)
    return worker.code


class _Worker:
    """This process in its place among the others, and the exit code that it will have."""

    def __init__(self) -> None:
        self.place = Place.from_environment()
        self.code = 0
        self.board: FailureBoard | None = None
        self.process: WatchedProcess | None = None
        self.heartbeat: Heartbeat | None = None

    def connect(self, timeout_seconds: float) -> World:
        """Connect to the other ranks, and watch over them."""
        place = self.place
        store = None
        if place.size > 1:
            store = _open_store(place, timeout_seconds)
            self.board = FailureBoard(store, rank=place.rank, size=place.size, host=place.host)
            self.board.roll_call(max(timeout_seconds, _START_SECONDS))
            self.process = WatchedProcess()
            self.heartbeat = _start_heartbeat(place, self.process, timeout_seconds)
        return World(
            rank=place.rank, size=place.size, device=own_device(place.local_rank), store=store,
            ranks_per_host=place.ranks_per_host, timeout_seconds=timeout_seconds, process=self.process)


    def show_stacks(self, world: World) -> None:
        """Write the stacks of this rank, and ask all others to do so."""
        world.process.show_stacks(world.rank)
        if self.heartbeat is not None:
            self.heartbeat.ask_for_stacks()


@contextmanager
def _reporting(job: Job | ProfileJob) -> Iterator[_Worker]:
    """Prepare this process for a job; if the job fails, say why in one sentence.

    The worker's exit code is then 2 for a UserError, and 1 for other failures. One of several processes ends
    here when it fails.
    """
    worker = _Worker()
    place = worker.place
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    _keep_freed_memory()
    set_nccl_environment()
    if isinstance(job, Job) and job.program.experiment.deterministic:
        repeat_exactly()
    try:
        with panics_as_errors():
            yield worker
    except UserError as error:
        if worker.process is not None:
            worker.process.leave_record(place.rank, str(error), traceback.format_exc())
        text = f"{traceback.format_exc()}realhf: {error}" if job.traceback else None
        if _differs_elsewhere(worker) is None:
            report(str(error), code=2, text=text)
        worker.code = 2
    except PeerError as error:
        if worker.process is not None:
            worker.process.leave_record(place.rank, str(error), traceback.format_exc())
        worker.code = _follow(error, worker)
    except (Exception, SystemExit) as error:
        if worker.process is not None and (fault := worker.process.communicators.fault):  # The cause.
            os._exit(_follow(PeerError(fault), worker))
        sentence = f"rank {place.rank} failed with {type(error).__name__}: {error}"
        if worker.process is not None:
            worker.process.leave_record(place.rank, sentence, traceback.format_exc())
        repeated = _differs_elsewhere(worker)
        if repeated is None:
            report(sentence, code=1, text=traceback.format_exc(), names_rank=True)
        worker.code = repeated or 1
    else:
        if worker.heartbeat is not None:
            worker.heartbeat.stop()
        return
    if place.size > 1:  # Skip destructors: they would wait for peers, and the peers for this process.
        os._exit(worker.code)


def report(sentence: str, *, code: int, text: str | None = None, names_rank: bool = False) -> None:
    """Tell all ranks why this one stops, so that the user reads it once (see FailureBoard.report).

    If the other ranks cannot be reached, print the sentence here.
    """
    write_error_file(sentence)
    if "MASTER_ADDR" in os.environ and "TORCHELASTIC_RUN_ID" in os.environ:
        with suppress(RuntimeError, OSError, KeyError):
            board = Place.from_environment().connect(_REPORT_SECONDS)
            board.report(sentence, code=code, text=text, names_rank=names_rank)
            return
    print(text or f"realhf: {sentence}", file=sys.stderr, flush=True)


def share_plan(
    make: Callable[[], ExecutionPlan], *, search_seconds: float, timeout_seconds: float
) -> ExecutionPlan:
    """Return the plan that `make` makes on rank 0. Every rank must call this, once in a run.

    If rank 0 finds none, all ranks raise its UserError; if it is lost, the others end with a sentence.
    """
    place = Place.from_environment()
    try:
        store = _store_of_plan(place, timeout_seconds)
        if place.rank == 0:
            try:
                plan = make()
            except UserError as error:
                store.set(_PLAN, json.dumps({"error": str(error)}))
                raise
            store.set(_PLAN, json.dumps(plan.to_dict()))
            return plan
        if os.environ["LOCAL_RANK"] == "0":
            waits = f"rank {place.rank} waits for the plan"
            searches = f"for which rank 0 searches at most {search_seconds:.0f} s"
            _say(f"{waits}, {searches}")
        store.set_timeout(timedelta(seconds=search_seconds + max(timeout_seconds, _START_SECONDS)))
        answer = json.loads(store.get(_PLAN))
    except dist.DistError as error:
        reason = str(error).partition("\n")[0]
        lost = f"rank {place.rank} has lost rank 0, which was making the plan ({reason})"
        report(lost, code=1, names_rank=True)
        sys.exit(1)
    if "error" in answer:
        raise UserError(answer["error"])
    return ExecutionPlan.from_dict(answer)


@cache
def _store_of_plan(place: Place, timeout_seconds: float) -> dist.Store:
    """Return the store, which may be served by this process; the cache keeps it open for the other ranks."""
    return open_store(rank=place.rank, size=place.size, timeout_seconds=timeout_seconds)


def _stop_signals(job: Job, world: World) -> Sequence[signal.Signals]:
    """Return the signals after which the run saves and ends. A run without checkpoints takes none."""
    if not any(job.program.experiment.checkpoint_period()):
        return ()
    if LOCAL_LAUNCHER in os.environ:
        return (ASK_TO_STOP,)
    return ENDING if world.size == 1 else (signal.SIGINT, signal.SIGTERM)


def _is_finished(job: Job, world: World, out: Path, checkpoint: Checkpoint) -> bool:
    """Return whether the run has ended before. Raises UserError if the checkpoint leaves nothing to do."""
    step = checkpoint.manifest.step
    steps = job.program.experiment.steps
    if step < steps:
        return False
    here = [(out / "summary.json").exists(), (out / "hf" / f"step_{steps}").exists()]
    has_summary, has_export = world.control.all_gather_json(here)[0]
    mend = "raise --steps to train further"
    if has_summary:
        if world.rank == 0:
            _say(f"the run {out} has ended after step {step}: {mend}")
    elif step > steps or not has_export:
        raise UserError(f"checkpoint {checkpoint.path} leaves nothing to do, as steps is {steps}: {mend}")
    return has_summary


def _out_of(job: Job) -> Path:
    return job.out or new_run_directory(job.name, below=job.started_in)


def _claim_directory(job: Job) -> tuple[RunDirectory, list[Path]]:
    """Return the run directory, and the checkpoints from which the run may continue, the newest first.

    A run that the launcher has restarted continues by itself.
    """
    restarted = find_restarted(job.out, below=job.started_in)
    if restarted is None and job.resume is None:
        return RunDirectory(_out_of(job), stem=job.name), []
    resume = job.resume if restarted is None else ""
    resumption = find_resumption(
        job.name, resume=resume or "", out=restarted or job.out, below=job.started_in)
    if not resumption.checkpoints:
        _say(f"{resumption.out} has no checkpoint: the run starts anew")
    return RunDirectory(resumption.out, stem=job.name, resumes=True), list(resumption.checkpoints.values())


def _open_store(place: Place, timeout_seconds: float) -> dist.Store:
    try:
        return open_store(rank=place.rank, size=place.size, timeout_seconds=timeout_seconds)
    except RuntimeError as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        reason = str(error).partition("\n")[0]
        raise PeerError(f"there is no connection to the first host's store at {where} ({reason})") from error


def _start_heartbeat(place: Place, process: WatchedProcess, timeout_seconds: float) -> Heartbeat:
    """Start the heartbeat on new connections, as the main thread may block its own."""
    store = open_store(rank=place.rank, size=place.size, timeout_seconds=timeout_seconds)
    heartbeat = Heartbeat(
        store, place.connect(timeout_seconds), process,
        rank=place.rank, size=place.size, timeout_seconds=timeout_seconds,
        silence_seconds=silence_over_nccl(timeout_seconds) if torch.cuda.is_available() else None)
    heartbeat.start()
    return heartbeat


def _follow(error: PeerError, worker: _Worker) -> int:
    """Return the exit code of a worker that stops because of a peer; repeat the peer's reason, if any."""
    if (code := repeat_later(worker.board)) is not None:
        return code
    report(f"rank {worker.place.rank} stops: {error}", code=1, names_rank=True)
    return 1


def _differs_elsewhere(worker: _Worker) -> int | None:
    """Repeat the watcher's sentence if ranks take different ways through a step, which caused this error.

    Return the exit code of that sentence, or None if there is none.
    """
    if worker.process is None or not worker.process.operations.is_used:
        return None
    return repeat_later(worker.board)


def repeat_later(board: FailureBoard | None) -> int | None:
    """Wait for the sentence of another rank and repeat it; return its exit code, or None if there is none."""
    time.sleep(_GRACE_SECONDS)
    if board is not None:
        with suppress(RuntimeError):
            return board.repeat()
    return None


def _keep_freed_memory() -> None:
    """Make glibc keep freed blocks for the next tensors, as writing to fresh pages is far slower."""
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        for option in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
            mallopt(option, 2**31 - 1)
