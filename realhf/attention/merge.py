"""Merging attention over parts of the keys (Dao et al. 2023, "Flash-Decoding")."""

from collections.abc import Iterable

import torch
from torch import Tensor


def merged(parts: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return out_TND and lse_TN over all keys, from those over disjoint parts of the keys.

    A part may be without keys for some queries, for which its lse is -inf. The parts are taken one by one, so
    that only one need be in memory.
    """
    iterator = iter(parts)
    out_TND, lse_TN = next(iterator)
    dtype = out_TND.dtype
    out_TND = out_TND.to(torch.promote_types(dtype, lse_TN.dtype))
    for part_TND, part_TN in iterator:
        both_TN = torch.logaddexp(lse_TN, part_TN)
        finite_TN = both_TN.masked_fill(both_TN == -torch.inf, 0)
        shares = [(lse - finite_TN).exp()[..., None] for lse in (lse_TN, part_TN)]
        out_TND = out_TND * shares[0] + part_TND * shares[1]
        lse_TN = both_TN
    return out_TND.to(dtype), lse_TN
