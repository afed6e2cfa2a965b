"""Tests reallocation from the optimizer's copy, of which every replica holds a part of the rows."""

import itertools
from dataclasses import replace

import pytest
import torch

from realhf.layout import Layout
from realhf.param_spec import model_spec
from realhf.realloc.execute import Reallocator
from realhf.region import region_size, region_slices
from tests.realloc.test_execute import _in_shared_memory, _model, _shards, _spec
from tests.test_param_spec import small

MOE = {"family": "Qwen3Moe"}
CASES = [
    ("d4@0-3", "d4@0-3", {}),  # what ZeRO-1 gathers after a step
    ("d4@0-3", "t4@0-3", {}),
    ("d2t2@0-3", "d4@0-3", {}),
    ("d2p2@0-3", "d2t2@3,1,0,2", {"tied": True}),
    ("d2t2@0-3", "p2@2-3", {"num_kv_heads": 1}),  # kv heads on both tp ranks, split at different rows
    ("d3@0-2", "d1@3", {}),
    ("c4@0-3", "t4@0-3", {}),
    ("d2c2@0-3", "d4@0-3", {}),
    ("c2t2@3,1,0,2", "p2@0-1", {"tied": True}),
    ("d4e2@0-3", "d4e2@0-3", MOE),
    ("d4e4@0-3", "t4@0-3", MOE),
    ("d2e2t2@0-3", "d4e4@3,1,0,2", MOE),
    ("d2e2c2@0-3", "d4@0-3", MOE),
    ("d2e2p2@0-3", "d2e2@1-2", MOE),
]


def _any_spec(settings, section_numel=1 << 24):
    spec = model_spec(small(tied=False, **settings)) if "family" in settings else _spec(**settings)
    return replace(spec, section_numel=section_numel)


in_sections = pytest.mark.parametrize("section_numel", [1 << 24, 2000], ids=["whole", "in sections"])


@pytest.mark.parametrize(
    "layout",
    [
        *("d4@0-3", "d2t2@0-3", "p2d2@0-3", "d3@1-3", "c4@0-3", "d2c2@0-3", "d3c2t2p2@0-23"),
        *("d4e2@0-3", "d4e4@0-3", "d2e2t2@0-3", "d6e3c2@0-11", "d4e2c3t2p2@0-47"),
    ],
)
@pytest.mark.parametrize("settings", [{}, {"tied": True}, MOE, {"family": "DeepseekV3"}])
@in_sections
def test_parts_tile_what_a_replica_holds(layout, settings, section_numel):
    spec, layout = _any_spec(settings, section_numel), Layout.parse(layout)
    if layout.ep > 1 and spec.config.moe is None:
        return
    for stage, index in itertools.product(range(layout.pp), range(layout.tp)):
        ranks = layout.grid[stage, :, :, index].ravel().tolist()
        held = {rank: spec.held_by(layout, rank) for rank in ranks}
        count = {p.name: torch.zeros(p.shape) for p in spec.params}
        sizes = []
        for rank in ranks:
            part = spec.held_by(layout, rank, sharded=True)
            assert list(part) == [name for name in held[rank] if name in part]
            sizes.append(sum(map(region_size, part.values())))
            for name, region in part.items():
                whole = held[rank][name]
                assert all(a >= c and b <= d for (a, b), (c, d) in zip(region, whole, strict=True))
                count[name][region_slices(region)] += 1
        for name, times in count.items():
            expected = torch.zeros_like(times)
            for regions in held.values():
                if name in regions:
                    expected[region_slices(regions[name])] = 1
            assert torch.equal(times, expected), name
        if layout.ep == 1:
            longest_row = max(region_size(((0, 1), *region[1:])) for region in held[ranks[0]].values())
            num_sections = len(spec.sections(layout, ranks[0]))
            assert max(sizes) - min(sizes) <= 2 * longest_row * num_sections


@pytest.mark.parametrize("layout", ["d4e2@0-3", "d2e2p2@0-3", "d6e3c2@0-11", "d4e2c3t2p2@0-47"])
@pytest.mark.parametrize("family", ["Qwen3Moe", "DeepseekV3"])
@in_sections
def test_sections_lie_end_to_end_and_share_their_elements_evenly(layout, family, section_numel):
    spec, layout = _any_spec({"family": family}, section_numel), Layout.parse(layout)
    for rank in layout.ranks:
        held, sections = spec.held_by(layout, rank), spec.sections(layout, rank)
        assert [item for regions, _ in sections for item in regions.items()] == list(held.items())
        for regions, ranks in sections:
            assert rank in ranks
            assert all(regions.items() <= spec.held_by(layout, r).items() for r in ranks)
            parts = [spec.held_by(layout, r, sharded=True) for r in ranks]
            sizes = [sum(region_size(x) for n, x in part.items() if n in regions) for part in parts]
            assert sum(sizes) == sum(map(region_size, regions.values()))
            longest_row = max(region_size(((0, 1), *region[1:])) for region in regions.values())
            assert max(sizes) - min(sizes) <= 2 * longest_row


@pytest.mark.parametrize("layout", ["d3c2t2p2@0-23", "d4e2@0-3", "d6e3c2@0-11", "d4e2c3t2p2@0-47"])
@pytest.mark.parametrize("settings", [{"tied": True}, MOE, {"family": "DeepseekV3"}])
@in_sections
def test_sharded_placements_agree_with_what_ranks_hold(layout, settings, section_numel):
    spec, layout = _any_spec(settings, section_numel), Layout.parse(layout)
    if layout.ep > 1 and spec.config.moe is None:
        return
    held = {rank: spec.held_by(layout, rank, sharded=True) for rank in layout.ranks}
    for param, placement in zip(spec.params, spec.placements(layout, sharded=True), strict=True):
        expected = {}
        for rank in sorted(layout.ranks):
            if param.name in held[rank]:
                expected.setdefault(held[rank][param.name], []).append(rank)
        assert {region: list(ranks) for region, ranks in placement} == expected


def _move(world, source, target, settings, dtype, shared):
    spec = _any_spec(settings, 2000 if dtype == torch.bfloat16 else 1 << 24)
    layouts = Layout.parse(source), Layout.parse(target)
    model = _model(spec, seed=1, dtype=torch.float32)
    held = spec.held_by(layouts[0], world.rank, sharded=True)
    wanted = spec.held_by(layouts[1], world.rank)
    shards = _shards(model, held)
    new = _shards({name: torch.zeros_like(x, dtype=dtype) for name, x in model.items()}, wanted)
    if shared:
        shards, new = (_in_shared_memory(world, some) for some in (shards, new))
    ends = {"source": layouts[0], "target": layouts[1]}
    stats = Reallocator(spec, **ends, world=world, dtype=dtype, sharded=True).run(shards, new)
    for name, region in wanted.items():
        assert torch.equal(new[name], model[name][region_slices(region)].to(dtype)), name
    here = sum(
        region_size(region) - (region_size(held[n]) if n in held and _within(held[n], region) else 0)
        for n, region in wanted.items()
    )
    return stats.bytes_received, here * dtype.itemsize


def _within(inner, outer) -> bool:
    return all(a >= c and b <= d for (a, b), (c, d) in zip(inner, outer, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shared", [False, True], ids=["messages", "memory"])
@pytest.mark.parametrize("source, target, settings", CASES)
def test_every_rank_gets_its_regions(pool, source, target, settings, dtype, shared):
    moved = pool.run(_move, source, target, settings, dtype, shared)
    assert all(received <= needed for received, needed in moved)
    if (source, target) == ("d4@0-3", "d4@0-3"):
        assert all(received == needed for received, needed in moved)
