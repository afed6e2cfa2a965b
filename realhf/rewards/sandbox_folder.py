"""The folder of a sandbox's code: made, measured while hostile code writes to it, and deleted."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from realhf.rewards.confinement import NOBODY

MAX_FILES = 1000
_GONE = (FileNotFoundError, NotADirectoryError)


@contextmanager
def new_folder() -> Iterator[str]:
    """Make a temporary folder for the code, and delete it at the end."""
    folder = os.path.realpath(tempfile.mkdtemp(prefix="realhf-sandbox-"))
    try:
        if os.geteuid() == 0:
            with suppress(OSError):
                os.chown(folder, NOBODY, NOBODY)
        yield folder
    finally:
        _delete(folder)


def size_of(folder: str) -> tuple[int, int]:
    """Return the bytes and the number of files below a folder; stop when there are more than MAX_FILES.

    A directory that cannot be listed, such as one with a very long path, counts as too many files.
    """
    size = 0
    count = 0
    waiting = [folder]
    while waiting and count <= MAX_FILES:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    count += 1
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    else:
                        size += _size_on_disk(entry.path)
                    if count > MAX_FILES:
                        break
        except _GONE:
            continue
        except OSError:
            return size, MAX_FILES + 1
    return size, count


def unlinked_size(process_id: int, folder: str) -> tuple[int, int]:
    """Return the bytes of a folder's deleted files that a process still has open.

    Also return how many deleted files it has mapped, whose sizes are not known. Both are 0 if this process
    may not look at the other one; see `may_look`.
    """
    size = 0
    mapped = 0
    with suppress(OSError):
        for name in os.listdir(f"/proc/{process_id}/fd"):
            with suppress(OSError):
                descriptor = f"/proc/{process_id}/fd/{name}"
                if _is_unlinked(os.readlink(descriptor), folder):
                    size += os.stat(descriptor).st_blocks * 512
        with open(f"/proc/{process_id}/maps", errors="replace") as lines:
            paths = (line.rstrip("\n").split(maxsplit=5)[5:] for line in lines)
            mapped = sum(_is_unlinked(path, folder) for fields in paths for path in fields)
    return size, mapped


def may_look() -> bool:
    """Return whether this process may look at the open files of a sandbox's process.

    The root user of a container often may not, because the other process belongs to another user.
    """
    if os.geteuid() != 0:
        return True
    with suppress(OSError, ValueError, IndexError), open("/proc/self/status") as file:
        rights = int(file.read().split("\nCapEff:")[1].split(maxsplit=1)[0], base=16)
        return bool(rights >> 19 & 1)  # CAP_SYS_PTRACE
    return False


def _is_unlinked(path: str, folder: str) -> bool:
    return path.startswith(f"{folder}/") and path.endswith(" (deleted)")


def _size_on_disk(path: str) -> int:
    with suppress(*_GONE):
        return os.stat(path, follow_symlinks=False).st_blocks * 512
    return 0


def _delete(folder: str) -> None:
    """Delete a folder of a process that has ended, however deep and whatever rights its directories have.

    Every directory is moved up before it is emptied, so that no path is too long.
    """
    emptied = 0
    waiting = [folder]
    with suppress(OSError):
        while waiting:
            directory = waiting.pop()
            os.chmod(directory, 0o700)
            for entry in list(os.scandir(directory)):
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.path)
                    continue
                os.chmod(entry.path, 0o700)
                emptied += 1
                target = f"{folder}/realhf-delete-{emptied}"
                if entry.path != target and not os.path.lexists(target):
                    os.rename(entry.path, target)
                    waiting.append(target)
                else:
                    waiting.append(entry.path)
            if directory != folder:
                os.rmdir(directory)
    with suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)
