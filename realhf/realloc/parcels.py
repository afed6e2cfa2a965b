"""Parcels: all elements that the same ranks hold and the same ranks lack, numbered end to end.

Overlaps of source and target are computed once per pair of placements, so once for all layers alike.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from realhf.param_spec import Placement
from realhf.region import Region, region_size


class Cell(NamedTuple):
    """A box of a parameter that every rank either holds as a whole or not at all.

    `takers` want it and lack it; `local` ranks want it and hold it already.
    """

    region: Region
    size: int
    holders: tuple[int, ...]
    takers: tuple[int, ...]
    local: tuple[int, ...]


class Piece(NamedTuple):
    """A box of parameter number `param`, in global indices."""

    param: int
    region: Region


@dataclass
class Parcel:
    """Boxes that all `takers` lack and each of `holders` can send, laid end to end in the table's order.

    `sizes` are the elements of each box. A position is the index of an element in the whole parcel.
    """

    holders: tuple[int, ...]
    takers: tuple[int, ...]
    pieces: list[Piece] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    @cached_property
    def _stops(self) -> np.ndarray:
        return np.cumsum(self.sizes)

    @cached_property
    def _starts(self) -> np.ndarray:
        return self._stops - np.array(self.sizes)

    @cached_property
    def _rows(self) -> np.ndarray:
        """Number of elements in one row of each box."""
        return np.array([math.prod(b - a for a, b in piece.region[1:]) for piece in self.pieces])

    @cached_property
    def size(self) -> int:
        """Number of elements."""
        return sum(self.sizes)

    def snap(self, positions: np.ndarray, *, tolerance: int) -> np.ndarray:
        """Round positions to the nearest start of a row, in boxes whose rows are at most `tolerance` long."""
        numbers = np.minimum(self._stops.searchsorted(positions, side="right"), len(self.sizes) - 1)
        starts = self._starts[numbers]
        rows = self._rows[numbers]
        snapped = starts + (2 * (positions - starts) + rows) // (2 * rows) * rows
        return np.where((rows <= tolerance) & (positions < self.size), snapped, positions)

    def between(self, start: int, stop: int) -> Iterator[Piece]:
        """Yield the elements at positions [start, stop) as boxes."""
        number = int(self._stops.searchsorted(start, side="right"))
        while start < stop:
            param, region = self.pieces[number]
            first = int(self._starts[number])
            last = min(stop, first + self.sizes[number])
            for box in _boxes(region, start - first, last - first):
                yield Piece(param, box)
            start, number = last, number + 1


def find_cells(source: Placement, target: Placement) -> list[Cell]:
    """Split a parameter at every border of a held or wanted region; omit the boxes that no rank wants."""
    borders = zip(*(region for region, _ in (*source, *target)), strict=True)
    edges = [sorted({edge for span in spans for edge in span}) for spans in borders]
    cells = []
    for region in itertools.product(*(list(itertools.pairwise(e)) for e in edges)):
        wanting = _owners(region, target)
        if wanting:
            having = _owners(region, source)
            held = set(having)
            local = tuple(rank for rank in wanting if rank in held)
            takers = tuple(rank for rank in wanting if rank not in held)
            cells.append(Cell(region, region_size(region), having, takers, local))
    return cells


def make_parcels(pairs: Sequence[list[Cell]]) -> list[Parcel]:
    """Group the cells of all parameters, given in table order, by the ranks that hold and lack them."""
    parcels: dict[tuple[tuple[int, ...], tuple[int, ...]], Parcel] = {}
    moving: dict[int, list[tuple[Parcel, Region, int]]] = {}
    for param, cells in enumerate(pairs):
        if id(cells) not in moving:
            moving[id(cells)] = [
                (parcels.setdefault((c.holders, c.takers), Parcel(c.holders, c.takers)), c.region, c.size)
                for c in cells if c.takers
            ]  # fmt: skip
        for parcel, region, size in moving[id(cells)]:
            parcel.pieces.append(Piece(param, region))
            parcel.sizes.append(size)
    return list(parcels.values())


def _owners(cell: Region, placement: Placement) -> tuple[int, ...]:
    owners: list[int] = []
    for region, ranks in placement:
        if all(low <= start < high for (start, _), (low, high) in zip(cell, region, strict=True)):
            owners.extend(ranks)
    return tuple(sorted(owners))


def _boxes(region: Region, start: int, stop: int) -> Iterator[Region]:
    """Yield elements [start, stop) of a box, in row-major order, as at most 2 * dims - 1 boxes."""
    if start >= stop:
        return
    low = region[0][0]
    rest = region[1:]
    row = math.prod(b - a for a, b in rest)
    if not rest:
        yield ((low + start, low + stop),)
        return
    first, last = -(-start // row), stop // row  # The whole rows.
    if first > last:  # All elements lie inside one row.
        for box in _boxes(rest, start - last * row, stop - last * row):
            yield ((low + last, low + last + 1), *box)
        return
    for box in _boxes(rest, start - (first - 1) * row, row) if first * row > start else ():
        yield ((low + first - 1, low + first), *box)
    if first < last:
        yield ((low + first, low + last), *rest)
    for box in _boxes(rest, 0, stop - last * row):
        yield ((low + last, low + last + 1), *box)
