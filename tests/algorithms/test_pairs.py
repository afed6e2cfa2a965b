"""Losses of preference pairs: parts, dropped samples, equal log-probs, and settings that are refused."""

import math
import random

import pytest
import torch

from realhf import DPOLoss
from realhf.algorithms.preferences import BradleyTerry, cross_entropy
from realhf.data.batch import Batch, Packed

LOSSES = [DPOLoss(), DPOLoss(label_smoothing=0.1), DPOLoss("hinge"), DPOLoss("ipo"), BradleyTerry(),
          DPOLoss("simpo", beta=2.0, gamma=1.0), DPOLoss("orpo", sft_coef=1.0), DPOLoss(sft_coef=0.5),
          BradleyTerry(margin_key="margin", center_coef=0.1)]


def _batch(num_pairs, *, seed=0):
    rng = random.Random(seed)
    lengths = [rng.randint(2, 6) for _ in range(2 * num_pairs)]
    generator = torch.Generator().manual_seed(seed)
    new, ref = 0.5 * torch.randn(2, sum(lengths), generator=generator).double()
    mask = torch.cat([torch.arange(n) > 0 for n in lengths]).double()
    columns = {"response_mask": mask, "logprobs": new * mask, "ref_logprobs": ref * mask}
    fields = {name: Packed(values, lengths) for name, values in columns.items()}
    fields["scores"] = torch.randn(2 * num_pairs, generator=generator).double()
    fields |= {"margin": [0.5] * 2 * num_pairs, "is_chosen": [True, False] * num_pairs}
    return Batch(list(range(2 * num_pairs)), fields)


def _run(loss, batch, totals=None):
    outputs = {"logprobs": batch["logprobs"].values, "scores": batch["scores"]}
    value, metrics = loss(outputs, batch, totals or loss.totals(batch))
    return {"loss": value.item(), **{name: metric.item() for name, metric in metrics.items()}}


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_parts_of_whole_pairs_add_up(loss):
    batch = _batch(7)
    whole = _run(loss, batch)
    parts = [batch.select(rows) for rows in ([0, 1, 9, 8], [13, 12], list(range(2, 8)), [11, 10])]
    found = [_run(loss, part, loss.totals(batch)) for part in parts]
    assert {name: sum(part[name] for part in found) for name in whole} == pytest.approx(whole, rel=1e-12)
    assert sum(loss.totals(part)["pairs"] for part in parts) == loss.totals(batch)["pairs"] == 7


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_a_sample_without_its_partner_does_not_count(loss):
    batch = _batch(4)
    left = batch.select([0, 2, 3, 5, 6, 7])  # A filter has dropped 1 and 4.
    assert _run(loss, left) == pytest.approx(_run(loss, batch.select([2, 3, 6, 7])))
    alone = _run(loss, batch.select([0, 3]))
    assert all(value == 0 for value in alone.values())


def test_the_gradient_is_right_where_policy_and_reference_are_equal():
    """The derivative of -log sigmoid(x) at 0 is -1/2, and far from 0 nothing overflows."""
    logit = torch.tensor([0.0, -800.0, 800.0], dtype=torch.float32, requires_grad=True)
    cross_entropy(logit, 1.0).sum().backward()
    assert logit.grad.tolist() == [-0.5, -1.0, 0.0]
    assert cross_entropy(logit, 1.0).tolist() == pytest.approx([math.log(2), 800.0, 0.0])
    reference = torch.nn.functional.binary_cross_entropy_with_logits
    given = torch.linspace(-5, 5, 11)
    for label in (0.0, 0.2, 1.0):
        expected = reference(given, torch.full_like(given, label), reduction="none")
        torch.testing.assert_close(cross_entropy(given, label), expected)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"beta": 0.0}, "loss.beta is 0.0: it must be above 0"),
        ({"variant": "kto"}, "loss.variant is 'kto': it must be"),
        ({"label_smoothing": 0.5}, "loss.label_smoothing is 0.5: it must be at least 0 and below 0.5"),
        ({"variant": "ipo", "label_smoothing": 0.1}, "it must be 0 with loss.variant ipo"),
        ({"gamma": 1.0}, "loss.gamma is 1.0: it must be 0 with loss.variant sigmoid"),
        ({"sft_coef": -1.0}, "loss.sft_coef is -1.0: it must not be negative"),
    ],
)
def test_illegal_settings_of_dpo(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        DPOLoss(**settings)


def test_illegal_settings_of_a_pairwise_reward_model():
    with pytest.raises(ValueError, match="loss.center_coef is -1: it must not be negative"):
        BradleyTerry(center_coef=-1)
    assert BradleyTerry("gap").row_fault({"gap": None}) == "gap is None: it must be a finite number"
    assert BradleyTerry("gap").row_fault({"gap": 1}) is None and BradleyTerry().row_fault({}) is None


@pytest.mark.parametrize("variant", ["sigmoid", "hinge", "ipo"])
def test_log_probs_of_the_reference_in_the_rows(variant):
    batch = _batch(5)
    sums = [float((x * m).sum()) for x, m in zip(
        batch["ref_logprobs"].split(), batch["response_mask"].split(), strict=True)]
    columns = {"ref_chosen_logps": sums[::2], "ref_rejected_logps": sums[1::2]}
    fields = {name: [x for x in values for _ in range(2)] for name, values in columns.items()}
    without = {name: column for name, column in batch.fields.items() if name != "ref_logprobs"}
    loss = DPOLoss(variant, precomputed_ref=True)
    rows = Batch(batch.ids, without | fields)
    assert _run(loss, rows) == pytest.approx(_run(DPOLoss(variant), batch), rel=1e-12)
    assert not loss.needs_ref and {*columns} <= set(loss.columns)
    assert loss.row_fault({"ref_chosen_logps": -1.0, "ref_rejected_logps": 0.5}).startswith(
        "ref_rejected_logps is 0.5: it must be a finite number of at most 0")
    assert DPOLoss(variant).row_fault({}) is None
    with pytest.raises(ValueError, match="loss.precomputed_ref is True: it must be false with"):
        DPOLoss("orpo", precomputed_ref=True)
