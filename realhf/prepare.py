"""prepare_once: makes the files that an experiment needs, in one process per host. Free of torch."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def prepare_once(path: str | Path, make: Callable[[Path], object]) -> Path:
    """Return `path`, after `make` has written it if it did not exist.

    The launcher and every worker execute an experiment file at the same time. One of the processes that call
    this for the same path, on one host or on hosts with a common file system, calls `make(temporary_path)`,
    which writes a file or a directory there; the others wait. The result gets its name only when it is
    complete, so that a `make` that fails leaves nothing behind.
    """
    path = Path(path)
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / f".{path.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            return path
        scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
        try:
            result = scratch / path.name
            make(result)
            if not result.exists():
                name = getattr(make, "__qualname__", type(make).__name__)
                raise ValueError(f"prepare_once: {name} wrote nothing at {result}, the path that it got")
            os.rename(result, path)
        finally:
            shutil.rmtree(scratch)
    return path
