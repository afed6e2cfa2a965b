"""Scheduler: which rows decode and which prompts go into the cache in the next step (continuous batching).

A row's slot is filled again as soon as the row has ended (Orca, Yu et al. 2022). Memory is handed out in
blocks as rows grow; when there is none left, the newest row gives up its own and is computed anew later
(vLLM, arXiv:2309.06180). All of it is decided from lengths alone, the same on every rank of a replica.
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
    """Tokens that go into the cache once, and the samples that continue them."""

    tokens: list[int]
    samples: list[int]
    blocks: list[int] = field(default_factory=list)
    num_cached: int = 0
    waiting: list[int] = field(default_factory=list)  # RolloutBuffer that have their first token, but no slot.
    num_started: int = 0

    def __post_init__(self) -> None:
        # A pass computes nothing for it: its samples would continue the token before theirs, somebody else's.
        assert self.tokens, "a prompt has at least one token"

    @property
    def is_cached(self) -> bool:
        return self.num_cached == len(self.tokens)


@dataclass(frozen=True)
class Piece:
    """Tokens [start, stop) of a prompt, which go into the cache in one pass."""

    prompt: Prompt
    start: int
    stop: int

    @property
    def tokens(self) -> list[int]:
        return self.prompt.tokens[self.start : self.stop]

    @property
    def is_last(self) -> bool:
        return self.stop == len(self.prompt.tokens)

    def places(self, block_size: int) -> list[int]:
        """Where in the cache the prompt's tokens up to `stop` lie."""
        blocks = self.prompt.blocks
        return [blocks[i // block_size] * block_size + i % block_size for i in range(self.stop)]


@dataclass(frozen=True)
class Step:
    """First blocks are copied; then one pass, in which all rows decode and pieces of prompts come in, the
    rest of one that has been begun before the others."""

    copies: list[tuple[int, int]]  # Block to copy from, block to copy to.
    rows: list[int]  # RolloutBuffer that decode one token, in order of their slots.
    pieces: list[Piece]

    @property
    def further(self) -> Piece | None:
        """What goes on with a prompt; nobody else's piece comes before it."""
        return self.pieces[0] if self.pieces and self.pieces[0].start > 0 else None

    @property
    def fresh(self) -> list[Piece]:
        """The other pieces, which begin their prompts."""
        return self.pieces[self.further is not None :]

    @property
    def num_tokens(self) -> int:
        """That go through the model: one of each row, then the pieces."""
        return len(self.rows) + sum(piece.stop - piece.start for piece in self.pieces)

    @property
    def last_tokens(self) -> list[int]:
        """Of every one of `samples`, which token it continues."""
        found, count = list(range(len(self.rows))), len(self.rows)
        for piece in self.pieces:
            count += piece.stop - piece.start
            found += [count - 1] * (len(piece.prompt.samples) * piece.is_last)
        return found

    @property
    def samples(self) -> list[int]:
        """Who gets a token: the rows, then the samples of prompts that are now complete."""
        return [*self.rows, *(s for piece in self.pieces if piece.is_last for s in piece.prompt.samples)]


class Scheduler:
    """Brings all samples of a queue of prompts to their ends, `num_slots` of them at a time."""

    def __init__(
        self, prompts: Iterable[Prompt], *, num_slots: int, blocks: BlockManager, tables: BlockTables,
        prefill_tokens: int, history: Callable[[int], list[int]], restart_at: int | None = None,
        more: Callable[[], Prompt | None] = lambda: None,
    ) -> None:  # fmt: skip
        """`history` gives a sample's prompt and all of its tokens so far. A row that is to grow past
        `restart_at` tokens is computed anew first. `more` is asked for another prompt when the queue is empty
        and a slot is free, until there is none."""
        self._queue, self._num_slots, self._prefill_tokens = deque(prompts), num_slots, prefill_tokens
        self._more = more
        self._blocks, self._tables = blocks, tables
        self._history, self._restart_at = history, restart_at
        self._ready: deque[Prompt] = deque()
        """In the cache, with samples that wait for slots."""
        self._rows: dict[int, int] = {}
        """Slot -> sample, the newest last."""
        self._free_slots = list(range(num_slots))[::-1]
        self._last: Step | None = None
        self.num_restarts = 0
        """Rows that had to give up their blocks and were computed anew."""

    def plan(self) -> Step | None:
        """The next step; None when all samples have ended. `update` comes between two."""
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
        """Which of the last step's `samples` have got their last token."""
        assert self._last is not None
        slots = self._tables.running()
        for slot in slots[np.array(ended[: len(slots)], dtype=bool)].tolist():
            self._stop(slot)
        rest = iter(ended[len(slots) :])
        for prompt in (piece.prompt for piece in self._last.pieces if piece.is_last):
            prompt.waiting = [sample for sample, end in zip(prompt.samples, rest, strict=False) if not end]
            if len(prompt.tokens) == self._restart_at:
                self._give_up(prompt)
            elif prompt.waiting:
                self._ready.append(prompt)
            else:
                self._blocks.release(prompt.blocks)

    def _stop(self, slot: int) -> int:
        """Takes a row out; its sample."""
        self._blocks.release(self._tables.stop(slot))
        self._free_slots.append(slot)
        return self._rows.pop(slot)

    def _restart(self, sample: int) -> None:
        self.num_restarts += 1
        is_cut = bool(self._queue) and bool(self._queue[0].blocks)  # It stays in front.
        self._queue.insert(is_cut, Prompt(self._history(sample), [sample]))

    def _give_up(self, prompt: Prompt) -> None:
        """All of its samples that wait are computed anew."""
        self._blocks.release(prompt.blocks)
        for sample in reversed(prompt.waiting):
            self._restart(sample)

    def _restart_long_rows(self) -> None:
        if self._restart_at is not None:
            lens = self._tables.lens
            for slot in [slot for slot in self._rows if lens[slot] == self._restart_at]:
                self._restart(self._stop(slot))

    def _grow(self) -> None:
        """Every row has a block for its next token; where there are too few, some rows lose all of theirs."""
        for slot in self._tables.full():
            while slot in self._rows and self._blocks.num_free == 0:
                self._make_room()
            if slot in self._rows:
                self._tables.append(slot, *self._blocks.allocate(1))

    def _make_room(self) -> None:
        """Gives back the blocks of who has waited or run for the shortest time."""
        if self._queue and self._queue[0].blocks:  # In the middle of its pieces.
            prompt = self._queue[0]
            self._blocks.release(prompt.blocks)
            prompt.blocks, prompt.num_cached = [], 0
        elif self._ready and not (len(self._ready) == 1 and not self._rows):
            self._give_up(self._ready.pop())
        else:
            self._restart(self._stop(next(reversed(self._rows))))

    def _start_rows(self) -> list[tuple[int, int]]:
        """Fills free slots; the blocks to copy for them: each row goes on in a last block of its own."""
        copies = []
        while self._ready and self._free_slots:
            prompt = self._ready[0]
            num_full, rest = divmod(len(prompt.tokens), self._tables.block_size)
            is_last, shares = len(prompt.waiting) == 1, len(prompt.samples) > 1
            copies_tail = rest > 0 and not is_last
            while not self._rows and self._blocks.num_free == 0 and (copies_tail or rest == 0):
                self._make_room()
            if self._blocks.num_free < (copies_tail or rest == 0):
                break
            slot, blocks = self._free_slots.pop(), prompt.blocks
            if not is_last:
                blocks = blocks[:num_full] + self._blocks.allocate(int(copies_tail))
                self._blocks.share(blocks[:num_full])
                if copies_tail:
                    copies.append((prompt.blocks[num_full], blocks[num_full]))
            self._tables.start(
                slot, blocks, length=len(prompt.tokens), num_shared=num_full * shares,
                ordinal=prompt.num_started)
            if rest == 0:
                self._tables.append(slot, *self._blocks.allocate(1))
            self._rows[slot] = prompt.waiting.pop(0)
            prompt.num_started += 1
            if is_last:
                self._ready.popleft()
        return copies

    def _pieces(self) -> list[Piece]:
        """Pieces of prompts that the slots and blocks have room for, at most `prefill_tokens` tokens."""
        pieces: list[Piece] = []
        room = self._prefill_tokens
        num_rows = len(self._rows) + sum(len(prompt.waiting) for prompt in self._ready)
        while room > 0 and (self._queue or self._fetch(num_rows)):
            prompt = self._queue[0]
            left = len(prompt.tokens) - prompt.num_cached
            if pieces and left > room:  # A prompt is cut only if it is too long for any pass.
                break
            if not prompt.blocks and not self._admit(prompt, num_rows):
                break
            take = min(left, room)
            pieces.append(Piece(prompt, prompt.num_cached, prompt.num_cached + take))
            prompt.num_cached += take
            room -= take
            num_rows += len(prompt.samples)
            if prompt.is_cached:
                self._queue.popleft()
        # Neighbours of equal length are attended to together; what goes on stays in front.
        return sorted(pieces, key=lambda piece: (piece.start == 0, piece.stop))

    def _fetch(self, num_rows: int) -> bool:
        """Whether another prompt has come into the queue, for which there was a slot and a block. One that
        turns out to need more waits here, even if another replica has room for it."""
        if num_rows < self._num_slots and self._blocks.num_free > 0 and (prompt := self._more()) is not None:
            self._queue.append(prompt)
        return bool(self._queue)

    def _admit(self, prompt: Prompt, num_rows: int) -> bool:
        """Takes blocks for the prompt, if a slot is free and each of its rows that it has slots for can have
        one block more."""
        free = self._num_slots - num_rows
        size, shares = self._tables.block_size, len(prompt.samples) > 1
        needs = num_blocks(len(prompt.tokens), size)
        wants = needs + min(len(prompt.samples), free) * shares
        if num_rows > 0 and (free <= 0 or self._blocks.num_free < wants):
            return False
        num_shared = len(prompt.tokens) // size * shares
        prompt.blocks = self._blocks.allocate(num_shared, to_share=True)
        prompt.blocks += self._blocks.allocate(needs - num_shared)
        return True
