"""A head in float32 on a bfloat16 model: generator and trainer differ less, on every layout."""

import pytest
import torch

from realhf import Role
from realhf.calls import Generate, LogProbs, OptimizerConfig, SamplingConfig
from realhf.data.batch import Batch, Packed
from realhf.distributed.world import World
from realhf.engine.native import NativeEngine
from realhf.graph import FunctionCall
from realhf.layout import Layout
from realhf.models.lora import LoraConfig
from realhf.models.model_config import ModelConfig
from realhf.models.param_spec import model_spec
from tests.nn.tiny import hf_config

OUTPUTS = ("sequence_ids", "response_mask", "gen_logprobs", "finished")
WORK = Generate(SamplingConfig(max_new_tokens=30))
GENERATE = FunctionCall("generate", "generate", ("prompts",), OUTPUTS, role="actor", work=WORK)
LOGPROBS = FunctionCall("logprobs", "forward", OUTPUTS[:2], ("out",), role="actor", work=LogProbs())


def _engine(world, layout, *, float32_head, tied=True, lora=None):
    """Return an engine whose logits have a large mean, as those of trained models do: in bfloat16 they are
    rounded much."""
    hf = hf_config(tied=tied) | {"vocab_size": 500, "initializer_range": 0.25, "eos_token_id": [3]}
    engine = NativeEngine(
        model_spec(ModelConfig.from_hf(hf)), Layout.parse(layout), world, dtype="bfloat16",
        float32_head=float32_head, lora=lora, optimizer=OptimizerConfig(lr=1e-3))
    engine.load(None, seed=0)
    for name, shard in engine.model.shards().items():
        if name.endswith(("embed_tokens.weight", "lm_head.weight")):
            shard.add_(1.0)
    return engine


def _answers(engine):
    """Return answers to eight prompts."""
    generator = torch.Generator().manual_seed(1)
    prompts = Packed.of([torch.randint(4, 500, (3 + i,), generator=generator) for i in range(8)])
    batch = Batch(list(range(8)), {"prompts": prompts})
    return engine.generate(GENERATE, batch).batch


def _logprobs(engine, answers):
    return engine.forward(LOGPROBS, answers, micro_batch_tokens=90)


@pytest.mark.parametrize("changes", [{}, {"tied": False}, {"lora": LoraConfig(rank=4)}])
def test_generator_and_trainer_differ_less(changes):
    found = {}
    for float32_head in (False, True):
        engine = _engine(World(), "d1@0", float32_head=float32_head, **changes)
        answers = _answers(engine)
        chosen = answers["response_mask"].values.bool()
        again = _logprobs(engine, answers)["out"].values
        found[float32_head] = (answers["gen_logprobs"].values - again)[chosen].abs().double().mean().item()
    assert 0 < found[True] < 0.7 * found[False]


def _on_layout(world, layout, answers):
    """Return the log-probs that this rank has of some answers."""
    if world.rank not in Layout.parse(layout):
        return None
    return _logprobs(_engine(world, layout, float32_head=True), answers).fields.get("out")


def test_the_last_stage_has_the_head_in_float32(pool):
    """Stages change no rounding, so log-probs are those of one rank."""
    engine = _engine(World(), "d1@0", float32_head=True)
    answers = _answers(engine)
    expected = _logprobs(engine, answers)["out"].values
    found = [part for part in pool.run(_on_layout, "p2@0-1", answers) if part is not None]
    assert len(found) == 1
    torch.testing.assert_close(found[0].values, expected, rtol=1e-5, atol=1e-5)


def test_what_has_no_head_in_float32_is_refused():
    with pytest.raises(ValueError, match="float32_head is true: the transformers engine"):
        Role("x", engine="transformers", float32_head=True)
    with pytest.raises(ValueError, match="float32_head is true: it is for head lm, and head is score"):
        Role("x", head="score", float32_head=True)
