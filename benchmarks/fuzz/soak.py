"""Runs many steps of a very small GRPO on four processes, and watches memory and open files of each rank.

    python benchmarks/fuzz/soak.py                    # 1,000 steps, some minutes
    python benchmarks/fuzz/soak.py --steps 200 --json

The run is `realhf run` with a checkpoint every 20 steps. Resident memory and file descriptors of every worker
are read from /proc once a second. A straight line is fitted to the second half of the samples; its slope is
given per 1,000 steps. The exit code is 1 if a goal was missed.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from rich.table import Table

from benchmarks.harness import Goal, machine, report
from realhf.cli.launch import WORKER_NAME
from tests.cli_tools import write_experiment

NUM_RANKS = 4
GOAL_MIB = 10.0
"""Largest growth of a rank's resident memory in 1,000 steps; the history of metrics takes a part of it."""


def workers(launcher: int) -> dict[int, int]:
    """Return rank -> process id of the launcher's living workers, which a child of it has forked."""
    workers_of_host = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                name = (entry / "comm").read_text().strip()
                if name.startswith(WORKER_NAME) and parent_of(parent_of(int(entry.name))) == launcher:
                    workers_of_host[int(name.removeprefix(WORKER_NAME))] = int(entry.name)
            except OSError:  # It has just ended.
                continue
    return workers_of_host


def parent_of(pid: int) -> int:
    """Return the process id of a process's parent."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def sample(pid: int) -> tuple[float, int]:
    """Return the resident memory of a process in MiB, and its number of file descriptors."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20, len(os.listdir(f"/proc/{pid}/fd"))


def soak(steps: int) -> tuple[dict[int, list[tuple[int, float, int]]], int, list[int]]:
    """Run the steps; return rank -> samples (step, MiB, files), the exit code, and the processes left."""
    samples: dict[int, list[tuple[int, float, int]]] = {rank: [] for rank in range(NUM_RANKS)}
    with tempfile.TemporaryDirectory() as directory:
        experiment = write_experiment(
            Path(directory), steps=steps, eval_dataset=None, checkpoint_every=20, log_every=100)
        out = Path(directory, "run")
        command = [sys.executable, "-m", "realhf", "run", str(experiment), "--nproc", str(NUM_RANKS)]
        process = subprocess.Popen([*command, "--out", str(out)], env=os.environ | {"OMP_NUM_THREADS": "1"})
        seen: set[int] = set()
        metrics = out / "metrics.jsonl"
        while process.poll() is None:
            time.sleep(1.0)
            step = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
            for rank, pid in workers(process.pid).items():
                seen.add(pid)
                if 0 < step < steps:  # Pictures are drawn after the last step.
                    try:
                        samples[rank].append((step, *sample(pid)))
                    except OSError:  # It has just ended.
                        continue
    return samples, process.returncode, [pid for pid in seen if Path(f"/proc/{pid}").exists()]


def slopes(samples: list[tuple[int, float, int]]) -> tuple[float, float]:
    """Return the growth in MiB and in files per 1,000 steps over the second half of the samples."""
    step, mib, files = np.array(samples[len(samples) // 2 :], dtype=float).T
    growth = [1000 * float(np.polyfit(step, values, 1)[0]) for values in (mib, files)]
    return growth[0], growth[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000, help="steps of the run")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args()
    start = time.monotonic()
    samples, code, left = soak(args.steps)
    ranks = {}
    titles = ("MiB at the end", "MiB per 1,000 steps", "files at the end", "files per 1,000 steps")
    table = Table("rank", "samples", *titles)
    for rank, of_rank in samples.items():
        mib, files = slopes(of_rank)
        ranks[rank] = {"samples": len(of_rank), "mib": of_rank[-1][1], "mib_per_1000_steps": mib,
                       "files": of_rank[-1][2], "files_per_1000_steps": files}
        cells = (f"{of_rank[-1][1]:.0f}", f"{mib:.2f}", str(of_rank[-1][2]), f"{files:.2f}")
        table.add_row(str(rank), str(len(of_rank)), *cells)
    goals = [
        Goal("exit code", code, at_most=0),
        Goal("processes left", len(left), at_most=0),
        Goal("largest growth, MiB per 1,000 steps", max(r["mib_per_1000_steps"] for r in ranks.values()),
             at_most=GOAL_MIB),
        Goal("largest growth, files per 1,000 steps", max(r["files_per_1000_steps"] for r in ranks.values()),
             at_most=0.5),
    ]
    seconds = time.monotonic() - start
    document = {"machine": machine(), "steps": args.steps, "seconds": seconds, "ranks": ranks}
    return report(document, tables=[table], goals=goals, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
