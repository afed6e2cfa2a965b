"""Claims run directories, so that no two runs write into the same one. Free of torch."""

import errno
import fcntl
import json
import os
import socket
from pathlib import Path
from typing import TextIO

from realhf.errors import UserError

LOCK = "run.lock"
"""A file in the run directory that rank 0 keeps locked during the run; it names rank 0's process and host."""
_RUNS = Path("runs")


def check_run_directory(out: Path, *, option: str = "--out") -> None:
    """Raise UserError unless a run may write here: the directory is new, or its run recorded no step."""
    try:
        if out.exists() and not out.is_dir():
            raise UserError(f"{option} {out} is a file: name a directory")
        if (out / "metrics.jsonl").exists() and "\n" in (out / "metrics.jsonl").read_text():
            raise UserError(f"{option} {out} already holds a run: choose another directory or remove it")
        nearest = next(path for path in (out, *out.absolute().parents) if path.exists())
    except OSError as error:
        raise UserError(f"{option} {out}: {error.strerror}") from error
    if not nearest.is_dir():
        raise UserError(f"{option} {out}: {nearest} is a file")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise UserError(f"{option} {out}: there is no permission to write in {nearest}")


def new_run_directory(stem: str) -> Path:
    """Make and return runs/STEM, or runs/STEM-2 and so on if that exists; no other process gets the same."""
    check_run_directory(_RUNS, option="run directory")
    number = 1
    while True:
        out = _RUNS / (stem if number == 1 else f"{stem}-{number}")
        try:
            out.mkdir(parents=True)
            return out
        except FileExistsError:
            number += 1
        except OSError as error:
            raise UserError(f"run directory {out} cannot be made: {error.strerror}") from error


class RunDirectory:
    """A run directory that this process holds until it ends."""

    def __init__(self, out: Path) -> None:
        """Claim `out`. Raises UserError when it holds a run, is in use, or cannot be written."""
        check_run_directory(out)
        try:
            out.mkdir(parents=True, exist_ok=True)
            self._lock = (out / LOCK).open("a+")
        except OSError as error:
            what = f"{error.filename or out} cannot be made: {error.strerror}"
            raise UserError(f"--out {out}: {what}") from error
        try:
            _lock(self._lock)
        except BlockingIOError as error:
            raise UserError(f"--out {out} is in use by another run{_owner(self._lock)}") from error
        check_run_directory(out)  # A run may have ended in the meantime.
        self._lock.truncate(0)
        self._lock.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}) + "\n")
        self._lock.flush()
        self.path = out.absolute()  # A reward function may change the current directory.

    def release(self) -> None:
        self._lock.close()


def _lock(file: TextIO) -> None:
    """Lock the file if its file system can. Raises BlockingIOError if another process holds the lock."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP):
            raise


def _owner(file: TextIO) -> str:
    file.seek(0)
    try:
        owner = json.loads(file.read())
        return f", process {owner['pid']} on {owner['host']}"
    except (ValueError, KeyError, TypeError):  # The owner has not written it yet.
        return ""
