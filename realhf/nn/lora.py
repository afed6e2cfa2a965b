"""LoRA adapters of the linear layers of a Transformer's blocks.

Shape suffixes: T tokens; I and O inputs and outputs of a layer on this rank, R rank.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from realhf.devices import half_precision
from realhf.devices.half_precision import needs_float32
from realhf.distributed.world import ParallelGroups
from realhf.models.lora import LoraConfig, adapter_spec
from realhf.models.model_config import ModelConfig
from realhf.nn.linear import Int8Weight, Weight, collects, linear
from realhf.nn.parameters import ShardedParameters


def _add_product(y_TO: Tensor, x_TR: Tensor, weight_OR: Tensor, scale: float) -> None:
    """Add scale x W^T to y in place."""
    if needs_float32(x_TR):
        y_TO.add_(half_precision.affine(x_TR, weight_OR), alpha=scale)
    else:
        y_TO.addmm_(x_TR, weight_OR.T, alpha=scale)


class _AddProduct(torch.autograd.Function):
    """Adds scale x W^T to y in place, for a weight that adds up its gradients itself."""

    @staticmethod
    def forward(ctx: Any, y_TO: Tensor, x_TR: Tensor, weight_OR: Weight, scale: float) -> Tensor:
        ctx.save_for_backward(x_TR)
        ctx.settings = weight_OR, scale
        ctx.mark_dirty(y_TO)
        _add_product(y_TO, x_TR, weight_OR, scale)
        return y_TO

    @staticmethod
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (x_TR,) = ctx.saved_tensors
        weight_OR, scale = ctx.settings
        weight_OR.add_product(grad_TO, x_TR, scale=scale)
        return grad_TO, half_precision.product(grad_TO, weight_OR) * scale, None, None


class Adapter:
    """The adapters of one weight, which may hold several linear layers side by side (such as q, k and v).

    `down` stacks the layers' A by rows, or is the one A that they share. `ups` lists, for each layer, its B
    (None if it has no adapter) and its number of outputs. If the weight's rows are split over tp, x A^T is
    complete on every rank; if its columns are split, x A^T is a partial sum, like the layer's output.
    """

    def __init__(
        self, weight: Tensor, down: Tensor, ups: list[tuple[Tensor | None, int]], *, scale: float
    ) -> None:
        self.weight = weight
        self._down = down
        self._scale = scale
        self._ups: list[tuple[slice, slice, Tensor]] = []
        """For each layer with an adapter: its columns of x A^T, its outputs, and its B."""
        rank, output = 0, 0
        for up, num_outputs in ups:
            if up is not None:
                self._ups.append((slice(rank, rank + up.shape[1]), slice(output, output + num_outputs), up))
                rank += up.shape[1]
            output += num_outputs
        assert (rank, output) == (len(down), len(weight))
        self.merged_weight: Tensor | None = None
        """A copy of the weight with the adapters merged in; None unless passes are to compute with it."""
        self._memory: Tensor | None = None
        """The memory of merged weights. It stays the same, because recorded passes read it."""

    def __call__(self, x_TI: Tensor, bias: Tensor | None) -> Tensor:
        by_ours = needs_float32(x_TI) or isinstance(self.weight, Int8Weight)
        multiply = linear if by_ours else F.linear
        if self.merged_weight is not None:
            return multiply(x_TI, self.merged_weight, bias)
        reads_packed = isinstance(self.weight, Weight) and self.weight.packs and not torch.is_grad_enabled()
        y_TO = (linear if reads_packed else multiply)(x_TI, self.weight, bias)
        is_trained = torch.is_grad_enabled() and collects(self._down)
        x_TR = (linear if is_trained else multiply)(x_TI, self._down)
        for ranks, outputs, up_OR in self._ups:
            layer_TO = y_TO if len(up_OR) == len(self.weight) else y_TO[:, outputs]
            if is_trained:
                _AddProduct.apply(layer_TO, x_TR[:, ranks], up_OR, self._scale)
            else:
                _add_product(layer_TO, x_TR[:, ranks], up_OR, self._scale)
        return y_TO

    @torch.no_grad()
    def merge(self) -> None:
        """Compute with W + scale B A until `merged_weight` is None; its memory stays until `release`."""
        if self._memory is None:
            self._memory = torch.empty_like(self.weight)
        self._memory.copy_(self._sum())
        self.merged_weight = self._memory

    @property
    def merged_bytes(self) -> int:
        return 0 if self._memory is None else self._memory.nbytes

    def release(self) -> None:
        assert self.merged_weight is None, "the merged weight is in use"
        self._memory = None

    @torch.no_grad()
    def merged(self) -> Tensor:
        """Return W + scale B A."""
        return self._sum().to(self.weight.dtype) if self.merged_weight is None else self.merged_weight

    def _sum(self) -> Tensor:
        """Return W + scale B A, computed in at least float32."""
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        sum_OI = self.weight.to(wide, copy=True)
        down_RI = self._down.to(wide)
        for ranks, outputs, up_OR in self._ups:
            sum_OI[outputs].addmm_(up_OR.to(wide), down_RI[ranks], alpha=self._scale)
        return sum_OI


Adapted = Mapping[str, Adapter]
"""Short name ("qkv.weight") -> the adapter of that weight; empty without LoRA."""


def adapted_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, adapter: Adapter | None = None
) -> Tensor:
    return linear(x, weight, bias) if adapter is None else adapter(x, bias)


class Adapters(ShardedParameters):
    """The adapters of a model, sharded like its layers, and the score head that is trained with them."""

    def __init__(
        self, config: ModelConfig, lora: LoraConfig, groups: ParallelGroups, *, dtype: torch.dtype,
        memory: Tensor | None = None,
    ) -> None:
        super().__init__(adapter_spec(config, lora), groups, dtype=dtype, memory=memory)
        self.lora = lora

    def of_weights(self, base: ShardedParameters, layer: int) -> dict[str, Adapter]:
        """Return short name ("qkv.weight") -> the adapter of that weight of a layer."""
        factors = self.of_layer(layer)
        adapters = {}
        for weight_name, weight in base.of_layer(layer).items():
            module, _, kind = weight_name.rpartition(".")
            if kind != "weight" or f"{module}.lora_A" not in factors:
                continue
            ups = [(factors.get(f"{module}.lora_B"), len(weight))]
            if ups[0][0] is None:
                fused = base.fused(layer, weight_name).items()
                ups = [(factors.get(name.replace(".weight", ".lora_B")), rows) for name, rows in fused]
            adapters[weight_name] = Adapter(
                weight, factors[f"{module}.lora_A"], list(ups), scale=self.lora.scale)
        return adapters
