"""Recomputation of blocks yields the same numbers as without it, and takes less memory."""

import pytest
import torch

from tests.engine.training import CALL, engine_and_minibatches
from tests.nn.tiny import SEQ_LENS, build, hf_config, tokens
from tests.realloc.test_memory import Storages
from tests.samples import marked


def _train(world, text, recompute):
    if (mine := engine_and_minibatches(world, text, num_rows=8)) is None:
        return None
    engine, batches = mine
    passes = []
    first = engine.model.blocks[0]
    engine.model.blocks[0] = lambda *args: passes.append(1) or first(*args)
    options = {"micro_batch_tokens": 20, "recompute": recompute}
    history = [engine.train(CALL, batches, **options) for _ in range(2)]
    return history, len(passes), {name: shard.clone() for name, shard in engine.model.shards().items()}


@pytest.mark.parametrize("layout", marked(["d1@0", "t2p2@0-3", "d2p2@0-3"], quick=[0]))
def test_recomputing_changes_no_bit(pool, layout):
    plain, again = (pool.run(_train, layout, recompute) for recompute in (False, True))
    for ours, expected in zip(again, plain, strict=True):
        if expected is None:
            continue
        assert ours[0] == expected[0] and expected[0][0]["grad_norm"] > 0
        assert ours[1] == 2 * expected[1] > 0, "every block is to run twice"
        assert all(torch.equal(ours[2][name], shard) for name, shard in expected[2].items())


def _kept_bytes(recompute):
    """Return the bytes that a forward pass keeps for the backward pass, its output included."""
    model = build(hf_config(), dtype=torch.float32)
    model.enable_grad()
    with Storages() as storages:
        output = model(tokens(), SEQ_LENS, recompute=recompute)
    assert output.requires_grad
    return storages.now


def test_blocks_keep_only_their_input():
    config, num_tokens = hf_config(), sum(SEQ_LENS)
    hidden = num_tokens * config["hidden_size"] * 4
    num_blocks, mlp = config["num_hidden_layers"], num_tokens * config["intermediate_size"] * 4
    rope = 2 * num_tokens * 4 * 4  # cos and sin of half of the 8 dims of a head
    numbers_per_token = 1024  # ids, the last norm's scales
    # Inputs of all blocks; input, normalised input and output of the last norm.
    assert _kept_bytes(recompute=True) <= (num_blocks + 3) * hidden + rope + numbers_per_token
    # Without: at least input, attention's input, q, k, v, its output, MLP's input, gate, up and down's input.
    assert _kept_bytes(recompute=False) >= num_blocks * (6 * hidden + 3 * mlp)
