"""Mixture of experts: routed experts in place of an MLP, split over expert- and tensor-parallel ranks.

Experts compute with `grouped_linear`, in which each group of rows has its own weight.

Shape suffixes: T tokens of all sequences end to end, A tokens of all ranks of an ep group, S sequences, H
hidden, E all experts, L this rank's experts, F this rank's part of an expert's width, K experts per token,
R rows (pairs of a token and one of its experts), G ranks of an ep group; I and O input and output dims of
an expert, N = L O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from realhf.attention.choose import grouped_refusal
from realhf.devices import half_precision
from realhf.devices.half_precision import joined, widened
from realhf.devices.pinned import Download
from realhf.distributed.group import Group, copy_to_group, exchange_rows, sum_over_group
from realhf.distributed.world import ParallelGroups
from realhf.layout import even_split
from realhf.models.model_config import ModelConfig, MoeConfig
from realhf.nn.fused import TritonChains, chains_of
from realhf.nn.linear import Int8Weight, add_rows, collects, converted_like, linear
from realhf.nn.linear import wide as wide_weight
from realhf.nn.mlp import Activation

_FEW_TOKENS = 1 << 13
"""Our own kernel sorts the rows of so many tokens; it reads all of them once for each expert."""


class RouterLosses:
    """The load-balancing loss and the z-loss of all routers in one pass over packed sequences.

    The balance loss is computed per sequence (DeepSeek-V3, arXiv:2412.19437, equations 17 to 20, without
    alpha), the z-loss per token (ST-MoE, arXiv:2202.08906, equation 5). The backward pass of the loss also
    computes the gradients of their sums, times the scales.
    """

    def __init__(self, *, balance_scale: float = 0.0, z_scale: float = 0.0) -> None:
        self._balance_scale = balance_scale
        self._z_scale = z_scale
        self._sums: dict[int, Tensor] = {}  # By layer, so that a recomputed layer counts once.

    def start(self, row_T: Tensor, length_T: Tensor, *, num_sequences: int, group: Group) -> None:
        """Begin a pass over tokens with these sequence indices and sequence lengths.

        The ranks of `group` share out the tokens of these sequences.
        """
        self._row_T = row_T
        self._length_T = length_T
        self._num_sequences = num_sequences
        self._group = group

    def add(self, weights_TK: Tensor, logits_TE: Tensor, scores_TE: Tensor, *, layer: int) -> Tensor:
        """Add one router's losses; return `weights_TK`, whose backward pass adds the losses' gradients."""
        top_k = weights_TK.shape[1]
        num_experts = scores_TE.shape[1]
        share_TE = scores_TE / scores_TE.sum(-1, keepdim=True) / self._length_T[:, None]
        chosen_TE = torch.zeros_like(share_TE).scatter_(1, scores_TE.topk(top_k).indices, 1)
        chosen_TE = chosen_TE * (num_experts / top_k / self._length_T[:, None])
        chosen_SE, share_SE = (
            add_rows(x.new_zeros(self._num_sequences, num_experts), self._row_T, x)
            for x in (chosen_TE, share_TE))
        if self._group.size > 1:
            self._group.all_reduce(chosen_SE)
        balance = (chosen_SE * share_SE).sum()
        z = logits_TE.to(share_TE.dtype).logsumexp(-1).square().sum()
        self._sums[layer] = torch.stack((balance, z)).detach()
        return _WithLoss.apply(weights_TK, self._balance_scale * balance + self._z_scale * z)

    def sums(self) -> Tensor:
        """Return this rank's part of the balance loss and of the z-loss, each summed over all layers."""
        return torch.stack([x.double() for x in self._sums.values()]).sum(0) if self._sums else torch.zeros(2)


class _WithLoss(torch.autograd.Function):
    """The identity of `x`, which also goes backward from `loss` (Megatron-LM's MoEAuxLossAutoScaler)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.ones_like(ctx.saved_tensors[0])


class Moe:
    """A layer whose router chooses experts for each token and weights the sum of their outputs.

    `shared` is the MLP of the shared experts, if there are any, which is added for all tokens. All ranks of
    an ep group must call the layer equally often, because they exchange tokens.
    """

    def __init__(
        self, config: ModelConfig, weights: Mapping[str, Tensor], layer: int, groups: ParallelGroups,
        *, activation: Activation, shared: Callable[[Tensor], Tensor] | None,
    ) -> None:
        assert config.moe is not None
        self.moe = config.moe
        self.layer = layer
        self.tp = groups.tp
        self.ep = groups.ep
        self.activation = activation
        self.shared = shared
        self.router = weights["router.weight"]
        self.shared_router = weights.get("shared_router.weight")
        self.choice_bias = weights.get("router.e_score_correction_bias")
        num_experts = config.moe.num_experts
        self.experts = [even_split(num_experts, self.ep.size, i) for i in range(self.ep.size)]
        """The experts [first, stop) of every rank of the ep group."""
        first, stop = self.experts[self.ep.index]
        self.num_local = stop - first
        self.up = weights["expert_gate_up.weight" if config.gated else "expert_up.weight"]
        self.down = weights["expert_down.weight"]
        self.gathered_tokens: int | None = None
        """See `gathering`."""

    def __call__(self, x_TH: Tensor, losses: RouterLosses | None = None) -> Tensor:
        gathers = self.gathered_tokens is not None and self.ep.size > 1
        mixed_TH = self._gathered(x_TH) if gathers else self._dispatched(x_TH, losses)
        y_TH = sum_over_group(mixed_TH, self.tp)
        if self.shared is None:
            return y_TH
        shared_TH = self.shared(x_TH)
        if self.shared_router is not None:
            shared_TH = linear(x_TH, self.shared_router).sigmoid() * shared_TH
        return y_TH + shared_TH

    def _dispatched(self, x_TH: Tensor, losses: RouterLosses | None) -> Tensor:
        """Send tokens to their experts' ranks; return the weighted sums of the outputs, partial over tp."""
        weights_TK, expert_TK = self._route(x_TH, losses)
        chains = self._chains(x_TH, losses)
        if chains is not None and self.ep.size == 1:
            token_R, place_R, ends_E = chains.group_rows(expert_TK, self.moe.num_experts)
            y_RH = self._compute(x_TH.index_select(0, token_R), RowGroups(ends_E))
            return chains.mix(y_RH, weights_TK.to(x_TH.dtype), place_R)
        # The weights multiply outputs that are partial sums over tp.
        weights_TK = copy_to_group(weights_TK, self.tp).to(x_TH.dtype)
        expert_R, order_R = expert_TK.flatten().sort(stable=True)
        back_R = _inverse(order_R)
        rows_RH = _Take.apply(copy_to_group(x_TH, self.tp), order_R, back_R, expert_TK.shape[1])
        rows_RH = self._dispatch(rows_RH, expert_R)
        y_TKH = _Take.apply(rows_RH, back_R, order_R, 1).unflatten(0, expert_TK.shape)
        return _mixed(weights_TK, y_TKH)

    def _gathered(self, x_TH: Tensor) -> Tensor:
        """Return what `_dispatched` returns, but gather the tokens of all ranks and compute own experts on
        all.

        There are no gradients. All sizes are known beforehand, so that the host need not wait for the GPU.
        """
        assert self.gathered_tokens is not None and not x_TH.requires_grad
        padding = self.gathered_tokens - len(x_TH)
        x_AH = self.ep.all_gather(F.pad(x_TH, (0, 0, 0, padding))).flatten(0, 1)
        weights_AK, expert_AK = self._route(x_AH, None)
        first, stop = self.experts[self.ep.index]
        is_mine_AK = (expert_AK >= first) & (expert_AK < stop)
        # The rows of other ranks' experts come last. They are not computed, so their values have no meaning.
        local_AK = torch.where(is_mine_AK, expert_AK - first, self.num_local)
        chains = self._chains(x_AH, None)
        if chains is not None:
            token_R, place_R, ends_L = chains.group_rows(local_AK, self.num_local)
            y_RH = self._compute(x_AH.index_select(0, token_R), RowGroups(ends_L))
            weights_AK = weights_AK.to(x_TH.dtype).masked_fill(~is_mine_AK, 0)
            return self._scattered(chains.mix(y_RH, weights_AK, place_R))[: len(x_TH)]
        expert_R, order_R = local_AK.flatten().sort(stable=True)
        rows_RH = x_AH.index_select(0, order_R // expert_AK.shape[1])
        y_RH = self._compute(rows_RH, RowGroups(_ends(expert_R, self.num_local)))
        y_AKH = y_RH.index_select(0, _inverse(order_R)).unflatten(0, expert_AK.shape)
        mixed_AH = _mixed(weights_AK.to(x_TH.dtype), y_AKH.masked_fill(~is_mine_AK[..., None], 0))
        return self._scattered(mixed_AH)[: len(x_TH)]

    def _scattered(self, mixed_AH: Tensor) -> Tensor:
        """Return this rank's part of the sums over the ranks of the ep group."""
        return self.ep.reduce_scatter(mixed_AH.unflatten(0, (self.ep.size, -1)).contiguous())

    @property
    def has_kernels(self) -> bool:
        """Whether grouped kernels compute the experts: then the host need not know how many rows each has."""
        up, down = (converted_like(weight) for weight in (self.up, self.down))
        up_LFH = up.view(self.num_local, -1, self.down.shape[0] // self.num_local)
        down_LHF = down.view(self.num_local, up_LFH.shape[2], -1)
        return takes_kernel(up_LFH) and takes_kernel(down_LHF)

    def _route(self, x_TH: Tensor, losses: RouterLosses | None) -> tuple[Tensor, Tensor]:
        """Return weights_TK, with gradients in at least float32, and expert_TK: each token's experts."""
        moe = self.moe
        chains = self._chains(x_TH, losses)
        if chains is not None and routes_by_kernel(moe):
            if moe.scores == "sigmoid" and x_TH.itemsize == 2:
                logits_TE = half_precision.affine_float32(x_TH, self.router)
            else:
                logits_TE = linear(x_TH, self.router)
            bias = None if self.choice_bias is None else self.choice_bias.detach()
            return chains.route(logits_TE, moe, bias, x_TH.dtype)
        wide = torch.promote_types(x_TH.dtype, torch.float32)
        if moe.scores == "sigmoid":
            logits_TE = F.linear(x_TH.to(wide), wide_weight(self.router))
            scores_TE = logits_TE.sigmoid()
        else:
            logits_TE = linear(x_TH, self.router)
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

    def _chains(self, x_TH: Tensor, losses: RouterLosses | None) -> TritonChains | None:
        """Return our own kernels if they compute around the experts: without gradients, of few tokens."""
        if torch.is_grad_enabled() or losses is not None or len(x_TH) > _FEW_TOKENS:
            return None
        return chains_of(x_TH)

    def _dispatch(self, rows_RH: Tensor, expert_R: Tensor) -> Tensor:
        """Return the experts' outputs for rows sorted by expert. The rows go to the experts' ranks and back.

        On a GPU the host waits once, for the counts of rows, if there are other ranks.
        """
        ends_E = _ends(expert_R, self.moe.num_experts)
        if self.ep.size == 1:
            return self._compute(rows_RH, RowGroups(ends_E))
        counts_GE = self.ep.all_gather(ends_E.diff(prepend=ends_E.new_zeros(1)))
        counts = counts_GE.cpu()
        first, stop = self.experts[self.ep.index]
        sends = [int(counts[self.ep.index, slice(*span)].sum()) for span in self.experts]
        recvs = counts[:, first:stop].sum(1).tolist()
        rows_RH = exchange_rows(rows_RH, self.ep, sends, recvs)
        # Rows arrive sorted by sender and, from each sender, by expert.
        expert_R = torch.arange(self.num_local, device=rows_RH.device).repeat(self.ep.size)
        expert_R = expert_R.repeat_interleave(counts_GE[:, first:stop].flatten(), output_size=len(rows_RH))
        expert_R, order_R = expert_R.sort(stable=True)
        back_R = _inverse(order_R)
        rows_RH = _Take.apply(rows_RH, order_R, back_R, 1)
        groups = RowGroups(_ends(expert_R, self.num_local), counts[:, first:stop].sum(0).tolist())
        y_RH = self._compute(rows_RH, groups)
        return exchange_rows(_Take.apply(y_RH, back_R, order_R, 1), self.ep, recvs, sends)

    def _compute(self, rows_RH: Tensor, groups: RowGroups) -> Tensor:
        """Return the outputs of this rank's experts, each of which has a group of rows."""
        up_RF = grouped_linear(rows_RH, self.up, groups)
        return grouped_linear(self.activation(up_RF), self.down, groups)


class RowGroups:
    """Consecutive groups of rows: where they end (ends_L, int32, on the rows' device) and, on the host, how
    many rows each has. Without gradients there may be rows after the last group, which are not computed."""

    def __init__(self, ends_L: Tensor, counts: Sequence[int] | None = None) -> None:
        """Without `counts`, they are computed when they are first asked for, which waits for a GPU."""
        self.ends_L = ends_L
        self._counts = counts
        self._ends: Download | None = None

    def download(self) -> None:
        """Begin to copy the ends to the host, so that it need not wait when it asks for `counts` later."""
        if self._counts is None and self._ends is None:
            self._ends = Download(self.ends_L)

    @cached_property
    def counts(self) -> list[int]:
        if self._counts is not None:
            return list(self._counts)
        if self._ends is not None:
            counts: list[int] = np.diff(self._ends.wait(), prepend=0).tolist()
            return counts
        return self.ends_L.diff(prepend=self.ends_L.new_zeros(1)).tolist()


def routes_by_kernel(moe: MoeConfig) -> bool:
    """Return whether our own kernel chooses a token's experts."""
    sizes = (moe.num_groups, moe.num_experts // moe.num_groups)
    return moe.num_groups == 1 or all(size & (size - 1) == 0 for size in sizes)


def _mixed(weights_TK: Tensor, y_TKH: Tensor) -> Tensor:
    """Return the weighted sum of each token's outputs."""
    return (widened(weights_TK)[:, None] @ widened(y_TKH))[:, 0].to(y_TKH.dtype)


def _ends(expert_R: Tensor, num_experts: int) -> Tensor:
    """Return where the rows of each expert end (int32), given the sorted experts of all rows."""
    experts_E = torch.arange(num_experts, device=expert_R.device)
    return torch.searchsorted(expert_R, experts_E, right=True, out_int32=True)


@torch.no_grad()
def _choose(scores_TE: Tensor, bias_E: Tensor | None, moe: MoeConfig) -> Tensor:
    """Return each token's experts: expert_TK, from the groups whose two best scores have the largest sums."""
    if bias_E is not None:
        scores_TE = scores_TE + bias_E
    if moe.num_groups > 1:
        grouped = scores_TE.unflatten(1, (moe.num_groups, -1))
        best = grouped.topk(2).values.sum(-1).topk(moe.num_groups_per_token).indices
        barred = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, False)
        scores_TE = grouped.masked_fill(barred[..., None], -torch.inf).flatten(1)
    return scores_TE.topk(moe.num_experts_per_token).indices


@contextmanager
def gathering(layers: Iterable[object], num_tokens: int) -> Iterator[None]:
    """Inside this context, layers with experts on several ranks gather all ranks' tokens, without waiting.

    This is for few tokens without gradients, as in decoding. All ranks of an ep group give the same
    `num_tokens`, and none of them passes more tokens to a layer.
    """
    experts = [layer for layer in layers if isinstance(layer, Moe)]
    for layer in experts:
        layer.gathered_tokens = num_tokens
    try:
        yield
    finally:
        for layer in experts:
            layer.gathered_tokens = None


class _Take(torch.autograd.Function):
    """A reordering in which each row of `x` appears `copies` times: row i is row order[i] // copies of `x`.

    The backward pass of indexing is slow on CPU; that of index_select adds copies up in any order on CUDA.
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
    """Return the permutation that undoes `order`."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def grouped_linear(x_RI: Tensor, weight_NI: Tensor, groups: RowGroups) -> Tensor:
    """Return y_RO: the rows of each group times the transpose of its weight, which is O rows of `weight_NI`.

    Uses torch's grouped kernel, which is faster, where it takes the operands, as in bfloat16 on a GPU. Else
    computes one product per group, for which the host must know how many rows each group has.
    """
    if isinstance(weight_NI, Int8Weight) and x_RI.is_cuda:  # The host does not know the numbers of rows.
        return grouped_linear(x_RI, weight_NI.dequantised(), groups)
    if isinstance(weight_NI, Int8Weight):
        return _by_group(x_RI, weight_NI, groups.counts)
    weight_LOI = weight_NI.view(len(groups.ends_L), -1, x_RI.shape[1])
    by_kernel = _kernel_takes(x_RI) and takes_kernel(weight_LOI)
    if by_kernel and not (torch.is_grad_enabled() and collects(weight_NI)):
        return _by_kernel(x_RI, weight_LOI, groups)
    if by_kernel:
        groups.download()
    return _Grouped.apply(x_RI, weight_NI, groups, by_kernel)


def _by_kernel(x_RI: Tensor, weight_LOI: Tensor, groups: RowGroups) -> Tensor:
    if not len(x_RI):  # A rank's experts may get no row. A product of nothing has gradients all the same.
        return x_RI @ weight_LOI[0].T
    x_RI, weight_LOI = (x if x.data_ptr() % 16 == 0 else x.clone() for x in (x_RI, weight_LOI))
    return F.grouped_mm(x_RI, weight_LOI.transpose(1, 2), offs=groups.ends_L)


def _by_group(x_RI: Tensor, weight: Int8Weight, counts: Sequence[int]) -> Tensor:
    num_outputs = len(weight) // len(counts)
    y_RO = x_RI.new_empty(len(x_RI), num_outputs)
    parts = zip(x_RI[: sum(counts)].split(counts), y_RO[: sum(counts)].split(counts), strict=True)
    for number, (x, y) in enumerate(parts):
        if len(x):
            y.copy_(weight.product(x, slice(number * num_outputs, (number + 1) * num_outputs)))
    return y_RO


def takes_kernel(weight_LOI: Tensor) -> bool:
    """Return whether torch's grouped kernel takes the weights."""
    aligned = weight_LOI.shape[1] * weight_LOI.element_size() % 16 == 0  # For the rows of y's gradient.
    return aligned and _kernel_takes(weight_LOI)


def _kernel_takes(x: Tensor) -> bool:
    """Return whether torch's grouped kernel takes an operand, whose base and rows need 16-byte alignment.

    On CUDA, `grouped_linear` copies an operand whose base is not aligned, as the host would have to wait for
    the other way. Only a weight that lies behind a parameter of odd size can be such an operand; no shipped
    model has one (tests/models/test_shipped_models.py). On CUDA the kernel is used in bfloat16 only, because
    with other dtypes torch waits for the ends of the groups.
    """
    is_legal = grouped_refusal("cuda" if x.is_cuda else "cpu", x.dtype) is None
    has_aligned_rows = x.shape[-1] * x.element_size() % 16 == 0
    has_base = x.is_cuda or x.data_ptr() % 16 == 0
    return is_legal and has_aligned_rows and has_base and not half_precision.needs_float32(x)


class _Grouped(torch.autograd.Function):
    """A product for each group.

    Autograd would make a gradient of full size for every slice, and the kernel rounds the gradient of a
    weight to 16 bits. So that gradient is computed by group. On a GPU the host has learned in the meantime
    how many rows each group has.
    """

    @staticmethod
    def forward(ctx: Any, x_RI: Tensor, weight_NI: Tensor, groups: RowGroups, by_kernel: bool) -> Tensor:
        ctx.save_for_backward(x_RI)
        ctx.settings = weight_NI, groups, by_kernel
        weight_LOI = weight_NI.view(len(groups.ends_L), -1, x_RI.shape[1])
        if by_kernel:
            return _by_kernel(x_RI, weight_LOI, groups)
        y_RO = x_RI.new_empty(len(x_RI), weight_LOI.shape[1])
        counts = groups.counts
        num_rows = sum(counts)
        pairs = zip(x_RI[:num_rows].split(counts), weight_LOI, y_RO[:num_rows].split(counts), strict=True)
        for x, weight, y in pairs:
            half_precision.product(x, weight.T, out=y)
        return y_RO

    @staticmethod
    def backward(ctx: Any, grad_RO: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (x_RI,) = ctx.saved_tensors
        weight_NI, groups, by_kernel = ctx.settings
        weight_LOI = weight_NI.view(len(groups.ends_L), -1, x_RI.shape[1])
        grad_x_RI = grad_weight_NI = None
        if ctx.needs_input_grad[0] and by_kernel:
            grad_x_RI = _by_kernel(grad_RO.contiguous(), weight_LOI.transpose(1, 2), groups)
        elif ctx.needs_input_grad[0]:
            counts = groups.counts
            grad_x_RI = torch.empty_like(x_RI)
            parts = zip(grad_RO.split(counts), weight_LOI, grad_x_RI.split(counts), strict=True)
            for grad, weight, grad_x in parts:
                half_precision.product(grad, weight, out=grad_x)
        if collects(weight_NI):
            weight_NI.add_products(grad_RO, x_RI, groups.counts)
        elif ctx.needs_input_grad[1]:
            grad_weight_NI = torch.zeros_like(weight_NI)
            parts = zip(
                grad_RO.split(groups.counts), x_RI.split(groups.counts), grad_weight_NI.view_as(weight_LOI),
                strict=True)
            for grad, x, grad_weight in parts:
                half_precision.product(grad.T, x, out=grad_weight)
        return grad_x_RI, grad_weight_NI, None, None
