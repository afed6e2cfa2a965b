"""The collectives of `dist.group` over NCCL (over gloo where the tests run on the CPU)."""

import itertools
import socket
import time

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

from realhf.distributed.group import Group
from realhf.distributed.process import WatchedProcess
from realhf.distributed.world import World
from realhf.models.param_spec import chunk_edges

pytestmark = pytest.mark.gpu
_REFUSED = ("Duplicate GPU", "invalid usage", "ncclInvalidUsage")


def _store(port, *, is_master):
    return dist.TCPStore("127.0.0.1", port, is_master=is_master, wait_for_workers=False)


def _check(group, device):
    """Collectives whose results depend on the members' numbers alone."""
    size, index = group.size, group.index
    sums = group.all_reduce(torch.full((100_000,), index + 1.0, device=device))
    assert (sums == size * (size + 1) / 2).all()
    gathered = group.all_gather(torch.full((3,), float(index), device=device))
    assert gathered.tolist() == [[float(i)] * 3 for i in range(size)]
    edges = chunk_edges(301 * size + 1, size)
    flat = torch.full((edges[-1],), index + 1.0, device=device)
    group.post_reduce_scatter(flat)()
    group.sum_rests([flat])
    assert (flat[edges[index] : edges[index + 1]] == size * (size + 1) / 2).all()
    flat = torch.full((edges[-1],), float(index), device=device)
    group.all_gather_flat(flat)
    group.spread_rests([flat])
    chunks = [flat[first:last] for first, last in itertools.pairwise(edges)]
    assert all((chunk == i).all() for i, chunk in enumerate(chunks))
    if size > 1:
        peer = 1 - index
        sends = [torch.full((4,), 10.0 * index + i, device=device) for i in range(2)]
        got = [torch.empty(4, device=device) for _ in range(2)]
        group.exchange([(peer, x) for x in sends], [(peer, x) for x in got])
        assert [float(x[0]) for x in got] == [10.0 * peer, 10.0 * peer + 1]
    group.barrier()


def test_a_world_of_one(process_device):
    device = process_device
    world = World(device=device, store=_store(0, is_master=True))
    native = device.type == "cuda"
    backend = world._connect(((0,), "data"), 0, native=native)
    _check(Group((0,), 0, backend, native=native, process=WatchedProcess()), device)


def test_two_processes_on_one_device(process_device):
    """NCCL refuses that unless it is told otherwise."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    answers = context.Queue()
    arguments = [(rank, port, str(process_device), answers) for rank in range(2)]
    processes = [context.Process(target=_rank, args=some, daemon=True) for some in arguments]
    for process in processes:
        process.start()
    found = []
    try:
        while len(found) < 2 and not any(found):  # After an error the other may wait for ever.
            found.append(answers.get(timeout=120))
    finally:
        for process in processes:
            process.kill()
            process.join()
    if any(word in found[-1] for word in _REFUSED):
        pytest.skip(f"NCCL refuses two processes on one GPU: {found[-1][-200:]}")
    assert not found[-1], found[-1]


def _rank(rank, port, device, answers):
    try:
        if device.startswith("cuda"):
            torch.cuda.set_device(device)
        world = World(rank=rank, size=2, device=device, store=_store(port, is_master=rank == 0))
        _check(world.group((0, 1)), torch.device(device))
        answers.put("")
    except Exception as error:
        answers.put(f"{type(error).__name__}: {error}")
    answers.close()
    answers.join_thread()
    time.sleep(60)  # The parent ends it: leaving early would break the other's connections.
