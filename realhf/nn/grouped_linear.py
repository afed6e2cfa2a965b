"""grouped_linear: a linear layer in which each group of rows has its own weight.

Shape suffixes: R rows, L groups (experts), I and O input and output dims.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from realhf.nn import half_matmul


def grouped_linear(x_RI: Tensor, weight_LOI: Tensor, ends_L: Tensor) -> Tensor:
    """Return y_RO: rows ends_L[i - 1] to ends_L[i] of `x_RI` times the transpose of weight i.

    Uses torch's grouped kernel, which is faster, where it takes the operands; else one product per group.
    """
    aligned = weight_LOI.shape[1] * weight_LOI.element_size() % 16 == 0  # For the rows of y's gradient.
    if aligned and _kernel_takes(x_RI) and _kernel_takes(weight_LOI):
        return F.grouped_mm(x_RI, weight_LOI.transpose(1, 2), offs=ends_L)
    return _ByGroup.apply(x_RI, weight_LOI, ends_L.diff(prepend=ends_L.new_zeros(1)).tolist())


def _kernel_takes(x: Tensor) -> bool:
    """Return whether torch's grouped kernel takes an operand: its rows and base must be aligned to 16 bytes.

    On CUDA it takes only bfloat16 here, because with other dtypes the host waits for the ends.
    """
    dtypes = (torch.bfloat16,) if x.is_cuda else (torch.bfloat16, torch.float16, torch.float32)
    is_aligned = x.shape[-1] * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0
    return x.dtype in dtypes and is_aligned and not half_matmul.needs_float32(x)


class _ByGroup(torch.autograd.Function):
    """A product for each group. Autograd would make a gradient of full size for every slice."""

    @staticmethod
    def forward(ctx: Any, x_RI: Tensor, weight_LOI: Tensor, counts: list[int]) -> Tensor:
        ctx.save_for_backward(x_RI, weight_LOI)
        ctx.counts = counts
        y_RO = x_RI.new_empty(len(x_RI), weight_LOI.shape[1])
        for x, weight, y in zip(x_RI.split(counts), weight_LOI, y_RO.split(counts), strict=True):
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
