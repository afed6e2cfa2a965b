"""FlashAttention-2: by the package flash-attn, if it is installed, and by torch (`varlen_attn`)."""

from collections.abc import Callable
from importlib import import_module
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from realhf.attention.interface import (
    AttentionKind,
    AttentionShape,
    Pages,
    Sequences,
    nothing_attended,
    repeatable,
)
from realhf.models import kv_blocks

PAGE_TOKENS = kv_blocks.FLASH_PAGE_TOKENS
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
    ) -> tuple[Tensor, Tensor]:
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
    ) -> tuple[Tensor, Tensor]:
        out_TND, lse_NT, _ = import_module("flash_attn").flash_attn_varlen_func(
            *padded(q_TND, k_JND, v_JND), cu_seqlens_q=queries.cu, cu_seqlens_k=keys.cu,
            max_seqlen_q=queries.longest, max_seqlen_k=keys.longest, causal=is_causal, return_attn_probs=True,
            **_options(kind, (-1, 0 if is_causal else -1)))
        return cut(out_TND, v_JND.shape[-1]), lse_NT.T


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
        return cut(repeatable(out_TND), v_TKD.shape[-1])

    @torch.no_grad()
    def paged(
        self, q_TND: Tensor, k_PLKD: Tensor, v_PLKD: Tensor, at: Pages, kind: AttentionKind,
        *, num_splits: int | None = None,
    ) -> tuple[Tensor, Tensor]:
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
    ) -> tuple[Tensor, Tensor]:
        function, options = _function(kind)
        out_TND, lse_NT = function(
            *padded(q_TND, k_JND, v_JND), queries.cu, keys.cu, queries.longest, keys.longest,
            window_size=(-1, 0 if is_causal else -1), return_aux=_aux_request(), **options)
        return cut(out_TND, v_JND.shape[-1]), lse_NT.T


def has_pages() -> bool:
    """Return whether the installed torch's `varlen_attn` takes pages of a cache."""
    varlen_attn = import_module("torch.nn.attention.varlen").varlen_attn
    return {"block_table", "seqused_k"} <= signature(varlen_attn).parameters.keys()


def flash_refusal(shape: AttentionShape, *, paged: bool) -> str | None:
    """Return why the kernels cannot compute this, in words; None if they can."""
    dtype = str(shape.dtype).removeprefix("torch.")
    return kv_blocks.flash_refusal(dim=shape.dim, value_dim=shape.value_dim, dtype=dtype, paged=paged)


def padded(*tensors: Tensor) -> list[Tensor]:
    """Return queries, keys and values with zeros behind them, so that all have one legal dim.

    The output then has as many dims, of which those behind the values' own are to be cut off.
    """
    dim = -(-max(x.shape[-1] for x in tensors) // kv_blocks.DIM_STEP) * kv_blocks.DIM_STEP
    return [x if x.shape[-1] == dim else F.pad(x, (0, dim - x.shape[-1])) for x in tensors]


def cut(out_TND: Tensor, value_dim: int) -> Tensor:
    """Return the first dims of an output."""
    return out_TND if out_TND.shape[-1] == value_dim else out_TND[..., :value_dim]


def cumulative(lens_B: Tensor) -> Tensor:
    """Return where each row starts, and where the last one ends, if rows lie end to end."""
    return F.pad(lens_B.cumsum(0, dtype=torch.int32), (1, 0))


def window_size(kind: AttentionKind, *, is_decoding: bool = False) -> tuple[int, int]:
    """Return how many tokens before and after its own a query sees; -1 for all.

    The one query of a decoding row is its last token and sees all keys. The kernel is told so, because it
    folds the queries of a group only where neither side is bounded.
    """
    if kind.window is None:
        return (-1, -1 if is_decoding else 0)
    return (kind.window - 1, 0)


def _options(kind: AttentionKind, window: tuple[int, int]) -> dict[str, Any]:
    return {"softmax_scale": kind.scale, "window_size": window, "softcap": kind.softcap or 0.0}


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def _aux_request() -> Any:
    """Return what makes `varlen_attn` return log-sum-exps, too."""
    return import_module("torch.nn.attention.varlen").AuxRequest(lse=True)


def _function(kind: AttentionKind) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return `varlen_attn` and the options that do not depend on its tensors."""
    # Slow to import, and only CUDA needs it.
    varlen_attn = import_module("torch.nn.attention.varlen").varlen_attn
    # torch 2.11 has no such option: it accepts fewer heads of keys than of queries anyway.
    grouped = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
    return varlen_attn, {"scale": kind.scale, **grouped}
