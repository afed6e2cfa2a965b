"""Moves a model's weights between two hosts, and compares the bytes with those that must cross the link.

    python benchmarks/measure/realloc_hosts.py                                    # as root; about two minutes
    python benchmarks/measure/realloc_hosts.py --pairs "dense t4@0-3 d4@0-3" --mbit 100 --repeats 3

The hosts are network namespaces with two ranks each, joined by a link of --mbit each way. The bytes that must
cross in a direction are those that some rank on the receiving host wants and no rank there holds, each
counted once; they are found with masks. The kernel counts the bytes that do cross, including headers,
acknowledgements and our barriers. The exit code is 1 if a goal was missed, and 2 if no namespaces can be made
here.
"""

import argparse
import functools
import json
import os
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from benchmarks.compare.move import DTYPE, Move
from benchmarks.compare.realloc_run import MODELS, Truth
from benchmarks.harness import Goal, machine, progress, report
from benchmarks.measure.two_hosts import NoNamespacesError, add_options, meet, run_again, two_hosts
from realhf.layout import Layout
from realhf.models.param_spec import ModelSpec, region_slices

RANKS_PER_HOST = 2
MTU = 9000
"""Jumbo frames, as in data centres, have 1 % of headers; frames of 1500 bytes would have 5 %."""
PAIRS = (
    "dense t4@0-3 d4@0-3",
    "dense d2@0-1 d4@0-3",
    "dense t2@0-1 t2@2-3",
    "dense p2t2@0-3 d2t2@0-3",
    "dense p4@0-3 t4@0-3",
    "dense d1@0 d4@0-3",
    "dense t2@0-1 d2t2@0-3",
    "experts d4e4@0-3 t4@0-3",
    "experts p4@0-3 d4e4@0-3",
    "experts d2e2@0-1 d4e4@0-3",
)


def parse(pair: str, mib: int) -> tuple[ModelSpec, Layout, Layout]:
    model, *layouts = pair.split()
    if model not in MODELS or len(layouts) != 2:
        raise ValueError(f"{pair!r} is not a pair: write for example {PAIRS[0]!r}")
    return MODELS[model](mib), *map(Layout.parse, layouts)  # type: ignore[return-value]


def must_cross_bytes(spec: ModelSpec, source: Layout, target: Layout) -> list[int]:
    """Return, by receiving host, the bytes that some rank there wants and none there holds, counted once."""
    needed = []
    for first in (0, RANKS_PER_HOST):
        host = range(first, first + RANKS_PER_HOST)
        masks = {param.name: torch.zeros(param.shape, dtype=torch.bool) for param in spec.params}
        for layout, lacks in ((target, True), (source, False)):
            for rank in host:
                for name, region in spec.held_by(layout, rank).items():
                    masks[name][region_slices(region)] = lacks
        needed.append(DTYPE.itemsize * sum(int(mask.sum()) for mask in masks.values()))
    return needed


def work(rank: int, address: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row per pair, on every rank."""
    world = meet(rank, address, ranks_per_host=RANKS_PER_HOST)
    rows = []
    for pair in args.pairs:
        spec, source, target = parse(pair, args.mib)
        move = Move.between(source, target, spec=spec, world=world, wires=world, scratch="")
        row = measure(move, repeats=args.repeats)
        rows.append({"pair": pair, "num_waves": move.reallocator.schedule.num_waves, **row})
        if rank == 0:
            progress(f"{pair}: {statistics.median(row['seconds']):.3f} s")
    world.control.barrier()  # Rank 0 keeps the store alive until all have their results.
    return rows


def measure(move: Move, *, repeats: int) -> dict[str, Any]:
    """Return, by repetition, the seconds of the slowest rank and the bytes that came to each host.

    The first run sets up connections: its result is checked, but its time is not counted.
    """
    barrier = move.world.control.barrier
    truth = Truth(move.spec)
    truth.write(move)
    move.wanted.flat.fill_(-1)
    shards = (move.held.pieces or None, move.wanted.pieces or None)
    run = functools.partial(move.reallocator.run, *shards)
    seconds, sent = [], []
    run()
    wrong = truth.wrong(move)
    for _ in range(repeats):
        barrier()
        before = _sent_bytes()
        barrier()
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
        barrier()
        sent.append(_sent_bytes() - before)
    everyones = move.world.control.all_gather_json({"seconds": seconds, "sent": sent, "wrong": wrong})
    came = [everyones[rank]["sent"] for rank in (RANKS_PER_HOST, 0)]  # Each host gets what the other sends.
    return {
        "wrong": [name for of_rank in everyones for name in of_rank["wrong"]],
        "seconds": [max(times) for times in zip(*(of_rank["seconds"] for of_rank in everyones), strict=True)],
        "came_bytes": [list(both) for both in zip(*came, strict=True)],
    }


def _sent_bytes() -> int:
    """Return the bytes that this host has sent over the link; messages inside the host use `lo`."""
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())


def judge(row: dict[str, Any], needed: list[int], *, mbit: int) -> dict[str, Any]:
    """Return a row with two ratios: most counted bytes to needed bytes, median seconds to least seconds."""
    least = max(needed) * 8 / (mbit * 1e6)
    return {
        **row, "must_cross_bytes": needed, "least_seconds": least,
        "over_bytes": max(map(sum, row["came_bytes"])) / sum(needed),
        "over_seconds": statistics.median(row["seconds"]) / least,
    }


def table(rows: list[dict[str, Any]]) -> Table:
    moves = Table(title="Between two hosts")
    columns = ("waves", "MB to 0", "MB to 1", "counted / needed", "seconds", "least", "seconds / least")
    for column in ("move", *columns):
        moves.add_column(column, justify="left" if column == "move" else "right")
    for row in rows:
        megabytes = (f"{needed / 1e6:.2f}" for needed in row["must_cross_bytes"])
        values = (
            row["over_bytes"], statistics.median(row["seconds"]), row["least_seconds"], row["over_seconds"]
        )
        moves.add_row(row["pair"], str(row["num_waves"]), *megabytes, *(f"{value:.3f}" for value in values))
    return moves


def main() -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--pairs", nargs="+", default=PAIRS, help="each 'MODEL SOURCE TARGET'")
    parser.add_argument("--mib", type=int, default=32, help="float32 weights of each model, at least")
    add_options(parser, mbit=200)
    args = parser.parse_args()
    if args.rank is not None:
        torch.set_num_threads(1)
        rows = work(args.rank, args.address, args)
        print(json.dumps(rows) if args.rank == 0 else "")
        return 0
    needed = [must_cross_bytes(*parse(pair, args.mib)) for pair in args.pairs]
    if idle := [pair for pair, both in zip(args.pairs, needed, strict=True) if not any(both)]:
        parser.error(f"nothing needs to cross in {idle[0]!r}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    hardware = machine()
    try:
        with two_hosts(mbit=args.mbit, mtu=MTU) as hosts:
            rows = run_again(hosts, ranks_per_host=RANKS_PER_HOST)
    except NoNamespacesError as error:
        progress(str(error))
        return 2
    if wrong := [(row["pair"], row["wrong"][0]) for row in rows if row["wrong"]]:
        raise AssertionError(f"parameters arrived wrong, among them {wrong}")
    rows = [judge(row, both, mbit=args.mbit) for row, both in zip(rows, needed, strict=True)]
    goals = [
        Goal("bytes counted / needed, worst pair", max(row["over_bytes"] for row in rows), at_most=1.05),
        Goal("seconds / least, worst pair", max(row["over_seconds"] for row in rows), at_most=1.15),
    ]
    settings = {name: value for name, value in vars(args).items() if name not in ("rank", "address")}
    document = {
        "benchmark": "realloc_hosts", "machine": hardware, "settings": {**settings, "mtu": MTU}, "rows": rows,
    }
    return report(document, tables=[table(rows)], goals=goals, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
