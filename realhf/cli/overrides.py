"""Overrides: options of the command line that change fields of an experiment. Free of torch."""

import contextlib
import dataclasses
import io
import os
import re
import textwrap
import types
import typing
from argparse import ArgumentParser
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from itertools import pairwise
from typing import Any

from realhf.errors import UserError, warn
from realhf.experiment import Experiment
from realhf.user_input.other_libraries import ours
from realhf.user_input.suggest import did_you_mean, near_options

_KINDS = {int: "a whole number", float: "a number", type(None): "None"}
_VAGUE = ("enable", "mode", "model", "name", "path", "type")
"""Last parts of names that say nothing without the parts before them."""
_UNKNOWN = "--help behind the experiment lists them all"


def option_names(parser: ArgumentParser) -> list[str]:
    """Return the options that a command declares."""
    return [action.option_strings[-1] for action in parser._actions if action.option_strings]


_STEPS = re.compile(r"(\d+)(?:-(\d+))?")


def step_numbers(text: str | None, *, option: str) -> frozenset[int]:
    """Return the steps that an option names, as in `5-7,10`; none if it is not given."""
    found: set[int] = set()
    for part in () if text is None else text.split(","):
        match = _STEPS.fullmatch(part.strip())
        first, last = (0, 0) if match is None else (int(match[1]), int(match[2] or match[1]))
        if not 1 <= first <= last:
            raise UserError(f"{option} {text}: write steps from 1 on, such as 5-7 or 5,10")
        found.update(range(first, last + 1))
    return frozenset(found)


def refuse_words(parser: ArgumentParser, words: Sequence[str]) -> None:
    """Raise UserError if a command that has no overrides is given words that it does not know."""
    if words:
        legal = [option for option in option_names(parser) if option != "--help"]
        what = f"option {words[0]}" if words[0].startswith("-") else f"use for {words[0]!r}"
        meant = did_you_mean(words[0], legal)
        raise UserError(f"{parser.prog} has no {what}{meant}: legal are {', '.join(legal)}")


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

    for sentence in repeated(words):
        warn(sentence)

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


def repeated(words: Sequence[str], among: Collection[str] | None = None) -> Iterator[str]:
    """Yield a sentence about each option that is given twice, with different values; the last one counts.

    `among` are the options to look for; None: all. Only the first process of a command looks.
    """
    is_worker = "RANK" in os.environ and "TORCHELASTIC_RUN_ID" not in os.environ
    if is_worker or os.environ.get("RANK", "0") != "0":
        return
    given: dict[str, list[str]] = {}
    for word, following in pairwise([*words, "--"]):
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word.partition("=")
            flag = "false" if name.startswith("--no-") else "true"
            value = value if equals else flag if following.startswith("--") else following
            option = _option(f"--{name.removeprefix('--').removeprefix('no-')}")
            given.setdefault(option, []).append(value)
    for option, values in given.items():
        if len(set(values)) > 1 and (among is None or option in among):
            yield f"{option} is given {len(values)} times, as {' and '.join(values)}: the last one counts"


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
    """Return a suggestion: what another library's option is called here, or options that are spelt alike."""
    if not word.startswith("--") and "=" not in word:
        return _UNKNOWN
    name = _option(f"--{word.removeprefix('--')}").removeprefix("--")
    by_name = {option.removeprefix("--"): option for option in options}
    head, _, _ = name.partition(".")
    inside = [known for known in by_name if "." in name and known.startswith(f"{head}.")]
    others = ours(name)
    if others is not None and (not inside or any(_ending_in(inside, end) for end in others.options)):
        places = [_ending_in(inside, end) or _ending_in(by_name, end) for end in others.options]
        if places and all(places):
            meant = " and ".join(" or ".join(by_name[known] for known in near[:3]) for near in places)
            return f"did you mean {meant}?" + (f" ({others.note})" if others.note else "")
        names = " and ".join(_option(f"--{end.removeprefix('--')}") for end in others.options)
        return others.instead or f"here it is {names}, which this command and this experiment do not have"
    last = name.rpartition(".")[2]
    same = [] if last in _VAGUE and not inside else _ending_in(inside or by_name, last)
    near = near_options(name, same) or same[:3] or near_options(name, list(by_name))
    return f"did you mean {' or '.join(by_name[known] for known in near)}?" if near else _UNKNOWN


def _ending_in(known: Iterable[str], end: str) -> list[str]:
    """Return the names that end in these whole parts, those with the fewest parts first."""
    end = end.removeprefix("--").replace("_", "-")
    found = [name for name in known if f".{name}".endswith(f".{end}")]
    return sorted(found, key=lambda name: name.count("."))


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


def _has_defaults(kind: type[Any]) -> bool:
    """Return whether a class can be made of its defaults alone."""
    if any(f.default is f.default_factory is MISSING for f in fields(kind)):
        return False
    try:
        kind()
    except ValueError:  # Some of its fields must be given, one or the other.
        return False
    return True



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
