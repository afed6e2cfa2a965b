"""Policy losses and their gradients against those of TRL's trainers, on padded copies of a batch."""

import random
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
import trl  # Its classes are imported on their first use, as that takes seconds.

from realhf.algorithms.policy_loss import PolicyLoss, PolicyLossConfig
from realhf.data.batch import Batch, Packed

NUM_SAMPLES = 8
COLUMNS = ("logprobs", "gen_logprobs", "ref_logprobs", "entropy")
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
        num_processes=1, gather=lambda x: x.reshape(-1), reduce=lambda x, reduction: x, sync_gradients=True)
    defaults = {
        "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None, "beta": 0.0, "use_vllm": False,
        "importance_sampling_level": "token", "aux_loss_enabled": False, "_entropy_bonus_enabled": False,
        "use_adaptive_entropy": False, "epsilon_low": 0.2, "epsilon_high": 0.2, "loss_type": "grpo",
        "current_gradient_accumulation_steps": 1, "delta": None, "max_completion_length": 11,
    }
    settings = defaults | settings
    args = SimpleNamespace(
        delta=settings.pop("delta"), use_bias_correction_kl=False, steps_per_generation=1)
    stand_in = SimpleNamespace(
        **settings, args=args, accelerator=reduced, model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *a, **k: (new, entropy, None))
    ids = torch.zeros(NUM_SAMPLES, 1, dtype=torch.long)
    inputs = {
        "prompt_ids": ids, "prompt_mask": ids + 1, "completion_ids": torch.zeros_like(mask).long(),
        "completion_mask": mask, "old_per_token_logps": _padded(batch, "gen_logprobs"),
        "ref_per_token_logps": _padded(batch, "ref_logprobs"), "num_items_in_batch": mask.sum(),
        "advantages": torch.stack([x[0] for x in batch["advantages"].split()]),
        "old_logps": _padded(batch, "gen_logprobs").sum(1),
    }
    value = trainer._compute_loss(stand_in, None, inputs)
    value.backward()
    grad = torch.zeros_like(batch["logprobs"].values)
    grad[batch["response_mask"].values.bool()] = new.grad[mask.bool()]
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
        assert value == pytest.approx(expected, rel=1e-9)
        torch.testing.assert_close(grad, expected_grad, rtol=1e-9, atol=1e-12)
        assert 0 < metrics["clip_fraction"] < 1  # Both sides of the bounds occur.


def test_the_loss_of_rloo_equals_trl():
    for seed in range(3):
        batch = _batch(seed)
        value, grad, metrics = _ours(batch, PolicyLossConfig(ratio="sequence"))
        expected, expected_grad = _theirs(trl.RLOOTrainer, batch)
        assert value == pytest.approx(expected, rel=1e-9)
        torch.testing.assert_close(grad, expected_grad, rtol=1e-9, atol=1e-12)
        assert 0 < metrics["clip_fraction"] < 1
