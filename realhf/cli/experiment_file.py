"""Loads an experiment file and compiles its experiment for a number of ranks. Free of torch."""

import argparse
import contextlib
import dataclasses
import importlib
import inspect
import json
import os
import re
import sys
import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from realhf.cli.launch import LAUNCHER_PLAN, is_worker
from realhf.cli.plan import TIME_LIMIT, auto_plan, cluster_at_hand
from realhf.cluster import Cluster
from realhf.errors import UserError, naming, shown, user_line
from realhf.experiment import Experiment
from realhf.plan import ExecutionPlan
from realhf.realloc.links import Links
from realhf.runtime.compile.program import Program, compile_program
from realhf.user_input.field_types import check_types, explain_keyword
from realhf.user_input.files import execute_file, read_text
from realhf.user_input.shipped import find_experiment
from realhf.user_input.suggest import did_you_mean

_OUTPUTS = ("out", "output")
"""Options with a file or folder that a command writes."""
_INPUTS = ("plan", "fallback_plan", "resume", "profile", "cluster", "model")
"""Options with a file or folder, or with the name of something shipped or on the hub."""
_PATH_FIELDS = ("path", "model", "tokenizer", "adapter")
"""Fields of experiments with a file or folder, or with a name on the hub."""
_PARSERS = ("argparse", "click", "tyro", "absl", "fire", "docopt", "optparse", "getopt")
"""Libraries that read the command line."""


def _smaller_plan(
    experiment: Experiment, options: Namespace, plan: ExecutionPlan, num_ranks: int
) -> ExecutionPlan:
    """Return a plan for the ranks that are left of a run: a fallback plan, else one made after a restart.

    If there is neither, return `plan`, although it does not fit.
    """
    said = f"realhf: plan {options.plan} needs {plan.num_ranks} ranks, and there are {num_ranks}"
    is_main = os.environ.get("RANK") == "0"
    for name in getattr(options, "fallback_plan", None) or ():
        other = ExecutionPlan.load(name)
        if other.num_ranks <= num_ranks:
            if is_main:
                print(f"{said}: the run uses {name}", file=sys.stderr, flush=True)
            return other
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        return plan
    if is_main:
        print(f"{said}: the run has a new plan", file=sys.stderr, flush=True)

    def make() -> ExecutionPlan:
        cluster = cluster_at_hand(nproc=None, cluster=options.cluster, profile=options.profile)
        if len(cluster.kinds) > 1:
            raise UserError(
                f"{said}: cluster {options.cluster} has several kinds of hosts, and which are left is not "
                "known: give the plan for fewer ranks (--fallback-plan)")
        per_host = min(cluster.devices_per_host, num_ranks)
        left = dataclasses.replace(
            cluster, devices_per_host=per_host, num_hosts=max(1, num_ranks // per_host))
        return auto_plan(experiment, options.experiment, cluster=left, profile=options.profile)

    return _made_once(make, options)


def _made_once(make: Callable[[], ExecutionPlan], options: Namespace) -> ExecutionPlan:
    """Return the plan that rank 0 makes, or make it here if there are no other workers."""
    if not is_worker() or os.environ["WORLD_SIZE"] == "1":
        return make()
    share = importlib.import_module("realhf.cli.plan_exchange").share_plan
    return share(make, search_seconds=TIME_LIMIT, timeout_seconds=options.timeout)


def _auto_plan(experiment: Experiment, options: Namespace, cluster: Cluster) -> ExecutionPlan:
    """Return the plan of --plan auto: that of our launcher, else the one that rank 0 makes."""
    if is_worker() and (made := os.environ.get(LAUNCHER_PLAN)) is not None:
        return ExecutionPlan.from_dict(json.loads(made))
    profile = getattr(options, "profile", None)
    return _made_once(
        lambda: auto_plan(experiment, options.experiment, cluster=cluster, profile=profile), options)


def read_experiment(name: str, options: Namespace, words: list[str]) -> Experiment:
    """Return the experiment of a file; see `load_experiment`.

    If the file changes the working directory, paths in it begin there, and those of the command line where
    the command was started: they become absolute in `options` and in the overrides `words`. Then the
    attribute `started_in` of the options is that directory, otherwise None.
    """
    start = Path.cwd()
    options.started_in = None
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
def _quiet_argparse() -> Iterator[None]:
    """Let parsers of the command line in the user's file print no usage when they end the program."""
    error = argparse.ArgumentParser.error

    def refuse(parser: ArgumentParser, message: str) -> NoReturn:
        raise SystemExit(message)

    argparse.ArgumentParser.error = refuse  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        argparse.ArgumentParser.error = error  # type: ignore[method-assign]


def load_experiment(name: str) -> Experiment:
    """Execute the user's file, or a shipped example, as a module whose name hides no other; return its
    `experiment`."""
    path = find_experiment(name)
    if path.suffix != ".py":
        raise UserError(f"experiment {name}: it must be a Python file, whose name ends in .py")
    try:
        # Standard output is for the command's own answer.
        with contextlib.redirect_stdout(sys.stderr), _quiet_argparse():
            module = execute_file(path, name=f"realhf_experiment_{path.stem}")
    except (Exception, SystemExit) as error:
        what = f"{type(error).__name__}: {error}"
        if isinstance(error, SystemExit) and (parser := _parser_of(error)) is not None:
            what = (
                f"it reads the command line by {parser} ({error}): the words there are realhf's own; fields "
                "are set by `--field value`, other values by environment variables (os.environ)")
        if isinstance(error, TypeError):
            what += explain_keyword(error, importlib.import_module("realhf"))
        if isinstance(error, ImportError) and error.name == "realhf":
            wanted = re.search(r"cannot import name '(\w+)'", str(error))
            what += did_you_mean(wanted[1], importlib.import_module("realhf").__all__) if wanted else ""
        raise UserError(f"experiment {name}{_line(error, path)}: {what}") from error
    experiment = getattr(module, "experiment", None)
    if not isinstance(experiment, Experiment):
        raise UserError(
            f"experiment {name}: it must define `experiment`, an Experiment such as realhf.GRPO(...)"
            f"{_what_it_has(module, path)}")
    _check_torch(name)
    with naming(name):
        _check_attributes(experiment)
        check_types(experiment)
    return experiment


def _parser_of(error: SystemExit) -> str | None:
    """Return the name of the library for command lines that has raised an error; None if none has."""
    paths = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    of_python = Path(argparse.__file__).parent
    libraries = [path for path in paths if path.parent == of_python or "site-packages" in path.parts]
    names = {part.removesuffix(".py") for path in libraries for part in path.parts}
    return next((library for library in _PARSERS if library in names), None)


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


def _line(error: BaseException, path: Path) -> str:
    """Return where in the user's code the error arose, as words that follow the experiment file's name."""
    where = user_line(error)
    if where is None:
        return f" line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
    file, _, number = where.rpartition(":")
    is_here = Path(file).resolve() == path.resolve()
    return f" line {number}" if is_here else f" ({file} line {number})"


def add_plan_option(parser: ArgumentParser) -> None:
    """Declare --plan, which `compile_experiment` reads."""
    text = "plan file or shipped name, or `auto`; default: calls split over all ranks by dp"
    parser.add_argument("--plan", help=text)


def compile_experiment(
    experiment: Experiment, options: Namespace, num_ranks: int | None = None
) -> tuple[Program, int]:
    """Return the program and its number of ranks.

    The number is that of torchrun's workers, else `num_ranks`, else --nproc, else as many as the plan uses.
    Raises UserError if experiment, plan and options do not fit each other.
    """
    if options.nproc is not None and options.nproc < 1:
        raise UserError(f"--nproc is {options.nproc}: it must be at least 1")
    if is_worker():
        num_ranks = int(os.environ["WORLD_SIZE"])
    plan = None
    named = getattr(options, "cluster", None)
    profile = getattr(options, "profile", None)
    cluster = Cluster.load(named) if named is not None else None
    if options.plan == "auto":
        cluster = cluster_at_hand(nproc=options.nproc, cluster=named, profile=profile)
        plan = _auto_plan(experiment, options, cluster)
        num_ranks = num_ranks or options.nproc or cluster.num_devices
    elif options.plan is not None:
        plan = ExecutionPlan.load(options.plan)
        if num_ranks is not None and plan.num_ranks > num_ranks:
            plan = _smaller_plan(experiment, options, plan, num_ranks)
    num_ranks = num_ranks or options.nproc or (plan.num_ranks if plan else 1)
    try:
        program = compile_program(experiment, plan, world_size=num_ranks)
        if cluster is not None and (origin := named or profile) is not None:
            links = Links.of_cluster(cluster, origin=f"{origin}'s")
            peaks = cluster.peak_flops if len(cluster.kinds) == 1 else {}  # A call's depend on its ranks.
            program = dataclasses.replace(program, links=links, peak_flops=peaks)
        return program, num_ranks
    except ValueError as error:
        about_plan = options.plan is not None and str(error).startswith("calls.")
        raise UserError(f"{f'plan {options.plan}' if about_plan else options.experiment}: {error}") from error
    except (Exception, SystemExit) as error:
        if user_line(error) is None:
            raise
        raise UserError(
            f"experiment {options.experiment}{_line(error, Path(options.experiment))}: "
            f"{type(error).__name__}: {error}") from error
