"""Samples that are parked between turns, against plain decoding of one row at a time with a cache."""

from functools import partial
from itertools import product

import pytest
import torch
import transformers

from realhf.calls import Generate, SamplingConfig
from realhf.distributed.world import World
from realhf.engine.native import pass_bytes
from realhf.inference.cache_memory import CacheLimit
from realhf.inference.generation import Generation
from realhf.inference.prompt_queue import PromptQueue
from realhf.inference.response_buffer import PromptGroup
from realhf.inference.sampling import stream_seed, uniform
from realhf.layout import Layout
from tests.inference.rounds import EOS, SEED, Case, make_engine, prompts_of, write_versions
from tests.samples import marked

MAX_NEW = 40
NUM_TURNS = 3
BUDGET = 6


@pytest.fixture(scope="module")
def versions(tmp_path_factory):
    """Models of versions 0 to 29, and the pattern of their directories."""
    return write_versions(tmp_path_factory.mktemp("versions"), 30)


def _prompts():
    a, b, c = prompts_of(8, [3, 64, 90])
    return [a, a, a, b, b, c]


def _observation(sample, turn):
    """Return the environment's answer: it has up to two blocks, and comes some rounds later."""
    length = [1, 7, 70][(sample + turn) % 3]
    return [21 + (sample + i) % 40 for i in range(length)], (sample + turn) % 2


def _expected(models):
    """Decode one row at a time; return all tokens of each sample."""
    rows = []
    for sample, prompt in enumerate(_prompts()):
        tokens, drawn, turn, number, left = list(prompt), 0, 0, 0, BUDGET
        cache = transformers.DynamicCache()
        while True:
            fresh = torch.tensor([tokens[cache.get_seq_length() :]])
            with torch.no_grad():
                logits = models[number](fresh, past_key_values=cache, use_cache=True).logits[0, -1]
            draw = uniform(
                stream_seed(SEED, "gen"), sample_ids=torch.tensor([sample]).numpy(),
                positions=torch.tensor([drawn]).numpy())[0]
            tokens.append(int((logits.softmax(-1).cumsum(0) <= draw).sum()))
            drawn, left = drawn + 1, left - 1
            if drawn == MAX_NEW:
                break
            if tokens[-1] in EOS:
                turn += 1
                if turn == NUM_TURNS:
                    break
                observed, delay = _observation(sample, turn)
                tokens += observed
                number, left = number + 1 + delay, BUDGET
            elif left == 0:
                number, left = number + 1, BUDGET
        rows.append(tokens)
    return rows


def _taken(generation):
    """Return the whole tokens and the number of new ones of each sample, on the rank that has them."""
    ids, columns = generation.take()
    if not columns:
        return {}
    rows = zip(ids, columns[0].split(), columns[1].split(), strict=True)
    return {i: (tokens.tolist(), int(mask.sum())) for i, tokens, mask in rows}


def _in_turns(world, text, pattern, max_rows, paged):
    """Generate in rounds, with an environment that answers at the end of each turn; return the tokens of each
    sample."""
    layout = Layout.parse(text)
    if world.rank not in layout:
        return None
    case = Case([_prompts()], [BUDGET], MAX_NEW, model=pattern, paged=paged)
    engine = make_engine(case, world, layout)
    work = Generate(
        SamplingConfig(max_new_tokens=MAX_NEW), seed=SEED, max_rows=max_rows, cache_on_update="keep")
    generation = Generation(
        engine.model, work, stream="gen", limit=CacheLimit(engine.groups),
        pass_bytes=partial(pass_bytes, engine.model, work), pool=engine.pages, keeps=True, in_turns=True)
    generation.submit([PromptGroup(prompt, [i]) for i, prompt in enumerate(_prompts())])
    tokens, drawn, turns = dict(enumerate(_prompts())), [0] * 6, [0] * 6
    answers, live, number = [], set(range(6)), 0
    control = world.group(layout.ranks, purpose="control")
    while live:
        engine.load(pattern.format(number), seed=0)
        generation.advance(PromptQueue(engine.groups, stealing=False), budget=BUDGET)
        # An environment would send its answers to all ranks of a replica.
        taken = control.all_gather_json(_taken(generation))
        for i, (row, num_new) in ((int(i), row) for part in taken for i, row in part.items()):
            tokens[i] = row
            drawn[i] += num_new
            if drawn[i] == MAX_NEW:
                live.remove(i)
            elif row[-1] in EOS:
                turns[i] += 1
                if turns[i] == NUM_TURNS:
                    generation.drop([i])
                    live.remove(i)
                else:
                    answers.append((number + _observation(i, turns[i])[1], i))
        for due, i in sorted(answers):
            if due == number:
                generation.append(i, _observation(i, turns[i])[0])
        answers = [(due, i) for due, i in answers if due > number]
        number += 1
    return [tokens[i] for i in range(6)]


@pytest.mark.parametrize(
    ("max_rows", "paged"), marked([(512, True), (512, False), (2, True), (2, False)], quick=[0]))
def test_turns_continue_what_is_cached(versions, max_rows, paged):
    models, pattern = versions
    expected = _expected(models)
    assert len({len(tokens) for tokens in expected}) > 3
    ends = [sum(token in EOS for token in tokens[len(prompt) :]) for tokens, prompt in zip(
        expected, _prompts(), strict=True)]
    assert max(ends) == NUM_TURNS and sum(ends) > 8
    assert _in_turns(World(), "d1@0", pattern, max_rows, paged) == expected


@pytest.mark.parametrize(("layout", "max_rows", "paged"), marked(
    product(["p2@0-1", "t2@0-1"], [512, 2], [True, False]), quick=[0]))
@pytest.mark.slow
def test_layouts_change_no_turn(pool, versions, layout, max_rows, paged):
    models, pattern = versions
    expected = _expected(models)
    for result in pool.run(_in_turns, layout, pattern, max_rows, paged):
        assert result is None or result == expected
