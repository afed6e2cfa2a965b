"""StepInputs: the numbers that the device needs for a step of a generation, besides weights and cache.

The host computes them as numpy arrays, and all those of a step go to the device in one copy (StepUpload).

Shape suffixes: B rows, or chunks of prompts; M pages of each; T tokens of chunks; S samples that get a token.
"""

from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

_A = TypeVar("_A")  # NDArray on the host, Tensor on the device


class RowPages(NamedTuple, Generic[_A]):
    """The new token of every row, and the pages to which it attends."""

    position_B: _A
    cache_position_B: _A
    lens_B: _A  # Cached tokens, the new one included.
    table_BM: _A  # Entries beyond a row's own pages are arbitrary.


class ChunkPages(NamedTuple, Generic[_A]):
    """The tokens of chunks of prompts, and the pages to which they attend."""

    position_T: _A
    length_T: _A  # Tokens of the whole prompt.
    cache_position_T: _A
    cu_q: _A  # The first token of each chunk, and the end.
    table_BM: _A
    lens_B: _A  # Cached tokens, those of the chunk included.


class StepInputs(NamedTuple):
    """The inputs of a step on the device."""

    row_pages: RowPages[Tensor] | None  # Only on the paged path.
    chunk_pages: ChunkPages[Tensor] | None  # Only on the paged path.
    sample_S: Tensor  # The samples that get a token; those of the rows come first.
    column_S: Tensor  # The column of that token in the buffer.
    draw_S: Tensor  # The random number in [0, 1) with which it is sampled.
    last_column_B: Tensor  # The column of each row's last token so far.
    prompt_T: Tensor  # The tokens of chunks.
    last_S: Tensor  # The index in the pass of the token that each sample continues, if there are chunks.


NO_INPUTS = StepInputs(None, None, *[torch.empty(0)] * 6)
"""The inputs of a step without rows and chunks."""
