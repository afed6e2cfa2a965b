"""Trains examples/control/hil_serl.py in full, with demonstrations only, and with neither, and draws curves.

    python benchmarks/measure/hil_serl.py [--picture docs/hil-serl.png]

Runs are of one process and one thread, one after another. Finished runs in the directory are not repeated.
The exit code is 1 if a goal was missed.
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from rich.table import Table

from benchmarks.harness import Goal, machine, progress, report
from realhf.user_input.files import read_json_lines

EXAMPLE = "examples/control/hil_serl.py"
ARMS = {
    "full": (), "demonstrations only": ("--no-helps",), "neither": ("--no-helps", "--demonstrations", "0")}
SUCCESS = "alone/success"
SHARE = "human/share"
_WINDOW = 20  # Steps over which the person's share is averaged.


@dataclass
class Options:
    """Trains the example with and without the person."""

    seeds: tuple[int, ...] = (0, 1, 2)
    out: Path = Path("runs/hil_serl")
    """Directory for the runs."""
    picture: Path | None = None
    """File for the picture of the curves."""
    json: bool = False
    """Print one JSON document."""


def main() -> int:
    """Train all; print the table and the goals; return the exit code."""
    options = tyro.cli(Options, description=__doc__)
    columns = ("", "seed", "successes of 100", "steps of a success", "person first", "person last", "seconds")
    table = Table(*columns)
    last: dict[str, list[float]] = {}
    curves: dict[str, list[list[dict[str, Any]]]] = {}
    goals = []
    for arm, words in ARMS.items():
        for seed in options.seeds:
            out = options.out / f"{arm.replace(' ', '_')}-{seed}"
            seconds = train(out, seed, words)
            steps = [row for _, row in read_json_lines(out / "metrics.jsonl")]
            test = [row for row in steps if SUCCESS in row][-1]
            shares = averages(steps)
            first, end = shares[0][1], shares[-1][1]
            last.setdefault(arm, []).append(100 * test[SUCCESS])
            curves.setdefault(arm, []).append(steps)
            table.add_row(
                arm, str(seed), f"{100 * test[SUCCESS]:.0f}", f"{test['alone/steps']:.1f}",
                f"{100 * first:.0f} %", f"{100 * end:.1f} %", f"{seconds:.0f}")
            if arm == "full":
                goals.append(Goal(f"seed {seed}: successes of 100", 100 * test[SUCCESS], at_least=95))
                goals.append(Goal(f"seed {seed}: share of the person's steps, %", 100 * end, at_most=5))
    means = {arm: statistics.fmean(values) for arm, values in last.items()}
    full, shown, neither = (means[arm] for arm in ARMS)
    goals.append(Goal("full less demonstrations only", full - shown, at_least=1))
    goals.append(Goal("demonstrations only less neither", shown - neither, at_least=1))
    if options.picture is not None:
        draw(curves, options.picture)
    document = {"benchmark": "hil_serl", "machine": machine(), "successes": last}
    return report(document, tables=[table], goals=goals, as_json=options.json)


def train(out: Path, seed: int, words: Sequence[str]) -> float:
    """Run the example, or what is left of it, unless it has been run before; return its seconds."""
    command = [sys.executable, "-m", "realhf", "run", EXAMPLE, "--out", str(out), "--seed", str(seed), *words]
    if not (out / "summary.json").exists():
        progress(str(out))
        subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True, capture_output=True)
    return float(json.loads((out / "summary.json").read_text())["seconds"])


def averages(steps: list[dict[str, Any]]) -> list[tuple[int, float]]:
    """Return steps, and the person's share over windows of steps before them; the first step is left out, in
    which the person shows the task."""
    windows = (steps[i : i + _WINDOW] for i in range(1, len(steps) - _WINDOW + 1))
    return [(window[-1]["step"], statistics.fmean(row[SHARE] for row in window)) for window in windows]


def draw(curves: dict[str, list[list[dict[str, Any]]]], path: Path) -> None:
    """Draw successes by steps of the environment, and the share of these that the person makes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for number, (arm, runs) in enumerate(curves.items()):
        color = f"C{number}"
        tested = [[(row["step"], 100 * row[SUCCESS]) for row in steps if SUCCESS in row] for steps in runs]
        for points in tested:
            left.plot(*zip(*points, strict=True), color=color, alpha=0.35, linewidth=1)
        means = [statistics.fmean(value for _, value in at) for at in zip(*tested, strict=True)]
        left.plot([step for step, _ in tested[0]], means, color=color, linewidth=2, label=arm)
    for seed, steps in enumerate(curves["full"]):
        points = [(step, 100 * share) for step, share in averages(steps)]
        right.plot(*zip(*points, strict=True), linewidth=1.2, label=f"run {seed + 1}")
    right.axhline(5, color="gray", linestyle="--", linewidth=1)
    left.set_title("Successes of 100 episodes alone", fontsize=10)
    right.set_title(f"Steps by the simulated person, % of {_WINDOW} steps of training", fontsize=10)
    left.legend(loc="upper left", fontsize=8)
    right.legend(loc="upper right", fontsize=8)
    for axes in (left, right):
        axes.set_xlabel("step of training (32 steps of the environment, 16 updates)", fontsize=9)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
