"""Reads a sharded checkpoint into models of several layouts, and compares this with safetensors alone.

    python benchmarks/compare/load.py                    # 2 GiB of bfloat16 on 4 processes
    python benchmarks/compare/load.py --mib 256 --layouts t4 --repeats 3

In every repetition all ways read into the same memory, and each time another one is first. The time is that
of the slowest rank, as a median over repetitions. The files are in the page cache. The exit code is 1 if a
goal was missed.

- `load_weights` is ours: every rank reads its own regions.
- `get_slice` reads the same regions with `safetensors.safe_open`, and copies them into the model.
- `load_file` is `safetensors.torch.load_file`, copied into memory. A process reads as large a share of the
  files as it holds of the model.

The memory is the peak of all pages of the process during the first `load_weights`, minus what it had before
the model was built.
"""

import argparse
import re
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from safetensors import safe_open
from safetensors.torch import load_file

from benchmarks import harness
from realhf.checkpoint.hf import load_weights, save_weights
from realhf.distributed.world import ParallelGroups, World
from realhf.layout import Layout
from realhf.models.model_config import ModelConfig
from realhf.models.param_spec import ModelSpec, model_spec, region_slices
from realhf.nn.transformer import Transformer

NPROC = 4
LAYOUTS = ("t4", "d2t2", "p4", "d4")
_MAX_EXTRA_MIB = 256
_MAX_RATIO = 1.5
_TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True)
class Settings:
    mib: int
    repeats: int
    layouts: tuple[str, ...]
    directory: str


def llama(mib: int) -> ModelSpec:
    """Return a Llama with Llama-3-8B's ratios and enough layers for `mib` of bfloat16, but at least four."""
    width = 2048 if mib >= 1024 else 512
    shape = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 16 * width,
        "hidden_size": width, "intermediate_size": width * 7 // 2, "num_attention_heads": 16,
        "num_key_value_heads": 4,
    }
    sizes = [model_spec(ModelConfig.from_hf({**shape, "num_hidden_layers": n})).numel for n in (1, 2)]
    layers = max(4, 1 + -(-((mib << 19) - sizes[0]) // (sizes[1] - sizes[0])))
    return model_spec(ModelConfig.from_hf({**shape, "num_hidden_layers": layers}))


def write(rank: int, nproc: int, store: dist.Store, settings: Settings) -> None:
    """Write the checkpoint: random bits that are no NaN as bfloat16."""
    world = World(rank=rank, size=nproc, store=store, timeout_seconds=_TIMEOUT_SECONDS)
    model = make(settings.mib, world, f"t{nproc}")
    bits = model.flat.view(torch.int16)
    step = 1 << 24
    for start in range(0, len(bits), step):
        bits[start : start + step].random_(0, 0x4000)
    save_weights(settings.directory, model, max_shard_bytes=settings.mib << 17)


def make(mib: int, world: World, layout: str) -> Transformer:
    groups = ParallelGroups.create(world, Layout.parse(f"{layout}@0-{world.size - 1}"))
    return Transformer(llama(mib), groups, dtype=torch.bfloat16)


def status_mib(key: str) -> float:
    """Return VmRSS (memory now) or VmHWM (its peak) of this process in MiB."""
    match = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) / 1024


def measure(rank: int, nproc: int, store: dist.Store, settings: Settings, layout: str) -> dict[str, Any]:
    world = World(rank=rank, size=nproc, store=store, timeout_seconds=_TIMEOUT_SECONDS)
    Path("/proc/self/clear_refs").write_text("5")  # Resets the peak.
    before = status_mib("VmRSS")
    model = make(settings.mib, world, layout)
    assert load_weights(settings.directory, model) == []
    shard = model.flat.nbytes / 2**20
    peak = status_mib("VmHWM") - before
    wanted = checksum(model)
    files = sorted(Path(settings.directory).glob("*.safetensors"))
    share = model.groups.layout.tp * model.groups.layout.pp
    rivals: dict[str, Callable[[], object]] = {
        "load_weights": lambda: load_weights(settings.directory, model),
        "get_slice": lambda: read_slices(files, model),
        "load_file": lambda: read_files(files[rank % share :: share]),
    }
    model.flat.zero_()
    rivals["get_slice"]()
    assert wanted == checksum(model), "the ways read differently"
    seconds = harness.time_interleaved(rivals, repeats=settings.repeats, barrier=world.control.barrier)
    return {"shard_mib": shard, "extra_mib": peak - shard, "seconds": seconds}


def checksum(model: Transformer) -> int:
    return sum(int(part.sum(dtype=torch.int64)) for part in model.flat.view(torch.int16).split(1 << 22))


def read_slices(files: list[Path], model: Transformer) -> None:
    for file in files:
        with safe_open(file, framework="pt") as reader:
            for name in reader.keys():  # noqa: SIM118 (the reader is no mapping)
                if name in model.regions:
                    part = reader.get_slice(name)[region_slices(model.regions[name])]
                    model.shards()[name].copy_(part)


def read_files(files: list[Path]) -> None:
    for file in files:
        for tensor in load_file(file).values():
            tensor.clone()


def row(layout: str, by_rank: list[dict[str, Any]]) -> dict[str, Any]:
    names = list(by_rank[0]["seconds"])
    by_name = {name: zip(*(r["seconds"][name] for r in by_rank), strict=True) for name in names}
    repetitions = {name: [max(times) for times in by_name[name]] for name in names}
    pairs = zip(repetitions["load_weights"], repetitions["get_slice"], strict=True)
    return {
        "layout": layout, "shard_mib": [round(r["shard_mib"], 1) for r in by_rank],
        "extra_mib": [round(r["extra_mib"], 1) for r in by_rank],
        "seconds": {name: harness.median_of_slowest([r["seconds"][name] for r in by_rank]) for name in names},
        "ratio": statistics.median(ours / theirs for ours, theirs in pairs), "repetitions": repetitions,
    }


def table(rows: list[dict[str, Any]]) -> Table:
    times_table = Table(title="Seconds to read; memory beside the model")
    for column in ("layout", "shard MiB", "extra MiB, worst rank", *rows[0]["seconds"], "ours / get_slice"):
        times_table.add_column(column, justify="left" if column == "layout" else "right")
    for measured in rows:
        seconds = [f"{value:.3f}" for value in measured["seconds"].values()]
        sizes = f"{max(measured['shard_mib']):.0f}", f"{max(measured['extra_mib']):.1f}"
        times_table.add_row(measured["layout"], *sizes, *seconds, f"{measured['ratio']:.2f}")
    return times_table


def main() -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--mib", type=int, default=2048, help="bfloat16 weights of the model, at least")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    args = parser.parse_args()
    hardware = harness.machine()
    rows = []
    with harness.scratch_directory(7 * args.mib << 20) as scratch:
        settings = Settings(args.mib, args.repeats, tuple(args.layouts), scratch)
        harness.run_ranks(write, NPROC, settings)
        for layout in args.layouts:
            rows.append(row(layout, harness.run_ranks(measure, NPROC, settings, layout)))
            harness.progress(f"{layout}: {rows[-1]['seconds']}, extra MiB by rank {rows[-1]['extra_mib']}")
    goals = [
        harness.Goal("worst extra MiB", max(max(r["extra_mib"]) for r in rows), at_most=_MAX_EXTRA_MIB),
        *(harness.Goal(f"{r['layout']}: ours / get_slice", r["ratio"], at_most=_MAX_RATIO) for r in rows),
    ]
    document = {
        "benchmark": "load", "machine": hardware, "settings": vars(args),
        "checkpoint_bytes": llama(args.mib).numel * 2, "rows": rows,
    }
    return harness.report(document, tables=[table(rows)], goals=goals, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
