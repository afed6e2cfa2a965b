"""Linear layers and embeddings that add the gradients of their weights to the gradient buffer.

Shape suffixes: T tokens, H hidden, O and I outputs and inputs of a layer.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from realhf.devices import half_precision
from realhf.devices.chunk_sizes import SMALL_PRODUCT
from realhf.devices.half_precision import widened
from realhf.nn.grad_accumulation import Weight, collects

_ROW_MULTIPLE = 32
"""Without gradients, bfloat16 rows on CPU are padded to a multiple of this: torch compiles a product anew for
every number of rows, and that changes from step to step in generation."""


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return y_TO = x W^T + b."""
    if torch.is_grad_enabled() and (collects(weight_OI) or half_precision.needs_float32(x_TI)):
        return _Linear.apply(x_TI, weight_OI, bias_O)
    is_padded = x_TI.dtype == torch.bfloat16 and not (x_TI.is_cuda or torch.is_grad_enabled())
    if is_padded and not half_precision.needs_float32(x_TI):
        return _bfloat16_linear(x_TI, weight_OI, bias_O)
    return half_precision.affine(x_TI, weight_OI, bias_O)


def _bfloat16_linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """Return x W^T + b for bfloat16 on CPU. Both ways to compute it add up in float32."""
    if len(x_TI) * weight_OI.numel() <= SMALL_PRODUCT:
        bias_O = None if bias_O is None else bias_O.float()
        return F.linear(x_TI.float(), weight_OI.float(), bias_O).to(x_TI.dtype)
    padding = -len(x_TI) % _ROW_MULTIPLE
    if not padding:
        return F.linear(x_TI, weight_OI, bias_O)
    return F.linear(F.pad(x_TI, (0, 0, 0, padding)), weight_OI, bias_O)[: len(x_TI)]


def embedding(ids_T: Tensor, weight_VH: Tensor) -> Tensor:
    """Return the rows of the weight at these ids."""
    if torch.is_grad_enabled() and collects(weight_VH):
        return _Embedding.apply(ids_T, weight_VH)
    return F.embedding(ids_T, weight_VH)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_TI)
        ctx.weight = weight_OI
        ctx.bias = bias_O
        return half_precision.affine(x_TI, weight_OI, bias_O)

    @staticmethod
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, ...]:
        (x_TI,) = ctx.saved_tensors
        weight_OI = ctx.weight
        grad_OI = None
        if collects(weight_OI):
            weight_OI.add_product(grad_TO, x_TI)
        elif ctx.needs_input_grad[1]:
            grad_OI = (widened(grad_TO).T @ widened(x_TI)).to(weight_OI.dtype)
        grad_O = None
        if ctx.bias is not None and collects(ctx.bias):
            ctx.bias.add_sum(grad_TO)
        elif ctx.needs_input_grad[2]:
            grad_O = grad_TO.sum(0)
        grad_x = half_precision.product(grad_TO, weight_OI) if ctx.needs_input_grad[0] else None
        return grad_x, grad_OI, grad_O


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids_T: Tensor, weight_VH: Weight) -> Tensor:
        ctx.save_for_backward(ids_T)
        ctx.weight = weight_VH
        return F.embedding(ids_T, weight_VH)

    @staticmethod
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[None, None]:
        ctx.weight.add_rows(ctx.saved_tensors[0], grad_TH)
        return None, None
