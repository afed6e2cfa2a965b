"""Sandbox: runs a stranger's Python code with limits on time, memory, processes, network and files."""

from __future__ import annotations

import json
import math
import os
import secrets
import selectors
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from realhf.errors import UserError
from realhf.rewards.confinement import NOBODY
from realhf.user_input.field_types import check_types, require

_ROOT = Path(__file__).parent.parent.parent
_START_SECONDS = 60.0
"""Longest time that an interpreter takes to start, on a machine that is busy."""
_POLL_SECONDS = 0.05
_MAX_FILES = 1000
_GONE = (FileNotFoundError, NotADirectoryError)
_EVENTS = ("ready", "unprotected", "note", "code", "test")
_SYSTEM_PATHS = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache",
                 "/etc/localtime")
"""Paths that libraries read, beside the interpreter's own directory."""
_OUTCOMES = ("passed", "wrong", "error", "memory", "network", "processes", "files")
"""The reasons that a report of the runner may give."""
_START = "import sys; sys.path[0] = {root!r}; from realhf.rewards import sandbox_runner as r; r.main()"


@dataclass(frozen=True)
class Execution:
    """The result of running code in a sandbox. Reasons are single words.

    `passed`; `wrong` (an assertion has failed); `error` (another exception); `timeout`, `memory`,
    `processes`, `network`, `files` or `output` (the sandbox has stopped it or refused something); `ended`
    (the process ended early, such as by os._exit); `killed` (by a signal, such as a crash).
    """

    reason: str  # Of the code itself, before the tests.
    tests: tuple[str, ...] = ()  # The reason of each test; tests that did not run have the code's reason.
    detail: str = ""  # The last line of the first error.
    stdout: str = ""
    stderr: str = ""


@dataclass(frozen=True)
class Sandbox:
    """Runs Python code in a process of its own that can only compute, and read and write files of its own.

    It refuses to run if the machine does not offer what it needs (see docs/rewards.md).
    """

    cpu_seconds: int = 5  # Longest time on the processor.
    wall_seconds: float = 20.0  # Longest time altogether, such as of code that sleeps.
    memory_mib: int = 1024  # Most MiB of memory.
    output_kib: int = 256  # Most KiB of standard output, and of standard error.
    files_mib: int = 64  # Most MiB of all files in its folder.
    threads: int = 32  # Most threads.
    packages: bool = False
    """Whether the code can import the packages that are installed here, such as numpy."""
    allow_unprotected: bool = False
    """Whether to run the code with limits on time and memory only, if the machine offers no protection. Such
    code can do whatever you can do."""
    landlock: bool = True  # Whether to use Landlock where the kernel has it.

    def __post_init__(self) -> None:
        check_types(self, "Sandbox.")
        for name in ("cpu_seconds", "wall_seconds", "memory_mib", "output_kib", "files_mib", "threads"):
            value = getattr(self, name)
            require(0 < value < math.inf, f"Sandbox.{name}", value, "be above 0")

    def run(
        self, code: str, tests: Sequence[str] = (), *, stdin: str = "", as_program: bool = False
    ) -> Execution:
        """Run code, and then each test in its namespace.

        `__name__` is `__main__` with `as_program`, else `answer`. Raises UserError if the machine does not
        offer what the sandbox needs.
        """
        job = {"code": code, "tests": list(tests), "module": "__main__" if as_program else "answer"}
        execution = self._run(job, stdin, protected=True)
        if isinstance(execution, Execution):
            return execution
        if self.allow_unprotected:
            unprotected = self._run(job, stdin, protected=False)
            if isinstance(unprotected, Execution):
                return unprotected
        raise UserError(
            f"the sandbox cannot protect this machine: {execution}; "
            "set Sandbox.allow_unprotected only for code that you trust")

    def _run(self, job: dict[str, Any], stdin: str, *, protected: bool) -> Execution | str:
        """Run a job. If the machine lacks what the sandbox needs, return a text that says so instead."""
        with _new_folder() as folder, _input_file(stdin) as input_fd:
            job = job | self._settings(folder) | {"protected": protected, "word": secrets.token_hex(16)}
            with _input_file(json.dumps(job)) as job_fd:
                watch = _Watch(self, folder, job["word"], len(job["tests"]))
                watch.start(job_fd, input_fd)
                return watch.result()

    def _settings(self, folder: str) -> dict[str, Any]:
        """Return the part of a job that does not depend on the code."""
        paths = [sysconfig.get_path(name) for name in ("purelib", "platlib")] if self.packages else []
        packages = list(dict.fromkeys(paths))
        interpreter = {sys.base_prefix, sys.base_exec_prefix, os.path.dirname(os.__file__)}
        limits = {"memory_bytes": self.memory_mib << 20, "cpu_seconds": self.cpu_seconds,
                  "file_bytes": self.files_mib << 20}
        return {
            "folder": folder, "package_root": str(_ROOT), "packages": packages, "limits": limits,
            "readable": [*sorted(interpreter - {"/"}), *_SYSTEM_PATHS, *packages],
            "landlock": self.landlock, "may_delete": may_look(), "parent": os.getpid(),
        }


@contextmanager
def _input_file(text: str) -> Iterator[int]:
    """Return a read-only descriptor of a file with this text, which no longer has a name."""
    descriptor, path = tempfile.mkstemp(prefix="realhf-input-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(text.encode("utf-8", "surrogatepass"))
        readable = os.open(path, os.O_RDONLY)
    finally:
        os.unlink(path)
    try:
        yield readable
    finally:
        os.close(readable)


@dataclass
class _Watch:
    """A running process: reads what it writes, and stops it when it breaks a limit."""

    sandbox: Sandbox
    folder: str
    word: str
    num_tests: int
    written: dict[str, bytearray] = field(default_factory=dict)
    stopped: str = ""  # Why the process was stopped from here.
    is_ready: bool = False
    process: Any = None
    events: list[dict[str, Any]] = field(default_factory=list)

    def start(self, job_fd: int, input_fd: int) -> None:
        """Start the process and wait until it has ended."""
        report, report_fd = os.pipe()
        code = _START.format(root=str(_ROOT))
        command = [os.path.realpath(sys.executable), "-s", "-S", "-B", "-c", code]
        try:
            try:
                self.process = subprocess.Popen(
                    [*command, str(job_fd), str(report_fd)], stdin=input_fd, stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE, pass_fds=(job_fd, report_fd), env=_environment(self.folder),
                    cwd="/", start_new_session=True)
            finally:
                os.close(report_fd)
            self._watch({"report": report, "stdout": self.process.stdout.fileno(),
                         "stderr": self.process.stderr.fileno()})
        finally:
            os.close(report)
            if self.process is not None:
                with suppress(ProcessLookupError):
                    os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
                self.process.stdout.close()
                self.process.stderr.close()

    def _watch(self, sources: dict[str, int]) -> None:
        """Read what the process writes until it ends or breaks a limit."""
        self.written = {name: bytearray() for name in sources}
        deadline = time.monotonic() + _START_SECONDS
        next_look = 0.0
        with selectors.DefaultSelector() as selector:
            for name, descriptor in sources.items():
                selector.register(descriptor, selectors.EVENT_READ, name)
            while selector.get_map() and not self.stopped:
                for key, _ in selector.select(_POLL_SECONDS):
                    if not self._read(key.fd, key.data):
                        selector.unregister(key.fd)
                if not self.is_ready and b"\n" in self.written["report"]:
                    self.is_ready = True
                    deadline = time.monotonic() + self.sandbox.wall_seconds
                now = time.monotonic()
                if now > deadline:
                    self.stopped = "timeout"
                elif now > next_look:
                    self.stopped = self.stopped or self._broken_limit()
                    next_look = now + _POLL_SECONDS
        if not self.stopped:
            try:  # The code may have closed its output and go on.
                self.process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.stopped = "timeout"

    def _read(self, descriptor: int, name: str) -> bool:
        """Read what has been written; return whether there may be more."""
        data = os.read(descriptor, 65536)
        self.written[name] += data
        most = self.sandbox.output_kib << 10 if name != "report" else 4096 * (self.num_tests + 16)
        if len(self.written[name]) > most:
            self.stopped = "output"
        return bool(data)

    def _broken_limit(self) -> str:
        """Return which limit on threads, memory or files the process has broken, if any.

        The limit on what it maps does not count the kernel's tables of its pages, so they are added here.
        """
        with suppress(OSError, ValueError, LookupError):  # It may just have ended.
            status = Path(f"/proc/{self.process.pid}/status").read_text()
            values = dict(line.split(":", 1) for line in status.splitlines())
            threads, resident_kib, tables_kib = (
                int(values[name].split()[0]) for name in ("Threads", "VmRSS", "VmPTE"))
            if threads > self.sandbox.threads:
                return "processes"
            if resident_kib + tables_kib > self.sandbox.memory_mib << 10:
                return "memory"
        size, count = _size_of(self.folder)
        unlinked, mapped = _unlinked_size(self.process.pid, self.folder)
        is_full = size + unlinked > self.sandbox.files_mib << 20 or count > _MAX_FILES
        return "files" if is_full or mapped else ""

    def result(self) -> Execution | str:
        """Return how the code has run, or what the machine lacks."""
        lines = self.written["report"].decode("utf-8", "replace").splitlines()
        events = [event for line in lines if (event := self._event_of(line)) is not None]
        if events and events[0]["event"] == "unprotected":
            return str(events[0]["detail"])
        stdout, stderr = (self.written[name].decode("utf-8", "replace") for name in ("stdout", "stderr"))
        if not events:
            return f"its interpreter did not start: {' '.join(stderr.split())[-300:] or self.stopped}"
        code = [event for event in events if event["event"] == "code"][:1]
        ends = [event for event in events if event["event"] == "test"][: self.num_tests]
        early = self._early_end()
        reason = code[0]["reason"] if code else early
        missing = early if reason == "passed" else reason
        tests = tuple(event["reason"] for event in ends)
        tests += (missing,) * (self.num_tests - len(tests))
        details = [event["detail"] for event in code + ends if event["reason"] != "passed"]
        if reason == "passed" and self.stopped:
            reason = self.stopped
        return Execution(reason, tests, details[0] if details else "", stdout, stderr)

    def _event_of(self, line: str) -> dict[str, str] | None:
        """Return the event of a line of the report; None if the line cannot be the runner's.

        Code that has found out the runner's secret word may write any line.
        """
        if not line.startswith(self.word):
            return None
        with suppress(ValueError, RecursionError):
            event = json.loads(line.removeprefix(self.word))
            if not isinstance(event, dict) or event.get("event") not in _EVENTS:
                return None
            event = {"reason": "error", "detail": ""} | event
            if event["reason"] in _OUTCOMES and isinstance(event["detail"], str):
                return event
        return None

    def _early_end(self) -> str:
        """Return why a process has ended before its report was complete."""
        if self.stopped:
            return self.stopped
        code = self.process.returncode
        if code == -signal.SIGXCPU:
            return "timeout"
        return "killed" if code < 0 else "ended"


def _environment(folder: str) -> dict[str, str]:
    """Return the environment of the code, which has nothing secret of this process's."""
    libraries = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    fixed = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": folder, "TMPDIR": folder,
             "PYTHONHASHSEED": "0"}
    return libraries | threads | fixed


@contextmanager
def _new_folder() -> Iterator[str]:
    """Make a temporary folder for the code, and delete it at the end."""
    folder = os.path.realpath(tempfile.mkdtemp(prefix="realhf-sandbox-"))
    try:
        if os.geteuid() == 0:
            with suppress(OSError):
                os.chown(folder, NOBODY, NOBODY)
        yield folder
    finally:
        _delete(folder)


def _size_of(folder: str) -> tuple[int, int]:
    """Return the bytes and the number of files below a folder; stop when there are more than _MAX_FILES.

    A directory that cannot be listed, such as one with a very long path, counts as too many files.
    """
    size = 0
    count = 0
    waiting = [folder]
    while waiting and count <= _MAX_FILES:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    count += 1
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    else:
                        size += _size_on_disk(entry.path)
                    if count > _MAX_FILES:
                        break
        except _GONE:
            continue
        except OSError:
            return size, _MAX_FILES + 1
    return size, count


def _unlinked_size(process_id: int, folder: str) -> tuple[int, int]:
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
