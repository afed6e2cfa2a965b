"""Bundles: all boxes of parameters that the same ranks hold and the same ranks lack.

A placement (see param_spec) lists which ranks hold which regions of a parameter. Parameters of all layers
share placements, so overlaps are computed once per pair of placements, not per layer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from realhf.models.param_spec import Placement
from realhf.models.region import Region, boxes_between, overlap, region_size

Ranks = tuple[int, ...]
Box = tuple[int, Region]
"""A box of the parameter with this number, in global indices."""


@dataclass
class Bundle:
    """Boxes that all `receivers` lack and each of `holders` can send, laid end to end.

    They are in the order of the table of parameters. A position is the index of an element in the bundle.
    """

    holders: Ranks
    receivers: Ranks
    boxes: list[Box] = field(default_factory=list)

    @cached_property
    def _edges(self) -> np.ndarray:
        """Return the position at which each box starts, and the end of the last one."""
        return np.cumsum([0, *(region_size(region) for _, region in self.boxes)])

    @cached_property
    def _rows(self) -> np.ndarray:
        """Return the number of elements in one row of each box."""
        return np.array([region_size(region[1:]) for _, region in self.boxes])

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(self._edges[-1])

    def snap(self, positions: np.ndarray, *, tolerance: int) -> np.ndarray:
        """Round positions to the nearest start of a row, in boxes whose rows are at most `tolerance` long."""
        boxes = np.minimum(self._edges.searchsorted(positions, side="right"), len(self.boxes)) - 1
        starts = self._edges[boxes]
        rows = self._rows[boxes]
        snapped = starts + (2 * (positions - starts) + rows) // (2 * rows) * rows
        return np.where((rows <= tolerance) & (positions < self.size), snapped, positions)

    def between(self, start: int, stop: int) -> Iterator[Box]:
        """Yield the elements at positions [start, stop) as boxes."""
        index = int(self._edges.searchsorted(start, side="right")) - 1
        while start < stop:
            param, region = self.boxes[index]
            first, end = self._edges[index : index + 2].tolist()
            last = min(stop, end)
            for box in boxes_between(region, start - first, last - first):
                yield param, box
            start = last
            index += 1


def make_bundles(source: Sequence[Placement], target: Sequence[Placement]) -> list[Bundle]:
    """Group what the target's ranks lack by who holds and who lacks it, given a placement per parameter."""
    bundles: dict[tuple[Ranks, Ranks], Bundle] = {}
    missing: dict[tuple[int, int], list[tuple[Bundle, Region]]] = {}
    for param, (held, wanted) in enumerate(zip(source, target, strict=True)):
        key = (id(held), id(wanted))
        if key not in missing:
            missing[key] = [
                (bundles.setdefault((holders, receivers), Bundle(holders, receivers)), region)
                for region, holders, receivers in _missing(held, wanted)
            ]
        for bundle, region in missing[key]:
            bundle.boxes.append((param, region))
    return list(bundles.values())


def _missing(source: Placement, target: Placement) -> list[tuple[Region, Ranks, Ranks]]:
    """Cut a parameter into boxes where held or wanted regions end; return those that some rank lacks.

    Each box comes with the ranks that hold it and the ranks that lack it. Held regions may overlap, because
    stages or tensor-parallel ranks that hold the same parameter can split it at different elements.
    """
    boxes = []
    for held, holders in disjoint(source):
        has_it = set(holders)
        for wanted, takers in target:
            shared = overlap(held, wanted)
            if shared is not None and (receivers := tuple(rank for rank in takers if rank not in has_it)):
                boxes.append((shared, holders, receivers))
    return sorted(boxes)


def disjoint(placement: Placement) -> Iterator[tuple[Region, Ranks]]:
    """Cut the regions of a placement where others end; yield each box once, with all ranks that hold it."""
    open_boxes: list[tuple[Region, Ranks]] = []
    for region, ranks in sorted(placement):
        # Regions come in the order of their first rows, so boxes that end before this one meet no others.
        yield from (pair for pair in open_boxes if pair[0][0][1] <= region[0][0])
        uncovered = [region]
        still_open: list[tuple[Region, Ranks]] = []
        for box, owners in open_boxes:
            if box[0][1] <= region[0][0]:
                continue
            shared = overlap(box, region)
            if shared is None:
                still_open.append((box, owners))
                continue
            still_open.append((shared, tuple(sorted({*owners, *ranks}))))
            still_open += ((part, owners) for part in _without(box, shared))
            uncovered = [part for box in uncovered for part in _without(box, shared)]
        open_boxes = [*still_open, *((part, ranks) for part in uncovered)]
    yield from open_boxes


def _without(box: Region, hole: Region) -> Iterator[Region]:
    """Yield the part of a box outside another one, as boxes."""
    shared = overlap(box, hole)
    if shared is None:
        yield box
        return
    for dim, ((start, stop), (first, last)) in enumerate(zip(box, shared, strict=True)):
        for low, high in ((start, first), (last, stop)):
            if low < high:
                yield (*shared[:dim], (low, high), *box[dim + 1 :])
