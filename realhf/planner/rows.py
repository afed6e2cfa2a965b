"""The rows that a generation decodes at once, and the cache that they need.

A cache may reserve the full length of every row. It may also have room for what rows are expected to have:
they begin without tokens and end at different times, so at no time all of them are long. A run admits a
prompt when its blocks are free; when none is left for a row that grows, the newest row restarts, which means
that its tokens are computed again later (inference/scheduler.py).

So a cache holds as many rows as have room for what they have on average at the fullest moment. Further rows
would only take blocks from each other. Rows restart when all rows together have more than the cache; they are
the newest, so what they have drawn is short. tests/planner/test_rows.py compares all this with the scheduler.

Rounds of unfinished samples, and caches that are kept between them, reserve full lengths.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

from realhf.layout import ParallelStrategy
from realhf.models.kv_blocks import block_size, cached_heads, num_blocks, page_tokens, tokens_for
from realhf.models.model_config import TransformersConfig
from realhf.planner.problem import ModelRole, Workload
from realhf.planner.slowest_replica import PeakContext, Rollout, peak_context

SAFE = 3.0
"""Standard deviations of the tokens of all rows with room for which so few rows restart that they count as
none."""
_RESTARTED_SHARE = 0.25
"""Tokens that a restarted row has drawn, relative to those of the mean running row."""
_MOST_LACKING = 2 / 3
"""If the cache lacks so large a share of the tokens of all rows, some wait nearly all the time."""
_MANY = 4
"""With so many times as many rows as slots, some wait nearly all the time."""
GIB = 1 << 30
_NORMAL = NormalDist()
_PARTS = 1000  # Caches in plans are multiples of 1 / 1000 GiB.


@dataclass(frozen=True)
class RankRows:
    """The rows of a rank in one generation: in each of `num_cohorts`, of which every pipeline stage works on
    one at a time, `slots` of `samples` rows decode at once."""

    role: ModelRole
    work: Workload
    strategy: ParallelStrategy
    is_cuda: bool

    @cached_property
    def all_samples(self) -> int:
        """The most rows of a rank, if none ends before its last round."""
        work = self.work
        return -(-work.rounds * work.most_samples("generate", self.strategy.dp) // self.strategy.cp)

    @cached_property
    def num_cohorts(self) -> int:
        return max(1, min(self.strategy.pp, self.all_samples, self.work.max_rows))

    @cached_property
    def samples(self) -> int:
        return max(1, -(-self.all_samples // self.num_cohorts))

    @cached_property
    def slots(self) -> int:
        """The most rows of a cohort that have slots, whether or not the cache holds them."""
        return min(self.samples, -(-self.work.max_rows // self.num_cohorts))

    @property
    def reserves_all(self) -> bool:
        """Whether caches have room for the full length of every row."""
        work = self.work
        are_reserved = work.rounds > 1 or work.keeps_cache or isinstance(self.role.config, TransformersConfig)
        return are_reserved or work.lengths.all_equal

    # Tokens in the cache of a cohort

    @cached_property
    def whole_tokens(self) -> int:
        """Tokens in the cache of a cohort whose slots have the longest rows."""
        return self._whole(self.slots)

    def _whole(self, rows: int) -> int:
        """Return the tokens of so many rows at full length.

        The rows of each age have what they got in earlier rounds, and room for this one. A cache that is kept
        between rounds holds all rows at once, as far as they can grow.
        """
        work = self.work
        samples = -(-self.samples // work.rounds)
        rows = self.samples if work.keeps_cache else rows
        cached_tokens = 0
        for age in reversed(range(work.num_ages)):
            had = age * work.round_tokens
            slots = min(rows, samples)
            rows -= slots
            if slots:
                left = work.max_new_tokens - had
                cached_tokens += tokens_for(
                    math.ceil(work.longest_prompt) + had, work.samples_per_prompt if age == 0 else 1,
                    num_slots=slots, num_samples=samples,
                    max_new_tokens=left if work.keeps_cache else min(left, work.round_tokens),
                    page_tokens=self._page_tokens)
        return cached_tokens

    @cached_property
    def _least_tokens(self) -> float:
        """Tokens of a cache in which any row can run."""
        longest = math.ceil(self.work.longest_prompt) + self.work.max_new_tokens
        return (num_blocks(longest, self._block_size) + 1.0) * self._block_size

    @cached_property
    def _peak(self) -> PeakContext:
        """The tokens of a slot that no other row shares, at the fullest moment."""
        return self._peak_of(self.samples)

    def _peak_of(self, samples: int) -> PeakContext:
        """Return the same for another number of rows in all."""
        work = self.work
        rollout = Rollout(
            work.lengths, 1, float(samples), float(min(samples, self.slots)), 1, False,
            work.samples_per_prompt, work.alike)
        return peak_context(rollout, self._own_prompt + self._block_size / 2)

    @cached_property
    def safe_tokens(self) -> float:
        """Tokens of a cohort's cache in which all slots have rows; further tokens are of no use."""
        if self.reserves_all:
            return self.whole_tokens
        tokens = self._peak.of(self.slots, deviations=SAFE) + self._shared_tokens(self.slots)
        return min(float(self.whole_tokens), max(tokens, self._least_tokens))

    @cached_property
    def least_tokens(self) -> float:
        """The least tokens of a cache that holds `slots` rows at once, among which may be more slots.

        If no row waits, ended rows are not replaced, so that more slots may need less.
        """
        if self.reserves_all:
            return self.whole_tokens
        per_row = min(self._peak.mean, self._peak_of(self.slots).mean)  # That is if none waits.
        tokens = self.slots * per_row + self._shared_tokens(self.slots)
        return min(float(self.whole_tokens), max(tokens, self._least_tokens))

    @cached_property
    def _page_tokens(self) -> int | None:
        return page_tokens(self.role.config, self.role.dtype) if self.is_cuda else None

    @cached_property
    def _block_size(self) -> int:
        prompts = [(math.ceil(self.work.longest_prompt), self.work.samples_per_prompt)]
        return block_size(prompts, max_new_tokens=self.work.max_new_tokens, page_tokens=self._page_tokens)

    @cached_property
    def _shared_blocks(self) -> int:
        """Blocks of a prompt that its samples share."""
        shares = self.work.samples_per_prompt > 1
        return math.ceil(self.work.longest_prompt) // self._block_size * shares

    @cached_property
    def _own_prompt(self) -> float:
        """Tokens of the prompt that each row has for itself."""
        return max(0.0, self.work.prompt_tokens - self._shared_blocks * self._block_size)

    def _shared_tokens(self, rows: int) -> float:
        """Return the tokens of the blocks that samples share, for as many prompts as `tokens_for` counts."""
        group = self.work.samples_per_prompt
        prompts = min(-(-self.samples // group), -(-2 * rows // group))
        return prompts * (self._shared_blocks + 1) * self._block_size * (group > 1)

    # Bytes, and what a limit does

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of a token in the cache of the stage with the most layers."""
        config = self.role.config
        width = cached_heads(config, self.strategy.tp).width
        return width * self.role.itemsize * -(-config.num_layers // self.strategy.pp)

    def gib_of(self, tokens: float) -> float:
        """Return the GiB of a rank whose cohorts have caches of so many tokens, rounded up."""
        block_bytes = self._block_size * self.token_bytes
        blocks = math.ceil(tokens / self._block_size)
        return math.ceil(self.num_cohorts * blocks * block_bytes / GIB * _PARTS) / _PARTS

    def cache_for(self, num_bytes: float) -> float | None:
        """Return the GiB of the largest cache that is of use within so many bytes of a rank; None if no row
        of full length fits, or if all rows must."""
        gib = math.floor(num_bytes / GIB * _PARTS) / _PARTS
        if self.reserves_all or gib < self.gib_of(self._least_tokens):
            return None
        return min(gib, self.gib_of(self.safe_tokens))

    @cached_property
    def limit_tokens(self) -> float:
        """Tokens that the cache of a cohort may have at most."""
        if self.work.kv_cache_gib is None:
            return math.inf
        return self.work.kv_cache_gib * GIB / self.num_cohorts / self.token_bytes

    @cached_property
    def held(self) -> float:
        """The rows of a cohort that decode at once, on average: as many as have slots and are held by the
        cache.

        The tokens of all rows are taken to be normally distributed. If the cache is too small for rows of
        which none waits, those that restart take the places of others that end, as waiting rows would.
        """
        if self.limit_tokens >= self.safe_tokens:
            return float(self.slots)
        if self.reserves_all:
            return float(largest(self.slots, lambda rows: self._whole(rows) <= self.limit_tokens) or 1)
        spread, spare = self._spread_and_spare
        z = spare / spread
        lacking = spread * _NORMAL.pdf(z) - spare * _NORMAL.cdf(-z)
        needed = self.limit_tokens - spare
        if_none_waits = self._rows_with(needed - lacking, self._peak.mean)
        while_some_wait = self._peak_of(max(self.samples, _MANY * self.slots)).mean
        if_some_wait = min(if_none_waits, self._rows_with(self.limit_tokens, while_some_wait))
        share = min(1.0, max(0.0, -spare / needed / _MOST_LACKING))
        return float(if_none_waits ** (1 - share) * if_some_wait**share)

    def _rows_with(self, tokens: float, per_row: float) -> float:
        """Return how many rows have so many tokens in all, if each has `per_row` besides those it shares."""
        group = self.work.samples_per_prompt
        of_prompt = (self._shared_blocks + 1) * self._block_size * (group > 1)
        if_all_prompts_begin = (tokens - -(-self.samples // group) * of_prompt) / per_row
        rows = max(tokens / (per_row + 2 * of_prompt / group), if_all_prompts_begin)
        return min(float(self.slots), max(1.0, rows))

    @cached_property
    def restarted_tokens(self) -> float:
        """Tokens that are computed again for each row, on average."""
        if self.limit_tokens >= self.safe_tokens or self.reserves_all:
            return 0.0
        spread, spare = self._spread_and_spare
        drawn = max(0.0, self._peak.mean - self._own_prompt)
        return _NORMAL.cdf(-spare / spread) * (self.work.prompt_tokens + _RESTARTED_SHARE * drawn)

    @property
    def most_cached(self) -> float:
        """The rows of a cohort that the cache holds while some of them wait for environments.

        It is as large as its slots need. A row that waits has ended some of its turns, all equally probable.
        """
        lengths = self.work.lengths
        turns = 1.0 if self.work.turns is None else self.work.turns.counts.mean
        drawn = lengths.squared_mean / max(1e-9, 2 * lengths.mean) * (1 + 1 / turns)
        room = min(self.limit_tokens, self.whole_tokens) - self._shared_tokens(self.slots)
        return max(float(self.slots), room / (self._own_prompt + self._block_size / 2 + drawn))

    @cached_property
    def _spread_and_spare(self) -> tuple[float, float]:
        """The standard deviation of the tokens of all rows at the fullest moment, and how many more tokens
        than their mean the cache holds then."""
        needed = self._peak.of(self.slots, deviations=0.0) + self._shared_tokens(self.slots)
        spread = self._peak.deviation_per_row * math.sqrt(self.slots)
        return max(spread, 1e-9), self.limit_tokens - needed


def largest(most: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number up to `most` that fits, if all smaller ones do; 0 if none does."""
    if fits(most):
        return most
    low = 0
    high = most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
