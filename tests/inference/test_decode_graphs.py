"""Recorded decoding, replayed on a CPU as CUDA graphs are: the same kernels on the same memory, no others."""

import gc
from collections import Counter
from contextlib import nullcontext
from itertools import count

import pytest
import torch

from realhf.distributed.communicators import Communicators
from realhf.inference.forward_batch import PagedBackends, paged_rows
from realhf.inference.kv_cache import BlockTables, RowPages
from realhf.inference.page_pool import PagePool, recorder
from realhf.models.kv_blocks import padded_size
from realhf.models.lora import LoraConfig
from tests.gpu.host_traffic import PretendedStream
from tests.gpu.models import write_model
from tests.inference.paged import PagedReference, engine_of, recorded, write_family
from tests.inference.test_generate import _generate, long_prompts
from tests.samples import marked


@pytest.mark.parametrize("name", marked(["llama-3.1", "qwen2-window", "gemma-2", "gpt2"], quick=[3]))
def test_replayed_steps_give_the_same_tokens_and_logprobs(name, tmp_path):
    """Passes that one call has recorded are replayed in the next."""
    write_family(name, tmp_path)
    engine = engine_of(tmp_path, paged=PagedReference())
    tapes = recorded(engine, PagedReference())
    for options in ({}, {"max_rows": 5, "prefill_tokens": 30}, {}):
        options = {"seed": 3, "max_new_tokens": 40, **options}
        num_replays = sum(tape.num_replays for tape in tapes)
        expected, whole = _generate(engine_of(tmp_path), long_prompts(), **options)
        made, again = _generate(engine, long_prompts(), **options)
        assert made == expected and {len(response) for response in expected} > {40}
        logprobs = again["gen_logprobs"].values, whole["gen_logprobs"].values
        torch.testing.assert_close(*logprobs, rtol=1e-9, atol=1e-9)
        assert sum(tape.num_replays for tape in tapes) > num_replays + 30
        unrecorded = _generate(engine, long_prompts(), cuda_graphs=False, **options)
        assert unrecorded[0] == expected
    assert len(tapes) <= 5  # Of 16, 8, 4, 2 and 1 rows, however many calls there are.


@pytest.mark.slow
@pytest.mark.parametrize("name", marked(["llama-3.1", "gpt2"], quick=[0]))
def test_merged_adapters_keep_the_recorded_passes(name, tmp_path):
    """The adapters change between two calls, as by training, and their merged weights stay in one place."""
    write_family(name, tmp_path)
    plain = engine_of(tmp_path, lora=LoraConfig(rank=2))
    engine = engine_of(tmp_path, paged=PagedReference(), lora=LoraConfig(rank=2, merge=True))
    tapes = recorded(engine, PagedReference())
    counts = []
    for number in range(4):
        generator = torch.Generator().manual_seed(number)
        engine.adapter_flat.normal_(0.0, 0.1, generator=generator)
        plain.adapter_flat.copy_(engine.adapter_flat)
        if number == 3:
            assert engine.memory()["merged"] == engine.model.merged_bytes > 0
            engine.release("cache")
            assert "merged" not in engine.memory() and "cache" not in engine.memory()
        expected, whole = _generate(plain, long_prompts(), seed=3, max_new_tokens=30)
        made, again = _generate(engine, long_prompts(), seed=3, max_new_tokens=30)
        assert made == expected
        logprobs = again["gen_logprobs"].values, whole["gen_logprobs"].values
        torch.testing.assert_close(*logprobs, rtol=1e-8, atol=1e-9)
        counts.append((len(tapes), sum(tape.num_replays for tape in tapes)))
    # There are 5 sizes, each of which is recorded when it is met for the second time.
    sizes = [num_tapes for num_tapes, _ in counts]
    assert 2 <= sizes[0] <= sizes[1] <= sizes[2] <= 5 and sizes[2] < sizes[3]
    assert counts[2][1] > counts[1][1] + 20
    assert "merged" not in plain.memory()


@torch.inference_mode()
def test_cohorts_with_tables_of_different_widths_take_turns(tmp_path):
    write_family("llama-3.1", tmp_path)
    engine = engine_of(tmp_path, paged=PagedReference())
    tapes = recorded(engine, PagedReference())
    pool = engine.pages
    tables = BlockTables(num_slots=1, num_blocks=3, block_size=16, blocks_per_row=2)
    tables.start(0, pool.lease(2, page_size=16), length=3)
    for step, row_pages in enumerate([2, 9, 2, 9, 2, 9]):
        pages = RowPages(*map(torch.from_numpy, tables.advance_pages(1, pool.table_width(row_pages))))
        token = torch.tensor([step])
        rows = paged_rows(pool.backends, pages, page_size=16)
        expected = engine.model.advance(token, pool.cache, [rows]).clone()
        torch.testing.assert_close(pool.graphs(token, pages).hidden_BH, expected, rtol=1e-12, atol=1e-12)
    assert [tape.num_replays for tape in tapes] == [2, 2]


class _Graph:
    """A CUDA graph, which demands of its pool what torch's allocator demands: other graphs use it, or none
    has ever used it (`create_or_incref_pool` in c10/core). What it records runs once, as it is recorded."""

    users = Counter()

    def capture_begin(self, *, pool, capture_error_mode):
        assert pool not in self.users or self.users[pool] > 0, "a pool that was released is used again"
        assert capture_error_mode == "thread_local" and not gc.isenabled()
        self._pool = pool
        self.users[pool] += 1

    def capture_end(self):
        pass

    def replay(self):
        pass

    def __del__(self):
        self.users[self._pool] -= 1


def test_a_pool_of_recorded_passes_is_not_used_again(monkeypatch):
    """All passes go when the memory of steps is wanted, and are recorded anew."""
    pools = count()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", _Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(pools))
    monkeypatch.setattr(torch.cuda, "Stream", PretendedStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", PretendedStream)
    record = recorder(torch.device("cuda"))
    replays = [record(lambda number=number: number) for number in range(3)]
    assert [replay() for replay in replays] == [0, 1, 2] and set(_Graph.users.values()) == {3}
    replays = replays[2:]
    replays.append(record(lambda: 3))  # While one is left, the pool is.
    assert [replay() for replay in replays] == [2, 3] and len(_Graph.users) == 1
    replays.clear()
    replays.append(record(lambda: 4))
    assert replays[0]() == 4 and sorted(_Graph.users.values()) == [0, 1] and gc.isenabled()


class _Joins(Communicators):
    """Communicators that count how often a stream has waited for the posts so far."""

    num = 0

    def join(self):
        self.num += 1
        super().join()


def _generate_recorded(world, layout, directory):
    """Return tokens, and how many passes were replayed and how many streams waited for posts before."""
    world.process.communicators = _Joins()
    engine = engine_of(directory, paged=PagedReference(), world=world, layout=layout)
    replays = []

    def record(compute):
        return lambda: replays.append(None) or compute()

    engine.pages = PagePool(
        engine.model, backends=PagedBackends(engine.model, PagedReference()), record=record)
    made, _ = _generate(engine, long_prompts(), seed=3, max_new_tokens=20)
    joins = world.process.communicators.num
    world.process.communicators = Communicators()
    return made, len(replays), joins


@pytest.mark.slow
def test_passes_with_collectives_wait_for_earlier_posts(pool, tmp_path):
    """Posts in a recorded pass are no part of the chain of posts (distributed/communicators.py)."""
    write_family("llama-3.1", tmp_path)
    expected, _ = _generate(engine_of(tmp_path), long_prompts(), seed=3, max_new_tokens=20)
    found = pool.run(_generate_recorded, "t2@0-1", tmp_path, num_ranks=2)
    assert found[0][0] == expected
    assert all(num_joins == num_replays > 10 for _, num_replays, num_joins in found)


_STOPS = [12, 4, 4, 0]
"""Rank 0 has so many of the 12 samples in each call, and rank 1 has the others."""


def _generate_with_experts(world, layout, directory):
    """Return for each call this rank's tokens, and how many passes have been recorded and replayed so far."""
    if world.rank > 1:
        return None
    engine = engine_of(directory, paged=PagedReference(), world=world, layout=layout, dtype="float32")
    tapes = recorded(engine, PagedReference())
    found = []
    for number, stop in enumerate(_STOPS):
        if number == 2 and world.rank == 1:
            engine.release("graphs")
        start, stop = (0, stop) if world.rank == 0 else (stop, None)
        made, _ = _generate(
            engine, long_prompts()[start:stop], seed=3, first_id=start, max_new_tokens=40, max_rows=12)
        found.append((made, len(tapes), sum(tape.num_replays for tape in tapes)))
    return found


@pytest.mark.slow
def test_experts_on_several_ranks_are_recorded(pool, tmp_path):
    """All ranks record and replay in the same steps: also without rows, after the pool of one rank grew,
    which keeps what it had recorded, and after one rank lost that before the third call."""
    write_model(
        tmp_path, "qwen3-moe", eos_token_id=[5, 11, 23], max_position_embeddings=256, initializer_range=0.4)
    alone = engine_of(tmp_path, dtype="float32")
    expected, _ = _generate(alone, long_prompts(), seed=3, max_new_tokens=40)
    assert len({len(response) for response in expected}) > 3
    results = pool.run(_generate_with_experts, "e2@0-1", tmp_path)[:2]
    so_far = [0, 0]
    grew = []
    for (first, *counts), (second, *other_counts) in zip(*results, strict=True):
        assert first + second == expected
        assert counts == other_counts and counts[1] > so_far[1] + 10
        grew.append(counts[0] > so_far[0])
        so_far = counts
    assert grew == [True, False, True, True]  # The fourth call has other shapes than the third.


def test_lengths_that_decide_on_angles_are_not_recorded(tmp_path):
    for name in ("phi-3", "llama-dynamic"):
        write_family(name, tmp_path / name)
        engine = engine_of(tmp_path / name, paged=PagedReference())
        tapes = recorded(engine, PagedReference())
        _generate(engine, long_prompts()[-1:], seed=3)
        assert not tapes and not engine.model.recordable


def test_sizes_recur():
    sizes = [padded_size(count) for count in range(1, 1025)]
    assert all(count <= size for count, size in enumerate(sizes, start=1))
    assert sorted(set(sizes)) == [1, 2, 4, 8, 16, *range(32, 257, 32), *range(320, 1025, 64)]
