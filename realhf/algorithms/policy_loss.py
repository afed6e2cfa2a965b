"""The policy loss of PPO and GRPO, and what they measure of a rollout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from realhf.data.batch import Batch, Packed


@dataclass(frozen=True)
class PolicyLossConfig:
    """The clipped surrogate of PPO (Schulman et al. 2017) and how it is averaged."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coef: float = 0.0
    """Weight of the KL to the reference in the loss (k3 estimator); 0: no reference is needed."""
    average: Literal["sequence", "token"] = "sequence"
    """`sequence`: mean of each response, then over responses (GRPO); `token`: over all tokens (DAPO)."""


@dataclass(frozen=True)
class PolicyLoss:
    """-min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) + kl_coef k3, rho = p_train / p_generated."""

    config: PolicyLossConfig
    output: str = "logprobs"
    entropy: bool = True

    def totals(self, batch: Batch) -> dict[str, float]:
        return {"tokens": float(batch["response_mask"].values.sum()), "sequences": float(len(batch))}

    def __call__(
        self, outputs: Mapping[str, Tensor], batch: Batch, totals: Mapping[str, float]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        c, mask, advantage_T = self.config, batch["response_mask"], batch["advantages"].values
        log_ratio_T = outputs["logprobs"] - batch["gen_logprobs"].values
        ratio_T = log_ratio_T.exp()
        clipped_T = ratio_T.clamp(1 - c.clip_low, 1 + c.clip_high)
        surrogate_T = (ratio_T * advantage_T).minimum(clipped_T * advantage_T)
        weight_T = mean_T = mask.values / max(totals["tokens"], 1.0)
        if c.average == "sequence":
            mean_T = mask.values / per_token(response_counts(mask).clamp(min=1.0), mask) / totals["sequences"]
        loss = -(surrogate_T * mean_T).sum()
        metrics = {
            "pg_loss": loss.detach(),
            "entropy": (outputs["entropy"].detach() * weight_T).sum(),
            "clip_fraction": ((clipped_T * advantage_T < ratio_T * advantage_T).detach() * weight_T).sum(),
            "approx_kl": ((ratio_T - 1 - log_ratio_T).detach() * weight_T).sum(),
        }
        if c.kl_coef:
            kl = (k3(outputs["logprobs"], batch["ref_logprobs"].values) * mean_T).sum()
            loss = loss + c.kl_coef * kl
            metrics["ref_kl"] = kl.detach()
        return loss, metrics


def k3(logp_T: Tensor, ref_T: Tensor) -> Tensor:
    """Schulman's unbiased, low-variance KL(policy || reference): exp(d) - d - 1 with d = ref - logp."""
    difference = ref_T - logp_T
    return difference.exp() - difference - 1


def response_counts(mask: Packed) -> Tensor:
    """Response tokens per sample, shape (num_samples,)."""
    values = mask.values
    return values.new_zeros(len(mask)).index_add(0, _sample_of_tokens(mask), values)


def per_token(values: Tensor, mask: Packed) -> Tensor:
    """Spreads one value per sample over its tokens, shape (num_tokens,)."""
    return values[_sample_of_tokens(mask)]


def _sample_of_tokens(mask: Packed) -> Tensor:
    """Every token's sample, by number. (The host does not wait for the device.)"""
    counts = mask.values.new_tensor(mask.lengths).long()
    return counts.new_tensor(range(len(mask))).repeat_interleave(counts, output_size=len(mask.values))


def rollout_metrics(batch: Batch) -> dict[str, float]:
    """Reward and length statistics of a batch with `score`, `response_mask` and `finished`."""
    score, lengths = batch["score"].double(), response_counts(batch["response_mask"])
    return {
        "reward/mean": score.mean().item(),
        "reward/std": score.std(correction=0).item(),
        "response_length/mean": lengths.mean().item(),
        "response_length/max": lengths.max().item(),
        "response_length/clip_ratio": 1.0 - batch["finished"].double().mean().item(),
    }
