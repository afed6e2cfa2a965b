"""The policy loss of PPO and GRPO, and the metrics that both compute from a rollout.

The suffix T of a tensor means one entry per packed token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, ClassVar, Literal

from realhf.errors import UserError
from realhf.field_types import check_types, require

if TYPE_CHECKING:
    from torch import Tensor

    from realhf.data.batch import Batch, Packed

_LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to [-20, 20], as in verl, so that ratios stay finite."""
_K3_LIMIT = 10.0
"""A token's KL estimate is at most 10, as in verl and OpenRLHF."""


@dataclass(frozen=True)
class PolicyLossConfig:
    """Settings of PPO's clipped surrogate (Schulman et al. 2017) and of its average."""

    clip_low: float = 0.2  # Ratios below 1 - `clip_low` have no gradient where the advantage is negative.
    clip_high: float = 0.2  # Ratios above 1 + `clip_high` have no gradient where the advantage is positive.
    dual_clip: float | None = None
    """Lower bound of the objective, in units of A, for tokens with a negative advantage A: it is at least
    `dual_clip` A, however large the ratio is (Ye et al. 2020, arXiv:1912.09729; 3 is usual). It must be above
    1; None: no bound."""
    kl_coef: float = 0.0
    """Weight of the KL to the reference in the loss (k3 estimator); with 0 no reference is needed."""
    average: Literal["sequence", "token"] = "sequence"
    """`sequence`: mean over each response, then over responses (GRPO); `token`: over all tokens (DAPO)."""
    proximal: Literal["generated", "recomputed"] = "generated"
    """The policy in the denominator of the clipped ratio: that of the generator as recorded, or that of the
    trainer before the update. The second is the decoupled objective (Hilton et al. 2021, arXiv:2110.00641;
    AReaL, arXiv:2505.24298): `actor_forward` recomputes the log-probs, and every token's term has the weight
    p_recomputed / p_generated."""
    importance_cap: float | None = None
    """The most that this weight may be (truncated importance sampling; 2 to 5 is usual). None: the whole
    weight, as in these papers, whose variance is high where generator and trainer differ."""
    max_age: int | None = None
    """Tokens that were sampled more than this many updates of the actor before it trains on them are left
    out of its loss, and of the critic's. None: tokens of any age count."""
    aged: Literal["mask", "drop"] = "mask"
    """`mask` leaves out only the tokens above `max_age`; `drop` leaves out the samples that have any."""

    def __post_init__(self) -> None:
        check_types(self, "loss.")
        for name in ("clip_low", "clip_high", "kl_coef"):
            require(getattr(self, name) >= 0, f"loss.{name}", getattr(self, name), "not be negative")
        require(self.dual_clip is None or self.dual_clip > 1, "loss.dual_clip", self.dual_clip, "be above 1")
        cap = self.importance_cap
        require(cap is None or cap >= 1, "loss.importance_cap", cap, "be at least 1")
        legal = cap is None or self.proximal == "recomputed"
        rule = "be None unless loss.proximal is recomputed: it limits the weight p_recomputed / p_generated"
        require(legal, "loss.importance_cap", cap, rule)
        legal = self.max_age is None or self.max_age >= 0
        require(legal, "loss.max_age", self.max_age, "not be negative")
        legal = self.aged == "mask" or self.max_age is not None
        require(legal, "loss.aged", self.aged, "be mask unless loss.max_age is given")


@dataclass(frozen=True)
class PolicyLoss:
    """The loss -w min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) + kl_coef k3.

    Here rho = p_train / p_proximal. With generated proximal log-probs, p_proximal is p_generated and w is 1;
    with recomputed ones, w = min(p_proximal / p_generated, importance_cap), which has no gradient. The logs
    of both ratios are clamped to [-20, 20]; outside this range rho has no gradient. With `dual_clip` the
    first term has none either where A < 0 and rho is above `dual_clip`.

    Metrics: `approx_kl` is KL(proximal || train), and `mismatch/kl` is KL(generator || trainer before the
    update), both on the generated tokens.
    """

    config: PolicyLossConfig
    output: ClassVar[str] = "logprobs"
    entropy: ClassVar[bool] = True

    @property
    def first_minibatch(self) -> dict[str, str]:
        """Return the names under which metrics of the first mini-batch are logged as well.

        Its weights are those of the trainer before the update, so there KL(generator || trainer) shows by how
        much generation and training disagree: about the same weights without lag, else about newer ones too.
        Recomputed log-probs show the same for every mini-batch.
        """
        if self.config.proximal == "recomputed":
            return {"mismatch/kl": "mismatch_kl"}
        return {"approx_kl": "mismatch_kl", "mismatch/kl": "mismatch/kl"}

    def totals(self, batch: Batch) -> dict[str, float]:
        mask, _ = without_dropped(batch["response_mask"], batch["advantages"].values)
        left_out = response_counts(mask.like(batch["advantages"].values.isnan().to(mask.values.dtype)))
        dropped = (left_out > 0) & (response_counts(mask) == 0)
        return {"tokens": float(mask.values.sum()), "sequences": float(len(batch) - dropped.sum())}

    def __call__(
        self, outputs: Mapping[str, Tensor], batch: Batch, totals: Mapping[str, float]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        c = self.config
        mask, advantage_T = without_dropped(batch["response_mask"], batch["advantages"].values)
        generated_T = batch["gen_logprobs"].values
        recomputed = c.proximal == "recomputed"
        proximal_T = batch["prox_logprobs"].values if recomputed else generated_T
        ratio_T = clamped_log_ratio(outputs["logprobs"], proximal_T).exp()
        clipped_T = ratio_T.clamp(1 - c.clip_low, 1 + c.clip_high)
        surrogate_T = (ratio_T * advantage_T).minimum(clipped_T * advantage_T)
        weight_T = mean_T = mask.values / max(totals["tokens"], 1.0)
        if c.average == "sequence":
            mean_T = mask.values / per_token(response_counts(mask).clamp(min=1.0), mask)
            mean_T = mean_T / max(totals["sequences"], 1.0)
        metrics = {}
        if c.dual_clip is not None:
            least_T = (c.dual_clip * advantage_T).where(advantage_T < 0, -inf)
            metrics["dual_clip_fraction"] = ((surrogate_T < least_T).detach() * weight_T).sum()
            surrogate_T = surrogate_T.maximum(least_T)
        if recomputed:
            importance_T = clamped_log_ratio(proximal_T, generated_T).exp()
            if c.importance_cap is not None:
                metrics["importance_cap_fraction"] = ((importance_T > c.importance_cap) * weight_T).sum()
                importance_T = importance_T.clamp(max=c.importance_cap)
            metrics["importance_weight"] = (importance_T * weight_T).sum()
            surrogate_T = importance_T * surrogate_T
        loss = -(surrogate_T * mean_T).sum()
        metrics |= {
            "pg_loss": loss.detach(),
            "entropy": (outputs["entropy"].detach() * weight_T).sum(),
            "clip_fraction": ((clipped_T * advantage_T < ratio_T * advantage_T).detach() * weight_T).sum(),
            "approx_kl": (k3(proximal_T, outputs["logprobs"].detach()) * weight_T).sum(),
        }
        metrics["mismatch/kl"] = metrics["approx_kl"]
        if recomputed:
            metrics["mismatch/kl"] = (k3(generated_T, proximal_T) * weight_T).sum()
        if c.kl_coef:
            kl = (k3(outputs["logprobs"], batch["ref_logprobs"].values) * mean_T).sum()
            loss = loss + c.kl_coef * kl
            metrics["ref_kl"] = kl.detach()
        return loss, metrics


def without_dropped(mask: Packed, values_T: Tensor) -> tuple[Packed, Tensor]:
    """Return the mask and the values with 0 for tokens that are left out, whose values are NaN.

    Left out are samples whose reward has failed, see RewardLimits, and what is too old, see AgeLimit.
    """
    dropped_T = values_T.isnan()
    return mask.like(mask.values.masked_fill(dropped_T, 0.0)), values_T.masked_fill(dropped_T, 0.0)


def clamped_log_ratio(logp_T: Tensor, other_T: Tensor) -> Tensor:
    """Return logp - other, clamped to [-20, 20]; it has no gradient outside."""
    return (logp_T - other_T).clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)


def k3(logp_T: Tensor, ref_T: Tensor) -> Tensor:
    """Return Schulman's unbiased, low-variance estimate of KL(policy || reference) for every token:
    exp(d) - d - 1 with d = ref - logp.

    The estimate is clamped to at most 10; where it is clamped (d above 2.6 or below -11) it has no gradient.
    """
    difference_T = clamped_log_ratio(ref_T, logp_T)
    return (difference_T.exp() - difference_T - 1).clamp(max=_K3_LIMIT)


def response_counts(mask: Packed) -> Tensor:
    """Return the number of response tokens of every sample, shape (num_samples,)."""
    values = mask.values
    return values.new_zeros(len(mask)).index_add(0, _sample_of_tokens(mask), values)


def per_token(values: Tensor, mask: Packed) -> Tensor:
    """Repeat every sample's value for each of its tokens, shape (num_tokens,)."""
    return values[_sample_of_tokens(mask)]


def _sample_of_tokens(mask: Packed) -> Tensor:
    """Return the index of every token's sample, without making the host wait for the device."""
    counts = mask.values.new_tensor(mask.lengths).long()
    return counts.new_tensor(range(len(mask))).repeat_interleave(counts, output_size=len(mask.values))


def rollout_metrics(batch: Batch) -> dict[str, float]:
    """Return reward and length statistics of a batch with `score`, `response_mask` and `finished`."""
    if not len(batch):
        return {}
    score = batch["score"].double()
    lengths = response_counts(batch["response_mask"])
    failed = score.isnan()
    if failed.all():
        raise UserError("the reward of every sample of the step has failed: none is left to train on")
    failures = {"reward/failed": failed.double().mean().item()} if failed.any() else {}
    score = score[~failed]
    return failures | {
        "reward/mean": score.mean().item(),
        "reward/std": score.std(correction=0).item(),
        "response_length/mean": lengths.mean().item(),
        "response_length/max": lengths.max().item(),
        "response_length/clip_ratio": 1.0 - batch["finished"].double().mean().item(),
    }
