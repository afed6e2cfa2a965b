"""Kills runs at random moments and resumes them: is a bit of the result lost, or a step more than necessary?

    python benchmarks/fuzz/faults.py                  # 200 kills
    python benchmarks/fuzz/faults.py --kills 40 --seed 1 --cases grpo-2
    python benchmarks/fuzz/faults.py --kills 0 --flips 200 --cases grpo-2 ppo-2 async-2

Runs of six steps (GRPO, PPO and asynchronous GRPO with max_lag 2, of tiny float64 models, on two ranks with
mixed layouts and in one process) save a checkpoint after every step. One rank or all are killed by SIGKILL:
after a random time, or shortly after something has appeared on the disk (a part of a checkpoint, its
manifest, its final name, the removal of an old one, an export). Then the run is resumed, killed again, and so
on. When it has ended, everything that does not depend on the clock is compared with an uninterrupted run,
byte by byte: metrics, the files of the last checkpoint, its manifest, exported weights, evaluation, events of
the timeline.

The phases are those of the killed ranks' threads in the moment of the kill, so one kill may hit several. A
step is repeated if metrics.jsonl had it and no checkpoint did: at most one, or two where a checkpoint is
still being written when the next step ends. The exit code is 1 if a goal was missed.

With `--flips`, bits are flipped in the checkpoints of copies of the uninterrupted runs, at random places of
random files: one in each of the newest one to three. The copy must name each damaged file, fall back to the
checkpoint before, and end with the same bytes.
"""

import argparse
import random
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks import harness
from tests.kills import STEPS, Tally, flip_and_resume, make_case, torture, uninterrupted

CASES = ("grpo-2", "ppo-2", "grpo-1", "ppo-1", "async-2", "async-1")
_MIN_HITS = 1
_MUST_HIT = (
    "generation", "reallocation", "update", "checkpoint write", "manifest and rename", "evaluation", "export",
    "start",
)


def torture_all(args: argparse.Namespace, directory: Path) -> tuple[Tally, dict[str, float]]:
    """Kill runs of all cases in turns; return the counts, and the seconds of the uninterrupted runs."""
    rng = random.Random(args.seed)
    tally = Tally()
    cases = {}
    seconds = {}
    for name in args.cases if args.kills else ():
        kind, ranks = name.split("-")
        case = make_case(kind, int(ranks), directory / f"case_{name}")
        uninterrupted(case, directory / f"first_{name}")  # The fork server starts with the first.
        expected, seconds[name] = uninterrupted(case, directory / f"expected_{name}")
        cases[name] = (case, expected)
    while tally.kills < args.kills and not (args.stop_at_first and tally.differences):
        name = args.cases[tally.runs % len(args.cases)]
        case, expected = cases[name]
        before = tally.kills
        torture(
            case, expected, directory / f"run_{tally.runs}", rng, tally,
            max_kills=min(12, args.kills - tally.kills), seconds=seconds[name],
        )
        lost = len(tally.differences)
        harness.progress(f"{name}: {tally.kills - before} kills, {tally.kills} in all, {lost} differences")
    return tally, seconds


def flip_all(args: argparse.Namespace, directory: Path, tally: Tally) -> None:
    """Flip bits in checkpoints of runs of all cases in turns, and resume these."""
    rng = random.Random(args.seed)
    runs = {}
    for name in args.cases if args.flips else ():
        kind, ranks = name.split("-")
        case = make_case(kind, int(ranks), directory / f"flips_{name}", keep_checkpoints=STEPS)
        expected, _ = uninterrupted(case, directory / f"whole_{name}")
        runs[name] = (case, directory / f"whole_{name}" / "run", expected)
    number = 0
    while tally.flips.total() < args.flips:
        name = args.cases[number % len(args.cases)]
        case, finished, expected = runs[name]
        flip_and_resume(case, finished, expected, directory / f"flipped_{number}", rng, tally)
        number += 1
        if number % 10 == 0:
            lost = len(tally.differences)
            harness.progress(f"{tally.flips.total()} flips, {number} resumes, {lost} differences")


def tables(tally: Tally) -> list[Table]:
    counts = Table("", "", title=f"{tally.kills} kills of {tally.runs} runs")
    rows: dict[str, Any] = {
        "resumes": tally.resumes, "differences": len(tally.differences), **dict(tally.killed),
        **{f"kills that cost {n} completed steps": k for n, k in sorted(tally.repeated.items())},
        **{f"flips in {name}": n for name, n in sorted(tally.flips.items())},
        **{f"left on the disk: {what}": n for what, n in tally.on_disk.items()},
        **{f"others ended only by SIGTERM: {phase}": n for phase, n in tally.had_to_be_ended.items()},
    }
    for what, number in rows.items():
        counts.add_row(what, str(number))
    hit = Table("phase", "kills that hit it", title="Phases")
    for phase, number in tally.phases.most_common():
        hit.add_row(phase, str(number))
    return [counts, hit]


def main() -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--flips", type=int, default=0, help="bits to flip in files of checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--stop-at-first", action="store_true", help="end after a run that differs")
    parser.add_argument("--keep", help="directory for the runs, which stay there")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    args = parser.parse_args()
    hardware = harness.machine()
    began = time.monotonic()
    with nullcontext(args.keep) if args.keep else tempfile.TemporaryDirectory(prefix="faults-") as scratch:
        tally, seconds = torture_all(args, Path(scratch))
        flip_all(args, Path(scratch), tally)
    for difference in tally.differences:
        harness.progress(difference)
    hits = min(tally.phases[phase] for phase in _MUST_HIT)
    goals = [
        harness.Goal("kills", tally.kills, at_least=args.kills),
        harness.Goal("flips", tally.flips.total(), at_least=args.flips),
        harness.Goal("differences", len(tally.differences), at_most=0),
        harness.Goal("repeated steps, at most", max(tally.repeated, default=0), at_most=2),
    ]
    if args.kills >= 100:
        goals.append(harness.Goal("kills of the phase least hit", hits, at_least=_MIN_HITS))
    document = {
        "benchmark": "faults", "machine": hardware, "settings": vars(args), "kills": tally.kills,
        "resumes": tally.resumes, "runs": tally.runs, "repeated_steps": dict(tally.repeated),
        "flips": dict(tally.flips), "phases": dict(tally.phases), "on_disk": dict(tally.on_disk),
        "killed": dict(tally.killed),
        "ended_only_by_sigterm": dict(tally.had_to_be_ended), "differences": tally.differences,
        "uninterrupted_seconds": seconds, "seconds": time.monotonic() - began,
    }
    return harness.report(document, tables=tables(tally), goals=goals, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
