"""Collectives that gradients flow through (Megatron-LM's f and g, arXiv:1909.08053 section 3)."""

from typing import Any

import torch

from realhf.dist.group import Group


class _CopyToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.group.all_reduce(grad.contiguous().clone()), None


class _SumOverGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        return group.all_reduce(x.contiguous().clone())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def copy_to_group(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Identity whose gradient is summed over the group: before a split computation."""
    return x if group.size == 1 else _CopyToGroup.apply(x, group)


def sum_over_group(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Sum over the group whose gradient passes through: after a split computation."""
    return x if group.size == 1 else _SumOverGroup.apply(x, group)
