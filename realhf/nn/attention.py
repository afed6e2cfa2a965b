"""Causal attention over packed sequences, by the fastest kernel that the device has.

Shape suffixes: T tokens of all sequences end to end, N query heads, K key-value heads, D head dim; of
sequences of equal length: S their number, L their length.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from realhf.nn.narrow import lacks_units, widened


@dataclass(frozen=True)
class AttentionKind:
    """What a layer's attention does besides being causal."""

    scale: float  # Of query times key.
    window: int | None = None  # A token sees so many, itself included.
    softcap: float | None = None  # c * tanh(x / c) of the scores.


@dataclass(frozen=True)
class Attend:
    """One layer's attention in one pass, or of some of its tokens: (kind, q_TND, k_TKD, v_TKD) -> out_TND.

    With `cached`, keys and values that the cache is to hold in place of these. Where the tokens attend to
    what is in the cache (`from_cache`), keys and values are given as it holds them.
    """

    layer: int  # Its number on this stage.
    compute: Callable[..., Tensor]
    from_cache: bool = False
    tokens: slice | None = None  # Which ones of the pass; None: all.

    def __call__(
        self, kind: AttentionKind, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor,
        *, cached: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        return self.compute(self.layer, kind, q_TND, k_TKD, v_TKD, *(cached or (k_TKD, v_TKD)))


def by_parts(
    attends: Sequence[Attend], compute: Callable[..., Tensor], *tensors: Tensor
) -> Tensor:
    """`compute` of each part of the tokens: an Attend, and its tokens of the tensors; out_TND of all."""
    if len(attends) == 1:
        return compute(attends[0], *tensors)
    parts = ((attend, [x[attend.tokens or slice(None)] for x in tensors]) for attend in attends)
    return torch.cat([compute(attend, *part) for attend, part in parts])


def packed_attention(
    q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, seq_lens: list[int], kind: AttentionKind
) -> Tensor:
    """Causal grouped-query attention inside each sequence: out_TND."""
    if not len(q_TND):  # A part of the graph all the same: ranks of an ep group go backward together.
        return q_TND[..., :1] * v_TKD.new_zeros(v_TKD.shape[-1]) + k_TKD.sum() + v_TKD.sum()
    if q_TND.is_cuda and q_TND.dtype in (torch.float16, torch.bfloat16):
        kernel = _varlen_kernel(kind)
        if kernel is not None:
            starts, longest = _cumulative(tuple(seq_lens), q_TND.device), max(seq_lens, default=0)
            dim = v_TKD.shape[-1]
            wanted = -(-max(dim, k_TKD.shape[-1]) // _DIM_STEP) * _DIM_STEP
            q, k, v = (
                x if x.shape[-1] == wanted else F.pad(x, (0, wanted - x.shape[-1]))
                for x in (q_TND, k_TKD, v_TKD))
            return kernel(q, k, v, starts, starts, longest, longest)[..., :dim]
    # One call per run of neighbours of equal length.
    runs = [(length, len(list(run))) for length, run in groupby(n for n in seq_lens if n)]
    plain = kind.softcap is None and (kind.window is None or kind.window >= max(seq_lens))
    plain = plain and v_TKD.shape[-1] == k_TKD.shape[-1]
    if plain and q_TND.device.type == "cpu" and torch.is_grad_enabled():
        return _Flash.apply(q_TND, k_TKD, v_TKD, runs, kind.scale)
    # (`split` is used because its backward is one `cat`.)
    sizes = [length * count for length, count in runs]
    outs = []
    for (length, count), *qkv in zip(runs, *(x.split(sizes) for x in (q_TND, k_TKD, v_TKD)), strict=True):
        q, k, v = ((x if plain else widened(x)).unflatten(0, (count, length)).transpose(1, 2) for x in qkv)
        outs.append(_equal_lengths(q, k, v, kind).to(q_TND.dtype).transpose(1, 2).flatten(0, 1))
    return torch.cat(outs)


_FEW = 4
"""Queries of a key-value head up to which torch's kernel on CPU is faster in bfloat16 when each is a head."""
_DIM_STEP = 8  # Of head dims that kernels on CUDA take, the same for queries, keys and values.
_BFLOAT16_PAYS = 1 << 15
"""Length times head dim from which torch's backward pass on CPU is faster in bfloat16 than in float32. (For
every length it compiles and keeps kernels of bfloat16: 6 ms and 5 MB.)"""


class _Flash(torch.autograd.Function):
    """torch's flash attention on CPU, run by run, with one output of all runs: autograd would keep each run's
    besides. It takes fewer heads of keys than of queries, and gives gradients so."""

    @staticmethod
    def forward(
        ctx: Any, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, runs: list[tuple[int, int]], scale: float
    ) -> Tensor:
        out_TND, lse = torch.empty_like(q_TND, memory_format=torch.contiguous_format), []
        compute = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        for out, *qkv in _by_runs((out_TND, q_TND, k_TKD, v_TKD), runs):
            values, lse_of_run = compute(*qkv, 0.0, True, scale=scale)
            out.copy_(values)
            lse.append(lse_of_run)
        ctx.save_for_backward(q_TND, k_TKD, v_TKD, out_TND, *lse)
        ctx.runs, ctx.scale = runs, scale
        return out_TND

    @staticmethod
    def backward(ctx: Any, grad_TND: Tensor) -> tuple[Tensor | None, ...]:
        q_TND, k_TKD, v_TKD, out_TND, *lse = ctx.saved_tensors
        compute = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        grads = [x.new_empty(x.shape) for x in (q_TND, k_TKD, v_TKD)]
        views = _by_runs((grad_TND, q_TND, k_TKD, v_TKD, out_TND, *grads), ctx.runs)
        for (*given, grad_q, grad_k, grad_v), lse_of_run in zip(views, lse, strict=True):
            is_short = grad_q.shape[2] * grad_q.shape[3] < _BFLOAT16_PAYS
            if lacks_units(grad_q) or grad_q.dtype == torch.bfloat16 and is_short:
                given = [x.float() for x in given]
            found = compute(*given, lse_of_run, 0.0, True, scale=ctx.scale)
            for place, grad in zip((grad_q, grad_k, grad_v), found, strict=True):
                place.copy_(grad)
        return *grads, None, None


def _by_runs(tensors: Sequence[Tensor], runs: list[tuple[int, int]]) -> Iterator[tuple[Tensor, ...]]:
    """Views of each run's part of the tensors: (sequences, heads, positions, dim) each."""
    start = 0
    for length, count in runs:
        stop = start + length * count
        yield tuple(x[start:stop].unflatten(0, (count, length)).transpose(1, 2) for x in tensors)
        start = stop


def _equal_lengths(q_SNLD: Tensor, k_SKLD: Tensor, v_SKLD: Tensor, kind: AttentionKind) -> Tensor:
    length = q_SNLD.shape[2]
    windowed = kind.window is not None and kind.window < length
    if kind.softcap is None and not windowed:
        # On CPU, `enable_gqa` beats expanded keys by 5 to 15 %.
        grouped = q_SNLD.shape[1] != k_SKLD.shape[1]
        return F.scaled_dot_product_attention(
            q_SNLD, k_SKLD, v_SKLD, is_causal=True, scale=kind.scale, enable_gqa=grouped)
    at = torch.arange(length, device=q_SNLD.device)
    behind = at[:, None] - at
    return masked_attention(
        q_SNLD, k_SKLD, v_SKLD, (behind >= 0) & (behind < (kind.window or length)), kind)


def masked_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, kind: AttentionKind) -> Tensor:
    """Grouped-query attention where `visible` is true; (sequences, heads, positions, dim) each."""
    if lacks_units(q):
        return masked_attention(q.float(), k.float(), v.float(), visible, kind).to(q.dtype)
    grouped = q.shape[1] != k.shape[1]
    if kind.softcap is None:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=visible, scale=kind.scale, enable_gqa=grouped)
    if grouped:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * kind.scale
    scores = (kind.softcap * torch.tanh(scores / kind.softcap)).masked_fill(~visible, -torch.inf)
    wide = torch.promote_types(q.dtype, torch.float32)
    return scores.softmax(-1, dtype=wide).to(q.dtype) @ v


def attention_with_lse(
    q: Tensor, k: Tensor, v: Tensor, kind: AttentionKind, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attention over all positions, `mask` added to the scores, and the log-sum-exp of these, without
    gradients; all as (sequences, heads, positions, dim), with as many heads of queries as of keys."""
    if q.device.type == "cpu" and kind.softcap is None:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        few = q.dtype == torch.bfloat16 and q.shape[2] <= _FEW and (mask is None or mask.shape[2] == 1)
        few = few and not lacks_units(q)
        alone = q.flatten(1, 2)[:, :, None] if few else q
        out, lse = flash(alone, k, v, attn_mask=mask, scale=kind.scale)
        return out.view(q.shape), lse.view(q.shape[:-1])
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(wide) @ k.to(wide).transpose(-1, -2) * kind.scale
    if kind.softcap is not None:
        scores = kind.softcap * torch.tanh(scores / kind.softcap)
    if mask is not None:
        scores = scores + mask
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp()
    return (weights @ v.to(wide)).to(v.dtype) if lacks_units(v) else weights.to(v.dtype) @ v, lse


@lru_cache(maxsize=16)
def _varlen_kernel(kind: AttentionKind) -> Callable[..., Tensor] | None:
    """flash-attn's kernel, if that optional package is installed, else torch's own, which has no softcap."""
    left = -1 if kind.window is None else kind.window - 1
    if find_spec("flash_attn"):
        flash = import_module("flash_attn").flash_attn_varlen_func

        def by_flash(*args: Any) -> Tensor:
            return flash(
                *args, causal=True, softmax_scale=kind.scale, window_size=(left, 0 if left >= 0 else -1),
                softcap=kind.softcap or 0.0)

        return by_flash
    if kind.softcap is not None:
        return None
    varlen = import_module("torch.nn.attention.varlen")  # here, as only CUDA needs it and it takes a second
    # torch 2.11 takes fewer heads of keys than of queries without being told.
    grouped = {"enable_gqa": True} if "enable_gqa" in signature(varlen.varlen_attn).parameters else {}

    def by_torch(*args: Any) -> Tensor:
        return varlen.varlen_attn(*args, scale=kind.scale, window_size=(left, 0), **grouped)

    return by_torch


@lru_cache(maxsize=8)
@torch.inference_mode(False)  # It may be kept for a backward pass later.
def _cumulative(seq_lens: tuple[int, ...], device: torch.device) -> Tensor:
    """Offsets of the sequences, kept so that the layers of one forward share one copy to the device."""
    return torch.tensor((0, *seq_lens)).cumsum(0).to(device, torch.int32)
