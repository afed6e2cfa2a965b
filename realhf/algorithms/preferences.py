"""Preference pairs: DPO and its variants, and reward models, also of labelled answers.

A pair is the chosen and the rejected sample of one prompt. DPO: Rafailov et al. 2023, arXiv:2305.18290. An
outcome reward model scores each answer by itself (Cobbe et al. 2021, arXiv:2110.14168). A pairwise one
follows Bradley and Terry (1952), as in Ouyang et al. 2022 (arXiv:2203.02155).

Suffixes of tensors name their dims: T packed tokens, S sequences, P pairs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import TYPE_CHECKING, Any, Literal

from realhf.algorithms.held_out import held_out_loss, scored_completions
from realhf.algorithms.on_policy import SEQUENCE, graph_of, initial_reference
from realhf.algorithms.responses import num_trained_tokens, response_sums
from realhf.calls import LogProbs, Loss, OptimizerConfig, SamplingConfig, Scores, TrainStep
from realhf.data.dataset import IS_CHOSEN
from realhf.experiment import Experiment, Role
from realhf.graph import DataflowGraph, FunctionCall
from realhf.rewards.reward import RewardFunctions
from realhf.user_input.field_types import check_types, require

if TYPE_CHECKING:
    from torch import Tensor

    from realhf.data.batch import Batch


PAIR = 2
"""Samples of a pair; their ids are consecutive."""


def pair_indices(batch: Batch) -> tuple[list[int], list[int]]:
    """Return the indices of the chosen and of the rejected samples, in the same order of pairs.

    A sample whose partner a filter has dropped is left out.
    """
    chosen: dict[int, int] = {}
    rejected: dict[int, int] = {}
    for i, (sample_id, is_chosen) in enumerate(zip(batch.ids, batch[IS_CHOSEN], strict=True)):
        (chosen if is_chosen else rejected)[sample_id // PAIR] = i
    both = [pair for pair in chosen if pair in rejected]
    return [chosen[pair] for pair in both], [rejected[pair] for pair in both]


def num_pairs(batch: Batch) -> int:
    return len(pair_indices(batch)[0])


def split_pairs(values_S: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the values of chosen and of rejected samples, from one value for each sample."""
    chosen, rejected = (values_S.new_tensor(indices).long() for indices in pair_indices(batch))
    return values_S[chosen], values_S[rejected]


def cross_entropy(logit: Tensor, label: Tensor | float) -> Tensor:
    """Return -label log sigmoid(logit) - (1 - label) log sigmoid(-logit), which cannot overflow.

    Its gradient is also right at 0, where log-ratios to a reference of equal weights begin.
    """
    zero = logit.new_zeros(())
    return label * (-logit).logaddexp(zero) + (1 - label) * logit.logaddexp(zero)


@dataclass(frozen=True)
class DPOLoss(Loss):
    """The mean over pairs of f(d), where d = log(p / p_ref)(chosen) - log(p / p_ref)(rejected).

    Log-ratios are sums over the completion's tokens. The metrics `rewards/...` are means over pairs of
    beta log(p / p_ref), and of how often the chosen completion has the larger one.
    """

    variant: Literal["sigmoid", "hinge", "ipo"] = "sigmoid"
    """`sigmoid` is DPO: f(d) = -log sigmoid(beta d). `hinge` is that of SLiC (arXiv:2305.10425):
    f(d) = max(0, 1 - beta d). `ipo` (arXiv:2310.12036): f(d) = (d - 1 / (2 beta))^2, with log-ratios averaged
    over the completion's tokens, as in TRL."""
    beta: float = 0.1  # How closely the policy stays to the reference; the larger, the closer.
    label_smoothing: float = 0.0
    """Share of pairs whose order is assumed to be wrong (conservative DPO, Mitchell 2023); `sigmoid` only."""
    output = "logprobs"
    learns = "preferences"
    group_size = PAIR

    def __post_init__(self) -> None:
        check_types(self, "loss.")
        require(self.beta > 0, "loss.beta", self.beta, "be above 0")
        share = self.label_smoothing
        require(0 <= share < 0.5, "loss.label_smoothing", share, "be at least 0 and below 0.5")
        require(
            share == 0 or self.variant == "sigmoid", "loss.label_smoothing", share,
            f"be 0 with loss.variant {self.variant}")

    def totals(self, batch: Batch) -> dict[str, float]:
        return {"pairs": float(num_pairs(batch))}

    def __call__(
        self, outputs: Mapping[str, Tensor], batch: Batch, totals: Mapping[str, float]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        mask = batch["response_mask"]
        log_ratio_S = response_sums(outputs["logprobs"] - batch["ref_logprobs"].values, mask)
        chosen_P, rejected_P = split_pairs(log_ratio_S, batch)
        if self.variant == "sigmoid":
            loss_P = cross_entropy(self.beta * (chosen_P - rejected_P), 1 - self.label_smoothing)
        elif self.variant == "hinge":
            loss_P = (1 - self.beta * (chosen_P - rejected_P)).relu()
        else:
            mean_S = log_ratio_S / num_trained_tokens(mask).clamp(min=1.0)
            chosen_mean_P, rejected_mean_P = split_pairs(mean_S, batch)
            loss_P = (chosen_mean_P - rejected_mean_P - 1 / (2 * self.beta)) ** 2
        chosen_reward_P = self.beta * chosen_P.detach()
        rejected_reward_P = self.beta * rejected_P.detach()
        metrics = {
            "rewards/chosen": chosen_reward_P,
            "rewards/rejected": rejected_reward_P,
            "rewards/margins": chosen_reward_P - rejected_reward_P,
            "rewards/accuracies": (chosen_reward_P > rejected_reward_P).to(chosen_reward_P.dtype)}
        count = max(totals["pairs"], 1.0)
        return loss_P.sum() / count, {name: x_P.sum() / count for name, x_P in metrics.items()}


@dataclass
class DPO(Experiment):
    """Trains `actor` on rows of prompt, chosen and rejected completion, against the reference `ref`."""

    actor: Role = field(default_factory=lambda: Role(model="", optimizer=OptimizerConfig()))
    ref: Role | None = None  # The reference model; None: the actor's initial weights.
    loss: DPOLoss = field(default_factory=DPOLoss)
    group_size: int = PAIR  # Samples per prompt: the chosen and the rejected completion.
    reward_function: RewardFunctions | None = None  # Scores answers to `eval_dataset`, if given.
    sampling: SamplingConfig = field(default_factory=SamplingConfig)  # Limits the length of those answers.
    router_aux_loss_coef: float = 0.0
    """Weight of the routers' load-balancing loss, for an actor with experts."""
    router_z_loss_coef: float = 0.0  # Weight of the routers' z-loss, which keeps their logits small.

    def roles(self) -> dict[str, Role]:
        return {"actor": self.actor, "ref": self.ref or initial_reference(self.actor)}

    def graph(self) -> DataflowGraph:
        work = TrainStep(
            self.loss, router_aux_loss_coef=self.router_aux_loss_coef,
            router_z_loss_coef=self.router_z_loss_coef)
        inputs = (*SEQUENCE, IS_CHOSEN, "ref_logprobs")
        train = FunctionCall("actor_train", inputs=inputs, role="actor", work=work)
        return graph_of(_log_probs("ref", "ref_logprobs"), train)

    def eval_graph(self) -> DataflowGraph:
        inputs = ("response_mask", IS_CHOSEN, "logprobs", "ref_logprobs")
        answers = scored_completions(
            self.reward_function, self.sampling, self.evaluation, tokenizer=self.tokenizer_dir())
        forwards = (_log_probs("ref", "ref_logprobs"), _log_probs("actor", "logprobs"))
        return graph_of(*forwards, held_out_loss(self.loss, inputs), *answers)


def _log_probs(role: str, key: str) -> FunctionCall:
    """Return the call that computes a role's log-probs of both completions."""
    return FunctionCall(f"{role}_forward", inputs=SEQUENCE, outputs=(key,), role=role, work=LogProbs())


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

    def doubts(self, rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
        """Yield in words what seems wrong with all rows of a data set together."""
        if len(rows) > 1 and len({row["label"] for row in rows}) == 1:
            yield f"label is {rows[0]['label']} in all {len(rows)} rows: every answer learns the same score"

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

    def doubts(self, rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
        """Yield in words what seems wrong with all rows of a data set together."""
        key = self.margin_key
        if key is not None and (count := sum(row[key] < 0 for row in rows)):
            yield (
                f"{key} is negative in {count} of {len(rows)} rows: the rejected completion may then have "
                "the higher score")

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
        FunctionCall("reward_train", inputs=inputs, role="reward", work=TrainStep(loss)))


def _eval_graph(loss: Loss, columns: tuple[str, ...]) -> DataflowGraph:
    read = ("sequence_ids",)
    forward = FunctionCall("reward_forward", inputs=read, outputs=("scores",), role="reward", work=Scores())
    return graph_of(forward, held_out_loss(loss, ("scores", *columns)))
