"""Compares a reallocation on four real processes with slices of the global tensors."""

import functools
from dataclasses import dataclass, field, replace

import pytest
import torch

from realhf.cluster import Cluster
from realhf.distributed.pieces import one_piece_each, whole_parameters
from realhf.distributed.world import World
from realhf.layout import Layout
from realhf.models.model_config import ModelConfig
from realhf.models.param_spec import ModelSpec, Region, model_spec
from realhf.realloc.execute import Reallocator, Staging, agreed_links
from realhf.realloc.links import Links
from tests.reallocators import make_reallocator
from tests.samples import pairs

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16


def _spec(num_layers=3, num_heads=12, num_kv_heads=2, tied=False, head="lm") -> ModelSpec:
    sizes = {"vocab_size": 37, "hidden_size": 10, "intermediate_size": 23, "head_dim": 2}
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head": head}
    flags = {"qkv_bias": True, "tie_word_embeddings": tied}
    return model_spec(ModelConfig("qwen2", num_layers=num_layers, **sizes, **heads, **flags))


def _at(region: Region) -> tuple[slice, ...]:
    return tuple(slice(*span) for span in region)


def _model(spec: ModelSpec, *, seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {p.name: torch.randn(p.shape, generator=generator, dtype=F64).to(dtype) for p in spec.params}


def _shards(model, regions):
    """Return contiguous copies of regions, or None on a rank that holds nothing."""
    return {name: model[name][_at(region)].clone() for name, region in regions.items()} or None


def _pieces(tensors, regions):
    """Return the tensors of these regions as shards of a reallocation."""
    return tensors and one_piece_each(tensors, {name: regions[name] for name in tensors})


def _lacking(spec: ModelSpec, source: Layout, target: Layout, rank: int) -> int:
    """Count the elements that a rank wants and does not hold, on masks."""
    held, wanted = spec.held_by(source, rank), spec.held_by(target, rank)
    total = 0
    for param in spec.params:
        mask = torch.zeros(param.shape, dtype=torch.bool)
        if param.name in wanted:
            mask[_at(wanted[param.name])] = True
        if param.name in held:
            mask[_at(held[param.name])] = False
        total += int(mask.sum())
    return total


@dataclass(frozen=True)
class Case:
    source: str
    target: str
    spec: ModelSpec = field(default_factory=_spec)
    dtypes: tuple[torch.dtype, torch.dtype] = (F32, F32)
    follow_rate: float = 1.0
    staging_bytes: int = 1 << 28


CASES = {
    "d4->t4": Case("d4@0-3", "t4@0-3"),
    "t4->d4": Case("t4@0-3", "d4@0-3"),
    "t4->p4": Case("t4@0-3", "p4@0-3", _spec(num_layers=5)),
    "d2t2->d4": Case("d2t2@0-3", "d4@0-3"),
    "same": Case("t2p2@0-3", "t2p2@0-3"),
    "disjoint": Case("p2@0-1", "t2@2-3"),
    "uneven": Case("t2p2@0-3", "d3@1-3"),
    "does not divide": Case("t4@0-3", "t3@1-3", _spec(num_kv_heads=12)),
    "one to many": Case("d1@0", "d4@0-3"),
    "many to one": Case("d4@0-3", "d1@2"),
    "gather to one": Case("t2p2@0-3", "d1@3"),
    "from replicated kv heads": Case("t4@0-3", "t2p2@0-3"),
    "to replicated kv heads": Case("p2t2@0-3", "t4@0-3", _spec(num_kv_heads=1)),
    "from tied": Case("p2@0-1", "t2@0-1", _spec(tied=True)),
    "to tied": Case("t2@0-1", "p3@1-3", _spec(tied=True)),
    "score head": Case("p3@0-2", "d2t2@0-3", _spec(head="score")),
    "permuted": Case("t2p2@0-3", "t2p2@2,0,3,1"),
    "a rank in neither": Case("d2@0-1", "t2@1-2"),
    "cast": Case("t2@0-1", "p2d2@0-3", dtypes=(F64, F32)),
    "cast to bf16": Case("d2t2@0-3", "t4@0-3", dtypes=(F32, BF16)),
    "moving average": Case("d2t2@0-3", "d4@0-3", follow_rate=0.25),
    "moving average with cast": Case("t4@0-3", "t2p2@0-3", dtypes=(F64, F32), follow_rate=0.75),
    "moving average from one": Case("d1@0", "d4@0-3", follow_rate=0.5),
    "several waves": Case("d2t2@0-3", "d4@0-3", staging_bytes=2000),
    "moving average in several waves": Case("t4@0-3", "p3@1-3", follow_rate=0.25, staging_bytes=1000),
    "waves of a few elements": Case("t2@0-1", "p2@1-2", staging_bytes=200),
}


def _reallocator(world, case: Case, staging: Staging | None = None) -> Reallocator:
    return make_reallocator(
        case.spec,
        Layout.parse(case.source),
        Layout.parse(case.target),
        world,
        dtype=case.dtypes[1],
        follow_rate=case.follow_rate,
        staging_bytes=case.staging_bytes,
        staging=staging,
    )


def _in_shared_memory(world, shards):
    """Return the tensors in shared memory, end to end as a model's shards are."""
    if not shards:
        return shards
    dtype = next(iter(shards.values())).dtype
    flat = world.zeros(sum(tensor.numel() for tensor in shards.values()), dtype)
    parts = flat.split([tensor.numel() for tensor in shards.values()])
    for part, tensor in zip(parts, shards.values(), strict=True):
        part.copy_(tensor.view(-1))
    return {n: part.view_as(t) for (n, t), part in zip(shards.items(), parts, strict=True)}


@functools.cache
def _two_hosts(world):
    """Return a World of the same four ranks as if they were two on each of two hosts."""
    store = torch.distributed.PrefixStore("two hosts", world._store)
    return World(rank=world.rank, size=world.size, store=store, ranks_per_host=2)


def _move(world, case: Case, transport: str):
    """Move two models with one Reallocator; return stats, waves, messages sent and staging bytes."""
    world = _two_hosts(world) if transport == "two hosts" else world
    realloc = _reallocator(world, case)
    held = case.spec.held_by(Layout.parse(case.source), world.rank)
    wanted = case.spec.held_by(Layout.parse(case.target), world.rank)
    for seed in (1, 2):
        new = _model(case.spec, seed=seed, dtype=case.dtypes[0])
        old = _model(case.spec, seed=seed + 10, dtype=case.dtypes[1])
        source, target = _shards(new, held), _shards(old, wanted)
        if transport != "messages":
            source, target = (_in_shared_memory(world, shards) for shards in (source, target))
        stats = realloc.run(_pieces(source, held), _pieces(target, wanted))
        for name, region in wanted.items():
            cast = new[name].to(case.dtypes[1])
            rate = case.follow_rate
            expected = cast if rate == 1 else rate * cast + (1 - rate) * old[name]
            assert torch.equal(target[name], expected[_at(region)]), name
        assert all(torch.equal(source[name], new[name][_at(region)]) for name, region in held.items())
    num_messages = sum(len(wave.sends) for wave in realloc._binding.waves)
    return stats, len(realloc.messages), num_messages, len(realloc.staging.bytes)


@pytest.mark.parametrize(("name", "transport"), pairs(CASES, ["messages", "memory", "two hosts"]))
def test_every_rank_gets_its_regions(pool, name, transport):
    case = CASES[name]
    stats, num_waves, num_messages, staging_bytes = zip(*pool.run(_move, case, transport), strict=True)
    source, target = Layout.parse(case.source), Layout.parse(case.target)
    lacking = [_lacking(case.spec, source, target, rank) * case.dtypes[1].itemsize for rank in range(4)]
    assert [s.bytes_received for s in stats] == lacking
    assert sum(s.bytes_sent for s in stats) == sum(lacking)
    assert all(s.over_bound == stats[0].over_bound >= 1 - 1e-9 for s in stats)
    if transport == "two hosts":
        assert max(staging_bytes) <= case.staging_bytes
    elif transport == "memory":
        assert sum(num_messages) == sum(staging_bytes) == 0, "ranks on one host read without messages"
    elif case.staging_bytes == 1 << 28:
        assert max(num_waves) == (1 if sum(lacking) else 0) and max(num_messages) <= 3
    else:
        assert max(num_waves) > 2 and max(staging_bytes) <= case.staging_bytes
    if not sum(lacking):
        assert stats[0].over_bound == 1 and sum(num_messages) == sum(staging_bytes) == 0


def _move_in_place(world, follow_rate):
    """Move p2 -> t2 -> p2 in the memory of the first layout where possible, through one staging buffer."""
    staging = Staging(world.device)
    there, back = Case("p2@0-1", "t2@0-1"), Case("t2@0-1", "p2@0-1")
    spec = there.spec
    full = spec.held_by(Layout.parse("p2@0-1"), world.rank)
    half = spec.held_by(Layout.parse("t2@0-1"), world.rank)
    old, new = _model(spec, seed=1, dtype=F32), _model(spec, seed=2, dtype=F32)
    source, target = _shards(new, full), _shards(old, half)
    for name in full.keys() & half.keys():  # tensor parallelism keeps a part of what the stage had
        low = [start for start, _ in full[name]]
        within = (slice(a - z, b - z) for (a, b), z in zip(half[name], low, strict=True))
        target[name] = source[name][tuple(within)]
    there = replace(there, follow_rate=follow_rate)
    _reallocator(world, there, staging).run(_pieces(source, full), _pieces(target, half))
    for name, region in half.items():
        average = follow_rate * new[name] + (1 - follow_rate) * old[name]
        moved = new[name] if name in full or follow_rate == 1 else average
        assert torch.equal(target[name], moved[_at(region)]), name
    if follow_rate == 1:
        kept = {name: tensor.clone() for name, tensor in source.items()}
        _reallocator(world, back, staging).run(_pieces(target, half), _pieces(source, full))
        assert all(torch.equal(source[name], kept[name]) for name in full)
    return len(half)


@pytest.mark.parametrize("follow_rate", [1.0, 0.5])
def test_a_target_in_the_memory_of_its_source(pool, follow_rate):
    # The workers return how many tensors each has compared.
    assert min(pool.run(_move_in_place, follow_rate, num_ranks=2)) > 0


def test_parameters_that_need_gradients(pool):
    assert min(pool.run(_move_into_parameters, num_ranks=2)) > 0  # The workers compare so many tensors each.


def _move_into_parameters(world):
    case = Case("t2@0-1", "d2@0-1")
    model = _model(case.spec, seed=1, dtype=F32)
    regions = case.spec.held_by(Layout.parse(case.source), world.rank)
    held = _shards(model, regions)
    source = {name: torch.nn.Parameter(tensor) for name, tensor in held.items()}
    target = {name: torch.nn.Parameter(torch.zeros_like(tensor)) for name, tensor in model.items()}
    for follow_rate in (1.0, 0.5):
        mover = _reallocator(world, replace(case, follow_rate=follow_rate))
        mover.run(_pieces(source, regions), whole_parameters(target))
        assert all(torch.equal(target[name], model[name]) for name in model)
    assert all(p.is_leaf and p.grad_fn is None for p in target.values())
    return len(target)


def _agreed(world):
    known = None if world.rank else Links.of_cluster(Cluster.load("h100-2x8"), origin="a file's")
    return agreed_links(_two_hosts(world), known), agreed_links(world, None)


def test_all_ranks_schedule_for_the_links_that_rank_0_knows(pool):
    """The links have the run's ranks per host. If rank 0 knows none, links are assumed, and say so."""
    for known, assumed in pool.run(_agreed):
        assert (known.devices_per_host, known.device, known.nic) == (2, 450e9, 50e9)
        links = "450 GB/s per rank, 50 GB/s per rank and 400 GB/s per host between hosts"
        assert known.about == f"a file's links: {links}"
        assert assumed == Links.of_hosts(4, cuda=False)
        assert assumed.about.startswith("assumed links: 4 GB/s per rank")


def test_the_links_of_a_cluster_of_processes_are_those_of_shared_memory():
    assert Links.of_cluster(Cluster.load("cpu-laptop")).pulled
    assert not Links.of_cluster(Cluster.load("h100-2x8")).pulled
