"""Plans for roles with adapters, compared with counts of parameters."""

from dataclasses import replace

import pytest

from realhf import GRPO, Expected, OptimizerConfig, PolicyLossConfig, Role
from realhf.calls import Output
from realhf.cli.planning_problem import problem_of
from realhf.cluster import Cluster
from realhf.execution_plan import CallPlan, ExecutionPlan
from realhf.graph import FunctionCall
from realhf.layout import Layout, ParallelStrategy
from realhf.models.lora import LoraConfig
from realhf.models.model_config import ModelConfig
from realhf.planner.call_cost import call_cost
from realhf.planner.memory_account import check_memory
from realhf.planner.problem import ModelRole, Workload
from realhf.planner.rates import Rates
from realhf.planner.shard import training_bytes, weights_bytes

LLAMA = ModelRole(ModelConfig.load("llama-7b"), trainable=True)
ADAPTED = replace(LLAMA, lora=LoraConfig(rank=16))


def test_sizes_are_those_of_weights_and_adapters():
    """A layer has 4 attention matrices of 4096 x 4096 and 3 of 4096 x 11008; adapters have rank * (in +
    out) each."""
    adapters = 32 * 16 * (4 * (4096 + 4096) + 3 * (4096 + 11008))
    assert ADAPTED.trained_spec.numel == adapters
    one = ParallelStrategy()
    assert weights_bytes(ADAPTED, one, 0) == 2 * (LLAMA.spec.numel + adapters)
    assert training_bytes(ADAPTED, one, 0) == 16 * adapters
    assert training_bytes(ADAPTED, ParallelStrategy(dp=8), 0) == pytest.approx(5.5 * adapters, rel=1e-2)


def test_training_goes_forward_and_once_back():
    """Without gradients of weights there are two thirds of the matrix products and no large optimizer."""
    rates, work = Rates(Cluster.load("h100-8x8")), Workload(64, response_tokens=2048.0, output=Output.VALUES)
    call = FunctionCall("actor_train", "train_step", ("x",), role="actor", work=None)

    def seconds(role):
        call_plan = CallPlan(Layout.parse("t8@0-7"), micro_batch_tokens=16384)
        return call_cost(rates, call, role, work, call_plan, per_host=8).seconds_by_cause

    whole, adapted = seconds(LLAMA), seconds(ADAPTED)
    assert 0.6 < adapted["compute"] / whole["compute"] < 0.8
    assert adapted["optimizer"] < 0.03 * whole["optimizer"]


def _reward(prompts, completions, completion_ids):
    return [0.0 for _ in prompts]


def test_the_reference_has_no_second_copy_where_it_has_the_same_part():
    actor = Role("llama-7b", dtype="bfloat16", optimizer=OptimizerConfig(), lora=LoraConfig(rank=16))
    experiment = GRPO(
        actor=actor, reward_function=_reward, loss=PolicyLossConfig(kl_coef=0.1),
        expected=Expected(prompt_tokens=100, response_tokens=100),
    )
    problem = problem_of(experiment, Cluster.load("h100-8x8"))
    layouts = {"actor_generate": "t4@0-3", "ref_forward": "d2t2@0-3", "actor_train": "d2t2@0-3"}
    plan = ExecutionPlan.from_dict({"calls": {name: {"layout": text} for name, text in layouts.items()}})
    weights, half = LLAMA.spec.numel * 2, ParallelStrategy(dp=2, tp=2)
    for peak in check_memory(problem, plan).peaks.values():
        assert peak.bytes_by_use.get("ref weights", 0.0) == 0
        assert peak.bytes_by_use["actor weights"] == weights_bytes(ADAPTED, half, 0) > weights / 2
    apart = problem_of(replace(experiment, actor=replace(actor, lora=None)), Cluster.load("h100-8x8"))
    peaks = check_memory(apart, plan).peaks.values()
    assert all(peak.bytes_by_use["ref weights"] > weights / 2 for peak in peaks)
