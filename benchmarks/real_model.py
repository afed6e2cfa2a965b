"""Measures examples/real_model.py: its curve, its step beside that of TRL's GRPOTrainer, and its generation.

    python examples/real_model.py                               # converts the model and writes the rows
    python benchmarks/real_model.py trl [--json]                # needs `make bench-setup`; half an hour
    python benchmarks/real_model.py generate [--json]           # and `make openvino-bench-setup`; an hour
    python benchmarks/real_model.py curve --picture docs/real-model.png      # three seeds; an hour and more
    python benchmarks/real_model.py front --picture docs/front.png           # the README's picture of them

`trl` makes steps in turns, as grpo_step.py does, with the example's model, rows, rewards and sizes. Both
sides get the same prompts and sample their own answers. The ratio is TRL's seconds to ours. In bfloat16, ours
has bfloat16 weights with a float32 master copy, and theirs is `bf16=True`.

`generate` answers the example's questions: with 40 tokens each (`equal`), and until the model ends them
(`natural`). Ours runs on one process with two threads and on two with one each, beside transformers'
`generate`, which gets as many prompts at a time as there are rows, and openvino-genai's continuous batching.
All sample at temperature 1 without filters. The goals are for the faster one of ours.

`curve` trains the seeds one after another. Finished runs are not repeated, and interrupted ones go on.

`front` draws the curves of those seeds that have made a step, and the timeline of a step of the first one.

The exit code is 1 if a goal was missed.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any, Literal

import tyro
from rich.table import Table

from benchmarks.compare.grpo_step import compare
from benchmarks.compare.sides import OPENVINO, OURS, REPO, THEIRS, Replicas, Side, alternate
from benchmarks.harness import Goal, machine, progress, report
from realhf.runtime.records.pictures import draw_steps, of_training
from realhf.user_input.files import read_json_lines

EXAMPLE = REPO / "examples" / "real_model.py"
_STEP_GOAL = 2.0
_SCORE_GOAL = 0.6
_RIGHT = "reward/right/mean"
_ROOT = Path("runs/real_model")
_SideName = Literal["one", "two", "generate", "openvino"]
_EQUAL_TOKENS = 40
_RIVAL_GOALS = {"generate": 2.5, "openvino": 1.0}
_SCRIPTS = {"one": OURS, "generate": THEIRS, "openvino": OPENVINO}
_OPTIMIZER = {"lr": 1e-6, "betas": [0.9, 0.99], "weight_decay": 0.0}
"""A rate so low that the answers of both sides keep the length that they begin with."""


@dataclass
class Trl:
    """Compares a step with TRL's."""

    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    repeats: int = 5
    """Steps of each side that count; one more warms up."""
    prompts: int = 16
    group: int = 8
    max_new_tokens: int = 32
    micro_batch: tuple[int, int] = (4096, 32)
    """Tokens of ours and sequences of theirs."""
    model: Path = _ROOT / "model"
    data: Path = _ROOT / "task" / "train.jsonl"
    json: bool = False
    """Print one JSON document."""


@dataclass
class Generation:
    """Compares generation with transformers' and openvino-genai's."""

    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    workloads: tuple[Literal["equal", "natural"], ...] = ("equal", "natural")
    sides: tuple[_SideName, ...] = ("one", "two", "generate", "openvino")
    """Ours on one process and on two, and the others."""
    repeats: int = 5
    """Generations of each side that count; a short one warms up."""
    rows: int = 64
    most_tokens: int = 128
    """Tokens of an answer that the model does not end."""
    model: Path = _ROOT / "model"
    data: Path = _ROOT / "task" / "train.jsonl"
    openvino_model: Path = _ROOT / "openvino"
    """The model as `make openvino-bench-setup` converts it; its weights are in float32."""
    json: bool = False
    """Print one JSON document."""


@dataclass
class Curve:
    """Trains the seeds and draws their curves."""

    seeds: tuple[int, ...] = (0, 1, 2)
    steps: int = 35
    plan: str = "auto"
    """A plan file; `auto` makes one for this machine."""
    out: Path = _ROOT
    """Directory for the runs."""
    picture: Path | None = None
    """File for the picture of the curves."""
    json: bool = False
    """Print one JSON document."""


@dataclass
class Front:
    """Draws the picture of the front page from the runs of `curve`."""

    picture: Path
    """File for the picture."""
    seeds: tuple[int, ...] = (0, 1, 2)
    out: Path = _ROOT
    """Directory with the runs."""


def compare_with_trl(options: Trl) -> int:
    """Print the seconds of a step of both sides; return the exit code."""
    hardware = machine()
    for path in (options.model, options.data):
        if not path.exists():
            sys.exit(f"there is no {path}: `python examples/real_model.py` makes it")
    settings = {
        "kind": "grpo", "model": str(options.model.resolve()), "data": str(options.data.resolve()),
        "task": "one_step_sums", "optimizer": _OPTIMIZER, "prompts": options.prompts, "group": options.group,
        "max_new_tokens": options.max_new_tokens, "steps": 100, "continuous": False,
    }
    sizes = dict(zip(("ours", "trl"), options.micro_batch, strict=True))
    rows = {}
    for dtype in options.dtypes:
        rows[dtype] = compare(settings | {"dtype": dtype}, sizes, ranks=1, repeats=options.repeats)
        progress(f"{dtype}: seconds {rows[dtype]['seconds']}, ratio {ratio_of_steps(rows[dtype]):.2f}")
    table = Table(title=f"Seconds of a step: medians of {options.repeats}")
    each = ("MiB", "mean tokens")
    for column in ("dtype", "ours", *each, "TRL", *each, "ratio", "ratio per token"):
        table.add_column(column, justify="right")
    forms = {"seconds": ".2f", "peak_mib": ".0f", "response_length": ".1f"}
    for dtype, row in rows.items():
        cells = [format(row[key][name], form) for name in ("ours", "trl") for key, form in forms.items()]
        table.add_row(dtype, *cells, f"{ratio_of_steps(row):.2f}", f"{row['ratio']:.2f}")
    goals = [
        Goal(f"{dtype}: TRL's seconds / ours", ratio_of_steps(row), at_least=_STEP_GOAL)
        for dtype, row in rows.items()]
    document = {"benchmark": "real_model trl", "machine": hardware, "settings": settings, "rows": rows}
    return report(document, tables=[table], goals=goals, as_json=options.json)


def ratio_of_steps(row: dict[str, Any]) -> float:
    """Return TRL's seconds of a step to ours: the median over the pairs of steps made in turn."""
    answers = row["repetitions"]
    return statistics.median(
        b["seconds"] / a["seconds"] for a, b in zip(answers["ours"], answers["trl"], strict=True))


def compare_generation(options: Generation) -> int:
    """Print the tokens per second of all sides; return the exit code."""
    hardware = machine()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch) / "prompts.json"
        for dtype, workload in product(options.dtypes, options.workloads):
            num_prompts = options.rows * (1 if workload == "equal" else 2)
            data.write_text(json.dumps(prompts_of(options.model, options.data, num_prompts)))
            rows.append({"dtype": dtype, "workload": workload, **_generated(options, dtype, workload, data)})
            progress(f"{dtype}, {workload}: tokens/s {rows[-1]['tokens_per_second']}")
    table = Table(title=f"Response tokens per second (per CPU second): medians of {options.repeats}")
    for column in ("dtype", "answers", *options.sides, "mean tokens", "ours / generate", "ours / openvino"):
        table.add_column(column, justify="right")
    goals = []
    for row in rows:
        speeds, per_cpu = row["tokens_per_second"], row["tokens_per_cpu_second"]
        cells = [f"{speeds[name]:.0f} ({per_cpu[name]:.0f})" for name in options.sides]
        ratios = [row["ratio"].get(name) for name in _RIVAL_GOALS]
        shown = ["-" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
        length = f"{row['mean_tokens'][options.sides[0]]:.1f}"
        table.add_row(row["dtype"], row["workload"], *cells, length, *shown)
        goals += [
            Goal(f"{row['dtype']} {row['workload']}: ours / {name}", ratio, at_least=least)
            for (name, least), ratio in zip(_RIVAL_GOALS.items(), ratios, strict=True)
            if ratio is not None and not (name == "generate" and row["workload"] == "equal")]
    document = {"benchmark": "real_model generate", "machine": hardware, "rows": rows}
    return report(document, tables=[table], goals=goals, as_json=options.json)


def prompts_of(model: Path, data: Path, count: int) -> list[list[int]]:
    """Return the tokens of the first chats of a data set."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    chats = (row["prompt"] for _, row in islice(read_json_lines(data), count))
    return [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]


def _generated(options: Generation, dtype: str, workload: str, data: Path) -> dict[str, Any]:
    """Return the medians of all sides, which take turns, and the ratios of the faster of ours to others."""
    ends = workload == "natural"
    most = options.most_tokens if ends else _EQUAL_TOKENS
    settings = {
        "kind": "generate", "model": str(options.model.resolve()), "data": str(data), "dtype": dtype,
        "group": 1, "rows": options.rows, "ends": ends, "continuous": False,
        "openvino_model": str(options.openvino_model.resolve()), "most_tokens": most,
    }
    with ExitStack() as stack:
        sides: dict[str, Side | Replicas] = {}
        for name in options.sides:
            side = Replicas(OURS, settings, count=2) if name == "two" else Side(_SCRIPTS[name], settings)
            sides[name] = stack.enter_context(side)
        for side in sides.values():
            side.ask(max_new_tokens=2)
        asks = {name: partial(side.ask, max_new_tokens=most) for name, side in sides.items()}
        answers = alternate(asks, repeats=options.repeats, warmups=0)
    speeds = {name: [a["tokens"] / a["seconds"] for a in of_side] for name, of_side in answers.items()}
    per_cpu = {name: [a["tokens"] / a["cpu_seconds"] for a in of_side] for name, of_side in answers.items()}
    medians = {name: statistics.median(speed) for name, speed in speeds.items()}
    ratios = {}
    if ours := [name for name in ("one", "two") if name in medians]:
        best = max(ours, key=lambda name: medians[name])
        ratios = {
            name: statistics.median(a / b for a, b in zip(speeds[best], speed, strict=True))
            for name, speed in speeds.items() if name in _RIVAL_GOALS}
    return {
        "tokens_per_second": medians,
        "tokens_per_cpu_second": {name: statistics.median(rates) for name, rates in per_cpu.items()},
        "mean_tokens": {
            name: statistics.fmean(a["tokens"] for a in of_side) / len(json.loads(data.read_text()))
            for name, of_side in answers.items()},
        "ratio": ratios, "repetitions": answers,
    }


def train_seeds(options: Curve) -> int:
    """Train each seed unless it has been trained; print and draw its scores; return the exit code."""
    hardware = machine()
    summaries: dict[int, dict[str, Any]] = {}
    curves: dict[int, list[dict[str, float]]] = {}
    for seed in options.seeds:
        directory = options.out / f"seed{seed}"
        summaries[seed] = run(directory, seed=seed, options=options)
        curves[seed] = records(directory / "metrics.jsonl")
    table = Table("seed", "pass@1 before", "after", "pass@4 before", "after", "seconds of a step")
    goals = []
    for seed, summary in summaries.items():
        scores = summary["evals"]
        steps = [row["timing_s/step"] for row in curves[seed] if row["step"] > 2]
        ends = [scores[f"eval/{name}"][when] for name in ("pass@1", "pass@4") for when in ("first", "last")]
        cells = [format(value, ".3f") for value in ends]
        table.add_row(str(seed), *cells, f"{statistics.median(steps):.1f}")
        what = f"seed {seed}: held-out pass@1 after {options.steps} steps"
        goals.append(Goal(what, scores["eval/pass@1"]["last"], at_least=_SCORE_GOAL))
    if options.picture is not None:
        draw(curves, options.picture)
    document = {"benchmark": "real_model curve", "machine": hardware, "summaries": summaries}
    return report(document, tables=[table], goals=goals, as_json=options.json)


def run(out: Path, *, seed: int, options: Curve) -> dict[str, Any]:
    """Run the example, or what is left of an interrupted run of it; return its summary."""
    command = [sys.executable, "-m", "realhf", "run", str(EXAMPLE), "--out", str(out), "--seed", str(seed)]
    command += ["--steps", str(options.steps)]
    command += ["--plan", str(options.plan), *(["--resume"] if (out / "checkpoints").exists() else [])]
    if not (out / "summary.json").exists():
        environment = os.environ | {"PYTHONPATH": str(REPO)}
        subprocess.run(command, check=True, env=environment, stdout=sys.stderr)
    return json.loads((out / "summary.json").read_text())


def draw(curves: dict[int, Sequence[dict[str, float]]], path: Path) -> None:
    """Draw the share of right answers, the mean length and the held-out score of each seed by step."""
    from matplotlib.figure import Figure

    titles = {
        _RIGHT: "right answers in training", "response_length/mean": "mean tokens of an answer",
        "eval/pass@1": "held-out pass@1"}
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    for axes, (metric, title) in zip(figure.subplots(1, len(titles)), titles.items(), strict=True):
        for seed, rows in curves.items():
            points = [(row["step"], row[metric]) for row in rows if metric in row]
            steps, values = zip(*points, strict=True)
            axes.plot(steps, values, label=f"seed {seed}", marker="o" if metric.startswith("eval") else None)
        axes.set(xlabel="step", title=title, ylim=(0, None))
        axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def draw_front(options: Front) -> int:
    """Draw the share of right answers by step beside the timeline of a step; return the exit code."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    files = {seed: options.out / f"seed{seed}" / "metrics.jsonl" for seed in options.seeds}
    curves = {seed: records(file) for seed, file in files.items() if file.exists()}
    curves = {seed: rows for seed, rows in curves.items() if any(_RIGHT in row for row in rows)}
    if not curves:
        sys.exit(f"no run in {options.out} has made a step: `benchmarks/real_model.py curve` makes them")
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(4, 6))
    for number, (seed, rows) in enumerate(curves.items()):
        for metric, style, what in ((_RIGHT, "-", "training"), ("eval/pass@1", "o", "held out")):
            points = [(row["step"], row[metric]) for row in rows if metric in row]
            left.plot(*zip(*points, strict=True), style, color=f"C{number}", label=f"seed {seed}, {what}")
    left.set(title="share of right answers", xlabel="step", ylim=(0, 1))
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    left.grid(alpha=0.3)
    left.legend(fontsize=7, ncols=2, loc="lower right")
    handles = draw_steps(of_training(records(options.out / f"seed{min(curves)}" / "timeline.jsonl")), right)
    right.legend(handles=handles, fontsize=7, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.22))
    options.picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.picture, dpi=110)
    return 0


def records(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file with one on each line."""
    return [row for _, row in read_json_lines(path)]


def main() -> int:
    commands = {"trl": Trl, "generate": Generation, "curve": Curve, "front": Front}
    options = tyro.extras.subcommand_cli_from_dict(commands, description=__doc__)
    if isinstance(options, Front):
        return draw_front(options)
    if isinstance(options, Generation):
        return compare_generation(options)
    return compare_with_trl(options) if isinstance(options, Trl) else train_seeds(options)


if __name__ == "__main__":
    sys.exit(main())
