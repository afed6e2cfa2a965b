"""Limits of a generation: how many rows decode at once, and how many blocks of the KV cache they may use.

All replicas agree on GenerationLimits; each cohort of samples derives its CacheSizes from them.
"""

from collections.abc import Callable, Sequence
from typing import Any

from realhf.calls import Generate
from realhf.errors import UserError
from realhf.inference.block_tables import BlockTables
from realhf.inference.rollout_buffer import PromptGroup, Size
from realhf.models.kv_blocks import SMALL, block_size, blocks_for, num_blocks

_GIB = 1 << 30


def agreed_sizes(groups: Sequence[PromptGroup], gather: Callable[[Any], list[Any]]) -> list[Size]:
    """Return three sizes of each replica: of its longest prompt, of its longest prompt with several samples,
    and of the prompt that is longest without drawn tokens.

    GenerationLimits depend on no other sizes. Each replica passes its own groups; `gather` returns the JSON
    documents of all replicas. Raises UserError on all replicas if a prompt is empty.
    """
    sizes = [group.size for group in groups]
    several = [size for size in sizes if size.num_samples > 1]
    longest = [max(candidates) for candidates in (sizes, several) if candidates]
    longest += [max(sizes, key=lambda size: size.num_undrawn)] if sizes else []
    empty = [i for group in groups if not group.tokens for i in group.ids]
    gathered = gather([longest, empty])
    if empty := [i for _, ids in gathered for i in ids]:
        raise UserError(f"the prompt of sample {min(empty)} is empty: it must have at least one token")
    return [Size(*size) for sizes, _ in gathered for size in sizes]


def check_positions(longest_prompt: int, max_new_tokens: int, num_positions: int | None) -> None:
    """Raise UserError if a prompt of this many tokens and its response exceed the model's positions."""
    if num_positions is not None and longest_prompt + max_new_tokens > num_positions:
        raise UserError(
            f"a prompt has {longest_prompt} tokens and sampling.max_new_tokens is {max_new_tokens}: "
            f"the model has {num_positions} positions")


class GenerationLimits:
    """The limits of all cohorts, the same on all replicas: none refuses a prompt that another one accepts."""

    def __init__(
        self, sizes: Sequence[Size], work: Generate, *, token_bytes: int, num_cohorts: int,
        cache_bytes: int | None = None, budget: int | None = None, fixed_block_size: int | None = None,
        page_tokens: int | None = None,
    ) -> None:
        """A token takes `token_bytes` of a rank's cache. The cohorts share the rows and the memory of `work`;
        if that sets no limit, `cache_bytes` is a rank's limit (None: there is none). A row gets at most
        `budget` tokens (None: as many as `work` allows). A cache that is kept has a `fixed_block_size`;
        blocks of a paged cache have a multiple of `page_tokens`."""
        max_new = work.sampling.max_new_tokens
        self.work = work
        self.num_cohorts = num_cohorts
        self.budget = budget
        self.new_tokens = max_new if budget is None else min(budget, max_new)
        """Most tokens that are drawn for a row."""
        self._token_bytes = token_bytes
        self._cache_bytes = cache_bytes
        self._longest = max((size.num_undrawn for size in sizes), default=0) + max_new
        prompts = [(size.num_undrawn, size.num_samples) for size in sizes]
        self.block_size = block_size(prompts or [(0, 1)], max_new_tokens=max_new, page_tokens=page_tokens)
        has_begun = any(size.num_drawn for size in sizes)
        if page_tokens is None and has_begun and self.affordable(self._least) < self._least:
            # The samples were accepted in an earlier round, perhaps with small blocks.
            self.block_size = min(self.block_size, SMALL)
        if fixed_block_size is not None:
            self.block_size = fixed_block_size

    @property
    def block_bytes(self) -> int:
        return self._token_bytes * self.block_size

    @property
    def _least(self) -> int:
        """Number of blocks with which a cohort can run any sample."""
        return num_blocks(self._longest, self.block_size) + 1

    def affordable(self, count: int) -> int:
        """Return how many of `count` blocks a cohort may have: at least enough for one sample, unless the
        user has set the limit."""
        if (gib := self.work.kv_cache_gib) is not None:
            return min(count, int(gib * _GIB / self.num_cohorts) // self.block_bytes)
        if self._cache_bytes is None:
            return count
        return min(count, max(self._least, self._cache_bytes // self.num_cohorts // self.block_bytes))

    def check(self, num_positions: int | None) -> None:
        """Raise UserError if a sample cannot fit in the model's positions or in the cache."""
        max_new = self.work.sampling.max_new_tokens
        check_positions(self._longest - max_new, max_new, num_positions)
        if self.affordable(self._least) < self._least:
            least_gib = self._least * self.num_cohorts * self.block_bytes / _GIB
            least_gib *= 1.01  # This exceeds what rounding to three digits takes away.
            raise UserError(
                f"kv_cache_gib is {self.work.kv_cache_gib:g} GiB: one sample of {self._longest} tokens "
                f"(prompt and sampling.max_new_tokens) needs {least_gib:.3g} GiB")


class CacheSizes:
    """The sizes of a cohort's cache and tables, large enough that each of these prompts can run."""

    def __init__(self, groups: Sequence[PromptGroup], limits: GenerationLimits) -> None:
        sizes = [group.size for group in groups]
        self.block_size = limits.block_size
        num_samples = sum(size.num_samples for size in sizes)
        self.num_slots = min(-(-limits.work.max_rows // limits.num_cohorts), num_samples)
        # (For rows that end in this round, because they reach `max_new_tokens`, this is too much.)
        self._longest = max((size.num_tokens for size in sizes), default=0) + limits.new_tokens
        self.num_wanted = blocks_for(
            [(size.num_tokens, size.num_samples) for size in sizes], size=self.block_size,
            num_slots=self.num_slots, max_new_tokens=limits.new_tokens)
        """Blocks with which no row has to wait for memory."""
        self.num_blocks = limits.affordable(self.num_wanted)

    def tables(self, cached_blocks: int | None = None) -> BlockTables:
        """Return empty tables for a cache of `cached_blocks` blocks (None: `num_blocks`)."""
        count = self.num_blocks if cached_blocks is None else cached_blocks
        return BlockTables(
            num_slots=self.num_slots, num_blocks=count, block_size=self.block_size,
            blocks_per_row=num_blocks(self._longest, self.block_size))

    def num_at_once(self, groups: Sequence[PromptGroup]) -> int:
        """Return how many of the groups, from the first on, find slots and blocks at the beginning."""
        rows = blocks = 0
        for number, size in enumerate(group.size for group in groups):
            own_blocks = min(size.num_samples, self.num_slots - rows) * (size.num_samples > 1)
            blocks += num_blocks(size.num_tokens, self.block_size) + own_blocks
            if rows >= self.num_slots or blocks > self.num_blocks:
                return number
            rows += size.num_samples
        return len(groups)
