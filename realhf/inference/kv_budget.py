"""Limits of a generation: how many rows decode at once, and how many blocks of the KV cache they may use.

All replicas agree on GenerationLimits; each cohort of samples derives its CohortCapacity from them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from realhf.calls import Generate
from realhf.errors import UserError
from realhf.inference.rollout_buffer import PromptGroup, Size
from realhf.kv_blocks import block_size, blocks_for, num_blocks

_GIB = 1 << 30


def longest_sizes(groups: Sequence[PromptGroup]) -> list[Size]:
    """Return the size of the longest prompt and of the longest one with several samples.

    GenerationLimits depend on no other sizes.
    """
    sizes = [group.size for group in groups]
    return [max(some) for some in (sizes, [size for size in sizes if size[1] > 1]) if some]


def check_not_empty(sample_ids: Sequence[int]) -> None:
    """Raise UserError if any sample has an empty prompt; the ids are those of such samples."""
    if sample_ids:
        raise UserError(f"the prompt of sample {min(sample_ids)} is empty: it must have at least one token")


def check_positions(longest_prompt: int, max_new_tokens: int, num_positions: int | None) -> None:
    """Raise UserError if a prompt of this many tokens and its response exceed the model's positions."""
    if num_positions is not None and longest_prompt + max_new_tokens > num_positions:
        raise UserError(
            f"a prompt has {longest_prompt} tokens and sampling.max_new_tokens is {max_new_tokens}: "
            f"the model has {num_positions} positions")


@dataclass(frozen=True)
class GenerationLimits:
    """The limits of all cohorts of all replicas, shared so that none refuses a prompt another one accepts."""

    work: Generate
    token_bytes: int  # Bytes of one token in a rank's cache.
    num_cohorts: int  # Cohorts that share the rows and the memory of `work`.
    longest: int  # Tokens of the longest possible row.
    block_size: int
    cache_bytes: int | None = None  # A rank's limit where `work` sets none; None: there is no limit.

    @classmethod
    def of(
        cls, sizes: Sequence[Size], work: Generate, *, token_bytes: int, num_cohorts: int,
        cache_bytes: int | None = None,
    ) -> "GenerationLimits":  # fmt: skip
        max_new = work.sampling.max_new_tokens
        longest = max((length for length, _ in sizes), default=0) + max_new
        size = block_size(sizes or [(0, 1)], max_new_tokens=max_new)
        return cls(work, token_bytes, num_cohorts, longest, size, cache_bytes)

    def affordable(self, count: int) -> int:
        """Return how many of `count` blocks a cohort may have. One sample can always run, unless the user has
        set the limit."""
        block_bytes = self.token_bytes * self.block_size
        if (gib := self.work.kv_cache_gib) is not None:
            return min(count, int(gib * _GIB / self.num_cohorts) // block_bytes)
        if self.cache_bytes is None:
            return count
        return min(count, max(self._least, self.cache_bytes // self.num_cohorts // block_bytes))

    @property
    def _least(self) -> int:
        """Number of blocks with which a cohort can run any sample."""
        return num_blocks(self.longest, self.block_size) + 1

    def check(self, num_positions: int | None) -> None:
        """Raise UserError if a sample cannot fit in the model's positions or in the cache."""
        max_new = self.work.sampling.max_new_tokens
        check_positions(self.longest - max_new, max_new, num_positions)
        least = self._least
        if self.affordable(least) < least:
            least_gib = least * self.num_cohorts * self.token_bytes * self.block_size / _GIB
            least_gib *= 1.01  # This exceeds what rounding to three digits takes away.
            raise UserError(
                f"kv_cache_gib is {self.work.kv_cache_gib:g} GiB: one sample of {self.longest} tokens "
                f"(prompt and sampling.max_new_tokens) needs {least_gib:.3g} GiB")


class CohortCapacity:
    """The sizes of a cohort's cache and tables, with which every one of the given prompts can run."""

    def __init__(self, groups: Sequence[PromptGroup], limits: GenerationLimits) -> None:
        sizes = [group.size for group in groups]
        max_rows = limits.work.max_rows
        max_new = limits.work.sampling.max_new_tokens
        self.block_size = limits.block_size
        self.num_slots = min(-(-max_rows // limits.num_cohorts), sum(count for _, count in sizes))
        self.max_sharers = max(count for _, count in sizes)
        self.blocks_per_row = num_blocks(max(length for length, _ in sizes) + max_new, self.block_size)
        self.num_wanted = blocks_for(
            sizes, size=self.block_size, num_slots=self.num_slots, max_new_tokens=max_new)
        """Blocks with which no row has to wait for memory."""
        self.num_blocks = limits.affordable(self.num_wanted)

    def num_at_once(self, groups: Sequence[PromptGroup]) -> int:
        """Return how many of the groups, from the first on, find slots and blocks at the beginning."""
        rows = blocks = 0
        for number, (tokens, ids) in enumerate(groups):
            own = min(len(ids), self.num_slots - rows) * (len(ids) > 1)
            blocks += num_blocks(len(tokens), self.block_size) + own
            if rows >= self.num_slots or blocks > self.num_blocks:
                return number
            rows += len(ids)
        return len(groups)
