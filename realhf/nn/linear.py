"""Weight, and the linear layers, embeddings and biases that add its gradients to the gradient buffer.

Autograd would allocate a gradient for every use of a weight and then add it to the buffer. Instead, linear
layers, experts, embeddings, norms and biases add to the buffer themselves, and the first gradient of a step
overwrites it. So no gradient of a weight's size is ever allocated (Megatron-LM's gradient accumulation
fusion). The gradients of 16-bit weights are computed and added up in float32: autograd would round that of
each micro-batch to 16 bits first.

Shape suffixes: T tokens, H hidden, O and I outputs and inputs of a layer.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor

from realhf.attention.choose import int8_refusal
from realhf.devices import half_precision
from realhf.devices.chunk_sizes import CUDA_PARTS, INT8_NUMEL, SMALL_PRODUCT
from realhf.devices.half_precision import widened
from realhf.models.param_spec import row_blocks

_ROW_MULTIPLE = 32
"""Without gradients, bfloat16 rows on CPU are padded to a multiple of this: torch compiles a product anew for
every number of rows, and that changes from step to step in generation."""


_PACKED_ROWS = 512
"""The number of rows for which weights are packed; products of other numbers of rows read the same order."""
_CHECKED_SHAPES = ((32, 48), (577, 461))
"""Shapes of a small weight, and of one that is large enough to be packed and that no block divides."""


class PackedWeight:
    """A copy of a weight in the order in which a CPU's products read it, without gradients.

    Products of few rows wait for memory, and read this several times as fast as a plain matrix. Where
    `needs_float32`, the copy is in float32, and its products are rounded once, as those of 16-bit units are.
    """

    def __init__(self, weight_OI: Tensor) -> None:
        self._shape = weight_OI.shape
        self._itemsize = self.itemsize(weight_OI.dtype)
        self._in_float32 = self._itemsize == 4
        if self._in_float32:
            self._packed = torch.ops.mkl._mkl_reorder_linear_weight(weight_OI.float(), _PACKED_ROWS)
            # The operator asks for its shape only.
            self._like = torch.empty((), dtype=torch.float32).expand(self._shape)
        else:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI, _PACKED_ROWS)

    @staticmethod
    def itemsize(dtype: torch.dtype) -> int:
        """Return the bytes of an element of a packed weight of this dtype."""
        return 4 if half_precision.needs_float32(torch.empty(0, dtype=dtype)) else dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """The bytes that the copy takes; MKL also reserves addresses, which take no memory."""
        return self._shape.numel() * self._itemsize

    def product(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        """Return y_TO = x W^T + b."""
        if not len(x_TI):
            return x_TI.new_empty(0, self._shape[0])
        if not self._in_float32:
            padding = -len(x_TI) % _ROW_MULTIPLE
            x = F.pad(x_TI, (0, 0, 0, padding)) if padding else x_TI
            return torch.ops.mkldnn._linear_pointwise(x, self._packed, bias_O, "none", [], "")[: len(x_TI)]
        bias_O = None if bias_O is None else bias_O.float()
        y_TO = torch.ops.mkl._mkl_linear(x_TI.float(), self._packed, self._like, bias_O, len(x_TI))
        return y_TO.to(x_TI.dtype)


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Return whether products on this CPU are faster with packed weights of this dtype, and are right."""
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return False
    in_float32 = PackedWeight.itemsize(dtype) == 4
    if not (torch.backends.mkl.is_available() if in_float32 else dtype == torch.bfloat16):
        return False
    try:
        return all(_multiplies_packed(dtype, *shape) for shape in _CHECKED_SHAPES)
    except RuntimeError:  # oneDNN has no such product for the instructions that this process may use.
        return False


def _multiplies_packed(dtype: torch.dtype, num_outputs: int, num_inputs: int) -> bool:
    """Return whether products with a packed weight of this shape are those with a plain one."""
    weight = torch.randn(num_outputs, num_inputs, generator=torch.Generator().manual_seed(0)).to(dtype)
    x = torch.randn(2 * _PACKED_ROWS, num_inputs, generator=torch.Generator().manual_seed(1)).to(dtype)
    packed = PackedWeight(weight)
    expected = x.float() @ weight.float().T
    return all(  # MKL says nothing about numbers of rows other than those for which it has packed.
        torch.allclose(packed.product(x[:count], None).float(), expected[:count], rtol=2**-7, atol=1e-2)
        for count in (1, 3, 64, 2 * _PACKED_ROWS))


class Weight(torch.nn.Parameter):
    """A parameter, frozen at first, that sums up its gradients of a step."""

    total: Tensor | None = None
    """The sum of the gradients, a view of the gradient buffer; None before `collect`."""
    is_empty = True
    """True before the first gradient of a step: until then, the values of `total` have no meaning."""
    packs = False
    """Whether products without gradients use a packed copy, made by the first of them."""
    _packed: PackedWeight | None = None

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of the hidden states that the weight is multiplied with."""
        return self.dtype

    def collect(self, total: Tensor) -> None:
        """Make the parameter trainable and add its gradients to `total` from now on."""
        self.total = total
        self.requires_grad_(True).register_post_accumulate_grad_hook(_move)

    def set_packs(self, packs: bool) -> None:
        """Make a packed copy when one is needed, or drop it: no copy may outlast a change of the weight."""
        self.packs = packs
        self._packed = None

    @property
    def packed_bytes(self) -> int:
        return 0 if self._packed is None else self._packed.num_bytes

    def packed(self) -> PackedWeight:
        if self._packed is None:
            self._packed = PackedWeight(self.detach())
        return self._packed

    def add_gradient(self, grad: Tensor) -> None:
        assert self.total is not None
        if self.is_empty:
            self.total.copy_(grad)
        else:
            self.total.add_(grad)
        self.is_empty = False

    def add_product(self, grad_TO: Tensor, x_TI: Tensor, *, scale: float = 1.0) -> None:
        """Add scale grad^T x to the sum."""
        assert self.total is not None
        half_precision.add_product(self.total, grad_TO, x_TI, is_empty=self.is_empty, scale=scale)
        self.is_empty = False

    def add_products(self, grad_RO: Tensor, x_RI: Tensor, counts: Sequence[int]) -> None:
        """Add grad^T x of each group of rows, which have these counts, to its rows of the sum."""
        self.finish()
        assert self.total is not None
        total_LOI = self.total.view(len(counts), -1, x_RI.shape[1])
        for total, grad, x in zip(total_LOI, grad_RO.split(counts), x_RI.split(counts), strict=True):
            if len(x):
                half_precision.add_product(total, grad, x, is_empty=False)

    def add_sum(self, grad: Tensor) -> None:
        """Add the sum over all dims but the last, the gradient of a bias."""
        assert self.total is not None
        self.add_gradient(grad.flatten(0, -2).sum(0, dtype=self.total.dtype))

    def add_rows(self, index_T: Tensor, rows_TI: Tensor) -> None:
        """Add rows to the rows of the sum at these indices."""
        self.finish()
        assert self.total is not None
        add_rows(self.total, index_T, rows_TI.to(self.total.dtype))

    def finish(self) -> None:
        """Set the sum to 0 if the step had no gradient."""
        assert self.total is not None
        if self.is_empty:
            self.total.zero_()
        self.is_empty = False


class Int8Weight(Weight):
    """A frozen weight q s in int8, with a scale for each output channel (realloc/quantise.py).

    Whole numbers up to 127 are exact in every dtype. So x W^T = (x q^T) s is computed as a product in the
    dtype of x, whose outputs are scaled; in float16, where they could be too large, q is.
    """

    scale_O: Tensor

    @property
    def compute_dtype(self) -> torch.dtype:
        return self.scale_O.dtype

    def dequantised(self) -> Tensor:
        """Return q s in the dtype of the hidden states."""
        return self.data.to(self.compute_dtype).mul_(self.scale_O[:, None])

    def product(self, x_TI: Tensor, outputs: slice = slice(None)) -> Tensor:
        """Return x W^T for some outputs; without gradients."""
        values_OI = self.data[outputs]
        scale_O = self.scale_O[outputs]
        num_rows, num_inputs = x_TI.shape
        device_type = "cuda" if x_TI.is_cuda else "cpu"
        refusal = int8_refusal(device_type, x_TI.dtype, num_rows=num_rows, num_inputs=num_inputs)
        if refusal is None and num_rows and x_TI.is_cuda:
            from realhf.nn.int8_kernel import int8_product

            return int8_product(x_TI, values_OI, scale_O)
        if refusal is None and num_rows:
            return torch._weight_int8pack_mm(x_TI.contiguous(), values_OI, scale_O)
        y_TO = x_TI.new_empty(len(x_TI), len(values_OI))
        block_numel = INT8_NUMEL * (CUDA_PARTS if x_TI.is_cuda else 1)
        scales_outputs = x_TI.dtype != torch.float16  # There x q^T may exceed the range of the dtype.
        for rows in row_blocks(len(values_OI), values_OI.shape[1], block_numel):
            weight_OI = values_OI[rows].to(x_TI.dtype)
            if not scales_outputs:
                weight_OI.mul_(scale_O[rows, None])
            y_TO[:, rows] = half_precision.affine(x_TI, weight_OI)
        return y_TO.mul_(scale_O) if scales_outputs else y_TO


def converted_like(weight: Tensor) -> Tensor:
    """Return a tensor of the shape and dtype with which products are computed; its values may have no
    meaning."""
    if isinstance(weight, Int8Weight):
        return weight.scale_O.new_empty(1).expand(weight.shape)
    return weight


def collects(weight: Tensor) -> TypeGuard[Weight]:
    """Return whether a weight sums up its gradients itself."""
    return isinstance(weight, Weight) and weight.total is not None and weight.requires_grad


def _move(weight: Any) -> None:
    """Add a gradient that autograd has computed. Autograd also calls this when it has computed none."""
    if weight.grad is not None:
        weight.add_gradient(weight.grad)
        weight.grad = None


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return y_TO = x W^T + b."""
    if isinstance(weight_OI, Int8Weight):
        return add_bias(weight_OI.product(x_TI), bias_O)
    if torch.is_grad_enabled() and (collects(weight_OI) or half_precision.needs_float32(x_TI)):
        return _Linear.apply(x_TI, weight_OI, bias_O)
    if isinstance(weight_OI, Weight) and weight_OI.packs and not torch.is_grad_enabled():
        return weight_OI.packed().product(x_TI, bias_O)
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
    if torch.is_grad_enabled() and collects(weight_VH):
        return _Embedding.apply(ids_T, weight_VH)
    return F.embedding(ids_T, weight_VH)


def add_bias(x: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return x
    if torch.is_grad_enabled() and collects(bias):
        return _AddBias.apply(x, bias)
    return x + bias


def wide(weight: Tensor) -> Tensor:
    """Return the weight in at least float32; its gradient is added up in that dtype."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    if dtype != weight.dtype and torch.is_grad_enabled() and collects(weight):
        return _Wide.apply(weight)
    return weight.to(dtype)


def add_rows(x: Tensor, index_T: Tensor, rows_T: Tensor) -> Tensor:
    """Add rows in place to the rows of `x` at these indices, and return `x`."""
    if x.is_cuda:  # On CUDA index_add_ adds in any order: runs would differ.
        return x.index_put_((index_T,), rows_T, accumulate=True)
    return x.index_add_(0, index_T, rows_T)


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


class _AddBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Weight) -> Tensor:
        ctx.bias = bias
        return x + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.bias.add_sum(grad)
        return grad, None


class _Wide(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Weight) -> Tensor:
        ctx.weight = weight
        assert weight.total is not None
        return weight.to(weight.total.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        ctx.weight.add_gradient(grad)
