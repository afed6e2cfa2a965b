"""Walks through the actions of one step on this rank: reallocate, move data, run calls; and keeps the time of
each.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from realhf.data.batch import Batch, Packed
from realhf.dist.group import World
from realhf.engine.native import CallResult
from realhf.engine.work import HostFunction
from realhf.errors import UserError
from realhf.graph import FunctionCall
from realhf.plan import ExecutionPlan
from realhf.runtime.actions import Action, Move, Reallocate, Run
from realhf.runtime.exchange import Exchange, Routing, Source
from realhf.runtime.models import ModelStore


@dataclass
class HostContext:
    """What host functions may use besides their batch."""

    tokenizer: Any
    step: int = 0


@dataclass
class StepRecord:
    """What one rank saw of one step; JSON throughout.

    `metrics` are (name, value, weight); equal names of several ranks are averaged by weight. Times are Unix
    seconds.
    """

    metrics: list[tuple[str, float, float]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)


class Executor:
    """Runs one compiled graph, step after step."""

    def __init__(
        self,
        world: World,
        actions: Sequence[Action],
        plan: ExecutionPlan,
        store: ModelStore,
        exchange: Exchange,
        context: HostContext,
        *,
        group_size: int,
    ) -> None:
        self._world = world
        self._actions = actions
        self._plan = plan
        self._store = store
        self._exchange = exchange
        self._context = context
        self._group_size = group_size

    def run(self, dataset_batch: Batch | None) -> StepRecord:
        """One step. `dataset_batch` is given on rank 0."""
        record = StepRecord()
        outputs: dict[str | None, Batch | None] = {None: dataset_batch}
        inputs: dict[str, list[Batch]] = {}
        for action in self._actions:
            if isinstance(action, Reallocate):
                self._reallocate(action, record)
            elif isinstance(action, Move):
                if self._takes_part(action):
                    with _Timer(record, self._world.rank, action.call.name, "move"):
                        batches = self._exchange.move(
                            self._sources(action, outputs), action.target, self._routing(action.call)
                        )
                    if batches is not None:
                        inputs[action.call.name] = batches
            else:
                if self._world.rank in action.layout:
                    outputs[action.call.name] = self._run_call(action, inputs.pop(action.call.name), record)
                if action.call.kind == "train_step":
                    assert action.call.role is not None
                    self._store.updated(action.call.role)
        return record

    def _takes_part(self, move: Move) -> bool:
        return self._world.rank in move.target or any(
            self._world.rank in layout.heads for _, layout, _ in move.sources
        )

    def _sources(self, move: Move, outputs: Mapping[str | None, Batch | None]) -> list[Source]:
        rank = self._world.rank
        return [
            Source(layout, keys, outputs[producer] if rank in layout.heads else None)
            for producer, layout, keys in move.sources
        ]

    def _routing(self, call: FunctionCall) -> Routing:
        return Routing(self._group_size, call.work.num_minibatches, keep_groups=call.kind == "generate")

    def _reallocate(self, action: Reallocate, record: StepRecord) -> None:
        if not self._store.is_due(action):
            return
        with _Timer(record, self._world.rank, action.target_role, "realloc") as timer:
            stats = self._store.reallocate(action)
        if stats is None:
            record.events.pop()
            return
        timer.event |= {
            "transfer": f"{action.source}->{action.target}",
            "sent_bytes": stats.bytes_sent,
            "received_bytes": stats.bytes_received,
            "over_bound": stats.over_bound,
        }

    def _run_call(self, action: Run, minibatches: list[Batch], record: StepRecord) -> Batch | None:
        call, layout, rank = action.call, action.layout, self._world.rank
        if call.kind == "host":
            with _Timer(record, rank, call.name, "host"):
                result = _run_host(call, minibatches[0], self._context)
            weight = float(len(minibatches[0]))
            record.metrics += [(name, value, weight) for name, value in result.metrics.items() if weight]
            return result.batch
        assert call.role is not None
        engine = self._store.engine(call.role, layout)
        with _Timer(record, rank, call.name, call.kind) as timer:
            result = engine.run(
                call, minibatches, micro_batch_tokens=self._plan[call.name].micro_batch_tokens
            )
        if rank == layout.head(0):
            record.metrics += [(f"{call.role}/{name}", value, 1.0) for name, value in result.metrics.items()]
        if rank not in layout.heads:
            return None
        tokens = (
            [result.batch.fields.get(call.outputs[0])]
            if call.kind == "generate"
            else [b[call.inputs[0]] for b in minibatches]
        )
        timer.event["num_tokens"] = (
            sum(sum(t.lengths) for t in tokens if isinstance(t, Packed)) * call.work.num_passes
        )
        return result.batch


def _run_host(call: FunctionCall, batch: Batch, context: HostContext) -> CallResult:
    assert isinstance(call.work, HostFunction)
    answer = call.work.function(batch, context)
    columns, metrics = answer if isinstance(answer, tuple) else (answer, {})
    missing = [key for key in call.outputs if key not in (columns or {})]
    if missing:
        raise UserError(
            f"host call {call.name!r} returned no column {missing[0]!r}, which it declares as an output"
        )
    try:
        return CallResult(Batch(batch.ids, {key: columns[key] for key in call.outputs}), metrics)
    except ValueError as error:
        raise UserError(f"host call {call.name!r}: {error}") from error


class _Timer:
    """Adds an event with start and end to the record."""

    def __init__(self, record: StepRecord, rank: int, name: str, kind: str) -> None:
        self.event: dict[str, Any] = {"rank": rank, "name": name, "kind": kind}
        self._record = record

    def __enter__(self) -> "_Timer":
        self.event["start"] = time.time()
        return self

    def __exit__(self, *_: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.event["end"] = time.time()
        self._record.events.append(self.event)
