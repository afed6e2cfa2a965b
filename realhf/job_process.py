"""JobProcess: a process with limits of time and memory, for work on what strangers wrote. Free of torch."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from realhf.user_input.units import format_bytes

_ROOT = Path(__file__).parent.parent
_START = "import sys; sys.path[0] = {root!r}; import {module} as m; m.{main}()"
_READY = "ready\n"


class JobEnded(Exception):
    """The process has ended over a job; the message says why."""


class CannotStart(Exception):
    """The process has ended before its first job."""


class JobProcess:
    """A process that answers jobs, values of JSON, one after the other; it starts with the first one.

    If it ends over a job, the next job starts it again. It ends when this process does.
    """

    def __init__(self, module: str, *, main: str = "main", seconds: float, memory_bytes: int) -> None:
        """The process runs the function `main` of a module, which calls `serve`.

        A job may take `seconds` of the processor, and the process may allocate `memory_bytes`.
        """
        self._module = module
        self._main = main
        self._seconds = seconds
        self._memory_bytes = memory_bytes
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def answer(self, job: Any) -> Any:
        """Return the answer to a job. Raises JobEnded if the process ends over it, or CannotStart.

        An exception that interrupts this ends the process: its late answer would be taken for the next job's.
        """
        question = json.dumps(job) + "\n"
        with self._lock:
            try:
                process = self._process or self._start()
                line = ""
                with suppress(BrokenPipeError):
                    assert process.stdin is not None and process.stdout is not None
                    process.stdin.write(question)
                    process.stdin.flush()
                    line = process.stdout.readline()
                if line.endswith("\n"):
                    return json.loads(line)
                raise JobEnded(self._end(process))
            except BaseException:
                if self._process is not None:
                    self._end(self._process, 0.0)
                raise

    def _start(self) -> subprocess.Popen[str]:
        self._process = start_process(
            self._module, self._main, str(self._seconds), str(self._memory_bytes), text=True)
        assert self._process.stdout is not None
        if self._process.stdout.readline() != _READY:
            self._end(self._process)
            raise CannotStart(f"the process of {self._module} does not start")
        return self._process

    def close(self) -> None:
        """End the process, if it runs."""
        with self._lock:
            if self._process is not None:
                self._end(self._process, 0.0)

    def _end(self, process: subprocess.Popen[str], patience_seconds: float = 1.0) -> str:
        """End the process; return in words why it has ended."""
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience_seconds)
        code = process.poll()
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        self._process = None
        if code == -signal.SIGPROF:
            return f"it took more than {self._seconds:g} s of processor time"
        if code is None:
            how = "closed its output"
        else:
            how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return f"its process {how}; it may have {format_bytes(self._memory_bytes)} of memory"


def start_process(
    module: str, main: str, *words: str, text: bool = False, variables: Mapping[str, str] | None = None
) -> subprocess.Popen[Any]:
    """Start a process that runs the function `main` of a module, with pipes for its input and its output.

    `words` are those of its command, and `variables` are further ones of its environment.
    """
    start = _START.format(root=str(_ROOT), module=module, main=main)
    environment = os.environ | {"PYTHONHASHSEED": "0", "RUST_BACKTRACE": "0", **(variables or {})}
    return subprocess.Popen(
        [sys.executable, "-c", start, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=text, env=environment, start_new_session=True)


def limit_memory(memory_bytes: int) -> None:
    """Limit what this process may allocate, and let it leave no core file."""
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = memory_bytes if most == resource.RLIM_INFINITY else min(memory_bytes, most)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def serve(answer: Callable[[Any], Any]) -> None:
    """Answer jobs until standard input ends. The limits are the last words of the command."""
    seconds = float(sys.argv[-2])
    limit_memory(int(sys.argv[-1]))
    results = sys.stdout
    sys.stdout = sys.stderr
    results.write(_READY)
    results.flush()
    for line in sys.stdin:
        # When the time is over, the signal ends the process, even within a long computation in C.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        result = answer(json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        results.write(json.dumps(result) + "\n")
        results.flush()
