"""What the planner knows of the megatron engine: its kernels, its copies of weights, its layouts."""

from dataclasses import replace

import pytest

from realhf.calls import Output
from realhf.cluster import Cluster
from realhf.execution_plan import ExecutionPlan
from realhf.graph import DataflowGraph, FunctionCall
from realhf.layout import Layout, ParallelStrategy
from realhf.models.model_config import MegatronConfig, ModelConfig
from realhf.planner.candidates import find_strategies
from realhf.planner.efficiencies import MEGATRON, OUR_CUDA
from realhf.planner.memory_account import MemoryAccount
from realhf.planner.problem import ModelRole, Problem, Workload
from tests.megatron.test_curves import hf_config
from tests.planner.problems import peak_memory


def test_kernels_are_counted_from_megatron_core(megatron):
    (dense,) = megatron("num_kernels", hf_config("llama"), num_ranks=1)
    assert dense[1] - dense[0] == MEGATRON.kernels
    hf = hf_config("qwen3-moe")
    for num_experts in (6, 12):
        changed = hf | {"num_experts": num_experts, "num_local_experts": num_experts}
        (found,) = megatron("num_kernels", changed, num_ranks=1)
        assert found[1] - found[0] == (
            MEGATRON.kernels + MEGATRON.expert_kernels + num_experts * MEGATRON.kernels_per_expert)


def test_a_role_trains_by_the_path_of_megatron_core_and_generates_by_ours():
    role = ModelRole(MegatronConfig.from_hf(hf_config("qwen2")))
    assert OUR_CUDA.of_role(role.config) is MEGATRON
    assert OUR_CUDA.of_role(role.generating.config) is OUR_CUDA
    assert role.generating.config == ModelConfig.from_hf(hf_config("qwen2"))


@pytest.mark.parametrize("kind", [ModelConfig, MegatronConfig])
def test_generation_in_the_layout_of_training_needs_a_copy(kind):
    calls = (
        FunctionCall("actor_generate", "generate", ("prompts",), ("sequence_ids",), "actor"),
        FunctionCall("actor_train", "train_step", ("sequence_ids",), (), "actor"),
    )
    role = ModelRole(kind.from_hf(hf_config("qwen2")), trainable=True)
    work = Workload(8, 16, 16, 16)
    problem = Problem(
        DataflowGraph(calls, ("prompts",)), {"actor": role}, {call.name: work for call in calls},
        Cluster.load("h100-8x8"))
    plan = ExecutionPlan.single(problem.graph, Layout.parse("d2@0-1"))
    resting = MemoryAccount(problem).of_plan(plan).resting
    copy = resting.get("actor copy", 0 * resting["actor weights"])
    assert list(copy[:2]) == list(resting["actor weights"][:2] * (kind is MegatronConfig))
    assert not copy[2:].any()
    elsewhere = replace(plan, calls=plan.calls | {"actor_generate": replace(
        plan["actor_generate"], layout=Layout.parse("d2@2-3"))})
    assert MemoryAccount(problem).of_plan(elsewhere).resting["actor copy"][2:4].all()


def test_interleaved_chunks_keep_more_activations():
    """Stage 0 of 4 keeps 4 micro-batches; with 2 chunks per stage, 2 * 3 + 4 + 1 = 11 passes through half of
    its layers (Megatron-LM's num_warmup_microbatches, and one more)."""
    role = ModelRole(MegatronConfig.load("llama-7b"), trainable=True)
    work = Workload(64, 1024, 1024, 1024, output=Output.VALUES)
    plain, interleaved = (
        peak_memory(
            role, "train_step", work, ParallelStrategy.parse(text), 0, micro_batch_tokens=2048, fused=True)
        for text in ("p4", "p4v2"))
    assert interleaved.activations / plain.activations == pytest.approx(11 / 2 / 4, rel=1e-2)


def test_the_search_interleaves_where_the_engine_can():
    cluster = Cluster.load("h100-1x8")
    found = {
        kind: {s.vp for s in find_strategies(kind.load("llama-7b"), 8, cluster=cluster, max_dp=8)}
        for kind in (ModelConfig, MegatronConfig)
    }
    assert found == {ModelConfig: {1}, MegatronConfig: {1, 2, 4}}
