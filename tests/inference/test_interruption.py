"""A phrase that is inserted into responses, against decoding one row at a time with transformers."""

from dataclasses import replace

import pytest
import torch

from realhf.calls import Generate, InsertedPhrase, SamplingConfig
from realhf.data.batch import Packed
from realhf.distributed.world import World
from realhf.engine.transformers import TransformersEngine
from realhf.layout import Layout
from realhf.models.model_config import TransformersConfig
from realhf.runtime.compile.actions import spec_of
from tests.inference.paged import PagedReference, recorded
from tests.inference.rounds import (
    BLOCK_GIB,
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
from tests.inference.test_kept_cache import KEEP, _generate
from tests.samples import marked

MAX_NEW = 24
PHRASE = InsertedPhrase(6, (40, 41, 42, 43, 44), (9,))


@pytest.fixture(scope="module")
def versions(tmp_path_factory):
    """Models of versions 0 to 7, and the pattern of their directories."""
    return write_versions(tmp_path_factory.mktemp("versions"), 8)


def _batches():
    """Return prompts that arrive in two rounds, of up to three blocks, some of them several times."""
    a, b, c, d, e = prompts_of(5, [3, 60, 1, 64, 125])
    return [[a, a, a, b, b, c, d, d], [e, e, c, a]]


def _case(versions, *budgets, phrase=PHRASE, max_new=MAX_NEW, **options):
    options = {"interruption": phrase, **options}
    return Case(_batches(), list(budgets) or [max_new], max_new, options, versions[1])


def _end_of_some(versions, count, after):
    """Return `count` tokens in a row that some responses have among their first `after`, and others not."""
    case = Case(_batches(), [MAX_NEW], MAX_NEW, model=versions[1])
    prompts = [prompt for batch in _batches() for prompt in batch]
    found = expected_rows(case, versions[0], keep=False)
    starts = [row[0][len(prompt) :][:after] for row, prompt in zip(found.values(), prompts, strict=True)]
    long = [tokens for tokens in starts if len(tokens) == after and not {3, 20} & set(tokens)]
    return tuple(long[0][after - count :])


@pytest.fixture(scope="module")
def phrases(versions):
    """Phrases of which some responses get the tokens: ends of one token and of two."""
    return [
        InsertedPhrase(6, (40, 41, 42, 43, 44), _end_of_some(versions, 1, 6)),
        InsertedPhrase(7, (50, 51, 52), _end_of_some(versions, 2, 7)),
    ]


def _interrupted(expected):
    return [i for i, (_, logprobs, _) in expected.items() if 0.0 in logprobs]


@pytest.mark.parametrize("number", marked([0, 1], quick=[1]))
def test_the_phrase_follows_long_thinking_only(versions, phrases, number):
    case = _case(versions, phrase=phrases[number])
    expected = expected_rows(case, versions[0], keep=False)
    num_long = sum(len(logprobs) > phrases[number].after_tokens for _, logprobs, _ in expected.values())
    assert 0 < len(_interrupted(expected)) < num_long
    found, _ = alone(case)
    check_rows(found, expected, case)
    for _, mask, *_ in found.values():
        packed = Packed(mask, [len(mask)])
        first = mask.tolist().index(1)
        assert packed.in_response().tolist() == [False] * first + [True] * (len(mask) - first)
        assert packed.response_lengths().tolist() == [len(mask) - first]


@pytest.mark.parametrize("budget", marked([1, 4, 9], quick=[1]))
def test_rounds_change_nothing(versions, phrases, budget):
    for phrase in phrases:
        case = replace(_case(versions, budget, phrase=phrase), changes=budget > 3)
        check_rows(alone(case)[0], expected_rows(case, versions[0], keep=False), case)


@pytest.mark.parametrize(
    "options", marked([{"max_rows": 2}, {"prefill_tokens": 7}, {"kv_cache_gib": 5 * BLOCK_GIB}], quick=[2]))
@pytest.mark.slow
def test_slots_memory_and_chunks_change_nothing(versions, phrases, options, monkeypatch):
    restarted = count_restarts(monkeypatch)
    phrase = replace(phrases[0], after_tokens=30)
    case = _case(versions, 16, phrase=phrase, max_new=70, **options)
    expected = expected_rows(case, versions[0], keep=False)
    assert _interrupted(expected)
    for paged in (False, True):
        check_rows(alone(replace(case, paged=paged))[0], expected, case)
        assert bool(restarted) == ("kv_cache_gib" in options)
        restarted.clear()


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["d2p2@0-3", "t2@0-1"])
def test_layouts_change_nothing(pool, versions, phrases, layout):
    """With few slots, replicas take unfinished samples from each other."""
    for budget, options in ((MAX_NEW, {"max_rows": 2}), (4, {"max_rows": 2})):
        case = replace(_case(versions, budget, phrase=phrases[1], **options), changes=True)
        rows = {}
        for part, _ in pool.run(generate_in_rounds, layout, case):
            rows |= part
        check_rows(rows, expected_rows(case, versions[0], keep=False), case)


@pytest.mark.parametrize("layout", marked(["t2@0-1", "p2@0-1"], quick=[1]))
def test_kept_caches_change_nothing(pool, versions, phrases, layout):
    case = replace(_case(versions, 4, phrase=phrases[1], **KEEP), changes=True)
    rows = {}
    for part in pool.run(_generate, layout, case):
        rows |= part
    check_rows(rows, expected_rows(case, versions[0], keep=True), case)


def test_recorded_steps_get_the_phrase(versions, phrases):
    case = _case(versions, phrase=phrases[0])
    engine = make_engine(case, World(), Layout.parse("d1@0"))
    tapes = recorded(engine, PagedReference())
    check_rows(alone(case, engine=engine)[0], expected_rows(case, versions[0], keep=False), case)
    assert sum(tape.num_replays for tape in tapes) > len(tapes) > 1


@pytest.mark.parametrize("budget", [None, 4])
def test_the_transformers_engine_inserts_it_too(versions, phrases, budget):
    """Its rotary angles are rounded to float32, so only what is masked and inserted is compared."""
    case = _case(versions, budget, phrase=replace(phrases[1], end=(66, 66, 66)))
    spec = spec_of(TransformersConfig.load(case.model.format(0)))
    engine = TransformersEngine(spec, Layout.parse("d1@0"), World(), dtype="float64")
    engine.load(case.model.format(0), seed=0)
    found, _ = generate_in_rounds(World(), "d1@0", case, engine=engine)
    prompts = [prompt for batch in case.batches for prompt in batch]
    interrupted = 0
    for i, (tokens, mask, logprobs, *_) in found.items():
        response, mask, logprobs = (x[len(prompts[i]) :].tolist() for x in (tokens, mask, logprobs))
        if len(response) > 7:
            interrupted += 1
            assert response[7:10] == [50, 51, 52][: len(response) - 7]
            assert mask == [0.0 if 7 <= at < 10 else 1.0 for at in range(len(response))]
            assert [x == 0 for x in logprobs] == [x == 0 for x in mask]
    assert interrupted > 3


def test_a_phrase_that_leaves_no_answer_is_refused():
    with pytest.raises(ValueError, match="after_tokens is 6: it must be at most 2, as the phrase"):
        Generate(SamplingConfig(max_new_tokens=8), interruption=PHRASE)


def test_responses_of_rows_with_and_without_samples():
    mask = Packed(torch.tensor([0.0, 1, 0, 1, 0, 0, 1, 1, 0, 0]), [5, 0, 1, 2, 2])
    assert mask.in_response().tolist() == [False, True, True, True, True, False, True, True, False, False]
    assert mask.response_lengths().tolist() == [4, 0, 0, 2, 0]
