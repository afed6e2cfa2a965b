"""Trains the examples with environments, and compares ways to credit turns.

    python benchmarks/measure/environments.py examples [--picture docs/environments.png]
    python benchmarks/measure/environments.py credit [--picture docs/turn-credit.png]

`examples` trains each example with several seeds; the calculator's seconds are those of its supervised phase,
too. `credit` trains two tasks with each credit: six questions in a row with a reward for each right answer,
and examples/guess_number.py, which gives most of its reward at its end.

Runs are of one process and one thread, one after another. Finished runs in the directory are not repeated.
The exit code is 1 if a goal was missed.
"""

import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from rich.table import Table

from benchmarks.harness import Goal, machine, progress, report
from realhf.user_input.files import read_json_lines

REPO = Path(__file__).parents[2]
TITLES = {
    "guess_number": "guess_number: score", "frozen_lake": "frozen_lake: reaches the goal",
    "calculator": "calculator: right answers", "code_repair": "code_repair: score",
    "real_model_tries": "real_model_tries: score"}
"""Examples, and what their held-out scores are."""
BEFORE = {"calculator": "calculator_sft"}
"""Example -> the example whose model it starts from."""
GAIN = 0.3
MOST_SECONDS = 600
CREDITS = ("trajectory", "per_turn", "to_go")
DISCOUNT = "0.2"
"""Of the last two, as an answer has no part in whether later ones are right."""
TASKS = {"questions": "questions: a reward in each turn", "guess_number": "guess_number: a reward at the end"}
TASK_FILE = "benchmarks/measure/turn_credit_task.py"


@dataclass
class Examples:
    """Trains the examples and draws their held-out scores."""

    seeds: tuple[int, ...] = (0, 1, 2)
    only: tuple[str, ...] = tuple(TITLES)
    """The examples to train."""
    finished: bool = False
    """Train nothing, and show the runs that have ended."""
    out: Path = Path("runs/environments")
    """Directory for the runs."""
    picture: Path | None = None
    """File for the picture of the curves."""
    json: bool = False
    """Print one JSON document."""


@dataclass
class Credit:
    """Compares the credits, on two tasks."""

    seeds: tuple[int, ...] = (0, 1, 2)
    credits: tuple[str, ...] = CREDITS
    tasks: tuple[str, ...] = tuple(TASKS)
    out: Path = Path("runs/turn_credit")
    """Directory for the runs."""
    picture: Path | None = None
    """File for the picture of the curves."""
    json: bool = False
    """Print one JSON document."""


def train_examples(options: Examples) -> int:
    """Train each example with each seed; print and draw held-out scores; return the exit code."""
    curves: dict[str, dict[int, list[tuple[int, float]]]] = {}
    table = Table("example", "seed", "before", "after", "steps", "seconds")
    goals = []
    for name in options.only:
        curves[name] = {}
        for seed in options.seeds:
            seconds, changes = 0.0, {}
            out = options.out / name / f"seed{seed}"
            if options.finished and not (out / "summary.json").exists():
                continue
            if name in BEFORE:
                first = options.out / BEFORE[name] / f"seed{seed}"
                seconds += run(f"examples/{BEFORE[name]}.py", first, seed=seed)
                (model,) = (first / "hf").glob("step_*")
                changes["actor.model"] = str(model)
            seconds += run(f"examples/{name}.py", out, seed=seed, changes=changes)
            curve = curves[name][seed] = scores(out)
            (_, before), (steps, after) = curve[0], curve[-1]
            table.add_row(name, str(seed), f"{before:.2f}", f"{after:.2f}", str(steps), f"{seconds:.0f}")
            what = f"{name}, seed {seed}"
            goals.append(Goal(f"{what}: gain", after - before, at_least=GAIN))
            goals.append(Goal(f"{what}: seconds", seconds, at_most=MOST_SECONDS))
    if options.picture is not None:
        draw(
            {TITLES[name]: {f"seed {seed}": [curve] for seed, curve in of_name.items()}
             for name, of_name in curves.items() if of_name}, options.picture)
    document = {"benchmark": "environments examples", "machine": machine(), "scores": curves}
    return report(document, tables=[table], goals=goals, as_json=options.json)


def compare_credits(options: Credit) -> int:
    """Train each task with each credit and seed; print and draw held-out scores; return the exit code."""
    curves: dict[str, dict[str, list[list[tuple[int, float]]]]] = {}
    table = Table("task", "credit", "mean score over the run", "by seed", "last score", "by seed")
    means: dict[tuple[str, str], list[float]] = {}
    for task in options.tasks:
        title = TASKS[task]
        curves[title] = {}
        for credit in options.credits:
            changes = {"environment.credit": credit, "eval_every": "10"}
            if task == "questions" and credit != "trajectory":
                changes["environment.discount"] = DISCOUNT
            file = TASK_FILE
            if task == "guess_number":
                file = "examples/guess_number.py"
                changes |= {"baseline": "leave_one_out", "normalize": "none"}
                changes |= {"steps": "60", "batch_size": "8"}
            environment = {"TASK": str(options.out.resolve() / "task")}
            runs = []
            for seed in options.seeds:
                out = options.out / task / credit / f"seed{seed}"
                run(file, out, seed=seed, changes=changes, environment=environment)
                runs.append(scores(out))
            curves[title][credit] = runs
            whole = means[task, credit] = [statistics.fmean(score for _, score in curve) for curve in runs]
            ends = [curve[-1][1] for curve in runs]
            table.add_row(title, credit, *_mean_and_each(whole), *_mean_and_each(ends))
    if options.picture is not None:
        draw(curves, options.picture)
    goals = []
    if {("questions", "per_turn"), ("questions", "trajectory")} <= means.keys():
        by_turn, whole = (statistics.fmean(means["questions", name]) for name in ("per_turn", "trajectory"))
        goals = [Goal("questions: mean score, per_turn less trajectory", by_turn - whole, at_least=0.3)]
    document = {"benchmark": "environments credit", "machine": machine(), "scores": curves}
    return report(document, tables=[table], goals=goals, as_json=options.json)


def _mean_and_each(values: list[float]) -> tuple[str, str]:
    return f"{statistics.fmean(values):.2f}", " ".join(f"{value:.2f}" for value in values)


def run(
    file: str, out: Path, *, seed: int, changes: dict[str, str] | None = None,
    environment: dict[str, str] | None = None,
) -> float:
    """Run an experiment, or what is left of it, unless it has been run before; return its seconds."""
    settings = {"seed": str(seed)} | (changes or {})
    words = [word for key, value in settings.items() for word in (f"--{key}", value)]
    command = [sys.executable, "-m", "realhf", "run", file, "--nproc", "1", "--out", str(out), *words]
    here = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)} | (environment or {})
    if not (out / "summary.json").exists():
        progress(str(out))
        done = subprocess.run(command, env=here, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return float(json.loads((out / "summary.json").read_text())["seconds"])


def scores(out: Path) -> list[tuple[int, float]]:
    """Return steps and held-out scores of a run."""
    rows: list[dict[str, Any]] = [row for _, row in read_json_lines(out / "metrics.jsonl")]
    return [(row["step"], row["eval/score"]) for row in rows if "eval/score" in row]


def draw(panels: dict[str, dict[str, list[list[tuple[int, float]]]]], path: Path) -> None:
    """Draw a panel for each title, with the mean of each name's curves and their range."""
    from matplotlib.figure import Figure

    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(3.7 * columns, 2.8 * lines), layout="constrained")
    every = list(figure.subplots(lines, columns, squeeze=False).flat)
    for axes, (title, of_panel) in zip(every, panels.items(), strict=False):
        for name, curves in of_panel.items():
            steps = [step for step, _ in curves[0]]
            by_step = list(zip(*([score for _, score in curve] for curve in curves), strict=True))
            axes.plot(steps, [statistics.fmean(values) for values in by_step], label=name, marker=".")
            if len(curves) > 1:
                axes.fill_between(steps, list(map(min, by_step)), list(map(max, by_step)), alpha=0.15)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("step", fontsize=9)
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right", fontsize=7)
    for axes in every[len(panels) :]:
        axes.axis("off")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> int:
    commands = {"examples": Examples, "credit": Credit}
    options = tyro.extras.subcommand_cli_from_dict(commands, description=__doc__)
    return train_examples(options) if isinstance(options, Examples) else compare_credits(options)


if __name__ == "__main__":
    sys.exit(main())
