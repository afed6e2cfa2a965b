"""What the planner makes of a role with adapters, against counts of parameters."""

from dataclasses import replace

import pytest

from realhf.cluster import Cluster
from realhf.graph import FunctionCall
from realhf.layout import ParallelStrategy
from realhf.lora import LoraConfig
from realhf.model_config import ModelConfig
from realhf.planner.cost import Options, call_cost
from realhf.planner.memory import training_bytes, weights_bytes
from realhf.planner.problem import ModelRole, Workload
from realhf.planner.rates import Rates

LLAMA = ModelRole(ModelConfig.load("llama-7b"), trainable=True)
ADAPTED = replace(LLAMA, lora=LoraConfig(rank=16))


def test_sizes_are_those_of_weights_and_adapters():
    """4 attention matrices of 4096 x 4096 and 3 of 4096 x 11008 a layer, each with rank * (in + out)."""
    adapters = 32 * 16 * (4 * (4096 + 4096) + 3 * (4096 + 11008))
    assert ADAPTED.trained_spec.numel == adapters
    one = ParallelStrategy()
    assert weights_bytes(ADAPTED, one, 0) == 2 * (LLAMA.spec.numel + adapters)
    assert training_bytes(ADAPTED, one, 0) == 16 * adapters
    assert training_bytes(ADAPTED, ParallelStrategy(dp=8), 0) == pytest.approx(5.5 * adapters, rel=1e-2)


def test_training_goes_forward_and_once_back():
    """Without gradients of weights: two thirds of the matrix products, and no large optimizer."""
    rates, work = Rates(Cluster.load("h100-8x8")), Workload(64, response_tokens=2048.0, output="values")
    call = FunctionCall("actor_train", "train_step", ("x",), role="actor", work=None)

    def seconds(role):
        options = Options(micro_batch_tokens=16384)
        return call_cost(rates, call, role, work, ParallelStrategy(tp=8), per_host=8, options=options).parts

    whole, adapted = seconds(LLAMA), seconds(ADAPTED)
    assert 0.6 < adapted["compute"] / whole["compute"] < 0.8
    assert adapted["optimizer"] < 0.03 * whole["optimizer"]
