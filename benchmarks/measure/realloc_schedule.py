"""Schedules the movements of RLHF on 8 to 1024 H100s: ratio to the bound, and time to compute the schedule.

The planner's estimate of each schedule (planner/reallocation.py) is compared with it, too.

    python benchmarks/measure/realloc_schedule.py
    python benchmarks/measure/realloc_schedule.py --models deepseek-v3 --only growing disjoint

Nothing is moved. Seconds are CPU seconds of one core, which other programs on the machine disturb least. They
are the median of three runs, or one run if it takes more than two seconds. The exit code is 1 if a goal was
missed.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.table import Table

from benchmarks.harness import Goal, machine, progress, report
from realhf.cluster import Cluster
from realhf.layout import Layout
from realhf.models.model_config import ModelConfig
from realhf.models.param_spec import ModelSpec, model_spec, region_size
from realhf.planner.links import ContiguousLayout
from realhf.planner.reallocation import MovedModel, estimate_movement
from realhf.realloc.links import Links
from realhf.realloc.schedule import make_schedule

OVER_BOUND = 1.05
PLANNED = 1.35
"""The most by which an estimate may differ from its schedule, as a ratio."""
SECONDS = {64: 1.0, 1024: 10.0}
"""Number of devices -> the most seconds for a schedule on that many (and fewer)."""
_ITEMSIZE = 2  # bfloat16
_HOSTS = (1, 2, 8, 16, 128)  # The shipped clusters h100-*x8.
_REPEATS = 3
_LONG_SECONDS = 2.0


class Case(NamedTuple):
    model: str
    movement: str
    source: str
    target: str


TO_GENERATE, TO_TRAIN = "train -> generate", "generate -> train"
COLOCATED, DISJOINT, GROWING, SHRINKING = "colocated", "disjoint", "growing", "shrinking"
MOVEMENTS = (TO_GENERATE, TO_TRAIN, COLOCATED, DISJOINT, GROWING, SHRINKING)

# Training spreads memory by pp, by tp inside a host, and by ep. Generation has little tp and many replicas,
# and splits experts by ep. Colocated: another role or sequence length on the same ranks. Disjoint: the
# generator and the trainer are on different ranks. Growing and shrinking: the generator gets ranks, or gives
# them back.
CASES = [
    Case(model, *case) for model, cases in {
        "llama-7b": [
            (TO_GENERATE, "d2t2p2@0-7", "d8@0-7"),
            (TO_GENERATE, "d4t2p8@0-63", "d64@0-63"),
            (TO_TRAIN, "d4t2@0-7", "t4p2@0-7"),
            (TO_TRAIN, "d32t2@0-63", "d8t4p2@0-63"),
            (COLOCATED, "d2t4@0-7", "d4p2@0-7"),
            (COLOCATED, "d8t8@0-63", "d16p4@0-63"),
            (DISJOINT, "d2t4@0-7", "d8@8-15"),
            (DISJOINT, "d8t2p2@0-31", "d32@32-63"),
            (GROWING, "d8@0-7", "d64@0-63"),
            (GROWING, "d4t2@0-7", "d16@0-15"),
            (SHRINKING, "d2t4p2@0-15", "d8@0-7"),
        ],
        "llama-70b": [
            (TO_GENERATE, "t8p2@0-15", "d4t4@0-15"),
            (TO_GENERATE, "d2t4p8@0-63", "d16t4@0-63"),
            (TO_GENERATE, "d16t8p8@0-1023", "d256t4@0-1023"),
            (TO_TRAIN, "d16t4@0-63", "d4t8p2@0-63"),
            (TO_TRAIN, "d256t4@0-1023", "d8t8p16@0-1023"),
            (COLOCATED, "t8p3@0-23", "d6t4@0-23"),
            (COLOCATED, "d4t4p4@0-63", "d2t8p4@0-63"),
            (DISJOINT, "d2t8p4@0-63", "d16t4@64-127"),
            (DISJOINT, "d8t8p8@0-511", "d128t4@512-1023"),
            (GROWING, "d8t4@0-31", "d16t4@0-63"),
            (GROWING, "t8p2@0-15", "d32t4@0-127"),
            (SHRINKING, "d16t4@0-63", "d2t8p2@0-31"),
        ],
        "qwen3-235b-a22b": [
            (TO_GENERATE, "d8t2p4e8@0-63", "d16t4e16@0-63"),
            (TO_GENERATE, "d32t4p8e16@0-1023", "d256t4e16@0-1023"),
            (TO_TRAIN, "d16t4e16@0-63", "d4t4p4e4@0-63"),
            (TO_TRAIN, "d128t8e16@0-1023", "d32t2p16e8@0-1023"),
            (COLOCATED, "d4t4p4e4@0-63", "d32p2e32@0-63"),
            (COLOCATED, "d4t2p6e4@0-47", "d12t4e12@0-47"),
            (DISJOINT, "d8t2p4e8@0-63", "d16t4e16@64-127"),
            (DISJOINT, "d4t4p4e4@0-63", "d16e16@64-79"),
            (GROWING, "d8t2e8@0-15", "d32t2e8@0-63"),
            (SHRINKING, "d16t4e16@0-63", "t8p2@0-15"),
        ],
        "deepseek-v3": [
            (TO_GENERATE, "d8p8e8@0-63", "d64e64@0-63"),
            (TO_GENERATE, "d64p16e64@0-1023", "d1024e128@0-1023"),
            (TO_TRAIN, "d8t8e8@0-63", "d4t2p8e4@0-63"),
            (TO_TRAIN, "d256t4e64@0-1023", "d64p16e64@0-1023"),
            (COLOCATED, "d8p16e8@0-127", "d16t8e16@0-127"),
            (COLOCATED, "d8t8e8@0-63", "d64e64@0-63"),
            (DISJOINT, "d8p8e8@0-63", "d64e64@64-127"),
            (DISJOINT, "d32p16e32@0-511", "d512e64@512-1023"),
            (GROWING, "d32t2e32@0-63", "d64t2e32@0-127"),
            (GROWING, "d4t8e4@0-31", "d64e64@0-63"),
            (SHRINKING, "d128e64@0-127", "d8t2p4e8@0-63"),
        ],
    }.items() for case in cases
]


def run(case: Case, config: ModelConfig) -> dict[str, Any]:
    """Return the row of a case."""
    devices = 1 + max(*Layout.parse(case.source).ranks, *Layout.parse(case.target).ranks)
    name = f"h100-{next(hosts for hosts in _HOSTS if 8 * hosts >= devices)}x8"
    cluster = Cluster.load(name)
    seconds = list[float]()
    while not seconds or len(seconds) < _REPEATS and seconds[0] <= _LONG_SECONDS:
        spec = model_spec(config)
        source = Layout.parse(case.source)
        target = Layout.parse(case.target)
        started = time.process_time()
        schedule = make_schedule(
            spec, source=source, target=target, itemsize=_ITEMSIZE, links=Links.of_cluster(cluster)
        )
        seconds.append(time.process_time() - started)
    links = Links.of_cluster(cluster)
    model = MovedModel(config, None, spec.section_numel)
    ends = (ContiguousLayout(layout.strategy, layout.ranks[0]) for layout in (source, target))
    planned = estimate_movement(links, model, *ends, itemsize=_ITEMSIZE)
    weights = max(_most_held(spec, layout) for layout in (source, target))
    assert weights <= cluster.device_memory_bytes, f"{case}: {weights / 1e9:.0f} GB on a device"
    assert schedule.bundles, f"{case}: nothing moves"
    return {
        **case._asdict(), "cluster": name, "devices": len({*source.ranks, *target.ranks}),
        "needed_bytes": schedule.needed_bytes, "bound_seconds": schedule.bound_seconds,
        "scheduled_seconds": schedule.seconds, "over_bound": schedule.over_bound,
        "planned_seconds": planned.seconds, "over_planned": schedule.seconds / planned.seconds,
        "waves": schedule.num_waves, "max_hops": schedule.max_hops, "hops": len(schedule.hops),
        "compute_seconds": statistics.median(seconds), "limit": schedule.limit,
    }


def _most_held(spec: ModelSpec, layout: Layout) -> int:
    """Return the bytes of weights on the fullest rank."""
    held = (sum(map(region_size, spec.held_by(layout, rank).values())) for rank in layout.ranks)
    return _ITEMSIZE * max(held)


def goals(rows: Sequence[dict[str, Any]]) -> list[Goal]:
    """Return the goals that the rows at hand can decide, each with its worst row."""
    over_bound = max(row["over_bound"] for row in rows)
    row_goals = [Goal("scheduled / bound, worst row", over_bound, at_most=OVER_BOUND)]
    ratios = [max(row["over_planned"], 1 / row["over_planned"]) for row in rows]
    what = "scheduled / planned or planned / scheduled, worst row"
    row_goals.append(Goal(what, max(ratios), at_most=PLANNED))
    fewer = 0
    for devices, most in SECONDS.items():
        if seconds := [row["compute_seconds"] for row in rows if fewer < row["devices"] <= devices]:
            what = f"seconds to compute, {fewer + 1} to {devices} devices, worst row"
            row_goals.append(Goal(what, max(seconds), at_most=most))
        fewer = devices
    return row_goals


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Return a table of all rows."""
    moves = Table(title="Schedules", padding=(0, 1, 0, 0))
    left = ("model", "movement", "src -> dst", "limit")
    for column in (*left[:3], "devices", "GB needed", "bound ms", "scheduled ms", "ratio", "planned ms",
                   "waves", "hops", "compute s", "limit"):
        moves.add_column(column, justify="left" if column in left else "right")
    for row in rows:
        milliseconds = (f"{1e3 * row[x]:.2f}" for x in ("bound_seconds", "scheduled_seconds"))
        moves.add_row(
            row["model"], row["movement"], f"{row['source']} -> {row['target']}", str(row["devices"]),
            f"{row['needed_bytes'] / 1e9:.1f}", *milliseconds, f"{row['over_bound']:.3f}",
            f"{1e3 * row['planned_seconds']:.2f}", str(row["waves"]), str(row["hops"]),
            f"{row['compute_seconds']:.2f}", row["limit"],
        )
    return moves


def main() -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    models = list(dict.fromkeys(case.model for case in CASES))
    parser.add_argument("--models", nargs="+", default=models, choices=models)
    parser.add_argument("--only", nargs="+", default=list(MOVEMENTS), choices=MOVEMENTS, metavar="MOVEMENT",
                        help=f"of these movements: {', '.join(MOVEMENTS)}")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    args = parser.parse_args()
    hardware = machine()
    rows = list[dict[str, Any]]()
    for case in CASES:
        if case.model in args.models and case.movement in args.only:
            rows.append(run(case, ModelConfig.load(case.model)))
            last = rows[-1]
            progress(f"{' '.join(case)}: {last['over_bound']:.3f} x the bound, {last['hops']} hops, "
                     f"at most {last['max_hops']} in a row, {last['compute_seconds']:.2f} s")
    document = {"benchmark": "realloc_schedule", "machine": hardware, "settings": vars(args), "rows": rows}
    return report(document, tables=[table(rows)], goals=goals(rows), as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
