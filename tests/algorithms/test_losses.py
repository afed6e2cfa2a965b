"""Losses against loops over sequences written from the papers, and against sums over partitions."""

import math
import random

import pytest
import torch
import torch.nn.functional as F

from realhf.algorithms.policy_loss import PolicyLoss, PolicyLossConfig
from realhf.algorithms.ppo import ValueLoss
from realhf.algorithms.sft import CrossEntropy
from realhf.calls import Output
from realhf.checkpoint.hf import load_weights
from realhf.data.batch import Batch, Packed
from realhf.distributed.world import ParallelGroups, World
from realhf.engine.base import PassSettings
from realhf.engine.chunked_loss import compute_outputs
from realhf.layout import Layout
from realhf.models.model_config import ModelConfig
from realhf.models.param_spec import model_spec
from realhf.nn.transformer import Transformer
from tests.engine.reference import plain_model

COLUMNS = ("gen_logprobs", "ref_logprobs", "advantages", "values", "returns")
OUTPUTS = ("logprobs", "entropy", "new_values")


def _batch(num_samples=7, *, seed=0):
    """Return samples of different lengths, with ratios below and above the clipping range."""
    generator = torch.Generator().manual_seed(seed)
    rng = random.Random(seed)
    shapes = [(rng.randint(1, 5), rng.randint(1, 6)) for _ in range(num_samples)]
    lengths = [p + r for p, r in shapes]
    mask = torch.cat([torch.tensor([0.0] * p + [1.0] * r) for p, r in shapes]).double()
    noise = torch.randn(len(COLUMNS) + len(OUTPUTS), len(mask), generator=generator).double()
    fields = {
        name: Packed(0.4 * x * mask, lengths) for name, x in zip((*COLUMNS, *OUTPUTS), noise, strict=True)
    }
    fields["response_mask"] = Packed(mask, lengths)
    return Batch(list(range(num_samples)), fields)


def _loss(loss, batch, totals):
    """Return the value, the metrics and the gradient with respect to the model's output of every token."""
    new = batch["new_values" if loss.output == "values" else "logprobs"].values.clone().requires_grad_()
    outputs = {"logprobs": new, "values": new, "entropy": batch["entropy"].values}
    value, metrics = loss(outputs, batch, totals)
    value.backward()
    return value.item(), {name: x.item() for name, x in metrics.items()}, new.grad


def _responses(batch, *names):
    """Return for each sample a list of one tuple of floats per response token."""
    mask = batch["response_mask"].split()
    columns = [[x[m.bool()].tolist() for x, m in zip(batch[n].split(), mask, strict=True)] for n in names]
    return [list(zip(*sample, strict=True)) for sample in zip(*columns, strict=True)]


def _policy_by_hand(batch, config):
    """DeepSeekMath eq. 3 and 4: 1/G sum_i 1/|o_i| sum_t {min[rho A, clip(rho) A] - beta (r - log r - 1)}.

    DAPO eq. 8 for the average over tokens.
    """
    sequences, kls, entropies, clipped, approx = [], [], [], 0, []
    names = ("logprobs", "gen_logprobs", "ref_logprobs", "advantages", "entropy")
    for sample in _responses(batch, *names):
        terms = []
        for new, old, ref, advantage, entropy in sample:
            rho = math.exp(new - old)
            bounded = min(max(rho, 1 - config.clip_low), 1 + config.clip_high)
            r = math.exp(ref) / math.exp(new)
            kls.append(r - math.log(r) - 1)
            objective = min(rho * advantage, bounded * advantage)
            if config.dual_clip is not None and advantage < 0:  # arXiv:1912.09729, eq. 5
                objective = max(objective, config.dual_clip * advantage)
            terms.append(objective - config.kl_coef * kls[-1])
            clipped += bounded != rho and bounded * advantage < rho * advantage
            entropies.append(entropy)
            approx.append(rho - 1 - math.log(rho))
        sequences.append(terms)
    tokens = [term for terms in sequences for term in terms]
    by_sequence = sum(sum(terms) / len(terms) for terms in sequences) / len(sequences)
    loss = -by_sequence if config.average == "sequence" else -sum(tokens) / len(tokens)
    mean = {"entropy": sum(entropies), "clip_fraction": clipped, "approx_kl": sum(approx)}
    return loss, {name: total / len(tokens) for name, total in mean.items()}


@pytest.mark.parametrize("average", ["sequence", "token"])
@pytest.mark.parametrize(
    "clip_low, clip_high, kl_coef, dual_clip",
    [(0.2, 0.2, 0.0, None), (0.2, 0.28, 0.0, None), (0.1, 0.3, 0.04, None), (0.1, 0.3, 0.04, 1.4)],
)
def test_policy_loss_is_the_papers_sum(average, clip_low, clip_high, kl_coef, dual_clip):
    config = PolicyLossConfig(
        clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip, kl_coef=kl_coef, average=average)
    batch, loss = _batch(), PolicyLoss(config)
    value, metrics, grad = _loss(loss, batch, loss.totals(batch))
    expected, expected_metrics = _policy_by_hand(batch, config)
    assert value == pytest.approx(expected, rel=1e-12)
    assert {name: metrics[name] for name in expected_metrics} == pytest.approx(expected_metrics, rel=1e-12)
    assert 0 < metrics["clip_fraction"] < 1
    assert 0 < metrics.get("dual_clip_fraction", 0.5) < 1
    step = 1e-6
    for i in range(0, len(grad), 3):  # the gradient, numerically
        sides = []
        for sign in (1, -1):
            moved = batch["logprobs"].values.clone()
            moved[i] += sign * step * float(batch["response_mask"].values[i])
            other = Batch(batch.ids, {**batch.fields, "logprobs": batch["logprobs"].like(moved)})
            sides.append(_policy_by_hand(other, config)[0])
        assert float(grad[i]) == pytest.approx((sides[0] - sides[1]) / (2 * step), abs=1e-7)


FAR = (-120.0, -30.0, -12.0, -3.0, 0.5, 3.0, 12.0, 19.9, 21.0, 120.0)
"""Log-ratios; those outside [-20, 20] are clamped, and k3 is where it would be above 10."""


def _far(advantage):
    """Return one token per value of FAR, by which log-probs of policy, generator and reference differ."""
    new = torch.zeros(len(FAR), dtype=torch.float32, requires_grad=True)
    ones = torch.ones(len(FAR))
    columns = {
        "gen_logprobs": -torch.tensor(FAR), "ref_logprobs": torch.tensor(FAR),
        "advantages": advantage * ones, "response_mask": ones,
    }
    return new, Batch([0], {name: Packed(x, [len(FAR)]) for name, x in columns.items()})


def _gradients_far(advantage, dual_clip):
    """Return gradients of surrogate and k3 by autograd on the plain formulas; float64 can hold exp(120)."""
    distance = torch.tensor(FAR, dtype=torch.float64, requires_grad=True)
    rho = distance.exp()
    objective = (rho * advantage).minimum(rho.clamp(0.8, 1.2) * advantage)
    if dual_clip is not None and advantage < 0:
        objective = objective.clamp(min=dual_clip * advantage)
    policy = torch.autograd.grad(-objective.sum(), distance)[0]
    reference = distance.detach().clone().requires_grad_()  # From the policy to the reference.
    estimate = reference.exp() - reference - 1
    kl = -torch.autograd.grad(estimate.sum(), reference)[0]
    within = distance.detach().abs() <= 20
    return torch.where(within, policy, 0.0), torch.where(within & (estimate.detach() < 10), kl, 0.0)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_ratios_far_off_give_finite_losses_and_gradients(advantage, dual_clip):
    new, batch = _far(advantage)
    loss = PolicyLoss(PolicyLossConfig(dual_clip=dual_clip, kl_coef=0.1, average="token"))
    value, metrics = loss({"logprobs": new, "entropy": new.detach()}, batch, loss.totals(batch))
    value.backward()
    assert all(math.isfinite(x) for x in (value.detach(), *metrics.values()))
    policy, kl = _gradients_far(advantage, dual_clip)
    torch.testing.assert_close(new.grad.double(), (policy + 0.1 * kl) / len(FAR), rtol=1e-5, atol=1e-9)
    assert metrics["approx_kl"] <= 10 and metrics["ref_kl"] <= 10
    if dual_clip is not None:
        assert abs(value.detach()) < 10 and new.grad.abs().max() < 1


@pytest.mark.parametrize("value", [1.0, 0.5, -3.0, math.nan])
def test_a_dual_clip_within_the_trust_region_is_refused(value):
    with pytest.raises(ValueError, match=f"loss.dual_clip is {value}: it must be above 1"):
        PolicyLossConfig(dual_clip=value)


def test_value_loss_is_the_clipped_square():
    batch, loss = _batch(), ValueLoss(clip=0.2)
    value, metrics, _ = _loss(loss, batch, loss.totals(batch))
    tokens = [t for sample in _responses(batch, "new_values", "values", "returns") for t in sample]
    plain = [(new - ret) ** 2 for new, _, ret in tokens]
    bounded = [(min(max(new, old - 0.2), old + 0.2) - ret) ** 2 for new, old, ret in tokens]
    assert value == pytest.approx(0.5 * sum(map(max, plain, bounded)) / len(tokens), rel=1e-12)
    fraction = sum(b > p for p, b in zip(plain, bounded, strict=True)) / len(tokens)
    assert 0 < fraction < 1
    assert metrics == {"vf_loss": value, "clip_fraction": pytest.approx(fraction)}


def test_rounding_is_not_counted_as_clipping():
    """Within the clip range old + (new - old) is often not new, but nothing was clipped."""
    generator = torch.Generator().manual_seed(1)
    old = torch.rand(1000, generator=generator) * 0.1
    new = torch.rand(1000, generator=generator) * -0.1
    assert (old + (new - old) != new).any()
    columns = {"response_mask": torch.ones(1000), "values": old, "returns": torch.zeros(1000)}
    batch = Batch([0], {name: Packed(column, [1000]) for name, column in columns.items()})
    loss = ValueLoss(clip=0.2)
    _, metrics = loss({"values": new}, batch, loss.totals(batch))
    assert metrics["clip_fraction"] == 0


@pytest.mark.parametrize(
    "loss",
    [
        PolicyLoss(PolicyLossConfig(kl_coef=0.1, average="sequence")),
        PolicyLoss(PolicyLossConfig(kl_coef=0.1, average="token", dual_clip=1.3)),
        ValueLoss(),
        CrossEntropy(),
    ],
)
def test_losses_add_up_over_any_partition(loss):
    batch, rng = _batch(9, seed=2), random.Random(3)
    totals = loss.totals(batch)
    value, metrics, grad = _loss(loss, batch, totals)
    grad_of = dict(enumerate(grad.split(batch["response_mask"].lengths)))
    for num_parts in (2, 4, 9):
        part_of = [rng.randrange(num_parts) for _ in batch.ids]
        parts = [[i for i in batch.ids if part_of[i] == part] for part in range(num_parts)]
        results = [(part, _loss(loss, batch.select(part), totals)) for part in parts if part]
        assert sum(r[0] for _, r in results) == pytest.approx(value, rel=1e-12)
        for name, whole in metrics.items():
            combined = (max if name.endswith("/max") else sum)(r[1][name] for _, r in results)
            assert combined == pytest.approx(whole, rel=1e-12), name
        for part, (_, _, part_grad) in results:
            torch.testing.assert_close(
                part_grad, torch.cat([grad_of[i] for i in part]), rtol=1e-12, atol=1e-15
            )
        counts = [loss.totals(batch.select(part)) for part in parts]
        assert {name: sum(c[name] for c in counts) for name in totals} == totals


def test_sft_loss_is_the_cross_entropy_of_transformers(tmp_path):
    """Compare with the `labels` of the plain model, in which -100 masks a token."""
    plain = plain_model(tmp_path)
    spec = model_spec(ModelConfig.load(str(tmp_path)))
    groups = ParallelGroups.create(World(), Layout.parse("d1@0"))
    model = Transformer(spec, groups, dtype=torch.float64)
    load_weights(tmp_path, model)
    ids = torch.randint(67, (4, 11), generator=torch.Generator().manual_seed(0))
    wanted = torch.ones_like(ids, dtype=torch.bool)
    for row, start in enumerate((3, 1, 10, 5)):
        wanted[row, :start] = False
    wanted[1, 6] = False  # a hole in the middle
    labels = ids.masked_fill(~wanted, -100)
    answer = plain(ids, labels=labels)
    tokens, mask = Packed(ids.flatten(), [11] * 4), Packed(wanted.flatten().double(), [11] * 4)
    batch = Batch([0, 1, 2, 3], {"sequence_ids": tokens, "response_mask": mask})
    loss = CrossEntropy()
    settings = PassSettings("sequence_ids", Output(loss.output), loss=loss)
    outputs = compute_outputs(model, model(tokens.values, tokens.lengths), batch, settings)
    value, _ = loss(outputs, batch, loss.totals(batch))
    assert value.item() == pytest.approx(answer.loss.item(), rel=1e-6)  # theirs is in float32
    exact = F.cross_entropy(answer.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
    assert value.item() == pytest.approx(exact.item(), rel=1e-10)
