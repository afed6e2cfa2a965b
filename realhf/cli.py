"""The command line. Free of torch; commands that need it are loaded when they are called."""

import argparse
import contextlib
import difflib
import importlib
import importlib.util
import io
import json
import os
import re
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, NoReturn

import tyro

from realhf.cluster import Cluster
from realhf.errors import UserError
from realhf.experiment import Experiment
from realhf.log import setup_logging
from realhf.plan import ExecutionPlan
from realhf.runtime.check import Program, compile_program

EXIT_DONE, EXIT_FAILED, EXIT_USER = 0, 1, 2
_TYRO = (tyro.conf.AvoidSubcommands,)
"""Optional parts of an experiment that are set can be overridden like any other field."""


@dataclass(frozen=True)
class Job:
    """A run as the command line describes it. `argv` repeats it for the workers."""

    program: Program
    num_ranks: int
    out: Path | None
    argv: tuple[str, ...]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit code: 0 done, 2 wrong input (one sentence on standard error), 1
    anything else.
    """
    setup_logging()
    argv = sys.argv[1:] if argv is None else argv
    try:
        options, overrides = _parser().parse_known_args(argv)
        return options.command(options, overrides, argv)
    except UserError as error:
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"realhf: {error}", file=sys.stderr)
        return EXIT_USER
    except KeyboardInterrupt:
        print("realhf: ended by SIGINT", file=sys.stderr)
        return EXIT_FAILED


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="realhf", description=importlib.import_module("realhf").__doc__, allow_abbrev=False
    )
    commands = parser.add_subparsers(title="commands", required=True)
    run = _add_command(
        commands, "run", _run, "train: run an experiment on local workers, or as one worker under torchrun"
    )
    run.add_argument("--nproc", type=int, help="local workers; default: as many as the plan uses, else 1")
    run.add_argument("--out", help="run directory; default: a new one below runs/")
    check = _add_command(
        commands, "check", _check, "find what is wrong with an experiment and a plan, without running it"
    )
    check.add_argument(
        "--nproc", type=int, help="number of ranks to check against; default: as many as the plan uses"
    )
    check.add_argument(
        "--cluster", help="cluster file or shipped name, whose number of devices is checked against"
    )
    check.add_argument("--json", action="store_true", help="print one JSON document")
    return parser


def _add_command(commands: Any, name: str, function: Any, text: str) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=text, description=text, add_help=False, allow_abbrev=False)
    command.set_defaults(command=function, parser=command)
    command.add_argument(
        "experiment", nargs="?", metavar="EXP.py", help="Python file that defines `experiment`"
    )
    command.add_argument(
        "--plan", help="plan file or shipped name; default: every call split over all ranks by dp"
    )
    command.add_argument(
        "-h",
        "--help",
        action="store_true",
        help="this help; with EXP.py also every field that can be overridden",
    )
    return command


def _run(options: argparse.Namespace, overrides: list[str], argv: Sequence[str]) -> int:
    if (experiment := _experiment(options, overrides)) is None:
        return EXIT_DONE
    is_worker = "TORCHELASTIC_RUN_ID" in os.environ
    if is_worker and options.nproc is not None and options.nproc != int(os.environ["LOCAL_WORLD_SIZE"]):
        raise UserError(
            f"--nproc {options.nproc}: under torchrun the number of workers comes from torchrun, leave it out"
        )
    plan = _plan(options)
    num_ranks = int(os.environ["WORLD_SIZE"]) if is_worker else _num_ranks(options, plan)
    program = _compile(experiment, plan, options, num_ranks)
    out = None if is_worker and options.out is None else _run_directory(options)
    words = list(argv) if options.out is not None or out is None else [*argv, "--out", str(out)]
    job = Job(program, num_ranks, out, tuple(words))
    if is_worker or num_ranks == 1:
        return importlib.import_module("realhf.worker").work(job)
    return importlib.import_module("realhf.launch").launch(job)


def _check(options: argparse.Namespace, overrides: list[str], argv: Sequence[str]) -> int:
    if (experiment := _experiment(options, overrides)) is None:
        return EXIT_DONE
    plan = _plan(options)
    num_ranks = _num_ranks(options, plan)
    if options.cluster is not None and options.nproc is None:
        num_ranks = _user(Cluster.load, options.cluster).num_devices
    program = _compile(experiment, plan, options, num_ranks)
    if options.json:
        homes = {role: str(layout) for role, layout in program.homes.items()}
        print(json.dumps({"ranks": num_ranks, "calls": program.plan.to_dict()["calls"], "homes": homes}))
        return EXIT_DONE
    print(f"{options.experiment} is sound on {num_ranks} ranks:")
    for call in program.graph.order:
        print(f"  {call.name:<18} {call.kind:<10} {call.role or '-':<8} {program.plan[call.name].layout}")
    return EXIT_DONE


def _experiment(options: argparse.Namespace, overrides: list[str]) -> Experiment | None:
    """The experiment with its overrides; None when help was asked for and given."""
    if options.help:
        print(options.parser.format_help())
        if options.experiment is not None:
            experiment = load_experiment(options.experiment)
            with contextlib.suppress(SystemExit):
                tyro.cli(
                    type(experiment),
                    default=experiment,
                    args=["--help"],
                    prog="overrides:",
                    description="",
                    config=_TYRO,
                )
        return None
    if options.experiment is None:
        raise UserError(f"{options.parser.prog} needs an experiment file: {options.parser.prog} EXP.py")
    return override(load_experiment(options.experiment), overrides)


def load_experiment(name: str) -> Experiment:
    """Executes the user's file and returns its `experiment`."""
    path = Path(name)
    if not path.is_file():
        raise UserError(f"experiment {name!r}: there is no such file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UserError(f"experiment {name}: it must be a Python file, whose name ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        with contextlib.redirect_stdout(sys.stderr):  # Standard output is for the command's own answer.
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == path]
        line = f" line {frames[-1].lineno}" if frames else ""
        raise UserError(f"experiment {name}{line}: {type(error).__name__}: {error}") from error
    experiment = getattr(module, "experiment", None)
    if not isinstance(experiment, Experiment):
        raise UserError(
            f"experiment {name}: it must define `experiment`, an Experiment such as realhf.GRPO(...)"
        )
    return experiment


def override(experiment: Experiment, words: Sequence[str]) -> Experiment:
    """The experiment with fields changed by `--field.subfield value` words."""
    if not words:
        return experiment
    complaints = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaints), contextlib.redirect_stdout(complaints):
            changed, unknown = tyro.cli(
                type(experiment), default=experiment, args=list(words), return_unknown_args=True, config=_TYRO
            )
    except SystemExit as error:
        raise UserError(f"overrides {' '.join(words)!r}: {_sentence(complaints.getvalue())}") from error
    except ValueError as error:
        raise UserError(f"overrides {' '.join(words)!r}: {error}") from error
    if unknown:
        legal = [f"--{name}" for name in _field_names(experiment)]
        near = difflib.get_close_matches(
            unknown[0].replace("_", "-"), [n.replace("_", "-") for n in legal], n=3, cutoff=0.5
        )
        hint = f"did you mean {' or '.join(near)}?" if near else f"legal are {', '.join(legal)}"
        raise UserError(f"unknown override {unknown[0]!r}: {hint}")
    return changed


def _sentence(complaint: str) -> str:
    """What tyro says in its box: the first part below the title, on one line."""
    parts = [" ".join(part.split()) for part in re.split(r"[─-]{3,}", re.sub(r"[│╭╮╰╯]", " ", complaint))]
    parts = [part for part in parts if part]
    return parts[min(1, len(parts) - 1)]


def _field_names(config: Any, prefix: str = "") -> list[str]:
    names = []
    for field in fields(config):
        value = getattr(config, field.name)
        nested = is_dataclass(value) and not isinstance(value, type)
        names += _field_names(value, f"{prefix}{field.name}.") if nested else [f"{prefix}{field.name}"]
    return names


def _plan(options: argparse.Namespace) -> ExecutionPlan | None:
    return None if options.plan is None else _user(ExecutionPlan.load, options.plan)


def _num_ranks(options: argparse.Namespace, plan: ExecutionPlan | None) -> int:
    if options.nproc is not None and options.nproc < 1:
        raise UserError(f"--nproc is {options.nproc}: it must be at least 1")
    return options.nproc or (plan.num_ranks if plan is not None else 1)


def _compile(
    experiment: Experiment, plan: ExecutionPlan | None, options: argparse.Namespace, num_ranks: int
) -> Program:
    try:
        return compile_program(experiment, plan, world_size=num_ranks)
    except ValueError as error:
        about_plan = options.plan is not None and str(error).startswith("calls.")
        raise UserError(f"{f'plan {options.plan}' if about_plan else options.experiment}: {error}") from error


def _user(function: Any, *arguments: Any) -> Any:
    """Calls a reader of the user's input, whose ValueErrors are sentences for the user."""
    try:
        return function(*arguments)
    except ValueError as error:
        raise UserError(str(error)) from error


def _run_directory(options: argparse.Namespace) -> Path:
    """The run directory: as given, if it holds no run yet; else a new one named after the experiment."""
    if options.out is not None:
        out = Path(options.out)
        if (out / "metrics.jsonl").exists():
            raise UserError(f"--out {out} already holds a run: choose another directory or remove it")
        return out
    stem, number = Path(options.experiment).stem, 1
    while (out := Path("runs") / (stem if number == 1 else f"{stem}-{number}")).exists():
        number += 1
    return out
