"""Waiting prompts that another replica steals: none is lost, none is computed twice or differently."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier

import pytest
import torch
import torch.distributed as dist

from realhf.calls import Generate, SamplingConfig
from realhf.data.batch import Batch, Packed
from realhf.distributed.group import PeerError
from realhf.distributed.world import ParallelGroups, World
from realhf.engine.base import output_batch
from realhf.engine.native import NativeEngine, pass_bytes
from realhf.errors import UserError
from realhf.graph import FunctionCall
from realhf.inference.cache_memory import CacheLimit
from realhf.inference.generation import Generation
from realhf.inference.prompt_queue import Lines, PromptQueue
from realhf.inference.response_buffer import PromptGroup
from realhf.inference.rounds import prompt_groups
from realhf.layout import Layout, even_split
from realhf.models.model_config import ModelConfig
from realhf.models.param_spec import model_spec
from tests.families import MOE_CASES
from tests.nn.tiny import hf_config
from tests.samples import marked

OUTPUTS = ("sequences", "mask", "logprobs", "finished")
NUM_LAYERS = 2
MAX_NEW = 16
MANY_NEW = 40
"""New tokens in tests in which the memory of prompts matters."""
BLOCK_GIB = NUM_LAYERS * 2 * 64 * 2 * 8 * 8 / 2**30
"""Size of a block: layers * keys and values * tokens * heads * dims * bytes of a number."""


def _engine(world, layout, *, family="qwen2"):
    config = hf_config(tied=True) | {"eos_token_id": [3, 20], "max_position_embeddings": 256}
    if family == "qwen2-moe":
        config = MOE_CASES[family].hf(architectures=["Qwen2MoeForCausalLM"], eos_token_id=[5, 11])
    config["num_hidden_layers"] = NUM_LAYERS
    engine = NativeEngine(model_spec(ModelConfig.from_hf(config)), layout, world, dtype="float64")
    engine.load(None, seed=0)
    return engine


def _shares(num_shards):
    """Distribute 48 samples: every shard except the first has two."""
    num_first = 48 - 2 * (num_shards - 1)
    return [list(range(num_first)), *([i, i + 1] for i in range(num_first, 48, 2))]


def _prompts(lengths):
    """Return the prompts of 48 samples, three in a row the same; the prompts take turns in `lengths`."""
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(4, 20, (lengths[i % len(lengths)],), generator=generator) for i in range(16)]
    return [prompt for prompt in prompts for _ in range(3)]


def _call(*, max_new=MAX_NEW, **options):
    sampling = SamplingConfig(max_new_tokens=max_new)
    work = Generate(sampling, **{"seed": 3, "max_rows": 4} | options)
    return FunctionCall("actor_generate", "generate", ("prompts",), OUTPUTS, role="actor", work=work)


def _generate(world, text, lengths, options, family="qwen2"):
    """Generate twice; return ids and columns of the results, the number of samples that this rank stole in
    the second generation, and the number of keys in the store before and after."""
    layout = Layout.parse(text)
    if world.rank not in layout:
        return None
    engine, ids = _engine(world, layout, family=family), _shares(layout.dp)[layout.coordinate(world.rank).dp]
    prompts, call = _prompts(lengths), _call(**options)
    batch = Batch(ids, {"prompts": Packed.of([prompts[i] for i in ids])})
    num_keys = [] if world.size == 1 else [_num_keys(engine)]
    made = [engine.generate(call, batch).batch]
    again, num_stolen = _generate_counting(engine, call, batch)
    num_keys += [] if world.size == 1 else [_num_keys(engine)]
    columns = [{key: _rows(column) for key, column in batch.fields.items()} for batch in (*made, again)]
    return ids, [batch.ids for batch in (*made, again)], columns, num_stolen, num_keys


def _generate_counting(engine, call, batch):
    """Generate; return the results, and how many samples the engine stole."""
    cp, queue = engine.groups.cp, PromptQueue(engine.groups, stealing=call.work.work_stealing)
    part = batch.select(range(*even_split(len(batch), cp.size, cp.index)))
    generation = Generation(
        engine.model, call.work, stream=call.name, limit=CacheLimit(engine.groups),
        pass_bytes=partial(pass_bytes, engine.model, call.work))
    generation.submit(prompt_groups(part, ["prompts"]))
    generation.advance(queue)
    ids, columns = generation.take()
    made = queue.collect_results(output_batch(call, ids, columns), batch.ids)
    return made, len(set(ids) - set(part.ids))


def _rows(column):
    return column.split() if isinstance(column, Packed) else column


def _num_keys(engine):
    """Return the number of keys in the whole store, while nobody uses it."""
    engine.groups.all.barrier()
    num_keys = engine.groups.world.store("").num_keys()
    engine.groups.all.barrier()
    return num_keys


def _check(pool, layout, lengths, options, *, family="qwen2"):
    """Check that every head has what one process computes, twice; return how many samples each rank stole."""
    alone = {"max_rows": 512, "max_new": options.get("max_new", MAX_NEW)}
    _, [all_ids, _], [expected, _], _, _ = _generate(World(), "d1@0", lengths, alone, family)
    assert all_ids == list(range(48))
    num_tokens = {len(tokens) for tokens in expected["sequences"]}
    assert len(num_tokens) > 3 and 0 < float(expected["finished"].mean()) < 1
    results = pool.run(_generate, layout, lengths, options, family)
    results = {rank: result for rank, result in enumerate(results) if result is not None}
    for rank, (ids, made, columns, _, (before, after)) in results.items():
        assert before == after
        if rank not in Layout.parse(layout).result_ranks:
            assert made == [[], []]
            continue
        assert made == [ids, ids]
        for found in columns:
            for key in ("sequences", "mask"):
                for ours, i in zip(found[key], ids, strict=True):
                    assert torch.equal(ours, expected[key][i]), (rank, key, i)
            for ours, i in zip(found["logprobs"], ids, strict=True):
                torch.testing.assert_close(ours, expected["logprobs"][i], rtol=1e-9, atol=1e-10)
            assert torch.equal(found["finished"], expected["finished"][ids])
    return {rank: num_stolen for rank, (*_, num_stolen, _) in results.items()}


@pytest.mark.parametrize(
    "layout",
    marked(["d2@0-1", "d4@3,1,0,2", "d2t2@0-3", "d2p2@0-3", "d2c2@0-3", "c2t2@0-3"], quick=[0]))
def test_replicas_that_are_done_continue_the_prompts_of_others(pool, layout):
    """All but a few samples begin on the first data shard, which has few slots."""
    num_stolen = _check(pool, layout, [3, 1, 6, 2], {})
    parsed = Layout.parse(layout)
    for dp in range(1, parsed.dp):  # These shards have few prompts, which begin at once.
        for rank in parsed.grid[:, dp].ravel().tolist():
            assert num_stolen[rank] > 0
    for replica in parsed.grid.transpose(1, 2, 0, 3).reshape(parsed.dp * parsed.cp, -1).tolist():
        assert len({num_stolen[rank] for rank in replica}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("layout", marked(["d2@0-1", "d2p2@0-3"], quick=[0]))
def test_what_waits_for_memory_goes_to_others_too(pool, layout):
    """Prompts have one or two blocks; a cohort's memory is enough for three rows. (With two stages there are
    two cohorts, and half of the layers.)"""
    options = {"kv_cache_gib": 5 * BLOCK_GIB, "max_rows": 512, "max_new": MANY_NEW}
    num_stolen = _check(pool, layout, [70, 2, 100, 64], options)
    assert num_stolen[Layout.parse(layout).grid[0, 1, 0, 0]] > 0


@pytest.mark.slow
def test_experts_keep_company_while_prompts_move(pool):
    num_stolen = _check(pool, "d2e2p2@0-3", [3, 1, 6, 2], {}, family="qwen2-moe")
    assert num_stolen[1] > 0


def test_nothing_moves_where_all_begin_at_once(pool):
    num_stolen = _check(pool, "d2@0-1", [3, 1, 6, 2], {"max_rows": 46})
    assert num_stolen == {0: 0, 1: 0}


@pytest.mark.slow
@pytest.mark.parametrize("layout", marked(["d2@0-1", "d2c2@0-3", "e2@0-1"], quick=[2]))
def test_without_stealing_every_prompt_stays_where_it_is(pool, layout):
    family = "qwen2-moe" if "e" in layout else "qwen2"
    num_stolen = _check(pool, layout, [3, 1, 6, 2], {"work_stealing": False}, family=family)
    assert set(num_stolen.values()) == {0}


def _refusal(world, text, lengths, gib):
    """Return the error of a call with prompts of these lengths by data shard, one sample each."""
    layout = Layout.parse(text)
    if world.rank not in layout:
        return None
    mine = lengths[layout.coordinate(world.rank).dp]
    batch = Batch(list(range(len(mine))), {"prompts": Packed.of([torch.full((n,), 4) for n in mine])})
    call = _call(kv_cache_gib=gib, max_new=MANY_NEW)
    with pytest.raises(UserError) as refused:
        _engine(world, layout).generate(call, batch)
    return str(refused.value)


SHORT = [3] * 20
"""Lengths of prompts, some of which have to wait."""


@pytest.mark.parametrize(
    ("layout", "lengths"),
    [
        ("d2@0-1", [SHORT, [250]]),  # The long one begins at once.
        ("d2@0-1", [[*SHORT, 250], SHORT]),  # It waits.
        ("d2p2@0-3", [SHORT, [250]]),  # One cohort alone would have all of the memory.
        ("d2p2@0-3", [[*SHORT, 250], [3]]),
    ],
)
def test_a_sample_that_can_never_run_is_refused_alike_everywhere(pool, layout, lengths):
    """Rows of 290 tokens take three blocks of 128, and one more is needed. There are as many cohorts as
    stages, and each stage has its share of the layers."""
    needed = 4 * 2 * BLOCK_GIB
    sentence = f"one sample of 290 tokens (prompt and sampling.max_new_tokens) needs {1.01 * needed:.3g} GiB"
    results = pool.run(_refusal, layout, lengths, 0.99 * needed)
    assert [r for r in results if r is not None] == [results[0]] * len(Layout.parse(layout).ranks)
    assert results[0].endswith(sentence)


def _after_a_failure(world):
    """Return the groups that this rank takes from a queue, after it abandoned another queue half-way."""
    groups = ParallelGroups.create(world, Layout.parse("d4@0-3"))
    taken = []
    for number in range(2):
        queue = PromptQueue(groups, stealing=True)
        queue.put([PromptGroup([4] * (1 + i % 3), [100 * world.rank + i]) for i in range(10 * world.rank)])
        world.control.barrier()
        while (group := queue.take()) is not None and (number == 1 or len(taken) < 9):
            taken.append(group)
        taken = taken if number else []
        world.control.barrier()
    return taken


def test_a_generation_that_failed_takes_nothing_from_the_next(pool):
    taken = [group for groups in pool.run(_after_a_failure) for group in groups]
    numbers = [(rank, i) for rank in range(4) for i in range(10 * rank)]
    expected = [PromptGroup([4] * (1 + i % 3), [100 * rank + i]) for rank, i in numbers]
    assert sorted(taken, key=lambda group: group.ids) == expected


def test_a_store_that_is_gone_is_a_peer_that_is_gone():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    lines = Lines([3, 3], 0, dist.TCPStore("127.0.0.1", server.port, is_master=False))
    assert lines.take() == (0, 0)
    del server
    with pytest.raises(PeerError, match="communication with the store broke off: "):
        _drain(lines)


COUNTS = [40, 0, 200, 7]
"""Number of items in the lines of four replicas."""


def _drain(lines):
    taken = []
    while (place := lines.take()) is not None:
        taken.append(place)
    return taken


def _check_drained(taken):
    """Check that every item is `taken` once: a replica's own from the front, stolen ones from the back."""
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
    store, barrier = dist.HashStore(), Barrier(len(COUNTS))

    def drain(index):
        barrier.wait()
        return _drain(Lines(COUNTS, index, store))

    with ThreadPoolExecutor(len(COUNTS)) as threads:
        _check_drained(list(threads.map(drain, range(len(COUNTS)))))


def _drain_together(world):
    store = world.store("test of lines")
    before = store.num_keys()
    world.control.barrier()
    lines = Lines(COUNTS, world.rank, store)
    taken = [lines.take()] if world.rank == 1 else []  # Rank 1 has no items of its own.
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
