"""Log-probabilities and entropy of logits whose vocabulary is split over a tensor-parallel group.

Both work in float32 (float64 for float64 logits), send one message per peer forward and none backward, and
take the logits in slices that fit the processor's cache: the only other (T, V) tensor is the gradient.

Shape suffixes: T tokens, V this rank's part of the vocabulary, R ranks of the group.
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


@torch.no_grad()
def vocab_parallel_entropy(logits_TV: Tensor, *, group: Group, temperature: float = 1.0) -> Tensor:
    """Entropy in nats of softmax(logits / temperature): entropy_T without gradient, same on every rank."""
    parts = []
    for _, x in _slices(logits_TV, temperature):
        parts.append(torch.stack((x.logsumexp(1), torch.linalg.vecdot(x.softmax(1), x))))
    lse_RT, mean_RT = group.all_gather(torch.cat(parts, dim=1)).unbind(1)
    lse_T = lse_RT.logsumexp(0)
    return lse_T - (mean_RT * (lse_RT - lse_T).exp()).sum(0)


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, labels_T: Tensor, group: Group, temperature: float) -> Tensor:
        lse_T = torch.cat([x.logsumexp(1) for _, x in _slices(logits_TV, temperature)])
        here_T = (labels_T >= 0) & (labels_T < logits_TV.shape[1])
        at_T1 = torch.where(here_T, labels_T, 0)[:, None]
        label_T = logits_TV.gather(1, at_T1)[:, 0].to(lse_T.dtype).div_(temperature).masked_fill_(~here_T, 0)
        lse_RT, label_RT = group.all_gather(torch.stack((lse_T, label_T))).unbind(1)
        lse_T = lse_RT.logsumexp(0)
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


def _slices(logits_TV: Tensor, temperature: float) -> Iterator[tuple[slice, Tensor]]:
    """At least one slice of tokens, each with a fresh float32 (or float64) copy of logits / temperature."""
    numel = _SLICE_NUMEL * (256 if logits_TV.is_cuda else 1)
    step = max(1, numel // max(1, logits_TV.shape[1]))
    wide = torch.promote_types(logits_TV.dtype, torch.float32)
    for start in range(0, max(1, len(logits_TV)), step):
        at = slice(start, start + step)
        yield at, logits_TV[at].to(wide) / temperature
