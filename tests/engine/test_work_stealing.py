"""Waiting prompts that go from one replica to another: none is lost, none done twice or differently."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from realhf.data.batch import Batch, Packed
from realhf.dist.group import World
from realhf.engine.native import NativeEngine
from realhf.engine.work import Generate, SamplingConfig
from realhf.engine.work_queue import Lines
from realhf.errors import UserError
from realhf.graph import FunctionCall
from realhf.layout import Layout
from realhf.model_config import ModelConfig
from realhf.param_spec import model_spec
from tests.families import MOE_CASES
from tests.nn.tiny import hf_config

OUTPUTS = ("sequences", "mask", "logprobs", "finished")
MAX_NEW = 40
BLOCK_GIB = 4 * 2 * 64 * 2 * 8 * 8 / 2**30
"""Of layers, keys and values, tokens, heads, dims and bytes, for blocks of 64 tokens."""


def _engine(world, layout, *, family="qwen2"):
    config = hf_config(tied=True) | {"eos_token_id": [3, 20], "max_position_embeddings": 256}
    if family == "qwen2-moe":
        config = MOE_CASES[family].hf(architectures=["Qwen2MoeForCausalLM"], eos_token_id=[5, 11])
    engine = NativeEngine(model_spec(ModelConfig.from_hf(config)), layout, world, dtype="float64")
    engine.load(None, seed=0)
    return engine


def _shares(num_shards):
    """Numbers of samples by shard: the first one has nearly all of 48."""
    return [list(range(48 - 2 * num_shards + 2)), *([i, i + 1] for i in range(50 - 2 * num_shards, 48, 2))]


def _prompts(lengths):
    """Of 48 samples, three neighbours have the same; `lengths` of them in turn."""
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(4, 20, (lengths[i % len(lengths)],), generator=generator) for i in range(16)]
    return [prompt for prompt in prompts for _ in range(3)]


def _call(**options):
    sampling = SamplingConfig(max_new_tokens=MAX_NEW)
    work = Generate(sampling, **{"seed": 3, "max_rows": 4} | options)
    return FunctionCall("actor_generate", "generate", ("prompts",), OUTPUTS, role="actor", work=work)


def _generate(world, text, lengths, options, num_calls=1, family="qwen2"):
    """What this rank gets, how many prompts it took from others, and the store's keys before and after."""
    layout = Layout.parse(text)
    if world.rank not in layout:
        return None
    engine, ids = _engine(world, layout, family=family), _shares(layout.dp)[layout.coordinate(world.rank).dp]
    prompts = _prompts(lengths)
    batch = Batch(ids, {"prompts": Packed.of([prompts[i] for i in ids])})
    num_keys = [] if world.size == 1 else [_num_keys(engine)]
    made = [engine.run(_call(**options), [batch], micro_batch_tokens=1000).batch for _ in range(num_calls)]
    num_keys += [] if world.size == 1 else [_num_keys(engine)]
    columns = [{key: _rows(column) for key, column in batch.fields.items()} for batch in made]
    return ids, [batch.ids for batch in made], columns, engine.num_stolen, num_keys


def _rows(column):
    return column.split() if isinstance(column, Packed) else column


def _num_keys(engine):
    """Of the whole store, while nobody uses it."""
    engine.groups.all.barrier()
    num_keys = engine.groups.world.store("").num_keys()
    engine.groups.all.barrier()
    return num_keys


def _check(pool, layout, lengths, options, *, num_calls=1, family="qwen2"):
    """Every rank of the last stage has what one process computes; how many prompts each rank has taken."""
    _, [all_ids], [expected], _, _ = _generate(World(), "d1@0", lengths, {"max_rows": 512}, family=family)
    assert all_ids == list(range(48))
    num_tokens = {len(tokens) for tokens in expected["sequences"]}
    assert len(num_tokens) > 3 and 0 < float(expected["finished"].mean()) < 1
    results = pool.run(_generate, layout, lengths, options, num_calls, family)
    results = {rank: result for rank, result in enumerate(results) if result is not None}
    last = Layout.parse(layout).grid[-1].ravel().tolist()
    for rank, (ids, made, columns, _, (before, after)) in results.items():
        assert before == after
        if rank not in last:
            assert made == [[]] * num_calls
            continue
        assert made == [ids] * num_calls
        for found in columns:
            for key in ("sequences", "mask"):
                for ours, i in zip(found[key], ids, strict=True):
                    assert torch.equal(ours, expected[key][i]), (rank, key, i)
            for ours, i in zip(found["logprobs"], ids, strict=True):
                torch.testing.assert_close(ours, expected["logprobs"][i], rtol=1e-9, atol=1e-10)
            assert torch.equal(found["finished"], expected["finished"][ids])
    return {rank: num_stolen for rank, (*_, num_stolen, _) in results.items()}


@pytest.mark.parametrize(
    "layout", ["d2@0-1", "d4@3,1,0,2", "d2t2@0-3", "d2p2@0-3", "d2c2@0-3", "c2t2@0-3"])
def test_replicas_that_are_done_continue_the_prompts_of_others(pool, layout):
    """All but a few samples begin on the first data shard, which has few slots."""
    num_stolen = _check(pool, layout, [3, 1, 6, 2], {}, num_calls=2)
    parsed = Layout.parse(layout)
    for dp in range(1, parsed.dp):  # These have one prompt or two, which begin at once.
        for rank in parsed.grid[:, dp].ravel().tolist():
            assert num_stolen[rank] > 0
    for replica in parsed.grid.transpose(1, 2, 0, 3).reshape(parsed.dp * parsed.cp, -1).tolist():
        assert len({num_stolen[rank] for rank in replica}) == 1


@pytest.mark.parametrize(("layout", "gib"), [("d2@0-1", 5 * BLOCK_GIB), ("d2p2@0-3", 5 * BLOCK_GIB)])
def test_what_waits_for_memory_goes_to_others_too(pool, layout, gib):
    """Prompts of one and of two blocks: three rows' worth for the samples of a shard."""
    num_stolen = _check(pool, layout, [70, 2, 100, 64], {"kv_cache_gib": gib, "max_rows": 512})
    assert num_stolen[Layout.parse(layout).grid[0, 1, 0, 0]] > 0


def test_experts_keep_company_while_prompts_move(pool):
    num_stolen = _check(pool, "d2e2p2@0-3", [3, 1, 6, 2], {}, family="qwen2-moe")
    assert num_stolen[1] > 0


def test_nothing_moves_where_all_begin_at_once(pool):
    num_stolen = _check(pool, "d2@0-1", [3, 1, 6, 2], {"max_rows": 46})
    assert num_stolen == {0: 0, 1: 0}


def _refusal(world, layout, options):
    """The error of a call that nobody can do. Both shards are told of the long prompts, one has them."""
    lengths = [3, 230, 4, 250]
    with pytest.raises(UserError) as refused:
        _generate(world, layout, lengths, options)
    return str(refused.value)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"kv_cache_gib": 2 * BLOCK_GIB}, "one sample of 290 tokens"),
        ({"kv_cache_gib": 4 * BLOCK_GIB}, "one sample of 290 tokens"),
    ],
)
def test_a_sample_that_can_never_run_is_refused_alike_everywhere(pool, options, sentence):
    alone = _refusal(World(), "d1@0", options)
    assert sentence in alone
    assert pool.run(_refusal, "d2@0-1", options, num_ranks=2) == [alone] * 2


COUNTS = [40, 0, 200, 7]
"""Items in the lines of four replicas."""


def _drain(lines):
    taken = []
    while (place := lines.take()) is not None:
        taken.append(place)
    return taken


def _check_drained(taken):
    """`taken` by replica: everything once, one's own from the front, that of others from the back."""
    counter = Counter(place for places in taken for place in places)
    assert counter == {(line, number): 1 for line, count in enumerate(COUNTS) for number in range(count)}
    for index, places in enumerate(taken):
        own = [number for line, number in places if line == index]
        assert own == list(range(len(own)))
        assert places[: len(own)] == [(index, number) for number in own]
        for line in {line for line, _ in places} - {index}:
            stolen = [number for other, number in places if other == line]
            assert stolen == sorted(stolen, reverse=True)


def test_many_threads_take_every_item_once():
    store = dist.HashStore()
    with ThreadPoolExecutor(len(COUNTS)) as threads:
        taken = threads.map(lambda index: _drain(Lines(COUNTS, index, store)), range(len(COUNTS)))
        _check_drained(list(taken))


def _drain_together(world):
    store = world.store("test of lines")
    before = store.num_keys()
    world.control.barrier()
    lines = Lines(COUNTS, world.rank, store)
    taken = [lines.take()] if world.rank == 1 else []  # Which has none of its own.
    world.control.barrier()
    taken += _drain(lines)
    world.control.barrier()
    lines.forget()
    world.control.barrier()
    assert store.num_keys() == before
    return taken


def test_many_processes_take_every_item_once(pool):
    taken = pool.run(_drain_together)
    _check_drained(taken)
    assert taken[1][0] == (2, 199)
