"""Calls whose tokens are split over cp against one process, also with fewer tokens than ranks."""

import pytest
import torch

from realhf.algorithms.sft import CrossEntropy
from realhf.calls import Generate, LogProbs, OptimizerConfig, SamplingConfig, Scores, TrainStep, Values
from realhf.data.batch import Batch, Packed
from realhf.distributed.world import World
from realhf.engine.native import NativeEngine
from realhf.graph import FunctionCall
from realhf.layout import Layout
from realhf.models.model_config import ModelConfig
from realhf.models.param_spec import model_spec
from tests.engine.reference import ragged_rows
from tests.nn.tiny import hf_config
from tests.samples import marked

LAYOUTS = ["c2@0-1", "c4@0-3", "c2t2@0-3", "c2p2@0-3", "d2c2@3,1,0,2"]
INPUTS = ("sequence_ids", "response_mask")
WORK = {"logprobs": LogProbs(temperature=0.7), "values": Values(), "scores": Scores()}
GENERATED = ("ids", "mask", "logprobs", "finished")


class WithEntropy(CrossEntropy):
    """Cross-entropy with the entropy among its metrics."""

    entropy = True

    def __call__(self, outputs, batch, totals):
        loss, metrics = super().__call__(outputs, batch, totals)
        return loss, metrics | {"entropy": outputs["entropy"].sum()}


def _rows():
    """Return prompts and completions, among them sequences of fewer than four tokens."""
    return [([5], [6]), *ragged_rows(7, seed=3), ([1, 2], [3]), ([7], [])]


def _batch(rows, first_id=0):
    ids = Packed.of([torch.tensor(p + c) for p, c in rows])
    mask = Packed.of([torch.tensor([0.0] * len(p) + [1.0] * len(c)).double() for p, c in rows])
    return Batch(list(range(first_id, first_id + len(rows))), {"sequence_ids": ids, "response_mask": mask})


def _engine(world, text, *, head="lm", trainable=False):
    config = hf_config(tied=True) | {"eos_token_id": [3, 20, 40], "num_hidden_layers": 2}
    spec = model_spec(ModelConfig.from_hf(config, head=head))
    optimizer = OptimizerConfig(lr=3e-3, max_grad_norm=0.5) if trainable else None
    engine = NativeEngine(spec, Layout.parse(text), world, dtype="float64", optimizer=optimizer)
    engine.load(None, seed=0)
    return engine


def _share(world, text, rows):
    """The rows of this rank's data shard."""
    layout = Layout.parse(text)
    return rows[layout.coordinate(world.rank).dp :: layout.dp]


def _forward(world, text, output, max_tokens):
    if world.rank not in Layout.parse(text):
        return None
    engine = _engine(world, text, head="lm" if output == "logprobs" else "score")
    call = FunctionCall("c", "forward", INPUTS, ("out",), role="r", work=WORK[output])
    batch = _batch(_share(world, text, _rows()))
    fields = engine.forward(call, batch, micro_batch_tokens=max_tokens).fields
    return fields["out"] if fields else None


@pytest.mark.parametrize(
    ("output", "layout"),
    [*(("logprobs", layout) for layout in LAYOUTS), ("values", "c2p2@0-3"), ("scores", "c4@0-3")])
def test_outputs_are_whole_on_every_rank_of_the_last_stage(pool, output, layout):
    for max_tokens in (1, 40):
        results = pool.run(_forward, layout, output, max_tokens)
        alone = _forward(World(), "d1@0", output, max_tokens)
        parsed = Layout.parse(layout)
        for dp in range(parsed.dp):
            for rank in parsed.grid[-1, dp].ravel().tolist():
                ours, theirs = results[rank], alone
                if output == "scores":
                    theirs = alone[dp :: parsed.dp]
                else:
                    theirs, ours = alone.select(range(dp, len(alone), parsed.dp)).values, ours.values
                torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def _train(world, text, max_tokens, recompute):
    if world.rank not in Layout.parse(text):
        return None
    engine = _engine(world, text, trainable=True)
    work = TrainStep(WithEntropy(), minibatches=2)
    call = FunctionCall("c", "train_step", INPUTS, role="r", work=work)
    rows = _rows()
    batches = [_batch(_share(world, text, part)) for part in (rows[:6], rows[6:])]
    options = {"micro_batch_tokens": max_tokens, "recompute": recompute}
    return [engine.train(call, batches, **options) for _ in range(2)]


@pytest.mark.parametrize(
    ("recompute", "layout"),
    marked([(True, "c2p2@0-3"), *((False, layout) for layout in LAYOUTS)], quick=[0]))
def test_metrics_of_training_count_every_token_once(pool, layout, recompute):
    expected = _train(World(), "d1@0", 40, False)
    assert expected[0]["grad_norm"] > 0.5
    for max_tokens in (1, 40):
        results = pool.run(_train, layout, max_tokens, recompute)
        for rank in Layout.parse(layout).grid[-1].ravel().tolist():
            for ours, theirs in zip(results[rank], expected, strict=True):
                assert ours == pytest.approx(theirs, rel=1e-9)


def _generate(world, text, num_rows):
    if world.rank not in Layout.parse(text):
        return None
    engine = _engine(world, text)
    work = Generate(SamplingConfig(max_new_tokens=6), seed=1, max_rows=3)
    call = FunctionCall("g", "generate", ("sequence_ids",), GENERATED, role="r", work=work)
    batch = _batch([row for row in _rows() for _ in range(2)][:num_rows]).pick(("sequence_ids",))
    made = engine.generate(call, batch).batch
    if not made.fields:
        return None
    return made.ids, *(made[key].split() for key in GENERATED[:3]), made["finished"]


@pytest.mark.parametrize(
    ("num_rows", "layout"),
    [(1, "c2@0-1"), (15, "c2@0-1"), (3, "c4@3,1,0,2"), (15, "c2t2@0-3"), (1, "c2p2@0-3"), (15, "c2p2@0-3")])
def test_ranks_share_out_the_rows_of_a_generation(pool, num_rows, layout):
    results, expected = pool.run(_generate, layout, num_rows), _generate(World(), "d1@0", num_rows)
    head = Layout.parse(layout).result_ranks[0]
    assert [rank for rank, result in enumerate(results) if result is not None] == [head]
    ids, sequences, masks, logprobs, finished = results[head]
    assert ids == expected[0] and torch.equal(finished, expected[4])
    pairs = zip((*sequences, *masks), (*expected[1], *expected[2]), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
    for ours, theirs in zip(logprobs, expected[3], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
