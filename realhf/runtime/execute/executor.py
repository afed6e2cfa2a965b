"""Executor: executes and times the parts of a step on this rank."""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from realhf.calls import Generate, HostFunction, TrainFunction, Training
from realhf.checkpoint.hf import memory_of
from realhf.data.batch import Batch, num_tokens_of
from realhf.data.order import prompt_of, samples_of
from realhf.distributed.group import Outbox
from realhf.distributed.world import World
from realhf.engine.base import CallResult
from realhf.errors import UserError, warn
from realhf.execution_plan import ExecutionPlan
from realhf.graph import FunctionCall, Work
from realhf.layout import Layout
from realhf.models.model_flops import ModelFlops
from realhf.runtime.compile.actions import (
    Action,
    Reallocate,
    Receive,
    Redistribute,
    Run,
    Send,
    outside_producers,
)
from realhf.runtime.compile.program import PredictedMemory
from realhf.runtime.execute.asking import Answers, Asker, answer_all, asked_by
from realhf.runtime.execute.host_call import Agreements, HostContext, call_host_function
from realhf.runtime.execute.meters import MemoryMeter, generate_flops, pass_flops, sampled_tokens
from realhf.runtime.records.step_record import Event, StepRecord
from realhf.runtime.samples.digests import DigestTaker
from realhf.runtime.samples.exchange import Exchange, Routing, Source
from realhf.runtime.samples.rollout_collector import RolloutCollector
from realhf.runtime.samples.sample_store import SampleStore
from realhf.runtime.weights.engine_store import OffloadedWeights
from realhf.runtime.weights.model_store import ModelStore
from realhf.runtime.weights.reallocations import Arrivals


@dataclass(frozen=True)
class RankState:
    """The state of a rank while calls run: models, samples, and messages that are still being sent."""

    world: World
    models: ModelStore
    context: HostContext
    samples: SampleStore = field(default_factory=SampleStore)
    outbox: Outbox = field(default_factory=Outbox)


@dataclass(frozen=True)
class PartsProgram:
    """The parts of one graph and the dataset on which they run."""

    parts: Mapping[str, Sequence[Action]]
    plan: ExecutionPlan
    read: Callable[[Sequence[int]], Batch] | None
    """Returns the batch of some prompts; None on ranks that do not hold the dataset."""
    group_size: int = 1
    num_rounds: int = 1
    """Rounds in which a response is generated; each may add an equal share of its tokens."""
    is_evaluation: bool = False
    prefix: str = ""
    """The beginning of the names under which its host calls have their states."""


@dataclass(frozen=True)
class Observations:
    """The records of a run's calls besides times and metrics; an evaluation makes none of them."""

    flops: Mapping[str, ModelFlops] = field(default_factory=dict)
    """Role -> its model's FLOPs; they are counted for the calls of these roles."""
    predicted_memory: PredictedMemory = field(default_factory=dict)
    failures: Path | None = None
    """The directory for the samples of updates that were skipped."""
    rollouts: RolloutCollector | None = None
    digests: DigestTaker | None = None
    note: Callable[[int, str, str], None] | None = None
    """Tells the watcher each operation: its number, its text, and the digest of all so far."""


_MEMORY = {
    "generate": "lower max_rows, sampling.max_new_tokens or (native engine) kv_cache_gib, prefill_tokens",
    "forward": "lower calls.{name}.micro_batch_tokens in the plan",
    "train_step": "lower calls.{name}.micro_batch_tokens in the plan, or set calls.{name}.recompute",
}
"""Kind of call -> advice when memory runs out."""


@contextmanager
def explaining(call: FunctionCall, rank: int, step: int) -> Iterator[None]:
    """Raise UserError with advice if the call runs out of memory or diverges."""
    try:
        yield
    except FloatingPointError as error:
        extreme = "values in its columns" if isinstance(call.work, TrainFunction) else "rewards and data"
        advice = f"lower {call.role}.optimizer.lr, or look for extreme {extreme}"
        if call.kind != "train_step":
            advice = (
                f"weights of {call.role} are NaN or too large, by a damaged file, by a learning rate that is "
                "too high, or because its dtype cannot hold their products")
        raise UserError(f"call {call.name!r} in step {step}: {error}: {advice}") from error
    except (MemoryError, RuntimeError) as error:
        what = str(error).partition("DefaultCPUAllocator: ")[2]
        if not what and not isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            raise
        what = ". ".join((what or str(error) or type(error).__name__).split(". ")[:2]).rstrip(".")
        advice = f"{_MEMORY[call.kind].format(name=call.name)}, or give it another layout"
        raise UserError(f"call {call.name!r} ran out of memory on rank {rank} ({what}): {advice}") from error


_MAX_SAVED = 16
"""Most files of samples that a run directory gets."""


class Executor:
    """Executes the parts of one graph on this rank; see `sample_pool.PartExecutor`."""

    def __init__(
        self, state: RankState, program: PartsProgram, observed: Observations | None = None
    ) -> None:
        self._world = state.world
        self._models = state.models
        self._context = state.context
        self._samples = state.samples
        self._outbox = state.outbox
        self._exchange = Exchange(state.world, state.outbox)
        self._program = program
        self._observed = observed or Observations()
        actions = [action for part in program.parts.values() for action in part]
        self._calls = {action.call.name: action for action in actions if isinstance(action, Run)}
        self._agreements = Agreements(state.world)
        self._answers = Answers(state.models.engines)
        self.memory = MemoryMeter(state.world, state.models.engines, self._observed.predicted_memory)
        self._record = StepRecord()
        self._arrivals = Arrivals()
        self._is_last = False
        self._last_read: tuple[tuple[int, ...], Batch] | None = None
        self._operation = 0
        self._waited = 0.0
        """Seconds that this rank has waited for inputs and weights since its last call."""

    def call(self, name: str) -> FunctionCall:
        """Return the call of this name as it runs now."""
        return self._calls[name].call

    def change_call(self, call: FunctionCall) -> None:
        """Run this call from now on in the place of the one of its name."""
        def changed(action: Action) -> Action:
            if isinstance(action, Run) and action.call.name == call.name:
                return replace(action, call=call)
            return action

        parts = {part: tuple(map(changed, actions)) for part, actions in self._program.parts.items()}
        self._program = replace(self._program, parts=parts)
        self._calls[call.name] = replace(self._calls[call.name], call=call)

    def begin_step(self, *, is_last: bool = False) -> None:
        """Begin a step, the last one of the run if `is_last`.

        It first waits until the messages of steps that are long past have been received.
        """
        self._outbox.next_step()
        self._agreements.next_step()
        self._is_last = is_last

    def take_record(self) -> StepRecord:
        """Return the record of the calls and reallocations since the last call of this method.

        The host waits here until the device has ended them, and not at every call.
        """
        record = self._record
        record.settle()
        self._arrivals.settle()
        record.events += self._arrivals.take_events(self._world.rank)
        self._record = StepRecord()
        return record

    def run(
        self, part: str, prompts: Sequence[int], *, operation: int = 0,
        sent: Collection[str | None] = (), updates: Mapping[str, int] | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        """Run a part on the samples of some prompts, see `sample_pool.PartExecutor`."""
        self._operation = operation
        self._context.updates = dict(updates or {})
        self._context.run_state = MappingProxyType({} if state is None else state)
        actions = self._program.parts[part]
        samples = self._samples_of(prompts)
        calls = [action.call.name for action in actions if isinstance(action, Run)]
        self._samples.forget(samples.ids, producers=calls)
        inputs: dict[str, list[Batch]] = {}
        for action in actions:
            if isinstance(action, Reallocate):
                self._reallocate(action)
            elif isinstance(action, Send):
                if action.producer not in sent:
                    self._send(action, samples)
            elif isinstance(action, Receive):
                if self._world.rank in action.target:
                    inputs[action.call.name] = self._receive(action, samples)
            elif isinstance(action, Redistribute):
                self._redistribute(action)
            else:
                self._wait_for_weights(action)
                minibatches = inputs.pop(action.call.name, None)
                if minibatches is None and asked_by(self._world, action.asks):
                    self._answer(action)
                if minibatches is not None and action.call.kind == "host":
                    self._run_host(action, minibatches)
                elif minibatches is not None and not action.is_asked:
                    self._run_model(action, minibatches)
                self._count_update(action.call)
        if (rollouts := self._observed.rollouts) is not None:
            self._record.rollouts += rollouts.collect(part, prompts, self._samples, self._context)

    def send(self, part: str, prompts: Sequence[int], producers: Collection[str | None]) -> None:
        """Start to send the outputs of these calls (None: the rows of the dataset) that a part needs."""
        for action in outside_producers(self._program.parts[part]):
            if action.producer in producers:
                self._send(action, self._samples_of(prompts))

    def passed(self, call: str, operation: int) -> list[int]:
        """Return the prompts whose samples have all passed a filtering call in this operation."""
        results = self._read_results(call, operation)
        group_size = self._program.group_size
        samples = [sample for result in results for sample in result["passed"]]
        counts = Counter(prompt_of(sample, group_size) for sample in samples)
        return sorted(prompt for prompt, count in counts.items() if count == group_size)

    def decision(self, call: str, operation: int) -> Any:
        """Return the decision of a call in this operation."""
        (result,) = self._read_results(call, operation)
        return result["decision"]

    def _read_results(self, call: str, operation: int) -> list[Any]:
        """Return the results of a host call; the wait counts for this rank's next call."""
        with self._waiting(call, f"waits for the result of {call}"):
            return self._agreements.read(call, operation, self._calls[call].layout.result_ranks)

    def forget(self, prompts: Sequence[int]) -> None:
        """Free the memory of these samples."""
        self._samples.forget(self._samples_of(prompts).ids)

    def flush_caches(self) -> None:
        """Free the caches that rest between rounds of generation, as a resumed run begins without them."""
        for action in self._calls.values():
            call = action.call
            if call.role is not None and self._in_rounds(call):
                if self._world.rank in action.layout:
                    self._models.engines.generating((call.role, action.layout)).flush_cache(call.name)
                self._samples.held_by_engine.discard(call.name)

    def note(self, number: int, text: str, digest: str) -> None:
        """Tell the watcher which operation follows, and the digest of all operations so far."""
        if self._observed.note is not None:
            self._observed.note(number, text, digest)

    def log(self, metric: str, value: float) -> None:
        """Add a metric to the step's record, on rank 0."""
        if self._world.rank == 0:
            self._record.metrics.append((metric, value, 1.0))

    def _samples_of(self, prompts: Sequence[int]) -> "_Chosen":
        return _Chosen(tuple(prompts), frozenset(samples_of(prompts, self._program.group_size)))

    def _wait_for_weights(self, action: Run) -> None:
        """Wait for the weights of a call on this rank; and before an update, for all copies of the role."""
        call = action.call
        if call.role is not None and call.kind == "train_step":
            self._wait(call.role)  # Parameters in flight must not change.
        for role in call.roles if self._world.rank in action.layout else ():
            self._wait(role, action.layout)
        for ask in action.asks:
            for role in ask.call.roles if self._world.rank in ask.layout else ():
                self._wait(role, ask.layout)

    def _count_update(self, call: FunctionCall) -> None:
        """Count the update of a train step, as every rank does."""
        if call.kind == "train_step" and call.role is not None:
            self._models.updated(call.role)
            self._context.updates[call.role] = self._context.updates.get(call.role, 0) + 1

    def _send(self, action: Send, samples: "_Chosen") -> None:
        rank = self._world.rank
        if rank in action.source.result_ranks and rank not in action.target:
            with self._record.timed(rank=rank, name=action.call.name, kind="move"):
                self._exchange.send(self._source(action, samples), action.target)

    def _receive(self, action: Receive, samples: "_Chosen") -> list[Batch]:
        """Return this rank's inputs of the call."""
        call = action.call
        work = call.work_as(Work)
        shuffled = work if isinstance(work, Training) and work.shuffle_minibatches else None
        sources = [self._source(send, samples) for send in action.sends]
        routing = Routing(
            self._program.group_size, work.num_minibatches, filtered=action.filtered,
            keep_groups=isinstance(work, Generate) or work.group_size > 1,
            shuffles=0 if shuffled is None else shuffled.epochs,
            seed=0 if shuffled is None else shuffled.seed)
        with self._waiting(call.name, f"waits for {self._producers(action)}"):
            return self._exchange.receive(sources, action.target, routing, tag=action.tag)

    def _redistribute(self, action: Redistribute) -> None:
        """Distribute the unfinished samples of a generating call evenly among the replicas."""
        call = action.call
        if self._world.rank not in action.layout or call.name in self._samples.held_by_engine:
            return
        mine = None
        if self._world.rank in action.layout.result_ranks:
            mine = self._samples.unfinished_of(call.name)
        routing = Routing(self._program.group_size, keep_groups=True, equal_costs=True)
        with self._waiting(call.name, "waits for unfinished samples"):
            (samples,) = self._exchange.receive(
                [Source(action.layout, mine, action.tag)], action.layout, routing, tag=action.tag)
        self._samples.unfinished[call.name] = samples

    @contextmanager
    def _waiting(self, call: str, doing: str) -> Iterator[None]:
        """Record how long this rank waits for the inputs or the result of a call."""
        start = time.monotonic()
        with self._world.process.doing(doing), self._record.timed(
            rank=self._world.rank, name=call, kind="move"
        ):
            yield
        self._waited += time.monotonic() - start

    def _producers(self, action: Receive) -> str:
        """Return which calls on other ranks produce the inputs, for example "actor_generate on 0-3"."""
        rank = self._world.rank
        far = [send for send in action.sends if send.producer is not None and rank not in send.source]
        names = dict.fromkeys(f"{send.producer} on {send.source.mesh}" for send in far)
        return f"{' and '.join(names) or 'the other ranks'}, for {action.call.name}"

    def _source(self, send: Send, samples: "_Chosen") -> Source:
        batch = None
        if self._world.rank in send.source.result_ranks:
            if send.producer is None:
                batch = self._dataset(samples.prompts).pick(send.keys)
            else:
                batch = self._samples.select(send.producer, send.keys, samples.ids)
        return Source(send.source, batch, send.tag)

    def _dataset(self, prompts: tuple[int, ...]) -> Batch:
        """Return the rows of some prompts; those read last are kept, as several calls may read the same."""
        if self._last_read is None or self._last_read[0] != prompts:
            assert self._program.read is not None, "this rank holds the dataset"
            self._last_read = prompts, self._program.read(prompts)
            if (digests := self._observed.digests) is not None:
                self._record.digests += digests.of_rows(self._context.step, self._last_read[1])
        return self._last_read[1]

    def _reallocate(self, action: Reallocate) -> None:
        """Start a reallocation, and wait for it here unless it runs `ahead` of the step that needs it.

        In that step its action comes again, without `ahead`, and nothing new starts: then the call that uses
        the weights waits, or the role's next update. An evaluation waits here, so that the time is its own.
        """
        if action.ahead and self._is_last:
            return
        if action.follow_rate is not None:
            self._wait(action.target_set)  # Copies in flight read values that now change.
        is_new = self._models.start(action)
        if action.ahead:
            return
        if is_new or self._program.is_evaluation:
            self._wait(action.target_set, action.target)

    def _wait(self, target_set: str, layout: Layout | None = None) -> None:
        """Wait for the reallocations of a set of parameters to one layout (None: to all); record them.

        With a role's name these are its model and its adapters.
        """
        process = self._world.process
        ranks = range(self._world.size) if layout is None else layout.ranks
        start = time.monotonic()
        with process.doing(f"waits for the parameters of {target_set}"), process.waiting(ranks):
            finished = self._models.reallocations.finish(target_set, layout)
        self._waited += time.monotonic() - start
        self._arrivals.add(finished)

    def _run_model(self, action: Run, minibatches: list[Batch]) -> None:
        """Run a call on a model; the layout's result ranks store its outputs."""
        call = action.call
        assert call.role is not None
        key = (call.role, action.layout)
        plan = self._program.plan[call.name]
        engines = self._models.engines
        note = self._world.process.note
        before = self._samples.unfinished_of(call.name)
        with self._running(action) as event:
            if call.kind == "generate":
                engine = engines.generating(key)
                is_held = call.name in self._samples.held_by_engine
                result = engine.generate(
                    call, minibatches[0], unfinished=None if is_held else before, budget=self._budget(call),
                    version=self._context.updates.get(call.role, 0), report=note)
                if (spent := engine.last_environment_time) is not None:
                    event["environment_seconds"] = spent.seconds
                    event["environment_waits"] = spent.waits
            elif call.kind == "train_step":
                metrics = engines[key].train(
                    call, minibatches, micro_batch_tokens=plan.micro_batch_tokens, recompute=plan.recompute,
                    gather=False, report=note, beside=engines.beside(call, action.layout))
                result = CallResult(Batch([]), metrics)
            else:
                outputs = engines[key].forward(
                    call, minibatches[0], micro_batch_tokens=plan.micro_batch_tokens, report=note,
                    beside=engines.beside(call, action.layout))
                result = CallResult(outputs, {})
            self._arrivals.delay(event)
            if self._world.rank in action.layout.result_ranks:
                self._count(event, call, minibatches, before, result)
        self._store(action, result)
        if result.metrics.get("skipped_updates") and self._world.rank in action.layout.result_ranks:
            self._save_samples(call.name, minibatches)

    @contextmanager
    def _running(self, action: Run) -> Iterator[Event]:
        """Time a call on a model and measure its memory; have its weights on the device meanwhile.

        Yield the event of the call. Raises UserError with advice if memory runs out or numbers diverge.
        """
        call = action.call
        rank = self._world.rank
        timed = self._record.timed(rank=rank, name=call.name, kind=call.kind, waited=self._take_waited())
        doing = self._world.process.doing(call.name)
        explained = explaining(call, rank, self._context.step)
        with doing, self._weights(action), explained, timed as event, self.memory.of_call(action, event):
            yield event

    def _store(self, action: Run, result: CallResult) -> None:
        """Store what a call on a model has returned: its outputs, unfinished samples and metrics."""
        call = action.call
        if self._in_rounds(call):
            self._samples.unfinished[call.name] = result.unfinished
            if call.work_as(Generate).cache_on_update == "keep":
                self._samples.held_by_engine.add(call.name)
        if self._world.rank in action.layout.result_ranks:
            self._put(call.name, result.batch)
        if self._world.rank == action.layout.result_ranks[0]:
            names = {name: name if "/" in name else f"{call.role}/{name}" for name in result.metrics}
            self._record.metrics += [(names[name], value, 1.0) for name, value in result.metrics.items()]

    def _in_rounds(self, call: FunctionCall) -> bool:
        """Return whether a call may leave samples unfinished."""
        return call.kind == "generate" and self._program.num_rounds > 1

    def _budget(self, call: FunctionCall) -> int | None:
        """Return the most tokens that each sample gets in this round; None: all that are left."""
        if not self._in_rounds(call):
            return None
        return -(-call.work_as(Generate).most_drawn_tokens // self._program.num_rounds)

    def _count(
        self, event: Event, call: FunctionCall, minibatches: Sequence[Batch], before: Batch,
        result: CallResult,
    ) -> None:
        """Add the tokens that a call has sampled or, once for each epoch, trained on, and its FLOPs.

        They are those of this rank's samples; `before` were unfinished when the call began.
        """
        after = [result.batch, result.unfinished]
        flops = self._observed.flops.get(call.role or "")
        if call.kind == "generate":
            event["num_tokens"] = sampled_tokens(call, before=before, after=after)
        elif call.kind == "train_step":
            num_tokens = sum(map(num_tokens_of, (batch[call.inputs[0]] for batch in minibatches)))
            event["num_tokens"] = call.work_as(Training).repeats * num_tokens
        if flops is not None and call.kind == "generate":
            event["flops"] = generate_flops(
                call, flops, minibatches[0], group_size=self._program.group_size, before=before, after=after)
        elif flops is not None:
            event["flops"] = pass_flops(call, flops, minibatches)

    def _take_waited(self) -> float:
        waited = self._waited
        self._waited = 0.0
        return waited

    def _save_samples(self, call: str, minibatches: Sequence[Batch]) -> None:
        """Save this rank's samples of a call whose update was skipped, unless enough files have been written.

        `Batch.unpack` reads the file.
        """
        directory = self._observed.failures
        if directory is None or len(list(directory.glob("*.safetensors"))) >= _MAX_SAVED:
            return
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"step_{self._context.step}_{call}_rank_{self._world.rank}.safetensors"
        data = Batch.concat(minibatches[: self._calls[call].call.work_as(Training).minibatches]).pack()
        path.write_bytes(memory_of(data))
        warn(
            f"{call} skipped an update in step {self._context.step}, as its gradient is not finite; "
            f"its samples: {path}")

    @contextmanager
    def _weights(self, action: Run) -> Iterator[None]:
        """Keep the call's weights on the device while it runs, and those that it reads, if offloaded."""
        engines = self._models.engines
        assert action.call.role is not None
        weights = engines.offloaded((action.call.role, action.layout))
        with engines.in_use(*((role, action.layout) for role in action.call.reads)):
            if weights is None:
                yield
            else:
                with self._loaded(action, weights):
                    yield

    @contextmanager
    def _loaded(self, action: Run, weights: OffloadedWeights) -> Iterator[None]:
        """Load offloaded weights, release them after use, and record the times."""
        rank = self._world.rank
        role = action.call.role
        assert role is not None
        with self._record.timed(
            rank=rank, name=role, kind="offload", what="load", bytes=weights.num_bytes
        ):
            weights.load()
        yield
        with self._record.timed(rank=rank, name=role, kind="offload", what="release"):
            weights.release()

    def _answer(self, action: Run) -> None:
        """Answer the questions of a host call on other ranks, until it has ended on all of them."""
        asks = [ask for ask in action.asks if ask.far(self._world.rank)]
        with ExitStack() as stack:
            events = [stack.enter_context(self._running(Run(ask.call, ask.layout))) for ask in asks]
            answer_all(self._world, self._answers, action.asks)
            events[0]["asking"] = self._answers.take()

    def _run_host(self, action: Run, minibatches: list[Batch]) -> None:
        """Call a host function and store its outputs."""
        (batch,) = minibatches
        call = action.call
        timed = self._record.timed(
            rank=self._world.rank, name=call.name, kind="host", waited=self._take_waited())
        doing = self._world.process.doing(call.name)
        of_call = self._context.of_call(
            self._program.prefix + call.name, ring=self._program.plan[call.name].ring)
        with doing, timed as event, of_call as context, ExitStack() as stack:
            for ask in action.asks:
                if self._world.rank in ask.layout:
                    stack.enter_context(self._weights(Run(ask.call, ask.layout)))
            context.asker = Asker(self._world, self._answers, action.asks)
            with context.asker.answering_others():
                result = call_host_function(call, batch, context)
                context.asker.close()
            if action.asks:
                cpu_seconds = {f"{what}_cpu_seconds": n for what, n in context.asker.cpu_seconds.items()}
                event["asking"] = {**self._answers.take(), **cpu_seconds, **context.taken}
        work = call.work_as(HostFunction)
        if work.filters or work.decides:
            agreed = {"passed": result.batch.ids, "decision": result.decision}
            self._agreements.post(call.name, self._operation, agreed)
        if batch.ids:
            metrics: dict[str, float] = {
                f"version/{ask.call.name}": context.version(ask.call.name) for ask in action.asks}
            metrics |= result.metrics
            self._record.metrics += [(name, value, float(len(batch))) for name, value in metrics.items()]
        self._put(call.name, result.batch)

    def _put(self, call: str, batch: Batch) -> None:
        """Store what a call has computed, and record its hashes."""
        self._samples.put(call, batch)
        if (digests := self._observed.digests) is not None:
            self._record.digests += digests.of_call(call, batch)


@dataclass(frozen=True)
class _Chosen:
    """The samples on which a part runs: the numbers of their prompts, and their ids."""

    prompts: tuple[int, ...]
    ids: frozenset[int]
