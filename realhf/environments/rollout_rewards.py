"""RolloutRewards: scores rollouts by what their environments have given, and by reward functions.

A rollout is the JSON object that rollouts.py describes. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from realhf.environments.protocol import STOP_REASONS
from realhf.rewards.scoring import RewardCall

if TYPE_CHECKING:
    from realhf.data.batch import Batch

ROLLOUT = "rollout"
"""The key of the column with rollouts."""


class RolloutRewards(RewardCall):
    """A host function that scores rollouts by the rewards of their environments, and by reward functions.

    The score is the sum of all turns' rewards, and of the weighted values of the functions, if there are any.
    """

    @property
    def outputs(self) -> tuple[str, ...]:
        logs = {"reward_metrics"}.union(super().outputs)
        return ("score", "completion", "reward_scores", *sorted(key for key in logs if key in _LOGGED))

    @property
    def inputs(self) -> tuple[str, ...]:
        return (*super().inputs, ROLLOUT)

    def __call__(self, batch: Batch, context: Any) -> dict[str, Any]:
        rollouts = batch[ROLLOUT]
        nothing: list[dict[str, Any]] = [{} for _ in rollouts]
        columns = super().__call__(batch, context)
        by_name = [rewards_by_name(rollout) for rollout in rollouts]
        totals = [math.fsum(rewards.values()) for rewards in by_name]
        totals = [math.nan if r["dropped"] else total for r, total in zip(rollouts, totals, strict=True)]
        columns["score"] = columns["score"] + columns["score"].new_tensor(totals)
        unknown = dict.fromkeys(name for own in by_name for name in own)
        columns["reward_scores"] = [
            (unknown if rollout["dropped"] else own) | others
            for rollout, own, others in zip(rollouts, by_name, columns["reward_scores"], strict=True)]
        logged = columns.get("reward_metrics", nothing)
        columns["reward_metrics"] = [
            rollout_metrics(rollout) | more for rollout, more in zip(rollouts, logged, strict=True)]
        columns.setdefault("reward_extra", nothing)
        return {key: columns[key] for key in self.outputs}


_LOGGED = ("reward_metrics", "reward_extra")


def rewards_by_name(rollout: Mapping[str, Any]) -> dict[str, float]:
    """Return the sums of a rollout's rewards over its turns, without names whose reward it has not got."""
    sums: dict[str, list[float]] = {}
    for turn in rollout["turns"]:
        for name, reward in turn["rewards"].items():
            sums.setdefault(name, []).append(reward)
    return {name: math.fsum(values) for name, values in sums.items()}


def turn_rewards(rollout: Mapping[str, Any], score: float) -> list[float]:
    """Return the reward of each turn of a rollout. What its score has beside these is added to the last."""
    rewards = [math.fsum(turn["rewards"].values()) for turn in rollout["turns"]]
    rewards[-1] += score - math.fsum(rewards)
    return rewards


def rollout_metrics(rollout: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a rollout whose means are logged."""
    stops = {f"environment/stop/{reason}": float(rollout["stop"] == reason) for reason in STOP_REASONS}
    own = {f"environment/{name}": value for name, value in rollout["metrics"].items()}
    return {"environment/turns": float(len(rollout["turns"])), "environment/seconds": rollout["seconds"],
            **own, **stops}
