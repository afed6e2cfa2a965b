"""Compares our generation with transformers' `generate` and its continuous batching (`generate_batch`).

    make bench-setup
    python benchmarks/compare/generate.py                         # everything; about an hour
    python benchmarks/compare/generate.py --models tiny --dtypes float32  # minutes
    python benchmarks/compare/generate.py --quick                 # a try: one repetition of the tiny model

All sides have the same random weights and prompts, sample at temperature 1 without filters, use two threads,
and decode 256 rows at once. Our side is one process, or two of one thread each (layouts d1 and d2), whichever
a trial finds faster. The workloads are:

- equal: prompts of 16 to 32 tokens with 64 new tokens each; no row ends early;
- spread: four times as many prompts, with lengths that are geometric with a mean of a quarter of 64;
  `generate` gets them in four batches;
- shared: 32 prompts of 192 tokens, with 8 samples of 32 tokens each.

Each side is a separate process that has loaded its model before. They take turns, and each time another one
is first. The speed is the number of response tokens (without padding) per second of the whole call, with
prefill. The ratio is ours to theirs in the same repetition, as a median over repetitions. The memory is the
peak of the process minus what it had before the model was loaded.

The seconds of a decoding step come from two calls, with few and with all new tokens, that differ only in the
number of steps. Decode efficiency compares them with what the machine allows: the time of the FLOPs at the
fastest measured matrix product, or of the bytes (weights, cached keys and values, logits) at the measured
speed of a copy, whichever is longer.

On a machine that is not idle, `ratio_of_cpu_seconds` in the JSON is a better guide than `ratio`.

The exit code is 1 if a goal was missed.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from benchmarks.compare.sides import OURS, THEIRS, Replicas, Side, alternate
from benchmarks.harness import Goal, machine, progress, report, scratch_directory
from benchmarks.measure.limits import decode_work
from benchmarks.measure.workloads import SIZES, Scene, config_of, sequences, write_model

ROWS = 256
GOALS = {"equal": 1.5, "spread": 3.0, "shared": 4.0}
_CONTINUOUS_GOAL = 1.0
_DECODE_GOAL = 0.5
_FEW_TOKENS = 8
_SCRATCH_BYTES = 2 << 30
_RIVALS = ("generate", "generate_batch")


class Workload(NamedTuple):
    prompt_lengths: tuple[int, int]
    group: int
    max_new_tokens: int
    end_probability: float
    samples: int = ROWS


WORKLOADS = {
    "equal": Workload((16, 32), 1, 64, 0.0),
    "spread": Workload((16, 32), 1, 64, 1 / 16, 4 * ROWS),
    "shared": Workload((192, 192), 8, 32, 0.0),
}


def model_of(scene: Scene) -> Path:
    ends = WORKLOADS[scene.workload].end_probability > 0
    return scene.directory / f"{scene.size}-{'ends' if ends else 'never_ends'}"


def prepare(scene: Scene) -> dict[str, Any]:
    """Return the settings of the sides, after writing the prompts and, if it is missing, the model."""
    workload = WORKLOADS[scene.workload]
    if not model_of(scene).exists():
        write_model(model_of(scene), scene.size, end_probability=workload.end_probability)
    data = scene.directory / f"{scene.size}-{scene.workload}.json"
    first, last = workload.prompt_lengths
    lengths = [first + i % (last - first + 1) for i in range(workload.samples // workload.group)]
    data.write_text(json.dumps(sequences(lengths, vocab_size=config_of(scene.size).vocab_size)))
    return {
        "kind": "generate", "model": str(model_of(scene)), "data": str(data), "dtype": scene.dtype,
        "group": workload.group, "rows": ROWS,
    }


def run(scene: Scene, *, repeats: int, rivals: Sequence[str]) -> dict[str, Any]:
    """Return a row of the table."""
    settings = prepare(scene)
    most = WORKLOADS[scene.workload].max_new_tokens
    with ExitStack() as stack:
        ranks = best_ranks(settings, most)
        ours = stack.enter_context(Replicas(OURS, settings, count=ranks))
        sides: dict[str, Side | Replicas] = {"ours": ours}
        for rival in rivals:
            more = {"continuous": rival == "generate_batch"}
            sides[rival] = stack.enter_context(Side(THEIRS, settings | more))
        base = {name: side.loaded["base_bytes"] for name, side in sides.items()}
        asks = {name: partial(side.ask, max_new_tokens=most) for name, side in sides.items()}
        answers = alternate(asks, repeats=repeats)
        row = {"size": scene.size, "dtype": scene.dtype, "workload": scene.workload, "ranks": ranks}
        row |= summary(answers, base, num_samples=WORKLOADS[scene.workload].samples)
        if scene.workload == "equal":
            row["decode"] = decode(scene, ours, most=most, repeats=repeats)
        return row


def best_ranks(settings: dict[str, Any], most: int) -> int:
    """Return which is faster for our side: 1 process with both threads, or 2 with one each (`d2`)."""
    seconds = {}
    for count in (1, 2):
        with Replicas(OURS, settings, count=count) as ours:
            ours.ask(max_new_tokens=most)
            seconds[count] = ours.ask(max_new_tokens=most)["seconds"]
    return min(seconds, key=lambda count: seconds[count])


def summary(
    answers: dict[str, list[dict[str, Any]]], base: dict[str, int], *, num_samples: int
) -> dict[str, Any]:
    """Return the medians of the sides, and the ratios of ours to the others."""
    speeds = {name: [a["tokens"] / a["seconds"] for a in of_side] for name, of_side in answers.items()}
    peaks = {name: max(a["peak_bytes"] for a in of_side) - base[name] for name, of_side in answers.items()}
    cpu = {name: [a["tokens"] / a["cpu_seconds"] for a in of_side] for name, of_side in answers.items()}
    ratios, cpu_ratios = (
        {
            name: statistics.median(a / b for a, b in zip(rates["ours"], rate, strict=True))
            for name, rate in rates.items() if name != "ours"
        }
        for rates in (speeds, cpu)
    )
    return {
        "tokens_per_second": {name: statistics.median(speed) for name, speed in speeds.items()},
        "mean_tokens": {
            name: statistics.fmean(a["tokens"] for a in of_side) / num_samples
            for name, of_side in answers.items()},
        "peak_mib": {name: peak / 2**20 for name, peak in peaks.items()},
        "ratio": ratios, "ratio_of_cpu_seconds": cpu_ratios, "repetitions": answers,
    }


def decode(scene: Scene, ours: Replicas, *, most: int, repeats: int) -> dict[str, float]:
    """Return the achieved and the attainable seconds of a decoding step."""
    asks = {n: partial(ours.ask, max_new_tokens=n) for n in (_FEW_TOKENS, most)}
    answers = alternate({str(n): ask for n, ask in asks.items()}, repeats=repeats)
    with Side(OURS, prepare(scene)) as alone:
        limits = alone.ask("limits")
    few, many = (statistics.median(a["seconds"] for a in answers[str(n)]) for n in asks)
    seconds = (many - few) / (most - _FEW_TOKENS)
    length = statistics.fmean(WORKLOADS[scene.workload].prompt_lengths) + (most + _FEW_TOKENS) / 2
    flops, moved = decode_work(config_of(scene.size), rows=ROWS, length=length, dtype=scene.dtype)
    by_flops, by_bytes = flops / limits["peak_flops"], moved / limits["copy_bytes_per_second"]
    return {
        **limits, "step_seconds": seconds, "attainable_by_flops": by_flops, "attainable_by_bytes": by_bytes,
        "efficiency": max(by_flops, by_bytes) / seconds,
    }


def goals(rows: Sequence[dict[str, Any]]) -> list[Goal]:
    row_goals = []
    for row in rows:
        name = f"{row['size']} {row['dtype']} {row['workload']}"
        for rival, ratio in row["ratio"].items():
            least = GOALS[row["workload"]] if rival == "generate" else _CONTINUOUS_GOAL
            row_goals.append(Goal(f"{name}: ours / {rival}", ratio, at_least=least))
        if "decode" in row and row["size"] == "100m":
            efficiency = row["decode"]["efficiency"]
            row_goals.append(Goal(f"{name}: decode efficiency", efficiency, at_least=_DECODE_GOAL))
    return row_goals


def tables(rows: Sequence[dict[str, Any]]) -> list[Table]:
    words = ("model", "dtype", "workload")
    speeds = Table(title="Response tokens per second, and ours relative to that")
    for column in (*words, "our ranks", "mean tokens", "ours", "peak MiB", *_RIVALS, "peak MiB of generate"):
        speeds.add_column(column, justify="left" if column in words else "right")
    limits = Table(title="A decoding step of 256 rows, milliseconds")
    columns = ("takes", "by FLOPs", "by bytes", "efficiency", "peak GFLOP/s", "copy GB/s")
    for column in (*words[:2], *columns):
        limits.add_column(column, justify="left" if column in words else "right")
    for row in rows:
        speed = row["tokens_per_second"]
        ratio = row["ratio"]
        mib = row["peak_mib"]
        others = [f"{speed[r]:.0f} ({ratio[r]:.2f})" if r in ratio else "-" for r in _RIVALS]
        theirs = f"{mib['generate']:.0f}" if "generate" in mib else "-"
        speeds.add_row(
            row["size"], row["dtype"], row["workload"], str(row["ranks"]),
            f"{row['mean_tokens']['ours']:.1f}",
            f"{speed['ours']:.0f}", f"{mib['ours']:.0f}", *others, theirs)
        if decode := row.get("decode"):
            times = (decode[key] for key in ("step_seconds", "attainable_by_flops", "attainable_by_bytes"))
            limits.add_row(
                row["size"], row["dtype"], *(f"{1000 * x:.1f}" for x in times),
                f"{decode['efficiency']:.2f}", f"{decode['peak_flops'] / 1e9:.0f}",
                f"{decode['copy_bytes_per_second'] / 1e9:.1f}")
    return [speeds, limits]


def main() -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    add = parser.add_argument
    add("--models", nargs="+", default=list(SIZES), choices=SIZES)
    add("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    add("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    add("--rivals", nargs="*", default=list(_RIVALS), choices=_RIVALS)
    add("--repeats", type=int, help="default: 5 of the tiny model, 3 of the large one")
    add("--quick", action="store_true", help="one repetition of the tiny model in float32")
    add("--json", action="store_true", help="one JSON document on standard output")
    args = parser.parse_args()
    if args.quick:
        args.models, args.dtypes, args.repeats = ["tiny"], ["float32"], 1
    hardware = machine()
    rows = []
    with scratch_directory(_SCRATCH_BYTES) as scratch:
        for size in args.models:
            for dtype in args.dtypes:
                for workload in args.workloads:
                    scene = Scene(size, dtype, workload, Path(scratch))
                    repeats = args.repeats or {"tiny": 5}.get(size, 3)
                    rows.append(run(scene, repeats=repeats, rivals=args.rivals))
                    speeds = {name: round(speed) for name, speed in rows[-1]["tokens_per_second"].items()}
                    progress(f"{scene.name}: tokens/s {speeds}")
    document = {"benchmark": "generate", "machine": hardware, "settings": vars(args), "rows": rows}
    return report(document, tables=tables(rows), goals=goals(rows), as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
