"""Imported: an experiment made of another library's settings, and what has become of each of these."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any

from realhf.algorithms.advantages import AdvantageConfig
from realhf.algorithms.kl import RewardKL
from realhf.algorithms.ppo import ValueLoss
from realhf.calls import OptimizerConfig, SamplingConfig
from realhf.data.dataset import DatasetConfig
from realhf.errors import cut
from realhf.experiment import Evaluation, Experiment, Role
from realhf.models.lora import LoraConfig
from realhf.user_input.other_libraries import ours

_ROLES = ("actor", "critic", "ref", "reward")
_CLASSES: dict[str, type] = {
    **dict.fromkeys(_ROLES, Role), "optimizer": OptimizerConfig,
    "lora": LoraConfig, "dataset": DatasetConfig, "eval_dataset": Evaluation, "sampling": SamplingConfig,
    "reward_kl": RewardKL, "advantage": AdvantageConfig, "value_loss": ValueLoss}
"""Last part of a field's name -> the class of the settings that it has; `loss` is that of the algorithm."""
_WIDTH = 100


@dataclass(frozen=True)
class Code:
    """An expression of Python, the public names of realhf in it, and the statements before it."""

    text: str
    names: tuple[str, ...] = ()
    statements: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return self.text


@dataclass(frozen=True)
class UnknownValue:
    """A value that is not read from the other library's script: its expression, and why not."""

    text: str
    why: str = "its value is known only when the script runs"

    def __repr__(self) -> str:
        return self.text


class Imported:
    """The settings that somebody has given another library, and the fields of an experiment that follow.

    Each name that is given is carried, or explained, or left; `text` tells of all of them.
    """

    def __init__(self, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self._given = given
        self._defaults = defaults
        self.kind: type[Experiment] = Experiment
        self.values: dict[str, Any] = {}
        """Dotted name of a field of the experiment -> its value."""
        self.prelude: list[str] = []
        """Statements of the file before the experiment."""
        self.command: list[str] = []
        """Options of `realhf run` that belong to the run."""
        self._written: set[str] = set()
        """Fields that are written even if they are our defaults."""
        self._told: set[str] = set()
        self._carried: list[str] = []
        self._explained: list[str] = []
        self._left: list[str] = []
        self._defaulted: list[str] = []

    def __getitem__(self, name: str) -> Any:
        """Return the value of a setting of the other library, by default its own default."""
        value = self._given.get(name, self._defaults.get(name))
        return self._defaults.get(name) if isinstance(value, UnknownValue) else value

    @property
    def names(self) -> list[str]:
        """The names of all settings that are given."""
        return list(self._given)

    def has(self, *names: str) -> bool:
        """Return whether one of these settings is given, with a value that is known."""
        return any(name in self._given and not isinstance(self._given[name], UnknownValue) for name in names)

    def carry(self, field: str, value: Any, *names: str, note: str = "") -> None:
        """Set a field of the experiment to what follows from these settings; `note` tells what differs."""
        if value is None:
            return
        self.values[field] = value
        if isinstance(value, Code):
            self.prelude += [each for each in value.statements if each not in self.prelude]
        given = [name for name in names if self.has(name)]
        line = f"{', '.join(map(self._shown, given or names))} -> {field} = {cut(_literal(value))}"
        if given:
            self._written.add(field)
            (self._explained if note else self._carried).append(line + (f": {note}" if note else ""))
            self._told.update(given)
        elif names:
            self._defaulted.append(line)

    def explain(self, note: str, *names: str) -> None:
        """Say what there is here in the place of settings; those that are not given are not named."""
        self._tell(self._explained, note, names)

    def note(self, sentence: str) -> None:
        """Say what is not carried over though no setting names it."""
        self._left.append(sentence)

    def leave(self, note: str, *names: str) -> None:
        """Say that settings are not carried over, and why."""
        self._tell(self._left, note, names)

    def _tell(self, lines: list[str], note: str, names: Sequence[str]) -> None:
        given = [name for name in names if self.has(name) and name not in self._told]
        if given:
            lines.append(f"{', '.join(map(self._shown, given))}: {note}")
            self._told.update(given)

    def _shown(self, name: str) -> str:
        value = self._given.get(name, self._defaults.get(name))
        return name if isinstance(value, Mapping) and "path" in value else f"{name}={cut(_literal(value))}"

    def _leave_rest(self) -> None:
        """Name each setting of which nothing has been said."""
        for name in self._given:
            value = self._given[name]
            if isinstance(value, UnknownValue) and name not in self._told:
                self._left.append(f"{name}={value}: {value.why}")
            elif name not in self._told:
                answer = ours(name)
                instead = "" if answer is None else answer.instead
                self._left.append(f"{self._shown(name)}: {instead or 'no counterpart is known'}")
        self._left.sort()

    def text(self, *, source: str, command: str) -> str:
        """Return the experiment file; `source` is what it was made from, and `command` runs it."""
        self._leave_rest()
        kind = self.kind()
        experiment, names = self._object(self.kind.__name__, self.kind, kind, self._tree(), prefix="")
        sections = [
            ("Carried over", self._carried), ("Has another form or meaning here", self._explained),
            ("Not carried over", self._left),
            ("Not given: the other library's defaults, where they are not ours", self._differing(kind))]
        comments = [*_comment(f"Imported by `realhf import` from {source}", indent=1), f"#     {command}"]
        for title, lines in sections:
            if lines:
                comments += ["#", f"# {title}:"]
            for line in lines:
                comments += _comment(line, indent=3)
        imported = sorted(dict.fromkeys(names), key=lambda name: (name != name.upper(), name))
        imports = f"from realhf import {', '.join(imported)}"
        if len(imports) > _WIDTH:
            imports = "\n".join(["from realhf import (", *(f"    {name}," for name in imported), ")"])
        lines = [each for each in self.prelude if each.startswith(("import ", "from "))]
        blocks = [each for each in self.prelude if each not in lines]
        body = "\n\n\n".join(["\n".join([*sorted(lines), imports]), *blocks, f"experiment = {experiment}"])
        return "\n".join([*comments, "", body, ""])

    def _differing(self, kind: Experiment) -> list[str]:
        """Return the lines about defaults of the other library that are written, as they are not ours."""
        fields_of = ((line, line.partition(" -> ")[2].partition(" = ")[0]) for line in self._defaulted)
        return [line for line, field in fields_of if self._is_written(field, kind)]

    def _is_written(self, field: str, kind: Experiment) -> bool:
        """Return whether a field is in the file: it was given, or is not the default of its class."""
        *holders, name = field.split(".")
        holder = self._class_of(holders[-1], kind) if holders else type(kind)
        return field in self._written or _default_of(holder, name) != self.values[field]

    def _class_of(self, name: str, kind: Experiment) -> type:
        return type(getattr(kind, "loss", None)) if name == "loss" else _CLASSES[name]

    def _tree(self) -> dict[str, Any]:
        """Return the values as nested dicts."""
        tree: dict[str, Any] = {}
        for field, value in self.values.items():
            *holders, name = field.split(".")
            inner = tree
            for holder in holders:
                inner = inner.setdefault(holder, {})
            inner[name] = value
        return tree

    def _object(
        self, name: str, cls: type, kind: Experiment, tree: Mapping[str, Any], *, prefix: str, indent: int = 0
    ) -> tuple[str, list[str]]:
        """Return the call that makes an object, and the public names in it."""
        names = [name]
        parts = []
        order = [*_ROLES, *(field.name for field in fields(cls))]
        for field in sorted(tree, key=order.index):
            value = tree[field]
            if isinstance(value, dict) and field not in _PLAIN_DICTS:
                inner = self._class_of(field, kind)
                shown, inside = self._object(
                    inner.__name__, inner, kind, value, prefix=f"{prefix}{field}.", indent=indent + 4)
                is_default = shown.endswith("()") and _default_of(cls, field) == inner()
                if is_default and not (cls is Role and field == "optimizer"):
                    continue
                names += inside
            elif not self._is_written(f"{prefix}{field}", kind):
                continue
            else:
                shown = _literal(value)
                names += value.names if isinstance(value, Code) else ()
            parts.append(f"{field}={shown}")
        line = f"{name}({', '.join(parts)})"
        if indent + len(line) <= _WIDTH and "\n" not in line:
            return line, names
        inner_lines = "".join(f"{' ' * (indent + 4)}{part},\n" for part in parts)
        return f"{name}(\n{inner_lines}{' ' * indent})", names


_PLAIN_DICTS = ("chat_template_kwargs",)
"""Fields whose values are dicts themselves."""


def _default_of(cls: type, name: str) -> Any:
    """Return the default of a field of a class; a value that equals no other one if it has none."""
    field = {each.name: each for each in fields(cls)}[name]
    if field.default is not MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not MISSING else MISSING


def _comment(text: str, *, indent: int) -> list[str]:
    """Return a text as the lines of a comment."""
    return textwrap.wrap(
        text, _WIDTH, initial_indent=f"#{' ' * indent}", subsequent_indent=f"#{' ' * (indent + 4)}",
        break_long_words=False, break_on_hyphens=False)


def _literal(value: Any) -> str:
    """Return a value as code, texts in double quotes."""
    if isinstance(value, str) and value.isprintable() and not {'"', "\\"} & set(value):
        return f'"{value}"'
    if type(value) is list:
        return f"[{', '.join(map(_literal, value))}]"
    if type(value) is tuple:
        return f"({', '.join(map(_literal, value))}{',' * (len(value) == 1)})"
    return repr(value)


def number(value: Any) -> Any:
    """Return the number, the truth value or None that a text stands for; other values as they are.

    YAML reads 1e-6 as text, and words of a command line are text.
    """
    if not isinstance(value, str):
        return value
    text = value.strip()
    known = {"true": True, "false": False, "none": None, "null": None}
    if text.lower() in known:
        return known[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return value
