"""The scheduler against a simulated cache of token numbers, for many lengths and memory sizes."""

import random

import numpy as np
import pytest

from realhf.calls import Generate, SamplingConfig
from realhf.inference.cache_memory import CacheSizes, GenerationLimits
from realhf.inference.cpu_decoding import DecodingSteps
from realhf.inference.kv_cache import BlockManager, BlockTables
from realhf.inference.response_buffer import PromptGroup
from realhf.inference.scheduler import Prompt, Scheduler
from realhf.models.kv_blocks import block_size, blocks_for, num_blocks
from tests.samples import drawn

MAX_NEW = 150
BLOCK_SIZE = 64


def _prompts(rng, count):
    """Return prompts of up to four blocks, some of them full, with up to five samples and unique tokens."""
    prompts, numbers = [], iter(range(10**9))
    for _ in range(count):
        length = rng.choice([1, 2, 63, 64, 65, 100, 128, rng.randint(1, 250)])
        tokens = [next(numbers) for _ in range(length)]
        first = sum(len(prompt.rows) for prompt in prompts)
        prompts.append(Prompt(tokens, list(range(first, first + rng.randint(1, 5)))))
    return prompts


def _sizes(prompts):
    return [(len(prompt.tokens), len(prompt.rows)) for prompt in prompts]


def test_a_prompt_without_tokens_is_not_taken():
    """A pass has no hidden state for it; its samples would continue another prompt's token."""
    with pytest.raises(AssertionError, match="a prompt has at least one token"):
        Prompt([], [0])


class _Replay:
    """Executes the scheduler's steps on token numbers instead of keys and values."""

    def __init__(
        self, prompts, *, num_slots, num_blocks_, prefill_tokens, restart_at, wanted, num_later=0,
        copies_prefixes=False,
    ):
        """The scheduler fetches the last `num_later` prompts by itself."""
        samples = {sample: prompt for prompt in prompts for sample in prompt.rows}
        self.prompts = {sample: list(prompt.tokens) for sample, prompt in samples.items()}
        self.made = {sample: [] for sample in samples}
        self.wanted = wanted
        self.memory = np.full(num_blocks_ * BLOCK_SIZE, -1)
        self.tables = BlockTables(
            num_slots=num_slots, num_blocks=num_blocks_, block_size=BLOCK_SIZE,
            blocks_per_row=num_blocks(250 + MAX_NEW, BLOCK_SIZE))
        self.decoding = DecodingSteps(self.tables)
        first, later = prompts[: len(prompts) - num_later], iter(prompts[len(prompts) - num_later :])
        self.scheduler = Scheduler(
            first, tables=self.tables, prefill_tokens=prefill_tokens, history=self.history,
            restart_at=restart_at, more=lambda: next(later, None), may_go_on=self.may_go_on,
            copies_prefixes=copies_prefixes)
        self.num_prefilled = 0
        self.num_slots, self.prefill_tokens = num_slots, prefill_tokens
        self.limits = list(wanted)
        self.steps, self.widest, self.most_joined, self.crossings = 0, 0, 0, []

    def begin_round(self, prompts, parked, blocks, *, num_more, budget):
        """Give all samples `budget` tokens more, in a cache with `num_more` further blocks."""
        blocks.grow(range(blocks.num_blocks, blocks.num_blocks + num_more))
        self.memory = np.pad(self.memory, (0, num_more * BLOCK_SIZE), constant_values=-1)
        self.limits = [len(made) + budget for made in self.made.values()]
        self.tables = BlockTables(
            num_slots=self.num_slots, num_blocks=blocks.num_blocks, block_size=BLOCK_SIZE,
            blocks_per_row=num_blocks(1000, BLOCK_SIZE))
        self.decoding = DecodingSteps(self.tables)
        self.scheduler = Scheduler(
            prompts, tables=self.tables, prefill_tokens=self.prefill_tokens, history=self.history,
            blocks=blocks, returning=parked, may_go_on=self.may_go_on)

    def history(self, sample):
        return self.prompts[sample] + self.made[sample]

    def may_go_on(self, sample):
        return len(self.made[sample]) < self.wanted[sample]

    def plan(self):
        return self.scheduler.plan()

    def step(self):
        step = self.plan()
        if step is None:
            return False
        for source, target in step.copies:
            self._block(target)[:] = self._block(source)
        if step.decoding:
            self._decode(step.decoding)
        assert sum(chunk.stop - chunk.start for chunk in step.chunks) <= self.prefill_tokens
        assert all(chunk.start == 0 for chunk in step.fresh)
        self.num_prefilled += sum(chunk.stop - chunk.start for chunk in step.chunks)
        for chunk in step.chunks:
            positions = chunk.cache_positions(BLOCK_SIZE)
            assert (self.memory[positions[: chunk.start]] == chunk.prompt.tokens[: chunk.start]).all()
            self.memory[positions[chunk.start :]] = chunk.prompt.tokens[chunk.start : chunk.stop]
            assert all(chunk.prompt.tokens == self.history(s) for s in chunk.prompt.rows)
        for sample in step.rows:
            self.made[sample].append(1_000_000 + 1000 * sample + len(self.made[sample]))
        stops = {s for s in step.rows if len(self.made[s]) in (self.wanted[s], self.limits[s])}
        for source, target in self.scheduler.count([s in stops for s in step.rows]):
            self._block(target)[:] = self._block(source)
        self.steps, self.widest = self.steps + 1, max(self.widest, len(step.decoding))
        return True

    def _block(self, block):
        return self.memory[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE]

    def _decode(self, rows):
        """Check that every row attends, in order, to exactly its prompt and its tokens so far."""
        before = self.tables.lens[self.tables.running()].tolist()
        decoding = self.decoding.advance()
        assert len(rows) == len(decoding.slots) <= self.num_slots
        tokens = [self.history(sample)[-1] for sample in rows]
        self.memory[decoding.cache_positions_B.numpy()] = tokens
        parts = []
        for blocks in decoding.sets:
            used = blocks.blocks
            numbers = list(range(used.start, used.stop)) if isinstance(used, slice) else used.tolist()
            joined = [numbers[i : i + blocks.joined] for i in range(0, len(numbers), blocks.joined)]
            self.most_joined = max(self.most_joined, blocks.joined)
            sharers = zip(blocks.rows_PS.tolist(), blocks.counts_PS.tolist(), strict=True)
            first = len(parts)
            for some, (sharing, counts) in zip(joined, sharers, strict=True):
                parts += [(some, count, row) for row, count in zip(sharing, counts, strict=True)]
            attended = [at for row in decoding.parts_BM.tolist() for at in row if first <= at < len(parts)]
            counts = [parts[at][1] for at in attended] or [0]
            assert (blocks.fewest, blocks.most) == (min(counts), max(counts))
            assert blocks.width == min(BLOCK_SIZE * blocks.joined, blocks.most)
        for row, (sample, past) in enumerate(zip(rows, before, strict=True)):
            seen = []
            for place, at in enumerate(decoding.parts_BM[row].tolist()):
                if decoding.missing_BM is None or not decoding.missing_BM[row, place]:
                    some, count, owner = parts[at]
                    assert (count, owner) == (past + 1 - len(seen), row)
                    seen += [token for number in some for token in self._block(number).tolist()]
            assert int(decoding.positions_B[row]) == past == len(self.history(sample)) - 1
            assert seen[: past + 1] == self.history(sample)
            self.crossings += [past] * (past == self.scheduler._restart_at)


@pytest.mark.parametrize("seed", drawn(range(40), 6))
def test_every_sample_gets_its_tokens_and_sees_its_own_history(seed):
    rng = random.Random(seed)
    prompts = _prompts(rng, rng.randint(1, 12))
    samples = [sample for prompt in prompts for sample in prompt.rows]
    num_slots = rng.choice([1, 3, 8, 64])
    least = max(num_blocks(len(prompt.tokens) + MAX_NEW, BLOCK_SIZE) for prompt in prompts) + 1
    plenty = blocks_for(_sizes(prompts), size=BLOCK_SIZE, num_slots=num_slots, max_new_tokens=MAX_NEW)
    available = rng.choice([least, least + 2, max(least, plenty)])
    replay = _Replay(
        prompts, num_slots=num_slots, num_blocks_=available, prefill_tokens=rng.choice([7, 100, 10_000]),
        restart_at=rng.choice([None, None, 100]), wanted=[rng.choice([1, 2, MAX_NEW]) for _ in samples],
        num_later=rng.choice([0, len(prompts) // 2, len(prompts)]))
    while replay.step():
        assert replay.steps < 10_000
    assert [len(replay.made[sample]) for sample in samples] == replay.wanted
    assert replay.scheduler.blocks.num_free == available
    assert not replay.crossings
    if available >= plenty and replay.scheduler._restart_at is None:
        assert replay.scheduler.num_restarts == 0


@pytest.mark.parametrize("seed", drawn(range(40), 10))
def test_prompts_get_copies_of_what_they_have_in_common_with_rows_that_run(seed):
    rng = random.Random(seed)
    beginnings = [range(first, first + 200) for first in (10**10, 2 * 10**10)]
    kinds = [rng.choice([(0, 5), (0, 16), (0, 64), (0, 70), (1, 63), (1, 130)]) for _ in range(12)]
    prompts = _prompts(rng, len(kinds))
    for prompt, (kind, count) in zip(prompts, kinds, strict=True):
        prompt.tokens = [*beginnings[kind][:count], *prompt.tokens]
        prompt.rows = prompt.rows[: rng.choice([1, 5])]
    for row, prompt in enumerate(prompts := sorted(prompts, key=lambda _: rng.random())):
        prompt.rows = list(range(5 * row, 5 * row + len(prompt.rows)))
    wanted = [rng.choice([1, 2, 10, MAX_NEW]) for _ in range(5 * len(prompts))]
    num_slots = rng.choice([2, 3, 8])
    least = max(num_blocks(len(prompt.tokens) + MAX_NEW, BLOCK_SIZE) for prompt in prompts) + 1
    settings = {
        "num_slots": num_slots, "num_blocks_": rng.choice([least, least + 4, 100]), "wanted": wanted,
        "prefill_tokens": rng.choice([7, 100, 10_000]), "restart_at": None, "num_later": rng.choice([0, 6])}
    replays = []
    for copies_prefixes in (False, True):
        again = [Prompt(list(prompt.tokens), list(prompt.rows)) for prompt in prompts]
        replay = _Replay(again, copies_prefixes=copies_prefixes, **settings)
        while replay.step():
            assert replay.steps < 10_000
        assert replay.scheduler.blocks.num_free == settings["num_blocks_"]
        replays.append(replay)
    assert replays[0].made == replays[1].made
    assert all(len(made) == wanted[row] for row, made in replays[0].made.items())
    assert not replays[1].scheduler._prompt_of
    if settings["num_blocks_"] == 100:
        most = sum(count for _, count in kinds if count >= 16)
        assert 0 < replays[0].num_prefilled - replays[1].num_prefilled <= most


@pytest.mark.parametrize("seed", drawn(range(30), 10))
def test_parked_rows_go_on_in_their_blocks(seed):
    """Samples get a few tokens per round. New prompts come in each round, and the cache grows for them."""
    rng = random.Random(seed)
    prompts = _prompts(rng, rng.randint(3, 12))
    arriving = [prompts[i::3] for i in range(3)]
    samples = [sample for prompt in prompts for sample in prompt.rows]
    budget = rng.choice([1, 2, 40, 64])
    replay = _Replay(
        prompts, num_slots=rng.choice([1, 3, 64]), num_blocks_=0, prefill_tokens=rng.choice([7, 10_000]),
        restart_at=None, wanted=[rng.choice([1, 2, MAX_NEW]) for _ in samples])
    parked, blocks, number = [], BlockManager([]), 0
    while number < 3 or parked:
        new = arriving[number] if number < 3 else []
        needed = sum(
            num_blocks(len(prompt.tokens) + MAX_NEW, BLOCK_SIZE) * len(prompt.rows) + 1 for prompt in new)
        replay.begin_round(new, parked, blocks, num_more=needed, budget=budget)
        before = {sample: len(made) for sample, made in replay.made.items()}
        live = {sample for prompt in new for sample in prompt.rows} | {one.row for one in parked}
        while replay.step():
            assert replay.steps < 10_000
        for sample in samples:
            expected = min(budget, replay.wanted[sample] - before[sample]) if sample in live else 0
            assert len(replay.made[sample]) == before[sample] + expected
        parked = replay.scheduler.parked
        assert replay.scheduler.num_restarts == 0
        number += 1
    assert [len(replay.made[sample]) for sample in samples] == replay.wanted
    assert blocks.num_free == blocks.num_blocks > 0


@pytest.mark.parametrize("seed", drawn(range(30), 10))
def test_parked_rows_get_tokens_of_an_environment(seed):
    """Each round parks all rows. They go on in the next one, most of them with tokens that were added."""
    rng = random.Random(seed)
    prompts = _prompts(rng, rng.randint(2, 8))
    samples = [sample for prompt in prompts for sample in prompt.rows]
    replay = _Replay(
        prompts, num_slots=rng.choice([1, 3, 64]), num_blocks_=0, prefill_tokens=rng.choice([7, 10_000]),
        restart_at=None, wanted=[10**6 for _ in samples])
    blocks = BlockManager([])
    longest = max(len(prompt.tokens) for prompt in prompts)
    plenty = (len(samples) + len(prompts)) * num_blocks(longest + 500, BLOCK_SIZE)
    replay.begin_round(prompts, [], blocks, num_more=plenty, budget=5)
    lens = dict.fromkeys(samples, 0)
    for budget in (5, 3, 1, 40):
        while replay.step():
            assert replay.steps < 10_000
        assert {sample: len(made) for sample, made in replay.made.items()} == {
            sample: count + budget for sample, count in lens.items()}
        continued, rows = [], []
        for parked in replay.scheduler.parked:
            added = rng.choice([[], [-7], list(range(-90, 0))])
            replay.made[parked.row] += added
            tokens = replay.history(parked.row)
            assert parked.num_cached == len(tokens) - len(added) - 1
            continued += [Prompt(
                tokens, [parked.row], list(parked.blocks), parked.num_cached, num_started=parked.ordinal,
                num_shared=parked.num_shared)] if added else []
            rows += [] if added else [parked]
        assert len(continued) + len(rows) == len(samples)
        lens = {sample: len(made) for sample, made in replay.made.items()}
        assert replay.scheduler.num_restarts == 0
        next_budget = {5: 3, 3: 1, 1: 40, 40: 2}[budget]
        replay.begin_round(continued, rows, blocks, num_more=0, budget=next_budget)
    while replay.step():
        pass
    blocks.release([block for row in replay.scheduler.parked for block in row.blocks])
    assert blocks.num_free == blocks.num_blocks


@pytest.mark.parametrize("seed", range(20))
def test_capacity_knows_how_many_prompts_begin_at_once(seed):
    rng = random.Random(seed)
    prompts = _prompts(rng, rng.randint(1, 12))
    groups = [PromptGroup(prompt.tokens, prompt.rows) for prompt in prompts]
    max_rows = rng.choice([1, 3, 8, 64])
    gib = rng.choice([None, rng.randint(8, 40) * 128 / 2**30])
    work = Generate(SamplingConfig(max_new_tokens=MAX_NEW), max_rows=max_rows, kv_cache_gib=gib)
    limits = GenerationLimits([group.size for group in groups], work, token_bytes=1, num_cohorts=1)
    sizes = CacheSizes([group.size for group in groups], limits)
    scheduler = Scheduler(
        prompts, tables=sizes.tables(), prefill_tokens=10_000, history=lambda sample: [])
    assert len(scheduler.plan().chunks) == max(1, sizes.num_at_once(groups))


@pytest.mark.parametrize("num_later", [0, 18, 20])
def test_slots_are_filled_again_at_once(num_later):
    """Three slots, twenty samples of different lengths: no slot is ever empty while a sample waits."""
    rng = random.Random(0)
    wanted = [rng.randint(2, 30) for _ in range(20)]
    prompts = [Prompt([i], [i]) for i in range(20)]
    replay = _Replay(
        prompts, num_slots=3, num_blocks_=50, prefill_tokens=1000, restart_at=None, wanted=wanted,
        num_later=num_later)
    while replay.step():
        pass
    assert replay.widest == 3
    # Each slot's rows follow one another, with one step between them that is their prefill.
    assert replay.steps <= -(-sum(wanted) // 3) + max(wanted)


def test_samples_of_a_prompt_share_its_blocks():
    prompts = [Prompt(list(range(200)), list(range(8)))]
    assert blocks_for(_sizes(prompts), size=BLOCK_SIZE, num_slots=8, max_new_tokens=20) == 4 + 8 * 1
    replay = _Replay(
        prompts, num_slots=8, num_blocks_=11, prefill_tokens=1000, restart_at=None, wanted=[20] * 8)
    replay.step()
    replay.step()
    assert (replay.widest, replay.most_joined) == (8, 3)
    assert replay.scheduler.blocks.num_free == 0  # three shared blocks, and eight of one row each


def test_blocks_are_small_where_samples_can_share_them():
    sizes = [block_size(prompts, max_new_tokens=20) for prompts in ([(300, 1), (63, 8)], [(300, 1), (64, 2)])]
    assert sizes[0] > sizes[1]
    assert block_size([(12, 1), (9, 8)], max_new_tokens=20) == 32  # No row is longer.


def test_blocks_to_share_and_others_lie_apart():
    blocks = BlockManager(range(10))
    assert blocks.allocate(3, to_share=True) == [0, 1, 2] and blocks.allocate(2) == [9, 8]
    blocks.share([1])
    blocks.release([0, 1, 9])
    assert blocks.num_free == 7
    assert blocks.allocate(2) == [9, 7] and blocks.allocate(2, to_share=True) == [0, 3]
    with pytest.raises(AssertionError, match="4 blocks wanted, 3 free"):
        blocks.allocate(4)
    with pytest.raises(AssertionError, match="block 4 is free"):
        blocks.share([4])
