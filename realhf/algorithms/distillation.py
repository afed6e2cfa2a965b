"""On-policy distillation: the actor answers prompts and learns from teachers how to continue its own answers.

The loss is the reverse KL(student || teacher) at the student's own tokens, for each token by itself, without
a discount (Agarwal et al. 2024, GKD, arXiv:2306.13649; Gu et al. 2024, MiniLLM, arXiv:2306.08543; Lu et al.
2025, "On-Policy Distillation", Thinking Machines Lab).

Suffixes of tensors name their dims: S samples, T packed tokens, M teachers, K tokens at one place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, nan
from typing import TYPE_CHECKING, Any, Literal

from realhf.algorithms.mismatch import UPDATES, AgeLimit, mismatch_sums, with_mismatch
from realhf.algorithms.on_policy import SEQUENCE, OnPolicy, graph_of
from realhf.algorithms.policy_loss import PolicyLossConfig
from realhf.algorithms.responses import length_metrics, per_token, truncated_tokens
from realhf.calls import HostFunction, LogProbs, Loss, TopLogProbs, TrainStep
from realhf.experiment import Role
from realhf.graph import DataflowGraph, FunctionCall
from realhf.rewards.reward import column_key
from realhf.user_input.field_types import require

if TYPE_CHECKING:
    from torch import Tensor

    from realhf.data.batch import Batch

_IMPOSSIBLE = -1e4
"""A log-prob whose probability is 0."""
_MOST_PADDING = 0.01
"""Models of one tokenizer pad its vocabulary to different sizes, which differ by at most this share."""
_LEAST_OTHER_MASS = 1e-7
"""The probability that is left for all other tokens is at least this, the rounding error of 1 in float32."""


@dataclass(frozen=True)
class TeacherWeights:
    """Finds the weights of the teachers for each token.

    They sum to 1 on response tokens, and are 0 on prompts, on tokens that `age_limit` leaves out, and perhaps
    on cut responses. `column` names the column of the dataset that has the teacher of each row; then that
    teacher's weight is 1 there.
    """

    teachers: tuple[str, ...]
    weights: tuple[float, ...]  # They sum to 1.
    column: str | None = None
    age_limit: AgeLimit | None = None
    mask_truncated: bool = False  # Whether responses that were cut are left out.

    def __call__(self, batch: Batch, context: Any) -> tuple[dict[str, Any], dict[str, float]]:
        weight_TM, metrics = self.of_tokens(batch, context)
        return {"teacher_weights": batch["response_mask"].like(weight_TM)}, metrics

    def of_tokens(self, batch: Batch, context: Any) -> tuple[Tensor, dict[str, float]]:
        """Return the weights, and metrics of the answers."""
        mask = batch["response_mask"]
        if not len(batch):  # Filters have dropped all samples.
            return mask.values.new_zeros(0, len(self.teachers)), {}
        rows = [self.weights] * len(batch)
        if self.column is not None:
            named = batch[column_key(self.column)]
            rows = [tuple(float(name == teacher) for teacher in self.teachers) for name in named]
        weight_TM = per_token(mask.values.new_tensor(rows), mask) * mask.values[:, None]
        metrics = length_metrics(batch) | {UPDATES: 0.0}
        if self.age_limit is not None:
            left_out_T, ages = self.age_limit(batch, context)
            weight_TM = weight_TM.masked_fill(left_out_T[:, None], 0.0)
            metrics |= ages
        if self.mask_truncated:
            weight_TM = weight_TM.masked_fill(truncated_tokens(batch)[:, None], 0.0)
        return weight_TM, metrics

    def row_fault(self, row: Mapping[str, Any]) -> str | None:
        """Return a sentence if a row of the dataset does not name a teacher, else None."""
        if self.column is None or row[self.column] in self.teachers:
            return None
        return f"{self.column} is {row[self.column]!r}: it must be one of {', '.join(self.teachers)}"


@dataclass(frozen=True)
class TeacherAdvantages(TeacherWeights):
    """Computes the advantages of the sampled tokens: log p_teacher - log p_student, weighted over teachers.

    Minus the advantage estimates the token's reverse KL. Tokens that are left out have the advantage NaN.
    """

    def __call__(self, batch: Batch, context: Any) -> tuple[dict[str, Any], dict[str, float]]:
        weight_TM, metrics = self.of_tokens(batch, context)
        student_T = batch["gen_logprobs"].values
        advantage_T = student_T * 0
        for name, weight_T in zip(self.teachers, weight_TM.unbind(1), strict=True):
            gain_T = weight_T * (batch[f"{name}_logprobs"].values - student_T)
            advantage_T = advantage_T + gain_T
            if len(self.teachers) > 1 and weight_T.any():
                metrics[f"actor/reverse_kl/{name}"] = -(gain_T.sum() / weight_T.sum()).item()
        trained_T = weight_TM.sum(1) > 0
        if trained_T.any():
            metrics["actor/reverse_kl"] = -advantage_T[trained_T].mean().item()
        left_out_T = batch["response_mask"].values.bool() & ~trained_T
        return {"advantages": batch["response_mask"].like(advantage_T.masked_fill(left_out_T, nan))}, metrics


@dataclass(frozen=True)
class ReverseKL(Loss):
    """The reverse KL over a teacher's K most probable tokens v, weighted over teachers, a mean over tokens:

        sum_v p_s(v) (log p_s(v) - log p_t(v)) + r_s (log r_s - log r_t)   with r = 1 - sum_v p(v).

    All other tokens together are one more outcome, of probability r. Joining outcomes can only lower a KL
    (the log sum inequality; Cover & Thomas 2006, theorem 2.7.1), so this is a lower bound of the KL over the
    vocabulary, and equal to it if K is the size of the vocabulary. The teacher's tokens are taken, and not
    the student's, because the teacher then needs no more than the answer.

    The metric `rest_mass` is the mean of r_s: if it is not small, the bound may be loose.
    """

    teachers: tuple[str, ...]
    vocab_size: int  # That of the student. A teacher's tokens beyond it, which are padding, join the others.
    output = "logprobs"
    entropy = True

    @property
    def token_ids(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(f"{name}_ids" for name in self.teachers)

    def totals(self, batch: Batch) -> dict[str, float]:
        weight_TM = batch["teacher_weights"].values
        sums = zip(self.teachers, weight_TM.sum(0).tolist(), strict=True)
        return {"tokens": float((weight_TM.sum(1) > 0).sum()), **dict(sums)}

    def summarize(self, means: Mapping[str, float], first: Mapping[str, float]) -> dict[str, float]:
        return with_mismatch(means, first)

    def __call__(
        self, outputs: Mapping[str, Tensor], batch: Batch, totals: Mapping[str, float]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        weight_TM = batch["teacher_weights"].values
        students = outputs["logprobs_at"].chunk(len(self.teachers), dim=1)
        num_tokens = max(totals["tokens"], 1.0)
        trained_T = weight_TM.sum(1) > 0
        metrics = {"entropy": (outputs["entropy"].detach() * trained_T).sum() / num_tokens}
        metrics |= mismatch_sums(outputs["logprobs"], batch["gen_logprobs"].values, trained_T)
        losses = []
        other_masses = []
        for name, weight_T, student_TK in zip(self.teachers, weight_TM.unbind(1), students, strict=True):
            beyond_TK = batch[f"{name}_ids"].values >= self.vocab_size
            student_TK = student_TK.masked_fill(beyond_TK, _IMPOSSIBLE)
            teacher_TK = batch[f"{name}_logprobs"].values.masked_fill(beyond_TK, _IMPOSSIBLE)
            kl = (weight_T * reverse_kl(student_TK, teacher_TK)).sum()
            losses.append(kl / num_tokens)
            other_masses.append((weight_T * _other_mass(student_TK.detach())).sum() / num_tokens)
            if len(self.teachers) > 1 and totals[name] > 0:
                metrics[f"actor/reverse_kl/{name}"] = kl.detach() / totals[name]
        loss = sum(losses[1:], losses[0])
        metrics["reverse_kl"] = loss.detach()
        metrics["rest_mass"] = sum(other_masses[1:], other_masses[0])
        return loss, metrics


def reverse_kl(student_TK: Tensor, teacher_TK: Tensor) -> Tensor:
    """Return the reverse KL at each token, given log-probs of the same tokens; see ReverseKL."""
    student_other_T = _other_mass(student_TK)
    kl_of_others_T = student_other_T * (student_other_T.log() - _other_mass(teacher_TK).log())
    return (student_TK.exp() * (student_TK - teacher_TK)).sum(1) + kl_of_others_T


def _other_mass(logprobs_TK: Tensor) -> Tensor:
    return (1 - logprobs_TK.exp().sum(1)).clamp(min=_LEAST_OTHER_MASS)


@dataclass
class Distillation(OnPolicy):
    """Trains `actor` to answer as one or several frozen teachers would, on its own answers.

    No reward takes part; `eval_function` can score answers to the held-out prompts.
    """

    teachers: tuple[Role, ...] = ()
    """The teachers, which have the actor's tokenizer. Their roles are called `teacher`, or `teacher_1`,
    `teacher_2` and so on if there are several."""
    teacher_weights: tuple[float, ...] = ()  # Weights of the teachers' KLs; none: all teachers count alike.
    teacher_column: str | None = None
    """A column of the dataset with the name of the one teacher that counts for this row, such as
    `teacher_2`."""
    variant: Literal["sampled", "top_k"] = "sampled"
    """`sampled`: the policy loss, with log p_teacher - log p_student of the sampled token as its advantage.
    `top_k`: the KL over the teacher's most probable tokens, differentiated: less noise, more memory."""
    top_k: int = 64  # Tokens in the KL of the variant `top_k`; all others together are one more outcome.
    loss: PolicyLossConfig = field(default_factory=lambda: PolicyLossConfig(average="token"))
    """Settings of the policy loss of the variant `sampled`; `top_k` reads only `max_age`, `aged` and
    `mask_truncated`."""

    @property
    def teacher_names(self) -> tuple[str, ...]:
        if len(self.teachers) == 1:
            return ("teacher",)
        return tuple(f"teacher_{number}" for number in range(1, len(self.teachers) + 1))

    def roles(self) -> dict[str, Role]:
        return {"actor": self.actor, **dict(zip(self.teacher_names, self.teachers, strict=True))}

    def graph(self) -> DataflowGraph:
        self._check_fields()
        self._check_teachers()
        generate = self.actor_generate()
        teachers = map(self._teacher_forward, self.teacher_names)
        if self.variant == "sampled":
            graph = graph_of(
                generate, *teachers, *self.actor_forward(), self._advantages(), self.actor_train())
            return self.with_checked_ages(graph)
        graph = graph_of(generate, *teachers, self._weights(), self._top_k_train())
        return self.with_checked_ages(graph, ages_of="teacher_weights")

    def eval_graph(self) -> DataflowGraph | None:
        function = self.evaluation.function or self.eval_function
        return None if function is None else super().eval_graph()

    def _teacher_forward(self, name: str) -> FunctionCall:
        if self.variant == "sampled":
            work: LogProbs | TopLogProbs = LogProbs(self.temperature)
            outputs: tuple[str, ...] = (f"{name}_logprobs",)
        else:
            work = TopLogProbs(self.top_k, self.temperature)
            outputs = (f"{name}_ids", f"{name}_logprobs")
        return FunctionCall(f"{name}_forward", inputs=SEQUENCE, outputs=outputs, role=name, work=work)

    def _advantages(self) -> FunctionCall:
        """Return the call that computes the advantages of the variant `sampled`."""
        logprobs = ("gen_logprobs", *(f"{name}_logprobs" for name in self.teacher_names))
        work = HostFunction(TeacherAdvantages(*self._weight_settings))
        inputs = (*self._weight_inputs, *logprobs)
        return FunctionCall("advantages", inputs=inputs, outputs=("advantages",), work=work)

    def _weights(self) -> FunctionCall:
        """Return the call that computes the weights of the teachers for the variant `top_k`."""
        work = HostFunction(TeacherWeights(*self._weight_settings))
        outputs = ("teacher_weights",)
        return FunctionCall("teacher_weights", inputs=self._weight_inputs, outputs=outputs, work=work)

    @property
    def _weight_settings(self) -> tuple[Any, ...]:
        unscaled = self.teacher_weights or (1.0,) * len(self.teachers)
        weights = tuple(weight / sum(unscaled) for weight in unscaled)
        return (
            self.teacher_names, weights, self.teacher_column, self.age_limit(), self.loss.mask_truncated)

    @property
    def _weight_inputs(self) -> tuple[str, ...]:
        column = () if self.teacher_column is None else (column_key(self.teacher_column),)
        return ("response_mask", "finished", *self.version_keys, *column)

    def _top_k_train(self) -> FunctionCall:
        names = self.teacher_names
        work = TrainStep(
            ReverseKL(names, self.actor.config().vocab_size), self.num_minibatches, self.epochs,
            self.temperature, self.router_aux_loss_coef, self.router_z_loss_coef, self.shuffle_minibatches,
            self.seed)
        columns = [f"{name}_{column}" for name in names for column in ("ids", "logprobs")]
        inputs = (*SEQUENCE, "gen_logprobs", "teacher_weights", *columns)
        return FunctionCall("actor_train", inputs=inputs, role="actor", work=work)

    def _check_fields(self) -> None:
        """Raise ValueError if a field has an illegal value, or one that would do nothing."""
        for name in ("ref", "reward", "reward_function", "reward_models", "score_shaping", "token_rewards"):
            if getattr(self, name):
                raise ValueError(
                    f"{name} is given, and distillation has no reward: the teachers take the reward's place; "
                    "score held-out answers by eval_function")
        require(
            self.variant in ("sampled", "top_k"), "variant", repr(self.variant), "be 'sampled' or 'top_k'")
        require(self.top_k >= 1, "top_k", self.top_k, "be at least 1")
        require(
            self.loss.kl_coef == 0, "loss.kl_coef", self.loss.kl_coef,
            "be 0: distillation has no reference model")
        require(
            self.loss.average != "prompt", "loss.average", self.loss.average,
            "be token, sequence or constant in distillation")
        share = self.loss.top_entropy_quantile
        require(
            share == 1, "loss.top_entropy_quantile", share,
            "be 1 in distillation, whose advantages are those of all tokens")
        kept = {name: getattr(self.loss, name) for name in ("max_age", "aged", "mask_truncated")}
        default = PolicyLossConfig(average="token", **kept)
        if self.variant == "top_k" and self.loss != default:
            raise ValueError(
                "loss has settings of the policy loss, which the variant 'top_k' does not have: set only "
                "loss.max_age, loss.aged and loss.mask_truncated, or use the variant 'sampled'")

    def _check_teachers(self) -> None:
        """Raise ValueError unless the teachers and their weights fit the actor and each other."""
        if not self.teachers:
            raise ValueError("teachers is empty: give at least one Role")
        weights = self.teacher_weights
        is_legal = all(0 <= weight < inf for weight in weights) and sum(weights) > 0
        if weights and (len(weights) != len(self.teachers) or not is_legal):
            require(
                False, "teacher_weights", weights,
                f"have {len(self.teachers)} numbers, one per teacher, none negative and not all 0")
        if weights and self.teacher_column is not None:
            raise ValueError("teacher_weights and teacher_column are given: a row has weights or one teacher")
        size = self.actor.config().vocab_size
        for name, role in zip(self.teacher_names, self.teachers, strict=True):
            if role.optimizer is not None:
                raise ValueError(f"{name} has an optimizer: teachers are frozen, so set it to None")
            if abs((theirs := role.config().vocab_size) - size) > _MOST_PADDING * size:
                raise ValueError(
                    f"{name}.model {role.model} has a vocabulary of {theirs} tokens and actor.model "
                    f"{self.actor.model} one of {size}: a teacher must have the tokenizer of the actor")
