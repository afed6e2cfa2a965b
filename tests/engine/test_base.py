"""Metrics of a train step, combined from its mini-batches."""

import torch

from realhf.algorithms.policy_loss import PolicyLoss, PolicyLossConfig
from realhf.calls import LogProbs, TrainStep
from realhf.dist.world import World
from realhf.graph import FunctionCall
from tests.engine.training import engine_and_minibatches

KEYS = ("sequence_ids", "response_mask")
COLUMNS = (*KEYS, "gen_logprobs", "advantages")


def _train(world, text, noise, num_minibatches, epochs):
    """Return the metrics of a train step whose generation log-probs are off by `noise`."""
    if (mine := engine_and_minibatches(world, text, num_rows=8)) is None:
        return None
    engine, batches = mine
    forward = FunctionCall("forward", "forward", KEYS, ("logprobs",), role="actor", work=LogProbs())
    for batch in batches:
        mask = batch["response_mask"]
        found = engine.run(forward, [batch.pick(KEYS)], micro_batch_tokens=40).batch.fields.get("logprobs")
        # (Only the last stage has them, and needs them.)
        logprobs = torch.zeros_like(mask.values) if found is None else found.values
        batch.fields["gen_logprobs"] = mask.like((logprobs + noise) * mask.values)
        batch.fields["advantages"] = mask.like(mask.values)
    work = TrainStep(PolicyLoss(PolicyLossConfig(average="token")), num_minibatches, epochs)
    call = FunctionCall("actor_train", "train_step", COLUMNS, role="actor", work=work)
    return engine.run(call, batches[:num_minibatches], micro_batch_tokens=40).metrics


def test_the_first_mini_batch_shows_how_far_generation_and_training_are_apart(pool):
    """The first mini-batch has the weights that generated, so that its KL is the noise's: exp(-x) - 1 + x."""
    alone = _train(World(), "d1@0", 0.0, 1, 1)
    assert alone["mismatch_kl"] == alone["approx_kl"] < 1e-15
    for layout in ("d1@0", "d2@0-1", "p2@0-1"):
        found = [m for m in pool.run(_train, layout, 0.3, 2, 2) if m is not None and "loss" in m]
        assert found
        for metrics in found:
            torch.testing.assert_close(metrics["mismatch_kl"], 0.3 - 1 + torch.tensor(-0.3).exp().item())
            assert abs(metrics["approx_kl"] - metrics["mismatch_kl"]) > 1e-3
