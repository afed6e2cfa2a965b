"""Packed sequences: the positions of their tokens, and the interface of segments that attend to a cache.

Shape suffixes: T tokens of all sequences end to end, N query heads, K key-value heads, D head dim.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from realhf.nn.attention import AttentionKind


class CachedSegment(Protocol):
    """Tokens of one pass that attend in the same way, and whose keys and values go into a cache."""

    @property
    def from_cache(self) -> bool:
        """Whether the tokens attend to the cache's contents, rather than to one another."""

    @property
    def longest(self) -> int:
        """Final length of the longest sequence, in tokens; 0 if an earlier pass has checked it."""

    @property
    def places(self) -> tuple[Tensor, Tensor]:
        """Each token's position, and the final length of its sequence: position_T, length_T."""

    def attend(
        self, cache: Any, layer: int, kind: AttentionKind, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor,
        k_cached: Tensor, v_cached: Tensor,
    ) -> Tensor:  # fmt: skip
        """Write k_cached and v_cached into the cache, and return the attention's output out_TND."""


def token_places(seq_lens: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return, for every packed token: sequence index, position in the sequence, sequence length."""
    counts = torch.tensor(seq_lens, dtype=torch.long)
    row_T = torch.repeat_interleave(counts)
    position_T = torch.arange(len(row_T)) - (counts.cumsum(0) - counts)[row_T]
    return row_T.to(device), position_T.to(device), counts[row_T].to(device)
