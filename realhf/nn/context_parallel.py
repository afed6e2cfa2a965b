"""Context parallelism: ranks share out the tokens, and around attention the heads (arXiv:2309.14509).

Token-wise work is done for a rank's own part of the packed tokens; sequences may be cut anywhere. Before
attention an all-to-all turns all heads of a part of the tokens into a part of the heads of all tokens, after it
another one turns that back, so attention itself knows nothing of it (DeepSpeed-Ulysses).

Shape suffixes: T tokens of all sequences end to end, t this rank's part of them, C ranks of the group; heads
before the exchange: N of queries, K of keys and values, after it: n and k; D dim of queries and keys, E of
values, W numbers that one token sends to one rank.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

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
    sent_tCW = torch.cat([
        x.reshape(t, C, heads * dim)
        for x, heads, dim in ((q_tND, n, D), (k_tKD, k, D), (v_tKE, k, E))
    ], dim=2)
    got_TW = _Exchange.apply(sent_tCW.transpose(0, 1), group, num_tokens, True)
    q_TnD, k_TkD, v_TkE = (
        x.unflatten(1, (heads, dim))
        for x, heads, dim in zip(got_TW.split((n * D, k * D, k * E), dim=1), (n, k, k), (D, D, E), strict=True)
    )
    out_CtW = _Exchange.apply(attention(q_TnD, k_TkD, v_TkE).flatten(1), group, num_tokens, False)
    return out_CtW.transpose(0, 1).reshape(t, N, E)


class _Exchange(torch.autograd.Function):
    """x_CtW -> y_TW: row c goes to rank c, where the parts of all ranks lie end to end; or that undone.

    Either direction is the gradient of the other.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, num_tokens: int, to_heads: bool) -> Tensor:
        ctx.args, ctx.to_heads = (group, num_tokens), to_heads
        return (_to_heads if to_heads else _to_tokens)(x, group, num_tokens)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return (_to_tokens if ctx.to_heads else _to_heads)(grad, *ctx.args), None, None, None


def _to_heads(x_CtW: Tensor, group: Group, num_tokens: int) -> Tensor:
    y_TW = x_CtW.new_empty(num_tokens, x_CtW.shape[2])
    _swap(list(x_CtW.contiguous().unbind()), _parts(y_TW, group), group)
    return y_TW


def _to_tokens(y_TW: Tensor, group: Group, num_tokens: int) -> Tensor:
    start, stop = token_range(num_tokens, group)
    x_CtW = y_TW.new_empty(group.size, stop - start, y_TW.shape[1])
    _swap(_parts(y_TW.contiguous(), group), list(x_CtW.unbind()), group)
    return x_CtW


def _parts(y_TW: Tensor, group: Group) -> list[Tensor]:
    """The tokens of each rank."""
    bounds = (even_split(len(y_TW), group.size, index) for index in range(group.size))
    return [y_TW[start:stop] for start, stop in bounds]


def _swap(sent: list[Tensor], received: list[Tensor], group: Group) -> None:
    """Sends and receives one tensor per rank; empty ones are no messages."""
    received[group.index].copy_(sent[group.index])
    peers = [(group.index + i) % group.size for i in range(1, group.size)]
    group.exchange(
        [(peer, sent[peer]) for peer in peers if len(sent[peer])],
        [(peer, received[peer]) for peer in peers if len(received[peer])],
    )
