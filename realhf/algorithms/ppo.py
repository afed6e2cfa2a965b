"""PPO for RLHF with up to four roles (Schulman et al. 2017; Ziegler et al. 2019; Ouyang et al. 2022).

Suffixes of tensors name their dims: T packed tokens, N response tokens end to end, S sequences (alone) or
sequences by response positions (ST).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from realhf.algorithms.advantages import AdvantageConfig, TokenAdvantages
from realhf.algorithms.on_policy import SEQUENCE, OnPolicy, graph_of
from realhf.algorithms.policy_loss import PolicyLossConfig
from realhf.algorithms.responses import (
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
    def kl_in_reward(self) -> AdvantageConfig:
        return self.advantage

    @property
    def _needs_ref(self) -> bool:
        return self.loss.needs_ref or self.advantage.kl_coef > 0

    def graph(self) -> DataflowGraph:
        inputs = self.advantage_inputs()
        by_prompt = self.loss.average == "prompt"
        require(not by_prompt, "loss.average", self.loss.average, "be sequence, token or constant for PPO")
        read = ("response_mask", *self.advantage.keys, "values", "score", "finished", *inputs.keys)
        learned = (*SEQUENCE, "values", "returns")
        advantages = HostFunction(TokenAdvantages(self.advantage, inputs, self.group_size))
        train = TrainStep(
            self.value_loss, self.num_minibatches, self.epochs, shuffle_minibatches=self.shuffle_minibatches,
            seed=self.seed)
        graph = graph_of(
            self.actor_generate(),
            *self.reward_calls(),
            *self.token_rewards_call(),
            *([self.ref_forward()] if self._needs_ref else []),
            *self.actor_forward(),
            FunctionCall(
                "critic_forward", inputs=SEQUENCE, outputs=("values",), role="critic", work=Values()),
            FunctionCall("advantages", inputs=read, outputs=("advantages", "returns"), work=advantages),
            self.actor_train(),
            FunctionCall("critic_train", inputs=learned, role="critic", work=train))
        return self.with_checked_ages(self.with_pass_rates(graph))
