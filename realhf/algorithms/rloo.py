"""RLOO (Ahmadian et al. 2024, "Back to Basics", arXiv:2402.14740): REINFORCE with a leave-one-out baseline.

A_i = r_i - mean of the other samples of the prompt, where r is the score minus the KL penalty of the whole
response. As in TRL, the ratio is that of the whole response, and it is clipped.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from realhf.algorithms.advantages import Baseline, Normalize
from realhf.algorithms.critic_free import CriticFree
from realhf.algorithms.kl import RewardKL
from realhf.algorithms.policy_loss import PolicyLossConfig


@dataclass
class RLOO(CriticFree):
    """REINFORCE of `actor` with the mean of a prompt's other samples as baseline."""

    group_size: int = 4  # Samples per prompt.
    baseline: Baseline = "leave_one_out"
    normalize: Normalize = "none"
    loss: PolicyLossConfig = field(default_factory=lambda: PolicyLossConfig(ratio="sequence"))
    reward_kl: RewardKL = field(default_factory=lambda: RewardKL(kl_coef=0.05))
