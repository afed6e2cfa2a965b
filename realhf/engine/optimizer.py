"""ZeRO-1 AdamW (Rajbhandari et al. 2020): every replica updates one chunk of each section of the
parameters.

Replicas are ranks over dp and cp. Experts that are spread over ep have fewer replicas, and sections of
their own. If parameters have the optimizer's dtype, their chunk is itself the master copy.

With `offload`, states are in host memory and pass through the device slice by slice. A slice is a replica's
chunk of a section, or some of a large one. Two buffers on the device take turns: while the optimizer
updates one slice, the states of the next one come up, and those of the one before go back (ZeRO-Offload,
Ren et al. 2021, with the update on the device). Every element is updated by the same kernel as without a
host copy, so results are equal bit for bit. Between steps the states take no memory of the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from realhf.calls import OPTIMIZER_STATE, OptimizerConfig, learning_rate, states_of_weights
from realhf.devices import chunk_sizes
from realhf.devices.pinned import run_bounds
from realhf.distributed.pieces import Shards, pieces_of
from realhf.engine.optimizer_sections import (
    GradientSums,
    OptimizerSlice,
    Section,
    make_sections,
    split_into_slices,
)
from realhf.nn.parameters import ShardedParameters


class ShardedAdamW:
    """An optimizer that owns the master copy of this rank's chunks; `step` updates all replicas.

    With `config.offload`, the master copy and the moments are in host memory between steps.
    """

    def __init__(self, model: ShardedParameters, config: OptimizerConfig) -> None:
        self.config = config
        self.num_steps = 0
        self.num_skipped = 0
        """Updates in a row that have been skipped so far."""
        self._model = model
        model.enable_grad()
        sections = make_sections(model)
        self.sums = GradientSums(model, sections)
        self._state = (OffloadedState if config.offload else AdamWState)(model, sections)
        self.state = self._state.by_kind
        """The tensors of this replica, which checkpoints hold: kind -> parameter name -> its part of it."""
        self.shards = self.state["master"]
        """Parameter name -> this replica's part of the master copy."""
        self.sources = self._state.sources
        """The same on the device, for reallocation: equal to the master copy in the model's dtype."""
        self.held = self._state.tensors
        """Tensors kept besides the parameters and their gradients, except for the numbers of steps."""

    def state_was_read(self, num_steps: int, num_skipped: int) -> None:
        """Continue after `num_steps` steps; `state` has been filled with that of a checkpoint."""
        self.num_steps = num_steps
        self.num_skipped = num_skipped
        self._state.was_read(num_steps)

    def reload(self) -> None:
        """Copy parameters that were written from outside to the master copy."""
        self._state.load_parameters()

    def step(self, *, gather: bool = True) -> dict[str, float]:
        """Sum gradients over replicas, clip and update; return `grad_norm`, `lr` and `skipped_updates`.

        Without `gather`, only this replica's part of the model's parameters is up to date afterwards. An
        update whose gradient norm is not finite is skipped, and only `skipped_updates` is returned (see
        `count_skipped`).
        """
        self.sums.complete()
        norm = torch.nn.utils.get_total_norm(self._state.counted).to(self._model.flat.device, torch.float64)
        grad_norm = math.sqrt(self._model.groups.all.all_reduce(norm.square().view(1)).item())
        self.num_skipped = count_skipped(
            grad_norm, self.config, num_steps=self.num_steps, num_skipped=self.num_skipped)
        if self.num_skipped:
            self._forget_grads()
            return {"skipped_updates": 1.0}
        lr = learning_rate(self.config, self.num_steps)
        self.num_steps += 1  # First, so that an interrupted update is not taken for none.
        if grad_norm > self.config.max_grad_norm:
            torch._foreach_mul_(self._state.grads, self.config.max_grad_norm / (grad_norm + 1e-6))
        self._state.update(lambda update: self._update(update, lr))
        if gather:  # (a no-op for one replica)
            self.sums.spread_parameters()
        self._forget_grads()
        return {"grad_norm": grad_norm, "lr": lr, "skipped_updates": 0.0}

    def _forget_grads(self) -> None:
        self._model.forget_grads()
        self.sums.restart()

    @torch.no_grad()
    def _update(self, update: Update, lr: float) -> None:
        """Take a step of AdamW: all parameters as whole slices, then norms and biases again without decay.

        The slices are updated in one kernel. The second update starts from the values before the first, and
        costs little, as norms and biases are few.
        """
        decay = self.config.weight_decay
        whole, vectors = update.whole, update.vectors
        fixed = [shard.clone() for shard in update.fixed]
        again = [*vectors.params, *vectors.means, *vectors.squares] if decay else []
        before = [torch.empty_like(tensor) for tensor in again]
        if again:
            torch._foreach_copy_(before, again)
        self._adamw(whole, lr, decay)
        if again:
            torch._foreach_copy_(again, before)
            self._adamw(vectors, lr, decay=0.0)
        for shard, value in zip(update.fixed, fixed, strict=True):
            shard.copy_(value)
        for master, target in zip(whole.params, update.targets, strict=True):
            target.copy_(master)

    def _adamw(self, operands: Operands, lr: float, decay: float) -> None:
        """Update some tensors. (Using torch.optim.AdamW would import torch's compiler: memory and time.)"""
        beta1, beta2 = self.config.betas
        adamw(
            operands.params, operands.grads, operands.means, operands.squares, [], operands.steps,
            fused=True, amsgrad=False, maximize=False, beta1=beta1, beta2=beta2, lr=lr,
            weight_decay=decay, eps=self.config.eps)


def count_skipped(grad_norm: float, config: OptimizerConfig, *, num_steps: int, num_skipped: int) -> int:
    """Return how many updates in a row are skipped after one with this gradient norm; 0 if it is finite.

    Before it there were `num_steps` steps, and then `num_skipped` updates that were skipped. Raises
    FloatingPointError when more than `max_skipped` of them follow one another.
    """
    if math.isfinite(grad_norm):
        return 0
    if num_skipped >= config.max_skipped:
        sentence = f"the gradient norm is {grad_norm} at optimizer step {num_steps}"
        skipped = f", and {num_skipped} updates before were skipped for such norms"
        raise FloatingPointError(sentence + (skipped if num_skipped else ""))
    return num_skipped + 1


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
        kinds = dict(zip(OPTIMIZER_STATE, (self._masters, self._means, self._squares), strict=True))
        self._kinds = [kinds[kind] for kind in states_of_weights(is_narrow=has_own_copy)]
        """The kinds of tensors that are kept besides the model's parameters."""
        self.tensors = [tensor for kind in self._kinds for tensor in kind]
        self.load_parameters()
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
        }

    def _update_of(
        self, slices: Sequence[OptimizerSlice], masters: list[Tensor], means: list[Tensor],
        squares: list[Tensor],
    ) -> Update:
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


class HostSlices:
    """The states of an optimizer's slices in host memory, and two buffers for them on the device.

    On a CPU the same copies are made, and wait for one another.
    """

    def __init__(self, states: Sequence[Sequence[Tensor]], device: torch.device) -> None:
        """Take the states of each slice: flat tensors in host memory, of one dtype.

        Call `release` once all views of `on_device` are made, for which the buffers need their memory.
        """
        self._states = states
        self._device = device
        sizes = [sum(map(len, tensors)) for tensors in states]
        slots = [max(sizes[first::2], default=0) for first in (0, 1)]
        dtype = states[0][0].dtype
        self._buffers = [torch.empty(size, dtype=dtype, device=device) for size in slots]
        self.on_device = [
            list(self._buffers[i % 2][:size].split([len(tensor) for tensor in tensors]))
            for i, (tensors, size) in enumerate(zip(states, sizes, strict=True))
        ]
        """For each slice the views of a buffer that have its states while it is updated."""
        self._up = _copy_stream(device)
        self._down = _copy_stream(device)

    def update(self, update: Callable[[int], None]) -> None:
        """Call `update` with the number of each slice while `on_device` has its states.

        The host waits until all states are back, so that it may read them afterwards.
        """
        for buffer in self._buffers:
            buffer.untyped_storage().resize_(buffer.nbytes)
        count = len(self._states)
        free = [self._now(), self._now()]
        """For each buffer an event after which it may be overwritten."""
        there = [self._bring(0, after=free[0])]
        for i in range(count):
            if i + 1 < count:
                there.append(self._bring(i + 1, after=free[(i + 1) % 2]))
            _wait(None, there[i])
            update(i)
            free[i % 2] = self._take_back(i, after=self._now())
        for event in free:
            if event is not None:
                event.synchronize()
        self.release()

    def _bring(self, number: int, *, after: torch.cuda.Event | None) -> torch.cuda.Event | None:
        """Copy a slice's states to the device; return an event after which they are there."""
        return self._copy(self._up, self.on_device[number], self._states[number], after)

    def _take_back(self, number: int, *, after: torch.cuda.Event | None) -> torch.cuda.Event | None:
        """Copy a slice's states back to the host; return an event after which they are there."""
        return self._copy(self._down, self._states[number], self.on_device[number], after)

    def _copy(
        self, stream: torch.cuda.Stream | None, targets: Sequence[Tensor], sources: Sequence[Tensor],
        after: torch.cuda.Event | None,
    ) -> torch.cuda.Event | None:
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            _wait(stream, after)
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
            return None if stream is None else stream.record_event()

    def _now(self) -> torch.cuda.Event | None:
        """Return an event after the work so far on the main stream; None on a CPU."""
        return torch.cuda.current_stream().record_event() if self._device.type == "cuda" else None

    def release(self) -> None:
        """Free the buffers until the next update; views of them stay valid."""
        for buffer in self._buffers:
            buffer.untyped_storage().resize_(0)


def host_tensors(sizes: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Return flat tensors of zeros in host memory, from which a CUDA device can copy asynchronously.

    Some of them share an allocation, because torch rounds pinned memory up to a power of two.
    """
    pins = device.type == "cuda"
    bounds = run_bounds([size * dtype.itemsize for size in sizes]) if pins else [0, len(sizes)]
    runs = [list(sizes[first:stop]) for first, stop in pairwise(bounds)]
    return [part for run in runs for part in torch.zeros(sum(run), dtype=dtype, pin_memory=pins).split(run)]


def _copy_stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def _wait(stream: torch.cuda.Stream | None, event: torch.cuda.Event | None) -> None:
    """Let a stream, or with None the main one, wait for an event, if there is one."""
    if event is not None:
        (stream or torch.cuda.current_stream()).wait_event(event)
