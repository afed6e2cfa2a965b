"""Losses that are one function of a user, given as `loss=f`: what it reads, and a call with checks.

A function names what it reads as its parameters: outputs of the model, and columns of the batch, which are
keys of other calls' outputs or columns of the dataset. It returns one number for each token, sample or pair;
the mean over these is the loss.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from realhf.algorithms.responses import per_token
from realhf.errors import UserError, described, shown, user_line

if TYPE_CHECKING:
    from torch import Tensor

    from realhf.data.batch import Batch

LossFunction = Callable[..., Any]
Unit = Literal["token", "sample", "pair"]


def columns_of(function: LossFunction | None, known: Collection[str]) -> tuple[str, ...]:
    """Return what a function reads besides the `known` values: keys of the graph, which are those of other
    calls or columns of the dataset. A loss with `totals` lists them as `columns`.

    Raises ValueError if it is no function whose parameters have names.
    """
    if function is None:
        return ()
    if is_complete(function):
        return tuple(getattr(function, "columns", ()))
    return tuple(name for name in _parameters(function) if name not in known)


def is_complete(function: LossFunction | None) -> bool:
    """Return whether a user's loss is an object with `totals`, and not a function of one unit."""
    return hasattr(function, "totals")


def own_or(loss: Any) -> Any:
    """Return the user's whole loss if the settings of a loss have one as `function`, else these settings."""
    return loss.function if is_complete(loss.function) else loss


def name_of(function: LossFunction) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _parameters(function: LossFunction) -> list[str]:
    if not callable(function) or isinstance(function, type):
        raise ValueError(f"loss is {shown(function)}: it must be a function, or an object of a loss")
    names = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(
                f"loss {name_of(function)} has the parameter {parameter}: each must have the name of what it "
                "gets, such as logprobs or advantages")
        if parameter.default is parameter.empty:
            names.append(parameter.name)
    return names


def called(
    function: LossFunction, known: Mapping[str, Tensor], batch: Batch, *, unit: Unit, count: int,
    rows: Sequence[int] | None = None,
) -> Tensor:
    """Return what a function returns: `count` numbers, one for each unit.

    `known` are values that have this form already. Of columns with an entry for each sample, a function of
    tokens gets the entry of each token's sample, and a function of pairs those of the samples `rows`. Raises
    UserError if the function fails or returns something else.
    """
    example = next(iter(known.values()))
    arguments = {
        name: known[name] if name in known else _column(name, batch, example, unit=unit, rows=rows)
        for name in _parameters(function)}
    name = name_of(function)
    try:
        values = function(**arguments)
    except Exception as error:
        if isinstance(error, UserError) or user_line(error) is None:
            raise
        raise UserError(f"loss {name} raised {described(error)}") from error
    shape = getattr(values, "shape", None)
    if shape is None or tuple(shape) != (count,):
        what = type(values).__name__ if shape is None else f"a tensor of shape {tuple(shape)}"
        raise UserError(
            f"loss {name} returned {what}: it must return a tensor of shape ({count},), one number for each "
            f"{unit}; realhf takes the mean")
    return values


def _column(name: str, batch: Batch, example: Tensor, *, unit: Unit, rows: Sequence[int] | None) -> Tensor:
    column = batch[name]
    if hasattr(column, "lengths"):
        if unit != "token":
            raise UserError(f"loss reads {name}, which has a number for each token, and it is one of {unit}s")
        return column.values
    if isinstance(column, list):
        if wrong := [x for x in column if not isinstance(x, int | float)]:
            raise UserError(f"loss reads the column {name} with {shown(wrong[0])}: it must have numbers")
        column = example.new_tensor(column)
    if unit == "token":
        return per_token(column, batch["response_mask"])
    return column if rows is None else column[list(rows)]
