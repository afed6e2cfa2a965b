"""Training of reward models: on labelled answers, or on preference pairs.

An outcome reward model scores each answer by itself (Cobbe et al. 2021, arXiv:2110.14168). A pairwise one
follows Bradley and Terry (1952), as in Ouyang et al. 2022 (arXiv:2203.02155).

Suffixes of tensors name their dims: S sequences, P pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import TYPE_CHECKING, Any

from realhf.algorithms.held_out import held_out_loss
from realhf.algorithms.on_policy import graph_of
from realhf.algorithms.pairs import PAIR, cross_entropy, num_pairs, pair_indices, split_pairs
from realhf.calls import Loss, OptimizerConfig, Scores, TrainStep
from realhf.data.dataset import IS_CHOSEN
from realhf.experiment import Experiment, Role
from realhf.graph import DataflowGraph, FunctionCall
from realhf.user_input.field_types import check_types, require

if TYPE_CHECKING:
    from torch import Tensor

    from realhf.data.batch import Batch


@dataclass(frozen=True)
class BinaryCrossEntropy(Loss):
    """The loss -label log sigmoid(score) - (1 - label) log sigmoid(-score), a mean over samples."""

    output = "scores"
    learns = "scores"

    def row_fault(self, row: Mapping[str, Any]) -> str | None:
        label = row["label"]
        if isinstance(label, int | float) and 0 <= label <= 1:
            return None
        return f"label is {label!r}: it must be a number from 0 (wrong) to 1 (right)"

    def totals(self, batch: Batch) -> dict[str, float]:
        return {"samples": float(len(batch))}

    def __call__(
        self, outputs: Mapping[str, Tensor], batch: Batch, totals: Mapping[str, float]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        score_S = outputs["scores"]
        label_S = score_S.new_tensor(batch["label"])
        loss = cross_entropy(score_S, label_S).sum() / totals["samples"]
        is_right_S = (score_S > 0) == (label_S > 0.5)
        return loss, {"accuracy": is_right_S.to(score_S.dtype).sum() / totals["samples"]}


@dataclass(frozen=True)
class BradleyTerry(Loss):
    """The mean over pairs of -log sigmoid(chosen - rejected - margin) + center_coef (chosen + rejected)^2,
    where chosen and rejected are scores.

    Metrics: `accuracy` is how often the chosen completion has the higher score, `margin` the mean of
    chosen - rejected, and `mean_reward` the mean of all scores.
    """

    margin_key: str | None = None
    """Column with the margin of each pair, by which the chosen score should at least be higher (Touvron et
    al. 2023, arXiv:2307.09288); None: no margin."""
    center_coef: float = 0.0
    """Weight of the square that keeps the scores' mean near 0 (Eisenstein et al. 2023, arXiv:2312.09244);
    0.01 is usual."""
    output = "scores"
    learns = "scores"
    group_size = PAIR

    def __post_init__(self) -> None:
        check_types(self, "loss.")
        require(self.center_coef >= 0, "loss.center_coef", self.center_coef, "not be negative")

    @property
    def columns(self) -> tuple[str, ...]:
        """Keys that the loss reads beside the scores."""
        return (IS_CHOSEN,) if self.margin_key is None else (IS_CHOSEN, self.margin_key)

    def row_fault(self, row: Mapping[str, Any]) -> str | None:
        margin = 0.0 if self.margin_key is None else row[self.margin_key]
        if isinstance(margin, int | float) and isfinite(margin):
            return None
        return f"{self.margin_key} is {margin!r}: it must be a finite number"

    def totals(self, batch: Batch) -> dict[str, float]:
        return {"pairs": float(num_pairs(batch))}

    def __call__(
        self, outputs: Mapping[str, Tensor], batch: Batch, totals: Mapping[str, float]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        chosen_P, rejected_P = split_pairs(outputs["scores"], batch)
        logit_P = chosen_P - rejected_P
        if self.margin_key is not None:
            margins = [batch[self.margin_key][i] for i in pair_indices(batch)[0]]
            logit_P = logit_P - chosen_P.new_tensor(margins)
        loss_P = cross_entropy(logit_P, 1.0) + self.center_coef * (chosen_P + rejected_P) ** 2
        metrics = {
            "accuracy": (chosen_P > rejected_P).to(chosen_P.dtype),
            "margin": (chosen_P - rejected_P).detach(),
            "mean_reward": (chosen_P + rejected_P).detach() / 2}
        count = max(totals["pairs"], 1.0)
        return loss_P.sum() / count, {name: x_P.sum() / count for name, x_P in metrics.items()}


@dataclass
class RewardModel(Experiment):
    """Trains the outcome reward model `reward` on rows of prompt, completion and `label`, from 0 (wrong) to 1
    (right)."""

    reward: Role = field(default_factory=lambda: Role(model="", head="score", optimizer=OptimizerConfig()))

    def roles(self) -> dict[str, Role]:
        return {"reward": self.reward}

    def graph(self) -> DataflowGraph:
        return _train_graph(BinaryCrossEntropy(), ("label",))

    def eval_graph(self) -> DataflowGraph:
        return _eval_graph(BinaryCrossEntropy(), ("label",))


@dataclass
class PairwiseRewardModel(RewardModel):
    """Trains the reward model `reward` on rows of prompt, chosen and rejected completion."""

    loss: BradleyTerry = field(default_factory=BradleyTerry)
    group_size: int = PAIR  # Samples per prompt: the chosen and the rejected completion.

    def graph(self) -> DataflowGraph:
        return _train_graph(self.loss, self.loss.columns)

    def eval_graph(self) -> DataflowGraph:
        return _eval_graph(self.loss, self.loss.columns)


def _train_graph(loss: Loss, columns: tuple[str, ...]) -> DataflowGraph:
    inputs = ("sequence_ids", *columns)
    return graph_of(
        FunctionCall("reward_train", "train_step", inputs, role="reward", work=TrainStep(loss)))


def _eval_graph(loss: Loss, columns: tuple[str, ...]) -> DataflowGraph:
    read = ("sequence_ids",)
    forward = FunctionCall("reward_forward", "forward", read, ("scores",), role="reward", work=Scores())
    return graph_of(forward, held_out_loss(loss, ("scores", *columns)))
