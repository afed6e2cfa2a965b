"""Credit of turns, on a problem whose gradient is known and whose rollouts can all be enumerated."""

import itertools
import math

import pytest

from realhf.environments.credit import returns, turn_advantages

STOP, GO = 0.4, 0.1
"""Rewards of stopping at the first turn, and of going on to the second, which gives 1 or 0."""
GO_LOGIT, RIGHT_LOGIT = 0.3, -0.2


def _sigmoid(x):
    return 1 / (1 + math.exp(-x))


P_GO, P_RIGHT = _sigmoid(GO_LOGIT), _sigmoid(RIGHT_LOGIT)
EXACT = (P_GO * (1 - P_GO) * (GO + P_RIGHT - STOP), P_GO * P_RIGHT * (1 - P_RIGHT))
"""The derivatives of the expected reward (1 - p) STOP + p (GO + q) with respect to both logits."""
ROLLOUTS = [
    (1 - P_GO, [STOP], [(0, -P_GO)]),
    (P_GO * P_RIGHT, [GO, 1.0], [(0, 1 - P_GO), (1, 1 - P_RIGHT)]),
    (P_GO * (1 - P_RIGHT), [GO, 0.0], [(0, 1 - P_GO), (1, -P_RIGHT)])]
"""Probability, rewards of the turns, and for each turn its logit and the derivative of its log-prob."""


def _gradient(advantages_of, size=3):
    """Return the expected policy gradient over all groups of so many rollouts."""
    gradient = [0.0, 0.0]
    for group in itertools.product(ROLLOUTS, repeat=size):
        probability = math.prod(rollout[0] for rollout in group)
        advantages = advantages_of([rollout[1] for rollout in group])
        for (_, _, scores), values in zip(group, advantages, strict=True):
            for (logit, score), value in zip(scores, values, strict=True):
                gradient[logit] += probability * score * value / size
    return gradient


def _means(group, turn):
    values = [rewards[turn] for rewards in group if len(rewards) > turn]
    return sum(values) / len(values)


def _reward_less_mean_of_turn(group):
    """The baseline that suggests itself: each turn's reward is compared with the same turn of the group."""
    return [returns([r - _means(group, k) for k, r in enumerate(rewards)]) for rewards in group]


def _return_less_mean_with_itself(group):
    to_go = [returns(rewards) for rewards in group]
    return [[value - _means(to_go, k) for k, value in enumerate(values)] for values in to_go]


@pytest.mark.parametrize("credit", ["trajectory", "to_go", "per_turn"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_expected_gradient_is_the_exact_one(credit, size):
    found = _gradient(lambda group: turn_advantages(group, credit=credit), size)
    assert found == pytest.approx(EXACT, abs=1e-12)


def test_baselines_that_depend_on_the_rollouts_own_turns_are_biased():
    """One charges for each turn: here it even turns the sign. The other weighs late turns less."""
    naive = _gradient(_reward_less_mean_of_turn)
    assert EXACT[0] > 0.03 and naive[0] < -0.02
    own = _gradient(_return_less_mean_with_itself)
    shares = [ours / exact for ours, exact in zip(own, EXACT, strict=True)]
    assert abs(shares[0] - shares[1]) > 0.1


def test_later_credit_has_less_noise():
    """Luck in the first turn and a decision in the second: the decision is compared with other decisions."""
    rollouts = [(0.25, [luck, right], right - 0.5) for luck in (0.0, 4.0) for right in (0.0, 1.0)]

    def moments(credit):
        mean = square = 0.0
        for group in itertools.product(rollouts, repeat=3):
            probability = math.prod(rollout[0] for rollout in group)
            advantages = turn_advantages([rollout[1] for rollout in group], credit=credit)
            pairs = zip(group, advantages, strict=True)
            made = sum(score * values[1] for (_, _, score), values in pairs) / 3
            mean += probability * made
            square += probability * made**2
        return mean, square - mean**2

    found = {credit: moments(credit) for credit in ("per_turn", "to_go", "trajectory")}
    assert [mean for mean, _ in found.values()] == pytest.approx([0.25] * 3)
    assert 5 * found["per_turn"][1] < found["to_go"][1] < found["trajectory"][1]


def test_credit_of_turns_is_that_of_rollouts_if_all_rewards_come_at_the_end():
    """Where all rollouts are equally long, the three do not differ at all."""
    group = [[0.0, 0.0, reward] for reward in (1.0, 0.25, 0.5, 0.0)]
    found = {credit: turn_advantages(group, credit=credit) for credit in ("trajectory", "to_go", "per_turn")}
    assert found["trajectory"] == found["to_go"] == found["per_turn"] != [[0.0] * 3] * 4


def test_returns_are_discounted_sums():
    assert returns([1.0, 2.0, 4.0], discount=0.5) == [1 + 1 + 1, 2 + 2, 4.0]
    assert returns([]) == []
    assert turn_advantages([[1.0, 2.0], [], [3.0]], credit="per_turn") == [[0.0, -1.0], [], [0.0]]
