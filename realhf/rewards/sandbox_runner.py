"""Runs a stranger's code and its tests in this process, after confining it. Started by `Sandbox` only.

The command line names two file descriptors. The job is a JSON document in the first. The report goes to the
second, a line for each event, which begins with the job's secret word.
"""

import builtins
import errno
import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from realhf.rewards.confinement import NETWORK_ERRNO, PROCESS_ERRNO, Unprotected, confine, limit_resources

_FILE_ERRNOS = (errno.EACCES, errno.EROFS, errno.EFBIG)
_MAX_DETAIL = 300


def main() -> None:
    """Read the job, confine this process, and run code and tests."""
    job_fd, report_fd = (int(argument) for argument in sys.argv[1:3])
    with os.fdopen(job_fd) as file:
        job = json.load(file)
    word = job["word"]

    def report(event: str, **more: Any) -> None:
        os.write(report_fd, f"{word} {json.dumps({'event': event, **more})}\n".encode())

    sys.path[:] = [path for path in sys.path if path != job["package_root"]] + job["packages"]
    os.chdir(job["folder"])
    try:
        if job["protected"]:
            confine(
                job["folder"], readable=job["readable"], landlock=job["landlock"],
                may_delete=job["may_delete"], parent=job["parent"])
        limit_resources(**job["limits"])
    except (Unprotected, OSError, ValueError) as error:
        report("unprotected", detail=str(error))
        os._exit(1)
    report("ready")
    _run(job, report)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception as error:  # The code may have closed or replaced it.
            report("note", detail=repr(error)[:_MAX_DETAIL])
    os._exit(0)  # Also if threads of the code still run.


def _run(job: Mapping[str, Any], report: Callable[..., None]) -> None:
    """Run the code, then each test, and report how each has ended."""
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]  # As in an interactive interpreter.
    namespace: dict[str, Any] = {"__name__": job["module"], "__builtins__": builtins}
    reason, detail = _outcome(job["code"], "<answer>", namespace)
    report("code", reason=reason, detail=detail)
    if reason != "passed":
        return
    for number, test in enumerate(job["tests"]):
        reason, detail = _outcome(test, f"<test {number}>", namespace)
        report("test", reason=reason, detail=detail)


def _outcome(source: str, name: str, namespace: dict[str, Any]) -> tuple[str, str]:
    """Execute source code; return `passed`, or the reason of its failure, and the error in one line."""
    try:
        exec(compile(source, name, "exec"), namespace)
    except SystemExit as error:
        in_code = namespace["__name__"] == "__main__" and error.code in (None, 0)
        return ("passed", "") if in_code else ("error", f"SystemExit: {error.code}")
    except BaseException as error:
        return _reason(error), _words(error)
    return "passed", ""


def _words(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:_MAX_DETAIL]
    except BaseException:  # The code's own exception may fail to be printed.
        return type(error).__name__


def _reason(error: BaseException) -> str:
    """Return in one word why code has failed, judged by the error or by the first cause that says more."""
    cause: BaseException | None = error
    for _ in range(10):
        if cause is None:
            break
        if (kind := _kind(cause)) != "error":
            return kind
        cause = cause.__cause__ or cause.__context__
    return "error"


def _kind(error: BaseException) -> str:
    if isinstance(error, MemoryError):
        return "memory"
    if isinstance(error, AssertionError):
        return "wrong"
    if type(error).__name__ == "gaierror":  # From the module socket, which is slow to import.
        return "network"
    if isinstance(error, OSError):
        kinds = {PROCESS_ERRNO: "processes", NETWORK_ERRNO: "network"} | dict.fromkeys(_FILE_ERRNOS, "files")
        return kinds.get(error.errno or 0, "error")
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        return "processes"
    return "error"


if __name__ == "__main__":
    main()
