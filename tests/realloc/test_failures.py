"""Tests that ranks stop and name a peer that dies or falls silent during a reallocation, and the moment."""

import multiprocessing
import os
import re
import time

import pytest
import torch.distributed as dist

from tests.pool import FORK_SERVER
from tests.samples import marked

NUM_RANKS, LOST, TIMEOUT_SECONDS = 3, 2, 4.0


def _rank(rank, port, fault, at_wave, results):
    import torch

    from realhf.distributed.group import PeerError
    from realhf.distributed.world import World
    from realhf.layout import Layout
    from tests.realloc.test_execute import _model, _pieces, _shards, _spec
    from tests.reallocators import make_reallocator

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    options = {"ranks_per_host": 1, "timeout_seconds": TIMEOUT_SECONDS}
    world = World(rank=rank, size=NUM_RANKS, store=store, **options)
    spec, source, target = _spec(), Layout.parse("p3@2,0,1"), Layout.parse("t3@1,2,0")
    settings = {"dtype": torch.float32, "staging_bytes": 1000, "role": "critic"}
    reallocator = make_reallocator(spec, source, target, world, **settings)
    model = _model(spec, seed=1, dtype=torch.float32)
    held = [spec.held_by(layout, rank) for layout in (source, target)]
    shards = [_pieces(_shards(model, regions), regions) for regions in held]
    reallocator.run(*shards)
    post = reallocator._post

    def post_or_fail(binding, number):
        if number == at_wave:
            if fault == "dies":
                os._exit(9)
            time.sleep(10 * TIMEOUT_SECONDS)
        return post(binding, number)

    if rank == LOST:
        reallocator._post = post_or_fail
    start = time.monotonic()
    try:
        reallocator.run(*shards)
    except PeerError as error:
        results.put((rank, str(error), time.monotonic() - start))
    time.sleep(2)  # The first to fail must not be taken for the cause by the other one.
    os._exit(0)


@pytest.mark.parametrize(
    "fault, at_wave", marked([("dies", 0), ("dies", 3), ("falls silent", 3)], quick=[1]))
def test_the_others_name_role_peer_and_wave(fault, at_wave):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = multiprocessing.get_context("forkserver").Queue()
    options = (store.port, fault, at_wave, results)
    ranks = [FORK_SERVER.start(_rank, rank, *options) for rank in range(NUM_RANKS)]
    try:
        stopped = [results.get(timeout=60) for _ in range(NUM_RANKS - 1)]
    finally:
        for process in ranks:
            process.kill()
            process.join()
    assert sorted(rank for rank, _, _ in stopped) == [0, 1]
    for _, sentence, seconds in stopped:
        assert seconds < 10 * TIMEOUT_SECONDS  # Within which the silent one sleeps.
        what = r"reallocation of critic from p3@2,0-1 to t3@1-2,0, wave \d+ of \d+: "
        assert re.match(what, sentence), sentence
    assert any(f"communication with rank {LOST} broke off" in sentence for _, sentence, _ in stopped), stopped
