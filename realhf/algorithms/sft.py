"""Supervised fine-tuning: maximum likelihood of the completions; prompts are masked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from realhf.algorithms.held_out import held_out_loss, scored_completions
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

    output = "logprobs"
    learns = "completions"

    def totals(self, batch: Batch) -> dict[str, float]:
        return {"tokens": float(batch["response_mask"].values.sum())}

    def __call__(
        self, outputs: Mapping[str, Tensor], batch: Batch, totals: Mapping[str, float]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        mask_T = batch["response_mask"].values
        return -(outputs["logprobs"] * mask_T).sum() / max(totals["tokens"], 1.0), {}


@dataclass
class SFT(Experiment):
    """Fine-tunes `actor` on rows of prompt and completion.

    An evaluation computes the loss of the completions of `eval_dataset`, unless it has none and only its
    prompts are answered, for `reward_function`.
    """

    actor: Role = field(default_factory=lambda: Role(model="", optimizer=OptimizerConfig()))
    reward_function: RewardFunctions | None = None  # Scores answers to `eval_dataset`, if given.
    sampling: SamplingConfig = field(default_factory=SamplingConfig)  # Limits the length of those answers.
    router_aux_loss_coef: float = 0.0
    """Weight of the routers' load-balancing loss, for an actor with experts."""
    router_z_loss_coef: float = 0.0  # Weight of the routers' z-loss, which keeps their logits small.

    def roles(self) -> dict[str, Role]:
        return {"actor": self.actor}

    def graph(self) -> DataflowGraph:
        work = TrainStep(
            CrossEntropy(), router_aux_loss_coef=self.router_aux_loss_coef,
            router_z_loss_coef=self.router_z_loss_coef)
        return graph_of(FunctionCall("actor_train", inputs=SEQUENCE, role="actor", work=work))

    def eval_graph(self) -> DataflowGraph:
        held_out = self.evaluation
        answers = scored_completions(
            self.reward_function, self.sampling, held_out, tokenizer=self.tokenizer_dir())
        if answers and not may_have_completions(held_out.dataset):
            return graph_of(*answers)
        forward = FunctionCall(
            "actor_forward", inputs=SEQUENCE, outputs=("logprobs",), role="actor", work=LogProbs())
        inputs = ("response_mask", "logprobs")
        return graph_of(forward, held_out_loss(CrossEntropy(), inputs, with_perplexity=True), *answers)
