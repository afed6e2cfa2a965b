"""How a run ends on all ranks: sentences on the failure board, signs of life, and standstills."""

import re
import threading

import pytest
import torch.distributed as dist

from realhf.distributed.failures import Beat, FailureBoard, Watch
from realhf.distributed.group import PeerError
from realhf.distributed.process import WatchedProcess

HOSTS = (0, 0, 1, 1)


def _boards():
    store = dist.HashStore()
    return [FailureBoard(store, rank=rank, size=4, host=host) for rank, host in enumerate(HOSTS)]


def _at_once(*calls):
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_equal_sentences_of_all_ranks_are_printed_once_on_each_host(capsys):
    _at_once(*(lambda b=b: b.report("no such file", code=2) for b in _boards()))
    assert capsys.readouterr().err == "realhf: no such file\n" * 2


def test_ranks_are_named_when_others_do_not_fail(capsys):
    boards = _boards()
    _at_once(*(lambda b=b: b.report("no such file", code=2) for b in boards[2:]))
    assert capsys.readouterr().err == "realhf: no such file (ranks 2 and 3)\n"
    assert [board.repeat() for board in boards] == [2, 2, 2, 2]
    by_one_of_host_0 = capsys.readouterr().err
    assert by_one_of_host_0 == "realhf: no such file (ranks 2 and 3, host 1)\n"


def test_different_sentences_are_all_printed(capsys):
    boards = _boards()
    _at_once(*(lambda i=i: boards[i].report(f"reason {i}", code=2) for i in range(2)))
    assert sorted(capsys.readouterr().err.splitlines()) == [
        "realhf: reason 0 (rank 0)", "realhf: reason 1 (rank 1)"
    ]


def test_text_takes_the_place_of_the_sentence(capsys):
    text = "Traceback ...\nKeyError"
    _boards()[3].report("rank 3 failed with KeyError", code=1, text=text, names_rank=True)
    assert capsys.readouterr().err == f"{text}\n"


def test_roll_call_ends_when_a_rank_fails_before_it():
    boards, errors = _boards(), []

    def come(board):
        try:
            board.roll_call(20.0)
        except PeerError as error:
            errors.append(str(error))

    _at_once(*(lambda b=b: come(b) for b in boards[:3]), lambda: boards[3].report("no data", code=2))
    assert errors == ["rank 3 has failed: no data"] * 3


def test_roll_call_names_who_does_not_come():
    boards, errors = _boards(), []

    def come(board):
        with pytest.raises(PeerError) as error:
            board.roll_call(0.5)
        errors.append(str(error.value))

    _at_once(*(lambda b=b: come(b) for b in (boards[0], boards[2])))
    assert errors == ["ranks 1 and 3 did not start within 0.5 s"] * 2


def test_roll_call_of_all():
    boards = _boards()
    _at_once(*(lambda b=b: b.roll_call(20.0) for b in boards))
    assert boards[0].failures() == [] and boards[0].repeat() is None


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
])
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
