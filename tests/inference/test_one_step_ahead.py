"""The scheduler when it learns one step late which samples have ended, against a simulated cache."""

import random

import pytest

from realhf.models.kv_blocks import num_blocks
from tests.inference.test_scheduler import BLOCK_SIZE, MAX_NEW, _prompts, _Replay
from tests.samples import drawn


class _Late(_Replay):
    """Tells the scheduler at once which samples have reached their limits, and one step later, or some more,
    which of them have ended at the tokens in `wanted`."""

    def __init__(self, *args, limits, window=1, together=1, **options):
        """Prompts are prefilled in the first step of each `window` only. The tokens of `together` steps are
        read at once, unless blocks become scarce."""
        super().__init__(*args, **options)
        self.window = window
        self.together = together
        self.limits = limits
        self.last = None
        self.ended = set()
        self.told = set()
        self.num_unread = 0

    @property
    def knows_all(self):
        return self.ended == self.told

    def step(self):
        if self.last is not None:
            self._receive(self.last)
            self.num_unread += 1
        if self.scheduler.may_reclaim or self.scheduler.is_idle:
            self._tell(is_next_planned=False)
        prefills = self.steps % self.window == 0
        step = self.scheduler.plan(prefills=prefills)
        assert prefills or step is None or not step.chunks
        if step is not None:
            self._run(step)
        if self.num_unread >= self.together:
            self._tell(is_next_planned=step is not None)
        self.last = step
        return step is not None or not prefills

    def _receive(self, last):
        """Count the last step, and append its tokens, also to samples whose ends are not known yet."""
        rows = [sample for sample in last.rows if sample not in self.told]
        for sample in rows:
            self.made[sample].append(1_000_000 + 1000 * sample + len(self.made[sample]))
        self.ended |= {sample for sample in rows if len(self.made[sample]) == self.wanted[sample]}
        full = {sample for sample in rows if len(self.made[sample]) == self.limits[sample]}
        self._copy(self.scheduler.count([s in full or s in self.told for s in last.rows]))

    def _tell(self, *, is_next_planned):
        new = self.ended - self.told
        self.told |= new
        for sample in new:
            del self.made[sample][self.wanted[sample] :]
        self.num_unread = 0
        self._copy(self.scheduler.end(new, is_next_planned=is_next_planned))

    def may_go_on(self, sample):
        return False

    def _run(self, step):
        self._copy(step.copies)
        if step.decoding:
            self._decode(step.decoding)
        for chunk in step.chunks:
            positions = chunk.cache_positions(BLOCK_SIZE)
            assert (self.memory[positions[: chunk.start]] == chunk.prompt.tokens[: chunk.start]).all()
            self.memory[positions[chunk.start :]] = chunk.prompt.tokens[chunk.start : chunk.stop]

    def _copy(self, copies):
        for source, target in copies:
            self._block(target)[:] = self._block(source)


@pytest.mark.parametrize("seed", drawn(range(40), 12))
def test_every_row_reads_its_own_tokens_and_all_blocks_come_back(seed):
    rng = random.Random(seed)
    prompts = _prompts(rng, rng.randint(1, 12))
    samples = [sample for prompt in prompts for sample in prompt.rows]
    ends = [rng.choice([1, 2, rng.randint(1, MAX_NEW), 10**6]) for _ in samples]
    limits = [rng.choice([1, 20, MAX_NEW]) for _ in samples]
    least = num_blocks(250 + MAX_NEW, BLOCK_SIZE) + 1
    replay = _Late(
        prompts, num_slots=rng.choice([1, 3, 64]), num_blocks_=least + rng.choice([0, 3, 200]),
        prefill_tokens=rng.choice([7, 60, 10_000]), restart_at=None, wanted=ends, limits=limits,
        window=rng.choice([1, 1, 4, 16]), together=rng.choice([1, 1, 3, 16]))
    restart = replay.scheduler._restart

    def checked(sample):  # A row that loses its blocks is one that goes on.
        assert replay.knows_all and len(replay.made[sample]) < min(ends[sample], limits[sample])
        restart(sample)

    replay.scheduler._restart = checked
    while replay.step():
        replay.steps += 1
        assert replay.steps < 20_000
    made = [len(replay.made[sample]) for sample in samples]
    assert made == [min(end, limit) for end, limit in zip(ends, limits, strict=True)]
    assert replay.scheduler.blocks.num_free == replay.scheduler.blocks.num_blocks
