"""One move of a model's weights, as one rank sees it: what it holds, what it wants, who has what."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from realhf.dist.group import World
from realhf.layout import Layout
from realhf.param_spec import ModelSpec
from realhf.realloc.bind import shards_of
from realhf.realloc.execute import Reallocator
from realhf.region import Region, region_size

DTYPE = torch.float32
Copies = list[tuple[torch.Tensor, torch.Tensor]]  # destination, source


class Shards:
    """What a rank holds: views of one flat buffer in table order, as nn.Transformer has them."""

    def __init__(self, spec: ModelSpec, layout: Layout, world: World) -> None:
        self.regions = spec.held_by(layout, world.rank)
        self.flat = world.zeros(sum(map(region_size, self.regions.values())), DTYPE)
        self.tensors = shards_of(self.flat, self.regions)

    def view(self, name: str, region: Region) -> torch.Tensor:
        """`region` (in global indices) of what is held here."""
        return self.tensors[name][within(region, self.regions[name])]


@dataclass(frozen=True)
class Move:
    """One move as one rank sees it; `holders` is who has which region of each parameter at the source.

    All ranks build it in step, since the Reallocators meet the others. The `messenger` sends messages where
    the `reallocator` looks into its neighbours' memory. `scratch` is a directory for all.
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
        held, wanted = Shards(spec, source, world), Shards(spec, target, world)
        ours = [Reallocator(spec, source=source, target=target, world=w, dtype=DTYPE) for w in (world, wires)]
        return cls(spec, source, target, held, wanted, holders, world, *ours, scratch)

    @property
    def rank(self) -> int:
        return self.world.rank

    def into_target(self, name: str, region: Region, values: torch.Tensor) -> Copies:
        """The copy of what of `values` (of `region`) is wanted here: one or none."""
        common = overlap(region, self.wanted.regions.get(name))
        if common is None:
            return []
        return [(self.wanted.view(name, common), values.view(shape_of(region))[within(common, region)])]


def overlap(one: Region, other: Region | None) -> Region | None:
    """The box that two regions share, if there is one."""
    if other is None:
        return None
    spans = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True)]
    return tuple(spans) if all(low < high for low, high in spans) else None


def shape_of(region: Region) -> list[int]:
    return [stop - start for start, stop in region]


def within(region: Region, box: Region) -> tuple[slice, ...]:
    return tuple(slice(start - low, stop - low) for (start, stop), (low, _) in zip(region, box, strict=True))
