"""Windows of steps under expert parallelism: ranks take all of them together, and rarely have to agree."""

import random
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch

from realhf.calls import Generate, SamplingConfig
from realhf.data.batch import Batch, Packed
from realhf.engine.native import NativeEngine
from realhf.graph import FunctionCall
from realhf.inference.scheduler import MOST_STEPS, DecodeWindows
from realhf.layout import Layout
from realhf.models.kv_blocks import num_blocks
from realhf.models.model_config import ModelConfig
from realhf.models.param_spec import model_spec
from tests.families import MOE_CASES
from tests.inference.test_scheduler import BLOCK_SIZE, MAX_NEW, _prompts, _Replay
from tests.samples import drawn, marked


class _Thread:
    """A rank of a group whose ranks are threads."""

    def __init__(self, index, barrier, documents):
        self._index = index
        self._barrier = barrier
        self._documents = documents
        self.size = len(documents)

    def all_gather_json(self, document):
        self._documents[self._index] = document
        self._barrier.wait(20)
        found = list(self._documents)
        self._barrier.wait(20)
        return found


class _Rank(_Replay):
    """A replica that takes its steps in windows, and does not know when its samples will end."""

    def __init__(self, rng, group):
        prompts = _prompts(rng, rng.choice([0, 1, rng.randint(1, 12)]))
        self.samples = [sample for prompt in prompts for sample in prompt.rows]
        self.most = rng.choice([5, MAX_NEW])
        least = num_blocks(250 + MAX_NEW, BLOCK_SIZE) + 1
        super().__init__(
            prompts, num_slots=rng.choice([1, 3, 64]), num_blocks_=least + rng.choice([0, 3, 200]),
            prefill_tokens=rng.choice([7, 60, 10_000]), restart_at=rng.choice([None, None, 100]),
            wanted=[min(self.most, rng.choice([1, 2, 40, MAX_NEW])) for _ in self.samples],
            num_later=rng.choice([0, len(prompts) // 2]))
        self.windows = DecodeWindows(group)
        self.width = rng.choice([8, 16])
        self.seen = []

    def num_left(self, numbers):
        return [self.most - len(self.made[sample]) for sample in numbers]

    def plan(self):
        step = self.windows.next_step(self.scheduler, self, num_pages=self.width, waits=False)
        window = self.windows.now
        self.seen.append(window)
        if step is not None:
            assert len(step.decoding) <= window.num_rows
            assert window.prefills or not step.chunks
        return step

    def run(self):
        self.step()
        while self.windows.now.num_steps > 0:
            self.step()
            assert len(self.seen) < 100_000
        return self


@pytest.mark.parametrize("seed", drawn(range(25), 8))
def test_all_ranks_take_the_same_steps(seed):
    rng = random.Random(seed)
    size = rng.choice([2, 3])
    barrier, documents = Barrier(size), [None] * size
    ranks = [_Rank(rng, _Thread(i, barrier, documents)) for i in range(size)]
    with ThreadPoolExecutor(size) as threads:
        for _ in threads.map(_Rank.run, ranks):
            pass
    for rank in ranks:
        assert rank.seen == ranks[0].seen
        assert [len(rank.made[sample]) for sample in rank.samples] == rank.wanted
        assert rank.scheduler.blocks.num_free == rank.scheduler.blocks.num_blocks
    for window in ranks[0].seen:
        assert window.num_steps == 1 if window.prefills else window.num_steps <= MOST_STEPS
        assert window.num_pages == max(rank.width for rank in ranks)


SHARES = [[(40, 60), (41, 60), (5, 60)], [(3, 9)]]
"""Length of each prompt and of its response, by rank."""


def _count(world, layout):
    """Return this rank's steps, the agreements on windows in its ep group, and its tokens."""
    parsed = Layout.parse(layout)
    if world.rank not in parsed:
        return None
    hf = MOE_CASES["qwen2-moe"].hf(architectures=["Qwen2MoeForCausalLM"], max_position_embeddings=256)
    engine = NativeEngine(
        model_spec(ModelConfig.from_hf(hf | {"num_hidden_layers": 2})), parsed, world, dtype="float64")
    engine.load(None, seed=0)
    group = engine.groups.ep_control
    gathers, steps = [], []
    gather = type(group).all_gather_json

    def counted(document):
        gathers.extend([document] if steps and isinstance(document, list) else [])
        return gather(group, document)

    group.all_gather_json = counted
    outputs = ("sequences", "mask", "logprobs", "finished")
    work = Generate(SamplingConfig(max_new_tokens=60, ignore_eos=True))
    call = FunctionCall("gen", "generate", ("prompts", "limits"), outputs, role="actor", work=work)
    share = SHARES[parsed.coordinate(world.rank).dp]
    prompts = [torch.arange(2, 2 + length) for length, _ in share]
    batch = Batch(
        [10 * world.rank + i for i in range(len(share))],
        {"prompts": Packed.of(prompts), "limits": [limit for _, limit in share]})
    try:
        made = engine.generate(call, batch, report=steps.append).batch
    finally:
        del group.all_gather_json
    lengths = [int(mask.sum()) for mask in made["mask"].split()] if made.fields else []
    return len(steps), len(gathers), lengths


@pytest.mark.parametrize("layout", marked(["e2@0-1", "e2p2@0-3"], quick=[0]))
def test_ranks_agree_once_in_a_window(pool, layout):
    """After the step of the prompts there are 59 steps, in four windows; then all ranks agree that they have
    ended."""
    results = [result for result in pool.run(_count, layout) if result is not None]
    num_cohorts = Layout.parse(layout).pp
    for num_steps, num_gathers, _ in results:
        assert num_steps == 60
        assert num_gathers == num_cohorts * (4 + 1)
    assert sorted(length for *_, lengths in results for length in lengths) == [9, 60, 60, 60]
