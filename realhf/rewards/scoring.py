"""Scores responses by reward functions.

A Scorer calls one function and checks that it returns a finite number for each sample; a RewardCall is the
host function of a graph that calls all of them and adds up what they return.
"""

from __future__ import annotations

import inspect
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from realhf.errors import UserError, described, warn
from realhf.rewards.limits import LimitedCall, RewardLimits, ServiceError, is_async, run_together
from realhf.rewards.reward import (
    EXTRAS,
    STANDARD,
    Reward,
    RewardFunctions,
    answers_by,
    calls_hash,
    column_key,
    columns_of,
    looked_up,
    name_of,
    parameters_of,
    rewards_of,
    takes_any,
    texts_in,
)
from realhf.user_input.field_types import OF_REWARDS, require_own_name
from realhf.user_input.suggest import did_you_mean

if TYPE_CHECKING:
    from realhf.data.batch import Batch

_ANSWER_NAME = re.compile(
    r"^(gold|gt|truth|(right|correct|expected|true)_.*|.*(answer|truth|solution|target|label|reference)s?)$")
"""Names of parameters that surely mean a column with right answers."""
_UNPRINTABLE = {"\a": "a", "\b": "b", "\f": "f", "\v": "v"}
"""Control characters that no completion has, and the letters of their escapes in Python."""
_SEQUENCE = ("sequence_ids", "response_mask")
_LOGS = {"log_metric": "reward_metrics", "log_extra": "reward_extra"}
"""Arguments by which functions log, and the columns that have what was logged: a dict for each sample."""
_SEARCH_SECONDS = 5.0
"""Time to search for a single sample on which a function raises."""
_MAX_SINGLE_SECONDS = 3600.0
"""Longest time for calls with single samples after one with all samples has failed."""
_MAX_SHOWN = 200
"""Most characters of a prompt in a message."""


@dataclass(frozen=True)
class SamplesToScore:
    """The samples to score: ids, and lists with an entry for each sample."""

    ids: Sequence[int]
    prompts: list[Any]
    completions: list[str]
    completion_ids: list[list[int]]
    columns: dict[str, list[Any]]  # Columns of the dataset.
    step: int = 0


@dataclass
class Scored:
    """The values of one reward function, and what it has logged, with an entry for each sample."""

    values: list[Any]
    """A number for each sample; None: the reward does not apply to it; NaN: it failed, drop the sample."""
    metrics: list[dict[str, float]]  # What the sample's call has passed to `log_metric`, by name.
    extra: list[dict[str, Any]]  # What the sample's call has passed to `log_extra`, by column.
    skipped: Sequence[bool] = ()
    """For each sample, whether the reward has failed on it and is skipped; empty: it has failed on none."""


@dataclass
class _Log:
    """The metrics and columns that a call has logged."""

    metrics: dict[str, list[float]] = field(default_factory=dict)
    extra: dict[str, list[Any]] = field(default_factory=dict)

    def log_metric(self, name: str, value: float) -> None:
        self.metrics.setdefault(str(name), []).append(float(value))

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        self.extra[str(column)] = list(values)


class Scorer:
    """Calls a reward's function on samples, within limits."""

    def __init__(self, reward: Reward, columns: Sequence[str], limits: RewardLimits) -> None:
        self.reward = reward
        self.limits = limits
        self.on_failure = reward.on_failure or limits.on_failure
        self.name = name_of(reward.function)
        self.columns = columns_of(reward.function, columns)
        parameters = parameters_of(reward.function)
        names = [p.name for p in parameters]
        self._standard = [name for name in STANDARD if name in names or takes_any(parameters)]
        self.extras = [name for name in EXTRAS if name in names]
        timeout = reward.timeout_seconds
        self._seconds = limits.timeout_seconds if timeout is None else timeout
        setting = "reward_limits.timeout_seconds" if timeout is None else "Reward.timeout_seconds"
        self._limited = LimitedCall(reward.function, seconds=self._seconds, limits=limits, setting=setting)
        self._has_warned_of_failures = False
        self._first_failure = ""
        """Why the function failed on a sample for the first time."""

    @property
    def runs_here(self) -> bool:
        """Whether the function runs in the thread that calls it, so that no other runs at the same time."""
        return self.reward.concurrency is None and not is_async(self.reward.function)

    def __call__(self, samples: SamplesToScore) -> Scored:
        """Score the samples. Raises UserError if the function fails and samples may not be dropped.

        The function gets completions of chats as messages, as in TRL.
        """
        if not samples.ids:
            return Scored([], [], [])
        # The lists are copies, so that a function that changes one changes it for no other function.
        standard = {
            "prompts": list(samples.prompts), "completion_ids": list(map(list, samples.completion_ids)),
            "completions": [
                text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
                for prompt, text in zip(samples.prompts, samples.completions, strict=True)]}
        arguments = {name: standard[name] for name in self._standard}
        arguments |= {name: list(samples.columns[name]) for name in self.columns}
        if self.reward.concurrency is not None:
            scored = self._pooled(arguments, samples)
        else:
            scored = self._together(arguments, samples)
        self._check_awaited(scored.values)
        if self.on_failure == "stop":
            self._check_finite(scored.values, samples)
            return scored
        scored.values = self._without_failed(scored.values, samples.ids)
        return self._with_skipped(scored) if self.on_failure == "skip" else scored

    def _with_skipped(self, scored: Scored) -> Scored:
        """Return the result with None, instead of NaN, for samples on which the reward has failed."""
        skipped = [isinstance(value, float) and math.isnan(value) for value in scored.values]
        share = f"reward/{self.reward.label}/failed"
        metrics = [logged | {share: float(failed)}
                   for logged, failed in zip(scored.metrics, skipped, strict=True)]
        values = [None if failed else value
                  for value, failed in zip(scored.values, skipped, strict=True)]
        return Scored(values, metrics, scored.extra, skipped)

    def _together(self, arguments: dict[str, list[Any]], samples: SamplesToScore) -> Scored:
        """Call the function with all samples."""
        try:
            values, log = self._call(arguments, samples.step)
        except (Exception, SystemExit) as error:
            if self.on_failure == "stop" or isinstance(error, SystemExit):
                raise self._explain(error, arguments, samples) from error
            if isinstance(error, ServiceError):  # The service is away for each of them.
                whole = Scored([], [], [])
                for _ in samples.ids:
                    self._add_failed(whole, error)
                return whole
            return self._one_by_one(arguments, samples)
        self._check_length(values, samples.ids)
        return self._scored(list(values), log)

    def _pooled(self, arguments: dict[str, list[Any]], samples: SamplesToScore) -> Scored:
        """Call the function with one sample at a time, several times at once."""
        logs: dict[int, _Log] = {}

        def maker(i: int) -> Callable[[], dict[str, Any]]:
            def make() -> dict[str, Any]:
                logs[i] = _Log()  # A call that is made again logs anew.
                return _sample(arguments, i) | self._callables(logs[i], samples.step)

            return make

        concurrency = self.reward.concurrency or 1
        makers = [maker(i) for i in range(len(samples.ids))]
        outcomes = self._limited.each(makers, concurrency=concurrency)
        whole = Scored([], [], [])
        for i, outcome in enumerate(outcomes):
            if outcome.error is not None:
                if self.on_failure == "stop" or not isinstance(outcome.error, Exception):
                    raise self._failure(outcome.error, _sample_words(samples, i)) from outcome.error
                self._add_failed(whole, outcome.error)
                continue
            self._check_length(outcome.value, samples.ids[i : i + 1])
            _extend(whole, self._scored(list(outcome.value), logs[i]))
        return whole

    def _one_by_one(self, arguments: dict[str, list[Any]], samples: SamplesToScore) -> Scored:
        """Score with one call per sample; a sample whose call fails has NaN.

        After ten times the time limit, and at most an hour, the samples that are left count as failed.
        """
        deadline = math.inf
        if self._seconds is not None:
            deadline = time.monotonic() + min(10 * self._seconds, max(self._seconds, _MAX_SINGLE_SECONDS))
        whole = Scored([], [], [])
        for i in range(len(samples.ids)):
            try:
                if (left := deadline - time.monotonic()) <= 0:
                    raise TimeoutError("the time for calls with single samples is over")
                log = _Log()
                call_arguments = _sample(arguments, i) | self._callables(log, samples.step)
                value = self._limited.once(call_arguments, at_most=left)[0]
            except Exception as error:
                self._add_failed(whole, error)
                continue
            _extend(whole, self._scored([value], log))
        self._check_length(whole.values, samples.ids)
        return whole

    def _call(self, arguments: dict[str, list[Any]], step: int) -> tuple[Any, _Log]:
        """Call the function, again if it fails and may be retried."""
        logs: list[_Log] = []

        def make() -> dict[str, Any]:
            logs.append(_Log())
            return arguments | self._callables(logs[-1], step)

        return self._limited.repeated(make), logs[-1]

    def _callables(self, log: _Log, step: int) -> dict[str, Any]:
        """Return the arguments of EXTRAS that the function names."""
        callables = {"log_metric": log.log_metric, "log_extra": log.log_extra,
                "trainer_state": SimpleNamespace(global_step=step)}
        return {name: callables[name] for name in self.extras}

    def _scored(self, values: list[Any], log: _Log) -> Scored:
        """Return the values of a call with what it has logged."""
        for column, entries in log.extra.items():
            if len(entries) != len(values):
                raise UserError(
                    f"reward function {self.name} passed {len(entries)} values to log_extra({column!r}) for "
                    f"{len(values)} samples")
        means = {}
        for name, logged in log.metrics.items():
            require_own_name(name, who=f"reward function {self.name}", reserved=OF_REWARDS)
            means[name] = sum(logged) / len(logged)
        extra = [{column: entries[i] for column, entries in log.extra.items()} for i in range(len(values))]
        return Scored(values, [means for _ in values], extra)

    def _add_failed(self, whole: Scored, error: Exception) -> None:
        self._first_failure = self._first_failure or described(error)
        _extend(whole, Scored([math.nan], [{}], [{}]))

    def _check_length(self, scores: Any, ids: Sequence[int]) -> None:
        """Raise UserError unless the function has returned a list, or the like, of one value per sample."""
        is_list = hasattr(scores, "__len__") and not isinstance(scores, str | bytes | dict | set)
        if is_list and len(scores) == len(ids):
            return
        returned = f"{len(scores)} values" if is_list else type(scores).__name__
        raise UserError(
            f"reward function {self.name} returned {returned} for {len(ids)} samples ({ids[0]} to "
            f"{ids[-1]}): it must return a list with one number per completion")

    def _check_awaited(self, scores: Sequence[Any]) -> None:
        """Raise UserError if scores are coroutines, or other objects that are to be awaited."""
        waiting = list(filter(inspect.isawaitable, scores))
        for coroutine in filter(inspect.iscoroutine, waiting):
            coroutine.close()
        if waiting:
            raise UserError(
                f"reward function {self.name} returned {type(waiting[0]).__name__}s, which nothing has "
                "awaited: make it `async def`, and return `await asyncio.gather(*...)` of them")

    def _check_finite(self, scores: Sequence[Any], samples: SamplesToScore) -> None:
        """Raise UserError that names the first sample whose score is neither None nor a finite number."""
        for i, score in enumerate(scores):
            if score is not None and not _is_finite(score):
                raise UserError(
                    f"reward function {self.name} returned {score!r} for {_sample_words(samples, i)}: "
                    "it must be a finite number")

    def _without_failed(self, scores: Sequence[Any], ids: Sequence[int]) -> list[Any]:
        """Return the scores, NaN for each that is neither None nor a finite number; warn the first time."""
        usable = [score is None or _is_finite(score) for score in scores]
        if not all(usable) and not self._has_warned_of_failures:
            self._has_warned_of_failures = True
            first = usable.index(False)
            cause = self._first_failure or f"it returned {list(scores)[first]!r}"
            failure = f"failed on {usable.count(False)} of {len(ids)} samples (sample {ids[first]} first)"
            then = "they are dropped with their groups"
            if self.on_failure == "skip":
                then = f"it counts as None for them, and reward/{self.reward.label}/failed is their share"
            warn(f"reward function {self.name} {failure}: {cause}; {then}")
        return [score if is_usable else math.nan for score, is_usable in zip(scores, usable, strict=True)]

    def _explain(
        self, error: BaseException, arguments: dict[str, list[Any]], samples: SamplesToScore
    ) -> UserError:
        """Return the error for the user. If the function fails on one sample alone, the error names it."""
        which = f"samples {samples.ids[0]} to {samples.ids[-1]}"
        deadline = time.monotonic() + _SEARCH_SECONDS
        for i in range(0 if isinstance(error, ServiceError) else len(samples.ids)):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            try:
                call_arguments = _sample(arguments, i) | self._callables(_Log(), samples.step)
                self._limited.once(call_arguments, at_most=left)
            except (Exception, SystemExit) as alone:
                if time.monotonic() < deadline:  # Else it may be slow, and no more than that.
                    error = alone
                    which = _sample_words(samples, i)
                break
        return self._failure(error, which)

    def _failure(self, error: BaseException, which: str) -> UserError:
        return UserError(f"reward function {self.name} raised {described(error)} on {which}{_mend(error)}")


def _sample(arguments: dict[str, list[Any]], i: int) -> dict[str, list[Any]]:
    """Return the arguments of a call with sample i alone."""
    return {name: values[i : i + 1] for name, values in arguments.items()}


def _extend(whole: Scored, part: Scored) -> None:
    whole.values += part.values
    whole.metrics += part.metrics
    whole.extra += part.extra


def _sample_words(samples: SamplesToScore, i: int) -> str:
    text = repr(samples.prompts[i])
    short = text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
    return f"sample {samples.ids[i]} with the prompt {short}"


def _mend(error: BaseException) -> str:
    """Return in words how a run can go on when a reward function has failed."""
    if not isinstance(error, Exception):
        return ""  # A `sys.exit` is neither repeated nor dropped.
    drop = "reward_limits.on_failure='drop' leaves such samples out"
    return f"; reward_limits.retries repeats a call, {drop}"


def _is_finite(score: Any) -> bool:
    if isinstance(score, str | bytes):
        return False
    try:
        return math.isfinite(float(score))
    except (TypeError, ValueError, OverflowError):
        return False


def decode_responses(
    batch: Batch, context: Any, *, sequence: tuple[str, str] = _SEQUENCE
) -> tuple[list[list[int]], list[str]]:
    """Return the token ids of each response, inserted ones included, and its text without special tokens.

    `sequence` are the keys of the tokens and of the response mask.
    """
    mask = batch[sequence[1]]
    pairs = zip(batch[sequence[0]].split(), mask.like(mask.in_response()).split(), strict=True)
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
    of each reward to its value. Without functions (None), scores are 0.
    `sequence` are the keys under which the call reads tokens and response masks.
    """

    def __init__(
        self, functions: RewardFunctions | None, columns: Sequence[str], limits: RewardLimits | None = None,
        *, sequence: tuple[str, str] = _SEQUENCE,
    ) -> None:
        self.rewards = () if functions is None else rewards_of(functions)
        self.columns = tuple(columns)
        self.sequence = sequence
        self.limits = limits or RewardLimits()
        self.answer_of: Callable[[str], Any] | None = None if functions is None else answers_by(functions)
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

    def unescaped(self) -> Iterator[str]:
        """Yield a sentence about each reward that looks for a control character."""
        for reward in self.rewards:
            for text in texts_in(reward.function):
                if (found := next((c for c in _UNPRINTABLE if c in text), None)) is not None:
                    yield (
                        f"reward {reward.label} looks for {text!r}, which has a control character: "
                        f"\\{_UNPRINTABLE[found]} in a Python text is no backslash and letter; write a raw "
                        "text, r'...'")
                    break

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
                is_answer = _ANSWER_NAME.search(parameter.name) is not None and parameter.default is None
                if parameter.default is not parameter.empty and not is_known and (near or is_answer):
                    near = near or f" (it has {', '.join(columns) or 'no more'})"
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
        if not self._scorers:
            nothing: list[dict[str, Any]] = [{} for _ in samples.ids]
            return RewardScores([0.0] * len(nothing), nothing, nothing, nothing)
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
