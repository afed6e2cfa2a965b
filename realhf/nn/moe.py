"""Moe: routed experts in place of an MLP, spread over expert- and tensor-parallel ranks.

Shape suffixes: T tokens of all sequences end to end, S sequences, H hidden, E all experts, L this rank's, F
this rank's part of an expert's width, K experts of a token, R rows (a token for one of its experts).
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from realhf.dist.autograd import copy_to_group, exchange_rows, sum_over_group
from realhf.dist.group import Group
from realhf.dist.parallel import ParallelGroups
from realhf.layout import even_split
from realhf.model_config import ModelConfig, MoeConfig
from realhf.nn.activation import Activation
from realhf.nn.grouped_linear import grouped_linear
from realhf.nn.narrow import widened
from realhf.nn.split_float32 import joined


class RouterLosses:
    """Load-balancing and z-loss of all routers in one pass over packed sequences.

    The balance loss is that of each sequence (DeepSeek-V3, arXiv:2412.19437, equations 17 to 20, without
    alpha), the z-loss that of each token (ST-MoE, arXiv:2202.08906, equation 5). Each sum, times its scale,
    is added to whatever loss the pass goes backward from.
    """

    def __init__(self, *, balance_scale: float = 0.0, z_scale: float = 0.0) -> None:
        self._balance_scale, self._z_scale = balance_scale, z_scale
        self._sums: dict[int, Tensor] = {}  # By layer: one that is recomputed counts once.

    def start(self, row_T: Tensor, length_T: Tensor, *, num_sequences: int, group: Group) -> None:
        """The pass is over these tokens: of which sequence, and how long that is; `group` has the others."""
        self._row_T, self._length_T, self._num_sequences = row_T, length_T, num_sequences
        self._group = group

    def add(self, weights_TK: Tensor, logits_TE: Tensor, scores_TE: Tensor, *, layer: int) -> Tensor:
        """Counts one router's losses; gives `weights_TK`, whose backward pass adds their gradient."""
        top_k, num_experts = weights_TK.shape[1], scores_TE.shape[1]
        share_TE = scores_TE / scores_TE.sum(-1, keepdim=True) / self._length_T[:, None]
        chosen_TE = torch.zeros_like(share_TE).scatter_(1, scores_TE.topk(top_k).indices, 1)
        chosen_TE = chosen_TE * (num_experts / top_k / self._length_T[:, None])
        empty_SE = share_TE.new_zeros(self._num_sequences, num_experts)
        chosen_SE, share_SE = (_with_rows(empty_SE, self._row_T, x) for x in (chosen_TE, share_TE))
        if self._group.size > 1:
            self._group.all_reduce(chosen_SE)
        balance, z = (chosen_SE * share_SE).sum(), logits_TE.to(share_TE.dtype).logsumexp(-1).square().sum()
        self._sums[layer] = torch.stack((balance, z)).detach()
        return _WithLoss.apply(weights_TK, self._balance_scale * balance + self._z_scale * z)

    def sums(self) -> Tensor:
        """Balance loss over sequences and layers, and z-loss over tokens and layers: this rank's part."""
        return torch.stack([x.double() for x in self._sums.values()]).sum(0) if self._sums else torch.zeros(2)


def _with_rows(x_SE: Tensor, row_T: Tensor, rows_TE: Tensor) -> Tensor:
    """Rows added to those of these numbers. (On CUDA index_add adds in any order: runs would not repeat.)"""
    if rows_TE.is_cuda:
        return x_SE.index_put((row_T,), rows_TE, accumulate=True)
    return x_SE.index_add(0, row_T, rows_TE)


class _WithLoss(torch.autograd.Function):
    """Identity of `x` that goes backward from `loss` as well (Megatron-LM's MoEAuxLossAutoScaler)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.ones_like(ctx.saved_tensors[0])


class Moe:
    """Each token's sum of its best experts' outputs, weighted by the router, and of the shared experts'.

    `shared` is those experts' MLP, if there are any. Every rank of an ep group must compute equally often.
    """

    def __init__(
        self, config: ModelConfig, weights: Mapping[str, Tensor], layer: int, groups: ParallelGroups,
        *, activation: Activation, shared: Callable[[Tensor], Tensor] | None,
    ) -> None:  # fmt: skip
        assert config.moe is not None
        self.moe, self.layer, self.tp, self.ep = config.moe, layer, groups.tp, groups.ep
        self.activation, self.shared = activation, shared
        self.router, self.shared_router = weights["router.weight"], weights.get("shared_router.weight")
        self.choice_bias = weights.get("router.e_score_correction_bias")
        num_experts = config.moe.num_experts
        self.experts = [even_split(num_experts, self.ep.size, i) for i in range(self.ep.size)]
        """Of every rank of the ep group: [first, last)."""
        first, stop = self.experts[self.ep.index]
        self.num_local = stop - first
        self.up = weights["expert_gate_up.weight" if config.gated else "expert_up.weight"]
        self.down = weights["expert_down.weight"]

    def __call__(self, x_TH: Tensor, losses: RouterLosses | None = None) -> Tensor:
        weights_TK, expert_TK = self._route(x_TH, losses)
        # The outputs that they multiply are parts of sums over tp.
        weights_TK = copy_to_group(weights_TK, self.tp).to(x_TH.dtype)
        order_R = expert_TK.flatten().argsort(stable=True)
        back_R = _inverse(order_R)
        rows_RH = _Take.apply(copy_to_group(x_TH, self.tp), order_R, back_R, expert_TK.shape[1])
        rows_RH = self._dispatch(rows_RH, expert_TK)
        y_TKH = _Take.apply(rows_RH, back_R, order_R, 1).unflatten(0, expert_TK.shape)
        mixed_TH = (widened(weights_TK)[:, None] @ widened(y_TKH))[:, 0].to(x_TH.dtype)
        y_TH = sum_over_group(mixed_TH, self.tp)
        if self.shared is None:
            return y_TH
        shared_TH = self.shared(x_TH)
        if self.shared_router is not None:
            shared_TH = _scores(x_TH, self.shared_router).sigmoid() * shared_TH
        return y_TH + shared_TH

    def _route(self, x_TH: Tensor, losses: RouterLosses | None) -> tuple[Tensor, Tensor]:
        """Each token's experts and their weights, in at least float32."""
        moe, wide = self.moe, torch.promote_types(x_TH.dtype, torch.float32)
        if moe.scores == "sigmoid":
            logits_TE = F.linear(x_TH.to(wide), self.router.to(wide))
            scores_TE = logits_TE.sigmoid()
        else:
            logits_TE = _scores(x_TH, self.router)
            scores_TE = logits_TE.softmax(-1, dtype=wide)
        bias_E = None if self.choice_bias is None else joined(self.choice_bias.detach())
        expert_TK = _choose(scores_TE.detach(), bias_E, moe)
        weights_TK = scores_TE.gather(1, expert_TK)
        if moe.normalize:
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
        if moe.scale != 1:
            weights_TK = weights_TK * moe.scale
        if losses is not None:
            weights_TK = losses.add(weights_TK, logits_TE, scores_TE, layer=self.layer)
        return weights_TK, expert_TK

    def _dispatch(self, rows_RH: Tensor, expert_TK: Tensor) -> Tensor:
        """Rows in order of their experts through those, wherever they are, and back."""
        counts_E = torch.bincount(expert_TK.flatten(), minlength=self.moe.num_experts)
        if self.ep.size == 1:
            return self._compute(rows_RH, counts_E)
        counts = self.ep.all_gather(counts_E).cpu()  # (ranks of the ep group, E)
        first, stop = self.experts[self.ep.index]
        sends = [int(counts[self.ep.index, slice(*span)].sum()) for span in self.experts]
        recvs = counts[:, first:stop].sum(1).tolist()
        rows_RH = exchange_rows(rows_RH, self.ep, sends, recvs)
        # They come by sender and, from each sender, by expert.
        expert_R = torch.arange(self.num_local).repeat(self.ep.size).repeat_interleave(
            counts[:, first:stop].flatten())
        order_R = expert_R.argsort(stable=True).to(rows_RH.device)
        back_R = _inverse(order_R)
        rows_RH = _Take.apply(rows_RH, order_R, back_R, 1)
        y_RH = self._compute(rows_RH, counts[:, first:stop].sum(0).to(rows_RH.device))
        return exchange_rows(_Take.apply(y_RH, back_R, order_R, 1), self.ep, recvs, sends)

    def _compute(self, rows_RH: Tensor, counts_L: Tensor) -> Tensor:
        """This rank's experts, each on its own rows: `counts_L` of them end to end."""
        ends_L = counts_L.cumsum(0).int()
        up_RF = grouped_linear(rows_RH, self.up.view(self.num_local, -1, rows_RH.shape[1]), ends_L)
        down_LHF = self.down.view(self.num_local, rows_RH.shape[1], -1)
        return grouped_linear(self.activation(up_RF), down_LHF, ends_L)


def _scores(x_TH: Tensor, weight_EH: Tensor) -> Tensor:
    """Return what a router makes of each token."""
    return F.linear(widened(x_TH), widened(weight_EH)).to(x_TH.dtype)


@torch.no_grad()
def _choose(scores_TE: Tensor, bias_E: Tensor | None, moe: MoeConfig) -> Tensor:
    """Each token's experts: expert_TK. With groups, out of those with the largest sums of two scores."""
    if bias_E is not None:
        scores_TE = scores_TE + bias_E
    if moe.num_groups > 1:
        grouped = scores_TE.unflatten(1, (moe.num_groups, -1))
        best = grouped.topk(2).values.sum(-1).topk(moe.num_groups_per_token).indices
        barred = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, False)
        scores_TE = grouped.masked_fill(barred[..., None], -torch.inf).flatten(1)
    return scores_TE.topk(moe.num_experts_per_token).indices


class _Take(torch.autograd.Function):
    """Reorders rows, of which each is there `copies` times: row i becomes row order[i] // copies of `x`.

    Indexing would do, but its backward pass is several times slower on CPU, and that of index_select adds
    copies up in any order on CUDA.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return x.index_select(0, order if copies == 1 else order // copies)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        grad = grad.index_select(0, ctx.saved_tensors[0])
        if ctx.copies > 1:
            grad = grad.view(len(grad) // ctx.copies, ctx.copies, grad.shape[1]).sum(1)
        return grad, None, None, None


def _inverse(order: Tensor) -> Tensor:
    """The permutation that undoes another."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
