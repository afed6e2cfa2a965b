"""Packed attention with soft caps by torch's compiled `flex_attention`, where flash-attn is missing.

Shape suffixes as in interface.py; I blocks of queries, which are as many as blocks of keys.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from realhf.attention.interface import AttentionKind, AttentionShape, Sequences, nothing_attended

_BLOCK = 128  # Queries, and keys, of a block, which the kernel skips or computes as a whole.


class FlexAttention:
    """One compiled kernel over all packed tokens, which skips blocks that no query sees.

    The number of tokens is rounded up to whole blocks, and compiled as a variable.
    """

    name = "torch's flex_attention"

    def __init__(self, *, compiles: bool = True) -> None:
        self._compiles = compiles  # Without a compiler it computes the formula, for tests on CPU.

    def refuses(self, shape: AttentionShape, *, paged: bool) -> str | None:
        if paged:
            return "it is not used for pages"
        if max(shape.dim, shape.value_dim) > 256:
            return f"its heads have at most 256 dims, not {max(shape.dim, shape.value_dim)}"
        return None

    def packed(
        self, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, at: Sequences, kind: AttentionKind
    ) -> Tensor:
        num_tokens = len(q_TND)
        if not num_tokens:
            return nothing_attended(q_TND, k_TKD, v_TKD)
        behind = -num_tokens % _BLOCK
        q, k, v = (
            F.pad(x, (0, 0, 0, 0, 0, behind)).transpose(0, 1)[None] for x in (q_TND, k_TKD, v_TKD))
        if kind.window not in at.derived:
            at.derived[kind.window] = _block_mask(_first_seen(at, num_tokens + behind, kind.window))
        out_1NTD = _function(self._compiles)(
            q, k, v, score_mod=None if kind.softcap is None else _capped(kind.softcap),
            block_mask=at.derived[kind.window], scale=kind.scale,
            enable_gqa=q_TND.shape[1] != k_TKD.shape[1])
        return out_1NTD[0].transpose(0, 1)[:num_tokens]

@cache
def _function(compiles: bool) -> Callable[..., Any]:
    # Slow to import, and only CUDA needs it.
    function = import_module("torch.nn.attention.flex_attention").flex_attention
    return torch.compile(function, dynamic=True) if compiles else function


@cache
def _capped(softcap: float) -> Callable[..., Tensor]:
    return lambda score, *_: softcap * torch.tanh(score / softcap)


def _first_seen(at: Sequences, num_tokens: int, window: int | None) -> Tensor:
    """Return the first token that each token sees. Those behind the last sequence see one another."""
    position_T = torch.arange(num_tokens, dtype=torch.int32, device=at.cu.device)
    first_T = at.cu[torch.searchsorted(at.cu, position_T, right=True) - 1]
    return first_T if window is None else torch.maximum(first_T, position_T - window + 1)


def _block_mask(first_T: Tensor) -> Any:
    """Return the blocks of keys that each block of queries sees, made on the device without a wait.

    Tokens see a range that ends with themselves, whose start never decreases. So do blocks.
    """
    first_I = first_T[::_BLOCK]  # The first query of a block sees farthest back.
    index_I = torch.arange(len(first_I), dtype=torch.int32, device=first_T.device)
    seen_I = first_I // _BLOCK
    whole_I = torch.minimum(-(-first_T[_BLOCK - 1 :: _BLOCK] // _BLOCK), index_I)
    # Blocks in [whole, index) are seen by all queries; those in [seen, whole), and `index`, are masked.
    num_before_I = whole_I - seen_I
    order_II = index_I[None, :]
    partly_II = torch.where(order_II < num_before_I[:, None], seen_I[:, None] + order_II, index_I[:, None])
    wholly_II = torch.minimum(whole_I[:, None] + order_II, index_I[:, None])

    def visible(_: Tensor, __: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key >= first_T[query])

    block_mask = import_module("torch.nn.attention.flex_attention").BlockMask
    return block_mask.from_kv_blocks(
        *(x[None, None].contiguous() for x in (num_before_I + 1, partly_II, index_I - whole_I, wholly_II)),
        BLOCK_SIZE=_BLOCK, mask_mod=visible)
