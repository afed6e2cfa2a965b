"""Tries losses and advantages of users for `realhf check`: on samples whose outputs are made up."""

from typing import Any

import torch

from realhf.calls import (
    Generate,
    GenerateOutputs,
    HostFunction,
    LogProbs,
    Loss,
    ModelWork,
    Output,
    Scores,
    TopLogProbs,
    TrainStep,
    is_own,
)
from realhf.data.batch import Batch, Packed
from realhf.data.loader import batch_of_samples
from realhf.data.tokenized import TokenizedSamples
from realhf.engine.own_loss import OwnLoss
from realhf.errors import UserError
from realhf.graph import DataflowGraph, FunctionCall
from realhf.rewards.scoring import RewardCall
from realhf.runtime.execute.host_call import HostContext, call_host_function

_LONGEST = 5
"""Tokens of a made-up response, at most."""


def try_losses(
    graph: DataflowGraph, samples: list[TokenizedSamples], *, group_size: int, vocabulary: int, tokenizer: str
) -> list[str]:
    """Call the losses and advantages that a user has written with these rows and with made-up answers and
    scores; return warnings.

    A loss is left out that reads what a host function of the user writes, as that is not called here. Raises
    UserError if one fails or returns something that training cannot use.
    """
    trains = [call for call in graph.calls if isinstance(call.work, TrainStep) and is_own(call.work.loss)]
    maker = _MadeUp(vocabulary, HostContext(tokenizer, step=1))
    batch = batch_of_samples(range(len(samples)), samples, keys=graph.inputs, group_size=group_size)
    for call in graph.order:
        if all(key in batch.fields for key in call.inputs):
            try:
                columns = maker.columns(call, batch)
            except UserError as error:
                raise UserError(f"{error}; check called it with made-up scores") from error
            batch = Batch(batch.ids, batch.fields | columns)
    warnings: list[str] = []
    for call in trains:
        if all(key in batch.fields for key in call.inputs):
            try:
                _try(call, batch.pick(call.inputs), maker, warnings)
            except UserError as error:
                raise UserError(
                    f"call {call.name!r}: {error}; check called it with rows of the dataset and made-up "
                    "outputs of other calls") from error
    return warnings


def _try(call: FunctionCall, batch: Batch, maker: "_MadeUp", warnings: list[str]) -> None:
    work = call.work_as(TrainStep)
    loss = OwnLoss(
        work.loss, key=call.inputs[0],
        warn=lambda sentence: warnings.append(f"call {call.name!r}: {sentence} (tried with made-up samples)"))
    totals = loss.totals(batch) or {"samples": float(len(batch))}
    loss(maker.outputs(work.loss, batch, key=call.inputs[0]), batch, totals)


class _MadeUp:
    """Random columns of the kinds that calls return, which are the same each time."""

    def __init__(self, vocabulary: int, context: HostContext) -> None:
        self._vocabulary = vocabulary
        self._context = context
        self._random = torch.Generator().manual_seed(0)

    def columns(self, call: FunctionCall, batch: Batch) -> dict[str, Any]:
        """Return the outputs of a call; none if a user's own function would have to be called."""
        if call.kind == "generate":
            return self._answers(call, batch)
        if call.kind == "forward":
            return self._forward(call, batch)
        if call.kind == "host":
            return self._host(call, batch)
        return {}

    def outputs(self, loss: Loss, batch: Batch, *, key: str) -> dict[str, torch.Tensor]:
        """Return what a model would compute for a loss, with gradients."""
        output = Output(loss.output)
        size = len(batch) if output.per_sequence else len(batch[key].values)
        if not output.needs_logits:
            return {output: self._normal(size).requires_grad_()}
        mask = batch.fields.get("response_mask")
        counted = torch.ones(size) if mask is None else mask.values
        outputs = {"logprobs": -self._normal(size).abs() * counted}
        if loss.entropy:
            outputs["entropy"] = self._normal(size).abs() * counted
        if loss.token_ids:
            width = sum(batch[name].values.shape[1] for name in loss.token_ids)
            outputs["logprobs_at"] = -self._normal(size, width).abs() * counted[:, None]
        return {name: values.requires_grad_() for name, values in outputs.items()}

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._random)

    def _ids(self, *shape: int) -> torch.Tensor:
        return torch.randint(self._vocabulary, shape, generator=self._random)

    def _answers(self, call: FunctionCall, batch: Batch) -> dict[str, Any]:
        prompts = batch[call.inputs[0]].split()
        most = min(_LONGEST, call.work_as(Generate).sampling.max_new_tokens)
        counts = torch.randint(1, most + 1, (len(prompts),), generator=self._random).tolist()
        pairs = list(zip(prompts, counts, strict=True))
        sequences = [torch.cat([prompt, self._ids(count)]) for prompt, count in pairs]
        masks = [torch.cat([torch.zeros(len(prompt)), torch.ones(count)]) for prompt, count in pairs]
        mask = Packed.of(masks)
        keys = GenerateOutputs.of(call)
        columns = {
            keys.sequences: Packed.of(sequences), keys.mask: mask,
            keys.logprobs: mask.like(-self._normal(len(mask.values)).abs() * mask.values),
            keys.finished: torch.tensor([float(n < most) for n in counts])}
        if keys.versions is not None:
            columns[keys.versions] = mask.like(torch.zeros(len(mask.values), dtype=torch.int64))
        return columns

    def _forward(self, call: FunctionCall, batch: Batch) -> dict[str, Any]:
        tokens = batch[call.inputs[0]]
        size = len(tokens.values)
        work = call.work_as(ModelWork)
        if isinstance(work, Scores):
            scores = self._normal(len(batch))
            return {call.outputs[0]: scores.sigmoid() if work.probability else scores}
        if isinstance(work, TopLogProbs):
            shape = (size, work.k)
            columns = (self._ids(*shape), -self._normal(*shape).abs().sort(dim=1).values)
            return {key: tokens.like(column) for key, column in zip(call.outputs, columns, strict=True)}
        mask = batch.fields.get("response_mask")
        counted = torch.ones(size) if mask is None else mask.values
        values = self._normal(size) if work.output is Output.VALUES else -self._normal(size).abs()
        outputs = {call.outputs[0]: tokens.like(values * counted)}
        if isinstance(work, LogProbs) and work.entropy:
            outputs[call.outputs[1]] = tokens.like(self._normal(size).abs() * counted)
        return outputs

    def _host(self, call: FunctionCall, batch: Batch) -> dict[str, Any]:
        function = call.work_as(HostFunction).function
        if isinstance(function, RewardCall):
            columns: dict[str, Any] = {key: [{} for _ in batch.ids] for key in call.outputs}
            score = self._normal(len(batch)).double()
            return columns | {"score": score, "completion": [""] * len(batch)}
        if not type(function).__module__.startswith("realhf."):
            return {}
        return dict(call_host_function(call, batch.pick(call.inputs), self._context).batch.fields)
