"""Training of an outcome reward model, which scores answers (Cobbe et al. 2021, arXiv:2110.14168)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from realhf.calls import OptimizerConfig, TrainStep
from realhf.experiment import Experiment, Role
from realhf.graph import DataflowGraph, FunctionCall

if TYPE_CHECKING:
    from torch import Tensor

    from realhf.data.batch import Batch


@dataclass(frozen=True)
class BinaryCrossEntropy:
    """The loss -label log sigmoid(score) - (1 - label) log sigmoid(-score), a mean over samples."""

    output: ClassVar[str] = "scores"
    entropy: ClassVar[bool] = False

    def row_fault(self, row: Mapping[str, Any]) -> str | None:
        """Return a sentence if the row's label is not legal, else None."""
        label = row["label"]
        if isinstance(label, int | float) and 0 <= label <= 1:
            return None
        return f"label is {label!r}: it must be a number from 0 (wrong) to 1 (right)"

    def totals(self, batch: Batch) -> dict[str, float]:
        return {"samples": float(len(batch))}

    def __call__(
        self, outputs: Mapping[str, Tensor], batch: Batch, totals: Mapping[str, float]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        score = outputs["scores"]
        label = score.new_tensor(batch["label"])
        # log(1 + exp(score)) - label * score, in a form that cannot overflow.
        loss = (score.clamp(min=0) - label * score + (-score.abs()).exp().log1p()).sum() / totals["samples"]
        return loss, {"accuracy": ((score > 0) == (label > 0.5)).to(score.dtype).sum() / totals["samples"]}


@dataclass
class RewardModel(Experiment):
    """Trains the reward model `reward` on rows of prompt, completion and `label` (1 right, 0 wrong)."""

    reward: Role = field(default_factory=lambda: Role(model="", head="score", optimizer=OptimizerConfig()))

    def roles(self) -> dict[str, Role]:
        return {"reward": self.reward}

    def graph(self) -> DataflowGraph:
        keys = ("sequence_ids", "label")
        work = TrainStep(BinaryCrossEntropy())
        call = FunctionCall("reward_train", "train_step", keys, role="reward", work=work)
        return DataflowGraph((call,), keys)
