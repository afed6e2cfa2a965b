"""Environments: what a user writes, and how what it returns is checked. Imports no torch.

An environment answers the messages of the model. It is an object of a class of the user, one for each sample:

    class GuessNumber:
        def start(self, row, seed):       # returns Start; without it, the row's prompt alone is the start
            ...
        def step(self, message):          # takes the assistant's message, returns Turn
            ...
        def finish(self, stop):           # optional: the rollout is stopped before it is done, such as for
            ...                           # max_turns; returns a Turn, whose reward counts for the last turn
        def close(self):                  # optional
            ...

Each method may be `async`. Environments see messages and never tokens. An environment whose steps cost much
may have `state()`, which returns what JSON can hold, and `restore(state)`, which is called after `start`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal, get_args

from realhf.data.memory_rows import json_form
from realhf.errors import UserError, shown
from realhf.user_input.field_types import check_types, require

ChatMessage = dict[str, Any]
"""A chat message: `role`, `content`, and for some `tool_calls`, `name` or `tool_call_id`."""
Rewards = float | dict[str, float]
"""A reward, or several by name, whose sum counts."""
StopReason = Literal[
    "done", "max_turns", "max_tokens", "context_full", "parse_error", "step_timeout", "step_error",
    "worker_lost", "replay_differs"]
"""Why a rollout has ended. No other reason exists."""
STOP_REASONS: tuple[StopReason, ...] = get_args(StopReason)
FAILURES: tuple[StopReason, ...] = (
    "step_timeout", "step_error", "worker_lost", "replay_differs")
"""The reasons for which `Environment.on_failure` says what happens to the rollout."""
MAX_REPLY_BYTES = 1 << 20
"""Most bytes of what an environment returns at once, as JSON."""
_ASKING = ("system", "developer", "user", "tool")
"""Roles of the messages that an environment may write."""
_ROLES = (*_ASKING, "assistant")
_SEED_BITS = 32
"""Seeds fit into numpy's older generators, too."""
_ODD = 2654435761
"""Multiplication by an odd number maps the numbers of samples to different seeds."""


@dataclass(frozen=True)
class Start:
    """The beginning of a rollout: the messages that the model answers first, and the tools that it may call.

    `messages` is a list of messages, a single one, or the text of a user's message; None: the prompt of the
    row. The tools are JSON schemas, or functions, whose schemas follow from signature and docstring.
    """

    messages: Sequence[ChatMessage] | ChatMessage | str | None = None
    tools: Sequence[Any] = ()


@dataclass(frozen=True)
class Turn:
    """The answer of an environment to a message of the model.

    `messages` has the same forms as in Start, and may be empty if the rollout is `done`. `metrics` are
    numbers by name, whose means are logged.
    """

    messages: Sequence[ChatMessage] | ChatMessage | str = ()
    reward: Rewards = 0.0
    done: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def rewards(self) -> dict[str, float]:
        """Return the rewards by name. One without a name is called `environment`."""
        return self.reward if isinstance(self.reward, dict) else {"environment": self.reward}

    @property
    def total(self) -> float:
        """Return the sum of the rewards."""
        return sum(self.rewards.values())


@dataclass(frozen=True)
class Environment:
    """The setting of an experiment whose prompts are answered in several turns with an environment.

    Give `make`, a class or a function without arguments that returns an object (see the module), or `tools`,
    functions that the model may call until it answers without a call.
    """

    make: Callable[[], Any] | None = None
    tools: tuple[Callable[..., Any], ...] = ()
    max_turns: int = 16  # Most messages of the model in a rollout.
    max_tokens: int | None = None
    """Most tokens of a rollout after its start, those of the environment included; None: the model's context
    and `sampling.max_new_tokens` for each turn are the only limits."""
    credit: Literal["trajectory", "to_go", "per_turn"] = "trajectory"
    """Which rewards count for a turn: `trajectory`, all of the rollout; `to_go`, those from the turn on;
    `per_turn`, those from the turn on, compared with what others of the group got from the same turn on."""
    discount: float = 1.0  # By which the reward of each later turn counts less, above 0 and at most 1.
    own_start: bool = False
    """Whether every sample of a group starts with a seed of its own, instead of one for the group."""
    on_failure: Literal["drop", "zero", "stop"] = "drop"
    """If an environment raises, takes too long or is lost: `drop` leaves the rollout out, `zero` gives it the
    rewards so far, `stop` ends the run with a sentence."""
    on_parse_error: Literal["reply", "end"] = "reply"
    """If the model calls a tool in a wrong way: `reply` tells it what is wrong, which takes a turn; `end`
    ends the rollout."""
    ends_at_call: bool = False
    """Whether a turn ends with its first complete tool call, so that nothing made up can follow it; there are
    no parallel calls then. The chat template must write a tag after each call, such as `</tool_call>`."""
    keep_thinking: bool = False
    """Whether the model goes on to see its earlier thinking where the chat template would leave it out. If
    not, such a template is refused, as the model would be trained on other texts than it is used with."""
    workers: int | None = None
    """Processes with environments, for each replica that generates; None: 2, or with `isolated` one for each
    environment. With `isolated`, rollouts wait until one of so many is free."""
    isolated: bool | None = None
    """Whether each environment has a process of its own, in which Python's and numpy's global random numbers
    begin with its seed. Otherwise those of a worker share it: `async` ones an event loop, others have a
    thread each. None: as the class says by an attribute `isolated`, else False."""
    start_seconds: float = 60.0  # Longest time until an object is made and has returned its start.
    step_seconds: float = 60.0  # Longest time of a step, and of closing.
    memory_gib: float = 4.0  # Most GiB of memory of each worker.

    def __post_init__(self) -> None:
        object.__setattr__(self, "tools", tuple(self.tools))
        check_types(self, "environment.")
        if callable(self.make) == bool(self.tools):
            given = f"{shown(self.make)} and {len(self.tools)} tools"
            rule = "be a class or a function, or None with tools: give one or the other"
            require(False, "environment.make", given, rule)
        if self.isolated is None:
            made = getattr(self.make, "func", self.make)  # Of functools.partial.
            object.__setattr__(self, "isolated", getattr(made, "isolated", False) is True)
        for tool in self.tools:
            require(callable(tool), "environment.tools", shown(tool), "have functions")
        require(self.max_turns >= 1, "environment.max_turns", self.max_turns, "be at least 1")
        for name in ("max_tokens", "workers"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"environment.{name}", value, "be at least 1, or None")
        for name in ("start_seconds", "step_seconds", "memory_gib"):
            value = getattr(self, name)
            require(0 < value < math.inf, f"environment.{name}", value, "be above 0")
        legal = 0 < self.discount <= 1
        require(legal, "environment.discount", self.discount, "be above 0 and at most 1")
        legal = self.discount == 1 or self.credit != "trajectory"
        rule = "be 1 with environment.credit 'trajectory', which counts whole rollouts"
        require(legal, "environment.discount", self.discount, rule)


def rollout_seed(run_seed: int, *, step: int, prompt: int, sample: int, own_start: bool = False) -> int:
    """Return the seed of a rollout: of the sample with this number in the group of a prompt at a step.

    All samples of a group have the same one; with `own_start`, no two of them do.
    """
    digest = hashlib.blake2b(json.dumps([run_seed, step, prompt]).encode(), digest_size=8).digest()
    own = _ODD * (sample + 1) if own_start else 0
    return (int.from_bytes(digest) + own) % (1 << _SEED_BITS)


def prompt_messages(row: Mapping[str, Any], prompt_key: str = "prompt") -> list[ChatMessage]:
    """Return the messages of a row's prompt; a text is the message of a user."""
    prompt = row.get(prompt_key)
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if isinstance(prompt, list) and prompt:
        return list(prompt)
    raise UserError(
        f"the row has no {prompt_key!r}, and the environment's start has no messages: one of them must have "
        "what the model answers first")


def checked_start(value: Any, row: Mapping[str, Any], where: str, *, prompt_key: str = "prompt") -> Start:
    """Return a start whose messages and tools are lists in JSON's types. Raises UserError.

    `where` names the class and the method.
    """
    if value is None:
        value = Start()
    if not isinstance(value, Start):
        raise UserError(
            f"{where} returned {_kind(value)}: it must be Start(...), or None for the row's prompt")
    if value.messages is None:
        messages = prompt_messages(row, prompt_key)
    else:
        messages = _messages(value.messages, f"{where} returned Start.messages with", _ROLES)
    if not messages:
        raise UserError(f"{where} returned Start.messages without any: there must be one that is answered")
    if messages[-1]["role"] == "assistant":
        raise UserError(
            f"{where} returned Start.messages whose last one is the assistant's: the model writes what "
            "follows, so the last role must be user, tool or system")
    if not isinstance(value.tools, Sequence) or isinstance(value.tools, str | bytes):
        raise UserError(
            f"{where} returned Start.tools {shown(value.tools)}: it must be a list of functions or schemas")
    for tool in value.tools:
        is_schema = isinstance(tool, dict) and isinstance(tool.get("function"), dict)
        if not callable(tool) and not (is_schema and isinstance(tool["function"].get("name"), str)):
            raise UserError(
                f"{where} returned Start.tools with {shown(tool)}: a tool must be a function, or a schema "
                '{"type": "function", "function": {"name": ..., "parameters": ...}}')
    return Start(messages, list(value.tools))


def checked_turn(value: Any, where: str) -> Turn:
    """Return a turn with a list of messages and with numbers, in JSON's types. Raises UserError.

    `where` names the class and the method.
    """
    if not isinstance(value, Turn):
        raise UserError(f"{where} returned {_kind(value)}: it must be Turn(messages, reward, done)")
    done = value.done
    if type(done).__name__ in ("bool_", "bool"):  # numpy has a type of its own.
        done = bool(done)
    else:
        raise UserError(f"{where} returned Turn.done {shown(done)}: it must be True or False")
    messages = _messages(value.messages, f"{where} returned Turn.messages with", _ASKING)
    if not messages and not done:
        raise UserError(
            f"{where} returned Turn.messages without any, and done is False: there must be a message "
            "that the model answers, or done must be True")
    if isinstance(value.reward, Mapping):
        reward: Rewards = _numbers(value.reward, f"{where} returned Turn.reward")
    else:
        rule = "a finite number, or a dict of them by name"
        reward = _number(value.reward, f"{where} returned Turn.reward", rule)
    if not isinstance(value.metrics, Mapping):
        raise UserError(f"{where} returned Turn.metrics {shown(value.metrics)}: it must be a dict")
    return Turn(messages, reward, done, _numbers(value.metrics, f"{where} returned Turn.metrics"))


def _messages(value: Any, what: str, roles: Sequence[str]) -> list[ChatMessage]:
    """Return messages as a list, each with a legal role and with contents that JSON can hold."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    elif isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list | tuple):
        raise UserError(f"{what} {shown(value)}: it must be text, a message or a list of messages")
    made = []
    for message in value:
        if not isinstance(message, Mapping):
            rule = 'a message must be like {"role": "user", "content": "..."}'
            raise UserError(f"{what} {shown(message)}: {rule}")
        role = message.get("role")
        if role == "assistant" and role not in roles:
            raise UserError(
                f"{what} a message of the assistant: only the model writes these, so the role must be "
                f"{', '.join(roles[1:-1])} or {roles[-1]}")
        if role not in roles:
            raise UserError(f"{what} the role {shown(role)}: legal are {', '.join(roles)}")
        try:
            message = json_form(message)
            json.dumps(message, allow_nan=False)
        except (TypeError, ValueError) as error:
            rule = "messages must have text, numbers, lists and dicts"
            raise UserError(f"{what} what is not JSON ({error}): {rule}") from error
        content = message.get("content")
        if not isinstance(content, str | list) and not (role == "assistant" and message.get("tool_calls")):
            raise UserError(f"{what} the content {shown(content)}: it must be text, or a list of parts")
        made.append(message)
    return made


def _numbers(values: Mapping[Any, Any], what: str) -> dict[str, float]:
    """Return finite numbers by name."""
    for name in values:
        if not isinstance(name, str):
            raise UserError(f"{what} with the name {shown(name)}: names must be text")
    return {name: _number(value, f"{what}[{name!r}]", "a finite number") for name, value in values.items()}


def _number(value: Any, what: str, rule: str) -> float:
    if hasattr(value, "item") and getattr(value, "size", 1) == 1:  # numpy's and torch's numbers.
        value = value.item()
    if not isinstance(value, Real) or not math.isfinite(value):
        raise UserError(f"{what} {shown(value)}: it must be {rule}")
    return float(value)


def _kind(value: Any) -> str:
    return "None" if value is None else f"{type(value).__name__} {shown(value)}"
