"""Packed sequences: where each token stands, and how segments of a pass attend to a cache.

Shape suffixes: T tokens of all sequences end to end, N query heads, K key-value heads, D head dim.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from realhf.nn.attention import AttentionKind


class CachedSegment(Protocol):
    """Tokens of one pass that attend alike, and whose keys and values go into a cache."""

    @property
    def from_cache(self) -> bool:
        """Whether they attend to the cache's contents; else they attend to one another."""

    @property
    def longest(self) -> int:
        """Tokens that the longest of the sequences will have; 0: that was checked in an earlier pass."""

    @property
    def places(self) -> tuple[Tensor, Tensor]:
        """Each token's position, and the length that its sequence will have: position_T, length_T."""

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
