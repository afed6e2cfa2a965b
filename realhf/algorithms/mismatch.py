"""By how much the log-probs of the generator and of the trainer differ on the tokens that were generated.

The generator computes them token by token over a cache, the trainer over whole sequences, perhaps in other
layouts, kernels and shapes. With d = log p_train - log p_generated the metrics are

- `mismatch/kl`: the mean of exp(d) - 1 - d, an estimate of KL(generator || trainer) (Schulman's k3),
- `mismatch/max`: the largest |d|,
- `mismatch/ess`: the effective sample share of the importance weights w = exp(d), which is
  (sum of w)^2 / (n * sum of w^2) for n tokens: 1 if all weights are equal (Kong 1992).

The suffix T of a tensor means one entry per packed token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from realhf.algorithms.kl import clamp_log_ratio

if TYPE_CHECKING:
    from torch import Tensor

_MAX = "mismatch/max"
_SUMS = ("mismatch/tokens", "mismatch/k3", "mismatch/weights", "mismatch/squares")
"""Sums over tokens, of which the metrics are made."""
UPDATES = "mismatch/updates"
"""How many updates lie between the weights that sampled a token and those of the trainer, in the mean. If it
is 0, both have the same weights, and only their computations differ."""


def mismatch_sums(train_T: Tensor, generated_T: Tensor, counts_T: Tensor) -> dict[str, Tensor]:
    """Return what `with_mismatch` needs to know about a part of a mini-batch.

    The tokens where `counts_T` is not 0 count.
    """
    counts_T = (counts_T != 0).double()
    difference_T = (train_T.detach().double() - generated_T.double()) * counts_T
    clamped_T = clamp_log_ratio(difference_T)
    weight_T = clamped_T.exp() * counts_T
    values = (counts_T, clamped_T.expm1() - clamped_T, weight_T, weight_T.square())
    sums = {name: values_T.sum() for name, values_T in zip(_SUMS, values, strict=True)}
    largest = difference_T.new_zeros(1 + len(difference_T))  # A part may have no token.
    largest[1:] = difference_T.abs()
    return sums | {_MAX: largest.max()}


def with_mismatch(metrics: Mapping[str, float], source: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics with those of the mismatch in the place of its sums.

    `source` are the metrics of the mini-batches in which the trainer had the weights before its update. There
    are none if that was skipped.
    """
    others = {name: value for name, value in metrics.items() if name not in (*_SUMS, _MAX)}
    if not source.get(_SUMS[0]):
        return others
    tokens, k3, weights, squares = (source[name] for name in _SUMS)
    ess = weights**2 / (tokens * squares)
    return others | {"mismatch/kl": k3 / tokens, _MAX: source[_MAX], "mismatch/ess": ess}
