"""RMSNorm (arXiv:1910.07467) and LayerNorm, whose weights add up their gradients in float32.

RMSNorm keeps only its input and one number per row for the backward pass. torch has a fused kernel on CUDA
only. On CPU it makes a dozen passes over memory and keeps their results; here the CPU processes as many
rows at a time as fit a core's cache.

Shape suffixes: H the dim that is normalised; p the rows that are processed at a time.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from realhf.devices.chunk_sizes import PART_NUMEL, block_numel
from realhf.models.model_config import ModelConfig
from realhf.models.param_spec import row_blocks
from realhf.nn.linear import collects
from realhf.nn.parameters import Weights


class Norm:
    """RMSNorm or LayerNorm over the last dim, or the identity where the family has no such norm."""

    def __init__(
        self, config: ModelConfig, weights: Weights, module: str, *, eps: float | None = None
    ) -> None:
        """`eps` stands for the epsilon of the model's other norms."""
        self.eps = config.norm_eps if eps is None else eps
        self.offset = config.norm_offset
        self.weight = weights.get(f"{module}.weight")
        self.bias = weights.get(f"{module}.bias")

    def __call__(self, x: Tensor) -> Tensor:
        if self.weight is None:
            return x
        if self.bias is not None:
            return layer_norm(x, self.weight, self.bias, self.eps)
        return rms_norm(x, self.weight, self.eps, offset=self.offset)


def rms_norm(x: Tensor, weight_H: Tensor, eps: float, *, offset: float = 0.0) -> Tensor:
    """Return x / rms(x) * (offset + weight) over the last dim, computed in at least float32."""
    wide = torch.promote_types(x.dtype, torch.float32)
    if x.is_cuda and _rounds_gradients(weight_H):
        return _Normed.apply(x, weight_H, None, eps, offset)
    if offset != 0 and (x.is_cuda or not torch.is_grad_enabled()):
        # Gemma adds in float32: in a narrower dtype, a weight near -1 or 0 would lose digits in the sum.
        weight_H = weight_H.to(wide) + offset
    is_small = not torch.is_grad_enabled() and x.numel() <= PART_NUMEL
    if x.is_cuda or is_small:
        return F.rms_norm(x.to(weight_H.dtype), weight_H.shape, weight_H, eps).to(x.dtype)
    if torch.is_grad_enabled():
        return _RmsNorm.apply(x, weight_H, eps, offset)
    return _normalise(x, weight_H, eps)[0]


def layer_norm(x: Tensor, weight_H: Tensor, bias_H: Tensor, eps: float) -> Tensor:
    if _rounds_gradients(weight_H):
        return _Normed.apply(x, weight_H, bias_H, eps, 0.0)
    return F.layer_norm(x, weight_H.shape, weight_H, bias_H, eps)


def _rounds_gradients(weight_H: Tensor) -> bool:
    """Return whether autograd would round the gradient of the weight before it is added up."""
    return torch.is_grad_enabled() and collects(weight_H) and weight_H.itemsize < 4


def _normalise(x: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the output, and 1 / rms of every row."""
    wide = torch.promote_types(x.dtype, torch.float32)
    weight_H = weight_H.to(wide)
    y = x.new_empty(x.shape)
    scale = x.new_empty((*x.shape[:-1], 1), dtype=wide)
    for rows in row_blocks(len(x), x[:1].numel(), PART_NUMEL):
        x_p = x[rows].to(wide)
        norm = torch.linalg.vector_norm(x_p, dim=-1, keepdim=True)
        torch.rsqrt(norm.square_().div_(x.shape[-1]).add_(eps), out=scale[rows])
        if wide == x.dtype:
            torch.mul(x_p, scale[rows], out=y[rows]).mul_(weight_H)
        else:
            y[rows] = x_p.mul_(scale[rows]).mul_(weight_H)
    return y, scale


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_H: Tensor, eps: float, offset: float) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        whole_H = weight_H.to(wide) + offset if offset != 0 else weight_H
        y, scale = _normalise(x, whole_H, eps)
        ctx.save_for_backward(x, weight_H, scale)
        ctx.weight = weight_H
        ctx.offset = offset
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        """Return (g - n mean(g n)) / rms and, for the weight, sum(grad n).

        Here n = x / rms and g = weight * grad.
        """
        x, narrow_H, scale = ctx.saved_tensors
        weight_H = narrow_H.to(scale.dtype) + ctx.offset
        grad_x = x.new_empty(x.shape)
        grad_weight_H = torch.zeros_like(weight_H)
        for rows in row_blocks(len(x), x[:1].numel(), PART_NUMEL):
            x_p = x[rows].to(scale.dtype)
            grad_p = grad_y[rows].to(scale.dtype)
            scale_p = scale[rows]
            product_pH = (x_p * grad_p).reshape(-1, x.shape[-1])
            mean = (product_pH @ weight_H).view_as(scale_p) * scale_p.pow(3).div_(-x.shape[-1])
            if ctx.needs_input_grad[1]:
                grad_weight_H.addmv_(product_pH.T, scale_p.reshape(-1))
            if grad_x.dtype == scale.dtype:
                torch.mul(grad_p, weight_H, out=grad_x[rows]).mul_(scale_p).addcmul_(x_p, mean)
            else:
                grad_x[rows] = (grad_p * weight_H).mul_(scale_p).addcmul_(x_p, mean)
        if collects(ctx.weight):
            ctx.weight.add_gradient(grad_weight_H)
            return grad_x, None, None, None
        return grad_x, grad_weight_H.to(narrow_H.dtype), None, None


class _Normed(torch.autograd.Function):
    """A norm by torch's kernels, LayerNorm if it has a bias; its 16-bit weights collect their gradients."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_H: Tensor, bias_H: Tensor | None, eps: float, offset: float
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.settings = weight_H, bias_H, eps, offset
        return _by_kernel(x, weight_H, bias_H, eps, offset)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        weight_H, bias_H, eps, offset = ctx.settings
        grad_weight_H = torch.zeros_like(weight_H, dtype=torch.float32)
        grad_bias_H = torch.zeros_like(grad_weight_H)
        numel = block_numel(is_cuda=True) if x.is_cuda else PART_NUMEL
        for rows in row_blocks(len(x), x[:1].numel(), numel):
            x_p = x[rows].float()
            normed_p = (
                F.rms_norm(x_p, weight_H.shape, None, eps) if bias_H is None
                else F.layer_norm(x_p, weight_H.shape, None, None, eps))
            grad_p = grad_y[rows].float()
            grad_weight_H += (grad_p * normed_p).flatten(0, -2).sum(0)
            if bias_H is not None:
                grad_bias_H += grad_p.flatten(0, -2).sum(0)
        weight_H.add_gradient(grad_weight_H)
        if bias_H is not None:
            bias_H.add_gradient(grad_bias_H)
        if not ctx.needs_input_grad[0]:
            return None, None, None, None, None
        with torch.enable_grad():  # The kernel's own backward pass, for the input alone.
            leaf = x.detach().requires_grad_()
            bias_H = None if bias_H is None else bias_H.detach()
            y = _by_kernel(leaf, weight_H.detach(), bias_H, eps, offset)
            (grad_x,) = torch.autograd.grad(y, leaf, grad_y)
        return grad_x, None, None, None, None


def _by_kernel(x: Tensor, weight_H: Tensor, bias_H: Tensor | None, eps: float, offset: float) -> Tensor:
    if bias_H is not None:
        return F.layer_norm(x, weight_H.shape, weight_H, bias_H, eps)
    if offset != 0:
        weight_H = weight_H.float() + offset
    return F.rms_norm(x.to(weight_H.dtype), weight_H.shape, weight_H, eps).to(x.dtype)
