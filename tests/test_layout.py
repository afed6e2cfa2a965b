"""Layouts: text forms, rank order, groups, and what is refused."""

import pytest

from realhf.layout import AXES, Coordinate, DeviceMesh, Layout, ParallelStrategy, even_part, even_split


def test_rank_order_of_d2t2p2():
    # tp fastest, then dp, pp slowest: written out by hand.
    layout = Layout.parse("d2t2p2@0-7")
    by_hand = {0: (0, 0, 0), 1: (0, 0, 1), 2: (0, 1, 0), 3: (0, 1, 1)}
    by_hand |= {4: (1, 0, 0), 5: (1, 0, 1), 6: (1, 1, 0), 7: (1, 1, 1)}
    for rank, (pp, dp, tp) in by_hand.items():
        assert layout.coordinate(rank) == Coordinate(pp=pp, dp=dp, cp=0, tp=tp)
    assert layout.groups("tp") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert layout.groups("dp") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert layout.groups("pp") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert layout.result_ranks == (4, 6)


def test_mesh_order_decides_who_stands_where():
    layout = Layout.parse("d2t2@8-9,3,1")
    assert layout.ranks == (8, 9, 3, 1)
    assert layout.groups("tp") == [(8, 9), (3, 1)]
    assert layout.groups("dp") == [(8, 3), (9, 1)]
    assert 3 in layout and 2 not in layout


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (2, 1, 1, 3), (3, 2, 2, 1), (2, 3, 2, 2)])
def test_coordinates_count_in_mixed_radix(sizes):
    strategy = ParallelStrategy(**dict(zip(AXES, sizes, strict=True)))
    layout = Layout(strategy, DeviceMesh(tuple(range(100, 100 + strategy.num_ranks))))
    for rank in layout.ranks:
        at = layout.coordinate(rank)
        assert 100 + ((at.pp * strategy.dp + at.dp) * strategy.cp + at.cp) * strategy.tp + at.tp == rank
    for axis in AXES:
        groups = layout.groups(axis)
        assert sorted(rank for group in groups for rank in group) == list(layout.ranks)
        for group in groups:
            assert [getattr(layout.coordinate(rank), axis) for rank in group] == list(range(len(group)))


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("d2t4p1@0-7", "d2t4@0-7"),
        ("p1@3", "d1@3"),
        ("@3", "d1@3"),
        ("t2@0,3", "t2@0,3"),
        ("p2d3t2@0-3,8-15", "d3t2p2@0-3,8-15"),
        ("t2@3-3,2", "t2@3,2"),
        ("e2@0-1", "d2e2@0-1"),
        ("d4e2c2@0-7", "d4c2e2@0-7"),
        ("t2v2p2d2@0-7", "d2t2p2v2@0-7"),
        (" d2@0-1 ", "d2@0-1"),
    ],
)
def test_text_form(text, canonical):
    layout = Layout.parse(text)
    assert str(layout) == canonical
    assert Layout.parse(canonical) == layout
    assert hash(Layout.parse(canonical)) == hash(layout)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("d2t4", "is not a layout: write strategy@ranks"),
        ("", "is not a layout"),
        (None, "is not a layout"),
        ("2d@0-1", "is not a layout"),
        ("x2@0-1", "unknown axis letter 'x' in 'x2': legal are p, v, d, c, t, e"),
        ("d2d2@0-3", "axis 'd' is given twice"),
        ("d0@0", "dp=0 is not legal"),
        ("d2t2@0-2", "d2t2 needs 4 ranks and the mesh 0-2 has 3"),
        ("d2@1-0", "runs backwards: write 0-1"),
        ("d2@0,", "is not a rank or a range"),
        ("d2@0-", "is not a rank or a range"),
        ("d4@0-2,2", "rank 2 stands twice in the mesh 0-2,2"),
        ("d3e2@0-2", "ep=2 does not divide dp=3"),
        ("v2@0", "vp=2 needs a pipeline"),
    ],
)
def test_refusals(text, sentence):
    with pytest.raises(ValueError) as caught:
        Layout.parse(text)
    assert sentence in str(caught.value)


@pytest.mark.parametrize("text", ["2d", "d2 t4", "d2,t4", "dt"])
def test_a_strategy_is_read_whole(text):
    with pytest.raises(ValueError, match="is not a parallel strategy"):
        ParallelStrategy.parse(text)


@pytest.mark.parametrize("mesh", [(), (-1, 0)])
def test_meshes_need_ranks_from_0(mesh):
    with pytest.raises(ValueError, match="at least one rank|count from 0"):
        DeviceMesh(mesh)


@pytest.mark.parametrize(("length", "num_parts"), [(7, 3), (12, 4), (5, 5), (151936, 6), (3, 5), (0, 2)])
def test_even_split_covers_in_order_and_evenly(length, num_parts):
    parts = [range(*even_split(length, num_parts, i)) for i in range(num_parts)]
    assert [x for part in parts for x in part] == list(range(length))
    assert all(even_part(length, num_parts, x) == i for i, part in enumerate(parts) for x in part)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
