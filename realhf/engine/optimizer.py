"""ZeRO-1 AdamW (Rajbhandari et al. 2020): every replica updates one slice of each section of the parameters.

Replicas are ranks over dp and cp. Experts that are spread over ep have fewer replicas, and sections of their
own. If parameters have the optimizer's dtype, their slice is itself the master copy.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch.optim.adamw import adamw

from realhf import chunk_sizes
from realhf.calls import OptimizerConfig
from realhf.dist.group import Group
from realhf.engine.host_optimizer import HostStates, host_tensors
from realhf.learning_rates import learning_rate
from realhf.nn.parameters import ShardedParameters
from realhf.realloc.pieces import Shards, pieces_of
from realhf.region import Region, chunk_edges, region_size, split_evenly

_MAX_IN_FLIGHT = 2
"""Sums over replicas at a time; with gloo, each takes memory for the messages of the other replicas."""


class _Section(NamedTuple):
    """A part of the flat parameters that all members of `group` hold, split into one chunk per member."""

    group: Group
    params: torch.Tensor
    grads: torch.Tensor
    own: slice  # This member's chunk of both.
    boxes: dict[str, tuple[Region, ...]]  # Parameter name -> its boxes in this member's chunk.
    names: list[str]  # Names of all parameters of the section.
    first_layer: float  # First layer of these: -1 for embeddings, infinity after the last layer.


class _OptimizerSlice(NamedTuple):
    """Some of this member's elements of a section, which are updated together."""

    number: int  # Of the section.
    section: _Section
    part: slice  # Of the member's chunk.

    def spans(self) -> Iterator[tuple[str, slice]]:
        """Yield each parameter of which the slice has elements, and which of its elements these are."""
        start = 0
        for name, boxes in self.section.boxes.items():
            stop = start + sum(map(region_size, boxes))
            first, last = max(start, self.part.start), min(stop, self.part.stop)
            if first < last:
                yield name, slice(first - self.part.start, last - self.part.start)
            start = stop

    @property
    def mine(self) -> torch.Tensor:
        """The model's parameters."""
        return self.section.params[self.section.own][self.part]

    @property
    def grads(self) -> torch.Tensor:
        return self.section.grads[self.section.own][self.part]


class _Parts(NamedTuple):
    """Parts of the parameters with their gradients and AdamW's state, in the same order."""

    params: list[torch.Tensor]
    grads: list[torch.Tensor]
    means: list[torch.Tensor]
    squares: list[torch.Tensor]
    steps: list[torch.Tensor]


class _Update(NamedTuple):
    """The parts that are updated together: whole slices, and the norms and biases among them.

    The values of `fixed` stay. Afterwards, `mine` of the model's parameters get those of the slices.
    """

    whole: _Parts
    vectors: _Parts
    fixed: list[torch.Tensor]
    mine: list[torch.Tensor]


class ShardedAdamW:
    """An optimizer that owns the master copy of this rank's slices; `step` updates all replicas.

    With `config.offload`, the master copy and the moments are in host memory between steps.
    """

    def __init__(self, model: ShardedParameters, config: OptimizerConfig) -> None:
        self.config = config
        self.num_steps = 0
        self.num_skipped = 0
        """Updates in a row that have been skipped so far."""
        self._model = model
        self._groups = model.groups
        self._by_name = {param.name: param for param in model.spec.params}
        model.enable_grad()
        grads = model.grad_buffer
        assert grads is not None
        self._sections: list[_Section] = []
        self._counted: list[torch.Tensor] = []
        """Gradients that this rank counts in the norm: those that several ranks share count once."""
        start = 0
        for regions, ranks in model.spec.sections(model.groups.layout, model.groups.rank):
            group = model.groups.world.group(ranks)
            stop = start + sum(map(region_size, regions.values()))
            first, last = chunk_edges(stop - start, group.size)[group.index :][:2]
            boxes = split_evenly(regions, group.size)[group.index]
            layers = [model.spec.layer_of[name] for name in regions]
            first_layer = min(math.inf if layer is None else layer for layer in layers)
            params = model.flat[start:stop]
            sums = grads[start:stop]
            self._sections.append(
                _Section(group, params, sums, slice(first, last), boxes, list(regions), first_layer))
            self._counted += self._primary(regions, grads, start + first, start + last)
            start = stop
        self._by_group: dict[Group, list[_Section]] = {}
        for section in self._sections:
            self._by_group.setdefault(section.group, []).append(section)
        self._open = self._by_layer()
        """Sections whose gradients are not summed yet."""
        self._has_rests = False
        """Whether sums have begun, of which what is left over of every section follows (see `sum_rests`)."""
        self._in_flight: deque[Callable[[], None]] = deque()
        """Functions that complete the sums that have begun."""
        self._masters = self._mine
        """The master copy, by section."""
        self._has_own_copy = model.flat.dtype != grads.dtype
        if self._has_own_copy:
            self._masters = self._zeros(shared=True)
        self._means = self._zeros()
        self._squares = self._zeros()
        self._host = None
        self._optimizer_slices = self._split_into_slices(config.offload)
        if config.offload:
            kinds = [*([self._masters] if self._has_own_copy else []), self._means, self._squares]
            states = [[kind[piece.number][piece.part] for kind in kinds] for piece in self._optimizer_slices]
            self._host = HostStates(states, model.flat.device)
        self.reload()
        self.shards = self._by_parameter(self._masters)
        """Parameter name -> this replica's part of the master copy."""
        self._mean_shards = self._by_parameter(self._means)
        self._square_shards = self._by_parameter(self._squares)
        self.sources = self.shards if self._host is None else self._by_parameter(self._mine)
        """The same on the device, for reallocation: equal to the master copy in the model's dtype."""
        self._updates = self._make_updates()
        if self._host is not None:
            self._host.release()

    def _zeros(self, *, shared: bool = False) -> list[torch.Tensor]:
        """Return zeros for each slice: in host memory if the optimizer is offloaded, else on the device,
        where other ranks of the host can read them if they are `shared`."""
        sizes = [len(mine) for mine in self._mine]
        dtype = self._mine_grads[0].dtype
        device = self._model.flat.device
        if self.config.offload:
            return host_tensors(sizes, dtype=dtype, device=device)
        if shared:
            return list(self._groups.world.zeros(sum(sizes), dtype).split(sizes))
        return [torch.zeros(size, dtype=dtype, device=device) for size in sizes]

    def _split_into_slices(self, is_offloaded: bool) -> list[_OptimizerSlice]:
        """Return whole sections, or parts of them that pass through the device together."""
        slices = []
        for number, section in enumerate(self._sections):
            count = section.own.stop - section.own.start
            step = min(max(1, count), chunk_sizes.OPTIMIZER_SLICE_NUMEL) if is_offloaded else max(1, count)
            for start in range(0, max(1, count), step):
                slices.append(_OptimizerSlice(number, section, slice(start, min(start + step, count))))
        return slices

    def _make_updates(self) -> list[_Update]:
        """Return the updates of a step: one of everything, or one of each slice that is on the host."""
        if self._host is None:
            return [self._update_of(self._optimizer_slices, self._masters, self._means, self._squares)]
        updates = []
        for piece, states in zip(self._optimizer_slices, self._host.on_device, strict=True):
            *master, mean, square = states
            updates.append(self._update_of([piece], master or [piece.mine], [mean], [square]))
        return updates

    def _update_of(
        self, slices: Sequence[_OptimizerSlice], masters: list[torch.Tensor], means: list[torch.Tensor],
        squares: list[torch.Tensor],
    ) -> _Update:  # fmt: skip
        """Return the update of some slices, whose states lie in the given tensors."""
        whole = _Parts(masters, [piece.grads for piece in slices], means, squares, _steps_of(masters))
        vectors = _Parts([], [], [], [], [])
        fixed = []
        for i, piece in enumerate(slices):
            for name, span in piece.spans():
                if self._by_name[name].is_vector:
                    for all_parts, tensors in zip(vectors[:4], whole[:4], strict=True):
                        all_parts.append(tensors[i][span])
                if not self._by_name[name].trainable:
                    fixed.append(masters[i][span])
        vectors.steps.extend(_steps_of(vectors.params))
        return _Update(whole, vectors, fixed, [piece.mine for piece in slices])

    def _by_parameter(self, slices: Sequence[torch.Tensor]) -> Shards:
        """Return this replica's part of every parameter, as views of one flat tensor per section."""
        return _by_parameter(self._sections, slices)

    @property
    def state(self) -> dict[str, Shards]:
        """The tensors of this replica, which checkpoints hold, by kind."""
        return {"master": self.shards, "exp_avg": self._mean_shards, "exp_avg_sq": self._square_shards}

    def state_was_read(self, num_steps: int, num_skipped: int) -> None:
        """Continue after `num_steps` steps; `state` has been filled with that of a checkpoint."""
        self.num_steps = num_steps
        self.num_skipped = num_skipped
        for update in self._updates:
            for step in (*update.whole.steps, *update.vectors.steps):
                step.fill_(num_steps)
        for master, mine in zip(self._masters, self._mine, strict=True):
            mine.copy_(master)

    @property
    def held(self) -> list[torch.Tensor]:
        """Tensors kept besides the parameters and their gradients, except for the numbers of steps."""
        return [*(self._masters if self._has_own_copy else []), *self._means, *self._squares]

    @property
    def _mine(self) -> list[torch.Tensor]:
        """This replica's chunks of the model's parameters."""
        return [section.params[section.own] for section in self._sections]

    @property
    def _mine_grads(self) -> list[torch.Tensor]:
        """The gradients of `_mine`, complete once all sums are."""
        return [section.grads[section.own] for section in self._sections]

    def _primary(
        self, names: Iterable[str], grads: torch.Tensor, start: int, stop: int
    ) -> list[torch.Tensor]:
        """Return these parameters' gradients in [start, stop) that this rank counts in the norm."""
        found = []
        groups = self._groups
        offsets = self._model.offsets
        for name in names:
            first, last = max(offsets[name][0], start), min(offsets[name][1], stop)
            param = self._by_name[name]
            if first < last and self._model.spec.is_primary(param, groups.layout, groups.at):
                found.append(grads[first:last])
        return found

    def reload(self) -> None:
        """Copy parameters that were written from outside to the master copy."""
        for master, mine in zip(self._masters, self._mine, strict=True):
            master.copy_(mine)

    def layer_is_done(self, layer: int) -> None:
        """Begin the sums over replicas of this layer's and later layers' gradients, which must be complete.

        All ranks must call this with the same layers in the same order, or not at all.
        """
        while self._open and self._open[-1].first_layer >= layer:
            self._reduce(self._open.pop())

    def _reduce(self, section: _Section) -> None:
        """Begin to sum a section's gradients over its replicas."""
        self._model.finish_grads(section.names)
        self._has_rests = True
        while len(self._in_flight) >= _MAX_IN_FLIGHT:
            self._in_flight.popleft()()
        self._in_flight.append(section.group.post_reduce_scatter(section.grads))

    def finish_sums(self) -> None:
        """Complete all sums of gradients.

        Nothing may wait for other replicas between the last backward pass and this call, because their
        backward passes may be waiting for the sums.
        """
        while self._open:
            self._reduce(self._open.pop())
        while self._in_flight:
            self._in_flight.popleft()()
        if self._has_rests:
            self._has_rests = False
            for group, sections in self._by_group.items():
                group.sum_rests([section.grads for section in sections])

    def _gather(self) -> None:
        """Fill the parameters of all replicas with what each of them has updated."""
        for section in self._sections:
            section.group.all_gather_flat(section.params)
        for group, sections in self._by_group.items():
            group.spread_rests([section.params for section in sections])

    def _by_layer(self) -> list[_Section]:
        """Return the sections by first layer; the backward pass completes the last section first."""
        return sorted(self._sections, key=lambda section: section.first_layer)

    def step(self, *, gather: bool = True) -> dict[str, float]:
        """Sum gradients over replicas, clip and update; return `grad_norm`, `lr` and `skipped_updates`.

        Without `gather`, only this replica's part of the model's parameters is up to date afterwards. An
        update whose gradient norm is not finite is skipped, and only `skipped_updates` is returned. Raises
        FloatingPointError when more than `max_skipped` of them follow one another.
        """
        self.finish_sums()
        grads = self._mine_grads
        norm = torch.nn.utils.get_total_norm(self._counted).to(self._model.flat.device, torch.float64)
        grad_norm = math.sqrt(self._groups.all.all_reduce(norm.square().view(1)).item())
        if not math.isfinite(grad_norm):
            self._skip(grad_norm)
            return {"skipped_updates": 1.0}
        self.num_skipped = 0
        rate = learning_rate(self.config, self.num_steps)
        if grad_norm > self.config.max_grad_norm:
            torch._foreach_mul_(grads, self.config.max_grad_norm / (grad_norm + 1e-6))
        if self._host is None:
            self._update(self._updates[0], rate)
        else:
            self._host.update(lambda number: self._update(self._updates[number], rate))
        if gather:  # (a no-op for one replica)
            self._gather()
        self._model.forget_grads()
        self._open = self._by_layer()
        self.num_steps += 1
        return {"grad_norm": grad_norm, "lr": rate, "skipped_updates": 0.0}

    def _skip(self, grad_norm: float) -> None:
        self.num_skipped += 1
        if self.num_skipped > self.config.max_skipped:
            what = f"the gradient norm is {grad_norm} at optimizer step {self.num_steps}"
            skipped = f", and {self.num_skipped - 1} updates before were skipped for such norms"
            raise FloatingPointError(what + (skipped if self.config.max_skipped else ""))
        self._model.forget_grads()
        self._open = self._by_layer()

    @torch.no_grad()
    def _update(self, update: _Update, rate: float) -> None:
        """Take a step of AdamW: all parameters as whole slices, then norms and biases again without decay.

        The slices are updated in one kernel. The second update starts from the values before the first, and
        costs little, as norms and biases are few.
        """
        decay = self.config.weight_decay
        whole, vectors = update.whole, update.vectors
        fixed = [shard.clone() for shard in update.fixed]
        again = [*vectors.params, *vectors.means, *vectors.squares] if decay else []
        before = [torch.empty_like(part) for part in again]
        if again:
            torch._foreach_copy_(before, again)
        self._adamw(whole, rate, decay)
        if again:
            torch._foreach_copy_(again, before)
            self._adamw(vectors, rate, decay=0.0)
        for shard, value in zip(update.fixed, fixed, strict=True):
            shard.copy_(value)
        for master, mine in zip(whole.params, update.mine, strict=True):
            mine.copy_(master)

    def _adamw(self, parts: "_Parts", rate: float, decay: float) -> None:
        """Update some parts. (Using torch.optim.AdamW would import torch's compiler: memory and time.)"""
        beta1, beta2 = self.config.betas
        adamw(
            parts.params, parts.grads, parts.means, parts.squares, [], parts.steps,
            fused=True, amsgrad=False, maximize=False, beta1=beta1, beta2=beta2, lr=rate,
            weight_decay=decay, eps=self.config.eps)


def _by_parameter(sections: Sequence[_Section], slices: Sequence[torch.Tensor]) -> Shards:
    """Return the parts of parameters in one flat tensor per section."""
    return {
        name: pieces for section, part in zip(sections, slices, strict=True)
        for name, pieces in pieces_of(part, section.boxes).items()
    }  # fmt: skip


def _steps_of(params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return a count of steps, on its device, for each tensor."""
    return [torch.zeros((), device=param.device) for param in params]
