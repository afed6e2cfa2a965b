"""ZeRO-1 AdamW (Rajbhandari et al. 2020): every replica updates one slice of each section of the parameters.

Replicas are ranks over dp and cp. Experts that are spread over ep have fewer replicas, and sections of their
own. If parameters have the optimizer's dtype, their slice is itself the master copy.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.optim.adamw import adamw

from realhf.calls import OptimizerConfig
from realhf.dist.group import Group
from realhf.engine.host_optimizer import HostStates, host_tensors
from realhf.engine.optimizer_sections import OptimizerSlice, Section, make_sections, split_into_slices
from realhf.learning_rates import learning_rate
from realhf.nn.parameters import ShardedParameters
from realhf.realloc.pieces import Shards, pieces_of

_MAX_IN_FLIGHT = 2
"""Sums over replicas at a time; with gloo, each takes memory for the messages of the other replicas."""


class _States(NamedTuple):
    """AdamW's state of this member's chunks, one flat tensor of each kind per section.

    If the model has the optimizer's dtype, `masters` are chunks of its parameters (`has_own_copy` is False).
    """

    masters: list[torch.Tensor]
    means: list[torch.Tensor]
    squares: list[torch.Tensor]
    has_own_copy: bool

    @property
    def added(self) -> list[list[torch.Tensor]]:
        """The kinds of tensors that are kept besides the model's parameters."""
        return [*([self.masters] if self.has_own_copy else []), self.means, self.squares]


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
        self._sections = make_sections(model)
        self._by_group: dict[Group, list[Section]] = {}
        for section in self._sections:
            self._by_group.setdefault(section.group, []).append(section)
        self._open = self._by_layer()
        """Sections whose gradients are not summed yet."""
        self._has_rests = False
        """Whether sums have begun, of which what is left over of every section follows (see `sum_rests`)."""
        self._in_flight: deque[Callable[[], None]] = deque()
        """Functions that complete the sums that have begun."""
        self._states = self._make_states()
        self._optimizer_slices = split_into_slices(self._sections, is_offloaded=config.offload)
        self._host = self._make_host_states() if config.offload else None
        self.reload()
        self.shards = self._by_parameter(self._states.masters)
        """Parameter name -> this replica's part of the master copy."""
        self.sources = self.shards if self._host is None else self._by_parameter(self._mine)
        """The same on the device, for reallocation: equal to the master copy in the model's dtype."""
        self._mean_shards = self._by_parameter(self._states.means)
        self._square_shards = self._by_parameter(self._states.squares)
        self._updates = self._make_updates()
        if self._host is not None:
            self._host.release()

    def _make_states(self) -> _States:
        """Return moments of zeros, and a master copy, without values yet, if the model's dtype is another."""
        has_own_copy = self._model.flat.dtype != self._mine_grads[0].dtype
        masters = self._zeros(shared=True) if has_own_copy else self._mine
        return _States(masters, self._zeros(), self._zeros(), has_own_copy)

    def _make_host_states(self) -> HostStates:
        """Return the states by slice, which pass through the device one after the other."""
        slices = self._optimizer_slices
        states = [[kind[piece.number][piece.part] for kind in self._states.added] for piece in slices]
        return HostStates(states, self._model.flat.device)

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

    def _make_updates(self) -> list[_Update]:
        """Return the updates of a step: one of everything, or one of each slice that is on the host."""
        if self._host is None:
            return [self._update_of(self._optimizer_slices, *self._states[:3])]
        updates = []
        for piece, states in zip(self._optimizer_slices, self._host.on_device, strict=True):
            *master, mean, square = states
            updates.append(self._update_of([piece], master or [piece.mine], [mean], [square]))
        return updates

    def _update_of(
        self, slices: Sequence[OptimizerSlice], masters: list[torch.Tensor], means: list[torch.Tensor],
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
        for master, mine in zip(self._states.masters, self._mine, strict=True):
            mine.copy_(master)

    @property
    def held(self) -> list[torch.Tensor]:
        """Tensors kept besides the parameters and their gradients, except for the numbers of steps."""
        return [tensor for kind in self._states.added for tensor in kind]

    @property
    def _mine(self) -> list[torch.Tensor]:
        """This replica's chunks of the model's parameters."""
        return [section.params[section.own] for section in self._sections]

    @property
    def _mine_grads(self) -> list[torch.Tensor]:
        """The gradients of `_mine`, complete once all sums are."""
        return [section.grads[section.own] for section in self._sections]

    def reload(self) -> None:
        """Copy parameters that were written from outside to the master copy."""
        for master, mine in zip(self._states.masters, self._mine, strict=True):
            master.copy_(mine)

    def layer_is_done(self, layer: int) -> None:
        """Begin the sums over replicas of this layer's and later layers' gradients, which must be complete.

        All ranks must call this with the same layers in the same order, or not at all.
        """
        while self._open and self._open[-1].first_layer >= layer:
            self._reduce(self._open.pop())

    def _reduce(self, section: Section) -> None:
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

    def _by_layer(self) -> list[Section]:
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
        counted = [grad for section in self._sections for grad in section.counted]
        norm = torch.nn.utils.get_total_norm(counted).to(self._model.flat.device, torch.float64)
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


def _by_parameter(sections: Sequence[Section], slices: Sequence[torch.Tensor]) -> Shards:
    """Return the parts of parameters in one flat tensor per section."""
    return {
        name: pieces for section, part in zip(sections, slices, strict=True)
        for name, pieces in pieces_of(part, section.boxes).items()
    }  # fmt: skip


def _steps_of(params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return a count of steps, on its device, for each tensor."""
    return [torch.zeros((), device=param.device) for param in params]
