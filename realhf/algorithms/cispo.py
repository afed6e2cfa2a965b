"""CISPO (MiniMax-M1, 2025, arXiv:2506.13585): REINFORCE with truncated importance weights of tokens.

The loss is -(1/T) sum of min(rho, ratio_cap) A log p, where the weight is a constant and T counts the tokens
of all samples of a prompt. No token loses its gradient, as those do that PPO clips.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from realhf.algorithms.critic_free import CriticFree
from realhf.algorithms.policy_loss import PolicyLossConfig
from realhf.graph import DataflowGraph
from realhf.user_input.field_types import require


@dataclass
class CISPO(CriticFree):
    """Clipped importance sampling policy optimisation of `actor`."""

    loss: PolicyLossConfig = field(
        default_factory=lambda: PolicyLossConfig(objective="cispo", average="prompt"))

    def graph(self) -> DataflowGraph:
        rule = "be cispo: a new PolicyLossConfig must say objective='cispo', average='prompt'"
        require(self.loss.objective == "cispo", "loss.objective", self.loss.objective, rule)
        return super().graph()
