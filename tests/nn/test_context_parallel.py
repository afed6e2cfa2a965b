"""Attention over a cp group, and models with special attention or positions, against one process."""

import random

import pytest
import torch
import transformers

from realhf.attention.interface import AttentionKind, Sequences
from realhf.distributed.world import World
from realhf.layout import Layout
from realhf.models.families import FAMILIES
from realhf.models.param_spec import region_slices
from realhf.nn.attention import attend_over_group, packed_attention, token_range
from tests.families import CASES
from tests.nn.tiny import SEQ_LENS, build

KINDS = [
    AttentionKind(0.5),
    AttentionKind(0.3, window=4),
    AttentionKind(0.4, softcap=2.0),
    AttentionKind(1.0, window=3, softcap=1.5),
]


def _case(seed, *, cp):
    """Return random shapes: (sequence lengths, query heads, kv heads, key dim, value dim, kind)."""
    rng = random.Random(seed)
    seq_lens = [rng.randrange(0, 12) for _ in range(rng.randrange(1, 5))]
    if seed % 5 == 0:
        seq_lens = [1, rng.randrange(0, 2)]  # Fewer tokens than ranks.
    heads = cp * rng.choice([1, 2, 3, 6])
    kv_heads = rng.choice([n for n in range(1, heads + 1) if heads % n == 0])
    return seq_lens, heads, kv_heads, rng.randrange(1, 7), rng.randrange(1, 7), KINDS[seed % len(KINDS)]


def _tensors(seed, seq_lens, heads, kv_heads, key_dim, value_dim):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(heads, key_dim), (kv_heads, key_dim), (kv_heads, value_dim), (heads, value_dim)]
    return [
        torch.randn(sum(seq_lens), *shape, dtype=torch.float64, generator=generator) for shape in shapes]


def _plain(seed, cp):
    seq_lens, *shapes, kind = _case(seed, cp=cp)
    *qkv, weights = _tensors(seed, seq_lens, *shapes)
    for x in qkv:
        x.requires_grad_()
    out = packed_attention(*qkv, Sequences.of(seq_lens, torch.device("cpu")), kind)
    (out * weights).sum().backward()
    return [out.detach(), *(x.grad for x in qkv)]


def _spread(world, seed, cp):
    """Return this rank's token range, and the output and gradients of those tokens."""
    if world.rank >= cp:
        return None
    group = world.group(tuple(range(cp)))
    seq_lens, *shapes, kind = _case(seed, cp=cp)
    here = slice(*token_range(sum(seq_lens), group))
    *qkv, weights = (x[here].clone() for x in _tensors(seed, seq_lens, *shapes))
    for x in qkv:
        x.requires_grad_()

    def attention(q, k, v):
        assert q.shape[1] == shapes[0] // cp and q.shape[1] % k.shape[1] == 0
        return packed_attention(q, k, v, Sequences.of(seq_lens, q.device), kind)

    out = attend_over_group(attention, *qkv, group=group, num_tokens=sum(seq_lens))
    (out * weights).sum().backward()
    return here, [out.detach(), *(x.grad for x in qkv)]


@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("seed", range(4))
def test_attention_is_that_of_one_process(pool, seed, cp):
    expected = _plain(seed, cp)
    results = [result for result in pool.run(_spread, seed, cp) if result is not None]
    assert len(results) == cp
    for here, tensors in results:
        for ours, whole in zip(tensors, expected, strict=True):
            torch.testing.assert_close(ours, whole[here], rtol=1e-9, atol=1e-12)


def _family(name):
    """Return a config.json as transformers writes it."""
    case = CASES[name]
    family = FAMILIES[case.family]
    config = transformers.AutoConfig.for_model(**case.hf())
    return {**config.to_dict(), "architectures": [family.architecture("lm")]}


def _logits_and_gradients(world, hf, text, seq_lens):
    """Return this rank's ranges of tokens and vocabulary, logits, and name -> (region, gradient)."""
    layout = Layout.parse(text)
    if world.rank not in layout:
        return None
    model = build(hf, world=world, layout=text)
    model.enable_grad()
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(67, (sum(seq_lens),), generator=generator)
    weights = torch.randn(len(ids), 67, dtype=torch.float64, generator=generator)
    here = slice(*token_range(len(ids), model.groups.cp))
    logits = model.logits(model(ids, seq_lens))
    (logits * weights[here, slice(*model.vocab_range)]).sum().backward()
    model.finish_grads()
    model.groups.cp.all_reduce(model.grad_buffer)
    grads = model.grad_shards()
    return (here, slice(*model.vocab_range)), logits.detach(), {
        name: (region_slices(region), grads[name]) for name, region in model.regions.items()}


@pytest.mark.parametrize(
    "name, layout, seq_lens",
    [
        ("llama-dynamic", "c4@0-3", SEQ_LENS),
        ("phi-3", "c4@0-3", SEQ_LENS),
        ("gemma-2", "c4@0-3", SEQ_LENS),
        ("olmo-2", "c4@0-3", [2]),  # Fewer tokens than ranks.
        ("olmo-2", "c2t2@0-3", SEQ_LENS),
    ],
)
def test_logits_and_gradients_are_those_of_one_process(pool, name, layout, seq_lens):
    hf = _family(name)
    _, expected, whole = _logits_and_gradients(World(), hf, "d1@0", seq_lens)
    for at, logits, grads in pool.run(_logits_and_gradients, hf, layout, seq_lens):
        torch.testing.assert_close(logits, expected[at], rtol=1e-9, atol=1e-9)
        for key, (region, grad) in grads.items():
            theirs = whole[key][1][region]
            torch.testing.assert_close(grad, theirs, rtol=1e-9, atol=1e-9, msg=f"{layout} {key}")
