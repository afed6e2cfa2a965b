"""Tests of the collectives of groups, and of the threads that carry their messages."""

import functools
import os
from pathlib import Path

import pytest
import torch

from realhf.models.param_spec import chunk_edges
from tests.distributed.emulated_nccl import NcclWorld


def _policies(world):
    """Return the scheduling policies of gloo's threads and of this one."""
    world.control.barrier()
    tasks = [int(task.name) for task in Path("/proc/self/task").iterdir()]
    names = {task: Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in tasks}
    gloo = [os.sched_getscheduler(task) for task, name in names.items() if name.startswith("gloo")]
    return gloo, os.sched_getscheduler(0)


def test_threads_of_gloo_do_not_interrupt_computation(pool):
    for gloo, own in pool.run(_policies):
        assert set(gloo) == {os.SCHED_BATCH}
        assert own == os.SCHED_OTHER


@functools.cache
def _nccl_world(world):
    store = torch.distributed.PrefixStore("emulated nccl", world._store)
    return NcclWorld(rank=world.rank, size=world.size, store=store, shared_memory=False)


def _collectives(world, numel, ranks):
    """Sum and spread the chunks of two tensors by the code for gloo and by that for NCCL; return both."""
    worlds = (world, _nccl_world(world))
    if world.rank not in ranks:
        return None
    results = []
    for some in worlds:
        group = some.group(ranks)
        flats = [torch.arange(n, dtype=torch.float64) * (world.rank + 1) for n in (numel, numel // 2)]
        for finish in [group.post_reduce_scatter(flat) for flat in flats]:
            finish()
        group.sum_rests(flats)
        edges = [chunk_edges(len(flat), group.size) for flat in flats]
        own = [
            flat[at[group.index] : at[group.index + 1]].clone()
            for flat, at in zip(flats, edges, strict=True)
        ]
        for flat in flats:
            group.all_gather_flat(flat)
        group.spread_rests(flats)
        results.append((own, flats))
    return results


@pytest.mark.parametrize("numel", [10, 1000, 2048, 5000])
@pytest.mark.parametrize("ranks", [(0, 1), (0, 1, 2), (3, 1, 0, 2)])
def test_chunks_of_the_code_for_nccl_are_those_of_gloo(pool, numel, ranks):
    answers = [answer for answer in pool.run(_collectives, numel, ranks) if answer is not None]
    factor = sum(rank + 1 for rank in ranks)
    for gloo, nccl in answers:
        for some in (gloo, nccl):
            for flat, size in zip(some[1], (numel, numel // 2), strict=True):
                assert torch.equal(flat, torch.arange(size, dtype=torch.float64) * factor)
        assert all(torch.equal(a, b) for a, b in zip(gloo[0], nccl[0], strict=True))
