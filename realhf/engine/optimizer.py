"""ZeRO-1 AdamW (Rajbhandari et al. 2020): every dp replica updates one slice of the flat parameters."""

import math
from itertools import accumulate

import torch

from realhf.engine.work import OptimizerConfig
from realhf.nn.parameters import ShardedParameters
from realhf.param_spec import region_size, shards_of_rows
from realhf.realloc.bind import shards_of


def learning_rate(config: OptimizerConfig, step: int) -> float:
    """The rate of optimizer step `step`, counted from 0."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    progress = min(1.0, (step - config.warmup_steps) / max(1, config.total_steps - config.warmup_steps))
    remaining = 1 - progress if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * remaining)


class ShardedAdamW:
    """Owns the master copy of this rank's slice; `step` turns gradients into new parameters everywhere."""

    def __init__(self, model: ShardedParameters, config: OptimizerConfig) -> None:
        self.config, self.num_steps = config, 0
        self._model, self._groups = model, model.groups
        model.enable_grad()
        grads, dp = model.grad_buffer, model.groups.dp
        assert grads is not None
        parts = shards_of_rows(model.regions, dp.size)
        stops = list(accumulate(sum(map(region_size, part.values())) for part in parts))
        slices = list(zip([0, *stops], stops, strict=False))
        self._param_chunks = [model.flat[start:stop] for start, stop in slices]
        self._grad_chunks = [grads[start:stop] for start, stop in slices]
        self._mine = self._param_chunks[dp.index]
        master = model.groups.world.zeros(len(self._mine), grads.dtype)
        self._master = torch.nn.Parameter(master.copy_(self._mine))
        self.shards = shards_of(master, parts[dp.index])
        """Parameter name -> this dp replica's rows of the master copy."""
        start, stop = slices[dp.index]
        by_name = {param.name: param for param in model.spec.params}
        # Gradients of this rank's slice that it counts in the norm: what several ranks share counts once.
        self._counted = [
            grads[max(first, start) : min(last, stop)] for name, (first, last) in model.flat_offsets().items()
            if max(first, start) < min(last, stop)
            and model.spec.is_primary(by_name[name], model.groups.layout, model.groups.at)
        ]
        self._adamw = torch.optim.AdamW(
            [self._master], betas=config.betas, eps=config.eps, weight_decay=config.weight_decay, fused=True)

    def reload(self) -> None:
        """Takes over parameters that were written from outside."""
        self._master.data.copy_(self._mine)

    def step(self, *, gather: bool = True) -> dict[str, float]:
        """Reduces gradients over dp, clips and updates; gives `grad_norm` and `lr`.

        Unless it is to `gather` them, the model's parameters are old afterwards, but for this replica's part.
        """
        self._model.finish_grads()
        grad = self._groups.dp.reduce_scatter_chunks(self._grad_chunks)
        norm = torch.nn.utils.get_total_norm(self._counted).to(grad.device, torch.float64)
        grad_norm = math.sqrt(self._groups.all.all_reduce(norm.square().view(1)).item())
        if not math.isfinite(grad_norm):
            raise FloatingPointError(f"the gradient norm is {grad_norm} at optimizer step {self.num_steps}")
        if grad_norm > self.config.max_grad_norm:
            grad.mul_(self.config.max_grad_norm / (grad_norm + 1e-6))
        rate = learning_rate(self.config, self.num_steps)
        self._adamw.param_groups[0]["lr"] = rate
        self._master.grad = grad
        self._adamw.step()
        self._master.grad = None
        self._mine.copy_(self._master.detach())
        if gather:  # (a no-op for one replica)
            self._groups.dp.all_gather_chunks(self._param_chunks)
        self._model.zero_grad_buffer()
        self.num_steps += 1
        return {"grad_norm": grad_norm, "lr": rate}
