"""NaN and infinity in what models compute end the call with a sentence, under every layout."""

import math

import pytest
import torch
import transformers

from realhf.calls import Generate, LogProbs, SamplingConfig, Scores, TopLogProbs, Values
from realhf.data.batch import Batch, Packed
from realhf.distributed.world import World
from realhf.engine.base import require_numbers
from realhf.engine.hf_factory import class_spec
from realhf.engine.native import NativeEngine
from realhf.engine.transformers import TransformersEngine
from realhf.errors import UserError
from realhf.graph import FunctionCall
from realhf.inference.sampling import sample
from realhf.layout import Layout, even_split
from realhf.models.model_config import ModelConfig, TransformersConfig
from realhf.models.param_spec import model_spec
from realhf.runtime.compile.program import compile_program
from realhf.runtime.trainer import Trainer
from tests.engine.training import minibatch
from tests.nn.tiny import hf_config
from tests.runtime.tiny import make_experiment, write_task

SETTINGS = [
    {}, {"temperature": 0.0}, {"temperature": 0.7, "top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1},
    {"top_k": 3, "top_p": 0.5, "min_p": 0.01}]
VOCABULARY = 700
BAD_ROW = 2


def _logits(bad):
    logits = torch.randn(5, VOCABULARY, generator=torch.Generator().manual_seed(0))
    logits[BAD_ROW, 451] = bad
    return logits


def _sampled(world, bad, settings, layout="t4@0-3"):
    """Sample with the vocabulary on the ranks of the layout, with and without the bad row."""
    if world.rank not in Layout.parse(layout):
        return None
    group = world.group(Layout.parse(layout).ranks)
    start, stop = even_split(VOCABULARY, group.size, group.index)
    draws = torch.rand(5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = []
    for rows in (list(range(5)), [i for i in range(5) if i != BAD_ROW]):
        found.append(sample(
            _logits(bad)[rows, start:stop], draws[rows], config=SamplingConfig(**settings),
            vocab_start=start, group=group, widest_shard=-(-VOCABULARY // group.size)))
    return found


def _check_sampled(found):
    (tokens, logprobs), (others, their_logprobs) = found
    good = [i for i in range(5) if i != BAD_ROW]
    assert logprobs[BAD_ROW].isnan() and 0 <= tokens[BAD_ROW] < VOCABULARY
    assert torch.equal(tokens[good], others) and torch.equal(logprobs[good], their_logprobs)
    assert logprobs[good].isfinite().all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("settings", SETTINGS)
def test_bad_logits_give_a_log_prob_that_is_no_number(bad, settings):
    """Rows beside them are as they are without them."""
    _check_sampled(_sampled(World(), bad, settings, layout="d1@0"))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_logits_of_another_rank_give_a_log_prob_that_is_no_number(pool, bad):
    for settings in ({}, {"temperature": 0.0}, {"top_p": 0.8}):
        for found in pool.run(_sampled, bad, settings):
            if found is not None:
                _check_sampled(found)


def _call(kind, work, outputs):
    inputs = ("prompt_ids",) if kind == "generate" else ("sequence_ids", "response_mask")
    return FunctionCall(f"actor_{kind}", kind, inputs, outputs, role="actor", work=work)


GENERATE = _call(
    "generate", Generate(SamplingConfig(max_new_tokens=3)),
    ("sequence_ids", "response_mask", "gen_logprobs", "finished"))
FORWARDS = {
    "logprobs": _call("forward", LogProbs(), ("ref_logprobs",)),
    "values": _call("forward", Values(), ("values",)),
    "scores": _call("forward", Scores(), ("score",)),
    "probability": _call("forward", Scores(probability=True), ("score",)),
    "top": _call("forward", TopLogProbs(k=3), ("top_ids", "top_logprobs")),
}
TOKEN = 5
"""Its embedding is NaN. Only the sample 1 has it."""


def _batch():
    rows = [([7, 8], [9, 10]), ([7, TOKEN], [11, 12, 13]), ([3], [4])]
    batch = minibatch(rows)
    prompts = Packed.of([torch.tensor(prompt) for prompt, _ in rows])
    return Batch(batch.ids, {**batch.fields, "prompt_ids": prompts})


def _failure(world, layout, name):
    """Return what the call of an engine raises on this rank, whose weights have a NaN."""
    if world.rank not in Layout.parse(layout):
        return None
    head = "score" if name in ("values", "scores", "probability") else "lm"
    spec = model_spec(ModelConfig.from_hf(hf_config(), head=head))
    engine = NativeEngine(spec, Layout.parse(layout), world, dtype="float64")
    engine.load(None, seed=0)
    for param, tensor in engine.model.shards().items():
        if "embed" in param:
            first, _ = engine.model.regions[param][0]
            if 0 <= TOKEN - first < len(tensor):
                tensor[TOKEN - first] = math.nan
    return _raised(engine, name)


def _raised(engine, name):
    try:
        if name == "generate":
            engine.generate(GENERATE, _batch().pick(["prompt_ids"]))
        else:
            batch = _batch().pick(["sequence_ids", "response_mask"])
            engine.forward(FORWARDS[name], batch, micro_batch_tokens=100)
    except FloatingPointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("name", "key"), [
    ("generate", "gen_logprobs"), ("logprobs", "ref_logprobs"), ("values", "values"), ("scores", "score"),
    ("probability", "score"), ("top", "top_logprobs")])
def test_a_call_with_nan_names_the_rank_and_the_sample(name, key):
    sentence = _failure(World(), "d1@0", name)
    assert f"rank 0 computed {key} that are NaN or infinite for 1 of 3 samples" in sentence
    assert sentence.endswith("sample 1")
    assert ("token 3 of sample 1" in sentence) == (name in ("generate", "logprobs", "values"))


@pytest.mark.parametrize(("layout", "rank"), [("t2@0-1", 0), ("t2p2@0-3", 2)])
def test_a_rank_that_has_the_results_says_so(pool, layout, rank):
    for name in ("generate", "logprobs"):
        sentences = [sentence for sentence in pool.run(_failure, layout, name) if sentence]
        assert f"rank {rank} computed" in sentences[0] and sentences[0].endswith("token 3 of sample 1")


def test_a_call_of_transformers_engine_names_the_sample(tmp_path):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=67, hidden_size=32, intermediate_size=44, num_hidden_layers=2, num_attention_heads=4)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    spec = class_spec(TransformersConfig.load(str(tmp_path)))
    engine = TransformersEngine(spec, Layout.parse("d1@0"), World(), dtype="float32")
    engine.load(tmp_path, seed=0)
    engine.model.shards()["model.embed_tokens.weight"][TOKEN] = math.nan
    for name in ("generate", "logprobs"):
        assert _raised(engine, name).endswith("token 3 of sample 1")


def test_numbers_and_impossible_tokens_pass():
    batch = Batch([4, 9], {
        "a": Packed(torch.tensor([0.0, -math.inf, 3.0]), [1, 2]), "b": torch.tensor([1, 2]),
        "c": torch.tensor([1.0, math.inf])})
    require_numbers(batch, "a", rank=0)
    require_numbers(batch, "b", rank=0)
    require_numbers(batch, "absent", rank=0)
    with pytest.raises(FloatingPointError, match="rank 3 computed c .* for 1 of 2 .* at sample 9"):
        require_numbers(batch, "c", rank=3)


@pytest.mark.parametrize("call", ["actor_generate", "ref_forward"])
def test_a_run_ends_with_the_call_and_the_cause(tmp_path, call):
    experiment = make_experiment("grpo", write_task(tmp_path), steps=2, eval_dataset=None)
    program = compile_program(experiment, None, world_size=1)
    trainer = Trainer(program, World(), quiet=True)
    broken = call.split("_")[0]
    trainer._state.models.engines[broken, program.plan[call].layout].flat.fill_(math.inf)
    with pytest.raises(UserError) as caught:
        trainer.run()
    sentence = str(caught.value)
    assert sentence.startswith(f"call '{call}' in step 1: rank 0 computed ")
    assert f"weights of {broken} are NaN or too large" in sentence
