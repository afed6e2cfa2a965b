"""Calls in plain Python: their context, inputs, outputs, and what ranks agree on."""

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any, TypeGuard

import numpy as np
import torch

from realhf.calls import DECISION, KEEP, HostFunction
from realhf.data.batch import Batch, Packed
from realhf.data.loader import load_tokenizer
from realhf.data.memory_rows import json_form, json_state
from realhf.distributed.group import peer_errors
from realhf.distributed.world import World
from realhf.errors import UserError, described, user_line
from realhf.graph import FunctionCall
from realhf.signals import time_limit
from realhf.user_input.field_types import require_own_name

PARTS = "parts"
"""The only key of a value of a state that has parts (see `is_in_parts`)."""


def is_in_parts(value: Any) -> TypeGuard[dict[str, dict[str, Any]]]:
    """Return whether a value of a state has parts that are joined over ranks (see `HostContext.state`)."""
    return isinstance(value, dict) and set(value) == {PARTS} and isinstance(value[PARTS], dict)


@dataclass
class HostContext:
    """The context of a host function: tokenizer, number of the step, updates so far, and its own state."""

    tokenizer_dir: str
    step: int = 0
    updates: dict[str, int] = field(default_factory=dict)
    """Train steps of each role so far."""
    state: dict[str, Any] = field(default_factory=dict)
    """JSON values that the present call keeps from step to step on this rank.

    A value {"parts": {name: JSON}} is divided over ranks: save only the parts of this rank. In a run that
    resumes with the call on other ranks, each rank first gets all parts, and must drop those of others.
    """
    states: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The `state` of every host call of this rank, by its name; checkpoints hold them."""
    run_state: Mapping[str, Any] = field(default_factory=dict)
    """`run.state` of the step program, equal on all ranks; host functions may only read it."""
    ring: int | None = None
    """The `ring` of the present call in the plan: slices of its environments; None: the function's choice."""
    taken: dict[str, float] = field(default_factory=dict)
    """What the present call has measured of its own work (see `measured`)."""
    asker: Any = None
    """Asks forward calls for the present call (see `runtime.execute.asking`)."""
    scored_samples: list[dict[str, Any]] = field(default_factory=list)
    """The samples that an evaluation has just scored on this rank."""

    @contextmanager
    def of_call(self, name: str, *, ring: int | None = None) -> Iterator["HostContext"]:
        """Let `state` and `ring` be those of a call; no other call sees them, wherever a plan puts it."""
        self.state = self.states.setdefault(name, {})
        self.ring = ring
        self.taken = {}
        yield self
        self.states[name] = json_state(self.state, f"host call {name!r}: context.state")

    def measured(self, figures: Mapping[str, float]) -> None:
        """Add figures, by name, to what the run records of the present call if it asks others.

        The planner uses those of `environments.vector.VectorSource.taken`, or others of the same names.
        """
        self.taken |= figures

    def ask(self, call: str, rows: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what a forward call answers to some rows: tensors, by name.

        Whether it runs on this rank or on another one is the plan's matter.
        """
        return self.ask_later(call, rows).result()

    def ask_later(self, call: str, rows: Mapping[str, Any]) -> Any:
        """Ask without waiting; `result()` of what is returned gives the answer. Answers come in order."""
        return self.asker.ask(call, rows)

    def version(self, call: str) -> int:
        """Return the number of updates of the weights by which a forward call answers."""
        return self.updates.get(self.asker.role(call), 0)

    @cached_property
    def tokenizer(self) -> Any:
        if not self.tokenizer_dir:
            raise UserError("there is no tokenizer, as no role is a language model: set `tokenizer`")
        return load_tokenizer(self.tokenizer_dir)

    @property
    def any_tokenizer(self) -> Any:
        """The tokenizer; None if there is none."""
        return self.tokenizer if self.tokenizer_dir else None


_ANY_TIME = timedelta(days=365)
_OPEN_STEPS = 8
"""Steps for which a result stays: no rank is further behind (see Outbox and StepDecisions)."""


class Agreements:
    """Results of host calls by operation, in the store that all ranks share. Posting one waits for nobody."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._store = world.unused_store("agreements") if world.size > 1 else None
        self._own: dict[str, Any] = {}
        self._posted: deque[list[str]] = deque([[]])

    def post(self, call: str, operation: int, result: Any) -> None:
        """Post this rank's result, a JSON value."""
        key = _key(call, operation, self._world.rank)
        self._own[key] = result
        self._posted[-1].append(key)
        if self._store is not None:
            self._store.set(key, json.dumps(result))

    def read(self, call: str, operation: int, ranks: Sequence[int]) -> list[Any]:
        """Return the results of these ranks, in their order; wait until they are there."""
        return [self._read(_key(call, operation, rank), rank) for rank in ranks]

    def _read(self, key: str, rank: int) -> Any:
        if rank == self._world.rank:
            return self._own[key]
        assert self._store is not None, "a rank of another process needs a store"
        with self._world.process.waiting([rank]), peer_errors():
            self._store.wait([key], _ANY_TIME)
            return json.loads(self._store.get(key))

    def next_step(self) -> None:
        """Delete this rank's oldest results, which no rank will read any more."""
        self._posted.append([])
        if len(self._posted) > _OPEN_STEPS:
            for key in self._posted.popleft():
                del self._own[key]
                if self._store is not None:
                    self._store.delete_key(key)


def _key(call: str, operation: int, rank: int) -> str:
    return f"{operation}/{call}/{rank}"


@dataclass(frozen=True)
class HostResult:
    """The output columns of the samples that have passed a host call, its metrics and its decision."""

    batch: Batch
    metrics: Mapping[str, float]
    decision: Any = None


def call_host_function(call: FunctionCall, batch: Batch, context: Any) -> HostResult:
    """Call the function of a host call on a batch.

    The function gets copies of lists of Python values, and the lists that it returns are converted to JSON's
    types, even if they stay on this rank: so a plan cannot change what a function sees. Raises UserError if
    the function fails, or if a column is missing or cannot be sent.
    """
    inputs = {key: json_form(column) if isinstance(column, list) else column
             for key, column in batch.fields.items()}
    returned = _returned(call, Batch(batch.ids, inputs), context)
    is_pair = isinstance(returned, tuple) and len(returned) == 2
    columns, metrics = returned if is_pair else (returned, {})
    if not isinstance(columns, Mapping | None):
        raise UserError(
            f"host call {call.name!r} returned {type(columns).__name__}: "
            "it must return a dict of columns, by output key")
    columns = columns or {}
    work = call.work_as(HostFunction)
    more = [key for key, wanted in ((KEEP, work.filters), (DECISION, work.decides)) if wanted]
    for key in (*call.outputs, *more):
        if key not in columns:
            raise UserError(f"host call {call.name!r} returned no column {key!r}, which it declares")
    try:
        outputs = Batch(batch.ids, {key: _column(columns[key], key) for key in call.outputs})
        if work.filters:
            outputs = outputs.select(_passed(columns[KEEP], len(batch)))
        decision = _decision(columns[DECISION]) if work.decides else None
        for name in metrics:
            require_own_name(name, who=f"host call {call.name!r}")
        return HostResult(outputs, {name: _metric(name, value) for name, value in metrics.items()}, decision)
    except UserError:
        raise
    except (TypeError, ValueError) as error:
        raise UserError(f"host call {call.name!r}: {error}") from error


def _decision(value: Any) -> Any:
    try:
        return json_form(value)
    except (TypeError, RecursionError) as error:
        raise TypeError(f"{DECISION!r} must be a JSON value: {error}") from error


def _passed(column: Any, num_samples: int) -> list[int]:
    """Return the indices of the samples that pass a filtering function."""
    values = column.tolist() if isinstance(column, torch.Tensor | np.ndarray) else column
    legal = isinstance(values, list | tuple) and len(values) == num_samples
    if not legal or any(value not in (0, 1) for value in values):
        raise TypeError(f"column {KEEP!r} must have a boolean for each of the {num_samples} samples")
    return [i for i, value in enumerate(values) if value]


def _returned(call: FunctionCall, batch: Batch, context: Any) -> Any:
    """Call the function. Raises UserError with the line number for an exception in the user's own code, and
    if it takes longer than its limit."""
    work = call.work_as(HostFunction)
    limit = work.timeout_seconds
    over = TimeoutError(f"it has not returned within {limit or 0.0:g} s (HostFunction.timeout_seconds)")
    try:
        with time_limit(limit, lambda: over):
            return work.function(batch, context)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        if user_line(error) is None and error is not over and not isinstance(error, SystemExit):
            raise
        raise UserError(f"host call {call.name!r} raised {described(error)}") from error


def _metric(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"metric {name!r} is {value!r}: it must be a number") from error


def _column(column: Any, key: str) -> Any:
    """Return an output column in the form in which it is sent."""
    if isinstance(column, Packed | torch.Tensor):
        return column
    if isinstance(column, np.ndarray) and column.dtype.kind in "biuf":
        return torch.from_numpy(column)
    if not isinstance(column, list | tuple | np.ndarray):
        legal = "a list, a tensor or Packed sequences, with an entry for each sample"
        raise TypeError(f"column {key!r} is {type(column).__name__}: it must be {legal}")
    try:
        return json_form(column)
    except TypeError as error:
        legal = "text, numbers, booleans, None, and lists and dicts of those"
        raise TypeError(f"column {key!r} has {error}; legal are {legal}") from error
