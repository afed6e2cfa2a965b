"""Tests reallocation from the optimizer's copy, of which every replica holds a part of the elements."""

import itertools
from dataclasses import replace

import pytest
import torch

from realhf.distributed.pieces import pieces_of
from realhf.layout import Layout
from realhf.models.param_spec import model_spec, overlap, region_size, region_slices
from realhf.realloc.routes import disjoint
from tests.models.test_param_spec import small
from tests.realloc.test_execute import _in_shared_memory, _model, _pieces, _shards, _spec
from tests.reallocators import make_reallocator
from tests.samples import marked, pairs

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


@pytest.mark.parametrize(("layout", "settings"), pairs(
    [
        *("d4@0-3", "d2t2@0-3", "p2d2@0-3", "d3@1-3", "c4@0-3", "d2c2@0-3", "d3c2t2p2@0-23"),
        *("d4e2@0-3", "d4e4@0-3", "d2e2t2@0-3", "d6e3c2@0-11", "d4e2c3t2p2@0-47"),
    ], [MOE, {}, {"family": "DeepseekV3"}, {"tied": True}]))
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
            part = spec.boxes_held_by(layout, rank, sharded=True)
            assert list(part) == [name for name in held[rank] if name in part]
            sizes.append(sum(map(region_size, itertools.chain(*part.values()))))
            for name, boxes in part.items():
                assert len(boxes) <= 3
                for box in boxes:
                    assert _within(box, held[rank][name])
                    count[name][region_slices(box)] += 1
        for name, times in count.items():
            expected = torch.zeros_like(times)
            for regions in held.values():
                if name in regions:
                    expected[region_slices(regions[name])] = 1
            assert torch.equal(times, expected), name
        if layout.ep == 1:
            num_sections = len(spec.sections(layout, ranks[0]))
            assert sizes[:-1] == sizes[:1] * (len(sizes) - 1)
            assert 0 <= sizes[-1] - sizes[0] < len(ranks) * 129 * num_sections


@pytest.mark.parametrize(
    ("layout", "family"),
    pairs(["d4e2@0-3", "d2e2p2@0-3", "d6e3c2@0-11", "d4e2c3t2p2@0-47"], ["Qwen3Moe", "DeepseekV3"]))
@in_sections
def test_sections_lie_end_to_end_and_share_their_elements_evenly(layout, family, section_numel):
    spec, layout = _any_spec({"family": family}, section_numel), Layout.parse(layout)
    for rank in layout.ranks:
        held, sections = spec.held_by(layout, rank), spec.sections(layout, rank)
        assert [item for regions, _ in sections for item in regions.items()] == list(held.items())
        for regions, ranks in sections:
            assert rank in ranks
            assert all(regions.items() <= spec.held_by(layout, r).items() for r in ranks)
            parts = [spec.boxes_held_by(layout, r, sharded=True) for r in ranks]
            mine = [[box for name in regions for box in part.get(name, ())] for part in parts]
            sizes = [sum(map(region_size, boxes)) for boxes in mine]
            assert sum(sizes) == sum(map(region_size, regions.values()))
            assert sizes[:-1] == [sizes[0]] * (len(sizes) - 1)
            assert len(ranks) == 1 or sizes[0] % 128 == 0
            assert 0 <= sizes[-1] - sizes[0] < len(ranks) * 129


@pytest.mark.parametrize("layout", ["d3c2t2p2@0-23", "d4e2@0-3", "d6e3c2@0-11", "d4e2c3t2p2@0-47"])
@pytest.mark.parametrize("settings", [{"tied": True}, MOE, {"family": "DeepseekV3"}])
@in_sections
def test_sharded_placements_agree_with_what_ranks_hold(layout, settings, section_numel):
    spec, layout = _any_spec(settings, section_numel), Layout.parse(layout)
    if layout.ep > 1 and spec.config.moe is None:
        return
    held = {rank: spec.boxes_held_by(layout, rank, sharded=True) for rank in layout.ranks}
    for param, placement in zip(spec.params, spec.placements(layout, sharded=True), strict=True):
        expected = {}
        for rank in sorted(layout.ranks):
            for box in held[rank].get(param.name, ()):
                expected.setdefault(box, []).append(rank)
        assert {region: list(ranks) for region, ranks in placement} == expected


def _move(world, source, target, settings, dtype, shared):
    spec = _any_spec(settings, 2000 if dtype == torch.bfloat16 else 1 << 24)
    layouts = Layout.parse(source), Layout.parse(target)
    model = _model(spec, seed=1, dtype=torch.float32)
    held = spec.boxes_held_by(layouts[0], world.rank, sharded=True)
    wanted = spec.held_by(layouts[1], world.rank)
    old = world.zeros(sum(map(region_size, itertools.chain(*held.values()))), torch.float32)
    shards = pieces_of(old if shared else old.clone(), held)
    for name, pieces in shards.items():
        for box, part in pieces:
            part.copy_(model[name][region_slices(box)])
    new = _shards({name: torch.zeros_like(x, dtype=dtype) for name, x in model.items()}, wanted)
    if shared:
        new = _in_shared_memory(world, new)
    reallocator = make_reallocator(spec, *layouts, world, dtype=dtype, sharded=True)
    stats = reallocator.run(shards or None, _pieces(new, wanted))
    for name, region in wanted.items():
        assert torch.equal(new[name], model[name][region_slices(region)].to(dtype)), name
    lacking = sum(map(region_size, wanted.values()))
    for name, region in wanted.items():
        shared = (overlap(box, region) for box in held.get(name, ()))
        lacking -= sum(region_size(box) for box in shared if box is not None)
    return stats.bytes_received, lacking * dtype.itemsize


def _within(inner, outer) -> bool:
    return all(a >= c and b <= d for (a, b), (c, d) in zip(inner, outer, strict=True))


WAYS = [(dtype, shared) for dtype in (torch.float32, torch.bfloat16) for shared in (False, True)]


@pytest.mark.parametrize(
    "source, target, settings, dtype, shared",
    marked([(*case, *way) for case in CASES for way in WAYS], quick=range(0, len(CASES) * len(WAYS), 9)))
def test_every_rank_gets_its_regions(pool, source, target, settings, dtype, shared):
    moved = pool.run(_move, source, target, settings, dtype, shared)
    assert all(received == lacking for received, lacking in moved)


@pytest.mark.parametrize("layout", ["d2p2@0-3", "d3c2t2p2@0-23", "d4t4@0-15"])
@in_sections
def test_overlapping_boxes_are_cut_into_disjoint_ones_with_all_their_holders(layout, section_numel):
    """Stages that share a tied embedding, and ranks that share key-value heads, cut them differently."""
    spec, layout = _any_spec({"tied": True}, section_numel), Layout.parse(layout)
    num_cut = 0
    for param, placement in zip(spec.params, spec.placements(layout, sharded=True), strict=True):
        held = torch.zeros((24, *param.shape), dtype=torch.bool)
        for box, ranks in placement:
            for rank in ranks:
                held[(rank, *region_slices(box))] = True
        seen = torch.zeros(param.shape)
        for box, ranks in disjoint(placement):
            at = region_slices(box)
            seen[at] += 1
            assert all(bool(held[(rank, *at)].all()) == (rank in ranks) for rank in range(24))
            assert all(bool(held[(rank, *at)].any()) == (rank in ranks) for rank in range(24))
        assert (seen == 1).all()
        num_cut += sum(1 for _ in disjoint(placement)) != len(placement)
    assert num_cut or len(layout.ranks) < 24
