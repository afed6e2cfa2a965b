"""RewardCall: scores responses by one or several reward functions, as a host function of a graph."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from realhf.data.responses import in_response
from realhf.errors import warn
from realhf.rewards.limited_call import run_together
from realhf.rewards.limits import RewardLimits
from realhf.rewards.reward import (
    EXTRAS,
    STANDARD,
    RewardFunctions,
    answers_by,
    calls_hash,
    column_key,
    looked_up,
    name_of,
    parameters_of,
    rewards_of,
    texts_in,
)
from realhf.rewards.scorer import SamplesToScore, Scored, Scorer
from realhf.user_input.suggest import did_you_mean

if TYPE_CHECKING:
    from realhf.data.batch import Batch

_SEQUENCE = ("sequence_ids", "response_mask")
_LOGS = {"log_metric": "reward_metrics", "log_extra": "reward_extra"}
"""Arguments by which functions log, and the columns that have what was logged: a dict for each sample."""


def decode_responses(
    batch: Batch, context: Any, *, sequence: tuple[str, str] = _SEQUENCE
) -> tuple[list[list[int]], list[str]]:
    """Return the token ids of each response, inserted ones included, and its text without special tokens.

    `sequence` are the keys of the tokens and of the response mask.
    """
    mask = batch[sequence[1]]
    pairs = zip(batch[sequence[0]].split(), mask.like(in_response(mask)).split(), strict=True)
    token_ids = [tokens[chosen].tolist() for tokens, chosen in pairs]
    return token_ids, [context.tokenizer.decode(ids, skip_special_tokens=True) for ids in token_ids]


@dataclass(frozen=True)
class RewardScores:
    """The scores of samples, with an entry for each."""

    totals: list[float]
    """The weighted sum of the rewards that apply, or 0 if none does. It is NaN for samples to drop: a reward
    has failed on them, or no reward applies to them because some have failed and are skipped."""
    by_name: list[dict[str, float | None]]
    """The value of each reward, without its weight; None if it does not apply or has failed."""
    metrics: list[dict[str, float]]
    extra: list[dict[str, Any]]


class RewardCall:
    """A host function that decodes responses, returns them as `completion`, and scores them.

    Column `score` has the weighted sum of the rewards, in float64, and `reward_scores` a dict from the name
    of each reward to its value. `sequence` are the keys under which the call reads tokens and response masks.
    """

    def __init__(
        self, functions: RewardFunctions, columns: Sequence[str], limits: RewardLimits | None = None,
        *, sequence: tuple[str, str] = _SEQUENCE,
    ) -> None:
        self.rewards = rewards_of(functions)
        self.columns = tuple(columns)
        self.sequence = sequence
        self.limits = limits or RewardLimits()
        self.answer_of: Callable[[str], Any] | None = answers_by(functions)
        """Returns the answer in a text, for majority votes; None if no reward function can tell it."""
        self._scorers = [Scorer(reward, self.columns, self.limits) for reward in self.rewards]
        self._has_warned_of_none = False

    @property
    def outputs(self) -> tuple[str, ...]:
        """Keys of the columns that the call returns."""
        extras = {name for scorer in self._scorers for name in scorer.extras}
        if any(scorer.on_failure == "skip" for scorer in self._scorers):
            extras.add("log_metric")  # The share of failures is logged.
        logs = (key for name, key in _LOGS.items() if name in extras)
        return ("score", "completion", "reward_scores", *logs)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Keys of the columns that the call reads."""
        return ("prompt", *self.sequence, *(column_key(column) for column in self.columns))

    def readers_of(self, column: str) -> list[str]:
        """Return the names of the reward functions that read a column."""
        return [scorer.name for scorer in self._scorers if column in scorer.columns]

    def unseen(self, special_tokens: Sequence[str]) -> Iterator[str]:
        """Yield a sentence about each reward that looks for a special token."""
        for reward in self.rewards:
            sought = texts_in(reward.function)
            unseen = [token for token in special_tokens if len(token) > 2
                      and any(token in text or re.escape(token) in text for text in sought)]
            if unseen:
                yield (
                    f"reward {reward.label} looks for {unseen[0]!r}, a special token of the tokenizer: "
                    "completions have no special tokens as text, only in completion_ids")

    def unstable(self) -> Iterator[str]:
        """Yield a sentence about each reward whose values differ between processes."""
        for reward in self.rewards:
            if os.environ.get("PYTHONHASHSEED", "random") == "random" and calls_hash(reward.function):
                yield (
                    f"reward {reward.label} calls hash(), and that of a text differs between processes: "
                    "a run that is repeated or resumed has other rewards (zlib.crc32 stays the same)")

    def misspelt(self, columns: Sequence[str]) -> Iterator[str]:
        """Yield warnings about columns that rewards ask for in vain.

        They are optional parameters that are nearly the name of a column, and names in `columns.get(name)`
        if they are so, too, or if the function finds no column at all.
        """
        for function in (reward.function for reward in self.rewards):
            names = looked_up(function)
            lost = [name for name in names if name not in (*STANDARD, *EXTRAS, *columns)]
            for name in lost:
                if (near := did_you_mean(name, columns)) or len(lost) == len(names):
                    yield (
                        f"dataset has no column {name!r}{near}: where {name_of(function)} looks it up by "
                        "`get`, it finds nothing")
            for parameter in parameters_of(function):
                is_known = parameter.name in (*STANDARD, *EXTRAS, *columns, "dataset")
                near = did_you_mean(parameter.name, columns)
                if parameter.default is not parameter.empty and not is_known and near:
                    yield (
                        f"dataset has no column {parameter.name!r}{near}: this parameter of "
                        f"{name_of(function)} always has its default, {parameter.default!r}")

    def doubts(self, prompt: str) -> Iterator[str]:
        """Yield what seems wrong with rewards if the first prompt reads so to the model."""
        for reward in self.rewards:
            doubt = getattr(reward.function, "doubt", None)
            if doubt is not None and (sentence := doubt(prompt)) is not None:
                yield f"reward {reward.label}: {sentence}"

    def __call__(self, batch: Batch, context: Any) -> dict[str, Any]:
        completion_ids, completions = decode_responses(batch, context, sequence=self.sequence)
        columns = {name: batch[column_key(name)] for name in self.columns}
        step = getattr(context, "step", 0)
        scores = self.scored(
            SamplesToScore(batch.ids, batch["prompt"], completions, completion_ids, columns, step))
        outputs = {
            "score": batch[self.sequence[1]].values.double().new_tensor(scores.totals),
            "completion": completions,
            "reward_scores": scores.by_name, "reward_metrics": scores.metrics, "reward_extra": scores.extra,
        }
        return {key: outputs[key] for key in self.outputs}

    def scores(
        self, ids: Sequence[int], prompts: list[Any], completions: list[str], completion_ids: list[list[int]],
        columns: dict[str, list[Any]],
    ) -> list[float]:
        """Return the score of each sample, NaN for those to drop. Raises UserError if a function fails."""
        return self.scored(SamplesToScore(ids, prompts, completions, completion_ids, columns)).totals

    def scored(self, samples: SamplesToScore) -> RewardScores:
        """Score the samples by all rewards, at the same time if they are `async`, limited or concurrent.

        Raises UserError if a function fails: the first one of the list, if several do.
        """
        work = [partial(scorer, samples) for scorer in self._scorers]
        outcomes = run_together(work, here=[scorer.runs_here for scorer in self._scorers])
        results: list[Scored] = [outcome.unwrap() for outcome in outcomes]
        names = [reward.label for reward in self.rewards]
        by_name = []
        totals = []
        for i, row in enumerate(zip(*(result.values for result in results), strict=True)):
            values = [None if value is None else float(value) for value in row]
            applied = [(r.weight, x) for r, x in zip(self.rewards, values, strict=True) if x is not None]
            is_lost = not applied and any(result.skipped and result.skipped[i] for result in results)
            totals.append(math.nan if is_lost else _weighted_sum(applied))
            shown = [None if value is None or math.isnan(value) else value for value in values]
            by_name.append(dict(zip(names, shown, strict=True)))
        self._warn_of_none(samples.ids, results)
        return RewardScores(totals, by_name, _merged([result.metrics for result in results]),
                      _merged([result.extra for result in results]))

    def _warn_of_none(self, ids: Sequence[int], results: Sequence[Scored]) -> None:
        """Warn the first time that no reward applies to some samples."""
        values = zip(*(result.values for result in results), strict=True)
        lost = {i for result in results for i, failed in zip(ids, result.skipped, strict=False) if failed}
        none = [i for i, row in zip(ids, values, strict=True) if all(value is None for value in row)]
        none = [i for i in none if i not in lost]
        if none and not self._has_warned_of_none:
            self._has_warned_of_none = True
            samples = f"{len(none)} of {len(ids)} samples (sample {none[0]} first)"
            if len(self._scorers) == 1:
                warn(f"reward function {self._scorers[0].name} returned None for {samples}: None counts as 0")
            else:
                warn(f"all reward functions returned None for {samples}: the score is 0")


def _weighted_sum(terms: Sequence[tuple[float, float]]) -> float:
    """Return the sum of weights times values, rounded to 12 digits below the largest term.

    So sums that are equal on paper, such as 0.1 + 0.2 and 0.3, are equal.
    """
    products = [weight * value for weight, value in terms]
    total = math.fsum(products)
    largest = max(map(abs, products), default=0.0)
    if not largest > 0 or not math.isfinite(largest) or (len(terms) == 1 and terms[0][0] == 1):
        return total
    return round(total, 11 - math.floor(math.log10(largest)))


def _merged(columns: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return for each sample the union of its dicts."""
    return [{k: v for of_reward in row for k, v in of_reward.items()} for row in zip(*columns, strict=True)]
