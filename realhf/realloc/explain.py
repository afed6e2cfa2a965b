"""Describes one reallocation as JSON or as a table: what moves, how long it takes and what limits it."""

from itertools import groupby
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from realhf.layout import DeviceMesh, Layout
from realhf.models.region import region_size
from realhf.realloc.schedule import Schedule
from realhf.user_input.units import format_bytes, format_seconds

_TOLERATED = 1.05


def document(schedule: Schedule, *, transfers: bool) -> dict[str, Any]:
    """Return the answer of `realhf realloc --json`, in bytes and seconds.

    `sent_bytes` and `received_bytes` map a rank to its total.
    """
    sent, received = schedule.port_bytes
    ranks = sorted({*schedule.source.ranks, *schedule.target.ranks})
    answer: dict[str, Any] = {
        "bytes_total": schedule.spec.numel * schedule.itemsize,
        "bytes_needed": schedule.needed_bytes,
        "port_bound_seconds": schedule.bound_seconds,
        "scheduled_seconds": schedule.seconds,
        "ratio": schedule.over_bound,
        "limit": schedule.limit,
        "busiest": schedule.busiest,
        "rounds": schedule.num_waves,
        "peak_staging_bytes": schedule.staging_bytes,
        "schedule_seconds": schedule.compute_seconds,
        "sent_bytes": {str(rank): sent[rank] for rank in ranks},
        "received_bytes": {str(rank): received[rank] for rank in ranks},
    }
    if transfers:
        answer["transfers"] = [
            {"round": number, "src": t.source, "dst": t.target, "param": t.name, "region": t.region}
            for number, t in schedule.transfers()
        ]
        answer["held"] = {"src": _held(schedule, schedule.source), "dst": _held(schedule, schedule.target)}
    return answer


def _held(schedule: Schedule, layout: Layout) -> dict[str, dict[str, list[Any]]]:
    """Return the regions that each rank holds under a layout, by rank and parameter name."""
    held = {rank: schedule.spec.boxes_held_by(layout, rank).items() for rank in layout.ranks}
    return {str(rank): {name: list(boxes) for name, boxes in by_name} for rank, by_name in held.items()}


def table(schedule: Schedule, *, title: str) -> Group:
    """Return the reallocation as a table for the terminal."""
    source = schedule.source
    target = schedule.target
    waves = schedule.num_waves
    busy = f"{format_seconds(schedule.seconds)} in {waves} wave{'s' * (waves != 1)}"
    if schedule.bundles:
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
    return Group(head, Text(), _by_rank(schedule))


def _by_rank(schedule: Schedule) -> Table:
    """Return a table with one row per run of consecutive ranks that have equal figures."""
    rows = Table("ranks", box=None, header_style="bold", padding=(0, 2, 0, 0))
    for name in ("holds before", "holds after", "sends", "receives"):
        rows.add_column(name, justify="right")

    def figures(rank: int) -> tuple[str, ...]:
        held = (schedule.spec.held_by(layout, rank) for layout in (schedule.source, schedule.target))
        held_bytes = (schedule.itemsize * sum(map(region_size, regions.values())) for regions in held)
        return tuple(map(format_bytes, (*held_bytes, *(port[rank] for port in schedule.port_bytes))))

    for values, ranks in groupby(sorted({*schedule.source.ranks, *schedule.target.ranks}), key=figures):
        rows.add_row(str(DeviceMesh(tuple(ranks))), *values)
    return rows
