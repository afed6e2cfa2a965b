"""Measures how soon a run starts on a large JSONL file, and how much memory its processes need.

    python benchmarks/measure/large_dataset.py                        # 2 GB, and a small file to compare with
    python benchmarks/measure/large_dataset.py --gb 2 --row-bytes 100 # short rows: more of them

It writes the file into a temporary directory, and runs one GRPO step of a tiny model on it with `realhf run`
in two processes. The time ends when the first step is written. The memory is the peak of the resident pages
of each process: the one that starts the run, and its two workers. The exit code is 1 if a goal was missed.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks import harness
from tests.hub import model_repository

ROOT = Path(__file__).parents[2]

_MAX_SECONDS = 20.0
_MAX_GIB = 1.0
_NPROC = 2
_SMALL_ROWS = 1000
_EXPERIMENT = """
from realhf import GRPO, DatasetConfig, OptimizerConfig, Role, SamplingConfig


def reward(completions, level):
    return [float(len(text) % (2 + number % 3)) for text, number in zip(completions, level)]


experiment = GRPO(
    actor=Role(model={model!r}, optimizer=OptimizerConfig()), dataset=DatasetConfig({data!r}),
    reward_function=reward, sampling=SamplingConfig(max_new_tokens=4), batch_size=8, group_size=2, steps=1,
    checkpoint_every=0,
)
"""


@dataclass(frozen=True)
class Measured:
    seconds: float
    gib: tuple[float, ...]
    """Peaks of the processes, the largest first."""
    cpu_seconds: float
    """CPU time of the busiest process: a bound of its seconds that other load does not change."""


def write_rows(path: Path, *, num_bytes: float, row_bytes: int) -> int:
    """Write rows of about `row_bytes` until the file has `num_bytes`; return their number."""
    filling = "x" * max(0, row_bytes - 60)
    written = 0
    count = 0
    with path.open("w") as file:
        while written < num_bytes:
            rows = [
                json.dumps({"prompt": f"{i} + {i % 7} =", "level": i % 5, "notes": filling})
                for i in range(count, count + 10_000)
            ]
            written += file.write("\n".join(rows) + "\n")
            count += len(rows)
    return count


def run(data: Path, directory: Path) -> Measured:
    """Run one step and return the seconds until it is written, and the peaks of the processes."""
    out = directory / f"run-{data.name}"
    experiment = directory / f"{data.stem}_experiment.py"
    experiment.write_text(_EXPERIMENT.format(model=str(directory / "model"), data=str(data)))
    words = [sys.executable, "-m", "realhf", "run", str(experiment), "--nproc", str(_NPROC)]
    words += ["--out", str(out)]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HOME": str(directory / "home")}
    peaks: dict[int, float] = {}
    cpu: dict[int, float] = {}
    started = time.monotonic()
    process = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    seconds = 0.0
    errors: list[bytes] = []
    reader = threading.Thread(target=lambda: errors.extend(process.stderr or ()))
    reader.start()
    while process.poll() is None:
        if not seconds and (out / "metrics.jsonl").exists() and (out / "metrics.jsonl").stat().st_size:
            seconds = time.monotonic() - started
        for pid in _tree(process.pid):
            peaks[pid] = max(peaks.get(pid, 0.0), _peak_gib(pid))
            cpu[pid] = max(cpu.get(pid, 0.0), _cpu_seconds(pid))
        time.sleep(0.05)
    reader.join()
    if process.returncode:
        raise RuntimeError(b"".join(errors).decode()[-2000:])
    largest = sorted(peaks.values(), reverse=True)[: _NPROC + 1]
    return Measured(seconds or time.monotonic() - started, tuple(largest), max(cpu.values()))


def _tree(pid: int) -> list[int]:
    """Return a process and all that it has started."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(descendant for child in children for descendant in _tree(int(child)))]


def _peak_gib(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    peaks = [int(line.split()[1]) for line in lines if line.startswith("VmHWM")]
    return peaks[0] / 2**20 if peaks else 0.0


def _cpu_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # utime and stime


def main() -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    add = parser.add_argument
    add("--gb", type=float, default=2.0, help="size of the file in GB; default: 2")
    add("--row-bytes", type=int, default=1000, help="bytes of a row; default: 1000")
    add("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    num_bytes = options.gb * 1e9
    with harness.scratch_directory(int(num_bytes * 3)) as scratch:
        directory = Path(scratch)
        (directory / "model").mkdir()
        for name, content in model_repository().files.items():
            (directory / "model" / name).write_bytes(content)
        small = directory / "small.jsonl"
        write_rows(small, num_bytes=_SMALL_ROWS * options.row_bytes, row_bytes=options.row_bytes)
        large = directory / "large.jsonl"
        num_rows = write_rows(large, num_bytes=num_bytes, row_bytes=options.row_bytes)
        harness.progress(f"wrote {num_rows} rows")
        files = {"small": small, "large": large}
        results = {name: run(path, directory) for name, path in files.items()}
    table = Table("file", "seconds to the first step", "CPU s of a process", "peak GiB of each process")
    for name, measured in results.items():
        peaks = ", ".join(f"{gib:.2f}" for gib in measured.gib)
        table.add_row(name, f"{measured.seconds:.1f}", f"{measured.cpu_seconds:.1f}", peaks)
    goals = [
        harness.Goal("seconds to the first step", results["large"].seconds, at_most=_MAX_SECONDS),
        harness.Goal("peak GiB of a process", max(results["large"].gib), at_most=_MAX_GIB),
    ]
    document: dict[str, Any] = {
        "machine": harness.machine(), "rows": num_rows, "gb": options.gb,
        "files": {name: asdict(measured) for name, measured in results.items()},
    }
    return harness.report(document, tables=[table], goals=goals, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
