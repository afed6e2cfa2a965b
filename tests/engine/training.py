"""A train step in two mini-batches, and a rank's engine and samples for it."""

import torch

from realhf.algorithms.sft import CrossEntropy
from realhf.calls import OptimizerConfig, TrainStep
from realhf.data.batch import Batch, Packed
from realhf.distributed.world import World
from realhf.engine.native import NativeEngine
from realhf.graph import FunctionCall
from realhf.layout import Layout
from realhf.models.model_config import ModelConfig
from realhf.models.param_spec import model_spec
from tests.engine.reference import ragged_rows
from tests.nn.tiny import hf_config

CALL = FunctionCall(
    "actor_train", "train_step", ("sequence_ids", "response_mask"), role="actor",
    work=TrainStep(CrossEntropy(), minibatches=2),
)


def minibatch(rows):
    no_ids, no_mask = torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.double)
    ids = Packed.of([torch.tensor(p + c) for p, c in rows], empty=no_ids)
    mask = Packed.of(
        [torch.tensor([0.0] * len(p) + [1.0] * len(c)).double() for p, c in rows], empty=no_mask)
    return Batch(list(range(len(rows))), {"sequence_ids": ids, "response_mask": mask})


def engine_and_minibatches(world: World, text: str, *, num_rows: int, tied: bool = True):
    """Return a float64 engine and this rank's part of two mini-batches; None if it is not in the layout."""
    layout = Layout.parse(text)
    if world.rank not in layout:
        return None
    spec = model_spec(ModelConfig.from_hf(hf_config(tied=tied)))
    engine = NativeEngine(spec, layout, world, dtype="float64", optimizer=OptimizerConfig(lr=3e-3))
    engine.load(None, seed=0)
    dp = layout.coordinate(world.rank).dp
    return engine, [minibatch(ragged_rows(num_rows, seed=seed)[dp :: layout.dp]) for seed in (0, 1)]
