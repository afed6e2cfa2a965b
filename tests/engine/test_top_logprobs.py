"""The most probable tokens as a forward call, against torch.topk on the logits of transformers' model."""

import pytest
import torch

from realhf.calls import TopLogProbs
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
from tests.engine.training import minibatch

K, TEMPERATURE = 5, 0.7
ROWS = ragged_rows(9, seed=4)
CALL = FunctionCall(
    "teacher_forward", "forward", ("sequence_ids", "response_mask"), ("ids", "logprobs"), role="teacher",
    work=TopLogProbs(K, TEMPERATURE),
)


def _columns(world, text, directory, rows=ROWS, engine_type=NativeEngine, *, chunk_tokens=6):
    """Return this rank's part of the rows, and the call's two columns on the last stage, sample by sample."""
    layout = Layout.parse(text)
    if world.rank not in layout:
        return [], None
    spec = model_spec(ModelConfig.load(str(directory)))
    if engine_type is TransformersEngine:
        spec = class_spec(TransformersConfig.load(str(directory)))
    engine = engine_type(spec, layout, world, dtype="float64")
    engine.load(directory, seed=0)
    mine = rows[layout.coordinate(world.rank).dp :: layout.dp]
    numel = chunk_sizes.CHUNK_NUMEL
    try:
        chunk_sizes.CHUNK_NUMEL = chunk_tokens * -(-67 // layout.tp)
        batch = engine.forward(CALL, minibatch(mine), micro_batch_tokens=25)
    finally:
        chunk_sizes.CHUNK_NUMEL = numel
    return mine, [batch[key] for key in CALL.outputs] if batch.fields else None


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    directory = tmp_path_factory.mktemp("plain")
    return directory, plain_model(directory, tied=True, initializer_range=0.3)


def _check(model, rows, columns, *, rtol):
    """Compare with the largest of the log-probs that transformers' model has; there are no ties."""
    for (prompt, completion), ids, logprobs in zip(rows, *(c.split() for c in columns), strict=True):
        sequence = torch.tensor([prompt + completion])
        with torch.no_grad():
            logp = (model(sequence).logits[0, len(prompt) - 1 : -1] / TEMPERATURE).log_softmax(-1)
        expected = logp.topk(K)
        assert ids.dtype == torch.int64
        assert ids[len(prompt) :].tolist() == expected.indices.tolist()
        torch.testing.assert_close(logprobs[len(prompt) :], expected.values, rtol=rtol, atol=0)
        assert not ids[: len(prompt)].any() and not logprobs[: len(prompt)].any()


@pytest.mark.parametrize(("engine_type", "rtol"), [(NativeEngine, 1e-9), (TransformersEngine, 1e-4)])
def test_one_process(plain, engine_type, rtol):
    rows, columns = _columns(World(), "d1@0", plain[0], engine_type=engine_type)
    assert len(rows) == len(ROWS)
    _check(plain[1], rows, columns, rtol=rtol)


@pytest.mark.parametrize("layout", ["d2@0-1", "t2@0-1", "p2@0-1", "c2@0-1", "d2t2@0-3", "t4@0-3"])
def test_every_layout_finds_the_same(pool, plain, layout):
    results = [result for result in pool.run(_columns, layout, plain[0]) if result[1] is not None]
    replicas = {tuple(map(str, rows)): columns for rows, columns in results}
    assert sum(map(len, replicas)) == len(ROWS)
    for rows, columns in results:
        _check(plain[1], rows, columns, rtol=1e-9)


def test_a_replica_without_samples_has_columns_of_the_same_kind(pool, plain):
    (_, full), (rows, empty), *_ = pool.run(_columns, "d2@0-1", plain[0], ROWS[:1])
    assert rows == []
    assert [x.values.dtype for x in empty] == [x.values.dtype for x in full]
    assert all(x.values.shape == (0, K) for x in empty)
