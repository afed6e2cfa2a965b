"""Sections of a model's flat parameters, which replicas split among them, and the sums of their gradients."""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from realhf.distributed.group import Group
from realhf.models.param_spec import ParamSpec, Region, chunk_edges, region_size, split_evenly
from realhf.nn.parameters import ShardedParameters

_MAX_IN_FLIGHT = 2
"""Sums over replicas at a time, over gloo: each takes memory for the messages of the other replicas."""


class Section(NamedTuple):
    """A part of the flat parameters that all members of `group` hold, split into one chunk per member."""

    group: Group
    params: torch.Tensor
    grads: torch.Tensor
    own: slice  # This member's chunk of both.
    boxes: dict[str, tuple[Region, ...]]  # Parameter name -> its boxes in this member's chunk.
    names: list[str]  # Names of all parameters of the section.
    first_layer: float  # First layer of these: -1 for embeddings, infinity after the last layer.
    counted: list[torch.Tensor]  # Gradients of this member's chunk that count in the norm on this rank.


class OptimizerSlice(NamedTuple):
    """Some of this member's elements of a section, which are updated together."""

    section_number: int
    section: Section
    elements: slice  # Of the member's chunk.

    def spans(self) -> Iterator[tuple[str, slice]]:
        """Yield each parameter of which the slice has elements, and which of its elements these are."""
        start = 0
        for name, boxes in self.section.boxes.items():
            stop = start + sum(map(region_size, boxes))
            first, last = max(start, self.elements.start), min(stop, self.elements.stop)
            if first < last:
                yield name, slice(first - self.elements.start, last - self.elements.start)
            start = stop

    @property
    def params(self) -> torch.Tensor:
        return self.section.params[self.section.own][self.elements]

    @property
    def grads(self) -> torch.Tensor:
        return self.section.grads[self.section.own][self.elements]


def make_sections(model: ShardedParameters) -> list[Section]:
    """Split a model's flat parameters and gradients into sections, each with its group of replicas."""
    grads = model.grad_buffer
    assert grads is not None
    params = {param.name: param for param in model.spec.params}
    sections = []
    start = 0
    for regions, ranks in model.spec.sections(model.groups.layout, model.groups.rank):
        group = model.groups.world.group(ranks)
        stop = start + sum(map(region_size, regions.values()))
        first, last = chunk_edges(stop - start, group.size)[group.index :][:2]
        boxes = split_evenly(regions, group.size)[group.index]
        layers = [model.spec.layer_of[name] for name in regions]
        first_layer = min(math.inf if layer is None else layer for layer in layers)
        counted = _primary(model, grads, [params[name] for name in regions], start + first, start + last)
        sections.append(Section(
            group, model.flat[start:stop], grads[start:stop], slice(first, last), boxes, list(regions),
            first_layer, counted))
        start = stop
    return sections


def _primary(
    model: ShardedParameters, grads: torch.Tensor, params: Sequence[ParamSpec], start: int, stop: int
) -> list[torch.Tensor]:
    """Return these parameters' gradients in [start, stop) that this rank counts in the norm.

    Gradients that several ranks share count on one of them.
    """
    counted = []
    for param in params:
        offsets = model.offsets[param.name]
        first, last = max(offsets[0], start), min(offsets[1], stop)
        if first < last and model.spec.is_primary(param, model.groups.layout, model.groups.at):
            counted.append(grads[first:last])
    return counted


def split_into_slices(
    sections: Sequence[Section], *, max_numel: int | None = None
) -> list[OptimizerSlice]:
    """Return this member's whole chunks, or slices of them of at most so many elements."""
    slices = []
    for number, section in enumerate(sections):
        count = section.own.stop - section.own.start
        step = max(1, count) if max_numel is None else min(max(1, count), max_numel)
        for start in range(0, max(1, count), step):
            slices.append(OptimizerSlice(number, section, slice(start, min(start + step, count))))
    return slices


class GradientSums:
    """The sums over replicas of the gradients of a mini-batch; of each section a rank gets its own chunk."""

    def __init__(self, model: ShardedParameters, sections: Sequence[Section]) -> None:
        self._model = model
        self._sections = sections
        self._by_layer = sorted(sections, key=lambda section: section.first_layer)
        self._by_group: dict[Group, list[Section]] = {}
        for section in sections:
            self._by_group.setdefault(section.group, []).append(section)
        self._in_flight: deque[Callable[[], None]] = deque()
        """Functions that complete the sums that have begun."""
        self.restart()

    def restart(self) -> None:
        """Expect the gradients of another mini-batch."""
        self._open = list(self._by_layer)
        """Sections whose sums have not begun; the backward pass completes the last one first."""
        self._has_rests = False
        """Whether sums have begun, of which what is left over of every section follows (see `sum_rests`)."""

    def layer_is_done(self, layer: int) -> None:
        """Begin the sums of this layer's and later layers' gradients, which must be complete.

        All ranks must call this with the same layers in the same order, or not at all.
        """
        while self._open and self._open[-1].first_layer >= layer:
            self._begin(self._open.pop())

    def _begin(self, section: Section) -> None:
        self._model.finish_grads(section.names)
        self._has_rests = True
        while len(self._in_flight) >= _MAX_IN_FLIGHT and not section.group.sums_in_place:
            self._in_flight.popleft()()
        self._in_flight.append(section.group.post_reduce_scatter(section.grads))

    def complete(self) -> None:
        """Complete all sums.

        Nothing may wait for other replicas between the last backward pass and this call, because their
        backward passes may be waiting for the sums.
        """
        while self._open:
            self._begin(self._open.pop())
        while self._in_flight:
            self._in_flight.popleft()()
        if self._has_rests:
            self._has_rests = False
            for group, sections in self._by_group.items():
                group.sum_rests([section.grads for section in sections])

    def spread_parameters(self) -> None:
        """Fill the parameters of all replicas with what each of them has updated."""
        for section in self._sections:
            section.group.all_gather_flat(section.params)
        for group, sections in self._by_group.items():
            group.spread_rests([section.params for section in sections])
