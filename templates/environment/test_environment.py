"""Tests of the environment, to run before every training: `pytest test_environment.py`."""

import pytest
from environment import BOXES, FindCoin


def calls(box):
    function = {"name": "look", "arguments": {"box": box}}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "call00000", "function": function}]}


def says(text):
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize("seed", range(8))
def test_the_tool_shows_where_the_coin_is(seed):
    game = FindCoin()
    assert game.start({"game": 1}, seed).messages.endswith("Game 1.")
    seen = {box: game.step(calls(box)).messages[0]["content"] for box in BOXES}
    assert sorted(seen.values()) == ["coin", "empty"]
    turns = {box: game.step(says(str(box))) for box in BOXES}
    assert all(turn.done and turn.reward == float(seen[box] == "coin") for box, turn in turns.items())


def test_the_coin_follows_from_the_seed():
    games = [FindCoin() for _ in range(20)]
    for i, game in enumerate(games):
        game.start({"game": i}, i // 2)
    assert all(a.coin == b.coin for a, b in zip(games[::2], games[1::2], strict=True))
    assert len({game.coin for game in games}) > 1


@pytest.mark.parametrize("text", ["hm", "2"])
def test_other_words_and_guesses_cost_something_and_get_an_answer(text):
    game = FindCoin()
    game.start({"game": 1}, 0)
    turn = game.step(says(text))
    assert turn.reward < 0 and not turn.done and turn.messages
    assert game.finish("max_turns").reward < 0
