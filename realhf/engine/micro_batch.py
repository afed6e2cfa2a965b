"""Cutting samples into parts of balanced cost."""

from collections.abc import Sequence


def balance(costs: Sequence[float], num_parts: int) -> list[list[int]]:
    """Indices, rising, of parts of nearly equal cost: Graham's LPT rule, at most 4/3 of the best maximum."""
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    totals = [0.0] * num_parts
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        lightest = min(range(num_parts), key=lambda part: (totals[part], len(parts[part]), part))
        parts[lightest].append(i)
        totals[lightest] += costs[i]
    return [sorted(part) for part in parts]


def micro_batches(lengths: Sequence[int], *, max_tokens: int, at_least: int = 1) -> list[list[int]]:
    """Indices of micro-batches of at most `max_tokens` tokens (a longer sequence stands alone)."""
    num_parts = max(-(-sum(lengths) // max_tokens), min(at_least, len(lengths)))
    while True:
        parts = [part for part in balance(lengths, num_parts) if part]
        if all(len(part) == 1 or sum(lengths[i] for i in part) <= max_tokens for part in parts):
            return parts
        num_parts += 1
