"""Merging attention over parts of the keys (Dao et al. 2023, "Flash-Decoding")."""

import torch
from torch import Tensor


def merge_into(out_TND: Tensor, lse_TN: Tensor, part_TND: Tensor, part_TN: Tensor) -> None:
    """Add attention over further keys, `part_TND` with its log-sum-exp `part_TN`, to `out_TND` and `lse_TN`.

    These are changed in place; `out_TND` is in float32 or wider. Where a query has no keys, its log-sum-exp
    is -inf.
    """
    both_TN = torch.logaddexp(lse_TN, part_TN)
    finite_TN = both_TN.masked_fill(both_TN == -torch.inf, 0)
    out_TND.mul_((lse_TN - finite_TN).exp()[..., None])
    out_TND.add_(part_TND * (part_TN - finite_TN).exp()[..., None])
    lse_TN.copy_(both_TN)
