"""Models with experts: every layout's tokens, log-probs and training are the same as in one process."""

import pytest
import torch

from realhf.algorithms.sft import CrossEntropy
from realhf.calls import Generate, LogProbs, OptimizerConfig, SamplingConfig, Scores, TrainStep
from realhf.data.batch import Batch, Packed
from realhf.devices.half_precision import split_into
from realhf.distributed.world import World
from realhf.engine.native import NativeEngine
from realhf.graph import FunctionCall
from realhf.layout import Layout
from realhf.models.model_config import ModelConfig
from realhf.models.param_spec import model_spec
from tests.families import MOE_CASES
from tests.samples import marked

PREFIX = {"mixtral": "Mixtral", "qwen2-moe": "Qwen2Moe", "deepseek-v3": "DeepseekV3"}
PROMPT_LENGTHS = [3, 1, 6, 2, 2, 4, 5, 1, 3]
SHARES = [[0, 1, 2, 3, 4], [5], [6, 7, 8], []]
"""Which prompts each dp replica gets, where there are two or more."""
NUM_NEW = 7


def _engine(name, world, layout, *, head="lm", optimizer=None):
    case = MOE_CASES[name]
    hf = case.hf(architectures=[f"{PREFIX[name]}ForCausalLM"], eos_token_id=[5, 11, 23, 40, 41, 42, 50, 60])
    hf["num_hidden_layers"] = 2
    spec = model_spec(ModelConfig.from_hf(hf, head=head))
    engine = NativeEngine(spec, layout, world, dtype="float64", optimizer=optimizer)
    engine.load(None, seed=0)
    for key, shard in engine.model.shards().items():
        if key.endswith("e_score_correction_bias"):
            split_into(shard, torch.linspace(-0.2, 0.2, shard.shape[1]))
    return engine


def _sequences(numbers, *, extra=0):
    rows = [
        torch.randint(1, 67, (PROMPT_LENGTHS[i] + extra,), generator=torch.Generator().manual_seed(i))
        for i in numbers
    ]
    return Packed.of(rows, empty=torch.zeros(0, dtype=torch.long))


def _share(layout, rank):
    """Prompts of this rank's dp replica: all of them for one, and for two the first two of four shares."""
    dp = layout.coordinate(rank).dp
    if layout.dp == 1:
        return list(range(9))
    shares = SHARES if layout.dp == 4 else [SHARES[0] + SHARES[2], SHARES[1]]
    return shares[dp]


def _run(world, name, text, max_rows):
    """Return for each sample id the sequence and log-probs of generation, and log-probs of a forward call."""
    layout = Layout.parse(text)
    if world.rank not in layout:
        return {}
    engine, ids = _engine(name, world, layout), _share(layout, world.rank)
    sampling = SamplingConfig(max_new_tokens=NUM_NEW)
    generate = FunctionCall(
        "actor_generate", "generate", ("prompt_ids",), ("sequence_ids", "response_mask", "logp", "finished"),
        role="actor", work=Generate(sampling, max_rows=max_rows))
    batch = Batch(ids, {"prompt_ids": _sequences(ids)})
    made = engine.generate(generate, batch).batch
    keys = ("sequence_ids",)
    forward = FunctionCall("ref_forward", "forward", keys, ("logp",), role="ref", work=LogProbs())
    batch = Batch(ids, {"sequence_ids": _sequences(ids, extra=2)})
    again = engine.forward(forward, batch, micro_batch_tokens=9)
    if not made.fields:
        return {}
    columns = zip(made.ids, made["sequence_ids"].split(), made["logp"].split(), strict=True)
    found = {i: (sequence.tolist(), logp) for i, sequence, logp in columns}
    forwards = dict(zip(again.ids, again["logp"].split(), strict=True))
    return {i: (*found[i], forwards[i]) for i in found}


@pytest.mark.parametrize(
    "name, layout, max_rows",
    marked([
        ("mixtral", "e2@0-1", 2),
        ("deepseek-v3", "e2@0-1", 2),
        ("deepseek-v3", "t2@0-1", 2),
        ("qwen2-moe", "e2t2@0-3", 2),
        ("qwen2-moe", "e2p2@0-3", 2),
        ("qwen2-moe", "e4@0-3", 2),
        ("qwen2-moe", "e2c2@0-3", 2),
        ("deepseek-v3", "d4e2@0-3", 2),
        ("deepseek-v3", "d4e2@0-3", 512),
    ], quick=[0, 4, 6, 8]),
)
def test_tokens_and_logprobs_are_those_of_one_process(pool, name, layout, max_rows):
    expected = _run(World(), name, "d1@0", 512)
    lengths = [len(sequence) - n for (sequence, *_), n in zip(expected.values(), PROMPT_LENGTHS, strict=True)]
    assert len(set(lengths)) > 2 and max(lengths) == NUM_NEW
    seen = set()
    for result in pool.run(_run, name, layout, max_rows):
        for i, (sequence, logp, forward) in result.items():
            seen.add(i)
            assert sequence == expected[i][0], (layout, i)
            torch.testing.assert_close((logp, forward), expected[i][1:], rtol=1e-9, atol=1e-10)
    assert seen == expected.keys()


def _train(world, name, text, recompute):
    """Metrics of two steps, and the parameters afterwards."""
    layout = Layout.parse(text)
    if world.rank not in layout:
        return None
    engine = _engine(name, world, layout, optimizer=OptimizerConfig(lr=3e-3, weight_decay=0.1))
    engine._optimizer.reload()
    work = TrainStep(CrossEntropy(), router_aux_loss_coef=0.5, router_z_loss_coef=0.1)
    keys = ("sequence_ids", "response_mask")
    call = FunctionCall("actor_train", "train_step", keys, role="actor", work=work)
    ids = _share(layout, world.rank)
    sequences = _sequences(ids, extra=4)
    mask = Packed(torch.ones(len(sequences.values), dtype=torch.float64), sequences.lengths)
    batch = Batch(ids, dict(zip(keys, (sequences, mask), strict=True)))
    history = [
        engine.train(call, [batch], micro_batch_tokens=9, recompute=recompute) for _ in range(2)
    ]
    shards = {key: (engine.model.regions[key], shard.clone()) for key, shard in engine.model.shards().items()}
    return history if engine.groups.is_last_stage else None, shards


@pytest.mark.parametrize(
    "name, layout",
    marked([
        ("mixtral", "e2@0-1"),
        ("deepseek-v3", "d4e2@0-3"),
        ("deepseek-v3", "e2c2@0-3"),
        ("qwen2-moe", "e2p2@0-3"),
    ], quick=[3]),
)
def test_training_is_that_of_one_process(pool, name, layout):
    expected, whole = _train(World(), name, "d1@0", False)
    assert expected[0]["router_aux_loss"] >= 1 - 1e-9 and expected[0]["router_z_loss"] > 0
    histories = 0
    for result in filter(None, pool.run(_train, name, layout, layout != "e2@0-1")):
        history, shards = result
        for key, (region, shard) in shards.items():
            box = tuple(slice(*extent) for extent in region)
            torch.testing.assert_close(shard, whole[key][1][box], rtol=1e-8, atol=1e-9, msg=key)
        if history is not None:
            histories += 1
            for ours, theirs in zip(history, expected, strict=True):
                assert ours == pytest.approx(theirs, rel=1e-9)
    assert histories


def test_training_leaves_the_bias_of_the_choice_alone():
    world, layout = World(), Layout.parse("d1@0")
    before = _engine("deepseek-v3", world, layout).model.shards()
    _, after = _train(world, "deepseek-v3", "d1@0", False)
    for key, (_, shard) in after.items():
        assert torch.equal(shard, before[key]) == key.endswith("e_score_correction_bias"), key


def test_a_critic_with_experts_scores_sequences():
    engine = _engine("qwen2-moe", World(), Layout.parse("d1@0"), head="score")
    call = FunctionCall("c", "forward", ("sequence_ids",), ("score",), role="reward", work=Scores())
    rows = Batch(list(range(9)), {"sequence_ids": _sequences(range(9))})
    together, alone = (
        engine.forward(call, rows, micro_batch_tokens=n)["score"] for n in (1000, 1)
    )
    assert together.shape == (9,)
    torch.testing.assert_close(together, alone)
