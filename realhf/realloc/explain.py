"""Describes one reallocation as JSON or as a table: what moves, how long it takes and what limits it."""

from collections import Counter
from collections.abc import Mapping
from itertools import groupby
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from realhf.layout import DeviceMesh, Layout
from realhf.realloc.schedule import Schedule
from realhf.region import region_size
from realhf.units import format_bytes, format_seconds

_TOLERATED = 1.05


def document(schedule: Schedule, *, source: Layout, target: Layout, transfers: bool) -> dict[str, Any]:
    """Return the answer of `realhf realloc --json`, in bytes and seconds.

    `sent_bytes` and `received_bytes` map a rank to its total.
    """
    sent, received = schedule.port_bytes
    ranks = sorted({*source.ranks, *target.ranks})
    answer: dict[str, Any] = {
        "bytes_total": schedule.spec.numel * schedule.itemsize,
        "bytes_needed": schedule.needed_bytes,
        "port_bound_seconds": schedule.bound_seconds,
        "scheduled_seconds": schedule.seconds,
        "ratio": schedule.over_bound,
        "limit": schedule.limit,
        "busiest": schedule.busiest,
        "rounds": schedule.num_rounds,
        "peak_staging_bytes": schedule.staging_bytes,
        "schedule_seconds": schedule.compute_seconds,
        "sent_bytes": {str(rank): sent.get(rank, 0) for rank in ranks},
        "received_bytes": {str(rank): received.get(rank, 0) for rank in ranks},
    }
    if transfers:
        answer["transfers"] = [
            {"round": number, "src": t.source, "dst": t.target, "param": t.name, "region": t.region}
            for number, t in schedule.transfers()
        ]
        answer["held"] = {"src": _held(schedule, source), "dst": _held(schedule, target)}
    return answer


def _held(schedule: Schedule, layout: Layout) -> dict[str, dict[str, list[Any]]]:
    """Return the regions that each rank holds under a layout, by rank and parameter name."""
    spec = schedule.spec
    return {str(r): {n: [box] for n, box in spec.held_by(layout, r).items()} for r in layout.ranks}


def table(schedule: Schedule, *, source: Layout, target: Layout, title: str) -> Group:
    """Return the reallocation as a table for the terminal."""
    rounds = schedule.num_rounds
    busy = f"{format_seconds(schedule.seconds)} in {rounds} round{'s' * (rounds != 1)}"
    if schedule.parcels:
        busy += f", {schedule.over_bound:.3f} x the bound of {format_seconds(schedule.bound_seconds)}"
    lines = {
        "model": f"{title}, {format_bytes(schedule.spec.numel * schedule.itemsize)}",
        "from, to": f"{source}  ->  {target}",
        "to move": f"{format_bytes(schedule.needed_bytes)}: what the ranks of {target} lack, summed",
        "time": busy,
        "limited by": schedule.limit,
        **({"held up by": f"{schedule.busiest} longest"} if schedule.over_bound > _TOLERATED else {}),
        "staging": f"at most {format_bytes(schedule.staging_bytes)} per rank",
        "planned in": format_seconds(schedule.compute_seconds),
    }
    head = Table.grid(padding=(0, 2))
    for name, value in lines.items():
        head.add_row(Text(name, style="bold"), Text(value))
    return Group(head, Text(), _by_rank(schedule, source, target))


def _by_rank(schedule: Schedule, source: Layout, target: Layout) -> Table:
    """Return a table with one row per run of consecutive ranks that have equal figures."""
    columns = ("ranks", "holds before", "holds after", "sends", "receives")
    rows = Table(*columns, box=None, header_style="bold", padding=(0, 2, 0, 0))
    for name in columns[1:]:
        rows.columns[columns.index(name)].justify = "right"
    sent, received = schedule.port_bytes
    before, after = (_held_bytes(schedule, layout) for layout in (source, target))

    def figures(rank: int) -> tuple[str, ...]:
        return tuple(format_bytes(side.get(rank, 0)) for side in (before, after, sent, received))

    for values, ranks in groupby(sorted({*source.ranks, *target.ranks}), key=figures):
        rows.add_row(str(DeviceMesh(tuple(ranks))), *values)
    return rows


def _held_bytes(schedule: Schedule, layout: Layout) -> Mapping[int, int]:
    held: dict[int, int] = dict.fromkeys(layout.ranks, 0)
    placements = schedule.spec.placements(layout)
    times = Counter(map(id, placements))
    for placement in {id(p): p for p in placements}.values():
        for region, ranks in placement:
            for rank in ranks:
                held[rank] += region_size(region) * times[id(placement)] * schedule.itemsize
    return held
