"""Rounds: what a generation is given besides new prompts, and what stays between its rounds.

Round joins the results of a round with those of earlier ones. An unfinished sample has the columns of a
finished one: its prompt ends at the first 1 of its response mask, and its tokens from there on have been
drawn, or inserted, for it. A RestingCache holds the keys and values of unfinished samples until they are
continued.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from realhf.calls import Generate, GenerateOutputs, SampleId
from realhf.data.batch import Batch, Packed
from realhf.errors import UserError
from realhf.graph import FunctionCall
from realhf.inference.cache_memory import GenerationLimits
from realhf.inference.kv_cache import BlockManager
from realhf.inference.page_pool import PagePool
from realhf.inference.response_buffer import PromptGroup, ResponseBuffer
from realhf.inference.scheduler import ParkedRow
from realhf.models.kv_blocks import num_blocks


def prompt_groups(prompts: Batch, inputs: Sequence[str]) -> list[PromptGroup]:
    """Return new samples, one in each group, from the inputs of a call (see Generate)."""
    samples = zip(prompts.ids, prompts[inputs[0]].split(), _limits(prompts, inputs), strict=True)
    return [PromptGroup(prompt.tolist(), [SampleId(i)], limit=limit) for i, prompt, limit in samples]


def _limits(samples: Batch, inputs: Sequence[str]) -> list[int | None]:
    """Return the limit of each sample's response; None: it has none of its own."""
    if len(inputs) < 2 or inputs[1] not in samples.fields:
        return [None] * len(samples)
    limits = [int(limit) for limit in samples[inputs[1]]]
    for i, limit in zip(samples.ids, limits, strict=True):
        if limit < 1:
            raise UserError(f"{inputs[1]} of sample {i} is {limit}: it must be at least 1")
    return [*limits]


def _limit_keys(call: FunctionCall) -> Sequence[str]:
    """Return the key of the most tokens of each sample's response, if the call has one."""
    return call.inputs[1:2] if call.work_as(Generate).environment is None else ()


@dataclass(frozen=True)
class Round:
    """One round of a generation. Weights may change between rounds, not in them.

    `unfinished` are the samples of earlier rounds, with all columns of the call's outputs, and of its second
    input if it has one: the most tokens of their responses. Every sample gets at most `budget` tokens in this
    round (None: as many as the call allows), all of the same `version`.
    """

    unfinished: Batch = field(default_factory=lambda: Batch([]))
    budget: int | None = None
    version: int = 0

    @classmethod
    def of(cls, call: FunctionCall, unfinished: Batch | None, budget: int | None, version: int) -> "Round":
        """Return a round of a call, with the columns of the unfinished samples that it needs."""
        if unfinished is None or not unfinished.ids:
            return cls(Batch([]), budget, version)
        limits = [key for key in _limit_keys(call) if key in unfinished.fields]
        return cls(unfinished.pick([*call.outputs, *limits]), budget, version)

    def __post_init__(self) -> None:
        assert self.budget is None or self.budget >= 1, f"a round of {self.budget} tokens"

    def groups(self, call: FunctionCall) -> list[PromptGroup]:
        """Return the unfinished samples, one in each group."""
        if not self.unfinished.ids:
            return []
        outputs = GenerateOutputs.of(call)
        sequences = self.unfinished[outputs.sequences].split()
        num_drawn = self.unfinished[outputs.mask].response_lengths().tolist()
        limits = _limits(self.unfinished, call.inputs)
        samples = zip(sequences, self.unfinished.ids, num_drawn, limits, strict=True)
        return [PromptGroup(tokens.tolist(), [SampleId(i)], *rest) for tokens, i, *rest in samples]

    def rollouts(
        self, call: FunctionCall, chosen: Sequence[int]
    ) -> dict[SampleId, tuple[list[int], dict[str, Any]]]:
        """Return the tokens and the rollouts so far of unfinished samples, chosen by their places."""
        if not self.unfinished.ids:
            return {}
        outputs = GenerateOutputs.of(call)
        assert outputs.rollout is not None
        sequences = self.unfinished[outputs.sequences].split()
        rollouts = self.unfinished[outputs.rollout]
        return {SampleId(self.unfinished.ids[i]): (sequences[i].tolist(), rollouts[i]) for i in chosen}

    def after(self, earlier: Batch) -> "Round":
        """Return the same round with further unfinished samples, which come first."""
        parts = [batch for batch in (earlier, self.unfinished) if batch.ids]
        return replace(self, unfinished=Batch.concat(parts) if parts else Batch([]))

    def join(self, call: FunctionCall, made: Batch, new: Batch) -> tuple[Batch, Batch]:
        """Return finished and unfinished samples with whole columns, given what this round has `made`.

        `new` are the inputs of the samples that have begun in this round. The first columns of `made` are the
        outputs of `call`; its response masks and log-probs are 0 on all tokens of earlier rounds. A batch
        without columns stays one.
        """
        if not made.fields:
            return made, Batch([])
        fields = dict(made.fields)
        outputs = GenerateOutputs.of(call)
        old_keys = [outputs.mask, outputs.logprobs]
        if outputs.versions is not None:
            mask = made[outputs.mask]
            fields[outputs.versions] = mask.like(mask.values.long() * self.version)
            old_keys.append(outputs.versions)
        if self.unfinished.ids:
            for key in old_keys:
                self._copy_old(fields[key], made.ids, key)
        whole = Batch(made.ids, fields)
        if self.budget is None:
            return whole, Batch([])
        if outputs.rollout is not None:
            has_ended = [rollout["stop"] is not None for rollout in whole[outputs.rollout]]
        else:
            num_drawn = whole[outputs.mask].response_lengths().tolist()
            most = self._most_drawn(call, made.ids, new)
            flags = zip(whole[outputs.finished].tolist(), num_drawn, most, strict=True)
            has_ended = [bool(finished) or drawn >= limit for finished, drawn, limit in flags]
        ended = whole.select([i for i, end in enumerate(has_ended) if end])
        unfinished = whole.select(going_on := [i for i, end in enumerate(has_ended) if not end])
        for key in _limit_keys(call):
            unfinished.fields[key] = [most[i] for i in going_on]
        return ended, unfinished

    def _most_drawn(self, call: FunctionCall, ids: Sequence[int], new: Batch) -> list[int]:
        """Return the most tokens of the responses of samples that are unfinished or new."""
        limit_of: dict[int, int | None] = {}
        for samples in (self.unfinished, new):
            limit_of |= zip(samples.ids, _limits(samples, call.inputs), strict=True)
        limits = [limit_of.get(i) for i in ids]
        most = call.work_as(Generate).sampling.max_new_tokens
        return [most if limit is None else min(limit, most) for limit in limits]

    def _copy_old(self, column: Packed, ids: Sequence[int], key: str) -> None:
        """Overwrite the values of tokens of earlier rounds with those of the unfinished samples."""
        old = dict(zip(self.unfinished.ids, self.unfinished[key].split(), strict=True))
        for i, values in zip(ids, column.split(), strict=True):
            if i in old:
                values[: len(old[i])] = old[i]


@dataclass(frozen=True)
class UnfinishedRow:
    """An unfinished sample with all of its tokens, and its blocks of the cache."""

    group: PromptGroup
    parked: ParkedRow

    def continue_in(self, buffer: ResponseBuffer) -> ParkedRow:
        """Add the sample to a round, and return its row."""
        return replace(self.parked, row=buffer.add(self.group).rows[0])


class RestingCache:
    """The pages of one cohort that stay leased between rounds, and the unfinished rows that have them.

    A row begins only if there are blocks for all of its tokens, so that no row ever loses its blocks.
    """

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.rows: list[UnfinishedRow] = []
        self.blocks = BlockManager([])

    def num_needed(self, groups: Sequence[PromptGroup], limits: GenerationLimits) -> int:
        """Return how many blocks suffice for the unfinished rows and new groups until all have ended."""
        max_new = limits.work.sampling.max_new_tokens
        size = limits.block_size
        shared = {block for row in self.rows for block in row.parked.blocks[: row.parked.num_shared]}
        needed = len(shared)
        for row in self.rows:
            longest = row.group.size.num_undrawn + max_new
            needed += num_blocks(longest, size) - row.parked.num_shared
        for tokens, count, drawn in (group.size for group in groups):
            num_shared = tokens // size if count > 1 else 0
            needed += num_shared + count * (num_blocks(tokens - drawn + max_new, size) - num_shared)
        # The scheduler admits a prompt with one more block than its samples need in the end.
        return needed + any(len(group.ids) > 1 for group in groups)

    def make_room(self, groups: Sequence[PromptGroup], limits: GenerationLimits) -> None:
        """Lease pages for new groups."""
        needed = self.num_needed(groups, limits)
        assert needed <= limits.affordable(needed), "the rows do not fit (see Generation)"
        more = max(0, needed - self.blocks.num_blocks)
        self.blocks.grow(self.pool.lease(more, page_size=limits.block_size))

    def release(self) -> None:
        """Forget all rows and give their pages back."""
        self.pool.give_back(self.blocks.blocks)
        self.blocks = BlockManager([])
        self.rows = []

    def take_over(self, parked: Sequence[ParkedRow], buffer: ResponseBuffer) -> None:
        """Replace the rows before a round by those that it leaves unfinished."""
        groups = buffer.as_groups([one.row for one in parked])
        self.rows = [UnfinishedRow(group, one) for one, group in zip(parked, groups, strict=True)]
