"""Advantages: of samples compared with a baseline (SampleAdvantages), of tokens by GAE (TokenAdvantages).

Suffixes of tensors name their dims: G prompts, K samples per prompt, T packed tokens, N response tokens end
to end, S sequences (alone) or sequences by response positions (ST); none: samples.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import nan
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from realhf.algorithms.kl import RewardKL
from realhf.algorithms.mismatch import UPDATES, AgeLimit
from realhf.algorithms.responses import (
    deviations,
    normalized,
    num_trained_tokens,
    per_token,
    response_sums,
    rollout_metrics,
    standard_deviation,
    truncated_tokens,
)
from realhf.calls import KEEP
from realhf.data.order import prompt_of
from realhf.environments.credit import turn_advantages
from realhf.environments.protocol import Environment
from realhf.environments.rollout_rewards import ROLLOUT, turn_rewards
from realhf.errors import UserError, described, user_line, warn
from realhf.rewards.limits import RewardLimits
from realhf.rewards.reward import column_key
from realhf.rewards.shaping import ScoreShaping, name_of
from realhf.user_input.field_types import require

if TYPE_CHECKING:
    from torch import Tensor

    from realhf.data.batch import Batch, Packed

Baseline = Literal["none", "group_mean", "leave_one_out", "greedy"]
Normalize = Literal["none", "group", "batch", "tokens"]
Deviation = Literal["population", "sample"]
_FAILED_STEPS = "reward/failed_steps"
"""Key of the host state: the last steps in a row in which all rewards have failed."""
_CORRECTION = {"population": 0, "sample": 1}


def _check_shaped(shaping: ScoreShaping, shaped: Any, score: Tensor) -> None:
    """Raise UserError unless a shaping has returned a new score for each that has not failed, or NaN to leave
    the sample out."""
    name = name_of(shaping)
    if getattr(shaped, "shape", None) != score.shape:
        is_tensor = hasattr(shaped, "shape")
        what = f"a tensor of shape {tuple(shaped.shape)}" if is_tensor else type(shaped).__name__
        rule = f"it must return a tensor with the {len(score)} new scores"
        raise UserError(f"score_shaping {name} returned {what}: {rule}")
    if shaped.isinf().any():
        raise UserError(
            f"score_shaping {name} returned {shaped[shaped.isinf()][0].item()}: it must return finite "
            "numbers, or NaN to leave a sample out")
    if (score.isnan() & ~shaped.isnan()).any():
        raise UserError(
            f"score_shaping {name} returned a number for a score that is NaN, as its reward has failed: it "
            "must stay NaN")


def compares_groups(baseline: Baseline, normalize: Normalize) -> bool:
    """Return whether the advantages depend on the other samples of a prompt."""
    return baseline in ("group_mean", "leave_one_out") or normalize == "group"


@dataclass(frozen=True)
class AdvantageInputs:
    """Inputs of the advantages of all algorithms, beside scores and the KL to the reference."""

    score_shaping: ScoreShaping | None = None
    token_returns: bool = False  # Whether the batch has `token_returns`, which are added to the advantages.
    age_limit: AgeLimit | None = None
    reward_logs: tuple[str, ...] = ()  # Columns of rewards that are only for metrics.
    limits: RewardLimits = field(default_factory=RewardLimits)
    turn_credit: Environment | None = None
    """The environment whose turns get the credit that it says; None: all of a response gets the same."""
    mask_truncated: bool = False  # Whether responses that were cut get no advantages (NaN).
    top_entropy_quantile: float = 1.0
    """Share of the tokens whose advantages stay, those of the highest entropy; the others' become 0."""

    @property
    def keys(self) -> tuple[str, ...]:
        versions = ("versions",) if self.age_limit is not None else ()
        returns = ("token_returns",) if self.token_returns else ()
        rollouts = (ROLLOUT,) if self.turn_credit is not None else ()
        entropies = ("prox_entropy",) if self.top_entropy_quantile < 1 else ()
        return (*self.reward_logs, *returns, *versions, *rollouts, *entropies)

    def turn_offsets(self, batch: Batch, scores: Tensor, group_size: int) -> Tensor:
        """Return for every token by how much the advantage of its turn differs from that of the rollout.

        Both are compared with the mean of the other samples (leave one out). What the score has beside the
        rewards of turns counts for the last turn.
        """
        assert self.turn_credit is not None
        credit, discount = self.turn_credit.credit, self.turn_credit.discount
        offsets = batch["response_mask"].values.double().new_zeros(len(batch["response_mask"].values))
        parts = batch["response_mask"].like(offsets).split()
        for first in range(0, len(batch), group_size):
            whole_group = range(first, first + group_size)
            group = [i for i in whole_group if not scores[i].isnan()]
            if len(group) < 2 or batch["score"][list(whole_group)].isnan().any():
                continue
            rewards = [turn_rewards(batch[ROLLOUT][i], scores[i].item()) for i in group]
            whole = turn_advantages(rewards, credit="trajectory")
            by_turn = turn_advantages(rewards, credit=credit, discount=discount)
            for i, ours, of_rollout in zip(group, by_turn, whole, strict=True):
                for turn, x, y in zip(batch[ROLLOUT][i]["turns"], ours, of_rollout, strict=True):
                    parts[i][turn["start"] : turn["stop"]] = x - y
        return offsets

    def shaped(self, score: Tensor, mask: Packed, finished: Tensor) -> Tensor:
        """Return the scores of responses after shaping; the score of a failed reward stays NaN."""
        if self.score_shaping is None:
            return score
        shaped = self.score_shaping(score, mask.response_lengths().to(score), finished)
        _check_shaped(self.score_shaping, shaped, score)
        return shaped

    def shaped_scores(self, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        """Return the scores after shaping, in float64, and metrics."""
        shaped = self.shaped(batch["score"].double(), batch["response_mask"], batch["finished"])
        if self.score_shaping is None:
            return shaped, {}
        left_out = shaped.isnan() & ~batch["score"].isnan()
        metrics = {"reward/left_out": left_out.double().mean().item()} if left_out.any() else {}
        scores = shaped[~shaped.isnan()]
        if len(scores):
            metrics["reward/shaped_mean"] = scores.double().mean().item()
        return shaped, metrics

    def check_failures(self, batch: Batch, context: Any) -> None:
        """Warn if the rewards of all samples of a step have failed; after too many such steps in a row, raise
        UserError. Checkpoints hold their number.
        """
        state = getattr(context, "state", {})
        if not batch["score"].isnan().all():
            state.pop(_FAILED_STEPS, None)
            return
        earlier = state.get(_FAILED_STEPS, [])
        steps = [*earlier, *([] if context.step in earlier else [context.step])]
        if len(steps) > self.limits.max_failed_steps:
            raise UserError(
                "the reward of every sample of the step has failed: none is left to train on; "
                f"reward_limits.max_failed_steps allows {self.limits.max_failed_steps} such steps in a row")
        state[_FAILED_STEPS] = steps
        warn(f"the reward of every sample of step {context.step} has failed: these samples train nothing")

    def returns_of_tokens(self, batch: Batch) -> Tensor | float:
        """Return the discounted sums of per-token rewards, if there are any."""
        return batch["token_returns"].values if self.token_returns else 0.0

    def left_out(self, batch: Batch, context: Any) -> tuple[Tensor | None, dict[str, float]]:
        """Return which tokens are too old, or of cut responses, if such are left out, and metrics of ages."""
        left_out_T: Tensor | None = None
        metrics = {UPDATES: 0.0}
        if self.age_limit is not None:
            left_out_T, metrics = self.age_limit(batch, context)
        if self.mask_truncated:
            cut_T = truncated_tokens(batch)
            left_out_T = cut_T if left_out_T is None else left_out_T | cut_T
        return left_out_T, metrics

    def of_top_entropy(self, advantage_T: Tensor, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        """Return the advantages, 0 for tokens below the quantile of the entropies, and a metric.

        Tokens whose advantages are NaN take no part in the quantile.
        """
        counted_T = batch["response_mask"].values.bool() & ~advantage_T.isnan()
        if self.top_entropy_quantile == 1 or not counted_T.any():
            return advantage_T, {}
        entropy_T = batch["prox_entropy"].values.double()
        threshold = float(np.quantile(entropy_T[counted_T].numpy(), 1 - self.top_entropy_quantile))
        below_T = counted_T & (entropy_T < threshold)
        return advantage_T.masked_fill(below_T, 0.0), {"actor/entropy_threshold": threshold}


@dataclass(frozen=True)
class Groups:
    """The samples of each prompt, as a user's function of advantages sees them; shape (prompts, samples)."""

    lengths: Tensor  # Tokens of each response, as a float tensor.
    finished: Tensor  # Whether each response has ended, and was not cut.


def columns_read(function: Any) -> tuple[str, ...]:
    """Return the columns of the dataset that a function of advantages names after its first two parameters.

    Raises ValueError if it does not have the form f(scores, groups, column, ...).
    """
    legal = callable(function) and not isinstance(function, type)
    parameters = list(inspect.signature(function).parameters.values()) if legal else []
    kinds = [parameter.kind for parameter in parameters]
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    legal = len(kinds) >= 2 and inspect.Parameter.KEYWORD_ONLY not in kinds[:2]
    rule = "be a function f(scores, groups), perhaps with columns of the dataset as further parameters"
    require(legal and all(kind in named for kind in kinds[2:]), "advantages", name_of(function), rule)
    return tuple(parameter.name for parameter in parameters[2:] if parameter.default is parameter.empty)


@dataclass(frozen=True)
class SampleAdvantages:
    """Advantages A_i = (score_i - baseline_i) / deviation, the same for all tokens of a response.

    With the KL in the reward, a response's score is reduced by the penalties of its tokens. With `kl_to_go`,
    each token's advantage is reduced by the penalties from it on instead, which neither the baseline nor the
    deviations of groups and batches change. In a group with a failed reward (NaN), all
    advantages are NaN. So are those of tokens that are too old, and of cut responses if these are left out;
    the rewards of their samples still count.
    All is computed in float64, in which equal scores have advantages of exactly 0.
    """

    group_size: int
    baseline: Baseline = "group_mean"
    """What the score is compared with: the mean of the prompt's samples (GRPO), the mean of its other samples
    (RLOO), the score of the greedy response (ReMax), or nothing."""
    normalize: Normalize = "group"
    """What divides the difference: the standard deviation of the prompt's scores (`group`), or that of all
    differences of the batch, whose mean is subtracted, too (`batch`: each sample counts once; `tokens`: each
    response token does), or nothing."""
    deviation: Deviation = "population"  # Divide variances by the number of samples, or by one less.
    inputs: AdvantageInputs = field(default_factory=AdvantageInputs)
    reward_kl: RewardKL = field(default_factory=RewardKL)
    kl_to_go: bool = False
    filters: bool = False
    """Whether groups whose scores, before shaping, are all equal, or have failed, are dropped."""
    counts_prompt_tokens: bool = False
    """Whether to return `prompt_tokens` as well: for each sample, the tokens of all responses of its prompt
    that count in the loss."""
    function: Any = None
    """A user's function of scores and Groups that returns the advantages of samples, in the place of baseline
    and deviation."""
    columns: tuple[str, ...] = ()  # Columns of the dataset that this function reads.
    eps: float = 1e-6  # Added to the deviation.

    def __call__(self, batch: Batch, context: Any) -> tuple[dict[str, Any], dict[str, float]]:
        mask = batch["response_mask"]
        if not len(batch):  # Filters have dropped all samples.
            counts = {"prompt_tokens": mask.values[:0]} if self.counts_prompt_tokens else {}
            return {"advantages": mask, KEEP: [], **counts}, {}
        self.inputs.check_failures(batch, context)
        scores, shaping = self.inputs.shaped_scores(batch)
        penalties_T, kl = self.reward_kl.penalties(batch, context)
        left_out_T, ages = self.inputs.left_out(batch, context)
        metrics = rollout_metrics(batch, group_size=self.group_size) | shaping | kl | ages
        columns: dict[str, Any] = {}
        if self.filters or self.function is not None or compares_groups(self.baseline, self.normalize):
            self._require_whole_groups(batch.ids)
            differ, spread = self._differing(batch["score"])
            metrics |= spread
            if self.filters:
                columns[KEEP] = differ
        offset_T: Tensor | float = 0.0
        if self.inputs.turn_credit is not None:
            offset_T = self.inputs.turn_offsets(batch, scores, self.group_size)
            if self.normalize == "group":
                offset_T = offset_T / (per_token(self._deviations(scores), mask) + self.eps)
        if not self.kl_to_go:
            scores = scores - response_sums(penalties_T, mask)
        by = self._compared if self.function is None else self._by_function
        advantages = by(scores, batch)
        if self.filters:  # What is dropped does not count for the deviation.
            advantages = advantages.masked_fill(~differ, nan)
        if self.normalize == "batch":
            advantages = self._normalized(advantages)
        advantage_T = per_token(advantages, mask) + self.inputs.returns_of_tokens(batch) + offset_T
        if self.kl_to_go:
            advantage_T = advantage_T - _sums_to_go(penalties_T, mask)
        if left_out_T is not None:
            advantage_T = advantage_T.masked_fill(left_out_T, nan)
        if self.normalize == "tokens":
            is_prompt_T = mask.values == 0
            normalized_T = self._normalized(advantage_T.masked_fill(is_prompt_T, nan))
            advantage_T = normalized_T.masked_fill(is_prompt_T, 0.0)
        advantage_T, entropies = self.inputs.of_top_entropy(advantage_T, batch)
        metrics |= entropies
        columns["advantages"] = mask.like(advantage_T.to(mask.values.dtype))
        if self.counts_prompt_tokens:
            columns["prompt_tokens"] = self._prompt_tokens(batch, advantage_T)
        return columns, metrics

    def _differing(self, scores: Tensor) -> tuple[Tensor, dict[str, float]]:
        """Return which samples are in groups whose scores differ, False with a failed one, and a metric."""
        score_GK = scores.view(-1, self.group_size)
        differ_G = score_GK.amax(-1) > score_GK.amin(-1)
        complete_G = ~score_GK.isnan().any(-1)
        metrics = {}
        if complete_G.any():
            metrics["reward/zero_std_groups"] = (~differ_G[complete_G]).double().mean().item()
        return differ_G.repeat_interleave(self.group_size), metrics

    def _deviations(self, scores: Tensor) -> Tensor:
        """Return for each sample the deviation of the scores of its group."""
        score_GK = scores.view(-1, self.group_size)
        deviation_G = standard_deviation(score_GK, correction=_CORRECTION[self.deviation])
        return deviation_G.repeat_interleave(self.group_size)

    def _compared(self, scores: Tensor, batch: Batch) -> Tensor:
        """Return the differences from the baseline, divided by the deviation of the group if wanted."""
        if self.baseline == "greedy":
            greedy = batch["greedy_score"].double(), batch["greedy_mask"], batch["greedy_finished"]
            scores = scores - self.inputs.shaped(*greedy)
        if not compares_groups(self.baseline, self.normalize):
            return scores
        score_GK = scores.view(-1, self.group_size)
        failed_GK = batch["score"].view(-1, self.group_size).isnan()
        score_GK = score_GK.masked_fill(failed_GK.any(1, keepdim=True), nan)
        deviation_G = standard_deviation(score_GK, correction=_CORRECTION[self.deviation])
        if self.baseline in ("group_mean", "leave_one_out"):
            score_GK = deviations(score_GK)
        if self.baseline == "leave_one_out":  # r_i - mean of the others = K / (K - 1) (r_i - mean of all).
            count_G1 = (~score_GK.isnan()).sum(1, keepdim=True).double()
            score_GK = score_GK * (count_G1 / (count_G1 - 1).clamp(min=1))
        if self.normalize == "group":
            score_GK = score_GK / (deviation_G[:, None] + self.eps)
        return score_GK.reshape(-1)

    def _by_function(self, scores: Tensor, batch: Batch) -> Tensor:
        """Return what the user's function returns, NaN for scores of NaN. Raises UserError if it fails."""
        name = name_of(self.function)
        shape = (-1, self.group_size)
        groups = Groups(
            batch["response_mask"].response_lengths().to(scores).view(shape),
            (batch["finished"] != 0).view(shape))
        columns = {column: batch[column_key(column)][:: self.group_size] for column in self.columns}
        try:
            returned = self.function(scores.view(shape).clone(), groups, **columns)
        except Exception as error:
            if isinstance(error, UserError) or user_line(error) is None:
                raise
            raise UserError(f"advantages {name} raised {described(error)}") from error
        expected = (len(scores) // self.group_size, self.group_size)
        if (found := getattr(returned, "shape", None)) != expected:
            what = f"an object of type {type(returned).__name__}"
            if found is not None:
                what = f"a tensor of shape {tuple(found)}"
            raise UserError(
                f"advantages {name} returned {what}: it must return a tensor of shape {expected}, as the "
                "scores are: prompts by samples")
        advantages = returned.double().reshape(-1)
        if advantages.isinf().any():
            raise UserError(
                f"advantages {name} returned infinite numbers: they must be finite, or NaN to leave a sample "
                "out")
        if advantages.isnan().all() and not scores.isnan().all():
            warn(f"advantages {name} returned NaN for all samples of a step: they train nothing")
        return advantages.masked_fill(scores.isnan(), nan)

    def _normalized(self, values: Tensor) -> Tensor:
        return normalized(values, correction=_CORRECTION[self.deviation], eps=self.eps)

    def _prompt_tokens(self, batch: Batch, advantage_T: Tensor) -> Tensor:
        """Return for each sample the tokens of its prompt's responses whose advantages are not NaN."""
        mask = batch["response_mask"]
        counts = response_sums((~advantage_T.isnan()).to(mask.values.dtype), mask)
        prompts = [prompt_of(sample, self.group_size) for sample in batch.ids]
        number = {prompt: index for index, prompt in enumerate(dict.fromkeys(prompts))}
        index = counts.new_tensor([number[prompt] for prompt in prompts]).long()
        return counts.new_zeros(len(number)).index_add(0, index, counts)[index]

    def _require_whole_groups(self, ids: Sequence[int]) -> None:
        """Raise UserError if a filter has dropped some samples of a prompt, and not all."""
        for prompt, count in Counter(prompt_of(sample, self.group_size) for sample in ids).items():
            if count != self.group_size:
                raise UserError(
                    "group advantages compare all samples of a prompt, "
                    f"and {count} of the {self.group_size} samples of prompt {prompt} are left: "
                    "let the filter keep or drop whole groups, or filter after the advantages")


def _sums_to_go(values_T: Tensor, mask: Packed) -> Tensor:
    """Return for every token the sum of its response's values from this token on, in float64.

    Each response is added up by itself, so that equal responses have equal sums.
    """
    values_T = values_T.double()
    sums_T = values_T.new_empty(values_T.shape)
    for values, sums in zip(mask.like(values_T).split(), mask.like(sums_T).split(), strict=True):
        sums.copy_(values.flip(0).cumsum(0).flip(0))
    return sums_T


@dataclass(frozen=True)
class AdvantageConfig(RewardKL):
    """Settings of GAE(gamma, lam) over the rewards of tokens.

    A token's reward is minus its KL penalty (see RewardKL), and the score is added at the last token.
    """

    kl_coef: float = 0.05  # Weight of the KL to the reference in the rewards of tokens.
    gamma: float = 1.0  # Discount of the reward of each following token.
    lam: float = 0.95
    """Weight of each following token's error; 1 relies on rewards only, 0 on the next value."""
    field_of_experiment: ClassVar[str] = "advantage"
    whiten: bool = True  # Normalise advantages to mean 0 and variance 1 over the batch's response tokens.

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("gamma", "lam"):
            require(
                0 <= getattr(self, name) <= 1, f"advantage.{name}", getattr(self, name),
                "be at least 0 and at most 1")


def generalized_advantages(
    rewards_ST: Tensor, values_ST: Tensor, mask_ST: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Return the advantages and returns of left-aligned sequences.

    They follow generalized advantage estimation (Schulman et al. 2016, arXiv:1506.02438).
    """
    advantages_ST = rewards_ST.new_zeros(rewards_ST.shape)
    running_S = rewards_ST.new_zeros(rewards_ST.shape[0])
    next_value_S = running_S
    for t in reversed(range(rewards_ST.shape[1])):
        mask_S = mask_ST[:, t]
        delta_S = rewards_ST[:, t] + gamma * next_value_S - values_ST[:, t]
        running_S = (delta_S + gamma * lam * running_S) * mask_S
        next_value_S = values_ST[:, t] * mask_S
        advantages_ST[:, t] = running_S
    return advantages_ST, (advantages_ST + values_ST) * mask_ST


@dataclass(frozen=True)
class TokenAdvantages:
    """Computes advantages and returns of the response tokens from score, KL to the reference and values.

    Rewards of single tokens have discounts of their own: their returns are added to both (Yeo et al. 2025,
    arXiv:2502.03373, who do so with lam = 1). Both are NaN for samples whose reward has failed and for tokens
    that are too old; the rewards and values of the latter still count for the tokens before them.
    All is computed in float64.
    """

    config: AdvantageConfig
    inputs: AdvantageInputs = field(default_factory=AdvantageInputs)
    group_size: int = 1  # Only for metrics.

    def __call__(self, batch: Batch, context: Any) -> tuple[dict[str, Any], dict[str, float]]:
        c = self.config
        mask = batch["response_mask"]
        if not len(batch):  # Filters have dropped all samples.
            empty = mask.like(batch["values"].values)
            return {"advantages": empty, "returns": empty}, {}
        self.inputs.check_failures(batch, context)
        metrics = rollout_metrics(batch, group_size=self.group_size)
        scores, shaping = self.inputs.shaped_scores(batch)
        penalties_T, kl = c.penalties(batch, context)
        left_out_T, ages = self.inputs.left_out(batch, context)
        # Tokens that were inserted into a response are no actions: the state after them follows the last one.
        chosen_T = mask.values.bool()
        counts_S = num_trained_tokens(mask).long()
        valid_ST = counts_S[:, None] > counts_S.new_tensor(range(int(counts_S.max())))
        values_N = batch["values"].values[chosen_T].double()
        rewards_ST = _scattered(-penalties_T[chosen_T].double(), valid_ST)
        rewards_ST[list(range(len(mask))), counts_S - 1] += scores
        advantages_ST, returns_ST = generalized_advantages(
            rewards_ST, _scattered(values_N, valid_ST), valid_ST.to(values_N.dtype), gamma=c.gamma, lam=c.lam
        )
        left_out_N = scores.isnan().repeat_interleave(valid_ST.sum(1))  # Also where lam is 0.
        if left_out_T is not None:
            left_out_N |= left_out_T[chosen_T]
        more_N = batch["token_returns"].values[chosen_T] if self.inputs.token_returns else 0.0
        advantage_N = (advantages_ST[valid_ST] + more_N).masked_fill(left_out_N, nan)
        return_N = (returns_ST[valid_ST] + more_N).masked_fill(left_out_N, nan)
        metrics |= shaping | kl | ages | _explained_variance(return_N[~left_out_N], values_N[~left_out_N])
        if c.whiten:
            advantage_N = normalized(advantage_N)
        advantage_T, entropies = self.inputs.of_top_entropy(_scattered(advantage_N, chosen_T), batch)
        columns = {"advantages": advantage_T, "returns": _scattered(return_N, chosen_T)}
        dtype = batch["values"].values.dtype
        return {key: mask.like(x_T.to(dtype)) for key, x_T in columns.items()}, metrics | entropies


def _explained_variance(return_N: Tensor, value_N: Tensor) -> dict[str, float]:
    """Return the share of the returns' variance that the values explain; nothing if they have no variance.

    Returns that should be equal differ by the rounding of their sums, which is far below 1e-12 of them.
    """
    if not len(return_N):
        return {}
    deviation = standard_deviation(return_N).item()
    if deviation <= 1e-12 * return_N.abs().max().item():
        return {}
    residual = standard_deviation(return_N - value_N).item()
    return {"critic/explained_variance": 1.0 - (residual / deviation) ** 2}


def _scattered(x_N: Tensor, where: Tensor) -> Tensor:
    """Return a tensor with the values of x in order where a mask is true, and 0 elsewhere."""
    return x_N.new_zeros(where.shape).masked_scatter(where, x_N)
