"""GSPO (Zheng et al. 2025, "Group Sequence Policy Optimization", arXiv:2507.18071).

GRPO with one ratio per response, (p_train(y) / p_generated(y))^(1/|y|), which is clipped much more narrowly,
as it is a geometric mean. The paper's bounds are 3e-4 and 4e-4; ScaleRL uses about ten times as much.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from realhf.algorithms.critic_free import CriticFree
from realhf.algorithms.policy_loss import PolicyLossConfig
from realhf.graph import DataflowGraph
from realhf.user_input.field_types import require


@dataclass
class GSPO(CriticFree):
    """Group sequence policy optimisation of `actor`."""

    loss: PolicyLossConfig = field(
        default_factory=lambda: PolicyLossConfig(ratio="sequence_mean", clip_low=3e-4, clip_high=4e-4))

    def graph(self) -> DataflowGraph:
        rule = "be sequence_mean: a new PolicyLossConfig must say that, and clip_low and clip_high"
        require(self.loss.ratio == "sequence_mean", "loss.ratio", self.loss.ratio, rule)
        return super().graph()
