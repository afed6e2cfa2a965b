"""Cohort: samples that share pages and slots, and the steps in which a replica's ranks continue them.

All ranks of a replica execute the scheduler's steps in lockstep (continuous batching). Hidden states flow to
later pipeline stages. Tokens flow back to earlier ones, from host to host: on NCCL they would have to wait
for hidden states of other cohorts, whose senders may wait for them (docs/reallocation.md).

Every step is started, then counted, then read. Counting needs no tokens: it gives each sample of the step one
token more, and stops those that have the most tokens that they may get now. Reading waits for the tokens, and
stops the samples that end with theirs. On the paged path, without a pipeline, the next step starts before the
last one has been read. Say that samples 7 and 8 decode in step 1, in which 8 gets as many tokens as it may
have, and 7 draws its end-of-sequence token. The next `advance` calls

- `_count(step 1)`: the scheduler's `count([False, True])` frees the slot of 8.
- `_start(step 2)`, in which 7 decodes again, and gets a token that nobody will read.
- `_read(step 1)`: 7 has ended. The scheduler's `end({7})` frees its slot, and step 2 notes 7 in
  `ended_before`, so that the next `_count` counts no token for it.

If a later round may continue 8, `count` parks it instead: 8 leaves its slot and keeps its blocks. Should its
token turn out to be an end, too, `end({7, 8})` releases them.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from realhf.calls import Beginning, NextTurn
from realhf.devices.pinned import Download, upload
from realhf.distributed.group import Pending
from realhf.inference.cache_memory import CacheSizes, GenerationLimits
from realhf.inference.cpu_decoding import DecodingSteps, cpu_segments
from realhf.inference.forward_batch import ChunkPages, chunk_pages, paged_chunks, paged_rows, prefill
from realhf.inference.kv_cache import BlockManager, RowPages
from realhf.inference.page_pool import DecodeGraphs, PagePool
from realhf.inference.prompt_queue import PromptQueue
from realhf.inference.response_buffer import PromptGroup, ResponseBuffer, Size
from realhf.inference.rounds import RestingCache
from realhf.inference.sampling import for_vocabulary, sample
from realhf.inference.scheduler import DecodeWindows, Prompt, Scheduler, Step
from realhf.models.kv_blocks import num_blocks
from realhf.nn.attention import Segment
from realhf.nn.transformer import Transformer


class StepInputs(NamedTuple):
    """The numbers that the device needs for a step, besides weights and cache.

    The host computes them as numpy arrays, and all of them go to the device in one copy.
    """

    row_pages: RowPages[Tensor] | None  # Only on the paged path.
    chunk_pages: ChunkPages[Tensor] | None  # Only on the paged path.
    sample_S: Tensor  # The samples that get a token; those of the rows come first.
    column_S: Tensor  # The column of that token in the buffer.
    draw_S: Tensor  # The random number in [0, 1) with which it is sampled.
    last_column_B: Tensor  # The column of each row's last token so far.
    prompt_T: Tensor  # The tokens of chunks.
    last_S: Tensor  # The index in the pass of the token that each sample continues, if there are chunks.


NO_INPUTS = StepInputs(None, None, *[torch.empty(0)] * 6)
"""The inputs of a step without rows and chunks."""


@dataclass
class _StartedStep:
    """A step that has been started, and what is known of its results."""

    step: Step
    at: tuple[torch.Tensor, torch.Tensor]  # Where the buffer keeps the tokens and log-probs.
    drawn_S: torch.Tensor  # On the last stage: the token of each of the step's samples.
    download: Download  # The same tokens on the host.
    is_read: bool = False
    ended_before: set[int] = field(default_factory=set)
    """Samples that had ended before the step, as has been found out since."""

    def live_samples(self) -> list[int]:
        """Return the samples that get a token."""
        if not self.ended_before:
            return self.step.samples
        return [sample for sample in self.step.samples if sample not in self.ended_before]


class EndedTurn(NamedTuple):
    """A turn of a sample that is `finished`, or has as many tokens as it may get now."""

    sample: int
    tokens: list[int]
    finished: bool


class Cohort:
    """Samples that share pages and slots in one round.

    With a `resting` cache, the unfinished samples of the round before go on from their cached tokens, all new
    groups begin here, and their pages stay leased.

    With `turn_ends`, samples are answered in turns, which these tokens end. They come by `begin`; their
    sizes, as far as they are known, are `expected`. A sample whose turn has ended parks, `ended_turns` tells
    so, and `go_on` continues or ends it. In the buffer each turn is a row of its own.
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
        self._device = model.flat.device
        self._queue = queue
        self._sampling = for_vocabulary(limits.work.sampling, model.config.vocab_size)
        num_returning = 0 if resting is None else len(resting.rows)
        capacity = sum(len(group.ids) for group in groups) + num_returning
        capacity += sum(size.num_samples for size in expected)
        self.buffer = ResponseBuffer(
            capacity, work=limits.work, seed=seed, device=self._device,
            eos_ids=model.config.eos_token_ids if turn_ends is None else sorted(turn_ends),
            vocab_range=model.vocab_range if self._parallel.is_last_stage else None, budget=limits.budget)
        # Rows of a longrope model restart by their lengths, which must then be known. In a pipeline, other
        # cohorts keep the device busy.
        self._is_ahead = (
            pool.backends is not None and model.rope_boundary is None and self._parallel.layout.pp == 1)
        self._upload = StepUpload(self._device)
        self.num_computed = 0
        """Tokens that have passed through this stage."""
        self._last: _StartedStep | None = None
        self._windows = DecodeWindows(self._parallel.ep_control)
        self._sent: list[Pending] = []
        self._scheduler: Scheduler | None = None
        self._leased: list[int] = []
        self._in_turns = turn_ends is not None
        self._newly_ended: list[int] = []
        """Turns that have ended, by their numbers in the buffer, of which `ended_turns` has not told."""
        self._row_of: dict[int, int] = {}
        """Sample -> the row of its last turn, by its number in the buffer."""
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
        self._decoding = DecodingSteps(self._tables)
        self._row_pages = self._pool.table_width(self._tables.blocks_per_row)
        returning = [row.continue_in(self.buffer) for row in rows]
        self.buffer.set_last_tokens([row.sample for row in returning])
        prompts = [self.buffer.add(group) for group in self._first_groups]
        self._scheduler = Scheduler(
            prompts, tables=self._tables,
            history=self.buffer.history, prefill_tokens=self._limits.work.prefill_tokens,
            restart_at=self._model.rope_boundary, more=self._take_prompt, blocks=blocks,
            returning=returning, may_go_on=self._may_go_on, takes_from_parked=self._in_turns)

    @cached_property
    def _graphs(self) -> DecodeGraphs | None:
        """The recorded passes, asked for when all cohorts have their pages; a round does not change them."""
        return self._pool.graphs if self._limits.work.cuda_graphs else None

    def _take_prompt(self) -> Prompt | None:
        group = self._queue.take()
        return None if group is None else self.buffer.add(group)

    def begin(self, group: Beginning) -> None:
        """Add samples that have a start now, or go on from an earlier round."""
        assert self._scheduler is not None
        self._make_room(group.num_start + group.most)
        prompt = self.buffer.add(PromptGroup(
            group.tokens, group.samples, group.num_drawn, group.num_drawn + group.limit, group.num_before))
        self._row_of |= zip(group.samples, prompt.samples, strict=True)
        if group.limit:
            self._scheduler.add(prompt)

    def go_on(self, turn: NextTurn) -> None:
        """Continue a sample whose turn has ended with an environment's tokens, or end it."""
        assert self._scheduler is not None
        number = self._row_of[turn.sample]
        if not turn.limit:
            self._scheduler.drop(number)
        if not (turn.limit or turn.tokens):
            return
        buffer = self.buffer
        num_before = int(buffer.num_before[number] + buffer.num_drawn[number] + buffer.lengths[number])
        prompt = buffer.add(PromptGroup(
            [*buffer.history(number), *turn.tokens], [turn.sample], limit=turn.limit,
            num_before=num_before + len(turn.tokens)))
        (self._row_of[turn.sample],) = prompt.samples
        if turn.limit:
            self._scheduler.go_on(prompt, number)

    def ended_turns(self) -> list[EndedTurn]:
        """Return the turns that have ended since the last call."""
        ended = [
            EndedTurn(
                int(self.buffer.ids[number]),
                self.buffer.tokens[number, 1 : 1 + self.buffer.lengths[number]].tolist(),
                bool(self.buffer.finished[number]))
            for number in self._newly_ended]
        self._newly_ended = []
        return ended

    def _make_room(self, longest: int) -> None:
        """Widen the tables for rows of so many tokens, and lease the pages of one. Raises UserError if there
        may not be so many."""
        assert self._scheduler is not None
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
        self._row_pages = self._pool.table_width(needed)
        vars(self).pop("_graphs", None)

    @property
    def shares_experts(self) -> bool:
        """Whether ranks that run other samples take part in its steps."""
        return self._parallel.ep.size > 1

    def advance(self, *, waits: bool = False) -> bool:
        """Start the next step, and read the tokens of the step before; return whether there was a next one,
        on this rank or on another one of its ep group.

        The messages of a step are in flight until the next call. The rank `waits` if environments of samples
        are at work.
        """
        if self._scheduler is None:
            return False
        self._wait_for_sent()
        last = self._last
        if last is not None:
            self._receive(last)
            self._count(last)
            if not self._is_ahead or self._scheduler.may_reclaim or self._scheduler.is_idle:
                self._read(last, following=None)
        step = self._windows.next_step(
            self._scheduler, self.buffer, num_pages=self._row_pages, waits=waits or bool(self._newly_ended))
        is_running = self._windows.now.num_steps > 0
        self.peers_wait = self._windows.now.waits
        self._last = None
        if step is not None:
            self._last = self._start(step)
        elif is_running:  # Another rank of the ep group has a step.
            self._pass(Step([], [], []), NO_INPUTS)
        if last is not None and not last.is_read:
            self._read(last, following=self._last)
        if not is_running and not self._in_turns:
            self.finish()
        return is_running

    def _wait_for_sent(self) -> None:
        for sent in self._sent:
            sent.wait()
        self._sent = []

    def finish(self) -> None:
        """Leave the parked rows for the next round, or give the pages back."""
        self._wait_for_sent()
        if self._scheduler is not None and self._resting is not None:
            self._resting.take_over(self._scheduler.parked, self.buffer)
        self._pool.give_back(self._leased)
        self._leased = []
        self._scheduler = None

    def _receive(self, last: _StartedStep) -> None:
        """Receive the tokens of the last step from the last stage, or send them to earlier ones."""
        if not self._parallel.is_last_stage:
            tokens_S = torch.empty(len(last.step.samples), dtype=torch.long)
            self._parallel.pp_back.exchange([], [(self._parallel.layout.pp - 1, tokens_S)])
            last.drawn_S = upload(tokens_S.numpy(), self._device)
            last.download = Download(tokens_S)
        elif not last.download.is_here:
            self._send_back(last)
        self.buffer.tokens[last.at] = last.drawn_S

    def _count(self, last: _StartedStep) -> None:
        """Stop the samples that have the most tokens of the round, or of their turn."""
        live = last.live_samples()
        stopped = self.buffer.count(live)
        if last.ended_before:  # The scheduler knows that these have ended.
            numbers = np.array(live, np.int64)[stopped].tolist()
            stopped = np.isin(last.step.samples, [*last.ended_before, *numbers])
        assert self._scheduler is not None
        self._copy(self._scheduler.count(stopped))

    def _read(self, last: _StartedStep, *, following: _StartedStep | None) -> None:
        """Stop the samples that end with their tokens of the last step; the `following` step may have
        started."""
        live = last.live_samples()
        tokens_S = last.download.wait()
        if last.ended_before:
            tokens_S = tokens_S[~np.isin(last.step.samples, list(last.ended_before))]
        finished = self.buffer.finish(live, tokens_S)
        numbers = np.array(live, np.int64)
        if self._in_turns:
            have_ended = finished | (self.buffer.lengths[live] >= self.buffer.limits(live))
            self._newly_ended += numbers[have_ended].tolist()
        ends = numbers[finished].tolist()
        if following is not None:
            following.ended_before |= set(ends)
        assert self._scheduler is not None
        self._copy(self._scheduler.end(ends, is_next_planned=following is not None))
        last.is_read = True

    def _may_go_on(self, sample: int) -> bool:
        """Return whether a sample that stops may get tokens in a later turn or round."""
        return self._in_turns or (self._resting is not None and self.buffer.may_go_on(sample))

    def _start(self, step: Step) -> _StartedStep:
        """Compute this stage's part of a step; on the last stage also sample."""
        insertions = self.buffer.insertions(step.samples) if self._parallel.is_last_stage else None
        processing = self.buffer.processing(step.samples)
        inputs = self._inputs(step)
        self.num_computed += len(step.rows) + len(inputs.prompt_T)
        self._copy(step.copies)
        hidden = self._pass(step, inputs)
        at = (inputs.sample_S, inputs.column_S)
        nothing = torch.zeros(0, dtype=torch.long)
        started = _StartedStep(step, at, inputs.sample_S[:0], Download(nothing))
        if not self._parallel.is_last_stage or not step.samples:
            return started
        tokens_S, logprobs_S = sample(
            self._model.logits(hidden), inputs.draw_S, config=self._sampling,
            vocab_start=self._model.vocab_range[0], group=self._parallel.tp, processing=processing,
            widest_shard=-(-self._model.config.vocab_size // self._parallel.layout.tp))
        started.drawn_S = self.buffer.record(at, tokens_S, logprobs_S, insertions)
        started.download = Download(started.drawn_S)
        if started.download.is_here:
            self._send_back(started)
        return started

    def _send_back(self, started: _StartedStep) -> None:
        """Send sampled tokens to all earlier stages: from a CPU at once, from a GPU when it is the cohort's
        turn again, so that the host starts steps of other cohorts instead of waiting."""
        if stages := range(self._parallel.at.pp):
            tokens_S = torch.from_numpy(started.download.wait())
            self._sent.append(self._parallel.pp_back.post([(stage, tokens_S) for stage in stages], []))

    def _inputs(self, step: Step) -> StepInputs:
        """Send all numbers that the device needs for a step, in one copy."""
        sample_S, column_S = self.buffer.columns(step.samples)
        num_rows = len(step.rows)
        own = (
            sample_S, column_S, self.buffer.draws_on_host(step.samples), column_S[:num_rows] - 1,
            np.array([i for chunk in step.chunks for i in chunk.tokens], np.int64),
            np.array(step.last_tokens if step.chunks else (), np.int64))
        rows: Sequence[NDArray[Any]] = ()
        chunks: Sequence[NDArray[Any]] = ()
        if self._pool.backends is not None:
            if step.rows:
                window = self._windows.now
                padded = num_rows if self._graphs is None else window.num_rows
                rows = self._tables.advance_pages(padded, window.num_pages)
            if paged := self._paged_chunks(step):
                chunks = chunk_pages(paged, page_size=self._tables.block_size)
        tensors = iter(self._upload([*rows, *chunks, *own]))
        return StepInputs(
            RowPages(*islice(tensors, len(rows))) if rows else None,
            ChunkPages(*islice(tensors, len(chunks))) if chunks else None, *tensors)

    def _paged_chunks(self, step: Step) -> list:
        """Return the pieces of prompts that attend to the cache.

        A latent is expanded for tokens that attend to one another, which takes fewer FLOPs.
        """
        return step.continued if self._model.config.mla is not None else step.chunks

    def _pass(self, step: Step, inputs: StepInputs) -> torch.Tensor:
        """Run the pass of a step; the last stage returns the hidden states from which its samples' tokens are
        drawn.

        Rows and chunks go through two passes if passes are recorded, or if experts are on several ranks: rows
        are then gathered, and an empty step takes part in both passes.
        """
        last_tokens = self.buffer.tokens[:0, 0]
        if step.rows:
            last_tokens = self.buffer.tokens[inputs.sample_S[: len(step.rows)], inputs.last_column_B]
        x = self._input(last_tokens, [inputs.prompt_T] if step.chunks else [])
        num_rows = len(step.rows)
        window = self._windows.now
        if self._graphs is None and self._parallel.ep.size == 1:
            hidden = self._extend(x, self._segments(step, inputs))
        else:
            parts = [self._decode(x[:num_rows], step, inputs)] if window.num_rows else []
            if window.prefills:
                chunks = replace(step, rows=[])
                parts.append(self._extend(x[num_rows:], self._segments(chunks, inputs)))
            hidden = parts[0] if len(parts) == 1 else torch.cat(parts)
        if not self._parallel.is_last_stage:
            self._sent.append(self._parallel.pp.post([(self._parallel.at.pp + 1, hidden.contiguous())], []))
            return hidden
        return hidden[inputs.last_S] if step.chunks else hidden

    def _decode(self, x: torch.Tensor, step: Step, inputs: StepInputs) -> torch.Tensor:
        """Compute the rows of a step; other ranks of the ep group may have more or fewer of them."""
        window = self._windows.now
        if self._graphs is None:
            with self._model.gathering(window.num_rows):
                return self._extend(x, self._segments(replace(step, chunks=[]), inputs))
        pages = inputs.row_pages or self._graphs.padding(window.num_rows, window.num_pages)
        hidden = self._graphs(x, pages)
        # Other cohorts overwrite it, perhaps before it has been sent.
        return hidden if self._parallel.is_last_stage else hidden.clone()

    def _extend(self, x: torch.Tensor, segments: Sequence[Segment]) -> torch.Tensor:
        """Run tokens through this stage; without any, only its experts compute something."""
        if not segments:
            return self._model(x, [])
        return self._model.advance(x, self._pool.cache, segments)

    def _segments(self, step: Step, inputs: StepInputs) -> list[Segment]:
        """Return the segments of a pass over the rows of a step, if there are any, and the chunks."""
        size = self._tables.block_size
        backends = self._pool.backends
        if backends is None:
            return list(cpu_segments(self._decoding if step.rows else None, step.chunks, page_size=size))
        segments: list[Segment] = []
        if step.rows:
            assert inputs.row_pages is not None
            longest = int(self._tables.lens[self._tables.running()].max())
            segments.append(paged_rows(backends, inputs.row_pages, page_size=size, longest=longest))
        if chunks := self._paged_chunks(step):
            assert inputs.chunk_pages is not None
            segments.append(paged_chunks(backends, inputs.chunk_pages, chunks))
        if len(chunks) < len(step.chunks):
            segments.append(prefill(step.fresh, page_size=size, device=self._device))
        return segments

    def _copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy blocks of the cache, given as (from, to)."""
        if copies:
            self._pool.cache.copy(*zip(*copies, strict=True))

    def _input(self, last_tokens: torch.Tensor, prompts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the tokens of a pass on the first stage, the previous stage's hidden states on others."""
        if self._parallel.is_first_stage:
            return torch.cat([last_tokens, *prompts]) if prompts else last_tokens
        num_tokens = len(last_tokens) + sum(map(len, prompts))
        hidden = self._model.flat.new_empty(num_tokens, self._model.config.hidden_size)
        self._parallel.pp.exchange([], [(self._parallel.at.pp - 1, hidden)])
        return hidden


_NUM_BUFFERS = 3  # A step's buffer is written again three steps later, when its copy has usually ended.
_ALIGNMENT = 16  # Bytes; kernels load several numbers at a time.


class StepUpload:
    """Sends all numbers of a step to the device in one copy.

    The copies start from a ring of pinned buffers. The host waits for the last copy from a buffer before it
    writes to it again. While rows decode, that copy has ended: the tokens of a later step have been read.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ring = [torch.empty(0, dtype=torch.uint8)] * (0 if device.type == "cpu" else _NUM_BUFFERS)
        self._next = 0
        self._copied: list[torch.cuda.Event | None] = [None] * len(self._ring)
        """The ends of the last copies from the buffers."""

    def __call__(self, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
        """Return the arrays as tensors on the device; a CPU shares the arrays' memory."""
        if not self._ring:
            return [torch.from_numpy(array) for array in arrays]
        padded_sizes = (-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays)
        *starts, stop = accumulate(padded_sizes, initial=0)
        num_bytes = max(_ALIGNMENT, stop)
        number = self._next
        self._next = (number + 1) % len(self._ring)
        buffer = self._buffer(number, num_bytes)
        on_host = buffer.numpy()
        for start, array in zip(starts, arrays, strict=True):
            on_host[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        on_device = buffer[:num_bytes].to(self._device, non_blocking=True)
        copied = self._copied[number] = torch.cuda.Event()
        copied.record()
        return [
            on_device[start : start + array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
            for start, array in zip(starts, arrays, strict=True)
        ]

    def _buffer(self, number: int, num_bytes: int) -> Tensor:
        """Return a buffer of the ring, of at least so many bytes, that no copy reads any more."""
        copied = self._copied[number]
        if copied is not None and not copied.query():
            copied.synchronize()
        if len(self._ring[number]) < num_bytes:
            size = 1 << (num_bytes - 1).bit_length()
            self._ring[number] = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
        return self._ring[number]
