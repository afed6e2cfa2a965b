"""The micro-batches into which calls on sequences (forward, train step) are assumed to be split.

The engine splits the groups of each batch at their real lengths (micro_batch.py); a group is a single
sequence, or those that a loss compares. The planner knows how lengths are distributed. Times follow from the
mean micro-batch of the slowest rank; if lengths vary, it is found by dealing out and splitting some drawn
batches as a run does. Memory follows from the largest micro-batch that is possible.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from realhf.data.micro_batch import balance
from realhf.layout import ParallelStrategy
from realhf.planner.lengths import Lengths
from realhf.planner.problem import Workload

_DRAWN = 2048  # Sequences that are drawn, in several mini-batches.
_LEAST_DRAWS = 3
_MOST_DRAWS = 16
_MOST_SPLITS = 4  # Mini-batches that are split into micro-batches.
_MOST_PARTS = 64
_MOST_GROUPS = 16
UNEVEN = 1.04  # How many times as large as the mean micro-batch the others may be.
ROUND_TO = 128
_MANY = 12  # With so many groups in a micro-batch, all micro-batches cost the same.


class MeanMicroBatch(NamedTuple):
    """The mean over the micro-batches into which the slowest data-parallel rank splits its part of a
    mini-batch.

    Numbers of tokens are per rank of the cp group.
    """

    num_micro_batches: int
    tokens: float
    squared_tokens: float  # Sum of the squared lengths of its sequences.
    output_tokens: float  # Positions whose logits are computed.
    num_samples: float
    num_prompts: float  # Different prompts among its samples.
    largest: float = 1.0  # The cost of the largest one, relative to the mean.
    mean_share: float = 1.0  # The cost of a mean rank's part, relative to that of the slowest one.


class LargestMicroBatch(NamedTuple):
    """The largest micro-batch of a data-parallel rank. Numbers of tokens are per rank of the cp group.

    If all sequences have one length, `num_micro_batches` is the number of micro-batches of this size that
    hold the samples. The engine may split them into more, but then not all are as large.
    """

    num_micro_batches: int
    tokens: float
    response_tokens: float


def mean_micro_batch(
    workload: Workload, strategy: ParallelStrategy, max_tokens: int, *, attention: float = 0.0,
    shares_prompts: bool = False,
) -> MeanMicroBatch:
    """Return the mean micro-batch of the data-parallel rank that ends last.

    Attention on a sequence of n tokens costs as much as `attention` * n^2 tokens do without it. If a pass
    `shares_prompts`, the rank with the most work is found without copies of prompts; they count as tokens all
    the same.
    """
    if not workload.all_alike:
        return _of_slowest_rank(
            workload, strategy, max_tokens, float(f"{attention:.2g}"), shares_prompts=shares_prompts)
    groups = _num_groups(workload, strategy)
    max_groups = max(1, max_tokens // max(1, math.ceil(workload.group_tokens)))
    num_micro_batches = min(groups, max(math.ceil(groups / max_groups), min(strategy.pp, groups)))
    each = groups * workload.group_size / num_micro_batches / strategy.cp
    output_tokens = workload.response_tokens or workload.tokens
    samples = workload.num_samples / workload.minibatches / strategy.dp
    held = groups * workload.group_size
    # Samples of equal length are dealt out in turns.
    together = workload.samples_per_prompt
    together = together if workload.group_size > 1 else -(-together // strategy.dp)
    return MeanMicroBatch(
        num_micro_batches, each * workload.tokens, each * workload.squared_tokens, each * output_tokens,
        held / num_micro_batches,
        _num_prompts(workload, held / together, held, max_tokens) / num_micro_batches,
        mean_share=min(1.0, samples / held))


def _num_prompts(workload: Workload, num_prompts: float, num_samples: float, max_tokens: int) -> float:
    """Return how many prompts the micro-batches of a rank have together, each of which has a copy of its own
    if the samples of a prompt do not fit in one."""
    return max(num_prompts, num_samples / max(1, max_tokens // max(1, math.ceil(workload.tokens))))


def _of_slowest_rank(
    workload: Workload, strategy: ParallelStrategy, max_tokens: int, attention: float,
    *, shares_prompts: bool,
) -> MeanMicroBatch:
    """Return the mean micro-batch of the slowest rank, which is that of drawn lengths."""
    per_unit = workload.samples_per_prompt if workload.group_size > 1 else 1
    num_units = math.ceil(workload.prompts / workload.minibatches) * workload.samples_per_prompt // per_unit
    batches = _Batches(
        workload.lengths, workload.prompt_lengths, workload.prompt_tokens, num_units, per_unit, strategy.dp,
        workload.samples_per_prompt, workload.alike)
    tokens = _num_groups(workload, strategy) * workload.group_tokens
    at_least = strategy.pp if 2 * strategy.pp * max_tokens > tokens else 1  # Else there are more in any case.
    split = _split(batches, workload.group_size, max_tokens, at_least, attention, shares_prompts)
    num_micro_batches = max(1, round(split.num_micro_batches))
    share = 1 / num_micro_batches / strategy.cp
    drawn = _drawn(batches._replace(dp=1))[1]  # Few long sequences: their mean is not quite the right one.
    tokens = split.tokens * workload.tokens / drawn.mean()
    squared_tokens = split.squared_tokens * workload.squared_tokens / (drawn**2).mean()
    output_tokens = tokens - (split.prompt_tokens if workload.response_tokens else 0.0)
    num_prompts = _num_prompts(workload, split.num_prompts, split.num_samples, max_tokens) / num_micro_batches
    return MeanMicroBatch(
        num_micro_batches, tokens * share, squared_tokens * share, output_tokens * share,
        split.num_samples / num_micro_batches, num_prompts, split.largest, split.mean_share)


class _Batches(NamedTuple):
    """Mini-batches of drawn lengths, and the number of ranks among which each of them is dealt out.

    A mini-batch has `num_units` of `per_unit` sequences, which stay together. The `group` sequences of a
    prompt follow each other, and an `alike` share of the groups has responses of one length.
    """

    lengths: Lengths
    prompt_lengths: Lengths | None
    prompt_tokens: float
    num_units: int
    per_unit: int
    dp: int
    group: int
    alike: float


class _Split(NamedTuple):
    """The micro-batches of the slowest rank, as means over several mini-batches."""

    num_micro_batches: float
    tokens: float
    squared_tokens: float
    prompt_tokens: float
    num_samples: float
    num_prompts: float  # Different prompts among the samples.
    largest: float  # The cost of the largest micro-batch, relative to the mean one.
    mean_share: float  # The cost of a mean rank's part, relative to that of the slowest one.


@lru_cache(maxsize=64)
def _drawn(batches: _Batches) -> tuple[np.ndarray, np.ndarray]:
    """Return lengths of prompts and of whole sequences, by mini-batch, unit and sequence."""
    rng = np.random.default_rng(0)
    size = batches.num_units * batches.per_unit
    num_draws = min(_MOST_DRAWS, max(_LEAST_DRAWS, _DRAWN // size))
    by_prompt = (num_draws, size // batches.group, batches.group)
    responses = batches.lengths.draw(rng, by_prompt)
    prompts = np.full(by_prompt, batches.prompt_tokens)
    if batches.prompt_lengths is not None:
        prompts[:] = batches.prompt_lengths.draw(rng, (*by_prompt[:2], 1))
    if batches.alike:
        is_alike = rng.random((*by_prompt[:2], 1)) < batches.alike
        responses = np.where(is_alike, responses[..., :1], responses)
    shape = (num_draws, batches.num_units, batches.per_unit)
    return prompts.reshape(shape), np.maximum(1.0, prompts + responses).reshape(shape)


@lru_cache(maxsize=1024)
def _dealt(batches: _Batches) -> list[list[list[int]]]:
    """Return the units of each rank in each mini-batch, dealt out by their tokens as in a run."""
    if batches.dp == 1:
        return [[list(range(batches.num_units))] for _ in _drawn(batches)[0]]
    whole = _drawn(batches._replace(dp=1))[1]
    return [balance(units.sum(axis=1).tolist(), batches.dp) for units in whole]


class _Share(NamedTuple):
    """The part of a mini-batch that the slowest rank has: lengths of prompts and whole sequences, by unit.

    It has `num_prompts` different prompts. A mean rank's part costs `mean_share` as much.
    """

    prompts: np.ndarray
    whole: np.ndarray
    num_prompts: int
    mean_share: float


@lru_cache(maxsize=1024)
def _slowest(batches: _Batches, attention: float, shares_prompts: bool) -> list[_Share]:
    """Return the share of the slowest rank in each mini-batch."""
    prompts, whole = _drawn(batches._replace(dp=1))
    costs = (whole + attention * whole**2).sum(axis=2).tolist()
    shares = []
    for number, ranks in enumerate(_dealt(batches)):
        rank_costs = [sum([costs[number][unit] for unit in units]) for units in ranks]
        counts = [len({unit * batches.per_unit // batches.group for unit in units}) for units in ranks]
        if shares_prompts:
            prompt = float(prompts[number].mean())
            copies = [len(units) * batches.per_unit - n for units, n in zip(ranks, counts, strict=True)]
            rank_costs = [cost - prompt * n for cost, n in zip(rank_costs, copies, strict=True)]
        slowest = rank_costs.index(max(rank_costs))
        mean_share = sum(rank_costs) / batches.dp / max(rank_costs)
        units = ranks[slowest]
        shares.append(
            _Share(prompts[number, units], whole[number, units], counts[slowest], mean_share))
    return shares


@lru_cache(maxsize=4096)
def _split(
    batches: _Batches, group_size: int, max_tokens: int, at_least: int, attention: float,
    shares_prompts: bool,
) -> _Split:
    """Return the split of what the slowest rank has of each mini-batch."""
    shares = _slowest(batches, attention, shares_prompts)
    splits = [_split_share(share.whole.reshape(-1, group_size), max_tokens, at_least, attention)
              for share in shares[:_MOST_SPLITS]]
    num_micro_batches, largest = np.mean(splits, axis=0).tolist()
    sums = [
        (share.whole.sum(), (share.whole**2).sum(), share.prompts.sum(), share.whole.size, share.num_prompts,
         share.mean_share)
        for share in shares]
    tokens, squared, prompt_tokens, num_samples, num_prompts, mean_share = np.mean(sums, axis=0).tolist()
    return _Split(
        num_micro_batches, tokens, squared, prompt_tokens, num_samples, num_prompts, largest, mean_share)


def _split_share(
    groups: np.ndarray, max_tokens: int, at_least: int, attention: float
) -> tuple[float, float]:
    """Return the number of micro-batches into which groups of sequences are split, and the cost of the
    largest one relative to the mean."""
    sizes = groups.sum(axis=1)
    num_wanted = max(math.ceil(sizes.sum() / max_tokens), min(at_least, len(groups)))
    if num_wanted == 1 or len(groups) >= _MANY * num_wanted:
        return num_wanted, 1.0
    costs = sizes + attention * (groups**2).sum(axis=1)
    micro_batches = balance(costs.tolist(), num_wanted, limit=max_tokens, sizes=sizes.tolist())
    sums = [costs[indices].sum() for indices in micro_batches if indices]
    return len(sums), max(sums) / costs.sum() * len(sums)


def largest_micro_batch(
    workload: Workload, strategy: ParallelStrategy, max_tokens: int
) -> LargestMicroBatch:
    """Return the largest micro-batch.

    If lengths vary, it may hold up to `max_tokens` tokens, half a group more than an even share, or the
    longest group.
    """
    groups = _num_groups(workload, strategy)
    size = workload.group_size
    cp = strategy.cp
    length = max(workload.group_tokens, 1.0)
    num_micro_batches = max(-(-int(groups * length) // max_tokens), min(strategy.pp, groups), 1)
    are_prompts_alike = workload.longest_prompt == workload.prompt_tokens
    if are_prompts_alike and workload.response_tokens >= workload.max_new_tokens:  # So are all sequences.
        held = max(1, min(-(-groups // num_micro_batches), int(max_tokens // length)))
        num_micro_batches = max(1, -(-groups // held))
        response_tokens = held * size * workload.response_tokens
        return LargestMicroBatch(num_micro_batches, held * length / cp, response_tokens / cp)
    longest_response = max(workload.max_new_tokens, workload.response_tokens)
    longest = size * (workload.longest_prompt + longest_response)
    tokens = max(longest, min(max_tokens, groups * length / num_micro_batches + longest / 2)) / cp
    response_share = size * max(workload.response_tokens / length, longest_response / longest)
    return LargestMicroBatch(num_micro_batches, tokens, tokens * response_share)


def micro_batch_sizes(workload: Workload, strategy: ParallelStrategy) -> list[int]:
    """Return the sizes with which a rank has up to `_MOST_PARTS` micro-batches, or up to `_MOST_GROUPS`
    groups in one."""
    groups = _num_groups(workload, strategy)
    longest = max(1, math.ceil(workload.group_tokens))
    sizes = {number * longest for number in range(1, min(groups, _MOST_GROUPS) + 1)}
    for number in range(1, min(groups, _MOST_PARTS) + 1):
        if workload.all_alike:
            sizes.add(math.ceil(groups / number) * longest)
        else:
            share = UNEVEN * groups * longest / number
            sizes.add(max(longest, math.ceil(share / ROUND_TO) * ROUND_TO))
    return sorted(sizes)


def _num_groups(workload: Workload, strategy: ParallelStrategy) -> int:
    """Return the most groups of a data-parallel rank in one mini-batch.

    A forward call has one mini-batch, and its samples are spread over ranks like those of a train step whose
    loss compares none.
    """
    return -(-workload.most_samples("train_step", strategy.dp) // workload.group_size)
