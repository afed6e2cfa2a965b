"""Cutting samples into parts of balanced cost."""

import heapq
import math
from collections.abc import Sequence


def balance(costs: Sequence[float], num_parts: int, *, limit: float = math.inf) -> list[list[int]]:
    """Indices, rising, of parts of nearly equal cost: Graham's LPT rule, at most 4/3 of the best maximum.

    Where even the lightest part has no room left below `limit`, a new part is opened.
    """
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    heap = [(0.0, 0, part) for part in range(num_parts)]
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        total, count, part = heap[0]
        if count and total + costs[i] > limit:
            parts.append([i])
            heapq.heappush(heap, (costs[i], 1, len(parts) - 1))
        else:
            parts[part].append(i)
            heapq.heapreplace(heap, (total + costs[i], count + 1, part))
    return [sorted(part) for part in parts]


def micro_batches(lengths: Sequence[int], *, max_tokens: int, at_least: int = 1) -> list[list[int]]:
    """Indices of micro-batches of at most `max_tokens` tokens (a longer sequence stands alone).

    Sequences of equal length are neighbours: attention takes them together.
    """
    num_parts = max(-(-sum(lengths) // max_tokens), min(at_least, len(lengths)))
    parts = balance(lengths, num_parts, limit=max_tokens) if lengths else []
    return [sorted(part, key=lambda i: (lengths[i], i)) for part in parts if part]
