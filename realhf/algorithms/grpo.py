"""GRPO (Shao et al. 2024, "DeepSeekMath", arXiv:2402.03300), with Dr. GRPO's and DAPO's variations as
options.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from realhf.algorithms.calls import (
    actor_generate,
    graph_of,
    greedy_evaluation,
    log_probs,
    per_token,
    response_counts,
    reward_forward,
    rollout_metrics,
)
from realhf.engine.work import HostFunction, OptimizerConfig, SamplingConfig, Scores, TrainStep
from realhf.experiment import Experiment, Role
from realhf.graph import DataflowGraph, FunctionCall
from realhf.rewards.scoring import RewardFunction

if TYPE_CHECKING:
    from torch import Tensor

    from realhf.data.batch import Batch


@dataclass(frozen=True)
class PolicyLossConfig:
    """The clipped surrogate of PPO (Schulman et al. 2017) and how it is averaged."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coef: float = 0.0
    """Weight of the KL to the reference in the loss (k3 estimator); 0: no reference is needed."""
    average: Literal["sequence", "token"] = "sequence"
    """`sequence`: mean over the tokens of each response, then over responses (GRPO); `token`: over all tokens
    (DAPO).
    """


@dataclass(frozen=True)
class PolicyLoss:
    """-min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) + kl_coef * k3, rho = p_train / p_generated per
    token.
    """

    config: PolicyLossConfig
    output: str = "logprobs"
    entropy: bool = True

    def totals(self, batch: Batch) -> dict[str, float]:
        return {"tokens": float(batch["response_mask"].values.sum()), "sequences": float(len(batch))}

    def __call__(
        self, outputs: Mapping[str, Tensor], batch: Batch, totals: Mapping[str, float]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        c, mask = self.config, batch["response_mask"]
        logp_T, old_T, mask_T = outputs["logprobs"], batch["gen_logprobs"].values, mask.values
        advantage_T = batch["advantages"].values
        log_ratio_T = logp_T - old_T
        ratio_T = log_ratio_T.exp()
        clipped_T = ratio_T.clamp(1 - c.clip_low, 1 + c.clip_high)
        surrogate_T = (ratio_T * advantage_T).minimum(clipped_T * advantage_T)
        weight_T = mask_T / max(totals["tokens"], 1.0)
        mean_T = weight_T
        if c.average == "sequence":
            mean_T = mask_T / per_token(response_counts(mask).clamp(min=1.0), mask) / totals["sequences"]
        loss = -(surrogate_T * mean_T).sum()
        metrics = {
            "pg_loss": loss.detach(),
            "entropy": (outputs["entropy"].detach() * weight_T).sum(),
            "clip_fraction": ((clipped_T * advantage_T < ratio_T * advantage_T).detach() * weight_T).sum(),
            "approx_kl": ((ratio_T - 1 - log_ratio_T).detach() * weight_T).sum(),
        }
        if c.kl_coef:
            kl = (k3(logp_T, batch["ref_logprobs"].values) * mean_T).sum()
            loss = loss + c.kl_coef * kl
            metrics["ref_kl"] = kl.detach()
        return loss, metrics


def k3(logp_T: Tensor, ref_T: Tensor) -> Tensor:
    """Schulman's low-variance, unbiased estimate of KL(policy || reference): exp(d) - d - 1, d = ref - logp.
    """
    difference = ref_T - logp_T
    return difference.exp() - difference - 1


@dataclass(frozen=True)
class GroupAdvantages:
    """A_i = (r_i - mean of its group) / (std of its group + eps); Dr. GRPO leaves the division out."""

    group_size: int
    scale_by_std: bool
    eps: float = 1e-6

    def __call__(self, batch: Batch, context: Any) -> tuple[dict[str, Tensor], dict[str, float]]:
        score_GK = batch["score"].view(-1, self.group_size)
        advantage_GK = score_GK - score_GK.mean(-1, keepdim=True)
        std_GK = score_GK.std(-1, keepdim=True, correction=0)
        if self.scale_by_std:
            advantage_GK = advantage_GK / (std_GK + self.eps)
        metrics = rollout_metrics(batch)
        metrics["reward/zero_std_groups"] = (std_GK == 0).double().mean().item()
        mask = batch["response_mask"]
        return {"advantages": mask.like(per_token(advantage_GK.reshape(-1), mask))}, metrics


@dataclass
class GRPO(Experiment):
    """Group-relative policy optimisation of `actor`, with a reward function or a reward model."""

    actor: Role = field(default_factory=lambda: Role(model="", optimizer=OptimizerConfig()))
    ref: Role | None = None
    """The reference; needed when `loss.kl_coef` is above 0. None: the actor's initial weights."""
    reward: Role | None = None
    """A reward model, when there is no reward function."""
    reward_scores: Scores = field(default_factory=Scores)
    """How the reward model's head is read."""
    reward_function: RewardFunction | None = None
    eval_function: RewardFunction | None = None
    """Scores the answers to `eval_dataset`; None: the training reward does."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    scale_by_std: bool = True
    minibatches: int = 1
    epochs: int = 1
    max_rows: int = 512
    """Sequences that a rank decodes at once."""
    group_size: int = 8

    def roles(self) -> dict[str, Role]:
        if (self.reward is None) == (self.reward_function is None):
            raise ValueError("give either reward_function or a reward role, and not both")
        roles = {"actor": self.actor}
        if self.loss.kl_coef:
            roles["ref"] = self.ref or replace(self.actor, optimizer=None)
        if self.reward is not None:
            roles["reward"] = self.reward
        return roles

    def graph(self) -> DataflowGraph:
        calls = [actor_generate(self.sampling, max_rows=self.max_rows), reward_forward(self.reward_function, self.reward_scores)]
        train_inputs = ["sequence_ids", "response_mask", "gen_logprobs", "advantages"]
        if self.loss.kl_coef:
            calls.append(log_probs("ref", output="ref_logprobs", temperature=self.sampling.temperature))
            train_inputs.append("ref_logprobs")
        advantages = HostFunction(GroupAdvantages(self.group_size, self.scale_by_std))
        inputs = ("score", "response_mask", "finished")
        calls.append(FunctionCall("group_advantages", "host", inputs, ("advantages",), work=advantages))
        work = TrainStep(
            PolicyLoss(self.loss),
            minibatches=self.minibatches,
            epochs=self.epochs,
            temperature=self.sampling.temperature or 1.0,
        )
        calls.append(FunctionCall("actor_train", "train_step", tuple(train_inputs), role="actor", work=work))
        return graph_of(*calls)

    def eval_graph(self) -> DataflowGraph:
        return greedy_evaluation(self.sampling, self.eval_function or self.reward_function)
