"""Float32 values stored as the sum of several terms of a model's dtype.

In this form, values that need float32 are stored, moved and averaged like all other parameters. In bfloat16,
three terms together hold all 24 bits of a float32; in a wider dtype, the first term alone does. In float16,
bits below 2^-25 are lost.
"""

import torch
from torch import Tensor


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which terms of this dtype are added up."""
    return torch.promote_types(dtype, torch.float32)


def joined(terms: Tensor) -> Tensor:
    """Return the values: the sum over the first dim, which is exact."""
    return terms.sum(0, dtype=sum_dtype(terms.dtype))


def split_into(terms: Tensor, values: Tensor) -> None:
    """Set the terms so that they add up to these values."""
    remainder = values.to(terms.device, sum_dtype(terms.dtype), copy=True)
    for term in terms:
        term.copy_(remainder)
        remainder -= term
