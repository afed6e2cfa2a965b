"""ZeRO-1 AdamW (Rajbhandari et al. 2020): every replica updates one chunk of each section of the parameters.

Replicas are ranks over dp and cp. Experts that are spread over ep have fewer replicas, and sections of their
own. If parameters have the optimizer's dtype, their chunk is itself the master copy.
"""

import math

import torch
from torch.optim.adamw import adamw

from realhf.calls import OptimizerConfig, learning_rate
from realhf.engine.optimizer_sections import GradientSums, make_sections
from realhf.engine.optimizer_state import AdamWState, OffloadedState, Operands, Update
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
