"""Compares a whole GRPO step with that of TRL's GRPOTrainer, and ours on two processes with ours on one.

    make bench-setup
    python benchmarks/compare/grpo_step.py                         # everything; about an hour
    python benchmarks/compare/grpo_step.py --models tiny --dtypes float32  # minutes
    python benchmarks/compare/grpo_step.py --quick                 # a try: one repetition of the tiny model

A step answers 32 prompts 8 times with up to 64 tokens, scores the answers with a function, and makes one
optimizer step. There is no KL term, and so no reference. Our side runs an experiment as `realhf run` does, in
one process or in two of one thread each (layouts d1 and d2), whichever a trial finds faster. Both sides have
the same random weights, prompts and hyperparameters, and two threads. Of the micro-batches within 3 % of the
fastest, each side takes the one with the least memory. A trial finds it; `--micro-batch OURS THEIRS --ranks
N` saves the time for that. bfloat16 is mixed precision on both sides: theirs is `bf16=True`, ours has
bfloat16 weights with a float32 master copy. The lengths are:

- equal: every answer has 64 tokens;
- spread: they are geometric with a mean of about a quarter of 64.

Both sides are processes that have loaded before. They take turns, and each time the other one is first. The
ratio is their seconds per answer token to ours, as a median over repetitions; with equal lengths this is the
ratio per step. Losses and gradient norms are compared on the same answers, with invented log-probs of an
earlier policy.

To compare two processes of one thread with one process of two, `realhf run` runs the demo's experiment after
its warm-up, in turns. The seconds of its calls show which of them differ.

On a machine that is not idle, `ratio_of_cpu_seconds` in the JSON is a better guide than `ratio`.

The exit code is 1 if a goal was missed.
"""

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.compare.sides import OURS, REPO, THEIRS, Side, Trial, alternate, best, try_micro_batches
from benchmarks.harness import Goal, machine, progress, report, scratch_directory
from benchmarks.measure.workloads import (
    SIZES,
    Scene,
    config_of,
    geometric_lengths,
    sequences,
    texts,
    write_model,
)

WORKLOADS = ("equal", "spread")
GOALS = {"equal": 1.3, "spread": 2.5}
_SCALING_GOAL = 0.9
_LOSS_TOLERANCE = {"float32": 1e-3, "bfloat16": 3e-2}
_PROMPTS = 32
_GROUP = 8
_MAX_NEW = 64
_OUR_TRIES, _THEIR_TRIES = (2048, 4096, 8192, 16384, 32768), (8, 16, 32, 64, 128, 256)
_OPTIMIZER = {"lr": 1e-6, "betas": [0.9, 0.99], "weight_decay": 0.0}
_SCRATCH_BYTES = 2 << 30
_EXAMPLES = REPO / "examples"


def prepare(scene: Scene) -> dict[str, Any]:
    """Return the settings of the sides, after writing the model and the prompts that they name."""
    model = scene.directory / f"{scene.size}-{scene.workload}"
    data = scene.directory / f"{scene.size}.jsonl"
    if not model.exists():
        write_model(model, scene.size, end_probability={"equal": 0.0, "spread": 1 / 16}[scene.workload])
    prompts = texts([16 + i % 17 for i in range(4 * _PROMPTS)])
    data.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
    return {
        "kind": "grpo", "model": str(model), "data": str(data), "dtype": scene.dtype, "optimizer": _OPTIMIZER,
        "prompts": _PROMPTS, "group": _GROUP, "max_new_tokens": _MAX_NEW, "steps": 100, "continuous": False,
    }


def run(scene: Scene, *, repeats: int, micro_batch: Sequence[int] | None, ranks: int) -> dict[str, Any]:
    """Return a row of the table."""
    settings = prepare(scene)
    tried = dict[str, list[Trial]]()
    if micro_batch is not None:
        sizes = dict(zip(("ours", "trl"), micro_batch, strict=True))
    else:
        ours_tried = [t for n in (1, 2) for t in try_micro_batches(OURS, settings, _OUR_TRIES, ranks=n)]
        theirs_tried = try_micro_batches(THEIRS, settings, _THEIR_TRIES)
        chosen = best(ours_tried)
        sizes = {"ours": chosen.micro_batch, "trl": best(theirs_tried).micro_batch}
        ranks = chosen.ranks
        tried = {"ours": ours_tried, "trl": theirs_tried}
        progress(f"{scene.name}: tried {tried}")
    return {
        "size": scene.size, "dtype": scene.dtype, "workload": scene.workload,
        "tried": {name: [trial._asdict() for trial in trials] for name, trials in tried.items()},
        **compare(settings, sizes, ranks=ranks, repeats=repeats),
        "equal_data": compare_losses(scene, settings),
    }


def compare(
    settings: dict[str, Any], micro_batch: dict[str, int], *, ranks: int, repeats: int
) -> dict[str, Any]:
    """Return seconds, memory and lengths of both sides, which make steps in turns."""
    with (
        Side(OURS, settings | {"micro_batch": micro_batch["ours"], "ranks": ranks}) as ours,
        Side(THEIRS, settings | {"micro_batch": micro_batch["trl"]}) as theirs,
    ):
        sides = {"ours": ours, "trl": theirs}
        base = {name: side.loaded["base_bytes"] for name, side in sides.items()}
        answers = alternate({name: partial(side.ask) for name, side in sides.items()}, repeats=repeats)
    ratio, cpu_ratio = (
        statistics.median(
            b[key] / b["response_length"] / a[key] * a["response_length"]
            for a, b in zip(answers["ours"], answers["trl"], strict=True))
        for key in ("seconds", "cpu_seconds")
    )
    calls = answers["ours"][0]["calls"]
    return {
        "micro_batch": micro_batch, "ranks": ranks,
        "seconds": {name: median(of_side, "seconds") for name, of_side in answers.items()},
        "response_length": {name: median(of_side, "response_length") for name, of_side in answers.items()},
        "ratio": ratio, "ratio_of_cpu_seconds": cpu_ratio,
        "calls": {call: statistics.median(a["calls"][call] for a in answers["ours"]) for call in calls},
        "peak_mib": {
            name: (max(a["peak_bytes"] for a in of_side) - base[name]) / 2**20
            for name, of_side in answers.items()},
        "repetitions": answers,
    }


def median(answers: Sequence[dict[str, Any]], key: str) -> float:
    return statistics.median(answer[key] for answer in answers)


def compare_losses(scene: Scene, settings: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return the loss and the gradient norm of both sides on the same 32 answers."""
    rng = random.Random(0)
    count = 32
    lengths = geometric_lengths(count, mean=16, most=_MAX_NEW, seed=2)
    vocab_size = config_of(scene.size).vocab_size
    prompts = sequences([16 + i % 17 for i in range(count)], vocab_size=vocab_size, seed=3)
    answers = sequences(lengths, vocab_size=vocab_size, seed=4)
    usual = -math.log(vocab_size)
    rows = [
        {"prompt": prompt, "completion": answer, "advantage": rng.gauss(0, 1),
         "logprobs": [usual + rng.gauss(0, 0.1) for _ in answer]}
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    path = scene.directory / "batch.json"
    path.write_text(json.dumps(rows))
    losses = {}
    for name, script, micro_batch in (("ours", OURS, 16384), ("trl", THEIRS, 32)):
        with Side(script, settings | {"batch": str(path), "micro_batch": micro_batch}) as side:
            losses[name] = side.ask()
    return losses


# Two processes


def scaling(directory: Path, *, repeats: int, steps: int) -> dict[str, Any]:
    """Return the seconds of steps and calls of the demo's experiment, on one process and on two."""
    _realhf(directory, "sft", 1, directory / "sft", [])
    warm = json.loads((directory / "sft" / "summary.json").read_text())["hf_dir"]
    rows_of_runs: dict[str, list[list[dict[str, float]]]] = {"one": [], "two": []}
    for repeat in range(repeats):
        for nproc, name in ((1, "one"), (2, "two"))[:: 1 if repeat % 2 else -1]:
            out = directory / f"{name}-{repeat}"
            options = ("--steps", str(steps), "--actor.model", warm, "--eval-every", "0")
            _realhf(directory, "grpo", nproc, out, [*options, "--eval-dataset.max-rows", "8"])
            lines = (out / "metrics.jsonl").read_text().splitlines()
            rows_of_runs[name].append([row for row in map(json.loads, lines) if row["step"] > 2])
    timings = [key for key in rows_of_runs["two"][0][0] if key.startswith("timing_s/")]
    medians = {
        name: {
            key.removeprefix("timing_s/"): statistics.median(row.get(key, 0.0) for run in runs for row in run)
            for key in timings}
        for name, runs in rows_of_runs.items()
    }
    by_run = {name: [median(run, "timing_s/step") for run in runs] for name, runs in rows_of_runs.items()}
    ratios = (one / two for one, two in zip(by_run["one"], by_run["two"], strict=True))
    return {"seconds": medians, "runs": by_run, "throughput": statistics.median(ratios)}


def _realhf(directory: Path, example: str, nproc: int, out: Path, words: list[str]) -> None:
    """Run an example with `realhf run` on processes that have two threads in total."""
    command = [sys.executable, "-m", "realhf", "run", str(_EXAMPLES / f"{example}.py"), "--nproc", str(nproc)]
    path = os.pathsep.join(filter(None, (str(REPO), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"OMP_NUM_THREADS": str(2 // nproc), "PYTHONPATH": path}
    subprocess.run(
        [*command, "--out", str(out), *words], check=True, cwd=directory, env=environment,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


# Reports


def goals(rows: Sequence[dict[str, Any]], scaled: dict[str, Any] | None) -> list[Goal]:
    row_goals = []
    for row in rows:
        name = f"{row['size']} {row['dtype']} {row['workload']}"
        row_goals.append(Goal(f"{name}: ours / TRL", row["ratio"], at_least=GOALS[row["workload"]]))
        for key, what in (("loss", "losses"), ("grad_norm", "gradient norms")):
            ours, theirs = (row["equal_data"][side][key] for side in ("ours", "trl"))
            apart = 1000 * abs(ours / theirs - 1)
            most = 1000 * _LOSS_TOLERANCE[row["dtype"]]
            row_goals.append(Goal(f"{name}: {what} apart, relative, x 1000", apart, at_most=most))
    if scaled is not None:
        what = "two processes of one thread / one of two, steps per second"
        row_goals.append(Goal(what, scaled["throughput"], at_least=_SCALING_GOAL))
    return row_goals


def tables(rows: Sequence[dict[str, Any]], scaled: dict[str, Any] | None) -> list[Table]:
    steps_table = Table(title="Seconds of a GRPO step (micro-batch: our tokens, their sequences)")
    words = ("model", "dtype", "lengths")
    each = ("micro", "MiB", "mean tokens")
    for column in (*words, "our ranks", "ours", *each, "TRL", *each, "ratio", "our generation", "training"):
        steps_table.add_column(column, justify="left" if column in words else "right")
    forms = {"seconds": ".2f", "micro_batch": "d", "peak_mib": ".0f", "response_length": ".1f"}
    for row in rows:
        cells = [format(row[key][name], form) for name in ("ours", "trl") for key, form in forms.items()]
        calls = (f"{row['calls'][call]:.2f}" for call in ("actor_generate", "actor_train"))
        name = (row["size"], row["dtype"], row["workload"], str(row["ranks"]))
        steps_table.add_row(*name, *cells, f"{row['ratio']:.2f}", *calls)
    if scaled is None:
        return [steps_table]
    title = "The demo's step on one process and on two (slowest rank)"
    parts = Table("seconds of", "one process", "two", title=title)
    for key, seconds in scaled["seconds"]["one"].items():
        parts.add_row(key, f"{seconds:.3f}", f"{scaled['seconds']['two'][key]:.3f}")
    return [steps_table, parts]


def main() -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    add = parser.add_argument
    add("--models", nargs="*", default=list(SIZES), choices=SIZES)
    add("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    add("--workloads", nargs="+", default=list(WORKLOADS), choices=WORKLOADS)
    text = "tokens of ours and sequences of theirs, instead of trying"
    add("--micro-batch", nargs=2, type=int, metavar=("OURS", "THEIRS"), help=text)
    add("--ranks", type=int, default=2, choices=(1, 2), help="of ours, with --micro-batch")
    add("--repeats", type=int, help="default: 5 of the tiny model, 3 of the large one and of two processes")
    add("--no-scaling", action="store_true", help="without two processes against one")
    add("--quick", action="store_true", help="one repetition of the tiny model in float32")
    add("--json", action="store_true", help="one JSON document on standard output")
    args = parser.parse_args()
    if args.quick:
        args.models, args.dtypes, args.repeats, args.no_scaling = ["tiny"], ["float32"], 1, True
        args.micro_batch = args.micro_batch or [16384, 64]
    hardware = machine()
    rows = []
    scaled = None
    with scratch_directory(_SCRATCH_BYTES) as scratch:
        for size in args.models:
            for dtype in args.dtypes:
                for workload in args.workloads:
                    scene = Scene(size, dtype, workload, Path(scratch))
                    repeats = args.repeats or {"tiny": 5}.get(size, 3)
                    rows.append(run(scene, repeats=repeats, micro_batch=args.micro_batch, ranks=args.ranks))
                    progress(f"{scene.name}: seconds {rows[-1]['seconds']}, ratio {rows[-1]['ratio']:.2f}")
        if not args.no_scaling:
            scaled = scaling(Path(scratch), repeats=args.repeats or 3, steps=14)
            progress(f"two processes at {scaled['throughput']:.2f} of one")
    document = {
        "benchmark": "grpo_step", "machine": hardware, "settings": vars(args), "rows": rows,
        "scaling": scaled,
    }
    return report(document, tables=tables(rows, scaled), goals=goals(rows, scaled), as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
