"""Tests of parameters that a rank holds in several tensors, as Megatron-Core holds those of attention."""

import random
from itertools import pairwise

import pytest
import torch

from realhf.distributed.pieces import assembled, cut, in_row_major_order, pairs
from realhf.layout import Layout
from realhf.models.param_spec import overlap, region_size, region_slices
from tests.realloc.test_execute import F32, _at, _in_shared_memory, _lacking, _model, _pieces, _shards, _spec
from tests.reallocators import make_reallocator

HEAD_DIM = 2


def _interleaved(spec, regions, values, zeros):
    """Return shards whose q, k and v rows are in one tensor, group by group, and gate and up in another.

    `values` are the tensors of the regions, or None for zeros; `zeros` allocates memory.
    """
    shards, by_layer = {}, {}
    for param in spec.params:
        if param.name in regions:
            part, _, kind = param.short_name.rpartition(".")
            fused = "qkv" if part in ("q", "k", "v") else "gate_up" if part in ("gate", "up") else param.name
            by_layer.setdefault((param.layer, fused, kind), []).append(param.name)
    for (_, fused, _), names in by_layer.items():
        some = [regions[name] for name in names]
        memory = zeros(sum(map(region_size, some)), F32).view(-1, *(b - a for a, b in some[0][1:]))
        groups = (some[1][0][1] - some[1][0][0]) // HEAD_DIM if fused == "qkv" else 1
        start = 0
        for group in range(groups):
            for name, ((low, high), *rest) in zip(names, some, strict=True):
                rows = (high - low) // groups
                box = ((low + group * rows, low + (group + 1) * rows), *rest)
                shards.setdefault(name, []).append((box, memory[start : start + rows]))
                start += rows
    for name, pieces in shards.items():
        for box, tensor in pieces if values is not None else ():
            tensor.copy_(values[name][region_slices(box, within=regions[name])])
    return {name: tuple(pieces) for name, pieces in shards.items()} or None


CASES = [
    ("t2@0-1", "d4@0-3", "source", 1.0, 1 << 28),
    ("d2t2@0-3", "t4@0-3", "both", 1.0, 1 << 28),
    ("d4@0-3", "t2p2@0-3", "target", 1.0, 1 << 28),
    ("t4@0-3", "d2t2@0-3", "both", 1.0, 1000),
    ("p2t2@0-3", "d4@0-3", "both", 0.25, 1000),
    ("t2@0-1", "t2@0-1", "target", 1.0, 1 << 28),
]


def _move(world, source, target, interleaved, follow_rate, staging_bytes, shared):
    spec = _spec(num_heads=16, num_kv_heads=8)
    held = spec.held_by(Layout.parse(source), world.rank)
    wanted = spec.held_by(Layout.parse(target), world.rank)
    zeros = world.zeros if shared else lambda numel, dtype: torch.zeros(numel, dtype=dtype)
    new, old = _model(spec, seed=1, dtype=F32), _model(spec, seed=2, dtype=F32)
    sides = []
    for side, values, regions in (("source", new, held), ("target", old, wanted)):
        tensors = _shards(values, regions)
        several = interleaved in (side, "both") and tensors is not None
        if several:
            sides.append(_interleaved(spec, regions, tensors, zeros))
        else:
            sides.append(_pieces(_in_shared_memory(world, tensors) if shared else tensors, regions))
    ends = {"source": Layout.parse(source), "target": Layout.parse(target)}
    mover = make_reallocator(
        spec, **ends, world=world, dtype=F32, follow_rate=follow_rate, staging_bytes=staging_bytes)
    stats = mover.run(*sides)
    most = 0
    for name, region in wanted.items():
        expected = new[name] if follow_rate == 1 else follow_rate * new[name] + (1 - follow_rate) * old[name]
        assert torch.equal(assembled(sides[1][name], region), expected[_at(region)]), name
        most = max(most, len(sides[1][name]))
    lacking = _lacking(spec, ends["source"], ends["target"], world.rank)
    return stats.bytes_received == 4 * lacking, most, max(map(len, (sides[0] or {"": ()}).values()))


@pytest.mark.parametrize("shared", [False, True], ids=["messages", "memory"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}->{case[1]} {case[2]} {case[3]}")
def test_tensors_of_groups_of_heads_move(pool, case, shared):
    is_exact, in_target, in_source = zip(*pool.run(_move, *case, shared), strict=True)
    assert all(is_exact)
    assert (max(in_source) > 1) == (case[2] != "target") and (max(in_target) > 1) == (case[2] != "source")


def _random_pieces(whole, draw):
    """Cut a tensor at random, in any dims, several times; return the pieces in random order."""
    boxes = [tuple((0, size) for size in whole.shape)]
    for _ in range(draw.randrange(6)):
        box = boxes.pop(draw.randrange(len(boxes)))
        dim = draw.randrange(len(box))
        edges = sorted({*box[dim], draw.randint(*box[dim])})
        boxes += ((*box[:dim], span, *box[dim + 1 :]) for span in pairwise(edges))
    draw.shuffle(boxes)
    return [(box, whole[_at(box)].clone()) for box in boxes]


def _random_box(shape, draw):
    return tuple((low, draw.randint(low + 1, size)) for size in shape for low in [draw.randrange(size)])


@pytest.mark.parametrize("seed", range(100))
def test_boxes_of_pieces_are_those_of_the_whole(seed):
    draw = random.Random(seed)
    shape = tuple(draw.randint(1, 7) for _ in range(draw.randint(1, 3)))
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    one, other = (_random_pieces(whole, draw) for _ in range(2))
    box = _random_box(shape, draw)
    expected = whole[_at(box)]
    parts = in_row_major_order(one, box)
    assert torch.equal(torch.cat([part.reshape(-1) for part in parts]), expected.flatten())
    assert torch.equal(assembled(one, box), expected)
    found = list(pairs(one, other, box))
    assert all(torch.equal(a, b) for a, b in found)
    assert sorted(int(x) for a, _ in found for x in a.flatten()) == sorted(expected.flatten().tolist())
    assert all(torch.equal(tensor, whole[_at(region)]) for region, tensor in cut(one, box))


def test_a_box_of_one_piece_is_a_view_without_copies():
    tensor = torch.arange(24).view(4, 6)
    pieces = [(((2, 6), (0, 6)), tensor)]
    (part,) = in_row_major_order(pieces, ((3, 5), (0, 6)))
    assert part.data_ptr() == tensor[1].data_ptr() and part.is_contiguous()
    assert assembled(pieces, ((2, 6), (0, 6))) is tensor
    assert overlap(pieces[0][0], ((3, 5), (0, 6))) == ((3, 5), (0, 6))
