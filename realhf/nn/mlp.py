"""Mlp: a gated or plain MLP, and the activations of MLPs and experts, with their gradients.

Shape suffixes: T tokens, H hidden, F width of the MLP on this rank.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from realhf.devices import half_precision
from realhf.devices.chunk_sizes import PART_NUMEL
from realhf.distributed.group import Group, copy_to_group, sum_over_group
from realhf.models.model_config import ModelConfig
from realhf.models.param_spec import row_blocks
from realhf.nn.fused import chains_of, takes_bias
from realhf.nn.linear import add_bias, collects
from realhf.nn.lora import Adapted, Adapter, adapted_linear
from realhf.nn.parameters import Weights

Activation = Callable[[Tensor], Tensor]
"""up_TF -> hidden_TF. In a gated MLP the first half of F is the gate, and hidden_TF is half as wide."""


class ElementwiseFunction(NamedTuple):
    """An element-wise function and its backward pass: (gradient of output, input) -> gradient of input."""

    compute: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]
    name: str  # That of the kernels of nn/fused.py.


_SILU = ElementwiseFunction(F.silu, torch.ops.aten.silu_backward, "silu")
_GELU = ElementwiseFunction(F.gelu, torch.ops.aten.gelu_backward, "gelu")
_GELU_TANH = ElementwiseFunction(
    partial(F.gelu, approximate="tanh"), partial(torch.ops.aten.gelu_backward, approximate="tanh"),
    "gelu_tanh")
ACTIVATIONS = {
    "silu": _SILU, "gelu": _GELU, "gelu_new": _GELU_TANH, "gelu_pytorch_tanh": _GELU_TANH,
    "relu": ElementwiseFunction(F.relu, partial(torch.ops.aten.threshold_backward, threshold=0), "relu"),
}


class Mlp:
    """A gated or plain MLP, split by width. Its weights' names begin with `prefix`."""

    def __init__(
        self, config: ModelConfig, weights: Weights, tp: Group, adapters: Adapted, *, prefix: str = ""
    ) -> None:
        self.tp = tp
        self.config = config
        up = f"{prefix}{'gate_up' if config.gated else 'up'}"
        self.up = weights[f"{up}.weight"]
        self.up_bias = weights.get(f"{up}.bias")
        self.down = weights[f"{prefix}down.weight"]
        self.down_bias = weights.get(f"{prefix}down.bias")
        self.up_adapter = adapters.get(f"{up}.weight")
        self.down_adapter = adapters.get(f"{prefix}down.weight")

    def __call__(self, x_TH: Tensor, _: object = None) -> Tensor:
        up_TF = adapted_linear(copy_to_group(x_TH, self.tp), self.up, self.up_bias, self.up_adapter)
        if takes_bias(up_TF, self.tp):
            return adapted_linear(
                activation(self.config)(up_TF), self.down, self.down_bias, self.down_adapter)
        y_TH = activated_linear(self.config, up_TF, self.down, self.down_adapter)
        return add_bias(sum_over_group(y_TH, self.tp), self.down_bias)


def activation(config: ModelConfig) -> Activation:
    function = ACTIVATIONS[config.activation]
    gated = config.gated

    def activate(up_TF: Tensor) -> Tensor:
        if torch.is_grad_enabled() and up_TF.requires_grad:
            return _Activate.apply(up_TF, function, gated)
        return _activate(up_TF, function, gated)

    return activate


def activated_linear(
    config: ModelConfig, up_TF: Tensor, weight_HF: Tensor, adapter: Adapter | None = None
) -> Tensor:
    """Return the down-projection of the activated `up_TF`; only `up_TF` is kept for the backward pass."""
    if torch.is_grad_enabled() and collects(weight_HF) and adapter is None:
        return _ActivatedLinear.apply(up_TF, weight_HF, ACTIVATIONS[config.activation], config.gated)
    return adapted_linear(activation(config)(up_TF), weight_HF, adapter=adapter)


def _rows_at_a_time(x_TF: Tensor) -> list[slice]:
    return list(row_blocks(len(x_TF), x_TF.shape[1], x_TF.numel() if x_TF.is_cuda else PART_NUMEL))


def _activate(up_TF: Tensor, function: ElementwiseFunction, gated: bool) -> Tensor:
    if not gated:
        return function.compute(up_TF)
    if (chains := chains_of(up_TF)) is not None:
        return chains.gated(up_TF, function.name)
    gate_TF, up_TF = up_TF.chunk(2, dim=1)
    blocks = _rows_at_a_time(up_TF)
    if len(blocks) == 1:
        return function.compute(gate_TF).mul_(up_TF)
    out_TF = up_TF.new_empty(up_TF.shape)
    for rows in blocks:
        torch.mul(function.compute(gate_TF[rows]), up_TF[rows], out=out_TF[rows])
    return out_TF


def _gradient(
    grad_TF: Tensor, up_TF: Tensor, function: ElementwiseFunction, gated: bool, *, recompute: bool = False
) -> Tensor:
    """Return the gradient of `up_TF`, given the gradient of the output of `_activate`.

    With `recompute`, that output is then written over `grad_TF`.
    """
    if not gated:
        out_TF = function.backward(grad_TF, up_TF)
        if recompute:
            grad_TF.copy_(function.compute(up_TF))
        return out_TF
    if (chains := chains_of(up_TF)) is not None:
        return chains.gated_backward(
            grad_TF if recompute else grad_TF.clone(memory_format=torch.contiguous_format), up_TF,
            function.name)
    out_TF = torch.empty_like(up_TF)
    gate_TF, up_TF = up_TF.chunk(2, dim=1)
    grad_gate_TF, grad_up_TF = out_TF.chunk(2, dim=1)
    for rows in _rows_at_a_time(grad_TF):
        activated = function.compute(gate_TF[rows])
        torch.mul(activated, grad_TF[rows], out=grad_up_TF[rows])
        grad_gate_TF[rows] = function.backward(grad_TF[rows] * up_TF[rows], gate_TF[rows])
        if recompute:
            torch.mul(activated, up_TF[rows], out=grad_TF[rows])
    return out_TF


class _Activate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, up_TF: Tensor, function: ElementwiseFunction, gated: bool) -> Tensor:
        ctx.save_for_backward(up_TF)
        ctx.settings = function, gated
        return _activate(up_TF, function, gated)

    @staticmethod
    def backward(ctx: Any, grad_TF: Tensor) -> tuple[Tensor, None, None]:
        return _gradient(grad_TF, *ctx.saved_tensors, *ctx.settings), None, None


class _ActivatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, up_TF: Tensor, weight_HF: Tensor, function: ElementwiseFunction, gated: bool
    ) -> Tensor:
        ctx.save_for_backward(up_TF)
        ctx.weight = weight_HF
        ctx.settings = function, gated
        return half_precision.affine(_activate(up_TF, function, gated), weight_HF)

    @staticmethod
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor, None, None, None]:
        hidden_TF = half_precision.product(grad_TH, ctx.weight)  # Its gradient, which `_gradient` overwrites.
        grad_TF = _gradient(hidden_TF, *ctx.saved_tensors, *ctx.settings, recompute=True)
        ctx.weight.add_product(grad_TH, hidden_TF)
        return grad_TF, None, None, None
