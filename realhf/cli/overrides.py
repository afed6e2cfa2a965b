"""Overrides: options of the command line that change fields of an experiment. Free of torch."""

import contextlib
import dataclasses
import difflib
import io
import re
import textwrap
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from itertools import pairwise
from typing import Any

import tyro

from realhf.errors import UserError
from realhf.experiment import Experiment

_KINDS = {int: "a whole number", float: "a number", type(None): "None"}
_ELSEWHERE = {
    **dict.fromkeys(("learning-rate", "lr"), "optimizer.lr"),
    **dict.fromkeys(("lr-scheduler-type", "lr-scheduler"), "optimizer.schedule"),
    **dict.fromkeys(("max-grad-norm", "grad-clip", "clip-grad"), "optimizer.max-grad-norm"),
    **dict.fromkeys(("num-generations", "rollout-n"), "group-size"),
    **dict.fromkeys(("per-device-train-batch-size", "train-batch-size"), "batch-size"),
    **dict.fromkeys(("max-completion-length", "max-response-length"), "sampling.max-new-tokens"),
    **dict.fromkeys(("max-prompt-length",), "dataset.max-prompt-tokens"),
    **dict.fromkeys(("kl-loss-coef", "beta"), "kl-coef"),
    **dict.fromkeys(("max-steps", "total-training-steps"), "steps"),
    **dict.fromkeys(("num-iterations", "ppo-epochs"), "epochs"),
    **dict.fromkeys(("ppo-mini-batch-size",), "minibatch-size"),
    **dict.fromkeys(("save-steps", "save-freq"), "checkpoint-every"),
    **dict.fromkeys(("eval-steps", "test-freq"), "eval-every"),
    **dict.fromkeys(("logging-steps",), "log-every"),
    **dict.fromkeys(("output-dir", "default-local-dir"), "out"),
    **dict.fromkeys(("torch-dtype", "model-dtype"), "actor.dtype"),
}
"""What an option is called in TRL or verl -> the end of our option's name."""
_TYRO = (tyro.conf.AvoidSubcommands,)  # Makes optional parts that are set overridable like other fields.


def print_fields(experiment: Experiment) -> None:
    """Print every override with its value and meaning; of parts that are not set, only the names."""
    with contextlib.suppress(SystemExit):
        tyro.cli(type(experiment), default=experiment, args=["--help"], prog="overrides:", description="",
                 config=_TYRO)
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
    for word in words:
        if word.startswith("--"):
            experiment = _with_part(experiment, _path(word))
    options = _options(experiment)
    for word, following in pairwise([*words, "--"]):
        _check_switch(options, word, following)
    complaints = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaints), contextlib.redirect_stdout(complaints):
            changed, unknown = tyro.cli(type(experiment), default=experiment, args=list(words),
                                        return_unknown_args=True, config=_TYRO)
    except (SystemExit, ValueError) as error:
        complaint = str(error)
        if isinstance(error, SystemExit):
            complaint = _sentence(complaints.getvalue())
            complaint = _no_number(options, complaint) or complaint
        if "fixed argument" in complaint:  # The parser's words for options that it does not know.
            others = [word for word in words if word.startswith("--") and _option(word) not in options]
            _refuse_unknown(others, options, also)
        raise UserError(f"overrides {' '.join(words)!r}: {complaint}") from error
    _refuse_unknown(unknown, options, also)
    return changed


def _refuse_unknown(unknown: Sequence[str], options: Mapping[str, Any], also: Sequence[str]) -> None:
    """Raise UserError, with a suggestion, if there are unknown words."""
    if not unknown:
        return
    if _option(unknown[0]) in options:
        raise UserError(f"override {unknown[0]!r}: this field can only be changed in the experiment file")
    near = _near(unknown[0], [*options, *also])
    hint = f"did you mean {' or '.join(near)}?" if near else "--help behind the experiment lists them all"
    raise UserError(f"unknown override {unknown[0]!r}: {hint}")


def _option(word: str) -> str:
    """Return the option that a word of the command line names, without its value and with hyphens."""
    return "--" + ".".join(_path(word)).replace("_", "-")


def _near(word: str, options: Sequence[str]) -> list[str]:
    """Return the options that were probably meant, by their spelling or by what other libraries call them."""
    name = word.split("=")[0].replace("_", "-")
    suffix = _ELSEWHERE.get(name.rpartition(".")[2].removeprefix("--"))
    if suffix is not None and (found := [option for option in options if _ends_in(option, suffix)]):
        return found[:3]
    return difflib.get_close_matches(name, options, n=3, cutoff=0.5)


def _ends_in(option: str, suffix: str) -> bool:
    return f".{option.removeprefix('--')}".endswith(f".{suffix}")


def _path(word: str) -> list[str]:
    return word[2:].split("=")[0].replace("-", "_").split(".")


def _options(config: Any, prefix: str = "", *, unset: bool = True) -> dict[str, tuple[str, Any]]:
    """Return the dotted name and the type of the field that each override changes.

    Optional parts that are not set are included if `unset`.
    """
    found: dict[str, tuple[str, Any]] = {}
    if isinstance(config, Mapping):  # Several sets of held-out rows by name.
        for key, part in config.items():
            found |= _options(part, f"{prefix}{key}.", unset=unset)
        return found
    for field in fields(config):
        value = getattr(config, field.name)
        if (kind := _unset_part(config, field.name)) is not None:
            if not unset or not _has_defaults(kind):
                continue
            value = kind()
        name = f"{prefix}{field.name}"
        if isinstance(value, Mapping) and value and all(map(_is_config, value.values())) or _is_config(value):
            found |= _options(value, f"{name}.", unset=unset)
        else:
            hint = typing.get_type_hints(type(config))[field.name]
            names = _switches(name) if hint is bool else [f"--{name}".replace("_", "-")]
            found |= dict.fromkeys(names, (name, hint))
    return found


def _switches(name: str) -> list[str]:
    """Return the options that switch a field on and off."""
    *path, last = name.replace("_", "-").split(".")
    return [f"--{'.'.join([*path, switch])}" for switch in (last, f"no-{last}")]


def _check_switch(options: Mapping[str, tuple[str, Any]], word: str, following: str) -> None:
    """Raise UserError if a field that is true or false is given a value."""
    name, hint = options.get(word.split("=")[0].replace("_", "-"), ("", None))
    if hint is bool and ("=" in word or not following.startswith("--")):
        given = word if "=" in word else f"{word} {following}"
        legal = " and ".join(_switches(name))
        raise UserError(f"override {given!r}: {name} takes no value: legal are {legal}")


def _with_part(value: Any, path: Sequence[str]) -> Any:
    """Return the config with the unset optional parts on a path, such as `actor.lora`, at their defaults."""
    name, *rest = path
    if isinstance(value, Mapping) and name in value:
        made = _with_part(value[name], rest) if rest else value[name]
        return value if made is value[name] else {**value, name: made}
    if not _is_config(value) or not hasattr(value, name):
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


def _is_config(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type)


def _has_defaults(kind: Any) -> bool:
    return not any(f.default is f.default_factory is MISSING for f in fields(kind))


def _sentence(complaint: str) -> str:
    """Return on one line the first paragraph below the title of tyro's error box."""
    parts = [" ".join(part.split()) for part in re.split(r"[─-]{3,}", re.sub(r"[│╭╮╰╯]", " ", complaint))]
    return [part for part in parts if part][:2][-1]


def _no_number(options: Mapping[str, tuple[str, Any]], complaint: str) -> str:
    """Return a plainer sentence than the parser's if a field should have been a number, else nothing."""
    found = re.match(r"Error parsing (--[\w.-]+):", complaint)
    if found is None or found[1] not in options:
        return ""
    _, hint = options[found[1]]
    is_union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    names = [_KINDS.get(kind, "") for kind in (typing.get_args(hint) if is_union else (hint,))]
    return f"{found[1]} must be {' or '.join(names)}" if all(names) else ""
