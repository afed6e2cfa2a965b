"""Cohort: samples that share pages and slots, and the steps in which a replica's ranks continue them.

All ranks of a replica execute the scheduler's steps in lockstep (continuous batching). StepPasses computes
this stage's part of them.

Every step is started, then counted, then read. Counting needs no tokens: it gives each row of the step one
token more, and stops those that have the most tokens that they may get now. Reading waits for the tokens, and
stops the rows that end with theirs. On the paged path, without a pipeline, the next step starts before the
last one has been read. While no row waits for a slot, the host reads several steps at once: it waits once for
all of them, and rows that have ended meanwhile compute tokens that nobody reads.

Say that rows 7 and 8 decode in step 1, in which 8 gets as many tokens as it may have, and 7 draws its
end-of-sequence token. The next `advance` calls

- `_count(step 1)`: the scheduler's `count([False, True])` frees the slot of 8.
- `StepPasses.start(step 2)`, in which 7 decodes again, and gets a token that nobody will read.
- `_read()` of step 1: 7 has ended. The scheduler's `end({7})` frees its slot, and step 2 notes 7 in
  `ended_before`, so that the next `_count` counts no token for it.

If a later round may continue 8, `count` parks it instead: 8 leaves its slot and keeps its blocks. Should its
token turn out to be an end, too, `end({7, 8})` releases them.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from realhf.calls import Beginning, Observation, SampleId
from realhf.inference.cache_memory import CacheSizes, GenerationLimits
from realhf.inference.kv_cache import BlockManager
from realhf.inference.page_pool import PagePool
from realhf.inference.prompt_queue import PromptQueue
from realhf.inference.response_buffer import PromptGroup, ResponseBuffer, Size
from realhf.inference.rounds import RestingCache
from realhf.inference.scheduler import MOST_STEPS, BufferRow, DecodeWindows, Prompt, Scheduler
from realhf.inference.step_passes import StartedStep, StepPasses
from realhf.models.kv_blocks import num_blocks
from realhf.nn.transformer import Transformer

_READ_SHARE = 16
"""Of every so many steps, one may be computed for rows that have ended."""


class EndedTurn(NamedTuple):
    """A turn of a sample that is `finished`, or has as many tokens as it may get now."""

    sample: SampleId
    tokens: list[int]
    finished: bool


class Cohort:
    """Samples that share pages and slots in one round.

    With a `resting` cache, the unfinished samples of the round before go on from their cached tokens, all new
    groups begin here, and their pages stay leased.

    With `turn_ends`, samples are answered in turns, which these tokens end. They come by `begin`; their
    sizes, as far as they are known, are `expected`. A sample whose turn has ended parks, `ended_turns` tells
    so, and `follow` continues or ends it. In the buffer each turn is a row of its own.
    """

    def __init__(
        self, model: Transformer, limits: GenerationLimits, groups: Sequence[PromptGroup],
        *, queue: PromptQueue, seed: int, pool: PagePool, resting: RestingCache | None = None,
        turn_ends: Collection[int] | None = None, expected: Sequence[Size] = (),
    ) -> None:
        self._expected = expected
        self.sizes = CacheSizes([*(group.size for group in groups), *expected], limits)
        num_first = self.sizes.num_at_once(groups) if resting is None else len(groups)
        self._first_groups = groups[:num_first]
        self.rest = groups[num_first:]
        """The groups that have to wait in the queue."""
        self._model = model
        self._limits = limits
        self._pool = pool
        self._resting = resting
        self._parallel = model.groups
        self._queue = queue
        num_returning = 0 if resting is None else len(resting.rows)
        capacity = sum(len(group.ids) for group in groups) + num_returning
        capacity += sum(size.num_samples for size in expected)
        self.buffer = ResponseBuffer(
            capacity, work=limits.work, seed=seed, device=model.flat.device,
            eos_ids=model.config.eos_token_ids if turn_ends is None else sorted(turn_ends),
            vocab_range=model.vocab_range if self._parallel.is_last_stage else None, budget=limits.budget)
        # Rows of a longrope model restart by their lengths, which must then be known. In a pipeline, other
        # cohorts keep the device busy.
        self._is_ahead = (
            pool.backends is not None and model.rope_boundary is None and self._parallel.layout.pp == 1)
        # Rows that park must know how many tokens they have; penalties forget rows that have ended.
        self._reads_together = (
            self._is_ahead and turn_ends is None and resting is None and not self.buffer.has_processing)
        self._passes: StepPasses | None = None
        self._last: StartedStep | None = None
        self._unread: list[StartedStep] = []
        """Steps that have been counted, and whose tokens the host has not read."""
        self._windows = DecodeWindows(self._parallel.ep_control)
        self._scheduler: Scheduler | None = None
        self._leased: list[int] = []
        self._in_turns = turn_ends is not None
        self._newly_ended: list[BufferRow] = []
        """The rows of turns that have ended, of which `ended_turns` has not told."""
        self._row_of: dict[SampleId, BufferRow] = {}
        """Sample -> the row of its last turn."""
        self.peers_wait = False
        """Whether samples of some rank of the ep group wait for environments, as it has last agreed."""

    def start(self, waiting: Sequence[PromptGroup]) -> None:
        """Lease pages and make the scheduler for as many rows as may run at once, within the budget.

        Any of the groups that are `waiting` may come out of the queue.
        """
        rows = [] if self._resting is None else self._resting.rows
        possible = [*(row.group for row in rows), *self._first_groups, *waiting]
        if not (possible or self._expected) and self._parallel.ep.size == 1:
            return
        sizes = CacheSizes([*(group.size for group in possible), *self._expected], self._limits)
        if self._resting is None:
            self._leased = self._pool.lease(sizes.num_blocks, page_size=sizes.block_size)
            blocks = BlockManager(self._leased)
        else:
            self._resting.make_room(self._first_groups, self._limits)
            blocks = self._resting.blocks
        self._tables = sizes.tables(self._pool.cache.num_blocks)
        self._passes = StepPasses(
            self._model, self._limits.work, pool=self._pool, tables=self._tables, buffer=self.buffer)
        returning = [row.continue_in(self.buffer) for row in rows]
        self.buffer.set_last_tokens([parked.row for parked in returning])
        prompts = [self.buffer.add(group) for group in self._first_groups]
        self._scheduler = Scheduler(
            prompts, tables=self._tables,
            history=self.buffer.history, prefill_tokens=self._limits.work.prefill_tokens,
            restart_at=self._model.rope_boundary, more=self._take_prompt, blocks=blocks,
            returning=returning, may_go_on=self._may_go_on, takes_from_parked=self._in_turns,
            copies_prefixes=self._pool.backends is None and self._model.copies_prefixes)

    def _take_prompt(self) -> Prompt | None:
        group = self._queue.take()
        return None if group is None else self.buffer.add(group)

    def begin(self, group: Beginning) -> None:
        """Add samples that have a start now, or go on from an earlier round."""
        assert self._scheduler is not None
        self._make_room(group.num_start + group.most)
        prompt = self.buffer.add(PromptGroup(
            group.tokens, group.samples, group.num_drawn, group.num_drawn + group.limit, group.num_before))
        self._row_of |= zip(group.samples, prompt.rows, strict=True)
        if group.limit:
            self._scheduler.add(prompt)

    def follow(self, observation: Observation) -> None:
        """Continue a sample whose turn has ended with an environment's tokens, or end it."""
        assert self._scheduler is not None
        sample, tokens, limit = observation
        row = self._row_of[sample]
        if not limit:
            self._scheduler.drop(row)
        if not (limit or tokens):
            return
        buffer = self.buffer
        num_before = int(buffer.num_before[row] + buffer.num_drawn[row] + buffer.lengths[row])
        prompt = buffer.add(PromptGroup(
            [*buffer.history(row), *tokens], [sample], limit=limit, num_before=num_before + len(tokens)))
        (self._row_of[sample],) = prompt.rows
        if limit:
            self._scheduler.continue_parked(prompt, row)

    def ended_turns(self) -> list[EndedTurn]:
        """Return the turns that have ended since the last call."""
        ended = [
            EndedTurn(
                SampleId(int(self.buffer.ids[row])),
                self.buffer.tokens[row, 1 : 1 + self.buffer.lengths[row]].tolist(),
                bool(self.buffer.finished[row]))
            for row in self._newly_ended]
        self._newly_ended = []
        return ended

    def _make_room(self, longest: int) -> None:
        """Widen the tables for rows of so many tokens, and lease the pages of one. Raises UserError if there
        may not be so many."""
        assert self._scheduler is not None and self._passes is not None
        needed = num_blocks(longest, self._tables.block_size)
        if needed <= self._tables.blocks_per_row:
            return
        self._limits.admit(longest)
        lacking = needed + 1 - self._scheduler.blocks.num_blocks
        if lacking > 0:
            pages = self._pool.lease(lacking, page_size=self._tables.block_size)
            self._leased += pages
            self._scheduler.blocks.grow(pages)
        self._tables.widen(needed, num_blocks=self._pool.cache.num_blocks)
        self._passes.tables_have_grown()

    @property
    def num_computed(self) -> int:
        """Tokens that have passed through this stage."""
        return 0 if self._passes is None else self._passes.num_computed

    @property
    def shares_experts(self) -> bool:
        """Whether ranks that run other samples take part in its steps."""
        return self._parallel.ep.size > 1

    def advance(self, *, waits: bool = False) -> bool:
        """Start the next step, and read the tokens of steps before; return whether there was a next one, on
        this rank or on another one of its ep group.

        The messages of a step are in flight until the next call. The rank `waits` if environments of samples
        are at work.
        """
        if self._scheduler is None:
            return False
        assert self._passes is not None
        self._passes.wait_for_sent()
        last = self._last
        if last is not None:
            self._passes.receive(last)
            self._count(last)
            self._unread.append(last)
        if not self._is_ahead or self._scheduler.may_reclaim or self._scheduler.is_idle:
            self._read(following=None)
        step = self._windows.next_step(
            self._scheduler, self.buffer, num_pages=self._passes.table_width,
            waits=waits or bool(self._newly_ended))
        is_running = self._windows.now.num_steps > 0
        self.peers_wait = self._windows.now.waits
        self._last = None
        if step is not None:
            self._last = self._passes.start(step, self._windows.now)
        elif is_running:  # Another rank of the ep group has a step.
            self._passes.start_empty(self._windows.now)
        if self._must_read():
            self._read(following=self._last)
        if not is_running and not self._in_turns:
            self.finish()
        return is_running

    def finish(self) -> None:
        """Leave the parked rows for the next round, or give the pages back."""
        if self._passes is not None:
            self._passes.wait_for_sent()
        if self._scheduler is not None and self._resting is not None:
            self._resting.take_over(self._scheduler.parked, self.buffer)
        self._pool.give_back(self._leased)
        self._leased = []
        self._scheduler = None

    def _count(self, last: StartedStep) -> None:
        """Stop the rows that have the most tokens of the round, or of their turn."""
        assert self._scheduler is not None and self._passes is not None
        live = last.live_rows()
        stopped = self.buffer.count(live)
        last.lengths = self.buffer.lengths[last.step.rows]
        if last.ended_before:  # The scheduler knows that these have ended.
            rows = np.array(live, np.int64)[stopped].tolist()
            stopped = np.isin(last.step.rows, [*last.ended_before, *rows])
        self._passes.copy(self._scheduler.count(stopped))

    def _must_read(self) -> bool:
        """Return whether to wait for the tokens of the unread steps, of which there may be more.

        A row that waits for a slot gets one as soon as another row has ended. Without such rows, the steps
        that rows compute beyond their ends are at most a sixteenth of those before.
        """
        assert self._scheduler is not None
        if not self._reads_together or self._scheduler.wants_slots:
            return True
        if not self._windows.has_ended:  # Its steps are taken whoever ends.
            return False
        if self._scheduler.has_queued or not self._queue.is_over or self.shares_experts:
            return True
        longest = max((step.lengths.max(initial=0) for step in self._unread[-1:]), default=0)
        return len(self._unread) >= min(MOST_STEPS, 1 + int(longest) // _READ_SHARE)

    def _read(self, *, following: StartedStep | None) -> None:
        """Stop the rows that end with their tokens of the unread steps; the `following` step may have
        started. The host waits for the last of these steps only."""
        assert self._scheduler is not None and self._passes is not None
        steps = self._unread
        self._unread = []
        if steps:
            steps[-1].download.wait()
        for number, step in enumerate(steps):
            live = step.live_rows()
            tokens_S = step.download.arrived()
            lengths_S = step.lengths
            if step.ended_before:
                is_live_S = ~np.isin(step.step.rows, list(step.ended_before))
                tokens_S = tokens_S[is_live_S]
                lengths_S = lengths_S[is_live_S]
            finished = self.buffer.finish(live, tokens_S, lengths_S)
            rows = np.array(live, np.int64)
            if self._in_turns:
                have_ended = finished | (lengths_S >= self.buffer.limits(live))
                self._newly_ended += rows[have_ended].tolist()
            ends = rows[finished].tolist()
            later = [*steps[number + 1 :], *([] if following is None else [following])]
            for other in later:
                other.ended_before |= set(ends)
            self._passes.copy(self._scheduler.end(ends, is_next_planned=following is not None))

    def _may_go_on(self, row: BufferRow) -> bool:
        """Return whether a row that stops may get tokens in a later turn or round."""
        return self._in_turns or (self._resting is not None and self.buffer.may_go_on(row))
