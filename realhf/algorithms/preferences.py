"""Preferences: DPO and its variants on pairs, KTO on single answers, and reward models of both.

A pair is the chosen and the rejected sample of one prompt. DPO: Rafailov et al. 2023, arXiv:2305.18290. An
outcome reward model scores each answer by itself (Cobbe et al. 2021, arXiv:2110.14168). A pairwise one
follows Bradley and Terry (1952), as in Ouyang et al. 2022 (arXiv:2203.02155).

Suffixes of tensors name their dims: T packed tokens, S sequences, P pairs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import inf, isfinite, log
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from realhf.algorithms.held_out import held_out_loss, scored_completions
from realhf.algorithms.loss_functions import LossFunction, called, columns_of, own_or
from realhf.algorithms.on_policy import SEQUENCE, graph_of, initial_reference
from realhf.algorithms.responses import num_trained_tokens, response_sums
from realhf.calls import (
    HostFunction,
    LogProbs,
    Loss,
    OptimizerConfig,
    SamplingConfig,
    Scores,
    TrainStep,
)
from realhf.data.dataset import DATASET_ROW, IS_CHOSEN
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
    """Return the number of pairs of which the batch has both samples."""
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
class Pairs:
    """The log-probs of pairs, as sums over the tokens of each completion, and the numbers of these tokens."""

    chosen_logps: Tensor
    rejected_logps: Tensor
    chosen_lengths: Tensor
    rejected_lengths: Tensor
    ref_chosen_logps: Tensor  # Of the reference; 0 if the loss has none.
    ref_rejected_logps: Tensor

    @property
    def chosen(self) -> Tensor:
        """The log-ratio to the reference, log(p / p_ref), of chosen completions."""
        return self.chosen_logps - self.ref_chosen_logps

    @property
    def rejected(self) -> Tensor:
        return self.rejected_logps - self.ref_rejected_logps

    @property
    def mean_chosen(self) -> Tensor:
        """The log-ratio divided by the number of tokens."""
        return self.chosen / self.chosen_lengths.clamp(min=1.0)

    @property
    def mean_rejected(self) -> Tensor:
        return self.rejected / self.rejected_lengths.clamp(min=1.0)


_KNOWN = tuple(each.name for each in fields(Pairs))
"""What a function of one's own gets without a column for it."""


def sigmoid_loss(c: DPOLoss, pairs: Pairs) -> Tensor:
    return cross_entropy(c.beta * (pairs.chosen - pairs.rejected), 1 - c.label_smoothing)


def hinge_loss(c: DPOLoss, pairs: Pairs) -> Tensor:
    return (1 - c.beta * (pairs.chosen - pairs.rejected)).relu()


def ipo_loss(c: DPOLoss, pairs: Pairs) -> Tensor:
    return (pairs.mean_chosen - pairs.mean_rejected - 1 / (2 * c.beta)) ** 2


def simpo_loss(c: DPOLoss, pairs: Pairs) -> Tensor:
    margin = c.beta * (pairs.mean_chosen - pairs.mean_rejected) - c.gamma
    return cross_entropy(margin, 1 - c.label_smoothing)


def orpo_loss(c: DPOLoss, pairs: Pairs) -> Tensor:
    log_odds = [mean - _log_of_complement(mean) for mean in (pairs.mean_chosen, pairs.mean_rejected)]
    return c.beta * cross_entropy(log_odds[0] - log_odds[1], 1.0)


def _log_of_complement(logp: Tensor) -> Tensor:
    """Return log(1 - p), given log p, which is accurate for small and for large p."""
    logp = logp.clamp(max=_LEAST_SURPRISE)
    return (-logp.expm1()).log().where(logp > -log(2), (-logp.exp()).log1p())


_LEAST_SURPRISE = -1e-7
"""The largest mean log-prob in ORPO's odds, which are infinite for a probability of 1."""


class _Variant(NamedTuple):
    """A loss of pairs."""

    function: Callable[[DPOLoss, Pairs], Tensor]
    needs_ref: bool = True
    of_means: bool = False  # Whether the metrics `rewards/...` are of means over tokens, and not of sums.


_VARIANTS = {
    "sigmoid": _Variant(sigmoid_loss), "hinge": _Variant(hinge_loss), "ipo": _Variant(ipo_loss),
    "simpo": _Variant(simpo_loss, needs_ref=False, of_means=True),
    "orpo": _Variant(orpo_loss, needs_ref=False, of_means=True),
}
_PRECOMPUTED = ("ref_chosen_logps", "ref_rejected_logps")
"""Columns of rows with the log-probs of the reference."""
_PAIR_SETTINGS = {"gamma": ("simpo",), "label_smoothing": ("sigmoid", "simpo")}
"""Setting -> the variants that read it."""


@dataclass(frozen=True)
class DPOLoss(Loss):
    """The mean over pairs of f(d), where d = log(p / p_ref)(chosen) - log(p / p_ref)(rejected).

    Log-ratios are sums over the completion's tokens. The metrics `rewards/...` are means over pairs of
    beta log(p / p_ref), and of how often the chosen completion has the larger one.
    """

    variant: Literal["sigmoid", "hinge", "ipo", "simpo", "orpo"] = "sigmoid"
    """`sigmoid` is DPO: f(d) = -log sigmoid(beta d). `hinge` is that of SLiC (arXiv:2305.10425):
    f(d) = max(0, 1 - beta d). `ipo` (arXiv:2310.12036): f(d) = (d - 1 / (2 beta))^2, with log-ratios averaged
    over the completion's tokens, as in TRL. The others have no reference and average log-probs over tokens:
    `simpo` (arXiv:2405.14734): f(d) = -log sigmoid(beta d - gamma). `orpo` (arXiv:2403.07691):
    f = -beta log sigmoid(log odds(chosen) - log odds(rejected)), where odds(p) = p / (1 - p)."""
    beta: float = 0.1
    """How closely the policy stays to the reference; the larger, the closer. Without one, how sharply SimPO
    compares, and the weight of ORPO's term."""
    gamma: float = 0.0  # Margin by which SimPO wants the chosen completion to be ahead.
    label_smoothing: float = 0.0
    """Share of pairs whose order is assumed to be wrong (conservative DPO, Mitchell 2023); for `sigmoid` and
    `simpo`."""
    sft_coef: float = 0.0
    """Weight of the negative log-likelihood of the chosen completions, a mean over their tokens (the SFT term
    of RPO, arXiv:2404.19733; in TRL the loss type `sft`)."""
    precomputed_ref: bool = False
    """Whether the rows have the reference's log-probs, as sums over the tokens of each completion, in the
    columns `ref_chosen_logps` and `ref_rejected_logps` (TRL's `precompute_ref_log_probs`). Then no reference
    model takes part. `realhf reference` writes such rows."""
    function: Any = None
    """A function of one's own in the place of the variant: it returns the loss of each pair, and names what
    it reads as parameters, such as `chosen_logps` (docs/algorithms.md). It may also be a Loss. `loss=f` in an
    experiment is short for it."""
    output = "logprobs"
    learns = "preferences"
    group_size = PAIR

    def __post_init__(self) -> None:
        check_types(self, "loss.")
        require(self.beta > 0, "loss.beta", self.beta, "be above 0")
        share = self.label_smoothing
        require(0 <= share < 0.5, "loss.label_smoothing", share, "be at least 0 and below 0.5")
        require(self.gamma >= 0, "loss.gamma", self.gamma, "not be negative")
        require(self.sft_coef >= 0, "loss.sft_coef", self.sft_coef, "not be negative")
        for name, variants in _PAIR_SETTINGS.items():
            require(
                getattr(self, name) == 0 or (self.variant in variants and self.function is None),
                f"loss.{name}", getattr(self, name), f"be 0 with loss.variant {self.variant}")
        has_reference = self.function is not None or _VARIANTS[self.variant].needs_ref
        require(
            has_reference or not self.precomputed_ref, "loss.precomputed_ref", self.precomputed_ref,
            f"be false with loss.variant {self.variant}, which has no reference")

    def row_fault(self, row: Mapping[str, Any]) -> str | None:
        for name in _PRECOMPUTED if self.precomputed_ref else ():
            if not isinstance(row[name], int | float) or not -inf < row[name] <= 0:
                return f"{name} is {row[name]!r}: it must be a finite number of at most 0, a sum of log-probs"
        return None

    def with_function(self, function: LossFunction) -> DPOLoss:
        """Return settings with a function of one's own."""
        return DPOLoss(function=function)

    @property
    def needs_ref(self) -> bool:
        """Whether the loss reads the log-probs of a reference model."""
        if self.precomputed_ref:
            return False
        if self.function is None:
            return _VARIANTS[self.variant].needs_ref
        read = columns_of(self.function, ())
        return any(name in read for name in ("ref_logprobs", "ref_chosen_logps", "ref_rejected_logps"))

    @property
    def columns(self) -> tuple[str, ...]:
        """Keys that the loss reads beside the log-probs of the completions."""
        precomputed = _PRECOMPUTED if self.precomputed_ref else ()
        read = (IS_CHOSEN, *precomputed, *columns_of(self.function, _KNOWN))
        return (*read, "ref_logprobs") if self.needs_ref and "ref_logprobs" not in read else read

    def totals(self, batch: Batch) -> dict[str, float]:
        totals = {"pairs": float(num_pairs(batch))}
        if self.sft_coef:
            lengths = num_trained_tokens(batch["response_mask"])
            totals["chosen_tokens"] = split_pairs(lengths, batch)[0].sum().item()
        return totals

    def __call__(
        self, outputs: Mapping[str, Tensor], batch: Batch, totals: Mapping[str, float]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        pairs = self._pairs(outputs["logprobs"], batch)
        count = max(totals["pairs"], 1.0)
        of_means = False
        if self.function is None:
            of_means = _VARIANTS[self.variant].of_means
            loss_P = _VARIANTS[self.variant].function(self, pairs)
        else:
            chosen_rows = pair_indices(batch)[0]
            loss_P = called(
                self.function, vars(pairs), batch, unit="pair", count=len(chosen_rows), rows=chosen_rows)
        loss = loss_P.sum() / count
        chosen_P, rejected_P = pairs.chosen, pairs.rejected
        if of_means:
            chosen_P, rejected_P = pairs.mean_chosen, pairs.mean_rejected
        chosen_reward_P = self.beta * chosen_P.detach()
        rejected_reward_P = self.beta * rejected_P.detach()
        by_pair = {
            "rewards/chosen": chosen_reward_P,
            "rewards/rejected": rejected_reward_P,
            "rewards/margins": chosen_reward_P - rejected_reward_P,
            "rewards/accuracies": (chosen_reward_P > rejected_reward_P).to(chosen_reward_P.dtype)}
        metrics = {name: x_P.sum() / count for name, x_P in by_pair.items()}
        if self.sft_coef:
            nll = -pairs.chosen_logps.sum() / max(totals["chosen_tokens"], 1.0)
            loss = loss + self.sft_coef * nll
            metrics["nll_loss"] = nll.detach()
        return loss, metrics

    def _pairs(self, logprobs_T: Tensor, batch: Batch) -> Pairs:
        mask = batch["response_mask"]
        logps_S = response_sums(logprobs_T, mask)
        ref_S = response_sums(batch["ref_logprobs"].values, mask) if self.needs_ref else logps_S.detach() * 0
        columns = (logps_S, num_trained_tokens(mask), ref_S)
        of_pairs = [part for column in columns for part in split_pairs(column, batch)]
        if self.precomputed_ref:
            rows = pair_indices(batch)[0]
            of_pairs[-2:] = [logps_S.new_tensor([batch[name][i] for i in rows]) for name in _PRECOMPUTED]
        return Pairs(*of_pairs)


@dataclass
class DPO(Experiment):
    """Trains `actor` on rows of prompt, chosen and rejected completion, against the reference `ref`.

    Its subclasses are other defaults of `loss`.
    """

    actor: Role = field(default_factory=lambda: Role(model="", optimizer=OptimizerConfig()))
    ref: Role | None = None  # The reference, if the loss needs one; None: the actor's initial weights.
    loss: DPOLoss = field(default_factory=DPOLoss)
    group_size: int = PAIR  # Samples per prompt: the chosen and the rejected completion.
    reward_function: RewardFunctions | None = None  # Scores answers to `eval_dataset`, if given.
    sampling: SamplingConfig = field(default_factory=SamplingConfig)  # Limits the length of those answers.
    router_aux_loss_coef: float = 0.0
    """Weight of the routers' load-balancing loss, for an actor with experts."""
    router_z_loss_coef: float = 0.0  # Weight of the routers' z-loss, which keeps their logits small.

    def roles(self) -> dict[str, Role]:
        if not self.loss.needs_ref:
            return {"actor": self.actor}
        return {"actor": self.actor, "ref": self.ref or initial_reference(self.actor)}

    def graph(self) -> DataflowGraph:
        return graph_of(*self._references(), self._train())

    def eval_graph(self) -> DataflowGraph:
        answers = scored_completions(
            self.reward_function, self.sampling, self.evaluation, tokenizer=self.tokenizer_dir())
        inputs = ("response_mask", *self.loss.columns, "logprobs")
        forward = _log_probs("actor", "logprobs")
        return graph_of(*self._references(), forward, held_out_loss(own_or(self.loss), inputs), *answers)

    def reference_pass(self, target: str) -> ReferencePass:
        """Return what computes the reference's log-probs of all rows, and writes them to a file.

        Raises ValueError if the loss has no reference, or has its log-probs in the rows already.
        """
        require(
            isinstance(self.loss, DPOLoss) and self.loss.needs_ref, "loss", type(self.loss).__name__,
            "be a DPOLoss with a reference, and without precomputed_ref")
        require(len(self.dataset.parts) == 1, "dataset", "a mixture", "be a single data set")
        return ReferencePass(
            actor=self.actor, ref=self.ref or initial_reference(self.actor), loss=self.loss, target=target,
            dataset=self.dataset, eval_dataset=self.dataset, seed=self.seed, tokenizer=self.tokenizer_dir())

    def _references(self) -> tuple[FunctionCall, ...]:
        return (_log_probs("ref", "ref_logprobs"),) if self.loss.needs_ref else ()

    def _train(self) -> FunctionCall:
        work = TrainStep(
            own_or(self.loss), router_aux_loss_coef=self.router_aux_loss_coef,
            router_z_loss_coef=self.router_z_loss_coef)
        inputs = (*SEQUENCE, *self.loss.columns)
        return FunctionCall("actor_train", inputs=inputs, role="actor", work=work)


@dataclass(frozen=True)
class StoredSums:
    """A host function that writes the sums of log-probs of each pair to a file, with its row's number."""

    target: str

    def __call__(self, batch: Batch, context: Any) -> tuple[dict[str, Any], dict[str, float]]:
        sums = response_sums(batch["ref_logprobs"].values.double(), batch["response_mask"])
        chosen, rejected = split_pairs(sums, batch)
        rows = [batch[DATASET_ROW][i] for i in pair_indices(batch)[0]]
        with Path(self.target).open("w") as file:
            for row, *values in zip(rows, chosen.tolist(), rejected.tolist(), strict=True):
                file.write(json.dumps({"row": row, **dict(zip(_PRECOMPUTED, values, strict=True))}) + "\n")
        return {}, {"pairs": float(len(rows))}


@dataclass
class ReferencePass(DPO):
    """One pass of the reference over the rows, which writes its log-probs to `target` and trains nothing."""

    target: str = ""

    def roles(self) -> dict[str, Role]:
        assert self.ref is not None
        return {"ref": self.ref}

    def graph(self) -> DataflowGraph:
        return self.eval_graph()

    def eval_graph(self) -> DataflowGraph:
        inputs = ("response_mask", IS_CHOSEN, DATASET_ROW, "ref_logprobs")
        store = FunctionCall("store", inputs=inputs, work=HostFunction(StoredSums(self.target)))
        return graph_of(*self._references(), store)


@dataclass
class SimPO(DPO):
    """SimPO (Meng et al. 2024, arXiv:2405.14734): no reference, log-probs per token, and a margin."""

    loss: DPOLoss = field(default_factory=lambda: DPOLoss("simpo", beta=2.0, gamma=1.0))


@dataclass
class ORPO(DPO):
    """ORPO (Hong et al. 2024, arXiv:2403.07691): fine-tuning on chosen completions and an odds ratio."""

    loss: DPOLoss = field(default_factory=lambda: DPOLoss("orpo", sft_coef=1.0))


def _log_probs(role: str, key: str) -> FunctionCall:
    """Return the call that computes a role's log-probs of the completions."""
    return FunctionCall(f"{role}_forward", inputs=SEQUENCE, outputs=(key,), role=role, work=LogProbs())


@dataclass(frozen=True)
class KTOLoss(Loss):
    """The mean over samples of weight (1 - sigmoid(beta (r - z))) for desirable completions, and of
    weight (1 - sigmoid(beta (z - r))) for undesirable ones, with the log-ratio r = log(p / p_ref).

    The reference point z is max(0, mean of r) over the step's mismatched pairs: each prompt with the
    completion of another sample. It has no gradient.
    """

    beta: float = 0.1  # How closely the policy stays to the reference; the larger, the closer.
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    """The weights times the numbers of samples should be about equal: from 1 to 4/3 of each other."""
    function: Any = None
    """A function of one's own in the place of the formula: it returns the loss of each sample, and names what
    it reads as parameters, such as `logps`, `ref_logps`, `label` and `kl` (docs/algorithms.md)."""
    output = "logprobs"
    learns = "preferences"
    needs_ref: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_types(self, "loss.")
        for name in ("beta", "desirable_weight", "undesirable_weight"):
            require(getattr(self, name) > 0, f"loss.{name}", getattr(self, name), "be above 0")

    def with_function(self, function: LossFunction) -> KTOLoss:
        """Return settings with a function of one's own."""
        return KTOLoss(function=function)

    @property
    def columns(self) -> tuple[str, ...]:
        """Keys that the loss reads beside the log-probs of the completions."""
        usual = ("label", "ref_logprobs", "kl")
        return tuple(dict.fromkeys((*usual, *columns_of(self.function, ("logps", "ref_logps")))))

    def row_fault(self, row: Mapping[str, Any]) -> str | None:
        if row["label"] in (True, False):
            return None
        return f"label is {row['label']!r}: it must be true for desirable completions, else false"

    def doubts(self, rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
        """Yield in words what seems wrong with all rows of a data set together."""
        good = sum(bool(row["label"]) for row in rows)
        bad = len(rows) - good
        if len(rows) < 2:
            return
        if not (good and bad):
            yield f"label is {rows[0]['label']} in all {len(rows)} rows: KTO learns from both kinds"
            return
        balance = self.desirable_weight * good / (self.undesirable_weight * bad)
        if not _LEAST_BALANCE < balance < _MOST_BALANCE:
            yield (
                f"label is true in {good} of {len(rows)} rows, loss.desirable_weight is "
                f"{self.desirable_weight:g} and loss.undesirable_weight {self.undesirable_weight:g}: the "
                "products of weight and number of rows should be about equal (KTO)")

    def totals(self, batch: Batch) -> dict[str, float]:
        good = float(sum(map(bool, batch["label"])))
        return {"samples": float(len(batch)), "chosen": good, "rejected": len(batch) - good}

    def __call__(
        self, outputs: Mapping[str, Tensor], batch: Batch, totals: Mapping[str, float]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        mask = batch["response_mask"]
        logps_S = response_sums(outputs["logprobs"], mask)
        ref_S = response_sums(batch["ref_logprobs"].values, mask)
        log_ratio_S = logps_S - ref_S
        label_S = log_ratio_S.new_tensor([float(bool(label)) for label in batch["label"]])
        if self.function is not None:
            known = {"logps": logps_S, "ref_logps": ref_S, "label": label_S}
            loss_S = called(self.function, known, batch, unit="sample", count=len(batch))
        else:
            distance_S = self.beta * (log_ratio_S - batch["kl"].to(log_ratio_S))
            good_S = self.desirable_weight * label_S * (-distance_S).sigmoid()
            loss_S = good_S + self.undesirable_weight * (1 - label_S) * distance_S.sigmoid()
        count = max(totals["samples"], 1.0)
        reward_S = self.beta * log_ratio_S.detach()
        chosen = (reward_S * label_S).sum() / max(totals["chosen"], 1.0)
        rejected = (reward_S * (1 - label_S)).sum() / max(totals["rejected"], 1.0)
        metrics = {
            "rewards/chosen": chosen, "rewards/rejected": rejected, "rewards/margins": chosen - rejected,
            "kl": batch["kl"].to(log_ratio_S).sum() / count}
        return loss_S.sum() / count, metrics


_LEAST_BALANCE = 1 / 4
_MOST_BALANCE = 4
"""Ratios of weighted numbers of rows that are far from the paper's 1 to 4/3."""


@dataclass(frozen=True)
class Mismatched:
    """A host function that makes the sequences of KTO's reference point: each prompt with the completion of
    the sample before it, the first with that of the last."""

    def __call__(self, batch: Batch, context: Any) -> dict[str, Any]:
        mask = batch["response_mask"]
        tokens = batch["sequence_ids"].split()
        starts = [len(ids) - int(n) for ids, n in zip(tokens, mask.response_lengths().tolist(), strict=True)]
        parts = [[ids[:start], ids[start:]] for ids, start in zip(tokens, starts, strict=True)]
        learned = [of_sample[start:] for of_sample, start in zip(mask.split(), starts, strict=True)]
        sequences, masks = [], []
        for i, (prompt, _) in enumerate(parts):
            sequences.append(prompt.new_tensor([*prompt.tolist(), *parts[i - 1][1].tolist()]))
            masks.append(mask.values.new_tensor([0.0] * len(prompt) + learned[i - 1].tolist()))
        ids = batch["sequence_ids"]
        return {
            "kl_ids": type(ids).of(sequences, empty=ids.values[:0]),
            "kl_mask": type(mask).of(masks, empty=mask.values[:0])}


@dataclass(frozen=True)
class ReferencePoint:
    """A host function that computes KTO's reference point, the same for all samples of a step."""

    def __call__(self, batch: Batch, context: Any) -> dict[str, Any]:
        mask = batch["kl_mask"]
        difference_T = batch["actor_kl_logprobs"].values - batch["ref_kl_logprobs"].values
        point = response_sums(difference_T.double(), mask.like(mask.values.double())).mean().clamp(min=0)
        return {"kl": point.nan_to_num().repeat(len(batch))}


@dataclass
class KTO(DPO):
    """KTO (Ethayarajh et al. 2024, arXiv:2402.01306): learns from single completions that are marked as
    desirable or not, in rows of prompt, completion and `label`."""

    loss: KTOLoss = field(default_factory=KTOLoss)  # type: ignore[assignment]
    group_size: int = 1

    def roles(self) -> dict[str, Role]:
        require(self.batch_size >= 2, "batch_size", self.batch_size, "be at least 2: KTO mixes its samples")
        return super().roles()

    def _references(self) -> tuple[FunctionCall, ...]:
        mixed = ("kl_ids", "kl_mask")
        keys = [f"{role}_kl_logprobs" for role in ("actor", "ref")]
        forwards = [
            FunctionCall(key.replace("logprobs", "forward"), inputs=mixed[:1], outputs=(key,),
                         role=key.partition("_")[0], work=LogProbs()) for key in keys]
        return (
            FunctionCall("mismatched", inputs=SEQUENCE, outputs=mixed, work=HostFunction(Mismatched())),
            *forwards,
            FunctionCall("reference_point", inputs=("kl_mask", *keys), outputs=("kl",),
                         work=HostFunction(ReferencePoint())),
            *super()._references())


@dataclass(frozen=True)
class BinaryCrossEntropy(Loss):
    """The loss -label log sigmoid(score) - (1 - label) log sigmoid(-score), a mean over samples."""

    function: Any = None
    """A function of one's own in the place of the formula: it returns the loss of each sample, and names what
    it reads as parameters, such as `scores` and `label` (docs/algorithms.md). It may also be a Loss."""
    output = "scores"
    learns = "scores"

    def with_function(self, function: LossFunction) -> BinaryCrossEntropy:
        """Return settings with a function of one's own."""
        return BinaryCrossEntropy(function)

    @property
    def columns(self) -> tuple[str, ...]:
        """Keys that the loss reads beside the scores."""
        return tuple(dict.fromkeys(("label", *columns_of(self.function, ("scores",)))))

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
        if self.function is not None:
            known = {"scores": score_S, "label": label_S}
            loss_S = called(self.function, known, batch, unit="sample", count=len(batch))
        else:
            loss_S = cross_entropy(score_S, label_S)
        loss = loss_S.sum() / totals["samples"]
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
    function: Any = None
    """A function of one's own in the place of the formula: it returns the loss of each pair, and names what
    it reads as parameters, such as `chosen_scores` and `rejected_scores`. It may also be a Loss."""
    output = "scores"
    learns = "scores"
    group_size = PAIR

    def with_function(self, function: LossFunction) -> BradleyTerry:
        """Return settings with a function of one's own."""
        return BradleyTerry(function=function)

    def __post_init__(self) -> None:
        check_types(self, "loss.")
        require(self.center_coef >= 0, "loss.center_coef", self.center_coef, "not be negative")

    @property
    def columns(self) -> tuple[str, ...]:
        """Keys that the loss reads beside the scores."""
        margin = () if self.margin_key is None else (self.margin_key,)
        own = columns_of(self.function, ("chosen_scores", "rejected_scores"))
        return tuple(dict.fromkeys((IS_CHOSEN, *margin, *own)))

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
        if self.function is not None:
            known = {"chosen_scores": chosen_P, "rejected_scores": rejected_P}
            rows = pair_indices(batch)[0]
            loss_P = called(self.function, known, batch, unit="pair", count=len(rows), rows=rows)
        else:
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
    loss: BinaryCrossEntropy = field(default_factory=BinaryCrossEntropy)

    def roles(self) -> dict[str, Role]:
        return {"reward": self.reward}

    def graph(self) -> DataflowGraph:
        loss = own_or(self.loss)
        inputs = ("sequence_ids", *self.loss.columns)
        return graph_of(FunctionCall("reward_train", inputs=inputs, role="reward", work=TrainStep(loss)))

    def eval_graph(self) -> DataflowGraph:
        forward = FunctionCall(
            "reward_forward", inputs=("sequence_ids",), outputs=("scores",), role="reward", work=Scores())
        return graph_of(forward, held_out_loss(own_or(self.loss), ("scores", *self.loss.columns)))


@dataclass
class PairwiseRewardModel(RewardModel):
    """Trains the reward model `reward` on rows of prompt, chosen and rejected completion."""

    loss: BradleyTerry = field(default_factory=BradleyTerry)  # type: ignore[assignment]
    group_size: int = PAIR  # Samples per prompt: the chosen and the rejected completion.
