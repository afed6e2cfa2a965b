"""RewardCall: runs a reward function over a batch and refuses what is not one finite number per sample."""

from __future__ import annotations

import inspect
import math
import time
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from realhf.errors import UserError

if TYPE_CHECKING:
    from realhf.data.batch import Batch

RewardFunction = Callable[..., list[float]]  # of (prompts, completions, completion_ids, **columns), as in TRL
_SEARCH_SECONDS = 5.0  # for the one sample on which a failing function fails
_STANDARD = ("self", "prompts", "completions", "completion_ids")


def reward_columns(function: RewardFunction, available: Sequence[str] = ()) -> tuple[str, ...]:
    """The columns to pass: those named; of those with a default, and for **columns, the available ones."""
    if not callable(function):
        raise UserError(f"reward_function is {function!r}: it must be a function")
    parameters = inspect.signature(function).parameters.values()
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    columns = [name for name, p in named.items() if p.default is p.empty or name in available]
    if any(p.kind == p.VAR_KEYWORD for p in parameters):
        columns += [name for name in available if name not in named]
    return tuple(name for name in columns if name not in _STANDARD)


class RewardCall:
    """A host function: decodes responses, calls the reward function, writes `score` and `completion`."""

    def __init__(self, function: RewardFunction, columns: Sequence[str]) -> None:
        self.function, self.columns = function, tuple(columns)
        self.name = getattr(function, "__qualname__", type(function).__name__)

    def __call__(self, batch: Batch, context: Any) -> dict[str, Any]:
        pairs = zip(batch["sequence_ids"].split(), batch["response_mask"].split(), strict=True)
        completion_ids = [tokens[chosen.bool()].tolist() for tokens, chosen in pairs]
        completions = [context.tokenizer.decode(ids, skip_special_tokens=True) for ids in completion_ids]
        columns = {"prompts": batch["prompt"], "completions": completions, "completion_ids": completion_ids}
        columns |= {name: batch[name] for name in self.columns}
        scores = self._scores(columns, batch) if batch.ids else []
        return {"score": batch["response_mask"].values.new_tensor(scores), "completion": completions}

    def _scores(self, columns: dict[str, list], batch: Batch) -> list[float]:
        try:
            scores = self.function(**columns)
        except Exception as error:
            raise self._explain(error, columns, batch) from error
        got = f"{len(scores)} values" if hasattr(scores, "__len__") else type(scores).__name__
        if got != f"{len(batch)} values":
            got = f"{got} for {len(batch)} samples ({batch.ids[0]} to {batch.ids[-1]})"
            rule = "it must return a list with one number per completion"
            raise UserError(f"reward function {self.name} returned {got}: {rule}")
        for score, sample_id, prompt in zip(scores, batch.ids, batch["prompt"], strict=True):
            if not _is_finite(score):
                got = f"{score!r} for sample {sample_id} with the prompt {prompt!r}"
                raise UserError(f"reward function {self.name} returned {got}: it must be a finite number")
        return [float(score) for score in scores]

    def _explain(self, error: Exception, columns: dict[str, list], batch: Batch) -> UserError:
        """Names the sample that the function fails on alone, if there is one."""
        which, deadline = f"samples {batch.ids[0]} to {batch.ids[-1]}", time.monotonic() + _SEARCH_SECONDS
        for i, sample_id in enumerate(batch.ids):
            if time.monotonic() > deadline:
                break
            try:
                self.function(**{name: values[i : i + 1] for name, values in columns.items()})
            except Exception as alone:
                error, which = alone, f"sample {sample_id} with the prompt {batch['prompt'][i]!r}"
                break
        where = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"
        return UserError(f"reward function {self.name} raised {what} on {which}")


def _is_finite(score: Any) -> bool:
    try:
        return math.isfinite(float(score))
    except (TypeError, ValueError):
        return False
