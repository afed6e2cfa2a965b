"""Float32 values stored as the sum of several tensors of a model's dtype, their parts.

In this form values that need float32 are stored, moved and averaged like all other parameters. In bfloat16
three parts hold all 24 bits of a float32, in wider dtypes the first part does; float16 loses what is below
2^-25.
"""

import torch
from torch import Tensor


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which parts of this dtype are added up."""
    return torch.promote_types(dtype, torch.float32)


def joined(parts: Tensor) -> Tensor:
    """Return the values: the sum over the first dim, which is exact if the smallest part comes first."""
    total = torch.zeros_like(parts[0], dtype=sum_dtype(parts.dtype))
    for part in reversed(parts):
        total = part + total
    return total


def split_into(parts: Tensor, values: Tensor) -> None:
    """Set the parts so that they add up to these values."""
    rest = values.to(parts.device, sum_dtype(parts.dtype), copy=True)
    for part in parts:
        part.copy_(rest)
        rest -= part
