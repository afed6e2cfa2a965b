"""Generation and forward calls against transformers' generate() and its logits."""

import pytest
import torch

from realhf.calls import Generate, LogProbs, SamplingConfig, Scores, Values
from realhf.data.batch import Batch, Packed
from realhf.distributed.world import World
from realhf.engine.native import NativeEngine
from realhf.errors import UserError
from realhf.graph import FunctionCall
from realhf.layout import Layout
from realhf.models.model_config import ModelConfig
from realhf.models.param_spec import model_spec
from tests.engine.reference import plain_model, ragged_rows
from tests.samples import marked

NUM_NEW = 12
NO_TOKENS = torch.zeros(0, dtype=torch.long)


def _prompts():
    """Return ragged prompts, with repetitions next to each other and apart, and a single token among them."""
    a, b, c, d = (prompt for prompt, _ in ragged_rows(4, seed=5))
    return [a, a, a, b, [9], c, c, a, d, d, b]


def _engine(directory, world=None, layout="d1@0"):
    spec = model_spec(ModelConfig.load(str(directory)))
    engine = NativeEngine(spec, Layout.parse(layout), world or World(), dtype="float64")
    engine.load(directory, seed=0)
    return engine


def _generate(
    engine, prompts, *, seed=0, max_rows=512, first_id=0, kv_cache_gib=None, prefill_tokens=8192,
    cuda_graphs=True, **sampling
):
    """Generate; return the responses, and the columns from which they were taken."""
    work = Generate(
        SamplingConfig(**{"max_new_tokens": NUM_NEW} | sampling), seed=seed, max_rows=max_rows,
        kv_cache_gib=kv_cache_gib, prefill_tokens=prefill_tokens, cuda_graphs=cuda_graphs)
    call = FunctionCall(
        name="actor_generate",
        kind="generate",
        inputs=("prompt_ids",),
        outputs=("sequence_ids", "response_mask", "gen_logprobs", "finished"),
        role="actor",
        work=work,
    )
    ids = list(range(first_id, first_id + len(prompts)))
    batch = Batch(ids, {"prompt_ids": Packed.of([torch.tensor(p) for p in prompts], empty=NO_TOKENS)})
    result = engine.generate(call, batch).batch
    if not result.fields:
        return None, result
    responses = []
    columns = zip(prompts, *(result[k].split() for k in call.outputs[:3]), strict=True)
    for prompt, tokens, mask, logprobs in columns:
        assert tokens[: len(prompt)].tolist() == prompt
        assert mask.tolist() == [0.0] * len(prompt) + [1.0] * (len(tokens) - len(prompt))
        assert not logprobs[: len(prompt)].any()
        responses.append(tokens[len(prompt) :].tolist())
    return responses, result


def _greedy_by_transformers(model, prompts, eos):
    responses = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUM_NEW,
            eos_token_id=eos or None, pad_token_id=0,
        )
        responses.append(out[0, len(prompt) :].tolist())
    return responses


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """Directory and HF model whose end-of-sequence tokens end some greedy responses early."""
    directory = tmp_path_factory.mktemp("model")
    free = _greedy_by_transformers(plain_model(directory, initializer_range=0.4), _prompts(), [])
    eos = [free[0][4], free[4][1]]
    return directory, plain_model(directory, initializer_range=0.4, eos_token_id=eos), eos


def _generate_greedily(world, layout, directory):
    parsed = Layout.parse(layout)
    if world.rank not in parsed:
        return None
    responses, result = _generate(_engine(directory, world, layout), _prompts(), temperature=0.0, max_rows=4)
    return None if responses is None else (responses, result["finished"].tolist())


@pytest.mark.parametrize("layout", marked(["t4@0-3", "t2p2@0-3"], quick=[1]))
def test_greedy_is_what_transformers_generates(pool, case, layout):
    directory, model, eos = case
    expected = _greedy_by_transformers(model, _prompts(), eos)
    ended = [float(response[-1] in eos) for response in expected]
    assert {len(response) for response in expected} > {NUM_NEW} and 0 < sum(ended) < len(ended)
    for max_rows in (512, 3, 1):
        responses, result = _generate(_engine(directory), _prompts(), temperature=0.0, max_rows=max_rows)
        assert responses == expected
        assert result["finished"].tolist() == ended
    results = [r for r in pool.run(_generate_greedily, layout, directory) if r is not None]
    assert results and all(result == (expected, ended) for result in results)


def test_logprobs_of_sampled_tokens_are_those_of_transformers_and_of_the_forward_call(case):
    directory, model, eos = case
    engine = _engine(directory)
    responses, result = _generate(engine, _prompts() * 3, temperature=0.7, top_k=40, top_p=0.95)
    for response, finished in zip(responses, result["finished"].tolist(), strict=True):
        stops = [i for i, token in enumerate(response) if token in eos]
        assert stops in ([], [len(response) - 1])
        assert finished == bool(stops) and (stops or len(response) == NUM_NEW)
    assert 0 < float(result["finished"].mean()) < 1
    call = FunctionCall(
        name="ref_forward",
        kind="forward",
        inputs=("sequence_ids", "response_mask"),
        outputs=("logprobs",),
        role="ref",
        work=LogProbs(temperature=0.7),
    )
    again = engine.forward(call, result, micro_batch_tokens=50)["logprobs"]
    torch.testing.assert_close(again.values, result["gen_logprobs"].values, rtol=1e-10, atol=1e-10)
    columns = zip(result["sequence_ids"].split(), result["gen_logprobs"].split(), responses, strict=True)
    for tokens, logprobs, response in columns:
        logits = model(tokens[None]).logits[0, :-1]
        theirs = (logits / 0.7).log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        num = len(response)
        torch.testing.assert_close(logprobs[-num:], theirs[-num:].detach(), rtol=1e-9, atol=1e-9)


def test_samples_depend_on_seed_and_sample_id_and_not_on_what_runs_beside_them(case):
    engine, prompts = _engine(case[0]), _prompts()
    whole, _ = _generate(engine, prompts, seed=3)
    assert len({tuple(r) for r in whole[:3]}) == 3  # equal prompts, different samples
    assert [_generate(engine, prompts, seed=3, max_rows=n)[0] for n in (1, 4)] == [whole, whole]
    assert _generate(engine, prompts[4:6], seed=3, first_id=4)[0] == whole[4:6]
    assert _generate(engine, prompts, seed=3, top_k=10**12)[0] == whole
    assert _generate(engine, prompts, seed=4)[0] != whole
    assert _generate(engine, prompts, seed=3, first_id=len(prompts))[0] != whole


LONG = 70  # New tokens: rows cross from block to block.


def long_prompts():
    """Return prompts of up to three blocks, some of them full, with up to four samples each."""
    generator = torch.Generator().manual_seed(7)
    lengths = [3, 130, 130, 130, 130, 64, 64, 1, 65, 65, 65, 20]
    prompts = {n: torch.randint(2, 67, (n,), generator=generator).tolist() for n in set(lengths)}
    return [prompts[length] for length in lengths]


def _generate_long(world, layout, directory, options):
    parsed = Layout.parse(layout)
    if world.rank not in parsed:
        return None
    settings = {"seed": 3, "max_new_tokens": LONG, **options}
    return _generate(_engine(directory, world, layout), long_prompts(), **settings)[0]


@pytest.mark.parametrize("every", [6, pytest.param(1, marks=pytest.mark.slow)])
def test_tokens_are_the_same_whatever_the_slots_the_memory_and_the_chunks(pool, tmp_path, every):
    """Every sixth of the settings and layouts, or every one."""
    sizes = {"max_position_embeddings": 512, "num_hidden_layers": 3}  # (One more on stage 1 of 2.)
    plain_model(tmp_path, initializer_range=0.4, eos_token_id=60, **sizes)
    expected = _generate_long(World(), "d1@0", tmp_path, {})
    lengths = {len(response) for response in expected}
    assert LONG in lengths and len(lengths) > 3
    block = 3 * 2 * 64 * 2 * 8 * 8 / 2**30  # GiB: layers, K and V, tokens, heads, dims, bytes
    settings = [
        {"max_rows": 5}, {"max_rows": 1}, {"prefill_tokens": 7, "max_rows": 3}, {"prefill_tokens": 50},
        {"kv_cache_gib": 5 * block}, {"kv_cache_gib": 9 * block, "prefill_tokens": 100},
    ]
    for options in settings[::every]:
        assert _generate_long(World(), "d1@0", tmp_path, options) == expected, options
    tight = {"kv_cache_gib": 7 * block, "prefill_tokens": 60, "max_rows": 6}
    for layout in ("t2p2@0-3", "t2@0-1", "p2@0-1")[::every]:
        results = [r for r in pool.run(_generate_long, layout, tmp_path, tight) if r is not None]
        assert results and all(result == expected for result in results), layout
    with pytest.raises(UserError, match="is .* GiB: one sample of 200 tokens .* needs .* GiB") as error:
        _generate_long(World(), "d1@0", tmp_path, {"kv_cache_gib": 4 * block})
    least = {"kv_cache_gib": float(str(error.value).split()[-2])}
    assert _generate_long(World(), "d1@0", tmp_path, least) == expected


def _refused(world, layout, directory):
    """Return the error message of this rank when the last prompt, on the last replica, is empty."""
    parsed = Layout.parse(layout)
    if world.rank not in parsed:
        return None
    engine, at = _engine(directory, world, layout), parsed.coordinate(world.rank)
    prompts = [*_prompts()[:3], []]
    mine = list(range(at.dp, len(prompts), parsed.dp))
    fields = {"prompt_ids": Packed.of([torch.tensor(prompts[i], dtype=torch.long) for i in mine])}
    call = FunctionCall(
        "g", "generate", ("prompt_ids",), ("ids", "mask", "logp", "finished"), role="actor", work=Generate())
    with pytest.raises(UserError) as error:
        engine.generate(call, Batch(mine, fields))
    return str(error.value)


@pytest.mark.parametrize("layout", ["d1@0", "d2@0-1", "t2@0-1", "p2@0-1"])
def test_an_empty_prompt_is_refused_on_every_rank(pool, case, layout):
    told = [words for words in pool.run(_refused, layout, case[0]) if words is not None]
    assert told == ["the prompt of sample 3 is empty: it must have at least one token"] * len(told) and told


def test_no_prompts_give_empty_columns(case):
    engine = _engine(case[0])
    call = FunctionCall(
        "g", "generate", ("p",), ("ids", "mask", "logp", "finished"), role="actor", work=Generate()
    )
    empty = Batch([], {"p": Packed(torch.zeros(0, dtype=torch.long), [])})
    result = engine.generate(call, empty).batch
    assert len(result) == 0 and set(result.fields) == {"ids", "mask", "logp", "finished"}


def test_forward_calls_give_every_sample_its_own_result(case):
    """Small micro-batches of mixed lengths, against the plain model's hidden states one row at a time."""
    directory, model, _ = case
    spec = model_spec(ModelConfig.load(str(directory), head="score"))
    engine = NativeEngine(spec, Layout.parse("d1@0"), World(), dtype="float64")
    engine.load(directory, seed=5)
    rows = [torch.tensor(p + c) for p, c in ragged_rows(9, seed=6)]
    sequences = Packed.of(rows)
    mask = Packed.of([(torch.arange(len(row)) >= len(row) // 2).double() for row in rows])
    batch = Batch(list(range(9)), {"sequence_ids": sequences, "response_mask": mask})
    head = engine.model.shards()["score.weight"][0]
    expected = [model.model(row[None]).last_hidden_state[0] @ head for row in rows]
    for max_tokens in (1, 17, 1000):
        results = []
        for work in (Scores(), Values()):
            keys = tuple(batch.fields)
            call = FunctionCall("c", "forward", keys, ("out",), role="critic", work=work)
            results.append(engine.forward(call, batch, micro_batch_tokens=max_tokens)["out"])
        scores, values = results
        torch.testing.assert_close(scores, torch.stack([e[-1] for e in expected]).detach())
        for value, all_states, row_mask in zip(values.split(), expected, mask.split(), strict=True):
            before = torch.cat([torch.zeros(1).double(), all_states[:-1].detach()])  # in which t is chosen
            chosen = row_mask.bool() & (torch.arange(len(row_mask)) > 0)
            torch.testing.assert_close(value, torch.where(chosen, before, 0.0))
