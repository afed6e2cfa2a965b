"""`realhf realloc`: explains one reallocation, without weights or GPUs. Free of torch."""

import json
from argparse import ArgumentParser, Namespace
from itertools import groupby
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from realhf.cli.overrides import refuse_words
from realhf.cluster import Cluster
from realhf.errors import UserError, naming
from realhf.layout import DeviceMesh, Layout
from realhf.models.model_config import ModelConfig
from realhf.models.param_spec import model_spec, region_size
from realhf.planner.problem import ITEMSIZE
from realhf.realloc.links import Links
from realhf.realloc.schedule import Schedule, make_schedule
from realhf.user_input.units import format_bytes, format_seconds

HELP = "explain one reallocation: what moves, how long it takes, what limits it"
EXAMPLES = ("realhf realloc --model llama-7b --src d2t4@0-7 --dst d8@0-7",)
_TOLERATED = 1.05
"""What takes longest is named if the schedule takes this many times its bound."""


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments of `realhf realloc`."""
    add = parser.add_argument
    add("--model", required=True, help="config.json, model directory, shipped name or hub name")
    add("--src", required=True, metavar="LAYOUT", help="where the parameters are, such as d2t4@0-7")
    add("--dst", required=True, metavar="LAYOUT", help="where they are to go")
    add("--cluster", help="cluster file or shipped name; default: one host with NVLink between all ranks")
    add("--dtype", choices=ITEMSIZE, help="dtype of the parameters; default: the config's, else bfloat16")
    add("--json", action="store_true", help="print one JSON document")
    add("--transfers", action="store_true", help="with --json: every transfer, and who holds what")


def main(options: Namespace, words: list[str]) -> int:
    """Print the explanation and return the exit code."""
    refuse_words(options.parser, words)
    if options.transfers and not options.json:
        raise UserError("--transfers needs --json: the list is for programs")
    with naming("--model"):
        config = ModelConfig.load(options.model)
        dtype = options.dtype or config.hf_dtype or "bfloat16"
        if dtype not in ITEMSIZE:
            raise ValueError(f"{options.model} has dtype {dtype!r}: legal are {', '.join(ITEMSIZE)}")
    with naming("--cluster"):
        cluster = Cluster.load(options.cluster) if options.cluster else None
    source, target = (_layout(options, name, config, cluster) for name in ("src", "dst"))
    schedule = make_schedule(
        model_spec(config).as_in_checkpoints(), source=source, target=target, itemsize=ITEMSIZE[dtype],
        links=Links.of_cluster(cluster) if cluster else None)
    if options.json:
        print(json.dumps(_document(schedule, transfers=options.transfers)))
    else:
        Console().print(_table(schedule, title=f"{options.model} in {dtype}"))
    return 0


def _layout(options: Namespace, name: str, config: ModelConfig, cluster: Cluster | None) -> Layout:
    """Return the layout that an option names. Raises UserError if the model or the cluster forbids it."""
    with naming(f"--{name} {getattr(options, name)}"):
        layout = Layout.parse(getattr(options, name))
        config.check_layout(layout)
        if cluster is not None and max(layout.ranks) >= cluster.num_devices:
            raise ValueError(
                f"rank {max(layout.ranks)} is not in cluster {options.cluster}, "
                f"which has {cluster.num_devices} devices")
    return layout


def _document(schedule: Schedule, *, transfers: bool) -> dict[str, Any]:
    """Return the answer of `realhf realloc --json`, in bytes and seconds.

    `sent_bytes` and `received_bytes` map a rank to its total. The document calls waves rounds.
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
    boxes_of = {rank: schedule.spec.boxes_held_by(layout, rank).items() for rank in layout.ranks}
    return {str(rank): {name: list(boxes) for name, boxes in by_name} for rank, by_name in boxes_of.items()}


def _table(schedule: Schedule, *, title: str) -> Group:
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
