"""Measurements of models (a few blocks of every kind, and decoding rows) and of a machine's links."""

import dataclasses
import functools
import time
from unittest.mock import patch

import numpy as np
import pytest
import torch

from realhf.algorithms.sft import CrossEntropy
from realhf.calls import Generate, Output, SamplingConfig, TrainStep
from realhf.cli.plan import this_machine
from realhf.cluster import num_cores
from realhf.devices import chunk_sizes
from realhf.distributed.world import World
from realhf.engine.chunked_loss import wanted
from realhf.engine.shared_prefixes import pass_tokens
from realhf.graph import FunctionCall
from realhf.layout import Layout, ParallelStrategy
from realhf.models.model_config import ModelConfig, MoeConfig
from realhf.models.param_spec import model_spec
from realhf.nn.transformer import Transformer
from realhf.planner.call_cost import CallCost
from realhf.planner.problem import ModelRole
from realhf.planner.profile import COLLECTIVES, Profile, Table
from realhf.planner.rates import Rates
from realhf.planner.shard import packed_params
from realhf.profiling import clock
from realhf.profiling.clock import Clock, describe, measure_memory
from realhf.profiling.engine_calls import (
    DecodingRows,
    EngineCalls,
    MeasuredModel,
    PackedModel,
    Sizes,
    prompts,
)
from realhf.profiling.machine import measure_cluster, measure_links
from realhf.profiling.measure import Bench, whole_calls, with_whole_calls
from tests.models.test_shipped_models import NUM_PARAMS
from tests.nn.tiny import build, hf_config
from tests.samples import marked

FEW = (1, 2)
"""The least and the most repetitions of what is timed."""


@pytest.mark.parametrize("name", NUM_PARAMS)
def test_blocks_to_measure(name):
    config = ModelConfig.load(name)
    few = MeasuredModel(config, "bfloat16", ()).with_blocks(2, "score")
    params = {p.short_name for p in model_spec(few).params if p.layer == 1}
    assert params == {p.short_name for p in model_spec(config).params if p.layer == config.num_layers - 1}
    assert few.num_layers == 2 and few.head == "score" and few.eos_token_ids == ()
    assert few.window(1) == config.window(1)


def test_rows_have_prompts_of_their_own():
    for rows, length, vocab_size in ((512, 5, 16), (3, 64, 64), (9, 16, 7)):
        batch = prompts(rows, length, vocab_size=vocab_size)
        ids = [prompt.tolist() for prompt in batch["prompt_ids"].split()]
        assert len(ids) == rows and {len(prompt) for prompt in ids} == {length}
        assert all(one != other for one, other in zip(ids, ids[1:], strict=False))


@pytest.mark.parametrize(("num_prompts", "own_blocks", "shared_blocks"), [(6, 12, 0), (2, 6, 2), (1, 6, 1)])
def test_rows_attend_to_blocks_of_their_own_but_where_they_share_a_prompt(
    num_prompts, own_blocks, shared_blocks
):
    """The prompt is of 130 tokens: 128 and 16 in two blocks of 128; or 64 and 64, which count as one, and
    what is not shared."""
    model = build(hf_config() | {"max_position_embeddings": 256})
    rows = DecodingRows(model, 6, prompt_tokens=130, num_prompts=num_prompts)
    own, *shared = rows.segment.decoding.sets
    assert rows.segment.decoding.positions_B.tolist() == [130] * 6
    assert own.rows_PS.shape == (own_blocks, 1) and sorted(own.rows_PS.unique().tolist()) == list(range(6))
    assert [s.rows_PS.shape for s in shared] == [(shared_blocks, 6 // num_prompts)] * (shared_blocks > 0)
    before = [layer.clone() for layer in rows._cache.layers]
    rows.decode(steps=1)
    changed = (rows._cache.layers[0] != before[0]).any(-1).any(-1).any(0)
    assert changed.sum() == 6, "every row writes one token, to a block of its own"
    rows.reading()()
    assert (rows._cache.layers[0] != before[0]).any(-1).any(-1).any(0).sum() == 6 + num_prompts * 130


@pytest.mark.parametrize("tied", [True, False])
def test_rows_decode_with_packed_weights_as_in_a_generation(monkeypatch, tied):
    """The copies are those that a generation makes and drops, and give the same hidden states."""
    monkeypatch.setattr(chunk_sizes, "LEAST_PACKED_NUMEL", 2000)
    work = Generate(SamplingConfig(max_new_tokens=2))
    config = ModelConfig.from_hf(hf_config(tied=tied))
    call = FunctionCall("g", inputs=("prompt_ids",), outputs=("a", "b", "c", "d"), role="role", work=work)
    calls = EngineCalls(MeasuredModel(config, "float32", (call,)), World())
    engine = calls.engine(3, Output.LOGPROBS, Layout.parse("d1@0"), trains=False)
    packed = PackedModel(engine.model)
    calls.generate(engine, 2, 8, 2)()
    assert engine.model.packed_bytes == 0
    assert packed.model.packed_bytes == engine.last_packed_bytes == 4 * packed.packed_params > 0
    role = ModelRole(engine.model.config, "float32")
    assert packed.packed_params == packed_params(role, ParallelStrategy(), 0)
    assert sum(copy.num_bytes for copy in packed.pack()) == packed.model.packed_bytes
    states = [
        DecodingRows(model, 4, prompt_tokens=20, num_prompts=4).decode(steps=1)
        for model in (packed.model, engine.model)]
    torch.testing.assert_close(*states, rtol=1e-4, atol=1e-5)


def test_rows_decode_and_are_read_in_the_mode_of_a_generation(monkeypatch):
    """Operations take longer outside of torch's inference mode."""
    work = Generate(SamplingConfig(max_new_tokens=3))
    config = ModelConfig.from_hf(hf_config())
    call = FunctionCall("g", inputs=("prompt_ids",), outputs=("a", "b", "c", "d"), role="role", work=work)
    calls = EngineCalls(MeasuredModel(config, "float32", (call,)), World())
    engine = calls.engine(1, Output.LOGPROBS, Layout.parse("d1@0"), trains=False)
    rows = DecodingRows(engine.model, 2, prompt_tokens=8, num_prompts=2)
    advance = Transformer.advance
    modes = []

    def noted(*args, **kwargs):
        modes.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))
        return advance(*args, **kwargs)

    monkeypatch.setattr(Transformer, "advance", noted)
    calls.generate(engine, 2, 8, 3)()
    in_generation = set(modes)
    for measured in (lambda: rows.decode(steps=1), rows.reading()):
        modes.clear()
        measured()
        assert len(modes) == 1 and set(modes) == in_generation


@pytest.mark.parametrize(("tokens", "length"), [(128, 64), (256, 64), (5, 64), (140, 47)])
def test_passes_for_blocks_have_one_output_for_each_sequence_and_share_nothing(tokens, length):
    """The vocabulary is so small that sequences repeat each other."""
    config = ModelConfig.from_hf(hf_config() | {"vocab_size": 16})
    calls = EngineCalls(MeasuredModel(config, "float32", CALLS), World())
    batch = calls.sequences(tokens, length, only_ends=True)
    ids, mask = batch["sequence_ids"], batch["response_mask"]
    chosen = np.flatnonzero(wanted(ids, mask))
    assert chosen.tolist() == (np.cumsum(ids.lengths) - 1).tolist()
    passed = pass_tokens(build(hf_config() | {"vocab_size": 16}), batch, "sequence_ids")
    assert passed.lens == ids.lengths and passed.prefixes == ()


def _int8_tables(monkeypatch, **changes):
    monkeypatch.setattr(clock, "_REPETITIONS", FEW)
    monkeypatch.setattr("realhf.profiling.measure._BUDGET", 0.01)
    work = Generate(SamplingConfig(max_new_tokens=2), **changes)
    call = FunctionCall("g", inputs=("prompt_ids",), outputs=("a", "b", "c", "d"), role="role", work=work)
    model = MeasuredModel(ModelConfig.from_hf(hf_config()), "float32", (call,))
    return Bench(Clock(World()), model, ParallelStrategy(), Sizes(20, 40, 4, 2)).entry().tables


def test_a_generation_in_int8_is_measured_with_such_weights(monkeypatch):
    assert "decode_int8" not in _int8_tables(monkeypatch)
    tables = _int8_tables(monkeypatch, generation_weights="int8")
    assert tables["decode_int8"].axes == {"rows": tables["decode_block"].axes["rows"]}
    assert min(tables["decode_int8"].seconds) > 0


@functools.cache
def _apart(world, per_host):
    """The same four ranks as if each host had so many of them."""
    store = torch.distributed.PrefixStore(f"{per_host} per host", world._store)
    return World(rank=world.rank, size=world.size, store=store, ranks_per_host=per_host)


def _measured(world, per_host):
    """The machine as a Cluster."""
    with patch.object(clock, "_REPETITIONS", FEW):
        return measure_cluster(Clock(_apart(world, per_host)), ["float32"])


@pytest.mark.slow
@pytest.mark.parametrize("per_host", [4, 2, 1])
def test_links_are_measured_where_they_are(pool, per_host):
    answers = pool.run(_measured, per_host)
    assert all(answer == answers[0] for answer in answers)
    cluster = answers[0]
    assert (cluster.num_hosts, cluster.devices_per_host) == (4 // per_host, per_host)
    assert cluster.device_type == "cpu"
    here = this_machine(per_host)
    assert cluster.host_memory_bytes == here.host_memory_bytes
    assert cluster.device_memory_bytes == here.device_memory_bytes
    # (A model too small to fill a link once gave petabytes per second.)
    assert 1e6 < cluster.link(within_host=False).bandwidth_bytes_per_second < 1e12
    if per_host == 4:  # Nobody has seen a link between hosts.
        assert cluster.inter_host is None and cluster.host_bandwidth_bytes_per_second is None
    else:
        assert cluster.inter_host != cluster.intra_host
        assert cluster.host_port_bytes_per_second <= per_host * cluster.inter_host.bandwidth_bytes_per_second


def _links(world, per_host):
    with patch.object(clock, "_REPETITIONS", FEW):
        links = measure_links(Clock(_apart(world, per_host)), Sizes(8, 16, 4, 1))
    return [(entry.hosts, entry.tables, entry.noise) for entry in links]


# Ranks per host -> hosts of the tables -> sizes of the groups that were measured.
GROUPS = {4: {1: [2, 4]}, 2: {1: [2], 2: [2, 4]}, 1: {2: [2], 4: [4]}}


@pytest.mark.parametrize("per_host", marked(GROUPS, quick=[]))
def test_collectives_are_measured_inside_hosts_and_between_them(pool, per_host):
    answers = pool.run(_links, per_host)
    assert all(answer == answers[0] for answer in answers)
    sizes = {hosts: tables["all_to_all"].axes["ranks"] for hosts, tables, _ in answers[0]}
    assert sizes == {hosts: tuple(map(float, sizes)) for hosts, sizes in GROUPS[per_host].items()}
    for hosts, tables, noise in answers[0]:
        assert tables.keys() == {*COLLECTIVES, *(("send", "samples") if hosts <= 2 else ())} == noise.keys()
        for table in tables.values():
            assert np.ravel(table.seconds).min() > 0
        assert all(spread >= 0 for spread in noise.values())


def _memory(world):
    group_bytes = measure_memory(world)["communicator_bytes"]
    own = world.control.all_gather_json(group_bytes)
    return measure_memory(world), own, describe(world)


def test_memory_and_surroundings_are_measured(pool):
    for memory, own, facts in pool.run(_memory):
        assert len(set(own)) == 1
        assert 5e7 < memory["context_bytes"] < 4e9  # A process that has imported torch.
        assert 0 <= memory["communicator_bytes"] < 1e9
        assert facts["processes"] == 4 and facts["hosts"] == 1 and facts["threads_per_process"] >= 1
        assert facts["cores"] == num_cores() and facts["load_before"] >= 0


MOE = MoeConfig(num_experts=4, num_experts_per_token=2, expert_width=16)
NARROW = ModelConfig("qwen3_moe", 32, 16, 32, 2, 2, 2, 8, moe=MOE)
CALLS = (
    FunctionCall("generate", "generate", ("prompt_ids",), (), role="actor", work=Generate()),
    FunctionCall("train", "train_step", ("sequence_ids",), (), role="actor", work=TrainStep(CrossEntropy())),
)


@pytest.mark.parametrize(
    ("moe", "strategy"),
    [
        pytest.param(None, ParallelStrategy(tp=2), marks=pytest.mark.slow),
        pytest.param(MOE, ParallelStrategy(dp=2, ep=2), marks=pytest.mark.slow),
    ],
)
def test_two_processes_measure_a_model(pool, moe, strategy):
    (tables, noise, calls), other = pool.run(_bench_of_two, moe, strategy, num_ranks=2)
    assert (tables, noise, calls) == other
    blocks = {"block_forward", "block_backward", "decode_block"}
    rest = {"logprobs_forward", "logprobs_backward", "decode_head", "update", "zero_gradients"}
    assert tables.keys() == (blocks if strategy.ep > 1 else blocks | rest)
    assert calls.keys() == (set() if strategy.ep > 1 else {"generate", "forward", "train_step"})
    assert {"forward", "train", "decode", "update"} <= noise.keys()
    for table in tables.values():
        assert np.ravel(table.seconds).min() > 0
    *_, tokens = tables["block_forward"].axes.values()
    assert tokens[-4:] == (24.0, 36.0, 60.0, 96.0) and tokens[0] < tokens[1] == 12.0


@functools.cache
def _two(world):
    store = torch.distributed.PrefixStore("two", world._store)
    return World(rank=world.rank, size=2, store=store, ranks_per_host=2)


def _bench_of_two(world, moe, strategy):
    config = ModelConfig("qwen3_moe" if moe else "qwen2", 32, 16, 32, 2, 2, 2, 8, moe=moe)
    with patch.object(clock, "_REPETITIONS", FEW):
        model = MeasuredModel(config, "float32", CALLS)
        bench = Bench(Clock(_two(world)), model, strategy, Sizes(4, 12, 8, 1))
    return bench.tables(), bench.noise, bench.calls()


class _Priced(Rates):
    """Rates under which every call takes a tenth of a second besides its passes."""

    def call_seconds(self, kind, *, samples):
        return 0.1


@pytest.mark.parametrize(
    "strategy", marked([ParallelStrategy(tp=2), ParallelStrategy(dp=2, ep=2)], quick=[0]))
@pytest.mark.slow
def test_whole_calls_are_compared_with_their_price(pool, strategy):
    found, other = pool.run(_whole_calls, strategy, num_ranks=2)
    assert found == other and found.keys() == {"forward", "train_step", "generate"}
    assert all(1e-3 < share < 30 for share in found.values())
    assert {type(share) for share in found.values()} == {float}  # YAML has no NumPy floats.


def _whole_calls(world, strategy):
    sizes = Sizes(4, 12, 8, 1)
    model = MeasuredModel(NARROW, "float32", CALLS)
    return whole_calls(Clock(_two(world)), model, strategy, sizes, _Priced(this_machine(2)))


def test_what_other_work_disturbed_is_measured_again():
    """The first measurement of the parts is planted: they took a thousand times as long."""
    model, sizes = MeasuredModel(NARROW, "float32", CALLS[1:]), Sizes(4, 12, 8, 1)
    with patch.object(clock, "_REPETITIONS", FEW):
        timer = Clock(World())
        first = Bench(timer, model, ParallelStrategy(), sizes).entry()
        slow = {name: Table(table.axes, (1000 * np.array(table.seconds)).tolist())
                for name, table in first.tables.items()}
        planted = dataclasses.replace(first, tables=slow)
        profile = Profile("today", describe(World()), this_machine(1), models=[planted])
        entry = with_whole_calls(profile, planted, timer, model, ParallelStrategy(), sizes)
    assert entry.key == first.key and entry.whole_calls.keys() == {"train_step", "forward"}
    assert entry.disturbance < 50 and entry.tables != slow


@pytest.mark.parametrize(("max_rows", "second"), [(512, 0.1), (3, 0.1), (3, 10.0)])
def test_whole_calls_run_what_they_price(max_rows, second, monkeypatch):
    """A generation has no more rows than a replica decodes at once, and fewer if it takes too long."""
    priced, run = [], []
    monkeypatch.setattr(
        "realhf.profiling.measure.call_cost",
        lambda rates, call, role, work, plan, per_host: priced.append((call.kind, work)) or CallCost(second))
    monkeypatch.setattr(
        EngineCalls, "generate", lambda self, engine, rows, prompt, new, *, in_one_pass: run.append(
            (rows, prompt, new, in_one_pass)) or (lambda: None))
    generate, train = CALLS
    work = Generate(SamplingConfig(max_new_tokens=80), max_rows=max_rows)
    generate = dataclasses.replace(generate, work=work)
    model = MeasuredModel(NARROW, "float32", (generate, train))
    whole_calls(Clock(World()), model, ParallelStrategy(), Sizes(10, 90, 8, 1), _Priced(this_machine(1)))
    (rows, prompt, new, in_one_pass), (kind, work) = run[0], priced[-1]
    assert kind == "generate" and not in_one_pass
    assert (rows, prompt, new) == (work.num_samples, work.prompt_tokens, work.max_new_tokens)
    assert (rows, new) == ((1, 40) if second > 1 else (min(8, max_rows), 80))


@pytest.mark.slow
def test_ranks_without_a_part_do_not_make_a_message_look_faster(pool):
    crowding = max(1, 4 / num_cores())  # Work on all four ranks is assumed to share the cores.
    for seconds in pool.run(_timed):
        assert seconds["all"] == pytest.approx(0.4 / 4 / crowding, rel=0.5)
        assert seconds["busy"] == pytest.approx(0.4, rel=0.5)


def _timed(world):
    work = {"sleep": lambda: time.sleep(0.4 if world.rank == 1 else 0)}
    timed = Clock(world)
    return {name: timed.seconds(work, budget=0.1, busy=busy)["sleep"]
            for name, busy in (("all", ()), ("busy", (1,)))}
