"""Trains the demo's model with every algorithm; those of RL start from one model and get equal compute.

    python benchmarks/measure/algorithms.py [--json] [--only GRPO DAPO] [--out DIR] [--picture FILE]

The compute of GRPO's run, in model FLOPs, is the budget: an algorithm's score is that of its last evaluation
within it. The others cost as much per step or more. Finished runs in the directory are not repeated. Runs are
of one process; another plan gives the same numbers (tests/algorithms/test_algorithms_run.py).
"""

import dataclasses
import json
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import tyro
from rich.table import Table

from benchmarks.harness import Goal, machine, progress, report
from benchmarks.measure.algorithm_settings import experiments
from examples.arithmetic import prepare

REPO = Path(__file__).parents[2]
REFERENCE = "GRPO"
GAIN = 0.2
TAUGHT = "Distillation"  # Its teacher is the model of the reference.
NAMES = tuple(experiments(Path()))
SUPERVISED = {
    "RewardModel": ("reward_model", "reward", "verifier", "eval/accuracy"),
    "PairwiseRewardModel": ("pairwise_reward_model", "reward", "pairs", "eval/accuracy"),
    "DPO": ("dpo", "actor", "pairs", "eval/rewards/accuracies"),
}
"""Algorithm -> its example, the role that it trains, its data, and the held-out metric."""
ACCURACY = 0.95
START_SCORE = 0.3
"""What SFT must reach. Its teacher mostly forgets to carry; one who always does is right in 0.31."""


@dataclasses.dataclass
class Options:
    only: tuple[str, ...] = (*NAMES, *SUPERVISED)
    """The algorithms to run, by name."""
    seed: int = 0
    """Decides the data, the initial weights and all samples."""
    out: Path = Path("runs/algorithms")
    """Directory for the runs."""
    picture: Path | None = None
    """File for the picture of all curves."""
    jobs: int = 2
    """Runs at a time, each of one process and one thread."""
    json: bool = False
    """Print one JSON document."""


def main(options: Options) -> None:
    if unknown := set(options.only) - {*NAMES, *SUPERVISED}:
        sys.exit(f"--only {' '.join(unknown)}: legal are {', '.join((*NAMES, *SUPERVISED))}")
    make_data(options)
    warm_up(options)
    names = [name for name in NAMES if name in options.only or name == REFERENCE]
    with ThreadPoolExecutor(options.jobs) as jobs:
        trained = {name: jobs.submit(train, options, name) for name in names if name != TAUGHT}
        learned = {
            name: jobs.submit(supervise, options, name) for name in SUPERVISED if name in options.only
        }
        if TAUGHT in names:
            trained[REFERENCE].result()
            trained[TAUGHT] = jobs.submit(train, options, TAUGHT)
        runs = {name: future.result() for name, future in trained.items()}
        measured = {name: future.result() for name, future in learned.items()}
    budget = max(record["compute/flops"] for record in runs[REFERENCE])
    rows = {name: summary(records, budget) for name, records in runs.items()}
    if options.picture is not None:
        draw(runs, budget, options.picture)
    table = Table("algorithm", "score before", "after", "steps", "seconds", "clip fraction")
    for name, row in rows.items():
        table.add_row(
            name, f"{row['before']:.3f}", f"{row['after']:.3f}", str(row["steps"]), f"{row['seconds']:.0f}",
            f"{row['clip_fraction']:.4f}")
    others = Table("algorithm", "held-out metric", "before", "after")
    of_start = first_and_last(metrics(options, "sft"), "eval/score")
    others.add_row("SFT", "eval/score", *(f"{score:.3f}" for score in of_start))
    for name, (before, after) in measured.items():
        others.add_row(name, SUPERVISED[name][-1], f"{before:.3f}", f"{after:.3f}")
    goals = [
        Goal(f"gain of {name}", row["after"] - row["before"], at_least=GAIN) for name, row in rows.items()
    ]
    goals.append(Goal("score of SFT", of_start[1], at_least=START_SCORE))
    goals += [
        Goal(f"{SUPERVISED[name][-1]} of {name}", after, at_least=ACCURACY)
        for name, (_, after) in measured.items()
    ]
    if TAUGHT in rows:
        behind = rows[REFERENCE]["after"] - rows[TAUGHT]["after"]
        goals.append(Goal("student behind its teacher", behind, at_most=0.03))
    document = {"machine": machine(), "budget_flops": budget, "algorithms": rows, "supervised": measured}
    sys.exit(report(document, tables=[table, others], goals=goals, as_json=options.json))


def summary(records: list[dict[str, Any]], budget: float) -> dict[str, float]:
    """Return the scores before and after training within the budget, and what that took."""
    scored = [record for record in records if "eval/score" in record]
    spent = [record for record in scored if record["compute/flops"] <= budget]
    trained = [record for record in records if 0 < record["step"] <= spent[-1]["step"]]
    return {
        "before": scored[0]["eval/score"], "after": spent[-1]["eval/score"], "steps": len(trained),
        "seconds": spent[-1]["compute/device_seconds"],
        "clip_fraction": statistics.mean(record["actor/clip_fraction"] for record in trained),
    }


def make_data(options: Options) -> None:
    """Make the data, not in a thread, as importing transformers in two threads fails."""
    prepare(options.out / "task", seed=options.seed)


def warm_up(options: Options) -> None:
    """Train the model from which all algorithms start."""
    task = options.out / "task"
    files = {"actor.model": task / "model", "dataset.path": task / "sft.jsonl",
             "eval-dataset.path": task / "held_out.jsonl"}
    run(options, "examples/sft.py", "sft", files)


def train(options: Options, name: str, **settings: float) -> list[dict[str, Any]]:
    """Run an algorithm, and return the metrics of its steps; step 0 is the evaluation before the first."""
    environment = {"ALGORITHM": name, "TASK": str(options.out.resolve())}
    run(options, "benchmarks/measure/algorithm_settings.py", name, settings, **environment)
    records = metrics(options, name)
    progress(f"{options.out / name}: {records[-1]['eval/score']:.3f}")
    return records


def supervise(options: Options, name: str) -> tuple[float, float]:
    """Run the example of a supervised algorithm, and return its held-out metric before and after."""
    example, role, data, metric = SUPERVISED[name]
    task = options.out / "task"
    files = {f"{role}.model": options.out / "sft" / "hf" / "step_700", "dataset.path": task / f"{data}.jsonl",
             "eval-dataset.path": task / f"held_out_{data}.jsonl"}
    run(options, f"examples/{example}.py", name, files)
    return first_and_last(metrics(options, name), metric)


def first_and_last(records: list[dict[str, Any]], metric: str) -> tuple[float, float]:
    """Return the first and the last value of a metric."""
    values = [record[metric] for record in records if metric in record]
    progress(f"{metric}: {values[-1]:.3f}")
    return values[0], values[-1]


def metrics(options: Options, name: str) -> list[dict[str, Any]]:
    """Return the metrics of a run, by step."""
    lines = (options.out / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def run(options: Options, experiment: str, name: str, settings: dict, **environment: str) -> None:
    """Run an experiment unless it has been run before."""
    out = options.out / name
    if (out / "summary.json").exists():
        return
    settings = {"seed": options.seed, **settings}
    words = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    command = [sys.executable, "-m", "realhf", "run", experiment, "--out", str(out), *words]
    here = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)} | environment
    done = subprocess.run(command, env=here, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")


def draw(runs: dict[str, list[dict[str, Any]]], budget: float, path: Path) -> None:
    """Draw the held-out scores of all algorithms over the model FLOPs so far."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for number, (name, records) in enumerate(runs.items()):
        scored = [record for record in records if "eval/score" in record]
        axes.plot(
            [record["compute/flops"] / 1e12 for record in scored],
            [record["eval/score"] for record in scored],
            label=name, color=f"C{number % 10}", linestyle=("-", "--")[number // 10])
    axes.axvline(budget / 1e12, color="black", linewidth=0.8, linestyle=":")
    axes.set(xlabel="model TFLOPs so far (dotted: the budget)", ylabel="held-out score")
    axes.set_xlim(0, 1.15 * budget / 1e12)
    axes.set_title("The demo's task, from one supervised model; one seed", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main(tyro.cli(Options))
