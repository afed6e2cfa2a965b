"""Routers: the router losses of one mini-batch, out of all its micro-batches and pipeline stages."""

import torch

from realhf.calls import TrainStep
from realhf.nn.moe import RouterLosses
from realhf.nn.transformer import Transformer


class Routers:
    """Means over the layers with experts, and over `num_sequences` or `num_tokens` of all dp replicas.

    So they add up over micro-batches, replicas and stages: each pass adds its part of the gradient.
    """

    def __init__(
        self, model: Transformer, work: TrainStep, *, num_sequences: float, num_tokens: float
    ) -> None:
        self._model, self._work, self._passes = model, work, list[RouterLosses]()
        num_layers = sum(map(model.config.has_experts, range(model.config.num_layers)))
        self._per_sequence = 1 / max(1, num_layers * num_sequences)
        self._per_token = 1 / max(1, num_layers * num_tokens)
        self._exist = num_layers > 0

    def next_pass(self) -> RouterLosses | None:
        """What the next micro-batch adds to; None for a model without experts."""
        if not self._exist:
            return None
        self._passes.append(
            RouterLosses(
                balance_scale=self._work.router_aux_loss_coef * self._per_sequence,
                z_scale=self._work.router_z_loss_coef * self._per_token,
            )
        )
        return self._passes[-1]

    def metrics(self) -> dict[str, float]:
        """This replica's part of both losses; every stage and cp rank must ask, after the backward passes."""
        if not self._exist:
            return {}
        sums = torch.zeros(2, dtype=torch.float64, device=self._model.flat.device)
        for found in self._passes:
            sums += found.sums().to(sums.device)
        for group in (self._model.groups.pp, self._model.groups.cp):
            if group.size > 1:
                group.all_reduce(sums)
        balance, z = sums.tolist()
        return {"router_aux_loss": balance * self._per_sequence, "router_z_loss": z * self._per_token}
