"""The micro-batches into which calls on sequences (forward, train step) are assumed to be split.

The engine splits the groups of each batch at their real lengths (engine/micro_batch.py); a group is a single
sequence, or those that a loss compares. The planner knows only mean and longest lengths, so both its
descriptions may differ from the engine's split: times follow from the mean micro-batch, and memory from the
largest one.
"""

import math
from typing import NamedTuple

from realhf.layout import ParallelStrategy
from realhf.planner.problem import Workload


class MeanMicroBatch(NamedTuple):
    """The mean over the micro-batches into which a data-parallel rank splits its part of a mini-batch.

    Numbers of tokens are per rank of the cp group.
    """

    num_micro_batches: int
    tokens: float
    squared_tokens: float  # Sum of the squared lengths of its sequences.
    output_tokens: float  # Positions whose logits are computed.


class LargestMicroBatch(NamedTuple):
    """The largest micro-batch of a data-parallel rank. Numbers of tokens are per rank of the cp group.

    If all sequences have one length, `num_micro_batches` is the number of micro-batches of this size that
    hold the samples. The engine may split them into more, but then not all are as large.
    """

    num_micro_batches: int
    tokens: float
    response_tokens: float


def mean_micro_batch(workload: Workload, strategy: ParallelStrategy, max_tokens: int) -> MeanMicroBatch:
    """Return the mean micro-batch if sequences of mean length are spread evenly."""
    groups = _num_groups(workload, strategy)
    max_groups = max(1, max_tokens // max(1, math.ceil(workload.group_tokens)))
    num_micro_batches = min(groups, max(math.ceil(groups / max_groups), min(strategy.pp, groups)))
    each = groups * workload.group_size / num_micro_batches / strategy.cp
    output_tokens = workload.response_tokens or workload.tokens
    return MeanMicroBatch(
        num_micro_batches, each * workload.tokens, each * workload.squared_tokens, each * output_tokens)


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


def _num_groups(workload: Workload, strategy: ParallelStrategy) -> int:
    """Return the most groups of a data-parallel rank in one mini-batch.

    A forward call has one mini-batch, and its samples are spread over ranks like those of a train step whose
    loss compares none.
    """
    return -(-workload.most_samples("train_step", strategy.dp) // workload.group_size)
