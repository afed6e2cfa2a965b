"""What the host does in a decoding step on a GPU, counted on a device that is not there."""

from itertools import pairwise

import pytest

from realhf.calls import Generate, SamplingConfig
from realhf.data.batch import Batch, Packed
from realhf.dist.world import World
from realhf.engine.native import NativeEngine
from realhf.graph import FunctionCall
from realhf.layout import Layout
from realhf.model_config import ModelConfig
from realhf.param_spec import model_spec
from tests.gpu.host_traffic import host_traffic
from tests.gpu.models import OUTPUTS, tokens, write_model
from tests.gpu.pretended import pretended_device
from tests.inference.paged import PagedReference
from tests.samples import marked

ROWS, NEW = 5, 40
READS = "Event.synchronize"
"""The wait for the tokens of the step before."""


def _steps(directory, *, dtype="float32", world=None, layout="d1@0", **sampling):
    """Generate; return after each step what the host has done so far: waits, transfers, replays, launches."""
    found = []
    with pretended_device() as device:
        engine = NativeEngine(
            model_spec(ModelConfig.load(str(directory))), Layout.parse(layout), world or World(device=device),
            dtype=dtype, paged=PagedReference())
        engine.load(directory, seed=0)
        work = Generate(SamplingConfig(max_new_tokens=NEW, **sampling))
        call = FunctionCall("gen", "generate", ("prompt_ids",), OUTPUTS, role="actor", work=work)
        batch = Batch(list(range(ROWS)), {"prompt_ids": Packed.of([tokens(40 + i) for i in range(ROWS)])})
        with host_traffic() as traffic:

            def report(_):
                found.append((list(traffic.waits), traffic.transfers, traffic.replays, traffic.launches))

            engine.run(call, [batch], micro_batch_tokens=1000, report=report)
    return found


@pytest.mark.parametrize("name", marked(["qwen2", "gemma-2", "qwen3-moe", "deepseek-v3"], quick=(1, 2)))
def test_a_decoding_step_only_reads_the_tokens_of_the_step_before(tmp_path, name):
    write_model(tmp_path / "model", name, max_position_embeddings=256)
    has_experts = name in ("qwen3-moe", "deepseek-v3")
    steps = _steps(tmp_path / "model", dtype="bfloat16" if has_experts else "float32")
    assert len(steps) == NEW
    # The first steps prefill, run a size for the first time, and record it.
    for (waits, *before), (more_waits, *after) in list(pairwise(steps[5:-2])):
        new = more_waits[len(waits) :]
        assert [wait for wait in new if not wait.startswith(READS)] == []
        transfers, replays, launches = (b - a for a, b in zip(before, after, strict=True))
        assert len(new) == 1 and transfers <= 2 and replays == 1
        assert launches < 60


@pytest.mark.parametrize("sampling", marked([
    {"temperature": 0.0}, {"top_k": 5, "top_p": 0.9, "temperature": 0.7}, {"min_p": 0.1},
    {"repetition_penalty": 1.1, "min_new_tokens": 3}, {"presence_penalty": 0.5},
], quick=(1, 3)))  # fmt: skip
def test_no_way_of_sampling_waits(tmp_path, sampling):
    write_model(tmp_path / "model", "qwen2", max_position_embeddings=256)
    steps = _steps(tmp_path / "model", **sampling)
    waits = [wait for wait in steps[-3][0][len(steps[5][0]) :] if not wait.startswith(READS)]
    assert waits == []
