"""The worker pool of the tests themselves."""

import os
import time

import pytest
import torch


def _sum_of_ranks(world, offset):
    return world.control.all_reduce(torch.tensor([world.rank + offset])).item()


def _pair_sum(world):
    group = world.group((0, 1))
    return group.all_reduce(torch.tensor([group.index + 1])).item()


def _fail_on(world, rank):
    if world.rank == rank:
        raise ValueError("no luck")
    world.control.barrier()


def _die_on(world, rank):
    if world.rank == rank:
        os._exit(3)
    world.control.barrier()


def _sleep_on(world, rank):
    if world.rank == rank:
        time.sleep(60)


def _pid(world):
    return os.getpid(), torch.get_num_threads()


def test_results_by_rank_from_the_same_workers(pool):
    assert pool.run(_sum_of_ranks, 10) == [46] * 4
    first, second = pool.run(_pid), pool.run(_pid)
    assert first == second and len(set(first)) == 4
    assert pool.run(_pair_sum, num_ranks=2) == [3, 3]
    assert all(threads == 1 for _, threads in first)
    assert torch.get_num_threads() == 1  # And here.


def test_failures_name_the_rank_and_leave_a_working_pool(pool):
    with pytest.raises(ValueError, match="no luck") as caught:
        pool.run(_fail_on, 2)
    assert "on rank 2" in caught.value.__notes__[0] and "_fail_on" in caught.value.__notes__[0]
    with pytest.raises(RuntimeError, match="rank 1 died with exit code 3"):
        pool.run(_die_on, 1)
    with pytest.raises(TimeoutError, match=r"ranks \[3\]"):
        pool.run(_sleep_on, 3, timeout=0.5)
    assert pool.run(_sum_of_ranks, 0) == [6] * 4
