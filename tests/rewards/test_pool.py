"""Rewards with a concurrency: calls at the same time, time limits, and the order of results."""

import asyncio
import math
import threading
import time

import pytest

from realhf import Reward, RewardLimits
from realhf.errors import UserError
from realhf.rewards.reward import reward_columns
from realhf.rewards.scoring import RewardCall, SamplesToScore

COUNT = 64


def _score(given, limits=None, count=COUNT):
    call = RewardCall(given, reward_columns(given), limits)
    texts = [str(i) for i in range(count)]
    prompts = [f"prompt {text}" for text in texts]
    return call.scored(SamplesToScore(list(range(count)), prompts, texts, [[1]] * count, {}))


def _sleeper(seconds, *, is_async):
    def sleeps(completions):
        time.sleep(seconds)
        return [float(text) for text in completions]

    async def sleeps_async(completions):
        await asyncio.sleep(seconds)
        return [float(text) for text in completions]

    return sleeps_async if is_async else sleeps


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("seconds", [0.3, pytest.param(2.0, marks=pytest.mark.slow)])
def test_calls_wait_at_the_same_time(seconds, is_async):
    """64 samples of a call that sleeps take the time of one call, and not of 64."""
    started = time.monotonic()
    found = _score(Reward(_sleeper(seconds, is_async=is_async), concurrency=COUNT))
    assert seconds <= time.monotonic() - started < seconds * COUNT / 2
    assert found.totals == [float(i) for i in range(COUNT)]


def test_no_more_calls_run_at_once_than_allowed():
    running = []
    most = []
    lock = threading.Lock()

    def counts(completions):
        with lock:
            running.append(1)
            most.append(len(running))
        time.sleep(0.02)
        with lock:
            running.pop()
        return [1.0]

    _score(Reward(counts, concurrency=5), count=20)
    assert max(most) == 5


def test_several_rewards_wait_at_the_same_time():
    """Concurrent, `async` and limited functions run beside each other, and beside plain ones."""
    rewards = [
        Reward(_sleeper(0.4, is_async=False), name="pooled", concurrency=8),
        Reward(_sleeper(0.4, is_async=True), name="async"),
        Reward(_sleeper(0.4, is_async=False), name="limited", timeout_seconds=5.0),
        Reward(_sleeper(0.4, is_async=False), name="plain"),
    ]
    started = time.monotonic()
    found = _score(rewards, count=8)
    assert time.monotonic() - started < 1.2
    assert found.totals == [4.0 * i for i in range(8)]


@pytest.mark.parametrize("is_async", [False, True])
def test_results_do_not_depend_on_the_order_in_which_calls_end(is_async):
    def delay(text):
        return 0.01 * ((int(text) * 7) % 11)

    def late(completions):
        time.sleep(delay(completions[0]))
        return [float(completions[0])]

    async def late_async(completions):
        await asyncio.sleep(delay(completions[0]))
        return [float(completions[0])]

    found = _score(Reward(late_async if is_async else late, concurrency=16))
    assert found.totals == [float(i) for i in range(COUNT)]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_call_that_takes_too_long_ends_the_run_or_is_dropped(is_async, capsys):
    def slow(completions):
        time.sleep(3 if completions == ["5"] else 0)
        return [1.0]

    async def slow_async(completions):
        await asyncio.sleep(3 if completions == ["5"] else 0)
        return [1.0]

    reward = Reward(slow_async if is_async else slow, name="slow", concurrency=4, timeout_seconds=0.3)
    started = time.monotonic()
    with pytest.raises(UserError) as caught:
        _score(reward, count=8)
    said = "raised TimeoutError: it has not returned within 0.3 s (Reward.timeout_seconds) on sample 5 with"
    assert said in str(caught.value)
    found = _score(reward, RewardLimits(on_failure="drop"), count=8)
    assert time.monotonic() - started < 2.5
    assert [i for i, total in enumerate(found.totals) if math.isnan(total)] == [5]
    assert found.by_name[5] == {"slow": None} and found.by_name[4] == {"slow": 1.0}
    assert "failed on 1 of 8 samples (sample 5 first): TimeoutError" in capsys.readouterr().err


def test_the_failed_sample_that_is_named_is_the_first_one():
    """Even if a later one fails earlier."""

    def fails(completions):
        if completions == ["2"]:
            time.sleep(0.2)
        if completions[0] in "26":
            raise ValueError(f"no {completions[0]}")
        return [1.0]

    with pytest.raises(UserError, match="ValueError: no 2 .* on sample 2 with the prompt 'prompt 2'"):
        _score(Reward(fails, concurrency=8), count=8)


def test_calls_with_single_samples_are_made_again():
    calls = []

    async def shaky(completions):
        calls.append(completions[0])
        if calls.count(completions[0]) < 3:
            raise ConnectionError("away")
        return [2.0]

    limits = RewardLimits(retries=2, retry_seconds=0.01)
    assert _score(Reward(shaky, concurrency=3), limits, count=6).totals == [2.0] * 6
    assert sorted(calls) == sorted([str(i) for i in range(6)] * 3)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("settings", [{"concurrency": 4}, {"timeout_seconds": 5.0}])
@pytest.mark.parametrize("others", [0, 1])
def test_an_exit_in_a_thread_is_not_lost(is_async, settings, others):
    def leaves(completions):
        raise SystemExit(3)

    async def leaves_async(completions):
        raise SystemExit(3)

    first = Reward(leaves_async if is_async else leaves, **settings)
    more = [Reward(_sleeper(0.0, is_async=True), name="fine")] * others
    for limits in (None, RewardLimits(on_failure="drop", retries=1, retry_seconds=0.01)):
        with pytest.raises(UserError, match="raised SystemExit: 3"):
            _score([first, *more], limits, count=4)
    assert _score(Reward(_sleeper(0.0, is_async=True)), count=2).totals == [0.0, 1.0]  # The loop still runs.


@pytest.mark.parametrize("answer", [[1.0, 2.0], 1.0, []])
def test_a_call_with_one_sample_returns_a_list_of_one(answer):
    with pytest.raises(UserError, match="it must return a list with one number per completion"):
        _score(Reward(lambda completions: answer, name="wrong", concurrency=2), count=3)


def test_async_objects_and_functions_that_return_awaitables():
    class Judge:
        async def __call__(self, completions):
            return [float(text) for text in completions]

    def starts(completions):
        return _sleeper(0.0, is_async=True)(completions)

    for given in (Judge(), starts):
        for reward in (Reward(given), Reward(given, concurrency=2), Reward(given, timeout_seconds=5.0)):
            assert _score(reward, count=3).totals == [0.0, 1.0, 2.0]


def test_async_functions_share_an_event_loop():
    """Also if they are different functions, so that they may share a connection."""
    loops = []

    async def one(completions):
        loops.append(asyncio.get_running_loop())
        return [0.0] * len(completions)

    async def two(completions):
        loops.append(asyncio.get_running_loop())
        return [0.0] * len(completions)

    for _ in range(2):
        _score([one, Reward(two, concurrency=2)], count=4)
    assert len(loops) == 10 and len(set(map(id, loops))) == 1
