"""The planner's bytes of packed and of merged weights are those of generations on a CPU."""

from dataclasses import replace

import pytest
import torch

from realhf.calls import Generate, SamplingConfig
from realhf.cli.plan import this_machine
from realhf.cluster import Cluster
from realhf.data.batch import Batch, Packed
from realhf.devices import chunk_sizes, half_precision
from realhf.distributed.world import World
from realhf.engine.native import NativeEngine, pass_bytes
from realhf.graph import FunctionCall
from realhf.inference.response_buffer import Size
from realhf.layout import Layout
from realhf.models.lora import LoraConfig
from realhf.models.model_config import ModelConfig, TransformersConfig
from realhf.nn.linear import PackedWeight, can_pack
from realhf.planner.call_memory import CallMemory, CallPieces, GenerationMoments
from realhf.planner.problem import ModelRole, Workload
from realhf.planner.shard import packed_itemsize
from tests.nn.tiny import hf_config
from tests.samples import marked

WORK = Generate(SamplingConfig(max_new_tokens=4, temperature=0.0), seed=0)
CALL = FunctionCall(
    "gen", inputs=("prompts",), role="actor", work=WORK, outputs=("tokens", "mask", "logprobs", "finished"))
HEAD = 2200 * 256
GATE_UP = 2 * 700 * 256
"""Gate alone, up alone and all other weights of a block are too small to be packed."""
ALL, SOME = LoraConfig(rank=4), LoraConfig(rank=4, target_modules=("q_proj", "o_proj"))
FUSED = LoraConfig(rank=4, target_modules=("up_proj",))


def _config(*, tied=False):
    return ModelConfig.from_hf(hf_config("LlamaForCausalLM", tied=tied) | {
        "vocab_size": 2200, "hidden_size": 256, "intermediate_size": 700, "num_hidden_layers": 3})


def _generate(world, role, text):
    """Generate on a rank; return the bytes of packed and of merged copies, the bytes of copies for which its
    cache leaves room when it is settled, and the log-probs."""
    layout = Layout.parse(text)
    if world.rank not in layout:
        return None
    layout = replace(layout, form="int8") if role.int8 else layout
    engine = NativeEngine(
        role.spec, layout, world, dtype=role.dtype, lora=role.lora, float32_head=role.float32_head)
    if not role.int8:  # A reallocation would fill it; zeros do here.
        engine.load(None, seed=0)
    if engine.adapters is not None:
        engine.adapters.flat.normal_(std=0.02, generator=torch.Generator().manual_seed(5))
    prompts = Packed.of([torch.arange(1 + i, 9 + i) for i in range(3)])
    made = engine.generate(CALL, Batch([0, 1, 2], {"prompts": prompts})).batch
    merged = 0
    if role.lora is not None and role.lora.merge:
        with engine.model.merged():
            merged = engine.model.merged_bytes
            there = pass_bytes(engine.model, WORK, [Size(8, 0, 1)], num_samples=3)
            assert there.absent == engine.last_packed_bytes
        engine.model.release_merged()
    limiting = pass_bytes(engine.model, WORK, [Size(8, 0, 1)], num_samples=3).absent
    return engine.last_packed_bytes, merged, limiting, made["logprobs"].values if made.fields else None


def _predicted(role, text, *, fused=False, has_units=False) -> list[CallMemory]:
    """Return the memory of each stage on a CPU that perhaps `has_units` for bfloat16."""
    strategy = Layout.parse(text).strategy
    laptop = Cluster.load("cpu-laptop")
    peaks = {"float32": 1e11, "float64": 5e10, "bfloat16": 5e11 if has_units else 9e10}
    cluster = replace(laptop, peak_flops=peaks, device_type="cuda" if fused else "cpu")
    pieces = CallPieces(
        role, Workload(3, 8, 4, max_new_tokens=4), strategy, 4096, False, fused=fused,
        packed_itemsize=packed_itemsize(role.dtype, cluster))
    return [GenerationMoments(pieces).on(pieces.stage(stage))[0] for stage in range(strategy.pp)]


@pytest.fixture
def converts(monkeypatch):
    """Let this CPU compute products of 16-bit numbers in float32."""
    monkeypatch.setattr(half_precision, "_has_units", lambda dtype: False)
    can_pack.cache_clear()
    yield
    can_pack.cache_clear()


@pytest.mark.parametrize("role, numel", [
    (ModelRole(_config(), "float32"), HEAD + 3 * GATE_UP),
    (ModelRole(_config(tied=True), "float32"), HEAD + 3 * GATE_UP),
    (ModelRole(_config(), "float64"), 0),
    (ModelRole(_config(), "bfloat16"), HEAD + 3 * GATE_UP),
    (ModelRole(_config(), "bfloat16", float32_head=True), 3 * GATE_UP),
    (ModelRole(_config(), "float32", int8=True), HEAD),
    (ModelRole(_config(), "float32", lora=ALL), HEAD + 3 * GATE_UP),
    (ModelRole(_config(), "float32", lora=replace(ALL, merge=True)), HEAD),
    (ModelRole(_config(), "float32", lora=replace(SOME, merge=True)), HEAD + 3 * GATE_UP),
    (ModelRole(_config(), "bfloat16", lora=replace(FUSED, merge=True)), HEAD),
])
def test_planner_and_run_agree(converts, role, numel):
    if numel and not can_pack(getattr(torch, role.dtype)):
        pytest.skip("no packed weights on this CPU")
    packed, merged, limiting, _ = _generate(World(), role, "d1@0")
    (memory,) = _predicted(role, "d1@0")
    assert packed == memory.packed == 4 * numel
    assert merged == memory.merged
    assert limiting == packed + merged
    assert not _predicted(role, "d1@0", fused=True)[0].packed


@pytest.mark.slow
@pytest.mark.parametrize("layout", marked(["t2@0-1", "p2@0-1", "t2p2@0-3"], quick=[1]))
@pytest.mark.parametrize("lora", [None, replace(SOME, merge=True)])
def test_ranks_pack_what_they_hold(pool, layout, lora):
    """Over two tp ranks, only the head is large enough."""
    if not can_pack(torch.float32):
        pytest.skip("no packed weights on this CPU")
    role = ModelRole(_config(tied=True), "float32", lora=lora)
    found = [result for result in pool.run(_generate, role, layout) if result is not None]
    grid = Layout.parse(layout).grid
    for stage, memory in enumerate(_predicted(role, layout)):
        of_ranks = [found[rank] for rank in grid[stage].ravel()]
        assert max(packed for packed, *_ in of_ranks) == memory.packed
        assert max(merged for _, merged, *_ in of_ranks) == memory.merged
        assert {limiting for _, _, limiting, _ in of_ranks} == {memory.packed + memory.merged}


@pytest.mark.parametrize("role, numel", [
    (ModelRole(_config(), "bfloat16"), HEAD + 3 * GATE_UP),
    (ModelRole(_config(), "bfloat16", lora=replace(ALL, merge=True)), HEAD),
])
def test_units_for_bfloat16_read_it_as_it_is(monkeypatch, role, numel):
    """oneDNN can do so without AMX, too, but more slowly than in float32."""
    monkeypatch.setattr(half_precision, "_has_units", lambda dtype: True)
    can_pack.cache_clear()
    try:
        if not can_pack(torch.bfloat16):
            pytest.skip("no packed weights in bfloat16 on this CPU")
        packed, merged, limiting, _ = _generate(World(), role, "d1@0")
    finally:
        can_pack.cache_clear()
    (memory,) = _predicted(role, "d1@0", has_units=True)
    assert packed == memory.packed == 2 * numel
    assert limiting == packed + merged == memory.packed + memory.merged


def test_this_machine_has_the_units_that_torch_finds():
    here = this_machine(1)
    if here.device_type == "cuda":
        pytest.skip("it has a GPU")
    assert packed_itemsize("bfloat16", here) == PackedWeight.itemsize(torch.bfloat16)
    assert here.peak_flops["float32"] == Cluster.load("cpu-laptop").peak_flops["float32"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_weights_with_adapters_give_the_same(monkeypatch, converts, dtype):
    role = ModelRole(_config(), dtype, lora=ALL)
    *_, found = _generate(World(), role, "d1@0")
    monkeypatch.setattr(chunk_sizes, "LEAST_PACKED_NUMEL", 1 << 40)
    packed, _, _, expected = _generate(World(), role, "d1@0")
    assert packed == 0
    tolerance = 1e-4 if dtype == "float32" else 2e-2
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_the_transformers_engine_packs_nothing():
    hf = hf_config("LlamaForCausalLM") | {"vocab_size": 2200, "hidden_size": 1024}
    config = TransformersConfig.from_hf(hf)
    assert not _predicted(ModelRole(config, "float32"), "d1@0")[0].packed
    assert _predicted(ModelRole(ModelConfig.from_hf(hf), "float32"), "d1@0")[0].packed
