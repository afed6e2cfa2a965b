"""Policy losses and their gradients against those of TRL's trainers, on padded copies of a batch."""

import math
import random
from collections import defaultdict
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import trl  # Its classes are imported on their first use, as that takes seconds.

from realhf.algorithms.advantages import AdvantageInputs, SampleAdvantages
from realhf.algorithms.policy_loss import PolicyLoss, PolicyLossConfig
from realhf.data.batch import Batch, Packed

NUM_SAMPLES = 8
COLUMNS = ("logprobs", "gen_logprobs", "ref_logprobs", "entropy", "prox_logprobs")
LONGEST = 7


def _batch(seed=0):
    """Return packed samples of different lengths, whose ratios lie on both sides of every bound.

    A sample's advantage is the same for all of its tokens.
    """
    rng = random.Random(seed)
    shapes = [(rng.randint(1, 4), rng.randint(1, LONGEST)) for _ in range(NUM_SAMPLES)]
    lengths = [prompt + response for prompt, response in shapes]
    mask = torch.tensor([m for p, r in shapes for m in [0.0] * p + [1.0] * r]).double()
    columns = {name: torch.tensor([rng.gauss(0, 0.4) for _ in mask]).double() * mask for name in COLUMNS}
    advantages = torch.tensor([rng.gauss(0, 1) for _ in shapes]).double()
    columns["advantages"] = advantages.repeat_interleave(torch.tensor(lengths))
    fields = {name: Packed(x, lengths) for name, x in {**columns, "response_mask": mask}.items()}
    return Batch(list(range(NUM_SAMPLES)), fields)


def _padded(batch, column):
    """Return a column's response tokens, shape (samples, LONGEST), padded with 0 on the right."""
    masks = batch["response_mask"].split()
    rows = [x[m.bool()] for x, m in zip(batch[column].split(), masks, strict=True)]
    return torch.stack([torch.nn.functional.pad(row, (0, LONGEST - len(row))) for row in rows])


def _theirs(trainer, batch, **settings):
    """Return TRL's loss and its gradient for every packed token, 0 outside responses."""
    new = _padded(batch, "logprobs").requires_grad_()
    entropy = _padded(batch, "entropy")
    mask = _padded(batch, "response_mask")
    reduced = SimpleNamespace(
        num_processes=1, gather=lambda x: x.reshape(-1), reduce=lambda x, reduction: x, sync_gradients=True,
        pad_across_processes=lambda x, **_: x)
    defaults = {
        "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None, "beta": 0.0, "use_vllm": False,
        "importance_sampling_level": "token", "aux_loss_enabled": False, "_entropy_bonus_enabled": False,
        "use_adaptive_entropy": False, "epsilon_low": 0.2, "epsilon_high": 0.2, "loss_type": "grpo",
        "current_gradient_accumulation_steps": 1, "delta": None, "max_completion_length": 11,
        "vllm_importance_sampling_correction": True, "completion_mask": mask, "importance": None,
        "weighs_kl": False,
    }
    settings = defaults | settings
    mask = settings.pop("completion_mask")
    importance = settings.pop("importance")
    args = SimpleNamespace(
        delta=settings.pop("delta"), use_bias_correction_kl=settings.pop("weighs_kl"), steps_per_generation=1,
        sapo_temperature_pos=1.0, sapo_temperature_neg=1.05)
    stand_in = SimpleNamespace(
        **settings, args=args, accelerator=reduced, model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *a, **k: (new, entropy, None),
        get_off_policy_mask=getattr(trainer, "get_off_policy_mask", None))
    if hasattr(trainer, "get_high_entropy_mask"):
        stand_in.get_high_entropy_mask = partial(trainer.get_high_entropy_mask, stand_in)
    ids = torch.zeros(NUM_SAMPLES, 1, dtype=torch.long)
    inputs = {
        "prompt_ids": ids, "prompt_mask": ids + 1, "completion_ids": torch.zeros_like(mask).long(),
        "completion_mask": mask, "old_per_token_logps": _padded(batch, "gen_logprobs"),
        "ref_per_token_logps": _padded(batch, "ref_logprobs"), "num_items_in_batch": mask.sum(),
        "advantages": torch.stack([x[0] for x in batch["advantages"].split()]),
        "old_logps": _padded(batch, "gen_logprobs").sum(1),
    }
    if importance is not None:
        inputs |= {"importance_sampling_ratio": importance,
                   "old_per_token_logps": _padded(batch, "prox_logprobs"),
                   "sampling_per_token_logps": _padded(batch, "gen_logprobs")}
        stand_in.use_vllm = True
    value = trainer._compute_loss(stand_in, None, inputs)
    value.backward()
    grad = torch.zeros_like(batch["logprobs"].values)
    grad[batch["response_mask"].values.bool()] = new.grad[_padded(batch, "response_mask").bool()]
    return value.item(), grad


def _ours(batch, config):
    loss = PolicyLoss(config)
    new = batch["logprobs"].values.clone().requires_grad_()
    value, metrics = loss({"logprobs": new, "entropy": batch["entropy"].values}, batch, loss.totals(batch))
    value.backward()
    return value.item(), new.grad, metrics


CASES = {
    "grpo": ({"beta": 0.04}, {"kl_coef": 0.04}),
    "clip-higher": ({"loss_type": "bnpo", "epsilon_high": 0.28}, {"average": "token", "clip_high": 0.28}),
    "dapo": (
        {"loss_type": "dapo", "epsilon_high": 0.28, "beta": 0.1},
        {"average": "token", "clip_high": 0.28, "kl_coef": 0.1},
    ),
    "weighted KL": ({"beta": 0.3, "weighs_kl": True}, {"kl_coef": 0.3, "kl_weighted": True}),
    "weighted KL of responses": (
        {"beta": 0.3, "weighs_kl": True, "importance_sampling_level": "sequence", "epsilon_low": 0.03,
         "epsilon_high": 0.04},
        {"kl_coef": 0.3, "kl_weighted": True, "ratio": "sequence_mean", "clip_low": 0.03, "clip_high": 0.04}),
    "luspo": (
        {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon_low": 0.03,
         "epsilon_high": 0.04},
        {"ratio": "sequence_mean", "clip_low": 0.03, "clip_high": 0.04, "average": "constant",
         "constant_length": 1}),
    "two-sided": ({"delta": 1.5}, {"dual_clip": 1.5}),
    "dr-grpo": ({"loss_type": "dr_grpo"}, {"average": "constant", "constant_length": 11}),
    "gspo": (
        {"importance_sampling_level": "sequence", "epsilon_low": 0.03, "epsilon_high": 0.04},
        {"ratio": "sequence_mean", "clip_low": 0.03, "clip_high": 0.04},
    ),
    "cispo": (
        {"loss_type": "cispo", "epsilon_high": 1.3},
        {"objective": "cispo", "ratio_cap": 1.3, "average": "token"},
    ),
    "sapo": ({"loss_type": "sapo", "beta": 0.04}, {"objective": "sapo", "kl_coef": 0.04}),
    "off-policy mask": (
        {"off_policy_mask_threshold": 0.05, "beta": 0.04},
        {"off_policy_mask_threshold": 0.05, "kl_coef": 0.04},
    ),
    "entropy": (
        {"loss_type": "bnpo", "_entropy_bonus_enabled": True, "entropy_coef": 0.3},
        {"average": "token", "entropy_coef": 0.3},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_losses_of_grpo_equal_trl(case):
    theirs, ours = CASES[case]
    for seed in range(3):
        batch = _batch(seed)
        value, grad, metrics = _ours(batch, PolicyLossConfig(**ours))
        expected, expected_grad = _theirs(trl.GRPOTrainer, batch, **theirs)
        tolerance = 1e-6 if case == "sapo" else 1e-9  # TRL's temperatures are float32.
        assert value == pytest.approx(expected, rel=tolerance)
        torch.testing.assert_close(grad, expected_grad, rtol=tolerance, atol=1e-9 * tolerance)
        for name in ("clip_fraction", "off_policy_fraction"):  # Both sides of the bounds occur.
            assert 0 < metrics.get(name, 0.5) < 1


def test_the_loss_of_rloo_equals_trl():
    for seed in range(3):
        batch = _batch(seed)
        value, grad, metrics = _ours(batch, PolicyLossConfig(ratio="sequence"))
        expected, expected_grad = _theirs(trl.RLOOTrainer, batch)
        assert value == pytest.approx(expected, rel=1e-9)
        torch.testing.assert_close(grad, expected_grad, rtol=1e-9, atol=1e-12)
        assert 0 < metrics["clip_fraction"] < 1


def _weights(batch, *, mode):
    """Return the importance weights as TRL's GRPOTrainer makes them, with the bounds 0.7 and 1.4."""
    difference = _padded(batch, "prox_logprobs") - _padded(batch, "gen_logprobs")
    ratio = (difference.sum(-1, keepdim=True) if mode.startswith("sequence") else difference).exp()
    if mode.endswith("truncate"):
        return ratio.clamp(0.7, 1.4)
    return ratio.masked_fill((ratio < 0.7) | (ratio > 1.4), 0.0)


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_weights_for_the_mismatch_of_generator_and_trainer_are_those_of_trl(mode):
    level, _, treatment = mode.partition("_")
    config = PolicyLossConfig(
        proximal="recomputed", importance_floor=0.7, importance_cap=1.4, importance_mode=treatment,
        importance_ratio=level, kl_coef=0.04)
    for seed in range(3):
        batch = _batch(seed)
        value, grad, metrics = _ours(batch, config)
        importance = _weights(batch, mode=mode)
        expected, expected_grad = _theirs(trl.GRPOTrainer, batch, importance=importance, beta=0.04)
        assert value == pytest.approx(expected, rel=1e-9)
        torch.testing.assert_close(grad, expected_grad, rtol=1e-9, atol=1e-12)
        assert 0 < metrics["importance_cap_fraction"] < 1


def _with_advantages(batch, inputs):
    """Return the batch with the advantages that GRPO computes from scores."""
    fields = batch.fields | {
        "score": torch.tensor([x[0] for x in batch["advantages"].split()]),
        "finished": torch.tensor([float(i % 3 > 0) for i in range(NUM_SAMPLES)]).double(),
        "prox_entropy": batch["entropy"]}
    batch = Batch(batch.ids, fields)
    function = SampleAdvantages(group_size=4, inputs=inputs, counts_prompt_tokens=True)
    columns, metrics = function(batch, None)
    return replace(batch, fields=batch.fields | columns), metrics


@pytest.mark.parametrize("average", ["sequence", "token"])
def test_tokens_of_top_entropy_are_those_of_trl(average):
    """TRL masks the policy's term of all other tokens, and neither the KL nor the averages."""
    for seed in range(3):
        batch, metrics = _with_advantages(_batch(seed), AdvantageInputs())
        masked, metrics = _with_advantages(_batch(seed), AdvantageInputs(top_entropy_quantile=0.3))
        value, grad, _ = _ours(masked, PolicyLossConfig(average=average, kl_coef=0.04))
        expected, expected_grad = _theirs(
            trl.GRPOTrainer, batch, top_entropy_quantile=0.3, beta=0.04,
            loss_type={"sequence": "grpo", "token": "dapo"}[average])
        assert value == pytest.approx(expected, rel=1e-6)  # TRL takes the quantile in float32.
        torch.testing.assert_close(grad, expected_grad, rtol=1e-9, atol=1e-12)
        response = batch["response_mask"].values.bool()
        share = (masked["advantages"].values[response] != 0).double().mean()
        assert share == pytest.approx(0.3, abs=1 / int(response.sum()))
        assert math.isfinite(metrics["actor/entropy_threshold"])


def test_cut_responses_are_masked_as_in_trl():
    """TRL masks their tokens, and its mean over tokens leaves them out; their scores still count."""
    for seed in range(3):
        batch, _ = _with_advantages(_batch(seed), AdvantageInputs())
        masked, _ = _with_advantages(_batch(seed), AdvantageInputs(mask_truncated=True))
        mask = _padded(batch, "response_mask") * batch["finished"][:, None]
        value, grad, _ = _ours(masked, PolicyLossConfig(average="token", kl_coef=0.04))
        expected, expected_grad = _theirs(
            trl.GRPOTrainer, batch, completion_mask=mask, loss_type="dapo", beta=0.04)
        assert value == pytest.approx(expected, rel=1e-9)
        kept = torch.cat([m * f for m, f in zip(
            batch["response_mask"].split(), batch["finished"], strict=True)]).bool()
        torch.testing.assert_close(grad[kept], expected_grad[kept], rtol=1e-9, atol=1e-12)
        assert not grad[~kept].any()


@pytest.mark.parametrize("average", ["sequence", "token", "prompt", "constant"])
def test_averages_are_those_of_a_batch_without_the_cut_responses(average):
    masked, _ = _with_advantages(_batch(), AdvantageInputs(mask_truncated=True))
    kept = [i for i, finished in enumerate(masked["finished"].tolist()) if finished]
    length = 11 if average == "constant" else None
    config = PolicyLossConfig(average=average, kl_coef=0.1, constant_length=length)
    value, grad, metrics = _ours(masked, config)
    alone = masked.select(kept)
    expected, expected_grad, expected_metrics = _ours(alone, config)
    assert value == pytest.approx(expected, rel=1e-12)
    grads = masked["response_mask"].like(grad).split()
    torch.testing.assert_close(torch.cat([grads[i] for i in kept]), expected_grad)
    for name, metric in expected_metrics.items():
        assert metrics[name] == pytest.approx(float(metric), rel=1e-12), name
