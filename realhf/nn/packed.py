"""Packed sequences: the positions of their tokens, and the interface of segments that attend to a cache.

Shape suffixes: T tokens of all sequences end to end, N query heads, K key-value heads, D head dim.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from realhf.attention.interface import AttentionKind
from realhf.devices.pinned import upload


class Segment(ABC):
    """Tokens of one pass that attend in the same way, and whose keys and values go into a cache.

    It has, for each token, the position, the final length of its sequence, and the cache position: block *
    block_size + offset in the block.
    """

    from_cache = True
    """Whether the tokens attend to the cache's contents, rather than to one another."""
    expands = False
    """Whether tokens that attend to one another also attend to earlier ones (see Attend.expands)."""

    def __init__(
        self, position_T: Tensor, length_T: Tensor, cache_positions_T: Tensor, *, longest: int = 0
    ) -> None:
        """`longest` is the final length of the longest sequence; 0 if an earlier pass has checked it."""
        self.position_T = position_T
        self.length_T = length_T
        self.cache_positions_T = cache_positions_T
        self.longest = longest

    @abstractmethod
    def attend(
        self, cache: Any, layer: int, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, *, kind: AttentionKind
    ) -> Tensor:
        """Return the attention's output out_TND; the cache already has the keys and values of the tokens."""


def token_positions(seq_lens: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return, for every packed token: sequence index, position in the sequence, sequence length."""
    counts = np.array(seq_lens, np.int64)
    row_T = np.repeat(np.arange(len(counts)), counts)
    position_T = np.arange(len(row_T)) - (counts.cumsum() - counts)[row_T]
    numbers_3T = upload(np.stack((row_T, position_T, counts[row_T])), device)
    return numbers_3T[0], numbers_3T[1], numbers_3T[2]
