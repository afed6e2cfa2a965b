"""Finds the files that realhf ships (plans, clusters, model configs, examples) by short name."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml

from realhf.errors import UserError, shown
from realhf.user_input.files import read_text
from realhf.user_input.hub import find_model, parse_hub_name
from realhf.user_input.suggest import did_you_mean, near_path

_KINDS = {"plans": "plan", "plans/clusters": "cluster"}
"""Kinds of YAML files, and the option that takes them."""
_PACKAGE = Path(__file__).parent.parent
_MAX_YAML_BYTES = 1 << 18
_MAX_DIGITS = 300


def shipped_dir(kind: str) -> Path:
    """Return the directory, in the wheel or the clone, of a kind of files such as `plans` or `models`."""
    installed = _PACKAGE / "shipped" / kind
    return installed if installed.is_dir() else _PACKAGE.parent / kind


def resolve(name: str, *, kind: str, suffix: str) -> Path:
    """Return the path of a file: `name` itself if it exists, else the shipped `kind/name.suffix`.

    A name of `models` may also be that of a model on the hub, whose small files are then downloaded. Raises a
    UserError that lists the shipped names if there is nothing of this name.
    """
    if (path := Path(name)).exists():
        return path
    directory = shipped_dir(kind)
    for candidate in (directory / f"{name}{suffix}", directory / name):
        if candidate.is_file():
            return candidate
    if kind == "models" and parse_hub_name(name) is not None:
        return find_model(name)
    shipped = sorted(p.name.removesuffix(suffix) for p in directory.glob(f"*{suffix}"))
    raise UserError(f"{name!r} is neither a path nor a shipped name in {kind}{_instead(name, kind, shipped)}")


def _instead(name: str, kind: str, shipped: Sequence[str]) -> str:
    """Return in words what a name that is not found probably means, or else the shipped names."""
    if (path := near_path(Path(name))) is not None:
        return f" (did you mean {path}?)"
    if meant := did_you_mean(name.lower(), shipped):
        hub = "; a model of the hub is named organisation/name" if kind == "models" else ""
        return f"{meant}{hub}"
    others = [other for other in _KINDS if other != kind and (shipped_dir(other) / f"{name}.yaml").is_file()]
    if others:
        return f": it is one in {others[0]}; --{_KINDS[others[0]]} takes those"
    return f"; shipped are: {', '.join(shipped) or 'none'}"


def find_experiment(name: str) -> Path:
    """Return `name` if it is a file, else the shipped example of that name, such as `grpo`.

    `examples/grpo.py` names the same example as `grpo`, so that commands of the documentation work in any
    directory. Raises a UserError that lists the shipped examples if there is neither.
    """
    path = Path(name)
    if path.is_file():
        return path
    directory = shipped_dir("examples")
    short = path.name.removesuffix(".py")
    if str(path.parent) in (".", "examples") and (example := directory / f"{short}.py").is_file():
        return example
    if path.is_dir():
        there = ", ".join(str(file) for file in _experiments(path)) or "it has none"
        raise UserError(f"experiment {name!r} is a directory: name the file of an experiment ({there})")
    for near in (path.with_name(f"{path.name}.py"), near_path(path, suffixes=[".py"])):
        if near is not None and near.is_file():
            raise UserError(f"experiment {name!r}: there is no such file (did you mean {near}?)")
    examples = [file.stem for file in _experiments(directory)]
    shipped = f", nor a shipped example of that name: these are {', '.join(examples)}" if examples else ""
    raise UserError(f"experiment {name!r}: there is no such file{did_you_mean(name, examples)}{shipped}")


def _experiments(directory: Path) -> list[Path]:
    """Return the Python files of a directory that define `experiment`."""
    files = sorted(directory.glob("*.py"))
    return [file for file in files if re.search(r"(?m)^experiment\b", read_text(file))]


def load_yaml(name: str, build: Callable[[Any], Any], *, kind: str | None = None, what: str) -> Any:
    """Return `build(document)` of a YAML file, which may be a shipped one if `kind` is given.

    Errors become a UserError that names the file.
    """
    path = Path(name) if kind is None else resolve(name, kind=kind, suffix=".yaml")
    if path.is_dir():
        raise UserError(f"{what} {path} is a directory: name a YAML file")
    text = read_text(path, most=_MAX_YAML_BYTES, what=what)
    try:
        return build(yaml.load(text, _Loader))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        problem = ", ".join(filter(None, (error.context, error.problem)))
        where = f" line {mark.line + 1} column {mark.column + 1}" if mark is not None else ""
        raise UserError(f"{what} {path}{where} is not YAML: {problem}") from error
    except RecursionError as error:
        raise UserError(f"{what} {path} is nested too deeply") from error
    except (ValueError, yaml.YAMLError) as error:
        raise UserError(f"{what} {path}: {' '.join(str(error).split())}") from error


def dump_yaml(document: Any, **style: Any) -> str:
    """Return a document as `load_yaml` reads it: what occurs twice in it is written twice."""
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, **style)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


class _Loader(yaml.SafeLoader):
    """A YAML loader for plain documents, which are as large in memory as they are in the file.

    It refuses aliases, merge keys and tags, a field that is given twice, and numbers without end.
    """

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            self._refuse("anchors (&) and aliases (*) are not read: write the value out", event.start_mark)
        if event.tag is not None:
            self._refuse("tags (!) are not read: leave it out", event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        names = set[str]()
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                self._refuse("merge keys (<<) are not read: write the fields out", key.start_mark)
            if isinstance(key, yaml.ScalarNode):
                if key.value in names:
                    self._refuse(f"{shown(key.value)} is given twice", key.start_mark)
                names.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_scalar(self, node: Any) -> Any:
        is_number = node.tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
        if is_number and len(node.value) > _MAX_DIGITS:
            self._refuse(f"a number of {len(node.value)} characters is not read", node.start_mark)
        return super().construct_scalar(node)

    def _refuse(self, problem: str, mark: Any) -> NoReturn:
        raise yaml.constructor.ConstructorError(None, None, problem, mark)
