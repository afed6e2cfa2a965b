"""Compares our optimizer step with that of the Hugging Face Trainer, on the same sequences.

    make bench-setup
    python benchmarks/compare/train.py                         # everything; about an hour
    python benchmarks/compare/train.py --models tiny --dtypes float32  # minutes
    python benchmarks/compare/train.py --quick                 # a try: one repetition of the tiny model

A step is forward and backward pass over a batch with the causal language model's loss, clipping, and fused
AdamW. Our side is a train step on packed sequences, in one process or data-parallel in two of one thread
each; theirs is `Trainer` with padded micro-batches. Both have the same random weights, hyperparameters and
data, and two threads. Trials find the settings: theirs has the fastest micro-batch (of those within 3 %, the
one with the least memory), ours the fastest that needs no more memory than theirs. `--micro-batch OURS THEIRS
--ranks N` saves the time for the trials. bfloat16 is mixed precision on both sides: theirs is autocast, ours
has bfloat16 weights with a float32 master copy. The batches are:

- equal: sequences of 256 tokens;
- spread: twice as many, of geometric lengths with a mean of a quarter of the maximum of 512.

Both sides are processes that have loaded before. They take turns, and each time the other one is first. The
ratio is ours to theirs in tokens per second without padding, as a median over repetitions. The memory is the
peak of the processes minus what they had before the model was loaded, with torch's own code in memory. A goal
is missed if the loss curves differ.

The efficiency is the time of the FLOPs (6 per parameter and token, plus attention) at the fastest matrix
product measured beside the run, divided by the time of the step.

On a machine that is not idle, `ratio_of_cpu_seconds` in the JSON is a better guide than `ratio`.

The exit code is 1 if a goal was missed.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.compare.sides import OURS, THEIRS, Side, Trial, alternate, best, try_micro_batches
from benchmarks.harness import Goal, machine, progress, report, scratch_directory
from benchmarks.measure.limits import train_flops
from benchmarks.measure.workloads import SIZES, Scene, config_of, geometric_lengths, sequences, write_model

WORKLOADS = ("equal", "spread")
GOALS = {"equal": 1.1, "spread": 2.0}
_EFFICIENCY_GOAL = 0.6
_LOSS_TOLERANCE = {"float32": 1e-3, "bfloat16": 1e-2}
_NUM_EQUAL = {"tiny": 64, "100m": 16}
_OUR_TRIES, _THEIR_TRIES = (512, 1024, 2048, 4096, 8192, 16384), (1, 2, 4, 8, 16, 32, 64)
_OPTIMIZER = {"lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": 0.01}
_SCRATCH_BYTES = 1 << 30
_WITHIN = 0.97  # Share of the other side's peak memory that our trials may reach: both vary.
_WARMUPS = 3  # The second step of a process is the slowest.


def lengths_of(scene: Scene) -> list[int]:
    """Return the lengths of the sequences of a batch."""
    count = _NUM_EQUAL[scene.size]
    if scene.workload == "equal":
        return [256] * count
    return geometric_lengths(2 * count, mean=128, most=512)


def prepare(scene: Scene) -> dict[str, Any]:
    """Return the settings of the sides, after writing the model and the data that they name."""
    model = scene.directory / scene.size
    data = scene.directory / f"{scene.size}-{scene.workload}.json"
    if not model.exists():
        write_model(model, scene.size, end_probability=0.0)
    vocab_size = config_of(scene.size).vocab_size
    data.write_text(json.dumps(sequences(lengths_of(scene), vocab_size=vocab_size)))
    return {
        "kind": "train", "model": str(model), "data": str(data), "dtype": scene.dtype,
        "optimizer": _OPTIMIZER, "steps": 100,
    }


def run(scene: Scene, *, repeats: int, micro_batch: Sequence[int] | None, ranks: int) -> dict[str, Any]:
    """A row of the table."""
    settings = prepare(scene)
    lengths = lengths_of(scene)
    tried = dict[str, list[Trial]]()
    if micro_batch is not None:
        sizes = dict(zip(("ours", "trainer"), micro_batch, strict=True))
    else:
        their_sizes = [n for n in _THEIR_TRIES if len(lengths) % n == 0]
        theirs_tried = try_micro_batches(THEIRS, settings, their_sizes)
        ours_tried = [t for n in (1, 2) for t in try_micro_batches(OURS, settings, _OUR_TRIES, ranks=n)]
        their_best = best(theirs_tried)
        chosen = best(ours_tried, at_most_bytes=_WITHIN * their_best.peak_bytes)
        sizes = {"ours": chosen.micro_batch, "trainer": their_best.micro_batch}
        ranks = chosen.ranks
        tried = {"ours": ours_tried, "trainer": theirs_tried}
        progress(f"{scene.name}: tried {tried}")
    with (
        Side(OURS, settings | {"micro_batch": sizes["ours"], "ranks": ranks}) as ours,
        Side(THEIRS, settings | {"micro_batch": sizes["trainer"]}) as theirs,
    ):
        sides = {"ours": ours, "trainer": theirs}
        base = {name: side.loaded["base_bytes"] for name, side in sides.items()}
        asks = {name: partial(side.ask) for name, side in sides.items()}
        answers = alternate(asks, repeats=repeats, warmups=_WARMUPS)
        limits = ours.ask("limits")
    least = train_flops(config_of(scene.size), lengths) / limits["peak_flops"]
    return {
        "size": scene.size, "dtype": scene.dtype, "workload": scene.workload, "micro_batch": sizes,
        "ranks": ranks,
        "tried": {name: [trial._asdict() for trial in trials] for name, trials in tried.items()},
        **summary(answers, base, num_tokens=sum(lengths)), **limits, "attainable_seconds": least,
        "efficiency": {name: least / median(of_side, "seconds") for name, of_side in answers.items()},
    }


def summary(
    answers: dict[str, list[dict[str, Any]]], base: dict[str, int], *, num_tokens: int
) -> dict[str, Any]:
    """Return the medians of both sides, the ratios of ours to theirs, and the difference of their losses."""
    pairs = list(zip(answers["ours"], answers["trainer"], strict=True))
    return {
        "tokens_per_second": {name: num_tokens / median(runs, "seconds") for name, runs in answers.items()},
        "ratio": statistics.median(b["seconds"] / a["seconds"] for a, b in pairs),
        "ratio_of_cpu_seconds": statistics.median(b["cpu_seconds"] / a["cpu_seconds"] for a, b in pairs),
        "loss_difference": max(abs(a["loss"] / b["loss"] - 1) for a, b in pairs),
        "peak_mib": {
            name: (max(a["peak_bytes"] for a in runs) - base[name]) / 2**20
            for name, runs in answers.items()},
        "repetitions": answers,
    }


def median(answers: Sequence[dict[str, Any]], key: str) -> float:
    return statistics.median(answer[key] for answer in answers)


def goals(rows: Sequence[dict[str, Any]]) -> list[Goal]:
    row_goals = []
    for row in rows:
        name = f"{row['size']} {row['dtype']} {row['workload']}"
        mib = row["peak_mib"]
        apart = f"{name}: losses apart, relative, x 1000"
        row_goals += [
            Goal(f"{name}: ours / Trainer", row["ratio"], at_least=GOALS[row["workload"]]),
            Goal(f"{name}: peak memory, ours / Trainer", mib["ours"] / mib["trainer"], at_most=1.0),
            Goal(apart, 1000 * row["loss_difference"], at_most=1000 * _LOSS_TOLERANCE[row["dtype"]]),
        ]
        if row["size"] == "100m":
            what = f"{name}: training efficiency"
            row_goals.append(Goal(what, row["efficiency"]["ours"], at_least=_EFFICIENCY_GOAL))
    return row_goals


def table(rows: Sequence[dict[str, Any]]) -> Table:
    speeds = Table(title="Tokens per second of an optimizer step (micro-batch: our tokens, their sequences)")
    words = ("model", "dtype", "batch")
    each = ("micro", "MiB", "efficiency")
    for column in (*words, "our ranks", "ours", *each, "Trainer", *each, "ratio", "peak GFLOP/s"):
        speeds.add_column(column, justify="left" if column in words else "right")
    forms = {"tokens_per_second": ".0f", "micro_batch": "d", "peak_mib": ".0f", "efficiency": ".2f"}
    for row in rows:
        cells = [format(row[key][name], form) for name in ("ours", "trainer") for key, form in forms.items()]
        speeds.add_row(
            row["size"], row["dtype"], row["workload"], str(row["ranks"]), *cells, f"{row['ratio']:.2f}",
            f"{row['peak_flops'] / 1e9:.0f}")
    return speeds


def main() -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    add = parser.add_argument
    add("--models", nargs="+", default=list(SIZES), choices=SIZES)
    add("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    add("--workloads", nargs="+", default=list(WORKLOADS), choices=WORKLOADS)
    text = "tokens of ours and sequences of theirs, instead of trying"
    add("--micro-batch", nargs=2, type=int, metavar=("OURS", "THEIRS"), help=text)
    add("--ranks", type=int, default=2, choices=(1, 2), help="of ours, with --micro-batch")
    add("--repeats", type=int, help="default: 7 of the tiny model, 3 of the large one")
    add("--quick", action="store_true", help="one repetition of the tiny model in float32")
    add("--json", action="store_true", help="one JSON document on standard output")
    args = parser.parse_args()
    if args.quick:
        args.models, args.dtypes, args.repeats = ["tiny"], ["float32"], 1
        args.micro_batch = args.micro_batch or [8192, 16]
    hardware = machine()
    rows = []
    with scratch_directory(_SCRATCH_BYTES) as scratch:
        for size in args.models:
            for dtype in args.dtypes:
                for workload in args.workloads:
                    scene = Scene(size, dtype, workload, Path(scratch))
                    repeats = args.repeats or {"tiny": 7}.get(size, 3)
                    rows.append(run(scene, repeats=repeats, micro_batch=args.micro_batch, ranks=args.ranks))
                    speeds = {name: round(speed) for name, speed in rows[-1]["tokens_per_second"].items()}
                    progress(f"{scene.name}: tokens/s {speeds}")
    document = {"benchmark": "train", "machine": hardware, "settings": vars(args), "rows": rows}
    return report(document, tables=[table(rows)], goals=goals(rows), as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
