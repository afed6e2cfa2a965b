"""Counts the memory of a reallocation, as new tensor storage, operator by operator."""

import gc
import weakref

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from realhf.distributed.pieces import one_piece_each
from realhf.distributed.world import World
from realhf.layout import Layout
from realhf.models.model_config import ModelConfig
from realhf.models.param_spec import model_spec, region_slices
from tests.realloc.test_execute import _model
from tests.reallocators import make_reallocator
from tests.samples import marked

STAGING_BYTES = 150_000
SLACK_BYTES = 4096  # Notices between ranks and other small tensors.
AVERAGE_BYTES = 4 << 18  # Products of a moving average are computed in parts of this size.


SPEC = model_spec(ModelConfig("llama", 2000, 64, 256, 8, 4, 4, 16))


class Storages(TorchDispatchMode):
    """A counter of the bytes of storage created while it is active, and of their peak.

    Memory of numpy's counts from the first operator on a tensor in it.
    """

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._known = set()
        for x in gc.get_objects():
            if issubclass(type(x), torch.Tensor):  # (isinstance would follow weak references.)
                self._meet(x, num_bytes=0)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves((args, kwargs, result)):
            if isinstance(x, torch.Tensor):
                self._meet(x, num_bytes=x.untyped_storage().nbytes())
        return result

    def _meet(self, x, *, num_bytes):
        if (at := x.untyped_storage()._cdata) not in self._known:
            self._known.add(at)
            self._count(num_bytes)
            weakref.finalize(x.untyped_storage(), self._forget, at, num_bytes)

    def _count(self, num_bytes):
        self.now += num_bytes
        self.peak = max(self.peak, self.now)

    def _forget(self, at, num_bytes):
        self._known.discard(at)
        self.now -= num_bytes


def test_the_counter_counts():
    with Storages() as storages:
        x = torch.zeros(1000)
        y = x.view(10, 100) + 1
        del x
        z = y.to(torch.float64)
    assert storages.peak == 4000 + 4000 + 8000 - 4000 and storages.now == y.nbytes + z.nbytes


def test_the_counter_counts_memory_of_numpy():
    before = torch.from_numpy(np.zeros(7))
    with Storages() as storages:
        x = torch.from_numpy(np.zeros(10)).view(2, 5)
        assert storages.now == 80 and float(x.sum() + before.sum()) == 0
        del x
    assert storages.now < 80 < storages.peak


def _move(world, source, target, follow_rate, sharded, dtype):
    spec, layouts = SPEC, (Layout.parse(source), Layout.parse(target))
    prefix = f"memory {source} {target} {follow_rate} {sharded}"
    store = torch.distributed.PrefixStore(prefix, world._store)
    apart = World(rank=world.rank, size=world.size, store=store, ranks_per_host=1)
    model = _model(spec, seed=1, dtype=torch.float32)
    held = spec.boxes_held_by(layouts[0], world.rank, sharded=sharded)
    old = {
        name: tuple((box, model[name][region_slices(box)].clone()) for box in boxes)
        for name, boxes in held.items()
    }
    realloc = make_reallocator(
        spec, *layouts, apart, dtype=dtype, sharded=sharded, follow_rate=follow_rate,
        staging_bytes=STAGING_BYTES)
    wanted = spec.held_by(layouts[1], world.rank)
    with Storages() as storages:
        shapes = {name: [stop - start for start, stop in region] for name, region in wanted.items()}
        new = {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}
        realloc.run(old or None, one_piece_each(new, wanted))
    return storages.peak, sum(x.nbytes for x in new.values())


@pytest.mark.parametrize(
    "source, target, follow_rate, sharded, dtype",
    marked([
        ("t4@0-3", "d4@0-3", 1.0, False, torch.float32),
        ("d1@0", "d4@0-3", 1.0, False, torch.bfloat16),
        ("p2t2@0-3", "d2t2@0-3", 0.5, False, torch.float32),
        ("d4@0-3", "t2p2@0-3", 1.0, True, torch.bfloat16),
    ], quick=[2, 3]),
)
def test_peak_is_target_plus_staging(pool, source, target, follow_rate, sharded, dtype):
    moved = pool.run(_move, source, target, follow_rate, sharded, dtype)
    for peak, target_bytes in moved:
        average_bytes = AVERAGE_BYTES * (follow_rate < 1)
        assert target_bytes <= peak <= target_bytes + STAGING_BYTES + SLACK_BYTES + average_bytes
    assert max(target_bytes for _, target_bytes in moved) > 2 * STAGING_BYTES
