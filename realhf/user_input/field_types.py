"""Checks the values of a config's fields against the types that its class declares."""

import re
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import partial
from numbers import Integral, Real
from os import PathLike
from typing import Any

from realhf.errors import UserError, cut, shown
from realhf.user_input.other_libraries import keyword_hint
from realhf.user_input.suggest import did_you_mean

_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "None"}
_UNIONS = (types.UnionType, typing.Union)


def check_types(config: Any, prefix: str = "") -> None:
    """Raise ValueError about the first field, nested ones included, whose value has another type.

    `prefix` stands before the names of the fields. Fields are not checked if the annotations of the class
    cannot be resolved, or if their types are other than numbers, text, literals, configs and tuples of these.
    """
    try:
        hints = typing.get_type_hints(type(config))
    except NameError:  # A user's class, annotated with what exists for type checkers only.
        return
    for field in fields(config):
        value = getattr(config, field.name)
        where = f"{prefix}{field.name}"
        hint = hints[field.name]
        if not _is_legal(value, hint):
            meant = _wrapped(value, hint)
            raise ValueError(f"{where} is {shown(value)}: it must be {_describe(hint)}{meant}")
        if is_dataclass(value) and not isinstance(value, type):
            check_types(value, f"{where}.")


def _wrapped(value: Any, hint: Any) -> str:
    """Return " (did you mean X?)" if an object of settings was probably meant, else an empty string.

    It is one of the class that was given, or one whose first field is the value.
    """
    kinds = [kind for kind in (hint, *typing.get_args(hint)) if isinstance(kind, type) and is_dataclass(kind)]
    if any(isinstance(value, type) and issubclass(value, kind) for kind in kinds):
        return f" (did you mean {value.__name__}(...)?)"
    for kind in kinds:
        first = typing.get_type_hints(kind)[fields(kind)[0].name]
        options = typing.get_args(first) if typing.get_origin(first) in _UNIONS else (first,)
        takes_function = any(typing.get_origin(option) is Callable for option in options)
        if takes_function and not isinstance(value, str | int | float | Mapping | Sequence):
            made = value if isinstance(value, type | types.FunctionType) else type(value)
            text = made.__name__
            if isinstance(value, partial):
                text = f"partial({getattr(value.func, '__name__', '...')}, ...)"
            return f" (did you mean {kind.__name__}({text})?)"
        if isinstance(value, str | int | float) and _is_legal(value, first):
            return f" (did you mean {kind.__name__}({shown(value)})?)"
    return ""


def require(legal: bool, name: str, value: Any, rule: str) -> None:
    """Raise ValueError unless the value of the field `name` is legal; `rule` follows "it must"."""
    if not legal:
        raise ValueError(f"{name} is {cut(str(value))}: it must {rule}")


def is_whole(value: Any, *, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max


def unused(config: Any, prefix: str, **rules: tuple[bool, str]) -> Iterator[str]:
    """Yield a sentence about each field that was changed although another setting switches it off.

    `rules` has for each field whether it has an effect, and why it has none.
    """
    for field in fields(config):
        has_effect, why = rules.get(field.name, (True, ""))
        default = field.default if field.default_factory is MISSING else field.default_factory()
        value = getattr(config, field.name)
        if not has_effect and value != default:
            yield f"{prefix}{field.name} is {shown(value)} and changes nothing, as {why}"


OF_REWARDS = ("reward", "response_length", "staleness", "mismatch", "pool", "actor", "critic")
"""First parts of the names of shipped algorithms' metrics, which a reward function must not use."""
_OF_THE_RUN = (
    "eval", "compute", "timing_s", "perf", "bubble", "tokens", "realloc_bytes",
    "realloc_over_bound")
"""First parts of the names of metrics that every run logs itself."""


def require_own_name(metric: Any, *, who: str, reserved: Collection[str] = ()) -> str:
    """Return the name of a metric that a user's code logs.

    Raises UserError, which begins with `who` logs it, if it is a name that the run uses itself.
    """
    if not isinstance(metric, str) or not metric.strip():
        raise UserError(f"{who} logs a metric with the name {shown(metric)}: it must be text")
    first = metric.partition("/")[0]
    if metric == "step" or (first != metric and first in (*_OF_THE_RUN, *reserved)):
        raise UserError(
            f"{who} logs the metric {metric!r}, a name of the run's own records: "
            f"use another one, such as 'mine/{metric.rpartition('/')[2]}'")
    return metric


def check_fields(
    document: Any, legal: Sequence[str], *, optional: Collection[str] = (), where: str = "", whole: str = ""
) -> dict[str, Any]:
    """Return a copy of a mapping that was read from a file: a whole document, or its field `where`.

    Raises ValueError unless it is a mapping with the legal fields, of which only the optional ones may be
    missing. The message calls the document `whole`.
    """
    prefix = where and f"{where}."
    if not isinstance(document, dict):
        raise ValueError(f"{where or whole} is {shown(document)}: it must give {', '.join(legal)}")
    for name in [*document, *(name for name in legal if name not in optional)]:
        if name not in legal:
            meant = did_you_mean(str(name), legal)
            raise ValueError(f"{prefix}{name} is not a field{meant}: legal are {', '.join(legal)}")
        if name not in document:
            raise ValueError(f"{prefix}{name} is missing")
    return dict(document)


def explain_keyword(error: TypeError, public: Any) -> str:
    """Return in brackets what a call with an unknown keyword probably meant, or an empty string.

    `public` is the module that has the class which was called.
    """
    match = re.match(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'", str(error))
    kind = getattr(public, match[1], None) if match else None
    if match is None or not isinstance(kind, type) or not is_dataclass(kind):
        return ""
    legal = [field.name for field in fields(kind)]
    of_experiment = [field.name for field in fields(public.Experiment)]
    if not issubclass(kind, public.Experiment) and match[2] in of_experiment:
        return f" (it is a field of the experiment itself, not of {match[1]})"
    hint = _in_a_part(kind, match[2]) or keyword_hint(match[2], legal)
    return f" ({hint})" if hint else did_you_mean(match[2], legal)


def _in_a_part(kind: Any, name: str) -> str:
    """Return how to set a field that a part of the config has, such as `sampling`, or an empty string."""
    try:
        hints = typing.get_type_hints(kind)
    except NameError:
        return ""
    settings = []
    for field in fields(kind):
        hint = hints[field.name]
        part = next((option for option in (hint, *typing.get_args(hint)) if is_dataclass(option)), None)
        if part is not None and name in [inner.name for inner in fields(part)]:
            settings.append(f"{field.name}={getattr(part, '__name__', part)}({name}=...)")
    return f"did you mean {' or '.join(settings[:2])}?" if settings else ""


def _is_legal(value: Any, hint: Any) -> bool:
    origin = typing.get_origin(hint)
    options = typing.get_args(hint)
    if origin in _UNIONS:
        return any(_is_legal(value, option) for option in options)
    if origin is typing.Literal:
        return value in options
    if origin is tuple:
        return _is_legal_tuple(value, options)
    if origin is Mapping:
        return isinstance(value, Mapping) and all(
            _is_legal(part, hint) for pair in value.items() for part, hint in zip(pair, options, strict=True))
    if hint in (int, float):
        return isinstance(value, Integral if hint is int else Real) and not isinstance(value, bool)
    if hint is str:
        return isinstance(value, str | PathLike)
    if isinstance(hint, type) and (hint in (bool, type(None)) or is_dataclass(hint)):
        return isinstance(value, hint)
    return True


def _is_legal_tuple(value: Any, options: Sequence[Any]) -> bool:
    if len(options) == 2 and options[1] is Ellipsis:
        return isinstance(value, Sequence) and all(_is_legal(part, options[0]) for part in value)
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != len(options):
        return False
    return all(_is_legal(part, option) for part, option in zip(value, options, strict=True))


def _describe(hint: Any) -> str:
    origin = typing.get_origin(hint)
    options = typing.get_args(hint)
    if origin in _UNIONS:
        return " or ".join(_describe(option) for option in options)
    if origin is typing.Literal:
        return " or ".join(repr(option) for option in options)
    if origin is tuple and options[1:] == (Ellipsis,):
        return f"a tuple, each part {_describe(options[0])}"
    if origin is tuple:
        return f"a tuple of {len(options)}: {', '.join(_describe(option) for option in options)}"
    if origin is Mapping:
        return f"a dict from {_describe(options[0])} to {_describe(options[1])}"
    name = getattr(hint, "__name__", str(hint))
    return _WORDS.get(hint) or f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"
