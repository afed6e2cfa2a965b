"""The command line. Free of torch: commands that need torch load it when they are called."""

import importlib
import os
import sys
import traceback
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from realhf.cli import (
    check,
    import_settings,
    init,
    merge,
    plan,
    profile,
    realloc,
    reference,
    report,
    rollouts,
    run,
    scaling,
)
from realhf.cli import eval as evaluate
from realhf.cli.launch import is_worker
from realhf.cli.overrides import repeated
from realhf.errors import UserError, described, one_line, user_line, warn
from realhf.user_input.suggest import nearest

COMMANDS = {
    "run": run, "check": check, "profile": profile, "plan": plan, "realloc": realloc, "scaling": scaling,
    "eval": evaluate, "rollouts": rollouts, "report": report, "merge": merge, "init": init,
    "import": import_settings, "reference": reference}
"""Modules with HELP, EXAMPLES, `add_arguments` and `main(options, other words)`."""
_OTHER_COMMANDS = {
    "train": "run", "start": "run", "resume": "run", "sft": "run", "grpo": "run", "validate": "check",
    "lint": "check", "test": "check", "evaluate": "eval", "new": "init", "create": "init", "search": "plan",
    "samples": "rollouts", "bench": "profile", "average": "merge", "convert": "merge", "export": "merge"}
"""Usual names of commands -> ours."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Return 0 if it is done, 2 if the input is wrong (one sentence on stderr), else 1."""
    if "OMP_WAIT_POLICY" not in os.environ:
        # OpenMP threads spin only briefly while they wait, as processes may share their cores.
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    # Our own sentences say more than torch's warnings about sockets.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        _check_environment()
        _check_command(argv)
        options, words = make_parser().parse_known_args(argv)
        options.argv = argv
        return options.main(options, words)
    except UserError as error:
        sentence = one_line(str(error))
        text = f"{traceback.format_exc()}realhf: {sentence}" if "--traceback" in argv else None
        if is_worker():
            from realhf.cli.worker import report

            report(sentence, code=2, text=text)
        else:
            print(text or f"realhf: {sentence}", file=sys.stderr)
        return 2
    except SystemExit as error:
        if user_line(error) is None:  # A help text, or why this worker ends, has been printed.
            return error.code if isinstance(error.code, int) else 0
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
    if argv and (argv[0].startswith("-") or argv[0] in COMMANDS):
        return
    legal = f"the commands are {', '.join(COMMANDS)}, and --help explains them"
    if not argv:
        raise UserError(f"a command is missing: {legal}")
    name = argv[0]
    if name in ("help", "version"):
        raise UserError(f"there is no command {name!r} (did you mean --{name}?): {legal}")
    if name.endswith(".py") or Path(name).is_file():
        raise UserError(f"{name}: a command comes before the file (did you mean realhf run {name}?)")
    near = nearest(name, [*COMMANDS, *_OTHER_COMMANDS])
    meant = f" (did you mean {_OTHER_COMMANDS.get(near, near)}?)" if near is not None else ""
    raise UserError(f"there is no command {name!r}{meant}: {legal}")


class _Parser(ArgumentParser):
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse the words, and warn about options that are given twice and count once."""
        actions = self._option_string_actions
        once = [name for name, action in actions.items() if type(action).__name__ == "_StoreAction"]
        for sentence in repeated(list(args or ()), once):
            warn(sentence)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def make_parser() -> ArgumentParser:
    """Return the parser of all commands."""
    package = importlib.import_module("realhf")
    parser = _Parser(
        prog="realhf", description=package.__doc__, epilog=_examples(run), allow_abbrev=False,
        formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=f"realhf {package.__version__}")
    commands = parser.add_subparsers(title="commands", required=True)
    for name, command in COMMANDS.items():
        subparser = commands.add_parser(
            name, help=command.HELP, description=command.HELP, epilog=_examples(command), allow_abbrev=False,
            formatter_class=RawDescriptionHelpFormatter, conflict_handler="resolve")
        subparser.set_defaults(main=command.main, parser=subparser)
        command.add_arguments(subparser)
    return parser


def _examples(command: ModuleType) -> str:
    return "\n  ".join(("examples:", *command.EXAMPLES))
