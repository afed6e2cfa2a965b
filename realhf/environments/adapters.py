"""Environments of other libraries, as ours. Each is made with what the library's user has, and imports the
library when it is used, so that none is needed for the others.

    Environment(partial(TextArena, "GuessTheNumber-v0"), max_turns=10)

`TRLEnvironment` takes classes written for TRL, `TextArena` and `ReasoningGymTask` games and tasks by name,
`GymnasiumText` environments that can be drawn as text, `OpenEnvironment` classes of OpenEnv, `SkyRLGym` those
of SkyRL-Gym, and `MessageEnvironment` those of tinker-cookbook and torchtitan. Give them by
`functools.partial`, so that their libraries are imported once, before workers are forked.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from realhf.environments.protocol import ChatMessage, Start, Turn, prompt_messages
from realhf.environments.tool_calls import call_tools, schema_library
from realhf.errors import UserError, shown

_HIGHLIGHT = re.compile(r"\x1b\[4\dm(.)\x1b\[0m")
"""A character with a background colour, such as the place of the player."""
_COLOUR = re.compile(r"\x1b\[[\d;]*m")


def _library(name: str, package: str | None = None) -> Any:
    """Import a library. Raises UserError if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = package or name
        raise UserError(f"this environment needs the package {package}: pip install {package}") from error


def _columns_of(row: Mapping[str, Any], columns: Sequence[str]) -> dict[str, Any]:
    """Return the settings of an environment that its row has. Raises UserError if one is missing."""
    for name in columns:
        if name not in row:
            raise UserError(f"the row has no {name!r}, which is in `columns`: it has {', '.join(row)}")
    return {name: row[name] for name in columns}


class TRLEnvironment:
    """An environment class as TRL's trainers take it.

    `reset(**row)` begins, other public methods are tools, and `get_reward()` is called at the end. The
    rollout is over with a message without a call. What `reset` returns is added to the last message of the
    prompt, as there. TRL passes no seed, so each has a process of its own, whose random numbers are seeded.
    """

    isolated = True

    def __init__(self, make: Callable[[], Any]) -> None:
        self._environment = make()
        if not callable(getattr(self._environment, "reset", None)):
            raise UserError(f"{type(self._environment).__name__} has no method reset, which TRL's must have")
        members = inspect.getmembers(type(self._environment), inspect.isfunction)
        self._tools = {
            name: getattr(self._environment, name) for name, _ in members
            if not name.startswith("_") and name not in ("reset", "get_reward")}

    @staticmethod
    def prepare() -> None:
        """Import what makes schemas before workers are forked."""
        schema_library()

    def start(self, row: Mapping[str, Any], seed: int) -> Start:
        observation = self._environment.reset(**row)
        messages = [dict(message) for message in prompt_messages(row)] if row.get("prompt") else []
        if observation is None:
            return Start(messages or None, list(self._tools.values()))
        if not messages:
            messages = [{"role": "user", "content": ""}]
        messages[-1]["content"] = f"{messages[-1]['content']}{observation}"
        return Start(messages, list(self._tools.values()))

    def step(self, message: ChatMessage) -> Turn | Awaitable[Turn]:
        return call_tools(message, self._tools) if message.get("tool_calls") else self.finish("done")

    def finish(self, stop: str) -> Turn | Awaitable[Turn]:
        """Return the reward, also if the rollout has been stopped."""
        get_reward = getattr(self._environment, "get_reward", None)
        reward: Any = 0.0 if get_reward is None else get_reward()

        async def awaited() -> Turn:
            return Turn(reward=await reward, done=True)

        return awaited() if inspect.isawaitable(reward) else Turn(reward=reward, done=True)


class TextArena:
    """A game of textarena in which the model is player 0.

    `opponent` makes the moves of other players from what they observe. `columns` are settings that each row
    has. The games draw from the process's random numbers, so each has a process of its own.
    """

    isolated = True

    def __init__(
        self, game: str, *, num_players: int = 1, opponent: Callable[[str], str] | None = None,
        columns: Sequence[str] = (), **settings: Any,
    ) -> None:
        self._name = game
        self._columns = columns
        self._settings = settings
        self._num_players = num_players
        self._opponent = opponent
        self._is_done = False

    @staticmethod
    def prepare() -> None:
        """Import the library before workers are forked: it takes seconds."""
        _library("textarena")

    def start(self, row: Mapping[str, Any], seed: int) -> Start:
        textarena = _library("textarena")
        # The raw game says what is new, where the wrapped one repeats all that has been said.
        raw = self._name if self._name.endswith("-raw") else f"{self._name}-raw"
        settings = self._settings | _columns_of(row, self._columns)
        try:
            self._game = textarena.make(raw, **settings)
        except ValueError as error:
            raise UserError(f"TextArena {self._name!r}: textarena has no such game") from error
        self._own_action = textarena.ObservationType.PLAYER_ACTION
        self._game.reset(num_players=self._num_players, seed=seed)
        self._let_others_move()
        return Start(self._observed())

    def step(self, message: ChatMessage) -> Turn:
        self._is_done, _ = self._game.step(action=message["content"])
        self._let_others_move()
        return self.finish("done") if self._is_done else Turn(self._observed() or "Your move.")

    def finish(self, stop: str) -> Turn:
        """Return the reward of the game, if it has ended."""
        rewards, _ = self._game.close() if self._is_done else (None, None)
        return Turn(self._observed() or (), float((rewards or {}).get(0, 0.0)), done=True)

    def _let_others_move(self) -> None:
        while not self._is_done and self._game.state.current_player_id != 0:
            if self._opponent is None:
                raise UserError("TextArena: this game has several players: give an `opponent`")
            self._is_done, _ = self._game.step(action=self._opponent(self._observed()))

    def _observed(self) -> str:
        """Return what the player whose turn it is has not read yet, without moves of its own."""
        player, observations = self._game.get_observation()
        return "\n".join(
            text for sender, text, kind in observations if sender != player or kind != self._own_action)


class GymnasiumText:
    """An environment of gymnasium that is drawn as text (`render_mode="ansi"`), with actions in words.

    `actions` are the names of the discrete actions in their order, such as ("left", "down", "right", "up"):
    the one that the model names last is taken; without names, the last number. `prompt` explains the task.
    An answer without an action gets `invalid_reply` and `invalid_reward`, and changes nothing else.
    `describe` makes the text from an observation, instead of drawing, in which [] stands for a background.
    `columns` are settings that each row has, such as ("desc",) for the map of a lake.
    """

    def __init__(
        self, name: str, *, prompt: str = "", actions: Sequence[str] = (), invalid_reward: float = 0.0,
        invalid_reply: str = "", describe: Callable[[Any], str] | None = None, columns: Sequence[str] = (),
        **settings: Any,
    ) -> None:
        self._name = name
        self._prompt = prompt
        self._actions = [action.lower() for action in actions]
        self._invalid_reward = invalid_reward
        self._invalid_reply = invalid_reply
        self._describe = describe
        self._columns = columns
        self._settings = settings if describe is not None else {"render_mode": "ansi"} | settings
        self._environment: Any = None

    @staticmethod
    def prepare() -> None:
        """Import the library before workers are forked."""
        _library("gymnasium")

    def start(self, row: Mapping[str, Any], seed: int) -> Start:
        gymnasium = _library("gymnasium")
        settings = self._settings | _columns_of(row, self._columns)
        self._environment = gymnasium.make(self._name, **settings)
        space = self._environment.action_space
        if not isinstance(space, gymnasium.spaces.Discrete):
            raise UserError(f"GymnasiumText {self._name!r} has actions of {space}: they must be Discrete")
        self._first = int(space.start)
        self._actions = self._actions or [str(self._first + i) for i in range(int(space.n))]
        if len(self._actions) != space.n:
            raise UserError(
                f"GymnasiumText {self._name!r} has {space.n} actions, and `actions` {len(self._actions)}")
        words = "|".join(sorted(map(re.escape, self._actions), key=len, reverse=True))
        self._pattern = re.compile(rf"(?<!\w)(?:{words})(?!\w)")
        observation, _ = self._environment.reset(seed=seed)
        self._environment.action_space.seed(seed)
        asked = self._prompt or f"Answer with one of: {', '.join(self._actions)}."
        return Start(f"{asked}\n\n{self._text(observation)}")

    def step(self, message: ChatMessage) -> Turn:
        found = self._pattern.findall(message["content"].lower())
        if not found:
            text = f"There is no action in this. Legal are {', '.join(self._actions)}."
            reply = self._invalid_reply or text
            return Turn(reply, self._invalid_reward, metrics={"invalid_action": 1.0})
        action = self._first + self._actions.index(found[-1])
        observation, reward, terminated, truncated, _ = self._environment.step(action)
        done = bool(terminated or truncated)
        return Turn(self._text(observation), float(reward), done, {"invalid_action": 0.0})

    def close(self) -> None:
        if self._environment is not None:
            self._environment.close()

    def _text(self, observation: Any) -> str:
        if self._describe is not None:
            return self._describe(observation)
        return _COLOUR.sub("", _HIGHLIGHT.sub(r"[\1]", str(self._environment.render())))


class ReasoningGymTask:
    """A task of reasoning-gym, made from the seed. Its scorer gives the reward.

    With several `tries`, a wrong answer gets another one; the last score counts. `columns` are settings that
    each row has, such as the number of terms.
    """

    def __init__(
        self, name: str, *, tries: int = 1, extract: str | None = None, columns: Sequence[str] = (),
        **settings: Any,
    ) -> None:
        self._library = _library("reasoning_gym", "reasoning-gym")
        self._name = name
        self._columns = columns
        self._settings = settings
        self._tries = tries
        self._pattern = None if extract is None else re.compile(extract, re.DOTALL)

    @staticmethod
    def prepare() -> None:
        """Import the library before workers are forked."""
        _library("reasoning_gym", "reasoning-gym")

    def start(self, row: Mapping[str, Any], seed: int) -> Start:
        settings = self._settings | _columns_of(row, self._columns)
        self._tasks = self._library.create_dataset(self._name, size=1, seed=seed, **settings)
        self._task = self._tasks[0]
        return Start(self._task["question"])

    def step(self, message: ChatMessage) -> Turn:
        answer = message["content"]
        if self._pattern is not None:
            answer = (self._pattern.findall(answer) or [None])[-1]
        score = float(self._tasks.score_answer(answer=answer, entry=self._task))
        self._tries -= 1
        if score < 1.0 and self._tries > 0:
            return Turn("That is not right. Try again.")
        return Turn(reward=score, done=True)


class OpenEnvironment:
    """An `Environment` of OpenEnv in the worker itself, without a server.

    `action` makes an action from the assistant's message: a function, or an Action class with one field of
    text. `describe` makes the text from an observation; None: its fields as JSON, or the only one as it is.
    """

    def __init__(
        self, make: Callable[[], Any], action: Callable[..., Any], *, prompt: str = "",
        describe: Callable[[Any], str] | None = None,
    ) -> None:
        self._environment = make()
        self._action = action
        self._prompt = prompt
        self._describe = describe or _fields_as_text
        fields = getattr(action, "model_fields", None)
        self._field = None
        if fields is not None:
            names = [name for name in fields if name != "metadata"]
            if len(names) != 1:
                raise UserError(
                    f"OpenEnvironment: {getattr(action, '__name__', shown(action))} has the fields {names}: "
                    "give `action` a function that makes one from a message")
            self._field = names[0]

    def start(self, row: Mapping[str, Any], seed: int) -> Start:
        observation = self._environment.reset(seed=seed)
        text = self._describe(observation)
        if self._prompt or not row.get("prompt"):
            return Start(f"{self._prompt}\n\n{text}" if self._prompt else text)
        return Start([*prompt_messages(row), {"role": "user", "content": text}] if text else None)

    def step(self, message: ChatMessage) -> Turn:
        taken = {} if self._field is None else {self._field: message["content"]}
        action = self._action(**taken) if taken else self._action(message)
        observation = self._environment.step(action)
        return Turn(self._describe(observation), float(observation.reward or 0.0), bool(observation.done))

    def close(self) -> None:
        self._environment.close()


def _fields_as_text(observation: Any) -> str:
    fields = observation.model_dump(mode="json", exclude={"done", "reward", "metadata"})
    if len(fields) == 1 and isinstance(value := next(iter(fields.values())), str):
        return value
    return json.dumps(fields) if fields else ""


class SkyRLGym:
    """An environment of SkyRL-Gym: `make(row)` returns one, such as `skyrl_gym.make("gsm8k", extras=row)`."""

    def __init__(self, make: Callable[[Mapping[str, Any]], Any]) -> None:
        self._make = make

    def start(self, row: Mapping[str, Any], seed: int) -> Start:
        self._environment = self._make(row)
        messages, _ = self._environment.init(prompt_messages(row))
        return Start(messages)

    def step(self, message: ChatMessage) -> Turn:
        made = self._environment.step(message["content"])
        metadata = made.get("metadata") or {}
        metrics = {k: float(v) for k, v in metadata.items() if isinstance(v, int | float)}
        return Turn(made["observations"], float(made["reward"]), bool(made["done"]), metrics)

    def close(self) -> None:
        self._environment.close()


class MessageEnvironment:
    """An environment of messages (MessageEnv) of tinker-cookbook or torchtitan: `make(row)` returns one.

    Those of torchtitan have `init`, and their steps return new messages. Those of tinker-cookbook have
    `initial_observation`, and their steps return the whole conversation, which must go on from what it was.
    """

    def __init__(self, make: Callable[[Mapping[str, Any]], Any]) -> None:
        self._make = make
        self._said: list[ChatMessage] = []

    async def start(self, row: Mapping[str, Any], seed: int) -> Start:
        self._environment = self._make(row)
        if hasattr(self._environment, "init"):
            begun = await self._environment.init()
            return Start(_plain(begun.init_prompt_messages), list(begun.tools))
        self._said = _plain(await self._environment.initial_observation())
        return Start(self._said)

    async def step(self, message: ChatMessage) -> Turn:
        made = await self._environment.step(message)
        if hasattr(made, "env_messages"):
            return Turn(_plain(made.env_messages), dict(made.env_rewards), bool(made.done))
        metrics = {name: float(value) for name, value in made.metrics.items()}
        done = bool(made.episode_done)
        return Turn([] if done else self._new(_plain(made.next_messages)), float(made.reward), done, metrics)

    def _new(self, messages: list[ChatMessage]) -> list[ChatMessage]:
        """Return what follows the assistant's message in a conversation."""
        known = len(self._said)
        is_assistants = len(messages) > known and messages[known]["role"] == "assistant"
        if messages[:known] != self._said or not is_assistants:
            raise UserError(
                f"{type(self._environment).__name__}.step must return the earlier messages as the model has "
                "read them, then the assistant's message, then new ones")
        self._said = messages
        return messages[known + 1 :]


def _plain(messages: Sequence[Mapping[str, Any]]) -> list[ChatMessage]:
    return [dict(message) for message in messages]
