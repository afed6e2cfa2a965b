"""The command line. Free of torch: commands that need torch load it when they are called."""

import importlib
import os
import sys
import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

from realhf.cli import check, plan, profile, realloc, run
from realhf.cli.experiment_file import load_experiment
from realhf.cli.job import is_worker
from realhf.cli.overrides import override, print_fields
from realhf.errors import UserError, one_line
from realhf.experiment import Experiment

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USER = 2


class _Command(NamedTuple):
    """A command that takes an experiment file."""

    help: str
    add_options: Callable[[ArgumentParser], None]
    run: Callable[[Namespace, Experiment, Sequence[str]], int]
    takes_plan: bool


_COMMANDS = {
    "run": _Command("train on local workers, or as one worker under torchrun",
                    run.add_options, run.run, takes_plan=True),
    "check": _Command("find what is wrong with an experiment and a plan, without running it",
                      check.add_options, check.run, takes_plan=True),
    "profile": _Command("measure this machine for the models of an experiment, for the planner",
                        profile.add_options, profile.run, takes_plan=False),
    "plan": _Command("search a plan for a cluster, with a lower bound over the plans enumerated",
                     plan.add_options, plan.run, takes_plan=False),
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Return 0 if it is done, 2 if the input is wrong (one sentence on stderr), else 1."""
    if "OMP_WAIT_POLICY" not in os.environ:
        # OpenMP threads spin only briefly while they wait, as processes may share their cores.
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    # Torch's warnings about sockets say less than our own sentences.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    argv = sys.argv[1:] if argv is None else argv
    try:
        _check_environment()
        options, overrides = _parser().parse_known_args(argv)
        if options.command is realloc.run:
            return realloc.run(options, overrides)
        experiment = _read_experiment(options, overrides)
        return EXIT_DONE if experiment is None else options.command(options, experiment, argv)
    except UserError as error:
        sentence = one_line(str(error))
        text = f"{traceback.format_exc()}realhf: {sentence}" if "--traceback" in argv else None
        if is_worker():
            importlib.import_module("realhf.cli.worker").report(sentence, code=EXIT_USER, text=text)
        else:
            print(text or f"realhf: {sentence}", file=sys.stderr)
        return EXIT_USER
    except BrokenPipeError:  # The reader of a pipe, such as `head`, has ended.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


def _check_environment() -> None:
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    if not threads.isdecimal() or int(threads) < 1:
        raise UserError(f"OMP_NUM_THREADS is {threads!r}: it must be a whole number of at least 1")


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def _parser() -> ArgumentParser:
    package = importlib.import_module("realhf")
    parser = _Parser(prog="realhf", description=package.__doc__, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"realhf {package.__version__}")
    commands = parser.add_subparsers(title="commands", required=True)
    for name, command in _COMMANDS.items():
        _add_command(commands, name, command)
    text = "explain one reallocation: what moves, how long it takes, what limits it"
    explains = commands.add_parser("realloc", help=text, description=text, allow_abbrev=False)
    explains.set_defaults(command=realloc.run)
    realloc.add_options(explains)
    return parser


def _add_command(commands: Any, name: str, command: _Command) -> None:
    parser = commands.add_parser(
        name, help=command.help, description=command.help, add_help=False, allow_abbrev=False)
    parser.set_defaults(command=command.run, parser=parser)
    add = parser.add_argument
    add("experiment", nargs="?", metavar="EXP.py", help="Python file that defines `experiment`")
    if command.takes_plan:
        add("--plan", help="plan file or shipped name, or `auto`; default: calls split over all ranks by dp")
    add("--traceback", action="store_true", help="show the Python traceback of an error, too")
    add("-h", "--help", action="store_true", help="this help; with EXP.py also every field to override")
    command.add_options(parser)


def _read_experiment(options: Namespace, overrides: list[str]) -> Experiment | None:
    """Return the experiment with its overrides; or, for --help, print the help and return None."""
    if options.help:
        print(options.parser.format_help())
        if options.experiment is not None:
            print_fields(load_experiment(options.experiment))
        return None
    if options.experiment is None:
        raise UserError(f"{options.parser.prog} needs an experiment file: {options.parser.prog} EXP.py")
    return override(load_experiment(options.experiment), overrides)
