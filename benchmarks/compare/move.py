"""A move of a model's weights from one layout to another, from the view of one rank."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from realhf.distributed.pieces import one_piece_each, shards_of
from realhf.distributed.world import World
from realhf.layout import Layout
from realhf.models.param_spec import ModelSpec, Region, overlap, region_size, region_slices
from realhf.realloc.execute import Reallocator, assumed_links
from realhf.realloc.schedule import make_schedule

DTYPE = torch.float32
Copies = list[tuple[torch.Tensor, torch.Tensor]]  # Pairs of destination and source.


class Shards:
    """The parameters that a rank holds, as views of one flat buffer in table order, as in nn.Transformer."""

    def __init__(self, spec: ModelSpec, layout: Layout, world: World) -> None:
        self.regions = spec.held_by(layout, world.rank)
        self.flat = world.zeros(sum(map(region_size, self.regions.values())), DTYPE)
        self.tensors = shards_of(self.flat, self.regions)
        self.pieces = one_piece_each(self.tensors, self.regions)

    def view(self, name: str, region: Region) -> torch.Tensor:
        """Return the view of `region` (in global indices), which this rank holds."""
        return self.tensors[name][region_slices(region, within=self.regions[name])]


@dataclass(frozen=True)
class Move:
    """A move from the view of one rank; `holders` has the ranks that hold each region at the source.

    All ranks must build it at the same time, because the Reallocators communicate. The `messenger` sends
    messages in cases where the `reallocator` reads its neighbours' memory. All ranks share the directory
    `scratch`.
    """

    spec: ModelSpec
    source: Layout
    target: Layout
    held: Shards
    wanted: Shards
    holders: Mapping[str, Mapping[Region, Sequence[int]]]
    world: World
    reallocator: Reallocator
    messenger: Reallocator
    scratch: str

    @classmethod
    def between(
        cls, source: Layout, target: Layout, *, spec: ModelSpec, world: World, wires: World, scratch: str
    ) -> "Move":
        holders: dict[str, dict[Region, list[int]]] = defaultdict(dict)
        for rank in source.ranks:
            for name, region in spec.held_by(source, rank).items():
                holders[name].setdefault(region, []).append(rank)
        ends = {"source": source, "target": target, "itemsize": DTYPE.itemsize}
        held, wanted = Shards(spec, source, world), Shards(spec, target, world)
        ours = [
            Reallocator(make_schedule(spec, **ends, links=assumed_links(w)), w, dtype=DTYPE)
            for w in (world, wires)]
        return cls(spec, source, target, held, wanted, holders, world, *ours, scratch)

    @property
    def rank(self) -> int:
        return self.world.rank

    def into_target(self, name: str, region: Region, values: torch.Tensor) -> Copies:
        """Return the copy of the part of `values` (of `region`) that this rank wants: one or none."""
        wanted = self.wanted.regions.get(name)
        common = wanted and overlap(region, wanted)
        if common is None:
            return []
        part = values.view(shape_of(region))[region_slices(common, within=region)]
        return [(self.wanted.view(name, common), part)]


def shape_of(region: Region) -> list[int]:
    return [stop - start for start, stop in region]
