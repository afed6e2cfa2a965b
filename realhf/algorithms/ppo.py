"""PPO for RLHF with up to four roles (Schulman et al. 2017; Ziegler et al. 2019; Ouyang et al. 2022).

Suffixes of tensors name their dims: T packed tokens, N response tokens end to end, S sequences (alone) or
sequences by response positions (ST).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import nan
from typing import TYPE_CHECKING, Any, ClassVar

from realhf.algorithms.advantages import AdvantageInputs
from realhf.algorithms.kl import RewardKL
from realhf.algorithms.on_policy import SEQUENCE, OnPolicy, graph_of
from realhf.algorithms.policy_loss import PolicyLossConfig
from realhf.algorithms.responses import (
    normalized,
    num_trained_tokens,
    rollout_metrics,
    standard_deviation,
    without_dropped,
)
from realhf.calls import HostFunction, Loss, OptimizerConfig, TrainStep, Values
from realhf.experiment import Role
from realhf.graph import DataflowGraph, FunctionCall
from realhf.user_input.field_types import require

if TYPE_CHECKING:
    from torch import Tensor

    from realhf.data.batch import Batch


@dataclass(frozen=True)
class ValueLoss(Loss):
    """The loss 0.5 max((v - R)^2, (clip(v, v_old - clip, v_old + clip) - R)^2).

    It is averaged over response tokens.
    """

    clip: float = 0.2  # Most by which a value may move from the one before training without being clipped.
    output = "values"
    learns = "critic"

    def __post_init__(self) -> None:
        require(self.clip > 0, "value_loss.clip", self.clip, "be above 0")

    def totals(self, batch: Batch) -> dict[str, float]:
        mask, _ = without_dropped(batch["response_mask"], batch["returns"].values)
        return {"tokens": float(mask.values.sum())}

    def __call__(
        self, outputs: Mapping[str, Tensor], batch: Batch, totals: Mapping[str, float]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        value_T = outputs["values"]
        old_T = batch["values"].values
        mask, return_T = without_dropped(batch["response_mask"], batch["returns"].values)
        weight_T = mask.values / max(totals["tokens"], 1.0)
        clipped_T = old_T + (value_T - old_T).clamp(-self.clip, self.clip)
        error_T = (value_T - return_T) ** 2
        clipped_error_T = (clipped_T - return_T) ** 2
        loss = 0.5 * (error_T.maximum(clipped_error_T) * weight_T).sum()
        # Inside the clip range the two errors may differ by rounding, which is not clipping.
        is_clipped_T = ((value_T - old_T).abs() > self.clip) & (clipped_error_T > error_T)
        clip_fraction = (is_clipped_T.detach() * weight_T).sum()
        return loss, {"vf_loss": loss.detach(), "clip_fraction": clip_fraction}


@dataclass(frozen=True)
class AdvantageConfig(RewardKL):
    """Settings of GAE(gamma, lam) over the rewards of tokens.

    A token's reward is minus its KL penalty (see RewardKL), and the score is added at the last token.
    """

    kl_coef: float = 0.05  # Weight of the KL to the reference in the rewards of tokens.
    gamma: float = 1.0  # Discount of the reward of each following token.
    lam: float = 0.95
    """Weight of each following token's error; 1 relies on rewards only, 0 on the next value."""
    field_of_experiment: ClassVar[str] = "advantage"
    whiten: bool = True  # Normalise advantages to mean 0 and variance 1 over the batch's response tokens.

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("gamma", "lam"):
            legal = 0 <= getattr(self, name) <= 1
            require(legal, f"advantage.{name}", getattr(self, name), "be at least 0 and at most 1")


def generalized_advantages(
    rewards_ST: Tensor, values_ST: Tensor, mask_ST: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Return the advantages and returns of left-aligned sequences.

    They follow generalized advantage estimation (Schulman et al. 2016, arXiv:1506.02438).
    """
    advantages_ST = rewards_ST.new_zeros(rewards_ST.shape)
    running_S = rewards_ST.new_zeros(rewards_ST.shape[0])
    next_value_S = running_S
    for t in reversed(range(rewards_ST.shape[1])):
        mask_S = mask_ST[:, t]
        delta_S = rewards_ST[:, t] + gamma * next_value_S - values_ST[:, t]
        running_S = (delta_S + gamma * lam * running_S) * mask_S
        next_value_S = values_ST[:, t] * mask_S
        advantages_ST[:, t] = running_S
    return advantages_ST, (advantages_ST + values_ST) * mask_ST


@dataclass(frozen=True)
class TokenAdvantages:
    """Computes advantages and returns of the response tokens from score, KL to the reference and values.

    Rewards of single tokens have discounts of their own: their returns are added to both (Yeo et al. 2025,
    arXiv:2502.03373, who do so with lam = 1). Both are NaN for samples whose reward has failed and for tokens
    that are too old; the rewards and values of the latter still count for the tokens before them.
    All is computed in float64.
    """

    config: AdvantageConfig
    inputs: AdvantageInputs = field(default_factory=AdvantageInputs)
    group_size: int = 1  # Only for metrics.

    def __call__(self, batch: Batch, context: Any) -> tuple[dict[str, Any], dict[str, float]]:
        c = self.config
        mask = batch["response_mask"]
        if not len(batch):  # Filters have dropped all samples.
            empty = mask.like(batch["values"].values)
            return {"advantages": empty, "returns": empty}, {}
        self.inputs.check_failures(batch, context)
        metrics = rollout_metrics(batch, group_size=self.group_size)
        scores, shaping = self.inputs.shaped_scores(batch)
        penalties_T, kl = c.penalties(batch, context)
        left_out_T, ages = self.inputs.left_out(batch, context)
        # Tokens that were inserted into a response are no actions: the state after them follows the last one.
        chosen_T = mask.values.bool()
        counts_S = num_trained_tokens(mask).long()
        valid_ST = counts_S[:, None] > counts_S.new_tensor(range(int(counts_S.max())))
        values_N = batch["values"].values[chosen_T].double()
        rewards_ST = _scattered(-penalties_T[chosen_T].double(), valid_ST)
        rewards_ST[list(range(len(mask))), counts_S - 1] += scores
        advantages_ST, returns_ST = generalized_advantages(
            rewards_ST, _scattered(values_N, valid_ST), valid_ST.to(values_N.dtype), gamma=c.gamma, lam=c.lam
        )
        left_out_N = scores.isnan().repeat_interleave(valid_ST.sum(1))  # Also where lam is 0.
        if left_out_T is not None:
            left_out_N |= left_out_T[chosen_T]
        more_N = batch["token_returns"].values[chosen_T] if self.inputs.token_returns else 0.0
        advantage_N = (advantages_ST[valid_ST] + more_N).masked_fill(left_out_N, nan)
        return_N = (returns_ST[valid_ST] + more_N).masked_fill(left_out_N, nan)
        metrics |= shaping | kl | ages | _explained_variance(return_N[~left_out_N], values_N[~left_out_N])
        if c.whiten:
            advantage_N = normalized(advantage_N)
        columns = {"advantages": advantage_N, "returns": return_N}
        dtype = batch["values"].values.dtype
        return {key: mask.like(_scattered(x_N, chosen_T).to(dtype)) for key, x_N in columns.items()}, metrics


def _explained_variance(return_N: Tensor, value_N: Tensor) -> dict[str, float]:
    """Return the share of the returns' variance that the values explain; nothing if they have no variance.

    Returns that should be equal differ by the rounding of their sums, which is far below 1e-12 of them.
    """
    if not len(return_N):
        return {}
    deviation = standard_deviation(return_N).item()
    if deviation <= 1e-12 * return_N.abs().max().item():
        return {}
    residual = standard_deviation(return_N - value_N).item()
    return {"critic/explained_variance": 1.0 - (residual / deviation) ** 2}


def _scattered(x_N: Tensor, where: Tensor) -> Tensor:
    """Return a tensor with the values of x in order where a mask is true, and 0 elsewhere."""
    return x_N.new_zeros(where.shape).masked_scatter(where, x_N)


@dataclass
class PPO(OnPolicy):
    """PPO of `actor` and `critic` against `ref`, with a reward model or a reward function."""

    critic: Role = field(default_factory=lambda: Role(model="", head="score", optimizer=OptimizerConfig()))
    loss: PolicyLossConfig = field(default_factory=lambda: PolicyLossConfig(average="token"))
    value_loss: ValueLoss = field(default_factory=ValueLoss)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    minibatches: int = 4
    """Optimizer steps of actor and critic per epoch of a step, each on an equal part of the samples."""

    def roles(self) -> dict[str, Role]:
        if not self.critic.model:
            raise ValueError("critic is not set: PPO needs critic=Role(model, head='score', optimizer=...)")
        return {**self.shared_roles(with_ref=self._needs_ref), "critic": self.critic}

    @property
    def _needs_ref(self) -> bool:
        return self.loss.kl_coef > 0 or self.advantage.kl_coef > 0

    def graph(self) -> DataflowGraph:
        inputs = AdvantageInputs(
            self.shaping(), bool(self.token_rewards), self.age_limit(), self.reward_logs(),
            self.reward_limits)
        by_prompt = self.loss.average == "prompt"
        require(not by_prompt, "loss.average", self.loss.average, "be sequence, token or constant for PPO")
        read = ("response_mask", *self.advantage.keys, "values", "score", "finished", *inputs.keys)
        learned = (*SEQUENCE, "values", "returns")
        advantages = HostFunction(TokenAdvantages(self.advantage, inputs, self.group_size))
        train = TrainStep(self.value_loss, self.num_minibatches, self.epochs)
        graph = graph_of(
            self.actor_generate(),
            self.reward_forward(),
            *self.token_rewards_call(),
            *([self.ref_forward()] if self._needs_ref else []),
            *self.actor_forward(),
            FunctionCall("critic_forward", "forward", SEQUENCE, ("values",), role="critic", work=Values()),
            FunctionCall("advantages", "host", read, ("advantages", "returns"), work=advantages),
            self.actor_train(),
            FunctionCall("critic_train", "train_step", learned, role="critic", work=train))
        return self.with_checked_ages(graph)
