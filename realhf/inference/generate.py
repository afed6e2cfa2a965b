"""Generation with continuous batching: the ranks of a replica execute the scheduler's steps in lockstep.

Under pipeline parallelism the samples form one cohort per stage, so that all stages work at the same time;
hidden states flow to later stages, tokens back to earlier ones. All ranks of a replica run all cohorts.

Under expert parallelism the ranks of an ep group pass through the experts together: ranks without tokens take
part in the passes of the others with an empty batch.

Prompts that do not begin at once wait in a queue, from which all cohorts of all replicas take.
"""

import zlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from realhf.calls import Generate
from realhf.data.batch import Batch
from realhf.dist.activity import Report, no_report
from realhf.dist.group import Pending
from realhf.inference.block_manager import BlockManager
from realhf.inference.block_tables import BlockTables
from realhf.inference.cache_limit import CacheLimit
from realhf.inference.decode_graphs import DecodeGraphs, recorder
from realhf.inference.forward_batch import ChunkedPrefill, Prefill, next_tokens
from realhf.inference.kv_budget import CohortCapacity, GenerationLimits, check_not_empty, longest_sizes
from realhf.inference.kv_cache import KVCache
from realhf.inference.prompt_queue import PromptQueue
from realhf.inference.rollout_buffer import PromptGroup, RolloutBuffer, by_prompt, columns
from realhf.inference.sampling import Draws, for_vocabulary, sample
from realhf.inference.scheduler import Prompt, Scheduler, Step
from realhf.layout import even_split
from realhf.nn.packed import Segment
from realhf.nn.transformer import Transformer


def generate(
    model: Transformer, batch: Batch, work: Generate, queue: PromptQueue, *, prompt_key: str, stream: str,
    limit: CacheLimit | None = None, report: Report = no_report,
) -> tuple[list[int], list]:
    """Return the ids of the samples that this replica has continued, and on one of its ranks (last stage,
    first of tp) the columns of `Generate`.

    Each `stream` (the call's name) has its own random numbers. If `work` does not limit the KV cache, `limit`
    does.

    Raises UserError when a prompt is empty, or when a sample cannot fit in the model's positions or in the
    budget of the KV cache: on all replicas among which prompts move.
    """
    prompts = [prompt.tolist() for prompt in batch[prompt_key].split()]
    seed = (work.seed << 32) | zlib.crc32(stream.encode())
    cache_bytes = None if limit is None or work.kv_cache_gib is not None else limit.num_bytes()
    limits = _agree_on_limits(model, by_prompt(prompts, batch.ids), work, queue, cache_bytes=cache_bytes)
    ranges = [slice(*even_split(len(prompts), limits.num_cohorts, i)) for i in range(limits.num_cohorts)]
    parts = [by_prompt(prompts[part], batch.ids[part]) for part in ranges]
    capacities = [CohortCapacity(part, limits) if part else None for part in parts]
    if limit is not None and cache_bytes is not None:
        block_bytes = limits.token_bytes * limits.block_size
        taken = block_bytes * sum(capacity.num_blocks for capacity in capacities if capacity is not None)
        needed = block_bytes * sum(capacity.num_wanted for capacity in capacities if capacity is not None)
        limit.warn_once(stream, taken=taken, needed=needed)
    num_begun = [
        0 if capacity is None else capacity.num_at_once(part)
        for capacity, part in zip(capacities, parts, strict=True)]
    rest = [part[count:] for part, count in zip(parts, num_begun, strict=True)]
    waiting = queue.put([group for part in rest for group in part])
    with torch.inference_mode():  # It has less overhead per operation than torch.no_grad.
        cohorts = [
            _Cohort(model, limits=limits, seed=seed, part=part, count=count, waiting=waiting, queue=queue)
            for part, count in zip(parts, num_begun, strict=True)]
        while any([cohort.advance() for cohort in cohorts]):
            report(_progress([cohort.samples for cohort in cohorts], len(prompts)))
    made = [cohort.samples for cohort in cohorts]
    ids = [i for samples in made for i in samples.ids[: len(samples.prompts)].tolist()]
    has_columns = model.groups.is_last_stage and model.groups.at.tp == 0
    return ids, columns(made, wide=model.wide) if has_columns else []


def _progress(parts: Sequence[RolloutBuffer], num_own: int) -> str:
    """Return how many samples of this replica have ended; it may have taken more than its own."""
    ended = sum(samples.num_ended for samples in parts)
    tokens = sum(samples.num_tokens for samples in parts)
    begun = sum(len(samples.prompts) for samples in parts)
    return f"{ended} of {max(begun, num_own)} samples of this rank have ended, {tokens} tokens"


def _agree_on_limits(
    model: Transformer, groups: Sequence[PromptGroup], work: Generate, queue: PromptQueue,
    *, cache_bytes: int | None,
) -> GenerationLimits:  # fmt: skip
    """Return limits that are equal on all replicas among which prompts move.

    Raises UserError on all of them when a prompt is empty or can never run.
    """
    empty = [i for group in groups if not group.tokens for i in group.ids]
    gathered = queue.gather([sum(len(group.ids) for group in groups), longest_sizes(groups), empty])
    check_not_empty([i for *_, ids in gathered for i in ids])
    most = max(count for count, *_ in gathered)
    sizes = [tuple(size) for _, some, _ in gathered for size in some]
    pp = model.groups.layout.pp
    num_cohorts = pp if model.groups.ep.size > 1 else max(1, min(pp, most, work.max_rows))
    limits = GenerationLimits.of(
        sizes, work, token_bytes=model.cache_token_bytes, num_cohorts=num_cohorts, cache_bytes=cache_bytes)
    if sizes:
        limits.check(model.config.num_positions)
    return limits


class _Cohort:
    """Samples that share a cache and slots."""

    def __init__(
        self, model: Transformer, *, limits: GenerationLimits, seed: int, part: Sequence[PromptGroup],
        count: int, waiting: Sequence[PromptGroup], queue: PromptQueue,
    ) -> None:  # fmt: skip
        """It begins with `count` groups of its part; any of those `waiting` may come out of the queue."""
        self._model = model
        self._groups = model.groups
        self._device = model.flat.device
        self._queue = queue
        self._draws = Draws(seed)
        self._sampling = for_vocabulary(limits.work.sampling, model.config.vocab_size)
        ends = torch.zeros(model.config.vocab_size, dtype=torch.bool, device=self._device)
        ends[[i for i in model.config.eos_token_ids if i < len(ends)]] = True
        num_samples = sum(len(group.ids) for group in part)
        self.samples = RolloutBuffer(num_samples, max_new_tokens=self._sampling.max_new_tokens, ends=ends)
        self._step: Step | None = None
        self._drawn = torch.zeros(0, dtype=torch.long)
        self._in_lockstep = self._groups.ep.size > 1
        """Whether some other rank of the ep group may still have samples."""
        self._sent: list[Pending] = []
        self._scheduler: Scheduler | None = None
        self._cache: KVCache | None = None
        self._graphs: DecodeGraphs | None = None
        if possible := [*part[:count], *waiting]:
            self._reserve(CohortCapacity(possible, limits), part[:count], limits.work)

    def _reserve(self, capacity: CohortCapacity, groups: Sequence[PromptGroup], work: Generate) -> None:
        """Allocate the cache and the scheduler for as many rows as may run at once, within the budget."""
        record = recorder(self._device) if work.cuda_graphs and self._model.recordable else None
        num_blocks = capacity.num_blocks + (record is not None)  # DecodeGraphs need a spare block.
        self._cache = KVCache.of(self._model, num_blocks, capacity.block_size)
        self._tables = BlockTables(
            num_slots=capacity.num_slots, num_blocks=capacity.num_blocks, block_size=capacity.block_size,
            blocks_per_row=capacity.blocks_per_row, max_sharers=capacity.max_sharers)
        self._scheduler = Scheduler(
            [self.samples.add(group) for group in groups], num_slots=capacity.num_slots,
            blocks=BlockManager(capacity.num_blocks), tables=self._tables, history=self.samples.history,
            prefill_tokens=work.prefill_tokens, restart_at=self._model.cache_limit, more=self._take_prompt)
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
            self._scheduler = self._cache = self._graphs = None  # This frees memory for other cohorts.
        if self._in_lockstep:
            self._compute_in_lockstep()
        elif self._step is not None:
            self._compute(self._step)
        return self._step is not None or self._in_lockstep

    def _compute_in_lockstep(self) -> None:
        """Compute a step, or an empty pass as long as another rank of the ep group has a step."""
        self._in_lockstep = any(self._groups.ep_control.all_gather_json(self._step is not None))
        if self._step is not None:
            self._compute(self._step)
        elif self._in_lockstep:
            self._model(self._empty_input(), [])

    def _compute(self, step: Step) -> None:
        """Compute this stage's part of a step; on the last stage also sample."""
        samples = np.array(step.samples, np.int64)
        draws = self._draws(
            samples, sample_ids=self.samples.ids[samples], positions=self.samples.lengths[samples])
        # A copy to a GPU waits for the work that is queued there, so these copies come before the pass.
        draws_B = torch.from_numpy(draws).to(self._device)
        at = self.samples.at(samples)
        hidden = self._pass(step)
        self._drawn = self._integers([])
        if not self._groups.is_last_stage or not len(samples):
            return
        self._drawn, logprobs_B = sample(
            self._model.logits(hidden), draws_B, config=self._sampling,
            vocab_start=self._model.vocab_range[0], group=self._groups.tp)
        self.samples.logprobs[at] = logprobs_B
        messages = [(stage, self._drawn) for stage in range(self._groups.at.pp)]
        self._sent.append(self._groups.pp_back.post(messages, []))

    def _pass(self, step: Step) -> torch.Tensor:
        """Run the pass of a step; the last stage returns the hidden states from which its samples' tokens are
        drawn."""
        assert self._cache is not None
        if step.copies:
            self._cache.copy(*zip(*step.copies, strict=True))
        if self._graphs is not None and step.rows:
            hidden = self._decode_by_graph(step, self._cache, self._graphs)
        else:
            hidden = self._model.advance(self._input(step), self._cache, list(self._segments(step)))
        if not self._groups.is_last_stage:
            self._sent.append(self._groups.pp.post([(self._groups.at.pp + 1, hidden.contiguous())], []))
            return hidden
        return hidden[self._integers(step.last_tokens)] if step.pieces else hidden

    def _decode_by_graph(self, step: Step, cache: KVCache, graphs: DecodeGraphs) -> torch.Tensor:
        """Run the rows by a CUDA graph, and the pieces in a second pass."""
        decoded = graphs(self._last_tokens(step))
        if not step.pieces:
            return decoded
        segments = list(self._prefill_segments(step))
        return torch.cat([decoded, self._model.advance(self._prompt_tokens(step), cache, segments)])

    def _segments(self, step: Step) -> Iterator[Segment]:
        if step.rows:
            yield next_tokens(self._tables, self._device)
        yield from self._prefill_segments(step)

    def _prefill_segments(self, step: Step) -> Iterator[Segment]:
        size = self._tables.block_size
        if (piece := step.continued) is not None:
            yield ChunkedPrefill(
                self._integers(piece.cache_positions(size)), num_tokens=len(piece.tokens),
                longest=len(piece.prompt.tokens))
        if fresh := step.fresh:
            positions_T = self._integers([i for piece in fresh for i in piece.cache_positions(size)])
            whole_lens = [len(piece.prompt.tokens) for piece in fresh]
            yield Prefill([piece.stop for piece in fresh], positions_T, whole_lens=whole_lens)

    def _receive_tokens(self, step: Step) -> None:
        groups = self._groups
        samples = np.array(step.samples, np.int64)
        if not groups.is_last_stage:
            self._drawn = torch.empty(len(samples), dtype=torch.long, device=self._device)
            groups.pp_back.exchange([], [(groups.layout.pp - 1, self._drawn)])
        assert self._scheduler is not None
        self._scheduler.update(self.samples.append(samples, self._drawn))

    def _integers(self, numbers: Sequence[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.long, device=self._device)

    def _empty_input(self) -> torch.Tensor:
        """Return this stage's input for a pass without tokens."""
        if self._groups.is_first_stage:
            return self._integers([])
        return self._model.flat.new_empty(0, self._model.config.hidden_size)

    def _last_tokens(self, step: Step) -> torch.Tensor:
        return self.samples.tokens[self.samples.at(np.array(step.rows, np.int64), back=1)]

    def _prompt_tokens(self, step: Step) -> torch.Tensor:
        return self._integers([token for piece in step.pieces for token in piece.tokens])

    def _input(self, step: Step) -> torch.Tensor:
        """Return the step's tokens on the first stage, and the previous stage's hidden states on others."""
        if self._groups.is_first_stage:
            last_B = self._last_tokens(step)
            return torch.cat([last_B, self._prompt_tokens(step)]) if step.pieces else last_B
        hidden = self._model.flat.new_empty(step.num_tokens, self._model.config.hidden_size)
        self._groups.pp.exchange([], [(self._groups.at.pp - 1, hidden)])
        return hidden
