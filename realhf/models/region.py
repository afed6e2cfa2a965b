"""Region: the box of a parameter that a rank holds. Also splits regions evenly over replicas."""

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping

CHUNK_MULTIPLE = 128
"""Number of elements that divides a chunk, so that the chunks of all members start at aligned addresses."""
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


def boxes_between(region: Region, start: int, stop: int) -> Iterator[Region]:
    """Yield elements [start, stop) of a region, in row-major order, as at most 2 * dims - 1 boxes."""
    if start >= stop:
        return
    low = region[0][0]
    rest = region[1:]
    row = region_size(rest)
    first = start // row
    last = stop // row

    def inside_row(row_index: int, start: int, stop: int) -> Iterator[Region]:
        for box in boxes_between(rest, start, stop):
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


def chunk_edges(numel: int, num_parts: int) -> list[int]:
    """Return where the chunks of a flat tensor start, one per part, and where the last one stops.

    All but the last are equal, and a multiple of CHUNK_MULTIPLE, so that one collective operation takes them
    all. The last one also has the rest, which is less than num_parts * (CHUNK_MULTIPLE + 1).
    """
    body = chunk_body(numel, num_parts)
    return [*(body * i for i in range(num_parts)), numel]


def chunk_body(numel: int, num_parts: int) -> int:
    """Return the number of elements that every chunk of a flat tensor has (see `chunk_edges`)."""
    return numel // (num_parts * CHUNK_MULTIPLE) * CHUNK_MULTIPLE if num_parts > 1 else numel


def split_evenly(regions: Mapping[str, Region], num_parts: int) -> list[dict[str, tuple[Region, ...]]]:
    """Split regions that are stored end to end into one chunk per part (see `chunk_edges`).

    Returns name -> the boxes that a chunk has of the region, for each part.
    """
    sizes = [region_size(region) for region in regions.values()]
    edges = chunk_edges(sum(sizes), num_parts)
    parts: list[dict[str, tuple[Region, ...]]] = [{} for _ in range(num_parts)]
    start = 0
    for (name, region), size in zip(regions.items(), sizes, strict=True):
        for part in range(bisect_right(edges, start, hi=num_parts) - 1, num_parts):
            first, last = max(edges[part], start), min(edges[part + 1], start + size)
            if first >= last:
                break
            parts[part][name] = tuple(boxes_between(region, first - start, last - start))
        start += size
    return parts
