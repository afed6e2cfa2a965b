"""Environments of other libraries: what ours answer is what the library's own objects do."""

import asyncio
import inspect
import random
import re
from functools import partial
from types import SimpleNamespace

import pytest

from realhf.environments.adapters import (
    GymnasiumText,
    MessageEnvironment,
    OpenEnvironment,
    ReasoningGymTask,
    SkyRLGym,
    TextArena,
    TRLEnvironment,
)
from realhf.environments.protocol import Environment, checked_start, checked_turn
from realhf.environments.workers import EnvironmentSource, EnvironmentWorkers
from realhf.errors import UserError

ROW = {"prompt": [{"role": "user", "content": "Begin."}]}


def says(text, *calls):
    message = {"role": "assistant", "content": text}
    functions = [{"name": name, "arguments": arguments} for name, arguments in calls]
    called = [{"id": f"call0000{i}", "type": "function", "function": f} for i, f in enumerate(functions)]
    return message | ({"tool_calls": called} if calls else {})


def play(environment, *answers, row=ROW, seed=3):
    """Return the start and the turns, as a worker would pass them on."""

    def now(value):
        async def waits():
            return await value

        return asyncio.run(waits()) if inspect.isawaitable(value) else value

    start = checked_start(now(environment.start(row, seed)), row, "start")
    return start, [checked_turn(now(environment.step(answer)), "step") for answer in answers]


def test_textarena_says_what_is_new_and_gives_its_reward():
    textarena = pytest.importorskip("textarena", reason="needs textarena")
    guesses = [says("[1]"), says("seven"), says("[20]"), says("[12]")]
    theirs = textarena.make("GuessTheNumber-v0")  # It repeats all that has been said.
    theirs.reset(num_players=1, seed=3)
    number = theirs.state.game_state["game_number"]
    start, turns = play(TextArena("GuessTheNumber-v0"), *guesses, says(f"I say [{number}]."))
    said = [start.messages[0]["content"]]
    assert theirs.get_observation()[1].strip() == f"[GAME] {said[0]}"
    for guess, turn in zip(guesses, turns, strict=False):
        assert turn.reward == 0.0 and not turn.done
        theirs.step(action=guess["content"])
        whole = theirs.get_observation()[1]
        assert whole.endswith(f"[GAME] {turn.messages[0]['content']}")
    assert turns[-1].done and turns[-1].reward == 1.0
    with pytest.raises(UserError, match="textarena has no such game"):
        play(TextArena("GuessTheNumber-v9"))


def test_textarena_has_other_players():
    pytest.importorskip("textarena", reason="needs textarena")
    seen = []

    def opponent(text):
        seen.append(text)
        return "[4]"

    start, turns = play(TextArena("TicTacToe-v0", num_players=2, opponent=opponent), says("[0]"))
    assert "You are Player 0" in start.messages[0]["content"] and "You are Player 1" in seen[0]
    assert not turns[0].done and "O" in turns[0].messages[0]["content"]


def test_gymnasium_takes_named_actions_and_is_read_without_colours():
    gymnasium = pytest.importorskip("gymnasium", reason="needs gymnasium")
    lake = partial(GymnasiumText, "FrozenLake-v1", actions=("left", "down", "right", "up"), is_slippery=True)
    words = ["I go down", "Right.", "jump", "down or rather left", "down"]
    numbers = [1, 2, None, 0, 1]
    theirs = gymnasium.make("FrozenLake-v1", is_slippery=True, render_mode="ansi")
    theirs.reset(seed=11)
    start, turns = play(lake(), *map(says, words), seed=11)
    assert start.messages[0]["content"].endswith("[S]FFF\nFHFH\nFFFH\nHFFG\n")
    for number, turn in zip(numbers, turns, strict=True):
        if number is None:
            assert turn.metrics == {"invalid_action": 1.0}
            assert "Legal are left, down" in turn.messages[0]["content"]
            continue
        place, reward, ended, _, _ = theirs.step(number)
        assert (turn.reward, turn.done) == (reward, ended)
        board = turn.messages[0]["content"].split(")\n")[1].replace("\n", "")
        assert board.index("[") == place and "\x1b" not in board
        if ended:
            break
    with pytest.raises(UserError, match="has 4 actions, and `actions` 2"):
        play(GymnasiumText("FrozenLake-v1", actions=("left", "right")))
    told = GymnasiumText("FrozenLake-v1", invalid_reply="Which way?", invalid_reward=-1.0)
    turn = play(told, says("jump"))[1][0]
    assert (turn.messages[0]["content"], turn.total) == ("Which way?", -1.0)
    blackjack = GymnasiumText("Blackjack-v1", describe=lambda seen: f"You have {seen[0]}.")
    assert play(blackjack, says("1"))[1][0].messages[0]["content"].startswith("You have ")


def test_rows_have_settings_of_their_environments():
    """The map of a lake, the most turns of a game and the terms of a sum are those of the row."""
    pytest.importorskip("gymnasium", reason="needs gymnasium")
    pytest.importorskip("textarena", reason="needs textarena")
    pytest.importorskip("reasoning_gym", reason="needs reasoning-gym")
    lake = GymnasiumText("FrozenLake-v1", columns=("desc",), is_slippery=False)
    start, turns = play(lake, says("2"), row={"desc": ["SG", "HF"], "other": 1})
    assert start.messages[0]["content"].endswith("[S]G\nHF\n")
    assert (turns[0].total, turns[0].done) == (1.0, True)
    game = TextArena("GuessTheNumber-v0", columns=("max_turns",))
    wrong = says("[21]")
    assert [turn.done for turn in play(game, wrong, wrong, row={"max_turns": 2})[1]] == [False, True]
    sums = ReasoningGymTask("chain_sum", columns=("min_terms", "max_terms"), min_digits=1, max_digits=1)
    (question,) = play(sums, row={"min_terms": 5, "max_terms": 5})[0].messages
    assert len(re.findall(r"\d+", question["content"].split(":")[-1])) == 5
    with pytest.raises(UserError, match="the row has no 'desc', which is in `columns`: it has prompt"):
        play(GymnasiumText("FrozenLake-v1", columns=("desc",)))
    GymnasiumText("FrozenLake-v1").close()  # It has not begun.


def test_reasoning_gym_scores_and_gives_further_tries():
    reasoning_gym = pytest.importorskip("reasoning_gym", reason="needs reasoning-gym")
    (entry,) = reasoning_gym.create_dataset("basic_arithmetic", size=1, seed=3)
    task = partial(ReasoningGymTask, "basic_arithmetic", extract="<answer>(.*?)</answer>")
    right = says(f"So <answer>{entry['answer']}</answer>")
    start, turns = play(task(tries=2), says("<answer>0.5</answer>"), right)
    assert start.messages[0]["content"] == entry["question"]
    assert [(turn.reward, turn.done) for turn in turns] == [(0.0, False), (1.0, True)]
    assert [turn.done for turn in play(task(), says("?"))[1]] == [True]


class Counter:
    """A class as TRL's documentation has it."""

    def reset(self, start=0, **row):
        self.total = start
        return f" Count to 5 from {start}."

    def increment(self, step: int) -> int:
        """Add to the counter and return it.

        Args:
            step: How much to add.
        """
        if step < 0:
            raise ValueError("only forward")
        self.total += step
        return self.total

    def _hidden(self):
        pass

    def get_reward(self):
        return float(self.total == 5)


def test_a_class_for_trl_runs_unchanged_in_a_worker():
    make = partial(TRLEnvironment, Counter)
    start, turns = play(
        make(), says("", ("increment", {"step": 3}), ("increment", {"step": -1})),
        says("", ("increment", {"step": 2})), says("Done."), row={**ROW, "start": 0})
    assert start.messages[-1]["content"] == "Begin. Count to 5 from 0."
    assert [tool.__name__ for tool in start.tools] == ["increment"]
    assert [m["content"] for m in turns[0].messages] == ["3", "Error: ValueError: only forward"]
    assert [turn.done for turn in turns] == [False, False, True] and turns[-1].reward == 1.0
    workers = EnvironmentWorkers(
        Environment(make), EnvironmentSource("COUNTER", module="tests.environments.test_adapters"))
    workers.start(0, {**ROW, "start": 2}, 0)
    (reply,) = workers.poll(300.0)
    (schema,) = reply.start.tools
    assert schema["function"]["parameters"]["required"] == ["step"]
    workers.step(0, says("", ("increment", {"step": 3})))
    (reply,) = workers.poll(60.0)
    assert reply.turn.messages[0] == {
        "role": "tool", "name": "increment", "tool_call_id": "call00000", "content": "5"}
    workers.finish(0, "max_turns")  # The reward counts even if the model has not ended.
    (reply,) = workers.poll(60.0)
    assert reply.turn.done and reply.turn.total == 1.0
    workers.shutdown()


COUNTER = partial(TRLEnvironment, Counter)


def test_openenv_in_process():
    types = pytest.importorskip("openenv.core.env_server.types", reason="needs openenv")
    interfaces = pytest.importorskip("openenv.core.env_server.interfaces", reason="needs openenv")

    class Say(types.Action):
        text: str

    class Heard(types.Observation):
        echo: str = ""

    class Echo(interfaces.Environment):
        def reset(self, seed=None, episode_id=None, **more):
            self.number = random.Random(seed).randint(1, 9)
            return Heard(echo=f"Say {self.number}.")

        def step(self, action, timeout_s=None, **more):
            right = action.text == str(self.number)
            return Heard(echo=action.text, reward=float(right), done=right)

        @property
        def state(self):
            return types.State()

    number = random.Random(3).randint(1, 9)
    start, turns = play(OpenEnvironment(Echo, Say), says("x"), says(str(number)), row={})
    assert start.messages[0]["content"] == f"Say {number}."
    assert [(t.messages[0]["content"], t.reward, t.done) for t in turns] == [
        ("x", 0.0, False), (str(number), 1.0, True)]


def test_skyrl_gyms_own_environment():
    skyrl_gym = pytest.importorskip("skyrl_gym", reason="needs skyrl-gym")
    row = {"prompt": [{"role": "user", "content": "2+3?"}], "reward_spec": {"ground_truth": "5"}}
    make = partial(SkyRLGym, lambda given: skyrl_gym.make("gsm8k", extras=given))
    rewards = [play(make(), says(f"#### {n}"), row=row)[1][0] for n in (5, 6)]
    assert [(turn.reward, turn.done) for turn in rewards] == [(1.0, True), (0.0, True)]


class Tinker:
    """As tinker-cookbook's MessageEnv: each step returns the whole conversation."""

    def __init__(self, row):
        self.said = list(row["prompt"])

    async def initial_observation(self):
        return list(self.said)

    async def step(self, message):
        self.said += [message, {"role": "user", "content": f"You say {message['content']}."}]
        if message["content"] == "forget":
            del self.said[0]
        return SimpleNamespace(
            reward=0.5, episode_done=message["content"] == "bye", next_messages=list(self.said),
            metrics={"n": 1})


class Titan:
    """As torchtitan's MessageEnv: each step returns new messages, and rewards by name."""

    def __init__(self, row):
        self.row = row

    async def init(self):
        return SimpleNamespace(init_prompt_messages=self.row["prompt"], tools=[])

    async def step(self, message):
        answer = {"role": "user", "content": f"You say {message['content']}."}
        done = message["content"] == "bye"
        return SimpleNamespace(env_messages=[answer], env_rewards={"r": 0.5}, done=done)


@pytest.mark.parametrize("kind", [Tinker, Titan])
def test_message_environments_return_what_is_new(kind):
    start, turns = play(MessageEnvironment(kind), says("hi"), says("so"), says("bye"))
    assert start.messages == ROW["prompt"]
    assert [turn.messages for turn in turns[:2]] == [
        [{"role": "user", "content": f"You say {text}."}] for text in ("hi", "so")]
    assert [(turn.total, turn.done) for turn in turns] == [(0.5, False), (0.5, False), (0.5, True)]


def test_tinkers_own_classes():
    tinkers = pytest.importorskip("tinker_cookbook.rl.message_env", reason="needs tinker-cookbook")

    class Asks(tinkers.MessageEnv):
        async def initial_observation(self):
            self.said = [{"role": "user", "content": "Hi"}]
            return list(self.said)

        async def step(self, message):
            self.said += [message, {"role": "user", "content": "And?"}]
            return tinkers.MessageStepResult(
                reward=1.0, episode_done=len(self.said) > 4, next_messages=list(self.said))

    start, turns = play(MessageEnvironment(lambda row: Asks()), says("a"), says("b"))
    assert start.messages == [{"role": "user", "content": "Hi"}]
    assert turns[0].messages == [{"role": "user", "content": "And?"}]
    assert [(turn.total, turn.done) for turn in turns] == [(1.0, False), (1.0, True)]


def test_changed_history_is_refused():
    with pytest.raises(UserError, match=r"Tinker\.step must return the earlier messages"):
        play(MessageEnvironment(Tinker), says("forget"))


def test_a_missing_library_is_named():
    from realhf.environments import adapters

    with pytest.raises(UserError, match="needs the package no-such: pip install no-such"):
        adapters._library("no_such_library", "no-such")
