"""Reallocation out of the optimizer's copy, of which every dp replica holds a part of the rows."""

import itertools

import pytest
import torch

from realhf.layout import Layout
from realhf.param_spec import region_size, region_slices
from realhf.realloc.execute import Reallocator
from tests.realloc.test_execute import _in_shared_memory, _model, _shards, _spec

CASES = [
    ("d4@0-3", "d4@0-3", {}),  # what ZeRO-1 gathers after a step
    ("d4@0-3", "t4@0-3", {}),
    ("d2t2@0-3", "d4@0-3", {}),
    ("d2p2@0-3", "d2t2@3,1,0,2", {"tied": True}),
    ("d2t2@0-3", "p2@2-3", {"num_kv_heads": 1}),  # kv heads on both tp ranks, cut at different rows
    ("d3@0-2", "d1@3", {}),
]


@pytest.mark.parametrize("layout", ["d4@0-3", "d2t2@0-3", "p2d2@0-3", "d3@1-3"])
@pytest.mark.parametrize("tied", [False, True])
def test_parts_tile_what_a_replica_holds(layout, tied):
    spec, layout = _spec(tied=tied), Layout.parse(layout)
    for stage, index in itertools.product(range(layout.pp), range(layout.tp)):
        ranks = layout.grid[stage, :, 0, index].tolist()
        whole = spec.held_by(layout, ranks[0])
        count = {p.name: torch.zeros(p.shape) for p in spec.params}
        sizes = []
        for rank in ranks:
            part = spec.held_by(layout, rank, sharded=True)
            sizes.append(sum(map(region_size, part.values())))
            for name, region in part.items():
                count[name][region_slices(region)] += 1
        for name, times in count.items():
            expected = torch.zeros_like(times)
            if name in whole:
                expected[region_slices(whole[name])] = 1
            assert torch.equal(times, expected), name
        longest_row = max(region_size(((0, 1), *region[1:])) for region in whole.values())
        assert max(sizes) - min(sizes) <= 2 * longest_row


def _move(world, source, target, settings, dtype, shared):
    spec, layouts = _spec(**settings), (Layout.parse(source), Layout.parse(target))
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
