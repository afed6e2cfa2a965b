"""Advantages against their definitions as plain sums."""

import math
import random
import statistics
from dataclasses import dataclass, field
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.algorithms.advantages import (
    AdvantageConfig,
    SampleAdvantages,
    TokenAdvantages,
    generalized_advantages,
)
from realhf.algorithms.kl import RewardKL
from realhf.algorithms.responses import deviations, normalized, rollout_metrics, standard_deviation
from realhf.data.batch import Batch, Packed
from realhf.rewards.reward import Reward
from realhf.rewards.scoring import RewardCall


def _gae_by_hand(rewards, values, gamma, lam):
    """Eq. 16 of arXiv:1506.02438: A_t = sum_l (gamma lam)^l delta_(t+l), no value after the end."""
    num = len(rewards)
    delta = [rewards[t] + gamma * (values[t + 1] if t + 1 < num else 0.0) - values[t] for t in range(num)]
    return [sum((gamma * lam) ** k * delta[t + k] for k in range(num - t)) for t in range(num)]


def _random_batch(seed, num_samples=6):
    rng = random.Random(seed)
    shapes = [(rng.randint(1, 4), rng.randint(1, 7)) for _ in range(num_samples)]
    lengths = [p + r for p, r in shapes]
    mask = torch.tensor([m for p, r in shapes for m in [0.0] * p + [1.0] * r]).double()
    names = ("values", "gen_logprobs", "ref_logprobs")
    fields = {
        n: Packed(torch.tensor([rng.gauss(0, 1) for _ in mask]).double() * mask, lengths) for n in names
    }
    fields["response_mask"] = Packed(mask, lengths)
    fields["score"] = torch.tensor([rng.gauss(0, 1) for _ in shapes]).double()
    fields["finished"] = torch.tensor([float(rng.random() < 0.5) for _ in shapes]).double()
    return Batch(list(range(num_samples)), fields)


@pytest.mark.parametrize("gamma, lam", [(1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (0.97, 0.0)])
def test_generalized_advantages_are_the_sum_of_their_definition(gamma, lam):
    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    counts = [rng.randint(1, 9) for _ in range(8)]
    rewards, values = torch.randn(2, 8, 9, generator=generator).double()
    mask = (torch.arange(9) < torch.tensor(counts)[:, None]).double()
    advantages, returns = generalized_advantages(rewards * mask, values * mask, mask, gamma=gamma, lam=lam)
    for s, count in enumerate(counts):
        now = values[s, :count]
        expected = torch.tensor(
            _gae_by_hand(rewards[s, :count].tolist(), now.tolist(), gamma, lam), dtype=now.dtype
        )
        torch.testing.assert_close(advantages[s, :count], expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(returns[s, :count], expected + now, rtol=1e-12, atol=1e-12)
        assert not advantages[s, count:].any() and not returns[s, count:].any()


@pytest.mark.parametrize("whiten", [False, True])
def test_advantages_count_the_kl_everywhere_and_the_score_at_the_end(whiten):
    batch = _random_batch(1)
    config = AdvantageConfig(gamma=0.98, lam=0.9, kl_coef=0.3, whiten=whiten)
    columns, metrics = TokenAdvantages(config)(batch, None)
    chosen = [m.bool() for m in batch["response_mask"].split()]
    expected, returns, kls, all_values = [], [], [], []
    for i, where in enumerate(chosen):
        values, old, ref = (
            batch[n].split()[i][where].tolist() for n in ("values", "gen_logprobs", "ref_logprobs")
        )
        kl = [a - b for a, b in zip(old, ref, strict=True)]
        rewards = [-0.3 * k for k in kl]
        rewards[-1] += float(batch["score"][i])
        advantages = _gae_by_hand(rewards, values, 0.98, 0.9)
        expected += advantages
        returns += [a + v for a, v in zip(advantages, values, strict=True)]
        kls.append(sum(kl))
        all_values += values
    unexplained = [r - v for r, v in zip(returns, all_values, strict=True)]
    explained = 1 - statistics.pvariance(unexplained) / statistics.pvariance(returns)
    if whiten:
        mean, deviation = statistics.mean(expected), statistics.pstdev(expected)
        expected = [(a - mean) / (deviation + 1e-8) for a in expected]
    where = torch.cat(chosen)
    assert columns["advantages"].values[where].tolist() == pytest.approx(expected, rel=1e-10)
    assert columns["returns"].values[where].tolist() == pytest.approx(returns, rel=1e-10)
    for column in columns.values():
        assert column.lengths == batch["response_mask"].lengths and not column.values[~where].any()
    lengths = [int(w.sum()) for w in chosen]
    known = {
        "reward/kl": statistics.mean(kls),
        "mismatch/updates": 0.0,
        "critic/explained_variance": explained,
        "reward/mean": statistics.mean(batch["score"].tolist()),
        "reward/std": statistics.pstdev(batch["score"].tolist()),
        "response_length/mean": statistics.mean(lengths),
        "response_length/max": max(lengths),
        "response_length/clip_ratio": 1 - statistics.mean(batch["finished"].tolist()),
    }
    assert metrics == pytest.approx(known, rel=1e-10)


@pytest.mark.parametrize("off", [120.0, torch.inf])
def test_a_reference_far_off_leaves_advantages_finite(off):
    """A token that the reference finds impossible costs as much as one with a ratio of e^-20."""
    found = []
    for distance in (off, 20.0):
        batch = _random_batch(1)
        at = int(batch["response_mask"].values.nonzero()[2])
        batch["ref_logprobs"].values[at] = batch["gen_logprobs"].values[at] - distance
        columns, metrics = TokenAdvantages(AdvantageConfig())(batch, None)
        found.append((columns["advantages"].values, columns["returns"].values, metrics))
    (advantages, returns, metrics), (expected, expected_returns, expected_metrics) = found
    assert torch.equal(advantages, expected) and torch.equal(returns, expected_returns)
    assert advantages.isfinite().all() and metrics == expected_metrics


@pytest.mark.parametrize("normalize", ["group", "none"])
def test_group_advantages_normalise_each_group(normalize):
    batch = _random_batch(2, num_samples=12)
    batch.fields["score"][4:8] = 0.25  # a group whose samples all get the same
    columns, metrics = SampleAdvantages(4, normalize=normalize)(batch, None)
    scores = batch["score"].tolist()
    for i, tokens in enumerate(columns["advantages"].split()):
        group = scores[i // 4 * 4 : i // 4 * 4 + 4]
        expected = scores[i] - statistics.mean(group)
        if normalize == "group":
            expected /= statistics.pstdev(group) + 1e-6
        chosen = batch["response_mask"].split()[i].bool()
        assert tokens[chosen].tolist() == pytest.approx([expected] * int(chosen.sum()), rel=1e-10, abs=1e-12)
    assert metrics["reward/zero_std_groups"] == pytest.approx(1 / 3)
    assert metrics["reward/mean"] == pytest.approx(statistics.mean(scores))


_NUMBERS = st.floats(-1e6, 1e6, allow_nan=False, allow_subnormal=False)
_WAYS = [
    (baseline, normalize)
    for baseline in ("none", "group_mean", "leave_one_out", "greedy")
    for normalize in ("none", "group", "batch", "tokens")
    if baseline != "none" or normalize in ("batch", "tokens")  # Else nothing is subtracted.
]


@dataclass
class _Context:
    state: dict = field(default_factory=dict)


def _scored(scores, response_lengths, *, dtype=torch.float32):
    """Return a batch of these float64 scores, with a prompt of one token before each response."""
    lengths = [1 + count for count in response_lengths]
    mask = torch.tensor([m for count in response_lengths for m in [0.0] + [1.0] * count], dtype=dtype)
    zeros = Packed(torch.zeros_like(mask), lengths)
    score = torch.tensor(scores, dtype=torch.float64)
    return Batch(list(range(len(scores))), {
        "response_mask": Packed(mask, lengths), "score": score, "finished": torch.ones(len(scores)),
        "values": zeros, "gen_logprobs": zeros, "ref_logprobs": zeros, "greedy_score": score.clone(),
        "greedy_mask": Packed(mask, lengths), "greedy_finished": torch.ones(len(scores))})


@settings(max_examples=25, deadline=None)
@given(
    value=_NUMBERS, group_size=st.integers(2, 17), num_groups=st.integers(1, 5), seed=st.integers(0, 99),
    deviation=st.sampled_from(["population", "sample"]), kl_to_go=st.booleans())
def test_equal_scores_have_advantages_of_exactly_zero(
    value, group_size, num_groups, seed, deviation, kl_to_go
):
    """Whatever the scores and their number are: nothing may be left of rounding, divided by about eps."""
    rng = random.Random(seed)
    count = group_size * num_groups
    batch = _scored([value] * count, [rng.randint(1, 9) for _ in range(count)])
    for baseline, normalize in _WAYS:
        function = SampleAdvantages(
            group_size, baseline, normalize, deviation=deviation, kl_to_go=kl_to_go,
            reward_kl=RewardKL(kl_coef=0.1))
        columns, metrics = function(batch, _Context())
        assert not columns["advantages"].values.any(), (baseline, normalize)
        assert metrics["reward/std"] == 0.0
        assert metrics.get("reward/zero_std_groups", 1.0) == 1.0
    columns, _ = SampleAdvantages(group_size, filters=True)(batch, _Context())
    assert columns["keep"].tolist() == [False] * count


@pytest.mark.parametrize("value", [0.7, 0.1, 1 / 3, -2.3, 1e6 + 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_eight_equal_answers_teach_nothing(value, dtype):
    """In float32, the mean of eight times 0.7 differs from 0.7 by as much as eps, 1e-6, is small."""
    batch = _scored([value] * 8, [5] * 8, dtype=dtype)
    for name in ("score", "greedy_score"):  # As a reward model writes them.
        batch.fields[name] = batch[name].to(dtype)
    for baseline, normalize in _WAYS:
        columns, _ = SampleAdvantages(8, baseline, normalize)(batch, _Context())
        assert columns["advantages"].values.dtype == dtype
        assert not columns["advantages"].values.any(), (baseline, normalize)


@settings(max_examples=60, deadline=None)
@given(
    base=_NUMBERS, steps=st.lists(st.integers(-3, 3), min_size=2, max_size=9),
    step=st.sampled_from([1e-6, 1e-3, 1.0]))
def test_small_differences_between_scores_stay(base, steps, step):
    """Against fractions, which do not round: the advantages of GRPO."""
    scores = [base + i * step for i in steps]
    exact = [Fraction(score) for score in scores]
    mean = sum(exact) / len(exact)
    deviation = math.sqrt(sum((x - mean) ** 2 for x in exact) / len(exact))
    expected = torch.tensor([float(x - mean) / (deviation + 1e-6) for x in exact])
    columns, _ = SampleAdvantages(len(scores))(_scored(scores, [1] * len(scores)), _Context())
    got = columns["advantages"].values.view(-1, 2)[:, 1]
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)
    assert got.any() == (len(set(scores)) > 1)


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(2, 40).flatmap(
    lambda count: st.lists(st.lists(_NUMBERS, min_size=count, max_size=count), min_size=1, max_size=3)))
def test_deviations_and_their_root_mean_square_against_fractions(rows):
    values = torch.tensor(rows, dtype=torch.float64)
    for i, row in enumerate(rows):
        exact = [Fraction(x) for x in row]
        mean = sum(exact) / len(exact)
        scale = max(map(abs, row), default=0.0) * 1e-13
        assert deviations(values)[i].tolist() == pytest.approx([float(x - mean) for x in exact], abs=scale)
        for correction in (0, 1):
            variance = sum((x - mean) ** 2 for x in exact) / (len(exact) - correction)
            got = standard_deviation(values, correction=correction)[i].item()
            assert got == pytest.approx(math.sqrt(variance), rel=1e-12, abs=2 * scale)
        if len(set(row)) == 1:
            assert not deviations(values)[i].any() and not normalized(values[i]).any()


def test_normalized_leaves_nan_alone():
    values = torch.tensor([math.nan, 0.7, 0.7, math.nan, 0.7])
    assert normalized(values).nan_to_num(9).tolist() == [9, 0, 0, 9, 0]
    values = torch.tensor([math.nan, 1.0, 2.0, math.nan, 3.0])
    z = (1.5) ** 0.5
    assert normalized(values).nan_to_num(9).tolist() == pytest.approx([9, -z, 0, 9, z])


@pytest.mark.parametrize("score", [0.7, -0.1, 123.456])
def test_whitened_advantages_of_ppo_are_zero_where_all_are_equal(score):
    """With lam = gamma = 1 and values that are all equal, every token has the same advantage."""
    batch = _scored([score] * 12, [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8])
    batch.fields["values"] = batch["response_mask"].like(batch["response_mask"].values * 0.3)
    config = AdvantageConfig(gamma=1.0, lam=1.0, kl_coef=0.0)
    columns, metrics = TokenAdvantages(config)(batch, None)
    assert not columns["advantages"].values.any()
    mask = batch["response_mask"].values
    assert torch.equal(columns["returns"].values, mask * torch.tensor(score, dtype=torch.float32))
    assert "critic/explained_variance" not in metrics  # There is no variance to explain.


def test_returns_of_a_learned_critic_are_the_score_without_rounding():
    """With lam = gamma = 1 the values cancel: every return is the score, and none has a variance."""
    batch = _scored([0.7] * 40, [1 + i % 9 for i in range(40)])
    values = torch.randn(len(batch["values"].values), generator=torch.Generator().manual_seed(0))
    batch.fields["values"] = batch["values"].like(values)
    columns, metrics = TokenAdvantages(AdvantageConfig(gamma=1.0, lam=1.0, kl_coef=0.0))(batch, None)
    mask = batch["response_mask"].values
    assert torch.equal(columns["returns"].values, mask * torch.tensor(0.7))
    assert "critic/explained_variance" not in metrics


def test_the_deviation_of_equal_scores_is_logged_as_zero():
    assert rollout_metrics(_scored([0.1] * 10, [2] * 10))["reward/std"] == 0.0


def test_sums_of_rewards_that_are_equal_on_paper_are_equal():
    """0.1 + 0.2 is 0.30000000000000004 in floating point: two such answers must not count as different."""
    parts = [[1.0, 1.0, 0.0], [0.0, 0.0, 1.0], [3.0, 0.0, 0.0]]
    weights = (0.1, 0.2, 0.3)

    def part(i):
        def reward(completions):
            return [row[i] for row in parts]

        return reward

    call = RewardCall([Reward(part(i), weight=weight, name=f"r{i}") for i, weight in enumerate(weights)], ())
    totals = call.scores([0, 1, 2], ["p"] * 3, ["c"] * 3, [[1]] * 3, {})
    assert totals == [0.3] * 3
    (one,) = RewardCall([lambda completions: [0.1 + 0.2]], ()).scores([0], ["p"], ["c"], [[1]], {})
    assert one == 0.1 + 0.2  # A single reward is as it is.


def test_scores_keep_what_the_reward_has_returned():
    """In float32, 0.7 is below 0.7 and 0.1 above 0.1, so that limits of scores would be missed."""
    call = RewardCall([lambda completions: [0.7, 0.1]], ())

    class Context:
        class tokenizer:  # noqa: N801
            @staticmethod
            def decode(ids, skip_special_tokens):
                return str(ids)

    mask = Packed(torch.tensor([0.0, 1.0, 0.0, 1.0]), [2, 2])
    batch = Batch([0, 1], {
        "prompt": ["a", "b"], "response_mask": mask, "sequence_ids": mask.like(torch.tensor([1, 2, 3, 4]))})
    assert call(batch, Context())["score"].tolist() == [0.7, 0.1]
