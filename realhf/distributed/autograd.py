"""Differentiable collectives (Megatron-LM's f and g, arXiv:1909.08053 section 3)."""

from typing import Any

import torch

from realhf.distributed.group import Group


class _GroupSum(torch.autograd.Function):
    """A sum over the group in one direction, forward or backward, and the identity in the other."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, is_forward: bool) -> torch.Tensor:
        ctx.group = None if is_forward else group
        return group.all_reduce(x.contiguous().clone()) if is_forward else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad if ctx.group is None else ctx.group.all_reduce(grad.contiguous().clone()), None, None


def copy_to_group(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return `x`, with its gradient summed over the group; used before a computation that is split."""
    return x if group.size == 1 else _GroupSum.apply(x, group, False)


def sum_over_group(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the sum over the group, whose gradient passes unchanged; used after a split computation."""
    return x if group.size == 1 else _GroupSum.apply(x, group, True)


class _ExchangeRows(torch.autograd.Function):
    """An all-to-all of rows, whose gradient takes the reverse way."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, group: Group, sends: list[int], recvs: list[int]
    ) -> torch.Tensor:
        ctx.group = group
        ctx.sends = sends
        ctx.recvs = recvs
        return _exchange_rows(rows, group, sends, recvs)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _exchange_rows(grad, ctx.group, ctx.recvs, ctx.sends), None, None, None


def _exchange_rows(rows: torch.Tensor, group: Group, sends: list[int], recvs: list[int]) -> torch.Tensor:
    out = rows.new_empty(sum(recvs), *rows.shape[1:])
    outgoing = rows.contiguous().split(sends)
    incoming = out.split(recvs)
    incoming[group.index].copy_(outgoing[group.index])
    peers = [i for i in range(group.size) if i != group.index]
    group.exchange([(i, outgoing[i]) for i in peers], [(i, incoming[i]) for i in peers])
    return out


def exchange_rows(rows: torch.Tensor, group: Group, sends: list[int], recvs: list[int]) -> torch.Tensor:
    """Exchange rows all-to-all: send the next sends[i] rows to member i and receive recvs[i] rows from it.

    Rows are sent and returned in the order of the members.
    """
    return _ExchangeRows.apply(rows, group, sends, recvs)
