"""Attention by the package flash-attn (FlashAttention-2), if it is installed."""

from importlib import import_module
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from realhf.attention.flash_limits import PAGE_TOKENS, cumulative, cut, flash_refusal, padded, window_size
from realhf.attention.interface import AttentionKind, AttentionShape, Pages, Sequences, nothing_attended

OLDEST = (2, 7)
"""Version of flash-attn from which it has all that is called here."""


class FlashAttention:
    """flash-attn's kernels for packed sequences, for pieces of prompts over pages, and for decoding."""

    name = "flash-attn"
    page_tokens = PAGE_TOKENS
    in_graph = True

    def __init__(self, version: tuple[int, int]) -> None:
        """`version` is that of the installed package."""
        self._version = version

    def refuses(self, shape: AttentionShape, *, paged: bool) -> str | None:
        if self._version < OLDEST:
            return f"version {_dotted(self._version)} is older than {_dotted(OLDEST)}"
        return flash_refusal(shape, paged=paged)

    def packed(
        self, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, at: Sequences, kind: AttentionKind
    ) -> Tensor:
        if not len(q_TND):
            return nothing_attended(q_TND, k_TKD, v_TKD)
        out_TND = import_module("flash_attn").flash_attn_varlen_func(
            *padded(q_TND, k_TKD, v_TKD), cu_seqlens_q=at.cu, cu_seqlens_k=at.cu, max_seqlen_q=at.longest,
            max_seqlen_k=at.longest, causal=True,
            deterministic=torch.are_deterministic_algorithms_enabled(), **_options(kind, window_size(kind)))
        return cut(out_TND, v_TKD.shape[-1])

    @torch.no_grad()
    def paged(
        self, q_TND: Tensor, k_PLKD: Tensor, v_PLKD: Tensor, at: Pages, kind: AttentionKind,
        *, num_splits: int | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        flash_attn = import_module("flash_attn")
        if at.max_q == 1:
            out_T1ND, lse_TN1 = flash_attn.flash_attn_with_kvcache(
                q_TND[:, None], k_PLKD, v_PLKD, cache_seqlens=at.lens_k, block_table=at.table,
                num_splits=num_splits or 0, return_softmax_lse=True,
                **_options(kind, window_size(kind, is_decoding=True)))
            return out_T1ND[:, 0], lse_TN1[..., 0]
        function = flash_attn.flash_attn_varlen_func
        # Versions that can split the keys of several queries compute wrong results then.
        splits = {"num_splits": 1} if "num_splits" in signature(function).parameters else {}
        out_TND, lse_NT, _ = function(
            q_TND, k_PLKD, v_PLKD, cu_seqlens_q=at.cu_q, cu_seqlens_k=cumulative(at.lens_k),
            max_seqlen_q=at.max_q, max_seqlen_k=at.max_k, causal=True, block_table=at.table,
            return_attn_probs=True, **_options(kind, window_size(kind)), **splits)
        return out_TND, lse_NT.T

    @torch.no_grad()
    def over_part(
        self, q_TND: Tensor, k_JND: Tensor, v_JND: Tensor, queries: Sequences, keys: Sequences,
        kind: AttentionKind, *, is_causal: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        out_TND, lse_NT, _ = import_module("flash_attn").flash_attn_varlen_func(
            *padded(q_TND, k_JND, v_JND), cu_seqlens_q=queries.cu, cu_seqlens_k=keys.cu,
            max_seqlen_q=queries.longest, max_seqlen_k=keys.longest, causal=is_causal, return_attn_probs=True,
            **_options(kind, (-1, 0 if is_causal else -1)))
        return cut(out_TND, v_JND.shape[-1]), lse_NT.T


def _options(kind: AttentionKind, window: tuple[int, int]) -> dict[str, Any]:
    return {"softmax_scale": kind.scale, "window_size": window, "softcap": kind.softcap or 0.0}


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
