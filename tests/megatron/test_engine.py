"""Forward calls of the megatron engine, what it reads from Megatron-Core's globals, and what it refuses."""

import json
from dataclasses import replace

import pytest
import torch

from realhf import ExecutionPlan, Role
from realhf.calls import LogProbs, TopLogProbs, Values
from realhf.distributed.world import World
from realhf.errors import UserError
from realhf.graph import FunctionCall
from realhf.layout import Layout
from realhf.models.model_config import MegatronConfig, ModelConfig
from realhf.models.param_spec import model_spec
from realhf.runtime.compile.program import compile_program
from realhf.runtime.weights.engine_store import engine_class
from tests.megatron.test_curves import hf_config
from tests.runtime.tiny import make_experiment, role, write_task

FORWARD = [
    FunctionCall("logprobs", "forward", ("sequence_ids",), ("logprobs",), role="actor", work=LogProbs()),
    FunctionCall("values", "forward", ("sequence_ids",), ("values",), role="actor", work=Values()),
    FunctionCall("top", "forward", ("sequence_ids",), ("ids", "top"), role="actor", work=TopLogProbs(k=3)),
]


@pytest.mark.parametrize("layout", ["t2p2@0-3", "t2p2v2@0-3"])
@pytest.mark.parametrize("call", FORWARD, ids=lambda call: call.name)
def test_forward_calls_are_those_of_the_native_engine(megatron, call, layout):
    hf = hf_config("qwen2")
    (expected,) = megatron("outputs", "native", hf, "d1@0", call, num_ranks=1)
    found = [rank for rank in megatron("outputs", "megatron", hf, layout, call, num_ranks=4) if rank]
    assert len(found) == 2  # The last stage of two tensor-parallel ranks.
    for columns in found:
        for ours, theirs in zip(columns, expected, strict=True):
            assert torch.allclose(torch.tensor(ours), torch.tensor(theirs), rtol=1e-4, atol=1e-5)


def test_no_group_comes_from_the_globals(megatron):
    """A group read from there would be that of another layout, if several are in one process."""
    for name, layout in (("qwen3-moe", "d2t2e2@0-3"), ("qwen2", "t2p2@0-3")):
        for called in megatron("reads_of_globals", hf_config(name), layout, num_ranks=4):
            assert set(called) <= {"get_global_memory_buffer", "is_initialized"}


def test_without_a_gpu_the_engine_says_so():
    spec = model_spec(ModelConfig.from_hf(hf_config("qwen2")))
    with pytest.raises(UserError, match="engine megatron needs a GPU"):
        engine_class("megatron")(spec, Layout.parse("d1@0"), World(), dtype="float32")


@pytest.mark.parametrize(("name", "what"), [
    ("deepseek-v3", "latent attention"), ("gemma-2", "soft caps"), ("gemma-3", "norms after attention"),
    ("gpt2", "learned positions"), ("olmo-2", "norms over all queries"), ("olmoe", "norms over all queries"),
    ("granite", "residual multiplier"), ("glm-4", "norms after attention"),
])
def test_models_that_it_lacks_are_refused(name, what):
    with pytest.raises(ValueError, match=f"the megatron engine does not have .*{what}"):
        MegatronConfig.from_hf(hf_config(name))


@pytest.mark.parametrize(("layout", "what"), [
    ("c2@0-1", "cp=2"), ("t4@0-3", "kv heads"), ("p3@0-2", "the 4 layers"), ("d2@1,0", "rising ranks"),
    ("d4e4@0-3", "experts"),
])
def test_layouts_that_it_lacks_are_refused_except_for_generation(layout, what):
    config = MegatronConfig.from_hf(hf_config("qwen3-moe") | {"num_key_value_heads": 2})
    with pytest.raises(ValueError, match=what):
        config.check_layout(Layout.parse(layout))
    config.check_generation_layout(Layout.parse(layout))


def test_interleaved_chunks_are_of_this_engine_only():
    config = MegatronConfig.from_hf(hf_config("qwen2"))
    layout = Layout.parse("p2v2@0-1")
    config.check_layout(layout)
    for check in (config.check_generation_layout, config.native().check_layout):
        with pytest.raises(ValueError, match="vp=2: only the megatron engine interleaves"):
            check(layout)
    with pytest.raises(ValueError, match=r"pp\*vp=8 does not divide the 4 layers"):
        config.check_layout(Layout.parse("p2v4@0-1"))


@pytest.mark.parametrize(("changes", "what"), [
    ({"dtype": "float16"}, "dtype is float16"), ({"dtype": "float64"}, "dtype is float64"),
])
def test_dtypes_that_it_lacks_are_refused(tmp_path, changes, what):
    directory = write_task(tmp_path)
    actor = replace(role(directory), engine="megatron", **changes)
    with pytest.raises(ValueError, match=what):
        compile_program(make_experiment("grpo", directory, actor=actor), None, world_size=1)


def test_head_in_float32_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(hf_config("qwen2")))
    with pytest.raises(ValueError, match="float32_head"):
        Role(str(tmp_path), engine="megatron", float32_head=True)


def test_an_optimizer_on_the_host_is_refused(tmp_path):
    directory = write_task(tmp_path)
    plain = role(directory)
    optimizer = replace(plain.optimizer, offload=True)
    actor = replace(plain, engine="megatron", dtype="float32", optimizer=optimizer)
    with pytest.raises(ValueError, match=r"actor\.optimizer\.offload is true"):
        compile_program(make_experiment("grpo", directory, actor=actor), None, world_size=1)


def test_offloading_is_refused(tmp_path):
    directory = write_task(tmp_path)
    actor = replace(role(directory), engine="megatron", dtype="float32")
    experiment = make_experiment("grpo", directory, actor=actor)
    calls = {call.name: {"layout": "d1@0"} for call in experiment.graph().calls if call.role is not None}
    calls["ref_forward"]["offload"] = True
    with pytest.raises(ValueError, match="the megatron engine of role 'ref' does not offload"):
        compile_program(experiment, ExecutionPlan.from_dict({"calls": calls}), world_size=1)
