"""Computes how much of a rollout's rewards is credited to each turn. Pure functions on lists of numbers.

Rollouts are lists of the rewards of their turns, the last of which includes the rewards of the end. A group
is a list of rollouts that answer the same start.

Credit must be compared with a baseline that does not depend on what the turn itself decides, or the gradient
has a bias. How many turns follow is decided by the model, too, which rules out two baselines that suggest
themselves: the mean reward of turn k over the group, subtracted from the reward of turn k before rewards are
summed, charges a rollout for each further turn that it takes; and a mean that includes the rollout itself
shrinks the credit of late turns, which few rollouts reach. The baselines here are functions of the other
rollouts of the group alone, so they are independent of the turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

TurnRewards = Sequence[float]


def returns(rewards: TurnRewards, *, discount: float = 1.0) -> list[float]:
    """Return for each turn the rewards from it on, each later turn discounted once more."""
    total = 0.0
    made = []
    for reward in reversed(rewards):
        total = reward + discount * total
        made.append(total)
    return made[::-1]


def turn_advantages(
    group: Sequence[TurnRewards], *, credit: Literal["trajectory", "to_go", "per_turn"], discount: float = 1.0
) -> list[list[float]]:
    """Return the advantage of each turn of each rollout of a group.

    `trajectory`: the rewards of the whole rollout less the mean of the others' (RLOO). `to_go`: those from
    the turn on less the same mean. `per_turn`: those from the turn on less the mean of the others from the
    same turn on; if none is as long, from their last turns on. An only rollout has no baseline.
    """
    made = []
    to_go = [returns(rewards, discount=discount) for rewards in group]
    for i, rewards in enumerate(group):
        others = [other for j, other in enumerate(to_go) if j != i and other]
        baselines = []
        for turn in range(len(rewards)):
            at = turn if credit == "per_turn" else 0
            as_long = [other for other in others if len(other) > at] or others
            values = [other[min(at, len(other) - 1)] for other in as_long]
            baselines.append(sum(values) / len(values) if values else 0.0)
        gains = to_go[i] if credit != "trajectory" else [to_go[i][0]] * len(rewards)
        made.append([gain - baseline for gain, baseline in zip(gains, baselines, strict=True)])
    return made
