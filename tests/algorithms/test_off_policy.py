"""Off-policy corrections against loops over sequences written from the papers."""

import math
import random
from dataclasses import dataclass, field, replace

import pytest
import torch

from realhf.algorithms.advantages import AdvantageConfig, AdvantageInputs, SampleAdvantages, TokenAdvantages
from realhf.algorithms.mismatch import AgeLimit
from realhf.algorithms.policy_loss import PolicyLoss, PolicyLossConfig
from realhf.algorithms.ppo import ValueLoss
from realhf.data.batch import Batch, Packed
from realhf.errors import UserError

LOG_PROBS = ("logprobs", "gen_logprobs", "prox_logprobs", "ref_logprobs")
NOISE = (*LOG_PROBS, "advantages", "values", "new_values", "entropy")
UPDATES = 7
GROUP = 4


@dataclass
class _Context:
    updates: dict[str, int] = field(default_factory=lambda: {"actor": UPDATES, "critic": 99})


def _with_ages(limit):
    return SampleAdvantages(GROUP, inputs=AdvantageInputs(age_limit=limit))


def _batch(num_samples=8, *, seed=0):
    """Return samples with ratios on both sides of every limit, and with versions from UPDATES - 3 on."""
    rng = random.Random(seed)
    shapes = [(rng.randint(1, 4), rng.randint(2, 7)) for _ in range(num_samples)]
    lengths = [p + r for p, r in shapes]
    mask = torch.tensor([m for p, r in shapes for m in [0.0] * p + [1.0] * r]).double()
    noise = {name: torch.tensor([rng.gauss(0, 0.5) for _ in mask]).double() * mask for name in NOISE}
    columns = {name: Packed(x, lengths) for name, x in noise.items()}
    versions = [
        v for p, r in shapes
        for v in [0] * p + sorted(UPDATES - rng.randint(0, 3) for _ in range(r))
    ]
    columns |= {"response_mask": Packed(mask, lengths), "versions": Packed(torch.tensor(versions), lengths)}
    score = torch.tensor([rng.gauss(0, 1) for _ in shapes]).double()
    return Batch(list(range(num_samples)), {**columns, "score": score, "finished": torch.ones(num_samples)})


def _with(batch, **columns):
    return Batch(batch.ids, batch.fields | {name: batch["versions"].like(x) for name, x in columns.items()})


def _run(loss, batch, totals=None):
    """Return the value, the metrics and the gradient with respect to the model's output of every token."""
    name = "new_values" if loss.output == "values" else "logprobs"
    new = batch[name].values.clone().requires_grad_()
    outputs = {loss.output: new, "entropy": batch["entropy"].values}
    value, metrics = loss(outputs, batch, loss.totals(batch) if totals is None else totals)
    value.backward()
    numbers = {key: x.item() for key, x in metrics.items()}
    return value.item(), numbers, new.grad


def _finished(loss, metrics):
    """Return the metrics of a call with one mini-batch."""
    return loss.summarize(metrics, metrics)


def _decoupled_by_hand(batch, config, kept):
    """Return the loss, its gradient by token, and metrics; `kept` says which tokens count.

    The decoupled objective of Hilton et al. 2021 is E[pi_prox / pi_behav min(r A, clip(r) A)] with
    r = pi / pi_prox. Its first ratio is a constant, here truncated to C. Dual clip: arXiv:1912.09729.
    """
    new, gen, prox, ref, advantage = (
        batch[name].values.tolist() for name in (*LOG_PROBS, "advantages"))
    rows, start = [], 0
    for length in batch["response_mask"].lengths:
        rows.append([t for t in range(start, start + length) if kept[t]])
        start += length
    num_tokens = sum(map(len, rows))
    rows = [row for row in rows if row]
    loss, grad, weights, capped, mismatch = 0.0, [0.0] * start, [], 0, 0.0
    for row in rows:
        for t in row:
            share = 1 / len(row) / len(rows) if config.average == "sequence" else 1 / num_tokens
            w = math.exp(prox[t]) / math.exp(gen[t])
            capped += w > (config.importance_cap or math.inf)
            w = min(w, config.importance_cap or math.inf)
            r, a = math.exp(new[t]) / math.exp(prox[t]), advantage[t]
            bounded = min(max(r, 1 - config.clip_low), 1 + config.clip_high)
            objective, slope = (r * a, r * a) if r * a <= bounded * a else (bounded * a, 0.0)
            if config.dual_clip is not None and a < 0 and objective < config.dual_clip * a:
                objective, slope = config.dual_clip * a, 0.0
            q = math.exp(ref[t]) / math.exp(new[t])
            loss += share * (config.kl_coef * (q - math.log(q) - 1) - w * objective)
            grad[t] = share * (config.kl_coef * (1 - q) - w * slope)
            weights.append(w)
            back = math.exp(prox[t]) / math.exp(gen[t])
            mismatch += back - 1 - math.log(back)
    metrics = {"importance_weight": sum(weights) / num_tokens, "mismatch/kl": mismatch / num_tokens}
    if config.importance_cap is not None:
        metrics["importance_cap_fraction"] = capped / num_tokens
    return loss, grad, metrics


CONFIGS = [
    PolicyLossConfig(proximal="recomputed", importance_cap=cap, dual_clip=dual, kl_coef=kl, average=average)
    for cap, dual, kl in ((None, None, 0.0), (1.0, None, 0.0), (1.3, 1.4, 0.1))
    for average in ("sequence", "token")
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_the_decoupled_loss_is_the_papers_sum(config):
    batch = _batch()
    value, metrics, grad = _run(PolicyLoss(config), batch)
    expected, expected_grad, expected_metrics = _decoupled_by_hand(
        batch, config, batch["response_mask"].values.bool().tolist())
    assert value == pytest.approx(expected, rel=1e-9)
    assert grad.tolist() == pytest.approx(expected_grad, rel=1e-9, abs=1e-15)
    metrics = _finished(PolicyLoss(config), metrics)
    assert {name: metrics[name] for name in expected_metrics} == pytest.approx(expected_metrics, rel=1e-9)
    assert 0 < metrics["clip_fraction"] < 1
    assert 0 < metrics.get("importance_cap_fraction", 0.5) < 1
    assert 0 < metrics.get("dual_clip_fraction", 0.5) < 1


def test_the_first_update_is_truncated_importance_sampling():
    """Before the first update the gradient is that of -min(p_train / p_generated, C) A log p_train, in which
    the weight is a constant."""
    batch = _batch()
    batch = _with(batch, prox_logprobs=batch["logprobs"].values)
    config = PolicyLossConfig(proximal="recomputed", importance_cap=1.2, average="token")
    _, _, grad = _run(PolicyLoss(config), batch)
    weight = (batch["logprobs"].values - batch["gen_logprobs"].values).exp().clamp(max=1.2)
    mask = batch["response_mask"].values
    torch.testing.assert_close(grad, -weight * batch["advantages"].values * mask / mask.sum())


def test_weights_far_off_are_finite():
    for far in (-120.0, 120.0):
        batch = _batch()
        mask = batch["response_mask"].values
        batch = _with(batch, gen_logprobs=(batch["prox_logprobs"].values - far) * mask)
        value, metrics, grad = _run(PolicyLoss(PolicyLossConfig(proximal="recomputed")), batch)
        assert grad.isfinite().all() and all(map(math.isfinite, (value, *metrics.values())))
        assert metrics["importance_weight"] == pytest.approx(math.exp(math.copysign(20.0, far)))


@pytest.mark.parametrize("average", ["sequence", "token"])
def test_recomputed_log_probs_that_equal_the_generators_change_nothing(average):
    batch = _batch()
    batch = _with(batch, prox_logprobs=batch["gen_logprobs"].values)
    plain = PolicyLossConfig(dual_clip=1.4, kl_coef=0.1, average=average)
    value, metrics, grad = _run(PolicyLoss(plain), batch)
    for cap in (None, 1.0):
        config = replace(plain, proximal="recomputed", importance_cap=cap)
        other, other_metrics, other_grad = _run(PolicyLoss(config), batch)
        assert other == value and torch.equal(other_grad, grad)
        assert other_metrics["importance_weight"] == pytest.approx(1.0, rel=1e-12)
        other_metrics = _finished(PolicyLoss(config), other_metrics)
        mismatch = [other_metrics[f"mismatch/{name}"] for name in ("kl", "max", "ess")]
        assert mismatch == [0, 0, 1]
        shared = {name for name in metrics if not name.startswith("mismatch/")}
        assert {name: other_metrics[name] for name in shared} == {name: metrics[name] for name in shared}


def test_without_options_the_loss_is_the_clipped_surrogate_bit_for_bit():
    """The expression is that of the loss before it had these options."""
    batch = _batch()
    loss = PolicyLoss(PolicyLossConfig(average="token"))
    value, metrics, grad = _run(loss, batch)
    new = batch["logprobs"].values.clone().requires_grad_()
    advantage, mask = batch["advantages"].values, batch["response_mask"].values
    ratio = (new - batch["gen_logprobs"].values).clamp(-20.0, 20.0).exp()
    surrogate = (ratio * advantage).minimum(ratio.clamp(1 - 0.2, 1 + 0.2) * advantage)
    expected = -(surrogate * (mask / mask.sum())).sum()
    expected.backward()
    assert value == expected.item() and torch.equal(grad, new.grad)
    metrics = _finished(loss, metrics)
    assert metrics["mismatch/kl"] == pytest.approx(metrics["approx_kl"], rel=1e-12)


def _left_out_by_hand(batch, max_age, aged):
    """Return which tokens must not count, prompts included."""
    left_out = []
    for versions, mask in zip(batch["versions"].split(), batch["response_mask"].split(), strict=True):
        tokens = list(zip(versions.tolist(), mask.tolist(), strict=True))
        old = [response == 1 and UPDATES - version > max_age for version, response in tokens]
        dropped = aged == "drop" and any(old)
        left_out += [m == 0 or o or dropped for (_, m), o in zip(tokens, old, strict=True)]
    return left_out


@pytest.mark.parametrize("aged, max_age", [("mask", 0), ("mask", 1), ("drop", 1), ("drop", 2), ("mask", 3)])
@pytest.mark.parametrize("average", ["sequence", "token"])
def test_old_tokens_have_no_weight(aged, max_age, average):
    batch = _batch(12, seed=3)
    whole, _ = SampleAdvantages(GROUP)(batch, None)
    columns, metrics = _with_ages(AgeLimit(max_age, aged))(batch, _Context())
    left_out = _left_out_by_hand(batch, max_age, aged)
    is_response = batch["response_mask"].values.bool()
    assert (columns["advantages"].values.isnan() & is_response).tolist() == [
        out and response for out, response in zip(left_out, is_response.tolist(), strict=True)]
    config = PolicyLossConfig(
        proximal="recomputed", importance_cap=1.3, kl_coef=0.1, average=average, max_age=max_age, aged=aged)
    loss = PolicyLoss(config)
    trained = Batch(batch.ids, batch.fields | columns)
    value, loss_metrics, grad = _run(loss, trained)
    # The rewards of old samples still count for their groups, so the other advantages stay the same.
    by_hand = Batch(batch.ids, batch.fields | whole)
    expected, expected_grad, expected_metrics = _decoupled_by_hand(
        by_hand, config, [not out for out in left_out])
    assert value == pytest.approx(expected, rel=1e-9)
    assert grad.tolist() == pytest.approx(expected_grad, rel=1e-9, abs=1e-15)
    loss_metrics = _finished(loss, loss_metrics)
    assert loss_metrics["mismatch/kl"] == pytest.approx(expected_metrics["mismatch/kl"], rel=1e-9)
    ages = [UPDATES - v for v, r in zip(batch["versions"].values.tolist(), is_response, strict=True) if r]
    assert metrics["staleness/mean"] == pytest.approx(sum(ages) / len(ages))
    assert metrics["staleness/max"] == max(ages) == 3
    versions = zip(batch["versions"].values.tolist(), left_out, strict=True)
    kept = [UPDATES - version for version, out in versions if not out]
    assert metrics["mismatch/updates"] == pytest.approx(sum(kept) / len(kept))
    num_out = sum(left_out) - int((~is_response).sum())
    assert metrics["staleness/left_out"] == pytest.approx(num_out / len(ages))
    assert (0 < num_out < len(ages)) == (max_age < 3)


def test_without_a_limit_ages_are_only_measured():
    batch = _batch()
    columns, metrics = _with_ages(AgeLimit())(batch, _Context())
    plain, plain_metrics = SampleAdvantages(GROUP)(batch, None)
    assert torch.equal(columns["advantages"].values, plain["advantages"].values)
    assert metrics.keys() - plain_metrics.keys() == {"staleness/mean", "staleness/max"}


@pytest.mark.parametrize("aged", ["mask", "drop"])
def test_the_critic_and_whitening_leave_the_same_tokens_out(aged):
    batch = _batch(12, seed=3)
    config = AdvantageConfig(whiten=False)
    whole, _ = TokenAdvantages(config)(batch, None)
    kept = torch.tensor([not out for out in _left_out_by_hand(batch, 1, aged)])
    limit = AgeLimit(1, aged)
    columns, _ = TokenAdvantages(config, AdvantageInputs(age_limit=limit))(batch, _Context())
    assert torch.equal(columns["returns"].values[kept], whole["returns"].values[kept])
    limited = AdvantageInputs(age_limit=limit)
    whitened, metrics = TokenAdvantages(replace(config, whiten=True), limited)(batch, _Context())
    advantages = whole["advantages"].values[kept]
    torch.testing.assert_close(
        whitened["advantages"].values[kept],
        (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8), rtol=1e-9, atol=1e-9,
    )
    returns, values = whole["returns"].values[kept], batch["values"].values[kept]
    explained = 1 - ((returns - values).var(correction=0) / returns.var(correction=0)).item()
    assert metrics["critic/explained_variance"] == pytest.approx(explained, rel=1e-9)
    value, _, grad = _run(ValueLoss(), Batch(batch.ids, batch.fields | columns))
    expected = 0.0
    new = batch["new_values"].values
    for t in kept.nonzero()[:, 0].tolist():
        old, target = float(batch["values"].values[t]), float(whole["returns"].values[t])
        bounded = min(max(float(new[t]), old - 0.2), old + 0.2)
        expected += 0.5 * max((float(new[t]) - target) ** 2, (bounded - target) ** 2) / int(kept.sum())
    assert value == pytest.approx(expected, rel=1e-9)
    assert not grad[~kept].any() and grad[kept].any()


def test_failed_rewards_and_old_tokens_are_left_out_together():
    batch = _batch(12, seed=3)
    batch["score"][5] = math.nan
    columns, _ = _with_ages(AgeLimit(0))(batch, _Context())
    is_response = batch["response_mask"].values.bool()
    found = columns["advantages"].values.isnan()[is_response].tolist()
    sample = [i for i, mask in zip(batch.ids, batch["response_mask"].split(), strict=True) for _ in mask]
    old = _left_out_by_hand(batch, 0, "mask")
    expected = [old[t] or 4 <= sample[t] < 8 for t in range(len(old)) if is_response[t]]
    assert found == expected
    totals = PolicyLoss(PolicyLossConfig()).totals(Batch(batch.ids, batch.fields | columns))
    kept = {sample[t] for t in range(len(old)) if is_response[t] and not old[t]} - {4, 5, 6, 7}
    assert totals == {"tokens": expected.count(False), "sequences": len(kept)}
    assert len(kept) < 8


def test_a_step_without_legal_tokens_ends_the_run_with_a_sentence():
    batch = _batch()
    context = _Context({"actor": UPDATES + 10})
    with pytest.raises(UserError, match="loss.max_age is 2 and leaves no token.*ages are 10 to 13"):
        _with_ages(AgeLimit(2))(batch, context)


@pytest.mark.parametrize(
    "config",
    [*CONFIGS[-2:], PolicyLossConfig(average="sequence"), PolicyLossConfig(average="token")], ids=str,
)
@pytest.mark.parametrize("aged", ["mask", "drop"])
def test_the_loss_adds_up_over_any_partition(config, aged):
    batch, rng = _batch(12, seed=3), random.Random(3)
    columns, _ = _with_ages(AgeLimit(1, aged))(batch, _Context())
    batch = Batch(batch.ids, batch.fields | columns)
    loss = PolicyLoss(config)
    totals = loss.totals(batch)
    value, metrics, grad = _run(loss, batch)
    grads = grad.split(batch["response_mask"].lengths)
    for num_parts in (2, 5, 12):
        part_of = [rng.randrange(num_parts) for _ in batch.ids]
        parts = [[i for i in batch.ids if part_of[i] == part] for part in range(num_parts)]
        counts = [loss.totals(batch.select(part)) for part in parts]
        assert {name: sum(count[name] for count in counts) for name in totals} == totals
        results = [(part, *_run(loss, batch.select(part), totals)) for part in parts if part]
        assert sum(found for _, found, _, _ in results) == pytest.approx(value, rel=1e-12, abs=1e-15)
        for name, whole in metrics.items():
            combined = (max if name.endswith("/max") else sum)(found[name] for _, _, found, _ in results)
            assert combined == pytest.approx(whole, rel=1e-12), name
        for part, _, _, found in results:
            torch.testing.assert_close(found, torch.cat([grads[i] for i in part]), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    "fields, sentence",
    [
        ({"importance_cap": 2.0}, "loss.importance_cap is 2.0: it must be None unless"),
        ({"importance_cap": 0.5, "proximal": "recomputed"}, "loss.importance_cap is 0.5: it must be at"),
        ({"importance_cap": math.nan, "proximal": "recomputed"}, "loss.importance_cap is nan: it must be at"),
        ({"max_age": -1}, "loss.max_age is -1: it must not be negative"),
        ({"aged": "drop"}, "loss.aged is drop: it must be mask unless loss.max_age is given"),
        ({"proximal": "old"}, "loss.proximal is 'old': it must be 'generated' or 'recomputed'"),
    ],
)
def test_options_that_contradict_each_other_are_refused(fields, sentence):
    with pytest.raises(ValueError, match=sentence):
        PolicyLossConfig(**fields)
