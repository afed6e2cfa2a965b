"""Int8Reallocator: fills a copy whose linear layers are in int8. They are quantised where they come from.

A weight W of a linear layer becomes W = q s: whole numbers q from -127 to 127 and a scale s for each output
channel, the largest |W| of its row / 127, rounded to the model's dtype. The ranks that hold parts of a row
agree on its largest value. So q and s do not depend on any layout, and only q and s travel.

Shape suffixes: O outputs, I inputs of a layer.
"""

from collections.abc import Iterator, Mapping
from itertools import accumulate

import torch
from torch import Tensor

from realhf.devices.half_precision import sum_dtype
from realhf.distributed.pieces import Piece, Shards
from realhf.distributed.world import World
from realhf.layout import Layout
from realhf.models.param_spec import SCALE, ModelSpec, Region, overlap, region_size, region_slices, row_blocks
from realhf.realloc.execute import Reallocator, ReallocStats, Staging
from realhf.realloc.links import Links
from realhf.realloc.schedule import Schedule, make_schedule

_LARGEST = 127
_BLOCK_NUMEL = 1 << 22
"""Elements of a weight that are quantised at a time."""


def scales_of(largest_O: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the scales of rows, in a model's dtype, given the largest |W| of each."""
    scale_O = (largest_O / _LARGEST).to(dtype)
    return scale_O.masked_fill_(scale_O == 0, 1)


def quantised(weight_OI: Tensor, scale_O: Tensor) -> Tensor:
    """Return q, rounded to even at ties, of rows that have these scales."""
    wide = sum_dtype(scale_O.dtype)
    quotient_OI = weight_OI.to(wide) / scale_O.to(wide)[:, None]
    return quotient_OI.round_().clamp_(-_LARGEST, _LARGEST).to(torch.int8)


Schedules = tuple[Schedule, Schedule]
"""The schedules of the weights in int8, and of all other parameters."""


def make_int8_schedules(
    spec: ModelSpec, *, source: Layout, target: Layout, itemsize: int, sharded: bool, links: Links | None,
) -> Schedules:
    """Return the schedules of an Int8Reallocator; see `make_schedule`."""
    of_part = [
        make_schedule(
            spec.part(int8=int8), source=source, target=target, itemsize=1 if int8 else itemsize,
            sharded=sharded, links=links)
        for int8 in (True, False)]
    return of_part[0], of_part[1]


class Int8Reallocator:
    """A Reallocator whose target holds the weights of linear layers in int8.

    Every rank of either layout must construct it and call `run`, as with a Reallocator. The target's shards
    have pieces of the scales, too, named as the parameter and SCALE.
    """

    def __init__(
        self, schedules: Schedules, world: World, *, dtype: torch.dtype, staging: Staging, role: str,
        posts: bool,
    ) -> None:
        int8, rest = schedules
        self._world = world
        self._dtype = dtype
        self._int8 = Reallocator(int8, world, dtype=torch.int8, staging=staging, role=role)
        self._rest = Reallocator(rest, world, dtype=dtype, staging=staging, role=role)
        ranks = tuple(dict.fromkeys((*int8.source.ranks, *int8.target.ranks)))
        self._group = world.group(ranks, purpose="realloc")
        self._ready = world.group(ranks, purpose="ready") if posts else None
        names = [param.name for param in int8.spec.params]
        stops = list(accumulate(param.shape[0] for param in int8.spec.params))
        self._first_row = dict(zip(names, [0, *stops], strict=False))
        """Parameter -> the place of its first row among the rows of all parameters."""
        self._num_rows = stops[-1] if stops else 0
        self._rest_names = [param.name for param in rest.spec.params]
        self._bound: tuple[Shards | None, Shards | None] | None = None
        self._values: Shards = {}
        """This rank's part of the source in int8."""
        self._sides: tuple[Shards, Shards, Shards, Shards] = ({}, {}, {}, {})

    def run(self, source: Shards | None, target: Shards | None) -> ReallocStats:
        """Move the parameters and return this rank's traffic; see `Reallocator.run`."""
        stats = self.post(source, target)
        if self._world.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        return stats

    def wait_until_ready(self) -> None:
        if self._ready is not None and self._ready.size > 1:
            self._ready.barrier()

    @torch.no_grad()
    def post(self, source: Shards | None, target: Shards | None) -> ReallocStats:
        """Quantise this rank's part of the source, move everything, and return this rank's traffic."""
        if self._bound is None or self._bound[0] is not source or self._bound[1] is not target:
            self._bind(source or {}, target or {})
            self._bound = (source, target)
        scales = self._quantise(source or {})
        for name, rows in self._rows(target or {}):
            (_, scale_O), = (target or {})[name + SCALE]
            scale_O.copy_(scales[rows])
        int8_source, int8_target, rest_source, rest_target = self._sides
        moved = self._int8.post(int8_source, int8_target)
        others = self._rest.post(rest_source, rest_target)
        return self._stats(moved, others, scales.nbytes)

    def _bind(self, source: Shards, target: Shards) -> None:
        """Give every piece of the source memory in int8: that of the target where this rank holds it there,
        so that nothing need be copied."""
        places = {
            name: [(box, _place(target.get(name, ()), box)) for box, _ in source[name]]
            for name in self._first_row if name in source}
        numel = sum(region_size(box) for pieces in places.values() for box, at in pieces if at is None)
        memory = self._world.zeros(numel, torch.int8)
        values: dict[str, tuple[Piece, ...]] = {}
        for name, pieces in places.items():
            found = []
            for box, at in pieces:
                if at is None:
                    at, memory = memory.tensor_split([region_size(box)])
                    at = at.view([stop - start for start, stop in box])
                found.append((box, at))
            values[name] = tuple(found)
        self._values = values
        self._sides = (
            values, _chosen(target, self._first_row), _chosen(source, self._rest_names),
            _chosen(target, self._rest_names))

    def _rows(self, shards: Shards) -> Iterator[tuple[str, slice]]:
        """Yield the parameters in int8 that have one piece, with the places of its rows."""
        for name, first in self._first_row.items():
            for box, _ in shards.get(name, ()):
                yield name, slice(first + box[0][0], first + box[0][1])

    def _quantise(self, source: Shards) -> Tensor:
        """Write the source's weights in int8 and return the scales of all rows of the model."""
        largest = torch.zeros(self._num_rows, dtype=sum_dtype(self._dtype), device=self._world.device)
        for rows, weight_OI, _ in self._blocks(source):
            torch.maximum(largest[rows], weight_OI.to(largest.dtype).abs().amax(1), out=largest[rows])
        # A scale of infinity makes every product with the row NaN; a maximum over ranks may drop a NaN.
        self._group.all_reduce(largest.nan_to_num_(nan=torch.inf, posinf=torch.inf), largest=True)
        scales = scales_of(largest, self._dtype)
        for rows, weight_OI, values_OI in self._blocks(source):
            values_OI.copy_(quantised(weight_OI, scales[rows]))
        return scales

    def _blocks(self, source: Shards) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield rows of the source: their places, weights in the model's dtype, and memory for int8."""
        for name, pieces in self._values.items():
            first = self._first_row[name]
            for (box, values_OI), (_, weight_OI) in zip(pieces, source[name], strict=True):
                start = first + box[0][0]
                for rows in row_blocks(len(weight_OI), weight_OI.shape[1], _BLOCK_NUMEL):
                    weight = weight_OI.detach()[rows].to(self._world.device, self._dtype)
                    yield slice(start + rows.start, start + rows.start + len(weight)), weight, values_OI[rows]

    def _stats(self, moved: ReallocStats, others: ReallocStats, scale_bytes: int) -> ReallocStats:
        """Return the traffic of both parts, and of a ring that has agreed on the scales."""
        size = self._group.size
        ring = 2 * (size - 1) * scale_bytes // size
        bound = moved.bound_seconds + others.bound_seconds
        seconds = sum(part.over_bound * part.bound_seconds for part in (moved, others))
        return ReallocStats(
            moved.bytes_sent + others.bytes_sent + ring, moved.bytes_received + others.bytes_received + ring,
            seconds / bound if bound else 1.0, tuple(sorted({*moved.senders, *others.senders})), bound)


def _chosen(shards: Shards, names: Mapping[str, int] | list[str]) -> Shards:
    return {name: shards[name] for name in names if name in shards}


def _place(pieces: tuple[Piece, ...], box: Region) -> Tensor | None:
    """Return the memory of a box in pieces, one of which holds all of it; None if none does."""
    for region, tensor in pieces:
        if overlap(region, box) == box:
            return tensor[region_slices(box, within=region)]
    return None
