"""Random numbers against Random123's known answers; sampling against softmax and transformers' warpers."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
import transformers

from realhf.calls import SamplingConfig
from realhf.distributed.world import World
from realhf.inference.sampling import Draws, nucleus_threshold, philox_4x32, sample, uniform

# Random123, examples/kat_vectors, lines "philox4x32 10": counter, key, result.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def _words(text):
    return [int(word, 16) for word in text.split()]


def test_philox_gives_the_known_answers():
    columns = zip(*(_words(counter) for counter, _, _ in KNOWN_ANSWERS), strict=True)
    counters = [np.array(words, np.uint64) for words in columns]
    for i, (_, key, answer) in enumerate(KNOWN_ANSWERS):
        result = philox_4x32(counters, tuple(_words(key)))
        assert [int(word[i]) for word in result] == _words(answer)


def _uniform(seed, sample_ids, positions):
    return torch.from_numpy(uniform(seed, sample_ids=sample_ids.numpy(), positions=positions.numpy()))


def _chi_square(counts, expected):
    return float(((counts - expected) ** 2 / expected).sum())


def _chi_square_limit(freedom, z=4.75):
    """Exceeded with probability 1e-6 (Wilson & Hilferty's approximation)."""
    return freedom * (1 - 2 / (9 * freedom) + z * math.sqrt(2 / (9 * freedom))) ** 3


def test_uniform_numbers_are_uniform_and_independent():
    ids, positions = torch.arange(400).repeat_interleave(100), torch.arange(100).repeat(400)
    draws = _uniform(7 << 32 | 5, ids, positions)
    assert draws.dtype == torch.float64 and float(draws.min()) >= 0 and float(draws.max()) < 1
    assert len(draws.unique()) == len(draws)
    for values in (draws, draws * 4096 % 1):  # also of the lower bits
        counts = (values * 64).long().bincount(minlength=64).double()
        assert _chi_square(counts, torch.full((64,), len(draws) / 64)) < _chi_square_limit(63)
    grid = draws.view(400, 100)
    for a, b in ((grid[:, 1:], grid[:, :-1]), (grid[1:], grid[:-1])):  # neighbouring positions, samples
        pairs = ((a * 8).long() * 8 + (b * 8).long()).flatten().bincount(minlength=64).double()
        assert _chi_square(pairs, torch.full((64,), a.numel() / 64)) < _chi_square_limit(63)
    for other in (7 << 32 | 6, 8 << 32 | 5):
        assert not torch.isin(_uniform(other, ids, positions), draws).any()
    far = _uniform(5, torch.tensor([3, 3 + (1 << 32)]), torch.tensor([1, 1]))
    assert far[0] != far[1]


@pytest.mark.parametrize("longest_past", [0, 50])
def test_numbers_made_ahead_are_the_same(longest_past):
    """Samples begin at different times and positions and pause, and rows are added."""
    rng, draws = np.random.default_rng(0), Draws(9)
    first = rng.integers(0, longest_past + 1, 40)
    positions, ids = first.copy(), np.arange(40) * 1000 + 7
    for step in range(120):
        rows = np.flatnonzero(rng.random(min(40, 1 + step)) < 0.5)
        there = {"sample_ids": ids[rows], "positions": positions[rows]}
        assert np.array_equal(draws(rows, **there), uniform(9, **there))
        positions[rows] += 1
    assert (positions - first).min() > 16 and len(set(positions.tolist())) > 5
    assert len(set((first % 16).tolist())) > (8 if longest_past else 0)


def _sample(logits, draws, **settings):
    group = World().group((0,))
    return sample(logits, draws, config=SamplingConfig(**settings), vocab_start=0, group=group)


def _warped(logits, temperature, top_k, top_p):
    scores = logits / temperature
    if top_k:
        scores = transformers.TopKLogitsWarper(top_k)(None, scores)
    return transformers.TopPLogitsWarper(top_p)(None, scores) if top_p < 1 else scores


@pytest.mark.parametrize(
    "temperature, top_k, top_p", [(1.0, 0, 1.0), (0.6, 0, 1.0), (1.3, 5, 1.0), (1.0, 0, 0.8), (0.9, 7, 0.9)]
)
def test_tokens_follow_the_distribution_that_transformers_would_sample(temperature, top_k, top_p):
    logits, num = torch.randn(1, 23, generator=torch.Generator().manual_seed(1)).double(), 20_000
    draws = _uniform(11, torch.arange(num), torch.zeros(num, dtype=torch.long))
    tokens, logprobs = _sample(
        logits.expand(num, -1), draws, temperature=temperature, top_k=top_k, top_p=top_p
    )
    probs = _warped(logits, temperature, top_k, top_p)[0].softmax(-1)
    counts = tokens.bincount(minlength=23).double()
    assert set(counts.nonzero()[:, 0].tolist()) <= set(probs.nonzero()[:, 0].tolist())
    inside = probs * num > 5
    assert int(inside.sum()) > 2
    limit = _chi_square_limit(int(inside.sum()) - 1)
    assert _chi_square(counts[inside], (probs * num)[inside]) < limit
    before_filters = (logits / temperature).log_softmax(-1)[0]
    torch.testing.assert_close(logprobs, before_filters[tokens], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "top_k, top_p", [(1, 1.0), (4, 1.0), (50, 1.0), (0, 0.05), (0, 0.5), (0, 0.95), (9, 0.9)]
)
def test_supports_of_the_filters_are_those_of_transformers(top_k, top_p):
    """A sweep of the uniform number meets every token that is not nearly impossible."""
    logits, num = 1.5 * torch.randn(20, 31, generator=torch.Generator().manual_seed(2)).double(), 2000
    sweep = (torch.arange(num) + 0.5).double() / num
    tokens, _ = _sample(logits.repeat_interleave(num, 0), sweep.repeat(20), top_k=top_k, top_p=top_p)
    probs = _warped(logits, 1.0, top_k, top_p).softmax(-1)
    for row, met in enumerate(tokens.view(20, num)):
        assert set(met.tolist()) <= set(probs[row].nonzero()[:, 0].tolist())
        assert set((probs[row] > 1.01 / num).nonzero()[:, 0].tolist()) <= set(met.tolist())


def test_draws_are_the_inverse_cdf_in_vocabulary_order():
    logits = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).double().log().repeat(6, 1)
    draws = torch.tensor([0.0, 0.0999, 0.1001, 0.5999, 0.6001, 1 - 2**-53], dtype=torch.float64)
    assert _sample(logits, draws)[0].tolist() == [0, 0, 1, 2, 3, 3]
    logits[:, [0, 3]] = -torch.inf
    assert _sample(logits, draws)[0].tolist() == [1, 1, 1, 2, 2, 2]


def test_greedy_is_the_argmax():
    logits = torch.randn(50, 31, generator=torch.Generator().manual_seed(3)).double()
    logits[0] = 0.0  # all equal: the first
    tokens, logprobs = _sample(logits, torch.rand(50).double(), temperature=0.0)
    assert torch.equal(tokens, logits.argmax(-1)) and tokens[0] == 0
    torch.testing.assert_close(logprobs, logits.log_softmax(-1).max(-1).values, rtol=1e-12, atol=1e-12)


SETTINGS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 6},
    {"top_p": 0.8},
    {"temperature": 1.4, "top_k": 12, "top_p": 0.9},
    {"top_k": 100},
]


def _split_inputs():
    generator = torch.Generator().manual_seed(4)
    logits = 3 * torch.randn(300, 29, generator=generator).double()
    logits[:40, 5] = -torch.inf
    logits[40] += 500.0
    logits[41, 4:5] += 60.0  # one shard has all the mass
    return logits, torch.rand(300, generator=generator, dtype=torch.float64)


def _sample_split(world, cuts):
    logits, draws = _split_inputs()
    group = world.group(tuple(range(len(cuts) - 1)))
    start, stop = cuts[group.index], cuts[group.index + 1]
    return [
        sample(
            logits[:, start:stop], draws, config=SamplingConfig(**s), vocab_start=start, group=group,
            widest_shard=max(b - a for a, b in pairwise(cuts)))
        for s in SETTINGS
    ]


@pytest.mark.parametrize("cuts", [(0, 15, 29), (0, 4, 5, 29)])
def test_a_split_vocabulary_draws_the_same_tokens(pool, cuts):
    logits, draws = _split_inputs()
    expected = [_sample(logits, draws, **settings) for settings in SETTINGS]
    for result in pool.run(_sample_split, cuts, num_ranks=len(cuts) - 1):
        for (tokens, logprobs), (whole_tokens, whole_logprobs) in zip(result, expected, strict=True):
            assert torch.equal(tokens, whole_tokens)
            torch.testing.assert_close(logprobs, whole_logprobs, rtol=1e-12, atol=1e-12)


def _rows_to_filter(seed, num):
    """Return random rows of logits, many of them with ties, equal masses, infinities or extreme values."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(num, 211, generator=generator) * torch.logspace(-2, 2, num)[:, None]
    kinds = torch.arange(num) % 10
    rows[kinds == 1] = rows[kinds == 1].round()  # Ties.
    rows[kinds == 2] = 0.0  # All are equal,
    rows[kinds == 2, ::2] = -0.0  # and equal zeros have different bits.
    rows[kinds == 3] = rows[kinds == 3].masked_fill(rows[kinds == 3] < 0.5, -torch.inf)
    rows[kinds == 3, 5] = 0.0
    rows[kinds == 4, 1:] = -torch.inf
    powers = -torch.arange(211) * math.log(2)  # Each has as much as all smaller ones.
    rows[kinds == 5] = powers.clamp(min=-30)[torch.randperm(211, generator=generator)]
    rows[kinds == 6] += 3e4
    rows[kinds == 7] = rows[kinds == 7].clamp(max=0)
    rows[kinds == 8] = rows[kinds == 8].bfloat16().float()
    return rows


def _nucleus_by_sort(logits_BV, top_p):
    ranked_BV = logits_BV.double().sort(-1, descending=True).values
    probs_BV = ranked_BV.softmax(-1)
    before_BV = probs_BV.cumsum(-1) - probs_BV
    return ranked_BV.masked_fill(before_BV >= top_p, torch.inf).amin(-1), before_BV, ranked_BV


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_nucleus_is_that_of_a_sort(dtype):
    """Except where the masses of the sort, which are rounded too, are within 1e-7 of the limit."""
    rows_BV = _rows_to_filter(5, 2000).to(dtype)
    num_equal = 0
    for top_p in (0.9, 0.1, 0.31, 0.5, 0.999, 1e-6):
        found_B = nucleus_threshold(rows_BV, top_p).double()
        wanted_B, before_BV, ranked_BV = _nucleus_by_sort(rows_BV, top_p)
        equal_B = found_B == wanted_B
        doubtful_B = ((before_BV - top_p).abs() < 1e-7).any(-1)
        assert (equal_B | doubtful_B).all(), top_p
        num_equal += int(equal_B.sum())
        # Ranges and the order of tokens do not matter.
        permuted_BV = rows_BV[:, torch.randperm(211, generator=torch.Generator().manual_seed(1))]
        padded_BV = torch.nn.functional.pad(permuted_BV, (0, 45), value=-torch.inf)
        assert torch.equal(nucleus_threshold(padded_BV, top_p).double(), found_B)
    assert num_equal > 0.95 * 6 * 2000


def test_a_nucleus_at_its_limit_leaves_the_next_token_out():
    """Two of four equal halves make exactly half of the mass; equal logits stay together."""
    logits = torch.tensor([[2.0, 1.0, 2.0, 0.0], [1.0, 1.0, 1.0, 1.0], [0.0, 3.0, 3.0, 3.0]])
    assert nucleus_threshold(logits.log(), 0.4).exp().tolist() == pytest.approx([2.0, 1.0, 3.0])
    assert nucleus_threshold(logits[:1].log(), 0.8).exp().tolist() == pytest.approx([2.0])
    assert nucleus_threshold(logits[:1].log(), 0.81).exp().tolist() == pytest.approx([1.0])


def test_logits_that_are_not_numbers_give_some_token():
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(0))
    logits[0] = torch.nan
    logits[1, 7] = torch.inf
    logits[2] = -torch.inf
    tokens, logprobs = _sample(logits, torch.full((4,), 0.5).double(), top_p=0.7, top_k=20)
    assert ((tokens >= 0) & (tokens < 300)).all() and logprobs[:3].isnan().all() and not logprobs[3].isnan()
