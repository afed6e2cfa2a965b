"""Cohort: samples that share a cache and slots, and the steps in which a replica's ranks continue them.

All ranks of a replica execute the scheduler's steps in lockstep (continuous batching). Hidden states flow to
later pipeline stages, tokens back to earlier ones.
"""

from collections.abc import Iterator, Sequence

import torch

from realhf.dist.group import Pending
from realhf.inference.block_manager import BlockManager
from realhf.inference.decode_graphs import DecodeGraphs, recorder
from realhf.inference.forward_batch import ChunkedPrefill, Prefill, next_tokens
from realhf.inference.kept_cache import KeptCache
from realhf.inference.kv_budget import CacheSizes, GenerationLimits
from realhf.inference.kv_cache import KVCache
from realhf.inference.prompt_queue import PromptQueue
from realhf.inference.rollout_buffer import PromptGroup, RolloutBuffer
from realhf.inference.sampling import for_vocabulary, sample
from realhf.inference.scheduler import Chunk, ParkedRow, Prompt, Scheduler, Step
from realhf.nn.packed import Segment
from realhf.nn.transformer import Transformer


class Cohort:
    """Samples that share a cache and slots in one round.

    With `kept`, the unfinished samples of the round before go on from their cached tokens, all new groups
    begin here, and the cache stays allocated.
    """

    def __init__(
        self, model: Transformer, limits: GenerationLimits, groups: Sequence[PromptGroup],
        *, queue: PromptQueue, seed: int, kept: KeptCache | None = None,
    ) -> None:  # fmt: skip
        self.sizes = CacheSizes(groups, limits)
        num_begun = self.sizes.num_at_once(groups) if kept is None else len(groups)
        self._begun = groups[:num_begun]
        self.rest = groups[num_begun:]
        """The groups that have to wait in the queue."""
        self._model = model
        self._limits = limits
        self._kept = kept
        self._parallel = model.groups
        self._device = model.flat.device
        self._queue = queue
        self._sampling = for_vocabulary(limits.work.sampling, model.config.vocab_size)
        capacity = sum(len(group.ids) for group in groups) + (0 if kept is None else len(kept.rows))
        self.samples = RolloutBuffer(
            capacity, work=limits.work, eos_ids=model.config.eos_token_ids, seed=seed, device=self._device,
            vocab_range=model.vocab_range if self._parallel.is_last_stage else None, budget=limits.budget)
        self._step: Step | None = None
        self._drawn = torch.zeros(0, dtype=torch.long)
        self._in_lockstep = self._parallel.ep.size > 1
        """Whether some other rank of the ep group may still have samples."""
        self._sent: list[Pending] = []
        self._scheduler: Scheduler | None = None
        self._cache: KVCache | None = None
        self._graphs: DecodeGraphs | None = None

    def start(self, waiting: Sequence[PromptGroup]) -> None:
        """Allocate the cache and the scheduler for as many rows as may run at once, within the budget.

        Any of the groups that are `waiting` may come out of the queue.
        """
        rows = [] if self._kept is None else [row for row in self._kept.rows if not row.waits]
        possible = [*(row.group for row in rows), *self._begun, *waiting]
        if not possible:
            return
        work = self._limits.work
        sizes = CacheSizes(possible, self._limits)
        record = recorder(self._device) if work.cuda_graphs and self._model.recordable else None
        num_spare = int(record is not None)  # DecodeGraphs need a spare block.
        if self._kept is None:
            blocks = BlockManager(sizes.num_blocks)
            self._cache = KVCache.of(self._model, sizes.num_blocks + num_spare, sizes.block_size)
        else:
            self._kept.make_room(self._model, self._begun, self._limits, num_spare=num_spare)
            blocks = self._kept.blocks
            self._cache = self._kept.cache
        assert self._cache is not None
        self._tables = sizes.tables(blocks.num_blocks)
        continued = [row.continue_in(self.samples) for row in rows]
        parked = [row for row in continued if isinstance(row, ParkedRow)]
        self.samples.set_last_tokens([row.sample for row in parked])
        prompts = [row for row in continued if isinstance(row, Prompt)]
        prompts += [self.samples.add(group) for group in self._begun]
        self._scheduler = Scheduler(
            prompts, tables=self._tables,
            history=self.samples.history, prefill_tokens=work.prefill_tokens,
            restart_at=self._model.rope_boundary, more=self._take_prompt, blocks=blocks, parked=parked)
        if record is not None:
            self._graphs = DecodeGraphs(self._model, self._cache, self._tables, record)

    def _take_prompt(self) -> Prompt | None:
        group = self._queue.take()
        return None if group is None else self.samples.add(group)

    def advance(self) -> bool:
        """Receive the tokens of the previous step and start the next one; return whether there was one.

        The messages of a step are in flight until the next call.
        """
        for sent in self._sent:
            sent.wait()
        self._sent = []
        if self._step is not None:
            self._receive_tokens(self._step)
        self._step = None if self._scheduler is None else self._scheduler.plan()
        if self._step is None:
            if self._kept is not None and self._scheduler is not None:
                self._kept.keep(self._scheduler.parked, self.samples)
            self._scheduler = self._cache = self._graphs = None  # This frees memory for other cohorts.
        is_running = self._step is not None
        if self._in_lockstep:
            is_running = any(self._parallel.ep_control.all_gather_json(is_running))
            self._in_lockstep = is_running
        if self._step is not None:
            self._compute(self._step)
        elif is_running:  # Another rank of the ep group has a step.
            self._model(self._input([], []), [])
        return is_running

    def _compute(self, step: Step) -> None:
        """Compute this stage's part of a step; on the last stage also sample."""
        # A copy to a GPU waits for the work that is queued there, so these copies come before the pass.
        draws_B = self.samples.draws(step.samples)
        at = self.samples.at(step.samples)
        insertions = self.samples.insertions(step.samples) if self._parallel.is_last_stage else None
        processing = self.samples.processing(step.samples)
        hidden = self._pass(step)
        self._drawn = self._integers([])
        if not self._parallel.is_last_stage or not step.samples:
            return
        tokens_B, logprobs_B = sample(
            self._model.logits(hidden), draws_B, config=self._sampling,
            vocab_start=self._model.vocab_range[0], group=self._parallel.tp, processing=processing,
            widest_shard=-(-self._model.config.vocab_size // self._parallel.layout.tp))
        self._drawn = self.samples.record(at, tokens_B, logprobs_B, insertions)
        messages = [(stage, self._drawn) for stage in range(self._parallel.at.pp)]
        self._sent.append(self._parallel.pp_back.post(messages, []))

    def _pass(self, step: Step) -> torch.Tensor:
        """Run the pass of a step; the last stage returns the hidden states from which its samples' tokens are
        drawn. A CUDA graph decodes the rows if there is one, and a second pass then prefills the chunks."""
        assert self._cache is not None
        self._copy(step.copies)
        parts = []
        rows = step.rows
        if self._graphs is not None and rows:
            parts = [self._graphs(self._last_tokens(rows))]
            rows = []
        segments = [next_tokens(self._tables, self._device)] if rows else []
        segments += self._prefill_segments(step)
        if segments:
            parts.append(self._model.advance(self._input(rows, step.chunks), self._cache, segments))
        hidden = parts[0] if len(parts) == 1 else torch.cat(parts)
        if not self._parallel.is_last_stage:
            self._sent.append(self._parallel.pp.post([(self._parallel.at.pp + 1, hidden.contiguous())], []))
            return hidden
        return hidden[self._integers(step.last_tokens)] if step.chunks else hidden

    def _prefill_segments(self, step: Step) -> Iterator[Segment]:
        size = self._tables.block_size
        for chunk in step.continued:
            yield ChunkedPrefill(
                self._integers(chunk.cache_positions(size)), num_tokens=len(chunk.tokens),
                longest=len(chunk.prompt.tokens))
        if fresh := step.fresh:
            positions_T = self._integers([i for chunk in fresh for i in chunk.cache_positions(size)])
            whole_lens = [len(chunk.prompt.tokens) for chunk in fresh]
            yield Prefill([chunk.stop for chunk in fresh], positions_T, whole_lens=whole_lens)

    def _receive_tokens(self, step: Step) -> None:
        if not self._parallel.is_last_stage:
            self._drawn = torch.empty(len(step.samples), dtype=torch.long, device=self._device)
            self._parallel.pp_back.exchange([], [(self._parallel.layout.pp - 1, self._drawn)])
        assert self._scheduler is not None
        ended = self.samples.append(step.samples, self._drawn)
        if self._kept is None:
            self._scheduler.update(ended)
            return
        stopped = (sample for sample, end in zip(step.samples, ended, strict=True) if end)
        in_turns = self._kept.in_turns
        parks = {sample for sample in stopped if self.samples.may_go_on(sample, in_turns=in_turns)}
        self._copy(self._scheduler.update(ended, parks=parks))

    def _copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy blocks of the cache, given as (from, to)."""
        assert self._cache is not None
        if copies:
            self._cache.copy(*zip(*copies, strict=True))

    def _integers(self, numbers: Sequence[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.long, device=self._device)

    def _last_tokens(self, rows: Sequence[int]) -> torch.Tensor:
        return self.samples.tokens[self.samples.at(rows, back=1)]

    def _input(self, rows: Sequence[int], chunks: Sequence[Chunk]) -> torch.Tensor:
        """Return the tokens of a pass on the first stage, the previous stage's hidden states on others."""
        if self._parallel.is_first_stage:
            prompt_tokens = [token for chunk in chunks for token in chunk.tokens]
            return torch.cat([self._last_tokens(rows), self._integers(prompt_tokens)])
        num_tokens = len(rows) + sum(len(chunk.tokens) for chunk in chunks)
        hidden = self._model.flat.new_empty(num_tokens, self._model.config.hidden_size)
        self._parallel.pp.exchange([], [(self._parallel.at.pp - 1, hidden)])
        return hidden
