"""Training on the device beside the same on the CPU: losses and gradient norms of some optimizer steps."""

import os

import pytest
import torch

from realhf.algorithms.policy_loss import PolicyLoss, PolicyLossConfig
from realhf.algorithms.sft import CrossEntropy
from realhf.calls import OptimizerConfig, TrainStep
from realhf.checkpoint.hf import save_weights
from realhf.data.batch import Batch, Packed
from realhf.graph import FunctionCall
from realhf.models.lora import LoraConfig
from tests.gpu.models import VARIABLE, engine_of, tokens, write_model

pytestmark = pytest.mark.gpu
NAMES = ("qwen2", "gemma-2", "gpt2", "qwen3-moe", "deepseek-v3")
LENGTHS, NUM_STEPS = [5, 2, 33, 33, 90, 12, 60, 7], 4
OPTIMIZER = OptimizerConfig(lr=1e-3, max_grad_norm=0.5)


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    base = tmp_path_factory.mktemp("models")
    return lambda name: base / name if (base / name).exists() else write_model(base / name, name)


def _batch():
    ids = tokens(sum(LENGTHS)).split(LENGTHS)
    masks = [(torch.arange(length) > 0).float() for length in LENGTHS]
    fields = {
        "sequence_ids": ids, "response_mask": masks, "gen_logprobs": [-3.0 * mask for mask in masks],
        "advantages": [mask * (-1) ** i for i, mask in enumerate(masks)],
    }
    columns = {name: Packed.of(list(column)) for name, column in fields.items()}
    return Batch(list(range(len(LENGTHS))), columns)


def train(engine, *, loss=None, recompute=False, router_losses=True):
    """Metrics of the steps."""
    coefficients = {"router_aux_loss_coef": 0.01, "router_z_loss_coef": 0.001} if router_losses else {}
    work = TrainStep(loss or CrossEntropy(), **coefficients)
    batch = _batch()
    call = FunctionCall("actor_train", "train_step", tuple(batch.fields), role="actor", work=work)
    steps = [
        engine.train(call, [batch], micro_batch_tokens=100, recompute=recompute)
        for _ in range(NUM_STEPS)]
    return {name: torch.tensor([step[name] for step in steps]) for name in steps[0]}


def _on(directory, device, *, dtype="float32", lora=None, **settings):
    engine = engine_of(directory, device=device, dtype=dtype, optimizer=OPTIMIZER, lora=lora)
    return train(engine, **settings)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("what", ["sft", "policy", "recompute", "lora"])
def test_float32_steps_are_those_of_the_cpu(directories, device, name, what):
    if what == "recompute" and os.environ.get(VARIABLE) == "pretended":
        pytest.skip("hooks of saved tensors do not see the pretended device")
    settings = {
        "sft": {}, "policy": {"loss": PolicyLoss(PolicyLossConfig())}, "recompute": {"recompute": True},
        "lora": {"lora": LoraConfig(rank=4)},
    }[what]
    ours, wanted = (_on(directories(name), where, **settings) for where in (device, torch.device("cpu")))
    assert ours["loss"][0] != ours["loss"][-1]
    assert ours.keys() == wanted.keys()
    for key, values in ours.items():
        torch.testing.assert_close(values, wanted[key], rtol=2e-3, atol=1e-5, msg=f"{key} of {what}")


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_steps_are_near_those_of_float32(directories, device, name, record_property):
    ours, wanted = (_on(directories(name), device, dtype=dtype) for dtype in ("bfloat16", "float32"))
    for key in ("loss", "grad_norm"):
        apart = (ours[key] / wanted[key] - 1).abs()
        record_property(f"{key} apart, relative", float(apart.max()))
        assert apart.max() < (0.05 if key == "loss" else 0.2), key


def test_what_was_trained_is_written_as_it_is(tmp_path, directories, device):
    engine = engine_of(directories("qwen2"), device=device, dtype="float32", optimizer=OPTIMIZER)
    train(engine)
    save_weights(tmp_path, engine.model)
    again = engine_of(tmp_path, device=torch.device("cpu"), dtype="float32")
    mine = engine.model.shards()
    assert all(torch.equal(x, mine[name].cpu()) for name, x in again.model.shards().items())
