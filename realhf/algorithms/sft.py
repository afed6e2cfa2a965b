"""Supervised fine-tuning: maximum likelihood of the completions; prompts are masked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from realhf.algorithms.held_out import held_out_loss, scored_completions
from realhf.algorithms.loss_functions import LossFunction, called, columns_of, own_or
from realhf.algorithms.on_policy import SEQUENCE, graph_of
from realhf.calls import LogProbs, Loss, OptimizerConfig, SamplingConfig, TrainStep
from realhf.data.rows import may_have_completions
from realhf.experiment import Experiment, Role
from realhf.graph import DataflowGraph, FunctionCall
from realhf.rewards.reward import RewardFunctions

if TYPE_CHECKING:
    from torch import Tensor

    from realhf.data.batch import Batch


@dataclass(frozen=True)
class CrossEntropy(Loss):
    """Negative log-likelihood, averaged over the completion tokens of the mini-batch."""

    function: Any = None
    """A function of one's own in the place of -log p: it returns the loss of each completion token, and names
    what it reads as parameters, such as `logprobs` (docs/algorithms.md). It may also be a Loss."""
    output = "logprobs"
    learns = "completions"

    def with_function(self, function: LossFunction) -> CrossEntropy:
        """Return settings with a function of one's own."""
        return CrossEntropy(function)

    @property
    def columns(self) -> tuple[str, ...]:
        """Keys that the loss reads beside the log-probs of the completions."""
        return columns_of(self.function, ("logprobs", *SEQUENCE))

    def totals(self, batch: Batch) -> dict[str, float]:
        return {"tokens": float(batch["response_mask"].values.sum())}

    def __call__(
        self, outputs: Mapping[str, Tensor], batch: Batch, totals: Mapping[str, float]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        mask_T = batch["response_mask"].values
        loss_T = -outputs["logprobs"]
        if self.function is not None:
            loss_T = called(self.function, outputs, batch, unit="token", count=len(mask_T))
            loss_T = loss_T.masked_fill(mask_T == 0, 0.0)
        return (loss_T * mask_T).sum() / max(totals["tokens"], 1.0), {}


@dataclass
class SFT(Experiment):
    """Fine-tunes `actor` on rows of prompt and completion.

    An evaluation computes the loss of the completions of `eval_dataset`, unless it has none and only its
    prompts are answered, for `reward_function`.
    """

    actor: Role = field(default_factory=lambda: Role(model="", optimizer=OptimizerConfig()))
    loss: CrossEntropy = field(default_factory=CrossEntropy)
    reward_function: RewardFunctions | None = None  # Scores answers to `eval_dataset`, if given.
    sampling: SamplingConfig = field(default_factory=SamplingConfig)  # Limits the length of those answers.
    router_aux_loss_coef: float = 0.0
    """Weight of the routers' load-balancing loss, for an actor with experts."""
    router_z_loss_coef: float = 0.0  # Weight of the routers' z-loss, which keeps their logits small.

    def roles(self) -> dict[str, Role]:
        return {"actor": self.actor}

    def graph(self) -> DataflowGraph:
        work = TrainStep(
            own_or(self.loss), router_aux_loss_coef=self.router_aux_loss_coef,
            router_z_loss_coef=self.router_z_loss_coef)
        inputs = (*SEQUENCE, *self.loss.columns)
        return graph_of(FunctionCall("actor_train", inputs=inputs, role="actor", work=work))

    def eval_graph(self) -> DataflowGraph:
        held_out = self.evaluation
        answers = scored_completions(
            self.reward_function, self.sampling, held_out, tokenizer=self.tokenizer_dir())
        if answers and not may_have_completions(held_out.dataset):
            return graph_of(*answers)
        forward = FunctionCall(
            "actor_forward", inputs=SEQUENCE, outputs=("logprobs",), role="actor", work=LogProbs())
        inputs = ("response_mask", "logprobs", *self.loss.columns)
        is_nll = self.loss.function is None
        return graph_of(
            forward, held_out_loss(own_or(self.loss), inputs, with_perplexity=is_nll), *answers)
