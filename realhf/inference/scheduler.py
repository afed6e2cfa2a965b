"""Scheduler: which rows decode and which prompts are prefilled in the next step (continuous batching).

A row is a sample that decodes in a slot. The slot is filled again as soon as the row has ended (Orca, Yu et
al. 2022). Rows get memory in blocks as they grow; when no block is left, the newest row gives up its blocks
and is computed again later (vLLM, arXiv:2309.06180). All decisions depend on lengths alone, so that they are
the same on every rank of a replica.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from realhf.inference.block_manager import BlockManager
from realhf.inference.block_tables import BlockTables
from realhf.kv_blocks import num_blocks


@dataclass(eq=False)
class Prompt:
    """Tokens that are prefilled once, and the samples that continue them."""

    tokens: list[int]
    samples: list[int]
    blocks: list[int] = field(default_factory=list)
    num_cached: int = 0
    waiting: list[int] = field(default_factory=list)  # Samples that have their first token, but no slot.
    num_started: int = 0

    def __post_init__(self) -> None:
        # An empty prompt has no hidden state: its samples would continue the token of another prompt.
        assert self.tokens, "a prompt has at least one token"

    @property
    def is_cached(self) -> bool:
        return self.num_cached == len(self.tokens)


@dataclass(frozen=True)
class Piece:
    """Tokens [start, stop) of a prompt, which one pass prefills."""

    prompt: Prompt
    start: int
    stop: int

    @property
    def tokens(self) -> list[int]:
        return self.prompt.tokens[self.start : self.stop]

    @property
    def is_last(self) -> bool:
        return self.stop == len(self.prompt.tokens)

    def cache_positions(self, block_size: int) -> list[int]:
        """Return the cache positions of the prompt's tokens up to `stop`."""
        blocks = self.prompt.blocks
        return [blocks[i // block_size] * block_size + i % block_size for i in range(self.stop)]


@dataclass(frozen=True)
class Step:
    """Copies of blocks, and then one pass in which all rows decode and pieces of prompts are prefilled.

    A piece that continues a prompt comes before those that begin one.
    """

    copies: list[tuple[int, int]]  # Block to copy from, block to copy to.
    rows: list[int]  # Samples that decode one token, in order of their slots.
    pieces: list[Piece]

    @property
    def continued(self) -> Piece | None:
        """The piece that continues a prompt, if there is one."""
        return self.pieces[0] if self.pieces and self.pieces[0].start > 0 else None

    @property
    def fresh(self) -> list[Piece]:
        """The pieces that begin their prompts."""
        return self.pieces[self.continued is not None :]

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the pass: one of each row, then those of the pieces."""
        return len(self.rows) + sum(piece.stop - piece.start for piece in self.pieces)

    @property
    def last_tokens(self) -> list[int]:
        """For each of `samples`, the index in the pass of the token that it continues."""
        count = len(self.rows)
        found = list(range(count))
        for piece in self.pieces:
            count += piece.stop - piece.start
            found += [count - 1] * (len(piece.prompt.samples) * piece.is_last)
        return found

    @property
    def samples(self) -> list[int]:
        """Samples that get a token: the rows, then the samples of prompts that are now complete."""
        return [*self.rows, *(s for piece in self.pieces if piece.is_last for s in piece.prompt.samples)]


class Scheduler:
    """Plans the steps that bring all samples of a queue of prompts to their ends, `num_slots` at a time."""

    def __init__(
        self, prompts: Iterable[Prompt], *, num_slots: int, blocks: BlockManager, tables: BlockTables,
        prefill_tokens: int, history: Callable[[int], list[int]], restart_at: int | None = None,
        more: Callable[[], Prompt | None] = lambda: None,
    ) -> None:  # fmt: skip
        """`history` returns a sample's prompt and all of its tokens so far. A row that reaches `restart_at`
        tokens is computed again before it grows further. When the queue is empty and a slot is free, `more`
        is called for another prompt, until it returns None."""
        self._queue = deque(prompts)
        self._more = more
        self._history = history
        self._num_slots = num_slots
        self._prefill_tokens = prefill_tokens
        self._restart_at = restart_at
        self._blocks = blocks
        self._tables = tables
        self._ready: deque[Prompt] = deque()
        """Cached prompts whose samples wait for slots."""
        self._rows: dict[int, int] = {}
        """Slot -> sample, the newest last."""
        self._free_slots = list(range(num_slots))[::-1]
        self._last: Step | None = None
        self.num_restarts = 0
        """Rows that gave up their blocks and were computed again."""

    def plan(self) -> Step | None:
        """Return the next step, or None when all samples have ended. `update` must be called in between."""
        self._restart_long_rows()
        self._grow()
        copies = self._start_rows()
        self._grow()
        pieces = self._pieces()
        if not self._rows and not pieces:
            assert not self._queue and not self._ready, "samples wait, but nobody can begin"
            return None
        self._last = Step(copies, [self._rows[slot] for slot in self._tables.running().tolist()], pieces)
        return self._last

    def update(self, ended: Sequence[bool]) -> None:
        """Record which of the last step's `samples` have got their last token."""
        assert self._last is not None
        slots = self._tables.running()
        for slot in slots[np.array(ended[: len(slots)], dtype=bool)].tolist():
            self._stop(slot)
        rest = iter(ended[len(slots) :])
        for prompt in (piece.prompt for piece in self._last.pieces if piece.is_last):
            prompt.waiting = [sample for sample, end in zip(prompt.samples, rest, strict=False) if not end]
            if len(prompt.tokens) == self._restart_at:
                self._restart_waiting(prompt)
            elif prompt.waiting:
                self._ready.append(prompt)
            else:
                self._blocks.release(prompt.blocks)

    def _stop(self, slot: int) -> int:
        """Remove the row from the slot and return its sample."""
        self._blocks.release(self._tables.stop(slot))
        self._free_slots.append(slot)
        return self._rows.pop(slot)

    def _restart(self, sample: int) -> None:
        self.num_restarts += 1
        is_begun = bool(self._queue) and bool(self._queue[0].blocks)  # A prompt that has begun stays first.
        self._queue.insert(is_begun, Prompt(self._history(sample), [sample]))

    def _restart_waiting(self, prompt: Prompt) -> None:
        """Release the prompt's blocks and queue its waiting samples to be computed again."""
        self._blocks.release(prompt.blocks)
        for sample in reversed(prompt.waiting):
            self._restart(sample)

    def _restart_long_rows(self) -> None:
        if self._restart_at is not None:
            lens = self._tables.lens
            for slot in [slot for slot in self._rows if lens[slot] == self._restart_at]:
                self._restart(self._stop(slot))

    def _grow(self) -> None:
        """Give every row a block for its next token; if there are too few, some rows lose all of theirs."""
        for slot in self._tables.full():
            while slot in self._rows and self._blocks.num_free == 0:
                self._reclaim_blocks()
            if slot in self._rows:
                self._tables.append(slot, *self._blocks.allocate(1))

    def _reclaim_blocks(self) -> None:
        """Release the blocks of the prompt or row that has waited or run for the shortest time."""
        if self._queue and self._queue[0].blocks:  # It has been prefilled in part.
            prompt = self._queue[0]
            self._blocks.release(prompt.blocks)
            prompt.blocks = []
            prompt.num_cached = 0
        elif self._ready and not (len(self._ready) == 1 and not self._rows):
            self._restart_waiting(self._ready.pop())
        else:
            self._restart(self._stop(next(reversed(self._rows))))

    def _start_rows(self) -> list[tuple[int, int]]:
        """Fill free slots; return the blocks to copy, as each row needs a last block of its own."""
        copies = []
        while self._ready and self._free_slots:
            prompt = self._ready[0]
            num_full, rest = divmod(len(prompt.tokens), self._tables.block_size)
            is_last = len(prompt.waiting) == 1
            copies_tail = rest > 0 and not is_last
            needs_block = copies_tail or rest == 0
            while not self._rows and self._blocks.num_free == 0 and needs_block:
                self._reclaim_blocks()
            if self._blocks.num_free < needs_block:
                break
            slot = self._free_slots.pop()
            blocks = prompt.blocks
            if not is_last:
                blocks = blocks[:num_full] + self._blocks.allocate(int(copies_tail))
                self._blocks.share(blocks[:num_full])
                if copies_tail:
                    copies.append((prompt.blocks[num_full], blocks[num_full]))
            num_shared = num_full if len(prompt.samples) > 1 else 0
            self._tables.start(
                slot, blocks, length=len(prompt.tokens), num_shared=num_shared, ordinal=prompt.num_started)
            if rest == 0:
                self._tables.append(slot, *self._blocks.allocate(1))
            self._rows[slot] = prompt.waiting.pop(0)
            prompt.num_started += 1
            if is_last:
                self._ready.popleft()
        return copies

    def _pieces(self) -> list[Piece]:
        """Return pieces of prompts for which there are slots and blocks, at most `prefill_tokens` tokens."""
        pieces: list[Piece] = []
        budget = self._prefill_tokens
        num_rows = len(self._rows) + sum(len(prompt.waiting) for prompt in self._ready)
        while budget > 0 and (self._queue or self._fetch(num_rows)):
            prompt = self._queue[0]
            left = len(prompt.tokens) - prompt.num_cached
            if pieces and left > budget:  # A prompt is split only if it is too long for any pass.
                break
            if not prompt.blocks and not self._admit(prompt, num_rows):
                break
            take = min(left, budget)
            pieces.append(Piece(prompt, prompt.num_cached, prompt.num_cached + take))
            prompt.num_cached += take
            budget -= take
            num_rows += len(prompt.samples)
            if prompt.is_cached:
                self._queue.popleft()
        # Attention batches neighbours of equal length; a piece that continues a prompt stays first.
        return sorted(pieces, key=lambda piece: (piece.start == 0, piece.stop))

    def _fetch(self, num_rows: int) -> bool:
        """Call `more` if a slot and a block are free; return whether the queue has a prompt.

        A prompt that turns out to need more blocks waits here, even if another replica could run it.
        """
        if num_rows < self._num_slots and self._blocks.num_free > 0 and (prompt := self._more()) is not None:
            self._queue.append(prompt)
        return bool(self._queue)

    def _admit(self, prompt: Prompt, num_rows: int) -> bool:
        """Allocate blocks for the prompt and return True, if a slot is free and enough blocks remain to give
        one more to each of its samples that gets a slot."""
        free_slots = self._num_slots - num_rows
        size = self._tables.block_size
        shares = len(prompt.samples) > 1
        needs = num_blocks(len(prompt.tokens), size)
        wants = needs + min(len(prompt.samples), free_slots) * shares
        if num_rows > 0 and (free_slots <= 0 or self._blocks.num_free < wants):
            return False
        num_shared = len(prompt.tokens) // size * shares
        prompt.blocks = self._blocks.allocate(num_shared, to_share=True)
        prompt.blocks += self._blocks.allocate(needs - num_shared)
        return True
