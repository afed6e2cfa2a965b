"""Copies in int8 on four processes: the formula's values of the whole weights, and the bytes that travel."""

import itertools
from dataclasses import replace

import pytest
import torch

from realhf.distributed.pieces import pieces_of
from realhf.distributed.world import ParallelGroups, World
from realhf.layout import Layout
from realhf.models.param_spec import SCALE, overlap, region_size, region_slices
from realhf.nn.parameters import Int8Parameters, ShardedParameters
from realhf.planner.problem import ModelRole
from realhf.realloc.quantise import quantised, scales_of
from tests.realloc.test_execute import _model
from tests.realloc.test_sharded_source import MOE, _any_spec
from tests.reallocators import make_int8_reallocator
from tests.samples import marked

CASES = [
    ("d4@0-3", "d4@0-3", {}, True),
    ("d4@0-3", "t4@0-3", {}, True),
    ("d2t2@0-3", "d4@0-3", {}, True),
    ("t4@0-3", "d2@1-2", {}, False),
    ("d1@0", "d1@0", {}, False),
    ("p2@0-1", "t2@2-3", {"tied": True}, False),
    ("d2p2@0-3", "d2t2@3,1,0,2", {"tied": True}, True),
    ("d3@0-2", "d1@3", {}, True),
    ("d2e2t2@0-3", "d4e4@3,1,0,2", MOE, True),
    ("d4e4@0-3", "t4@0-3", MOE, True),
    ("t2@0-1", "d1@3", {"family": "DeepseekV3"}, False),
]


def _move(world, source, target, settings, sharded, dtype):
    spec = _any_spec(settings, 2000)
    layouts = Layout.parse(source), replace(Layout.parse(target), form="int8")
    model = _model(spec, seed=1, dtype=torch.float32)
    held = spec.boxes_held_by(layouts[0], world.rank, sharded=sharded)
    old = world.zeros(sum(map(region_size, itertools.chain(*held.values()))), torch.float32)
    shards = pieces_of(old, held)
    for name, pieces in shards.items():
        for box, part in pieces:
            part.copy_(model[name][region_slices(box)])
    new = {}
    wanted = spec.held_by(layouts[1], world.rank)
    if wanted:
        groups = ParallelGroups.create(world, layouts[1])
        rest = ShardedParameters(spec.part(int8=False), groups, dtype=dtype)
        new = {**rest.pieces(), **Int8Parameters(spec, groups, dtype=dtype).pieces()}
    reallocator = make_int8_reallocator(spec, *layouts, world, dtype=dtype, sharded=sharded)
    for _ in range(2):  # The second time, the tensors are bound already.
        stats = reallocator.run(shards or None, new or None)
    lacking = 0
    params = {param.name: param for param in spec.params}
    for name, region in wanted.items():
        (_, found), = new[name]
        value = model[name].to(dtype)
        if params[name].takes_int8:
            scale = scales_of(value.float().abs().amax(1), dtype)
            value = quantised(value, scale)
            (_, scales), = new[name + SCALE]
            assert torch.equal(scales, scale[slice(*region[0])]), name
        assert torch.equal(found, value[region_slices(region)]), name
        shared = (overlap(box, region) for box in held.get(name, ()))
        numel = region_size(region) - sum(region_size(box) for box in shared if box is not None)
        lacking += numel * found.itemsize
    rows = sum(param.shape[0] for param in spec.params if param.takes_int8)
    ranks = len({*layouts[0].ranks, *layouts[1].ranks})
    in_ring = 2 * (ranks - 1) * rows * dtype.itemsize // ranks if world.rank in layouts[0] or wanted else 0
    return stats.bytes_received - in_ring, lacking, stats.bytes_received


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("source", "target", "settings", "sharded"), marked(CASES, quick=[1, 5, 8]))
def test_a_copy_has_the_formulas_values_and_receives_what_it_lacks(
    pool, source, target, settings, sharded, dtype
):
    ranks = {*Layout.parse(source).ranks, *Layout.parse(target).ranks}
    results = [r for r in pool.run(_on_rank, ranks, source, target, settings, sharded, dtype) if r]
    assert [received for received, *_ in results] == [lacking for _, lacking, _ in results]


def test_bytes_are_those_that_the_planner_predicts(pool):
    received = pool.run(_on_rank, {0, 3}, "d1@0", "d1@3", {}, False, torch.bfloat16)[3][2]
    spec = _any_spec({}, 2000)
    rows = sum(param.shape[0] for param in spec.params if param.takes_int8)
    numel = sum(param.numel for param in spec.params if param.takes_int8)
    predicted = 2 * (spec.numel - (1 - ModelRole(spec.config).in_int8.moved_share) * numel)
    # The planner counts a ring of many ranks, which sends each scale twice; one of two sends it once.
    assert received == round(predicted) - rows * 2


def _on_rank(world: World, ranks, *given):
    return _move(world, *given) if world.rank in ranks else None
