"""Region: the box of a parameter that a rank holds. Also splits regions evenly over replicas."""

import math
from collections.abc import Iterator, Mapping

import numpy as np

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


def row_blocks(num_rows: int, row_size: int, block_size: int) -> Iterator[slice]:
    """Yield slices of rows that have `block_size` elements or bytes at most, or a single row each.

    Yields one slice even if there are no rows.
    """
    step = max(1, block_size // max(1, row_size))
    for start in range(0, max(1, num_rows), step):
        yield slice(start, start + step)


def shards_of_rows(regions: Mapping[str, Region], num_parts: int) -> list[dict[str, Region]]:
    """Split regions that are stored end to end into parts that are as even as whole rows allow.

    Returns name -> region for each part.
    """
    boxes = list(regions.items())
    sizes = np.array([region_size(region) for region in regions.values()])
    num_rows = np.array([stop - start for (start, stop), *_ in regions.values()])
    cuts = np.arange(num_parts + 1) * sizes.sum() // num_parts
    rows = (cuts - (sizes.cumsum() - sizes)[:, None]) / (sizes // num_rows)[:, None]
    edges = rows.round().clip(0, num_rows[:, None]).astype(np.int64)  # Of each region, one per cut.
    parts: list[dict[str, Region]] = [{} for _ in range(num_parts)]
    for number, i in np.argwhere(np.diff(edges)).tolist():
        name, ((low, _), *rest) = boxes[number]
        first, last = edges[number, i : i + 2].tolist()
        parts[i][name] = ((low + first, low + last), *rest)
    return parts
