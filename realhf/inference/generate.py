"""Generation with continuous batching: the scheduler decides, the ranks of a replica follow it in lockstep.

Under pipeline parallelism the samples form one cohort per stage, so that all stages work at the same time;
hidden states flow to later stages, tokens back to earlier ones. All ranks of a data shard follow all cohorts.

Under expert parallelism the ranks of an ep group pass through the experts together: those that have no tokens
(left) take part in the passes of the others with none.

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
from realhf.inference.forward_batch import ChunkedPrefill, Prefill, Segment, next_tokens
from realhf.inference.kv_budget import CohortCapacity, GenerationLimits, check_not_empty, longest_sizes
from realhf.inference.kv_cache import KVCache
from realhf.inference.prompt_queue import PromptQueue
from realhf.inference.rollout_buffer import PromptGroup, RolloutBuffer, by_prompt, columns
from realhf.inference.sampling import Draws, for_vocabulary, sample
from realhf.inference.scheduler import Prompt, Scheduler, Step
from realhf.layout import even_split
from realhf.nn.transformer import Transformer


def generate(
    model: Transformer, batch: Batch, work: Generate, queue: PromptQueue, *, prompt_key: str, stream: str,
    limit: CacheLimit | None = None, report: Report = no_report,
) -> tuple[list[int], list]:
    """Ids of the samples that this replica has continued, and on one of its ranks (last stage, first of tp)
    the columns of `Generate`; `stream` (the call's name) has its own random numbers.
    `limit` of the KV cache holds where `work` has none.

    Raises UserError when a prompt is empty, or when a sample cannot fit in the model's positions or in the
    budget of the KV cache: on all replicas among which prompts move.
    """
    prompts = [prompt.tolist() for prompt in batch[prompt_key].split()]
    seed = (work.seed << 32) | zlib.crc32(stream.encode())
    cache_bytes = None if limit is None or work.kv_cache_gib is not None else limit.num_bytes()
    terms = _agree(model, by_prompt(prompts, batch.ids), work, queue, cache_bytes=cache_bytes)
    ranges = [slice(*even_split(len(prompts), terms.num_cohorts, i)) for i in range(terms.num_cohorts)]
    parts = [by_prompt(prompts[part], batch.ids[part]) for part in ranges]
    rooms = [CohortCapacity(part, terms) if part else None for part in parts]
    if limit is not None and cache_bytes is not None:
        counts = [(room.num_blocks, room.num_wanted) for room in rooms if room is not None]
        block_bytes = terms.token_bytes * terms.block_size
        taken, needed = (block_bytes * sum(some) for some in zip(*counts, strict=True)) if counts else (0, 0)
        limit.say(stream, taken=taken, needed=needed)
    at_home = [0 if room is None else room.num_at_once(part) for room, part in zip(rooms, parts, strict=True)]
    waiting = queue.put([job for part, count in zip(parts, at_home, strict=True) for job in part[count:]])
    with torch.inference_mode():  # 7 % faster than without gradients alone.
        cohorts = [
            _Cohort(model, terms=terms, seed=seed, part=part, count=count, waiting=waiting, queue=queue)
            for part, count in zip(parts, at_home, strict=True)]
        while any([cohort.advance() for cohort in cohorts]):
            report(_how_far([cohort.samples for cohort in cohorts], len(prompts)))
    made = [cohort.samples for cohort in cohorts]
    ids = [i for samples in made for i in samples.ids[: len(samples.prompts)].tolist()]
    has_columns = model.groups.is_last_stage and model.groups.at.tp == 0
    return ids, columns(made, wide=model.wide) if has_columns else []


def _how_far(parts: Sequence[RolloutBuffer], num_own: int) -> str:
    """Return how many samples of this replica have ended; it may have taken over more than its own."""
    ended = sum(samples.num_ended for samples in parts)
    tokens = sum(samples.num_tokens for samples in parts)
    begun = sum(len(samples.prompts) for samples in parts)
    return f"{ended} of {max(begun, num_own)} samples of this rank have ended, {tokens} tokens"


def _agree(
    model: Transformer, jobs: Sequence[PromptGroup], work: Generate, queue: PromptQueue, *, cache_bytes: int | None
) -> GenerationLimits:
    """The same for all replicas among which prompts move. Raises UserError where nobody could take one."""
    empty = [i for job in jobs if not job.tokens for i in job.ids]
    told = queue.gather([sum(len(job.ids) for job in jobs), longest_sizes(jobs), empty])
    check_not_empty([i for *_, ids in told for i in ids])
    most, sizes = max(count for count, *_ in told), [tuple(size) for _, some, _ in told for size in some]
    pp, in_lockstep = model.groups.layout.pp, model.groups.ep.size > 1
    num_cohorts = pp if in_lockstep else max(1, min(pp, most, work.max_rows))
    terms = GenerationLimits.of(
        sizes, work, token_bytes=model.cache_token_bytes, num_cohorts=num_cohorts, cache_bytes=cache_bytes)
    if sizes:
        terms.check(model.config.num_positions)
    return terms


class _Cohort:
    """RolloutBuffer that share a cache and slots."""

    def __init__(
        self, model: Transformer, *, terms: GenerationLimits, seed: int, part: Sequence[PromptGroup], count: int,
        waiting: Sequence[PromptGroup], queue: PromptQueue,
    ) -> None:  # fmt: skip
        """It begins with `count` jobs of its part; those that are `waiting` may come out of the queue."""
        sampling = for_vocabulary(terms.work.sampling, model.config.vocab_size)
        self._model, self._groups, self._sampling = model, model.groups, sampling
        self._device, self._queue, self._draws = model.flat.device, queue, Draws(seed)
        ends = torch.zeros(model.config.vocab_size, dtype=torch.bool, device=self._device)
        ends[[i for i in model.config.eos_token_ids if i < len(ends)]] = True
        capacity = sum(len(job.ids) for job in part)
        self.samples = RolloutBuffer(capacity, max_new_tokens=sampling.max_new_tokens, ends=ends)
        self._step: Step | None = None
        self._drawn = torch.zeros(0, dtype=torch.long)
        self._has_company = self._groups.ep.size > 1
        """Some rank of the ep group may still have samples."""
        self._sent: list[Pending] = []
        self._scheduler: Scheduler | None = None
        self._cache: KVCache | None = None
        self._graphs: DecodeGraphs | None = None
        if reach := [*part[:count], *waiting]:
            self._reserve(CohortCapacity(reach, terms), part[:count], terms.work)

    def _reserve(self, room: CohortCapacity, jobs: Sequence[PromptGroup], work: Generate) -> None:
        """Memory for as many rows as may run at once, within the budget."""
        record = recorder(self._device) if work.cuda_graphs and self._model.recordable else None
        num_blocks = room.num_blocks + (record is not None)  # The spare one of DecodeGraphs.
        self._cache = KVCache.of(self._model, num_blocks, room.block_size)
        self._tables = BlockTables(
            num_slots=room.num_slots, num_blocks=room.num_blocks, block_size=room.block_size,
            blocks_per_row=room.blocks_per_row, max_sharers=room.max_sharers)
        self._scheduler = Scheduler(
            [self.samples.add(job) for job in jobs], num_slots=room.num_slots,
            blocks=BlockManager(room.num_blocks), tables=self._tables, history=self.samples.history,
            prefill_tokens=work.prefill_tokens, restart_at=self._model.cache_limit, more=self._take_prompt)
        if record is not None:
            self._graphs = DecodeGraphs(self._model, self._cache, self._tables, record)

    def _take_prompt(self) -> Prompt | None:
        job = self._queue.take()
        return None if job is None else self.samples.add(job)

    def advance(self) -> bool:
        """Takes over the tokens of the step before and starts the next, whose messages travel meanwhile;
        whether there was one."""
        for sent in self._sent:
            sent.wait()
        self._sent = []
        if self._step is not None:
            self._take_tokens(self._step)
        self._step = None if self._scheduler is None else self._scheduler.plan()
        if self._step is None:
            self._scheduler = self._cache = self._graphs = None  # Their memory is for others.
        if self._has_company:
            self._keep_company()
        elif self._step is not None:
            self._compute(self._step)
        return self._step is not None or self._has_company

    def _keep_company(self) -> None:
        """All ranks of the ep group make as many passes as the one that makes most."""
        self._has_company = any(self._groups.ep_control.all_gather_json(self._step is not None))
        if self._step is not None:
            self._compute(self._step)
        elif self._has_company:
            self._model(self._nothing(), [])

    def _compute(self, step: Step) -> None:
        """This stage's part of a step, and on the last stage the sampling."""
        samples = np.array(step.samples, np.int64)
        ids, lengths = self.samples.ids[samples], self.samples.lengths[samples]
        draws = self._draws(samples, sample_ids=ids, positions=lengths)
        # (What goes to a GPU waits for what it does, so that this goes before the pass.)
        draws_B, at = torch.from_numpy(draws).to(self._device), self.samples.at(samples)
        hidden = self._pass(step)
        self._drawn = self._integers([])
        if not self._groups.is_last_stage or not len(samples):
            return
        logits, start = self._model.logits(hidden), self._model.vocab_range[0]
        self._drawn, logprobs_B = sample(
            logits, draws_B, config=self._sampling, vocab_start=start, group=self._groups.tp)
        self.samples.logprobs[at] = logprobs_B
        back = [(stage, self._drawn) for stage in range(self._groups.at.pp)]
        self._sent.append(self._groups.pp_back.post(back, []))

    def _pass(self, step: Step) -> torch.Tensor:
        """Runs the step; on the last stage the hidden states that its samples' tokens come from."""
        assert self._cache is not None
        if step.copies:
            self._cache.copy(*zip(*step.copies, strict=True))
        if self._graphs is not None and step.rows:
            hidden = self._by_graph(step, self._cache, self._graphs)
        else:
            hidden = self._model.advance(self._input(step), self._cache, list(self._segments(step)))
        if not self._groups.is_last_stage:
            self._sent.append(self._groups.pp.post([(self._groups.at.pp + 1, hidden.contiguous())], []))
            return hidden
        return hidden[self._integers(step.last_tokens)] if step.pieces else hidden

    def _by_graph(self, step: Step, cache: KVCache, graphs: DecodeGraphs) -> torch.Tensor:
        """The rows in a pass of their own."""
        hidden = graphs(self._last_tokens(step))
        if not step.pieces:
            return hidden
        return torch.cat([hidden, self._model.advance(self._read(step), cache, list(self._prompts(step)))])

    def _segments(self, step: Step) -> Iterator[Segment]:
        if step.rows:
            yield next_tokens(self._tables, self._device)
        yield from self._prompts(step)

    def _prompts(self, step: Step) -> Iterator[Segment]:
        size = self._tables.block_size
        if (piece := step.further) is not None:
            places_L, longest = self._integers(piece.places(size)), len(piece.prompt.tokens)
            yield ChunkedPrefill(places_L, num_tokens=len(piece.tokens), longest=longest)
        if fresh := step.fresh:
            places_T = self._integers([place for piece in fresh for place in piece.places(size)])
            lens, whole = [piece.stop for piece in fresh], [len(piece.prompt.tokens) for piece in fresh]
            yield Prefill(lens, places_T, whole_lens=whole)

    def _take_tokens(self, step: Step) -> None:
        samples, groups = np.array(step.samples, np.int64), self._groups
        if not groups.is_last_stage:
            self._drawn = torch.empty(len(samples), dtype=torch.long, device=self._device)
            groups.pp_back.exchange([], [(groups.layout.pp - 1, self._drawn)])
        assert self._scheduler is not None
        self._scheduler.update(self.samples.append(samples, self._drawn))

    def _integers(self, numbers: Sequence[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.long, device=self._device)

    def _nothing(self) -> torch.Tensor:
        """This stage's input for no token at all."""
        width, first = self._model.config.hidden_size, self._groups.is_first_stage
        return self._integers([]) if first else self._model.flat.new_empty(0, width)

    def _last_tokens(self, step: Step) -> torch.Tensor:
        return self.samples.tokens[self.samples.at(np.array(step.rows, np.int64), back=1)]

    def _read(self, step: Step) -> torch.Tensor:
        """The tokens of prompts."""
        return self._integers([token for piece in step.pieces for token in piece.tokens])

    def _input(self, step: Step) -> torch.Tensor:
        """Tokens on the first stage, the previous stage's hidden states of them on others."""
        if self._groups.is_first_stage:
            last_B = self._last_tokens(step)
            return torch.cat([last_B, self._read(step)]) if step.pieces else last_B
        hidden = self._model.flat.new_empty(step.num_tokens, self._model.config.hidden_size)
        self._groups.pp.exchange([], [(self._groups.at.pp - 1, hidden)])
        return hidden
