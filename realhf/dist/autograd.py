"""Collectives that gradients flow through (Megatron-LM's f and g, arXiv:1909.08053 section 3)."""

from typing import Any

import torch

from realhf.dist.group import Group


class _GroupSum(torch.autograd.Function):
    """Sums over the group in one direction, forward or backward, and is the identity in the other."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, is_forward: bool) -> torch.Tensor:
        ctx.group = None if is_forward else group
        return group.all_reduce(x.contiguous().clone()) if is_forward else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad if ctx.group is None else ctx.group.all_reduce(grad.contiguous().clone()), None, None


def copy_to_group(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Identity whose gradient is summed over the group: before a split computation."""
    return x if group.size == 1 else _GroupSum.apply(x, group, False)


def sum_over_group(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Sum over the group whose gradient passes through: after a split computation."""
    return x if group.size == 1 else _GroupSum.apply(x, group, True)


class _ExchangeRows(torch.autograd.Function):
    """All-to-all of rows, forward one way and backward the other."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, group: Group, sends: list[int], recvs: list[int]
    ) -> torch.Tensor:
        ctx.group, ctx.sends, ctx.recvs = group, sends, recvs
        return _exchange_rows(rows, group, sends, recvs)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _exchange_rows(grad, ctx.group, ctx.recvs, ctx.sends), None, None, None


def _exchange_rows(rows: torch.Tensor, group: Group, sends: list[int], recvs: list[int]) -> torch.Tensor:
    out = rows.new_empty(sum(recvs), *rows.shape[1:])
    parts, places = rows.contiguous().split(sends), out.split(recvs)
    places[group.index].copy_(parts[group.index])
    peers = [i for i in range(group.size) if i != group.index]
    group.exchange([(i, parts[i]) for i in peers], [(i, places[i]) for i in peers])
    return out


def exchange_rows(rows: torch.Tensor, group: Group, sends: list[int], recvs: list[int]) -> torch.Tensor:
    """All-to-all: the first sends[0] rows go to member 0, and so on; recvs[0] rows come from it first."""
    return _ExchangeRows.apply(rows, group, sends, recvs)
