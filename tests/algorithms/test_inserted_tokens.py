"""Tokens that were inserted into responses: rewards see them, and losses are as if they were not there."""

from types import SimpleNamespace

import pytest
import torch

from realhf.algorithms.advantages import AdvantageConfig, AdvantageInputs, SampleAdvantages, TokenAdvantages
from realhf.algorithms.on_policy import TokenReturns
from realhf.algorithms.policy_loss import PolicyLoss, PolicyLossConfig
from realhf.algorithms.responses import rollout_metrics
from realhf.data.batch import Batch, Packed
from realhf.rewards.scoring import decode_responses
from realhf.rewards.shaping import RepetitionPenalty, SoftOverlongPenalty

MASKS = [[0, 0, 1, 1, 0, 0, 1, 1], [0, 1, 1, 1], [0, 1, 0, 0], [0, 0, 0, 1, 1, 0, 1]]
KINDS = [["p", "p", "s", "s", "i", "i", "s", "s"], ["p", "s", "s", "s"], ["p", "s", "i", "i"],
         ["p", "p", "p", "s", "s", "i", "s"]]
"""Tokens of prompts, sampled tokens and inserted ones."""
COLUMNS = ("gen_logprobs", "ref_logprobs", "values", "advantages", "logprobs", "entropy")


def _batch(*, with_inserted=True):
    """Return a batch with inserted tokens, or the same without these tokens."""
    generator = torch.Generator().manual_seed(0)
    fields = {key: [] for key in ("response_mask", "sequence_ids", *COLUMNS)}
    for kinds in KINDS:
        kept = torch.tensor([with_inserted or kind != "i" for kind in kinds])
        mask = torch.tensor([float(kind == "s") for kind in kinds], dtype=torch.float64)
        fields["response_mask"].append(mask[kept])
        fields["sequence_ids"].append(torch.randint(5, (len(kinds),), generator=generator)[kept])
        for key in COLUMNS:
            values = torch.randn(len(kinds), generator=generator, dtype=torch.float64)
            fields[key].append((values * mask)[kept])
    columns = {key: Packed.of(rows) for key, rows in fields.items()}
    score = torch.tensor([1.0, 0.0, 0.5, 2.0], dtype=torch.float64)
    return Batch([0, 1, 2, 3], columns | {"score": score, "finished": torch.ones(4, dtype=torch.float64)})


def _sampled(column, batch):
    return column.values[batch["response_mask"].values.bool()]


def test_the_masks_are_those_of_the_kinds():
    assert [mask.tolist() for mask in _batch()["response_mask"].split()] == MASKS


def test_rewards_and_lengths_count_inserted_tokens():
    batch = _batch()
    context = SimpleNamespace(tokenizer=SimpleNamespace(decode=lambda ids, skip_special_tokens: str(ids)))
    ids, texts = decode_responses(batch, context)
    expected = [
        tokens[kinds.index("s") :].tolist()
        for tokens, kinds in zip(batch["sequence_ids"].split(), KINDS, strict=True)]
    assert ids == expected and texts == [str(tokens) for tokens in expected]
    metrics = rollout_metrics(batch)
    assert metrics["response_length/mean"] == (6 + 3 + 3 + 4) / 4
    assert metrics["response_length/max"] == 6
    assert metrics["response_length/interrupted"] == 0.75
    assert "response_length/interrupted" not in rollout_metrics(_batch(with_inserted=False))
    shaped, _ = AdvantageInputs(SoftOverlongPenalty(6, 3)).shaped_scores(batch)
    torch.testing.assert_close(shaped, batch["score"] - torch.tensor([1, 0, 0, 1 / 3]).double())


def test_token_rewards_see_inserted_tokens():
    batch = _batch()
    penalty = RepetitionPenalty(ngram=1, penalty=-1.0, discount=0.5)
    columns, _ = TokenReturns((penalty,))(batch, None)
    for i, kinds in enumerate(KINDS):
        first = kinds.index("s")
        tokens = batch["sequence_ids"].split()[i].tolist()[first:]
        rewards = [-float(token in tokens[:at]) for at, token in enumerate(tokens)]
        returns = [sum(r * 0.5**j for j, r in enumerate(rewards[at:])) for at in range(len(tokens))]
        found = columns["token_returns"].split()[i]
        assert found.tolist() == pytest.approx([0.0] * first + returns)


@pytest.mark.parametrize("config", [AdvantageConfig(gamma=0.9, lam=0.8), AdvantageConfig(whiten=False)])
def test_ppo_passes_over_inserted_tokens(config):
    pair = [_batch(), _batch(with_inserted=False)]
    made = [TokenAdvantages(config)(batch, None)[0] for batch in pair]
    for key in ("advantages", "returns"):
        ours, theirs = (_sampled(columns[key], batch) for columns, batch in zip(made, pair, strict=True))
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("average", ["sequence", "token", "prompt"])
@pytest.mark.parametrize("objective", ["ppo", "cispo"])
def test_losses_are_those_without_inserted_tokens(objective, average):
    found = []
    for batch in (_batch(), _batch(with_inserted=False)):
        advantages = SampleAdvantages(2, normalize="batch", counts_prompt_tokens=True)
        batch.fields |= advantages(batch, None)[0]
        loss = PolicyLoss(PolicyLossConfig(objective=objective, average=average))
        logprobs = batch["logprobs"].values.requires_grad_()
        outputs = {"logprobs": logprobs, "entropy": batch["entropy"].values}
        value, metrics = loss(outputs, batch, loss.totals(batch))
        value.backward()
        found.append((value, _sampled(Packed(logprobs.grad, batch["response_mask"].lengths), batch), metrics))
        assert not logprobs.grad[batch["response_mask"].values == 0].any()
    torch.testing.assert_close(*found)
