"""Sums of gradients over replicas, which begin during the backward pass, are complete and correct."""

from dataclasses import replace

import pytest
import torch

from realhf.calls import OptimizerConfig
from realhf.engine.native import NativeEngine
from realhf.layout import Layout
from realhf.models.lora import LoraConfig
from realhf.models.model_config import ModelConfig
from realhf.models.param_spec import model_spec
from realhf.nn.lora import Adapters
from tests.engine.reference import ragged_rows
from tests.engine.test_optimizer import hf_config as family_config
from tests.engine.training import CALL, minibatch
from tests.nn.tiny import SEQ_LENS, build, hf_config, tokens
from tests.samples import marked

LORA = LoraConfig(rank=2, target_modules=("q_proj", "o_proj", "down_proj"))
SECTION = 3000  # Parameters; the tiny models have 30,000 to 60,000.


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("lora", [False, True])
def test_gradients_are_complete_when_a_layer_is_left_behind(lora, recompute):
    model = build(hf_config(tied=True))
    if lora:
        adapters = Adapters(model.config, LORA, model.groups, dtype=torch.float64)
        adapters.init_random(seed=1)
        model = build(hf_config(tied=True), adapters=adapters)
    trained = adapters if lora else model
    trained.enable_grad()
    assert trained.grad_buffer is not None
    trained.grad_buffer.fill_(torch.nan)  # The first gradient is written over what is there.
    seen = {}

    def left_behind(layer):
        grads, layers = trained.grad_shards(), trained.spec.layer_of
        later = [name for name, at in layers.items() if at is not None and at >= layer]
        seen[layer] = {name: grads[name].clone() for name in later}

    for last in (False, True):
        hidden = model(tokens(), SEQ_LENS, recompute=recompute, layer_done=left_behind if last else None)
        model.logits(hidden).square().sum().backward()
    trained.finish_grads()
    final = trained.grad_shards()
    assert list(seen) == ([3, 2, 1] if lora else [3, 2, 1, 0])  # Nothing is trained before the first adapter.
    for layer, grads in seen.items():
        assert len(grads) > len(seen.get(layer + 1, {}))
        assert all(torch.equal(grad, final[name]) for name, grad in grads.items())


def _train(world, config, text, num_rows, section_numel, recompute):
    """Metrics, this rank's parameters, and whether sums had begun when the backward passes were over."""
    layout = Layout.parse(text)
    if world.rank not in layout:
        return None
    config = family_config(config) if isinstance(config, str) else ModelConfig.from_hf(config)
    spec = replace(model_spec(config), section_numel=section_numel)
    engine = NativeEngine(spec, layout, world, dtype="float64", optimizer=OptimizerConfig(lr=3e-3))
    engine.load(None, seed=0)
    optimizer, had_begun = engine._optimizer, []
    complete = optimizer.sums.complete

    def complete_sums():
        had_begun.append(len(optimizer.sums._open) < len(optimizer.sums._by_layer))
        complete()

    optimizer.sums.complete = complete_sums
    dp = layout.coordinate(world.rank).dp
    batches = [minibatch(ragged_rows(num_rows, seed=seed)[dp :: layout.dp]) for seed in (0, 1)]
    history = [
        engine.train(CALL, batches, micro_batch_tokens=20, recompute=recompute) for _ in range(2)]
    shards = {name: shard.clone() for name, shard in engine.model.shards().items()}
    return history, shards, had_begun[::2]  # (`step` asks again.)


ONE_KV_HEAD = hf_config() | {"num_key_value_heads": 1}  # Ranks over tp share it and add up its gradients.


@pytest.mark.parametrize(
    ("config", "layout", "num_rows", "recompute"),
    marked([
        (hf_config(tied=True), "d2@0-1", 8, False), (hf_config(), "d4@3,1,0,2", 9, True),
        (hf_config(), "d4@0-3", 3, False), (hf_config(), "c2@0-1", 5, True),
        (hf_config(), "d2c2@0-3", 5, False), (hf_config(tied=True), "d2p2@0-3", 7, True),
        (ONE_KV_HEAD, "d2t2@0-3", 6, False), ("qwen3-moe", "d4e2@0-3", 6, True),
        ("deepseek-v3", "d2e2p2@0-3", 6, False), ("deepseek-v3", "d2e2p2@0-3", 6, True),
    ], quick=[6]),
)
def test_early_sums_change_nothing(pool, config, layout, num_rows, recompute):
    whole, parts = (
        pool.run(_train, config, layout, num_rows, size, recompute) for size in (1 << 26, SECTION))
    for ours, expected in zip(parts, whole, strict=True):
        if expected is None:
            continue
        assert ours[0] == [pytest.approx(metrics, rel=1e-9) for metrics in expected[0]]
        for name, shard in expected[1].items():
            torch.testing.assert_close(ours[1][name], shard, rtol=1e-9, atol=1e-11, msg=name)
        assert any(expected[2]) == (Layout.parse(layout).ep > 1)  # Experts are sections of their own.
    begun = [result[2] for result in parts if result is not None]
    assert all(map(all, begun)) if num_rows > 3 else any(map(any, begun))  # One of four has no samples of 3.
