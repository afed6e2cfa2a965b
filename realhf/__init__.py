"""realhf: reinforcement learning of language models as a dataflow graph, every call in its own layout."""

import importlib
from typing import Any

_PUBLIC = {
    "algorithms.grpo": ("GRPO",),
    "algorithms.policy_loss": ("PolicyLoss", "PolicyLossConfig"),
    "algorithms.ppo": ("PPO", "AdvantageConfig", "ValueLoss"),
    "algorithms.sft": ("SFT",),
    "algorithms.reward_model": ("RewardModel",),
    "cluster": ("Cluster",),
    "data.dataset": ("DatasetConfig",),
    "calls": ("Generate", "HostFunction", "LogProbs", "OptimizerConfig", "SamplingConfig", "Scores",
                    "TrainStep", "Values"),
    "experiment": ("Expected", "Experiment", "Role"),
    "graph": ("DataflowGraph", "FunctionCall"),
    "layout": ("DeviceMesh", "Layout", "ParallelStrategy"),
    "lora": ("LoraConfig",),
    "model_config": ("ModelConfig",),
    "plan": ("CallPlan", "ExecutionPlan"),
    "prepare": ("prepare_once",),
}
_MODULE_OF = {name: module for module, names in _PUBLIC.items() for name in names}

__all__ = sorted(_MODULE_OF)  # noqa: PLE0605
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Imports a public name on first use, so that `import realhf` stays quick."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'realhf' has no attribute {name!r}")
    return getattr(importlib.import_module(f"realhf.{_MODULE_OF[name]}"), name)
