"""Splits samples into micro-batches, and items into bins of balanced cost."""

import heapq
import math
from collections.abc import Sequence

from realhf.layout import ParallelStrategy
from realhf.models.model_flops import ModelFlops
from realhf.models.param_spec import ModelSpec


def balance(
    costs: Sequence[float], num_bins: int, *, limit: float = math.inf, sizes: Sequence[float] | None = None
) -> list[list[int]]:
    """Split items into bins of nearly equal cost; return the indices of each bin's items, rising.

    This is Graham's LPT rule: the largest cost is at most 4/3 of the optimum. The sizes (None: the costs) of
    a bin's items add up to `limit` at most, except for a single larger item. If need be, bins are added.
    """
    sizes = costs if sizes is None else sizes
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    filled = [0.0] * num_bins
    heap = [(0.0, 0, index) for index in range(num_bins)]
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        full = []  # The lightest bins that cannot take the item.
        while heap and heap[0][1] and filled[heap[0][2]] + sizes[i] > limit:
            full.append(heapq.heappop(heap))
        if not heap:
            heap.append((0.0, 0, len(bins)))
            bins.append([])
            filled.append(0.0)
        total, count, index = heap[0]
        bins[index].append(i)
        filled[index] += sizes[i]
        heapq.heapreplace(heap, (total + costs[i], count + 1, index))
        for entry in full:
            heapq.heappush(heap, entry)
    return [sorted(items) for items in bins]


def attention_share(spec: ModelSpec) -> float:
    """Return s such that a sequence of n tokens costs as much as n + s n^2 tokens without attention.

    Costs are FLOPs. Every token has an output, and sees half of the sequence on average.
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

    The samples of a group (see `data.order.groups_of`) are adjacent in one micro-batch. Costs are balanced;
    `attention` is the `attention_share` of a sequence's cost. Groups of equal length are adjacent, because
    attention batches sequences of equal length.
    """
    if not lengths:
        return []
    sizes = [sum(lengths[i] for i in group) for group in groups]
    costs = [sum(lengths[i] + attention * lengths[i] ** 2 for i in group) for group in groups]
    num_batches = max(-(-sum(sizes) // max_tokens), min(at_least, len(groups)))
    batches = balance(costs, num_batches, limit=max_tokens, sizes=sizes)
    ordered = [sorted(batch, key=lambda group: (sizes[group], group)) for batch in batches if batch]
    return [[i for group in batch for i in groups[group]] for batch in ordered]


def interleaved_group(num_micro_batches: int, pp: int) -> int:
    """Return how many micro-batches pass one chunk of a stage before the stage turns to its next chunk.

    It is the least number that Megatron-Core accepts: at least `pp`, such that the last group of
    micro-batches has at least `pp`, too.
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
    batches: list[list[int]] = []
    longest = [max(lengths[i] for i in group) for group in groups]
    width = 0
    for group in sorted(range(len(groups)), key=lambda group: (-longest[group], group)):
        if batches and (len(batches[-1]) + len(groups[group])) * width <= max_tokens:
            batches[-1] += groups[group]
        else:
            batches.append(list(groups[group]))
            width = longest[group]
    return batches
