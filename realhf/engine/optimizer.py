"""ZeRO-1 AdamW (Rajbhandari et al. 2020): every dp replica updates one slice of the flat parameters."""

import math

import torch

from realhf.dist.parallel import ParallelGroups
from realhf.engine.work import OptimizerConfig
from realhf.layout import even_split
from realhf.nn.transformer import Transformer


def learning_rate(config: OptimizerConfig, step: int) -> float:
    """The rate of optimizer step `step`, counted from 0."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    span = max(1, config.total_steps - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / span)
    remaining = 1 - progress if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * remaining)


class ShardedAdamW:
    """Owns the master copy of this rank's slice; `step` turns gradients into new parameters everywhere."""

    def __init__(self, model: Transformer, config: OptimizerConfig) -> None:
        self.config = config
        self.num_steps = 0
        self._model = model
        groups = self._groups = model.groups
        model.enable_grad()
        assert model.grad_buffer is not None
        slices = [even_split(model.flat.numel(), groups.dp.size, i) for i in range(groups.dp.size)]
        self._param_chunks = [model.flat[start:stop] for start, stop in slices]
        self._grad_chunks = [model.grad_buffer[start:stop] for start, stop in slices]
        mine = self._param_chunks[groups.dp.index].detach()
        self._master = torch.nn.Parameter(mine.to(model.grad_buffer.dtype))
        self._counted = _primary_slices(model, groups, *slices[groups.dp.index])
        self._adamw = torch.optim.AdamW(
            [self._master], betas=config.betas, eps=config.eps, weight_decay=config.weight_decay, fused=True
        )

    def reload(self) -> None:
        """Takes over parameters that were written from outside."""
        self._master.data.copy_(self._param_chunks[self._groups.dp.index])

    def step(self) -> dict[str, float]:
        """Reduces gradients over dp, clips, updates, gathers the parameters; gives `grad_norm` and `lr`."""
        groups = self._groups
        self._model.finish_grads()
        grad = groups.dp.reduce_scatter_chunks(self._grad_chunks)
        grad_norm = self._grad_norm(grad)
        if not math.isfinite(grad_norm):
            raise FloatingPointError(f"the gradient norm is {grad_norm} at optimizer step {self.num_steps}")
        if grad_norm > self.config.max_grad_norm:
            grad.mul_(self.config.max_grad_norm / (grad_norm + 1e-6))
        rate = learning_rate(self.config, self.num_steps)
        self._adamw.param_groups[0]["lr"] = rate
        self._master.grad = grad
        self._adamw.step()
        self._master.grad = None
        mine = self._param_chunks[groups.dp.index]
        if mine.data_ptr() != self._master.data_ptr():
            mine.copy_(self._master.detach())
        groups.dp.all_gather_chunks(self._param_chunks)
        self._model.zero_grad_buffer()
        self.num_steps += 1
        return {"grad_norm": grad_norm, "lr": rate}

    def _grad_norm(self, grad: torch.Tensor) -> float:
        """L2 norm over all parameters of the model; what several ranks share counts once."""
        square = torch.zeros((), dtype=torch.float64, device=grad.device)
        for start, stop in self._counted:
            square += torch.linalg.vector_norm(grad[start:stop]).double() ** 2
        return math.sqrt(self._groups.all.all_reduce(square.view(1)).item())


def _primary_slices(
    model: Transformer, groups: ParallelGroups, start: int, stop: int
) -> list[tuple[int, int]]:
    """Ranges, relative to `start`, of what this rank counts in sums over parameters; neighbours joined."""
    by_name = {param.name: param for param in model.spec.params}
    ranges: list[tuple[int, int]] = []
    for name, (first, last) in model.flat_offsets().items():
        first, last = max(first, start), min(last, stop)
        if first >= last or not model.spec.is_primary(by_name[name], groups.layout, groups.at):
            continue
        if ranges and ranges[-1][1] == first - start:
            ranges[-1] = (ranges[-1][0], last - start)
        else:
            ranges.append((first - start, last - start))
    return ranges
