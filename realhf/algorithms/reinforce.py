"""REINFORCE++ (Hu 2025, arXiv:2501.03262): PPO's loss without a critic.

The advantage of a token is the score minus the KL penalties from this token on, normalised over all response
tokens of the batch. REINFORCE++-baseline subtracts the mean of the prompt's samples first, and takes the KL
into the loss: `baseline="group_mean"`, `group_size=8`, `reward_kl.kl_coef=0` and `loss.kl_estimator="k2"`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from realhf.algorithms.advantages import Baseline, Normalize
from realhf.algorithms.critic_free import CriticFree
from realhf.algorithms.kl import RewardKL
from realhf.algorithms.policy_loss import PolicyLossConfig


@dataclass
class ReinforcePlusPlus(CriticFree):
    """REINFORCE++ of `actor`: advantages are normalised over the batch, not within groups."""

    group_size: int = 1  # Samples per prompt.
    baseline: Baseline = "none"
    normalize: Normalize = "tokens"
    kl_to_go: bool = True
    loss: PolicyLossConfig = field(default_factory=lambda: PolicyLossConfig(average="token"))
    reward_kl: RewardKL = field(default_factory=lambda: RewardKL(kl_coef=0.01))
