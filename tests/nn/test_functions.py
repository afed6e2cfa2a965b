"""Functions with their own backward pass, against autograd through the formula and numerical differences."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from realhf.attention.interface import AttentionKind, Sequences
from realhf.nn import mlp, norm
from realhf.nn.attention import packed_attention
from realhf.nn.linear import Weight, embedding, linear
from realhf.nn.rope import rotate
from tests.realloc.test_memory import Storages


def _random(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def _weight(*shape, dtype=torch.float64):
    """Return a weight that collects gradients in a buffer of NaN, which the first one must overwrite."""
    weight = Weight(_random(*shape, dtype=dtype, seed=7), requires_grad=False)
    weight.collect(torch.full(shape, torch.nan, dtype=torch.promote_types(dtype, torch.float32)))
    return weight


def _value_and_gradients(function, *inputs):
    leaves = [x.clone().requires_grad_() for x in inputs]
    y = function(*leaves)
    (y * _random(*y.shape, seed=3).to(y.dtype)).sum().backward()
    return [y.detach(), *(leaf.grad for leaf in leaves)]


def _strided(rows, heads, dim):
    """Return a slice of every row of a wider tensor, like the queries' part of queries, keys and values."""
    return _random(rows, heads + 2, dim)[:, :heads]


@pytest.mark.parametrize("numel", [1, 40, 1 << 17])
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("x", [_random(9, 16), _strided(5, 3, 8)], ids=["rows", "heads"])
def test_rms_norm(monkeypatch, x, offset, numel):
    monkeypatch.setattr(norm, "PART_NUMEL", numel)
    weight = _random(x.shape[-1], seed=1)
    inputs = x.clone().requires_grad_(), weight.clone().requires_grad_()
    assert torch.autograd.gradcheck(partial(norm.rms_norm, eps=1e-3, offset=offset), inputs)

    def formula(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * (weight + offset)

    ours = _value_and_gradients(partial(norm.rms_norm, eps=1e-3, offset=offset), x, weight)
    torch.testing.assert_close(ours, _value_and_gradients(formula, x, weight))
    with torch.no_grad():
        torch.testing.assert_close(norm.rms_norm(x, weight, 1e-3, offset=offset), formula(x, weight))


def test_rms_norm_of_halves_is_computed_in_float32():
    x, weight = _random(50, 64, dtype=torch.bfloat16), _random(64, dtype=torch.bfloat16, seed=1)
    exact = F.rms_norm(x.float(), (64,), weight.float(), 1e-6).bfloat16()
    assert torch.equal(norm.rms_norm(x.requires_grad_(), weight.requires_grad_(), 1e-6), exact)
    norm.rms_norm(x, weight, 1e-6).sum().backward()
    assert x.grad.dtype == weight.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotated, num_heads", [(8, 5), (8, 3), (4, 3)])
def test_rotate(interleaved, rotated, num_heads):
    angle = _random(6, 1, rotated // 2, seed=1)
    ours = partial(rotate, angles=(angle.cos(), angle.sin()), interleaved=interleaved, num_heads=num_heads)
    x = _random(6, 5, 8)
    assert torch.autograd.gradcheck(ours, (x.clone().requires_grad_(),))
    y = ours(x)
    assert torch.equal(y[:, num_heads:], x[:, num_heads:])
    assert torch.equal(y[:, :, rotated:], x[:, :, rotated:])
    turned = [z[:, :num_heads, :rotated] for z in (x, y)]
    if interleaved:
        before, after = (torch.view_as_complex(z.unflatten(2, (-1, 2)).contiguous()) for z in turned)
    else:
        before, after = (torch.complex(*z.chunk(2, dim=2)) for z in turned)
    torch.testing.assert_close(after, before * torch.exp(1j * angle))


class _Config:
    def __init__(self, name, gated):
        self.activation, self.gated = name, gated


@pytest.mark.parametrize("name", mlp.ACTIVATIONS)
@pytest.mark.parametrize("gated", [False, True])
def test_activations(monkeypatch, name, gated):
    """Activations in several parts have the gradients that autograd finds for the formula."""
    monkeypatch.setattr(mlp, "PART_NUMEL", 50)
    curve = mlp.ACTIVATIONS[name].compute

    def formula(x):
        gate, up = x.chunk(2, dim=1)
        return curve(gate) * up if gated else curve(x)

    x = _random(11, 24)
    ours = _value_and_gradients(mlp.activation(_Config(name, gated)), x)
    torch.testing.assert_close(ours, _value_and_gradients(formula, x))
    weight = _weight(6, 12 if gated else 24)
    plain = weight.detach().clone().requires_grad_()
    ours = _value_and_gradients(
        lambda x: mlp.activated_linear(_Config(name, gated), x, weight), x)
    torch.testing.assert_close(ours, _value_and_gradients(lambda x: formula(x) @ plain.T, x))
    torch.testing.assert_close(weight.total, plain.grad)


def test_a_gated_mlp_keeps_gate_and_up_only():
    x, weight = _random(64, 256, dtype=torch.float32).requires_grad_(), _weight(16, 128, dtype=torch.float32)
    with Storages() as storages:
        y = mlp.activated_linear(_Config("silu", True), x, weight)
    assert storages.now == y.nbytes


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_linear_and_embedding_add_to_the_buffer(dtype):
    """A tied weight sums up its gradients of two passes, and overwrites what the buffer held before."""
    weight, ids = _weight(13, 8, dtype=dtype), torch.tensor([3, 12, 3, 0])
    plain, bias = weight.detach().clone().requires_grad_(), _random(13, dtype=dtype).requires_grad_()
    for w, rows, product in ((weight, embedding, linear), (plain, lambda i, w: w[i], F.linear)):
        for scale in (1.0, 2.0):
            (product(rows(ids, w) * scale, w, bias) ** 2).sum().backward()
    assert weight.grad is None
    tolerance = {"rtol": 2e-2, "atol": 1.0} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(weight.total, plain.grad.to(weight.total.dtype), **tolerance)


def test_a_weight_without_gradients_sums_up_to_zero():
    weight = _weight(3, 4)
    weight.finish()
    assert not weight.total.any()


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_over_runs(kv_heads):
    lengths, kind = [3, 5, 5, 1, 2, 2], AttentionKind(0.3)
    q, k, v = (_random(18, heads, 8, seed=heads) for heads in (4, kv_heads, kv_heads))

    def formula(q, k, v):
        outs = []
        for part in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
            a, b, c = (x.repeat_interleave(4 // x.shape[1], dim=1).transpose(0, 1) for x in part)
            scores = (a @ b.transpose(1, 2) * kind.scale)
            hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
            outs.append((scores.masked_fill(hidden, -torch.inf).softmax(-1) @ c).transpose(0, 1))
        return torch.cat(outs)

    at = Sequences.of(lengths, torch.device("cpu"))
    ours = _value_and_gradients(lambda *x: packed_attention(*x, at, kind), q, k, v)
    torch.testing.assert_close(ours, _value_and_gradients(formula, q, k, v))
