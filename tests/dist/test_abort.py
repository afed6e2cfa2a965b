"""Tests what a rank does when a peer dies during an operation that only an abort can end."""

import re
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

from realhf.dist.activity import Activity
from realhf.dist.communicators import Communicators
from realhf.dist.failures import FailureBoard
from realhf.dist.group import Group, PeerError
from realhf.dist.heartbeat import Heartbeat


class Work:
    """A work that completes, or fails, when it is told to."""

    def __init__(self):
        self.error = None
        self.completed = False

    def wait(self):
        return True

    def exception(self):
        return self.error

    def is_completed(self):
        return self.completed


class Backend:
    """A communicator whose operations never complete, and which records that it is aborted."""

    def __init__(self):
        self.work = Work()
        self.aborted = threading.Event()

    def allreduce(self, tensors):
        return self.work

    def abort(self):
        self.aborted.set()


def _rank_0(activity, *, grace_seconds):
    """Return a heartbeat of rank 0, whose peer has given a sign of life once, and the failure board."""
    store = dist.HashStore()
    board = FailureBoard(store, rank=0, size=2, host=0)
    beats = dist.PrefixStore("realhf/heartbeat", store)
    doing = "actor_train (step 7/9)"
    beats.set("1", f'{{"number": 1, "doing": "{doing}", "waits_for": null, "num_waits": 0}}')
    heartbeat = Heartbeat(
        store, board, activity, rank=0, size=2, timeout_seconds=60, silence_seconds=1,
        grace_seconds=grace_seconds,
    )  # fmt: skip
    heartbeat.start()
    return heartbeat, board


def test_a_host_that_waits_for_a_dead_peer_is_freed_and_says_who_died_where_and_when(capsys):
    activity, backends = Activity("step 7/9"), [Backend(), Backend()]
    groups = [Group((0, 1), 0, backend, native=True, activity=activity) for backend in backends]
    for backend in backends:
        activity.communicators.add(backend)
    groups[0].all_reduce(torch.zeros(3))  # It never completes.
    began = time.time()
    heartbeat, board = _rank_0(activity, grace_seconds=60)
    assert all(backend.aborted.wait(20) for backend in backends)
    with pytest.raises(PeerError) as caught:
        groups[1].all_reduce(torch.zeros(3))
    with pytest.raises(PeerError):
        groups[1].exchange([(1, torch.zeros(3))], [])
    heartbeat.stop()
    (failure,) = board.failures()
    assert str(caught.value) == failure.sentence
    found = re.fullmatch(
        r"rank 1 has given no sign of life for \d s; the last was of actor_train \(step 7/9\), "
        r"at (\d\d:\d\d:\d\d)", failure.sentence)
    assert found
    times = {time.strftime("%H:%M:%S", time.localtime(began + s)) for s in range(-1, 4)}
    assert found[1] in times
    assert f"realhf: {failure.sentence}" in capsys.readouterr().err


def test_a_main_thread_that_does_not_come_back_is_ended_with_the_sentence():
    code = (
        "import time\nfrom tests.dist.test_abort import Backend, _rank_0\n"
        "from realhf.dist.activity import Activity\n"
        "activity = Activity()\nactivity.communicators.add(Backend())\n"
        "_rank_0(activity, grace_seconds=1)\ntime.sleep(60)\n"
    )
    began = time.monotonic()
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1 and time.monotonic() - began < 50
    assert "realhf: rank 1 has given no sign of life for" in ended.stderr


def test_the_first_error_of_a_work_is_found_and_completed_works_are_forgotten():
    communicators, one, other = Communicators(), Backend(), Backend()
    works = [Work() for _ in range(3)]
    communicators.watch(one, works[0])
    communicators.watch(one, works[1])
    communicators.watch(other, works[2])
    assert communicators.failure() == ""
    works[1].completed = True
    assert communicators.failure() == ""
    works[1].error = RuntimeError("comes too late")
    works[2].error = RuntimeError("NCCL communicator was aborted\nStack")
    assert communicators.failure() == "NCCL communicator was aborted"


def test_a_failed_work_ends_the_run_with_the_rank_and_its_call():
    activity = Activity("step 3/9")
    backend = Backend()
    activity.communicators.add(backend)
    backend.work.error = RuntimeError("NCCL error: remote process exited")
    Group((0, 1), 0, backend, native=True, activity=activity).all_reduce(torch.zeros(3))
    with activity.doing("critic_train"):
        heartbeat, board = _rank_0(activity, grace_seconds=60)
        assert backend.aborted.wait(20)
        heartbeat.stop()
    wanted = "rank 0 lost its peers in critic_train (step 3/9): NCCL error: remote process exited"
    assert board.failures()[0].sentence == wanted
