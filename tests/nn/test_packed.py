"""Products with packed weights are those with plain ones, for any number of rows, and see every update."""

import pytest
import torch

from realhf.calls import Generate, OptimizerConfig, SamplingConfig
from realhf.data.batch import Batch, Packed
from realhf.devices import chunk_sizes, half_precision
from realhf.distributed.world import World
from realhf.engine.native import NativeEngine
from realhf.graph import FunctionCall
from realhf.layout import Layout
from realhf.models.model_config import ModelConfig
from realhf.models.param_spec import model_spec
from realhf.nn.linear import PackedWeight, can_pack
from tests.engine.reference import ragged_rows
from tests.engine.training import CALL, minibatch
from tests.nn.tiny import hf_config


def _random(*shape, seed, dtype):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("widens", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_are_those_of_the_formula(monkeypatch, dtype, widens):
    monkeypatch.setattr(half_precision, "_has_units", lambda dtype: not widens)
    can_pack.cache_clear()
    if not can_pack(dtype):
        pytest.skip(f"no packed weights in {dtype} on this CPU")
    weight, bias = _random(70, 45, seed=0, dtype=dtype), _random(70, seed=1, dtype=dtype)
    packed = PackedWeight(weight)
    tolerance = 1e-4 if dtype == torch.float32 else 2**-7
    for num_rows in (0, 1, 7, 32, 513, 1500):
        x = _random(num_rows, 45, seed=num_rows, dtype=dtype)
        exact = x.double() @ weight.double().T
        for found, expected in (
            (packed.product(x, None), exact), (packed.product(x, bias), exact + bias.double())):
            assert found.dtype == dtype
            torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=20 * tolerance)
    can_pack.cache_clear()


def test_no_copy_is_used_in_float64():
    assert not can_pack(torch.float64)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_generation_after_an_update_uses_the_new_weights(monkeypatch, dtype):
    """Its log-probs are those of a new engine with these weights, and no copy is left."""
    monkeypatch.setattr(chunk_sizes, "LEAST_PACKED_NUMEL", 1)
    engine = _engine(dtype)
    before = _generate(engine)
    engine.train(CALL, [minibatch(ragged_rows(8, seed=seed)) for seed in (0, 1)], micro_batch_tokens=100)
    after = _generate(engine)
    fresh = _engine(dtype)
    fresh.flat.copy_(engine.flat)
    torch.testing.assert_close(after, _generate(fresh), rtol=0, atol=0)
    assert not torch.equal(before, after)
    weights = [weight for block in ("qkv", "o", "gate_up", "down") for weight in _weights(engine, block)]
    assert weights and not any(weight.packs or weight._packed is not None for weight in weights)


def _weights(engine, name):
    return [engine.model.of_layer(layer)[f"{name}.weight"] for layer in range(4)]


def _engine(dtype):
    spec = model_spec(ModelConfig.from_hf(hf_config()))
    engine = NativeEngine(
        spec, Layout.parse("d1@0"), World(), dtype=dtype, optimizer=OptimizerConfig(lr=1e-2))
    engine.load(None, seed=0)
    return engine


def _generate(engine):
    prompts = [torch.tensor(prompt) for prompt, _ in ragged_rows(5, seed=3)]
    call = FunctionCall(
        "actor_generate", inputs=("prompt_ids",), role="actor",
        work=Generate(SamplingConfig(max_new_tokens=6, temperature=0.0), seed=0),
        outputs=("sequence_ids", "response_mask", "gen_logprobs", "finished"))
    return engine.generate(call, Batch(list(range(5)), {"prompt_ids": Packed.of(prompts)})).batch[
        "gen_logprobs"].values
