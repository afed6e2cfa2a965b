"""Overrides: options of the command line that change fields of an experiment. Free of torch."""

import contextlib
import dataclasses
import io
import re
import textwrap
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from itertools import pairwise
from typing import Any

from realhf.errors import UserError
from realhf.experiment import Experiment
from realhf.user_input.other_libraries import Ours, ours
from realhf.user_input.suggest import near_options

_KINDS = {int: "a whole number", float: "a number", type(None): "None"}
_VAGUE = ("enable", "mode", "model", "name", "path", "type")
"""Last parts of names that say nothing without the parts before them."""


def print_fields(experiment: Experiment) -> None:
    """Print every override with its value and meaning; for unset optional parts, only the names."""
    import tyro  # Imported here and below, as most commands do not need it.

    with contextlib.suppress(SystemExit):
        tyro.cli(type(experiment), default=experiment, args=["--help"], prog="overrides:", description="",
                 config=(tyro.conf.AvoidSubcommands, tyro.conf.SuppressFixed))
    shown = _options(experiment, unset=False)
    if others := [option for option in _options(experiment) if option not in shown]:
        text = f"Parts that are not set have the options {', '.join(others)}."
        print(textwrap.fill(text, break_on_hyphens=False), end="\n\n")


def override(experiment: Experiment, words: Sequence[str], *, also: Sequence[str] = ()) -> Experiment:
    """Return the experiment with fields changed by options of the form `--field.subfield value`.

    An unknown option may be a misspelt one of these, or one of the command's options, `also`.
    """
    if not words:
        return experiment
    import tyro

    for word in words:
        if word.startswith("--"):
            experiment = _with_part(experiment, _path(word))
    options = _options(experiment)
    for word, following in pairwise([*words, "--"]):
        _check_switch(options, word, following)
    complaints = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaints), contextlib.redirect_stdout(complaints):
            # AvoidSubcommands makes optional parts that are set overridable like other fields.
            changed, unknown = tyro.cli(type(experiment), default=experiment, args=list(words),
                                        return_unknown_args=True, config=(tyro.conf.AvoidSubcommands,))
    except (SystemExit, ValueError) as error:
        complaint = str(error)
        if isinstance(error, SystemExit):
            complaint = _sentence(complaints.getvalue())
            complaint = _no_number(options, complaint) or complaint
        if "fixed argument" in complaint:  # The parser's words for options that it does not know.
            _refuse_unknown(_not_options(words, options), options, also)
        raise UserError(f"overrides {' '.join(words)!r}: {complaint}") from error
    _refuse_unknown(unknown, options, also)
    return changed


def _not_options(words: Sequence[str], options: Mapping[str, Any]) -> list[str]:
    """Return the words that name no option: `--name`, or `name=value` where no value is expected."""
    others = []
    for before, word in pairwise(["", *words]):
        is_named = word.startswith("--") and _option(word) not in options
        if is_named or not before.startswith("--") and re.match(r"[a-z][\w.]*=", word):
            others.append(word)
    return others


def _refuse_unknown(unknown: Sequence[str], options: Mapping[str, Any], also: Sequence[str]) -> None:
    """Raise UserError, with a suggestion, if there are unknown words."""
    if not unknown:
        return
    if _option(unknown[0]) in options:
        raise UserError(f"override {unknown[0]!r}: this field can only be changed in the experiment file")
    raise UserError(f"unknown override {unknown[0]!r}: {_hint(unknown[0], [*options, *also])}")


def _option(word: str) -> str:
    """Return the option that a word of the command line names, without its value and with hyphens."""
    return "--" + ".".join(_path(word)).replace("_", "-")


def _hint(word: str, options: Sequence[str]) -> str:
    """Return a suggestion: options that are spelt alike, or those that another library calls by this name."""
    unknown = "--help behind the experiment lists them all"
    is_option = word.startswith("--")
    if not is_option and "=" not in word:
        return unknown
    name = _option(word if is_option else f"--{word}").removeprefix("--")
    by_name = {option.removeprefix("--"): option for option in options}
    if same := sorted(_ending_in(by_name, name), key=_depth):
        return _did_you_mean(by_name[option] for option in same[:3])
    others = ours(name)
    head = name.partition(".")[0]
    is_ours = "." in name and any(option.startswith(f"{head}.") for option in by_name)
    meant_by_others = others is not None and any(_ending_in(by_name, end, head) for end in others.options)
    last = name.rpartition(".")[2]
    if is_ours and not meant_by_others and (
            near := _inside(by_name, name) or near_options(name, list(by_name))):
        return _did_you_mean(by_name[option] for option in near)
    if others is not None:
        return _hint_of_others(others, by_name, head)
    same = [] if last in _VAGUE else sorted(_ending_in(by_name, last), key=_depth)
    near = same[:3] or near_options(name, list(by_name))
    return _did_you_mean(by_name[option] for option in near) if near else unknown


def _hint_of_others(others: Ours, known: Mapping[str, str], head: str) -> str:
    """Return the sentence about an option of another library; `known` are the options of this command."""
    matches = [_ending_in(known, end, head) or _ending_in(known, end) for end in others.options]
    if others.options and all(matches):
        if len(matches) == 1:
            meant = _did_you_mean(known[option] for option in sorted(matches[0], key=_depth)[:3])
        else:
            meant = f"did you mean {' and '.join(known[options[0]] for options in matches)}?"
        return f"{meant} ({others.note})" if others.note else meant
    if others.instead:
        return others.instead
    names = " and ".join(f"--{end.removeprefix('--')}".replace("_", "-") for end in others.options)
    return f"here it is {names}, which this command and this experiment do not have"


def _did_you_mean(options: Iterable[str]) -> str:
    return f"did you mean {' or '.join(options)}?"


def _ending_in(known: Iterable[str], end: str, head: str = "") -> list[str]:
    """Return the names that end in these whole parts, and begin with the part `head` if it is given."""
    end = end.removeprefix("--").replace("_", "-")
    return [name for name in known
            if f".{name}".endswith(f".{end}") and (not head or name.startswith(f"{head}."))]


def _inside(known: Iterable[str], name: str) -> list[str]:
    """Return the names that begin and end in the same parts as an unknown one, the nearest three."""
    inside = sorted(_ending_in(known, name.rpartition(".")[2], name.partition(".")[0]), key=_depth)
    return near_options(name, inside) or inside[:3] if inside else []


def _depth(name: str) -> int:
    return name.count(".")


def _path(word: str) -> list[str]:
    return word[2:].split("=")[0].replace("-", "_").split(".")


def _options(config: Any, prefix: str = "", *, unset: bool = True) -> dict[str, tuple[str, Any]]:
    """Return the dotted name and the type of the field that each override changes.

    Optional parts that are not set are included if `unset`.
    """
    options: dict[str, tuple[str, Any]] = {}
    if isinstance(config, Mapping):  # Several sets of held-out rows by name.
        for key, part in config.items():
            options |= _options(part, f"{prefix}{key}.", unset=unset)
        return options
    for field in fields(config):
        value = getattr(config, field.name)
        if (kind := _unset_part(config, field.name)) is not None:
            if not unset or not _has_defaults(kind):
                continue
            value = kind()
        name = f"{prefix}{field.name}"
        if isinstance(value, Mapping) and value and all(map(_is_config, value.values())) or _is_config(value):
            options |= _options(value, f"{name}.", unset=unset)
        else:
            hint = typing.get_type_hints(type(config))[field.name]
            names = _switches(name) if hint is bool else [f"--{name}".replace("_", "-")]
            options |= dict.fromkeys(names, (name, hint))
    return options


def _switches(name: str) -> list[str]:
    """Return the options that switch a field on and off."""
    *path, last = name.replace("_", "-").split(".")
    return [f"--{'.'.join([*path, switch])}" for switch in (last, f"no-{last}")]


def _check_switch(options: Mapping[str, tuple[str, Any]], word: str, following: str) -> None:
    """Raise UserError if a field that is true or false is given a value."""
    name, hint = options.get(word.split("=")[0].replace("_", "-"), ("", None))
    if hint is bool and ("=" in word or not following.startswith("--")):
        written = word if "=" in word else f"{word} {following}"
        legal = " and ".join(_switches(name))
        raise UserError(f"override {written!r}: {name} takes no value: legal are {legal}")


def _with_part(value: Any, path: Sequence[str]) -> Any:
    """Return the config with the unset optional parts on a path, such as `actor.lora`, at their defaults."""
    name, *rest = path
    if isinstance(value, Mapping) and name in value:
        changed = _with_part(value[name], rest) if rest else value[name]
        return value if changed is value[name] else {**value, name: changed}
    if not _is_config(value) or not hasattr(value, name):
        return value
    kind = _unset_part(value, name)
    if kind is not None and not _has_defaults(kind):
        word = ".".join(path).replace("_", "-")
        raise UserError(f"override '--{word}': {name} is not set; the experiment file must set it first")
    if not rest:
        return value
    part = getattr(value, name) if kind is None else kind()
    changed = _with_part(part, rest)
    return value if changed is getattr(value, name) else dataclasses.replace(value, **{name: changed})


def _unset_part(value: Any, name: str) -> type[Any] | None:
    """Return the class of an optional part that is not set, such as `actor.lora`; None for other fields."""
    if getattr(value, name) is not None:
        return None
    kinds = typing.get_args(typing.get_type_hints(type(value))[name])
    return next((kind for kind in kinds if isinstance(kind, type) and is_dataclass(kind)), None)


def _is_config(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type)


def _has_defaults(kind: Any) -> bool:
    return not any(f.default is f.default_factory is MISSING for f in fields(kind))


def _sentence(complaint: str) -> str:
    """Return on one line the first paragraph below the title of tyro's error box."""
    parts = [" ".join(part.split()) for part in re.split(r"[─-]{3,}", re.sub(r"[│╭╮╰╯]", " ", complaint))]
    return [part for part in parts if part][:2][-1]


def _no_number(options: Mapping[str, tuple[str, Any]], complaint: str) -> str:
    """Return a plain sentence if the complaint is about a field that must be a number, else nothing."""
    match = re.match(r"Error parsing (--[\w.-]+):", complaint)
    if match is None or match[1] not in options:
        return ""
    _, hint = options[match[1]]
    is_union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    names = [_KINDS.get(kind, "") for kind in (typing.get_args(hint) if is_union else (hint,))]
    return f"{match[1]} must be {' or '.join(names)}" if all(names) else ""
