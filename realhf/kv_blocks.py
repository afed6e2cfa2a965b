"""Sizes of a KV cache: how many tokens a block holds, and how many blocks a generation needs."""

from collections.abc import Iterable, Sequence

_SMALL = 64
_LARGE = 128
_STEP = 16
"""Tokens in a block. Small blocks share more and waste less, large blocks are faster to attend to."""

SHARE_OF_FREE = 0.5
"""Share of the free memory that a cache may take, unless the user sets a limit."""


def block_size(prompts: Sequence[tuple[int, int]], *, max_new_tokens: int) -> int:
    """Return the number of tokens in a block, for prompts of (tokens, samples).

    Blocks are small if samples can share one, and not longer than the longest row.
    """
    if any(length >= _SMALL and count > 1 for length, count in prompts):
        return _SMALL
    longest = max(length for length, _ in prompts) + max_new_tokens
    return min(_LARGE, -(-longest // _STEP) * _STEP)


def num_blocks(num_tokens: int, size: int) -> int:
    """Return how many blocks of `size` tokens hold `num_tokens` tokens of a row."""
    return -(-num_tokens // size)


def shared_tokens(length: int, count: int) -> int:
    """Return how many of a prompt's tokens lie in blocks that its samples share."""
    return length // _SMALL * _SMALL if count > 1 else 0


def blocks_for(prompts: Iterable[tuple[int, int]], *, size: int, num_slots: int, max_new_tokens: int) -> int:
    """Return how many blocks let `num_slots` rows run without waiting for one another, even if all reach
    their maximal length, for prompts of (tokens, samples).

    Shared blocks are counted for twice as many prompts as fill the slots, because the last samples of earlier
    prompts may still be running.
    """
    own: list[int] = []
    shared: list[int] = []
    for length, count in prompts:
        whole = length // size * (count > 1)
        shared.append(whole + (count > 1))  # The last block is not full: all samples but one copy it.
        own += [num_blocks(length + max_new_tokens, size) - whole] * count
    num_prompts = -(-2 * num_slots * len(shared) // max(1, len(own)))
    return sum(sorted(own)[-num_slots:]) + sum(sorted(shared)[-num_prompts:])


def tokens_for(
    length: int, samples_per_prompt: int, *, num_slots: int, num_samples: int, max_new_tokens: int
) -> int:
    """Return how many tokens fit in the blocks that `blocks_for` returns if all prompts are alike."""
    shares = samples_per_prompt > 1
    size = block_size([(length, samples_per_prompt)], max_new_tokens=max_new_tokens)
    whole = length // size * shares
    prompts = -(-num_samples // samples_per_prompt)
    prompts = min(prompts, -(-2 * num_slots * prompts // num_samples))
    own = num_blocks(length + max_new_tokens, size) - whole
    return (num_slots * own + prompts * (whole + 1) * shares) * size
