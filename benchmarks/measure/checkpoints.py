"""Measures what checkpoints cost a run: time of a step, bytes saved, and host memory.

    python benchmarks/measure/checkpoints.py    # the demo's GRPO on four processes, three repetitions
    python benchmarks/measure/checkpoints.py --steps 8 --repeats 5 --json

The run is that of examples/demo.py (plan grpo-4, batches of 64 x 8 samples), with the task's model drawn at
random instead of the one that the demo trains first. In every repetition it runs without checkpoints, with
one after each step, and with the default period, each time another one first. The time is `timing_s/step`,
from the end of one step to the end of the next, without the first two steps; the ratio is that of the medians
over all repetitions. A run on a busy machine says little: the load is printed, and with --max-load the runs
wait until it is lower.

The memory is the peak of all pages of a process that copies and writes one large tensor, minus what it had
before, divided by the tensor's size. The exit code is 1 if a goal was missed.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from benchmarks import harness
from realhf.checkpoint.run_state import Snapshot

REPO = Path(__file__).parents[2]
PERIODS = {"none": "0", "every step": "1", "default": "15m"}
_WARM_UP = 2
_MAX_RATIO = 1.05
_MAX_COPIES = 1.05
_TENSOR_BYTES = 512 << 20
_POLL_SECONDS = 5.0


def prepare(directory: Path) -> Path:
    """Write the demo's task and return its directory."""
    code = f"from arithmetic import prepare; from pathlib import Path; prepare(Path({str(directory)!r}))"
    subprocess.run([sys.executable, "-c", code], cwd=REPO / "examples", check=True)
    return directory


def run(task: Path, out: Path, *, period: str, steps: int) -> list[float]:
    """Run the demo's GRPO and return the seconds of its steps after the first two."""
    options = {
        "plan": "grpo-4", "out": out, "steps": steps, "eval-every": 0, "checkpoint-every": period,
        "dataset.path": task / "prompts.jsonl", "eval-dataset.path": task / "held_out.jsonl",
        "actor.model": task / "model",
    }
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    command = [sys.executable, "-m", "realhf", "run", "examples/grpo.py", *words, "--actor.random-init"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=REPO, check=True, capture_output=True, env=environment)
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [record["timing_s/step"] for record in records if record["step"] > _WARM_UP]


def wait_for_quiet(max_load: float | None) -> float:
    """Wait until the machine's load is at most `max_load`; return the load."""
    while max_load is not None and os.getloadavg()[0] > max_load:
        time.sleep(_POLL_SECONDS)
    return os.getloadavg()[0]


def copies_in_memory(directory: Path) -> float:
    """Return how much memory a checkpoint of a large tensor takes, in multiples of its size."""

    def status_bytes(key: str) -> int:
        match = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
        assert match is not None
        return int(match[1]) * 1024

    tensor = torch.ones(_TENSOR_BYTES // 4)
    Path("/proc/self/clear_refs").write_text("5")  # Resets the peak.
    before = status_bytes("VmRSS")
    snapshot = Snapshot({"tensor": (((0, len(tensor)),), [(((0, len(tensor)),), tensor)])})
    for number in range(2):
        snapshot.take()
        snapshot.write(directory / f"{number}.safetensors")
    return (status_bytes("VmHWM") - before) / tensor.nbytes


def table(seconds: dict[str, list[float]], ratios: dict[str, float]) -> Table:
    times_table = Table("checkpoints", "median s/step", "fastest", "slowest", "ratio", title="Time of a step")
    for name, times in seconds.items():
        cells = [f"{value:.3f}" for value in (statistics.median(times), min(times), max(times))]
        times_table.add_row(name, *cells, f"{ratios[name]:.3f}")
    return times_table


def main() -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-load", type=float, help="wait for this load before each run")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    args = parser.parse_args()
    hardware = harness.machine()
    seconds: dict[str, list[float]] = {name: [] for name in PERIODS}
    loads = []
    num_bytes = 0
    with harness.scratch_directory(2 << 30) as scratch:
        task = prepare(Path(scratch) / "task")
        names = list(PERIODS)
        for repeat in range(args.repeats):
            shift = repeat % len(names)
            for name in names[shift:] + names[:shift]:
                loads.append(wait_for_quiet(args.max_load))
                out = Path(scratch) / f"{name}_{repeat}".replace(" ", "_")
                times = run(task, out, period=PERIODS[name], steps=args.steps)
                seconds[name] += times
                saved = list(out.glob(f"checkpoints/step_{args.steps}/*"))
                num_bytes = max(num_bytes, sum(path.stat().st_size for path in saved))
                harness.progress(f"{name}: {statistics.median(times):.3f} s/step, load {loads[-1]:.1f}")
        copies = copies_in_memory(Path(scratch))
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    ratios = {name: median / medians["none"] for name, median in medians.items()}
    goals = [
        harness.Goal("one after each step / none", ratios["every step"], at_most=_MAX_RATIO),
        harness.Goal("default period / none", ratios["default"], at_most=_MAX_RATIO),
        harness.Goal("host memory / saved bytes", copies, at_most=_MAX_COPIES),
    ]
    document: dict[str, Any] = {
        "benchmark": "checkpoints", "machine": hardware | {"loads": loads}, "settings": vars(args),
        "seconds": seconds, "ratios": ratios, "checkpoint_bytes": num_bytes, "copies_in_memory": copies,
    }
    if not args.json:
        harness.progress(f"a checkpoint has {num_bytes:,} bytes")
    return harness.report(document, tables=[table(seconds, ratios)], goals=goals, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
