"""flex_attention's arguments, without its compiler: outputs and blocks. It has no gradients on CPU."""

import pytest
import torch

from realhf.attention.flex import FlexAttention, _block_mask, _first_seen
from realhf.attention.interface import AttentionKind, Sequences
from tests.attention.cases import by_formula

CPU = torch.device("cpu")


@pytest.mark.parametrize("lens", [(5, 0, 9, 1), (300, 7, 128, 1, 77), (128, 128), (1,)])
@pytest.mark.parametrize(
    "kind", [AttentionKind(0.4, softcap=2.0), AttentionKind(0.4, window=40, softcap=1.0)], ids=str
)
def test_outputs_are_those_of_the_formula(lens, kind):
    q, k, v = (torch.randn(sum(lens), heads, dim) for heads, dim in ((4, 16), (2, 16), (2, 8)))
    with torch.no_grad():
        out = FlexAttention(compiles=False).packed(q, k, v, Sequences.of(lens, CPU), kind)
    rows = zip(*(x.split(lens) for x in (q, k, v)), strict=True)
    wanted = torch.cat([by_formula(*row, kind)[0] for row in rows if len(row[0])])
    torch.testing.assert_close(out.double(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seed", range(20))
def test_blocks_are_those_that_hold_visible_pairs(seed):
    generator = torch.Generator().manual_seed(seed)
    lens = torch.randint(0, 400, (1 + seed % 6,), generator=generator).tolist()
    lens[0] += 128 - sum(lens) % 128  # As many tokens as whole blocks.
    window = None if seed % 2 else int(torch.randint(1, 300, (), generator=generator))
    first_T = _first_seen(Sequences.of(lens, CPU), sum(lens), window)
    mask = _block_mask(first_T)
    row_T = torch.repeat_interleave(torch.tensor(lens))
    at_T = torch.arange(len(row_T))
    visible_TT = (row_T[:, None] == row_T) & (at_T <= at_T[:, None])
    if window is not None:
        visible_TT &= at_T > at_T[:, None] - window
    assert torch.equal((at_T <= at_T[:, None]) & (at_T >= first_T[:, None]), visible_TT)
    blocks = visible_TT.unflatten(0, (-1, 128)).unflatten(2, (-1, 128)).transpose(1, 2).flatten(2)
    for i, of_row in enumerate(blocks):
        partly = mask.kv_indices[0, 0, i, : mask.kv_num_blocks[0, 0, i]].tolist()
        wholly = mask.full_kv_indices[0, 0, i, : mask.full_kv_num_blocks[0, 0, i]].tolist()
        assert sorted(partly + wholly) == of_row.any(1).nonzero().flatten().tolist()
        assert wholly == of_row.all(1).nonzero().flatten().tolist()
