"""Two processes that post two collectives in opposite orders: the run ends with both ranks and operations."""

import multiprocessing
import re
import time
import traceback

import pytest
import torch.distributed as dist

from realhf.distributed.failures import FailureBoard
from tests.pool import FORK_SERVER

TIMEOUT_SECONDS = 3.0
CALLS = ("actor_train", "critic_train")


def _rank(rank, port, native, order, late_seconds, answers):
    import torch

    from realhf.distributed.failures import Heartbeat
    from realhf.distributed.process import WatchedProcess
    from realhf.distributed.world import World
    from tests.distributed.emulated_nccl import DeviceThread, pretend_nccl

    def connect():
        return dist.TCPStore("127.0.0.1", port, is_master=False)

    torch.set_num_threads(1)
    process = WatchedProcess("step 1/2")
    board = FailureBoard(connect(), rank=rank, size=2, host=0)
    heartbeat = Heartbeat(connect(), board, process, rank=rank, size=2, timeout_seconds=TIMEOUT_SECONDS)
    heartbeat.start()
    world = World(rank=rank, size=2, store=connect(), process=process, shared_memory=False)
    groups = {call: world.group((0, 1), purpose=call.split("_")[0]) for call in CALLS}
    device = DeviceThread()
    if native:
        for group in groups.values():
            pretend_nccl(group, device, process)
    world.control.barrier()
    time.sleep(late_seconds)
    try:
        for call in order:
            with process.doing(call):
                groups[call].all_reduce(torch.ones(3))
        device.synchronize()
        answers.put((rank, "done"))
        heartbeat.stop()
    except Exception:
        answers.put((rank, process.communicators.fault or traceback.format_exc()))


def _run(native, orders, late=(0.0, 0.0)):
    """Return what each rank says, the sentences on the failure board, and the seconds until the last one."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    board = FailureBoard(store, rank=0, size=2, host=0)
    answers = multiprocessing.get_context("forkserver").Queue()
    ranks = [FORK_SERVER.start(_rank, rank, store.port, native, orders[rank], late[rank], answers)
             for rank in range(2)]
    began = time.monotonic()
    try:
        for process in ranks:
            process.join(60)
        assert not any(process.is_alive() for process in ranks)
        said = {}
        while not answers.empty():
            rank, text = answers.get()
            said[rank] = text
    finally:
        for process in ranks:
            process.kill()
            process.join()
    return said, [failure.sentence for failure in board.failures()], time.monotonic() - began


NATIVE = [True, pytest.param(False, marks=pytest.mark.slow)]


@pytest.mark.slow
@pytest.mark.parametrize("native", NATIVE, ids=["pretended NCCL", "gloo"])
def test_opposite_orders_end_with_both_ranks_and_operations(native):
    said, sentences, _ = _run(native, (CALLS, CALLS[::-1]))
    (sentence,) = sentences
    found = re.fullmatch(
        r"all ranks have waited for one another for 3 s \(--timeout\): "
        r"rank 0 in (.*): all_reduce 1 of ranks 0-1 \(actor\)(.*), (\d+) s old; "
        r"rank 1 in (.*): all_reduce 1 of ranks 0-1 \(critic\)(.*), (\d+) s old", sentence)
    assert found, sentence
    assert all(TIMEOUT_SECONDS <= int(seconds) < 3 * TIMEOUT_SECONDS for seconds in (found[3], found[6]))
    if native:  # The host has gone on, and waits for the device; it is freed from that, and says why.
        assert (found[1], found[4]) == ("step 1/2", "step 1/2")
        posted = ", posted by {} (step 1/2)"
        assert (found[2], found[5]) == tuple(posted.format(call) for call in CALLS)
        assert said == {0: sentence, 1: sentence}
    else:
        places = tuple(f"{call} (step 1/2) for rank {1 - rank}" for rank, call in enumerate(CALLS))
        assert (found[1], found[4]) == places and "done" not in said.values()


@pytest.mark.slow
@pytest.mark.parametrize("native", NATIVE, ids=["pretended NCCL", "gloo"])
def test_a_rank_that_comes_late_is_waited_for(native):
    said, sentences, seconds = _run(native, (CALLS, CALLS), late=(0.0, 2 * TIMEOUT_SECONDS))
    assert seconds > 2 * TIMEOUT_SECONDS
    assert said == {0: "done", 1: "done"} and sentences == []
