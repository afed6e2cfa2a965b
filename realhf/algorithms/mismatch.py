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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from realhf.algorithms.kl import clamp_log_ratio
from realhf.algorithms.responses import num_trained_tokens, per_token
from realhf.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from realhf.data.batch import Batch


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


@dataclass(frozen=True)
class AgeLimit:
    """Finds the tokens that are too old to train on, and measures the ages of all tokens.

    The batch has `versions`, as a generating call writes them, and `response_mask`. `context.updates` counts
    the updates of each role so far, which are those before the train step that follows.
    """

    max_age: int | None = None  # The greatest legal age; None: every age is legal.
    aged: Literal["mask", "drop"] = "mask"  # Leave out the tokens that are older, or their whole samples.
    role: str = "actor"

    def __call__(self, batch: Batch, context: Any) -> tuple[Tensor, dict[str, float]]:
        """Return which packed tokens are left out, and metrics over response tokens.

        Raises UserError if that leaves no token to train on.
        """
        mask = batch["response_mask"]
        is_response_T = mask.values.bool()
        age_T = context.updates[self.role] - batch["versions"].values
        age_N = age_T[is_response_T]
        assert (age_N >= 0).all(), "a token has a version that the weights have not reached"
        metrics = {"staleness/mean": age_N.double().mean().item(), "staleness/max": float(age_N.max())}
        if self.max_age is None:
            metrics[UPDATES] = metrics["staleness/mean"]
            return is_response_T.new_zeros(is_response_T.shape), metrics
        left_out_T = (age_T > self.max_age) & is_response_T
        if self.aged == "drop":
            left_out_T = per_token(num_trained_tokens(mask.like(left_out_T.to(mask.values.dtype))) > 0, mask)
        left_out_N = left_out_T[is_response_T]
        if left_out_N.all():
            raise UserError(
                f"loss.max_age is {self.max_age} and leaves no token of the step to train on: "
                f"ages are {age_N.min()} to {age_N.max()}; raise it, or lower max_lag")
        return left_out_T, metrics | {
            "staleness/left_out": left_out_N.double().mean().item(),
            UPDATES: age_N[~left_out_N].double().mean().item()}
