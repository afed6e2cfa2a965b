"""Penalties, biases, bad words and filters on given logits, against transformers' processors."""

from itertools import pairwise

import pytest
import torch

from realhf.calls import Generate, SamplingConfig
from realhf.distributed.world import World
from realhf.inference.response_buffer import PromptGroup, ResponseBuffer
from realhf.inference.sampling import sample, stream_seed, uniform
from tests.engine.reference import plain_model
from tests.inference.sampling_reference import Reference

NUM_VOCAB = 29
EOS = [4, 17]
SEED = stream_seed(5, "gen")
NUM_STEPS = 14
A, B, C, D = [5, 6, 5, 9], [7], [5, 6, 5, 9, 11, 11], list(range(20))
PROMPTS = [(A, [0, 1, 2], 0), (B, [3], 0), (C, [4], 2), (D, [5], 9)]
"""Tokens, samples, and how many of the tokens are drawn."""
SETTINGS = [
    {"min_p": 0.1},
    {"min_p": 0.3, "top_k": 9, "top_p": 0.9, "temperature": 1.5},
    {"repetition_penalty": 1.7},
    {"presence_penalty": 1.1, "frequency_penalty": 0.6, "temperature": 0.8},
    {"frequency_penalty": -0.7},
    {"logit_bias": ((3, 2.5), (28, 4.0), (11, -3.0))},
    {"bad_word_ids": ((5,), (4,), (6, 9), (11, 11), (1, 2, 3), (0, 1))},
    {"min_new_tokens": 8, "stop_token_ids": (9,)},
    {"temperature": 0.0, "repetition_penalty": 1.4, "frequency_penalty": 0.5, "min_new_tokens": 12},
    {"repetition_penalty": 0.6, "presence_penalty": 0.9, "logit_bias": ((5, 1.5), (6, 1.5)), "top_p": 0.8,
     "bad_word_ids": ((9, 5), (6,)), "min_p": 0.02, "temperature": 0.7},
]


def _logits(number, step):
    generator = torch.Generator().manual_seed(1000 * step + number)
    logits = 2 * torch.randn(NUM_VOCAB, generator=generator).double()
    logits[:3] += 1.5  # Tokens of a bad word, and those of the smallest shard.
    logits[EOS] += 1.0
    return logits


def _running(step):
    """Return the samples that get a token: some rest in some steps, as rows do that wait for a slot."""
    return [i for i in range(6) if (i + step) % 4 or i == 0]


def _draw(world, cuts, settings):
    """Draw tokens from shards of the vocabulary; return the samples' tokens and log-probs."""
    group = world.group(tuple(range(len(cuts) - 1)))
    shard = (cuts[group.index], cuts[group.index + 1])
    work = Generate(SamplingConfig(max_new_tokens=40, **settings))
    samples = ResponseBuffer(
        0, work=work, eos_ids=EOS, seed=SEED, device=torch.device("cpu"), vocab_range=shard)
    for prompt in PROMPTS:
        samples.add(PromptGroup(*prompt))
    done = set()
    for step in range(NUM_STEPS):
        if not (numbers := [i for i in _running(step) if i not in done]):
            continue
        logits_BV = torch.stack([_logits(i, step) for i in numbers])[:, slice(*shard)]
        tokens_B, logprobs_B = sample(
            logits_BV, samples.draws(numbers), config=work.sampling, vocab_start=shard[0], group=group,
            processing=samples.processing(numbers), widest_shard=NUM_VOCAB)
        tokens_B = samples.record(samples.at(numbers), tokens_B, logprobs_B, None)
        ended = samples.append(numbers, tokens_B)
        done |= {i for i, end in zip(numbers, ended, strict=True) if end}
    lengths = samples.lengths.tolist()
    logprobs = [row[1 : 1 + n].tolist() for row, n in zip(samples.logprobs, lengths, strict=True)]
    return [samples.history(i) for i in range(6)], logprobs, samples.finished.tolist()


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Tokens, log-probs and ends of each settings by transformers' processors, one row at a time."""
    model = plain_model(tmp_path_factory.mktemp("model"))
    return [_by_transformers(Reference(model, EOS, settings)) for settings in SETTINGS]


def _by_transformers(reference):
    rows = [(list(tokens), len(tokens) - drawn) for tokens, ids, drawn in PROMPTS for _ in ids]
    tokens, logprobs, finished = [row for row, _ in rows], [[] for _ in rows], [False] * len(rows)
    for step in range(NUM_STEPS):
        for i in (i for i in _running(step) if not finished[i]):
            size = rows[i][1]
            position = torch.tensor([len(tokens[i]) - size]).numpy()
            draw = uniform(SEED, sample_ids=torch.tensor([i]).numpy(), positions=position)[0]
            logits = _logits(i, step)
            tokens[i].append(reference.token(tokens[i], size, logits, draw))
            own = (logits / (reference.temperature or 1.0)).log_softmax(-1)
            logprobs[i].append(float(own[tokens[i][-1]]))
            finished[i] = reference.has_finished(tokens[i][size:])
    return tokens, logprobs, finished


def _draw_all(world, cuts):
    return [_draw(world, cuts, settings) for settings in SETTINGS]


@pytest.mark.parametrize("cuts", [(0, 29), (0, 15, 29), (0, 3, 16, 29)])
def test_tokens_are_those_of_transformers_processors(pool, expected, cuts):
    """The log-probs are the model's own, whatever the options are."""
    num_ranks = len(cuts) - 1
    parts = [_draw_all(World(), cuts)] if num_ranks == 1 else pool.run(_draw_all, cuts, num_ranks=num_ranks)
    for found in parts:
        for (tokens, logprobs, finished), theirs, settings in zip(found, expected, SETTINGS, strict=True):
            assert tokens == theirs[0], settings
            assert finished == theirs[2], settings
            flat = [torch.tensor([x for row in rows for x in row]) for rows in (logprobs, theirs[1])]
            torch.testing.assert_close(*flat, rtol=1e-5, atol=1e-6)


def test_every_option_changes_tokens(expected):
    """Otherwise the test above would not see whether it has an effect."""
    plain = _draw(World(), (0, NUM_VOCAB), {})
    for settings, (tokens, *_) in zip(SETTINGS, expected, strict=True):
        assert tokens != plain[0], settings
    bad = SETTINGS[6]["bad_word_ids"]
    assert all(pair not in bad for row in expected[6][0][:4] for pair in pairwise(row[4:]))
    assert 5 not in expected[6][0][3] and any(set(row) & {4} for row in expected[6][0])  # Eos is no bad word.
    for tokens, finished in zip(expected[7][0], expected[7][2], strict=True):
        assert not finished or tokens[-1] in (4, 9, 17)


def test_a_shard_without_a_legal_token_gives_none(pool):
    """All tokens of the first shard are forbidden."""
    settings = {"bad_word_ids": ((0,), (1,), (2,))}
    for found in pool.run(_draw, (0, 3, 29), settings, num_ranks=2):
        tokens, logprobs, _ = found
        whole = _draw(World(), (0, 29), settings)
        assert tokens == whole[0] and not any(set(row[4:]) & {0, 1, 2} for row in tokens[:3])
        assert all(x > -torch.inf for row in logprobs for x in row)


def test_without_options_nothing_is_processed():
    work = Generate(SamplingConfig(top_k=5, top_p=0.9, min_p=0.1, stop_token_ids=(3,)))
    samples = ResponseBuffer(
        1, work=work, eos_ids=EOS, seed=SEED, device=torch.device("cpu"), vocab_range=(0, 29))
    samples.add(PromptGroup([1], [0]))
    assert samples.processing([0]) is None


def test_rows_of_ended_samples_are_used_again():
    work = Generate(SamplingConfig(max_new_tokens=2, frequency_penalty=1.0))
    samples = ResponseBuffer(
        0, work=work, eos_ids=[], seed=SEED, device=torch.device("cpu"), vocab_range=(0, 29))
    for i in range(20):
        samples.add(PromptGroup([i], [i]))
        for _ in range(2):
            processing = samples.processing([i])
            changed = processing(torch.zeros(1, 29))
            assert changed.sum() == -samples.lengths[i]  # Nothing is left of the sample before.
            samples.append([i], torch.tensor([i % 3]))
    assert len(samples._processors._history.counts_RV) == 1


@pytest.mark.parametrize(("settings", "fault"), [
    ({"min_p": 1.5}, "sampling.min_p is 1.5: it must be from 0 to 1"),
    ({"stop": ("a", "")}, r"sampling.stop is \('a', ''\): it must have no empty part"),
    ({"stop": (1,)}, r"sampling.stop is \(1,\): it must be a tuple, each part text"),
    ({"stop_token_ids": (-1,)}, "sampling.stop_token_ids is .*: it must have no negative token id"),
    ({"stop_token_ids": 5}, "sampling.stop_token_ids is 5: it must be a tuple, each part a whole number"),
    ({"repetition_penalty": 0.0}, "sampling.repetition_penalty is 0.0: it must be a number above 0"),
    ({"presence_penalty": 2.5}, "sampling.presence_penalty is 2.5: it must be from -2 to 2"),
    ({"frequency_penalty": -3}, "sampling.frequency_penalty is -3: it must be from -2 to 2"),
    ({"logit_bias": {3: float("inf")}}, "sampling.logit_bias is .*: it must have finite numbers"),
    ({"logit_bias": ((3, 1.0), (3, 2.0))}, "sampling.logit_bias is .*: it must have each token id once"),
    ({"bad_word_ids": ((),)}, "sampling.bad_word_ids is .*: it must have no empty part"),
    ({"min_new_tokens": 300}, "sampling.min_new_tokens is 300: it must be from 0 to sampling.max_new_tokens"),
])
def test_illegal_options_are_refused(settings, fault):
    with pytest.raises(ValueError, match=fault):
        SamplingConfig(**settings)


def test_forms_of_options_that_are_understood():
    config = SamplingConfig(stop="ab", logit_bias={3: 1.5}, bad_word_ids=[[1, 2]], bad_words=["x"])
    assert (config.stop, config.logit_bias, config.bad_word_ids, config.bad_words) == (
        ("ab",), ((3, 1.5),), ((1, 2),), ("x",))
    assert hash(config) is not None
    greedy = SamplingConfig(top_k=3, top_p=0.5, min_p=0.2, stop="a", presence_penalty=1.0).greedy()
    assert greedy == SamplingConfig(temperature=0.0, stop="a", presence_penalty=1.0)


def test_texts_need_a_tokenizer():
    for settings in ({"stop": "a"}, {"bad_words": "a"}):
        with pytest.raises(ValueError, match="tokenizer is None: it must be a directory for sampling.stop"):
            Generate(SamplingConfig(**settings))
