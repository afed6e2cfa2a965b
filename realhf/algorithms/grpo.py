"""GRPO (Shao et al. 2024, "DeepSeekMath", arXiv:2402.03300), with options of Dr. GRPO and DAPO.

Suffixes of tensors name their dims: G groups, K samples per group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from realhf.algorithms.on_policy import OnPolicy, graph_of
from realhf.algorithms.policy_loss import per_token, rollout_metrics
from realhf.calls import HostFunction
from realhf.experiment import Role
from realhf.graph import DataflowGraph, FunctionCall

if TYPE_CHECKING:
    from realhf.data.batch import Batch


@dataclass(frozen=True)
class GroupAdvantages:
    """Advantages A_i = (r_i - mean of the group) / (std of the group + eps).

    Dr. GRPO leaves the division out. In a group with a failed reward (NaN), all advantages are NaN.
    """

    group_size: int
    scale_by_std: bool
    eps: float = 1e-6

    def __call__(self, batch: Batch, context: Any) -> tuple[dict[str, Any], dict[str, float]]:
        score_GK = batch["score"].view(-1, self.group_size)
        advantage_GK = score_GK - score_GK.mean(-1, keepdim=True)
        std_GK = score_GK.std(-1, keepdim=True, correction=0)
        if self.scale_by_std:
            advantage_GK = advantage_GK / (std_GK + self.eps)
        mask = batch["response_mask"]
        metrics = rollout_metrics(batch)
        metrics["reward/zero_std_groups"] = (std_GK[~std_GK.isnan()] == 0).double().mean().item()
        return {"advantages": mask.like(per_token(advantage_GK.reshape(-1), mask))}, metrics


@dataclass
class GRPO(OnPolicy):
    """Group-relative policy optimisation of `actor`, with a reference model if `loss.kl_coef` is above 0."""

    scale_by_std: bool = True  # Divide advantages by the standard deviation of the group; Dr. GRPO does not.
    group_size: int = 8  # Samples per prompt, which are compared with each other.

    def roles(self) -> dict[str, Role]:
        return self.shared_roles(with_ref=self.loss.kl_coef > 0)

    def graph(self) -> DataflowGraph:
        if self.group_size < 2:
            why = "GRPO compares the samples of a prompt, and a single one has the advantage 0"
            raise ValueError(f"group_size is {self.group_size}: it must be at least 2, as {why}")
        work = HostFunction(GroupAdvantages(self.group_size, self.scale_by_std))
        inputs = ("score", "response_mask", "finished")
        advantages = FunctionCall("group_advantages", "host", inputs, ("advantages",), work=work)
        ref = [self.ref_forward()] if self.loss.kl_coef > 0 else []
        return graph_of(self.actor_generate(), self.reward_forward(), *ref, advantages, self.actor_train())
