"""Runs a case of `benchmarks/fuzz/inputs.py` in this process, and judges what the command did."""

import contextlib
import io
import json
import os
import signal
import stat
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.fuzz.cases import Case
from realhf.checkpoint.run_state import Manifest, check_file
from realhf.checkpoint.tensor_files import find_tensors
from realhf.cli.main import main
from realhf.errors import one_line

_PACKAGE = str(Path(__file__).parents[2] / "realhf")
_PASSING = ("realhf: warning: ", "realhf: searching ", "realhf: planned ")
"""Beginnings of lines on standard error that are no errors."""
_MAX_SENTENCE = 1500
_WAITING = 6
"""The limit of a case's elapsed time, in units of the limit of its processor time."""


class Overtime(BaseException):
    """The error that a case has taken too long; no handler of the code under test catches it."""


@dataclass(frozen=True)
class Fault:
    """A wrong answer to a case. Faults with the same `cause` are counted as one."""

    cause: str
    detail: str
    case: Case


@dataclass(frozen=True)
class Outcome:
    """The exit code and output of a command, and the exception, with its place, that ended it, if any."""

    code: Any
    out: str
    err: str
    error: tuple[str, str] | None = None  # Without the exception itself, which would keep all memory.


def run_case(case: Case, directory: Path, *, seconds: float) -> tuple[Any, Fault | None]:
    """Write the files of a case and run its command; return the exit code and what was wrong, if anything."""
    for name, content in case.files.items():
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content.replace(b"{dir}", str(directory).encode()))
    for name, kind in case.special.items():
        _make_special(directory / name, kind)
    try:
        outcome = _run([word.replace("{dir}", str(directory)) for word in case.words], seconds)
        names = tuple(name.replace("{dir}", str(directory)) for name in case.names)
        return outcome.code, _judge(replace(case, names=names), outcome)
    finally:
        for name in (*case.files, *case.special):
            path = directory / name
            if path.is_dir() and not path.is_symlink():
                path.rmdir()
            else:
                path.unlink(missing_ok=True)


def _make_special(path: Path, kind: str) -> None:
    """Make what is no readable file, of a kind of SPECIAL."""
    path.parent.mkdir(exist_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "directory":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "socket":
        os.mknod(path, stat.S_IFSOCK | 0o600)
    elif kind == "huge":
        path.touch()
        os.truncate(path, 100 << 30)


def _run(words: list[str], seconds: float) -> Outcome:
    out, err = io.StringIO(), io.StringIO()
    path, modules = sys.path.copy(), set(sys.modules)
    command = {"(checkpoint)": _read_checkpoint, "(weights)": _read_weights}.get(words[0], main)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), _time_limit(seconds):
            code: Any = command(words)
    except SystemExit as error:
        code = error.code
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return Outcome(None, out.getvalue(), err.getvalue(), (_origin(error), repr(error)[:300]))
    finally:
        sys.path[:] = path
        for name in set(sys.modules) - modules:
            if name.startswith("realhf_experiment_"):
                del sys.modules[name]
    return Outcome(code, out.getvalue(), err.getvalue())


def _read_checkpoint(words: list[str]) -> int:
    """Read a checkpoint as a resumed run does; say what is wrong as a command would."""
    directory = Path(words[1])
    try:
        manifest = Manifest.load(directory)
        for name in manifest.files:
            check_file(directory, name, manifest)
    except ValueError as error:
        print(f"realhf: {one_line(str(error))}", file=sys.stderr)
        return 2
    return 0


def _read_weights(words: list[str]) -> int:
    """Read the headers of a model directory as a run does."""
    try:
        find_tensors(Path(words[1]))
    except ValueError as error:
        print(f"realhf: {one_line(str(error))}", file=sys.stderr)
        return 2
    return 0


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise Overtime in the `with` block after so much time of the processor, or a long time of waiting."""

    def end(*_: Any) -> NoReturn:
        raise Overtime(f"{seconds:g} s")

    timers = {
        signal.SIGPROF: (signal.ITIMER_PROF, seconds),
        signal.SIGALRM: (signal.ITIMER_REAL, _WAITING * seconds),
    }
    before = {number: signal.signal(number, end) for number in timers}
    for timer, limit in timers.values():
        signal.setitimer(timer, limit)
    try:
        yield
    finally:
        for number, (timer, _) in timers.items():
            signal.setitimer(timer, 0)
            signal.signal(number, before[number])


def _judge(case: Case, outcome: Outcome) -> Fault | None:
    if outcome.error is not None:
        return Fault(*outcome.error, case)
    if outcome.code not in (0, 2):
        return Fault(f"exit code {outcome.code}", outcome.err[-300:], case)
    if "Traceback (most recent call last)" in outcome.err and "--traceback" not in case.words:
        return Fault("a traceback", outcome.err[-300:], case)
    lines = [line for line in outcome.err.split("\n")[:-1] if not line.startswith(_PASSING)]
    detail = "\n".join(lines)[:500]
    if outcome.code == 0:
        if lines and "--help" not in case.words and "-h" not in case.words:
            return Fault(f"exit code 0 with words on stderr: {lines[0][:40]}", detail, case)
        return _judge_json(case, outcome.out) if "--json" in case.words else None
    start = "realhf: "
    if len(lines) != 1 or not lines[0].startswith(start):
        return Fault(f"{len(lines)} lines instead of a sentence: {detail[:40]!r}", detail, case)
    if not lines[0].isprintable():
        return Fault(f"control characters in {lines[0][:40]!r}", detail, case)
    if len(lines[0]) > _MAX_SENTENCE:
        return Fault(f"a sentence of {len(lines[0]) // 1000} kB: {lines[0][:40]}", detail, case)
    # A sentence about the time alone: the input is legal.
    is_late = "--time-limit" in case.words and lines[0].startswith(f"{start}--time-limit ")
    if case.names and not is_late and not any(name in lines[0] for name in case.names):
        return Fault(f"names none of {', '.join(case.names)}: {_shape(lines[0])}", detail, case)
    return None


def _judge_json(case: Case, out: str) -> Fault | None:
    """Return a fault if the output is not one document of strict JSON."""

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not JSON")

    try:
        if out.strip() or "--help" not in case.words:
            json.loads(out, parse_constant=refuse)
    except ValueError as error:
        return Fault(f"--json: {str(error)[:40]}", out[:300], case)
    return None


def _shape(sentence: str) -> str:
    """Return a sentence's last words, which do not depend on the values in it."""
    return sentence[-40:]


def _origin(error: BaseException) -> str:
    """Return the type of an exception and the last line of ours that it passed."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(_PACKAGE)]
    place = f"{Path(frames[-1].filename).relative_to(_PACKAGE)} {frames[-1].name}" if frames else "?"
    return f"{type(error).__name__} in {place}"
