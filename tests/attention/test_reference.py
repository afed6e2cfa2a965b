"""The reference against torch's scaled_dot_product_attention (and a formula for soft caps) in float64."""

import pytest
import torch

from realhf.attention.dense import DenseAttention
from realhf.attention.interface import AttentionKind, Pages, Sequences, merge_into
from realhf.attention.reference import ReferenceAttention
from tests.attention.cases import by_formula, expected, random_case
from tests.samples import drawn

CPU = torch.device("cpu")


@pytest.mark.parametrize("part", drawn(range(10), 3))
def test_attention_over_pages_is_that_over_the_rows(part):
    """600 random tables: windows, soft caps, grouped heads, shared pages, pieces of prompts, value dims."""
    for seed in range(part * 60, part * 60 + 60):
        case = random_case(seed)
        out, lse = ReferenceAttention().paged(*case.arguments())
        for found, wanted in zip((out, lse), expected(case), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.slow
def test_the_random_cases_have_all_features():
    cases = [random_case(seed) for seed in range(600)]
    assert sum(case.kind.window is not None for case in cases) > 100
    assert sum(case.kind.softcap is not None for case in cases) > 100
    assert sum(case.at.max_q == 1 for case in cases) > 100
    assert sum(case.q_TND.shape[1] > case.k_PLKD.shape[2] for case in cases) > 100
    assert sum(case.v_PLKD.data_ptr() == case.k_PLKD.data_ptr() for case in cases) > 100
    shared = [len({*case.at.table[:, 0].tolist()}) < len(case.rows) for case in cases]
    assert sum(shared) > 100
    assert sum(1 < len(q) < len(k) for case in cases for q, k, _ in case.rows) > 100


@pytest.mark.parametrize("dtype, atol", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_narrow_dtypes_are_computed_in_float32(dtype, atol):
    for seed in range(20):
        case = random_case(seed, dtype=dtype)
        out, lse = ReferenceAttention().paged(*case.arguments())
        assert out.dtype == dtype and lse.dtype == torch.float32
        out_wanted, lse_wanted = expected(case)
        torch.testing.assert_close(out.double(), out_wanted, rtol=0, atol=atol)
        torch.testing.assert_close(lse.double(), lse_wanted, rtol=0, atol=1e-5)


def test_a_padding_row_of_a_graph_attends_to_the_spare_page():
    k_PLKD = torch.randn(3, 16, 2, 8)
    at = Pages(torch.tensor([0, 1, 2]).int(), 1, torch.tensor([[2, 2], [0, 1]]).int(),
               torch.tensor([1, 20]).int(), 32)
    out, _ = ReferenceAttention().paged(torch.randn(2, 4, 8), k_PLKD, k_PLKD, at, AttentionKind(0.3))
    torch.testing.assert_close(out[0], k_PLKD[2, 0].repeat_interleave(2, 0))


KINDS = [
    AttentionKind(0.4), AttentionKind(0.4, window=5), AttentionKind(0.4, softcap=2.0),
    AttentionKind(0.4, window=3, softcap=1.0),
]


@pytest.mark.parametrize("backend", [ReferenceAttention(), DenseAttention()])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value_dim", [8, 5])
def test_packed_attention_and_its_gradients_are_those_of_the_formula(backend, kind, value_dim):
    lens = [7, 3, 3, 0, 12, 1]
    generator = torch.Generator().manual_seed(0)
    q, k, v, weights = (
        torch.randn(sum(lens), heads, dim, dtype=torch.float64, generator=generator)
        for heads, dim in ((6, 8), (2, 8), (2, value_dim), (6, value_dim)))

    def plain(q, k, v):
        rows = zip(*(x.split(lens) for x in (q, k, v)), strict=True)
        return torch.cat([by_formula(*row, kind)[0] for row in rows if len(row[0])])

    results = []
    for compute in (lambda *x: backend.packed(*x, Sequences.of(lens, CPU), kind), plain):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = compute(*leaves)
        (out * weights).sum().backward()
        results.append([out.detach(), *(x.grad for x in leaves)])
    torch.testing.assert_close(results[0], results[1], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("backend", [ReferenceAttention(), DenseAttention()])
def test_no_tokens_have_gradients_of_zero(backend):
    q, k, v = (torch.zeros(0, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    out = backend.packed(q, k, v, Sequences.of([0, 0], CPU), AttentionKind(1.0))
    assert out.shape == (0, 4, 8)
    out.sum().backward()
    assert all(x.grad is not None and x.grad.shape == x.shape for x in (q, k, v))


@pytest.mark.parametrize("seed", range(30))
def test_results_over_parts_of_the_keys_merge(seed):
    """A prefix in pages, and the rows' own tokens: as two calls and as one."""
    generator = torch.Generator().manual_seed(seed)
    num_prefix, num_own, heads, group, dim = 1 + seed % 3, 1 + seed % 2, 1 + seed % 2, 1 + seed % 4, 8
    num_rows, page = 3, 16
    k_PLKD, v_PLKD = torch.randn(2, 20, page, heads, dim, dtype=torch.float64, generator=generator)
    q_BND = torch.randn(num_rows, heads * group, dim, dtype=torch.float64, generator=generator)
    kind = AttentionKind(0.5, softcap=None if seed % 2 else 3.0)
    prefix = torch.arange(num_prefix).expand(num_rows, -1)
    own = num_prefix + torch.arange(num_rows * num_own).view(num_rows, num_own)
    own_lens = torch.randint(1, num_own * page + 1, (num_rows,), generator=generator)
    cu_q = torch.arange(num_rows + 1).int()

    def attend(table, lens):
        at = Pages(cu_q, 1, table.int(), lens.int(), int(lens.max()))
        return ReferenceAttention().paged(q_BND, k_PLKD, v_PLKD, at, kind)

    whole = attend(torch.cat((prefix, own), 1), num_prefix * page + own_lens)
    parts = [attend(prefix, torch.full_like(own_lens, num_prefix * page)), attend(own, own_lens)]
    torch.testing.assert_close(_merged(parts), whole, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(_merged(parts[::-1]), whole, rtol=1e-9, atol=1e-11)


def _merged(parts):
    out, lse = (x.clone() for x in parts[0])
    for part in parts[1:]:
        merge_into(out, lse, *part)
    return out, lse


def test_parts_without_keys_merge():
    out, lse = torch.randn(2, 3, 4), torch.randn(2, 3)
    nothing = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
    torch.testing.assert_close(_merged([nothing, (out, lse)]), (out, lse))
    torch.testing.assert_close(_merged([(out, lse), nothing]), (out, lse))
    torch.testing.assert_close(_merged([nothing, nothing]), nothing)
    narrow = out.bfloat16()
    found, _ = _merged([(narrow.float(), lse), (narrow, lse)])
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, narrow.float())
