"""Scheduler: which rows decode and which prompts are prefilled in the next step (continuous batching).

A row is a place in the response buffer: a sample, or one of its turns. It decodes in a slot, which is filled
again as soon as the row has ended (Orca, Yu et al. 2022). Rows get memory in blocks as they grow; when no
block is left, the newest row gives up its blocks and is computed again later (vLLM, arXiv:2309.06180). All
decisions depend on lengths alone, so that they are the same on every rank of a replica.

| state of a row | it waits for | its blocks |
|---|---|---|
| queued | its tokens to be computed, for the first time or again | none, or those that are cached already |
| ready | a slot; its prompt is cached | those of its prompt, shared with other rows of this |
| returning | a slot, in which it goes on where it was parked | its own |
| running | nothing: it has a slot and decodes | its own, one more whenever they are full |
| parked | its environment, or the next round | its own, unless they have been taken away |
| ended | nothing | none |

The ranks of an expert-parallel group decode different rows but pass through the experts together, so each
takes part in the steps of the others. DecodeWindows has them agree on the number and the shapes of the next
steps. Inside such a window they exchange no further messages about it: a rank without rows computes padding
until the window ends. A window in which prompts are prefilled has a single step, because the number of rows
grows after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NewType

import numpy as np
from numpy.typing import NDArray

from realhf.attention.interface import num_common_tokens
from realhf.distributed.group import Group
from realhf.inference.kv_cache import BlockManager, BlockTables, Flags
from realhf.models.kv_blocks import num_blocks, padded_size

if TYPE_CHECKING:
    from realhf.inference.response_buffer import ResponseBuffer

BufferRow = NewType("BufferRow", int)
"""The place of a sample, or of one of its turns, in the ResponseBuffer of a cohort."""
MOST_STEPS = 16
"""Most steps of a window. Free slots are filled only when it ends, and its last steps may have no rows."""


@dataclass(eq=False)
class Prompt:
    """Tokens that are prefilled once, and the rows that continue them.

    The tokens of a parked row, to which an environment has added some, are a prompt, too: the first
    `num_cached` of them are in its blocks, of which it shares the first `num_shared` with other rows.
    """

    tokens: list[int]
    rows: list[BufferRow]
    blocks: list[int] = field(default_factory=list)
    num_cached: int = 0
    waiting: list[BufferRow] = field(default_factory=list)  # Those that have their first token, but no slot.
    num_started: int = 0
    num_shared: int = 0
    follows: bool = False  # Whether it goes on from an earlier turn, or again where others can be parked.

    def __post_init__(self) -> None:
        # An empty prompt has no hidden state: its rows would continue the token of another prompt.
        assert self.tokens, "a prompt has at least one token"


@dataclass(frozen=True)
class Chunk:
    """Tokens [start, stop) of a prompt, which one pass prefills."""

    prompt: Prompt
    start: int
    stop: int
    num_shared: int = 0
    """So many of its first tokens are computed with those of the first chunk that begins a prompt."""

    @property
    def tokens(self) -> list[int]:
        """The tokens that pass."""
        return self.prompt.tokens[self.start + self.num_shared : self.stop]

    @property
    def is_last(self) -> bool:
        return self.stop == len(self.prompt.tokens)

    def cache_positions(self, block_size: int) -> list[int]:
        blocks = self.prompt.blocks
        return [blocks[i // block_size] * block_size + i % block_size for i in range(self.stop)]


@dataclass(frozen=True)
class Step:
    """Copies of blocks, and then one pass in which all rows decode and chunks of prompts are prefilled.

    Chunks that attend to cached tokens of their prompts come before those that begin one.
    """

    copies: list[tuple[int, int]]  # Block to copy from, block to copy to.
    decoding: list[BufferRow]  # Rows that decode one token, in order of their slots.
    chunks: list[Chunk]

    @property
    def continued(self) -> list[Chunk]:
        """The chunks whose prompts have cached tokens, their own or copies of those of another one."""
        return [chunk for chunk in self.chunks if chunk.start > 0]

    @property
    def fresh(self) -> list[Chunk]:
        """The chunks that begin their prompts."""
        return [chunk for chunk in self.chunks if chunk.start == 0]

    def with_shared_prefix(self) -> Step:
        """Return the step in which the tokens that all fresh chunks begin with are computed once."""
        fresh = self.fresh
        num_shared = num_common_tokens([np.array(chunk.tokens[:-1], np.int64) for chunk in fresh])
        if not num_shared:
            return self
        sharing = [replace(chunk, num_shared=num_shared) for chunk in fresh[1:]]
        return replace(self, chunks=[*self.continued, fresh[0], *sharing])

    @property
    def last_tokens(self) -> list[int]:
        """For each of `rows`, the index in the pass of the token that it continues."""
        count = len(self.decoding)
        indices = list(range(count))
        for chunk in self.chunks:
            count += len(chunk.tokens)
            if chunk.is_last:
                indices += [count - 1] * len(chunk.prompt.rows)
        return indices

    @property
    def rows(self) -> list[BufferRow]:
        """Rows that get a token: those that decode, then the rows of prompts that are now complete."""
        return [*self.decoding, *(row for chunk in self.chunks if chunk.is_last for row in chunk.prompt.rows)]


@dataclass(frozen=True)
class ParkedRow:
    """The blocks of a row that has no slot, and how it shares them (see BlockTables.start).

    Its first `num_cached` tokens are cached: all but the last.
    """

    row: BufferRow
    blocks: list[int]
    num_cached: int
    num_shared: int
    ordinal: int


class Scheduler:
    """Plans the steps that bring all rows of a queue of prompts to their ends."""

    def __init__(
        self, prompts: Iterable[Prompt], *, tables: BlockTables, prefill_tokens: int,
        history: Callable[[BufferRow], list[int]], restart_at: int | None = None,
        more: Callable[[], Prompt | None] = lambda: None, blocks: BlockManager | None = None,
        returning: Iterable[ParkedRow] = (), may_go_on: Callable[[BufferRow], bool] = lambda row: False,
        takes_from_parked: bool = False, copies_prefixes: bool = False,
    ) -> None:
        """`history` returns a row's prompt and all of its tokens so far. A row that reaches `restart_at`
        tokens is computed again before it grows further. When the queue is empty and a slot is free, `more`
        is called for another prompt, until it returns None.

        `blocks` are those of a cache that rests, in which the `returning` rows have their blocks; None: all
        blocks are free. These rows go on first.

        A row that stops is parked if it `may_go_on`, and ends otherwise. Parked rows lose their blocks
        before others do if the scheduler `takes_from_parked`; `continue_parked` then has them computed again.
        Otherwise there must be enough blocks for all rows.

        If it `copies_prefixes`, a prompt gets copies of what it has in common with that of a row that runs,
        and only its other tokens are computed."""
        self._queued = deque(prompts)
        self._more = more
        self._history = history
        self._prefill_tokens = prefill_tokens
        self._restart_at = restart_at
        self.blocks = BlockManager(range(tables.num_blocks)) if blocks is None else blocks
        self._tables = tables
        self._ready: deque[Prompt] = deque()
        """Cached prompts, each with rows that are ready."""
        self._running: dict[int, BufferRow] = {}
        """Slot -> row, the newest last."""
        self._free_slots = list(range(tables.num_slots))[::-1]
        self._returning = deque(returning)
        self._may_go_on = may_go_on
        self._takes_from_parked = takes_from_parked
        self.parked: list[ParkedRow] = []
        self._copies_prefixes = copies_prefixes
        self._prompt_of: dict[int, NDArray[np.int64]] = {}
        """Slot -> the tokens of the prompt with which its row has begun here, if prefixes are copied."""
        self._last: Step | None = None
        self._last_slots: list[int] = []
        """The slots of the last step's rows."""
        self.num_restarts = 0
        """Rows that gave up their blocks and were computed again."""

    def plan(self, *, prefills: bool = True) -> Step | None:
        """Return the next step; `update` must be called before the next one.

        Return None when all rows have ended; and, for a step that may not have `prefills`, when no row can
        run.
        """
        self._restart_long_rows()
        self._grow()
        copies = self._start_rows()
        self._grow()
        chunks = self._chunks(copies) if prefills else []
        if not self._running and not chunks:
            waits = self._queued or self._ready or self._returning
            assert not (prefills and waits), "rows wait, but nobody can begin"
            return None
        self._last_slots = self._tables.running().tolist()
        self._last = Step(copies, [self._running[slot] for slot in self._last_slots], chunks)
        return self._last

    @property
    def is_idle(self) -> bool:
        """Whether no row runs and none can begin, but for those that are parked."""
        return not (self._running or self._queued or self._ready or self._returning)

    @property
    def wants_slots(self) -> bool:
        """Whether rows whose prompts are cached wait for slots."""
        return bool(self._ready or self._returning)

    @property
    def has_queued(self) -> bool:
        """Whether prompts wait in its queue."""
        return bool(self._queued)

    def add(self, prompt: Prompt) -> None:
        """Queue a further prompt."""
        self._queued.append(prompt)

    def continue_parked(self, prompt: Prompt, row: BufferRow) -> None:
        """Queue what follows the turn of a `row`, whose cached tokens need not be computed again if it has
        its blocks still. It comes before prompts that have not begun."""
        if (parked := self._unpark(row)) is not None:
            prompt.blocks = list(parked.blocks)
            prompt.num_cached = parked.num_cached
            prompt.num_shared = parked.num_shared
            prompt.num_started = parked.ordinal
        prompt.follows = True
        self._insert(prompt, _num_followers(self._queued))

    def _insert(self, prompt: Prompt, place: int) -> None:
        """Insert a prompt into the queue, but not before one of which a part has been prefilled."""
        first_has_begun = len(self._queued) > 0 and len(self._queued[0].blocks) > 0
        self._queued.insert(max(place, int(first_has_begun)), prompt)

    def drop(self, row: BufferRow) -> None:
        """Release the blocks of a row that has been parked."""
        if (parked := self._unpark(row)) is not None:
            self.blocks.release(parked.blocks)

    def _unpark(self, row: BufferRow) -> ParkedRow | None:
        """Remove a row from those that are parked; None: its blocks have been taken away."""
        parked = next((one for one in self.parked if one.row == row), None)
        if parked is not None:
            self.parked.remove(parked)
        return parked

    @property
    def prefilled_rows(self) -> list[BufferRow]:
        """The rows that run, or could run without a prompt being prefilled first."""
        waiting = [row for prompt in self._ready for row in prompt.waiting]
        return [*self._running.values(), *(parked.row for parked in self._returning), *waiting]

    @property
    def most_rows(self) -> int:
        """The most rows that can run in the next steps if no prompt is prefilled."""
        return min(self._tables.num_slots, len(self.prefilled_rows))

    @property
    def may_reclaim(self) -> bool:
        """Whether the next plan may have to take blocks away from a row or a prompt."""
        starts = len(self._returning) + sum(len(prompt.waiting) for prompt in self._ready)
        # A row that starts takes one block at most: for a copied tail, or for its next token.
        wants = len(self._tables.full()) + min(starts, len(self._free_slots))
        return self.blocks.num_free < wants

    def count(self, stopped: Sequence[bool] | Flags) -> list[tuple[int, int]]:
        """Record which of the last step's `rows` stop, as they have the most tokens that they may get now.

        `end` follows when the tokens have been read (see the example in cohort.py). Returns blocks to copy at
        once, as (from, to).
        """
        assert self._last is not None
        copies: list[tuple[int, int]] = []
        num_rows = len(self._last_slots)
        for index in np.flatnonzero(np.asarray(stopped[:num_rows], dtype=bool)).tolist():
            slot = self._last_slots[index]
            if self._running.get(slot) == self._last.decoding[index]:  # Others have ended already.
                self._leave(slot)
        flags = iter(stopped[num_rows:])
        for prompt in (chunk.prompt for chunk in self._last.chunks if chunk.is_last):
            pairs = list(zip(prompt.rows, flags, strict=False))
            parks = {row for row, stops in pairs if stops and self._may_go_on(row)}
            prompt.waiting = [row for row, stops in pairs if not stops or row in parks]
            if not prompt.waiting:
                self.blocks.release(prompt.blocks)
                continue
            copies += self._park_ready(prompt, parks)
            if prompt.waiting:
                place = _num_followers(self._ready) if prompt.follows else len(self._ready)
                self._ready.insert(place, prompt)
        return copies

    def end(self, rows: Collection[BufferRow], *, is_next_planned: bool = False) -> list[tuple[int, int]]:
        """Stop rows by their tokens of the step for which `count` has been called last.

        If the next step `is_next_planned`, these rows compute one token too many in it, which nobody reads.
        Rows that cannot go on may have computed more of these, and may have been stopped by `count` since.
        Returns blocks to copy at once, as (from, to).
        """
        slot_of = {row: slot for slot, row in self._running.items()} if rows else {}
        copies: list[tuple[int, int]] = []
        for row in rows:
            slot = slot_of.get(row)
            if slot is not None:
                self._leave(slot, num_unread=int(is_next_planned))
            else:
                copies += self._end_without_slot(row)
        return copies

    def _end_without_slot(self, row: BufferRow) -> list[tuple[int, int]]:
        """Stop a row that is ready or parked; others have ended already."""
        for prompt in [prompt for prompt in self._ready if row in prompt.waiting]:
            copies = []
            if self._may_go_on(row):
                copies = self._park_ready(prompt, {row})
            else:
                prompt.waiting.remove(row)
                if not prompt.waiting:
                    self.blocks.release(prompt.blocks)
            if not prompt.waiting:
                self._ready.remove(prompt)
            return copies
        if not self._may_go_on(row):
            self.drop(row)
        return []

    def _leave(self, slot: int, *, num_unread: int = 0) -> None:
        """Park the row of a slot, without its last `num_unread` tokens, or end it."""
        if not self._may_go_on(self._running[slot]):
            self._stop(slot)
            return
        num_cached = int(self._tables.lens[slot]) - num_unread
        num_shared, ordinal = self._tables.sharing(slot)
        blocks = self._free(slot)
        self.parked.append(ParkedRow(self._running.pop(slot), blocks, num_cached, num_shared, ordinal))

    def _park_ready(self, prompt: Prompt, parks: Collection[BufferRow]) -> list[tuple[int, int]]:
        """Give blocks of their own to rows of a cached prompt that park before they have had a slot."""
        copies = []
        num_tail = int(len(prompt.tokens) % self._tables.block_size > 0)
        for row in [row for row in prompt.waiting if row in parks]:
            if self._takes_from_parked and len(prompt.waiting) > 1 and self.blocks.num_free < num_tail:
                prompt.waiting.remove(row)  # It loses its blocks at once.
                continue
            blocks, tail_copies = self._blocks_of_next_row(prompt)
            copies += tail_copies
            prompt.waiting.remove(row)
            self.parked.append(
                ParkedRow(row, blocks, len(prompt.tokens), self._num_shared(prompt), prompt.num_started))
            prompt.num_started += 1
        return copies

    def _num_shared(self, prompt: Prompt) -> int:
        """Return how many blocks the rows of a prompt share."""
        is_shared = len(prompt.rows) > 1
        return len(prompt.tokens) // self._tables.block_size if is_shared else prompt.num_shared

    def _stop(self, slot: int) -> BufferRow:
        """Free a slot and its blocks; return the row that had it."""
        self.blocks.release(self._free(slot))
        return self._running.pop(slot)

    def _free(self, slot: int) -> list[int]:
        """Free a slot; return the blocks of the row that had it."""
        self._free_slots.append(slot)
        self._prompt_of.pop(slot, None)
        return self._tables.stop(slot)

    def _restart(self, row: BufferRow, *, has_run: bool = True) -> None:
        """Queue a row to be computed again; one that `has_run` goes on before others begin."""
        self.num_restarts += 1
        follows = has_run and self._takes_from_parked
        place = 0 if has_run else _num_followers(self._queued)
        self._insert(Prompt(self._history(row), [row], follows=follows), place)

    def _restart_waiting(self, prompt: Prompt) -> None:
        """Release the prompt's blocks and queue its waiting rows to be computed again."""
        self.blocks.release(prompt.blocks)
        for row in reversed(prompt.waiting):
            self._restart(row, has_run=prompt.follows)

    def _restart_long_rows(self) -> None:
        if self._restart_at is not None:
            for prompt in [prompt for prompt in self._ready if len(prompt.tokens) == self._restart_at]:
                self._ready.remove(prompt)
                self._restart_waiting(prompt)
            lens = self._tables.lens
            for slot in [slot for slot in self._running if lens[slot] == self._restart_at]:
                self._restart(self._stop(slot))

    def _grow(self) -> None:
        """Give every row a block for its next token; if there are too few, some rows lose all of theirs."""
        for slot in self._tables.full():
            while slot in self._running and self.blocks.num_free == 0:
                self._reclaim_blocks()
            if slot in self._running:
                self._tables.append(slot, *self.blocks.allocate(1))

    def _reclaim_blocks(self) -> None:
        """Release the blocks of the prompt or row that has waited or run for the shortest time; parked rows
        and prompts in the queue come first."""
        if self._reclaim_idle_blocks():
            return
        if len(self._ready) > 1 or (self._ready and self._running):  # Keep a last one that can start at once.
            self._restart_waiting(self._ready.pop())
        else:
            self._restart(self._stop(next(reversed(self._running))))

    def _reclaim_idle_blocks(self, *, but: Prompt | None = None) -> bool:
        """Release the blocks of a parked row, or of a prompt in the queue: one that has been prefilled in
        part, or that goes on from an earlier turn. Return whether there was one, `but` this prompt."""
        if self._takes_from_parked and self.parked:
            self.blocks.release(self.parked.pop().blocks)
            return True
        prompt = next((p for p in reversed(self._queued) if p.blocks and p is not but), None)
        if prompt is None:
            return False
        self.blocks.release(prompt.blocks)
        prompt.blocks = []
        prompt.num_cached = prompt.num_shared = prompt.num_started = 0
        return True

    def _start_rows(self) -> list[tuple[int, int]]:
        """Start rows of ready prompts in the free slots; return the blocks to copy, as (from, to).

        Say that a block has 64 tokens. A prompt of 150 tokens with two rows fills blocks 0 and 1, and 22
        tokens of block 2, its tail. The first row shares blocks 0 and 1 and gets a copy of the tail, as it
        goes on writing there; the last row takes the tail itself. A prompt of 128 tokens has no tail, so each
        of its rows gets an empty block for its next token.
        """
        copies = []
        while self._returning and self._free_slots:
            parked = self._returning.popleft()
            slot = self._free_slots.pop()
            self._tables.start(
                slot, parked.blocks, length=parked.num_cached, num_shared=parked.num_shared,
                ordinal=parked.ordinal)
            self._running[slot] = parked.row
        while self._ready and self._free_slots:
            prompt = self._ready[0]
            has_tail = len(prompt.tokens) % self._tables.block_size > 0
            is_last = len(prompt.waiting) == 1
            if not (has_tail and is_last):  # It needs one more block: a copy of the tail, or an empty one.
                while not self._running and self.blocks.num_free == 0:
                    self._reclaim_blocks()
                if self.blocks.num_free == 0:
                    break
            slot = self._free_slots.pop()
            blocks, tail_copies = self._blocks_of_next_row(prompt)
            copies += tail_copies
            self._tables.start(
                slot, blocks, length=len(prompt.tokens), num_shared=self._num_shared(prompt),
                ordinal=prompt.num_started)
            if not has_tail:
                self._tables.append(slot, *self.blocks.allocate(1))
            self._running[slot] = prompt.waiting.pop(0)
            if self._copies_prefixes:
                self._prompt_of[slot] = np.array(prompt.tokens, np.int64)
            prompt.num_started += 1
            if is_last:
                self._ready.popleft()
        return copies

    def _blocks_of_next_row(self, prompt: Prompt) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the row's blocks for the tokens of its prompt, and the copy of the tail if it needs one."""
        if len(prompt.waiting) == 1:  # No other row will need them.
            return prompt.blocks, []
        num_full = len(prompt.tokens) // self._tables.block_size
        full, tail = prompt.blocks[:num_full], prompt.blocks[num_full:]
        self.blocks.share(full)
        own_tail = self.blocks.allocate(len(tail))
        return full + own_tail, list(zip(tail, own_tail, strict=True))

    def _chunks(self, copies: list[tuple[int, int]]) -> list[Chunk]:
        """Return chunks of prompts for which there are slots and blocks, at most `prefill_tokens` tokens. The
        blocks that these need before the pass are added to the `copies`."""
        chunks: list[Chunk] = []
        budget = self._prefill_tokens
        num_first = len(self._running) + len(self._returning)
        # Rows that go on get slots before those that begin, and do not wait for them.
        num_first += sum(len(prompt.waiting) for prompt in self._ready if prompt.follows)
        num_rows = num_first + sum(len(prompt.waiting) for prompt in self._ready if not prompt.follows)
        while budget > 0 and (self._queued or self._fetch(num_rows)):
            prompt = self._queued[0]
            left = len(prompt.tokens) - prompt.num_cached
            if chunks and left > budget:  # A prompt is split only if it is too long for any pass.
                break
            needs = num_blocks(len(prompt.tokens), self._tables.block_size) - len(prompt.blocks)
            if needs > 0 and not self._admit(
                prompt, num_first if prompt.follows else num_rows, needs=needs, runs_alone=num_rows == 0):
                break
            if prompt.num_cached == 0 and self._copies_prefixes:
                copies += self._copied_prefix(prompt, fresh={target for _, target in copies})
                left = len(prompt.tokens) - prompt.num_cached
            take = min(left, budget)
            chunks.append(Chunk(prompt, prompt.num_cached, prompt.num_cached + take))
            prompt.num_cached += take
            budget -= take
            num_rows += len(prompt.rows)
            num_first += len(prompt.rows) * prompt.follows
            if prompt.num_cached == len(prompt.tokens):
                self._queued.popleft()
        # Attention batches neighbours of equal length; chunks that continue a prompt stay first.
        return sorted(chunks, key=lambda chunk: (chunk.start == 0, chunk.stop))

    def _copied_prefix(self, prompt: Prompt, *, fresh: Collection[int]) -> list[tuple[int, int]]:
        """Let a prompt have its first tokens from a row that runs; return the blocks to copy, as (from, to).

        Blocks that are `fresh` are copies themselves, and have not been made yet. The last block may have
        tokens of the other row at its end, over which this one writes before it reads them.
        """
        tokens = np.array(prompt.tokens[:-1], np.int64)  # The last one has to pass.
        most, blocks = 0, list[int]()
        for slot, others in self._prompt_of.items():
            count = num_common_tokens((tokens, others))
            if count > most:
                sources = self._tables.table[slot, : num_blocks(count, self._tables.block_size)].tolist()
                if not set(sources) & set(fresh):
                    most, blocks = count, sources
        prompt.num_cached = most
        return list(zip(blocks, prompt.blocks, strict=False))

    def _fetch(self, num_rows: int) -> bool:
        """Call `more` if a slot and a block are free; return whether the queue has a prompt.

        A prompt that turns out to need more blocks waits here, even if another replica could run it.
        """
        has_room = num_rows < self._tables.num_slots and self.blocks.num_free > 0
        if has_room and (prompt := self._more()) is not None:
            self._queued.append(prompt)
        return bool(self._queued)

    def _admit(self, prompt: Prompt, num_rows: int, *, needs: int, runs_alone: bool) -> bool:
        """Allocate blocks that the prompt still needs and return True, if a slot is free besides `num_rows`
        and enough blocks remain to give one more to each of its rows that gets a slot.

        A row that goes on, or that `runs_alone`, takes the blocks of idle ones. Others begin only if blocks
        are free.
        """
        free_slots = self._tables.num_slots - num_rows
        if free_slots <= 0:
            return False
        size = self._tables.block_size
        is_shared = len(prompt.rows) > 1
        wants = needs + (min(len(prompt.rows), free_slots) if is_shared else 0)
        takes = prompt.follows or runs_alone
        while takes and self.blocks.num_free < wants and self._reclaim_idle_blocks(but=prompt):
            pass
        if not runs_alone and self.blocks.num_free < wants:
            return False
        num_shared = len(prompt.tokens) // size if is_shared else 0
        prompt.blocks += self.blocks.allocate(num_shared, to_share=True)
        prompt.blocks += self.blocks.allocate(needs - num_shared)
        return True


def _num_followers(prompts: Sequence[Prompt]) -> int:
    """Return how many of the prompts, from the first on, go on from an earlier turn."""
    return next((i for i, prompt in enumerate(prompts) if not prompt.follows), len(prompts))


@dataclass(frozen=True)
class DecodeWindow:
    """Steps of one cohort, which are the same on all ranks of an ep group."""

    num_steps: int = 0  # 0: no rank has anything left.
    num_rows: int = 0  # Rows of every rank that decode in a step, with padding; 0: none do.
    num_pages: int = 0  # Width of their tables.
    prefills: bool = False  # Whether some rank prefills prompts in the step.
    waits: bool = False  # Whether samples of some rank wait for environments.


class DecodeWindows:
    """Plans the steps of a cohort, window by window; a group of one rank has windows of one step."""

    def __init__(self, group: Group) -> None:
        """`group` has the ranks of an ep group, over gloo."""
        self._group = group
        self._num_left = 0
        self.now = DecodeWindow()
        """The window of the step that has been planned last."""

    @property
    def has_ended(self) -> bool:
        """Whether the step that has been planned last is the last one of its window."""
        return self._num_left == 0

    def next_step(
        self, scheduler: Scheduler, buffer: ResponseBuffer, *, num_pages: int, waits: bool
    ) -> Step | None:
        """Return this rank's next step; None if only other ranks have one, or if none has.

        `num_pages` is the width of this rank's tables. The rank `waits` if environments are at work.
        """
        begins = self._num_left == 0
        step = scheduler.plan(prefills=begins)
        if begins and self._group.size == 1:
            num_rows = 0 if step is None else len(step.decoding)
            prefills = step is not None and len(step.chunks) > 0
            self.now = DecodeWindow(int(step is not None), _padded(num_rows), num_pages, prefills, waits)
        elif begins:
            self.now = self._agree(step, scheduler, buffer, num_pages, waits)
        self._num_left = self.now.num_steps if begins else self._num_left
        self._num_left = max(0, self._num_left - 1)
        return step

    def _agree(
        self, step: Step | None, scheduler: Scheduler, buffer: ResponseBuffer, num_pages: int, waits: bool
    ) -> DecodeWindow:
        """Return the window that covers the steps of all ranks of the group."""
        prefilled = scheduler.prefilled_rows
        wish = (scheduler.most_rows, max(buffer.num_left(prefilled), default=0), num_pages)
        prefills = step is not None and len(step.chunks) > 0
        wishes = self._group.all_gather_json([*wish, prefills, waits])
        num_rows, num_steps, num_pages, prefills, waits = map(max, zip(*wishes, strict=True))
        num_steps = 1 if prefills else min(MOST_STEPS, num_steps)
        return DecodeWindow(num_steps, _padded(num_rows), num_pages, prefills, waits)


def _padded(num_rows: int) -> int:
    return padded_size(num_rows) if num_rows else 0
