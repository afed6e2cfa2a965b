"""Region: the box of a parameter that a rank holds. Also splits regions evenly over replicas."""

import itertools
import math
from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate

Region = tuple[tuple[int, int], ...]
"""A half-open index range for each dim."""


def region_size(region: Region) -> int:
    """Return the number of elements in a region."""
    return math.prod(stop - start for start, stop in region)


def overlap(one: Region, other: Region) -> Region | None:
    """Return the box that two regions of a parameter share, or None if they share nothing."""
    box = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return box if all(start < stop for start, stop in box) else None


def region_slices(region: Region, *, within: Region | None = None) -> tuple[slice, ...]:
    """Return the region as an index into the whole tensor, or into a tensor that holds region `within`."""
    lows = (low for low, _ in within) if within is not None else (0 for _ in region)
    return tuple(slice(start - low, stop - low) for (start, stop), low in zip(region, lows, strict=True))


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
