"""Routers: collects the router losses of a mini-batch from all its micro-batches and pipeline stages."""

from collections.abc import Mapping

import torch

from realhf.calls import TrainStep
from realhf.nn.moe import RouterLosses
from realhf.nn.transformer import Transformer


class Routers:
    """The router losses of a mini-batch: means over the layers with experts, and over all
    sequences (`samples`) or tokens (`routed_tokens`) of all dp replicas.

    These totals are known in advance, so that losses and gradients of micro-batches, replicas and stages
    simply add up.
    """

    def __init__(self, model: Transformer, work: TrainStep, totals: Mapping[str, float]) -> None:
        self._model = model
        self._work = work
        self._passes: list[RouterLosses] = []
        num_layers = sum(map(model.config.has_experts, range(model.config.num_layers)))
        self._per_sequence = 1 / max(1, num_layers * totals["samples"])
        self._per_token = 1 / max(1, num_layers * totals["routed_tokens"])

    def next_pass(self) -> RouterLosses:
        """Return the object that collects the next micro-batch's losses."""
        losses = RouterLosses(
            balance_scale=self._work.router_aux_loss_coef * self._per_sequence,
            z_scale=self._work.router_z_loss_coef * self._per_token)
        self._passes.append(losses)
        return losses

    def metrics(self) -> dict[str, float]:
        """Return this replica's part of both losses. Every stage and cp rank calls this after the backward
        passes."""
        sums = torch.zeros(2, dtype=torch.float64, device=self._model.flat.device)
        for losses in self._passes:
            sums += losses.sums().to(sums.device)
        for group in (self._model.groups.pp, self._model.groups.cp):
            group.all_reduce(sums)
        balance, z = sums.tolist()
        return {"router_aux_loss": balance * self._per_sequence, "router_z_loss": z * self._per_token}
