"""Schedules against brute force: one array cell per element of every parameter."""

import numpy as np
import pytest

from realhf.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.model_config import ModelConfig
from realhf.param_spec import ModelSpec, Region, model_spec, region_size
from realhf.realloc.schedule import Schedule, make_schedule

MAX_RANKS = 8


def _random_spec(rng: np.random.Generator) -> ModelSpec:
    kv_heads = int(rng.integers(1, 4))
    config = ModelConfig(
        family="qwen2",
        vocab_size=int(rng.integers(8, 20)),
        hidden_size=int(rng.integers(1, 4)),
        intermediate_size=int(rng.integers(8, 14)),
        num_layers=int(rng.integers(1, 6)),
        num_heads=kv_heads * int(rng.choice([1, 2, 4])),
        num_kv_heads=kv_heads,
        head_dim=2,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        qkv_bias=bool(rng.integers(2)),
        tie_word_embeddings=bool(rng.integers(2)),
        head=str(rng.choice(["lm", "score"])),
    )
    return model_spec(config)


def _random_layout(rng: np.random.Generator, config: ModelConfig) -> Layout:
    while True:
        pp, dp, tp = (int(rng.integers(1, 5)) for _ in range(3))
        if pp * dp * tp > MAX_RANKS:
            continue
        ranks = tuple(int(r) for r in rng.permutation(MAX_RANKS)[: pp * dp * tp])
        layout = Layout(ParallelStrategy(pp=pp, dp=dp, tp=tp), DeviceMesh(ranks))
        try:
            config.check_layout(layout)
        except ValueError:
            continue
        return layout


def _at(region: Region) -> tuple[slice, ...]:
    return tuple(slice(*span) for span in region)


def _masks(spec: ModelSpec, layout: Layout) -> dict[str, np.ndarray]:
    """Per parameter, which rank holds which element: bool (MAX_RANKS, *shape)."""
    masks = {p.name: np.zeros((MAX_RANKS, *p.shape), dtype=bool) for p in spec.params}
    for rank in layout.ranks:
        for name, region in spec.held_by(layout, rank).items():
            masks[name][rank][_at(region)] = True
    assert all(mask.any(axis=0).all() for mask in masks.values())
    return masks


def _check(spec: ModelSpec, schedule: Schedule, source: Layout, target: Layout) -> None:
    held, wanted = _masks(spec, source), _masks(spec, target)
    ids = {p.name: np.arange(p.numel).reshape(p.shape) for p in spec.params}
    written = {name: np.zeros(mask.shape, dtype=int) for name, mask in wanted.items()}
    result = {name: np.full(mask.shape, -1) for name, mask in wanted.items()}
    assert all(t.source == t.target for t in schedule.local_copies)
    assert all(t.source != t.target for t in schedule.transfers)
    for t in (*schedule.local_copies, *schedule.transfers):
        at = _at(t.region)
        assert held[t.name][t.source][at].all(), "a rank sends what it does not hold"
        assert t.source == t.target or not held[t.name][t.target][at].any(), "something local is sent"
        result[t.name][t.target][at] = np.where(held[t.name][t.source], ids[t.name], -2)[at]
        written[t.name][t.target][at] += 1
    for name, mask in wanted.items():
        assert (written[name] == mask).all(), "every wanted element is written once and no other"
        assert (result[name] == np.where(mask, ids[name], -1)).all()
    lacking = {name: wanted[name] & ~held[name] for name in wanted}
    received = sum(mask.reshape(MAX_RANKS, -1).sum(axis=1) for mask in lacking.values())
    assert [schedule.received_elements.get(r, 0) for r in range(MAX_RANKS)] == list(received)
    ranks = range(MAX_RANKS)
    sent = [sum(region_size(t.region) for t in schedule.transfers if t.source == r) for r in ranks]
    assert [schedule.sent_elements.get(r, 0) for r in ranks] == sent and sum(sent) == received.sum()
    alone = {n: held[n] & (held[n].sum(axis=0) == 1) & lacking[n].any(axis=0) for n in held}
    must_send = sum(mask.reshape(MAX_RANKS, -1).sum(axis=1) for mask in alone.values())
    assert max(received.max(), must_send.max()) <= schedule.bound_elements <= max(*sent, *received)
    assert schedule.over_bound >= 1 and (schedule.over_bound == 1 or schedule.transfers)


def _check_rounds(schedule: Schedule, max_elements: int) -> None:
    """Rounds carry what the transfers carry, and no rank more than its cap."""
    parts: dict[tuple, list[Region]] = {}
    for transfers in schedule.rounds(max_elements):
        load = np.zeros(MAX_RANKS, dtype=int)
        for t in transfers:
            size = int(np.prod([stop - start for start, stop in t.region]))
            load[[t.source, t.target]] += size
            parts.setdefault(t[:3], []).append(t.region)
        assert 0 < load.max() <= max_elements
    whole: dict[tuple, list[Region]] = {}
    for t in schedule.transfers:
        whole.setdefault(t[:3], []).append(t.region)
    assert parts.keys() == whole.keys()
    for key, regions in whole.items():
        shape = [max(region[d][1] for region in regions) for d in range(len(regions[0]))]
        count = np.zeros(shape, dtype=int)
        for region in parts[key]:
            count[_at(region)] += 1
        for region in regions:
            count[_at(region)] -= 1
        assert not count.any()


@pytest.mark.parametrize("seed", range(8))
def test_random_models_and_layouts(seed):
    rng = np.random.default_rng(seed)
    for _ in range(25):
        spec = _random_spec(rng)
        source, target = (_random_layout(rng, spec.config) for _ in range(2))
        schedule = make_schedule(spec, source=source, target=target)
        _check(spec, schedule, source, target)
        _check_rounds(schedule, int(rng.integers(1, 200)))
        assert make_schedule(spec, source=source, target=target) == schedule
        assert not make_schedule(spec, source=source, target=source).transfers


def _llama(num_layers: int) -> ModelSpec:
    return model_spec(
        ModelConfig("llama", 32000, 8192, 28672, num_layers, 64, 8, 128, 1e-5, 1e4, False, False)
    )


# layouts, the largest over_bound that is all right, and why it may exceed 1
PORT_CASES = [
    ("t4@0-3", "d4@0-3", 1.0, ""),
    ("d4@0-3", "t4@4-7", 1.02, ""),
    ("d2t2@0-3", "d4@0-3", 1.02, ""),
    ("t4p2@0-7", "t8@0-7", 1.1, "the last stage holds the head besides its layers"),
    ("t8@0-7", "t8@8-15", 1.0, ""),
    ("d1@0", "d4@1-4", 4.0, "the sole holder sends every copy itself; forwarding would bring 1"),
    ("d2t4p8@0-63", "d16t4@0-63", 1.1, "the end stages are larger than the others and send more"),
]


@pytest.mark.parametrize("source, target, most, why", PORT_CASES)
def test_port_load_against_the_bound(source, target, most, why):
    schedule = make_schedule(_llama(80), source=Layout.parse(source), target=Layout.parse(target))
    assert 1 <= schedule.over_bound <= most, why


def test_hand_counted_example():
    """Two replicas of 8 layers give a third rank the model: each sends half, the receiver is the bound."""
    spec = _llama(8)
    schedule = make_schedule(spec, source=Layout.parse("d2@0-1"), target=Layout.parse("d1@2"))
    assert schedule.bound_elements == schedule.received_elements[2] == spec.numel
    assert schedule.over_bound == 1
    assert abs(schedule.sent_elements[0] - schedule.sent_elements[1]) <= 32000 * 8192
