"""ReMax (Li et al. 2023, arXiv:2310.10505): REINFORCE with the score of the greedy answer as baseline.

A = r(sampled answer) - r(greedy answer). The calls `greedy_generate` and `greedy_reward` make the baseline.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from realhf.algorithms.advantages import Baseline, Normalize
from realhf.algorithms.critic_free import CriticFree
from realhf.algorithms.kl import RewardKL
from realhf.algorithms.policy_loss import PolicyLossConfig


@dataclass
class ReMax(CriticFree):
    """REINFORCE of `actor` with its greedy answers as baseline."""

    group_size: int = 1  # Samples per prompt; it must be 1.
    baseline: Baseline = "greedy"
    normalize: Normalize = "none"
    kl_to_go: bool = True
    loss: PolicyLossConfig = field(default_factory=lambda: PolicyLossConfig(average="token"))
    reward_kl: RewardKL = field(default_factory=lambda: RewardKL(kl_coef=0.01))
