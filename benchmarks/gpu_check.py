"""Runs everything that needs a GPU, in one command: the tests marked `gpu`, then the measurements.

    python benchmarks/gpu_check.py --json gpu.json
    python benchmarks/gpu_check.py --only models nccl        # some of the checks
    python benchmarks/gpu_check.py --device cpu              # a try of the checks themselves, with tiny sizes

Each check is a separate process with a time limit, so that a failure does not affect the others. Some tests
run at the same time; the measurements then run alone. By these limits all checks take less than nine minutes
on one GPU. Results are printed and written as they come; what needs two GPUs is reported as not run.

The exit code is 1 if a check failed, and 2 if there is no CUDA device.
"""

import argparse
import heapq
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
_SCRATCH_BYTES = 16 << 30
_LAST_LINES = 40
_TESTS_AT_ONCE = 4
_SHARED = Path("/dev/shm")


class Check(NamedTuple):
    """A check: a file of tests/gpu, or a program of benchmarks/ and the kind that it measures."""

    about: str
    seconds: int  # After which it is ended, on a GPU.
    tests: str = ""
    program: tuple[str, str] = ("", "")


_SPEED, _GENERATION = "measure/gpu_speed.py", "measure/gpu_generation.py"
CHECKS = {
    "environment": Check("what there is, and its limits", 30, program=(_SPEED, "environment")),
    "models": Check("families against transformers: logits, gradients, greedy tokens", 150, "test_models.py"),
    "generation": Check("tokens and log-probs, with few slots and little memory", 150, "test_generation.py"),
    "training": Check("steps beside those of the CPU; LoRA, recomputing", 150, "test_training.py"),
    "runs": Check("GRPO runs, twice the same bits", 100, "test_runs.py"),
    "nccl": Check("collectives of one process, and of two", 60, "test_nccl.py"),
    "attention": Check(
        "each kind of attention against the formula, up to 8,000 tokens", 40,
        program=(_GENERATION, "attention")),
    "long-prompts": Check("prompts of 8,000 tokens", 45, program=(_GENERATION, "long-prompts")),
    "long-tail": Check("512 rows, a few of them long", 60, program=(_GENERATION, "long-tail")),
    "no-waits": Check("decoding in which the host never waits", 35, program=(_GENERATION, "no-waits")),
    "decode": Check(
        "64 rows beside `generate`, and beside the bandwidth", 45, program=(_SPEED, "generation")),
    "train": Check("share of the fastest product; memory against the prediction", 60,
                   program=(_SPEED, "training")),
}
NEED_TWO_GPUS = {
    "nccl-two-gpus": "collectives and reallocation between two GPUs",
    "tp-graphs": "recorded decoding steps under tensor parallelism",
    "abort": "the end of a run whose peer has died inside a collective",
}
_CPU_SLOWER = 6
"""How many times longer a check may take on a CPU."""


def longest_seconds(names: Iterable[str], *, at_once: int) -> int:
    """Return the most seconds that these checks can take, by their limits."""
    tests = [CHECKS[name].seconds for name in names if CHECKS[name].tests]
    free = [0] * at_once  # When each of the tests' places is free again.
    for seconds in tests:
        heapq.heapreplace(free, free[0] + seconds)
    return max(free) + sum(CHECKS[name].seconds for name in names if not CHECKS[name].tests)


def run_check(name: str, device: str, scratch: Path) -> dict[str, Any]:
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
    limit = check.seconds * (1 if device.startswith("cuda") else _CPU_SLOWER)
    code = _run(command, _environment(device, directory), directory / "output", seconds=limit)
    lines = (directory / "output").read_text(errors="replace").splitlines()
    result: dict[str, Any] = {"about": check.about, "seconds": round(time.monotonic() - start, 1)}
    ended = f"did not end within {limit} s" if code is None else f"ended with code {code}"
    result["status"] = "passed" if code == 0 else f"failed: {ended}"
    if check.tests and results.exists():
        result["tests"] = tests = list(_tests(results))
        outcomes = Counter(test["outcome"] for test in tests)
        result["summary"] = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
        if code == 0 and set(outcomes) == {"skipped"}:
            result["status"] = "skipped"
    elif results.exists():
        result["found"] = measured = json.loads(results.read_text())
        result["summary"] = measured.get("not_run") or figures(measured)
        if "not_run" in measured:
            result["status"] = "not run"
        elif code == 0 and device.startswith("cuda"):
            result["goals_missed"] = missed = goals_missed(name, measured)
            if missed:
                result["status"] = f"failed: {'; '.join(missed)}"
    if code != 0:
        result["output"] = lines[-_LAST_LINES:]
    shutil.rmtree(directory)
    return result


def _run(command: list[str], environment: dict[str, str], output: Path, *, seconds: float) -> int | None:
    """Run a command and return its exit code; None if it was ended after `seconds`."""
    with output.open("w") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:  # End the processes that it has started, too.
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _environment(device: str, directory: Path) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    more = {
        "PYTHONPATH": path, "TMPDIR": str(directory), "REALHF_GPU_DEVICE": device.split(":")[0],
        "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1",
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


def figures(measured: dict[str, Any], prefix: str = "") -> str:
    """Return the measured numbers as a line of text: those of nested mappings, but no lists."""
    words = []
    for name, value in measured.items():
        if isinstance(value, dict) and name not in ("profile", "repetitions"):
            words.append(figures(value, f"{prefix}{name}."))
        elif isinstance(value, str | int | float):
            shown = f"{value:.4g}" if isinstance(value, float) else value
            words.append(f"{prefix}{name} {shown}")
    return ", ".join(words)


def goals_missed(name: str, measured: dict[str, Any]) -> list[str]:
    """Return sentences about what is slower, or needs more memory, than it should on a GPU."""
    if name == "train":
        mfu = measured["mfu"]
        goals = [(mfu >= 0.45, f"training is at {mfu:.2f} of the fastest product, below 0.45")]
        for call, predicted in measured["predicted_gib"].items():
            peak = measured["peak_gib"][call]
            what = f"{call} took {peak:.1f} GiB at its peak, and {predicted:.1f} were predicted"
            goals.append((abs(peak / predicted - 1) <= 0.1, what))
    elif name == "decode":
        ratio, share = measured["ratio"], measured["decode"]["efficiency"]
        goals = [(ratio >= 3, f"generation is {ratio:.1f} times as fast as `generate`, below 3"),
                 (share >= 0.6, f"a decoding step is at {share:.2f} of the limit, below 0.6")]
    else:
        goals = []
    return [sentence for is_reached, sentence in goals if not is_reached]


class Report:
    """A report that prints results as they come, and keeps all of them in a file."""

    def __init__(self, path: Path | None, device: str) -> None:
        self._path = path
        self._device = device
        self._results = dict[str, Any]()

    def add(self, name: str, result: dict[str, Any]) -> None:
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
        return [name for name, result in self._results.items() if result["status"].startswith("failed")]


def run_all(names: list[str], device: str, report: Report, *, at_once: int) -> None:
    """Run the environment check, then the tests, `at_once` at a time, then the measurements one by one."""
    with _scratch() as scratch:
        tests = [name for name in names if CHECKS[name].tests]
        first = [name for name in names if name == "environment"]
        for name in first:
            report.add(name, run_check(name, device, scratch))
        with ThreadPoolExecutor(at_once) as pool:
            waiting = {name: pool.submit(run_check, name, device, scratch) for name in tests}
            for name, result in waiting.items():
                report.add(name, result.result())
        for name in names:
            if name not in (*first, *tests):
                report.add(name, run_check(name, device, scratch))


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
    add("--json", type=Path, metavar="OUT", help="where results are written, after every check")
    add("--only", nargs="+", choices=CHECKS, metavar="NAME", help=f"of {', '.join(CHECKS)}")
    add("--at-once", type=int, help=f"files of tests; default: {_TESTS_AT_ONCE} on cuda, 1 on cpu")
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
    at_once = args.at_once or (_TESTS_AT_ONCE if args.device == "cuda" else 1)
    names = args.only or list(CHECKS)
    if args.device == "cuda":
        print(f"at most {longest_seconds(names, at_once=at_once)} seconds", flush=True)
    run_all(names, device, report, at_once=at_once)
    if args.only is None:
        for name, about in NEED_TWO_GPUS.items():
            why = f"{about}: needs two GPUs"
            report.add(name, {"about": about, "status": "not run", "seconds": 0.0, "summary": why})
    print(f"failed: {', '.join(report.failed)}" if report.failed else "all passed")
    return int(bool(report.failed))


if __name__ == "__main__":
    sys.exit(main())
