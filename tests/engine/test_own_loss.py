"""Losses of users: what they may return, and whether they add up over the parts of a mini-batch."""

import pytest
import torch

from realhf.calls import Loss, is_own
from realhf.data.batch import Batch, Packed
from realhf.engine.own_loss import OwnLoss
from realhf.errors import UserError

LENGTHS = [3, 1, 4, 2]


class Mine(Loss):
    """The mean of -A log p over all tokens, with a fault perhaps."""

    output = "logprobs"

    def __init__(self, fault: str = "", **fields) -> None:
        self.fault = fault
        vars(self).update(fields)

    def totals(self, batch):
        tokens = batch["response_mask"].values.sum()
        if self.fault == "tensor total":
            return {"tokens": tokens}
        if self.fault == "list":
            return [tokens.item()]
        if self.fault == "mean total":
            return {"tokens": tokens.item() / len(batch)}
        return {"tokens": tokens.item()}

    def __call__(self, outputs, batch, totals):
        mask = batch["response_mask"].values
        terms = -outputs["logprobs"] * batch["advantages"].values * mask
        if self.fault == "attribute":
            return outputs.logprobs.sum(), {}
        if self.fault == "mean":
            return terms.sum() / mask.sum(), {}
        if self.fault == "batch mean":  # Advantages that are centred by the part's own mean.
            advantages = batch["advantages"].values
            return -(outputs["logprobs"] * (advantages - advantages.mean())).sum() / totals["tokens"], {}
        if self.fault == "vector":
            return terms / totals["tokens"], {}
        loss = terms.sum() / totals["tokens"]
        if self.fault == "no gradient":
            return loss.detach(), {}
        if self.fault == "float metric":
            return loss, {"mine": 0.5}
        if self.fault == "mean metric":
            return loss, {"mine": mask.mean() + loss.detach()}
        if self.fault == "alone":
            return loss
        return loss, {"mine": loss.detach(), "most/max": terms.detach().max()}


def _batch(ids=(0, 1, 2, 3)) -> Batch:
    generator = torch.Generator().manual_seed(1)
    size = sum(LENGTHS)
    columns = {
        "sequence_ids": torch.arange(size), "response_mask": torch.ones(size),
        "advantages": torch.randn(size, generator=generator)}
    return Batch(list(ids), {key: Packed(values, LENGTHS) for key, values in columns.items()})


def _tried(loss: Loss, ids=(0, 1, 2, 3)) -> list[str]:
    warnings: list[str] = []
    own = OwnLoss(loss, key="sequence_ids", warn=warnings.append)
    batch = _batch(ids)
    outputs = {"logprobs": -torch.rand(sum(LENGTHS), generator=torch.Generator().manual_seed(2))}
    outputs["logprobs"].requires_grad_()
    totals = own.totals(batch)
    for _ in range(2):
        value, metrics = own(outputs, batch, totals)
    assert value.dim() == 0 and all(isinstance(metric, torch.Tensor) for metric in metrics.values())
    return warnings


@pytest.mark.parametrize(("fault", "says"), [
    ("tensor total", "Mine.totals() returned a tensor for 'tokens': totals are plain numbers"),
    ("list", "Mine.totals() returned list: it must return a dict of numbers"),
    ("attribute", "Mine.__call__() raised AttributeError: 'dict' object has no attribute 'logprobs'"),
    ("vector", "Mine.__call__() returned a tensor of shape (10,) as loss"),
    ("no gradient", "Mine.__call__() returned a loss without a gradient"),
    ("float metric", "Mine.__call__() returned float 0.5 as metric 'mine'"),
    ("alone", "Mine.__call__() returned a tensor of shape (): it must return a loss and a dict of metrics"),
])
def test_what_training_cannot_use_is_refused(fault, says):
    with pytest.raises(UserError) as raised:
        _tried(Mine(fault))
    assert str(raised.value).startswith(says)


@pytest.mark.parametrize(("fault", "says"), [
    ("mean", "Mine.__call__(): the loss of a batch is"),
    ("batch mean", "Mine.__call__(): the loss of a batch is"),
    ("mean total", "Mine.totals(): 'tokens' is 2.5 for a batch, and 2 and 3 for its halves"),
    ("mean metric", "Mine.__call__(): metric 'mine' is"), ("", None),
])
def test_what_does_not_add_up_is_told_once(fault, says):
    warnings = _tried(Mine(fault))
    assert [sentence[: len(says or "")] for sentence in warnings] == ([] if says is None else [says])


def test_groups_stay_whole():
    """A loss that compares the two samples of a prompt adds up over prompts; one prompt cannot be cut."""

    class Pairs(Mine):
        group_size = 2

        def __call__(self, outputs, batch, totals):
            parts = outputs["logprobs"].split(batch["sequence_ids"].lengths)
            sums = torch.stack([part.sum() for part in parts])
            return -(sums[0::2] - sums[1::2]).sigmoid().sum() / totals["tokens"], {}

    assert _tried(Pairs()) == []
    assert len(_tried(Pairs(group_size=1), ids=(0, 2, 4, 6))) == 0
    assert _tried(Mine("mean", group_size=4)) == []  # There is one group, and so nothing to compare.


def test_own_losses_are_those_of_other_modules():
    from realhf.algorithms.ppo import ValueLoss

    assert is_own(Mine()) and not is_own(ValueLoss())
