"""Which tokens of packed sequences belong to responses. Imports no torch.

A response mask is 1 on the tokens that were sampled. A response begins at the first of these and goes on to
the end of its sequence. Inside it, the mask is 0 on tokens that were inserted
(`realhf.calls`). The suffix T of a tensor means one entry per packed token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from realhf.data.batch import Packed


def in_response(mask: Packed) -> Tensor:
    """Return which tokens are part of a response, inserted ones included."""
    sampled_T = mask.values != 0
    count_T = sampled_T.long().cumsum(0)
    before_T = count_T - sampled_T.long()
    lengths = count_T.new_tensor(mask.lengths)
    starts = (lengths.cumsum(0) - lengths)[lengths > 0]
    before_sequence_T = before_T[starts].repeat_interleave(lengths[lengths > 0], output_size=len(mask.values))
    return count_T > before_sequence_T


def response_lengths(mask: Packed) -> Tensor:
    """Return the number of tokens of each response, inserted ones included."""
    lengths = mask.values.new_tensor(mask.lengths).long()
    row_T = lengths.new_tensor(range(len(mask))).repeat_interleave(lengths, output_size=len(mask.values))
    return lengths.new_zeros(len(mask)).index_add(0, row_T, in_response(mask).long())
