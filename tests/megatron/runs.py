"""What the workers of these tests run. Importing this module patches torch: see shim.py."""

from tests.megatron import shim  # isort: skip

from typing import Any

from realhf.algorithms.sft import CrossEntropy
from realhf.calls import OptimizerConfig, TrainStep
from realhf.dist.world import World
from realhf.engine.base import Engine
from realhf.engine.megatron.engine import MegatronEngine
from realhf.engine.native import NativeEngine
from realhf.graph import FunctionCall
from realhf.layout import Layout
from realhf.model_config import ModelConfig
from realhf.param_spec import model_spec
from tests.engine.reference import ragged_rows
from tests.engine.training import minibatch

assert shim.VERSION
ENGINES = {"native": NativeEngine, "megatron": MegatronEngine}
CALL = FunctionCall(
    "actor_train", "train_step", ("sequence_ids", "response_mask"), role="actor",
    work=TrainStep(CrossEntropy()),
)  # fmt: skip


def make_engine(
    world: World, kind: str, hf: dict[str, Any], text: str, *, dtype: str = "float32", **options: Any
) -> Engine | None:
    """Return an engine with random weights; None if the rank is not in the layout."""
    layout = Layout.parse(text)
    if world.rank not in layout:
        return None
    spec = model_spec(ModelConfig.from_hf(hf))
    config = OptimizerConfig(lr=3e-3, weight_decay=0.1, max_grad_norm=0.5)
    engine = ENGINES[kind](spec, layout, world, dtype=dtype, optimizer=config, **options)
    engine.load(None, seed=0)
    return engine


def train(engine: Engine, *, steps: int, recompute: bool = False) -> list[dict[str, float]]:
    """Return the metrics of a few steps on ragged rows, of which each replica has a part."""
    dp = engine.groups.at.dp
    size = engine.groups.layout.dp
    found = []
    for seed in range(steps):
        batch = minibatch(ragged_rows(6, seed=seed)[dp::size])
        result = engine.run(CALL, [batch], micro_batch_tokens=16, recompute=recompute)
        found.append(result.metrics)
    return found


def curve(
    world: World, kind: str, hf: dict[str, Any], text: str, options: dict[str, Any]
) -> list[dict[str, float]] | None:
    """Return the metrics of five steps, on the last pipeline stage."""
    options = dict(options)
    recompute = options.pop("recompute", False)
    engine = make_engine(world, kind, hf, text, **options)
    return None if engine is None else train(engine, steps=5, recompute=recompute)
