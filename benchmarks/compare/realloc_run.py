"""Compares six ways to move a model's weights between layouts: ours, four baselines, and bare messages.

    python benchmarks/compare/realloc_run.py              # 2, 4 and 8 processes, 512 MiB, takes a while
    python benchmarks/compare/realloc_run.py --nproc 4 --models experts --methods ours unpacked

All methods run in the same processes on the same tensors, in turn. The time is that of the slowest rank, as a
median over repetitions. Every method is checked against the full tensors first. The exit code is 1 if a goal
was missed.
"""

import argparse
import functools
import gc
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table

from benchmarks.compare.move import Move
from benchmarks.compare.rivals import RIVALS
from benchmarks.harness import (
    Goal,
    geometric_mean,
    machine,
    median_of_slowest,
    progress,
    report,
    run_ranks,
    scratch_directory,
    time_interleaved,
)
from realhf.distributed.world import World
from realhf.layout import Layout
from realhf.models.model_config import ModelConfig
from realhf.models.param_spec import ModelSpec, model_spec, region_slices

_TIMEOUT_SECONDS = 600.0
_SMALL_MIB = 512
"""A smaller model is narrow, so that at least eight layers fit; it serves to try the benchmark out."""


def dense(mib: int) -> ModelSpec:
    """Return a Llama with Llama-3-8B's ratios of width, MLP and heads, and enough layers for `mib`."""
    width = 1024 if mib >= _SMALL_MIB else 128
    shape = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 16 * width, "hidden_size": width,
        "intermediate_size": width * 7 // 2, "num_attention_heads": 32, "num_key_value_heads": 8,
    }
    return _sized(shape, mib)


def experts(mib: int) -> ModelSpec:
    """Return a Qwen3-MoE with Qwen3-30B-A3B's ratio of width to expert: thousands of small tensors."""
    width = 384 if mib >= _SMALL_MIB else 64
    shape = {
        "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 16 * width, "hidden_size": width,
        "intermediate_size": 3 * width, "moe_intermediate_size": width * 3 // 8, "num_experts": 64,
        "num_experts_per_tok": 8, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": width // 8,
        "decoder_sparse_step": 1, "norm_topk_prob": True, "mlp_only_layers": [],
    }
    return _sized(shape, mib)


MODELS = {"dense": dense, "experts": experts}


def _sized(shape: dict[str, Any], mib: int) -> ModelSpec:
    """Return a model with the fewest layers, but at least eight (for p8), that reach `mib` of float32."""
    single, two = (model_spec(ModelConfig.from_hf({**shape, "num_hidden_layers": n})).numel for n in (1, 2))
    layers = max(8, 1 + math.ceil(((mib << 18) - single) / (two - single)))
    return model_spec(ModelConfig.from_hf({**shape, "num_hidden_layers": layers}))


def layout_pairs(model: str, nproc: int) -> list[tuple[Layout, Layout]]:
    """Return the moves of an RLHF step, chosen by rule and not by result.

    They go between training and generation on all ranks, in both directions, with each of pipeline, tensor,
    data and (for experts) expert parallelism on one of the sides. Then the generator grows onto ranks that
    have nothing yet, shrinks to the last half, and is on separate ranks. `measure` drops pairs that move
    nothing.
    """
    half, every = nproc // 2, f"0-{nproc - 1}"
    first, last = f"0-{half - 1}", f"{half}-{nproc - 1}"
    pairs = {
        "dense": [
            (f"p{nproc}@{every}", f"t{nproc}@{every}"),
            (f"t{nproc}@{every}", f"p{nproc}@{every}"),
            (f"t{nproc}@{every}", f"d{nproc}@{every}"),
            (f"t{nproc}@{every}", f"d2t{half}@{every}"),
            (f"p2t{half}@{every}", f"d2t{half}@{every}"),
            (f"t{half}@{first}", f"d2t{half}@{every}"),
            (f"p2t{half}@{every}", f"t{half}@{last}"),
            (f"t{half}@{first}", f"p{half}@{last}"),
        ],
        "experts": [
            (f"p{nproc}@{every}", f"d{nproc}e{nproc}@{every}"),
            (f"d{nproc}e{nproc}@{every}", f"p{nproc}@{every}"),
            (f"d{nproc}e{nproc}@{every}", f"t{nproc}@{every}"),
            (f"t{nproc}@{every}", f"d{nproc}e{nproc}@{every}"),
            (f"d{nproc}e{nproc}@{every}", f"d2t{half}e2@{every}"),
            (f"d{half}e{half}@{first}", f"d{nproc}e{nproc}@{every}"),
            (f"p2t{half}@{every}", f"d{half}e{half}@{last}"),
            (f"p{half}@{first}", f"d{half}e{half}@{last}"),
        ],
    }[model]
    return list(dict.fromkeys((Layout.parse(source), Layout.parse(target)) for source, target in pairs))


@dataclass(frozen=True)
class Settings:
    mib: int
    repeats: int
    models: tuple[str, ...]
    methods: tuple[str, ...]
    scratch: str


def measure(rank: int, nproc: int, store: dist.Store, settings: Settings) -> list[dict[str, Any]]:
    """Return a row per model and pair of layouts, on every rank."""
    world = World(
        rank=rank, size=nproc, store=dist.PrefixStore("realhf", store), timeout_seconds=_TIMEOUT_SECONDS
    )
    wires = World(
        rank=rank, size=nproc, store=dist.PrefixStore("messages", store), timeout_seconds=_TIMEOUT_SECONDS,
        shared_memory=False,
    )
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("baselines", store), rank=rank, world_size=nproc,
        timeout=timedelta(seconds=_TIMEOUT_SECONDS),
    )
    rows = []
    for model in settings.models:
        spec = MODELS[model](settings.mib)
        for source, target in layout_pairs(model, nproc):
            move = Move.between(source, target, spec=spec, world=world, wires=wires, scratch=settings.scratch)
            if not move.reallocator.schedule.needed_bytes:
                continue
            row = measure_move(move, settings)
            rows.append({"model": model, "nproc": nproc, "source": str(source), "target": str(target), **row})
            if rank == 0:
                times = "  ".join(f"{name} {seconds:.3f}" for name, seconds in row["seconds"].items())
                progress(f"{model} {source} -> {target}, {row['moved_bytes'] >> 20} MiB, seconds: {times}")
            del move
            gc.collect()
    return rows


def measure_move(move: Move, settings: Settings) -> dict[str, Any]:
    """Build the methods, check them, and time them."""
    truth = Truth(move.spec)
    truth.write(move)
    rivals = {name: RIVALS[name](move) for name in settings.methods}
    for name, rival in rivals.items():
        move.wanted.flat.fill_(-1)
        dist.barrier()
        rival.run()
        if name != "raw" and (wrong := truth.wrong(move)):
            where = f"rank {move.rank}, {move.source} -> {move.target}"
            raise AssertionError(f"{name} got {len(wrong)} parameters wrong, among them {wrong[0]}: {where}")
    runs = {name: rival.run for name, rival in rivals.items()}
    mine = time_interleaved(runs, repeats=settings.repeats, barrier=dist.barrier)
    everyones: list[Any] = [None] * move.world.size
    dist.all_gather_object(everyones, mine)
    schedule = move.reallocator.schedule
    return {
        "num_params": len(move.spec.params), "model_bytes": move.spec.numel * 4,
        "moved_bytes": schedule.needed_bytes, "over_bound": schedule.over_bound,
        "seconds": {name: median_of_slowest([times[name] for times in everyones]) for name in rivals},
        "repetitions": {
            name: [max(times) for times in zip(*(t[name] for t in everyones), strict=True)] for name in rivals
        },
    }


class Truth:
    """The values that every element must have. Parameters are windows of one tensor of consecutive numbers.

    float32 counts to 2**24. Beyond that, neighbours have equal values, but elements further apart differ.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self.params = {param.name: (param, 37 * i) for i, param in enumerate(spec.params)}
        self.numbers = _numbers(max(param.numel + shift for param, shift in self.params.values()))

    def whole(self, name: str) -> torch.Tensor:
        param, shift = self.params[name]
        return self.numbers[shift:][: param.numel].view(param.shape)

    def write(self, move: Move) -> None:
        for name, tensor in move.held.tensors.items():
            tensor.copy_(self.whole(name)[region_slices(move.held.regions[name])])

    def wrong(self, move: Move) -> list[str]:
        """Return the names of parameters whose shard at the target is wrong."""
        wanted = ((n, t, region_slices(move.wanted.regions[n])) for n, t in move.wanted.tensors.items())
        return [name for name, tensor, index in wanted if not torch.equal(tensor, self.whole(name)[index])]


@functools.cache
def _numbers(count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32)


def ratios(rows: Sequence[dict[str, Any]], method: str) -> list[float]:
    """Return, by row, the seconds of a method divided by ours."""
    return [row["seconds"][method] / row["seconds"]["ours"] for row in rows]


def goals(rows: Sequence[dict[str, Any]], methods: Sequence[str]) -> list[Goal]:
    """Return the goals that the rows and methods at hand can decide."""
    row_goals = []
    if "ours" not in methods:
        return []
    for method, factor in (("broadcast", 3.0), ("checkpoint", 3.0), ("all_gather", 5.0)):
        if method in methods:
            row_goals.append(Goal(f"{method} / ours", geometric_mean(ratios(rows, method)), factor))
    if "unpacked" in methods:
        row_goals.append(Goal("unpacked / ours, worst row", min(ratios(rows, "unpacked")), 1.0))
        if expert_rows := [row for row in rows if row["model"] == "experts"]:
            ratio = geometric_mean(ratios(expert_rows, "unpacked"))
            row_goals.append(Goal("unpacked / ours, experts", ratio, 1.5))
    if {"raw", "messages"} <= set(methods):
        times = [row["seconds"]["raw"] / row["seconds"]["messages"] for row in rows]
        row_goals.append(Goal("raw / ours by messages only", geometric_mean(times), 0.7))
    if "raw" in methods:
        row_goals.append(Goal("raw / ours", geometric_mean(ratios(rows, "raw")), 0.7))
    return row_goals


def tables(rows: Sequence[dict[str, Any]], methods: Sequence[str]) -> list[Table]:
    """Return a table of all moves, and one of geometric means by model and number of processes."""
    rivals = [method for method in methods if method != "ours"]
    has_ours = "ours" in methods
    moves = Table(title="Seconds by method (times ours)" if has_ours else "Seconds by method")
    means = Table(title="Geometric means of time over ours")
    for column in ("model", "move", "MiB", "over bound", "ours", "GB/s", *rivals):
        moves.add_column(column, justify="left" if column in ("model", "move") else "right")
    for column in ("model", "processes", *rivals):
        means.add_column(column, justify="left" if column == "model" else "right")
    for row in rows:
        seconds = row["seconds"]
        ours = row["seconds"].get("ours")
        times = [f"{seconds[m]:.3f}" + (f" ({seconds[m] / ours:.2f})" if ours else "") for m in rivals]
        speed = (f"{ours:.3f}", f"{row['moved_bytes'] / ours / 1e9:.2f}") if ours else ("", "")
        moved = f"{row['moved_bytes'] / 2**20:.0f}", f"{row['over_bound']:.3f}"
        moves.add_row(row["model"], f"{row['source']} -> {row['target']}", *moved, *speed, *times)
    kinds = dict.fromkeys((row["model"], row["nproc"]) for row in rows)
    for model, nproc in kinds if has_ours else []:
        model_rows = [row for row in rows if (row["model"], row["nproc"]) == (model, nproc)]
        means.add_row(model, str(nproc), *(f"{geometric_mean(ratios(model_rows, m)):.2f}" for m in rivals))
    if has_ours:
        means.add_row("all", "", *(f"{geometric_mean(ratios(rows, m)):.2f}" for m in rivals))
    return [moves, means] if has_ours else [moves]


def main() -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--nproc", type=int, nargs="+", default=[2, 4, 8], choices=[2, 4, 8])
    parser.add_argument("--mib", type=int, default=512, help="float32 weights of each model, at least")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--methods", nargs="+", default=list(RIVALS), choices=list(RIVALS))
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    args = parser.parse_args()
    hardware = machine()
    with scratch_directory(4 * args.mib << 20) as scratch:
        settings = Settings(args.mib, args.repeats, tuple(args.models), tuple(args.methods), scratch)
        rows = [row for nproc in args.nproc for row in run_ranks(measure, nproc, settings)[0]]
    rivals = [method for method in args.methods if method != "ours" and "ours" in args.methods]
    document = {
        "benchmark": "realloc_run", "machine": hardware, "settings": vars(args), "rows": rows,
        "geometric_means": {method: geometric_mean(ratios(rows, method)) for method in rivals},
    }
    return report(
        document, tables=tables(rows, args.methods), goals=goals(rows, args.methods), as_json=args.json
    )


if __name__ == "__main__":
    sys.exit(main())
