"""The demands of FlashAttention-2 on its arguments, in flash-attn as in torch's copy of it."""

import torch
import torch.nn.functional as F
from torch import Tensor

from realhf.attention import page_sizes
from realhf.attention.interface import AttentionKind, AttentionShape

PAGE_TOKENS = page_sizes.FLASH_PAGE_TOKENS


def flash_refusal(shape: AttentionShape, *, paged: bool) -> str | None:
    """Return why the kernels cannot compute this, in words; None if they can."""
    dtype = str(shape.dtype).removeprefix("torch.")
    return page_sizes.flash_refusal(dim=shape.dim, value_dim=shape.value_dim, dtype=dtype, paged=paged)


def padded(*tensors: Tensor) -> list[Tensor]:
    """Return queries, keys and values with zeros behind them, so that all have one legal dim.

    The output then has as many dims, of which those behind the values' own are to be cut off.
    """
    dim = -(-max(x.shape[-1] for x in tensors) // page_sizes.DIM_STEP) * page_sizes.DIM_STEP
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
