# mypy: disable-error-code="no-untyped-def"
# (Triton compiles these functions from their source; their arguments have no types of Python.)
"""The Triton kernel that multiplies few rows with a weight in int8, which it reads as it is stored.

Shape suffixes: T tokens, O outputs, I inputs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_OUTPUTS = 16  # Of a program. Few, so that small weights occupy all units; a decoding step waits for memory.
_INPUTS = 256  # That a program reads at a time.
_MOST_ROWS = 64  # Of a program.


@triton.jit
def _product(
    x, values, scale, y, num_rows, num_outputs, num_inputs,
    BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
):
    """Write BLOCK_O outputs of BLOCK_T tokens (grid: outputs, tokens). All tensors are contiguous."""
    o = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    i = tl.arange(0, BLOCK_I)
    inside_O = o < num_outputs
    inside_T = t < num_rows
    sum_TO = tl.zeros((BLOCK_T, BLOCK_O), tl.float32)
    for start in range(0, num_inputs, BLOCK_I):
        inside_I = start + i < num_inputs
        x_TI = tl.load(
            x + t.to(tl.int64)[:, None] * num_inputs + start + i[None],
            mask=inside_T[:, None] & inside_I[None], other=0.0)
        values_OI = tl.load(
            values + o.to(tl.int64)[:, None] * num_inputs + start + i[None],
            mask=inside_O[:, None] & inside_I[None], other=0)
        sum_TO += tl.dot(x_TI, tl.trans(values_OI.to(x_TI.dtype)))
    scale_O = tl.load(scale + o, mask=inside_O, other=0.0).to(tl.float32)
    y_TO = (sum_TO * scale_O[None]).to(y.dtype.element_ty)
    at_TO = y + t.to(tl.int64)[:, None] * num_outputs + o[None]
    tl.store(at_TO, y_TO, mask=inside_T[:, None] & inside_O[None])


def int8_product(x_TI: Tensor, values_OI: Tensor, scale_O: Tensor) -> Tensor:
    """Return (x q^T) s, added up in float32 and rounded once."""
    x_TI = x_TI.contiguous()
    num_rows, num_inputs = x_TI.shape
    y_TO = torch.empty(num_rows, len(values_OI), dtype=x_TI.dtype, device=x_TI.device)
    if not num_rows:
        return y_TO
    rows = min(max(16, triton.next_power_of_2(num_rows)), _MOST_ROWS)  # A product of tiles has 16 at least.
    grid = (triton.cdiv(len(values_OI), _OUTPUTS), triton.cdiv(num_rows, rows))
    _product[grid](
        x_TI, values_OI, scale_O, y_TO, num_rows, len(values_OI), num_inputs,
        BLOCK_T=rows, BLOCK_O=_OUTPUTS, BLOCK_I=_INPUTS)
    return y_TO
