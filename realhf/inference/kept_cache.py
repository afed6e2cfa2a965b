"""KeptCache: the keys and values of unfinished samples between the rounds of a generation."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from realhf.inference.block_manager import BlockManager
from realhf.inference.kv_budget import GenerationLimits
from realhf.inference.page_pool import PagePool
from realhf.inference.rollout_buffer import PromptGroup, RolloutBuffer
from realhf.inference.steps import ParkedRow, Prompt
from realhf.models.kv_blocks import num_blocks


@dataclass(frozen=True)
class KeptRow:
    """An unfinished sample with all of its tokens, and its blocks of the cache.

    If it `waits`, its turn has ended, and an environment must add tokens before it is continued.
    """

    group: PromptGroup
    parked: ParkedRow
    waits: bool = False

    def continue_in(self, buffer: RolloutBuffer) -> ParkedRow | Prompt:
        """Add the sample to a round. Return a row if only its last token is not cached, else a prompt."""
        prompt = buffer.add(self.group)
        parked = self.parked
        if parked.num_cached == len(prompt.tokens) - 1:
            return replace(parked, sample=prompt.samples[0])
        prompt.blocks = list(parked.blocks)
        prompt.num_cached = parked.num_cached
        prompt.num_shared = parked.num_shared
        prompt.num_started = parked.ordinal
        return prompt


class KeptCache:
    """The pages of one cohort, and the rows whose pages it holds between rounds.

    A row begins only if there are blocks for all of its tokens, so that no row ever loses its blocks. With
    `in_turns`, rows whose turns have ended stay, too.
    """

    def __init__(self, pool: PagePool, *, in_turns: bool) -> None:
        self.pool = pool
        self.in_turns = in_turns
        self.rows: list[KeptRow] = []
        self.blocks = BlockManager([])

    def num_needed(self, groups: Sequence[PromptGroup], limits: GenerationLimits) -> int:
        """Return how many blocks suffice for the kept rows and new groups until all of them have ended."""
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

    def keep(self, parked: Sequence[ParkedRow], buffer: RolloutBuffer) -> None:
        """Replace the rows of a round by those that it leaves unfinished."""
        self.rows = [row for row in self.rows if row.waits]
        groups = buffer.as_groups([row.sample for row in parked])
        for row, group in zip(parked, groups, strict=True):
            self.rows.append(KeptRow(group, row, waits=bool(buffer.finished[row.sample])))

    def append(self, sample: int, tokens: Sequence[int]) -> bool:
        """Add an environment's tokens to a row; return whether it is here."""
        for i, row in enumerate(self.rows):
            if row.group.ids == [sample]:
                group = row.group._replace(tokens=[*row.group.tokens, *tokens])
                self.rows[i] = replace(row, group=group, waits=False)
                return True
        return False

    def drop(self, samples: Collection[int]) -> None:
        """Free the blocks of rows that end without further tokens."""
        for row in self.rows:
            if row.group.ids[0] in samples:
                self.blocks.release(row.parked.blocks)
        self.rows = [row for row in self.rows if row.group.ids[0] not in samples]
