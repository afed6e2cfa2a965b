"""Compares held-out scores of asynchronous GRPO with synchronous GRPO on the demo's task, by lag and seed.

    python benchmarks/measure/lag_scores.py [--json] [--lags 0 1 4] [--seeds 0 1] [--out DIR] [--picture FILE]

Every seed has its own data and its own warmed-up model, from which all lags start. Finished runs in the
directory are not repeated. Runs are of one process: another plan gives the same numbers (tests/runtime/
test_lag.py). The goal is a score within 0.03 of the synchronous one, as means over the seeds.
"""

import dataclasses
import json
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import tyro
from rich.table import Table

from benchmarks.harness import Goal, machine, progress, report
from examples.arithmetic import prepare

REPO = Path(__file__).parents[2]
MARGIN = 0.03


@dataclasses.dataclass
class Options:
    lags: tuple[int, ...] = (0, 1, 2, 4, 8)
    seeds: tuple[int, ...] = (0, 1, 2)
    steps: int = 130
    lr: float = 1.5e-4
    """Learning rate of GRPO. Lag needs a lower one: at 4e-4, lag 0 and 1 learn faster and lag 8 collapses."""
    out: Path = Path("runs/lag-scores")
    """Directory for the runs."""
    picture: Path | None = None
    """File for the picture of all curves."""
    jobs: int = 2
    """Runs at a time, each of one process and one thread."""
    json: bool = False
    """Print one JSON document."""


def main(options: Options) -> None:
    curves: dict[int, list[list[tuple[int, float]]]] = {lag: [] for lag in options.lags}
    make_data(options)
    with ThreadPoolExecutor(options.jobs) as jobs:
        list(jobs.map(lambda seed: warm_up(options, seed), options.seeds))
        cases = [(seed, lag) for seed in options.seeds for lag in options.lags]
        runs = jobs.map(lambda case: train(options, *case), cases)
        for (seed, lag), curve in zip(cases, runs, strict=True):
            curves[lag].append(curve)
            progress(f"seed {seed}, lag {lag}: {curve[-1][1]:.3f}")
    results = {lag: [curve[-1][1] for curve in of_lag] for lag, of_lag in curves.items()}
    if options.picture is not None:
        draw(curves, options.picture)
    table = Table("lag", "final score by seed", "mean", "apart from lag 0")
    means = {lag: statistics.mean(finals) for lag, finals in results.items()}
    apart = {lag: mean - means[options.lags[0]] for lag, mean in means.items()}
    for lag, finals in results.items():
        by_seed = " ".join(f"{score:.3f}" for score in finals)
        table.add_row(str(lag), by_seed, f"{means[lag]:.3f}", f"{apart[lag]:+.3f}")
    worst = max(abs(difference) for difference in apart.values())
    goals = [Goal("largest distance of a mean score from lag 0", worst, at_most=MARGIN)]
    document = {"machine": machine(), "scores": results, "steps": options.steps}
    sys.exit(report(document, tables=[table], goals=goals, as_json=options.json))


def train(options: Options, seed: int, lag: int) -> list[tuple[int, float]]:
    """Train one model with GRPO; return steps and held-out scores."""
    directory = options.out / f"seed{seed}"
    task = directory / "task"
    settings = {
        "actor.model": directory / "sft" / "hf" / "step_700", "dataset.path": task / "prompts.jsonl",
        "max-lag": lag, "steps": options.steps, "actor.optimizer.lr": options.lr,
    }
    run("async_grpo", directory / f"lag{lag}", seed, task, settings)
    return scores(directory / f"lag{lag}")


def make_data(options: Options) -> None:
    """Make the data of all seeds."""
    for seed in options.seeds:
        prepare(options.out / f"seed{seed}" / "task", seed=seed)


def warm_up(options: Options, seed: int) -> None:
    """Train the model of a seed, which imitates the careless teacher."""
    directory = options.out / f"seed{seed}"
    task = directory / "task"
    files = {"actor.model": task / "model", "dataset.path": task / "sft.jsonl"}
    run("sft", directory / "sft", seed, task, files)


def run(example: str, out: Path, seed: int, task: Path, settings: dict) -> None:
    """Run an example unless it has been run before."""
    if (out / "summary.json").exists():
        return
    settings = {"seed": seed, "eval-dataset.path": task / "held_out.jsonl", **settings}
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "realhf", "run", f"examples/{example}.py", "--out", str(out), *words]
    here = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
    done = subprocess.run(command, cwd=REPO, env=here, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")


def scores(out: Path) -> list[tuple[int, float]]:
    """Return steps and held-out scores of a run."""
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(record["step"], record["eval/score"]) for record in records if "eval/score" in record]


def draw(curves: dict[int, list[list[tuple[int, float]]]], path: Path) -> None:
    """Draw the mean of each lag's curves, with the range over the seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for lag, of_lag in curves.items():
        steps = [step for step, _ in of_lag[0]]
        values = [[score for _, score in curve] for curve in of_lag]
        by_step = list(zip(*values, strict=True))
        (line,) = axes.plot(steps, [statistics.mean(v) for v in by_step], label=f"max_lag {lag}")
        axes.fill_between(steps, list(map(min, by_step)), list(map(max, by_step)),
                          color=line.get_color(), alpha=0.12, linewidth=0)
    axes.set(xlabel="updates", ylabel="held-out score")
    axes.set_title("Mean and range over the seeds", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main(tyro.cli(Options))
