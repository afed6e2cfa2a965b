"""Context parallelism: ranks split the tokens, and inside attention the heads (arXiv:2309.14509).

Each rank does the token-wise work for its own range of the packed tokens; a sequence may be split anywhere.
Before attention, a rank has all heads of its tokens; an all-to-all exchanges these for all tokens of some
heads. Another all-to-all after attention turns that back. Attention itself does not change
(DeepSpeed-Ulysses).

Shape suffixes: T tokens of all sequences end to end, t those of this rank's range, C ranks of the group, R =
C * t; N heads of queries and K of keys and values before the exchange, n and k after it; D dim of queries
and keys, E of values, W numbers that one token sends to one rank.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from realhf.distributed.autograd import exchange_rows
from realhf.distributed.group import Group
from realhf.layout import even_split


def token_range(num_tokens: int, group: Group) -> tuple[int, int]:
    """Return this rank's range [start, stop) of the tokens of a micro-batch; it may be empty."""
    return even_split(num_tokens, group.size, group.index)


def attend_over_group(
    attention: Callable[[Tensor, Tensor, Tensor], Tensor], q_tND: Tensor, k_tKD: Tensor, v_tKE: Tensor,
    *, group: Group, num_tokens: int,
) -> Tensor:
    """Return out_tNE of this rank's tokens; each rank runs `attention` on all tokens and N / C query heads.

    A key-value head goes to every rank that has one of its query heads, and its gradients are added up.
    """
    t, N, D = q_tND.shape
    K, E = v_tKE.shape[1:]
    C = group.size
    assert N % C == 0 and N % K == 0, "check_layout refuses such layouts"
    # Each copy of a key-value head serves `share` query heads, all of which are on one rank.
    share = math.gcd(N // C, N // K)
    k_tKD, v_tKE = (x.repeat_interleave(N // K // share, dim=1) for x in (k_tKD, v_tKE))
    n, k = N // C, N // C // share
    shapes = ((n, D), (k, D), (k, E))
    widths = [num_heads * dim for num_heads, dim in shapes]
    sent = zip((q_tND, k_tKD, v_tKE), widths, strict=True)
    mine = [t] * C
    whole = [stop - start for start, stop in (even_split(num_tokens, C, i) for i in range(C))]
    got_TW = exchange_rows(  # Sends (C, t, W): t rows to each rank.
        torch.cat([x.reshape(t, C, width).transpose(0, 1) for x, width in sent], dim=2).flatten(0, 1),
        group, mine, whole,
    )
    q_TnD, k_TkD, v_TkE = (
        x.unflatten(1, shape) for x, shape in zip(got_TW.split(widths, dim=1), shapes, strict=True))
    out_RW = exchange_rows(attention(q_TnD, k_TkD, v_TkE).flatten(1), group, whole, mine)
    return out_RW.view(C, t, n * E).transpose(0, 1).reshape(t, N, E)
