"""What the host does in a decoding step on a GPU, counted on a device that is not there."""

from itertools import pairwise
from unittest.mock import patch

import pytest

from realhf.calls import Generate, InsertedPhrase, SamplingConfig
from realhf.data.batch import Batch, Packed
from realhf.distributed.world import World
from realhf.engine.native import NativeEngine
from realhf.graph import FunctionCall
from realhf.layout import Layout
from realhf.models.lora import LoraConfig
from realhf.models.model_config import ModelConfig
from realhf.models.param_spec import model_spec
from tests.gpu.host_traffic import host_traffic
from tests.gpu.models import OUTPUTS, tokens, write_model
from tests.gpu.pretended import DeviceWorld, pretended_device
from tests.inference.paged import PagedReference
from tests.samples import marked

ROWS, NEW = 5, 40
READS = "Event.synchronize"
"""The wait for the tokens of the step before."""


def _steps(
    directory, *, dtype="float32", world=None, layout="d1@0", limits=(NEW,) * ROWS, lora=None, calls=1,
    interruption=None, max_new_tokens=NEW, **sampling,
):
    """Generate rows that have limits; return after each step of the last of some calls what the host has done
    so far in it: waits, transfers, replays, launches, and agreements with other ranks."""
    found = []
    agreed = []
    with pretended_device() as device:
        world = World(device=device) if world is None else DeviceWorld(world)
        engine = NativeEngine(
            model_spec(ModelConfig.load(str(directory))), Layout.parse(layout), world, dtype=dtype,
            paged=PagedReference(), lora=lora)
        engine.load(directory, seed=0)
        work = Generate(SamplingConfig(max_new_tokens=max_new_tokens, **sampling), interruption=interruption)
        call = FunctionCall("gen", "generate", ("prompt_ids", "limits"), OUTPUTS, role="actor", work=work)
        prompts = Packed.of([tokens(40 + i) for i in range(len(limits))])
        ids = [100 * world.rank + i for i in range(len(limits))]
        batch = Batch(ids, {"prompt_ids": prompts, "limits": list(limits)})
        for _ in range(calls - 1):
            engine.generate(call, batch)
        group = engine.groups.ep_control
        gather = group.all_gather_json
        patched = patch.object(group, "all_gather_json", lambda x: agreed.append(x) or gather(x))
        with patched, host_traffic() as traffic:

            def report(_):
                counts = traffic.transfers, traffic.replays, traffic.launches, len(agreed)
                found.append((list(traffic.waits), *counts))

            engine.generate(call, batch, report=report)
    return found


def _num_reads(first, last):
    """Return how often the host reads in these steps: it reads one step at once, and one more for every 16
    that have been taken, but at most 16."""
    num_reads = num_unread = 0
    for step in range(1, last + 1):
        num_unread += 1
        if num_unread >= min(16, 1 + step // 16):
            num_unread = 0
            num_reads += step >= first
    return num_reads


@pytest.mark.parametrize("name, new", marked(
    [("qwen2", 150), ("gemma-2", NEW), ("qwen3-moe", NEW), ("deepseek-v3", NEW)], quick=[0]))
def test_a_decoding_step_only_reads_the_tokens_of_steps_before(tmp_path, name, new):
    """Several steps together wait once."""
    write_model(tmp_path / "model", name, max_position_embeddings=256)
    has_experts = name in ("qwen3-moe", "deepseek-v3")
    dtype = "bfloat16" if has_experts else "float32"
    steps = _steps(tmp_path / "model", dtype=dtype, limits=(new,) * ROWS, max_new_tokens=new)
    assert len(steps) == new
    # The first steps prefill, run a size for the first time, and record it.
    reads = 0
    for (waits, *before), (more_waits, *after) in list(pairwise(steps[5:-2])):
        new_waits = more_waits[len(waits) :]
        assert [wait for wait in new_waits if not wait.startswith(READS)] == []
        transfers, replays, launches, _ = (b - a for a, b in zip(before, after, strict=True))
        assert len(new_waits) <= 1 and transfers <= 2 and replays == 1
        assert launches < 60
        reads += len(new_waits)
    assert reads == _num_reads(6, new - 3)
    assert reads < (40 if new == 150 else 24)


def _expert_steps(world, directory, limits):
    """Return the steps of a rank whose experts are spread over two ranks."""
    if world.rank > 1:
        return None
    return _steps(
        directory, dtype="bfloat16", world=world, layout="e2@0-1", limits=limits[world.rank])


@pytest.mark.parametrize("name", marked(["qwen3-moe", "deepseek-v3"], quick=[]))
def test_nor_do_ranks_that_share_experts(pool, tmp_path, name):
    """They read once in a window. Rank 1 has fewer rows, which end long before those of rank 0; it then
    decodes padding."""
    write_model(tmp_path / "model", name, max_position_embeddings=256)
    short = 12
    results = pool.run(_expert_steps, tmp_path / "model", [[NEW] * ROWS, [short, short]])
    for rank, steps in enumerate(results[:2]):
        assert len(steps) == NEW
        reads = 0
        for number, (before, after) in enumerate(pairwise(steps)):
            if 5 <= number < NEW - 2:
                waits = after[0][len(before[0]) :]
                assert [wait for wait in waits if not wait.startswith(READS)] == []
                pairs = zip(before[1:], after[1:], strict=True)
                transfers, replays, launches, _ = (b - a for a, b in pairs)
                is_idle = rank == 1 and number >= short
                assert len(waits) <= (not is_idle) and transfers <= 2 * (not is_idle)
                assert replays == 1 and launches < 60
                reads += len(waits)
        assert reads <= (1 if rank == 1 else 3)  # One in each window.
        assert steps[-1][-1] - steps[0][-1] == 3  # 39 steps: windows of 16, 16 and 7.


@pytest.mark.slow
def test_merged_adapters_are_recorded_once(tmp_path):
    """In the second call every decoding step replays a pass, and launches little else."""
    write_model(tmp_path / "model", "qwen2", max_position_embeddings=256)
    steps = _steps(tmp_path / "model", lora=LoraConfig(rank=2, merge=True), calls=2)
    launches = [after[3] - before[3] for before, after in pairwise(steps[1:])]
    replays = [after[2] - before[2] for before, after in pairwise(steps[1:])]
    assert set(replays) == {1} and max(launches) < 60


@pytest.mark.slow
def test_an_inserted_phrase_waits_for_nothing(tmp_path):
    write_model(tmp_path / "model", "qwen2", max_position_embeddings=256)
    steps = _steps(tmp_path / "model", interruption=InsertedPhrase(6, phrase=(7, 8, 9), end=(5, 6)))
    assert [wait for wait in steps[-3][0] if not wait.startswith(READS) and "phrase" in wait] == []
    assert [wait for wait in steps[-3][0][len(steps[2][0]) :] if not wait.startswith(READS)] == []


@pytest.mark.parametrize("sampling", marked([
    {"temperature": 0.0}, {"top_k": 5, "top_p": 0.9, "temperature": 0.7}, {"min_p": 0.1},
    {"repetition_penalty": 1.1, "min_new_tokens": 3}, {"presence_penalty": 0.5},
], quick=[1]))
@pytest.mark.slow
def test_no_way_of_sampling_waits(tmp_path, sampling):
    write_model(tmp_path / "model", "qwen2", max_position_embeddings=256)
    steps = _steps(tmp_path / "model", **sampling)
    waits = [wait for wait in steps[-3][0][len(steps[5][0]) :] if not wait.startswith(READS)]
    assert waits == []
