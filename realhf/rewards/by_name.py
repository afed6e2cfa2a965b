"""Finds reward functions by the names that `realhf eval --reward` takes. Free of torch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from realhf.errors import UserError
from realhf.rewards.answers import ExactMatch
from realhf.rewards.math_answer import MathAnswer
from realhf.user_input.files import execute_file
from realhf.user_input.suggest import did_you_mean

SHIPPED: dict[str, Callable[[str], Any]] = {"exact": ExactMatch, "math": MathAnswer}
"""The shipped rewards by name: each takes the column of the answers."""


def reward_by_name(text: str) -> Any:
    """Return a shipped reward (`exact`, or `exact:column`), or the function of a file (`file.py:function`).

    Raises UserError if there is none of this name.
    """
    path, _, function = text.rpartition(":")
    if path.endswith(".py"):
        return _from_file(Path(path), function)
    name, _, column = text.partition(":")
    if name not in SHIPPED:
        raise UserError(
            f"--reward {text!r}{did_you_mean(name, list(SHIPPED))}: "
            f"legal are {', '.join(SHIPPED)} and FILE.py:FUNCTION")
    return SHIPPED[name](column or "answer")


def _from_file(path: Path, function: str) -> Any:
    """Execute the user's file as a module and return one of its functions."""
    if not path.is_file():
        raise UserError(f"--reward {path}:{function}: there is no file {path}")
    try:
        module = execute_file(path, name=f"realhf_reward_{path.stem}")
    except (Exception, SystemExit) as error:
        raise UserError(f"--reward {path}: {type(error).__name__}: {error}") from error
    if not callable(reward := getattr(module, function, None)):
        names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise UserError(f"--reward {path}:{function}: the file's functions are {', '.join(names) or 'none'}")
    return reward
