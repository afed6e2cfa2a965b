"""Losses against the methods of TRL's trainers, which are called with a minimal stand-in for the trainer."""

import random
from collections import defaultdict
from itertools import chain
from types import SimpleNamespace

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from realhf.algorithms.preferences import BradleyTerry, DPOLoss, KTOLoss
from realhf.data.batch import Batch, Packed


def _pairs(num_pairs, *, seed=0):
    """Return a batch of pairs of different lengths in a random order, of some prompts that are not empty."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    shapes = [(rng.randint(1, 4), rng.randint(1, 6), rng.randint(1, 6)) for _ in range(num_pairs)]
    masks = list(chain.from_iterable(([0.0] * p + [1.0] * c, [0.0] * p + [1.0] * r) for p, c, r in shapes))
    order = rng.sample(range(2 * num_pairs), 2 * num_pairs)
    lengths = [len(mask) for mask in masks]
    mask = Packed(torch.tensor(list(chain(*masks))).double(), lengths)
    noise = torch.randn(2, sum(lengths), generator=generator).double()
    fields = {
        "response_mask": mask, "is_chosen": [i % 2 == 0 for i in range(2 * num_pairs)],
        "logprobs": mask.like((noise[0] - 1) * mask.values),
        "ref_logprobs": mask.like((noise[1] - 1) * mask.values),
        "scores": torch.randn(2 * num_pairs, generator=generator).double(),
        "margin": [rng.random() for _ in range(num_pairs) for _ in range(2)],
    }
    return Batch([6 + i for i in range(2 * num_pairs)], fields).select(order)


def _chosen_first(batch):
    """Return the indices of the chosen samples and then of the rejected ones, by pair."""
    rows = sorted(range(len(batch)), key=lambda i: batch.ids[i])
    return [*rows[::2], *rows[1::2]]


def _trainer(**settings):
    accelerator = SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x)
    return SimpleNamespace(
        model=SimpleNamespace(training=True), accelerator=accelerator, _metrics={"train": defaultdict(list)},
        _total_train_tokens=0, _tp_size=1, **settings)


def _trl_dpo(batch, logprobs_T, *, variant, beta, label_smoothing=0.0, sft_coef=None):
    """Return TRL's loss, and its metrics, of log-probs of packed tokens."""
    rows = _chosen_first(batch)
    packed = batch["response_mask"]
    columns = (packed, packed.like(logprobs_T * packed.values), batch["ref_logprobs"])
    mask, new, ref = (
        pad_sequence([column.split()[i] for i in rows], batch_first=True) for column in columns)
    shape = new[:, 1:].shape
    outputs = SimpleNamespace(
        log_probs=new[:, 1:], entropy=torch.zeros(shape), mean_logits=torch.zeros(shape),
        is_top1=torch.zeros(shape, dtype=torch.bool))
    ref_logps = ref.sum(1)
    half = len(rows) // 2
    inputs = {
        "input_ids": torch.ones_like(mask, dtype=torch.long), "attention_mask": torch.ones_like(mask),
        "completion_mask": mask.long(), "ref_chosen_logps": ref_logps[:half],
        "ref_rejected_logps": ref_logps[half:],
    }
    trainer = _trainer(
        aux_loss_enabled=False, ld_alpha=None, precompute_ref_logps=True, f_divergence_type="reverse_kl",
        use_weighting=False, loss_types=[variant] if sft_coef is None else [variant, "sft"],
        loss_weights=[1.0] if sft_coef is None else [1.0, sft_coef], beta=beta,
        label_smoothing=label_smoothing)
    from trl.trainer.dpo_trainer import DPOTrainer  # Imported here, as it takes seconds.

    loss = DPOTrainer._compute_loss(trainer, lambda **_: outputs, inputs, False)
    return loss, {name: sum(values) for name, values in trainer._metrics["train"].items()}


def _gradient(loss, at):
    return torch.autograd.grad(loss, at)[0]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("beta", [0.1, 0.7])
@pytest.mark.parametrize("variant", ["sigmoid", "hinge", "ipo"])
def test_dpo(variant, beta, seed):
    batch = _pairs(9, seed=seed)
    loss = DPOLoss(variant=variant, beta=beta)
    logprobs_T = batch["logprobs"].values.clone().requires_grad_()
    ours, metrics = loss({"logprobs": logprobs_T}, batch, loss.totals(batch))
    theirs, their_metrics = _trl_dpo(batch, logprobs_T, variant=variant, beta=beta, label_smoothing=0.0)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-12)
    torch.testing.assert_close(_gradient(ours, logprobs_T), _gradient(theirs, logprobs_T))
    assert len(metrics) == 4 and 0 < metrics["rewards/accuracies"] < 1
    for name, value in metrics.items():
        assert value.item() == pytest.approx(their_metrics[name], rel=1e-6), name  # Accuracies are float32.


def test_dpo_with_label_smoothing():
    """TRL has the smoothed loss as `aot`, which sorts log-ratios: of a single pair this changes nothing."""
    batch = _pairs(9)
    loss = DPOLoss(beta=0.3, label_smoothing=0.2)
    logprobs_T = batch["logprobs"].values.clone().requires_grad_()
    ours, _ = loss({"logprobs": logprobs_T}, batch, loss.totals(batch))
    theirs = torch.tensor(0.0)
    starts = torch.tensor([0, *batch["response_mask"].lengths]).cumsum(0)
    for pair in sorted({i // 2 for i in batch.ids}):
        rows = [i for i, sample in enumerate(batch.ids) if sample // 2 == pair]
        tokens = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in rows])
        value, _ = _trl_dpo(
            batch.select(rows), logprobs_T[tokens], variant="aot", beta=0.3, label_smoothing=0.2)
        theirs = theirs + value / 9
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-12)
    torch.testing.assert_close(_gradient(ours, logprobs_T), _gradient(theirs, logprobs_T))


@pytest.mark.parametrize("margin_key", [None, "margin"])
@pytest.mark.parametrize("center_coef", [0.0, 0.05])
def test_pairwise_reward_model(margin_key, center_coef):
    batch = _pairs(9)
    loss = BradleyTerry(margin_key=margin_key, center_coef=center_coef)
    scores_S = batch["scores"].clone().requires_grad_()
    ours, metrics = loss({"scores": scores_S}, batch, loss.totals(batch))
    rows = _chosen_first(batch)
    inputs = {"attention_mask": torch.ones(len(rows), 1)}
    if margin_key is not None:
        inputs["margin"] = torch.tensor([batch["margin"][i] for i in rows[:9]], dtype=torch.float64)
    trainer = _trainer(args=SimpleNamespace(center_rewards_coefficient=center_coef or None))
    outputs = SimpleNamespace(logits=scores_S[rows][:, None])
    from trl.trainer.reward_trainer import RewardTrainer  # Imported here, as it takes seconds.

    theirs = RewardTrainer.compute_loss(trainer, lambda **_: outputs, inputs)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-12)
    torch.testing.assert_close(_gradient(ours, scores_S), _gradient(theirs, scores_S))
    their_metrics = trainer._metrics["train"]
    for name in ("accuracy", "margin", "mean_reward"):
        assert metrics[name].item() == pytest.approx(their_metrics[name][0], rel=1e-6), name


@pytest.mark.parametrize("variant", ["sigmoid", "ipo"])
def test_dpo_with_an_sft_term(variant):
    batch = _pairs(9)
    loss = DPOLoss(variant, beta=0.3, sft_coef=0.7)
    logprobs_T = batch["logprobs"].values.clone().requires_grad_()
    ours, metrics = loss({"logprobs": logprobs_T}, batch, loss.totals(batch))
    theirs, _ = _trl_dpo(batch, logprobs_T, variant=variant, beta=0.3, sft_coef=0.7)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-12)
    torch.testing.assert_close(_gradient(ours, logprobs_T), _gradient(theirs, logprobs_T))
    assert metrics["nll_loss"] > 0


def _means(batch, logprobs_T):
    """Return the mean log-probs over tokens of chosen and of rejected completions."""
    rows = _chosen_first(batch)
    masks = [batch["response_mask"].split()[i] for i in rows]
    logprobs = [batch["response_mask"].like(logprobs_T).split()[i] for i in rows]
    means = torch.stack([(x * m).sum() / m.sum() for x, m in zip(logprobs, masks, strict=True)])
    return means[: len(rows) // 2], means[len(rows) // 2 :]


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_simpo(label_smoothing):
    from trl.experimental.cpo import CPOTrainer  # Imported here, as it takes seconds.

    batch = _pairs(9)
    loss = DPOLoss("simpo", beta=2.0, gamma=0.8, label_smoothing=label_smoothing)
    logprobs_T = batch["logprobs"].values.clone().requires_grad_()
    ours, metrics = loss({"logprobs": logprobs_T}, batch, loss.totals(batch))
    trainer = _trainer(
        alpha=0.0, loss_type="simpo", simpo_gamma=0.8, beta=2.0, label_smoothing=label_smoothing)
    losses, chosen, rejected = CPOTrainer.cpo_loss(trainer, *_means(batch, logprobs_T))
    assert ours.item() == pytest.approx(losses.mean().item(), rel=1e-12)
    torch.testing.assert_close(_gradient(ours, logprobs_T), _gradient(losses.mean(), logprobs_T))
    assert metrics["rewards/chosen"].item() == pytest.approx(chosen.mean().item())
    assert metrics["rewards/rejected"].item() == pytest.approx(rejected.mean().item())


def test_orpo():
    """TRL computes the odds in float32; its likelihood term is that of chosen tokens, as a mean."""
    from trl.experimental.orpo import ORPOTrainer  # Imported here, as it takes seconds.

    batch = _pairs(9)
    loss = DPOLoss("orpo", beta=0.3, sft_coef=1.0)
    logprobs_T = batch["logprobs"].values.clone().requires_grad_()
    ours, metrics = loss({"logprobs": -logprobs_T.abs()}, batch, loss.totals(batch))
    values_T = -logprobs_T.abs()  # Log-probs are negative.
    losses, chosen, _, ratio, _ = ORPOTrainer.odds_ratio_loss(_trainer(beta=0.3), *_means(batch, values_T))
    is_chosen_T = torch.cat([
        torch.full((n,), float(c)) for n, c in zip(
            batch["response_mask"].lengths, batch["is_chosen"], strict=True)])
    tokens_T = is_chosen_T * batch["response_mask"].values
    theirs = -(values_T * tokens_T).sum() / tokens_T.sum() - losses.mean()
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)
    torch.testing.assert_close(
        _gradient(ours, logprobs_T), _gradient(theirs, logprobs_T), rtol=1e-5, atol=1e-7)
    assert metrics["rewards/chosen"].item() == pytest.approx(chosen.mean().item(), rel=1e-6)
    exact = torch.autograd.gradcheck(
        lambda x: loss({"logprobs": -x.abs()}, batch, loss.totals(batch))[0], (logprobs_T,))
    assert exact


@pytest.mark.parametrize("kl", [-0.4, 0.6])
def test_kto(kl):
    """TRL's method gets this difference of log-probs on mismatched pairs, and clamps it at 0."""
    from trl import KTOTrainer  # Imported here, as it takes seconds.

    batch = _pairs(4)
    labels = [i % 3 > 0 for i in range(len(batch))]
    point = torch.full((len(batch),), max(kl, 0.0)).double()
    batch = Batch(batch.ids, batch.fields | {"label": labels, "kl": point})
    loss = KTOLoss(beta=0.5, desirable_weight=1.2, undesirable_weight=0.7)
    logprobs_T = batch["logprobs"].values.clone().requires_grad_()
    ours, metrics = loss({"logprobs": logprobs_T}, batch, loss.totals(batch))
    packed = batch["response_mask"]
    columns = (packed, packed.like(logprobs_T * packed.values), batch["ref_logprobs"])
    mask, new, ref = (pad_sequence(column.split(), batch_first=True) for column in columns)
    zeros = torch.zeros(new[:, 1:].shape)
    outputs = SimpleNamespace(
        log_probs=new[:, 1:], entropy=zeros, mean_logits=zeros, is_top1=zeros > 0)
    inputs = {
        "input_ids": torch.ones_like(mask, dtype=torch.long), "attention_mask": torch.ones_like(mask),
        "completion_mask": mask.long(), "label": torch.tensor(labels), "ref_logps": ref.sum(1),
        "ref_KL_logps": torch.zeros(len(batch)).double()}
    trainer = _trainer(
        aux_loss_enabled=False, precompute_ref_logps=True, calculate_KL=True, loss_type="kto", beta=0.5,
        desirable_weight=1.2, undesirable_weight=0.7,
        _compute_kl_logps=lambda model, batch: torch.full((len(labels),), kl).double())
    theirs = KTOTrainer._compute_loss(trainer, lambda **_: outputs, inputs, False)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-12)
    torch.testing.assert_close(_gradient(ours, logprobs_T), _gradient(theirs, logprobs_T))
    assert metrics["kl"].item() == pytest.approx(max(kl, 0.0))
    assert metrics["rewards/chosen"] != metrics["rewards/rejected"]
