"""Generation with continuous batching: the samples of one replica, which are continued in rounds.

Under pipeline parallelism the samples form one cohort per stage, so that all stages work at the same time.
All ranks of a replica run all cohorts.

Under expert parallelism the ranks of an ep group pass through the experts together, in windows of steps whose
shapes they have agreed on (DecodeWindows).

Prompts that do not begin at once wait in a queue, from which all cohorts of all replicas take.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Protocol

import torch

from realhf.calls import EnvironmentReplies, Generate, SampleId, TurnSource
from realhf.distributed.process import Report, no_report
from realhf.errors import UserError
from realhf.inference.cache_memory import CacheLimit, GenerationLimits, PassMemory, agreed_sizes
from realhf.inference.cohort import Cohort
from realhf.inference.page_pool import PagePool
from realhf.inference.prompt_queue import PromptQueue
from realhf.inference.response_buffer import (
    PromptGroup,
    ResponseBuffer,
    Size,
    join_equal,
    output_columns,
)
from realhf.inference.rounds import RestingCache
from realhf.inference.sampling import stream_seed
from realhf.inference.turns import (
    EnvironmentTime,
    deal_sizes,
    expected_sizes,
    first_arrivals,
    run_turns,
    turn_columns,
)
from realhf.layout import even_split
from realhf.nn.transformer import Transformer

_GIB = 1 << 30


class PassBytes(Protocol):
    """Returns the most bytes that the passes of a rank need beside its KV cache."""

    def __call__(self, sizes: Sequence[Size], *, num_samples: int) -> PassMemory:
        """The prompts have these sizes, and a replica has at most `num_samples` samples."""


class Generation:
    """The samples of one replica. All of its ranks call its methods alike.

    Weights may change between two calls of `advance`. If its `cache_rests`, the keys and values of unfinished
    samples stay cached, and the next call continues these samples on the cohort on which they began. If not,
    `take` hands unfinished samples over to the caller, who brings them back by `resume`; then all their
    tokens are computed again.
    """

    def __init__(
        self, model: Transformer, work: Generate, *, stream: str, limit: CacheLimit, pass_bytes: PassBytes,
        pool: PagePool | None = None, cache_rests: bool = False,
    ) -> None:
        """Each `stream` (the call's name) has its own random numbers. `limit` limits the KV cache unless
        `work` does; `pass_bytes` tells what it must leave free. The cache consists of pages of `pool`;
        without a pool, every cohort has a cache of its own. Raises UserError if the model cannot keep its
        cache."""
        if cache_rests and model.rope_boundary is not None:
            raise UserError(
                f"{stream}: cache_on_update is 'keep', but a longrope model must compute its cache again at "
                f"{model.rope_boundary} tokens: set it to 'recompute'")
        self._model = model
        self._work = work
        self._stream = stream
        self._limit = limit
        self._pass_bytes = pass_bytes
        self._pool = pool
        self._new: list[PromptGroup] = []
        self._resumed: list[PromptGroup] = []
        self._resting: list[RestingCache] | None = [] if cache_rests else None
        """One cache for each cohort, once there are any."""
        self._block_size: int | None = None
        self._last_buffers: list[ResponseBuffer] = []
        self.cache_bytes = 0
        """Bytes of the keys and values for which the last round had blocks."""
        self.environment_time: EnvironmentTime | None = None
        """The time that environments took in the last round; None: it had none."""
        self.num_computed = 0
        """Tokens that have passed through this stage in the last round, those computed again included."""

    @property
    def resting_bytes(self) -> int:
        """Bytes of the caches that stay between rounds."""
        return sum(cache.pool.num_bytes for cache in self._resting or [])

    def submit(self, prompts: Sequence[PromptGroup]) -> None:
        """Add new samples, one in each group."""
        self._new += prompts

    def resume(self, begun: Sequence[PromptGroup]) -> None:
        """Add samples of earlier rounds, one in each group; their tokens are computed again."""
        self._resumed += begun

    def release(self) -> None:
        """Free the cache that rests, and forget its samples."""
        for cache in self._resting or []:
            cache.release()

    def advance(
        self, queue: PromptQueue, *, budget: int | None = None, report: Report = no_report,
        turn_source: TurnSource | None = None,
    ) -> None:
        """Run one round, in which every sample gets at most `budget` tokens (None: as many as `work` allows).

        With a `turn_source`, which knows the budget itself, samples come from there. One whose turn has ended
        parks until its environment has answered, while others go on. All ranks of a replica get the same
        answers at the same time.

        Raises UserError if a prompt is empty, or if a sample does not fit in the model's positions or in the
        KV cache: on all replicas among which prompts move. Raises it on all replicas if not all samples fit
        in a cache that rests.
        """
        first = EnvironmentReplies()
        expected: list[Size] = []
        if turn_source is not None:
            first = first_arrivals(turn_source, report, waits_for_all=self._work.deterministic)
            expected = expected_sizes(first.beginnings, turn_source.num_samples)
        most_response = max((group.most for group in first.beginnings), default=None)
        limits = self._agree_on_limits(queue, budget, expected, most_response=most_response)
        caches: Sequence[RestingCache | None] = [None] * limits.num_cohorts
        if self._resting is None:
            by_cohort = _split(self._resumed, self._new, num_parts=limits.num_cohorts)
        else:
            if not self._resting:
                self._resting = [RestingCache(self._cohort_pool()) for _ in range(limits.num_cohorts)]
            by_cohort = _deal([*self._resumed, *self._new], [len(cache.rows) for cache in self._resting])
            self._check_resting(by_cohort, limits)
            caches = self._resting
        num_own = sum(len(cache.rows) for cache in caches if cache is not None)
        num_own += len(self._new) + len(self._resumed)
        expected_by_cohort = deal_sizes(expected, limits.num_cohorts)
        seed = stream_seed(self._work.seed, self._stream)
        with torch.inference_mode():  # It has less overhead per operation than torch.no_grad.
            cohorts = [
                Cohort(
                    self._model, limits, groups, queue=queue, seed=seed, resting=cache,
                    turn_ends=None if turn_source is None else turn_source.end_token_ids, expected=sizes,
                    pool=self._cohort_pool() if cache is None else cache.pool)
                for groups, cache, sizes in zip(by_cohort, caches, expected_by_cohort, strict=True)]
            self.cache_bytes = limits.block_bytes * sum(cohort.sizes.num_blocks for cohort in cohorts)
            if self._work.kv_cache_gib is None and self._resting is None:
                self._limit.require_recorded(self._stream, self.cache_bytes)
                self._limit.warn_once(
                    self._stream, taken=self.cache_bytes,
                    needed=limits.block_bytes * sum(cohort.sizes.num_wanted for cohort in cohorts))
            waiting = queue.put([group for cohort in cohorts for group in cohort.rest])
            for cohort in cohorts:
                cohort.start(waiting)
            if self._pool is not None and self._work.cuda_graphs:
                self._pool.drop_unequal_graphs(self._model.groups.passes_control)
            if turn_source is None:
                while any([cohort.advance() for cohort in cohorts]):
                    report(_progress([cohort.buffer for cohort in cohorts], num_own, budget))
            else:
                self.environment_time = run_turns(
                    turn_source, cohorts, first, report, waits_for_all=self._work.deterministic)
        self._last_buffers = [cohort.buffer for cohort in cohorts]
        self.num_computed = sum(cohort.num_computed for cohort in cohorts)
        self._new = []
        self._resumed = []

    def _cohort_pool(self) -> PagePool:
        return self._pool or PagePool(self._model)

    def take(self) -> tuple[list[SampleId], list]:
        """Return the ids of the samples that this replica continued in the last round, and their columns.

        Only one rank of the replica (last stage, first of tp) gets the columns, the first ones of `Generate`.
        Only tokens of that round count as the response."""
        buffers = self._last_buffers
        self._last_buffers = []
        ids = [i for buffer in buffers for i in buffer.ids[: len(buffer.prompts)].tolist()]
        has_columns = self._model.groups.is_last_stage and self._model.groups.at.tp == 0
        return ids, output_columns(buffers, wide=self._model.wide) if has_columns else []

    def take_turns(self, turn_source: TurnSource) -> tuple[list[SampleId], list]:
        """Return the same as `take` for samples that were answered in turns; the last column has what their
        environments have answered."""
        buffers = self._last_buffers
        self._last_buffers = []
        ids, columns = turn_columns(buffers, wide=self._model.wide)
        if not (self._model.groups.is_last_stage and self._model.groups.at.tp == 0):
            return ids, []
        rollouts, finished = turn_source.results(ids)
        return ids, [*columns, torch.tensor(finished, dtype=self._model.wide), rollouts]

    def _agree_on_limits(
        self, queue: PromptQueue, budget: int | None, expected: Sequence[Size], *, most_response: int | None
    ) -> GenerationLimits:
        """Return limits that are equal on all replicas among which prompts move.

        Raises UserError on all of them when a prompt is empty or can never run.
        """
        model = self._model
        work = self._work
        groups = [row.group for cache in self._resting or [] for row in cache.rows]
        groups += [*join_equal(self._resumed), *join_equal(self._new)]
        sizes = [*agreed_sizes(groups, queue.gather), *expected]
        most = max(queue.gather(sum(len(group.ids) for group in groups)))
        most += sum(size.num_samples for size in expected)
        cache_bytes = None
        if work.kv_cache_gib is None:
            cache_bytes = self._limit.agree(
                lambda: self._pass_bytes(sizes, num_samples=most),
                takes_all=work.takes_free_memory or self._resting is not None)
        pp = model.groups.layout.pp
        num_cohorts = pp if model.groups.ep.size > 1 else max(1, min(pp, most, work.max_rows))
        if self._resting is not None:
            num_cohorts = min(pp, work.max_rows) if model.groups.ep.size == 1 else pp
        limits = GenerationLimits(
            sizes, work, token_bytes=model.cache_token_bytes, num_cohorts=num_cohorts,
            cache_bytes=cache_bytes, budget=budget, fixed_block_size=self._block_size,
            page_tokens=None if self._pool is None else self._pool.page_tokens,
            most_response=most_response)
        if sizes:
            limits.check(model.config.num_positions)
        return limits

    def _check_resting(self, by_cohort: Sequence[Sequence[PromptGroup]], limits: GenerationLimits) -> None:
        """Raise UserError on all replicas if the rows of one of them do not fit in its cache."""
        assert self._resting is not None
        pairs = zip(self._resting, by_cohort, strict=True)
        needed = [cache.num_needed(groups, limits) for cache, groups in pairs]
        most = max(needed)
        num_rows = sum(len(cache.rows) for cache in self._resting)
        num_rows += len(self._new) + len(self._resumed)
        gib = most * limits.num_cohorts * limits.block_bytes / _GIB if limits.affordable(most) < most else 0.0
        gib, num_rows = max(self._model.groups.replicas_control.all_gather_json((gib, num_rows)))
        if gib > 0:
            limit = "less is free (see kv_cache_gib)"
            if self._work.kv_cache_gib is not None:
                limit = f"kv_cache_gib is {self._work.kv_cache_gib:g}"
            raise UserError(
                f"{self._stream}: cache_on_update is 'keep', and the {num_rows} unfinished samples of a rank "
                f"need {1.01 * gib:.3g} GiB for their keys and values; {limit}")
        self._block_size = limits.block_size if any(needed) else self._block_size


def _split(
    unfinished: Sequence[PromptGroup], new: Sequence[PromptGroup], *, num_parts: int
) -> list[list[PromptGroup]]:
    """Split unfinished samples, and new ones, into equal lists, one for each cohort."""
    by_cohort = []
    for i in range(num_parts):
        old = unfinished[slice(*even_split(len(unfinished), num_parts, i))]
        fresh = new[slice(*even_split(len(new), num_parts, i))]
        by_cohort.append([*join_equal(old), *join_equal(fresh)])
    return by_cohort


def _deal(groups: Sequence[PromptGroup], counts: Sequence[int]) -> list[list[PromptGroup]]:
    """Deal samples to cohorts that have `counts` rows, so that these become as equal as possible."""
    sums = list(counts)
    for _ in groups:
        sums[sums.index(min(sums))] += 1
    stops = list(accumulate(total - count for total, count in zip(sums, counts, strict=True)))
    return [join_equal(groups[start:stop]) for start, stop in pairwise([0, *stops])]


def _progress(buffers: Sequence[ResponseBuffer], num_own: int, budget: int | None) -> str:
    """Return in words how many samples of this replica have ended, those that it has stolen included."""
    ended = sum(buffer.num_ended for buffer in buffers)
    tokens = sum(buffer.num_tokens for buffer in buffers)
    begun = sum(len(buffer.prompts) for buffer in buffers)
    done = "have ended" if budget is None else f"have ended or have {budget} new tokens"
    return f"{ended} of {max(begun, num_own)} samples of this rank {done}, {tokens} tokens"
