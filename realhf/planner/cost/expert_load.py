"""Loads of experts: how many tokens the busiest rank of an expert-parallel group gets, and experts in use."""

from functools import lru_cache
from statistics import NormalDist
from typing import Any

import numpy as np

SKEW = 0.5
"""Standard deviation of the experts' shares of tokens, relative to their mean. Routers without a balancing
loss, as in reinforcement learning, favour experts: with 0.5, 16 experts a rank and 8 ranks, the busiest rank
has 1.2 times the mean. Training Qwen3-235B on H100s is 1.24 times slower than with forced balance
(github.com/yanring/Megatron-MoE-ModelZoo, best_practice/Qwen3: 295 against 237 TFLOP/s)."""


@lru_cache
def expected_maximum(count: int) -> float:
    """Return the expected maximum of so many normal numbers, about the (n - 3/8) / (n + 1/4) quantile (Blom
    1958)."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def busiest_load(num_tokens: Any, num_ranks: int, num_experts: int) -> Any:
    """Return the expected load of the busiest rank, relative to the mean.

    `num_tokens` routed tokens (a number, or an array) fall on ranks at random, and the ranks' shares differ
    by the mean skew of their experts.
    """
    if num_ranks == 1:
        return 1.0
    by_chance = (num_ranks - 1) / np.maximum(num_tokens, 1.0)
    by_skew = SKEW**2 * num_ranks / num_experts
    deviation = (by_chance + by_skew) ** 0.5
    return np.minimum(float(num_ranks), 1 + expected_maximum(num_ranks) * deviation)


def used_experts(num_experts: int, num_per_token: int, num_tokens: Any) -> Any:
    """Return how many experts at least one of the tokens chooses, if each chooses at random.

    b tokens with k of E experts each use E (1 - (1 - k / E)^b) experts.
    """
    return num_experts * (1 - (1 - num_per_token / num_experts) ** num_tokens)
