"""Advantages against their definitions as plain sums."""

import random
import statistics

import pytest
import torch

from realhf.algorithms.advantages import SampleAdvantages
from realhf.algorithms.ppo import AdvantageConfig, TokenAdvantages, generalized_advantages
from realhf.data.batch import Batch, Packed


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
