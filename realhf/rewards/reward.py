"""Reward: a reward function with its weight and its name. Also finds the columns that functions read."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from types import CodeType, FunctionType
from typing import Any, Literal

from realhf.data.dataset import COLUMN, LOADER_KEYS
from realhf.errors import UserError
from realhf.user_input.field_types import check_types, require

RewardFunction = Callable[..., Any]
"""A function of (prompts, completions, completion_ids, **columns) that returns a list of numbers, as in TRL.
It may be `async`. None in the list means that the reward does not apply to the sample.

An object may name the columns that it reads in `column_names`, instead of as parameters. It may also have a
method `answer_of(completion)`, which returns the answer in a text, or None; a majority vote counts these."""
STANDARD = ("prompts", "completions", "completion_ids")
EXTRAS = ("log_metric", "log_extra", "trainer_state")
"""Arguments that a function gets if it names them, as in TRL."""
_NOT_EXTRA = ("prompt", "completion")
"""Columns that **columns do not receive, as in TRL: they would repeat the standard ones."""
_TAKEN = (*LOADER_KEYS, "completion", "score", "gen_logprobs", "ref_logprobs", "finished", "advantages",
          "values", "returns", "versions", "prox_logprobs", "prompt_tokens", "token_returns", "greedy_ids",
          "greedy_mask", "greedy_logprobs", "greedy_finished", "greedy_score", "held_out_ids",
          "held_out_mask", "logprobs", "scores", "teacher_weights", "reward_scores", "reward_extra",
          "reward_metrics", "rollout", "prox_entropy", "kl", "kl_ids", "kl_mask", "actor_kl_logprobs",
          "ref_kl_logprobs")
"""Keys that the outputs of calls use; columns of a dataset with these names get other keys."""
_OF_MODELS = "reward_"
"""How keys of reward models begin, which have their names."""
_METRICS = ("mean", "std", "failed", "kl", "kl_coef", "shaped_mean", "token_return", "zero_std_groups",
            "left_out")
"""Metrics `reward/...` of all rewards together: a single reward must not have one of these names."""
_MAX_TEXTS = 1000
"""Most texts of a collection that may be looked for."""
_FORM = "its form is f(prompts, completions, completion_ids, **columns)"


@dataclass(frozen=True)
class Reward:
    """A reward function, its weight in the score, and how it is called."""

    function: RewardFunction
    weight: float = 1.0
    """The score of a sample is the sum of weight times value, over the rewards that apply to the sample."""
    name: str | None = None  # The reward is logged as `reward/<name>/mean`; None: the function's name.
    concurrency: int | None = None
    """How many calls run at once, each with one sample; None: one call with all samples of a rank. Calls of
    plain functions run in threads, those of `async` functions in one event loop."""
    timeout_seconds: float | None = None  # Longest time of a call; None: that of `reward_limits`.
    on_failure: Literal["stop", "drop", "skip"] | None = None
    """What happens if the function fails on a sample; None: what `reward_limits` says. With `skip`, the
    reward does not apply to the sample, and the metric `reward/<name>/failed` is the share of such
    samples."""

    def __post_init__(self) -> None:
        if isinstance(self.function, Reward):
            raise ValueError("Reward.function is a Reward: give the function itself")
        check_types(self, "Reward.")
        finite = abs(self.weight) < float("inf")
        require(finite, "Reward.weight", self.weight, "be a finite number")
        many = self.concurrency is None or self.concurrency >= 1
        require(many, "Reward.concurrency", self.concurrency, "be at least 1, or None")
        above = self.timeout_seconds is None or self.timeout_seconds > 0
        require(above, "Reward.timeout_seconds", self.timeout_seconds, "be above 0, or None")

    @property
    def label(self) -> str:
        """The name under which the reward is logged."""
        return self.name or str(getattr(self.function, "__name__", type(self.function).__name__))


RewardFunctions = RewardFunction | Reward | Sequence[RewardFunction | Reward]
"""One reward function or several, each with its weight and name, or without."""


def rewards_of(functions: RewardFunctions) -> tuple[Reward, ...]:
    """Return the value of a field `reward_function` as rewards. Raises UserError if it is none."""
    listed: list[Any] = list(functions) if isinstance(functions, list | tuple) else [functions]
    if not listed:
        raise UserError("reward_function is empty: give at least one function")
    rewards = tuple(item if isinstance(item, Reward) else Reward(item) for item in listed)
    for reward in rewards:
        parameters_of(reward.function)
    require_labels([reward.label for reward in rewards])
    return rewards


def require_labels(labels: Sequence[str]) -> None:
    """Raise UserError unless the names of all rewards differ from each other and from those of metrics."""
    for label, count in Counter(labels).items():
        if count > 1:
            raise UserError(
                f"{count} reward functions are named {label!r}: give them names by Reward(f, name=...)")
        if label in _METRICS:
            raise UserError(
                f"a reward function is named {label!r}: metrics reward/{label} are those of all rewards "
                "together; use Reward(f, name=...)")


def answers_by(functions: RewardFunctions) -> Callable[[str], Any] | None:
    """Return the method `answer_of` of the first reward function that has one; None if there is none."""
    methods = [getattr(reward.function, "answer_of", None) for reward in rewards_of(functions)]
    return next((method for method in methods if method is not None), None)


def reward_columns(functions: RewardFunctions, available: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the columns to pass to reward functions.

    A parameter without a default always gets its column. Parameters with a default, and **columns, get those
    of the `available` columns. Raises UserError if one is not a reward function.
    """
    rewards = rewards_of(functions)
    return tuple(dict.fromkeys(name for reward in rewards for name in columns_of(reward.function, available)))


def columns_of(function: RewardFunction, available: Sequence[str]) -> tuple[str, ...]:
    """Return the columns to pass to one reward function; see `reward_columns`."""
    parameters = parameters_of(function)
    if (declared := getattr(function, "column_names", None)) is not None:
        return tuple(declared)
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    columns = [name for name, p in named.items() if p.default is p.empty or name in available]
    if takes_any(parameters):
        columns += [name for name in available if name not in named and name not in _NOT_EXTRA]
    return tuple(name for name in columns if name not in (*STANDARD, *EXTRAS))


def column_key(column: str) -> str:
    """Return the key of a graph under which a reward function's call reads a column of the dataset."""
    is_taken = column in _TAKEN or column.startswith(_OF_MODELS)
    return COLUMN + column if is_taken else column


def parameters_of(function: RewardFunction) -> list[inspect.Parameter]:
    """Return the parameters of a reward function. Raises UserError if it is none."""
    if not callable(function):
        raise UserError(f"reward_function is {function!r}: it must be a function, a Reward or a list of them")
    name = name_of(function)
    if isinstance(function, type):
        raise UserError(f"reward function {name} is a class: give an object of it, {name}(...)")
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError as error:
        raise UserError(f"reward function {name} does not tell its parameters: {_FORM}") from error
    if positional := [p.name for p in parameters if p.kind == p.POSITIONAL_ONLY]:
        raise UserError(
            f"reward function {name}: {positional[0]} is positional only, and all are passed by name")
    if not takes_any(parameters) and not {"completions", "completion_ids"} & {p.name for p in parameters}:
        raise UserError(f"reward function {name} has no parameter `completions` or `completion_ids`: {_FORM}")
    return parameters


def texts_in(function: RewardFunction) -> list[str]:
    """Return the texts that a reward function may look for.

    They are the constants of its code and of the functions in it, the texts and regular expressions among
    its fields and the globals that it names, and what it lists as `looks_for`.
    """
    inner = _without_partial(function)
    sources: list[Any] = []
    if is_dataclass(inner):
        sources += [getattr(inner, field.name) for field in fields(inner)]
        sources += getattr(inner, "looks_for", ())
    if (called := _own_function(function)) is not None:
        for code in _codes(called):
            sources += [constant for constant in code.co_consts if constant != called.__doc__]
            sources += [called.__globals__.get(name) for name in code.co_names]
    return [text for value in sources for text in _texts(value)]


def calls_hash(function: RewardFunction) -> bool:
    """Return whether a reward function calls Python's `hash`, itself or in functions of its file."""
    called = _own_function(function)
    seen: list[FunctionType] = [] if called is None else [called]
    for each in seen:
        names = {name for code in _codes(each) for name in code.co_names}
        if "hash" in names and "hash" not in each.__globals__:
            return True
        known = [each.__globals__.get(name) for name in names]
        others = [value for value in known if isinstance(value, FunctionType) and value not in seen]
        seen += [value for value in others if value.__globals__ is each.__globals__]
    return False


def looked_up(function: RewardFunction) -> list[str]:
    """Return the names that a reward function looks up in its **columns, as in `columns.get("level")`."""
    called = _own_function(function)
    try:
        source = "" if called is None else textwrap.dedent(inspect.getsource(called))
        tree = ast.parse(source)
    except (OSError, SyntaxError):  # Such as a lambda within a longer line.
        return []
    first = tree.body[0] if tree.body else None
    if not isinstance(first, ast.FunctionDef | ast.AsyncFunctionDef) or first.args.kwarg is None:
        return []
    gets = [ast.unparse(node) for node in ast.walk(first) if isinstance(node, ast.Call)]
    form = re.compile(rf"{first.args.kwarg.arg}\.(?:get|pop)\('([^'\\]+)'.*\)", re.DOTALL)
    return [match[1] for text in gets if (match := form.fullmatch(text)) is not None]


def _without_partial(function: RewardFunction) -> RewardFunction:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _own_function(function: RewardFunction) -> FunctionType | None:
    """Return the Python function that a user's reward calls; None for shipped rewards."""
    inner = _without_partial(function)
    called: Any = inner if inspect.isroutine(inner) else type(inner).__call__
    called = getattr(called, "__func__", called)
    is_shipped = type(inner).__module__.partition(".")[0] == __name__.partition(".")[0]
    return called if isinstance(called, FunctionType) and not is_shipped else None


def _codes(called: FunctionType) -> list[CodeType]:
    """Return the code of a function and of all functions in it."""
    codes = [called.__code__]
    for code in codes:
        codes += [constant for constant in code.co_consts if inspect.iscode(constant)]
    return codes


def _texts(value: Any) -> list[str]:
    """Return a text, the pattern of a regular expression, or those of a short collection."""
    if isinstance(value, tuple | list | set | frozenset):
        return [text for part in list(value)[:_MAX_TEXTS] for text in _texts(part)]
    text = getattr(value, "pattern", value)
    return [text] if isinstance(text, str) else []


def takes_any(parameters: Sequence[inspect.Parameter]) -> bool:
    """Return whether a function with these parameters has one like `**columns`."""
    return any(p.kind == p.VAR_KEYWORD for p in parameters)


def name_of(function: RewardFunction) -> str:
    return getattr(function, "__qualname__", type(function).__name__)
