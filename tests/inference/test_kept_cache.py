"""Caches that are kept when weights change, against plain decoding of one row at a time with such a cache."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from realhf.data.batch import Batch
from realhf.distributed.world import World
from realhf.engine.native import NativeEngine
from realhf.errors import UserError
from realhf.inference.scheduler import Scheduler
from realhf.layout import Layout
from realhf.models.lora import LoraConfig
from realhf.models.model_config import ModelConfig
from realhf.models.param_spec import model_spec
from tests.families import CASES
from tests.inference.paged import PagedReference, recorded
from tests.inference.rounds import (
    BLOCK_GIB,
    Case,
    alone,
    check_rows,
    expected_rows,
    make_engine,
    prompts_of,
    rows_of,
    write_versions,
)
from tests.samples import marked

MAX_NEW = 24
KEEP = {"cache_on_update": "keep"}


@pytest.fixture(scope="module")
def versions(tmp_path_factory):
    """Models of versions 0 to 25, and the pattern of their directories."""
    return write_versions(tmp_path_factory.mktemp("versions"), 26)


def _batches():
    """Return prompts that arrive in three rounds, of up to three blocks, some of them several times."""
    a, b, c, d, e = prompts_of(5, [3, 60, 1, 64, 125])
    return [[a, a, a, b, b, c, d, d], [e, e, e, c, a], [d, c, b]]


def _case(versions, budget=5, **options):
    return Case(_batches(), [budget], MAX_NEW, KEEP | options, versions[1], changes=True)


def _kept(engine, case, world, *, flushed=(), disturb=None):
    """Generate in rounds with an engine that holds the unfinished samples; return rows by id.

    The cache is flushed at the beginning of the rounds in `flushed`; `disturb` is called between rounds.
    """
    layout = engine.groups.layout
    dp = engine.groups.at.dp
    control = world.group(layout.ranks, purpose="control")
    rows, number, left, held = {}, 0, None, Batch([])
    while number < len(case.batches) or any(left):
        if case.changes:
            engine.load(case.model.format(number), seed=0)
        unfinished = None
        if number in flushed:
            engine.flush_cache("gen")
            rows_of_ranks = control.all_gather_bytes(held.pack())
            unfinished = Batch.unpack(rows_of_ranks[layout.ranks.index(layout.result_ranks[dp])])
        ids = case.ids(number)
        batch = case.batch(number, ids[dp :: layout.dp])
        result = engine.generate(
            case.call, batch, budget=case.budget(number), version=number, unfinished=unfinished)
        rows |= rows_of(result.batch)
        held = result.unfinished
        left = control.all_gather_json(len(result.unfinished))
        if disturb is not None:
            disturb(engine)
        number += 1
    return rows


def _generate(world, text, case, flushed=()):
    layout = Layout.parse(text)
    if world.rank not in layout:
        return {}
    return _kept(make_engine(case, world, layout), case, world, flushed=flushed)


@pytest.mark.parametrize("budget", marked([1, 5, 16], quick=[1]))
def test_tokens_are_those_of_a_cache_that_outlives_its_weights(versions, budget, monkeypatch):
    monkeypatch.setattr(Scheduler, "_restart", None)  # Nothing is computed twice.
    case = _case(versions, budget)
    expected = expected_rows(case, versions[0], keep=True)
    lengths = {len(logprobs) for _, logprobs, _ in expected.values()}
    assert MAX_NEW in lengths and len(lengths) > 3
    again = expected_rows(case, versions[0], keep=False)
    assert any(again[i][0] != expected[i][0] for i in expected)
    for options in ({}, {"max_rows": 2}, {"max_rows": 1, "prefill_tokens": 9}, {"kv_cache_gib": 1.0}):
        found = _generate(World(), "d1@0", replace(case, options=KEEP | options))
        check_rows(found, expected, case)


def _kept_on_pages(case, options=None):
    """Generate by the paged path with recorded passes; return rows by id, and the tapes."""
    case = replace(case, options=case.options | (options or {}))
    engine = make_engine(case, World(), Layout.parse("d1@0"))
    tapes = recorded(engine, PagedReference())
    return _kept(engine, case, World()), tapes


@pytest.mark.parametrize(
    ("options", "budget"),
    marked(product([{"max_rows": 2}, {}, {"max_rows": 3, "prefill_tokens": 9}], [10, 1]), quick=[0]))
def test_recorded_steps_use_the_cache_of_their_round(versions, budget, options, monkeypatch):
    """The pool grows under what is recorded: a pass for each number of rows, and none again."""
    monkeypatch.setattr(Scheduler, "_restart", None)  # Nothing is computed twice.
    case = _case(versions, budget)
    found, tapes = _kept_on_pages(case, options)
    check_rows(found, expected_rows(case, versions[0], keep=True), case)
    if budget == 10:
        assert 2 <= len(tapes) <= 5 and sum(tape.num_replays for tape in tapes) > len(tapes)


def test_constant_weights_give_the_tokens_of_one_call(versions):
    case = replace(_case(versions), changes=False)
    expected, _ = alone(replace(case, budgets=[None]))
    found = _generate(World(), "d1@0", case)
    assert found.keys() == expected.keys()
    for i, row in expected.items():
        assert torch.equal(found[i][0], row[0])
        torch.testing.assert_close(found[i][2], row[2], rtol=1e-9, atol=1e-10)


SLOW_LAYOUTS = [
    pytest.param(layout, marks=pytest.mark.slow)
    for layout in ("d2@0-1", "t2@0-1", "p2@0-1", "c2@0-1", "d2p2@0-3")
]


@pytest.mark.parametrize("options", marked([{"max_rows": 3}, {}], quick=[0]))
@pytest.mark.parametrize("layout", ["c2t2@0-3", *SLOW_LAYOUTS])
def test_layouts_change_nothing(pool, versions, layout, options):
    case = _case(versions, **options)
    expected = expected_rows(case, versions[0], keep=True)
    found = {}
    for rows in pool.run(_generate, layout, case):
        found |= rows
    check_rows(found, expected, case)


def _experts(world, text, case):
    """Generate with experts whose weights change; return rows by id."""
    layout = Layout.parse(text)
    if world.rank not in layout:
        return {}
    engine = make_engine(case, world, layout)
    load = NativeEngine.load
    engine.load = lambda directory, seed: load(engine, None, seed=int(directory) % 3)
    return _kept(engine, replace(case, model="{}", changes=True), world)


@pytest.mark.parametrize("layout", marked(["e2@0-1", "e2p2@0-3"], quick=[1]))
def test_experts_keep_company(pool, layout):
    case = Case(_batches(), [5], 12, KEEP)
    expected = _experts(World(), "d1@0", case)
    constant = _generate(World(), "d1@0", case)
    assert any(not torch.equal(constant[i][0], expected[i][0]) for i in expected)
    found = {}
    for rows in pool.run(_experts, layout, case):
        found |= rows
    assert found.keys() == expected.keys()
    for i, row in expected.items():
        assert torch.equal(found[i][0], row[0]) and torch.equal(found[i][4], row[4])
        torch.testing.assert_close(found[i][2], row[2], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("layout", marked(["d1@0", "d2p2@0-3"], quick=[1]))
@pytest.mark.slow
def test_a_flushed_cache_is_computed_again(pool, versions, layout):
    case = _case(versions)
    expected = expected_rows(case, versions[0], keep=True, flushed=[2, 4])
    kept = expected_rows(case, versions[0], keep=True)
    assert any(kept[i][0] != expected[i][0] for i in expected)
    found = {}
    for rows in pool.run(_generate, layout, case, [2, 4]):
        found |= rows
    check_rows(found, expected, case)


def test_evaluations_and_a_new_engine_do_not_disturb_the_rows(versions):
    """An evaluation uses the same call without a budget. A new engine gets the unfinished samples back."""
    case = _case(versions)
    expected = expected_rows(case, versions[0], keep=True)
    evaluated = []

    def evaluate(engine):
        result = engine.generate(case.call, case.batch(0, range(4)))
        evaluated.append(result)

    engine = make_engine(case, World(), Layout.parse("d1@0"))
    check_rows(_kept(engine, case, World(), disturb=evaluate), expected, case)
    assert all(result.batch.ids == [0, 1, 2, 3] and not result.unfinished.ids for result in evaluated)
    engine = make_engine(case, World(), Layout.parse("d1@0"))
    first = engine.generate(case.call, case.batch(0, case.ids(0)), budget=5, version=0)
    engine = make_engine(case, World(), Layout.parse("d1@0"))
    engine.load(case.model.format(1), seed=0)
    second = engine.generate(
        case.call, case.batch(1, case.ids(1)), budget=5, version=1,
        unfinished=Batch.unpack(first.unfinished.pack()))
    whole = {**rows_of(first.batch), **rows_of(second.batch), **rows_of(second.unfinished)}
    flushed = expected_rows(case, versions[0], keep=True, flushed=[1])
    for i, row in whole.items():
        assert row[0].tolist() == flushed[i][0][: len(row[0])]
        assert row[4].tolist()[-1] <= 1


@pytest.mark.parametrize("keep", [False, True])
def test_merged_adapters_change_with_the_rounds(versions, keep):
    """Merged or not, adapters give the same tokens; they change before each round."""
    case = replace(_case(versions), options=KEEP if keep else {}, changes=False)
    results = []
    for merge, changes in ((False, True), (True, True), (True, False)):
        engine = NativeEngine(
            model_spec(ModelConfig.load(versions[1].format(0))), Layout.parse("d1@0"), World(),
            dtype="float64", lora=LoraConfig(rank=2, merge=merge))
        engine.load(versions[1].format(0), seed=0)
        rows, unfinished, number = {}, None, 0
        while number < 3 or unfinished.ids:
            generator = torch.Generator().manual_seed(number if changes else 0)
            engine.adapter_flat.normal_(0.0, 0.1, generator=generator)
            made = engine.generate(
                case.call, case.batch(number, case.ids(number)), budget=5,
                unfinished=None if keep else unfinished, version=number)
            rows |= rows_of(made.batch)
            unfinished = made.unfinished
            number += 1
        results.append(rows)
    plain, merged, constant = results
    assert plain.keys() == merged.keys() == set(range(16))
    for i, row in plain.items():
        assert torch.equal(row[0], merged[i][0])
        torch.testing.assert_close(row[2], merged[i][2], rtol=1e-8, atol=1e-9)
    assert sum(not torch.equal(constant[i][0], row[0]) for i, row in plain.items()) > 5


def test_what_cannot_be_kept_is_refused(versions):
    case = _case(versions)
    needed = None
    with pytest.raises(UserError, match="the 8 unfinished samples of a rank need .* GiB for their") as error:
        _generate(World(), "d1@0", _case(versions, kv_cache_gib=10 * BLOCK_GIB))
    needed = float(str(error.value).split(" need ")[1].split()[0])
    # Rows of up to 88 tokens: b and d share no block and one, of 64; two for each of theirs.
    assert needed == pytest.approx(1.01 * (4 * 1 + 2 * 2 + 1 + 2 * 1 + 1) * BLOCK_GIB, rel=0.01)
    with pytest.raises(UserError, match="the 1[0-3] unfinished samples of a rank need"):
        _generate(World(), "d1@0", _case(versions, kv_cache_gib=needed))
    hf = CASES["phi-3"].hf(architectures=["Phi3ForCausalLM"])
    spec = model_spec(ModelConfig.from_hf(hf))
    engine = NativeEngine(spec, Layout.parse("d1@0"), World(), dtype="float64")
    engine.load(None, seed=0)
    with pytest.raises(UserError, match="a longrope model must compute its cache again at .* tokens"):
        engine.generate(case.call, case.batch(0, [0]), budget=5)


def _refusals(world):
    """Return the error of each replica when only the first has too many rows."""
    layout = Layout.parse("d2@0-1")
    case = Case([[[5] * 100] * 20], [5], MAX_NEW, KEEP | {"kv_cache_gib": 8 * BLOCK_GIB}, None)
    engine = make_engine(case, world, layout)
    with pytest.raises(UserError) as error:
        engine.generate(case.call, case.batch(0, [range(19), [19]][world.rank]), budget=5)
    return str(error.value)


def test_all_replicas_refuse_what_one_cannot_keep(pool):
    told = pool.run(_refusals, num_ranks=2)
    assert told[0] == told[1] and "the 19 unfinished samples" in told[0]
