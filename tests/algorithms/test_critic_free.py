"""Advantages and averages of the algorithms without a critic, against loops written from the papers."""

import math
import random
import statistics
from dataclasses import dataclass, field, replace

import pytest
import torch

from realhf.algorithms.advantages import AdvantageInputs, SampleAdvantages
from realhf.algorithms.kl import RewardKL, kl_estimate
from realhf.algorithms.policy_loss import PolicyLoss, PolicyLossConfig
from realhf.calls import KEEP
from realhf.data.batch import Batch, Packed
from realhf.errors import UserError
from realhf.rewards.shaping import CosineReward, SoftOverlongPenalty

GROUP = 4
EPS = 1e-6


@dataclass
class _Context:
    state: dict = field(default_factory=dict)


def _batch(num_samples=12, *, seed=0):
    rng = random.Random(seed)
    shapes = [(rng.randint(1, 4), rng.randint(1, 7)) for _ in range(num_samples)]
    lengths = [p + r for p, r in shapes]
    mask = torch.tensor([m for p, r in shapes for m in [0.0] * p + [1.0] * r]).double()
    columns = {
        name: torch.tensor([rng.gauss(0, 0.5) for _ in mask]).double() * mask
        for name in ("logprobs", "gen_logprobs", "ref_logprobs", "token_returns", "entropy")
    }
    fields = {name: Packed(x, lengths) for name, x in {**columns, "response_mask": mask}.items()}
    scores = torch.tensor([rng.choice([0.0, 1.0, 0.3]) for _ in shapes]).double()
    scores[0] = 0.6
    scores[4:8] = 1.0  # A group whose samples all get the same.
    greedy = torch.tensor([rng.choice([0.0, 1.0]) for _ in shapes]).double()
    finished = torch.tensor([float(rng.random() < 0.8) for _ in shapes])
    greedy_lengths = [rng.randint(1, 7) for _ in shapes]
    greedy_mask = Packed(torch.ones(sum(greedy_lengths)).double(), greedy_lengths)
    return Batch(list(range(num_samples)), fields | {
        "score": scores, "finished": finished, "greedy_score": greedy, "greedy_mask": greedy_mask,
        "greedy_finished": finished.flip(0)})


def _rows(batch, column):
    """Return the values of each response's tokens."""
    pairs = zip(batch[column].split(), batch["response_mask"].split(), strict=True)
    return [values[mask.bool()].tolist() for values, mask in pairs]


def _token_kl(policy, reference, estimator):
    d = policy - reference
    return {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[estimator]


def _check(columns, expected, batch):
    """Require these advantages per response token, and finite numbers elsewhere."""
    got = _rows(Batch(batch.ids, batch.fields | {"got": columns["advantages"]}), "got")
    for ours, theirs in zip(got, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_rloo_compares_with_the_mean_of_the_others(estimator):
    """RLOO, arXiv:2402.14740: R(y_i) - 1/(k-1) sum over j != i of R(y_j), with the KL in R."""
    batch = _batch()
    kl = RewardKL(kl_coef=0.2, kl_estimator=estimator)
    columns, metrics = SampleAdvantages(GROUP, "leave_one_out", "none", reward_kl=kl)(batch, _Context())
    kls = [
        [_token_kl(p, q, estimator) for p, q in zip(*pair, strict=True)]
        for pair in zip(_rows(batch, "gen_logprobs"), _rows(batch, "ref_logprobs"), strict=True)
    ]
    rewards = [score - 0.2 * sum(tokens) for score, tokens in zip(batch["score"].tolist(), kls, strict=True)]
    expected = []
    for i, tokens in enumerate(kls):
        start = i // GROUP * GROUP
        others = [rewards[j] for j in range(start, start + GROUP) if j != i]
        expected.append([rewards[i] - statistics.mean(others)] * len(tokens))
    _check(columns, expected, batch)
    assert metrics["reward/kl"] == pytest.approx(statistics.mean(map(sum, kls)), rel=1e-9)


def test_reinforce_plus_plus_normalises_over_the_tokens_of_the_batch():
    """arXiv:2501.03262: A_t = r - beta sum over i >= t of KL(i), then minus its mean, over its deviation."""
    batch = _batch(7)
    columns, _ = SampleAdvantages(
        1, "none", "tokens", reward_kl=RewardKL(kl_coef=0.3), kl_to_go=True)(batch, _Context())
    plain = []
    columns_of = _rows(batch, "gen_logprobs"), _rows(batch, "ref_logprobs")
    for score, policy, reference in zip(batch["score"].tolist(), *columns_of, strict=True):
        kls = [p - q for p, q in zip(policy, reference, strict=True)]
        plain.append([score - 0.3 * sum(kls[t:]) for t in range(len(kls))])
    tokens = [x for row in plain for x in row]
    mean, deviation = statistics.mean(tokens), statistics.pstdev(tokens)
    _check(columns, [[(x - mean) / (deviation + EPS) for x in row] for row in plain], batch)
    outside = columns["advantages"].values[batch["response_mask"].values == 0]
    assert outside.tolist() == [0.0] * len(outside)


def test_remax_compares_with_the_greedy_answer():
    batch = _batch(6)
    columns, _ = SampleAdvantages(1, "greedy", "none")(batch, _Context())
    differences = (batch["score"] - batch["greedy_score"]).tolist()
    counts = map(len, _rows(batch, "logprobs"))
    _check(columns, [[d] * n for d, n in zip(differences, counts, strict=True)], batch)


def test_greedy_answers_are_shaped_as_well():
    batch = _batch(6)
    inputs = AdvantageInputs(CosineReward(9))
    columns, _ = SampleAdvantages(1, "greedy", "none", inputs=inputs)(batch, _Context())
    sampled, greedy = (
        CosineReward(9)(batch[f"{kind}score"], torch.tensor(counts).double(), batch[f"{kind}finished"])
        for kind, counts in (("", [len(row) for row in _rows(batch, "logprobs")]),
                             ("greedy_", batch["greedy_mask"].lengths))
    )
    counts = map(len, _rows(batch, "logprobs"))
    differences = (sampled - greedy).tolist()
    _check(columns, [[d] * n for d, n in zip(differences, counts, strict=True)], batch)


@pytest.mark.parametrize(
    ("shaping", "sentence"),
    [
        (lambda score, lengths, finished: score / 0, "returned -?inf: it must return finite numbers, or NaN"),
        (lambda score, lengths, finished: score.tolist(), "returned list: it must return a tensor with"),
        (lambda score, lengths, finished: score.mean(), r"returned a tensor of shape \(\)"),
    ],
)
def test_a_shaping_that_returns_something_else_is_named(shaping, sentence):
    inputs = AdvantageInputs(shaping)
    with pytest.raises(UserError, match=f"score_shaping .*lambda.* {sentence}"):
        SampleAdvantages(GROUP, inputs=inputs)(_batch(8), _Context())


def test_groups_are_filtered_by_scores_before_shaping():
    """DAPO's equation 11 counts right answers: a length penalty does not make a group informative."""
    batch = _batch(8)
    inputs = AdvantageInputs(SoftOverlongPenalty(8, 7))
    columns, _ = SampleAdvantages(GROUP, inputs=inputs, filters=True)(batch, _Context())
    assert columns[KEEP].tolist() == [True] * 4 + [False] * 4


@pytest.mark.parametrize("deviation", ["population", "sample"])
@pytest.mark.parametrize("filters", [False, True])
def test_normalisation_by_batch_counts_each_sample_once(deviation, filters):
    """ScaleRL: differences from the mean of the group, over their deviation in the batch."""
    batch = _batch(seed=1)
    batch["score"][8] = math.nan  # A failed reward, whose group drops out.
    function = SampleAdvantages(GROUP, normalize="batch", deviation=deviation, filters=filters)
    columns, metrics = function(batch, _Context())
    scores = batch["score"].tolist()
    differences = [scores[i] - statistics.mean(scores[i // GROUP * GROUP :][:GROUP]) for i in range(8)]
    counted = differences[:4] if filters else differences  # The second group's scores are equal.
    spread = statistics.pstdev(counted) if deviation == "population" else statistics.stdev(counted)
    rows = _rows(batch, "logprobs")
    got = columns["advantages"].split()
    for i in range(4 if filters else 8):
        chosen = batch["response_mask"].split()[i].bool()
        expected = [differences[i] / (spread + EPS)] * len(rows[i])
        assert got[i][chosen].tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert all(got[i].isnan().all() for i in range(8, 12))
    assert metrics["reward/zero_std_groups"] == 0.5
    if filters:
        assert columns[KEEP].tolist() == [True] * 4 + [False] * 8


@pytest.mark.parametrize("size", [3, 6, 7])
def test_equal_scores_are_equal_however_their_mean_is_rounded(size):
    batch = _batch(size)
    batch.fields["score"] = torch.full((size,), 0.1)
    columns, metrics = SampleAdvantages(size, filters=True)(batch, _Context())
    assert not columns[KEEP].any() and metrics["reward/zero_std_groups"] == 1.0


def test_an_adaptive_coefficient_follows_its_target():
    """Ziegler et al. 2019: e = clip(KL / target - 1, -0.2, 0.2), beta *= 1 + e n / horizon."""
    kl = RewardKL(kl_coef=0.1, kl_target=2.0, kl_horizon=100)
    context, expected = _Context(), 0.1
    for seed in range(4):
        batch = _batch(seed=seed)
        penalties, metrics = kl.penalties(batch, context)
        differences = batch["gen_logprobs"].values - batch["ref_logprobs"].values
        torch.testing.assert_close(penalties, expected * differences)
        assert metrics["reward/kl_coef"] == pytest.approx(expected)
        error = float(differences.sum()) / len(batch) / 2.0 - 1
        expected *= 1 + max(-0.2, min(0.2, error)) * len(batch) / 100
    assert context.state == {"reward_kl_coef": pytest.approx(expected)}


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_gradients_of_the_estimates_are_what_the_docstring_says(estimator):
    """On a categorical distribution, the expected gradient of k2 is that of KL(policy || reference), that of
    k3 is that of KL(reference || policy), and that of k1 is 0."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, generator=generator, dtype=torch.float64, requires_grad=True)
    noise = torch.randn(5, generator=generator, dtype=torch.float64)
    reference = (logits.detach() + 0.5 * noise).log_softmax(-1)  # So near that no estimate is clamped.
    logp = logits.log_softmax(-1)
    estimates = kl_estimate(logp, reference, estimator)
    (got,) = torch.autograd.grad((logp.detach().exp() * estimates).sum(), logits, retain_graph=True)
    exact = {
        "k1": 0.0 * logits.sum(),
        "k2": (logp.exp() * (logp - reference)).sum(),
        "k3": (reference.exp() * (reference - logp)).sum(),
    }[estimator]
    (expected,) = torch.autograd.grad(exact, logits)
    torch.testing.assert_close(got, expected)


def test_shaping_and_token_returns_take_part():
    batch = _batch(8)
    inputs = AdvantageInputs(CosineReward(8), token_returns=True)
    columns, metrics = SampleAdvantages(GROUP, inputs=inputs)(batch, _Context())
    counts = torch.tensor([float(len(row)) for row in _rows(batch, "logprobs")])
    shaped = CosineReward(8)(batch["score"], counts, batch["finished"])
    plain, _ = SampleAdvantages(GROUP)(Batch(batch.ids, batch.fields | {"score": shaped}), _Context())
    expected = plain["advantages"].values + batch["token_returns"].values
    torch.testing.assert_close(columns["advantages"].values, expected)
    assert metrics["reward/mean"] == pytest.approx(batch["score"].mean().item())
    assert metrics["reward/shaped_mean"] == pytest.approx(shaped.mean().item())


def _with_advantages(seed=0):
    batch = _batch(seed=seed)
    batch["score"][8] = math.nan
    columns, _ = SampleAdvantages(GROUP, counts_prompt_tokens=True)(batch, _Context())
    return Batch(batch.ids, batch.fields | columns)


def _run(config, batch, totals=None):
    loss = PolicyLoss(config)
    new = batch["logprobs"].values.clone().requires_grad_()
    outputs = {"logprobs": new, "entropy": 0.5 * new**2}  # An entropy with a gradient.
    value, metrics = loss(outputs, batch, loss.totals(batch) if totals is None else totals)
    value.backward()
    return value.item(), {name: x.item() for name, x in metrics.items()}, new.grad


def test_cispo_is_the_papers_sum_by_prompts():
    """ScaleRL: the mean over prompts of 1/T sum of sg(min(rho, cap)) A log p; an entropy bonus beside it."""
    batch = _with_advantages()
    config = PolicyLossConfig(objective="cispo", ratio_cap=1.2, average="prompt", entropy_coef=0.1)
    value, metrics, grad = _run(config, batch)
    columns = [_rows(batch, name) for name in ("logprobs", "gen_logprobs", "advantages")]
    samples = [list(zip(*rows, strict=True)) for rows in zip(*columns, strict=True)]
    by_prompt, expected_grad, capped = [], [], 0
    for prompt in (0, 1):  # The third has a failed reward.
        tokens = [t for sample in samples[prompt * GROUP : (prompt + 1) * GROUP] for t in sample]
        terms = []
        for new, old, advantage in tokens:
            weight = min(math.exp(new - old), 1.2)
            capped += math.exp(new - old) > 1.2
            terms.append(weight * advantage * new + 0.1 * 0.5 * new**2)
            expected_grad.append(-(weight * advantage + 0.1 * new) / len(tokens) / 2)
        by_prompt.append(sum(terms) / len(terms))
    assert value == pytest.approx(-statistics.mean(by_prompt), rel=1e-9)
    counted = batch["response_mask"].values.bool() & ~batch["advantages"].values.isnan()
    assert grad[counted].tolist() == pytest.approx(expected_grad, rel=1e-9)
    assert not grad[~counted].any()
    assert metrics["clip_fraction"] == pytest.approx(capped / len(expected_grad)) and capped


CONFIGS = [
    PolicyLossConfig(objective="cispo", ratio_cap=1.2, average="prompt", entropy_coef=0.1),
    PolicyLossConfig(average="prompt", kl_coef=0.1, kl_estimator="k1"),
    PolicyLossConfig(average="constant", constant_length=9, kl_coef=0.1, kl_estimator="k2"),
    PolicyLossConfig(ratio="sequence_mean", clip_low=0.03, clip_high=0.04),
    PolicyLossConfig(ratio="sequence", average="token"),
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_losses_add_up_over_any_partition(config):
    batch, rng = _with_advantages(), random.Random(3)
    totals = PolicyLoss(config).totals(batch)
    value, metrics, grad = _run(config, batch, totals)
    for num_parts in (2, 5, 12):
        part_of = [rng.randrange(num_parts) for _ in batch.ids]
        parts = [part for p in range(num_parts) if (part := [i for i in batch.ids if part_of[i] == p])]
        results = [_run(config, batch.select(part), totals) for part in parts]
        assert sum(r[0] for r in results) == pytest.approx(value, rel=1e-12)
        for name, whole in metrics.items():
            combined = (max if name.endswith("/max") else sum)(r[1][name] for r in results)
            assert combined == pytest.approx(whole, rel=1e-12), name
        grads = batch["response_mask"].like(grad).split()
        for part, (_, _, part_grad) in zip(parts, results, strict=True):
            torch.testing.assert_close(part_grad, torch.cat([grads[i] for i in part]), rtol=1e-12, atol=1e-15)
        sums = [PolicyLoss(config).totals(batch.select(part)) for part in parts]
        assert {name: sum(s[name] for s in sums) for name in totals} == pytest.approx(totals, rel=1e-12)


def test_a_decoupled_ratio_of_responses_has_a_weight_of_responses():
    """w = (product of p_prox / p_gen)^(1/n): recomputed log-probs that are moved by a constant."""
    batch = _with_advantages()
    moved = batch["response_mask"].like(batch["gen_logprobs"].values + 0.1 * batch["response_mask"].values)
    batch = Batch(batch.ids, batch.fields | {"prox_logprobs": moved})
    config = PolicyLossConfig(ratio="sequence_mean", proximal="recomputed")
    value, metrics, _ = _run(config, batch)
    shifted = Batch(batch.ids, batch.fields | {"gen_logprobs": moved})
    plain, _, _ = _run(replace(config, proximal="generated"), shifted)
    assert value == pytest.approx(math.exp(0.1) * plain, rel=1e-9)
    assert metrics["importance_weight"] == pytest.approx(math.exp(0.1), rel=1e-9)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"objective": "cispo", "ratio_cap": 0.5}, "loss.ratio_cap is 0.5: it must be at least 1"),
        ({"entropy_coef": -1.0}, "loss.entropy_coef is -1.0: it must not be negative"),
        ({"average": "constant", "constant_length": 0}, "loss.constant_length is 0: it must be at least 1"),
        ({"objective": "cispo", "dual_clip": 3.0}, "loss.dual_clip is 3.0: it must be None unless"),
        ({"average": "batch"}, "loss.average is 'batch'"),
        ({"ratio_cap": 3.0}, "loss.ratio_cap is 3.0: it must be 5.0 unless loss.objective is cispo"),
        ({"constant_length": 9}, "loss.constant_length is 9: it must be None unless loss.average"),
        ({"kl_estimator": "k1"}, "loss.kl_estimator is k1: it must be k3 unless loss.kl_coef is above 0"),
    ],
)
def test_illegal_settings_are_refused(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        PolicyLossConfig(**settings)
