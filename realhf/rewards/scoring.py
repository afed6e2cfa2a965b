"""RewardCall: runs a reward function on a batch and checks that it returns one finite number per sample."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from realhf.data.dataset import COLUMN, LOADER_KEYS
from realhf.data.responses import in_response
from realhf.errors import UserError, described, warn
from realhf.rewards.limits import LimitedCall, RewardLimits

if TYPE_CHECKING:
    from realhf.data.batch import Batch

RewardFunction = Callable[..., Any]
"""A function of (prompts, completions, completion_ids, **columns) that returns a list of numbers, as in TRL.
It may be `async`. None in the list means that the reward does not apply to the sample, and counts as 0."""
_SEARCH_SECONDS = 5.0
"""Time to search for the one sample on which a function raises."""
_MAX_SHOWN = 200
"""Most characters of a prompt in a message."""
_SEQUENCE = ("sequence_ids", "response_mask")
_STANDARD = ("prompts", "completions", "completion_ids")
_NOT_EXTRA = ("prompt", "completion")
"""Columns that **columns do not receive, as in TRL: they would repeat the standard ones."""
_TAKEN = (*LOADER_KEYS, "completion", "score", "gen_logprobs", "ref_logprobs", "finished", "advantages",
          "values", "returns", "versions", "prox_logprobs", "prompt_tokens", "token_returns", "greedy_ids",
          "greedy_mask", "greedy_logprobs", "greedy_finished", "greedy_score", "answer_ids", "answer_mask",
          "logprobs", "scores", "teacher_weights")  # fmt: skip
"""Keys that the outputs of calls use; columns of a dataset with these names get other keys."""
_FORM = "its form is f(prompts, completions, completion_ids, **columns)"


def reward_columns(function: RewardFunction, available: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the columns to pass to a reward function.

    Parameters without a default are required; parameters with a default and **columns get `available`
    columns. Raises UserError if `function` is not a reward function.
    """
    parameters = _parameters(function)
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    columns = [name for name, p in named.items() if p.default is p.empty or name in available]
    if _takes_any(parameters):
        columns += [name for name in available if name not in named and name not in _NOT_EXTRA]
    return tuple(name for name in columns if name not in _STANDARD)


def column_key(column: str) -> str:
    """Return the key of a graph under which a reward function's call reads a column of the dataset."""
    return COLUMN + column if column in _TAKEN else column


def _parameters(function: RewardFunction) -> list[inspect.Parameter]:
    if not callable(function):
        raise UserError(f"reward_function is {function!r}: it must be a function")
    name = _name(function)
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError as error:
        raise UserError(f"reward function {name} does not tell its parameters: {_FORM}") from error
    if positional := [p.name for p in parameters if p.kind == p.POSITIONAL_ONLY]:
        raise UserError(
            f"reward function {name}: {positional[0]} is positional only, and all are passed by name")
    if not _takes_any(parameters) and not {"completions", "completion_ids"} & {p.name for p in parameters}:
        lacks = "has no parameter `completions` or `completion_ids`"
        raise UserError(f"reward function {name} {lacks}: {_FORM}")
    return parameters


def _takes_any(parameters: Sequence[inspect.Parameter]) -> bool:
    return any(p.kind == p.VAR_KEYWORD for p in parameters)


def _name(function: RewardFunction) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


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


class RewardCall:
    """A host function that decodes responses and returns them as `completion`, with the reward as `score`.

    It reads their tokens and masks under the keys `sequence`.
    """

    def __init__(
        self, function: RewardFunction, columns: Sequence[str], limits: RewardLimits | None = None,
        *, sequence: tuple[str, str] = _SEQUENCE,
    ) -> None:  # fmt: skip
        self.function = function
        self.columns = tuple(columns)
        self.sequence = sequence
        self.name = _name(function)
        parameters = _parameters(function)
        names = [p.name for p in parameters]
        self._standard = [name for name in _STANDARD if name in names or _takes_any(parameters)]
        self.limits = limits or RewardLimits()
        self._limited = LimitedCall(function, seconds=self.limits.timeout_seconds)
        self._has_warned_of_none = False
        self._has_warned_of_failures = False
        self._first_failure = ""
        """Why the function failed on a sample for the first time."""

    def __call__(self, batch: Batch, context: Any) -> dict[str, Any]:
        completion_ids, completions = decode_responses(batch, context, sequence=self.sequence)
        columns = {name: batch[column_key(name)] for name in self.columns}
        scores = self.scores(batch.ids, batch["prompt"], completions, completion_ids, columns)
        return {"score": batch[self.sequence[1]].values.new_tensor(scores), "completion": completions}

    def scores(
        self, ids: Sequence[int], prompts: list[Any], completions: list[str], completion_ids: list[list[int]],
        columns: dict[str, list[Any]],
    ) -> list[float]:  # fmt: skip
        """Return a score for each sample, NaN for those to drop. Raises UserError if the function fails.

        The function gets completions of chats as messages, as in TRL.
        """
        if not ids:
            return []
        standard = {"prompts": prompts, "completion_ids": completion_ids, "completions": [
            text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
            for prompt, text in zip(prompts, completions, strict=True)]}  # fmt: skip
        arguments = {name: standard[name] for name in self._standard} | columns
        drops = self.limits.on_failure == "drop"
        try:
            scores = self._call(arguments)
        except (Exception, SystemExit) as error:
            if not drops or isinstance(error, SystemExit):
                raise self._explain(error, arguments, ids, prompts) from error
            scores = self._one_by_one(arguments, len(ids))
        self._check_length(scores, ids)
        if drops:
            scores = self._without_failed(scores, ids)
        else:
            self._check_finite(scores, ids, prompts)
        self._warn_of_none([i for i, score in zip(ids, scores, strict=True) if score is None], len(ids))
        return [0.0 if score is None else float(score) for score in scores]

    def _check_length(self, scores: Any, ids: Sequence[int]) -> None:
        """Raise UserError unless the function has returned a list, or the like, of one value per sample."""
        is_list = hasattr(scores, "__len__") and not isinstance(scores, str | bytes | dict | set)
        if is_list and len(scores) == len(ids):
            return
        returned = f"{len(scores)} values" if is_list else type(scores).__name__
        samples = f"{len(ids)} samples ({ids[0]} to {ids[-1]})"
        rule = "it must return a list with one number per completion"
        raise UserError(f"reward function {self.name} returned {returned} for {samples}: {rule}")

    def _check_finite(self, scores: Sequence[Any], ids: Sequence[int], prompts: list[Any]) -> None:
        """Raise UserError that names the first sample whose score is neither None nor a finite number."""
        for score, sample_id, prompt in zip(scores, ids, prompts, strict=True):
            if score is not None and not _is_finite(score):
                sample = f"sample {sample_id} with the prompt {_short(prompt)}"
                rule = "it must be a finite number"
                raise UserError(f"reward function {self.name} returned {score!r} for {sample}: {rule}")

    def _call(self, arguments: dict[str, list[Any]]) -> Any:
        """Call the function, again if it fails and may be retried."""
        for _ in range(self.limits.retries):
            with suppress(Exception):
                return self._limited(**arguments)
        return self._limited(**arguments)

    def _one_by_one(self, arguments: dict[str, list[Any]], num_samples: int) -> list[Any]:
        """Return the scores from one call per sample: NaN for a sample whose call fails.

        After ten times the time limit, the samples that are left count as failed.
        """
        seconds = self.limits.timeout_seconds
        deadline = math.inf if seconds is None else time.monotonic() + 10 * seconds
        scores: list[Any] = []
        for i in range(num_samples):
            score: Any = math.nan
            if time.monotonic() < deadline:
                try:
                    score = self._limited(**_sample(arguments, i))[0]
                except Exception as error:
                    self._first_failure = self._first_failure or described(error)
            scores.append(score)
        return scores

    def _without_failed(self, scores: Sequence[Any], ids: Sequence[int]) -> list[Any]:
        """Return the scores, NaN for each that is neither None nor a finite number; warn the first time."""
        usable = [score is None or _is_finite(score) for score in scores]
        if not all(usable) and not self._has_warned_of_failures:
            self._has_warned_of_failures = True
            first = usable.index(False)
            cause = self._first_failure or f"it returned {list(scores)[first]!r}"
            failure = f"failed on {usable.count(False)} of {len(ids)} samples (sample {ids[first]} first)"
            warn(f"reward function {self.name} {failure}: {cause}; they are dropped with their groups")
        return [score if is_usable else math.nan for score, is_usable in zip(scores, usable, strict=True)]

    def _warn_of_none(self, ids: Sequence[int], num_samples: int) -> None:
        """Warn the first time that the scores of some samples, those in `ids`, are None."""
        if ids and not self._has_warned_of_none:
            self._has_warned_of_none = True
            samples = f"{len(ids)} of {num_samples} samples (sample {ids[0]} first)"
            warn(f"reward function {self.name} returned None for {samples}: None counts as 0")

    def _explain(
        self, error: BaseException, arguments: dict[str, list[Any]], ids: Sequence[int], prompts: list[Any]
    ) -> UserError:
        """Return the error for the user. If the function fails on one sample alone, the error names it."""
        which = f"samples {ids[0]} to {ids[-1]}"
        deadline = time.monotonic() + max(_SEARCH_SECONDS, 2 * (self.limits.timeout_seconds or 0.0))
        for i, sample_id in enumerate(ids):
            if time.monotonic() > deadline:
                break
            try:
                self._limited(**_sample(arguments, i))
            except (Exception, SystemExit) as alone:
                error = alone
                which = f"sample {sample_id} with the prompt {_short(prompts[i])}"
                break
        return UserError(f"reward function {self.name} raised {described(error)} on {which}")


def _sample(arguments: dict[str, list[Any]], i: int) -> dict[str, list[Any]]:
    """Return the arguments of a call with sample i alone."""
    return {name: values[i : i + 1] for name, values in arguments.items()}


def _short(prompt: Any) -> str:
    text = repr(prompt)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _is_finite(score: Any) -> bool:
    if isinstance(score, str | bytes):
        return False
    try:
        return math.isfinite(float(score))
    except (TypeError, ValueError, OverflowError):
        return False
