"""Splits samples into micro-batches, and into parts of balanced cost."""

import heapq
import math
from collections.abc import Sequence

from realhf.layout import ParallelStrategy
from realhf.models.model_flops import ModelFlops
from realhf.models.param_spec import ModelSpec


def balance(
    costs: Sequence[float], num_parts: int, *, limit: float = math.inf, sizes: Sequence[float] | None = None
) -> list[list[int]]:
    """Split items into parts of nearly equal cost; return the parts' indices, rising.

    This is Graham's LPT rule: the largest cost is at most 4/3 of the optimum. No part is larger than `limit`
    (except for a single large item); sizes are the costs, unless given. If an item fits nowhere, a part is
    added.
    """
    sizes = costs if sizes is None else sizes
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    filled = [0.0] * num_parts
    heap = [(0.0, 0, part) for part in range(num_parts)]
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        full = []  # Lightest parts that cannot take the item.
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
    """Return the s for which a sequence of n tokens costs as much as n + s n^2 tokens without attention.

    It is a ratio of FLOPs, when every token has an output and sees half of the sequence on average.
    """
    flops = ModelFlops.of(spec)
    return flops.attention * spec.config.num_layers / (4 * (flops.matrices + flops.head))


def micro_batches(
    lengths: Sequence[int],
    *,
    max_tokens: int,
    groups: Sequence[Sequence[int]],
    at_least: int = 1,
    attention: float = 0.0,
) -> list[list[int]]:
    """Return the indices of micro-batches of at most `max_tokens` tokens (a longer group stands alone).

    The samples of a group (see `sample_ids.groups_of`) are adjacent in one micro-batch. Costs are balanced;
    `attention` is the `attention_share` of a sequence's cost. Groups of equal length are adjacent, because
    attention batches sequences of equal length.
    """
    if not lengths:
        return []
    sizes = [sum(lengths[i] for i in group) for group in groups]
    costs = [sum(lengths[i] + attention * lengths[i] ** 2 for i in group) for group in groups]
    num_parts = max(-(-sum(sizes) // max_tokens), min(at_least, len(groups)))
    parts = balance(costs, num_parts, limit=max_tokens, sizes=sizes)
    ordered = [sorted(part, key=lambda group: (sizes[group], group)) for part in parts if part]
    return [[i for group in part for i in groups[group]] for part in ordered]


def interleaved_group(num_micro_batches: int, pp: int) -> int:
    """Return how many micro-batches pass one chunk of a stage before the stage turns to its next chunk.

    It is the least number that Megatron-Core accepts: at least `pp`, and the last group has no fewer.
    """
    sizes = range(pp, num_micro_batches + 1)
    return next(n for n in sizes if num_micro_batches % n == 0 or num_micro_batches % n >= pp)


def passes_in_flight(strategy: ParallelStrategy, stage: int, num_micro_batches: int) -> int:
    """Return how many forward passes of chunks wait on a stage for their backward passes, at most (1F1B)."""
    pp, vp = strategy.pp, strategy.vp
    if vp == 1:
        return min(num_micro_batches, pp - stage)
    num_micro_batches = max(num_micro_batches, pp)
    warm_up = 2 * (pp - stage - 1) + (vp - 1) * interleaved_group(num_micro_batches, pp)
    return min(num_micro_batches * vp, warm_up + 1)


def padded_micro_batches(
    lengths: Sequence[int], *, max_tokens: int, groups: Sequence[Sequence[int]]
) -> list[list[int]]:
    """Return micro-batches of groups of similar length, as many as fit when all samples are padded."""
    parts: list[list[int]] = []
    longest = [max(lengths[i] for i in group) for group in groups]
    width = 0
    for group in sorted(range(len(groups)), key=lambda group: (-longest[group], group)):
        if parts and (len(parts[-1]) + len(groups[group])) * width <= max_tokens:
            parts[-1] += groups[group]
        else:
            parts.append(list(groups[group]))
            width = longest[group]
    return parts
