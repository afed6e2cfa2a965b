"""DPO (Rafailov et al. 2023, arXiv:2305.18290) and its variants: a policy learns from preference pairs.

Suffixes of tensors name their dims: T packed tokens, S sequences, P pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from realhf.algorithms.held_out import held_out_loss, scored_answers
from realhf.algorithms.on_policy import SEQUENCE, graph_of, initial_reference
from realhf.algorithms.pairs import PAIR, cross_entropy, num_pairs, split_pairs
from realhf.algorithms.responses import num_trained_tokens, response_sums
from realhf.calls import LogProbs, Loss, OptimizerConfig, SamplingConfig, TrainStep
from realhf.data.dataset import IS_CHOSEN
from realhf.experiment import Experiment, Role
from realhf.graph import DataflowGraph, FunctionCall
from realhf.rewards.reward import RewardFunctions
from realhf.user_input.field_types import check_types, require

if TYPE_CHECKING:
    from torch import Tensor

    from realhf.data.batch import Batch


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
        legal = share == 0 or self.variant == "sigmoid"
        require(legal, "loss.label_smoothing", share, f"be 0 with loss.variant {self.variant}")

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
        train = FunctionCall("actor_train", "train_step", inputs, role="actor", work=work)
        return graph_of(_log_probs("ref", "ref_logprobs"), train)

    def eval_graph(self) -> DataflowGraph:
        inputs = ("response_mask", IS_CHOSEN, "logprobs", "ref_logprobs")
        answers = scored_answers(
            self.reward_function, self.sampling, self.evaluation, tokenizer=self.tokenizer_dir())
        forwards = (_log_probs("ref", "ref_logprobs"), _log_probs("actor", "logprobs"))
        return graph_of(*forwards, held_out_loss(self.loss, inputs), *answers)


def _log_probs(role: str, key: str) -> FunctionCall:
    """Return the call that computes a role's log-probs of both completions."""
    return FunctionCall(f"{role}_forward", "forward", SEQUENCE, (key,), role=role, work=LogProbs())
