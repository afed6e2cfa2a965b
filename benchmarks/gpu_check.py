"""Runs everything that needs a GPU, in one command: the tests marked `gpu`, then the measurements.

    python benchmarks/gpu_check.py --json gpu.json --minutes 8
    python benchmarks/gpu_check.py --json gpu.json           # again: what has not passed; outputs in gpu.txt
    python benchmarks/gpu_check.py --only models nccl        # some of the checks
    python benchmarks/gpu_check.py --device cpu              # a try of the checks themselves, with tiny sizes

The checks run in the order of their worth, until the minutes are over. Each is a separate process with a
time limit, so that a failure does not affect the others, and writes each figure once it knows it. Checks
that have passed, as the file of an earlier call tells, do not run again. What needs two GPUs is reported as
not run. What the checks print goes to a file beside that of the figures; a check that is ended first prints
where all of its threads are.

The exit code is 1 if a check failed or there was no time for one, and 2 if there is no CUDA device.
"""

import argparse
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
_SCRATCH_BYTES = 16 << 30
_LAST_LINES = 40
_MOST_OUTPUT = 1 << 19
"""Characters that are kept of what a check prints."""
_SHARE_TO_BEGIN = 0.8
"""Tests that have not begun in this share of their file's time are left out, so that pytest can report."""
_IS_OVER = "minutes are over"
_SECONDS_TO_PRINT = 2.0
"""Of each process of a check that is ended."""
_SHARED = Path("/dev/shm")
_MINUTES = 8.0
NO_TIME = "no time left"


class Check(NamedTuple):
    """A check: a file of tests/gpu, or a program of benchmarks/ and the kind that it measures."""

    about: str
    seconds: int  # After which it is ended, on a GPU.
    tests: str = ""
    program: tuple[str, str] = ("", "")


_SPEED, _GENERATION = "measure/gpu_speed.py", "measure/gpu_generation.py"
CHECKS = {
    "environment": Check("what there is, and its limits", 30, program=(_SPEED, "environment")),
    "kernels": Check(
        "chains and sampling against torch's operations", 75, program=(_GENERATION, "kernels")),
    "models": Check("families against transformers: logits, gradients, greedy tokens", 150, "test_models.py"),
    "decode": Check(
        "64 rows beside `generate`, and beside the bandwidth", 75, program=(_SPEED, "generation")),
    "train": Check("share of the fastest product; memory against the prediction", 75,
                   program=(_SPEED, "training")),
    "grpo": Check("a GRPO step of a 1.5B model", 60, program=(_SPEED, "grpo")),
    "attention": Check(
        "each kind of attention against the formula, up to 8,000 tokens", 60,
        program=(_GENERATION, "attention")),
    "launches": Check("kernels of a decoding step", 45, program=(_GENERATION, "launches")),
    "rows": Check("1, 64 and 512 rows beside the bandwidth", 75, program=(_SPEED, "rows")),
    "generation": Check("tokens and log-probs, with few slots and little memory", 120, "test_generation.py"),
    "training": Check("steps beside those of the CPU; LoRA, recomputing", 120, "test_training.py"),
    "runs": Check("GRPO runs, twice the same bits", 100, "test_runs.py"),
    "no-waits": Check("decoding in which the host never waits", 45, program=(_GENERATION, "no-waits")),
    "pages": Check("memory of pages that goes and comes under recorded passes", 45,
                   program=(_GENERATION, "pages")),
    "long-tail": Check("512 rows, a few of them long", 75, program=(_GENERATION, "long-tail")),
    "long-prompts": Check("prompts of 8,000 tokens", 60, program=(_GENERATION, "long-prompts")),
    "demo": Check("the demo: a tiny model learns to carry", 150, "test_demo.py"),
    "megatron": Check("steps of the megatron engine beside ours", 90, "test_megatron.py"),
    "nccl": Check("collectives of one process, and of two", 60, "test_nccl.py"),
}
"""In the order of their worth."""
NEED_TWO_GPUS = {
    "nccl-two-gpus": "collectives and reallocation between two GPUs",
    "gradient-overlap": "sums of gradients beside the collectives of tensor parallelism",
    "tp-graphs": "recorded decoding steps under tensor parallelism",
    "abort": "the end of a run whose peer has died inside a collective",
}
_CPU_SLOWER = 6
"""How many times longer a check may take on a CPU."""
_LEAST_SECONDS = 10
"""No check begins with less time than this."""


def run_check(name: str, device: str, scratch: Path, *, most_seconds: float) -> dict[str, Any]:
    """Run a check, and return its `status`, its `seconds`, its findings, and the end of its output."""
    check = CHECKS[name]
    directory = scratch / name
    directory.mkdir()
    results = directory / "found"
    python = [sys.executable, "-u"]
    if check.tests:
        command = [*python, "-m", "pytest", "-v", "-m", "gpu", "--tb=short", "-p", "no:cacheprovider",
                   f"tests/gpu/{check.tests}", f"--junitxml={results}"]
    else:
        program, kind = check.program
        command = [*python, f"benchmarks/{program}", kind, device, str(results)]
    start = time.monotonic()
    own_limit = check.seconds * (1 if device.startswith("cuda") else _CPU_SLOWER)
    limit = round(min(most_seconds, own_limit))
    if check.tests:
        command.append(f"--minutes={_SHARE_TO_BEGIN * limit / 60:.2f}")
    code = _run(command, _environment(device, directory), directory / "output", seconds=limit)
    output = (directory / "output").read_text(errors="replace")
    lines = output.splitlines()
    result: dict[str, Any] = {"about": check.about, "seconds": round(time.monotonic() - start, 1)}
    ended = f"did not end within {limit} s" if code is None else f"ended with code {code}"
    result["status"] = "passed" if code == 0 else f"failed: {ended}"
    if code is None and limit < own_limit:
        result["status"] = NO_TIME
    if check.tests:
        result["tests"] = tests = list(_tests(results) if results.exists() else _printed_tests(lines))
        outcomes = Counter(test["outcome"] for test in tests)
        result["summary"] = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
        if code == 0 and any(_IS_OVER in test.get("message", "") for test in tests):
            result["status"] = NO_TIME
        elif code == 0 and set(outcomes) == {"skipped"}:
            result["status"] = "skipped"
    elif results.exists():
        result["found"] = measured = json.loads(results.read_text())
        result["summary"] = measured.get("not_run") or figures(measured)
        if "not_run" in measured:
            result["status"] = "not run"
        elif measured.get("failed"):
            parts = [f"{part}: {why}" for part, why in measured["failed"].items()]
            result["status"] = f"failed: {'; '.join(parts)}"
        elif code == 0 and device.startswith("cuda"):
            result["goals_missed"] = missed = goals_missed(name, measured)
            if missed:
                result["status"] = f"failed: {'; '.join(missed)}"
    if code != 0:
        result["output"] = lines[-_LAST_LINES:]
    result["whole_output"] = output[-_MOST_OUTPUT:]
    shutil.rmtree(directory)
    return result


def _run(command: list[str], environment: dict[str, str], output: Path, *, seconds: float) -> int | None:
    """Run a command and return its exit code; None if it was ended after `seconds`.

    It is ended with the processes that it has started. One after the other, the newest first, all of them
    print where they are (PYTHONFAULTHANDLER).
    """
    with output.open("w") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            preexec_fn=_without_core)
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            for member in _members(process.pid):
                with suppress(ProcessLookupError):
                    os.kill(member, signal.SIGABRT)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_SECONDS_TO_PRINT)
            return None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _members(group: int) -> list[int]:
    """Return the processes of a group, the newest first."""
    numbers = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(ProcessLookupError):
            if os.getpgid(int(path.name)) == group:
                numbers.append(int(path.name))
    return sorted(numbers, reverse=True)


def _without_core() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _environment(device: str, directory: Path) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    more = {
        "PYTHONPATH": path, "TMPDIR": str(directory), "REALHF_GPU_DEVICE": device.split(":")[0],
        "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "PYTHONFAULTHANDLER": "1",
        # Kernels are compiled once for all checks; the directory of a check may forbid to run files.
        "TORCHINDUCTOR_CACHE_DIR": str(Path(tempfile.gettempdir()) / "gpu-check-inductor"),
    }
    if device == "cpu":
        more |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return os.environ | more


def _tests(report: Path) -> Iterator[dict[str, Any]]:
    """Yield the outcome and the figures of each test of a JUnit report."""
    for case in ElementTree.parse(report).iter("testcase"):
        outcomes = {"failure": "failed", "error": "failed", "skipped": "skipped"}
        notes = [child for child in case if child.tag in outcomes]
        figures = {p.get("name"): p.get("value") for p in case.iter("property")}
        yield {
            "name": case.get("name"), "seconds": float(case.get("time", 0)),
            "outcome": outcomes[notes[0].tag] if notes else "passed",
            **({"figures": figures} if figures else {}),
            **({"message": (notes[0].get("message") or "")[:400]} if notes else {}),
        }


def _printed_tests(lines: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the outcomes that pytest had printed before it was ended."""
    for line in lines:
        if found := re.match(r"\S+::(\S+) (PASSED|FAILED|ERROR|SKIPPED)", line):
            name, word = found.groups()
            outcome = "failed" if word == "ERROR" else word.lower()
            yield {"name": name, "outcome": outcome, "message": "" if outcome == "passed" else line}


def figures(measured: dict[str, Any], prefix: str = "") -> str:
    """Return the measured numbers as a line of text: those of nested mappings, but no lists."""
    words = []
    for name, value in measured.items():
        if isinstance(value, dict) and name not in ("profile", "repetitions", "failed"):
            words.append(figures(value, f"{prefix}{name}."))
        elif isinstance(value, str | int | float):
            shown = f"{value:.4g}" if isinstance(value, float) else value
            words.append(f"{prefix}{name} {shown}")
    return ", ".join(words)


def goals_missed(name: str, measured: dict[str, Any]) -> list[str]:
    """Return sentences about what is slower, or needs more memory, than it should on a GPU."""
    if name == "train":
        mfu = measured["mfu"]
        goals = [(mfu >= 0.5, f"training is at {mfu:.2f} of the fastest product, below 0.5")]
        for call, predicted in measured["predicted_gib"].items():
            peak = measured["peak_gib"][call]
            what = f"{call} took {peak:.1f} GiB at its peak, and {predicted:.1f} were predicted"
            goals.append((abs(peak / predicted - 1) <= 0.1, what))
    elif name == "decode":
        ratio, share = measured["ratio"], measured["decode"]["efficiency"]
        goals = [(ratio >= 5, f"generation is {ratio:.1f} times as fast as `generate`, below 5"),
                 (share >= 0.6, f"a decoding step is at {share:.2f} of the limit, below 0.6")]
    else:
        goals = []
    return [sentence for is_reached, sentence in goals if not is_reached]


class Report:
    """A report that prints results as they come, and keeps all of them in a file, with those of earlier
    calls."""

    def __init__(self, path: Path | None, device: str) -> None:
        self._path = path
        self._device = device
        self._results = dict[str, Any]()
        if path is not None and path.exists():
            document = json.loads(path.read_text())
            if document["device"] == device:
                self._results = document["checks"]

    def has_passed(self, name: str) -> bool:
        return self._results.get(name, {}).get("status") == "passed"

    def add(self, name: str, result: dict[str, Any]) -> None:
        output = result.pop("whole_output", "")
        if self._path is not None and output:
            with self._path.with_suffix(".txt").open("a") as file:
                file.write(f"==== {name}: {result['status']}\n{output}\n")
        self._results[name] = result
        print(f"{name:<16} {result['status']:<8} {result['seconds']:6.0f} s  {result.get('summary', '')}")
        for test in result.get("tests", ()):
            if test["outcome"] != "passed":
                print(f"    {test['outcome']}: {test['name']}: {test['message'].partition(chr(10))[0]}")
        for line in result.get("output", ())[-12:]:
            print(f"    | {line[:200]}")
        sys.stdout.flush()
        if self._path is not None:
            document = {"benchmark": "gpu_check", "device": self._device, "checks": self._results}
            part = self._path.with_suffix(".part")
            part.write_text(json.dumps(document, indent=2))
            part.replace(self._path)

    @property
    def failed(self) -> list[str]:
        """The checks that failed, or for which there was no time."""
        statuses = ("failed", NO_TIME)
        return [name for name, result in self._results.items() if result["status"].startswith(statuses)]


def run_all(names: list[str], device: str, report: Report, *, minutes: float) -> None:
    """Run checks one by one, as long as there is time."""
    end = time.monotonic() + 60 * minutes
    with _scratch() as scratch:
        for name in names:
            left = end - time.monotonic()
            if left < _LEAST_SECONDS:
                report.add(name, {"about": CHECKS[name].about, "status": NO_TIME, "seconds": 0.0})
                continue
            try:
                result = run_check(name, device, scratch, most_seconds=left)
            except Exception as error:  # Whatever it is, the next check runs.
                why = f"failed: {type(error).__name__}: {error}"
                result = {"about": CHECKS[name].about, "status": why, "seconds": 0.0}
            report.add(name, result)


@contextmanager
def _scratch() -> Iterator[Path]:
    """Make a temporary directory, in memory if there is enough."""
    in_memory = _SHARED.is_dir() and shutil.disk_usage(_SHARED).free > _SCRATCH_BYTES
    with tempfile.TemporaryDirectory(prefix="gpu-check-", dir=_SHARED if in_memory else None) as path:
        yield Path(path)


def main() -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--json", type=Path, metavar="OUT", help="where results are written, after every check; checks that "
        "have passed by this file do not run again; OUT with the suffix .txt gets what the checks print")
    add("--only", nargs="+", choices=CHECKS, metavar="NAME", help=f"of {', '.join(CHECKS)}")
    add("--minutes", type=float, default=_MINUTES, help=f"time for all checks; default: {_MINUTES:g}")
    args = parser.parse_args()
    if args.json is not None and not args.json.absolute().parent.is_dir():
        parser.error(f"--json {args.json}: there is no directory {args.json.absolute().parent}")
    if args.device == "cuda":
        import torch  # Imported only here: the checks are other processes.

        if not torch.cuda.is_available():
            print("gpu_check: there is no CUDA device (torch.cuda.is_available() is false)", file=sys.stderr)
            return 2
    report = Report(args.json, args.device)
    device = "cuda:0" if args.device == "cuda" else "cpu"
    names = args.only or [name for name in CHECKS if not report.has_passed(name)]
    run_all(names, device, report, minutes=args.minutes)
    if args.only is None:
        for name, about in NEED_TWO_GPUS.items():
            why = f"{about}: needs two GPUs"
            report.add(name, {"about": about, "status": "not run", "seconds": 0.0, "summary": why})
    print(f"failed: {', '.join(report.failed)}" if report.failed else "all passed")
    return int(bool(report.failed))


if __name__ == "__main__":
    sys.exit(main())
