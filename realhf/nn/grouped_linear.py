"""grouped_linear: a linear layer in which each group of rows has its own weight.

Shape suffixes: R rows, L groups (experts), I and O input and output dims.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from realhf.nn import half_matmul


class RowGroups:
    """Consecutive groups of rows: where they end (ends_L, int32, on the rows' device) and, on the host, how
    many rows each has. Without gradients there may be rows after the last group, which are not computed."""

    def __init__(self, ends_L: Tensor, counts: Sequence[int] | None = None) -> None:
        """Without `counts`, they are computed when they are first asked for, which waits for a GPU."""
        self.ends_L = ends_L
        self._counts = counts

    @cached_property
    def counts(self) -> list[int]:
        """The number of rows of each group."""
        if self._counts is not None:
            return list(self._counts)
        return self.ends_L.diff(prepend=self.ends_L.new_zeros(1)).tolist()


def grouped_linear(x_RI: Tensor, weight_LOI: Tensor, groups: RowGroups) -> Tensor:
    """Return y_RO: the rows of group i times the transpose of weight i.

    Uses torch's grouped kernel, which is faster, where it takes the operands, as in bfloat16 on a GPU. Else
    computes one product per group, for which the host must know how many rows each group has.
    """
    if _kernel_takes(x_RI) and takes_kernel(weight_LOI):
        x_RI, weight_LOI = (x if x.data_ptr() % 16 == 0 else x.clone() for x in (x_RI, weight_LOI))
        return F.grouped_mm(x_RI, weight_LOI.transpose(1, 2), offs=groups.ends_L)
    return _ByGroup.apply(x_RI, weight_LOI, groups.counts)


def takes_kernel(weight_LOI: Tensor) -> bool:
    """Return whether torch's grouped kernel takes the weights."""
    aligned = weight_LOI.shape[1] * weight_LOI.element_size() % 16 == 0  # For the rows of y's gradient.
    return aligned and _kernel_takes(weight_LOI)


def _kernel_takes(x: Tensor) -> bool:
    """Return whether torch's grouped kernel takes an operand, whose base and rows need 16-byte alignment.

    On CUDA, `grouped_linear` copies an operand whose base is not aligned, as the host would have to wait for
    the other way. Only a weight that lies behind a parameter of odd size can be such an operand; no shipped
    model has one (tests/models/test_shipped_models.py). On CUDA the kernel is used in bfloat16 only, because
    with other dtypes torch waits for the ends of the groups.
    """
    dtypes = (torch.bfloat16,) if x.is_cuda else (torch.bfloat16, torch.float16, torch.float32)
    has_aligned_rows = x.shape[-1] * x.element_size() % 16 == 0
    has_base = x.is_cuda or x.data_ptr() % 16 == 0
    return x.dtype in dtypes and has_aligned_rows and has_base and not half_matmul.needs_float32(x)


class _ByGroup(torch.autograd.Function):
    """A product for each group. Autograd would make a gradient of full size for every slice."""

    @staticmethod
    def forward(ctx: Any, x_RI: Tensor, weight_LOI: Tensor, counts: list[int]) -> Tensor:
        ctx.save_for_backward(x_RI, weight_LOI)
        ctx.counts = counts
        y_RO = x_RI.new_empty(len(x_RI), weight_LOI.shape[1])
        num_rows = sum(counts)
        groups = zip(x_RI[:num_rows].split(counts), weight_LOI, y_RO[:num_rows].split(counts), strict=True)
        for x, weight, y in groups:
            half_matmul.product(x, weight.T, out=y)
        return y_RO

    @staticmethod
    def backward(ctx: Any, grad_RO: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_RI, weight_LOI = ctx.saved_tensors
        grads = grad_RO.split(ctx.counts)
        grad_x_RI = grad_weight_LOI = None
        if ctx.needs_input_grad[0]:
            grad_x_RI = torch.empty_like(x_RI)
            for grad, weight, grad_x in zip(grads, weight_LOI, grad_x_RI.split(ctx.counts), strict=True):
                half_matmul.product(grad, weight, out=grad_x)
        if ctx.needs_input_grad[1]:
            grad_weight_LOI = torch.zeros_like(weight_LOI)
            for grad, x, grad_weight in zip(grads, x_RI.split(ctx.counts), grad_weight_LOI, strict=True):
                half_matmul.product(grad.T, x, out=grad_weight)
        return grad_x_RI, grad_weight_LOI, None
