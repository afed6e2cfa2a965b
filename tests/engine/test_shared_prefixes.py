"""What several sequences begin with passes once, and changes no output and no gradient: each sequence alone,
in a micro-batch of its own, gives the same."""

import numpy as np
import pytest
import torch

from realhf.calls import Generate, LogProbs, OptimizerConfig, SamplingConfig
from realhf.data.batch import Batch, Packed
from realhf.devices import chunk_sizes
from realhf.distributed.world import World
from realhf.engine.native import NativeEngine
from realhf.engine.shared_prefixes import keep_prompts_together, pass_tokens
from realhf.graph import FunctionCall
from realhf.layout import Layout
from realhf.models.lora import LoraConfig
from realhf.models.model_config import ModelConfig
from realhf.models.param_spec import model_spec
from tests.engine.training import CALL, minibatch
from tests.nn.tiny import hf_config
from tests.samples import marked

INPUTS = ("sequence_ids", "response_mask")
FORWARD = FunctionCall(
    "ref_forward", "forward", INPUTS, ("logprobs",), role="actor", work=LogProbs(temperature=0.7))
WHOLE = 10_000  # Tokens of a micro-batch that holds everything.


def rows_of(*, common: int, own: int, seed: int = 0) -> list[tuple[list[int], list[int]]]:
    """Return (prompt, completion) rows: five answers of 1 to 9 tokens to each of three prompts, in turns.

    These begin with `common` equal tokens, and have up to two more than `own` others. The last one is short.
    """
    draw = np.random.default_rng(seed)
    system = draw.integers(2, 67, common).tolist()
    prompts = [system + draw.integers(2, 67, own + i).tolist() for i in range(3)]
    rows = [(prompts[i % 3], draw.integers(2, 67, draw.integers(1, 10)).tolist()) for i in range(15)]
    return [*rows, (system + [5, 6], [7, 8, 9])] if common else rows


def _run(world, text, rows, micro_batch_tokens, options):
    """Return what this rank computes in two train steps, of two mini-batches each, and a forward call."""
    layout = Layout.parse(text)
    if world.rank not in layout:
        return None
    adapters = LoraConfig(rank=2, target_modules=("q_proj", "k_proj", "v_proj", "down_proj"))
    lora = adapters if options.get("lora") else None
    spec = model_spec(ModelConfig.from_hf(hf_config()))
    dtype = options.get("dtype", "float64")
    engine = NativeEngine(spec, layout, world, dtype=dtype, optimizer=OptimizerConfig(lr=3e-3), lora=lora)
    engine.load(None, seed=0)
    dp = layout.coordinate(world.rank).dp
    batches = [minibatch(rows[part][dp :: layout.dp]) for part in (slice(0, 9), slice(9, None))]
    before = chunk_sizes.CHUNK_NUMEL
    try:
        chunk_sizes.CHUNK_NUMEL = options.get("chunk_tokens", 1000) * -(-67 // layout.tp)
        settings = {"micro_batch_tokens": micro_batch_tokens, "recompute": options.get("recompute", False)}
        metrics = [engine.train(CALL, batches, **settings) for _ in range(2)]
        logprobs = engine.forward(FORWARD, batches[0], micro_batch_tokens=micro_batch_tokens)
    finally:
        chunk_sizes.CHUNK_NUMEL = before
    trained = engine.model if lora is None else engine.adapters
    shards = {name: shard.clone() for name, shard in trained.shards().items()}
    values = logprobs.fields.get("logprobs")
    return metrics, shards, None if values is None else values.values


@pytest.mark.parametrize(("layout", "options"), marked([
    ("d1@0", {}), ("d1@0", {"chunk_tokens": 3}), ("d1@0", {"recompute": True}), ("d1@0", {"lora": True}),
    ("t2@0-1", {}), ("p2@0-1", {"chunk_tokens": 20}), ("d2@0-1", {}), ("d2t2@0-3", {"recompute": True}),
], quick=[0, 1, 5]))
@pytest.mark.parametrize("common", [0, 18])
def test_sharing_changes_no_number(pool, layout, options, common):
    rows = rows_of(common=common, own=17)
    alone = pool.run(_run, layout, rows, 1, options)
    for ours, expected in zip(pool.run(_run, layout, rows, WHOLE, options), alone, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_narrow_numbers_differ_by_rounding_alone(dtype):
    rows = rows_of(common=18, own=17)
    shared, alone = (_run(World(), "d1@0", rows, tokens, {"dtype": dtype}) for tokens in (WHOLE, 1))
    tolerance = {"float32": 1e-5, "bfloat16": 0.1}[dtype]
    apart = (shared[2] - alone[2]).abs() / (1 + alone[2].abs())
    assert apart.quantile(0.98) <= tolerance and apart.max() <= 3 * tolerance
    assert shared[0][0]["grad_norm"] == pytest.approx(alone[0][0]["grad_norm"], rel=tolerance)


def _model(**changes):
    spec = model_spec(ModelConfig.from_hf(hf_config() | changes))
    return NativeEngine(spec, Layout.parse("d1@0"), World(), dtype="float32").model


def test_each_prompt_and_what_all_begin_with_pass_once():
    batch = minibatch(rows_of(common=18, own=17))
    tokens = pass_tokens(_model(), batch, "sequence_ids")
    responses = int(batch["response_mask"].values.sum())
    assert len(tokens.ids_T) == sum(tokens.lens) == 18 + (17 + 18 + 19) + 2 + responses
    # Every token of every sequence is where the table says.
    torch.testing.assert_close(
        tokens.ids_T[torch.from_numpy(tokens.row_of_token)], batch["sequence_ids"].values, rtol=0, atol=0)


@pytest.mark.parametrize(("rows", "changes"), [
    (rows_of(common=0, own=10), {}),  # Prompts that are too short.
    (rows_of(common=18, own=17)[:1], {}),
    ([(row[0] + [i] * 20, row[1]) for i, row in enumerate(rows_of(common=0, own=17))], {}),
    (rows_of(common=18, own=17), {
        "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0,
        "layer_types": ["sliding_attention"] * 4}),
])
def test_what_saves_nothing_or_has_no_kernel_passes_as_it_is(rows, changes):
    batch = minibatch(rows)
    tokens = pass_tokens(_model(**changes), batch, "sequence_ids")
    assert tokens.prefixes == ()
    assert tokens.lens == batch["sequence_ids"].lengths


def test_samples_of_a_prompt_share_micro_batches():
    """Three prompts have 15 samples in turns; 80 tokens hold two or three of a prompt's samples."""
    batch = minibatch(rows_of(common=0, own=17))
    lengths = batch["sequence_ids"].lengths
    groups = keep_prompts_together(batch, "sequence_ids", [[i] for i in range(15)], max_tokens=80)
    assert sorted(i for group in groups for i in group) == list(range(15))
    for group in groups:
        assert len({i % 3 for i in group}) == 1
        assert sum(lengths[i] for i in group) <= 80
    whole = keep_prompts_together(batch, "sequence_ids", [[i] for i in range(15)], max_tokens=WHOLE)
    assert whole == [[i, i + 3, i + 6, i + 9, i + 12] for i in range(3)]


def test_a_loss_over_groups_keeps_them_whole():
    batch = minibatch(rows_of(common=0, own=17))
    pairs = [[i, i + 1] for i in range(0, 14, 2)]
    joined = keep_prompts_together(batch, "sequence_ids", pairs, max_tokens=200)
    for pair in pairs:
        assert any(group[k : k + 2] == pair for group in joined for k in range(0, len(group), 2))

@pytest.mark.parametrize(("layout", "group"), marked(
    [("d1@0", 1), ("d1@0", 3), ("t2@0-1", 1), ("p2@0-1", 2)], quick=[0, 3]))
def test_prompts_that_begin_alike_are_answered_as_alone(pool, layout, group):
    """In one pass they share what they begin with. Later ones copy it from rows that run; with one row at a
    time there are none."""
    alone = pool.run(_answers, layout, group, 8192, 1)
    for prefill_tokens in (8192, 1):
        for ours, expected in zip(pool.run(_answers, layout, group, prefill_tokens, 64), alone, strict=True):
            torch.testing.assert_close(ours, expected)


def _answers(world, text, group, prefill_tokens, max_rows):
    """Return the answers to prompts that begin alike."""
    layout = Layout.parse(text)
    if world.rank not in layout:
        return None
    engine = NativeEngine(model_spec(ModelConfig.from_hf(hf_config())), layout, world, dtype="float64")
    engine.load(None, seed=0)
    rows = rows_of(common=18, own=17)
    prompts = [torch.tensor(prompt) for prompt, _ in rows[:3] for _ in range(group)]
    batch = Batch(list(range(len(prompts))), {"prompt_ids": Packed.of(prompts)})
    sampling = SamplingConfig(max_new_tokens=7)
    work = Generate(sampling, seed=1, max_rows=max_rows, prefill_tokens=prefill_tokens)
    call = FunctionCall(
        "actor_generate", inputs=("prompt_ids",), role="actor", work=work,
        outputs=("sequence_ids", "response_mask", "gen_logprobs", "finished"))
    made = engine.generate(call, batch).batch
    if max_rows > 1:  # In later steps of a row, one token passes.
        num_decoded = sum(map(len, prompts))
        assert engine.last_num_computed < num_decoded + 7 * len(prompts) - 2 * 18
    return {key: made[key].values for key in ("sequence_ids", "gen_logprobs")} if made.fields else None
