"""Counts the collectives that a train step posts over NCCL, recorded on tensors without memory."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.fx.experimental import _config
from torch.utils._python_dispatch import TorchDispatchMode

from realhf import OptimizerConfig
from realhf.algorithms.sft import CrossEntropy
from realhf.calls import TrainStep
from realhf.data.batch import Batch, Packed
from realhf.engine.native import NativeEngine
from realhf.graph import FunctionCall
from realhf.layout import Layout
from realhf.models.model_config import ModelConfig
from realhf.models.param_spec import model_spec
from tests.distributed.recording import RecordedWorld, fault_of
from tests.samples import marked


class _Scalars(TorchDispatchMode):
    """Gives 1 where the host reads a value of a tensor without memory."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return 1.0 if args[0].is_floating_point() else 1
        return func(*args, **(kwargs or {}))


_TINY = ModelConfig("llama", 64, 16, 32, 6, 4, 2, 4)


def _train(config, layout, rank, *, num_ranks, num_micro_batches=2):
    """Return the spec of the model, and the posts of one rank in a train step."""
    world = RecordedWorld(rank, num_ranks, device="meta")
    spec = replace(model_spec(config), section_numel=1 << 24 if config is not _TINY else 1 << 12)
    dtype = "float32" if config is _TINY else "bfloat16"
    engine = NativeEngine(spec, layout, world, dtype=dtype, optimizer=OptimizerConfig(lr=1e-5))
    lengths = [32] * num_micro_batches
    num_tokens = sum(lengths)
    columns = {
        "sequence_ids": Packed(torch.zeros(num_tokens, dtype=torch.long, device="meta"), lengths),
        "response_mask": Packed(torch.zeros(num_tokens, device="meta"), lengths, torch.ones(num_tokens)),
    }
    work = TrainStep(CrossEntropy())
    call = FunctionCall("actor_train", "train_step", tuple(columns), role="actor", work=work)
    with _Scalars(), _config.patch(meta_nonzero_assume_all_nonzero=True):
        engine.train(call, [Batch(list(range(num_micro_batches)), columns)], micro_batch_tokens=32)
    return spec, world.log.posts


@pytest.mark.slow
@pytest.mark.parametrize("rank", marked([0, 63], quick=[1]))
def test_a_7b_model_on_64_replicas_takes_two_collectives_per_section(rank):
    layout = Layout.parse("d64@0-63")
    spec, posts = _train(ModelConfig.load("llama-7b"), layout, rank, num_ranks=64)
    num_sections = len(spec.sections(layout, rank))
    kinds = Counter(post.operation for post in posts)
    assert num_sections == 34
    assert kinds["reduce_scatter"] == kinds["all_gather"] == num_sections
    others = kinds - Counter(reduce_scatter=num_sections, all_gather=num_sections)
    assert others == {"all_reduce": 2, "broadcast from 63": 1}  # (The rests of all sections, and the norm.)
    whole = {kind: sum(p.num_bytes for p in posts if p.operation == kind) for kind in kinds}
    assert whole["reduce_scatter"] == pytest.approx(4 * spec.numel, rel=1e-4)
    assert whole["all_gather"] == pytest.approx(2 * spec.numel, rel=1e-4)


def _logs(layout, num_micro_batches):
    """Return the posts of all ranks in a train step of a tiny model; replica i has num_micro_batches[i]."""
    logs = {}
    placed = Layout.parse(layout)
    for rank in placed.ranks:
        count = num_micro_batches[placed.coordinate(rank).dp]
        logs[rank] = _train(_TINY, placed, rank, num_ranks=len(placed.ranks), num_micro_batches=count)[1]
    return logs


@pytest.mark.parametrize(
    ("layout", "num_micro_batches"),
    marked([
        *(("p2@0-1", [n]) for n in (1, 2, 5)), *(("p4@0-3", [n]) for n in (1, 3, 4, 9)),
        ("t2@0-1", [2]), ("d2p2@0-3", [2, 2]), ("d2p3@0-5", [1, 6]), ("d2t2p2@0-7", [4, 3]),
    ], quick=(1, 7, 8)),
)
def test_the_posts_of_all_ranks_drain_as_one_chain(layout, num_micro_batches):
    logs = _logs(layout, num_micro_batches)
    assert fault_of(logs) == "" and all(logs.values())


def test_a_swap_in_a_real_step_is_found():
    logs = _logs("d2p2@0-3", [3, 3])
    mine = list(logs[1])
    rests, norm = (i for i, post in enumerate(mine) if post.operation == "all_reduce")
    mine[rests], mine[norm] = mine[norm], mine[rests]
    assert "rank 1 waits in all_reduce of 8 bytes on data [0, 1, 2, 3]" in fault_of({**logs, 1: mine})
