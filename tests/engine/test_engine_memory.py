"""Memory that engines give back: gradients between train steps, an optimizer whose state is on the host."""

import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from realhf.attention.reference import ReferenceAttention
from realhf.calls import Generate, OptimizerConfig, SamplingConfig
from realhf.data.batch import Batch, Packed
from realhf.devices import chunk_sizes
from realhf.devices.pinned import run_bounds
from realhf.distributed.world import World
from realhf.engine.native import NativeEngine
from realhf.engine.optimizer import HostSlices
from realhf.graph import FunctionCall
from realhf.layout import Layout
from realhf.models.lora import LoraConfig
from realhf.models.model_config import ModelConfig
from realhf.models.param_spec import model_spec
from realhf.planner import call_memory
from realhf.planner.call_memory import CallPieces, TrainMoments
from realhf.planner.problem import ModelRole, Workload
from tests.engine.reference import ragged_rows
from tests.engine.training import CALL, minibatch
from tests.nn.test_moe import hf_config as moe_config
from tests.nn.tiny import hf_config
from tests.samples import marked

STEPS = 5
OPTIMIZER = OptimizerConfig(lr=3e-3, weight_decay=0.1, max_grad_norm=0.5)


def _engine(world, text, *, dtype="float32", lora=None, offload=False, section_numel=2000, hf=None):
    """Return an engine whose parameters are in several sections."""
    spec = replace(model_spec(ModelConfig.from_hf(hf or hf_config(tied=True))), section_numel=section_numel)
    optimizer = replace(OPTIMIZER, offload=offload)
    engine = NativeEngine(spec, Layout.parse(text), world, dtype=dtype, optimizer=optimizer, lora=lora)
    engine.load(None, seed=0)
    return engine


def _step(engine, world, number):
    layout = engine.groups.layout
    mine = slice(layout.coordinate(world.rank).dp, None, layout.dp)
    rows = [ragged_rows(8, seed=2 * number + i)[mine] for i in (0, 1)]
    return engine.train(CALL, [minibatch(some) for some in rows], micro_batch_tokens=40)


def _values(engine):
    """Return copies of the model's parameters and of the optimizer's state."""
    found = {"flat": engine._trained.flat.clone()}
    for kind, shards in engine.optimizer.state.items():
        for name, parts in shards.items():
            found |= {f"{kind}/{name}/{box}": part.clone() for box, part in parts}
    return found


def _assert_equal(found, expected):
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)], ids=["model", "adapters"])
def test_released_gradients_come_back_and_change_nothing(lora):
    world = World()
    kept, released = (_engine(world, "d1@0", lora=lora) for _ in range(2))
    views = dict(released._trained.grad_shards())
    size = 4 * released._trained.flat.numel()
    for number in range(3):
        released.release("gradients")
        assert "gradients" not in released.memory()
        assert released._trained.grad_buffer.untyped_storage().nbytes() == 0
        assert _step(released, world, number) == _step(kept, world, number)
        assert released.memory()["gradients"] == kept.memory()["gradients"] == size
        _assert_equal(_values(released), _values(kept))
        sums = kept._trained.grad_shards()
        assert all(torch.equal(views[name], sums[name]) for name in sums), "the views are not valid any more"
        assert any(sums[name].any() for name in sums)
    assert released.memory() == kept.memory()


def test_the_gradients_of_an_unfinished_step_are_not_released():
    engine = _engine(World(), "d1@0")
    next(iter(engine._trained.weights())).is_empty = False
    with pytest.raises(AssertionError, match="the step has not ended"):
        engine.release("gradients")


def _offloaded_or_not(world, text, dtype):
    """Train with and without offloaded state; return the names of values that differ, and the memory."""
    layout = Layout.parse(text)
    if world.rank not in layout:
        return None
    plain, offloaded = (_engine(world, text, dtype=dtype, offload=offload) for offload in (False, True))
    wrong = []
    for number in range(STEPS):
        if _step(plain, world, number) != _step(offloaded, world, number):
            wrong.append(f"metrics of step {number}")
        expected, found = _values(plain), _values(offloaded)
        wrong += [f"{number} {name}" for name in expected if not torch.equal(expected[name], found[name])]
        for name, parts in offloaded.optimizer_shards().items():
            for (box, source), (_, master) in zip(parts, plain.optimizer.shards[name], strict=True):
                if not torch.equal(source, master.to(source.dtype)):
                    wrong.append(f"{number} source {name} {box}")
    buffers = [
        buffer.untyped_storage().nbytes() for buffer in offloaded.optimizer._state.slices._buffers]
    held = [sum(x.nbytes for x in engine.optimizer.held) for engine in (offloaded, plain)]
    return wrong, buffers, _bytes_of_buffers(offloaded), *held


def _bytes_of_buffers(engine):
    return sum(buffer.nbytes for buffer in engine.optimizer._state.slices._buffers)


@pytest.mark.parametrize("text, dtype", marked([
    ("d1@0", "bfloat16"), ("d1@0", "float32"), ("d4@0-3", "bfloat16"), ("d2t2@0-3", "float32"),
], quick=[0]))
def test_an_offloaded_optimizer_gives_the_same_bits(pool, text, dtype):
    ranks = len(Layout.parse(text).ranks)
    for wrong, buffers, buffer_bytes, host_bytes, held in pool.run(
        _offloaded_or_not, text, dtype, num_ranks=ranks
    ):
        assert wrong == []
        assert buffers == [0, 0]
        assert host_bytes == held and 0 < buffer_bytes < 0.7 * held


@pytest.mark.parametrize(
    "section_numel, window", marked([(1 << 24, 640), (2000, 640), (2000, 128)], quick=[2]))
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_slices_bound_the_memory_of_large_sections(monkeypatch, section_numel, window, dtype):
    """A model in one section, and one in several, of which two slices are on the device at a time."""
    monkeypatch.setattr(chunk_sizes, "OPTIMIZER_SLICE_NUMEL", window)
    world = World()
    plain, offloaded = (
        _engine(world, "d1@0", dtype=dtype, offload=offload, section_numel=section_numel)
        for offload in (False, True))
    for number in range(STEPS):
        assert _step(plain, world, number) == _step(offloaded, world, number)
        _assert_equal(_values(offloaded), _values(plain))
    num_states = 3 if dtype == "bfloat16" else 2
    assert _bytes_of_buffers(offloaded) == 2 * window * num_states * 4
    held = offloaded.optimizer.held
    assert sum(x.nbytes for x in held) == num_states * 4 * offloaded.flat.numel()


@pytest.mark.parametrize("text, section_numel", [
    ("d1@0", 1 << 24), ("d1@0", 9000), ("d2@0-1", 9000), ("t2@0-1", 1 << 24), ("e2@0-1", 9000),
    ("e2@0-1", 1 << 24)])
def test_the_planner_counts_the_buffers(pool, text, section_numel):
    """It counts no less than there is, and at most twice as much: it assumes two of the largest slices."""
    layout = Layout.parse(text)
    config = ModelConfig.from_hf(moe_config("qwen3-moe"))
    for window in (1 << 24, 3000):
        found = pool.run(_buffer_bytes, text, section_numel, window, num_ranks=len(layout.ranks))
        role = ModelRole(config, "bfloat16", True, offloads_optimizer=True)
        role.__dict__["spec"] = replace(role.spec, section_numel=section_numel)
        pieces = CallPieces(
            role, Workload(8, 8, 8), layout.strategy, micro_batch_tokens=40, recompute=False, fused=True)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(call_memory, "OPTIMIZER_SLICE_NUMEL", window)
            counted = TrainMoments(pieces)._optimizer_buffers(pieces.stage(0))
        assert max(found) <= 1.02 * counted <= 2.1 * max(found), (window, found, counted)


def _buffer_bytes(world, text, section_numel, window):
    before = chunk_sizes.OPTIMIZER_SLICE_NUMEL
    chunk_sizes.OPTIMIZER_SLICE_NUMEL = window
    try:
        engine = _engine(
            world, text, dtype="bfloat16", offload=True, section_numel=section_numel,
            hf=moe_config("qwen3-moe"))
    finally:
        chunk_sizes.OPTIMIZER_SLICE_NUMEL = before
    return _bytes_of_buffers(engine)


def test_pinned_allocations_are_nearly_full():
    """torch rounds each up to a power of two."""
    generator = torch.Generator().manual_seed(0)
    for numbers in ([1000] * 33, [218_000_000] * 32, [5] * 3, [700, 300, 300, 20, 20], [7]):
        bounds = run_bounds(numbers)
        assert bounds[0] == 0 and bounds[-1] == len(numbers) and bounds == sorted(set(bounds))
    equal = [_rounded(run) for run in _runs([67 << 20] * 40)]
    assert sum(equal) < 1.1 * 40 * (67 << 20) < _rounded([67 << 20] * 40)
    for _ in range(50):
        sizes = torch.randint(1 << 20, 1 << 28, (40,), generator=generator).tolist()
        assert sum(map(_rounded, _runs(sizes))) <= min(1.15 * sum(sizes), _rounded(sizes))


def _runs(sizes):
    return [sizes[start:stop] for start, stop in pairwise(run_bounds(sizes))]


def _rounded(run):
    return 1 << (sum(run) - 1).bit_length()


def _saved(engine):
    """Return a copy of the optimizer's state."""
    tensors = {
        f"{kind}/{name}": parts for kind, shards in engine.optimizer.state.items()
        for name, parts in shards.items()
    }
    return {name: [(box, part.clone()) for box, part in parts] for name, parts in tensors.items()}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.slow
def test_state_moves_between_offloaded_and_other_optimizers(dtype):
    """What a checkpoint reads and writes are the same tensors; a run may go on with or without offload."""
    world = World()
    first = _engine(world, "d1@0", dtype=dtype, offload=True)
    for number in range(2):
        _step(first, world, number)
    saved = _saved(first)
    for offload in (True, False):
        second = _engine(world, "d1@0", dtype=dtype, offload=offload)
        for kind, shards in second.optimizer.state.items():
            for name, parts in shards.items():
                for (_, part), (_, value) in zip(parts, saved[f"{kind}/{name}"], strict=True):
                    part.copy_(value)
        second.optimizer.state_was_read(first.optimizer.num_steps, 0)
        again = _engine(world, "d1@0", dtype=dtype)
        for number in range(2):
            _step(again, world, number)
        for number in range(2, STEPS):
            assert _step(second, world, number) == _step(again, world, number)
        _assert_equal(_values(second), _values(again))


def test_every_section_passes_through_the_buffers_once():
    """Sections of unequal sizes, whose states are changed while they are on the device."""
    sizes = (5, 1, 7, 3)
    states = [[torch.full((size,), float(i)), torch.full((size,), 10.0 + i)] for i, size in enumerate(sizes)]
    host = HostSlices(states, torch.device("cpu"))
    assert sum(buffer.nbytes for buffer in host._buffers) == 4 * 2 * (7 + 3)
    seen = []

    def update(section):
        seen.append([part.tolist() for part in host.on_device[section]])
        for part in host.on_device[section]:
            part += 100

    host.update(update)
    assert seen == [[[float(i)] * size, [10.0 + i] * size] for i, size in enumerate(sizes)]
    assert [[part.tolist() for part in parts] for parts in states] == [
        [[100.0 + i] * size, [110.0 + i] * size] for i, size in enumerate(sizes)]


_SETTINGS = """
import os
from realhf.__main__ import set_allocator
set_allocator(os.environ)
import torch
print(torch._C._accelerator_getAllocatorSettings())
"""


@pytest.mark.parametrize("own, expected", marked([
    ({}, "expandable_segments:True"),
    ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64"),
    ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:32"}, "max_split_size_mb:32"),
], quick=[2]))
@pytest.mark.slow
def test_torch_reads_the_setting_of_its_allocator_unless_the_user_has_one(own, expected):
    others = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    made = subprocess.run(
        [sys.executable, "-c", _SETTINGS], env=others | own, capture_output=True, text=True, check=True)
    assert made.stdout.strip() == expected


def test_released_pages_come_back():
    """The paged path on a CPU: the pool stays after a call, unless it is released."""
    config = hf_config(tied=True) | {"eos_token_id": [3]}
    engine = NativeEngine(
        model_spec(ModelConfig.from_hf(config)), Layout.parse("d1@0"), World(), dtype="float64",
        paged=ReferenceAttention())
    engine.load(None, seed=0)
    work = Generate(SamplingConfig(max_new_tokens=6))
    call = FunctionCall("gen", "generate", ("prompts",), ("s", "m", "l", "f"), role="actor", work=work)
    prompts = Batch([0, 1], {"prompts": Packed.of([torch.tensor([5, 6, 7]), torch.tensor([8, 9])])})

    def tokens():
        made = engine.generate(call, prompts).batch
        return [row.tolist() for row in made["s"].split()]

    assert "cache" not in engine.memory()
    first = tokens()
    held = engine.memory()["cache"]
    assert held > 0
    assert tokens() == first and engine.memory()["cache"] == held
    engine.release("cache")
    assert "cache" not in engine.memory()
    assert tokens() == first and engine.memory()["cache"] == held
