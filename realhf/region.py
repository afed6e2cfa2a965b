"""Region: the box of a parameter that a rank holds. Also splits regions evenly over replicas."""

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from itertools import accumulate

Region = tuple[tuple[int, int], ...]
"""A half-open index range for each dim."""


def region_size(region: Region) -> int:
    """Return the number of elements in a region."""
    return math.prod(stop - start for start, stop in region)


def region_slices(region: Region) -> tuple[slice, ...]:
    """Return the region as an index into the whole tensor."""
    return tuple(slice(start, stop) for start, stop in region)


def row_blocks(num_rows: int, row_size: int, block_size: int) -> Iterator[slice]:
    """Yield slices of rows that have `block_size` elements or bytes at most, or a single row each.

    Yields an empty slice if there are no rows.
    """
    step = max(1, block_size // max(1, row_size))
    for start in range(0, max(1, num_rows), step):
        yield slice(start, start + step)


def shards_of_rows(regions: Mapping[str, Region], num_parts: int) -> list[dict[str, Region]]:
    """Split regions that are stored end to end into parts that are as even as whole rows allow.

    Returns name -> region for each part.
    """
    names = list(regions)
    stops = list(accumulate(map(region_size, regions.values())))
    starts = [0, *stops]
    edges = [(0, 0)]  # Index of the parameter, row in it.
    for index in range(1, num_parts):
        position = starts[-1] * index // num_parts
        number = min(bisect_right(stops, position), len(names) - 1)
        (low, high), *rest = regions[names[number]]
        row = math.prod(b - a for a, b in rest)
        edges.append((number, min(high - low, round((position - starts[number]) / row))))
    edges.append((len(names), 0))
    parts: list[dict[str, Region]] = []
    for (first, begin), (last, end) in itertools.pairwise(edges):
        part: dict[str, Region] = {}
        for number in range(first, min(last + 1, len(names))):
            (low, high), *rest = regions[names[number]]
            rows = (low + begin if number == first else low, low + end if number == last else high)
            if rows[0] < rows[1]:
                part[names[number]] = (rows, *rest)
        parts.append(part)
    return parts
