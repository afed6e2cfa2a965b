"""Tests the simulator of posts with orders that are known to drain or to block."""

import random
import threading
from dataclasses import replace

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


def _with_chains(logs, draw):
    """Return the same posts in two chains, each communicator in one of them."""
    names = sorted({post.communicator for posts in logs.values() for post in posts})
    chain_of = {name: draw.choice(["calls", "background"]) for name in names}
    return {
        rank: [replace(post, chain=chain_of[post.communicator]) for post in posts]
        for rank, posts in logs.items()}


def _drains_by_simulation(logs):
    """Begin and end posts one by one, in any order that a device might take (another independent rule)."""
    begun = {rank: [] for rank in logs}  # Numbers of the posts that have begun, and not ended.
    following = dict.fromkeys(logs, 0)
    is_moving = True
    while is_moving:
        is_moving = False
        for rank, posts in logs.items():
            number = following[rank]
            busy = {posts[i].chain for i in begun[rank]} | {posts[i].communicator for i in begun[rank]}
            if number < len(posts) and not busy & {posts[number].chain, posts[number].communicator}:
                begun[rank].append(number)
                following[rank] += 1
                is_moving = True
        for rank, posts in logs.items():
            for number in list(begun[rank]):
                post = posts[number]
                ends = {rank, *(peer for peer, _ in (*post.sends, *post.recvs))}
                found = {
                    r: i for r in (post.ranks if post.operation != "messages" else ends) for i in begun[r]
                    if logs[r][i].communicator == post.communicator}
                others = [logs[r][i] for r, i in found.items()]
                meets = all({r, *(p for p, _ in (*x.sends, *x.recvs))} == ends for r, x in zip(
                    found, others, strict=True)) if post.operation == "messages" else True
                if len(found) == len(post.ranks if post.operation != "messages" else ends) and meets and len(
                        {(x.operation, x.num_bytes) for x in others}) == 1:
                    for r, i in found.items():
                        begun[r].remove(i)
                    is_moving = True
    return all(following[rank] == len(posts) and not begun[rank] for rank, posts in logs.items())


@pytest.mark.parametrize("seed", drawn(range(50), 10))
def test_two_chains_drain_where_one_does_and_swaps_are_found(seed):
    """Posts of the other chain have begun before: so two chains may overlap, and never wait in a ring that
    one chain would not have."""
    draw = random.Random(1000 + seed)
    logs = _with_chains(_random_logs(draw), draw)
    assert fault_of(logs) == "" and _drains_by_simulation(logs)
    for rank, posts in logs.items():
        for i in range(len(posts) - 1):
            swapped = {**logs, rank: [*posts[:i], posts[i + 1], posts[i], *posts[i + 2 :]]}
            assert (fault_of(swapped) == "") == _drains_by_simulation(swapped)


def test_a_post_waits_for_the_beginning_of_the_other_chain_only():
    """Rank 1 comes to the sums of gradients last. Its peers on a tp group go on meanwhile, but not beyond a
    second sum: it begins after the first one has ended."""
    tp = Post("tp", (0, 2), "all_reduce", 4, F32)
    sums = Post("dp", (0, 1), "reduce_scatter", 4, F32, chain="background")
    tp_1 = Post("tp 1", (1, 3), "all_reduce", 4, F32)
    logs = {0: [sums, tp], 2: [tp], 1: [tp_1, sums], 3: [tp_1]}
    assert fault_of(logs) == ""
    unfinished = {**logs, 1: []}
    del unfinished[3]
    assert fault_of(unfinished) == "rank 0 waits in reduce_scatter of 4 bytes on dp"
    one_chain = {rank: [replace(post, chain="calls") for post in posts] for rank, posts in unfinished.items()}
    assert "rank 2 waits in all_reduce" in fault_of(one_chain)
    second = {**unfinished, 0: [sums, replace(sums), tp]}
    assert "rank 2 waits in all_reduce" in fault_of(second)


@pytest.mark.parametrize("setting, chains", [("1", ["calls", "background"]), ("0", ["calls", "calls"])])
def test_gradients_and_reallocations_are_posted_beside_calls(monkeypatch, setting, chains):
    """Without NCCL's order of launches there is one chain."""
    monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", setting)
    process = WatchedProcess()
    log = PostLog(process.communicators)

    def group(purpose):
        backend = RecordingBackend(purpose, (0, 1), 0, log)
        return Group((0, 1), 0, backend, native=True, process=process, purpose=purpose)

    data, weights = group("data"), group("realloc")
    data.all_reduce(torch.zeros(3))
    data.post_reduce_scatter(torch.zeros(256))()
    data.sum_rests([torch.zeros(257)])
    weights.exchange([(1, torch.zeros(3))], [])
    calls, background = chains
    assert [post.chain for post in log.posts] == [calls, background, calls, background]
