"""Tests that Watch distinguishes dead ranks from busy ones and detects a standstill."""

import re

import pytest

from realhf.distributed.failures import Beat, Watch
from realhf.distributed.process import WatchedProcess


def _watch(rank=0, timeout=10.0):
    return Watch(rank, timeout_seconds=timeout)


def test_a_silent_rank_is_dead_and_named_with_what_it_did():
    watch = _watch()
    for now in range(0, 40, 2):
        beats = {0: Beat(now, "actor_train of step 3"), 1: Beat(min(now, 7), "reward_forward of step 3")}
        fault = watch.find_fault(beats, now=float(now))
        assert bool(fault) == (now > 18), now  # The last new beat was seen at 8.
    assert fault.startswith("rank 1 has given no sign of life for 30 s")
    assert re.search(r"the last was of reward_forward of step 3, at \d\d:\d\d:\d\d$", fault)


def test_a_busy_rank_is_not_dead_and_its_peers_may_wait_for_it():
    watch = _watch()
    for now in range(1000):
        beats = {0: Beat(now, "actor_train", (1,), 5), 1: Beat(now, "reward_forward")}
        assert watch.find_fault(beats, now=float(now)) == ""


def test_ranks_that_all_wait_without_moving_stand_still():
    watch, other = _watch(), _watch(rank=1)
    for now in range(20):
        first = Beat(now, "actor_train of step 2", (1, 2), 5)
        beats = {0: first, 1: Beat(now, "critic_train of step 2", (0,), 7)}
        fault = watch.find_fault(beats, now=float(now))
        assert bool(fault) == (now > 10)
        assert other.find_fault({0: beats[0]}, now=float(now)) == ""  # It does not see all ranks.
    assert "all ranks have waited for one another for 10 s" in fault
    assert "rank 0 in actor_train of step 2 for ranks 1 and 2" in fault
    assert "rank 1 in critic_train of step 2 for rank 0" in fault


def test_operations_on_the_device_that_stay_unfinished_are_waits():
    """The host may wait for its device without a sign of it; another rank waits over gloo."""
    watch = _watch()
    stuck = ("all_reduce 12 of ranks 0-1 (data), posted by actor_train (step 3/9)", "messages 3")
    for now in range(20):
        first = Beat(now, "critic_train (step 3/9)", None, 5, [(text, now + 0.4) for text in stuck])
        fault = watch.find_fault({0: first, 1: Beat(now, "actor_train", (0,), 7)}, now=float(now))
        assert bool(fault) == (now > 10)
    assert f"rank 0 in critic_train (step 3/9): {stuck[0]}, 19 s old; rank 1 in actor_train for" in fault


@pytest.mark.parametrize("texts", [
    lambda now: [f"all_reduce {now // 9} of ranks 0-1"],  # Operations end.
    lambda now: ["all_reduce 1 of ranks 0-1"] if now % 9 else [],  # The device computes now and then.
])  # fmt: skip
def test_a_device_that_gets_on_is_not_accused(texts):
    watch = _watch()
    for now in range(100):
        beats = {
            0: Beat(now, "actor_train", None, 5, [(text, 3.0) for text in texts(now)]),
            1: Beat(now, "actor_train", (0,), 7),
        }
        assert watch.find_fault(beats, now=float(now)) == ""


def test_waits_that_end_are_progress():
    watch = _watch()
    for now in range(100):
        beats = {0: Beat(now, "actor_train", (1,), now), 1: Beat(now, "actor_train", (0,), 3)}
        assert watch.find_fault(beats, now=float(now)) == ""


def test_a_rank_that_is_done_may_be_silent():
    watch = _watch()
    beats = {0: Beat(1, "the end"), 1: Beat(1, "the end"), 2: Beat(1, "the end")}
    assert watch.find_fault(beats, now=0.0) == ""
    beats = {0: Beat(2, "the end"), 1: None, 2: Beat(2, "the end")}
    assert watch.find_fault(beats, now=50.0) == ""
    assert watch.find_fault({**beats, 0: Beat(3, "the end")}, now=61.0).startswith("rank 2 ")


def test_a_process_counts_the_outermost_wait_of_the_main_thread():
    process = WatchedProcess()
    with process.waiting((1,)), process.waiting((2, 3)):
        assert process.waits_for == (1,)
    assert process.waits_for is None and process.num_waits == 1
