"""Tells whether a CPU has units for 16-bit numbers; without, it multiplies them one by one, which is slow."""

from functools import cache

import torch
from torch import Tensor


def needs_float32(x: Tensor) -> bool:
    """Return whether products of this tensor's dtype are slow on its device."""
    return x.dtype in (torch.bfloat16, torch.float16) and x.device.type == "cpu" and not _has_units(x.dtype)


@cache
def _has_units(dtype: torch.dtype) -> bool:
    """Return whether oneDNN multiplies this dtype on this CPU; ONEDNN_MAX_CPU_ISA can forbid it."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.ops.mkldnn._is_mkldnn_fp16_supported()


def widened(x: Tensor) -> Tensor:
    """Return the tensor in float32 if products of its dtype are slow, else unchanged; keeps gradients."""
    return x.float() if needs_float32(x) else x
