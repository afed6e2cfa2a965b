"""Sampling options and limits of single prompts in all layouts, against transformers' own processors."""

from dataclasses import replace
from itertools import product

import pytest
import torch
import transformers

from realhf.calls import SamplingConfig
from realhf.data.loader import load_tokenizer
from realhf.distributed.world import World
from realhf.engine.transformers import TransformersEngine
from realhf.errors import UserError
from realhf.layout import Layout
from realhf.models.model_config import TransformersConfig
from realhf.runtime.compile.actions import spec_of
from tests.inference.paged import PagedReference, recorded
from tests.inference.rounds import (
    BLOCK_GIB,
    EOS,
    Case,
    alone,
    check_rows,
    count_restarts,
    expected_rows,
    generate_in_rounds,
    make_engine,
    prompts_of,
    write_versions,
)
from tests.inference.sampling_reference import Reference
from tests.inference.test_kept_cache import KEEP, _generate
from tests.inference.test_rounds import assert_same
from tests.inference.tokenizers import write_tokenizer
from tests.samples import marked, pairs

MAX_NEW = 20
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.7}
OPTIONS = {
    "min_p and penalties": {"min_p": 0.05, "temperature": 1.2, **PENALTIES},
    "stops": {"stop": ("bca", "é", "a b"), "stop_token_ids": (40,), "min_new_tokens": 3},
    "greedy": {
        "temperature": 0.0, **PENALTIES, "stop": ("bbcab", " cb"), "bad_word_ids": ((33,), (25, 30)),
        "logit_bias": ((44, 1.5), (9, -2.0)),
    },
    "words": {
        "ignore_eos": True, "stop": ("ccc",), "top_k": 30, "frequency_penalty": 0.5,
        "bad_word_ids": ((12,), (33,), *((i, j) for i in range(4, 20) for j in range(21, 60))),
    },
}


@pytest.fixture(scope="module")
def versions(tmp_path_factory):
    """Models of versions 0 to 7, and the pattern of their directories."""
    return write_versions(tmp_path_factory.mktemp("versions"), 8)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"), "bytes")


def _batches():
    """Return prompts that arrive in two rounds, of up to three blocks, some of them several times."""
    a, b, c, d = prompts_of(5, [3, 60, 1, 125])
    return [[a, a, a, b, b, c, d], [d, d, c, a]]


LIMITS = {0: 1, 1: 1000, 2: 7, 4: 12, 6: 5, 8: 3, 10: 9}


def _case(versions, tokenizer, name, *budgets, limits=None, **options):
    sampling = OPTIONS.get(name, {})
    options = {"tokenizer": tokenizer, **options}
    return Case(_batches(), list(budgets) or [MAX_NEW], MAX_NEW, options, versions[1],
                sampling=sampling, limits=limits or {})


_MADE = {}
"""Expected rows by case, whatever its layout is."""


def _expected(case, versions, *, keep=False):
    """Return the rows that transformers' processors give, and the reference that made them."""
    reference = Reference(versions[0][0], EOS, case.sampling, case.options["tokenizer"], case.limits)
    key = repr((case.sampling, case.limits, case.budgets, case.max_new, case.changes, keep))
    if key not in _MADE:
        _MADE[key] = expected_rows(case, versions[0], keep=keep, reference=reference)
    return _MADE[key], reference


def _check(pool, layout, case, versions, *, keep=False):
    expected, reference = _expected(case, versions, keep=keep)
    rows = {}
    if layout in ("d1@0", "pages"):
        case = replace(case, paged=layout == "pages")
        rows = _generate(World(), "d1@0", case) if keep else alone(case)[0]
    else:
        for part in pool.run(_generate if keep else generate_in_rounds, layout, case):
            rows |= part if keep else part[0]
    check_rows(rows, expected, case, reference=reference)
    return expected, reference


@pytest.mark.parametrize(("layout", "name"), pairs(["d1@0", "pages", "t2@0-1", "p2@0-1", "d2@0-1"], OPTIONS))
def test_tokens_are_those_of_transformers_in_every_layout(pool, versions, tokenizer, layout, name):
    """With few slots, replicas of d2 take prompts from each other."""
    case = _case(versions, tokenizer, name, max_rows=2)
    expected, reference = _check(pool, layout, case, versions)
    plain, _ = _expected(replace(case, sampling={}), versions)
    assert sum(row[0] != plain[i][0] for i, row in expected.items()) > 3
    if "stop" in case.sampling and layout == "d1@0":
        _check_that_strings_stop(expected, reference, case)


def _check_that_strings_stop(expected, reference, case):
    """Some responses end at a string that more than one token has, and some elsewhere."""
    prompts = [prompt for batch in case.batches for prompt in batch]
    responses = [row[0][len(prompt) :] for row, prompt in zip(expected.values(), prompts, strict=True)]
    at_strings = [r for r in responses if reference.has_finished(r) and r[-1] not in reference.ends]
    texts = load_tokenizer(case.options["tokenizer"])
    stops = case.call.work.sampling.stop
    assert any(not any(stop in texts.decode(r[-1:]) for stop in stops) for r in at_strings)
    assert len(at_strings) < len(responses)


@pytest.mark.parametrize(
    "layout", marked(["d1@0", "pages", "t2@0-1", "p2@0-1", "d2@0-1"], quick=(1, 4)))
def test_every_prompt_may_have_its_own_limit(pool, versions, tokenizer, layout):
    """In one round, and in rounds of four tokens."""
    for budget, settings in ((MAX_NEW, {}), (4, {"changes": True})):
        case = _case(versions, tokenizer, "", budget, limits=LIMITS, max_rows=2)
        expected, _ = _check(pool, layout, replace(case, **settings), versions)
        lengths = [len(logprobs) for _, logprobs, _ in expected.values()]
        assert all(length <= LIMITS.get(i, MAX_NEW) for i, length in enumerate(lengths))
        assert sum(length == LIMITS.get(i) for i, length in enumerate(lengths)) >= 4
        assert MAX_NEW in lengths


@pytest.mark.parametrize(
    ("layout", "name"), marked(
        product(["d1@0", "pages", "d2p2@0-3", "t2@0-1"], ["stops", "greedy"]), quick=[3]))
def test_rounds_change_nothing(pool, versions, tokenizer, layout, name):
    """What earlier rounds have drawn counts: for penalties, words and strings that began there."""
    for budget in (1, 3):
        case = _case(versions, tokenizer, name, budget, limits=LIMITS, max_rows=2)
        one_round, _ = _expected(replace(case, budgets=[MAX_NEW]), versions)
        expected, _ = _check(pool, layout, case, versions)
        assert {i: row[:2] for i, row in expected.items()} == {i: row[:2] for i, row in one_round.items()}


@pytest.mark.parametrize(
    ("layout", "name"), pairs(["pages", "d2@0-1", "p2@0-1"], ["stops", "min_p and penalties"]))
def test_kept_caches_change_nothing(pool, versions, tokenizer, layout, name):
    case = _case(versions, tokenizer, name, 3, limits=LIMITS, **KEEP)
    _check(pool, layout, replace(case, changes=True), versions, keep=True)


@pytest.mark.slow
def test_rows_that_give_up_their_memory_lose_no_history(pool, versions, tokenizer, monkeypatch):
    restarted = count_restarts(monkeypatch)
    for name in ("stops", "min_p and penalties"):
        case = _case(versions, tokenizer, name, kv_cache_gib=7 * BLOCK_GIB)
        case = replace(case, max_new=70, budgets=[70], sampling=case.sampling | {"ignore_eos": True})
        for layout in ("d1@0", "pages"):
            _check(pool, layout, case, versions)
            assert restarted
            restarted.clear()


def test_recorded_steps_sample_alike(versions, tokenizer):
    case = _case(versions, tokenizer, "min_p and penalties")
    expected, reference = _expected(case, versions)
    engine = make_engine(case, World(), Layout.parse("d1@0"))
    tapes = recorded(engine, PagedReference())
    check_rows(alone(case, engine=engine)[0], expected, case, reference=reference)
    assert sum(tape.num_replays for tape in tapes) > len(tapes) > 1


def test_greedy_answers_are_those_of_generate(versions, tokenizer):
    """(It reads the prompts as well, so they end in a token that begins no stop string.)"""
    sampling = {**OPTIONS["greedy"], "presence_penalty": 0.0, "frequency_penalty": 0.0,
                "stop": ("bbbb", "cabc", "ababb")}
    prompts = [[*prompt, 66] for prompt in prompts_of(9, [3, 8, 1, 20, 5, 6, 7, 11])]
    case = Case([prompts], [MAX_NEW], MAX_NEW, {"tokenizer": tokenizer}, versions[1], sampling=sampling)
    model = versions[0][0]
    found, _ = alone(case)
    responses = []
    for i, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=MAX_NEW,
            eos_token_id=EOS, pad_token_id=0, repetition_penalty=1.3,
            bad_words_ids=[[33], [25, 30]], sequence_bias=[[[44], 1.5], [[9], -2.0]],
            stop_strings=list(sampling["stop"]), tokenizer=load_tokenizer(tokenizer))
        responses.append(out[0, len(prompt) :].tolist())
        assert found[i][0][len(prompt) :].tolist() == responses[-1]
    ended = [r for r in responses if len(r) < MAX_NEW and r[-1] not in EOS]
    assert ended and any(r[-1] in EOS for r in responses)


@pytest.mark.parametrize("budget", [MAX_NEW, 6])
def test_the_transformers_engine_has_them_too(versions, tokenizer, budget):
    """Its rotary angles are rounded to float32, so log-probs are compared less exactly."""
    case = _case(versions, tokenizer, "stops", budget, limits=LIMITS, max_rows=4)
    case = replace(case, sampling=case.sampling | PENALTIES | {"min_p": 0.02})
    spec = spec_of(TransformersConfig.load(case.model.format(0)))
    engine = TransformersEngine(spec, Layout.parse("d1@0"), World(), dtype="float64")
    engine.load(case.model.format(0), seed=0)
    found, _ = generate_in_rounds(World(), "d1@0", case, engine=engine)
    models = [transformers.AutoModelForCausalLM.from_pretrained(case.model.format(0), dtype=torch.float64)]
    reference = Reference(models[0], EOS, case.sampling, tokenizer, case.limits)
    expected = expected_rows(case, models, keep=False, reference=reference)
    check_rows(found, expected, case, reference=reference, rtol=1e-4)


def test_limits_below_one_are_refused(versions, tokenizer):
    case = _case(versions, tokenizer, "", limits={2: 0})
    with pytest.raises(UserError, match="limits of sample 2 is 0: it must be at least 1"):
        alone(case)


def test_the_settings_are_those_of_the_reference():
    """Every field of SamplingConfig is in one of the cases, or has tests of its own."""
    tested = {name for sampling in OPTIONS.values() for name in sampling}
    others = {"max_new_tokens", "top_p", "bad_words"}
    assert tested | others == set(SamplingConfig.__dataclass_fields__)


@pytest.mark.slow
@pytest.mark.parametrize("layout", marked(["e2@0-1", "d4e2@0-3"], quick=[1]))
def test_experts_on_several_ranks_sample_alike(pool, tokenizer, layout):
    """In rounds that are shorter than a window, and with prompts that move between ranks."""
    for name, budget in (("stops", 3), ("min_p and penalties", None)):
        case = _case((None, None), tokenizer, name, budget, limits=LIMITS, max_rows=4)
        expected, _ = alone(replace(case, options={"tokenizer": tokenizer}))
        found = {}
        for rows, _ in pool.run(generate_in_rounds, layout, replace(case, paged=True)):
            found |= rows
        assert_same(found, expected)
