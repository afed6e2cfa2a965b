"""Runs everything that needs a GPU, in one command: the tests marked `gpu`, then the measurements of speed.

    python benchmarks/gpu_check.py --json gpu.json
    python benchmarks/gpu_check.py --only models nccl        # some of the checks
    python benchmarks/gpu_check.py --device cpu              # a try of the checks themselves, with tiny sizes

Each check is a separate process with a time limit, so that a failure does not affect the others. Some tests
run at the same time; the measurements then run alone. Results are printed and written as they come.

The exit code is 1 if a check failed, and 2 if there is no CUDA device.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
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
    """A check: a file of tests/gpu, or arguments of gpu_speed.py."""

    about: str
    seconds: int
    tests: str = ""
    speed: tuple[str, ...] = ()


CHECKS = {
    "environment": Check("what there is, and its limits", 120, speed=("environment",)),
    "models": Check("families against transformers: logits, gradients, greedy tokens", 300, "test_models.py"),
    "generation": Check("tokens and log-probs, with few slots and little memory", 400, "test_generation.py"),
    "training": Check("steps beside those of the CPU; LoRA, recomputing", 300, "test_training.py"),
    "nccl": Check("collectives of one process and of two", 200, "test_nccl.py"),
    "runs": Check("GRPO runs, twice the same", 300, "test_runs.py"),
    "generate-equal": Check("speed of generation, equal lengths", 240, speed=("generation", "equal")),
    "generate-spread": Check("the same, spread lengths", 240, speed=("generation", "spread")),
    "train-equal": Check("speed of training, equal lengths", 200, speed=("training", "equal")),
    "train-spread": Check("the same, spread lengths", 200, speed=("training", "spread")),
}


def run_check(name: str, device: str, scratch: Path) -> dict[str, Any]:
    """Run a check, and return its `status`, its `seconds`, its findings, and the end of its output."""
    check = CHECKS[name]
    directory = scratch / name
    directory.mkdir()
    found = directory / "found"
    python = [sys.executable, "-u"]
    if check.tests:
        command = [*python, "-m", "pytest", "-v", "-m", "gpu", "--tb=short", "-p", "no:cacheprovider",
                   f"tests/gpu/{check.tests}", f"--junitxml={found}"]  # fmt: skip
    else:
        kind, *rest = check.speed
        command = [*python, "benchmarks/gpu_speed.py", kind, device, str(found), *rest]
    start = time.monotonic()
    code = _run(command, _environment(device, directory), directory / "output", seconds=check.seconds)
    lines = (directory / "output").read_text(errors="replace").splitlines()
    result: dict[str, Any] = {"about": check.about, "seconds": round(time.monotonic() - start, 1)}
    ended = f"did not end within {check.seconds} s" if code is None else f"ended with code {code}"
    result["status"] = "passed" if code == 0 else f"failed: {ended}"
    if check.tests and found.exists():
        result["tests"] = tests = list(_tests(found))
        outcomes = Counter(test["outcome"] for test in tests)
        result["summary"] = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
        if code == 0 and set(outcomes) == {"skipped"}:
            result["status"] = "skipped"
    elif found.exists():
        result["found"] = measured = json.loads(found.read_text())
        result["summary"] = _figures(measured)
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
    path = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")])
    more = {
        "PYTHONPATH": path, "TMPDIR": str(directory), "REALHF_GPU_DEVICE": device.split(":")[0],
        "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }  # fmt: skip
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
        }  # fmt: skip


def _figures(found: dict[str, Any]) -> str:
    """Return the measurements as a line of text."""
    if "ratio" not in found:
        peak, copy = (found["bfloat16"][key] for key in ("peak_flops", "copy_bytes_per_second"))
        name = found.get("gpu", "cpu")
        return f"{name}, torch {found['torch']}, {peak / 1e12:.1f} TFLOP/s, copies {copy / 1e9:.0f} GB/s"
    speeds = [f"{name} {speed:.0f}" for name, speed in found["tokens_per_second"].items()]
    memory = [f"{name} {gib:.2f}" for name, gib in found["peak_gib"].items()]
    words = [f"tokens/s: {', '.join(speeds)} ({found['ratio']:.2f})", f"GiB: {', '.join(memory)}"]
    if "decode" in found:
        step = 1000 * found["decode"]["step_seconds"]["ours"]
        words.append(f"decoding step {step:.1f} ms, {found['decode']['efficiency']:.2f} of what is possible")
    if "efficiency" in found:
        shares = [f"{name} {share:.2f}" for name, share in found["efficiency"].items()]
        words.append(f"of the peak: {', '.join(shares)}; losses apart {found['losses_apart']:.1e}")
    return "; ".join(words)


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
    run_all(args.only or list(CHECKS), device, report, at_once=at_once)
    print(f"failed: {', '.join(report.failed)}" if report.failed else "all passed")
    return int(bool(report.failed))


if __name__ == "__main__":
    sys.exit(main())
