"""The calls of flash-attn's and torch's kernels: by functions of the same signatures, and by fake tensors."""

import sys
import types

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import varlen

from realhf.attention.dense import DenseAttention
from realhf.attention.flash import FlashAttention, VarlenAttention, has_pages
from realhf.attention.interface import AttentionKind, AttentionShape, Pages, Sequences, merge_into
from realhf.attention.reference import ReferenceAttention
from tests.attention import stand_ins
from tests.attention.cases import by_formula, expected, random_case
from tests.samples import marked

CPU = torch.device("cpu")
KINDS = [AttentionKind(0.4), AttentionKind(0.4, window=5), AttentionKind(0.4, softcap=2.0)]


@pytest.fixture
def libraries(monkeypatch):
    """flash-attn 2.8 and torch 2.13's varlen_attn, as far as one can have them without a GPU."""
    flash_attn = types.ModuleType("flash_attn")
    flash_attn.flash_attn_varlen_func = stand_ins.flash_attn_varlen_func
    flash_attn.flash_attn_with_kvcache = stand_ins.flash_attn_with_kvcache
    monkeypatch.setitem(sys.modules, "flash_attn", flash_attn)
    monkeypatch.setattr(varlen, "varlen_attn", stand_ins.varlen_attn)
    stand_ins.CALLS.clear()
    return monkeypatch


BACKENDS = [FlashAttention((2, 8)), VarlenAttention(has_pages=True)]


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("decodes, num_splits", marked(
    [(True, None), (True, 1), (False, None)], quick=[0, 1]))
def test_pages_are_passed_as_the_kernels_want_them(libraries, backend, decodes, num_splits):
    num_cases = 0
    for seed in range(60 if decodes else 10):
        case = random_case(seed, dtype=torch.bfloat16, pages=(256,), dims=(16,), decodes=decodes)
        shape = AttentionShape(case.kind, 16, case.v_PLKD.shape[-1], torch.bfloat16)
        if backend.refuses(shape, paged=True):
            assert case.kind.softcap is not None or shape.value_dim != 16
            continue
        num_cases += 1
        out, lse = backend.paged(*case.arguments(), num_splits=num_splits)
        out_wanted, lse_wanted = expected(case)
        torch.testing.assert_close(out.double(), out_wanted, rtol=0, atol=2e-2)
        torch.testing.assert_close(lse.double(), lse_wanted, rtol=0, atol=1e-5)
    assert num_cases >= 3
    if backend is BACKENDS[0] and decodes:
        assert set(stand_ins.CALLS) == {f"flash_attn_with_kvcache, {num_splits or 0} splits"}
    if backend is BACKENDS[1]:
        assert set(stand_ins.CALLS) == {"varlen_attn, 1 splits"}


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim, value_dim", [(16, 16), (12, 8), (8, 13)])
@pytest.mark.parametrize("old_torch", [False, True])
def test_packed_sequences_are_passed_as_the_kernels_want_them(
    libraries, backend, kind, dim, value_dim, old_torch
):
    if old_torch:
        libraries.setattr(varlen, "varlen_attn", stand_ins.old_varlen_attn)
    if backend.refuses(AttentionShape(kind, dim, value_dim, torch.bfloat16), paged=False):
        assert kind.softcap is not None and backend is BACKENDS[1]
        return
    lens = [5, 0, 9, 1]
    shapes = ((6, dim), (2, dim), (2, value_dim))
    q, k, v = (torch.randn(15, *shape, requires_grad=True) for shape in shapes)
    out = backend.packed(q, k, v, Sequences.of(lens, CPU), kind)
    rows = zip(*(x.split(lens) for x in (q, k, v)), strict=True)
    wanted = torch.cat([by_formula(*row, kind)[0] for row in rows if len(row[0])])
    torch.testing.assert_close(out.double(), wanted, rtol=1e-4, atol=1e-5)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    torch.testing.assert_close(
        grads, torch.autograd.grad(wanted.sum(), (q, k, v)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", [*BACKENDS, ReferenceAttention()], ids=lambda backend: backend.name)
@pytest.mark.parametrize("dim, value_dim", [(16, 16), (12, 8)])
@pytest.mark.parametrize("old_torch", [False, True])
def test_own_tokens_and_two_parts_of_earlier_ones_merge_to_all(libraries, backend, dim, value_dim, old_torch):
    if old_torch:
        libraries.setattr(varlen, "varlen_attn", stand_ins.old_varlen_attn)
    lens, parts = [5, 3, 1], ([4, 7, 2], [6, 1, 1])
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(9, 3, dim, generator=generator)
    keys = [
        [torch.randn(sum(some), 3, d, generator=generator) for d in (dim, value_dim)]
        for some in (lens, *parts)]
    at = Sequences.of(lens, CPU)
    kind = AttentionKind(0.4)
    out, lse = backend.over_part(q, *keys[0], at, at, kind, is_causal=True)
    for some, earlier in zip(parts, keys[1:], strict=True):
        merge_into(
            out, lse, *backend.over_part(q, *earlier, at, Sequences.of(some, CPU), kind, is_causal=False))
    in_order = zip((*parts, lens), (*keys[1:], keys[0]), strict=True)
    rows = [x.split(some) for some, pair in in_order for x in pair]
    wanted = [
        by_formula(of, torch.cat((k0, k1, k2)), torch.cat((v0, v1, v2)), kind)
        for of, k0, v0, k1, v1, k2, v2 in zip(q.split(lens), *rows, strict=True)]
    torch.testing.assert_close(out.double(), torch.cat([x for x, _ in wanted]), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse.double(), torch.cat([x for _, x in wanted]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_kv_heads", [2, 4])
@pytest.mark.parametrize("kind", KINDS[:2])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_torch_accepts_the_calls_for_packed_sequences(num_kv_heads, kind, device):
    """Fake tensors run torch's own checks of arguments and its formulas of shapes.

    Those on CUDA can neither have gradients nor be sliced without CUDA, so that this is checked on CPU.
    """
    value_dim = 24 if device == "cuda" else 16
    with FakeTensorMode():
        at = Sequences(torch.zeros(4, dtype=torch.int32, device=device), (5, 0, 9))
        q, k, v = (
            torch.empty(14, heads, dim, device=device, dtype=torch.bfloat16, requires_grad=device == "cpu")
            for heads, dim in ((4, 24), (num_kv_heads, 24), (num_kv_heads, value_dim)))
        out = VarlenAttention(has_pages=True).packed(q, k, v, at, kind)
        assert out.shape == (14, 4, value_dim) and out.dtype == torch.bfloat16 and out.device.type == device
        if device == "cpu":
            grads = torch.autograd.grad(out.sum(), (q, k, v))
            assert [grad.shape for grad in grads] == [x.shape for x in (q, k, v)]


@pytest.mark.skipif(not has_pages(), reason="torch before 2.13 has no pages")
@pytest.mark.parametrize("num_kv_heads", [2, 4])
@pytest.mark.parametrize("kind", KINDS[:2])
@pytest.mark.parametrize("num_tokens, max_q", [(3, 1), (40, 30)])
def test_torch_accepts_the_calls_for_pages(num_kv_heads, kind, num_tokens, max_q):
    with FakeTensorMode():
        k, v = (
            torch.empty(7, 256, num_kv_heads, 24, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        cu_q, table, lens_k = (
            torch.zeros(shape, dtype=torch.int32, device="cuda") for shape in ((4,), (3, 5), (3,)))
        q = torch.empty(num_tokens, 4, 24, device="cuda", dtype=torch.bfloat16)
        at = Pages(cu_q, max_q, table, lens_k, 5 * 256)
        out, lse = VarlenAttention(has_pages=True).paged(q, k, v, at, kind)
        assert out.shape == q.shape and lse.shape == (num_tokens, 4) and lse.dtype == torch.float32


@pytest.mark.parametrize("is_causal", [True, False])
def test_torch_accepts_the_calls_for_parts(is_causal):
    with FakeTensorMode():
        cu = torch.zeros(4, dtype=torch.int32, device="cuda")
        queries, keys = Sequences(cu, (5, 3, 6)), Sequences(cu, (1, 9, 4))
        q, k, v = (torch.empty(14, 4, 24, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        backend = VarlenAttention(has_pages=True)
        out, lse = backend.over_part(q, k, v, queries, keys, KINDS[0], is_causal=is_causal)
        assert out.shape == q.shape and lse.shape == (14, 4) and lse.dtype == torch.float32


def test_this_torch_knows_pages_from_2_13_on():
    assert has_pages() == (tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13))


class _Kernel(torch.autograd.Function):
    """Notes in its backward pass whether torch's kernels would add up in one order: if they would raise."""

    notes = []

    @staticmethod
    def forward(ctx, q_TND, v_TND):
        return q_TND + v_TND

    @staticmethod
    def backward(ctx, grad_TND):
        raises = not torch.is_deterministic_algorithms_warn_only_enabled()
        _Kernel.notes.append(torch.are_deterministic_algorithms_enabled() and raises)
        return grad_TND, grad_TND


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("backend", [VarlenAttention(has_pages=True), DenseAttention()])
def test_gradients_of_deterministic_runs_are_added_up_in_one_order(monkeypatch, deterministic, backend):
    """Other operations without an order still warn, before and after."""
    monkeypatch.setattr(varlen, "varlen_attn", lambda q, k, v, *_, **__: _Kernel.apply(q, v))
    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention", lambda q, k, v, **_: _Kernel.apply(q, v))
    q, k, v = torch.rand(3, 8, 2, 16, requires_grad=True)
    kind = AttentionKind(0.3, window=2 if isinstance(backend, DenseAttention) else None)  # Not by our own.
    monkeypatch.setattr(_Kernel, "notes", [])
    try:
        torch.use_deterministic_algorithms(deterministic, warn_only=deterministic)
        sequences = Sequences.of((5, 3), CPU)
        outs = [backend.packed(q, k, v, sequences, kind) for _ in range(2)]
        sum(out.sum() for out in outs).backward()
        assert torch.are_deterministic_algorithms_enabled() == deterministic
        assert torch.is_deterministic_algorithms_warn_only_enabled() == deterministic
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(_Kernel.notes) >= 2 and set(_Kernel.notes) == {deterministic}
