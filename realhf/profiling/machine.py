"""Time operations that depend on no model: messages, samples between calls, reallocations, products."""

import os
import platform
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from realhf.cluster import Cluster, Link, host_memory_bytes
from realhf.data.batch import Batch, Packed
from realhf.dist import tags
from realhf.dist.group import Group, Outbox
from realhf.dist.world import World
from realhf.engine.native import NativeEngine
from realhf.engine.protocol import DTYPES
from realhf.layout import Layout
from realhf.model_config import ModelConfig
from realhf.param_spec import model_spec
from realhf.planner.dependencies import SAMPLE_BYTES
from realhf.planner.profile import Table
from realhf.profiling.clock import Clock
from realhf.profiling.memory import device_bytes
from realhf.profiling.models import Sizes
from realhf.realloc.execute import Reallocator
from realhf.runtime.exchange import Exchange, Routing, Source

_MESSAGE_BYTES = (1 << 10, 1 << 14, 1 << 18, 1 << 22, 1 << 25)
_FLOATS_PER_TOKEN = (SAMPLE_BYTES - 8) // 4  # Besides the ids.
_GEMM = 1024
_COPY_BYTES = 1 << 27
_NARROW = ModelConfig("llama", 256, 64, 256, 1, 1, 1, 64)
_WIDE = ModelConfig("llama", 1000, 1024, 8192, 1, 8, 8, 128)
"""Models with the same number of tensors. Latency dominates the reallocation of the first, bandwidth that of
the second (30M parameters)."""


def measure_links(clock: Clock, sizes: Sizes) -> dict[str, Table]:
    """Time collectives and messages inside a host; return nothing where a rank is alone on its host."""
    world = clock.world
    per_host = world.ranks_per_host
    if per_host == 1:  # All tables are about links inside a host.
        return {}
    counts = sorted({2, per_host} if per_host % 2 == 0 else {per_host})
    rows: dict[str, list[list[float]]] = {"all_reduce": [], "all_gather": [], "reduce_scatter": []}
    for count in counts:
        first = world.rank - world.rank % count
        group = world.group(range(first, first + count))
        times = [_collectives(clock, group, num_bytes) for num_bytes in _MESSAGE_BYTES]
        for name, row in zip(rows, zip(*times, strict=True), strict=True):
            rows[name].append(list(row))
    axes = {"ranks": tuple(map(float, counts)), "bytes": tuple(map(float, _MESSAGE_BYTES))}
    links = {name: Table(axes, values) for name, values in rows.items()}
    everybody = world.group(range(world.size))
    paired = [rank for rank in range(world.size) if (rank % per_host) ^ 1 < per_host]
    sends = clock.seconds(
        {n: partial(_ping_pong, everybody, world, n) for n in _MESSAGE_BYTES}, busy=paired
    )
    links["send"] = Table({"bytes": axes["bytes"]}, [there_and_back / 2 for there_and_back in sends.values()])
    links["samples"] = _samples(clock, sizes)
    return links


def _collectives(clock: Clock, group: Group, num_bytes: int) -> list[float]:
    """Return the seconds of an all-reduce, an all-gather and a reduce-scatter of `num_bytes` in all."""
    tensor = torch.zeros(num_bytes // 4, device=clock.world.device)
    chunks = list(tensor.tensor_split(group.size))
    times = clock.seconds({
        "all_reduce": partial(group.all_reduce, tensor),
        "all_gather": partial(group.all_gather_chunks, chunks),
        "reduce_scatter": partial(group.reduce_scatter_chunks, chunks),
    })  # fmt: skip
    return list(times.values())


def _ping_pong(group: Group, world: World, num_bytes: int) -> None:
    """Send a message there and back between the two ranks of each pair inside a host."""
    inside = world.rank % world.ranks_per_host
    peer = world.rank - inside + (inside ^ 1)
    tensor = torch.zeros(num_bytes // 4, device=world.device)
    if inside ^ 1 >= world.ranks_per_host:
        return
    for sends in (world.rank < peer, world.rank > peer):
        group.exchange(*(([(peer, tensor)], []) if sends else ([], [(peer, tensor)])))


def _samples(clock: Clock, sizes: Sizes) -> Table:
    """Time samples that move from the first rank to the second."""
    world = clock.world
    source, target = Layout.parse("d1@0"), Layout.parse("d1@1")
    moves: dict[float, Callable[[], object]] = {}
    for samples in sorted({1, max(2, sizes.samples)}):
        tokens = samples * sizes.tokens
        lengths = [sizes.tokens] * samples
        columns = {
            "ids": Packed(torch.zeros(tokens, dtype=torch.long), lengths),
            "floats": Packed(torch.zeros(tokens, _FLOATS_PER_TOKEN), lengths),
        }
        batch = Batch(list(range(samples)), columns) if world.rank == 0 else None
        given = Source(source, batch, tag=tags.PROFILED)
        moves[float(tokens * SAMPLE_BYTES)] = partial(_move, world, given, target)
    return Table({"bytes": tuple(moves)}, list(clock.seconds(moves, busy=(0, 1)).values()))


def _move(world: World, source: Source, target: Layout) -> None:
    outbox = Outbox()
    exchange = Exchange(world, outbox)
    if world.rank in source.layout:
        exchange.send(source, target)
    if world.rank in target:
        exchange.receive([source], target, Routing(), tag=tags.PROFILED)
    outbox.wait()


def measure_cluster(clock: Clock, dtypes: list[str]) -> Cluster:
    """Return the machine as a cluster; its links are timed by reallocations.

    There is no link between hosts where there is only one.
    """
    world = clock.world
    a = torch.zeros(_COPY_BYTES // 4, device=world.device)
    b = torch.zeros_like(a)
    squares = {name: torch.ones(_GEMM, _GEMM, dtype=DTYPES[name], device=world.device) for name in dtypes}
    work: dict[str, Callable[[], object]] = {x: partial(torch.matmul, squares[x], squares[x]) for x in dtypes}
    seconds = clock.seconds({"copy": partial(b.copy_, a), **work})
    peaks = {name: 2 * _GEMM**3 / seconds[name] for name in dtypes}
    copied = _COPY_BYTES / seconds["copy"]
    per_host = world.ranks_per_host
    inter_host = host_bandwidth = None
    # A rank that is alone on its host has no neighbour: its link is a copy in its own memory.
    intra_host = Link(1e-7, copied) if per_host == 1 else _reallocation_link(clock, dtypes[0], peer=1)
    if world.size > per_host:
        inter_host = _reallocation_link(clock, dtypes[0], peer=per_host)
        at_once = _reallocation_link(clock, dtypes[0], peer=per_host, num_pairs=per_host)
        each = min(at_once.bandwidth_bytes_per_second, inter_host.bandwidth_bytes_per_second)
        host_bandwidth = per_host * each
    return Cluster(
        max(1, world.size // per_host), per_host, device_bytes(world), host_memory_bytes(), 2 * copied, peaks,
        intra_host, inter_host, host_bandwidth, world.device.type)


def _reallocation_link(clock: Clock, dtype: str, *, peer: int, num_pairs: int = 1) -> Link:
    """Time reallocations of a small and of a large model from rank 0 to `peer`.

    With more than one pair, rank 1 sends to the rank after `peer` at the same time, and so on.
    """
    world = clock.world
    busy = [*range(num_pairs), *range(peer, peer + num_pairs)]
    first = world.rank - peer if world.rank >= peer else world.rank
    source, target = Layout.parse(f"d1@{first}"), Layout.parse(f"d1@{first + peer}")
    runs: dict[int, Callable[[], object]] = {}
    for config in (_NARROW, _WIDE):
        spec = model_spec(config)
        num_bytes = spec.numel * DTYPES[dtype].itemsize
        runs[num_bytes] = _nothing
        if world.rank in busy:
            shards = NativeEngine(spec, target if world.rank >= peer else source, world, dtype=dtype).shards()
            reallocator = Reallocator(spec, source=source, target=target, world=world, dtype=DTYPES[dtype])
            ends = (shards, None) if world.rank < peer else (None, shards)
            runs[num_bytes] = partial(reallocator.run, *ends)
    (few_bytes, few), (many_bytes, many) = clock.seconds(runs, busy=busy).items()
    bandwidth = (many_bytes - few_bytes) / max(many - few, 1e-9)
    return Link(max(1e-7, few - few_bytes / bandwidth), bandwidth)


def _nothing() -> None:
    """Do nothing, on a rank that has no part in the timed work."""


def describe(world: World) -> dict[str, Any]:
    """Return the facts about the machine that timings depend on."""
    cuda = torch.cuda.get_device_name() if world.device.type == "cuda" else None
    return {
        "platform": platform.platform(), "processor": _processor(), "cores": os.cpu_count(),
        "device": cuda or "cpu", "processes": world.size, "threads_per_process": torch.get_num_threads(),
        "torch": str(torch.__version__), "python": platform.python_version(),
    }  # fmt: skip


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()
