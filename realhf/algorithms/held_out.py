"""Evaluation on held-out rows: the loss of their completions, and the scores of responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from realhf.algorithms.on_policy import graph_of
from realhf.calls import Generate, HostFunction, Loss, Output, SamplingConfig, as_loss
from realhf.data.rows import extra_columns
from realhf.experiment import Evaluation, Experiment, Role
from realhf.graph import DataflowGraph, FunctionCall
from realhf.rewards.limits import RewardLimits
from realhf.rewards.reward import RewardFunctions, reward_columns
from realhf.rewards.scoring import RewardCall

if TYPE_CHECKING:
    from realhf.data.batch import Batch


HELD_OUT_RESPONSE = ("held_out_ids", "held_out_mask")
"""Keys of the responses. Those of `SEQUENCE` are the completions of the rows."""


@dataclass(frozen=True)
class HeldOutLoss:
    """A host function that returns the loss of all its samples, and the loss's metrics."""

    loss: Loss
    with_perplexity: bool = False  # The loss is the mean over tokens of -log p, and exp(loss) is wanted.

    def row_fault(self, row: Mapping[str, Any]) -> str | None:
        """Return a sentence if the loss cannot use the row, else None."""
        return self.loss.row_fault(row)

    def __call__(self, batch: Batch, context: Any) -> tuple[dict[str, Any], dict[str, float]]:
        output = Output(self.loss.output)
        column = batch[output]
        values = column if output.per_sequence else column.values
        value, metrics = self.loss({output: values}, batch, self.loss.totals(batch))
        numbers = {"loss": value.item(), **{name: metric.item() for name, metric in metrics.items()}}
        if self.with_perplexity:
            numbers["perplexity"] = value.double().exp().item()  # Infinite for a loss above 709.
        return {}, numbers


def held_out_loss(loss: Loss, inputs: Sequence[str], *, with_perplexity: bool = False) -> FunctionCall:
    """Return the call that computes a loss from a model's outputs and columns. It runs on one rank with all
    samples, so that its metrics are the same under every plan."""
    work = HostFunction(HeldOutLoss(as_loss(loss), with_perplexity))
    return FunctionCall("eval_loss", inputs=tuple(inputs), work=work)


def scored_completions(
    function: RewardFunctions | None, sampling: SamplingConfig, held_out: Evaluation, *, tokenizer: str,
    limits: RewardLimits | None = None,
) -> tuple[FunctionCall, ...]:
    """Return the calls that answer prompts and score the responses; none without a function.

    The function and the sampling of the held-out set, if it has them, come before these.
    """
    function = held_out.function or function
    if function is None:
        return ()
    sampling = held_out.sampling_for(sampling)
    generate = Generate(sampling=sampling, tokenizer=tokenizer if sampling.reads_text else None)
    written = (*HELD_OUT_RESPONSE, "gen_logprobs", "finished")
    columns = reward_columns(function, extra_columns(held_out.dataset))
    call = RewardCall(function, columns, limits, sequence=HELD_OUT_RESPONSE)
    reward = HostFunction(call, splittable=True, timeout_seconds=None)
    return (
        FunctionCall("actor_generate", inputs=("prompt_ids",), outputs=written, role="actor", work=generate),
        FunctionCall("reward_forward", inputs=call.inputs, outputs=call.outputs, work=reward))


@dataclass
class Evaluate(Experiment):
    """Lets the frozen `actor` answer the prompts of `eval_dataset`, and scores the responses."""

    actor: Role = field(default_factory=lambda: Role(model=""))
    reward_function: Any = None
    reward_limits: RewardLimits = field(default_factory=RewardLimits)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)

    def roles(self) -> dict[str, Role]:
        return {"actor": self.actor}

    def graph(self) -> DataflowGraph:
        return self.eval_graph()

    def eval_graph(self) -> DataflowGraph:
        calls = scored_completions(
            self.reward_function, self.sampling, self.evaluation, tokenizer=self.tokenizer_dir(),
            limits=self.reward_limits)
        return graph_of(*calls)
