"""Region: the box of a parameter that a rank holds. Also splits regions evenly over replicas."""

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping

CHUNK_MULTIPLE = 128
"""All chunks but the last have a multiple of this many elements, so that all start at aligned addresses."""
Region = tuple[tuple[int, int], ...]
"""A half-open index range for each dim."""


def region_size(region: Region) -> int:
    """Return the number of elements in a region."""
    return math.prod(stop - start for start, stop in region)


def overlap(region: Region, other: Region) -> Region | None:
    """Return the box that two regions of a parameter share, or None if they share nothing."""
    box = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(region, other, strict=True))
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
    inner = region[1:]
    row = region_size(inner)
    first = start // row
    last = stop // row

    def inside_row(row_index: int, start: int, stop: int) -> Iterator[Region]:
        for box in boxes_between(inner, start, stop):
            yield ((low + row_index, low + row_index + 1), *box)

    if first == last:
        yield from inside_row(first, start % row, stop % row)
        return
    if start % row:
        yield from inside_row(first, start % row, row)
        first += 1
    if first < last:
        yield ((low + first, low + last), *inner)
    yield from inside_row(last, 0, stop % row)


def chunk_edges(numel: int, num_chunks: int) -> list[int]:
    """Return where the chunks of a flat tensor start, and where the last one stops.

    All chunks have `chunk_body` elements, so that one collective operation can send them all; the last one
    also has the elements that are left, fewer than num_chunks * (CHUNK_MULTIPLE + 1).
    """
    body = chunk_body(numel, num_chunks)
    return [*(body * i for i in range(num_chunks)), numel]


def chunk_body(numel: int, num_chunks: int) -> int:
    """Return the number of elements that every chunk of a flat tensor has (see `chunk_edges`)."""
    return numel // (num_chunks * CHUNK_MULTIPLE) * CHUNK_MULTIPLE if num_chunks > 1 else numel


def split_evenly(regions: Mapping[str, Region], num_chunks: int) -> list[dict[str, tuple[Region, ...]]]:
    """Split regions that are stored end to end into chunks (see `chunk_edges`).

    Returns, for each chunk, name -> the boxes of that region that the chunk holds.
    """
    sizes = [region_size(region) for region in regions.values()]
    edges = chunk_edges(sum(sizes), num_chunks)
    chunks: list[dict[str, tuple[Region, ...]]] = [{} for _ in range(num_chunks)]
    start = 0
    for (name, region), size in zip(regions.items(), sizes, strict=True):
        for i in range(bisect_right(edges, start, hi=num_chunks) - 1, num_chunks):
            first, last = max(edges[i], start), min(edges[i + 1], start + size)
            if first >= last:
                break
            chunks[i][name] = tuple(boxes_between(region, first - start, last - start))
        start += size
    return chunks
