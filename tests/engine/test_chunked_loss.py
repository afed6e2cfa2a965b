"""Losses by parts of a micro-batch, a chunk of logits at a time, have the same values as losses of the whole;
and losses with an entropy bonus have the right gradients."""

from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch

from realhf.algorithms.sft import CrossEntropy
from realhf.calls import LogProbs, OptimizerConfig, TrainStep
from realhf.devices import chunk_sizes
from realhf.distributed.world import World
from realhf.engine.hf_factory import class_spec
from realhf.engine.native import NativeEngine
from realhf.engine.transformers import TransformersEngine
from realhf.graph import FunctionCall
from realhf.layout import Layout
from realhf.models.model_config import ModelConfig, TransformersConfig
from realhf.models.param_spec import model_spec
from tests.engine.reference import plain_model, ragged_rows
from tests.engine.training import CALL, engine_and_minibatches, minibatch
from tests.nn.tiny import hf_config
from tests.realloc.test_memory import Storages
from tests.samples import marked

FORWARD = FunctionCall(
    "ref_forward", "forward", ("sequence_ids", "response_mask"), ("logprobs",), role="actor",
    work=LogProbs(temperature=0.7),
)


def _run(world, text, chunk_tokens, tied):
    """Return metrics, parameters and log-probs of this rank, with `chunk_tokens` in a chunk of logits."""
    if (mine := engine_and_minibatches(world, text, num_rows=12, tied=tied)) is None:
        return None
    engine, batches = mine
    before = chunk_sizes.CHUNK_NUMEL
    try:
        chunk_sizes.CHUNK_NUMEL = chunk_tokens * -(-67 // engine.groups.layout.tp)
        metrics = [engine.train(CALL, batches, micro_batch_tokens=60) for _ in range(2)]
        logprobs = engine.forward(FORWARD, batches[0], micro_batch_tokens=60).fields.get("logprobs")
    finally:
        chunk_sizes.CHUNK_NUMEL = before
    shards = {name: shard.clone() for name, shard in engine.model.shards().items()}
    return metrics, shards, None if logprobs is None else logprobs.values


@pytest.mark.parametrize(("layout", "tied"), marked(
    [(layout, tied) for layout in ("d1@0", "t2@0-1", "p2@0-1", "c2@0-1") for tied in (False, True)],
    quick=[4, 7]))
def test_chunks_change_no_number(pool, layout, tied):
    """A chunk has one token, a few (a sequence has up to 12), or all of them."""
    whole = pool.run(_run, layout, 1000, tied)
    for chunk_tokens in (1, 9):
        for ours, expected in zip(pool.run(_run, layout, chunk_tokens, tied), whole, strict=True):
            torch.testing.assert_close(ours, expected)


def _peak(chunk_tokens, monkeypatch):
    """Return the peak memory of a train step in bytes, and the number of its response tokens."""
    monkeypatch.setattr(chunk_sizes, "CHUNK_NUMEL", chunk_tokens * 5000)
    spec = model_spec(ModelConfig.from_hf(hf_config(tied=True) | {"vocab_size": 5000}))
    settings = {"dtype": "float32", "optimizer": OptimizerConfig(lr=1e-3)}
    engine = NativeEngine(spec, Layout.parse("d1@0"), World(), **settings)
    engine.load(None, seed=0)
    batch = minibatch(ragged_rows(40, seed=0))
    batch.fields["response_mask"].values = batch["response_mask"].values.float()
    with Storages() as storages:
        engine.train(CALL, [batch, batch], micro_batch_tokens=1000)
    return storages.peak, int(batch["response_mask"].values.sum())


def test_training_holds_no_more_than_a_chunk(monkeypatch):
    whole, responses = _peak(1000, monkeypatch)
    parts, _ = _peak(20, monkeypatch)
    assert whole - parts > 0.9 * (responses - 20) * 5000 * 4


@dataclass(frozen=True)
class WithBonus(CrossEntropy):
    """Cross-entropy minus 0.3 times the entropy; `attached` says whether gradients flow through it."""

    entropy: bool = True
    attached: bool = True

    def __call__(self, outputs, batch, totals):
        loss, metrics = super().__call__(outputs, batch, totals)
        entropy_T = outputs["entropy"] if self.attached else outputs["entropy"].detach()
        bonus = (entropy_T * batch["response_mask"].values).sum() / totals["tokens"]
        return loss - 0.3 * bonus, metrics | {"entropy": bonus}


ROWS = ragged_rows(9, seed=4)
TEMPERATURE = 0.7
LINEAR = OptimizerConfig(lr=1e6, eps=1e6, weight_decay=0.0, max_grad_norm=1e9)
"""The first step subtracts the gradient, to six digits."""


def _gradients(world, text, directory, engine_type=NativeEngine, *, chunk_tokens=1000, attached=True):
    """Return the metrics of a step with WithBonus, and the gradients of this rank's shards."""
    layout = Layout.parse(text)
    if world.rank not in layout:
        return None
    spec = model_spec(ModelConfig.load(str(directory)))
    if engine_type is TransformersEngine:
        spec = class_spec(TransformersConfig.load(str(directory)))
    engine = engine_type(spec, layout, world, dtype="float64", optimizer=LINEAR)
    engine.load(directory, seed=0)
    before = {name: shard.clone() for name, shard in engine.model.shards().items()}
    call = replace(CALL, work=TrainStep(WithBonus(attached=attached), temperature=TEMPERATURE))
    rows = ROWS[layout.coordinate(world.rank).dp :: layout.dp]
    numel = chunk_sizes.CHUNK_NUMEL
    try:
        chunk_sizes.CHUNK_NUMEL = chunk_tokens * -(-67 // layout.tp)
        metrics = engine.train(call, [minibatch(rows)], micro_batch_tokens=40)
    finally:
        chunk_sizes.CHUNK_NUMEL = numel
    return metrics, {name: before[name] - shard for name, shard in engine.model.shards().items()}


def _plain_gradients(model, *, attached):
    """Compute loss and gradients by autograd on the logits of transformers' model."""
    model.zero_grad()
    loss, count = 0.0, sum(len(completion) for _, completion in ROWS)
    for prompt, completion in ROWS:
        ids = torch.tensor([prompt + completion])
        logits = model(ids).logits[0, len(prompt) - 1 : -1]
        logp = (logits / TEMPERATURE).log_softmax(-1)
        entropy = -(logp.exp() * logp).sum()
        chosen = logp.gather(1, ids[0, len(prompt) :, None]).sum()
        loss = loss - chosen - 0.3 * (entropy if attached else entropy.detach())
    (loss / count).backward()
    return (loss / count).item(), {name: p.grad for name, p in model.named_parameters()}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    directory = tmp_path_factory.mktemp("plain")
    return directory, plain_model(directory, tied=True, initializer_range=0.3)


@pytest.mark.parametrize("attached", [True, False])
@pytest.mark.parametrize(
    ("engine_type", "chunk_tokens"), [(NativeEngine, 1000), (NativeEngine, 5), (TransformersEngine, 1000)])
def test_an_entropy_bonus_has_the_gradient_of_plain_logits(plain, engine_type, chunk_tokens, attached):
    directory, model = plain
    loss, expected = _plain_gradients(model, attached=attached)
    _, others = _plain_gradients(model, attached=not attached)
    metrics, found = _gradients(
        World(), "d1@0", directory, engine_type, chunk_tokens=chunk_tokens, attached=attached)
    # (transformers' own classes, and so that engine, compute angles and norms in float32.)
    rtol = 2e-6 if engine_type is NativeEngine else 1e-4
    assert metrics["loss"] == pytest.approx(loss, rel=rtol)
    for name, gradient in expected.items():
        largest = float(gradient.abs().max())
        if not name.endswith("k_proj.bias"):  # It has no gradient.
            torch.testing.assert_close(found[name], gradient, rtol=0, atol=rtol * largest, msg=name)
            assert (others[name] - gradient).abs().max() > 0.01 * largest


@pytest.mark.parametrize("layout", ["t2@0-1", "c2@0-1", "p2@0-1", "d2t2@0-3"])
@pytest.mark.parametrize("chunk_tokens", marked([5, 1000], quick=[0]))
def test_an_entropy_bonus_is_the_same_under_every_layout(pool, plain, layout, chunk_tokens):
    whole, _ = _gradients(World(), "d1@0", plain[0])
    results = pool.run(partial(_gradients, chunk_tokens=chunk_tokens), layout, plain[0])
    found = [metrics for metrics, _ in filter(None, results) if "loss" in metrics]
    assert found
    for metrics in found:
        assert metrics == pytest.approx(whole, rel=1e-9)
