"""Warns about roles whose engine computes in a dtype that this CPU has no units for."""

from collections.abc import Iterator, Mapping

import torch

from realhf.engine.protocol import DTYPES
from realhf.experiment import Role
from realhf.half_precision import needs_float32


def slow_dtypes(roles: Mapping[str, Role], device: torch.device) -> Iterator[str]:
    """Yield a sentence for each role that transformers' classes compute in a slow dtype."""
    for name, role in roles.items():
        weight = torch.empty(0, dtype=DTYPES[role.weights_dtype], device=device)
        if role.engine == "transformers" and needs_float32(weight):
            yield (
                f"{name}.dtype is {role.weights_dtype}, for which this CPU has no units: "
                "with engine transformers it takes many times as long as float32 (the native engine computes "
                "in float32 by itself)")
