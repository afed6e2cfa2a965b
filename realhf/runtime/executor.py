"""Executor: executes and times the actions of a step on this rank."""

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from realhf.checkpoint.write import memory_of
from realhf.data.batch import Batch
from realhf.data.loader import load_tokenizer
from realhf.dist.group import Outbox
from realhf.dist.world import World
from realhf.errors import UserError
from realhf.graph import FunctionCall
from realhf.layout import Layout
from realhf.plan import ExecutionPlan
from realhf.runtime.actions import Action, Reallocate, Receive, Run, Send, role_of
from realhf.runtime.exchange import Exchange, Routing, Source
from realhf.runtime.host_call import call_host_function
from realhf.runtime.models import ModelStore

_MAX_SAVED = 16
"""Most files of samples that a run directory gets."""


@dataclass
class HostContext:
    """The context of host functions: the tokenizer, and the number of the step."""

    tokenizer_dir: str
    step: int = 0
    state: dict[str, Any] = field(default_factory=dict)
    """JSON values that host functions keep from step to step; checkpoints hold those of every rank."""
    answers: list[dict[str, Any]] = field(default_factory=list)
    """The rows of the last evaluation, on rank 0."""

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.tokenizer_dir)


@dataclass
class StepRecord:
    """Metrics and timed events of one rank in one step, as JSON values. Times are Unix seconds.

    `metrics` are (name, value, weight); equal names of several ranks are averaged by weight.
    """

    metrics: list[tuple[str, float, float]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)

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


@dataclass(frozen=True)
class Executor:
    """Runs one compiled graph step by step."""

    world: World
    actions: Sequence[Action]
    plan: ExecutionPlan
    store: ModelStore
    context: HostContext
    group_size: int
    outbox: Outbox = field(default_factory=Outbox)
    failures: Path | None = None
    """Directory for the samples of updates that were skipped."""

    def run(self, dataset_batch: Batch | None, *, is_last: bool = False) -> StepRecord:
        """Run one step. Ranks of `dataset_layout` give the `dataset_batch`; `is_last`: no step follows."""
        self.outbox.next_round()
        record = StepRecord()
        outputs: dict[str | None, Batch | None] = {None: dataset_batch}
        inputs: dict[str, list[Batch]] = {}
        for action in self.actions:
            if isinstance(action, Reallocate):
                self._reallocate(action, record, is_last=is_last)
            elif isinstance(action, Send):
                self._send(action, outputs, record)
            elif isinstance(action, Receive):
                if self.world.rank in action.target:
                    inputs[action.call.name] = self._receive(action, outputs, record)
            else:
                if action.call.role is not None and action.call.kind == "train_step":
                    self._wait(record, action.call.role)  # Parameters in flight must not change.
                elif action.call.role is not None and self.world.rank in action.layout:
                    self._wait(record, action.call.role, action.layout)
                if (minibatches := inputs.pop(action.call.name, None)) is not None:
                    run = self._run_host if action.call.kind == "host" else self._run_model
                    outputs[action.call.name] = run(action, minibatches, record)
                if action.call.kind == "train_step" and action.call.role is not None:
                    self.store.updated(action.call.role)
        return record

    def _send(
        self, action: Send, outputs: Mapping[str | None, Batch | None], record: StepRecord
    ) -> None:
        rank = self.world.rank
        if rank in action.source.heads and rank not in action.target:
            with record.timed(rank=rank, name=action.call.name, kind="move"):
                Exchange(self.world, self.outbox).send(self._source(action, outputs), action.target)

    def _receive(
        self, action: Receive, outputs: Mapping[str | None, Batch | None], record: StepRecord
    ) -> list[Batch]:
        """Return this rank's inputs of the call."""
        call = action.call
        sources = [self._source(send, outputs) for send in action.sends]
        routing = Routing(self.group_size, call.work.num_minibatches, keep_groups=call.kind == "generate")
        waits = self.world.activity.doing(f"waits for {self._producers(action)}")
        with waits, record.timed(rank=self.world.rank, name=call.name, kind="move"):
            return Exchange(self.world, self.outbox).receive(sources, action.target, routing, tag=action.tag)

    def _producers(self, action: Receive) -> str:
        """Return names and ranks of the calls on other ranks that produce the inputs."""
        rank = self.world.rank
        far = [send for send in action.sends if send.producer is not None and rank not in send.source]
        names = dict.fromkeys(f"{send.producer} on {send.source.mesh}" for send in far)
        return f"{' and '.join(names) or 'the other ranks'}, for {action.call.name}"

    def _source(self, send: Send, outputs: Mapping[str | None, Batch | None]) -> Source:
        batch = outputs[send.producer] if self.world.rank in send.source.heads else None
        return Source(send.source, send.keys, batch, send.tag)

    def _reallocate(self, action: Reallocate, record: StepRecord, *, is_last: bool) -> None:
        """Start a reallocation, and wait for it unless it runs ahead of the next step.

        One that the previous step has started ahead is awaited by the call that uses it, or by the role's
        next update; an evaluation awaits it at once, and so counts it as its own.
        """
        if action.ahead and is_last:
            return
        if action.rate is not None:
            self._wait(record, action.target_set)
        if (self.store.start(action) or not self._updates_anything) and not action.ahead:
            self._wait(record, action.target_set, action.target)

    @cached_property
    def _updates_anything(self) -> bool:
        return any(isinstance(action, Reallocate) and action.ahead for action in self.actions)

    def _wait(self, record: StepRecord, role: str, layout: Layout | None = None) -> None:
        """Wait for reallocations of a role and its adapters, to one layout or all; record them as events."""
        activity = self.world.activity
        ranks = range(self.world.size) if layout is None else layout.ranks
        with activity.doing(f"waits for the parameters of {role}"), activity.waiting(ranks):
            finished = self.store.finish(role, layout)
        for moved in finished:
            record.events.append({
                "rank": self.world.rank, "name": role_of(moved.action.target_set), "kind": "realloc",
                "start": moved.start, "transfer": f"{moved.action.source}->{moved.action.target}",
                "sent_bytes": moved.stats.bytes_sent, "received_bytes": moved.stats.bytes_received,
                "senders": list(moved.stats.senders), "over_bound": moved.stats.over_bound, "end": moved.end,
            })  # fmt: skip

    def _run_model(self, action: Run, minibatches: list[Batch], record: StepRecord) -> Batch | None:
        """Run the call; return its output columns on heads of the layout, None elsewhere."""
        call = action.call
        layout = action.layout
        rank = self.world.rank
        assert call.role is not None
        plan = self.plan[call.name]
        weights = self._weights(action, record)
        timed = record.timed(rank=rank, name=call.name, kind=call.kind)
        doing = self.world.activity.doing(call.name)
        with doing, weights, _explaining(call, rank, self.context.step), timed as event:
            engine = self.store.engine(call.role, layout)
            result = engine.run(
                call, minibatches, micro_batch_tokens=plan.micro_batch_tokens, recompute=plan.recompute,
                gather=False, report=self.world.activity.note,
            )  # fmt: skip
            if call.kind == "train_step" and rank in layout.heads:
                event["num_tokens"] = sum(sum(batch[call.inputs[0]].lengths) for batch in minibatches)
        if result.metrics.get("skipped_updates") and rank in layout.heads:
            self._save_samples(call.name, minibatches)
        if rank == layout.heads[0]:
            names = {name: name if "/" in name else f"{call.role}/{name}" for name in result.metrics}
            record.metrics += [(names[name], value, 1.0) for name, value in result.metrics.items()]
        return result.batch if rank in layout.heads else None

    def _save_samples(self, call: str, minibatches: Sequence[Batch]) -> None:
        """Save this rank's samples of a call (see Batch.unpack), if its first failures are not enough."""
        if self.failures is None or len(list(self.failures.glob("*.safetensors"))) >= _MAX_SAVED:
            return
        self.failures.mkdir(parents=True, exist_ok=True)
        path = self.failures / f"step_{self.context.step}_{call}_rank_{self.world.rank}.safetensors"
        data = Batch.concat(minibatches).pack()
        path.write_bytes(memory_of(data))
        what = f"{call} skipped an update in step {self.context.step}, as its gradient is not finite"
        print(f"realhf: warning: {what}; its samples: {path}", file=sys.stderr, flush=True)

    @contextmanager
    def _weights(self, action: Run, record: StepRecord) -> Iterator[None]:
        """Keep the call's weights on the device while it runs, if they are offloaded."""
        assert action.call.role is not None
        weights = self.store.offloaded(action.call.role, action.layout)
        if weights is None:
            yield
            return
        about = {"rank": self.world.rank, "name": action.call.role, "kind": "offload"}
        with record.timed(**about, what="load", bytes=weights.num_bytes):
            weights.load()
        yield
        with record.timed(**about, what="release"):
            weights.release()

    def _run_host(self, action: Run, minibatches: list[Batch], record: StepRecord) -> Batch:
        (batch,) = minibatches
        timed = record.timed(rank=self.world.rank, name=action.call.name, kind="host")
        with self.world.activity.doing(action.call.name), timed:
            columns, metrics = call_host_function(action.call, batch, self.context)
        if batch.ids:
            record.metrics += [(name, value, float(len(batch))) for name, value in metrics.items()]
        return columns


_MEMORY = {
    "generate": "lower max_rows, sampling.max_new_tokens or (native engine) kv_cache_gib, prefill_tokens",
    "forward": "lower calls.{name}.micro_batch_tokens in the plan",
    "train_step": "lower calls.{name}.micro_batch_tokens in the plan, or set calls.{name}.recompute",
}
"""Advice by kind of call when memory runs out."""


@contextmanager
def _explaining(call: FunctionCall, rank: int, step: int) -> Iterator[None]:
    """Raise UserError with advice if the call runs out of memory or diverges."""
    try:
        yield
    except FloatingPointError as error:
        advice = f"lower {call.role}.optimizer.lr, or look for extreme rewards and data"
        raise UserError(f"call {call.name!r} in step {step}: {error}: {advice}") from error
    except (MemoryError, RuntimeError) as error:
        what = str(error).partition("DefaultCPUAllocator: ")[2]
        if not what and not isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            raise
        what = ". ".join((what or str(error) or type(error).__name__).split(". ")[:2]).rstrip(".")
        advice = f"{_MEMORY[call.kind].format(name=call.name)}, or give it another layout"
        raise UserError(f"call {call.name!r} ran out of memory on rank {rank} ({what}): {advice}") from error
