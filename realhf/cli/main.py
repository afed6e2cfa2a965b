"""The command line. Free of torch: commands that need torch load it when they are called."""

import importlib
import os
import sys
import traceback
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from realhf.cli import check, init, plan, profile, realloc, rollouts, run, scaling
from realhf.cli import eval as evaluate
from realhf.cli.eval import fetch_models
from realhf.cli.experiment_file import load_experiment, read_experiment
from realhf.cli.launch import is_worker
from realhf.cli.overrides import override, print_fields
from realhf.errors import UserError, described, one_line, user_line
from realhf.experiment import Experiment
from realhf.user_input.suggest import nearest

_COMMANDS = {
    "run": run, "check": check, "profile": profile, "plan": plan, "realloc": realloc, "scaling": scaling,
    "eval": evaluate, "rollouts": rollouts, "init": init}
"""Modules with HELP, EXAMPLES, `add_options` and `run`."""
_OTHER_COMMANDS = {
    "train": "run", "start": "run", "resume": "run", "sft": "run", "grpo": "run", "validate": "check",
    "lint": "check", "test": "check", "evaluate": "eval", "new": "init", "create": "init", "search": "plan",
    "samples": "rollouts", "bench": "profile"}
"""Usual names of commands -> ours."""
_WITHOUT_EXPERIMENT = (evaluate, init, realloc, rollouts, scaling)
"""The commands that take no experiment file."""
_WITH_WEIGHTS = (run,)
"""The commands that read the weights of models."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Return 0 if it is done, 2 if the input is wrong (one sentence on stderr), else 1."""
    if "OMP_WAIT_POLICY" not in os.environ:
        # OpenMP threads spin only briefly while they wait, as processes may share their cores.
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    # Our own sentences say more than torch's warnings about sockets.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    argv = sys.argv[1:] if argv is None else argv
    try:
        _check_environment()
        _check_command(argv)
        options, words = _parser().parse_known_args(argv)
        if options.command in [command.run for command in _WITHOUT_EXPERIMENT]:
            return options.command(options, words)
        experiment = _read_experiment(options, words)
        if experiment is None:
            return 0
        fetch_models(experiment, weights=options.command in [command.run for command in _WITH_WEIGHTS])
        return options.command(options, experiment, argv)
    except UserError as error:
        sentence = one_line(str(error))
        text = f"{traceback.format_exc()}realhf: {sentence}" if "--traceback" in argv else None
        if is_worker():
            importlib.import_module("realhf.cli.worker").report(sentence, code=2, text=text)
        else:
            print(text or f"realhf: {sentence}", file=sys.stderr)
        return 2
    except SystemExit as error:
        if user_line(error) is None:  # A help text has been printed.
            raise
        print(f"realhf: the experiment's own code ended the command: {described(error)}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # The reader of a pipe, such as `head`, has ended.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _check_environment() -> None:
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    if not threads.isdecimal() or int(threads) < 1:
        raise UserError(f"OMP_NUM_THREADS is {threads!r}: it must be a whole number of at least 1")


def _check_command(argv: Sequence[str]) -> None:
    """Raise UserError unless the first word is a command or an option; say what was probably meant."""
    if argv and (argv[0].startswith("-") or argv[0] in _COMMANDS):
        return
    legal = f"the commands are {', '.join(_COMMANDS)}, and --help explains them"
    if not argv:
        raise UserError(f"a command is missing: {legal}")
    name = argv[0]
    if name in ("help", "version"):
        raise UserError(f"there is no command {name!r} (did you mean --{name}?): {legal}")
    if name.endswith(".py") or Path(name).is_file():
        raise UserError(f"{name}: a command comes before the file (did you mean realhf run {name}?)")
    near = nearest(name, [*_COMMANDS, *_OTHER_COMMANDS])
    meant = f" (did you mean {_OTHER_COMMANDS.get(near, near)}?)" if near is not None else ""
    raise UserError(f"there is no command {name!r}{meant}: {legal}")


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def _parser() -> ArgumentParser:
    package = importlib.import_module("realhf")
    parser = _Parser(
        prog="realhf", description=package.__doc__, epilog=_examples(run), allow_abbrev=False,
        formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=f"realhf {package.__version__}")
    commands = parser.add_subparsers(title="commands", required=True)
    for name, command in _COMMANDS.items():
        takes_experiment = command not in _WITHOUT_EXPERIMENT
        subparser = commands.add_parser(
            name, help=command.HELP, description=command.HELP, epilog=_examples(command), allow_abbrev=False,
            formatter_class=RawDescriptionHelpFormatter, add_help=not takes_experiment)
        subparser.set_defaults(command=command.run)
        if takes_experiment:
            subparser.set_defaults(parser=subparser)
            subparser.usage = f"realhf {name} EXP.py [options] [--field value ...]"
            text = "this help; with EXP.py, the Python file that defines `experiment`, also every field"
            subparser.add_argument("-h", "--help", action="store_true", help=text)
            text = "show the traceback of an error, too"
            subparser.add_argument("--traceback", action="store_true", help=text)
        command.add_options(subparser)
    return parser


def _examples(command: ModuleType) -> str:
    return "\n  ".join(("examples:", *command.EXAMPLES))


def _read_experiment(options: Namespace, words: list[str]) -> Experiment | None:
    """Return the experiment with its overrides; or, for --help, print the help and return None.

    The experiment file is the first word, or, if that is an override, the first word that ends in .py.
    """
    is_override = bool(words) and words[0].startswith("-")
    file = next((word for word in words if not is_override or word.endswith(".py")), None)
    if options.help:
        if file is not None:
            print_fields(load_experiment(file))
        options.parser.print_help()
        return None
    if file is None:
        raise UserError(f"{options.parser.prog} needs an experiment file: {options.parser.prog} EXP.py")
    options.experiment = file
    words.remove(file)
    follows = dict(zip(words[1:], words, strict=False))
    if more := [word for word in words if word.endswith(".py") and not follows.get(word, "").startswith("-")]:
        raise UserError(f"there are two experiment files, {file} and {more[0]}: give one")
    flags = [f"--{name.replace('_', '-')}" for name in vars(options) if name not in ("command", "parser")]
    return override(read_experiment(file, options, words), words, also=flags)
