"""Overrides: options of the command line that change fields of an experiment. Free of torch."""

import contextlib
import dataclasses
import difflib
import io
import re
import types
import typing
from collections.abc import Sequence
from dataclasses import MISSING, fields, is_dataclass
from itertools import pairwise
from typing import Any

import tyro

from realhf.errors import UserError
from realhf.experiment import Experiment

_KINDS = {int: "a whole number", float: "a number", type(None): "None"}
_TYRO = (tyro.conf.AvoidSubcommands,)  # Makes optional parts that are set overridable like other fields.


def print_fields(experiment: Experiment) -> None:
    """Print every override with its value and meaning."""
    with contextlib.suppress(SystemExit):
        tyro.cli(type(experiment), default=experiment, args=["--help"], prog="overrides:", description="",
                 config=_TYRO)


def override(experiment: Experiment, words: Sequence[str]) -> Experiment:
    """Return the experiment with fields changed by options of the form `--field.subfield value`."""
    if not words:
        return experiment
    for word in words:
        if word.startswith("--"):
            experiment = _with_part(experiment, _path(word))
    for word, following in pairwise([*words, "--"]):
        _check_switch(experiment, word, following)
    complaints = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaints), contextlib.redirect_stdout(complaints):
            changed, unknown = tyro.cli(type(experiment), default=experiment, args=list(words),
                                        return_unknown_args=True, config=_TYRO)
    except (SystemExit, ValueError) as error:
        complaint = str(error)
        if isinstance(error, SystemExit):
            complaint = _sentence(complaints.getvalue())
            complaint = _no_number(experiment, complaint) or complaint
        raise UserError(f"overrides {' '.join(words)!r}: {complaint}") from error
    if unknown:
        legal = [f"--{name.replace('_', '-')}" for name in _field_names(experiment)]
        near = difflib.get_close_matches(unknown[0].replace("_", "-"), legal, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else "--help behind the experiment lists them all"
        raise UserError(f"unknown override {unknown[0]!r}: {hint}")
    return changed


def _path(word: str) -> list[str]:
    return word[2:].split("=")[0].replace("-", "_").split(".")


def _check_switch(experiment: Experiment, word: str, following: str) -> None:
    """Raise UserError if a field that is true or false is given a value."""
    if not word.startswith("--") or ("=" not in word and following.startswith("--")):
        return
    *path, name = _path(word)
    value: Any = experiment
    for part in path:
        value = getattr(value, part, None)
    names = [name, name.removeprefix("no_")]
    if (field := next((n for n in names if isinstance(getattr(value, n, None), bool)), None)) is not None:
        on, off = (".".join([*path, switch]).replace("_", "-") for switch in (field, f"no_{field}"))
        given = word if "=" in word else f"{word} {following}"
        dotted = ".".join([*path, field])
        raise UserError(f"override {given!r}: {dotted} takes no value: legal are --{on} and --{off}")


def _with_part(value: Any, path: Sequence[str]) -> Any:
    """Return the config with the unset optional parts on a path, such as `actor.lora`, at their defaults."""
    name, *rest = path
    if not is_dataclass(value) or isinstance(value, type) or not hasattr(value, name):
        return value
    kind = _unset_part(value, name)
    if kind is not None and not _has_defaults(kind):
        word = ".".join(path).replace("_", "-")
        raise UserError(f"override '--{word}': {name} is not set; the experiment file must set it first")
    if not rest:
        return value
    part = getattr(value, name) if kind is None else kind()
    made = _with_part(part, rest)
    return value if made is getattr(value, name) else dataclasses.replace(value, **{name: made})


def _unset_part(value: Any, name: str) -> type[Any] | None:
    """Return the class of an optional part that is not set, such as `actor.lora`; None for other fields."""
    if getattr(value, name) is not None:
        return None
    kinds = typing.get_args(typing.get_type_hints(type(value))[name])
    return next((kind for kind in kinds if isinstance(kind, type) and is_dataclass(kind)), None)


def _has_defaults(kind: Any) -> bool:
    return not any(f.default is f.default_factory is MISSING for f in fields(kind))


def _sentence(complaint: str) -> str:
    """Return on one line the first paragraph below the title of tyro's error box."""
    parts = [" ".join(part.split()) for part in re.split(r"[─-]{3,}", re.sub(r"[│╭╮╰╯]", " ", complaint))]
    return [part for part in parts if part][:2][-1]


def _no_number(experiment: Experiment, complaint: str) -> str:
    """Return a plainer sentence than the parser's if a field should have been a number, else nothing."""
    if (found := re.match(r"Error parsing (--[\w.-]+):", complaint)) is None:
        return ""
    *path, name = _path(found[1])
    value: Any = experiment
    for part in path:
        value = getattr(value, part, None)
    hint = typing.get_type_hints(type(value)).get(name)
    is_union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    kinds = typing.get_args(hint) if is_union else (hint,)
    names = [_KINDS.get(kind, "") for kind in kinds]
    return f"{found[1]} must be {' or '.join(names)}" if all(names) else ""


def _field_names(value: Any, name: str = "") -> list[str]:
    """Return the names of all fields that an override can change, including those of unset optional parts.

    A field that is true or false has a second name, which switches it off.
    """
    if isinstance(value, bool):
        *parts, last = name.split(".")
        return [name, ".".join([*parts, f"no_{last}"])]
    if not is_dataclass(value) or isinstance(value, type):
        return [name]
    names = []
    for part in fields(value):
        kind = _unset_part(value, part.name)
        path = f"{name}.{part.name}".lstrip(".")
        if kind is None:
            names += _field_names(getattr(value, part.name), path)
        elif _has_defaults(kind):
            names += _field_names(kind(), path)
    return names
