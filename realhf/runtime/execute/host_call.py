"""Calls in plain Python: converts their inputs and outputs to one form that is the same on every rank."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from realhf.calls import DECISION, KEEP
from realhf.data.batch import Batch, Packed
from realhf.data.json_form import json_form
from realhf.errors import UserError, described, user_line
from realhf.graph import FunctionCall
from realhf.time_limit import time_limit


@dataclass(frozen=True)
class HostResult:
    """The output columns of the samples that a host call has kept, its metrics and its decision."""

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
    answer = _answer(call, Batch(batch.ids, inputs), context)
    columns, metrics = answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, {})
    if not isinstance(columns, Mapping | None):
        raise UserError(
            f"host call {call.name!r} returned {type(columns).__name__}: "
            "it must return a dict of columns, by output key")
    columns = columns or {}
    answers = [key for key, wanted in ((KEEP, call.work.filters), (DECISION, call.work.decides)) if wanted]
    for key in (*call.outputs, *answers):
        if key not in columns:
            raise UserError(f"host call {call.name!r} returned no column {key!r}, which it declares")
    try:
        outputs = Batch(batch.ids, {key: _column(columns[key], key) for key in call.outputs})
        if call.work.filters:
            outputs = outputs.select(_kept(columns[KEEP], len(batch)))
        decision = _decision(columns[DECISION]) if call.work.decides else None
        return HostResult(outputs, {name: _metric(name, value) for name, value in metrics.items()}, decision)
    except (TypeError, ValueError) as error:
        raise UserError(f"host call {call.name!r}: {error}") from error


def _decision(value: Any) -> Any:
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise TypeError(f"{DECISION!r} must be a JSON value: {error}") from error


def _kept(column: Any, num_samples: int) -> list[int]:
    """Return the indices of the samples that a filtering function keeps."""
    values = column.tolist() if isinstance(column, torch.Tensor | np.ndarray) else column
    legal = isinstance(values, list | tuple) and len(values) == num_samples
    if not legal or any(value not in (0, 1) for value in values):
        raise TypeError(f"column {KEEP!r} must have a boolean for each of the {num_samples} samples")
    return [i for i, value in enumerate(values) if value]


def _answer(call: FunctionCall, batch: Batch, context: Any) -> Any:
    """Call the function. Raises UserError with the line number for an exception in the user's own code, and
    if it takes longer than its limit."""
    limit = call.work.timeout_seconds
    over = TimeoutError(f"it has not returned within {limit or 0.0:g} s (HostFunction.timeout_seconds)")
    try:
        with time_limit(limit, lambda: over):
            return call.work.function(batch, context)
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
