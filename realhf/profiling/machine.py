"""Time operations that depend on no model: messages, samples between calls, reallocations, products."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch

from realhf.cluster import ACCELERATORS, Cluster, Link, host_memory_bytes, num_cores
from realhf.data.batch import Batch, Packed
from realhf.distributed import tags
from realhf.distributed.group import Group, Outbox
from realhf.distributed.world import World
from realhf.engine.base import DTYPES
from realhf.engine.native import NativeEngine
from realhf.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.models.model_config import ModelConfig
from realhf.models.param_spec import model_spec
from realhf.planner.profile import COLLECTIVES, LinkTables, Table
from realhf.planner.step_time import MOVED_BYTES_PER_TOKEN
from realhf.profiling.clock import Clock, device_bytes, nothing
from realhf.profiling.engine_calls import Sizes
from realhf.realloc.execute import Reallocator, assumed_links
from realhf.realloc.schedule import make_schedule
from realhf.runtime.samples.exchange import Exchange, Routing, Source

_MESSAGE_BYTES = (1 << 10, 1 << 14, 1 << 18, 1 << 22, 1 << 25)
_FLOATS_PER_TOKEN = (MOVED_BYTES_PER_TOKEN - 8) // 4  # Besides the ids.
_LINK_BUDGET = 2.0  # Seconds for all collectives of groups of one size.
_GEMM = 1024
_COPY_BYTES = 1 << 27
_NARROW = ModelConfig("llama", 256, 64, 256, 1, 1, 1, 64)
_WIDE = ModelConfig("llama", 1000, 1024, 8192, 1, 8, 8, 128)
"""Models with the same number of tensors. Latency dominates the reallocation of the first, bandwidth that of
the second (30M parameters)."""


def measure_links(clock: Clock, sizes: Sizes) -> list[LinkTables]:
    """Time collectives and messages inside a host, and among two hosts and all of them if there are several.

    All groups of one size work at once.
    """
    world = clock.world
    num_hosts = world.size // world.ranks_per_host
    measured = []
    for hosts in sorted({1, num_hosts, *((2,) if num_hosts % 2 == 0 else ())}):
        if hosts * world.ranks_per_host == 1:
            continue  # A rank that is alone on its host has no link inside it.
        tables, noise = _collectives(clock, hosts)
        if hosts <= 2:
            tables["send"], noise["send"] = _messages(clock, hosts)
            tables["samples"], noise["samples"] = _samples(clock, sizes, hosts)
        measured.append(LinkTables(hosts, tables, noise))
    return measured


def _groups(world: World, hosts: int) -> dict[int, list[int]]:
    """Return the groups of this rank on so many hosts by size: inside a host the powers of two that divide
    its number of ranks; else with one rank on each host, and with all ranks of the hosts."""
    per_host = world.ranks_per_host
    if hosts == 1:
        powers = {2**i for i in range(1, per_host.bit_length()) if per_host % 2**i == 0}
        firsts = {n: world.rank - world.rank % n for n in sorted({*powers, per_host})}
        return {n: list(range(first, first + n)) for n, first in firsts.items()}
    first = world.rank - world.rank % (hosts * per_host)
    everybody = list(range(first, first + hosts * per_host))
    one_per_host = [rank for rank in everybody if rank % per_host == world.rank % per_host]
    return {len(ranks): ranks for ranks in (one_per_host, everybody)}


def _collectives(clock: Clock, hosts: int) -> tuple[dict[str, Table], dict[str, float]]:
    """Return tables of collectives among ranks of so many hosts, and the noise of each."""
    groups = {n: clock.world.group(ranks) for n, ranks in sorted(_groups(clock.world, hosts).items())}
    times: dict[tuple[str, int, int], float] = {}
    spreads: dict[tuple[str, int, int], float] = {}
    for count, group in groups.items():
        work: dict[tuple[str, int, int], Callable[[], object]] = {}
        for num_bytes in _MESSAGE_BYTES:
            tensor = torch.zeros(num_bytes // 4, device=clock.world.device)
            chunks = list(tensor.tensor_split(count))
            calls: dict[str, Callable[[], object]] = {
                "all_reduce": partial(group.all_reduce, tensor),
                "all_gather": partial(group.all_gather_flat, tensor),
                "reduce_scatter": partial(_reduce_scatter, group, tensor),
                "all_to_all": partial(_all_to_all, group, chunks)}
            work |= {(name, count, num_bytes): call for name, call in calls.items()}
        times |= clock.seconds(work, budget=_LINK_BUDGET)
        spreads |= {key: clock.noise[key] for key in work}
    axes = {"ranks": tuple(map(float, groups)), "bytes": tuple(map(float, _MESSAGE_BYTES))}
    tables = {
        name: Table(axes, [[times[name, count, n] for n in _MESSAGE_BYTES] for count in groups])
        for name in COLLECTIVES}
    return tables, {name: _median(spreads[key] for key in spreads if key[0] == name) for name in COLLECTIVES}


def _reduce_scatter(group: Group, flat: torch.Tensor) -> None:
    """Sum the chunks of a tensor, each on one member."""
    group.post_reduce_scatter(flat)()


def _all_to_all(group: Group, chunks: Sequence[torch.Tensor]) -> None:
    """Exchange equal parts of a tensor between all members."""
    peers = [i for i in range(group.size) if i != group.index]
    parts = [(i, torch.empty_like(chunks[group.index])) for i in peers]
    group.exchange([(i, chunks[i]) for i in peers], parts)


def _messages(clock: Clock, hosts: int) -> tuple[Table, float]:
    """Time messages between the ranks of each pair, inside a host or on two neighbouring ones."""
    world = clock.world
    everybody = world.group(range(world.size))
    partners = [_partner(rank, hosts, per_host=world.ranks_per_host) for rank in range(world.size)]
    paired = [rank for rank, partner in enumerate(partners) if partner is not None]
    partner = partners[world.rank]
    work: dict[tuple[str, int, int], Callable[[], object]] = {
        ("send", hosts, n): nothing if partner is None else partial(_ping_pong, everybody, world, n, partner)
        for n in _MESSAGE_BYTES}
    seconds = clock.seconds(work, busy=paired)
    table = Table({"bytes": tuple(map(float, _MESSAGE_BYTES))}, [both / 2 for both in seconds.values()])
    return table, _median(clock.noise[key] for key in work)


def _partner(rank: int, hosts: int, *, per_host: int) -> int | None:
    """Return the rank with which this one is paired: a neighbour on its host, or with `hosts` 2 the one with
    its index on the neighbouring host. None for the last of an odd number on one host."""
    host, index = divmod(rank, per_host)
    if hosts > 1:
        return (host ^ 1) * per_host + index
    return host * per_host + (index ^ 1) if index ^ 1 < per_host else None


def _median(values: Iterable[float]) -> float:
    return round(statistics.median(values), 4)


def _ping_pong(group: Group, world: World, num_bytes: int, partner: int) -> None:
    """Send a message to the partner and back."""
    tensor = torch.zeros(num_bytes // 4, device=world.device)
    for sends in (world.rank < partner, world.rank > partner):
        group.exchange(*(([(partner, tensor)], []) if sends else ([], [(partner, tensor)])))


def _samples(clock: Clock, sizes: Sizes, hosts: int) -> tuple[Table, float]:
    """Time samples that move between calls, on all ranks of so many hosts, each to another rank.

    Between calls all ranks tell each other which samples they have, so they work even if few samples move.
    """
    world = clock.world
    ranks = tuple(range(hosts * world.ranks_per_host))
    strategy = ParallelStrategy(dp=len(ranks))
    source = Layout(strategy, DeviceMesh(ranks))
    target = Layout(strategy, DeviceMesh(ranks[::-1]))
    moves: dict[tuple[str, int, float], Callable[[], object]] = {}
    for samples in sorted({1, max(2, sizes.samples // len(ranks))}):
        tokens = samples * sizes.tokens
        lengths = [sizes.tokens] * samples
        columns = {
            "ids": Packed(torch.zeros(tokens, dtype=torch.long), lengths),
            "floats": Packed(torch.zeros(tokens, _FLOATS_PER_TOKEN), lengths)}
        first = world.rank * samples
        batch_source = Source(source, Batch(list(range(first, first + samples)), columns), tag=tags.PROFILED)
        num_bytes = float(len(ranks) * tokens * MOVED_BYTES_PER_TOKEN)
        moves["samples", hosts, num_bytes] = partial(_move, world, batch_source, target)
    # The planner takes these seconds as they are, on cores that all ranks share.
    crowding = clock.crowding(world.ranks_per_host)
    seconds = [taken * crowding for taken in clock.seconds(moves, busy=ranks).values()]
    table = Table({"bytes": tuple(num_bytes for _, _, num_bytes in moves)}, seconds)
    return table, _median(clock.noise[key] for key in moves)


def _move(world: World, source: Source, target: Layout) -> None:
    if world.rank not in target:
        return
    outbox = Outbox()
    exchange = Exchange(world, outbox)
    exchange.send(source, target)
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
        intra_host, inter_host, host_bandwidth, world.device.type, _host_memory_link(clock),
        accelerator=_accelerator(world),
        cores_per_host=num_cores() if world.device.type == "cpu" else None)


def _accelerator(world: World) -> str | None:
    """Return the accelerator whose efficiencies are known for this GPU; None on CPU, or if there is none."""
    if world.device.type == "cpu":
        return None
    name = torch.cuda.get_device_name(world.device).lower()
    return next((known for known in ACCELERATORS if known in name), None)


def _host_memory_link(clock: Clock) -> Link | None:
    """Time copies from the host's memory to the device, on all devices at once; None if they are the same."""
    device = clock.world.device
    if device.type == "cpu":
        return None
    work: dict[int, Callable[[], object]] = {}
    for num_bytes in (1 << 20, _COPY_BYTES):
        there = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        here = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        work[num_bytes] = partial(there.copy_, here)
    (few_bytes, few), (many_bytes, many) = clock.seconds(work).items()
    return _fitted(few_bytes, few, many_bytes, many)


def _fitted(few_bytes: int, few: float, many_bytes: int, many: float) -> Link:
    """Return the link that takes these seconds for few and for many bytes."""
    bandwidth = (many_bytes - few_bytes) / max(many - few, 1e-9)
    return Link(max(1e-7, few - few_bytes / bandwidth), bandwidth)


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
        runs[num_bytes] = nothing
        if world.rank in busy:
            shards = NativeEngine(spec, target if world.rank >= peer else source, world, dtype=dtype).shards()
            schedule = make_schedule(
                spec, source=source, target=target, itemsize=DTYPES[dtype].itemsize,
                links=assumed_links(world))
            reallocator = Reallocator(schedule, world, dtype=DTYPES[dtype])
            ends = (shards, None) if world.rank < peer else (None, shards)
            runs[num_bytes] = partial(reallocator.run, *ends)
    (few_bytes, few), (many_bytes, many) = clock.seconds(runs, busy=busy).items()
    return _fitted(few_bytes, few, many_bytes, many)
