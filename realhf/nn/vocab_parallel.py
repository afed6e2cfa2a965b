"""Log-probabilities and entropy from hidden states, without holding the logits of all tokens at once.

Logits are computed for one chunk of tokens at a time, in the dtype of the head's weight or in float32, and
evaluated in float32 (float64 for float64 logits). For the backward pass, the forward pass keeps each token's
log-sum-exp, and the logits of the first chunks (KEPT_CHUNKS); those of later chunks are computed again.
The backward pass turns logits into their gradient in place. Each rank of a tensor-parallel group has a part
of the vocabulary; the forward pass sends one message per peer, however many chunks there are.

Shape suffixes: T tokens, H hidden, V this rank's part of the vocabulary, R ranks of the group, K labels or
most probable tokens; t tokens of a chunk, s tokens of a slice of a chunk.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from realhf.devices import half_precision
from realhf.devices.chunk_sizes import KEPT_CHUNKS, chunk_numel, slice_numel
from realhf.distributed.group import Group, copy_to_group
from realhf.models.param_spec import row_blocks
from realhf.nn.fused import chains_of
from realhf.nn.linear import Weight, collects, linear


@dataclass(frozen=True)
class Head:
    """The output head, which computes this rank's part of the logits; `vocab_start` is its first token id."""

    weight_VH: Tensor
    vocab_start: int
    group: Group
    scale: float = 1.0
    softcap: float | None = None  # Logits x become c * tanh(x / c).
    float32: bool = False  # The products with a 16-bit weight are computed in float32.

    @property
    def chunk_tokens(self) -> int:
        """Number of tokens for which logits are computed at a time."""
        numel = chunk_numel(is_cuda=self.weight_VH.is_cuda)
        return max(1, numel // max(1, len(self.weight_VH)))

    def logits(self, hidden_TH: Tensor) -> Tensor:
        """Return logits_TV of all these tokens, in at least float32; without gradients if `float32`."""
        hidden_TH = copy_to_group(hidden_TH, self.group)
        multiply = half_precision.affine_float32 if self._is_widened else linear
        return self.to_logits(multiply(hidden_TH, self.weight_VH), temperature=1.0)

    def product(self, hidden_TH: Tensor) -> Tensor:
        """Return the product with the weight, which `to_logits` turns into logits; without gradients."""
        multiply = half_precision.affine_float32 if self._is_widened else half_precision.affine
        return multiply(hidden_TH, self.weight_VH)

    @property
    def _is_widened(self) -> bool:
        return self.float32 and self.weight_VH.itemsize < 4

    def to_logits(self, product_TV: Tensor, *, temperature: float) -> Tensor:
        """Return the logits, given the product with the weight; may return that same tensor."""
        x = product_TV.to(torch.promote_types(product_TV.dtype, torch.float32))
        if self.scale != 1:
            x = x * self.scale
        if self.softcap is not None:
            x = self.softcap * torch.tanh(x / self.softcap)
        return x if temperature == 1 else x / temperature

    def to_logits_backward(self, grad_TV: Tensor, x_TV: Tensor, *, temperature: float) -> Tensor:
        """Turn the gradient of logits `x_TV` in place into that of the product, and return it."""
        if temperature != 1:
            grad_TV.div_(temperature)
        if self.softcap is not None:  # 1 - tanh^2
            share_TV = x_TV * (temperature / self.softcap)
            grad_TV.sub_(share_TV.square_().mul_(grad_TV))
        return grad_TV if self.scale == 1 else grad_TV.mul_(self.scale)


def head_logprobs(
    hidden_TH: Tensor, labels: Tensor, head: Head, *, temperature: float = 1.0, entropy: bool = False,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the labels' log-probs and entropy_T, the same on every rank; entropy_T is None unless `entropy`.

    The labels are global token ids: one per token (labels_T), or several (labels_TK). Their log-probabilities
    are log softmax(logits / temperature), of the same shape; the entropy is that of the same distribution, in
    nats. Both have gradients. The gradient of an entropy that the loss does not use, or only detached, costs
    nothing.
    """
    hidden_TH = copy_to_group(hidden_TH, head.group)
    columns = 1 if labels.dim() == 1 else labels.shape[1]
    logprobs_TK, entropy_T = _LogProbs.apply(
        hidden_TH, head.weight_VH, labels.reshape(-1, columns) - head.vocab_start, head, temperature, entropy,
        chunk_tokens or head.chunk_tokens)
    return logprobs_TK.view(labels.shape), entropy_T if entropy else None


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_TH: Tensor, weight_VH: Tensor, labels_TK: Tensor, head: Head, temperature: float,
        entropy: bool, chunk: int,
    ) -> tuple[Tensor, Tensor | None]:
        here_TK = (labels_TK >= 0) & (labels_TK < len(weight_VH))
        at_TK = torch.where(here_TK, labels_TK, 0)
        statistics = []
        kept: list[Tensor] = []
        num_kept = KEPT_CHUNKS if any(ctx.needs_input_grad) else 0
        logits_tV = hidden_TH
        for tokens in row_blocks(len(hidden_TH), 1, chunk):
            logits_tV = hidden_TH  # Frees the previous chunk before the next product.
            logits_tV = head.product(hidden_TH[tokens])
            statistics += _statistics(logits_tV, at_TK[tokens], head, temperature, entropy)
            if len(kept) < num_kept:
                kept.append(logits_tV)
        lse_RT, label_RTK, *mean = _gathered(statistics, here_TK, head.group)
        lse_T = lse_RT.logsumexp(0)
        entropy_T = lse_T - (mean[0] * (lse_RT - lse_T).exp()).sum(0) if entropy else None
        # Not by save_for_backward, because the backward pass overwrites and frees them.
        ctx.kept = kept
        ctx.save_for_backward(hidden_TH, weight_VH, lse_T, entropy_T, at_TK, here_TK)
        ctx.settings = head, temperature, chunk
        ctx.set_materialize_grads(False)  # The gradient of an unused output is None.
        return label_RTK.sum(0) - lse_T[:, None], entropy_T

    @staticmethod
    def backward(
        ctx: Any, grad_TK: Tensor | None, grad_entropy_T: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden_TH, weight_VH, lse_T, entropy_T, at_TK, here_TK = ctx.saved_tensors
        head, temperature, chunk = ctx.settings
        grad_TK = torch.zeros_like(at_TK, dtype=lse_T.dtype) if grad_TK is None else grad_TK
        kept = ctx.kept[::-1]
        ctx.kept = []
        grad_hidden_TH = torch.empty_like(hidden_TH)
        summing = _summing(head.weight_VH) if ctx.needs_input_grad[1] else None
        for tokens in row_blocks(len(hidden_TH), 1, chunk):
            grad_tV = kept.pop() if kept else head.product(hidden_TH[tokens])
            labels = at_TK[tokens], here_TK[tokens]
            of_entropy = None
            if grad_entropy_T is not None:
                of_entropy = entropy_T[tokens], grad_entropy_T[tokens]
            _to_gradient(grad_tV, grad_TK[tokens], lse_T[tokens], labels, of_entropy, head, temperature)
            half_precision.product(grad_tV, weight_VH, out=grad_hidden_TH[tokens])
            if summing is not None:
                summing.add_product(grad_tV, hidden_TH[tokens])
            del grad_tV
        grad_weight_VH = None
        if summing is not None and summing.total is not None and summing is not head.weight_VH:
            grad_weight_VH = summing.total.to(weight_VH.dtype)
        return grad_hidden_TH, grad_weight_VH, None, None, None, None, None


def _summing(weight_VH: Tensor) -> Weight:
    """Return the weight if it sums up its gradients itself, else a copy of it that does so for autograd."""
    if collects(weight_VH):
        return weight_VH
    summing = Weight(weight_VH.detach(), requires_grad=False)
    wide = torch.promote_types(weight_VH.dtype, torch.float32)
    summing.total = torch.empty_like(weight_VH, dtype=wide)
    return summing


def _slices(logits_tV: Tensor) -> Iterator[slice]:
    numel = slice_numel(is_cuda=logits_tV.is_cuda)
    return row_blocks(len(logits_tV), logits_tV.shape[1], numel)


def _statistics(
    logits_tV: Tensor, at_tK: Tensor, head: Head, temperature: float, entropy: bool
) -> list[Tensor]:
    """Return, per slice, each token's log-sum-exp, its labels' logits and, if wanted, its mean logit."""
    if (chains := chains_of(logits_tV)) is not None:
        return [chains.logit_statistics(logits_tV, at_tK, head, temperature, entropy)]
    by_slice = []
    for rows in _slices(logits_tV):
        x_sV = head.to_logits(logits_tV[rows], temperature=temperature)
        lse_s1 = x_sV.logsumexp(1, keepdim=True)
        columns = [lse_s1, x_sV.gather(1, at_tK[rows])]
        if entropy:
            columns.append((x_sV - lse_s1).exp_().mul_(x_sV).sum(1, keepdim=True))
        by_slice.append(torch.cat(columns, dim=1))
    return by_slice


def _gathered(by_slice: list[Tensor], here_TK: Tensor, group: Group) -> list[Tensor]:
    """Return the statistics of all ranks: lse_RT, label_RTK with 0 for labels of other ranks, and perhaps
    mean_RT."""
    statistics = torch.cat(by_slice)
    stop = 1 + here_TK.shape[1]
    statistics[:, 1:stop].masked_fill_(~here_TK, 0)
    gathered = group.all_gather(statistics)
    return [gathered[..., 0], gathered[..., 1:stop], *gathered[..., stop:].unbind(-1)]


def _to_gradient(
    logits_tV: Tensor, grad_tK: Tensor, lse_t: Tensor, labels: tuple[Tensor, Tensor],
    of_entropy: tuple[Tensor, Tensor] | None, head: Head, temperature: float,
) -> None:
    """Turn logits in place into their gradient.

    With p = softmax, it is the sum over labels of the gradient of the log-prob times (one-hot - p) and, if
    `of_entropy` holds the entropy H and the gradient of H, that gradient times -p (log p + H).
    """
    if (chains := chains_of(logits_tV)) is not None:
        chains.logit_gradient(logits_tV, grad_tK, lse_t, labels, of_entropy, head, temperature)
        return
    at_tK, here_tK = labels
    grad_t = grad_tK.sum(1)
    for rows in _slices(logits_tV):
        x_sV = head.to_logits(logits_tV[rows], temperature=temperature)
        capped_sV = x_sV.clone() if head.softcap is not None else x_sV
        logp_sV = x_sV.sub_(lse_t[rows, None])
        if of_entropy is None:
            grad_sV = logp_sV.exp_().mul_(-grad_t[rows, None])
        else:
            entropy_s, grad_s = (x[rows] for x in of_entropy)
            factor_sV = (logp_sV + entropy_s[:, None]).mul_(grad_s[:, None]).add_(grad_t[rows, None])
            grad_sV = logp_sV.exp_().mul_(factor_sV.neg_())
        _add_columns(grad_sV, at_tK[rows], grad_tK[rows] * here_tK[rows])
        head.to_logits_backward(grad_sV, capped_sV, temperature=temperature)
        if grad_sV.data_ptr() != logits_tV[rows].data_ptr():
            logits_tV[rows] = grad_sV


def _add_columns(x_sV: Tensor, at_sK: Tensor, values_sK: Tensor) -> None:
    """Add values in place to these columns of every row."""
    if x_sV.is_cuda and at_sK.shape[1] > 1:  # A label may be there twice: scatter_add_ adds in any order.
        rows_s1 = torch.arange(len(x_sV), device=x_sV.device)[:, None]
        x_sV.index_put_((rows_s1, at_sK), values_sK, accumulate=True)
    else:
        x_sV.scatter_add_(1, at_sK, values_sK)


@torch.no_grad()
def head_top_logprobs(
    hidden_TH: Tensor, head: Head, k: int, *, temperature: float = 1.0, chunk_tokens: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return ids_TK and logprobs_TK of the `k` most probable tokens, the same on every rank.

    They are in falling order of log softmax(logits / temperature); of tokens with equal logits, those with
    lower ids come first. The vocabulary must have `k` tokens or more.
    """
    by_slice = []
    width = min(k, len(head.weight_VH))
    for tokens in row_blocks(len(hidden_TH), 1, chunk_tokens or head.chunk_tokens):
        logits_tV = head.product(hidden_TH[tokens])
        for rows in _slices(logits_tV):
            x_sV = head.to_logits(logits_tV[rows], temperature=temperature)
            lse_s1 = x_sV.logsumexp(1, keepdim=True)
            top_sK, ids_sK = top_tokens(x_sV, width)
            # Every rank sends k columns, in one message; float32 holds all token ids exactly.
            top_sK = F.pad(top_sK, (0, k - width), value=-torch.inf)
            ids_sK = F.pad(ids_sK + head.vocab_start, (0, k - width)).to(x_sV.dtype)
            by_slice.append(torch.cat([lse_s1, top_sK, ids_sK], dim=1))
        del logits_tV
    lse_RT1, top_RTK, ids_RTK = head.group.all_gather(torch.cat(by_slice)).split([1, k, k], dim=-1)
    top_TX = top_RTK.transpose(0, 1).flatten(1)
    # A stable sort keeps the order of ranks, which is that of token ids.
    order_TK = top_TX.sort(dim=1, descending=True, stable=True).indices[:, :k]
    ids_TK = ids_RTK.transpose(0, 1).flatten(1).gather(1, order_TK).long()
    return ids_TK, top_TX.gather(1, order_TK) - lse_RT1.logsumexp(0)


def top_tokens(x_TV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the `k` largest logits of each token in falling order, and their indices: top_TK, at_TK.

    Of equal logits those with lower indices count as larger. (torch.topk leaves open which of them it takes.)
    NaN counts as minus infinity.
    """
    x_TV = x_TV.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    least_T1 = x_TV.topk(k, dim=1, sorted=True).values[:, -1:]
    above_TV = x_TV > least_T1
    equal_TV = x_TV == least_T1
    wanted_T1 = k - above_TV.sum(1, keepdim=True)
    chosen_TV = above_TV | (equal_TV & (equal_TV.cumsum(1, dtype=torch.int32) <= wanted_T1))
    if x_TV.is_cuda:  # On a GPU `nonzero` would wait for the number of results, which is known.
        at_TK = chosen_TV.to(torch.uint8).topk(k, dim=1).indices.sort(dim=1).values
    else:
        at_TK = chosen_TV.nonzero()[:, 1].view(-1, k)
    top_TK, order_TK = x_TV.gather(1, at_TK).sort(dim=1, descending=True, stable=True)
    return top_TK, at_TK.gather(1, order_TK)
