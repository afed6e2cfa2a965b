"""The experiment of a command: its file and its overrides. Free of torch."""

import ast
import contextlib
import dataclasses
import importlib
import inspect
import os
import re
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from realhf.cli.overrides import option_names, override, print_fields
from realhf.errors import UserError, naming, shown, user_line, warn
from realhf.experiment import Experiment
from realhf.runtime.compile.program import leaves, to_json
from realhf.user_input.field_types import check_types, explain_keyword
from realhf.user_input.files import execute_file, read_text
from realhf.user_input.hub import find_model
from realhf.user_input.shipped import find_experiment
from realhf.user_input.suggest import did_you_mean

_OUTPUTS = ("out", "output")
"""Options with a file or folder that a command writes."""
_INPUTS = ("plan", "fallback_plan", "resume", "profile", "cluster", "model")
"""Options with a file or folder, or with the name of something shipped or on the hub."""
_PATH_FIELDS = ("path", "model", "tokenizer", "adapter")
"""Fields of experiments with a file or folder, or with a name on the hub."""


def add_experiment_arguments(parser: ArgumentParser, what: str = "EXP.py") -> None:
    """Declare what every command with an experiment has: its name among the words, --help and --traceback."""
    parser.usage = f"{parser.prog} {what} [options] [--field value ...]"
    text = f"this help; with {what} also every field (EXP.py is a Python file that defines `experiment`)"
    parser.add_argument("-h", "--help", action="store_true", help=text)
    text = "show the traceback of an error, too"
    parser.add_argument("--traceback", action="store_true", help=text)


def read_experiment(options: Namespace, words: list[str], *, weights: bool = False) -> Experiment:
    """Return the experiment of the file that the words name, with its overrides; see `with_overrides`."""
    name = experiment_name(options, words)
    experiment = None if name is None else experiment_of(name, options, words)
    return with_overrides(experiment, options, words, weights=weights)


def experiment_name(options: Namespace, words: list[str]) -> str | None:
    """Take the name of the experiment out of the words; None if there is none, and help is wanted.

    It is the first word, or, if that is an override, the first word that ends in .py.
    """
    is_override = bool(words) and words[0].startswith("-")
    name = next((word for word in words if not is_override or word.endswith(".py")), None)
    if name is None:
        if options.help:
            return None
        raise UserError(f"{options.parser.prog} needs an experiment file: {options.parser.usage}")
    options.experiment = name
    options.started_in = None
    words.remove(name)
    follows = dict(zip(words[1:], words, strict=False))
    if more := [word for word in words if word.endswith(".py") and not follows.get(word, "").startswith("-")]:
        raise UserError(f"there are two experiment files, {name} and {more[0]}: give one")
    return name


def with_overrides(
    experiment: Experiment | None, options: Namespace, words: list[str], *, weights: bool
) -> Experiment:
    """Return the experiment with its overrides, and download what it has on the hub, perhaps `weights`.

    For --help, print all fields and the help instead, and end the command.
    """
    if options.help or experiment is None:
        if experiment is not None:
            print_fields(experiment)
        options.parser.print_help()
        raise SystemExit(0)
    changed = override(experiment, words, also=option_names(options.parser))
    _fetch_models(changed, weights=weights)
    return changed


def _fetch_models(experiment: Experiment, *, weights: bool) -> None:
    """Download the models, adapters and tokenizers with names of the hub that are not in its cache.

    Without `weights`, download only configs and tokenizers. Raises UserError, which names the field.
    """
    try:
        roles = experiment.roles()
        names = experiment.hub_names()
    except (Exception, SystemExit):  # Compiling the experiment raises it again, with a better sentence.
        return
    drawn = {f"{name}.model" for name, role in roles.items() if role.random_init}
    for field, name in names.items():
        with naming(field):
            find_model(name, weights=weights and field != "tokenizer" and field not in drawn)


def experiment_of(name: str, options: Namespace, words: list[str]) -> Experiment:
    """Return the experiment of a file; see `load_experiment`.

    If the file changes the working directory, paths in it begin there, and those of the command line where
    the command was started: they become absolute in `options` and in the overrides `words`. Then the
    attribute `started_in` of the options is that directory.
    """
    start = Path.cwd()
    experiment = load_experiment(name)
    if Path.cwd() == start:
        return experiment
    options.started_in = str(start)
    for option in _OUTPUTS:
        if (value := getattr(options, option, None)) is not None:
            setattr(options, option, str(start / value))
    for option in _INPUTS:
        value = getattr(options, option, None)
        if isinstance(value, list):
            setattr(options, option, [_from(start, each) for each in value])
        elif value:
            setattr(options, option, _from(start, value))
    for i, word in enumerate(words):
        flag, equals, value = word.rpartition("=")
        if not equals:
            flag = words[i - 1] if i else ""
            value = word
        if flag.startswith("--") and flag.lstrip("-").rpartition(".")[2] in _PATH_FIELDS:
            words[i] = f"{flag}={_from(start, value)}" if equals else _from(start, value)
    return experiment


def _from(start: Path, name: str) -> str:
    """Return the absolute path of a file or folder below `start`, and other names as they are."""
    return str(start / name) if (start / name).exists() else name


@contextlib.contextmanager
def _without_arguments(path: Path) -> Iterator[None]:
    """Let a file that reads the command line find only its own name there: the words are for realhf."""
    argv = sys.argv
    sys.argv = [str(path)]
    try:
        yield
    finally:
        sys.argv = argv


def load_experiment(name: str) -> Experiment:
    """Execute the user's file, or a shipped example, as a module whose name hides no other; return its
    `experiment`."""
    path = find_experiment(name)
    if path.suffix != ".py":
        raise UserError(f"experiment {name}: it must be a Python file, whose name ends in .py")
    path = path.absolute()  # The file may change the working directory.
    try:
        # Standard output is for the command's own answer.
        with contextlib.redirect_stdout(sys.stderr), _without_arguments(path):
            module = execute_file(path, name=f"realhf_experiment_{path.stem}")
    except (Exception, SystemExit) as error:
        what = f"{type(error).__name__}: {error}"
        if isinstance(error, SystemExit):
            what += (
                "; the file gets no arguments of the command line: fields are set by `--field value`, other "
                "values by environment variables (os.environ)")
        if isinstance(error, dataclasses.FrozenInstanceError):
            what += (
                "; settings such as sampling, loss and dataset never change: give new ones, for example "
                "experiment.sampling = dataclasses.replace(experiment.sampling, temperature=0.7)"
                f"{_near_field(str(error))}")
        if isinstance(error, TypeError):
            what += explain_keyword(error, importlib.import_module("realhf"))
        if isinstance(error, ImportError) and error.name == "realhf":
            wanted = re.search(r"cannot import name '(\w+)'", str(error))
            what += did_you_mean(wanted[1], importlib.import_module("realhf").__all__) if wanted else ""
        elif isinstance(error, ImportError) and (hidden := _hidden_file(path, error.name)) is not None:
            what += f"; {hidden}"
        raise UserError(f"experiment {name}{line_of(error, path)}: {what}") from error
    experiment = getattr(module, "experiment", None)
    if not isinstance(experiment, Experiment):
        raise UserError(
            f"experiment {name}: it must define `experiment`, an Experiment such as realhf.GRPO(...)"
            f"{_what_it_has(module, path)}")
    _check_torch(name)
    with naming(name):
        _check_attributes(experiment)
        check_types(experiment)
    if os.environ.get("RANK", "0") == "0":
        imported = {name.partition(".")[0] for name in _imports(path)}
        hidden_files = [_hidden_file(path, name) for name in sorted(imported)]
        for sentence in (*filter(None, hidden_files), *_other_files(experiment, path)):
            warn(sentence)
    return experiment


def _near_field(sentence: str) -> str:
    """Return which field of the settings was probably meant, if the sentence quotes a misspelt one."""
    package = importlib.import_module("realhf")
    kinds = [kind for name in package.__all__ if dataclasses.is_dataclass(kind := getattr(package, name))]
    known = {field.name for kind in kinds for field in dataclasses.fields(kind)}
    named = re.search(r"'(\w+)'", sentence)
    return did_you_mean(named[1], sorted(known)) if named and named[1] not in known else ""


def _imports(path: Path) -> Iterator[str]:
    """Yield the names of the modules that a file imports at its top."""
    for node in ast.parse(read_text(path)).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            yield node.module


def _hidden_file(path: Path, module: str | None) -> str | None:
    """Return a sentence if a file beside the experiment is hidden by another module of its name."""
    top = (module or "").partition(".")[0]
    beside = path.parent / f"{top}.py"
    loaded = getattr(sys.modules.get(top), "__file__", None)
    if not top or loaded is None or not beside.is_file() or Path(loaded).resolve() == beside.resolve():
        return None
    return (
        f"{beside} is not what `import {top}` finds: the installed module {loaded} hides it; give the "
        "file another name")


def _other_files(experiment: Experiment, path: Path) -> Iterator[str]:
    """Yield a sentence for each relative path that names one file here and another beside the experiment."""
    if path.parent.resolve() == Path.cwd():
        return
    for field, value in leaves(to_json(experiment)):
        is_path = field.rpartition(".")[2] in _PATH_FIELDS and isinstance(value, str)
        if not is_path or not value or Path(value).is_absolute():
            continue
        here, beside = Path(value), path.parent / value
        if here.exists() and beside.exists() and here.resolve() != beside.resolve():
            yield (
                f"{field} {value} is {here.resolve()}, below the current directory, and {beside.resolve()}, "
                "beside the experiment, is not read: Path(__file__).parent / ... names the latter")


def _what_it_has(module: ModuleType, path: Path) -> str:
    """Return what a file has in the place of an experiment, as words that follow a sentence."""
    if hasattr(module, "experiment"):
        found = module.experiment
        if inspect.isroutine(found):
            return "; `experiment` is a function: define what it returns, `experiment = ...`"
        if isinstance(found, type):
            return "; `experiment` is a class: define an object of it, `experiment = ...(...)`"
        return f"; `experiment` is of type {type(found).__name__}"
    others = [name for name, value in vars(module).items() if isinstance(value, Experiment)]
    if others:
        return f"; `{others[0]}` is one: call it `experiment`"
    if re.search(r"""^if __name__ == ["']__main__["']""", read_text(path), re.MULTILINE):
        return "; what stands below `if __name__ == \"__main__\"` is not executed: define it outside"
    return ""


def _check_torch(name: str) -> None:
    """Raise UserError if an experiment file has changed a setting of torch on which all of a run depends."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    rules = {
        "set_default_dtype": (torch.get_default_dtype(), torch.float32, "Role(dtype=...) is that of a model"),
        "set_default_device": (str(torch.get_default_device()), "cpu", "a plan says where calls run"),
        "set_grad_enabled": (torch.is_grad_enabled(), True, "use `with torch.no_grad()` in your functions"),
    }
    for function, (value, legal, instead) in rules.items():
        if value != legal:
            raise UserError(
                f"experiment {name}: it has called torch.{function}({value}), which changes the whole "
                f"process, and must leave {legal}: {instead}")


def _check_attributes(experiment: Experiment) -> None:
    """Raise UserError if an attribute was surely meant to be a field, and is none.

    It is a misspelt one that was set later, or one in the body of a subclass that is no dataclass.
    """
    names = [field.name for field in dataclasses.fields(experiment)]
    own = type(experiment)
    for attribute in vars(experiment):
        is_field = attribute in names or attribute.startswith("_") or hasattr(own, attribute)
        near = did_you_mean(attribute, names)
        if not is_field and (near or own.__module__.startswith("realhf.")):
            raise UserError(f"experiment.{attribute} is set, and {own.__name__} has no such field{near}")
    for cls in own.__mro__:
        if cls.__module__.startswith("realhf."):
            break
        annotated = vars(cls).get("__annotations__", {}) if "__dataclass_fields__" in vars(cls) else {}
        for attribute, value in vars(cls).items():
            if attribute in names and attribute not in annotated and not hasattr(value, "__set__"):
                raise UserError(
                    f"{cls.__name__}.{attribute} has no effect: the field {attribute} of the experiment is "
                    f"{shown(getattr(experiment, attribute))}; give it to the constructor, or make the class "
                    f"a dataclass with `{attribute}: TYPE = ...`")


def line_of(error: BaseException, path: Path) -> str:
    """Return where in the user's code the error arose, as words that follow the experiment file's name."""
    where = user_line(error)
    if where is None:
        return f" line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
    file, _, number = where.rpartition(":")
    is_here = Path(file).resolve() == path.resolve()
    return f" line {number}" if is_here else f" ({file} line {number})"
