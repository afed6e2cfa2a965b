"""Ages of sampled tokens: the updates of a role's weights between sampling a token and training on it.

The suffix T of a tensor means one entry per packed token, N one per response token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from realhf.algorithms.mismatch import UPDATES
from realhf.algorithms.responses import num_trained_tokens, per_token
from realhf.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from realhf.data.batch import Batch


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
