"""Losses by parts of a micro-batch, of whose logits a chunk exists at a time: the same numbers as at once."""

import pytest
import torch

from realhf.dist.group import World
from realhf.engine.native import NativeEngine
from realhf.engine.work import LogProbs, OptimizerConfig
from realhf.graph import FunctionCall
from realhf.layout import Layout
from realhf.model_config import ModelConfig
from realhf.nn import vocab_parallel
from realhf.param_spec import model_spec
from tests.engine.reference import ragged_rows
from tests.engine.training import CALL, engine_and_minibatches, minibatch
from tests.nn.tiny import hf_config
from tests.realloc.test_memory import Storages

FORWARD = FunctionCall(
    "ref_forward", "forward", ("sequence_ids", "response_mask"), ("logprobs",), role="actor",
    work=LogProbs(temperature=0.7),
)  # fmt: skip


def _run(world, text, chunk_tokens, tied):
    """Metrics, parameters and log-probs of this rank, with so many tokens in a chunk of logits."""
    if (mine := engine_and_minibatches(world, text, num_rows=12, tied=tied)) is None:
        return None
    engine, batches = mine
    before = vocab_parallel._CHUNK_NUMEL
    try:
        vocab_parallel._CHUNK_NUMEL = chunk_tokens * -(-67 // engine.groups.layout.tp)
        metrics = [engine.run(CALL, batches, micro_batch_tokens=60).metrics for _ in range(2)]
        logprobs = engine.run(FORWARD, batches[:1], micro_batch_tokens=60).batch.fields.get("logprobs")
    finally:
        vocab_parallel._CHUNK_NUMEL = before
    shards = {name: shard.clone() for name, shard in engine.shards().items()}
    return metrics, shards, None if logprobs is None else logprobs.values


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layout", ["d1@0", "t2@0-1", "p2@0-1", "c2@0-1"])
def test_chunks_change_no_number(pool, layout, tied):
    """Of one token, of a few (a sequence has up to 12), and all at once."""
    whole = pool.run(_run, layout, 1000, tied)
    for chunk_tokens in (1, 9):
        for ours, expected in zip(pool.run(_run, layout, chunk_tokens, tied), whole, strict=True):
            torch.testing.assert_close(ours, expected)


def _peak(chunk_tokens, monkeypatch):
    """Bytes of a train step's peak, and the number of its response tokens."""
    monkeypatch.setattr(vocab_parallel, "_CHUNK_NUMEL", chunk_tokens * 5000)
    spec = model_spec(ModelConfig.from_hf(hf_config(tied=True) | {"vocab_size": 5000}))
    settings = {"dtype": "float32", "optimizer": OptimizerConfig(lr=1e-3)}
    engine = NativeEngine(spec, Layout.parse("d1@0"), World(), **settings)
    engine.load(None, seed=0)
    batch = minibatch(ragged_rows(40, seed=0))
    batch.fields["response_mask"].values = batch["response_mask"].values.float()
    with Storages() as storages:
        engine.run(CALL, [batch, batch], micro_batch_tokens=1000)
    return storages.peak, int(batch["response_mask"].values.sum())


def test_training_holds_no_more_than_a_chunk(monkeypatch):
    whole, responses = _peak(1000, monkeypatch)
    parts, _ = _peak(20, monkeypatch)
    assert whole - parts > 0.9 * (responses - 20) * 5000 * 4
