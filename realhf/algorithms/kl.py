"""Estimates of KL(policy || reference) from sampled tokens, and their use as a penalty in the reward.

The estimators k1, k2 and k3 are Schulman's ("Approximating KL divergence", 2020). The suffix T of a tensor
means one entry per packed token.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from realhf.errors import UserError
from realhf.user_input.field_types import check_types, require

if TYPE_CHECKING:
    from torch import Tensor

    from realhf.data.batch import Batch

KLEstimator = Literal["k1", "k2", "k3"]
_LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to [-20, 20], as in verl, so that ratios stay finite."""
_K3_LIMIT = 10.0
"""A token's k3 estimate is at most 10, as in verl and OpenRLHF."""
_STATE = "reward_kl_coef"
"""The entry of a host function's state that holds the adaptive coefficient."""


def clamped_log_ratio(logp_T: Tensor, other_T: Tensor) -> Tensor:
    """Return logp - other, clamped to [-20, 20]; it has no gradient outside."""
    return clamp_log_ratio(logp_T - other_T)


def clamp_log_ratio(log_ratio: Tensor) -> Tensor:
    """Return a log-ratio clamped to [-20, 20]; it has no gradient outside."""
    return log_ratio.clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)


def k3(logp_T: Tensor, ref_T: Tensor) -> Tensor:
    """Return Schulman's unbiased, low-variance estimate of KL(policy || reference) for every token:
    exp(d) - d - 1 with d = ref - logp.

    The estimate is clamped to at most 10; where it is clamped (d above 2.6 or below -11) it has no gradient.
    """
    difference_T = clamped_log_ratio(ref_T, logp_T)
    return (difference_T.exp() - difference_T - 1).clamp(max=_K3_LIMIT)


def kl_estimate(logp_T: Tensor, ref_T: Tensor, estimator: KLEstimator) -> Tensor:
    """Return an estimate of KL(policy || reference) for every token, in nats.

    With d = logp - ref, k1 is d (unbiased, may be negative), k2 is d^2 / 2 (biased) and k3 is
    exp(-d) + d - 1. As a term of the loss, only k2 has the gradient of the KL in expectation; that of k1 is 0
    in expectation, and that of k3 is the gradient of KL(reference || policy).
    """
    if estimator == "k3":
        return k3(logp_T, ref_T)
    difference_T = clamped_log_ratio(logp_T, ref_T)
    return difference_T if estimator == "k1" else difference_T**2 / 2


@dataclass(frozen=True)
class RewardKL:
    """A penalty on the KL to the reference in the reward (Ziegler et al. 2019, arXiv:1909.08593).

    A token's penalty is `kl_coef` times its estimate, for the policy that generated it.
    """

    kl_coef: float = 0.0  # Weight of the KL to the reference in the rewards.
    kl_estimator: KLEstimator = "k1"  # How the KL is estimated from a token's log-probs.
    kl_target: float | None = None
    """KL per response, in nats, that the coefficient aims at: above it the coefficient rises, below it falls
    (section 2.2 of the paper). None: the coefficient is fixed."""
    kl_horizon: int = 10_000
    """Samples in which the coefficient grows by the factor e^0.2 if the KL stays far above the target."""

    field_of_experiment: ClassVar[str] = "reward_kl"

    def __post_init__(self) -> None:
        prefix = f"{self.field_of_experiment}."
        check_types(self, prefix)
        require(self.kl_coef >= 0, f"{prefix}kl_coef", self.kl_coef, "not be negative")
        require(
            self.kl_target is None or (self.kl_target > 0 and self.kl_coef > 0), f"{prefix}kl_target",
            self.kl_target, "be above 0, with kl_coef above 0 to start from")
        require(self.kl_horizon >= 1, f"{prefix}kl_horizon", self.kl_horizon, "be at least 1")

    @property
    def keys(self) -> tuple[str, ...]:
        return ("gen_logprobs", "ref_logprobs") if self.kl_coef else ()

    def penalties(self, batch: Batch, context: Any) -> tuple[Tensor, dict[str, float]]:
        """Return the penalty of every packed token, 0 outside responses, and metrics.

        Adapts the coefficient of the next step.
        """
        mask = batch["response_mask"]
        if not self.kl_coef:
            return mask.values.new_zeros(mask.values.shape), {}
        ref_T = batch["ref_logprobs"].values
        kl_T = kl_estimate(batch["gen_logprobs"].values, ref_T, self.kl_estimator) * mask.values
        mean = kl_T.sum().item() / len(mask)
        if not isfinite(mean):
            raise UserError(
                f"the KL of the reward is {mean}: gen_logprobs or ref_logprobs have NaN or infinite values")
        metrics = {"reward/kl": mean}
        coefficient = self._coefficient(context)
        if self.kl_target is not None:
            metrics["reward/kl_coef"] = coefficient
            error = min(max(mean / self.kl_target - 1, -0.2), 0.2)
            context.state[_STATE] = coefficient * (1 + error * len(mask) / self.kl_horizon)
        return coefficient * kl_T, metrics

    def _coefficient(self, context: Any) -> float:
        """Return the coefficient of this step. An adaptive one is kept in `context.state`."""
        return self.kl_coef if self.kl_target is None else float(context.state.get(_STATE, self.kl_coef))
