"""The policy loss of all algorithms that train on sampled answers: ratios, objectives, averages.

The suffix T of a tensor means one entry per packed token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any, Literal

from realhf.algorithms.kl import KLEstimator, clamp_log_ratio, k3, kl_estimate
from realhf.algorithms.loss_functions import LossFunction, called, columns_of
from realhf.algorithms.mismatch import mismatch_sums, with_mismatch
from realhf.algorithms.responses import num_trained_tokens, per_token, response_sums, without_dropped
from realhf.calls import Loss
from realhf.user_input.field_types import check_types, require

if TYPE_CHECKING:
    from torch import Tensor

    from realhf.data.batch import Batch, Packed


_SETTINGS = {
    "ppo": ("clip_low", "clip_high"), "cispo": ("ratio_cap",),
    "sapo": ("sapo_temperature_pos", "sapo_temperature_neg")}
"""Objective -> the settings that it alone reads."""
_WIDE_LOW = 0.5
_WIDE_HIGH = 2.0
"""Distances from 1 that look like bounds themselves, such as 0.8 and 1.2; 0.2 to 0.3 is usual."""
_FAR = 8
"""A constant length that is so many times the longest answer, or so many times less, is a mistake."""


_KNOWN = ("logprobs", "entropy", "advantages", "gen_logprobs", "response_mask", "sequence_ids")
"""What a function of one's own gets without a call or a column for it."""


@dataclass(frozen=True)
class PolicyLossConfig:
    """Settings of the policy loss: by default PPO's clipped surrogate (Schulman et al. 2017)."""

    objective: Literal["ppo", "cispo", "sapo"] = "ppo"
    """`ppo`: min(rho A, clip(rho) A), with rho = p_train / p_generated. `cispo`: c A log p_train with the
    constant c = min(rho, `ratio_cap`), in which every token has a gradient (MiniMax-M1, arXiv:2506.13585).
    `sapo`: 4 / tau sigmoid(tau (rho - 1)) A, whose gradient fades with the distance of rho from 1
    (arXiv:2511.20347); tau is `sapo_temperature_pos` where A is above 0, else `sapo_temperature_neg`."""
    function: Any = None
    """A function of one's own in the place of the objective: it returns the loss of each response token, and
    names what it reads as parameters (docs/algorithms.md). It may also be a Loss, which then is the whole
    loss. `loss=f` in an experiment is short for it."""
    ratio: Literal["token", "sequence", "sequence_mean"] = "token"
    """Whose ratio rho is: the token's; the whole response's, a product over its tokens (RLOO); or the
    geometric mean over its tokens (GSPO, arXiv:2507.18071)."""
    clip_low: float = 0.2  # Ratios below 1 - `clip_low` have no gradient where the advantage is negative.
    clip_high: float = 0.2  # Ratios above 1 + `clip_high` have no gradient where the advantage is positive.
    ratio_cap: float = 5.0  # The most that CISPO's ratio counts; 4, 5 and 8 behave alike (ScaleRL).
    sapo_temperature_pos: float = 1.0  # How fast SAPO's gradient fades where the advantage is above 0.
    sapo_temperature_neg: float = 1.05  # The same for other advantages, whose gradients are less stable.
    dual_clip: float | None = None
    """Lower bound of the objective, in units of A, for tokens with a negative advantage A: it is at least
    `dual_clip` A, however large the ratio is (Ye et al. 2020, arXiv:1912.09729; 3 is usual). It must be above
    1; None: no bound."""
    kl_coef: float = 0.0
    """Weight of the KL to the reference in the loss; with 0 the loss needs no reference."""
    kl_estimator: KLEstimator = "k3"  # The KL's estimate from a token's log-probs, see `kl.kl_estimate`.
    kl_weighted: bool = False
    """Whether the KL of a token is multiplied by rho. Then it and its gradient are unbiased, on samples of
    older weights, too (DeepSeek-V3.2, arXiv:2512.02556)."""
    entropy_coef: float = 0.0  # Weight of the policy's entropy, in nats, by which the loss falls.
    average: Literal["sequence", "token", "prompt", "constant"] = "sequence"
    """`sequence`: mean over each response, then over responses (GRPO). `token`: over all tokens. `prompt`:
    over the tokens of a prompt's responses, then over prompts (DAPO, ScaleRL). `constant`: sum over each
    response divided by `constant_length`, then mean over responses (Dr. GRPO)."""
    constant_length: int | None = None  # Tokens; None: sampling.max_new_tokens.
    proximal: Literal["generated", "recomputed"] = "generated"
    """The policy in the denominator of the clipped ratio: that of the generator as recorded, or that of the
    trainer before the update. The second is the decoupled objective (Hilton et al. 2021, arXiv:2110.00641;
    AReaL, arXiv:2505.24298): `actor_forward` recomputes the log-probs, and every token's term has the weight
    p_recomputed / p_generated."""
    importance_cap: float | None = None
    """The most that this weight may be (truncated importance sampling; 2 to 5 is usual). None: the whole
    weight, as in these papers, whose variance is high where generator and trainer differ."""
    importance_floor: float | None = None  # The least that this weight may be; None: no bound.
    importance_mode: Literal["truncate", "mask"] = "truncate"
    """What happens to weights outside of `importance_floor` and `importance_cap`: they become the bound, or
    0, so that these tokens or responses have no gradient (masked importance sampling, IcePop)."""
    importance_ratio: Literal["token", "sequence", "sequence_mean"] | None = None
    """Whose ratio this weight is: the values are those of `ratio`; None: as `ratio` says. With `mask`,
    `sequence` leaves out whole responses by which generator and trainer disagree."""
    off_policy_mask_threshold: float | None = None
    """Responses with a negative advantage count only if log(p_generated / p_train), in nats and averaged over
    their tokens, is at most this (DeepSeek-V3.2, arXiv:2512.02556). None: all count."""
    max_age: int | None = None
    """Tokens that were sampled more than this many updates of the actor before it trains on them are left
    out of its loss, and of the critic's. None: tokens of any age count."""
    aged: Literal["mask", "drop"] = "mask"
    """`mask` leaves out only the tokens above `max_age`; `drop` leaves out the samples that have any."""
    mask_truncated: bool = False
    """Whether responses that were cut by the length limit are left out of the loss, of its averages, and of
    the critic's loss (DAPO, arXiv:2503.14476). Their scores still count for the others' advantages."""
    top_entropy_quantile: float = 1.0
    """Share of the step's response tokens, those of the highest entropy, whose advantages count; the others'
    are 0 (arXiv:2506.01939; 0.2 there). Below 1, `actor_forward` computes the entropies before the update."""

    def __post_init__(self) -> None:
        check_types(self, "loss.")
        for name in ("clip_low", "clip_high", "kl_coef", "entropy_coef"):
            require(getattr(self, name) >= 0, f"loss.{name}", getattr(self, name), "not be negative")
        require(self.clip_low <= 1, "loss.clip_low", self.clip_low, "be at most 1, as ratios are above 0")
        require(self.dual_clip is None or self.dual_clip > 1, "loss.dual_clip", self.dual_clip, "be above 1")
        require(
            self.dual_clip is None or self.objective == "ppo", "loss.dual_clip", self.dual_clip,
            "be None unless loss.objective is ppo")
        by_objective = [
            (name, f"loss.objective is {objective}" + " and loss.function None" * (self.function is not None),
             self.objective == objective and self.function is None)
            for objective, names in _SETTINGS.items() for name in names]
        recomputed = self.proximal == "recomputed"
        has_bound = self.importance_cap is not None or self.importance_floor is not None
        weight = "loss.proximal is recomputed: it limits the weight p_recomputed / p_generated"
        for name, needed, has_effect in (
            *by_objective,
            ("importance_cap", weight, recomputed), ("importance_floor", weight, recomputed),
            ("importance_ratio", weight, recomputed),
            ("importance_mode", "loss.importance_cap or loss.importance_floor is given", has_bound),
            ("constant_length", "loss.average is constant", self.average == "constant"),
            ("kl_estimator", "loss.kl_coef is above 0", self.kl_coef > 0),
            ("kl_weighted", "loss.kl_coef is above 0", self.kl_coef > 0),
        ):
            default = type(self).__dataclass_fields__[name].default
            require(
                has_effect or getattr(self, name) == default, f"loss.{name}", getattr(self, name),
                f"be {default} unless {needed}")
        require(self.ratio_cap >= 1, "loss.ratio_cap", self.ratio_cap, "be at least 1")
        for name in ("sapo_temperature_pos", "sapo_temperature_neg"):
            require(getattr(self, name) > 0, f"loss.{name}", getattr(self, name), "be above 0")
        length = self.constant_length
        require(length is None or length >= 1, "loss.constant_length", length, "be at least 1")
        cap = self.importance_cap
        require(cap is None or cap >= 1, "loss.importance_cap", cap, "be at least 1")
        floor = self.importance_floor
        require(floor is None or 0 <= floor <= 1, "loss.importance_floor", floor, "be from 0 to 1")
        share = self.top_entropy_quantile
        require(0 < share <= 1, "loss.top_entropy_quantile", share, "be above 0 and at most 1")
        require(self.max_age is None or self.max_age >= 0, "loss.max_age", self.max_age, "not be negative")
        require(
            self.aged == "mask" or self.max_age is not None, "loss.aged", self.aged,
            "be mask unless loss.max_age is given")

    def with_function(self, function: LossFunction) -> PolicyLossConfig:
        """Return settings with a function of one's own, averaged as these say."""
        return PolicyLossConfig(function=function, average=self.average)

    @property
    def columns(self) -> tuple[str, ...]:
        """Keys that the own function reads besides what every policy loss does."""
        return columns_of(self.function, _KNOWN)

    @property
    def needs_ref(self) -> bool:
        """Whether the loss reads the log-probs of the reference."""
        return self.kl_coef > 0 or "ref_logprobs" in self.columns

    @property
    def needs_actor_forward(self) -> bool:
        """Whether the trainer computes log-probs, or entropies, before the update."""
        needs_logprobs = self.proximal == "recomputed" or "prox_logprobs" in self.columns
        return needs_logprobs or self.top_entropy_quantile < 1

    def doubts(self, *, max_lag: int, longest: int) -> Iterator[str]:
        """Yield what is probably not meant, where generation runs `max_lag` batches ahead and answers have at
        most `longest` tokens."""
        low, high = self.clip_low, self.clip_high
        if self.objective == "ppo" and (low >= _WIDE_LOW or 1 <= high < _WIDE_HIGH):
            yield (
                f"loss.clip_low is {low:g} and loss.clip_high {high:g}, distances from 1: ratios are clipped "
                f"below {1 - low:.3g} and above {1 + high:.3g}; the bounds 0.8 and 1.2 are clip_low 0.2 and "
                "clip_high 0.2")
        if self.max_age is not None and self.max_age < max_lag:
            yield (
                f"loss.max_age is {self.max_age} and max_lag {max_lag}: tokens are up to {max_lag} updates "
                f"old in training, and those older than {self.max_age} are left out, which may be most of "
                "them (metric staleness/left_out); raise max_age to max_lag, or leave it out")
        length = self.constant_length
        if length is not None and max(length / longest, longest / length) >= _FAR:
            yield (
                f"loss.constant_length is {length} and sampling.max_new_tokens {longest}: loss and gradient "
                f"are {longest / length:.2g} times those of constant_length None, "
                "which takes the longest answer")
        if self.off_policy_mask_threshold is not None and self.off_policy_mask_threshold <= 0:
            yield (
                f"loss.off_policy_mask_threshold is {self.off_policy_mask_threshold:g}: on the weights that "
                "have generated them responses are 0 nats away, so that about half of those with a negative "
                "advantage do not count; values such as 0.1 are usual")


@dataclass(frozen=True)
class PolicyLoss(Loss):
    """The loss -w objective(rho, A) + kl_coef KL - entropy_coef H, averaged as `average` says.

    Here rho = p_train / p_proximal. With generated proximal log-probs, p_proximal is p_generated and w is 1;
    with recomputed ones, w is p_proximal / p_generated within its bounds, which has no gradient. Rho is that
    of `ratio`. The logs of both are clamped to [-20, 20]; outside this range rho has no gradient.
    With `dual_clip` the first term has none either where A < 0 and rho is above `dual_clip`.

    Metrics: `approx_kl` is KL(proximal || train) on the generated tokens; those of mismatch.py compare the
    generator with the trainer before the update.
    """

    config: PolicyLossConfig
    output = "logprobs"
    entropy = True

    @property
    def function(self) -> LossFunction | None:
        """The function of one's own, if there is one."""
        return self.config.function

    def summarize(self, means: Mapping[str, float], first: Mapping[str, float]) -> dict[str, float]:
        # Only the first mini-batch has the weights of the trainer before the update; recomputed log-probs are
        # those of these weights in every mini-batch.
        return with_mismatch(means, means if self.config.proximal == "recomputed" else first)

    def totals(self, batch: Batch) -> dict[str, float]:
        mask, _ = without_dropped(batch["response_mask"], batch["advantages"].values)
        left_out = num_trained_tokens(mask.like(batch["advantages"].values.isnan().to(mask.values.dtype)))
        counts = num_trained_tokens(mask)
        dropped = (left_out > 0) & (counts == 0)
        totals = {"tokens": float(mask.values.sum()), "sequences": float(len(batch) - dropped.sum())}
        if self.config.average == "prompt":  # Each response is its share of a prompt.
            totals["prompts"] = float((counts / batch["prompt_tokens"].clamp(min=1)).sum())
        return totals

    def __call__(
        self, outputs: Mapping[str, Tensor], batch: Batch, totals: Mapping[str, float]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        c = self.config
        mask, advantage_T = without_dropped(batch["response_mask"], batch["advantages"].values)
        logp_T = outputs["logprobs"]
        generated_T = batch["gen_logprobs"].values
        recomputed = c.proximal == "recomputed"
        proximal_T = batch["prox_logprobs"].values if recomputed else generated_T
        weight_T = mask.values / max(totals["tokens"], 1.0)
        mean_T = self._mean_weights(mask, batch, totals)
        metrics: dict[str, Tensor] = {}
        if c.function is not None:
            known = {**outputs, "advantages": advantage_T, "response_mask": mask.values}
            loss_T = called(c.function, known, batch, unit="token", count=len(logp_T))
            objective_T = -loss_T.masked_fill(mask.values == 0, 0.0)
        else:
            ratio_T = _ratios(logp_T - proximal_T, mask, of=c.ratio)
            objective_T, metrics = _OBJECTIVES[c.objective](c, ratio_T, advantage_T, logp_T, weight_T)
        if recomputed:
            importance_T = self._importance(proximal_T - generated_T, mask, weight_T, metrics)
            objective_T = importance_T * objective_T
        if c.off_policy_mask_threshold is not None:
            sums = response_sums(generated_T - logp_T.detach(), mask)
            distances = sums / num_trained_tokens(mask).clamp(min=1.0)
            is_off_T = (advantage_T < 0) & (per_token(distances, mask) > c.off_policy_mask_threshold)
            metrics["off_policy_fraction"] = (is_off_T * weight_T).sum()
            objective_T = objective_T.masked_fill(is_off_T, 0.0)
        loss = -(objective_T * mean_T).sum()
        metrics |= {
            "pg_loss": loss.detach(),
            "entropy": (outputs["entropy"].detach() * weight_T).sum(),
            "approx_kl": (k3(proximal_T, logp_T.detach()) * weight_T).sum()}
        metrics |= mismatch_sums(proximal_T if recomputed else logp_T, generated_T, mask.values)
        if c.kl_coef:
            kl_T = kl_estimate(logp_T, batch["ref_logprobs"].values, c.kl_estimator)
            if c.kl_weighted:
                kl_T = kl_T * _ratios(logp_T - proximal_T, mask, of=c.ratio)
            kl = (kl_T * mean_T).sum()
            loss = loss + c.kl_coef * kl
            metrics["ref_kl"] = kl.detach()
        if c.entropy_coef:
            loss = loss - c.entropy_coef * (outputs["entropy"] * mean_T).sum()
        return loss, metrics

    def _importance(
        self, log_ratio_T: Tensor, mask: Packed, weight_T: Tensor, metrics: dict[str, Tensor]
    ) -> Tensor:
        """Return the weights p_proximal / p_generated within their bounds, and add their metrics."""
        c = self.config
        importance_T = _ratios(log_ratio_T, mask, of=c.importance_ratio or c.ratio)
        low = c.importance_floor
        high = c.importance_cap
        if low is not None or high is not None:
            bounded_T = importance_T.clamp(min=low, max=high)
            is_outside_T = bounded_T != importance_T
            metrics["importance_cap_fraction"] = (is_outside_T * weight_T).sum()
            importance_T = bounded_T
            if c.importance_mode == "mask":
                importance_T = bounded_T.masked_fill(is_outside_T, 0.0)
        metrics["importance_weight"] = (importance_T * weight_T).sum()
        return importance_T

    def _mean_weights(self, mask: Packed, batch: Batch, totals: Mapping[str, float]) -> Tensor:
        """Return the weight of every token in the average."""
        average = self.config.average
        if average == "token":
            return mask.values / max(totals["tokens"], 1.0)
        if average == "prompt":
            shares_T = mask.values / per_token(batch["prompt_tokens"].clamp(min=1), mask)
            return shares_T / max(totals["prompts"], 1e-9)
        if average == "constant":
            assert self.config.constant_length is not None, "the experiment sets the length"
            shares_T = mask.values / self.config.constant_length
        else:
            shares_T = mask.values / per_token(num_trained_tokens(mask).clamp(min=1.0), mask)
        return shares_T / max(totals["sequences"], 1.0)


def _ratios(
    log_ratio_T: Tensor, mask: Packed, *, of: Literal["token", "sequence", "sequence_mean"]
) -> Tensor:
    """Return the ratio of every token, from its log: the token's own, or that of its response."""
    if of != "token":
        sums = response_sums(log_ratio_T, mask)
        if of == "sequence_mean":
            sums = sums / num_trained_tokens(mask).clamp(min=1.0)
        log_ratio_T = per_token(sums, mask)
    return clamp_log_ratio(log_ratio_T).exp()


Objective = tuple["Tensor", "dict[str, Tensor]"]
"""The objective of every token, and metrics."""


def ppo_objective(
    c: PolicyLossConfig, ratio_T: Tensor, advantage_T: Tensor, logp_T: Tensor, weight_T: Tensor
) -> Objective:
    """Return PPO's objective of every token, and how many tokens are clipped."""
    clipped_T = ratio_T.clamp(1 - c.clip_low, 1 + c.clip_high)
    surrogate_T = (ratio_T * advantage_T).minimum(clipped_T * advantage_T)
    is_clipped_T = (clipped_T * advantage_T < ratio_T * advantage_T).detach()
    metrics = {"clip_fraction": (is_clipped_T * weight_T).sum()}
    if c.dual_clip is not None:
        least_T = (c.dual_clip * advantage_T).where(advantage_T < 0, -inf)
        metrics["dual_clip_fraction"] = ((surrogate_T < least_T).detach() * weight_T).sum()
        surrogate_T = surrogate_T.maximum(least_T)
    return surrogate_T, metrics


def cispo_objective(
    c: PolicyLossConfig, ratio_T: Tensor, advantage_T: Tensor, logp_T: Tensor, weight_T: Tensor
) -> Objective:
    """Return CISPO's objective of every token, and how many tokens are at the cap."""
    ratio_T = ratio_T.detach()
    metrics = {"clip_fraction": ((ratio_T > c.ratio_cap) * weight_T).sum()}
    return ratio_T.clamp(max=c.ratio_cap) * advantage_T * logp_T, metrics


def sapo_objective(
    c: PolicyLossConfig, ratio_T: Tensor, advantage_T: Tensor, logp_T: Tensor, weight_T: Tensor
) -> Objective:
    """Return SAPO's objective of every token, whose soft gate is 1 / tau times 2 at a ratio of 1."""
    tau_T = ratio_T.new_full((), c.sapo_temperature_pos).where(advantage_T > 0, c.sapo_temperature_neg)
    return (tau_T * (ratio_T - 1)).sigmoid() * 4 / tau_T * advantage_T, {}


_OBJECTIVES: dict[str, Callable[..., Objective]] = {
    "ppo": ppo_objective, "cispo": cispo_objective, "sapo": sapo_objective}
