"""Loads torch's code into memory, on both sides of a benchmark, before their memory is measured."""

import torch
import torch.nn.functional as F


def touch_libraries() -> None:
    """Run a little of everything that training uses, so that its code is in memory before the measurement."""
    for dtype in (torch.float32, torch.bfloat16):
        weight = torch.nn.Parameter(torch.randn(64, 64, dtype=dtype))
        ids = torch.arange(256) % 64
        x = F.silu(F.linear(F.embedding(ids, weight), weight)) * F.embedding(ids, weight)
        x = F.rms_norm(x, (64,), weight[0]).view(4, 64, 4, 16).transpose(1, 2)
        x = F.scaled_dot_product_attention(x, x, x, is_causal=True).transpose(1, 2).reshape(256, 64)
        F.cross_entropy(F.linear(x, weight).float(), ids).backward()
        torch.optim.AdamW([weight], fused=True).step()  # Imports torch's compiler.
