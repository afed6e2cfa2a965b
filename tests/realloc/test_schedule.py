"""Compares schedules with brute force, on arrays with one entry per element of every parameter."""

import numpy as np
import pytest

from realhf.cluster import Cluster, Link
from realhf.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.models.model_config import MlaConfig, ModelConfig, MoeConfig
from realhf.models.param_spec import ModelSpec, Region, model_spec, region_size
from realhf.realloc.links import Links
from realhf.realloc.schedule import Schedule, make_schedule
from tests.samples import drawn

MAX_RANKS = 16


def _random_spec(rng: np.random.Generator) -> ModelSpec:
    family = str(rng.choice(["qwen2", "qwen3_moe", "deepseek_v3"]))
    kv_heads, num_layers = int(rng.integers(1, 4)), int(rng.integers(1, 8))
    heads = kv_heads * int(rng.choice([1, 2, 4]))
    mla = MlaConfig(None if rng.integers(3) == 0 else 3, 2, 1, 1, 2) if family == "deepseek_v3" else None
    config = ModelConfig(
        family=family,
        vocab_size=int(rng.integers(8, 20)),
        hidden_size=int(rng.integers(1, 4)),
        intermediate_size=int(rng.integers(8, 14)),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=heads if mla else kv_heads,
        head_dim=2,
        qkv_bias=family == "qwen2" and bool(rng.integers(2)),
        qk_norm="head" if family == "qwen3_moe" else None,
        tie_word_embeddings=bool(rng.integers(2)),
        head=str(rng.choice(["lm", "score"])),
        moe=None if family == "qwen2" else _random_moe(rng, num_layers, shared=family == "deepseek_v3"),
        mla=mla,
    )
    return model_spec(config)


def _random_moe(rng: np.random.Generator, num_layers: int, *, shared: bool) -> MoeConfig:
    """Return experts that often cannot be split evenly; with `shared`, with DeepSeek's extra fields."""
    num_experts, width = int(rng.integers(2, 9)), int(rng.integers(4, 7))
    if not shared:
        return MoeConfig(num_experts, 2, width)
    dense = int(rng.integers(num_layers + 1))
    return MoeConfig(num_experts, 2, width, 2 * width, dense, router_bias=True)


def _random_layout(rng: np.random.Generator, config: ModelConfig, num_ranks: int) -> Layout:
    """Return a layout that the model allows, on at most `num_ranks` ranks; pipelines are often uneven."""
    while True:
        pp, dp, tp = int(rng.integers(1, 7)), int(rng.integers(1, 9)), int(rng.integers(1, 5))
        if pp * dp * tp > num_ranks:
            continue
        ep = int(rng.choice([size for size in range(1, dp + 1) if dp % size == 0])) if config.moe else 1
        ranks = tuple(int(r) for r in rng.permutation(num_ranks)[: pp * dp * tp])
        layout = Layout(ParallelStrategy(pp=pp, dp=dp, tp=tp, ep=ep), DeviceMesh(ranks))
        try:
            config.check_layout(layout)
        except ValueError:
            continue
        return layout


def _at(region: Region) -> tuple[slice, ...]:
    return tuple(slice(*span) for span in region)


def _masks(spec: ModelSpec, layout: Layout) -> dict[str, np.ndarray]:
    """Return a mask by parameter of the elements that each rank holds: bool (MAX_RANKS, *shape)."""
    masks = {p.name: np.zeros((MAX_RANKS, *p.shape), dtype=bool) for p in spec.params}
    for rank in layout.ranks:
        for name, region in spec.held_by(layout, rank).items():
            masks[name][rank][_at(region)] = True
    assert all(mask.any(axis=0).all() for mask in masks.values())
    return masks


def _check(spec: ModelSpec, schedule: Schedule, source: Layout, target: Layout) -> None:
    """Execute the transfers, wave by wave, on arrays that hold element ids."""
    held, wanted = _masks(spec, source), _masks(spec, target)
    ids = {p.name: np.arange(p.numel).reshape(p.shape) for p in spec.params}
    written = {name: np.zeros(mask.shape, dtype=int) for name, mask in wanted.items()}
    result = {name: np.where(held[name], ids[name], -1) for name in wanted}
    for rank in range(MAX_RANKS):
        for name, region in schedule.local_copies(rank):
            assert held[name][rank][_at(region)].all(), "a local copy of what the rank does not hold"
            written[name][rank][_at(region)] += 1
    load = np.zeros((2, MAX_RANKS), dtype=int)
    by_wave: dict[int, list] = {}
    for number, transfer in schedule.transfers():
        by_wave.setdefault(number, []).append(transfer)
    assert sorted(by_wave) == sorted(set(by_wave)) and max(by_wave, default=-1) < schedule.num_waves
    for number in sorted(by_wave):
        arriving = []
        for t in by_wave[number]:
            at = _at(t.region)
            assert t.source != t.target and region_size(t.region) > 0
            assert (result[t.name][t.source][at] >= 0).all(), "a rank sends what it does not hold yet"
            assert not held[t.name][t.target][at].any(), "something local is sent"
            arriving.append((t, result[t.name][t.source][at].copy()))
            load[[0, 1], [t.source, t.target]] += region_size(t.region)
        for t, data in arriving:
            result[t.name][t.target][_at(t.region)] = data
            written[t.name][t.target][_at(t.region)] += 1
    for name, mask in wanted.items():
        assert (written[name] == mask).all(), "every wanted element is written once and no other"
        assert (np.where(mask, result[name], -1) == np.where(mask, ids[name], -1)).all()
    lacking = {name: wanted[name] & ~held[name] for name in wanted}
    needed = sum(mask.reshape(MAX_RANKS, -1).sum(axis=1) for mask in lacking.values())
    assert list(load[1]) == list(needed) and schedule.needed_bytes == needed.sum() * schedule.itemsize
    sent, received = schedule.port_bytes
    for rank in range(MAX_RANKS):
        assert sent.get(rank, 0) == load[0][rank] * schedule.itemsize
        assert received.get(rank, 0) == load[1][rank] * schedule.itemsize


def _check_bound(spec: ModelSpec, schedule: Schedule, source: Layout, target: Layout) -> None:
    """Check that the bound is at least what any single rank, or any single host, must send or receive."""
    held, wanted, links = _masks(spec, source), _masks(spec, target), schedule.links
    lacking = {name: wanted[name] & ~held[name] for name in wanted}
    host = np.arange(MAX_RANKS) // links.devices_per_host
    least = [0.0]
    for rank in range(MAX_RANKS):
        comes = sum(int(mask[rank].sum()) for mask in lacking.values())
        alone = sum(
            int((held[n][rank] & (held[n].sum(axis=0) == 1) & lacking[n].any(axis=0)).sum()) for n in held
        )
        least += [comes / links.device, alone / links.device]
    for number in set(host):
        here = host == number
        absent = {n: ~held[n][here].any(axis=0) & wanted[n][here].any(axis=0) for n in held}
        least.append(sum(int(mask.sum()) for mask in absent.values()) / links.host)
    assert schedule.bound_seconds >= max(least) * schedule.itemsize * (1 - 1e-9)
    assert schedule.seconds >= schedule.bound_seconds * (1 - 1e-9)
    assert schedule.bound_seconds > 0 or not schedule.bundles


def _waves_by_port(schedule: Schedule) -> list[dict[tuple, float]]:
    """Return the seconds of every port, by wave."""
    links = schedule.links
    waves: dict[int, dict[tuple, float]] = {}
    for number, t in schedule.transfers():
        size, ports = region_size(t.region) * schedule.itemsize, waves.setdefault(number, {})
        hosts = [rank // links.devices_per_host for rank in (t.source, t.target)]
        used = [(("out", t.source), links.device), (("in", t.target), links.device)]
        if hosts[0] != hosts[1]:
            used += [(("card out", t.source), links.nic), (("card in", t.target), links.nic)]
            used += [(("host out", hosts[0]), links.host), (("host in", hosts[1]), links.host)]
        for port, bandwidth in used:
            ports[port] = ports.get(port, 0.0) + size / bandwidth
    return list(waves.values())


def _random_links(rng: np.random.Generator) -> Links | None:
    if rng.integers(3) == 0:
        return None
    device, nic = (float(10 ** rng.uniform(3, 6)) for _ in range(2))
    links = Link(float(10 ** rng.uniform(-6, -3)), device), Link(1e-4, min(device, nic))
    host = float(min(device, nic) * rng.uniform(0.5, 4)) if rng.integers(2) else None
    return Links.of_cluster(
        Cluster(16, int(rng.choice([1, 2, 3, 4])), 1e9, 1e9, 1e9, {"float32": 1e9}, *links, host)
    )


@pytest.mark.parametrize("seed", drawn(range(8), 1))
def test_random_models_layouts_and_clusters(seed):
    rng = np.random.default_rng(seed)
    hops = with_experts = 0
    for _ in range(18):
        spec, num_ranks = _random_spec(rng), int(rng.choice([4, 8, MAX_RANKS]))
        source, target = (_random_layout(rng, spec.config, num_ranks) for _ in range(2))
        options = {
            "itemsize": int(rng.choice([2, 4])), "links": _random_links(rng),
            "staging_bytes": int(rng.integers(100, 4000)), "forward": bool(rng.integers(4)),
        }
        schedule = make_schedule(spec, source=source, target=target, **options)
        _check(spec, schedule, source, target)
        _check_bound(spec, schedule, source, target)
        again = make_schedule(spec, source=source, target=target, **options)
        transfers = list(schedule.transfers())
        assert list(again.transfers()) == transfers
        for rank in range(MAX_RANKS):
            own = [(n, t) for n, t in transfers if rank in (t.source, t.target)]
            assert list(schedule.transfers(rank)) == own
        hops += schedule.max_hops > 1
        with_experts += source.ep > 1 or target.ep > 1
        assert not make_schedule(spec, source=source, target=source, **options).bundles
    assert hops > 1, "hardly any schedule forwards anything: the cases are too easy"
    assert with_experts > 3


def _llama(num_layers: int) -> ModelSpec:
    return model_spec(
        ModelConfig("llama", 32000, 8192, 28672, num_layers, 64, 8, 128)
    )


PORT_CASES = [
    ("t4@0-3", "d4@0-3", None),
    ("d4@0-3", "t4@4-7", None),
    ("t4p2@0-7", "t8@0-7", None),
    ("d1@0", "d4@1-4", None),  # receivers forward stripes
    ("t2@0-1", "d4@0-3", None),
    ("d2t4p8@0-63", "d16t4@0-63", None),
    ("d2t4p8@0-63", "d16t4@0-63", "h100-8x8"),
    ("t8@0-7", "d16t4@0-63", "h100-8x8"),
    ("d1@0", "d64@0-63", "h100-8x8"),  # every host gets each element once and forwards it
    ("p8@0-7", "d2t4@8-15", "h100-2x8"),
    ("d1@0", "d128@0-127", None),  # teams of receivers feed each other
    ("t8@0-7", "d64t8@0-511", "h100-128x8"),
]


@pytest.mark.parametrize("source, target, cluster", PORT_CASES)
def test_seconds_against_the_bound(source, target, cluster):
    links = cluster and Links.of_cluster(Cluster.load(cluster))
    ends = {"source": Layout.parse(source), "target": Layout.parse(target)}
    schedule = make_schedule(_llama(80), **ends, itemsize=2, links=links)
    assert 1 - 1e-9 <= schedule.over_bound <= 1.05


SMALL_PORT_CASES = [case for case in PORT_CASES if max(Layout.parse(case[1]).ranks) < 16]


@pytest.mark.parametrize("source, target, cluster", SMALL_PORT_CASES)
def test_waves_use_ports_and_memory_as_stated(source, target, cluster):
    """`seconds` is the sum of the busiest ports' times; two waves fit into the staging memory."""
    links = cluster and Links.of_cluster(Cluster.load(cluster))
    ends = {"source": Layout.parse(source), "target": Layout.parse(target)}
    staging = 256 << 20
    schedule = make_schedule(_llama(8), **ends, itemsize=2, links=links, staging_bytes=staging)
    waves = _waves_by_port(schedule)
    assert sum(max(ports.values()) for ports in waves) == pytest.approx(schedule.seconds, rel=0.02)
    in_flight: dict[int, dict[int, int]] = {}
    for number, t in schedule.transfers():
        for rank in (t.source, t.target):
            load = in_flight.setdefault(rank, {})
            load[number] = load.get(number, 0) + 2 * region_size(t.region)
    for load in in_flight.values():
        assert max(load.get(n, 0) + load.get(n + 1, 0) for n in load) <= staging
    steady = [max(ports.values()) for ports in waves[8:-8]]
    assert max(steady) <= 1.1 * min(steady), "every wave of the middle carries the same"


def test_hand_counted_example():
    """Two replicas of 8 layers send a third rank the model: each sends half; the receiver is the bound."""
    spec = _llama(8)
    schedule = make_schedule(spec, source=Layout.parse("d2@0-1"), target=Layout.parse("d1@2"), itemsize=2)
    sent, received = schedule.port_bytes
    assert received == {2: 2 * spec.numel}
    assert schedule.bound_seconds == pytest.approx(2 * spec.numel / schedule.links.device)
    assert schedule.over_bound == pytest.approx(1, abs=1e-6)
    assert sent[0] == pytest.approx(sent[1], rel=0.01)


def test_a_lone_holder_on_another_host():
    """Rank 0 sends its model to four hosts of two ranks: each element leaves it once; hosts forward it."""
    links, spec = Links(2, device=1e9, nic=1e8, host=2e8, latency_seconds=1e-6), _llama(8)
    schedule = make_schedule(
        spec, source=Layout.parse("d1@0"), target=Layout.parse("d8@2-9"), itemsize=2, links=links
    )
    assert schedule.bound_seconds == pytest.approx(2 * spec.numel / 1e8)  # once over the card of rank 0
    assert schedule.over_bound < 1.05
    crossing = [t for _, t in schedule.transfers() if t.source // 2 != t.target // 2]
    assert sum(region_size(t.region) for t in crossing) == 4 * spec.numel  # once to every host
