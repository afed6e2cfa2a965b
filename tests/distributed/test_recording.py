"""Tests the simulator of posts with orders that are known to drain or to block."""

import random
import threading

import pytest
import torch

from realhf.distributed.group import Group
from realhf.distributed.process import WatchedProcess
from tests.distributed.recording import Post, PostLog, RecordingBackend, fault_of
from tests.samples import drawn

F32 = torch.float32


def _random_logs(draw):
    """Return posts of four ranks in one order everywhere: collectives and messages of random groups."""
    logs = {rank: [] for rank in range(4)}
    for _ in range(draw.randint(5, 30)):
        ranks = tuple(sorted(draw.sample(range(4), draw.randint(2, 4))))
        name = str(ranks)
        size = 4 * draw.randint(1, 99)
        if draw.random() < 0.5:
            for rank in ranks:
                logs[rank].append(Post(name, ranks, "all_reduce", size, F32))
        else:
            a, b = draw.sample(ranks, 2)
            logs[a].append(Post(name, ranks, "messages", size, F32, sends=((b, size),)))
            logs[b].append(Post(name, ranks, "messages", size, F32, recvs=((a, size),)))
    return logs


def _drains_by_brute_force(logs):
    """Return whether repeated passes over all posts, in any order, complete them (an independent rule)."""
    heads = dict.fromkeys(logs, 0)
    done = False
    while not done:
        done = True
        for rank, posts in logs.items():
            if heads[rank] == len(posts):
                continue
            post = posts[heads[rank]]
            ends = {rank, *(peer for peer, _ in (*post.sends, *post.recvs))}
            members = set(post.ranks) if post.operation != "messages" else ends
            if all(heads[r] < len(logs[r]) for r in members):
                theirs = [logs[r][heads[r]] for r in members]
                if len({(p.communicator, p.operation, p.num_bytes) for p in theirs}) == 1 and all(
                    {r, *(peer for peer, _ in (*p.sends, *p.recvs))} == ends or p.operation != "messages"
                    for r, p in zip(members, theirs, strict=True)
                ):
                    for r in members:
                        heads[r] += 1
                    done = False
    return all(heads[rank] == len(posts) for rank, posts in logs.items())


@pytest.mark.parametrize("seed", drawn(range(50), 20))
def test_one_order_drains_and_a_swap_is_found_whenever_it_blocks(seed):
    draw = random.Random(seed)
    logs = _random_logs(draw)
    assert fault_of(logs) == "" and _drains_by_brute_force(logs)
    num_blocked = 0
    for rank, posts in logs.items():
        for i in range(len(posts) - 1):
            swapped = {**logs, rank: [*posts[:i], posts[i + 1], posts[i], *posts[i + 2 :]]}
            assert (fault_of(swapped) == "") == _drains_by_brute_force(swapped)
            num_blocked += not _drains_by_brute_force(swapped)
    assert num_blocked or all(len(posts) < 2 for posts in logs.values())


def test_two_communicators_in_two_orders_block():
    one, two = (Post(name, (0, 1), "all_reduce", 4, F32) for name in ("one", "two"))
    assert fault_of({0: [one, two], 1: [one, two]}) == ""
    found = fault_of({0: [one, two], 1: [two, one]})
    waits = "rank 0 waits in all_reduce of 4 bytes on one; rank 1 waits in all_reduce of 4 bytes on two"
    assert found == waits


def test_a_reallocation_that_two_ranks_post_at_two_places_of_the_program_blocks():
    """In the program, rank 0 sends weights to rank 1; then ranks 1 and 2 have a call, and then 0 and 2."""
    weights, first, second = (
        Post(name, ranks, "all_reduce", 4, F32)
        for name, ranks in [("realloc", (0, 1)), ("first", (1, 2)), ("second", (0, 2))]
    )
    in_place = {0: [weights, second], 1: [weights, first], 2: [first, second]}
    assert fault_of(in_place) == ""
    moved = fault_of({**in_place, 0: [second, weights]})  # Rank 0 has gone on, as rank 1 was not ready.
    assert "rank 0 waits in all_reduce of 4 bytes on second" in moved
    assert "rank 1 waits in all_reduce of 4 bytes on realloc" in moved
    later = {0: [second, weights], 1: [first, weights], 2: [first, second]}
    assert fault_of(later) == ""  # At one place for all it may be later.


def test_a_missing_post_and_other_sizes_are_found():
    one, large = (Post("one", (0, 1), "all_reduce", size, F32) for size in (4, 8))
    assert fault_of({0: [one, one], 1: [one]}) == "rank 0 waits in all_reduce of 4 bytes on one"
    assert "rank 0 posts all_reduce of 4 bytes" in fault_of({0: [one], 1: [large]}) or (
        "rank 1 posts all_reduce of 8 bytes" in fault_of({0: [one], 1: [large]}))


def test_a_second_thread_that_posts_fails_at_once():
    log = PostLog()
    groups = [
        Group((0, 1), 0, RecordingBackend(name, (0, 1), 0, log), native=True, process=WatchedProcess())
        for name in ("gradients", "weights")
    ]
    groups[0].all_reduce(torch.zeros(3))
    errors = []

    def post():
        try:
            groups[1].exchange([(1, torch.zeros(3))], [])
        except AssertionError as error:
            errors.append(str(error))

    thread = threading.Thread(target=post, name="second")
    thread.start()
    thread.join()
    assert errors == ["two threads post: MainThread, and second messages of 12 bytes on weights"]
    assert len(log.posts) == 1
