"""Log-probabilities and entropy of logits whose vocabulary is split over a tensor-parallel group.

Both work in float32 (float64 for float64 logits), send one message per peer forward and none backward, and
take the logits in slices that fit the processor's cache: the only other (T, V) tensor is the gradient.

Shape suffixes: T tokens, V this rank's part of the vocabulary.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from realhf.dist.group import Group

_SLICE_NUMEL = 1 << 18
"""Logits per slice on CPU: 1 MiB of float32. A GPU takes larger ones, as each costs kernel launches."""


def vocab_parallel_logprobs(
    logits_TV: Tensor, labels_T: Tensor, *, vocab_start: int, group: Group, temperature: float = 1.0
) -> Tensor:
    """log softmax(logits / temperature) at global token ids `labels_T`: logprobs_T, same on every rank."""
    return _LogProbs.apply(logits_TV, labels_T - vocab_start, group, temperature)


def vocab_parallel_entropy(logits_TV: Tensor, *, group: Group, temperature: float = 1.0) -> Tensor:
    """Entropy in nats of softmax(logits / temperature): entropy_T, differentiable, the same on every rank."""
    return _Entropy.apply(logits_TV, group, temperature)


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, labels_T: Tensor, group: Group, temperature: float) -> Tensor:
        top_T, sum_T, _ = _local_sums(logits_TV, temperature)
        here_T = (labels_T >= 0) & (labels_T < logits_TV.shape[1])
        at_T1 = torch.where(here_T, labels_T, 0)[:, None]
        label_T = logits_TV.gather(1, at_T1)[:, 0].to(sum_T.dtype).div_(temperature).masked_fill_(~here_T, 0)
        top_RT, sum_RT, label_RT = group.all_gather(torch.stack((top_T, sum_T, label_T))).unbind(1)
        lse_T = (top_RT + sum_RT.log()).logsumexp(0)
        ctx.save_for_backward(logits_TV, lse_T, at_T1, here_T)
        ctx.temperature = temperature
        return label_RT.sum(0) - lse_T

    @staticmethod
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor | None, ...]:
        logits_TV, lse_T, at_T1, here_T = ctx.saved_tensors
        grad_T = grad_T / ctx.temperature
        out_TV = torch.empty_like(logits_TV)
        for at, x in _slices(logits_TV, ctx.temperature):
            out_TV[at] = x.sub_(lse_T[at, None]).exp_().mul_(-grad_T[at, None])
        out_TV.scatter_add_(1, at_T1, (grad_T * here_T)[:, None].to(out_TV.dtype))
        return out_TV, None, None, None


class _Entropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, group: Group, temperature: float) -> Tensor:
        parts = torch.stack(_local_sums(logits_TV, temperature, weighted=True))
        top_RT, sum_RT, dot_RT = group.all_gather(parts).unbind(1)
        lse_T = (top_RT + sum_RT.log()).logsumexp(0)
        mean_T = (dot_RT * (top_RT - lse_T).exp()).sum(0)
        ctx.save_for_backward(logits_TV, lse_T, mean_T)
        ctx.temperature = temperature
        return lse_T - mean_T

    @staticmethod
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor | None, ...]:
        logits_TV, lse_T, mean_T = ctx.saved_tensors
        out_TV = torch.empty_like(logits_TV)
        for at, x in _slices(logits_TV, ctx.temperature):
            probs = (x - lse_T[at, None]).exp_()
            out_TV[at] = probs.mul_(x.sub_(mean_T[at, None])).mul_(-grad_T[at, None] / ctx.temperature)
        return out_TV, None, None


def _local_sums(
    logits_TV: Tensor, temperature: float, *, weighted: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Per token over the local vocabulary: max x, sum e and, when `weighted`, sum e*x.

    x = logits / temperature, e = exp(x - max x).
    """
    wide = torch.promote_types(logits_TV.dtype, torch.float32)
    top_T, sum_T, dot_T = logits_TV.new_zeros((3, len(logits_TV)), dtype=wide).unbind(0)
    for at, x in _slices(logits_TV, temperature):
        top_T[at] = x.amax(1)
        e = (x - top_T[at, None]).exp_()
        sum_T[at] = e.sum(1)
        if weighted:
            dot_T[at] = torch.linalg.vecdot(e, x)
    return top_T, sum_T, dot_T


def _slices(logits_TV: Tensor, temperature: float) -> Iterator[tuple[slice, Tensor]]:
    """Slices of tokens with a fresh float32 (or float64) copy of their logits / temperature."""
    numel = _SLICE_NUMEL * (256 if logits_TV.is_cuda else 1)
    step = max(1, numel // max(1, logits_TV.shape[1]))
    wide = torch.promote_types(logits_TV.dtype, torch.float32)
    for start in range(0, len(logits_TV), step):
        at = slice(start, start + step)
        yield at, logits_TV[at].to(wide) / temperature
