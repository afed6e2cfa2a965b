"""Cutting samples into parts of balanced cost."""

import heapq
import math
from collections.abc import Sequence

from realhf.param_spec import ModelSpec


def balance(
    costs: Sequence[float], num_parts: int, *, limit: float = math.inf, sizes: Sequence[float] | None = None
) -> list[list[int]]:
    """Indices, rising, of parts of nearly equal cost: Graham's LPT rule, at most 4/3 of the best maximum.

    No part is larger than `limit` (but for one that stands alone); sizes are the costs, unless given. A new
    part is opened where none has room.
    """
    sizes = costs if sizes is None else sizes
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    filled = [0.0] * num_parts
    heap = [(0.0, 0, part) for part in range(num_parts)]
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        full = []  # Of the lightest, those without room.
        while heap and heap[0][1] and filled[heap[0][2]] + sizes[i] > limit:
            full.append(heapq.heappop(heap))
        if not heap:
            heap.append((0.0, 0, len(parts)))
            parts.append([])
            filled.append(0.0)
        total, count, part = heap[0]
        parts[part].append(i)
        filled[part] += sizes[i]
        heapq.heapreplace(heap, (total + costs[i], count + 1, part))
        for entry in full:
            heapq.heappush(heap, entry)
    return [sorted(part) for part in parts]


def attention_share(spec: ModelSpec) -> float:
    """The share s for which a sequence of n tokens costs as much as n + s n^2 tokens without attention.

    From FLOPs: 2 of a token for every parameter of its linear layers, and of causal attention 2 n^2 for every
    dim of all heads (half of 4 n^2, for scores and values).
    """
    config, moe = spec.config, spec.config.moe
    active = 1.0 if moe is None else moe.num_experts_per_token / moe.num_experts
    used = [p for p in spec.params if len(p.shape) > 1 and (config.tied or p.part != "embedding.weight")]
    params = sum(p.numel * (1.0 if p.expert is None else active) for p in used)
    return config.num_layers * config.num_heads * config.head_dim / params


def micro_batches(
    lengths: Sequence[int], *, max_tokens: int, at_least: int = 1, attention: float = 0.0
) -> list[list[int]]:
    """Indices of micro-batches of at most `max_tokens` tokens (a longer sequence stands alone).

    Their cost is balanced, for which attention counts as in `attention_share`. Sequences of equal length are
    neighbours: attention takes them together.
    """
    if not lengths:
        return []
    num_parts = max(-(-sum(lengths) // max_tokens), min(at_least, len(lengths)))
    costs = [n + attention * n**2 for n in lengths]
    parts = balance(costs, num_parts, limit=max_tokens, sizes=lengths)
    return [sorted(part, key=lambda i: (lengths[i], i)) for part in parts if part]
