"""Reward shaping, against the papers' figures and formulas, PyTorch's cosine schedule and TRL's penalty."""

import random
from dataclasses import replace
from math import nan

import pytest
import torch
from trl.rewards import get_soft_overlong_punishment

from realhf import CosineReward, RepetitionPenalty, SoftOverlongPenalty
from realhf.rewards.shaping import discounted_returns, token_returns

MAX_LENGTH = 40
LENGTHS = torch.arange(MAX_LENGTH + 1.0)


def _curve(shaping, *, score, finished=1.0):
    """Return the shaped score of a response of each length from 0 to MAX_LENGTH."""
    return shaping(torch.full_like(LENGTHS, score), LENGTHS, torch.full_like(LENGTHS, finished))


@pytest.mark.parametrize("correct", [(2.0, 1.0), (0.0, 10.0), (6.0, 5.0), (10.0, 9.0)])
def test_the_cosine_reward_goes_between_the_published_values(correct):
    """Every curve runs monotonously from one published value to the other, and halfway in the middle."""
    shaping = CosineReward(MAX_LENGTH, correct=correct)
    for score, (start, end) in ((1.0, correct), (0.0, (-10.0, 0.0))):
        rewards = _curve(shaping, score=score)
        middle = (start + end) / 2
        assert rewards[[0, MAX_LENGTH // 2, MAX_LENGTH]].tolist() == pytest.approx([start, middle, end])
        assert (rewards.diff() * (1 if end > start else -1) > 0).all()
    assert CosineReward(MAX_LENGTH) == CosineReward(MAX_LENGTH, (2.0, 1.0), (-10.0, 0.0), over_length=-10.0)


def test_the_cosine_reward_has_the_form_of_the_cosine_learning_rate_schedule():
    """PyTorch's schedule computes end + (start - end) (1 + cos(pi t / T)) / 2, step by step."""
    parameter = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([parameter], lr=2.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, MAX_LENGTH, eta_min=1.0)
    rates = []
    for _ in LENGTHS:
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert _curve(CosineReward(MAX_LENGTH), score=1.0).tolist() == pytest.approx(rates)


def test_responses_that_were_cut_get_the_same_reward_right_or_wrong():
    shaping = CosineReward(MAX_LENGTH, over_length=-7.0)
    for score in (0.0, 1.0):
        assert (_curve(shaping, score=score, finished=0.0) == -7.0).all()
    lengths = torch.tensor([MAX_LENGTH, MAX_LENGTH + 1.0])
    assert shaping(torch.ones(2), lengths, torch.ones(2)).tolist() == [1.0, -7.0]


def test_a_response_is_right_above_the_threshold():
    score = torch.tensor([0.2, 0.5, 0.6])
    zeros, ones = torch.zeros(3), torch.ones(3)
    assert CosineReward(MAX_LENGTH)(score, zeros, ones).tolist() == [-10.0, -10.0, 2.0]
    assert CosineReward(MAX_LENGTH, correct_above=0.1)(score, zeros, ones).tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("shaping", [CosineReward(MAX_LENGTH), SoftOverlongPenalty(MAX_LENGTH, buffer=10)])
def test_failed_rewards_stay_nan_and_types_stay(shaping):
    score = torch.tensor([nan, nan, nan, 1.0], dtype=torch.float64)
    lengths = torch.tensor([3.0, 35.0, 50.0, 3.0], dtype=torch.float64)
    shaped = shaping(score, lengths, torch.tensor([1.0, 1.0, 0.0, 1.0], dtype=torch.float64))
    assert shaped.isnan().tolist() == [True, True, True, False] and shaped.dtype == torch.float64


def test_the_soft_overlong_penalty_at_its_corners():
    """It is 0 up to L_max - L_cache, -1 from L_max on and halfway in the middle."""
    lengths = torch.tensor([0.0, 29.0, 30.0, 35.0, 40.0, 41.0, 99.0])
    score = torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 1.0])
    shaped = SoftOverlongPenalty(40, buffer=10)(score, lengths, torch.ones(7))
    assert (shaped - score).tolist() == [0.0, 0.0, 0.0, -0.5, -1.0, -1.0, -1.0]


def test_the_soft_overlong_penalty_is_that_of_trl():
    theirs = get_soft_overlong_punishment(max_completion_len=MAX_LENGTH, soft_punish_cache=13)
    lengths = torch.arange(60)
    ours = SoftOverlongPenalty(MAX_LENGTH, buffer=13)(torch.zeros(60), lengths.float(), torch.ones(60))
    expected = theirs(completion_ids=[[0] * int(n) for n in lengths])
    assert ours.tolist() == pytest.approx(expected, abs=1e-6)


def _repetition_penalty(tokens, *, ngram, penalty):
    """Compute the algorithm of Yeo et al. 2025 in plain loops: compare each N-gram with all before it."""
    rewards = [0.0] * len(tokens)
    for j in range(len(tokens)):
        for i in range(j):
            fits = j + ngram <= len(tokens)
            if fits and all(tokens[i + k] == tokens[j + k] for k in range(ngram)):
                for t in range(j, j + ngram):
                    rewards[t] = penalty
    return rewards


def test_the_repetition_penalty_on_a_worked_example():
    """Of `1 2 3 4 1 2 3 5 2 3 5`, the trigrams `1 2 3` and `2 3 5` occur for a second time at 4 and 8."""
    reward = RepetitionPenalty(ngram=3, penalty=-0.5)
    tokens = [1, 2, 3, 4, 1, 2, 3, 5, 2, 3, 5]
    assert reward([tokens, [], [1, 2]]) == [[0.0] * 4 + [-0.5] * 3 + [0.0] + [-0.5] * 3, [], [0.0, 0.0]]


def test_the_repetition_penalty_of_random_responses():
    rng = random.Random(0)
    for ngram in (1, 2, 4):
        responses = [rng.choices(range(3), k=rng.randrange(40)) for _ in range(50)]
        expected = [_repetition_penalty(tokens, ngram=ngram, penalty=-0.05) for tokens in responses]
        assert RepetitionPenalty(ngram=ngram)(responses) == expected
        assert any(map(any, expected))


def test_tokens_that_lie_in_several_repeated_ngrams_are_penalised_once():
    """With the published N of 40, all tokens of a second copy of 60 tokens get -0.05."""
    (rewards,) = RepetitionPenalty()([[*range(60), *range(60)]])
    assert rewards == [0.0] * 60 + [-0.05] * 60


def test_returns_of_several_token_rewards_are_the_double_sum():
    """R_t = sum over rewards m and distances n of gamma_m^n r_(m, t + n)."""
    rng = random.Random(1)
    responses = [rng.choices(range(2), k=length) for length in (0, 1, 30)]
    token_rewards = [
        RepetitionPenalty(ngram=3, discount=0.99),
        RepetitionPenalty(ngram=5, penalty=-1.0, discount=0.5),
    ]
    by_reward = [(m.discount, m(responses)) for m in token_rewards]
    expected = [
        [
            sum(gamma**n * r[i][t + n] for gamma, r in by_reward for n in range(len(tokens) - t))
            for t in range(len(tokens))
        ]
        for i, tokens in enumerate(responses)
    ]
    for returns, right in zip(token_returns(token_rewards, responses), expected, strict=True):
        assert returns == pytest.approx(right)
    assert min(expected[2]) < -1
    assert token_returns([], responses) == [[0.0] * len(tokens) for tokens in responses]


def test_discounts_of_one_and_zero():
    assert discounted_returns([1.0, 2.0, 3.0], 1.0) == [6.0, 5.0, 3.0]
    assert discounted_returns([1.0, 2.0, 3.0], 0.0) == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    "config, changes, sentence",
    [
        (CosineReward(9), {"max_length": 0}, "CosineReward.max_length is 0: it must be at least 1"),
        (CosineReward(9), {"max_length": 9.5}, "CosineReward.max_length is 9.5: it must be a whole number"),
        (CosineReward(9), {"wrong": (nan, 0.0)}, r"CosineReward.wrong is \(nan, 0.0\): it must be finite"),
        (CosineReward(9), {"correct": (1.0,)}, r"CosineReward.correct is \(1.0,\): it must be a tuple of 2"),
        (SoftOverlongPenalty(9, 3), {"buffer": 10}, "buffer is 10: it must be at least 1 and at most max_le"),
        (SoftOverlongPenalty(9, 3), {"max_length": 0}, "max_length is 0: it must be at least 1"),
        (RepetitionPenalty(), {"ngram": 0}, "RepetitionPenalty.ngram is 0: it must be at least 1"),
        (RepetitionPenalty(), {"penalty": 0.05}, "RepetitionPenalty.penalty is 0.05: it must be below 0"),
        (RepetitionPenalty(), {"discount": 1.1}, "discount is 1.1: it must be at least 0 and at most 1"),
    ],
)
def test_illegal_fields(config, changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        replace(config, **changes)
