"""Context parallelism: ranks share out the tokens, and around attention the heads (arXiv:2309.14509).

Token-wise work is done for a rank's own part of the packed tokens; sequences may be cut anywhere. An
all-to-all before attention turns all heads of a part of the tokens into a part of the heads of all tokens,
another one behind it turns that back; attention itself knows nothing of it (DeepSpeed-Ulysses).

Shape suffixes: T tokens of all sequences end to end, t this rank's part of them, C ranks of the group; heads
before the exchange: N of queries, K of keys and values, after it: n and k; D dim of queries and keys, E of
values, W numbers that one token sends to one rank, R = C * t.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from realhf.dist.autograd import exchange_rows
from realhf.dist.group import Group
from realhf.layout import even_split


def token_range(num_tokens: int, group: Group) -> tuple[int, int]:
    """This rank's part of the tokens of a micro-batch: [start, stop); it can be empty."""
    return even_split(num_tokens, group.size, group.index)


def attend_over_group(
    attention: Callable[[Tensor, Tensor, Tensor], Tensor], q_tND: Tensor, k_tKD: Tensor, v_tKE: Tensor,
    *, group: Group, num_tokens: int,
) -> Tensor:  # fmt: skip
    """out_tNE of this rank's tokens; each rank runs `attention` on all tokens, for N / C of the query heads.

    A key-value head goes to every rank that has one of its query heads, and its gradients are added up.
    """
    (t, N, D), (K, E), C = q_tND.shape, v_tKE.shape[1:], group.size
    assert N % C == 0 and N % K == 0, "check_layout refuses such layouts"
    # Each rank gets whole groups of query heads that share a key-value head: those that there are, or parts.
    share = math.gcd(N // C, N // K)
    k_tKD, v_tKE = (x.repeat_interleave(N // K // share, dim=1) for x in (k_tKD, v_tKE))
    n, k = N // C, N // C // share
    shapes = ((n, D), (k, D), (k, E))
    widths = [heads * dim for heads, dim in shapes]
    parts = zip((q_tND, k_tKD, v_tKE), widths, strict=True)
    mine, whole = [t] * C, [stop - start for start, stop in (even_split(num_tokens, C, i) for i in range(C))]
    got_TW = exchange_rows(  # (C, t, W), of which each rank gets its t rows.
        torch.cat([x.reshape(t, C, width).transpose(0, 1) for x, width in parts], dim=2).flatten(0, 1),
        group, mine, whole,
    )  # fmt: skip
    q_TnD, k_TkD, v_TkE = (
        x.unflatten(1, shape) for x, shape in zip(got_TW.split(widths, dim=1), shapes, strict=True))
    out_RW = exchange_rows(attention(q_TnD, k_TkD, v_TkE).flatten(1), group, whole, mine)
    return out_RW.view(C, t, n * E).transpose(0, 1).reshape(t, N, E)
