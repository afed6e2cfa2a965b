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

    With `from_cache`, the tokens attend to the cache, and `k_TKD` and `v_TKD` have the cache's format.
    Without it, the tokens attend to one another. `cached` are then the keys and values to store, if the
    cache's format is another one. If it also `expands`, the tokens attend to earlier tokens as well, whose
    keys and values `expand` computes from the cache.
    """

    compute: Callable[..., Tensor]
    store: Callable[[Tensor, Tensor], None] | None = None  # Writes keys and values to a cache.
    from_cache: bool = False
    tokens: slice | None = None  # Which tokens of the pass; None: all.
    expands: bool = False

    def __call__(
        self, kind: AttentionKind, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor,
        *, cached: tuple[Tensor, Tensor] | None = None, expand: Expand | None = None,
    ) -> Tensor:
        if self.store is not None:
            self.store(*(cached or (k_TKD, v_TKD)))
        options = {"expand": expand} if self.expands else {}
        return self.compute(q_TND, k_TKD, v_TKD, kind=kind, **options)


def attend_each(attends: Sequence[Attend], compute: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Call `compute(attend, *tensors)` on the tokens of each Attend, and return out_TND of all tokens."""
    if len(attends) == 1:
        return compute(attends[0], *tensors)
    slices = ((attend, [x[attend.tokens or slice(None)] for x in tensors]) for attend in attends)
    return torch.cat([compute(attend, *own_tensors) for attend, own_tensors in slices])


def packed_attention(
    q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, sequences: Sequences, kind: AttentionKind
) -> Tensor:
    """Return the causal grouped-query attention within each sequence, out_TND, by the device's backend."""
    shape = AttentionShape(kind, q_TND.shape[-1], v_TKD.shape[-1], q_TND.dtype)
    return packed_backend(q_TND.device, shape).packed(q_TND, k_TKD, v_TKD, sequences, kind)
