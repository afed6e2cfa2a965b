"""Messages to users: UserError, which is printed without traceback, with exit code 2; and warnings."""

import contextlib
import os
import sys
import sysconfig
import traceback
from collections.abc import Collection, Iterator
from pathlib import Path
from types import FunctionType

_LIBRARIES = (Path(__file__).parent, *{Path(sysconfig.get_path(name)) for name in (
    "stdlib", "platstdlib", "purelib", "platlib")})

_MAX_MESSAGE = 1600
_MAX_VALUE = 160


class UserError(ValueError):
    """An error whose message is a sentence: the file, field, function or sample, and what would be legal."""


def one_line(text: str) -> str:
    """Return a message on one line, with unprintable characters escaped and the middle of long ones left out.

    Messages quote files, and what these hold must not reach a terminal as control characters.
    """
    line = " ".join(part for part in map(str.strip, text.splitlines()) if part)
    if len(line) > _MAX_MESSAGE:
        line = f"{line[: _MAX_MESSAGE // 2]} ... {line[-_MAX_MESSAGE // 4 :]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


def cut(text: str) -> str:
    """Return a text for a message, with the middle of long ones left out."""
    return text if len(text) <= _MAX_VALUE else f"{text[: _MAX_VALUE // 2]}...{text[-_MAX_VALUE // 4 :]}"


def shown(value: object) -> str:
    """Return a value as code for a message, with the middle of long ones left out.

    Classes, functions and objects whose code says little are shown by name.
    """
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, FunctionType):
        return f"the function {value.__name__}"
    if type(value).__repr__ is object.__repr__:
        return f"an object of the class {type(value).__name__}"
    return cut(repr(value))


def user_line(error: BaseException) -> str | None:
    """Return `file:line` of the innermost frame of a user's own code; None if there is none.

    Code of this package, of Python's library and of site-packages is not the user's own.
    """
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_users_file(frame.filename):
            return f"{frame.filename}:{frame.lineno}"
    return None


def innermost_user_line() -> str:
    """Return `file:line` of the innermost call of a user's own code that runs now."""
    frames = reversed(traceback.extract_stack())
    lines = (f"{frame.filename}:{frame.lineno}" for frame in frames if is_users_file(frame.filename))
    return next(lines, "?")


def is_users_own(error: BaseException, *, calls: Collection[str] = ()) -> bool:
    """Return whether an exception arose in the user's own code, or in a library that this has called.

    It did not if the user's code called a file of this package, other than the files named in `calls`.
    """
    paths = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    user_frames = [i for i, path in enumerate(paths) if is_users_file(str(path))]
    if not user_frames:
        return False
    package = Path(__file__).parent
    return not any(p.is_relative_to(package) and p.name not in calls for p in paths[user_frames[-1] + 1 :])


def is_users_file(filename: str) -> bool:
    """Return whether a file is the user's own: not of this package, Python's library or site-packages."""
    return not filename.startswith("<") and not any(Path(filename).is_relative_to(p) for p in _LIBRARIES)


def catch_exits() -> None:
    """Turn `os._exit` in the user's own code into SystemExit, which ends the command with a sentence.

    It stays as it is in libraries, in this package and in processes that this one forks.
    """
    leave = getattr(os._exit, "leave", os._exit)
    process = os.getpid()

    def leave_or_raise(status: int) -> None:
        if os.getpid() == process and is_users_file(sys._getframe(1).f_code.co_filename):
            raise SystemExit(f"os._exit({status})")
        leave(status)

    leave_or_raise.leave = leave  # type: ignore[attr-defined]
    os._exit = leave_or_raise  # type: ignore[assignment]


def described(error: BaseException) -> str:
    """Return an error's type and message on one line, and where in the user's own code it arose, if there."""
    where = user_line(error)
    return f"{type(error).__name__}: {' '.join(str(error).split())}" + (f" ({where})" if where else "")


def warn(sentence: str) -> None:
    """Print a warning on standard error."""
    print(f"realhf: warning: {sentence}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def naming(what: str) -> Iterator[None]:
    """Turn ValueErrors of the `with` block into UserErrors that begin with `what`, an option or file."""
    try:
        yield
    except ValueError as error:
        raise UserError(f"{what}: {error}") from error
