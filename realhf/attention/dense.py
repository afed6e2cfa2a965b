"""Attention by torch's own kernels for dense tensors: on CPU, and in float32 on any device.

Shape suffixes as in interface.py; for sequences of equal length: S their number, L their length.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from realhf.attention.interface import AttentionKind, Prefix, Sequences, nothing_attended, repeatable
from realhf.attention.reference import ReferenceAttention
from realhf.devices.half_precision import needs_float32, widened

_FEW_QUERIES = 4
"""Up to so many queries per head, torch's CPU kernel is faster in bfloat16 if each query is its own head."""
_MIN_BFLOAT16_NUMEL = 1 << 15
"""Length times head dim from which torch's backward pass on CPU is faster in bfloat16 than in float32: in
bfloat16 it compiles and keeps kernels for every length."""
_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class DenseAttention(ReferenceAttention):
    """Packed attention with one call of torch's kernel per run of consecutive sequences of equal length.

    `paged` is the reference's. Decoding on CPU does not use it: it reads shared blocks once (inference/).
    """

    name = "torch's dense kernels"

    def packed(
        self, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, at: Sequences, kind: AttentionKind
    ) -> Tensor:
        if not len(q_TND):
            return nothing_attended(q_TND, k_TKD, v_TKD)
        plain = kind.softcap is None and (kind.window is None or kind.window >= at.longest)
        plain = plain and v_TKD.shape[-1] == k_TKD.shape[-1]
        if at.prefixes or (plain and q_TND.device.type == "cpu" and torch.is_grad_enabled()):
            assert plain, f"{kind} has no kernel for prefixes"
            return _Flash.apply(q_TND, k_TKD, v_TKD, at, kind.scale)
        runs = _equal_runs(at)
        # `split` and no slices, because its backward pass is one `cat`.
        sizes = [length * count for length, count in runs]
        outs = []
        for (length, count), *qkv in zip(runs, *(x.split(sizes) for x in (q_TND, k_TKD, v_TKD)), strict=True):
            q, k, v = (
                (x if plain else widened(x)).unflatten(0, (count, length)).transpose(1, 2) for x in qkv)
            outs.append(_equal_lengths(q, k, v, kind).to(q_TND.dtype).transpose(1, 2).flatten(0, 1))
        return torch.cat(outs)


class _Flash(torch.autograd.Function):
    """torch's flash attention on CPU, run by run and prefix by prefix, with one output for all.

    Autograd alone would also keep the output of each run. Keys and their gradients may have fewer heads than
    queries. Attention to a prefix and to a sequence's own tokens are merged by their log-sum-exps. Given
    those of both together, the kernel's backward pass computes the gradients of either part.
    """

    @staticmethod
    def forward(
        ctx: Any, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, at: Sequences, scale: float
    ) -> Tensor:
        out_TND = torch.empty_like(q_TND, memory_format=torch.contiguous_format)
        runs = _equal_runs(at)
        lse = []
        for out, *qkv in _by_runs((out_TND, q_TND, k_TKD, v_TKD), runs):
            values, lse_of_run = _FLASH(*qkv, 0.0, True, scale=scale)
            out.copy_(values)
            lse.append(lse_of_run)
        if at.prefixes:
            lse_TN = torch.cat([x.transpose(1, 2).flatten(0, 1) for x in lse])
            for prefix in at.prefixes:
                q = q_TND[prefix.queries].transpose(0, 1)[None]
                out, lse_of_prefix = _FLASH(q, *_prefix_of((k_TKD, v_TKD), prefix), 0.0, False, scale=scale)
                _merge(
                    out_TND[prefix.queries], lse_TN[prefix.queries], out[0].transpose(0, 1),
                    lse_of_prefix[0].T)
            lse = [lse_TN]
        ctx.save_for_backward(q_TND, k_TKD, v_TKD, out_TND, *lse)
        ctx.settings = at, runs, scale
        return out_TND

    @staticmethod
    def backward(ctx: Any, grad_TND: Tensor) -> tuple[Tensor | None, ...]:
        q_TND, k_TKD, v_TKD, out_TND, *lse = ctx.saved_tensors
        at, runs, scale = ctx.settings
        grads = [x.new_empty(x.shape) for x in (q_TND, k_TKD, v_TKD)]
        if at.prefixes:
            (lse_TN,) = lse
            lse = [x[..., 0].contiguous() for (x,) in _by_runs((lse_TN[..., None],), runs)]
        views = _by_runs((grad_TND, q_TND, k_TKD, v_TKD, out_TND, *grads), runs)
        for (*inputs, grad_q, grad_k, grad_v), lse_of_run in zip(views, lse, strict=True):
            computed = _flash_backward(inputs, lse_of_run, is_causal=True, scale=scale)
            for target, grad in zip((grad_q, grad_k, grad_v), computed, strict=True):
                target.copy_(grad)
        for prefix in at.prefixes:
            grad, q, out = (x[prefix.queries].transpose(0, 1)[None] for x in (grad_TND, q_TND, out_TND))
            inputs = [grad, q, *_prefix_of((k_TKD, v_TKD), prefix), out]
            lse_1NQ = lse_TN[prefix.queries].T[None].contiguous()
            grad_q, *grad_kv = _flash_backward(inputs, lse_1NQ, is_causal=False, scale=scale)
            grads[0][prefix.queries] += grad_q[0].transpose(0, 1)
            for target, grad in zip(grads[1:], grad_kv, strict=True):
                sizes = [keys.stop - keys.start for keys in prefix.keys]
                for keys, part in zip(prefix.keys, grad[0].transpose(0, 1).split(sizes), strict=True):
                    target[keys] += part
        return *grads, None, None


def _equal_runs(at: Sequences) -> list[tuple[int, int]]:
    """Return the lengths of consecutive sequences of equal length, and how many these are."""
    return [(length, len(list(run))) for length, run in groupby(n for n in at.lens if n)]


def _prefix_of(tensors: Sequence[Tensor], prefix: Prefix) -> list[Tensor]:
    """Return the keys of a prefix, and its values, as (1, heads, positions, dim)."""
    return [
        (x[prefix.keys[0]] if len(prefix.keys) == 1 else torch.cat([x[keys] for keys in prefix.keys]))
        .transpose(0, 1)[None] for x in tensors]


def _merge(out_QND: Tensor, lse_QN: Tensor, more_QND: Tensor, more_QN: Tensor) -> None:
    """Add attention to further keys, with its log-sum-exp, in place to that of the same queries."""
    both_QN = torch.logaddexp(lse_QN, more_QN)
    share_QN1, more_QN1 = ((x - both_QN).exp_()[..., None] for x in (lse_QN, more_QN))
    if out_QND.dtype == both_QN.dtype:
        out_QND.mul_(share_QN1).addcmul_(more_QND, more_QN1)
    else:
        out_QND.copy_((out_QND * share_QN1).addcmul_(more_QND, more_QN1))
    lse_QN.copy_(both_QN)


def _flash_backward(
    inputs: Sequence[Tensor], lse: Tensor, *, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values. Inputs are the output's, these, and the output."""
    q = inputs[1]
    is_short = q.shape[2] * q.shape[3] < _MIN_BFLOAT16_NUMEL
    if needs_float32(q) or q.dtype == torch.bfloat16 and is_short:
        inputs = [x.float() for x in inputs]
    compute = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return compute(*inputs, lse, 0.0, is_causal, scale=scale)


def _by_runs(tensors: Sequence[Tensor], runs: list[tuple[int, int]]) -> Iterator[tuple[Tensor, ...]]:
    """Yield, for each run, views of its part of the tensors, each (sequences, heads, positions, dim)."""
    start = 0
    for length, count in runs:
        stop = start + length * count
        yield tuple(x[start:stop].unflatten(0, (count, length)).transpose(1, 2) for x in tensors)
        start = stop


def _equal_lengths(q_SNLD: Tensor, k_SKLD: Tensor, v_SKLD: Tensor, kind: AttentionKind) -> Tensor:
    length = q_SNLD.shape[2]
    windowed = kind.window is not None and kind.window < length
    if kind.softcap is None and not windowed:
        # On CPU, `enable_gqa` is faster than expanding the keys.
        grouped = q_SNLD.shape[1] != k_SKLD.shape[1]
        return repeatable(F.scaled_dot_product_attention(
            q_SNLD, k_SKLD, v_SKLD, is_causal=True, scale=kind.scale, enable_gqa=grouped))
    position = torch.arange(length, device=q_SNLD.device)
    distance = position[:, None] - position
    visible = (distance >= 0) & (distance < (kind.window or length))
    return masked_attention(q_SNLD, k_SKLD, v_SKLD, visible, kind)


def masked_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, kind: AttentionKind) -> Tensor:
    """Return grouped-query attention where `visible` is true; all are (sequences, heads, positions, dim)."""
    if needs_float32(q):
        return masked_attention(q.float(), k.float(), v.float(), visible, kind).to(q.dtype)
    grouped = q.shape[1] != k.shape[1]
    if kind.softcap is None:
        return repeatable(F.scaled_dot_product_attention(
            q, k, v, attn_mask=visible, scale=kind.scale, enable_gqa=grouped))
    if grouped:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * kind.scale
    scores = (kind.softcap * torch.tanh(scores / kind.softcap)).masked_fill(~visible, -torch.inf)
    wide = torch.promote_types(q.dtype, torch.float32)
    return scores.softmax(-1, dtype=wide).to(q.dtype) @ v


def attention_with_lse(
    q: Tensor, k: Tensor, v: Tensor, kind: AttentionKind, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return attention over all positions and the log-sum-exp of its scores; without gradients.

    `mask` is added to the scores. All tensors are (sequences, heads, positions, dim), with as many heads of
    queries as of keys.
    """
    if q.device.type == "cpu" and kind.softcap is None:
        few = q.shape[2] <= _FEW_QUERIES and (mask is None or mask.shape[2] == 1)
        few = few and q.dtype == torch.bfloat16 and not needs_float32(q)
        query_heads = q.flatten(1, 2)[:, :, None] if few else q
        out, lse = _FLASH(query_heads, k, v, attn_mask=mask, scale=kind.scale)
        return out.view(q.shape), lse.view(q.shape[:-1])
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(wide) @ k.to(wide).transpose(-1, -2) * kind.scale
    if kind.softcap is not None:
        scores = kind.softcap * torch.tanh(scores / kind.softcap)
    if mask is not None:
        scores = scores + mask
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp()
    return (weights @ v.to(wide)).to(v.dtype) if needs_float32(v) else weights.to(v.dtype) @ v, lse
