"""AdamW's state of what a replica updates, on the device or in host memory, and the updates of a step."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from realhf.devices import chunk_sizes
from realhf.distributed.pieces import Shards, pieces_of
from realhf.engine.host_optimizer import HostSlices, host_tensors
from realhf.engine.optimizer_sections import OptimizerSlice, Section, split_into_slices
from realhf.nn.parameters import ShardedParameters


class Operands(NamedTuple):
    """Pieces of the parameters with their gradients and AdamW's state, in the same order."""

    params: list[Tensor]
    grads: list[Tensor]
    means: list[Tensor]
    squares: list[Tensor]
    steps: list[Tensor]  # Each one's count of steps, on its device.


class Update(NamedTuple):
    """The slices that one update changes, and the norms and biases among them.

    The values of `fixed` stay. Afterwards, `targets`, which are the model's own parameters, get those of the
    slices.
    """

    whole: Operands
    vectors: Operands
    fixed: list[Tensor]
    targets: list[Tensor]


class AdamWState:
    """The master copy and the moments of this replica's chunks, on the device; a flat tensor per section.

    If the model has the optimizer's dtype, the chunks of its parameters are themselves the master copy.
    """

    def __init__(self, model: ShardedParameters, sections: Sequence[Section]) -> None:
        self._model = model
        self._sections = sections
        self.counted = [grad for section in sections for grad in section.counted]
        """The gradients that count in the norm on this rank."""
        self.grads = [section.grads[section.own] for section in sections]
        """The gradients of the chunks, complete once all sums are."""
        self._chunks = [section.params[section.own] for section in sections]
        has_own_copy = model.flat.dtype != self.grads[0].dtype
        self._masters = self._zeros(shared=True) if has_own_copy else self._chunks
        self._means = self._zeros()
        self._squares = self._zeros()
        self._kinds = [*([self._masters] if has_own_copy else []), self._means, self._squares]
        """The kinds of tensors that are kept besides the model's parameters."""
        self.tensors = [tensor for kind in self._kinds for tensor in kind]
        self.load_parameters()
        kinds = {"master": self._masters, "exp_avg": self._means, "exp_avg_sq": self._squares}
        self.by_kind = {kind: self._by_parameter(tensors) for kind, tensors in kinds.items()}
        """Kind of tensor -> parameter name -> this replica's part."""
        self.sources = self.by_kind["master"]
        """The master copy, or what equals it in the model's dtype, on the device."""
        self._updates = self._make_updates()

    def _zeros(self, *, shared: bool = False) -> list[Tensor]:
        """Return zeros for each chunk; other ranks of the host can read `shared` ones."""
        sizes = [len(grad) for grad in self.grads]
        dtype = self.grads[0].dtype
        if shared:
            return list(self._model.groups.world.zeros(sum(sizes), dtype).split(sizes))
        return [torch.zeros(size, dtype=dtype, device=self._model.flat.device) for size in sizes]

    def _make_updates(self) -> list[Update]:
        """Return the updates of a step."""
        return [self._update_of(split_into_slices(self._sections), self._masters, self._means, self._squares)]

    def update(self, update: Callable[[Update], None]) -> None:
        """Call `update` with each update of a step, while its tensors are on the device."""
        update(self._updates[0])

    def load_parameters(self) -> None:
        """Copy the model's parameters to the master copy."""
        for master, chunk in zip(self._masters, self._chunks, strict=True):
            master.copy_(chunk)

    def was_read(self, num_steps: int) -> None:
        """Continue after `num_steps` steps; the tensors have been filled with those of a checkpoint."""
        for update in self._updates:
            for step in (*update.whole.steps, *update.vectors.steps):
                step.fill_(num_steps)
        for master, chunk in zip(self._masters, self._chunks, strict=True):
            chunk.copy_(master)

    def _by_parameter(self, chunks: Sequence[Tensor]) -> Shards:
        """Return this replica's part of every parameter, as views of one flat tensor per section."""
        return {
            name: pieces for section, chunk in zip(self._sections, chunks, strict=True)
            for name, pieces in pieces_of(chunk, section.boxes).items()
        }  # fmt: skip

    def _update_of(
        self, slices: Sequence[OptimizerSlice], masters: list[Tensor], means: list[Tensor],
        squares: list[Tensor],
    ) -> Update:  # fmt: skip
        """Return the update of some slices, whose states lie in the given tensors."""
        params = {param.name: param for param in self._model.spec.params}
        grads = [chunk_slice.grads for chunk_slice in slices]
        whole = Operands(masters, grads, means, squares, _steps_of(masters))
        vectors = Operands([], [], [], [], [])
        fixed = []
        for i, chunk_slice in enumerate(slices):
            for name, span in chunk_slice.spans():
                if params[name].is_vector:
                    for all_vectors, tensors in zip(vectors[:4], whole[:4], strict=True):
                        all_vectors.append(tensors[i][span])
                if not params[name].trainable:
                    fixed.append(masters[i][span])
        vectors.steps.extend(_steps_of(vectors.params))
        return Update(whole, vectors, fixed, [chunk_slice.params for chunk_slice in slices])


class OffloadedState(AdamWState):
    """The same in host memory, of which each slice passes through the device in a step."""

    def _zeros(self, *, shared: bool = False) -> list[Tensor]:
        sizes = [len(grad) for grad in self.grads]
        return host_tensors(sizes, dtype=self.grads[0].dtype, device=self._model.flat.device)

    def _make_updates(self) -> list[Update]:
        """Return an update of each slice, whose states are then in a buffer on the device."""
        self.sources = self._by_parameter(self._chunks)
        slices = split_into_slices(self._sections, max_numel=chunk_sizes.OPTIMIZER_SLICE_NUMEL)
        states = [[kind[part.section_number][part.elements] for kind in self._kinds] for part in slices]
        self.slices = HostSlices(states, self._model.flat.device)
        updates = []
        for chunk_slice, (*master, mean, square) in zip(slices, self.slices.on_device, strict=True):
            updates.append(self._update_of([chunk_slice], master or [chunk_slice.params], [mean], [square]))
        self.slices.release()
        return updates

    def update(self, update: Callable[[Update], None]) -> None:
        self.slices.update(lambda number: update(self._updates[number]))


def _steps_of(params: Sequence[Tensor]) -> list[Tensor]:
    """Return a count of steps, on its device, for each tensor."""
    return [torch.zeros((), device=param.device) for param in params]
