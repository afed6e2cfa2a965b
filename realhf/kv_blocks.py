"""Blocks of a KV cache: how many tokens each holds, and how many of them a generation needs."""

from collections.abc import Iterable, Sequence

_SMALL, _LARGE, _STEP = 64, 128, 16
"""Tokens in a block. Small ones share more and waste less, large ones are faster to attend to."""

SHARE_OF_FREE = 0.5
"""Share of the free memory that a cache takes at most, unless the user says how much it may have."""


def block_size(prompts: Sequence[tuple[int, int]], *, max_new_tokens: int) -> int:
    """Tokens of one row in a block, for prompts of (tokens, samples): small blocks where samples can share
    one, and none longer than the longest row."""
    if any(length >= _SMALL and count > 1 for length, count in prompts):
        return _SMALL
    longest = max(length for length, _ in prompts) + max_new_tokens
    return min(_LARGE, -(-longest // _STEP) * _STEP)


def num_blocks(num_tokens: int, size: int) -> int:
    """Blocks of so many tokens that hold these of a row."""
    return -(-num_tokens // size)


def shared_tokens(length: int, count: int) -> int:
    """Of a prompt so many tokens lie in blocks that its samples share."""
    return length // _SMALL * _SMALL if count > 1 else 0


def blocks_for(prompts: Iterable[tuple[int, int]], *, size: int, num_slots: int, max_new_tokens: int) -> int:
    """Blocks with which `num_slots` rows need not wait for one another, even if all become as long as they
    may, for prompts of (tokens, samples). What samples share is counted for twice as many prompts as fill
    the slots, because the last samples of others may still be running."""
    own: list[int] = []
    shared: list[int] = []
    for length, count in prompts:
        whole = length // size * (count > 1)
        shared.append(whole + (count > 1))  # (and the last one, of which all but one have a copy)
        own += [num_blocks(length + max_new_tokens, size) - whole] * count
    num_prompts = -(-2 * num_slots * len(shared) // max(1, len(own)))
    return sum(sorted(own)[-num_slots:]) + sum(sorted(shared)[-num_prompts:])


def tokens_for(
    length: int, samples_per_prompt: int, *, num_slots: int, num_samples: int, max_new_tokens: int
) -> int:
    """Tokens in the blocks that `blocks_for` gives so many samples of prompts that are all alike."""
    shares = samples_per_prompt > 1
    size = block_size([(length, samples_per_prompt)], max_new_tokens=max_new_tokens)
    whole = length // size * shares
    prompts = -(-num_samples // samples_per_prompt)
    prompts = min(prompts, -(-2 * num_slots * prompts // num_samples))
    own = num_blocks(length + max_new_tokens, size) - whole
    return (num_slots * own + prompts * (whole + 1) * shares) * size
