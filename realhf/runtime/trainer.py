"""Trainer: the step loop, which every rank runs. It knows nothing of the algorithm."""

import gc
import platform
import statistics
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from realhf.calls import Generate
from realhf.checkpoint.hf import Beside
from realhf.data.loader import AnyLoader, ArrayLoader, make_loader, tokenized
from realhf.devices.half_precision import needs_float32
from realhf.distributed import tags
from realhf.distributed.group import Outbox, PeerError
from realhf.distributed.world import World
from realhf.engine.base import DTYPES
from realhf.errors import UserError, warn
from realhf.errors import described as described_error
from realhf.experiment import Role
from realhf.runtime.checkpointer import Checkpoint, Checkpointer, begin
from realhf.runtime.compile.actions import dataset_layout
from realhf.runtime.compile.checks import check_lengths, check_vocabulary, row_faults_of
from realhf.runtime.compile.program import Program, described, to_json
from realhf.runtime.doubts.changes import changed_fields, changed_files, changed_sources, sources_of
from realhf.runtime.doubts.data import named_parts
from realhf.runtime.doubts.rules import warnings_of
from realhf.runtime.evaluations import Evaluations, HeldOutRows, first_and_last
from realhf.runtime.execute.executor import Executor, Observations, PartsProgram, RankState
from realhf.runtime.execute.host_call import HostContext
from realhf.runtime.execute.meters import (
    ComputeMeter,
    flops_by_role,
    largest_by_call,
    largest_of_processes,
    peaks_by_call,
)
from realhf.runtime.execute.module_trial import try_functions
from realhf.runtime.hooks import Hooks, Wishes, push_to_hub
from realhf.runtime.journal import Journal
from realhf.runtime.records.about import ABOUT, PROFILES, about_run, clocks_ahead
from realhf.runtime.records.progress import Progress
from realhf.runtime.records.recorder import Recorder
from realhf.runtime.records.trackers import Ending
from realhf.runtime.samples.digests import DigestTaker
from realhf.runtime.samples.rollout_collector import DATASET_KEYS, logs_rollouts, make_collector
from realhf.runtime.weights.model_store import ModelStore, config_fields, files_beside
from realhf.signals import StopSignals

_STOP = "stop"
"""Key of the store that another rank than 0 sets when a signal has asked it to stop."""


@dataclass(frozen=True)
class Decision:
    """The decision about what follows a step: whether a checkpoint is saved, and whether the run ends."""

    saves: bool = False
    stops: bool = False


class StepDecisions:
    """Rank 0 decides after each step about the next one, so that other ranks may be a step ahead of it.

    So a run of several ranks that is asked to stop in step 10 stops after step 11, because rank 0 has already
    sent the decision about step 10. If only another rank is asked, and rank 0 hears of it after its decision
    about step 11, the run stops after step 12.
    """

    def __init__(
        self, world: World, outbox: Outbox, *, last_step: int, is_due: Callable[[int], bool]
    ) -> None:
        """Take the run's last step and a function that returns, on rank 0, whether to save after a step."""
        self._world = world
        self._outbox = outbox
        self._last_step = last_step
        self._is_due = is_due
        self._store = world.unused_store("decisions") if world.size > 1 else None
        self._has_asked = False
        self._ahead = Decision()
        """On rank 0, the decision about the next step, which it has sent."""

    def begin(self, first_step: int) -> None:
        """Decide about the first step; every rank calls this before it."""
        self._decide(first_step, wants_stop=False)

    def after(self, step: int, *, wants_stop: bool, is_last: bool = False) -> Decision:
        """Return the decision about a step; every rank calls this after it, and says if it wants to stop.

        `is_last` says that the ranks have agreed to end the run after this step.
        """
        if self._store is None:
            return Decision(self._is_due(step), wants_stop)
        if self._world.rank == 0:
            decision = self._ahead
            if not (decision.stops or is_last):
                self._decide(step + 1, wants_stop=wants_stop)
            return decision
        if wants_stop and not self._has_asked:
            self._has_asked = True
            self._store.set(_STOP, "")
        return Decision(**self._world.control.recv_json(0, tag=tags.DECISION))

    def _decide(self, step: int, *, wants_stop: bool) -> None:
        if self._store is not None and self._world.rank == 0 and step <= self._last_step:
            stops = wants_stop or self._store.check([_STOP])
            self._ahead = Decision(self._is_due(step), stops)
            peers = range(1, self._world.size)
            self._outbox.add(self._world.control.send_json(asdict(self._ahead), peers, tag=tags.DECISION))


@dataclass(frozen=True)
class RunResult:
    """The metrics of all steps and the summary of a finished run; both are empty except on rank 0."""

    metrics: list[dict[str, float]]
    summary: dict[str, Any]
    stopped_after: int | None = None
    """The last step of a run that a signal has stopped early."""


class RunData:
    """The rows of a run on this rank, and the context of its host functions. Every rank constructs it.

    Raises UserError about rows and a tokenizer that do not suit the models.
    """

    def __init__(self, program: Program, world: World, *, logs_rollouts: bool) -> None:
        self._program = program
        self._device = world.device
        self.context = HostContext(program.experiment.tokenizer_dir())
        is_main = world.rank == 0
        if is_main and (tokenizer := self.context.any_tokenizer) is not None:
            largest = max(tokenizer.get_vocab().values())
            check_vocabulary(program.roles, largest, tokenizer=self.context.tokenizer_dir)
        self.is_reader = world.rank in dataset_layout(program.graph, program.plan)
        """Whether this rank reads the dataset."""
        shown = DATASET_KEYS if logs_rollouts else ()
        self.loader = self._make_loader(shown) if is_main or self.is_reader else None
        """The dataset's loader on the rank that reads it, and on rank 0, which shows its size."""
        self.held_out = HeldOutRows(program, world, self.context)
        self.files = self._fingerprints() if is_main else {}
        """The fingerprints of the files of all data sets, by field, on rank 0."""
        self.sources = sources_of(program) if is_main else {}
        """The fingerprints of code and models, on rank 0."""

    def _make_loader(self, shown: Sequence[str]) -> AnyLoader:
        """Return the dataset's loader, whose batches have the inputs of the graph and what is `shown`."""
        program = self._program
        experiment = program.experiment
        loader = make_loader(
            experiment.dataset, keys=tuple(dict.fromkeys((*program.graph.inputs, *shown))),
            tokenizer=self.context.any_tokenizer, group_size=experiment.group_size, seed=experiment.seed,
            row_faults=row_faults_of(program.graph))
        if not isinstance(loader, ArrayLoader):
            check_lengths(program.roles, program.graph, loader)
        return loader

    def _fingerprints(self) -> dict[str, list[dict[str, Any]]]:
        loaders: dict[str, AnyLoader | None] = {"dataset": self.loader}
        loaders |= {eval_set.field: self.held_out.loaders[eval_set.name]
                    for eval_set in self._program.evaluations}
        of_arrays = {
            name: loader.fingerprints for name, loader in loaders.items() if isinstance(loader, ArrayLoader)}
        return of_arrays | {
            where: part.fingerprints
            for name, loader in loaders.items() for where, part in named_parts(name, tokenized(loader))}

    @property
    def parts(self) -> PartsProgram:
        """The parts of a step, with the rows that they read."""
        program = self._program
        rows = None if self.loader is None else self.loader.batch
        experiment = program.experiment
        return PartsProgram(
            program.parts, program.plan, rows, experiment.group_size, experiment.num_rounds)

    def warnings(self, checkpoint: Checkpoint | None) -> list[str]:
        """Return warnings about what the user probably did not intend, on rank 0, which has all rows."""
        program = self._program
        warnings = []
        if checkpoint is not None:
            saved = checkpoint.manifest
            warnings += changed_fields(saved.experiment, described(program.experiment))
            warnings += changed_files(saved.data, self.files)
            warnings += changed_sources(saved.sources, self.sources)
        held_out = {name: tokenized(loader) for name, loader in self.held_out.loaders.items()}
        warnings += warnings_of(program, tokenized(self.loader), held_out)
        warnings += try_functions(program, plays=False, device=self._device)
        return [*warnings, *_slow_dtypes(program.roles, self._device)]


class Trainer:
    """Runs a program on this world; rank 0 writes the run directory `out`, if there is one.

    It continues after `checkpoint`, if there is one. It ends after the step in which `stop` is requested, or
    with several ranks after the next one (see StepDecisions). `track` names the trackers of metrics,
    `profile_steps` the steps in which torch's profiler runs.
    """

    def __init__(
        self, program: Program, world: World,
        *, out: Path | None = None, checkpoint: Checkpoint | None = None, stop: StopSignals | None = None,
        quiet: bool = False, track: Sequence[str] = (), profile_steps: Collection[int] = (),
    ) -> None:
        """Read rows and models, then write. So faults in them leave the run directory as it was."""
        self._program = program
        self._world = world
        self._process = world.process
        self._out = out
        self._is_main = world.rank == 0
        self._stop = stop
        self._profile_steps = profile_steps
        self._configs = {name: role.config() for name, role in program.roles.items()}
        data = RunData(program, world, logs_rollouts=out is not None and logs_rollouts(program))
        if self._is_main and not quiet:
            for sentence in data.warnings(checkpoint):
                warn(sentence)
        self._data = data
        state = RankState(world, ModelStore(world, program), data.context)
        self._state = state
        self._context = state.context
        self._executor = Executor(state, data.parts, _observations(program, world, data, out))
        self._runner = program.experiment.step_runner(program.graph, self._executor)
        self._evaluations = Evaluations(program, state, data.held_out)
        beginning = begin(checkpoint, program, state, self._runner, data.loader)
        self._first_step = beginning.step
        self._context.step = beginning.step - 1
        writes = out if self._is_main else None
        self._recorder = None if writes is None else _recorder(program, writes, beginning.history, track)
        clocks = clocks_ahead(world)
        if self._recorder is not None:
            self._recorder.start(
                described(program.experiment) | {"roles": to_json(program.roles)}, program.plan,
                about_run(
                    program, ranks_per_host=world.ranks_per_host, device=_device_name(world.device),
                    links=state.models.links, data=data.files,
                    sources=data.sources, tokenizer=data.context.tokenizer_dir, clocks=clocks,
                    earlier=beginning.history and beginning.history.absolute().parents[2] / ABOUT))
        self._progress = Progress(program, self._process) if self._is_main and not quiet else None
        meter = _meter(program, world.size, earlier=self._recorder.history if self._recorder else ())
        self._journal = Journal(
            world, state.outbox, self._recorder, self._progress, meter, program.evaluations)
        self._checkpointer = None if out is None else Checkpointer(
            program, state, self._runner, out / "checkpoints",
            loader=data.loader if data.is_reader else None, data=data.files, sources=data.sources)
        self._decisions = StepDecisions(
            world, state.outbox, last_step=program.experiment.steps,
            is_due=self._checkpointer.is_due if self._checkpointer is not None else lambda step: False)
        self._hooks = Hooks(
            program, state, self._runner, self._executor, self._journal, out=out,
            checkpointer=self._checkpointer)
        self._wishes = Wishes()
        """What the hooks have asked for after the newest step."""

    def run(self) -> RunResult:
        """Run all steps, evaluations and exports."""
        steps = self._program.experiment.steps
        stopped_after = None
        with self._guarded():
            self._executor.memory.begin()
            if self._progress is not None:
                prompts = self._data.held_out.prompts
                held_out = {name: len(chosen) for name, chosen in prompts.items()}
                self._progress.start(self._data.loader, held_out=held_out)
            if self._evaluates and self._first_step == 1 and self._program.experiment.eval_at_start:
                self._journal.add(0, None, self._evaluations.run(), pauses=True)
            if self._stop is not None:
                with self._process.doing("waits for the other ranks"):
                    self._world.control.barrier()  # So that a signal finds all of them at one place.
                self._stop.begin(self._answer_to_signal if self._is_main else None)
            self._decisions.begin(self._first_step)
            for step in range(self._first_step, steps + 1):
                self._run_step(step)
                if self._save_or_stop(step) and step < steps and self._wishes.stops is None:
                    stopped_after = step
                    break
                if self._wishes.stops is not None:
                    break
            with self._process.doing("waits for the other ranks"):
                with self._process.waiting(range(self._world.size)):
                    self._journal.finish()
                if self._checkpointer is not None:
                    self._checkpointer.finish()
                self._state.outbox.wait()
                self._evaluations.wait()
                self._require_equal_steps()  # It waits, too, until every rank's export is written.
                self._hooks.last_checkpoints()
            if self._is_main and stopped_after is not None:
                self._stop_tracking("stopped")
            summary = self._finish() if self._is_main and stopped_after is None else {}
        if summary:
            self._require_samples()
        return RunResult(list(self._journal.history) if self._is_main else [], summary, stopped_after)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Keep garbage collections short; and if the run fails, save what is left of it."""
        is_frozen = gc.get_freeze_count() > 0  # Then the caller does so.
        if not is_frozen:
            gc.collect()
            gc.freeze()  # From now on, garbage collection skips the objects that exist.
        try:
            yield
        except Exception as error:
            self._journal.abandon()
            self._stop_tracking("failed")
            if self._checkpointer is not None:
                self._rescue(error)
            raise
        finally:
            self._process.rescue = None  # It holds the trainer, whose threads end when nobody holds it.
            if not is_frozen:
                gc.unfreeze()
            if self._progress is not None:
                self._progress.stop()

    def _rescue(self, error: Exception) -> None:
        """Save the state after the last finished step, if this is possible, and keep the error as it is."""
        assert self._checkpointer is not None
        try:
            self._checkpointer.rescue(leads=not isinstance(error, PeerError))
        except Exception as failure:
            warn(f"the state after the last finished step is not saved: {described_error(failure)}")

    def _answer_to_signal(self) -> str:
        """Return what follows a signal, for the user; another thread calls this."""
        steps = self._program.experiment.steps
        step = max(self._context.step, self._first_step) + (self._world.size > 1)  # See StepDecisions.
        when = f"step {step}" if step < steps else f"the last step, {steps}"
        now = str(self._process)
        sentence = f"the run saves a checkpoint after {when}, and ends; a second signal ends it at once"
        return f"{sentence} ({now})" if now else sentence

    def _stop_tracking(self, ending: Ending) -> None:
        if self._recorder is not None:
            self._recorder.stop_tracking(ending)

    def _require_equal_steps(self) -> None:
        """Raise UserError if step() has not run the same operations on all ranks."""
        digests = self._world.control.all_gather_json(self._runner.digest)
        if others := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
            raise UserError(
                f"step() differs between ranks 0 and {others[0]}; it may depend on agreed values only")

    @property
    def _evaluates(self) -> bool:
        return bool(self._program.evaluations)

    def _run_step(self, step: int) -> None:
        """Run the step program, and the evaluation and the export that are due after it.

        In the first step it runs `max_lag` times more, so that generation is ahead.
        """
        experiment = self._program.experiment
        is_last = step == experiment.steps
        self._context.step = step
        self._process.step = f"step {step}/{experiment.steps}"
        self._executor.begin_step(is_last=is_last)
        with self._profiled(step):
            for _ in range(1 + (experiment.max_lag if step == 1 else 0)):
                with self._runner.one_step():
                    experiment.step(self._runner)
        if step == self._first_step:
            with self._process.doing("measures the memory for caches"):
                self._state.models.engines.settle_cache_limits()
        record = self._executor.take_record()
        evaluation = []
        if self._evaluates and (is_last or _is_multiple(step, experiment.eval_every)):
            self._note_end(step)  # The evaluation may fail.
            try:
                evaluation = self._evaluations.run()
            except Exception:
                if self._world.size == 1:  # Of several ranks, rank 0 would wait for the others' records.
                    self._journal.add(step, record)
                    self._note_end(step)
                raise
        exports = is_last or _is_multiple(step, experiment.export_every)
        self._journal.add(step, record, evaluation, pauses=exports or bool(evaluation))
        self._wishes = self._hooks.after(step)
        self._note_end(step)
        if exports or self._wishes.exports or self._wishes.stops:
            self._export(step)

    @contextmanager
    def _profiled(self, step: int) -> Iterator[None]:
        """Let torch's profiler record a step that is to be profiled, and write its trace."""
        if step not in self._profile_steps or self._out is None:
            yield
            return
        on_cuda = [ProfilerActivity.CUDA] if self._world.device.type == "cuda" else []
        with profile(activities=[ProfilerActivity.CPU, *on_cuda]) as profiler:
            yield
        path = self._out / PROFILES / f"step_{step}_rank_{self._world.rank}.json.gz"
        path.parent.mkdir(exist_ok=True)
        profiler.export_chrome_trace(str(path))

    def _note_end(self, step: int) -> None:
        if self._checkpointer is not None:
            self._checkpointer.end_step(step, self._journal.last)

    def _save_or_stop(self, step: int) -> bool:
        """Save a checkpoint if one is due; return whether the run is to end. All ranks agree on both."""
        wants_stop = self._stop is not None and self._stop.requested is not None
        is_last = self._wishes.stops is not None
        decision = self._decisions.after(step, wants_stop=wants_stop, is_last=is_last)
        ends = decision.stops or is_last or step == self._program.experiment.steps
        experiment = self._program.experiment
        is_multiple = _is_multiple(step, experiment.checkpoint_period()[0])
        if is_multiple or decision.stops:  # A run without checkpoints drops its caches at the same steps.
            self._executor.flush_caches()
        if decision.stops and not is_multiple and self._is_main and _has_resting_caches(self._program):
            warn(
                "cache_on_update is 'keep' and the run was told to stop between two checkpoints: "
                "what follows may differ in last bits")
        if self._checkpointer is not None and self._checkpointer.is_on and (decision.saves or ends):
            with self._process.doing("saves a checkpoint"):
                self._checkpointer.save(step)
            self._journal.pause()
        return decision.stops

    def _export(self, step: int) -> None:
        """Write trainable roles as Hugging Face directories, or their adapters as PEFT's.

        The first role is written to hf/step_N, others to folders in it.
        """
        if self._out is None:
            return
        experiment = self._program.experiment
        trainable = [name for name, role in self._program.roles.items() if role.optimizer is not None]
        for i, name in enumerate(trainable):
            directory = self._out / "hf" / f"step_{step}" / (name if i else "")
            beside: dict[str, Beside] = {}
            fields: dict[str, object] = {}
            if self._is_main:
                beside = files_beside(experiment, name, step=step)
                if self._program.roles[name].is_language_model:
                    pad_token_id = self._context.tokenizer.pad_token_id
                    fields = config_fields(self._configs[name], pad_token_id=pad_token_id)
            with self._process.doing(f"export of {name}"):
                self._state.models.export(name, directory, beside=beside, fields=fields)

    def _require_samples(self) -> None:
        """Raise UserError if no step of the run had a sample to train on."""
        history = self._journal.history
        if history and all(metrics.get("reward/failed") == 1 for metrics in history):
            raise UserError(
                "the rewards or environments of all samples have failed in every step "
                f"({self._context.step}): nothing has been trained, and the model is as it was at the start")

    def _finish(self) -> dict[str, Any]:
        steps = self._context.step
        history = self._journal.history
        if self._wishes.stops is not None:
            why = f"the run ends after step {steps}: {self._wishes.stops}"
            print(f"realhf: {why}", file=sys.stderr, flush=True)
        summary: dict[str, Any] = {
            **first_and_last(self._journal.evaluations, self._program.evaluations),
            "steps": steps,
            "seconds": self._journal.seconds,
            "tokens": self._journal.tokens,
            "failed": statistics.fmean(metrics.get("reward/failed", 0.0) for metrics in history or [{}]),
            "hf_dir": str(self._out / "hf" / f"step_{steps}") if self._out else None,
            "realloc": {},
            "memory": largest_by_call(history),
            "process_memory": largest_of_processes(history) | {
                "beside_models": self._executor.memory.beside_models},
            **self._hooks.summary()}
        for role in self._program.roles:
            moved = [m[f"realloc_bytes/{role}"] for m in history if f"realloc_bytes/{role}" in m]
            over = [m[f"realloc_over_bound/{role}"] for m in history if f"realloc_over_bound/{role}" in m]
            rates = [m[name] for m in history if (name := f"perf/realloc_gbytes_per_s/{role}") in m]
            if moved:  # Without the first step, in which even frozen parameters move.
                summary["realloc"][role] = {
                    "bytes_per_step": max(moved[1:] or moved),
                    "gbytes_per_s": statistics.median(rates[1:] or rates) if rates else None,
                    "over_bound": max(over), "links": self._state.models.links.about}
        if self._recorder is not None:
            self._recorder.finish(summary)
        if self._progress is not None:
            self._progress.finish(summary, self._out)
        if self._out is not None:
            exported = summary.get("best", {}).get("step", steps)
            push_to_hub(self._program.experiment, self._out / "hf" / f"step_{exported}")
        return summary


def _observations(program: Program, world: World, data: RunData, out: Path | None) -> Observations:
    """Return what is recorded of calls. Every rank calls this.

    Where ranks might take different ways through a step, the watcher is told each operation.
    """
    may_differ = program.experiment.has_own_program or program.experiment.max_lag > 0
    digest_bytes = program.experiment.rollouts.digest_bytes
    return Observations(
        flops=flops_by_role(program.roles), predicted_memory=program.predicted_memory,
        failures=None if out is None else out / "failures",
        rollouts=None if out is None else make_collector(program, world, tokenized(data.loader)),
        digests=DigestTaker(program, max_bytes=digest_bytes // world.size) if out and digest_bytes else None,
        note=world.process.operations.add if world.size > 1 and may_differ else None)


def _recorder(program: Program, out: Path, history: Path | None, track: Sequence[str]) -> Recorder:
    """Return the writer of the run directory, which goes on from a file of metrics, if there is one."""
    most = program.experiment.rollouts.max_bytes if logs_rollouts(program) else 0
    return Recorder(
        out, history=history, max_rollout_bytes=most, track=track,
        max_digest_bytes=program.experiment.rollouts.digest_bytes)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})"


def _meter(program: Program, num_ranks: int, *, earlier: Sequence[dict[str, float]]) -> ComputeMeter:
    """Return the meter of the run's compute, which goes on from the metrics of earlier steps."""
    return ComputeMeter(
        num_devices=num_ranks, peaks=peaks_by_call(program.graph.calls, program.roles, program.peak_flops),
        has_flops=program.roles.keys() <= flops_by_role(program.roles).keys(), earlier=earlier)


def _has_resting_caches(program: Program) -> bool:
    """Return whether caches live from one round of generation to the next."""
    rests = any(work.cache_on_update == "keep" for work in program.graph.works(Generate))
    return rests and program.experiment.num_rounds > 1


def _is_multiple(step: int, period: int) -> bool:
    return period > 0 and step % period == 0


def _slow_dtypes(roles: Mapping[str, Role], device: torch.device) -> Iterator[str]:
    """Yield a sentence for each role that transformers' classes compute in a slow dtype."""
    for name, role in roles.items():
        weight = torch.empty(0, dtype=DTYPES[role.weights_dtype], device=device)
        if role.engine == "transformers" and needs_float32(weight):
            yield (
                f"{name}.dtype is {role.weights_dtype}, for which this CPU has no fast units: "
                "with engine transformers it takes 2 to 90 times as long as float32 (the native engine "
                "computes in float32 by itself)")
