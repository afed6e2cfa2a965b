"""Claims run directories, so that no two runs write into the same one. Free of torch."""

import errno
import fcntl
import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from realhf.checkpoint.names import MANIFEST, find_checkpoints, step_of
from realhf.errors import UserError
from realhf.user_input.files import open_regular, read_lines, read_object

LOCK = "run.lock"
"""A file in the run directory that rank 0 keeps locked during the run; it names rank 0's process and host."""
_RUNS = Path("runs")


def check_run_directory(out: Path, *, option: str = "--out", resumes: bool = False) -> None:
    """Raise UserError unless a run may write here: the directory is new, or its run recorded no step.

    A run that `resumes` may continue the one in the directory.
    """
    try:
        if out.exists() and not out.is_dir():
            raise UserError(f"{option} {out} is a file: name a directory")
        if not resumes and _has_record(out):
            raise UserError(
                f"{option} {out} already holds a run: add --resume to continue it, "
                "choose another directory or remove it")
        nearest = next(path for path in (out, *out.absolute().parents) if path.exists())
    except OSError as error:
        raise UserError(f"{option} {out}: {error.strerror}") from error
    if not nearest.is_dir():
        raise UserError(f"{option} {out}: {nearest} is a file")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise UserError(f"{option} {out}: there is no permission to write in {nearest}")


def require_free(out: Path, *, option: str = "--out") -> None:
    """Raise UserError if a run that goes on writes into this directory."""
    if (out / LOCK).exists():
        with (out / LOCK).open("a") as file:
            try:
                _lock(file)
            except BlockingIOError as error:
                raise UserError(_is_in_use(out, option)) from error


def _has_record(out: Path) -> bool:
    path = out / "metrics.jsonl"
    return path.is_file() and any(line.endswith(b"\n") for line in read_lines(path))


@dataclass(frozen=True)
class Resumption:
    """A run to continue, the directory in which it goes on, and its checkpoints by step, the newest first."""

    run: Path
    out: Path
    checkpoints: Mapping[int, Path]


def find_resumption(
    stem: str, *, resume: str, out: Path | None, below: str | None = None
) -> Resumption:
    """Return the run that `--resume` and `--out` name; by default the newest of the experiment file `stem`.

    `resume` is a run directory, a checkpoint, or empty for the run directory `out`. A checkpoint continues
    in its own run directory, or in a new one, `out`. `below` is the directory that has `runs`, by default the
    working directory. Raises UserError if something is not there.
    """
    if resume == "" and out is None:
        runs = Path(below or "") / _RUNS
        owners = {lock: _read_owner(lock) for lock in runs.glob(f"*/{LOCK}")}
        locks = [lock for lock, owner in owners.items() if owner.get("experiment") == stem]
        if not locks:
            raise UserError(f"--resume: no directory in {runs}/ has a run of {stem}: name one with --out")
        out = max(locks, key=lambda lock: lock.stat().st_mtime).parent
    source = Path(resume) if resume else out
    assert source is not None
    if not (source / "checkpoints").is_dir() and find_checkpoints(source):
        source = source.absolute().parent
    if not source.is_dir():
        raise UserError(f"--resume: {source} is no directory: name a run directory or one of its checkpoints")
    if (source / MANIFEST).is_file():
        step = step_of(source) or 0
        run = source.absolute().parent.parent
        checkpoints = {step: source}
    else:
        run = source
        checkpoints = find_checkpoints(source / "checkpoints")
    if out is None:
        out = run
    if out.resolve() != run.resolve():
        check_run_directory(out)
    elif later := [s for s in find_checkpoints(out / "checkpoints") if s > max(checkpoints, default=0)]:
        raise UserError(
            f"--resume {source}: the run has a checkpoint of step {later[0]}: "
            "branch off to a new directory (--out), or remove the later checkpoints")
    return Resumption(run, out, checkpoints)


def find_restarted(out: Path | None, *, below: str | None = None) -> Path | None:
    """Return the run directory that an earlier start of this torchrun has claimed: `out`, or one in runs/.

    It is recognised by torchrun's id of the run; if that is "none", only a restarted process looks for it.
    `below` is the directory that has `runs`, by default the working directory.
    """
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if run_id == "none" and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        return None
    runs = Path(below or "") / _RUNS
    for lock in sorted(runs.glob(f"*/{LOCK}")) if out is None else [out / LOCK]:
        if _read_owner(lock).get("run_id") == run_id:
            return lock.parent
    return None


def new_run_directory(stem: str, *, below: str | None = None) -> Path:
    """Make and return runs/STEM, or runs/STEM-2 and so on if that exists; no other process gets the same.

    `below` is the directory that has or gets `runs`, by default the working directory.
    """
    runs = Path(below or "") / _RUNS
    check_run_directory(runs, option="run directory")
    number = 1
    while True:
        out = runs / (stem if number == 1 else f"{stem}-{number}")
        try:
            out.mkdir(parents=True)
            return out
        except FileExistsError:
            number += 1
        except OSError as error:
            raise UserError(f"run directory {out} cannot be made: {error.strerror}") from error


class RunDirectory:
    """A run directory that this process holds until it ends."""

    def __init__(self, out: Path, *, stem: str = "", resumes: bool = False) -> None:
        """Claim `out` for the experiment file `stem`.

        Raises UserError when it is in use, cannot be written, or holds a run that is not to be resumed.
        """
        check_run_directory(out, resumes=resumes)
        try:
            out.mkdir(parents=True, exist_ok=True)
            if (out / LOCK).exists():
                open_regular(out / LOCK).close()
            self._lock = (out / LOCK).open("a")
        except OSError as error:
            raise UserError(
                f"--out {out}: {error.filename or out} cannot be made: {error.strerror}") from error
        try:
            _lock(self._lock)
        except BlockingIOError as error:
            raise UserError(_is_in_use(out, "--out")) from error
        check_run_directory(out, resumes=resumes)  # A run may have ended in the meantime.
        run_id = os.environ.get("TORCHELASTIC_RUN_ID")
        self._owner = {"pid": os.getpid(), "host": socket.gethostname(), "run_id": run_id, "experiment": stem}
        self._write_owner()
        self.path = out.absolute()  # A reward function may change the current directory.

    def begin(self) -> None:
        """Note that the run's steps begin: from now on it can be continued from its checkpoints."""
        self._owner["begun"] = True
        self._write_owner()

    def _write_owner(self) -> None:
        self._lock.truncate(0)
        self._lock.write(json.dumps(self._owner) + "\n")
        self._lock.flush()

    def release(self) -> None:
        self._lock.close()


def has_begun(out: Path, run_id: str) -> bool:
    owner = _read_owner(out / LOCK)
    return owner.get("run_id") == run_id and "begun" in owner


def _lock(file: TextIO) -> None:
    """Lock the file if its file system can. Raises BlockingIOError if another process holds the lock."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP):
            raise


def _is_in_use(out: Path, option: str) -> str:
    owner = _read_owner(out / LOCK)
    who = f", process {owner.get('pid')} on {owner.get('host')}" if owner else ""
    return f"{option} {out} is in use by another run{who}"


def _read_owner(lock: Path) -> dict[str, Any]:
    """Return the owner that a lock file names; empty if the owner has not written it yet."""
    try:
        return read_object(lock)
    except UserError:
        return {}
