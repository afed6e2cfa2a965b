"""Values that need float32 in a model of any dtype: they are held as the sum of several tensors of that
dtype.

So they lie, travel and are averaged as all other parameters do. In bfloat16 three limbs have all 24 bits of a
float32, in wider dtypes the first one has them; in float16 what is below 2^-25 is lost.
"""

import torch
from torch import Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """What the sum of limbs of this dtype is computed in."""
    return torch.promote_types(dtype, torch.float32)


def joined(limbs: Tensor) -> Tensor:
    """The values: the sum over the first dim, from the smallest on, which is exact."""
    total = torch.zeros_like(limbs[0], dtype=wide(limbs.dtype))
    for limb in reversed(limbs):
        total = limb + total
    return total


def split_into(limbs: Tensor, values: Tensor) -> None:
    """Sets the limbs so that they add up to these values."""
    rest = values.to(limbs.device, wide(limbs.dtype), copy=True)
    for limb in limbs:
        limb.copy_(rest)
        rest -= limb
