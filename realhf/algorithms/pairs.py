"""Parts of the losses of preference pairs. A pair is the chosen and the rejected sample of one prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from realhf.data.dataset import IS_CHOSEN

if TYPE_CHECKING:
    from torch import Tensor

    from realhf.data.batch import Batch

PAIR = 2
"""Samples of a pair; their ids are consecutive."""


def pair_indices(batch: Batch) -> tuple[list[int], list[int]]:
    """Return the indices of the chosen and of the rejected samples, in the same order of pairs.

    A sample whose partner a filter has dropped is left out.
    """
    chosen: dict[int, int] = {}
    rejected: dict[int, int] = {}
    for i, (sample_id, is_chosen) in enumerate(zip(batch.ids, batch[IS_CHOSEN], strict=True)):
        (chosen if is_chosen else rejected)[sample_id // PAIR] = i
    both = [pair for pair in chosen if pair in rejected]
    return [chosen[pair] for pair in both], [rejected[pair] for pair in both]


def num_pairs(batch: Batch) -> int:
    return len(pair_indices(batch)[0])


def split_pairs(values_S: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the values of chosen and of rejected samples, from one value for each sample."""
    chosen, rejected = (values_S.new_tensor(indices).long() for indices in pair_indices(batch))
    return values_S[chosen], values_S[rejected]


def cross_entropy(logit: Tensor, label: Tensor | float) -> Tensor:
    """Return -label log sigmoid(logit) - (1 - label) log sigmoid(-logit), which cannot overflow.

    Its gradient is also right at 0, where log-ratios to a reference of equal weights begin.
    """
    zero = logit.new_zeros(())
    return label * (-logit).logaddexp(zero) + (1 - label) * logit.logaddexp(zero)
