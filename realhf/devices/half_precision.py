"""16-bit numbers: products that are computed in float32, and float32 values kept as sums of 16-bit terms.

A CPU without units for 16-bit numbers multiplies them one by one, which is far slower than float32. On
Intel CPUs without AMX, products in bfloat16 are half as fast as in float32 (190 against 350 GFLOP/s). So the
operands are converted to float32, as many rows at a time as fit a core's cache, and the results are rounded.
The head of a model with `float32_head` computes in float32 on every device, and does not round. Nor do the
gradients of weights, which are added up in float32 (see `add_product`).

The terms of `split_into` are stored, moved and averaged like all other parameters. In bfloat16, three terms
together hold all 24 bits of a float32; in a wider dtype, the first term alone does. In float16, bits below
2^-25 are lost.

Shape suffixes: T tokens, O and I outputs and inputs of a layer; t some of the tokens, o some of the outputs.
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from realhf.devices.chunk_sizes import CUDA_PARTS, WIDENED_TOKENS_NUMEL, WIDENED_WEIGHT_NUMEL, block_numel
from realhf.models.param_spec import row_blocks


def needs_float32(x: Tensor) -> bool:
    """Return whether products of this tensor's dtype are slow on its device."""
    return x.dtype in (torch.bfloat16, torch.float16) and x.device.type == "cpu" and not _has_units(x.dtype)


@cache
def _has_units(dtype: torch.dtype) -> bool:
    """Return whether oneDNN multiplies this dtype on this CPU, and faster than float32.

    ONEDNN_MAX_CPU_ISA can forbid it.
    """
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        is_fast = torch.cpu._is_amx_tile_supported() or not _is_intel()
        return is_fast and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.ops.mkldnn._is_mkldnn_fp16_supported()


def _is_intel() -> bool:
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def widened(x: Tensor) -> Tensor:
    """Return the tensor in float32 if products of its dtype are slow, else unchanged; keeps gradients."""
    return x.float() if needs_float32(x) else x


def affine(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return x W^T + b; without gradients if `needs_float32`."""
    if not needs_float32(x_TI):
        return F.linear(x_TI, weight_OI, bias_O)
    y_TO = x_TI.new_empty(len(x_TI), len(weight_OI))
    for tokens in _tokens(x_TI, x_TI.shape[1]):
        x_tI = x_TI[tokens].float()
        for outputs in _outputs(weight_OI, len(x_tI)):
            y_to = x_tI @ weight_OI[outputs].float().T
            y_TO[tokens, outputs] = y_to if bias_O is None else y_to.add_(bias_O[outputs])
    return y_TO


def affine_float32(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """Return x W^T in float32, for operands of 16 bits; without gradients.

    The product of two 16-bit numbers is exact in float32. So a GPU's 16-bit units, which add the products up
    in float32, need no converted operands.
    """
    if x_TI.is_cuda:
        return torch.mm(x_TI, weight_OI.T, out_dtype=torch.float32)
    y_TO = x_TI.new_empty(len(x_TI), len(weight_OI), dtype=torch.float32)
    for tokens in _tokens(x_TI, x_TI.shape[1]):
        x_tI = x_TI[tokens].float()
        for outputs in _outputs(weight_OI, len(x_tI)):
            torch.mm(x_tI, weight_OI[outputs].float().T, out=y_TO[tokens, outputs])
    return y_TO


def product(x_TO: Tensor, weight_OI: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return x W, written to `out` if that is given; without gradients.

    If x is in float32 and W is not, the product is computed in float32.
    """
    y_TI = x_TO.new_empty(len(x_TO), weight_OI.shape[1]) if out is None else out
    if not needs_float32(x_TO) and x_TO.dtype == weight_OI.dtype:
        return torch.mm(x_TO, weight_OI, out=y_TI)
    for tokens in _tokens(x_TO, weight_OI.shape[1]):
        y_tI = torch.zeros_like(y_TI[tokens], dtype=torch.float32)
        for outputs in _outputs(weight_OI, len(y_tI)):
            _add_mm(y_tI, x_TO[tokens, outputs], weight_OI[outputs])
        y_TI[tokens] = y_tI
    return y_TI


def add_product(
    total_OI: Tensor, grad_TO: Tensor, x_TI: Tensor, *, is_empty: bool, scale: float = 1.0
) -> None:
    """Add scale grad^T x, without rounding it, to a sum in at least float32; overwrite it if `is_empty`.

    A CPU computes products of 16-bit operands in float32, whatever units it has: torch would round the
    product to 16 bits, and with transposed operands it is no faster. A GPU adds them up in float32.
    """
    if total_OI.dtype == grad_TO.dtype == x_TI.dtype:
        total_OI.addmm_(grad_TO.T, x_TI, beta=0 if is_empty else 1, alpha=scale)
        return
    if grad_TO.is_cuda and grad_TO.dtype == x_TI.dtype:
        _add_on_cuda(total_OI, grad_TO.T, x_TI, is_empty=is_empty, scale=scale)
        return
    for tokens in _tokens(x_TI, x_TI.shape[1]):
        x_tI = x_TI[tokens] if x_TI.is_cuda else x_TI[tokens].float()
        for outputs in _outputs(total_OI, len(x_tI)):
            if is_empty and tokens.start == 0:
                total_OI[outputs].zero_()
            _add_mm(total_OI[outputs], grad_TO[tokens, outputs].T, x_tI, scale=scale)


def _add_on_cuda(
    total_OI: Tensor, x_OT: Tensor, y_TI: Tensor, *, is_empty: bool, scale: float
) -> None:
    """Add scale x y of 16-bit operands to a float32 sum, by the product itself where torch can."""
    if adds_in_product(total_OI.device):
        torch.addmm(
            total_OI, x_OT, y_TI, out_dtype=torch.float32, beta=0 if is_empty else 1, alpha=scale,
            out=total_OI)
        return
    for outputs in row_blocks(len(total_OI), total_OI.shape[1], block_numel(is_cuda=True)):
        if is_empty:
            total_OI[outputs].zero_()
        total_OI[outputs].add_(torch.mm(x_OT[outputs], y_TI, out_dtype=torch.float32), alpha=scale)


@cache
def adds_in_product(device: torch.device) -> bool:
    """Return whether torch adds a product of 16-bit operands to a float32 sum on this GPU; some versions take
    no sum that is wider than the operands."""
    total = torch.zeros(16, 16, device=device)
    operand = torch.zeros(16, 16, dtype=torch.bfloat16, device=device)
    try:
        torch.addmm(total, operand, operand, out_dtype=torch.float32, out=total)
    except RuntimeError:
        return False
    return True


def _add_mm(total: Tensor, x: Tensor, y: Tensor, *, scale: float = 1.0) -> None:
    """Add scale x y, computed in float32, to a float32 sum.

    If y is in bfloat16, a GPU multiplies it with three bfloat16 tensors whose sum is x. Their products are
    exact in float32, and a GPU's 16-bit units are several times as fast as those for float32.
    """
    if not y.is_cuda or y.dtype != torch.bfloat16:
        total.addmm_(x.float(), y.float(), alpha=scale)
        return
    remainder = x.float()
    for _ in range(3):  # A bfloat16 number has 8 of the 24 bits of a float32.
        term = remainder.bfloat16()
        _add_on_cuda(total, term, y, is_empty=False, scale=scale)
        remainder = remainder - term


def _tokens(x_T: Tensor, width: int) -> Iterator[slice]:
    """Yield ranges of tokens to convert at a time, if each token has `width` elements to convert."""
    return row_blocks(len(x_T), width, WIDENED_TOKENS_NUMEL * (CUDA_PARTS if x_T.is_cuda else 1))


def _outputs(weight_OI: Tensor, num_tokens: int) -> Iterator[slice]:
    """Yield ranges of a weight's rows, so small that the outputs for `num_tokens` tokens are small, too."""
    share = WIDENED_TOKENS_NUMEL // WIDENED_WEIGHT_NUMEL
    numel = WIDENED_WEIGHT_NUMEL * (CUDA_PARTS if weight_OI.is_cuda else 1)
    return row_blocks(len(weight_OI), max(weight_OI.shape[1], num_tokens // share), numel)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def joined(terms: Tensor) -> Tensor:
    """Return the float32 values that terms add up to over their first dim, which is exact."""
    return terms.sum(0, dtype=sum_dtype(terms.dtype))


def split_into(terms: Tensor, values: Tensor) -> None:
    """Set terms, along their first dim, so that they add up to these values."""
    remainder = values.to(terms.device, sum_dtype(terms.dtype), copy=True)
    for term in terms:
        term.copy_(remainder)
        remainder -= term
