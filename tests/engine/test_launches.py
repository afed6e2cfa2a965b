"""Counts the collectives that a train step posts over NCCL, recorded on tensors without memory."""

from collections import Counter

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
from realhf.model_config import ModelConfig
from realhf.param_spec import model_spec
from tests.dist.recording import RecordedWorld


class _Scalars(TorchDispatchMode):
    """Gives 1 where the host reads a value of a tensor without memory."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return 1.0 if args[0].is_floating_point() else 1
        return func(*args, **(kwargs or {}))


def _train(name, layout, rank, *, num_ranks, gather):
    """Return the engine's spec and the posts of one rank in a train step of two micro-batches."""
    world = RecordedWorld(rank, num_ranks, device="meta")
    spec = model_spec(ModelConfig.load(name))
    engine = NativeEngine(spec, layout, world, dtype="bfloat16", optimizer=OptimizerConfig(lr=1e-5))
    columns = {
        "sequence_ids": Packed(torch.zeros(64, dtype=torch.long, device="meta"), [32, 32]),
        "response_mask": Packed(torch.zeros(64, device="meta"), [32, 32]),
    }  # fmt: skip
    work = TrainStep(CrossEntropy())
    call = FunctionCall("actor_train", "train_step", tuple(columns), role="actor", work=work)
    with _Scalars(), _config.patch(meta_nonzero_assume_all_nonzero=True):
        engine.run(call, [Batch([0, 1], columns)], micro_batch_tokens=32, gather=gather)
    return spec, world.log.posts


@pytest.mark.parametrize("rank", [0, 63])
def test_a_7b_model_on_64_replicas_takes_two_collectives_per_section(rank):
    layout = Layout.parse("d64@0-63")
    spec, posts = _train("llama-7b", layout, rank, num_ranks=64, gather=True)
    num_sections = len(spec.sections(layout, rank))
    kinds = Counter(post.operation for post in posts)
    assert num_sections == 34
    assert kinds["reduce_scatter"] == kinds["all_gather"] == num_sections
    others = kinds - Counter(reduce_scatter=num_sections, all_gather=num_sections)
    assert others == {"all_reduce": 2, "broadcast from 63": 1}  # (The rests of all sections, and the norm.)
    whole = {kind: sum(p.num_bytes for p in posts if p.operation == kind) for kind in kinds}
    assert whole["reduce_scatter"] == pytest.approx(4 * spec.numel, rel=1e-4)
    assert whole["all_gather"] == pytest.approx(2 * spec.numel, rel=1e-4)
