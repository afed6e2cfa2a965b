"""Parcels: everything that the same ranks hold and the same ranks lack, as one line of elements.

Overlaps of source and target are computed once per pair of placements, that is once for all layers alike.
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
    """A box that every rank holds whole or not at all; of those that want it, `local` ranks hold it."""

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
    """Boxes in table order, laid end to end: what `takers` lack and each of `holders` could send."""

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
        """Per box, the elements of one row."""
        return np.array([math.prod(b - a for a, b in piece.region[1:]) for piece in self.pieces])

    @cached_property
    def size(self) -> int:
        """Number of elements."""
        return sum(self.sizes)

    def snap(self, positions: np.ndarray, *, tolerance: int) -> np.ndarray:
        """Positions moved to the nearest start of a row of their box, if rows are as short as `tolerance`."""
        numbers = np.minimum(self._stops.searchsorted(positions, side="right"), len(self.sizes) - 1)
        starts, rows = self._starts[numbers], self._rows[numbers]
        snapped = starts + (2 * (positions - starts) + rows) // (2 * rows) * rows
        return np.where((rows <= tolerance) & (positions < self.size), snapped, positions)

    def between(self, start: int, stop: int) -> Iterator[Piece]:
        """The elements [start, stop) of the line as boxes."""
        number = int(self._stops.searchsorted(start, side="right"))
        while start < stop:
            param, region = self.pieces[number]
            first = int(self._starts[number])
            last = min(stop, first + self.sizes[number])
            for box in _boxes(region, start - first, last - first):
                yield Piece(param, box)
            start, number = last, number + 1


def find_cells(source: Placement, target: Placement) -> list[Cell]:
    """A parameter, cut along every border of a held or wanted region; what nobody wants is left out."""
    borders = zip(*(region for region, _ in (*source, *target)), strict=True)
    cuts = [sorted({edge for span in spans for edge in span}) for spans in borders]
    cells = []
    for region in itertools.product(*(list(itertools.pairwise(c)) for c in cuts)):
        wanting = _owners(region, target)
        if wanting:
            having = _owners(region, source)
            held = set(having)
            local = tuple(rank for rank in wanting if rank in held)
            takers = tuple(rank for rank in wanting if rank not in held)
            cells.append(Cell(region, region_size(region), having, takers, local))
    return cells


def make_parcels(pairs: Sequence[list[Cell]]) -> list[Parcel]:
    """Groups the cells of all parameters, given in table order, by who holds and who lacks them."""
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
    """Elements [start, stop) of a box, in row-major order, as at most 2 * dims - 1 boxes."""
    if start >= stop:
        return
    (low, _), rest = region[0], region[1:]
    row = math.prod(b - a for a, b in rest)
    if not rest:
        yield ((low + start, low + stop),)
        return
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # inside one row
        for box in _boxes(rest, start - last * row, stop - last * row):
            yield ((low + last, low + last + 1), *box)
        return
    for box in _boxes(rest, start - (first - 1) * row, row) if first * row > start else ():
        yield ((low + first - 1, low + first), *box)
    if first < last:
        yield ((low + first, low + last), *rest)
    for box in _boxes(rest, 0, stop - last * row):
        yield ((low + last, low + last + 1), *box)
