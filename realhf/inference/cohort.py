"""Cohort: samples that share pages and slots, and the steps in which a replica's ranks continue them.

All ranks of a replica execute the scheduler's steps in lockstep (continuous batching). Hidden states flow to
later pipeline stages. Tokens flow back to earlier ones, from host to host: on NCCL they would have to wait
for hidden states of other cohorts, whose senders may wait for them (docs/collectives.md).

On the paged path, without a pipeline, a step starts before the host has read the tokens of the step before. A
row that has ended with that token then computes one token too many, which nobody reads, and frees its slot
one step later.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from realhf.dist.group import Pending
from realhf.inference.block_manager import BlockManager
from realhf.inference.decode_graphs import DecodeGraphs
from realhf.inference.decode_windows import DecodeWindows
from realhf.inference.forward_batch import (
    chunk_arrays,
    cpu_segments,
    paged_chunks,
    paged_rows,
    prefill,
)
from realhf.inference.kept_cache import KeptCache
from realhf.inference.kv_budget import CacheSizes, GenerationLimits
from realhf.inference.page_pool import PagePool
from realhf.inference.prompt_queue import PromptQueue
from realhf.inference.rollout_buffer import PromptGroup, RolloutBuffer
from realhf.inference.sampling import for_vocabulary, sample
from realhf.inference.scheduler import Scheduler
from realhf.inference.steps import ParkedRow, Prompt, Step
from realhf.inference.transfers import Download, StepUpload
from realhf.nn.packed import Segment
from realhf.nn.transformer import Transformer
from realhf.pinned import upload


@dataclass
class _Started:
    """A step that has been started, and what is known of its results."""

    step: Step
    at: tuple[torch.Tensor, torch.Tensor]  # Where the buffer keeps the tokens and log-probs.
    drawn_S: torch.Tensor  # On the last stage: the token of each of the step's samples.
    download: Download  # The same tokens on the host.
    unread: set[int] = field(default_factory=set)
    """Samples that had ended before the step, as has been found out since."""

    def numbers(self) -> list[int]:
        """Return the samples that get a token."""
        if not self.unread:
            return self.step.samples
        return [number for number in self.step.samples if number not in self.unread]


class Cohort:
    """Samples that share pages and slots in one round.

    With `kept`, the unfinished samples of the round before go on from their cached tokens, all new groups
    begin here, and their pages stay leased.
    """

    def __init__(
        self, model: Transformer, limits: GenerationLimits, groups: Sequence[PromptGroup],
        *, queue: PromptQueue, seed: int, pool: PagePool, kept: KeptCache | None = None,
    ) -> None:  # fmt: skip
        self.sizes = CacheSizes(groups, limits)
        num_begun = self.sizes.num_at_once(groups) if kept is None else len(groups)
        self._begun = groups[:num_begun]
        self.rest = groups[num_begun:]
        """The groups that have to wait in the queue."""
        self._model = model
        self._limits = limits
        self._pool = pool
        self._kept = kept
        self._parallel = model.groups
        self._device = model.flat.device
        self._queue = queue
        self._sampling = for_vocabulary(limits.work.sampling, model.config.vocab_size)
        capacity = sum(len(group.ids) for group in groups) + (0 if kept is None else len(kept.rows))
        self.samples = RolloutBuffer(
            capacity, work=limits.work, eos_ids=model.config.eos_token_ids, seed=seed, device=self._device,
            vocab_range=model.vocab_range if self._parallel.is_last_stage else None, budget=limits.budget)
        # Rows of a longrope model restart by their lengths, which must then be known. In a pipeline, other
        # cohorts keep the device busy.
        self._is_ahead = (
            pool.backends is not None and model.rope_boundary is None and self._parallel.layout.pp == 1)
        self._upload = StepUpload(self._device)
        self._last: _Started | None = None
        self._windows = DecodeWindows(self._parallel.ep_control)
        self._sent: list[Pending] = []
        self._scheduler: Scheduler | None = None
        self._leased: list[int] = []

    def start(self, waiting: Sequence[PromptGroup]) -> None:
        """Lease pages and make the scheduler for as many rows as may run at once, within the budget.

        Any of the groups that are `waiting` may come out of the queue.
        """
        rows = [] if self._kept is None else [row for row in self._kept.rows if not row.waits]
        possible = [*(row.group for row in rows), *self._begun, *waiting]
        if not possible and self._parallel.ep.size == 1:
            return
        sizes = CacheSizes(possible, self._limits)
        if self._kept is None:
            self._leased = self._pool.lease(sizes.num_blocks, page_size=sizes.block_size)
            blocks = BlockManager(self._leased)
        else:
            self._kept.make_room(self._begun, self._limits)
            blocks = self._kept.blocks
        self._tables = sizes.tables(self._pool.cache.num_blocks)
        self._row_pages = self._pool.table_width(self._tables.blocks_per_row)
        continued = [row.continue_in(self.samples) for row in rows]
        parked = [row for row in continued if isinstance(row, ParkedRow)]
        self.samples.set_last_tokens([row.sample for row in parked])
        prompts = [row for row in continued if isinstance(row, Prompt)]
        prompts += [self.samples.add(group) for group in self._begun]
        self._scheduler = Scheduler(
            prompts, tables=self._tables,
            history=self.samples.history, prefill_tokens=self._limits.work.prefill_tokens,
            restart_at=self._model.rope_boundary, more=self._take_prompt, blocks=blocks, parked=parked)

    @cached_property
    def _graphs(self) -> DecodeGraphs | None:
        """The recorded passes, asked for when all cohorts have their pages; a round does not change them."""
        return self._pool.graphs if self._limits.work.cuda_graphs else None

    def _take_prompt(self) -> Prompt | None:
        group = self._queue.take()
        return None if group is None else self.samples.add(group)

    def advance(self) -> bool:
        """Start the next step, and read the tokens of the step before; return whether there was a next one.

        The messages of a step are in flight until the next call.
        """
        if self._scheduler is None:
            return False
        self._wait_for_sent()
        last = self._last
        is_read = last is None or self._receive(last)
        if not is_read and self._scheduler.may_reclaim:
            assert last is not None
            is_read = self._read_late(last, following=None)
        step = self._windows.next_step(self._scheduler, self.samples, num_pages=self._row_pages)
        is_running = self._windows.now.num_steps > 0
        self._last = None
        if step is not None:
            self._last = self._compute(step)
        elif is_running:  # Another rank of the ep group has a step.
            self._pass(Step([], [], []), {})
        if not is_read and last is not None:
            self._read_late(last, following=self._last)
        if not is_running:
            self._finish()
        return is_running

    def _wait_for_sent(self) -> None:
        for sent in self._sent:
            sent.wait()
        self._sent = []

    def _finish(self) -> None:
        """Keep the unfinished rows of the round, or give the pages back."""
        self._wait_for_sent()
        if self._scheduler is not None and self._kept is not None:
            self._kept.keep(self._scheduler.parked, self.samples)
        self._pool.give_back(self._leased)
        self._leased = []
        self._scheduler = None

    def _receive(self, last: _Started) -> bool:
        """Take over the tokens of the last step, and tell the scheduler which samples have ended, as far as
        the host knows; return whether it knows all."""
        if not self._parallel.is_last_stage:
            tokens_S = torch.empty(len(last.step.samples), dtype=torch.long)
            self._parallel.pp_back.exchange([], [(self._parallel.layout.pp - 1, tokens_S)])
            last.drawn_S = upload(tokens_S.numpy(), self._device)
            last.download = Download(tokens_S)
        elif not last.download.is_here:
            self._send_back(last)
        self.samples.tokens[last.at] = last.drawn_S
        numbers = last.numbers()
        ended = self.samples.count(numbers)
        if not self._is_ahead:
            ended |= self._finished(last, numbers)
        stopped = np.array(numbers, np.int64)[ended]
        if last.unread:  # The scheduler knows that these have ended.
            ended = np.isin(last.step.samples, [*last.unread, *stopped.tolist()])
        assert self._scheduler is not None
        self._copy(self._scheduler.update(ended, parks=self._parks(stopped.tolist())))
        return not self._is_ahead

    def _read_late(self, last: _Started, *, following: _Started | None) -> bool:
        """End the samples whose tokens of the last step say so; the `following` step may have begun."""
        numbers = last.numbers()
        finished = np.array(numbers, np.int64)[self._finished(last, numbers)].tolist()
        if following is not None:
            following.unread |= set(finished)
        if self._scheduler is not None:
            self._copy(self._scheduler.end(
                finished, parks=self._parks(finished), is_next_planned=following is not None))
        return True

    def _finished(self, last: _Started, numbers: Sequence[int]) -> NDArray[np.bool_]:
        """Wait for the tokens of a step, and return which of `numbers`, the samples that get one, end with
        theirs, whatever their limits are."""
        tokens_S = last.download.wait()
        if last.unread:
            tokens_S = tokens_S[~np.isin(last.step.samples, list(last.unread))]
        return self.samples.finish(numbers, tokens_S)

    def _parks(self, stopped: Collection[int]) -> set[int]:
        """Return which of these samples keep their pages for later rounds."""
        if self._kept is None:
            return set()
        in_turns = self._kept.in_turns
        return {number for number in stopped if self.samples.may_go_on(number, in_turns=in_turns)}

    def _compute(self, step: Step) -> _Started:
        """Compute this stage's part of a step; on the last stage also sample."""
        insertions = self.samples.insertions(step.samples) if self._parallel.is_last_stage else None
        processing = self.samples.processing(step.samples)
        numbers = self._upload(self._arrays(step))
        self._copy(step.copies)
        hidden = self._pass(step, numbers)
        at = (numbers["sample_S"], numbers["column_S"])
        nothing = torch.zeros(0, dtype=torch.long)
        started = _Started(step, at, numbers["sample_S"][:0], Download(nothing))
        if not self._parallel.is_last_stage or not step.samples:
            return started
        tokens_S, logprobs_S = sample(
            self._model.logits(hidden), numbers["draw_S"], config=self._sampling,
            vocab_start=self._model.vocab_range[0], group=self._parallel.tp, processing=processing,
            widest_shard=-(-self._model.config.vocab_size // self._parallel.layout.tp))
        started.drawn_S = self.samples.record(at, tokens_S, logprobs_S, insertions)
        started.download = Download(started.drawn_S)
        if started.download.is_here:
            self._send_back(started)
        return started

    def _send_back(self, started: _Started) -> None:
        """Send sampled tokens to all earlier stages: from a CPU at once, from a GPU when it is the cohort's
        turn again, so that the host starts steps of other cohorts instead of waiting."""
        if stages := range(self._parallel.at.pp):
            tokens_S = torch.from_numpy(started.download.wait())
            self._sent.append(self._parallel.pp_back.post([(stage, tokens_S) for stage in stages], []))

    def _arrays(self, step: Step) -> dict[str, NDArray[Any]]:
        """Return all numbers that the device needs for a step: of rows B, prompt tokens T and samples S."""
        sample_S, column_S = self.samples.columns(step.samples)
        arrays: dict[str, NDArray[Any]] = {"sample_S": sample_S, "column_S": column_S}
        arrays["draw_S"] = self.samples.draws_on_host(step.samples)
        num_rows = len(step.rows)
        if step.rows:  # Their last tokens are those before the next ones.
            arrays["row_B"] = sample_S[:num_rows]
            arrays["last_column_B"] = column_S[:num_rows] - 1
        if step.chunks:
            arrays["last_S"] = np.array(step.last_tokens, np.int64)
            arrays["prompt_T"] = np.array([i for chunk in step.chunks for i in chunk.tokens], np.int64)
        if self._pool.backends is not None:
            if step.rows:
                window = self._windows.now
                padded = num_rows if self._graphs is None else window.num_rows
                arrays |= self._tables.advance_pages(padded, window.num_pages)
            if chunks := self._paged_chunks(step):
                arrays |= chunk_arrays(chunks, page_size=self._tables.block_size)
        return arrays

    def _paged_chunks(self, step: Step) -> list:
        """Return the pieces of prompts that attend to the cache.

        A latent is expanded for tokens that attend to one another, which takes fewer FLOPs.
        """
        return step.continued if self._model.config.mla is not None else step.chunks

    def _pass(self, step: Step, numbers: dict[str, torch.Tensor]) -> torch.Tensor:
        """Run the pass of a step; the last stage returns the hidden states from which its samples' tokens are
        drawn.

        Rows and chunks go through two passes if passes are recorded, or if experts are on several ranks: rows
        are then gathered, and an empty step takes part in both passes.
        """
        last_tokens = self.samples.tokens[:0, 0]
        if step.rows:
            last_tokens = self.samples.tokens[numbers["row_B"], numbers["last_column_B"]]
        x = self._input(last_tokens, [numbers["prompt_T"]] if step.chunks else [])
        num_rows = len(step.rows)
        window = self._windows.now
        if self._graphs is None and self._parallel.ep.size == 1:
            hidden = self._extend(x, self._segments(step, numbers))
        else:
            parts = [self._decode(x[:num_rows], step, numbers)] if window.num_rows else []
            if window.prefills:
                chunks = replace(step, rows=[])
                parts.append(self._extend(x[num_rows:], self._segments(chunks, numbers)))
            hidden = parts[0] if len(parts) == 1 else torch.cat(parts)
        if not self._parallel.is_last_stage:
            self._sent.append(self._parallel.pp.post([(self._parallel.at.pp + 1, hidden.contiguous())], []))
            return hidden
        return hidden[numbers["last_S"]] if step.chunks else hidden

    def _decode(self, x: torch.Tensor, step: Step, numbers: dict[str, torch.Tensor]) -> torch.Tensor:
        """Compute the rows of a step; other ranks of the ep group may have more or fewer of them."""
        window = self._windows.now
        if self._graphs is None:
            with self._model.gathering(window.num_rows):
                return self._extend(x, self._segments(replace(step, chunks=[]), numbers))
        if not step.rows:
            numbers = self._graphs.padding(window.num_rows, window.num_pages)
        hidden = self._graphs(x, numbers)
        # Other cohorts overwrite it, perhaps before it has been sent.
        return hidden if self._parallel.is_last_stage else hidden.clone()

    def _extend(self, x: torch.Tensor, segments: Sequence[Segment]) -> torch.Tensor:
        """Run tokens through this stage; without any, only its experts compute something."""
        if not segments:
            return self._model(x, [])
        return self._model.advance(x, self._pool.cache, segments)

    def _segments(self, step: Step, numbers: dict[str, torch.Tensor]) -> list[Segment]:
        """Return the segments of a pass over the rows of a step, if there are any, and the chunks."""
        size = self._tables.block_size
        backends = self._pool.backends
        if backends is None:
            return list(cpu_segments(self._tables if step.rows else None, step.chunks, page_size=size))
        segments: list[Segment] = []
        if step.rows:
            longest = int(self._tables.lens[self._tables.running()].max())
            segments.append(paged_rows(backends, numbers, page_size=size, longest=longest))
        if chunks := self._paged_chunks(step):
            segments.append(paged_chunks(backends, numbers, chunks))
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
