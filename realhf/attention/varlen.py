"""Attention by torch's `varlen_attn`, a copy of FlashAttention-2 in torch itself."""

from collections.abc import Callable
from importlib import import_module
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from realhf.attention.flash_limits import PAGE_TOKENS, cumulative, cut, flash_refusal, padded, window_size
from realhf.attention.interface import AttentionKind, AttentionShape, Pages, Sequences, nothing_attended


class VarlenAttention:
    """torch's kernels: with gradients for packed sequences, and from torch 2.13 on over pages."""

    name = "torch's varlen_attn"
    page_tokens = PAGE_TOKENS
    in_graph = True

    def __init__(self, *, has_pages: bool) -> None:
        """`has_pages` says whether the installed torch's function takes a block table."""
        self._has_pages = has_pages

    def refuses(self, shape: AttentionShape, *, paged: bool) -> str | None:
        if shape.kind.softcap is not None:
            return "it has no soft cap"
        if paged and not self._has_pages:
            return f"that of torch {torch.__version__} has no block table"
        return flash_refusal(shape, paged=paged)

    def packed(
        self, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, at: Sequences, kind: AttentionKind
    ) -> Tensor:
        if not len(q_TND):
            return nothing_attended(q_TND, k_TKD, v_TKD)
        function, options = _function(kind)
        out_TND = function(
            *padded(q_TND, k_TKD, v_TKD), at.cu, at.cu, at.longest, at.longest,
            window_size=window_size(kind), **options)
        return cut(out_TND, v_TKD.shape[-1])

    @torch.no_grad()
    def paged(
        self, q_TND: Tensor, k_PLKD: Tensor, v_PLKD: Tensor, at: Pages, kind: AttentionKind,
        *, num_splits: int | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        function, options = _function(kind)
        # The keys are never split, since results over pages are then wrong (pytorch/pytorch#194167). The
        # window is bounded even for one query, since the log-sum-exps of folded groups come in another order.
        out_TND, lse_NT = function(
            q_TND, k_PLKD, v_PLKD, at.cu_q, cumulative(at.lens_k), at.max_q, at.max_k,
            window_size=window_size(kind), seqused_k=at.lens_k, block_table=at.table, num_splits=1,
            return_aux=_aux_request(), **options)
        return out_TND, lse_NT.T

    @torch.no_grad()
    def over_part(
        self, q_TND: Tensor, k_JND: Tensor, v_JND: Tensor, queries: Sequences, keys: Sequences,
        kind: AttentionKind, *, is_causal: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        function, options = _function(kind)
        out_TND, lse_NT = function(
            *padded(q_TND, k_JND, v_JND), queries.cu, keys.cu, queries.longest, keys.longest,
            window_size=(-1, 0 if is_causal else -1), return_aux=_aux_request(), **options)
        return cut(out_TND, v_JND.shape[-1]), lse_NT.T


def _aux_request() -> Any:
    """Return what makes `varlen_attn` return log-sum-exps, too."""
    return import_module("torch.nn.attention.varlen").AuxRequest(lse=True)


def has_pages() -> bool:
    """Return whether the installed torch's `varlen_attn` takes pages of a cache."""
    varlen_attn = import_module("torch.nn.attention.varlen").varlen_attn
    return {"block_table", "seqused_k"} <= signature(varlen_attn).parameters.keys()


def _function(kind: AttentionKind) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return `varlen_attn` and the options that do not depend on its tensors."""
    # Slow to import, and only CUDA needs it.
    varlen_attn = import_module("torch.nn.attention.varlen").varlen_attn
    # torch 2.11 has no such option: it accepts fewer heads of keys than of queries anyway.
    grouped = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
    return varlen_attn, {"scale": kind.scale, **grouped}
