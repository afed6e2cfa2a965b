"""Region: a box of a tensor, of which a rank holds one; and how replicas share out what lies end to end."""

import itertools
import math
from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate

Region = tuple[tuple[int, int], ...]
"""One half-open index range per dim."""


def region_size(region: Region) -> int:
    """Number of elements in a region."""
    return math.prod(stop - start for start, stop in region)


def region_slices(region: Region) -> tuple[slice, ...]:
    """The region as an index into the whole tensor."""
    return tuple(slice(start, stop) for start, stop in region)


def shards_of_rows(regions: Mapping[str, Region], num_parts: int) -> list[dict[str, Region]]:
    """Regions that lie end to end, in parts as even as whole rows allow: name -> region, for each part."""
    stops = list(accumulate(map(region_size, regions.values())))
    names, starts = list(regions), [0, *stops]
    edges = [(0, 0)]  # (number of the parameter, row in it)
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
