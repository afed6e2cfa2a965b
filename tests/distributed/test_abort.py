"""Tests what a rank does when a peer dies during an operation that only an abort can end."""

import os
import re
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType

from realhf.distributed import failures
from realhf.distributed.communicators import NCCL_SETTINGS, Communicators, set_nccl_environment
from realhf.distributed.failures import FailureBoard, Heartbeat, silence_over_nccl
from realhf.distributed.group import Group, PeerError
from realhf.distributed.process import WatchedProcess


class Work:
    """A work that completes when it is told to."""

    def __init__(self):
        self.completed = False

    def wait(self):
        return True

    def is_completed(self):
        return self.completed


class Backend:
    """A communicator whose operations never complete, and which records that it is aborted."""

    def __init__(self):
        self.work = Work()
        self.error = ErrorType.SUCCESS
        self.aborted = threading.Event()

    def allreduce(self, tensors):
        return self.work

    def get_error(self):
        return self.error

    def abort(self):
        self.aborted.set()


def _rank_0(process, *, grace_seconds):
    """Return a heartbeat of rank 0, whose peer has given a sign of life once, and the failure board."""
    store = dist.HashStore()
    board = FailureBoard(store, rank=0, size=2, host=0)
    beats = dist.PrefixStore("realhf/heartbeat", store)
    doing = "actor_train (step 7/9)"
    beats.set("1", f'{{"number": 1, "doing": "{doing}", "waits_for": null, "num_waits": 0}}')
    heartbeat = Heartbeat(
        store, board, process, rank=0, size=2, timeout_seconds=60, silence_seconds=1,
        grace_seconds=grace_seconds,
    )
    heartbeat.start()
    return heartbeat, board


def test_a_host_that_waits_for_a_dead_peer_is_freed_and_says_who_died_where_and_when(capsys):
    process, backends = WatchedProcess("step 7/9"), [Backend(), Backend()]
    groups = [Group((0, 1), 0, backend, native=True, process=process) for backend in backends]
    for backend in backends:
        process.communicators.add(backend)
    groups[0].all_reduce(torch.zeros(3))  # It never completes.
    began = time.time()
    heartbeat, board = _rank_0(process, grace_seconds=60)
    assert all(backend.aborted.wait(20) for backend in backends)
    with pytest.raises(PeerError) as caught:
        groups[1].all_reduce(torch.zeros(3))
    with pytest.raises(PeerError):
        groups[1].exchange([(1, torch.zeros(3))], [])
    heartbeat.stop()
    (failure,) = board.failures()
    assert str(caught.value) == failure.sentence
    found = re.fullmatch(
        r"rank 1 has given no sign of life for \d s \(--timeout 60 allows 1 s\); "
        r"the last was of actor_train \(step 7/9\), at (\d\d:\d\d:\d\d)", failure.sentence)
    assert found
    times = {time.strftime("%H:%M:%S", time.localtime(began + s)) for s in range(-1, 4)}
    assert found[1] in times
    assert f"realhf: {failure.sentence}" in capsys.readouterr().err


@pytest.mark.slow
def test_a_main_thread_that_does_not_come_back_is_ended_with_the_sentence():
    code = (
        "import time\nfrom tests.distributed.test_abort import Backend, _rank_0\n"
        "from realhf.distributed.process import WatchedProcess\n"
        "process = WatchedProcess()\nprocess.communicators.add(Backend())\n"
        "_rank_0(process, grace_seconds=1)\ntime.sleep(60)\n"
    )
    began = time.monotonic()
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1 and time.monotonic() - began < 50
    assert "realhf: rank 1 has given no sign of life for" in ended.stderr


def test_a_communicator_that_has_failed_is_found():
    communicators, backends = Communicators(), [Backend(), Backend()]
    for backend in backends:
        communicators.add(backend)
    assert communicators.failure() == ""
    backends[1].error = ErrorType.COMM_ERROR
    assert communicators.failure() == "NCCL reports COMM_ERROR (its own messages say more)"


def test_a_failed_work_ends_the_run_with_the_rank_and_its_call():
    process = WatchedProcess("step 3/9")
    backend = Backend()
    process.communicators.add(backend)
    backend.error = ErrorType.REMOTE_ERROR
    Group((0, 1), 0, backend, native=True, process=process).all_reduce(torch.zeros(3))
    with process.doing("critic_train"):
        heartbeat, board = _rank_0(process, grace_seconds=60)
        assert backend.aborted.wait(20)
        heartbeat.stop()
    wanted = "rank 0 lost its peers in critic_train (step 3/9): NCCL reports REMOTE_ERROR"
    assert board.failures()[0].sentence.startswith(wanted)


def test_nccl_leaves_the_decision_to_the_watcher_unless_the_user_has_chosen(monkeypatch):
    for name in NCCL_SETTINGS:
        monkeypatch.setenv(name, "as it was before")  # So that the end of the test takes it out.
        monkeypatch.delenv(name)
    monkeypatch.setenv("NCCL_LAUNCH_RACE_FATAL", "0")
    set_nccl_environment()
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"] == "1" and os.environ["NCCL_LAUNCH_RACE_FATAL"] == "0"


def test_the_silence_of_a_dead_rank_over_nccl_follows_the_timeout():
    timeouts = (10, 30, 31, 600, 601, 3600)
    assert [silence_over_nccl(timeout) for timeout in timeouts] == [10, 30, 30, 30, pytest.approx(30.05), 180]


@pytest.mark.parametrize("error", [ValueError("strange"), RuntimeError("changed size"), OSError("no")])
def test_a_heartbeat_survives_any_error_and_says_so_once(capsys, error):
    process = WatchedProcess("step 7/9")
    num_calls = []

    def unfinished():
        num_calls.append(None)
        if 1 < len(num_calls) < 5:
            raise error
        return []

    process.unfinished = unfinished
    store = dist.HashStore()
    board = FailureBoard(store, rank=0, size=1, host=0)
    heartbeat = Heartbeat(store, board, process, rank=0, size=1, timeout_seconds=60, silence_seconds=0.4)
    heartbeat.start()
    deadline = time.monotonic() + 10
    while len(num_calls) < 8 and time.monotonic() < deadline:
        time.sleep(0.05)
    heartbeat.stop()
    assert len(num_calls) >= 8
    said = capsys.readouterr().err
    sentence = f"rank 0's heartbeat met an error and goes on ({type(error).__name__}: {error})"
    assert said.count(sentence) == 1


def test_a_heartbeat_without_its_store_ends_the_process(monkeypatch, capsys):
    class LostStore(Exception):
        pass

    def leave(code):
        raise LostStore(code)

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(failures, "_GRACE_SECONDS", 0.05)
    store = dist.HashStore()
    board = FailureBoard(store, rank=0, size=1, host=0)
    heartbeat = Heartbeat(
        store, board, WatchedProcess("step 7/9"), rank=0, size=1, timeout_seconds=60, silence_seconds=0.4)

    def lost(*_):
        raise RuntimeError("Connection reset by peer")

    heartbeat._store = SimpleNamespace(set=lost, check=lost)
    with pytest.raises(LostStore):
        heartbeat._run()
    assert "it lost the store that all ranks of the run share" in capsys.readouterr().err
