"""Room: how many rows run at once in a generation, and the blocks of the cache that they have."""

from collections.abc import Sequence

from realhf.cache_blocks import block_size, blocks_for, num_blocks
from realhf.engine.samples import Job
from realhf.engine.work import Generate
from realhf.errors import UserError

_GIB = 1 << 30


class Room:
    """What a cache and its tables are made for, so that all of these prompts can pass through.

    It is one of `num_cohorts` that share the rows and the memory of `work`; a token takes `token_bytes`.
    """

    def __init__(self, jobs: Sequence[Job], work: Generate, *, token_bytes: int, num_cohorts: int) -> None:
        sizes, max_new = [(len(job.tokens), len(job.ids)) for job in jobs], work.sampling.max_new_tokens
        self.num_slots = min(-(-work.max_rows // num_cohorts), sum(count for _, count in sizes))
        self.longest = max(length for length, _ in sizes) + max_new
        self.max_sharers = max(count for _, count in sizes)
        self.block_size = block_size(sizes, max_new_tokens=max_new)
        self.num_blocks = blocks_for(
            sizes, size=self.block_size, num_slots=self.num_slots, max_new_tokens=max_new)
        self._work, self._num_cohorts = work, num_cohorts
        self._block_bytes, self._budget = token_bytes * self.block_size, self.num_blocks
        if work.kv_cache_gib is not None:
            self._budget = int(work.kv_cache_gib * _GIB / num_cohorts) // self._block_bytes
            self.num_blocks = min(self.num_blocks, self._budget)

    @property
    def blocks_per_row(self) -> int:
        return num_blocks(self.longest, self.block_size)

    def check(self, num_positions: int | None) -> None:
        """Raises UserError when a sample cannot fit in the model's positions or in the cache."""
        max_new = self._work.sampling.max_new_tokens
        if num_positions is not None and self.longest > num_positions:
            raise UserError(
                f"a prompt has {self.longest - max_new} tokens and sampling.max_new_tokens is {max_new}: "
                f"the model has learned {num_positions} positions")
        gib, least = self._work.kv_cache_gib, self.blocks_per_row + 1
        if gib is not None and self._budget < least:
            least_gib = least * self._num_cohorts * self._block_bytes / _GIB
            raise UserError(
                f"kv_cache_gib is {gib:g}: one sample of {self.longest} tokens (prompt and "
                f"sampling.max_new_tokens) needs {least_gib:.3g}")

    def num_at_once(self, jobs: Sequence[Job]) -> int:
        """How many of them, from the first on, have slots and blocks to begin with."""
        rows = blocks = 0
        for number, (tokens, ids) in enumerate(jobs):
            own = min(len(ids), self.num_slots - rows) * (len(ids) > 1)
            blocks += num_blocks(len(tokens), self.block_size) + own
            if rows >= self.num_slots or blocks > self.num_blocks:
                return number
            rows += len(ids)
        return len(jobs)
