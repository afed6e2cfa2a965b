"""Generation with continuous batching: the ranks of a replica execute the scheduler's steps in lockstep.

Under pipeline parallelism the samples form one cohort per stage, so that all stages work at the same time;
hidden states flow to later stages, tokens back to earlier ones. All ranks of a replica run all cohorts.

Under expert parallelism the ranks of an ep group pass through the experts together: ranks without tokens take
part in the passes of the others with an empty batch.

Prompts that do not begin at once wait in a queue, from which all cohorts of all replicas take.
"""

from collections.abc import Iterator, Sequence

import torch

from realhf.calls import Generate
from realhf.data.batch import Batch
from realhf.dist.activity import Report, no_report
from realhf.dist.group import Pending
from realhf.inference.cache_limit import CacheLimit
from realhf.inference.decode_graphs import DecodeGraphs, recorder
from realhf.inference.forward_batch import ChunkedPrefill, Prefill, next_tokens
from realhf.inference.kv_budget import CacheSizes, GenerationLimits, agreed_sizes
from realhf.inference.kv_cache import KVCache
from realhf.inference.prompt_queue import PromptQueue
from realhf.inference.rollout_buffer import PromptGroup, RolloutBuffer, join_equal, output_columns
from realhf.inference.sampling import for_vocabulary, sample, stream_seed
from realhf.inference.scheduler import Chunk, Prompt, Scheduler, Step
from realhf.layout import even_split
from realhf.nn.packed import Segment
from realhf.nn.transformer import Transformer


def generate(
    model: Transformer, batch: Batch, work: Generate, queue: PromptQueue, *, prompt_key: str, stream: str,
    limit: CacheLimit, report: Report = no_report, unfinished: Sequence[PromptGroup] = (),
    budget: int | None = None,
) -> tuple[list[int], list]:
    """Return the ids of the samples that this replica has continued, and on one of its ranks (last stage,
    first of tp) the first columns of `Generate`, in which only tokens of this call count as the response.

    Each sample, new in `batch` or `unfinished` in an earlier round, gets at most `budget` tokens.

    Each `stream` (the call's name) has its own random numbers. If `work` does not limit the KV cache, `limit`
    does.

    Raises UserError when a prompt is empty, or when a sample cannot fit in the model's positions or in the
    budget of the KV cache: on all replicas among which prompts move.
    """
    prompts = zip(batch[prompt_key].split(), batch.ids, strict=True)
    new = [PromptGroup(prompt.tolist(), [i]) for prompt, i in prompts]
    num_own = len(unfinished) + len(new)
    limits = _agree_on_limits(model, [*join_equal(unfinished), *join_equal(new)], work, queue, limit, budget)
    seed = stream_seed(work.seed, stream)
    with torch.inference_mode():  # It has less overhead per operation than torch.no_grad.
        cohorts = [
            _Cohort(model, limits, groups, queue=queue, seed=seed)
            for groups in _split(unfinished, new, num_parts=limits.num_cohorts)]
        if work.kv_cache_gib is None:
            limit.warn_once(
                stream, taken=limits.block_bytes * sum(cohort.sizes.num_blocks for cohort in cohorts),
                needed=limits.block_bytes * sum(cohort.sizes.num_wanted for cohort in cohorts))
        waiting = queue.put([group for cohort in cohorts for group in cohort.rest])
        for cohort in cohorts:
            cohort.start(waiting)
        while any([cohort.advance() for cohort in cohorts]):
            report(_progress([cohort.samples for cohort in cohorts], num_own, budget))
    made = [cohort.samples for cohort in cohorts]
    ids = [i for samples in made for i in samples.ids[: len(samples.prompts)].tolist()]
    has_columns = model.groups.is_last_stage and model.groups.at.tp == 0
    return ids, output_columns(made, wide=model.wide) if has_columns else []


def _split(
    unfinished: Sequence[PromptGroup], new: Sequence[PromptGroup], *, num_parts: int
) -> list[list[PromptGroup]]:
    """Split unfinished samples, and new ones, into equal parts."""
    parts = []
    for i in range(num_parts):
        old, fresh = (rows[slice(*even_split(len(rows), num_parts, i))] for rows in (unfinished, new))
        parts.append([*join_equal(old), *join_equal(fresh)])
    return parts


def _progress(parts: Sequence[RolloutBuffer], num_own: int, budget: int | None) -> str:
    """Return how many samples of this replica have ended; it may have taken more than its own."""
    ended = sum(samples.num_ended for samples in parts)
    tokens = sum(samples.num_tokens for samples in parts)
    begun = sum(len(samples.prompts) for samples in parts)
    done = "have ended" if budget is None else f"have ended or have {budget} new tokens"
    return f"{ended} of {max(begun, num_own)} samples of this rank {done}, {tokens} tokens"


def _agree_on_limits(
    model: Transformer, groups: Sequence[PromptGroup], work: Generate, queue: PromptQueue,
    limit: CacheLimit, budget: int | None,
) -> GenerationLimits:  # fmt: skip
    """Return limits that are equal on all replicas among which prompts move.

    Raises UserError on all of them when a prompt is empty or can never run.
    """
    cache_bytes = limit.num_bytes if work.kv_cache_gib is None else None
    sizes = agreed_sizes(groups, queue.gather)
    most = max(queue.gather(sum(len(group.ids) for group in groups)))
    pp = model.groups.layout.pp
    num_cohorts = pp if model.groups.ep.size > 1 else max(1, min(pp, most, work.max_rows))
    limits = GenerationLimits(
        sizes, work, token_bytes=model.cache_token_bytes, num_cohorts=num_cohorts, cache_bytes=cache_bytes,
        budget=budget)
    if sizes:
        limits.check(model.config.num_positions)
    return limits


class _Cohort:
    """Samples that share a cache and slots."""

    def __init__(
        self, model: Transformer, limits: GenerationLimits, groups: Sequence[PromptGroup],
        *, queue: PromptQueue, seed: int,
    ) -> None:  # fmt: skip
        self.sizes = CacheSizes(groups, limits)
        num_begun = self.sizes.num_at_once(groups)
        self._begun = groups[:num_begun]
        self.rest = groups[num_begun:]
        """The groups that have to wait in the queue."""
        self._model = model
        self._limits = limits
        self._groups = model.groups
        self._device = model.flat.device
        self._queue = queue
        self._sampling = for_vocabulary(limits.work.sampling, model.config.vocab_size)
        self.samples = RolloutBuffer(
            sum(len(group.ids) for group in groups), max_new_tokens=self._sampling.max_new_tokens,
            eos_ids=model.config.eos_token_ids, seed=seed, device=self._device, budget=limits.budget)
        self._step: Step | None = None
        self._drawn = torch.zeros(0, dtype=torch.long)
        self._in_lockstep = self._groups.ep.size > 1
        """Whether some other rank of the ep group may still have samples."""
        self._sent: list[Pending] = []
        self._scheduler: Scheduler | None = None
        self._cache: KVCache | None = None
        self._graphs: DecodeGraphs | None = None

    def start(self, waiting: Sequence[PromptGroup]) -> None:
        """Allocate the cache and the scheduler for as many rows as may run at once, within the budget.

        Any of the groups that are `waiting` may come out of the queue.
        """
        possible = [*self._begun, *waiting]
        if not possible:
            return
        work = self._limits.work
        sizes = CacheSizes(possible, self._limits)
        record = recorder(self._device) if work.cuda_graphs and self._model.recordable else None
        num_blocks = sizes.num_blocks + (record is not None)  # DecodeGraphs need a spare block.
        self._cache = KVCache.of(self._model, num_blocks, sizes.block_size)
        self._tables = sizes.tables()
        self._scheduler = Scheduler(
            [self.samples.add(group) for group in self._begun], tables=self._tables,
            history=self.samples.history, prefill_tokens=work.prefill_tokens,
            restart_at=self._model.rope_boundary, more=self._take_prompt)
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
        goes_on = self._step is not None
        if self._in_lockstep:
            goes_on = any(self._groups.ep_control.all_gather_json(goes_on))
            self._in_lockstep = goes_on
        if self._step is not None:
            self._compute(self._step)
        elif goes_on:  # Another rank of the ep group has a step.
            self._model(self._input([], []), [])
        return goes_on

    def _compute(self, step: Step) -> None:
        """Compute this stage's part of a step; on the last stage also sample."""
        # A copy to a GPU waits for the work that is queued there, so these copies come before the pass.
        draws_B = self.samples.draws(step.samples)
        at = self.samples.at(step.samples)
        hidden = self._pass(step)
        self._drawn = self._integers([])
        if not self._groups.is_last_stage or not step.samples:
            return
        self._drawn, logprobs_B = sample(
            self._model.logits(hidden), draws_B, config=self._sampling,
            vocab_start=self._model.vocab_range[0], group=self._groups.tp)
        self.samples.logprobs[at] = logprobs_B
        messages = [(stage, self._drawn) for stage in range(self._groups.at.pp)]
        self._sent.append(self._groups.pp_back.post(messages, []))

    def _pass(self, step: Step) -> torch.Tensor:
        """Run the pass of a step; the last stage returns the hidden states from which its samples' tokens are
        drawn. A CUDA graph decodes the rows if there is one, and a second pass then prefills the chunks."""
        assert self._cache is not None
        if step.copies:
            self._cache.copy(*zip(*step.copies, strict=True))
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
        if not self._groups.is_last_stage:
            self._sent.append(self._groups.pp.post([(self._groups.at.pp + 1, hidden.contiguous())], []))
            return hidden
        return hidden[self._integers(step.last_tokens)] if step.chunks else hidden

    def _prefill_segments(self, step: Step) -> Iterator[Segment]:
        size = self._tables.block_size
        if (chunk := step.continued) is not None:
            yield ChunkedPrefill(
                self._integers(chunk.cache_positions(size)), num_tokens=len(chunk.tokens),
                longest=len(chunk.prompt.tokens))
        if fresh := step.fresh:
            positions_T = self._integers([i for chunk in fresh for i in chunk.cache_positions(size)])
            whole_lens = [len(chunk.prompt.tokens) for chunk in fresh]
            yield Prefill([chunk.stop for chunk in fresh], positions_T, whole_lens=whole_lens)

    def _receive_tokens(self, step: Step) -> None:
        if not self._groups.is_last_stage:
            self._drawn = torch.empty(len(step.samples), dtype=torch.long, device=self._device)
            self._groups.pp_back.exchange([], [(self._groups.layout.pp - 1, self._drawn)])
        assert self._scheduler is not None
        self._scheduler.update(self.samples.append(step.samples, self._drawn))

    def _integers(self, numbers: Sequence[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.long, device=self._device)

    def _last_tokens(self, rows: Sequence[int]) -> torch.Tensor:
        return self.samples.tokens[self.samples.at(rows, back=1)]

    def _input(self, rows: Sequence[int], chunks: Sequence[Chunk]) -> torch.Tensor:
        """Return the tokens of a pass on the first stage, the previous stage's hidden states on others."""
        if self._groups.is_first_stage:
            prompt_tokens = [token for chunk in chunks for token in chunk.tokens]
            return torch.cat([self._last_tokens(rows), self._integers(prompt_tokens)])
        num_tokens = len(rows) + sum(len(chunk.tokens) for chunk in chunks)
        hidden = self._model.flat.new_empty(num_tokens, self._model.config.hidden_size)
        self._groups.pp.exchange([], [(self._groups.at.pp - 1, hidden)])
        return hidden
