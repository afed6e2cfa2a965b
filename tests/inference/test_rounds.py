"""Generation in rounds: with constant weights the tokens of one call, with others those of plain decoding."""

import time
from dataclasses import replace

import pytest
import torch

from realhf.engine import native
from realhf.inference.prompt_queue import PromptQueue
from tests.inference.rounds import (
    BLOCK_GIB,
    Case,
    alone,
    check_rows,
    count_restarts,
    expected_rows,
    generate_in_rounds,
    prompts_of,
    write_versions,
)
from tests.samples import marked

MAX_NEW = 24


@pytest.fixture(scope="module")
def versions(tmp_path_factory):
    """Models of versions 0 to 5, and the pattern of their directories."""
    return write_versions(tmp_path_factory.mktemp("versions"), 6)


def _batches():
    """Return prompts that arrive in two rounds, of up to three blocks, some of them several times."""
    a, b, c, d, e = prompts_of(5, [3, 60, 1, 64, 125])
    return [[a, a, a, b, b, c, d, d], [e, e, c, a]]


def assert_same(found, expected):
    """Check that rows are equal except for their versions."""
    assert found.keys() == expected.keys()
    for i, row in expected.items():
        for ours, theirs in zip(found[i][:2], row[:2], strict=True):
            assert torch.equal(ours, theirs), i
        torch.testing.assert_close(found[i][2], row[2], rtol=1e-9, atol=1e-10)
        assert found[i][3] == row[3]


@pytest.mark.parametrize("budget", marked([1, 7, 10, 16, 20], quick=[1, 3]))
def test_rounds_give_the_tokens_of_one_call(versions, budget):
    case = Case(_batches(), [None], MAX_NEW, model=versions[1])
    expected, _ = alone(case)
    lengths = {int(row[1].sum()) for row in expected.values()}
    assert MAX_NEW in lengths and len(lengths) > 3
    found, history = alone(replace(case, budgets=[budget]))
    assert_same(found, expected)
    assert len(history) == -(-MAX_NEW // budget) + (lengths != {MAX_NEW} and len(history[-2]) > 0)
    for i, (_, mask, _, _, numbers) in found.items():
        first, drawn = int(i >= 8), int(mask.sum())
        assert numbers[len(mask) - drawn :].tolist() == [first + at // budget for at in range(drawn)]
    mixed, _ = alone(replace(case, budgets=[budget, 3, None]))
    assert_same(mixed, expected)


@pytest.mark.parametrize(
    "options",
    marked([
        {"max_rows": 2}, {"max_rows": 1}, {"prefill_tokens": 7},
        {"kv_cache_gib": 5 * BLOCK_GIB}, {"kv_cache_gib": 6 * BLOCK_GIB, "prefill_tokens": 50},
    ], quick=[4]),
)
@pytest.mark.slow
def test_slots_memory_and_chunks_change_nothing(versions, options, monkeypatch):
    restarted = count_restarts(monkeypatch)
    case = Case(_batches(), [None], 70, model=versions[1])
    expected, _ = alone(case)
    assert not restarted
    for budget, paged in ((16, False), (33, False), (16, True)):
        found, _ = alone(replace(case, budgets=[budget], options=options, paged=paged))
        assert_same(found, expected)
    assert bool(restarted) == ("kv_cache_gib" in options)


_SLOW = ("d2@0-1", "t2@0-1", "p2@0-1", "c2@0-1")
LAYOUTS = ["c2t2@0-3", *(pytest.param(layout, marks=pytest.mark.slow) for layout in _SLOW)]


class _CountingQueue(PromptQueue):
    """A queue that counts the samples of earlier rounds that this replica took from others."""

    num_taken = 0
    unfinished = frozenset[int]()

    def take(self):
        if self._replicas.index == 0:  # The first replica is slow, so that others take what is its own.
            time.sleep(0.02)
        return super().take()

    def collect_results(self, made, ids):
        _CountingQueue.num_taken += len(self._stolen.keys() & self.unfinished)
        _CountingQueue.unfinished = frozenset(range(1000))  # After the first round.
        return super().collect_results(made, ids)


def _generate_counting(world, text, case):
    """Generate; return rows, and how many unfinished samples other replicas took before this one."""
    queue = native.PromptQueue
    native.PromptQueue = _CountingQueue
    _CountingQueue.num_taken = 0
    _CountingQueue.unfinished = frozenset()
    try:
        return generate_in_rounds(world, text, case)[0], _CountingQueue.num_taken
    finally:
        native.PromptQueue = queue


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["d2@0-1", "d2p2@0-3"])
def test_unfinished_samples_that_others_take_keep_their_columns(pool, versions, layout):
    """No samples come after the first round; the first shard has most, and few slots."""
    batches = [[prompt for batch in _batches() for prompt in batch]]
    case = Case(batches, [5], MAX_NEW, {"max_rows": 2}, versions[1], changes=True)
    expected = expected_rows(case, versions[0], keep=False)
    results = pool.run(_generate_counting, layout, case)
    assert sum(num_taken for _, num_taken in results) > 0
    rows = {}
    for part, _ in results:
        rows |= part
    check_rows(rows, expected, case)


def _gathered(pool, layout, case):
    """Generate on the pool; return the rows of all heads."""
    results = pool.run(generate_in_rounds, layout, case)
    rows = {}
    for part, _ in results:
        assert not rows.keys() & part.keys()
        rows |= part
    return rows


@pytest.mark.parametrize(("budget", "options"), marked([
    (1, {}), (7, {"max_rows": 2}), (10, {"work_stealing": False}), (16, {}),
], quick=[1]))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rounds_are_the_same_on_every_layout(pool, versions, layout, budget, options):
    case = Case(_batches(), [None], MAX_NEW, model=versions[1])
    expected, _ = alone(case)
    assert_same(_gathered(pool, layout, replace(case, budgets=[budget], options=options)), expected)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["e2@0-1", "e2p2@0-3"])
def test_experts_take_part_in_the_rounds_of_others(pool, layout):
    """Most samples begin on the first data shard, so that others have rounds without any."""
    case = Case(_batches(), [None], 12)
    expected, _ = alone(case)
    assert len({int(row[1].sum()) for row in expected.values()}) > 2
    for budget, options in ((1, {"max_rows": 2}), (7, {}), (5, {"work_stealing": False})):
        assert_same(_gathered(pool, layout, replace(case, budgets=[budget], options=options)), expected)


def _changing(versions, budget=5):
    return Case(_batches(), [budget], MAX_NEW, model=versions[1], changes=True)


def test_a_round_computes_histories_with_its_own_weights(versions):
    case = _changing(versions)
    expected = expected_rows(case, versions[0], keep=False)
    lengths = {len(logprobs) for _, logprobs, _ in expected.values()}
    assert MAX_NEW in lengths and len(lengths) > 3
    constant = expected_rows(replace(case, changes=False), versions[0], keep=False)
    assert sum(constant[i][0] != expected[i][0] for i in expected) > 5
    for options in ({}, {"max_rows": 2, "prefill_tokens": 9}, {"kv_cache_gib": 5 * BLOCK_GIB}):
        found, _ = alone(replace(case, options=options))
        check_rows(found, expected, case)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_change_on_every_layout(pool, versions, layout):
    case = _changing(versions)
    expected = expected_rows(case, versions[0], keep=False)
    for options in ({}, {"max_rows": 2}):
        check_rows(_gathered(pool, layout, replace(case, options=options)), expected, case)
