"""GradientSums: adds up the gradients of replicas, section by section, while the backward pass goes on."""

from collections import deque
from collections.abc import Callable, Sequence

from realhf.dist.group import Group
from realhf.engine.optimizer_sections import Section
from realhf.nn.parameters import ShardedParameters

_MAX_IN_FLIGHT = 2
"""Sums over replicas at a time; with gloo, each takes memory for the messages of the other replicas."""


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
        while len(self._in_flight) >= _MAX_IN_FLIGHT:
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
