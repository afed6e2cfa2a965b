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
