"""What users write and return: legal forms, and a sentence for each that is not."""

import re
from functools import partial

import numpy as np
import pytest

from realhf.environments.adapters import TextArena
from realhf.environments.protocol import (
    STOP_REASONS,
    Environment,
    Start,
    Turn,
    checked_start,
    checked_turn,
    rollout_seed,
)
from realhf.errors import UserError
from tests.environments.players import Guess, tool_add

HELLO = [{"role": "user", "content": "Hello"}]
ROW = {"prompt": "Hello"}


@pytest.mark.parametrize("value", [
    None, Start(), Start("Hello"), Start(HELLO[0]), Start(tuple(HELLO)), Start(HELLO, tools=[tool_add])])
def test_forms_of_a_start(value):
    start = checked_start(value, ROW, "Mine.start")
    assert start.messages == HELLO and start.tools == ([tool_add] if value and value.tools else [])


def test_numbers_of_numpy_and_truth_are_rewards():
    turn = checked_turn(Turn(done=np.bool_(True), reward=np.float32(0.5), metrics={"n": np.int64(3)}), "s")
    assert (turn.done, turn.reward, turn.metrics) == (True, 0.5, {"n": 3.0})
    assert checked_turn(Turn("x", reward=True), "s").rewards == {"environment": 1.0}
    assert checked_turn(Turn("x", {"a": 1, "b": -0.5}), "s").total == 0.5


WRONG_TURNS = [
    (("hi", 1.0, True), "tuple ('hi', 1.0, True): it must be Turn("),
    (None, "None: it must be Turn("),
    (Turn(), "Turn.messages without any, and done is False"),
    (Turn([{"role": "assistant", "content": "x"}]), "Turn.messages with a message of the assistant: only"),
    (Turn([{"role": "robot", "content": "x"}]), "Turn.messages with the role 'robot': legal are system, dev"),
    (Turn(["x"]), "Turn.messages with 'x': a message must be like"),
    (Turn(3), "Turn.messages with 3: it must be text, a message or a list of messages"),
    (Turn([{"role": "user"}]), "Turn.messages with the content None: it must be text, or a list of parts"),
    (Turn([{"role": "user", "content": "x", "at": float("inf")}]), "Turn.messages with what is not JSON"),
    (Turn([{"role": "user", "content": "x", "by": object()}]), "Turn.messages with what is not JSON (a"),
    (Turn("x", reward=float("nan")), "Turn.reward nan: it must be a finite number, or a dict of them by"),
    (Turn("x", reward="1"), "Turn.reward '1': it must be a finite number"),
    (Turn("x", reward={"a": float("inf")}), "Turn.reward['a'] inf: it must be a finite number"),
    (Turn("x", reward={1: 1.0}), "Turn.reward with the name 1: names must be text"),
    (Turn("x", done=1), "Turn.done 1: it must be True or False"),
    (Turn("x", metrics=3), "Turn.metrics 3: it must be a dict"),
    (Turn("x", metrics={"n": None}), "Turn.metrics['n'] None: it must be a finite number"),
]


@pytest.mark.parametrize(("value", "sentence"), WRONG_TURNS)
def test_each_wrong_turn_has_a_sentence_with_class_method_and_what_is_legal(value, sentence):
    with pytest.raises(UserError, match=re.escape(f"Mine.step returned {sentence}")):
        checked_turn(value, "Mine.step")


@pytest.mark.parametrize(("value", "row", "sentence"), [
    ("Hello", ROW, "Mine.start returned str 'Hello': it must be Start("),
    (Start([]), ROW, "Mine.start returned Start.messages without any"),
    (Start([*HELLO, {"role": "assistant", "content": "x"}]), ROW, "whose last one is the assistant's"),
    (Start("x", tools=["add"]), ROW, "Start.tools with 'add': a tool must be a function, or a schema"),
    (Start("x", tools=3), ROW, "Start.tools 3: it must be a list of functions or schemas"),
    (None, {}, "the row has no 'prompt', and the environment's start has no messages"),
])
def test_each_wrong_start_has_a_sentence(value, row, sentence):
    with pytest.raises(UserError, match=re.escape(sentence)):
        checked_start(value, row, "Mine.start")


@pytest.mark.parametrize(("settings", "sentence"), [
    ({}, "environment.make is None and 0 tools: it must be a class or a function, or None with tools"),
    ({"make": Guess, "tools": [tool_add]}, "and 1 tools: it must be a class or a function, or None with"),
    ({"tools": ["add"]}, "environment.tools is 'add': it must have functions"),
    ({"make": Guess, "max_turns": 0}, "environment.max_turns is 0: it must be at least 1"),
    ({"make": Guess, "max_turns": 2.5}, "environment.max_turns is 2.5: it must be a whole number"),
    ({"make": Guess, "max_tokens": 0}, "environment.max_tokens is 0: it must be at least 1, or None"),
    ({"make": Guess, "workers": 0}, "environment.workers is 0: it must be at least 1, or None"),
    ({"make": Guess, "step_seconds": 0}, "environment.step_seconds is 0: it must be above 0"),
    ({"make": Guess, "start_seconds": 1e999}, "environment.start_seconds is inf: it must be above 0"),
    ({"make": Guess, "memory_gib": -1}, "environment.memory_gib is -1: it must be above 0"),
    ({"make": Guess, "discount": 1.5}, "environment.discount is 1.5: it must be above 0 and at most 1"),
    ({"make": Guess, "discount": 0.5}, "environment.discount is 0.5: it must be 1 with environment.credit"),
    ({"make": Guess, "credit": "turn"}, "environment.credit is 'turn': it must be 'trajectory' or 'to_go'"),
    ({"make": Guess, "on_failure": "skip"}, "environment.on_failure is 'skip': it must be 'drop' or 'zero'"),
])
def test_each_wrong_setting_has_a_sentence(settings, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        Environment(**settings)


def test_a_class_may_ask_for_a_process_of_its_own():
    game = partial(TextArena, "GuessTheNumber-v0")
    assert [Environment(make).isolated for make in (Guess, game, TextArena)] == [False, True, True]
    assert Environment(game, isolated=False).isolated is False and Environment(Guess, isolated=True).isolated


def test_members_of_a_group_share_a_seed_unless_they_start_on_their_own():
    seeds = {(step, prompt): rollout_seed(1, step=step, prompt=prompt, sample=0)
             for step in range(20) for prompt in range(50)}
    assert len(set(seeds.values())) == 1000 and all(0 <= seed < 2**32 for seed in seeds.values())
    assert seeds[3, 4] == rollout_seed(1, step=3, prompt=4, sample=7)
    assert seeds[3, 4] != rollout_seed(2, step=3, prompt=4, sample=0)
    own = {rollout_seed(1, step=3, prompt=4, sample=i, own_start=True) for i in range(10000)}
    assert len(own) == 10000 and seeds[3, 4] not in own


def test_the_reasons_are_a_closed_list():
    assert STOP_REASONS == (
        "done", "max_turns", "max_tokens", "context_full", "parse_error", "step_timeout", "step_error",
        "worker_lost", "replay_differs")
