"""One process against transformers' own classes, and the KV cache against the full forward."""

from functools import partial

import pytest
import torch
import transformers

from realhf.attention.interface import AttentionKind, Sequences
from realhf.checkpoint.hf import load_weights
from realhf.layout import Layout
from realhf.nn import parameters
from realhf.nn.attention import packed_attention
from tests.inference.cached import CachedRows
from tests.nn.tiny import SEQ_LENS, backward_of_both, build, hf_config, tokens
from tests.realloc.test_memory import Storages


class _Float64Rotary(torch.nn.Module):
    """Angles in float64; transformers computes them in float32 even in a float64 model."""

    def __init__(self, head_dim):
        super().__init__()
        self.inv_freq = 10000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)

    def forward(self, x, position_ids):
        angles = (position_ids[:, :, None].double() * self.inv_freq).repeat(1, 1, 2)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def _float64_norm(weight, x):
    """Normalise in float64; transformers normalises in float32 even in a float64 model."""
    return weight * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def _reference(hf, directory, architecture):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**hf, attn_implementation="sdpa")
    model = getattr(transformers, architecture)(config).double()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith(("bias", "norm.weight")):
                value.normal_()
    model.save_pretrained(directory)
    model.model.rotary_emb = _Float64Rotary(8)
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(_float64_norm, module.weight)
    return model


@pytest.mark.parametrize(
    "architecture, tied",
    [
        ("Qwen2ForCausalLM", False),
        ("Qwen2ForCausalLM", True),
        ("LlamaForCausalLM", False),
        ("LlamaForCausalLM", True),
    ],
)
def test_logits_and_gradients_are_those_of_transformers(tmp_path, architecture, tied):
    hf = hf_config(architecture, tied=tied)
    reference = _reference(hf, tmp_path, architecture)
    model = build(hf)
    assert load_weights(tmp_path, model) == []
    model.enable_grad()
    for _ in range(2):  # two micro-batches accumulate
        torch.testing.assert_close(*backward_of_both(model, reference, tokens()), rtol=1e-10, atol=1e-10)
    grads = {name: value.grad for name, value in reference.named_parameters()}
    assert grads.keys() == model.shards().keys()
    for name, grad in model.grad_shards().items():
        scale = grads[name].abs().max()
        torch.testing.assert_close(grad / scale, grads[name] / scale, rtol=0, atol=1e-10, msg=name)


def test_scores_are_those_of_transformers(tmp_path):
    architecture = "Qwen2ForSequenceClassification"
    hf = hf_config(architecture)
    reference = _reference(hf, tmp_path, architecture)
    model = build(hf)
    load_weights(tmp_path, model)
    ids = tokens()
    scores = model.scores(model(ids, SEQ_LENS)).split(SEQ_LENS)
    for part, score in zip(ids.split(SEQ_LENS), scores, strict=True):
        hidden = reference.model(part[None]).last_hidden_state
        torch.testing.assert_close(score, reference.score(hidden)[0, :, 0])


def test_flat_buffers_are_the_shards():
    model = build(hf_config())
    model.enable_grad()
    assert list(model.shards()) == list(model.spec.held_by(model.groups.layout, 0))
    stops = [0, *(stop for _, stop in model.offsets.values())]
    assert stops == [0, *torch.tensor([s.numel() for s in model.shards().values()]).cumsum(0).tolist()]
    assert stops[-1] == model.flat.numel() == model.grad_buffer.numel() == model.spec.numel
    before = model.logits(model(tokens(), SEQ_LENS)).detach()
    model.flat.mul_(0.5)
    assert not torch.equal(before, model.logits(model(tokens(), SEQ_LENS)))
    model(tokens(), SEQ_LENS).sum().backward()
    assert model.grad_buffer.abs().sum() > 0
    assert all(p.grad is None for p in model.weights())
    model.requires_grad_(False)
    assert not model(tokens(), SEQ_LENS).requires_grad


@pytest.mark.parametrize("layout", ["d1@0", "t2@0-1"])
def test_random_weights_are_drawn_a_few_at_a_time(pool, layout):
    """Drawing in blocks gives the same numbers as drawing at once, and needs little memory."""
    results = [found for found in pool.run(_drawn, layout) if found is not None]
    for extra, most, numbers in results:
        assert extra < most / 4 and numbers


def _drawn(world, layout):
    """Return bytes beside the weights, bytes of the largest weight, and whether all numbers are right."""
    if world.rank not in Layout.parse(layout):
        return None
    model = build({**hf_config(), "vocab_size": 70001}, world=world, layout=layout, dtype=torch.float32)
    before, ours = parameters._DRAWN_NUMEL, model.flat.clone()
    parameters._DRAWN_NUMEL = 1 << 60
    model.init_random(seed=3)
    parameters._DRAWN_NUMEL = 1 << 16
    is_equal = torch.equal(model.flat, ours)
    with Storages() as storages:
        model.init_random(seed=3)
    parameters._DRAWN_NUMEL = before
    is_equal = is_equal and torch.equal(model.flat, ours)
    return storages.peak, max(p.numel for p in model.spec.params) * 4, is_equal


def test_bfloat16_accumulates_gradients_in_float32():
    model, exact = build(hf_config(), dtype=torch.bfloat16), build(hf_config(), dtype=torch.float32)
    exact.flat.copy_(model.flat)
    for m in (model, exact):
        m.enable_grad()
        for _ in range(3):
            m.logits(m(tokens(), SEQ_LENS)).logsumexp(1).sum().backward()
    assert model.grad_buffer.dtype == torch.float32
    assert all(p.grad is None for p in model.weights())
    assert torch.cosine_similarity(model.grad_buffer, exact.grad_buffer, dim=0) > 0.999


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.bfloat16, 0.1)])
def test_decoding_with_the_cache_is_the_full_forward(dtype, tolerance):
    model = build(hf_config(), dtype=dtype)
    lens = [5, 1, 63, 70, 3]
    sequences = list(torch.randint(67, (sum(lens),), generator=torch.Generator().manual_seed(1)).split(lens))
    rows = CachedRows(model, lens)
    with torch.no_grad():
        hidden = rows.prefill(torch.cat(sequences))
        torch.testing.assert_close(hidden, model(torch.cat(sequences), lens))
        for step in range(5):
            new = torch.randint(67, (len(sequences),), generator=torch.Generator().manual_seed(step))
            sequences = [torch.cat((s, t[None])) for s, t in zip(sequences, new, strict=True)]
            hidden, lens = rows.decode(new), [len(s) for s in sequences]
            full = model(torch.cat(sequences), lens)[torch.tensor(lens).cumsum(0) - 1]
            torch.testing.assert_close(hidden, full, rtol=tolerance, atol=tolerance)
            if step == 2:  # the longest
                rows.stop(3)
                del sequences[3]


def test_a_prompt_in_pieces_is_the_full_forward():
    model, ids = build(hf_config()), tokens()
    rows = CachedRows(model, [len(ids)])
    with torch.no_grad():
        pieces = [rows.prefill(ids[:4], first=4)]
        rows.lens = [20]
        pieces.append(rows.extend(ids[4:20], 0))
        rows.lens = [len(ids)]
        pieces.append(rows.extend(ids[20:], 0))
        torch.testing.assert_close(torch.cat(pieces), model(ids, [len(ids)]), rtol=1e-12, atol=1e-12)


def test_empty_sequences_take_no_part_in_attention():
    q, k, v = (torch.randn(6, heads, 8) for heads in (4, 2, 2))
    out = packed_attention(q, k, v, Sequences.of([0, 2, 0, 4, 0], q.device), AttentionKind(8**-0.5))
    expected = packed_attention(q, k, v, Sequences.of([2, 4], q.device), AttentionKind(8**-0.5))
    assert torch.equal(out, expected)
    for at in (slice(0, 2), slice(2, 6)):
        scores = torch.einsum("tnd,snd->nts", q[at], k[at].repeat_interleave(2, 1)) / 8**0.5
        probs = scores.masked_fill(torch.ones_like(scores[0]).triu(1).bool(), -torch.inf).softmax(-1)
        torch.testing.assert_close(
            out[at], torch.einsum("nts,snd->tnd", probs, v[at].repeat_interleave(2, 1))
        )
