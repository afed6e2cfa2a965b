"""Bundles: all boxes of parameters that the same ranks hold and the same ranks lack.

Overlaps of source and target are computed once per pair of placements, so once for all layers alike.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise, product

import numpy as np

from realhf.param_spec import Placement
from realhf.region import Region, region_size

Ranks = tuple[int, ...]
Box = tuple[int, Region]
"""A box of the parameter with this number, in global indices."""


@dataclass
class Bundle:
    """Boxes that all `receivers` lack and each of `holders` can send, laid end to end in the table's order.

    A position is the index of an element in the whole bundle.
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
            for box in _boxes(region, start - first, last - first):
                yield param, box
            start = last
            index += 1


def make_bundles(source: Sequence[Placement], target: Sequence[Placement]) -> list[Bundle]:
    """Group what ranks lack by who holds and who lacks it; placements are in the order of parameters."""
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


def _missing(source: Placement, target: Placement) -> Iterator[tuple[Region, Ranks, Ranks]]:
    """Split a parameter at every border of a held or wanted region; yield the boxes that some rank lacks.

    Each box comes with the ranks that hold it and the ranks that lack it.
    """
    borders = zip(*(region for region, _ in (*source, *target)), strict=True)
    edges = [sorted({edge for span in spans for edge in span}) for spans in borders]
    for region in product(*(list(pairwise(e)) for e in edges)):
        holders = _owners(region, source)
        held = set(holders)
        if receivers := tuple(rank for rank in _owners(region, target) if rank not in held):
            yield region, holders, receivers


def _owners(box: Region, placement: Placement) -> Ranks:
    owners: list[int] = []
    for region, ranks in placement:
        if all(low <= start < high for (start, _), (low, high) in zip(box, region, strict=True)):
            owners.extend(ranks)
    return tuple(sorted(owners))


def _boxes(region: Region, start: int, stop: int) -> Iterator[Region]:
    """Yield elements [start, stop) of a box, in row-major order, as at most 2 * dims - 1 boxes."""
    if start >= stop:
        return
    low = region[0][0]
    rest = region[1:]
    row = region_size(rest)
    first = start // row
    last = stop // row

    def inside_row(row_index: int, start: int, stop: int) -> Iterator[Region]:
        for box in _boxes(rest, start, stop):
            yield ((low + row_index, low + row_index + 1), *box)

    if first == last:
        yield from inside_row(first, start % row, stop % row)
        return
    if start % row:
        yield from inside_row(first, start % row, row)
        first += 1
    if first < last:
        yield ((low + first, low + last), *rest)
    yield from inside_row(last, 0, stop % row)
