"""GRPO (Shao et al. 2024, "DeepSeekMath", arXiv:2402.03300).

A_i = (r_i - mean of the group) / (std of the group + eps). Dr. GRPO (Liu et al. 2025, arXiv:2503.20783) is
`normalize="none"` with `loss.average="constant"`: it divides neither by the deviation nor by lengths.
"""

from __future__ import annotations

from dataclasses import dataclass

from realhf.algorithms.critic_free import CriticFree


@dataclass
class GRPO(CriticFree):
    """Group-relative policy optimisation of `actor`."""
