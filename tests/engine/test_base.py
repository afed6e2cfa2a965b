"""Metrics of a train step, combined from its mini-batches."""

import numpy as np
import pytest
import torch

from realhf.algorithms.policy_loss import PolicyLoss, PolicyLossConfig
from realhf.calls import LogProbs, TrainStep
from realhf.distributed.world import World
from realhf.graph import FunctionCall
from tests.engine.training import engine_and_minibatches

KEYS = ("sequence_ids", "response_mask")
COLUMNS = (*KEYS, "gen_logprobs", "advantages")


def _train(world, text, noise, num_minibatches, epochs, proximal):
    """Return the metrics of a train step whose generation log-probs are off by normal noise, and what each of
    its mini-batches is off by, on the ranks that know."""
    if (mine := engine_and_minibatches(world, text, num_rows=8)) is None:
        return None
    engine, batches = mine
    forward = FunctionCall("forward", "forward", KEYS, ("logprobs",), role="actor", work=LogProbs())
    generator = torch.Generator().manual_seed(world.rank)
    differences = []
    for batch in batches:
        mask = batch["response_mask"]
        found = engine.forward(forward, batch.pick(KEYS), micro_batch_tokens=40).fields.get("logprobs")
        # (Only the last stage has them, and needs them.)
        logprobs = torch.zeros_like(mask.values) if found is None else found.values
        off = noise * torch.randn(len(mask.values), dtype=torch.float64, generator=generator)
        batch.fields["gen_logprobs"] = mask.like((logprobs - off) * mask.values)
        batch.fields["prox_logprobs"] = mask.like(logprobs * mask.values)
        batch.fields["advantages"] = mask.like(mask.values)
        differences.append([] if found is None else off[mask.values != 0].tolist())
    loss = PolicyLoss(PolicyLossConfig(average="token", proximal=proximal))
    work = TrainStep(loss, num_minibatches, epochs)
    columns = (*COLUMNS, "prox_logprobs") if proximal == "recomputed" else COLUMNS
    call = FunctionCall("actor_train", "train_step", columns, role="actor", work=work)
    metrics = engine.train(call, batches[:num_minibatches], micro_batch_tokens=40)
    return metrics, differences[:num_minibatches]


def _by_formula(differences):
    """Return the metrics of the mismatch, given log p_train - log p_generated of all tokens."""
    d = np.array(differences)
    weights = np.exp(d)
    ess = weights.sum() ** 2 / (len(d) * (weights**2).sum())
    return {"kl": np.mean(weights - 1 - d), "max": np.abs(d).max(), "ess": ess}


@pytest.mark.parametrize("proximal", ["generated", "recomputed"])
def test_the_mismatch_is_that_of_the_weights_before_the_update(pool, proximal):
    """The first mini-batch has these weights; recomputed log-probs are those of these weights in all."""
    alone, _ = _train(World(), "d1@0", 0.0, 1, 1, proximal)
    assert alone["mismatch/kl"] == pytest.approx(0, abs=1e-15) and alone["mismatch/max"] < 1e-12
    assert alone["mismatch/ess"] == pytest.approx(1, rel=1e-12)
    for layout in ("d1@0", "d2@0-1", "p2@0-1"):
        found = [x for x in pool.run(_train, layout, 0.3, 2, 2, proximal) if x is not None and "loss" in x[0]]
        assert found
        counted = slice(None) if proximal == "recomputed" else slice(1)
        # (Both replicas' tokens of each mini-batch; the ranks of a pipeline's first stage know none.)
        differences = [d for _, minibatches in found for batch in minibatches[counted] for d in batch]
        assert len(differences) > 20
        for metrics, _ in found:
            for name, value in _by_formula(differences).items():
                assert metrics[f"mismatch/{name}"] == pytest.approx(value, rel=1e-9), (layout, name)
            assert not any(name.endswith(("/weights", "/squares", "/tokens", "/k3")) for name in metrics)
            assert abs(metrics["approx_kl"] - metrics["mismatch/kl"]) > 1e-4


class _Plain:
    """A loss without a base class."""

    output = "scores"
    entropy = False
    group_size = 3

    def totals(self, batch):
        return {"samples": 2.0}

    def __call__(self, outputs, batch, totals):
        return outputs["scores"].sum() / totals["samples"], {}


def test_a_loss_needs_no_base_class():
    loss = TrainStep(_Plain()).loss
    assert (loss.output, loss.group_size, loss.learns, loss.token_ids) == ("scores", 3, "policy", ())
    assert loss.summarize({"a": 1.0}, {"a": 2.0}) == {"a": 1.0} and loss.row_fault({}) is None
    value, _ = loss({"scores": torch.tensor([1.0, 5.0])}, None, loss.totals(None))
    assert value == 3.0


@pytest.mark.parametrize("output", ["logits", None])
def test_an_output_that_no_model_has_is_refused(output):
    class Wrong(_Plain):
        pass

    Wrong.output = output
    sentence = f"Wrong.output is {output!r}: it must be one of logprobs, values, scores"
    with pytest.raises(ValueError, match=sentence):
        TrainStep(Wrong())
