"""transformers' own Qwen2 in exact float64, the reference of the engine tests.

transformers imports its submodules on first use, which worker processes do without.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.nn.tiny import hf_config


class _Float64Rotary(torch.nn.Module):
    """transformers computes angles in float32 even in a float64 model; this one does not."""

    def forward(self, x, position_ids):
        inv_freq = 10000.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
        angles = (position_ids[:, :, None].double() * inv_freq).repeat(1, 1, 2)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def _float64_norm(weight, x):
    """transformers normalises in float32 even in a float64 model; this does not."""
    return weight * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def plain_model(directory: Path, *, tied: bool = False, **changes: Any) -> transformers.Qwen2ForCausalLM:
    """Build a random tiny Qwen2 with heads of 8 dims and a vocabulary of 67, and save it to `directory`."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**(hf_config(tied=tied) | changes), attn_implementation="sdpa")
    model = transformers.Qwen2ForCausalLM(config).double()
    model.save_pretrained(directory)
    model.model.rotary_emb = _Float64Rotary()
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(_float64_norm, module.weight)
    return model


def ragged_rows(num_rows: int, *, seed: int) -> list[tuple[list[int], list[int]]]:
    """Return (prompt, completion) token lists of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    draw = partial(torch.randint, generator=generator)
    lengths = draw(1, 7, (num_rows, 2)).tolist()
    return [(draw(2, 67, (p,)).tolist(), draw(2, 67, (c,)).tolist()) for p, c in lengths]
