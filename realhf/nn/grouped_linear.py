"""grouped_linear: a linear layer in which each group of rows has its own weight.

Shape suffixes: R rows, L groups (experts), I and O input and output dims, N = L O.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from realhf.devices import half_precision
from realhf.devices.pinned import Download
from realhf.nn.grad_accumulation import collects


class RowGroups:
    """Consecutive groups of rows: where they end (ends_L, int32, on the rows' device) and, on the host, how
    many rows each has. Without gradients there may be rows after the last group, which are not computed."""

    def __init__(self, ends_L: Tensor, counts: Sequence[int] | None = None) -> None:
        """Without `counts`, they are computed when they are first asked for, which waits for a GPU."""
        self.ends_L = ends_L
        self._counts = counts
        self._ends: Download | None = None

    def download(self) -> None:
        """Begin to copy the ends to the host, so that it need not wait when it asks for `counts` later."""
        if self._counts is None and self._ends is None:
            self._ends = Download(self.ends_L)

    @cached_property
    def counts(self) -> list[int]:
        """The number of rows of each group."""
        if self._counts is not None:
            return list(self._counts)
        if self._ends is not None:
            counts: list[int] = np.diff(self._ends.wait(), prepend=0).tolist()
            return counts
        return self.ends_L.diff(prepend=self.ends_L.new_zeros(1)).tolist()


def grouped_linear(x_RI: Tensor, weight_NI: Tensor, groups: RowGroups) -> Tensor:
    """Return y_RO: the rows of each group times the transpose of its weight, which is O rows of `weight_NI`.

    Uses torch's grouped kernel, which is faster, where it takes the operands, as in bfloat16 on a GPU. Else
    computes one product per group, for which the host must know how many rows each group has.
    """
    weight_LOI = weight_NI.view(len(groups.ends_L), -1, x_RI.shape[1])
    by_kernel = _kernel_takes(x_RI) and takes_kernel(weight_LOI)
    if by_kernel and not (torch.is_grad_enabled() and collects(weight_NI)):
        return _by_kernel(x_RI, weight_LOI, groups)
    if by_kernel:
        groups.download()
    return _Grouped.apply(x_RI, weight_NI, groups, by_kernel)


def _by_kernel(x_RI: Tensor, weight_LOI: Tensor, groups: RowGroups) -> Tensor:
    x_RI, weight_LOI = (x if x.data_ptr() % 16 == 0 else x.clone() for x in (x_RI, weight_LOI))
    return F.grouped_mm(x_RI, weight_LOI.transpose(1, 2), offs=groups.ends_L)


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
    return x.dtype in dtypes and has_aligned_rows and has_base and not half_precision.needs_float32(x)


class _Grouped(torch.autograd.Function):
    """A product for each group.

    Autograd would make a gradient of full size for every slice, and the kernel rounds the gradient of a
    weight to 16 bits. So that gradient is computed by group. On a GPU the host has learned in the meantime
    how many rows each group has.
    """

    @staticmethod
    def forward(ctx: Any, x_RI: Tensor, weight_NI: Tensor, groups: RowGroups, by_kernel: bool) -> Tensor:
        ctx.save_for_backward(x_RI)
        ctx.settings = weight_NI, groups, by_kernel
        weight_LOI = weight_NI.view(len(groups.ends_L), -1, x_RI.shape[1])
        if by_kernel:
            return _by_kernel(x_RI, weight_LOI, groups)
        y_RO = x_RI.new_empty(len(x_RI), weight_LOI.shape[1])
        counts = groups.counts
        num_rows = sum(counts)
        pairs = zip(x_RI[:num_rows].split(counts), weight_LOI, y_RO[:num_rows].split(counts), strict=True)
        for x, weight, y in pairs:
            half_precision.product(x, weight.T, out=y)
        return y_RO

    @staticmethod
    def backward(ctx: Any, grad_RO: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (x_RI,) = ctx.saved_tensors
        weight_NI, groups, by_kernel = ctx.settings
        weight_LOI = weight_NI.view(len(groups.ends_L), -1, x_RI.shape[1])
        grad_x_RI = grad_weight_NI = None
        if ctx.needs_input_grad[0] and by_kernel:
            grad_x_RI = _by_kernel(grad_RO.contiguous(), weight_LOI.transpose(1, 2), groups)
        elif ctx.needs_input_grad[0]:
            counts = groups.counts
            grad_x_RI = torch.empty_like(x_RI)
            parts = zip(grad_RO.split(counts), weight_LOI, grad_x_RI.split(counts), strict=True)
            for grad, weight, grad_x in parts:
                half_precision.product(grad, weight, out=grad_x)
        if collects(weight_NI):
            weight_NI.add_products(grad_RO, x_RI, groups.counts)
        elif ctx.needs_input_grad[1]:
            grad_weight_NI = torch.zeros_like(weight_NI)
            parts = zip(
                grad_RO.split(groups.counts), x_RI.split(groups.counts), grad_weight_NI.view_as(weight_LOI),
                strict=True)
            for grad, x, grad_weight in parts:
                half_precision.product(grad.T, x, out=grad_weight)
        return grad_x_RI, grad_weight_NI, None, None
