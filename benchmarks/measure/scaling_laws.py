"""Fits the scaling law to runs of the demo's task: does the first half predict the end, and what differs?

    python benchmarks/measure/scaling_laws.py [--json] [--seeds 0 1 2] [--out DIR] [--picture FILE]

GRPO and ScaleRL (lag 8) train from the same supervised model of each seed, at the same learning rate. A law
is fitted to the first half of every run's compute, in model FLOPs; the score at the end is the mean of the
last evaluations. Finished runs in the directory are not repeated.
"""

import dataclasses
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import tyro
from rich.table import Table

from benchmarks.harness import Goal, machine, report
from benchmarks.measure import algorithms
from realhf.scaling.analysis import Amount, Curve, FitSettings, compare, fit_curve, read_curve
from realhf.scaling.picture import draw_fits

NAMES = ("GRPO", "ScaleRL")
MARGIN = 0.03
_LAST = 3  # Evaluations whose mean is the score at the end: one of 256 problems has an error of 0.01 to 0.03.


@dataclasses.dataclass
class Options:
    seeds: tuple[int, ...] = (0, 1, 2)
    steps: int = 120
    eval_every: int = 3
    lr: float = 1.5e-4
    """Learning rate of both: the highest at which lag 8 learns steadily (lag_scores.py)."""
    out: Path = Path("runs/scaling-laws")
    """Directory for the runs."""
    picture: Path | None = None
    """File for the picture of the pooled curves and their laws."""
    jobs: int = 2
    """Runs at a time, each of one process and one thread."""
    json: bool = False
    """Print one JSON document."""


def main(options: Options) -> None:
    seeds = {seed: algorithms.Options(seed=seed, out=options.out / f"seed{seed}") for seed in options.seeds}
    settings: dict[str, Any] = {
        "steps": options.steps, "eval-every": options.eval_every, "actor.optimizer.lr": options.lr}
    for of_seed in seeds.values():
        algorithms.make_data(of_seed)
    with ThreadPoolExecutor(options.jobs) as jobs:
        list(jobs.map(algorithms.warm_up, seeds.values()))
        cases = [(seed, name) for seed in options.seeds for name in NAMES]
        list(jobs.map(lambda case: algorithms.train(seeds[case[0]], case[1], **settings), cases))
    table = Table("run", "A", "B", "C_mid, GFLOPs", "score at the end", "predicted from the first half")
    errors = {}
    for seed, name in cases:
        curve = curve_of(options, name, (seed,))
        law = fit_curve(curve, FitSettings(num_bootstrap=0)).sigmoid
        half = fit_curve(curve, FitSettings(num_bootstrap=0, fit_until=Amount(0.5, is_share=True))).sigmoid
        end = float(curve.score[-_LAST:].mean())
        predicted = float(half(curve.compute[-_LAST:]).mean())
        errors[f"{name}, seed {seed}"] = predicted - end
        table.add_row(
            f"{name}, seed {seed}", f"{law.asymptote:.3f}", f"{law.exponent:.2f}",
            f"{law.midpoint / 1e9:.1f}", f"{end:.3f}", f"{predicted:.3f}")
    pooled = [fit_curve(curve_of(options, name, options.seeds), FitSettings()) for name in NAMES]
    laws = Table("all seeds", "A", "B", "C_mid, GFLOPs")
    for name, fit in zip(NAMES, pooled, strict=True):
        columns = [("asymptote", 1.0, ".3f"), ("exponent", 1.0, ".2f"), ("midpoint", 1e9, ".1f")]
        laws.add_row(name, *(with_interval(fit, *column) for column in columns))
    (comparison,) = compare(pooled, NAMES, margin=FitSettings.margin)
    if options.picture is not None:
        until = max(float(fit.curve.compute.max()) for fit in pooled)
        draw_fits(pooled, NAMES, options.picture, until=until, x="model FLOPs", y="held-out score")
    goals = [Goal(f"error of the prediction, {run}", abs(x), at_most=MARGIN) for run, x in errors.items()]
    document = {
        "machine": machine(), "errors": errors, "median_error": statistics.median(map(abs, errors.values())),
        "laws": {name: dataclasses.asdict(fit.sigmoid) for name, fit in zip(NAMES, pooled, strict=True)},
        "comparison": comparison.verdict}
    laws.caption = comparison.verdict
    sys.exit(report(document, tables=[table, laws], goals=goals, as_json=options.json))


def curve_of(options: Options, name: str, seeds: tuple[int, ...]) -> Curve:
    """Return the scores over model FLOPs of an algorithm's runs."""
    files = [options.out / f"seed{seed}" / name / "metrics.jsonl" for seed in seeds]
    return read_curve(f"{name}={','.join(map(str, files))}", x="compute/flops", y="eval/score")


def with_interval(fit: Any, name: str, unit: float, form: str) -> str:
    """Return a parameter of a law with its 95 % interval, in words."""
    low, high = (x / unit for x in fit.interval(name))
    return f"{getattr(fit.sigmoid, name) / unit:{form}} ({low:{form}} to {high:{form}})"


if __name__ == "__main__":
    main(tyro.cli(Options))
