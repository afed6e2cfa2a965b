"""Pieces: a rank's parameters as boxes, each with the tensor that holds its elements.

An engine may keep a region in several tensors: one for each group of heads where queries, keys and values of
a group lie side by side, or whole rows and parts of rows where a flat tensor is cut anywhere. Reallocations,
checkpoints and exports ask for elements by region, and the functions here find them.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from realhf.models.param_spec import Region, overlap, region_size, region_slices

Piece = tuple[Region, Tensor]
"""A box of a parameter in global indices, and its elements: a tensor of the box's shape, with any strides."""
Shards = Mapping[str, tuple[Piece, ...]]
"""Parameter name -> this rank's pieces of it, which do not overlap; always the same memory."""


def shards_of(flat: Tensor, regions: Mapping[str, Region]) -> dict[str, Tensor]:
    """Return the regions as views of a flat tensor in which they lie end to end."""
    shards = flat.split([region_size(region) for region in regions.values()])
    return {name: shard.view(_shape(regions[name])) for name, shard in zip(regions, shards, strict=True)}


def pieces_of(flat: Tensor, boxes: Mapping[str, Sequence[Region]]) -> Shards:
    """Return the boxes as views of a flat tensor in which they lie end to end."""
    sizes = [region_size(box) for regions in boxes.values() for box in regions]
    parts = iter(flat.split(sizes))
    return {
        name: tuple((box, next(parts).view(_shape(box))) for box in regions)
        for name, regions in boxes.items()
    }


def one_piece_each(tensors: Mapping[str, Tensor], regions: Mapping[str, Region]) -> Shards:
    """Return shards in which the region of every parameter is one tensor."""
    return {name: ((regions[name], tensor),) for name, tensor in tensors.items()}


def whole_parameters(tensors: Mapping[str, Tensor]) -> Shards:
    """Return shards that hold these parameters as a whole."""
    return {name: ((tuple((0, n) for n in tensor.shape), tensor),) for name, tensor in tensors.items()}


def detached(shards: Shards | None) -> Shards:
    """Return the shards without their ties to autograd; None stands for no shards."""
    return {
        name: tuple((box, tensor.detach()) for box, tensor in pieces)
        for name, pieces in (shards or {}).items()
    }


def cut(pieces: Sequence[Piece], box: Region) -> Iterator[Piece]:
    """Yield the parts of a box that the pieces hold, as views."""
    for region, tensor in pieces:
        shared = overlap(region, box)
        if shared == region:
            yield region, tensor  # A new view could not be made of memory that is freed between uses.
        elif shared is not None:
            yield shared, tensor[region_slices(shared, within=region)]


def pairs(pieces: Sequence[Piece], others: Sequence[Piece], box: Region) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield tensors that hold the same elements of a box, one of `pieces` and one of `others`."""
    for region, tensor in cut(pieces, box):
        for shared, other in cut(others, region):
            mine = tensor if shared == region else tensor[region_slices(shared, within=region)]
            yield mine, other


def in_row_major_order(pieces: Sequence[Piece], box: Region) -> list[Tensor]:
    """Return the tensors that hold the elements of a box, in row-major order if laid end to end."""
    tensors = list(_row_major(list(cut(pieces, box)), box, dim=0))
    assert sum(tensor.numel() for tensor in tensors) == region_size(box), f"no piece has a part of {box}"
    return tensors


def _row_major(pieces: Sequence[Piece], box: Region, *, dim: int) -> Iterator[Tensor]:
    """Yield the tensors of pieces that lie in a box; the box has one index in every dim before `dim`."""
    if len(pieces) <= 1:
        yield from (tensor for _, tensor in pieces)
        return
    edges: Sequence[int] = sorted({edge for region, _ in pieces for edge in region[dim]})
    if len(edges) == 2:  # All pieces have the same rows, and each has only some columns of these.
        edges = range(edges[0], edges[1] + 1)
    for first, last in pairwise(edges):
        part = (*box[:dim], (first, last), *box[dim + 1 :])
        yield from _row_major(list(cut(pieces, part)), part, dim=dim + (last - first == 1))


def assembled(pieces: Sequence[Piece], box: Region) -> Tensor:
    """Return the elements of a box as one tensor: a view if one piece has them all, else a copy."""
    parts = list(cut(pieces, box))
    if len(parts) == 1:
        return parts[0][1]
    whole = parts[0][1].new_empty(_shape(box))
    for region, tensor in parts:
        whole[region_slices(region, within=box)] = tensor
    return whole


def _shape(box: Region) -> torch.Size:
    return torch.Size(stop - start for start, stop in box)
