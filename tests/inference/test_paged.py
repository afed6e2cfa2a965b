"""Generation by the paged path, one step ahead, against the path of a CPU: the same tokens."""

from dataclasses import replace

import pytest
import torch

from realhf.distributed.world import World
from realhf.errors import UserError
from realhf.inference.page_pool import page_pool
from realhf.layout import Layout
from tests.inference.paged import PagedReference, engine_of, recorded, write_family
from tests.inference.rounds import (
    BLOCK_GIB,
    Case,
    alone,
    generate_in_rounds,
    make_engine,
    prompts_of,
    rows_of,
    write_versions,
)
from tests.inference.test_generate import _generate, long_prompts
from tests.samples import marked

FAMILIES = [
    "llama-3.1", "qwen2-window", "mistral", "gemma-2", "gpt2", "phi-3", "llama-dynamic", "mixtral",
    "qwen3-moe", "deepseek-v3",
]
NEW = 40
_A, _B, _C = prompts_of(3, [70, 3, 64])
BATCHES = [[_A, _A, _A, _B, _B, _C, _C, _B], [_A, _C]]


@pytest.fixture(scope="module")
def versions(tmp_path_factory):
    return write_versions(tmp_path_factory.mktemp("versions"), 1)[1]


def _tight(engine):
    """Return settings with few slots, memory for few rows, and prompts in chunks."""
    gib = 7 * 64 * engine.model.cache_token_bytes / 2**30
    return [{"max_rows": 5, "prefill_tokens": 30}, {"kv_cache_gib": gib}]


@pytest.mark.parametrize("name", marked(FAMILIES, quick=[0]))
def test_tokens_are_those_of_the_cpu(name, tmp_path):
    write_family(name, tmp_path)
    on_cpu = engine_of(tmp_path)
    engine = engine_of(tmp_path, paged=PagedReference())
    for options in ({}, *_tight(engine)):
        options = {"seed": 3, "max_new_tokens": NEW, **options}
        expected, whole = _generate(on_cpu, long_prompts(), **options)
        assert len({len(response) for response in expected}) > 1
        made, again = _generate(engine, long_prompts(), **options)
        assert made == expected, options
        logprobs = again["gen_logprobs"].values, whole["gen_logprobs"].values
        torch.testing.assert_close(*logprobs, rtol=1e-9, atol=1e-9)
        assert torch.equal(again["finished"], whole["finished"])


@pytest.mark.parametrize("name", marked(["qwen3-moe"], quick=[0]))
def test_reading_many_steps_at_once_changes_no_token(name, tmp_path):
    """Long samples are read in windows of up to 10 steps, in which others end; with and without a queue."""
    write_family(name, tmp_path)
    on_cpu = engine_of(tmp_path)
    engine = engine_of(tmp_path, paged=PagedReference())
    prompts = [[*range(30 + i, 36 + i)] for i in range(12)]
    for options in ({}, {"max_rows": 5}):
        options = {"seed": 4, "max_new_tokens": 150, "ignore_eos": True, "stop_token_ids": (5,), **options}
        expected, _ = _generate(on_cpu, prompts, **options)
        assert max(map(len, expected)) > 100 and len({len(response) for response in expected}) > 6
        assert _generate(engine, prompts, **options)[0] == expected


def _same_rows(found, expected):
    assert found.keys() == expected.keys()
    for i, row in expected.items():
        assert torch.equal(found[i][0], row[0]) and bool(found[i][3]) == bool(row[3]), i
        torch.testing.assert_close(found[i][2], row[2], rtol=1e-9, atol=1e-10)


LAYOUTS = [
    "t2@0-1", "t2p2@0-3", "d2p2@0-3", "c2@0-1", "e2@0-1", "e2p2@0-3", "e2t2@0-3", "d4e2@0-3"]


@pytest.mark.parametrize("layout", marked(LAYOUTS, quick=[5]))
def test_layouts_change_nothing(pool, versions, layout):
    """In rounds, with slots for a part of the samples and memory for few of them."""
    model = None if layout.startswith("e") else versions
    case = Case(BATCHES, [7], 40, {"max_rows": 6, "kv_cache_gib": 9 * BLOCK_GIB}, model, paged=True)
    expected, _ = alone(replace(case, paged=False, options={}))
    assert len({len(row[0]) for row in expected.values()}) > 3
    found = {}
    for rows, _ in pool.run(generate_in_rounds, layout, case):
        found |= rows
    _same_rows(found, expected)


def test_pages_live_across_calls_and_are_given_back(versions):
    """A cache that is kept has its pages until it is flushed; the other pages serve other calls."""
    case = Case(BATCHES, [5, 5, None], 24, {"cache_on_update": "keep"}, versions, paged=True)
    engine = make_engine(case, World(), Layout.parse("d1@0"))
    kept = engine.generate(case.call, case.batch(0, range(4)), budget=5)
    assert len(kept.unfinished) > 0
    first = engine.generate(case.call, case.batch(0, range(8)))
    cache = engine.pages.cache
    size = cache.num_blocks
    again = engine.generate(case.call, case.batch(0, range(8)))
    _same_rows(rows_of(again.batch), rows_of(first.batch))
    assert engine.pages.cache is cache and cache.num_blocks == size
    token_bytes = engine.model.cache_token_bytes
    assert engine.pages.num_bytes == size * cache.block_size * token_bytes
    engine.pages.release()
    assert engine.pages.cache is cache  # Rows between rounds have pages.
    engine.flush_cache("gen")
    engine.pages.release()
    assert engine.pages.num_bytes == 0
    _same_rows(rows_of(engine.generate(case.call, case.batch(0, range(8))).batch), rows_of(first.batch))


def test_recorded_passes_are_dropped_with_what_they_read(versions):
    """With the memory of the weights, but not with that of the pages, which comes back to its addresses."""
    case = Case(BATCHES, [None], 24, {}, versions, paged=True)
    engine = make_engine(case, World(), Layout.parse("d1@0"))
    tapes = recorded(engine, PagedReference())
    expected, _ = alone(replace(case, paged=False))
    counts = []
    for change in ("nothing", "pages", "weights"):
        if change == "pages":
            engine.pages.release()
        if change == "weights":
            memory = engine.model.flat.untyped_storage()
            weights = engine.model.flat.clone()
            memory.resize_(0)
            held = torch.zeros(memory.nbytes() + len(weights), dtype=torch.float64)
            memory.resize_(weights.nbytes)
            engine.model.flat.copy_(weights)
            del held
        found = {i: row for i, row in alone(case, engine=engine)[0].items()}
        _same_rows(found, expected)
        counts.append(len(tapes))
    assert counts[0] == counts[1] < counts[2]


@pytest.mark.parametrize("page_tokens, tokens", [(1, 64), (16, 64), (48, 96), (256, 256)])
def test_the_backend_decides_on_the_size_of_a_page(versions, page_tokens, tokens):
    case = Case(BATCHES, [None], 24, {"prefill_tokens": 50}, versions)
    expected, _ = alone(case)
    engine = make_engine(case, World(), Layout.parse("d1@0"))
    engine.pages = page_pool(engine.model, PagedReference(page_tokens))
    _same_rows(alone(case, engine=engine)[0], expected)
    assert engine.pages.cache.block_size == tokens


class _Refusing(PagedReference):
    name = "a kernel"

    def refuses(self, shape, *, paged):
        return "it is too wide" if paged else None


def test_a_backend_that_cannot_is_refused_before_the_run(versions):
    case = Case(BATCHES, [None], 24, {}, versions)
    engine = make_engine(case, World(), Layout.parse("d1@0"))
    with pytest.raises(UserError, match="a kernel cannot compute the attention of the cache: it is too wide"):
        page_pool(engine.model, _Refusing())


class _Splitting(PagedReference):
    """A backend that notes into how many parts it was told to split the keys."""

    def __init__(self):
        super().__init__()
        self.told = set()

    def paged(self, *args, num_splits=None):
        self.told.add(num_splits)
        return super().paged(*args, num_splits=num_splits)


@pytest.mark.parametrize("deterministic, told", [(False, {None}), (True, {1})])
def test_deterministic_runs_fix_the_number_of_splits(versions, deterministic, told):
    case = Case(BATCHES, [None], 4, {}, versions)
    engine = make_engine(case, World(), Layout.parse("d1@0"))
    backend = _Splitting()
    engine.pages = page_pool(engine.model, backend)
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    try:
        alone(case, engine=engine)
    finally:
        torch.use_deterministic_algorithms(False)
    assert backend.told == told
