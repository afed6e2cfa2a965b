"""Log-probabilities and entropy from hidden states, without ever holding all logits.

Logits are made for a chunk of tokens at a time, in the dtype of the head's weight, and looked at in float32
(float64 of float64 logits). Of what is more than one chunk, only each token's log-sum-exp is kept, and the
backward pass makes the logits again; it turns them in place into their gradient. Ranks of a tensor-parallel
group, each with a part of the vocabulary, send one message per peer forward, however many chunks there are.

Shape suffixes: T tokens, H hidden, V this rank's part of the vocabulary, R ranks of the group; t tokens of a
chunk, s those of a slice of it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from realhf.dist.autograd import copy_to_group
from realhf.dist.group import Group
from realhf.nn import narrow
from realhf.nn.grad_accumulation import Weight, collects
from realhf.nn.linear import linear

_CHUNK_NUMEL = 1 << 24
"""Logits that exist at a time; see also planner/memory.py."""
_CUDA_CHUNKS = 8
"""As many times more on a GPU, where products of few tokens are slow."""
_SLICE_NUMEL = 1 << 18
"""Logits per slice on CPU: 1 MiB of float32, which fits its cache. On CUDA each costs kernel launches."""
_CUDA_SLICES = 256


@dataclass(frozen=True)
class Head:
    """What makes this rank's part of the logits; `vocab_start` is its first token id."""

    weight_VH: Tensor
    vocab_start: int
    group: Group
    scale: float = 1.0
    softcap: float | None = None  # c * tanh(x / c)

    @property
    def chunk_tokens(self) -> int:
        """For how many tokens logits are made at a time."""
        numel = _CHUNK_NUMEL * (_CUDA_CHUNKS if self.weight_VH.is_cuda else 1)
        return max(1, numel // max(1, len(self.weight_VH)))

    def logits(self, hidden_TH: Tensor) -> Tensor:
        """All logits of these tokens: logits_TV, in at least float32."""
        logits_TV = linear(copy_to_group(hidden_TH, self.group), self.weight_VH)
        return self.finished(logits_TV, temperature=1.0)

    def finished(self, logits_TV: Tensor, *, temperature: float) -> Tensor:
        """The product with the weight, as logits; it may be the same tensor."""
        x = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
        if self.scale != 1:
            x = x * self.scale
        if self.softcap is not None:
            x = self.softcap * torch.tanh(x / self.softcap)
        return x if temperature == 1 else x / temperature

    def unfinished(self, grad_TV: Tensor, x_TV: Tensor, *, temperature: float) -> Tensor:
        """In place, from the gradient of `x`, which `finished` gave, that of what it was given."""
        if temperature != 1:
            grad_TV.div_(temperature)
        if self.softcap is not None:  # 1 - tanh^2
            share_TV = x_TV * (temperature / self.softcap)
            grad_TV.sub_(share_TV.square_().mul_(grad_TV))
        return grad_TV if self.scale == 1 else grad_TV.mul_(self.scale)


def head_logprobs(
    hidden_TH: Tensor, labels_T: Tensor, head: Head, *, temperature: float = 1.0, entropy: bool = False,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return log softmax(logits / temperature) at global token ids `labels_T`, and if wanted the entropy in
    nats of that distribution: logprobs_T and entropy_T, the same on every rank.

    Both have gradients. A loss that does not use the entropy, or only detached, does not pay for its own.
    """
    labels_T, chunk = labels_T - head.vocab_start, chunk_tokens or head.chunk_tokens
    hidden_TH = copy_to_group(hidden_TH, head.group)
    logprobs_T, entropy_T = _LogProbs.apply(
        hidden_TH, head.weight_VH, labels_T, head, temperature, entropy, chunk)
    return logprobs_T, entropy_T if entropy else None


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_TH: Tensor, weight_VH: Tensor, labels_T: Tensor, head: Head, temperature: float,
        entropy: bool, chunk: int,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        here_T = (labels_T >= 0) & (labels_T < len(weight_VH))
        at_T1 = torch.where(here_T, labels_T, 0)[:, None]
        parts, logits_tV = [], hidden_TH
        for tokens in _steps(len(hidden_TH), chunk):
            logits_tV = hidden_TH  # The chunk before goes first.
            logits_tV = narrow.linear(hidden_TH[tokens], weight_VH)
            parts += _statistics(logits_tV, at_T1[tokens], head, temperature, entropy)
        found = torch.cat(parts, dim=1)
        found[1].masked_fill_(~here_T, 0)
        lse_RT, label_RT, *mean = head.group.all_gather(found).unbind(1)
        lse_T = lse_RT.logsumexp(0)
        entropy_T = lse_T - (mean[0] * (lse_RT - lse_T).exp()).sum(0) if entropy else None
        # (Not by save_for_backward: the backward pass changes them, and lets them go.)
        ctx.logits_TV = logits_tV if any(ctx.needs_input_grad) and len(hidden_TH) <= chunk else None
        ctx.save_for_backward(hidden_TH, weight_VH, lse_T, entropy_T, at_T1, here_T)
        ctx.settings = head, temperature, chunk
        ctx.set_materialize_grads(False)  # An output without a use has None for its gradient.
        return label_RT.sum(0) - lse_T, entropy_T

    @staticmethod
    def backward(
        ctx: Any, grad_T: Tensor | None, grad_entropy_T: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden_TH, weight_VH, lse_T, entropy_T, at_T1, here_T = ctx.saved_tensors
        head, temperature, chunk = ctx.settings
        grad_T = torch.zeros_like(lse_T) if grad_T is None else grad_T
        kept_TV, ctx.logits_TV = ctx.logits_TV, None
        grad_hidden_TH, sums = torch.empty_like(hidden_TH), _WeightGradient(head.weight_VH)
        for tokens in _steps(len(hidden_TH), chunk):
            grad_tV = narrow.linear(hidden_TH[tokens], weight_VH) if kept_TV is None else kept_TV
            labels, of_entropy = (at_T1[tokens], here_T[tokens]), None
            if grad_entropy_T is not None:
                of_entropy = entropy_T[tokens], grad_entropy_T[tokens]
            _to_gradient(grad_tV, grad_T[tokens], lse_T[tokens], labels, of_entropy, head, temperature)
            narrow.product(grad_tV, weight_VH, out=grad_hidden_TH[tokens])
            if ctx.needs_input_grad[1]:
                sums.add(grad_tV, hidden_TH[tokens])
            del grad_tV
        return grad_hidden_TH, sums.result, None, None, None, None, None


def _steps(num_tokens: int, step: int) -> Iterator[slice]:
    """At least one."""
    for start in range(0, max(1, num_tokens), step):
        yield slice(start, start + step)


def _slices(logits_tV: Tensor) -> Iterator[slice]:
    numel = _SLICE_NUMEL * (_CUDA_SLICES if logits_tV.is_cuda else 1)
    return _steps(len(logits_tV), max(1, numel // max(1, logits_tV.shape[1])))


def _statistics(
    logits_tV: Tensor, at_t1: Tensor, head: Head, temperature: float, entropy: bool
) -> list[Tensor]:
    """By slices: log-sum-exp, the label's logit and, for the entropy, the mean logit of every token."""
    parts = []
    for at in _slices(logits_tV):
        x_sV = head.finished(logits_tV[at], temperature=temperature)
        lse_s1 = x_sV.logsumexp(1, keepdim=True)
        found = [lse_s1[:, 0], x_sV.gather(1, at_t1[at])[:, 0]]
        if entropy:
            found.append((x_sV - lse_s1).exp_().mul_(x_sV).sum(1))
        parts.append(torch.stack(found))
    return parts


def _to_gradient(
    logits_tV: Tensor, grad_t: Tensor, lse_t: Tensor, labels: tuple[Tensor, Tensor],
    of_entropy: tuple[Tensor, Tensor] | None, head: Head, temperature: float,
) -> None:  # fmt: skip
    """Turn logits, in place, into their gradient.

    With p = softmax: that of the log-prob times (one-hot - p), and with `of_entropy` (the entropy H and its
    gradient) that of H times -p (log p + H).
    """
    at_t1, here_t = labels
    for at in _slices(logits_tV):
        x_sV = head.finished(logits_tV[at], temperature=temperature)
        capped_sV = x_sV.clone() if head.softcap is not None else x_sV
        logp_sV = x_sV.sub_(lse_t[at, None])
        if of_entropy is None:
            grad_sV = logp_sV.exp_().mul_(-grad_t[at, None])
        else:
            entropy_s, grad_s = (x[at] for x in of_entropy)
            factor_sV = (logp_sV + entropy_s[:, None]).mul_(grad_s[:, None]).add_(grad_t[at, None])
            grad_sV = logp_sV.exp_().mul_(factor_sV.neg_())
        grad_sV.scatter_add_(1, at_t1[at], (grad_t[at] * here_t[at])[:, None])
        head.unfinished(grad_sV, capped_sV, temperature=temperature)
        if grad_sV.data_ptr() != logits_tV[at].data_ptr():
            logits_tV[at] = grad_sV


class _WeightGradient:
    """The sum over chunks of a weight's gradient: in the weight, if it collects its gradients, else here, in
    at least float32."""

    def __init__(self, weight_VH: Tensor) -> None:
        self._weight, self._sum = weight_VH, torch.zeros(0)
        self._is_used = False

    def add(self, grad_tV: Tensor, hidden_tH: Tensor) -> None:
        if collects(self._weight):
            assert isinstance(self._weight, Weight)
            self._weight.add_product(grad_tV, hidden_tH)
            return
        if not self._is_used:
            wide = torch.promote_types(self._weight.dtype, torch.float32)
            self._sum, self._is_used = torch.zeros_like(self._weight, dtype=wide), True
        self._sum.add_(narrow.widened(grad_tV).T @ narrow.widened(hidden_tH))

    @property
    def result(self) -> Tensor | None:
        """What autograd is to be given."""
        return self._sum.to(self._weight.dtype) if self._is_used else None
