"""The calls of attention by a model's layers: over the tokens of a pass, or over a cache.

Shape suffixes: T tokens of all sequences end to end, N query heads, K key-value heads, D head dim.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from realhf.attention.choose import packed_backend
from realhf.attention.interface import AttentionKind, AttentionShape, Sequences

Expand = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Returns the keys and values of tokens, k_JND and v_JND, from what a cache holds of them."""


@dataclass(frozen=True)
class Attend:
    """The attention of one layer over all or some tokens of a pass: (kind, q_TND, k_TKD, v_TKD) -> out_TND.

    With `from_cache`, the tokens attend to the cache's contents, and the keys and values have the cache's
    format. Else `cached` holds the keys and values to store in the cache, if they differ from `k_TKD` and
    `v_TKD`; and if it `expands`, the tokens attend to earlier ones as well, whose keys and values `expand`
    computes from what the cache holds.
    """

    compute: Callable[..., Tensor]
    store: Callable[[Tensor, Tensor], None] | None = None  # Writes keys and values to a cache.
    from_cache: bool = False
    tokens: slice | None = None  # Position of its tokens in the pass; None: all.
    expands: bool = False

    def __call__(
        self, kind: AttentionKind, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor,
        *, cached: tuple[Tensor, Tensor] | None = None, expand: Expand | None = None,
    ) -> Tensor:  # fmt: skip
        if self.store is not None:
            self.store(*(cached or (k_TKD, v_TKD)))
        options = {"expand": expand} if self.expands else {}
        return self.compute(q_TND, k_TKD, v_TKD, kind=kind, **options)


def attend_in_parts(attends: Sequence[Attend], compute: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Call `compute(attend, *tensors)` on the tokens of each Attend, and return out_TND of all tokens."""
    if len(attends) == 1:
        return compute(attends[0], *tensors)
    parts = ((attend, [x[attend.tokens or slice(None)] for x in tensors]) for attend in attends)
    return torch.cat([compute(attend, *part) for attend, part in parts])


def packed_attention(
    q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, at: Sequences, kind: AttentionKind
) -> Tensor:
    """Return the causal grouped-query attention within each sequence, out_TND, by the device's backend."""
    shape = AttentionShape(kind, q_TND.shape[-1], v_TKD.shape[-1], q_TND.dtype)
    return packed_backend(q_TND.device, shape).packed(q_TND, k_TKD, v_TKD, at, kind)
