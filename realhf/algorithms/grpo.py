"""GRPO (Shao et al. 2024, "DeepSeekMath", arXiv:2402.03300), with options of Dr. GRPO and DAPO.

Suffixes of tensors name their dims: G groups, K samples per group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import nan
from typing import TYPE_CHECKING, Any

from realhf.algorithms.on_policy import OnPolicy, graph_of
from realhf.algorithms.policy_loss import per_token, rollout_metrics
from realhf.algorithms.staleness import AgeLimit
from realhf.calls import KEEP, HostFunction
from realhf.errors import UserError
from realhf.experiment import Role
from realhf.graph import DataflowGraph, FunctionCall

if TYPE_CHECKING:
    from realhf.data.batch import Batch


@dataclass(frozen=True)
class GroupAdvantages:
    """Advantages A_i = (r_i - mean of the group) / (std of the group + eps).

    Dr. GRPO leaves the division out. In a group with a failed reward (NaN), all advantages are NaN. So are
    those of tokens that `age_limit` leaves out; the rewards of their samples still count for the group.
    """

    group_size: int
    scale_by_std: bool
    eps: float = 1e-6
    age_limit: AgeLimit | None = None
    filters: bool = False
    """Whether groups whose scores are all equal, or have failed, are dropped."""

    def __call__(self, batch: Batch, context: Any) -> tuple[dict[str, Any], dict[str, float]]:
        if not len(batch):  # Filters have dropped all samples.
            return {"advantages": batch["response_mask"], KEEP: []}, {}
        self._require_whole_groups(batch.ids)
        score_GK = batch["score"].view(-1, self.group_size)
        advantage_GK = score_GK - score_GK.mean(-1, keepdim=True)
        std_GK = score_GK.std(-1, keepdim=True, correction=0)
        if self.scale_by_std:
            advantage_GK = advantage_GK / (std_GK + self.eps)
        mask = batch["response_mask"]
        metrics = rollout_metrics(batch)
        metrics["reward/zero_std_groups"] = (std_GK[~std_GK.isnan()] == 0).double().mean().item()
        advantage_T = per_token(advantage_GK.reshape(-1), mask)
        if self.age_limit is not None:
            left_out_T, ages = self.age_limit(batch, context)
            advantage_T = advantage_T.masked_fill(left_out_T, nan)
            metrics |= ages
        columns = {"advantages": mask.like(advantage_T)}
        if self.filters:
            columns[KEEP] = (std_GK > 0).expand_as(score_GK).reshape(-1)
        return columns, metrics

    def _require_whole_groups(self, ids: Sequence[int]) -> None:
        """Raise UserError if a filter has dropped some samples of a prompt, and not all."""
        for prompt, count in Counter(i // self.group_size for i in ids).items():
            if count != self.group_size:
                has = f"{count} of the {self.group_size} samples of prompt {prompt} are left"
                raise UserError(
                    f"group advantages compare all samples of a prompt, and {has}: let the filter keep or "
                    "drop whole groups, or filter after the advantages")


@dataclass
class GRPO(OnPolicy):
    """Group-relative policy optimisation of `actor`, with a reference model if `loss.kl_coef` is above 0."""

    scale_by_std: bool = True  # Divide advantages by the standard deviation of the group; Dr. GRPO does not.
    group_size: int = 8  # Samples per prompt, which are compared with each other.
    filter_groups: bool = False
    """Whether prompts whose samples all have the same score are left out: their advantages are 0."""

    def roles(self) -> dict[str, Role]:
        return self.shared_roles(with_ref=self.loss.kl_coef > 0)

    def graph(self) -> DataflowGraph:
        if self.group_size < 2:
            why = "GRPO compares the samples of a prompt, and a single one has the advantage 0"
            raise ValueError(f"group_size is {self.group_size}: it must be at least 2, as {why}")
        function = GroupAdvantages(
            self.group_size, self.scale_by_std, age_limit=self.age_limit(), filters=self.filter_groups)
        work = HostFunction(function, filters=self.filter_groups)
        inputs = ("score", "response_mask", "finished", *self.version_keys)
        advantages = FunctionCall("group_advantages", "host", inputs, ("advantages",), work=work)
        ref = [self.ref_forward()] if self.loss.kl_coef > 0 else []
        before = (self.actor_generate(), self.reward_forward(), *ref, *self.actor_forward())
        return self.with_checked_ages(graph_of(*before, advantages, self.actor_train()), "group_advantages")
