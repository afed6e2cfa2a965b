"""Compares GRPO with the cosine reward and with the plain reward where longer answers are right more often.

    python benchmarks/measure/long_chain.py [--json] [--seeds 0 1] [--steps 120] [--out DIR] [--picture FILE]

Every seed has its own data and its own model, trained on a teacher's searches (examples/long_chain_sft.py).
From it start examples/long_chain.py and examples/long_chain_plain.py. Every training prompt is answered in
one step only, so the answers of a step are answers to new problems. Finished runs in the directory are not
repeated. All runs are of one process.
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.table import Table

from benchmarks.harness import Goal, machine, progress, report
from examples.pair_search import LIMIT, prepare

REPO = Path(__file__).parents[2]
VARIANTS = {"cosine reward": "long_chain", "plain reward": "long_chain_plain"}
"""Name of a variant -> its example."""
METRICS = {
    "reward/mean": "right answers", "response_length/mean": "mean length in tokens",
    "response_length/clip_ratio": "cut answers",
}
WINDOW = 20
"""Steps over which the first and the last figures of a run are averaged, and the curves are smoothed."""
Curves = dict[str, list[float]]
"""The values of each metric, by step."""


@dataclass
class Options:
    seeds: tuple[int, ...] = (0, 1)
    steps: int = 120
    """Steps of each GRPO run, at most 200: that many see every prompt once."""
    out: Path = Path("runs/long-chain")
    """Directory for the runs."""
    picture: Path | None = None
    """File for the picture of the curves."""
    json: bool = False
    """Print one JSON document."""


def main(options: Options) -> None:
    runs: dict[str, list[Curves]] = {name: [] for name in VARIANTS}
    for seed in options.seeds:
        model = warm_up(options, seed)
        for name, example in VARIANTS.items():
            runs[name].append(train(options, seed, example, model))
            progress(f"seed {seed}, {name}: {described(runs[name][-1])}")
    if options.picture is not None:
        draw(runs, options.picture, limit=LIMIT)
    figures = {name: summaries(of_variant) for name, of_variant in runs.items()}
    table = Table("", *(f"{metric}, {when}" for metric in METRICS.values() for when in ("first", "last")))
    for name, of_variant in figures.items():
        table.add_row(name, *(
            f"{statistics.median(values):.3g} ({' '.join(f'{value:.3g}' for value in values)})"
            for metric in METRICS for values in of_variant[metric].values()))
    document = {"machine": machine(), "steps": options.steps, "limit": LIMIT, "figures": figures}
    sys.exit(report(document, tables=[table], goals=goals(figures), as_json=options.json))


def goals(figures: dict[str, dict[str, dict[str, list[float]]]]) -> list[Goal]:
    """Return the goals, for medians over the seeds."""
    def last(variant: str, metric: str, when: str = "last") -> float:
        return statistics.median(figures[variant][metric][when])

    cosine, plain = VARIANTS
    cut = "response_length/clip_ratio"
    rise = last(cosine, "reward/mean") - last(cosine, "reward/mean", "first")
    return [
        Goal("cosine reward: rise of the share of right answers", rise, at_least=0.05),
        Goal("share of cut answers, plain less cosine", last(plain, cut) - last(cosine, cut), at_least=0.1),
    ]


def warm_up(options: Options, seed: int) -> Path:
    """Train the model of a seed on the teacher's searches; return its directory."""
    directory = options.out / f"seed{seed}"
    task = prepare(directory / "task", seed=seed)
    files = {"actor.model": task / "model", "dataset.path": task / "sft.jsonl"}
    return Path(run("long_chain_sft", directory / "sft", {"seed": seed} | files)["hf_dir"])


def train(options: Options, seed: int, example: str, model: Path) -> Curves:
    """Train the model of a seed with GRPO; return the metrics of all steps."""
    directory = options.out / f"seed{seed}"
    files = {"actor.model": model, "dataset.path": directory / "task" / "prompts.jsonl"}
    run(example, directory / example, {"seed": seed, "steps": options.steps} | files)
    lines = (directory / example / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines[: options.steps]]
    return {metric: [record[metric] for record in records] for metric in METRICS}


def run(example: str, out: Path, settings: dict) -> dict:
    """Run an example unless it has been run before; return its summary."""
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    file = str(REPO / "examples" / f"{example}.py")
    command = [sys.executable, "-m", "realhf", "run", file, "--out", str(out), "--nproc", "1", *words]
    if not (out / "summary.json").exists():
        here = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
        done = subprocess.run(command, env=here, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return json.loads((out / "summary.json").read_text())


def summaries(runs: Sequence[Curves]) -> dict[str, dict[str, list[float]]]:
    """Return, for each metric and each run, its means over the first and over the last steps."""
    return {
        metric: {
            "first": [statistics.fmean(curves[metric][:WINDOW]) for curves in runs],
            "last": [statistics.fmean(curves[metric][-WINDOW:]) for curves in runs],
        }
        for metric in METRICS
    }


def described(curves: Curves) -> str:
    """Return the means over the last steps in words."""
    return ", ".join(
        f"{METRICS[metric]} {values['last'][0]:.3g}" for metric, values in summaries([curves]).items())


def draw(runs: dict[str, list[Curves]], path: Path, *, limit: int) -> None:
    """Draw the median of each metric over the seeds, with the range."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.6), layout="constrained")
    for axes, (metric, title) in zip(figure.subplots(1, len(METRICS)), METRICS.items(), strict=True):
        for name, of_variant in runs.items():
            by_step = list(zip(*(smoothed(curves[metric]) for curves in of_variant), strict=True))
            steps = range(1, len(by_step) + 1)
            (line,) = axes.plot(steps, [statistics.median(values) for values in by_step], label=name)
            axes.fill_between(steps, list(map(min, by_step)), list(map(max, by_step)),
                              color=line.get_color(), alpha=0.15, linewidth=0)
        if metric == "response_length/mean":
            axes.axhline(limit, color="gray", linestyle="--", label="limit")
        axes.set(xlabel="step", title=title, ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right" if metric != "response_length/clip_ratio" else "best", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def smoothed(values: Sequence[float]) -> list[float]:
    """Return the mean of each value and those before it, WINDOW at most."""
    return [statistics.fmean(values[max(0, i + 1 - WINDOW) : i + 1]) for i in range(len(values))]


if __name__ == "__main__":
    main(tyro.cli(Options))
