"""realhf: reinforcement learning of language models as a dataflow graph, every call in its own layout."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # For editors and type checkers: the names below are imported on first use.
    from realhf.algorithms.cispo import CISPO
    from realhf.algorithms.critic_free import CriticFree
    from realhf.algorithms.dapo import DAPO
    from realhf.algorithms.distillation import Distillation
    from realhf.algorithms.dpo import DPO, DPOLoss
    from realhf.algorithms.grpo import GRPO
    from realhf.algorithms.gspo import GSPO
    from realhf.algorithms.kl import RewardKL
    from realhf.algorithms.on_policy import SEQUENCE, OnPolicy, graph_of
    from realhf.algorithms.pass_rates import PassRateLimit
    from realhf.algorithms.policy_loss import PolicyLoss, PolicyLossConfig
    from realhf.algorithms.ppo import PPO, AdvantageConfig, ValueLoss
    from realhf.algorithms.reinforce import ReinforcePlusPlus
    from realhf.algorithms.remax import ReMax
    from realhf.algorithms.reward_model import BradleyTerry, PairwiseRewardModel, RewardModel
    from realhf.algorithms.rloo import RLOO
    from realhf.algorithms.scalerl import ScaleRL, scalerl_actor
    from realhf.algorithms.sft import SFT
    from realhf.calls import (
        Generate,
        HostFunction,
        LogProbs,
        OptimizerConfig,
        Scores,
        TopLogProbs,
        TrainStep,
        Values,
    )
    from realhf.cluster import Cluster
    from realhf.data.dataset import DatasetConfig, DatasetMixture
    from realhf.evaluation.sets import Evaluation
    from realhf.experiment import Expected, Experiment, Role
    from realhf.graph import DataflowGraph, FunctionCall
    from realhf.layout import DeviceMesh, Layout, ParallelStrategy
    from realhf.models.lora import LoraConfig
    from realhf.models.model_config import ModelConfig
    from realhf.plan import CallPlan, ExecutionPlan
    from realhf.prepare import prepare_once
    from realhf.rewards.answers import ExactMatch, FormatReward, RegexMatch
    from realhf.rewards.limits import RewardLimits
    from realhf.rewards.math_answer import MathAnswer
    from realhf.rewards.puzzles import ReasoningGym
    from realhf.rewards.remote_judge import RemoteJudge
    from realhf.rewards.reward import Reward
    from realhf.rewards.sandbox import Sandbox
    from realhf.rewards.shaping import (
        CosineReward,
        RepetitionPenalty,
        ScoreShaping,
        SoftOverlongPenalty,
        TokenReward,
    )
    from realhf.rewards.unit_tests import UnitTests
    from realhf.settings.interruption import Interruption
    from realhf.settings.rollout_log import RolloutLog
    from realhf.settings.sampling_config import SamplingConfig
    from realhf.steps.part_executor import Samples
    from realhf.steps.sample_pool import Pool
    from realhf.steps.step_runner import StepRunner

_PUBLIC = {
    "algorithms.cispo": ("CISPO",),
    "algorithms.critic_free": ("CriticFree",),
    "algorithms.dapo": ("DAPO",),
    "algorithms.distillation": ("Distillation",),
    "algorithms.dpo": ("DPO", "DPOLoss"),
    "algorithms.grpo": ("GRPO",),
    "algorithms.gspo": ("GSPO",),
    "algorithms.kl": ("RewardKL",),
    "algorithms.on_policy": ("SEQUENCE", "OnPolicy", "graph_of"),
    "algorithms.pass_rates": ("PassRateLimit",),
    "algorithms.policy_loss": ("PolicyLoss", "PolicyLossConfig"),
    "algorithms.ppo": ("PPO", "AdvantageConfig", "ValueLoss"),
    "algorithms.reinforce": ("ReinforcePlusPlus",),
    "algorithms.remax": ("ReMax",),
    "algorithms.reward_model": ("BradleyTerry", "PairwiseRewardModel", "RewardModel"),
    "rewards.limits": ("RewardLimits",),
    "rewards.answers": ("ExactMatch", "FormatReward", "RegexMatch"),
    "rewards.math_answer": ("MathAnswer",),
    "rewards.puzzles": ("ReasoningGym",),
    "rewards.remote_judge": ("RemoteJudge",),
    "rewards.reward": ("Reward",),
    "rewards.sandbox": ("Sandbox",),
    "rewards.unit_tests": ("UnitTests",),
    "algorithms.rloo": ("RLOO",),
    "algorithms.scalerl": ("ScaleRL", "scalerl_actor"),
    "algorithms.sft": ("SFT",),
    "calls": ("Generate", "HostFunction", "LogProbs", "OptimizerConfig", "Scores", "TopLogProbs",
              "TrainStep", "Values"),
    "cluster": ("Cluster",),
    "data.dataset": ("DatasetConfig", "DatasetMixture"),
    "evaluation.sets": ("Evaluation",),
    "experiment": ("Expected", "Experiment", "Role"),
    "graph": ("DataflowGraph", "FunctionCall"),
    "settings.interruption": ("Interruption",),
    "layout": ("DeviceMesh", "Layout", "ParallelStrategy"),
    "models.lora": ("LoraConfig",),
    "models.model_config": ("ModelConfig",),
    "steps.part_executor": ("Samples",),
    "plan": ("CallPlan", "ExecutionPlan"),
    "prepare": ("prepare_once",),
    "rewards.shaping": ("CosineReward", "RepetitionPenalty", "ScoreShaping", "SoftOverlongPenalty",
                        "TokenReward"),
    "settings.rollout_log": ("RolloutLog",),
    "steps.sample_pool": ("Pool",),
    "settings.sampling_config": ("SamplingConfig",),
    "steps.step_runner": ("StepRunner",),
}
"""Public names by the module that defines them."""
_MODULE_OF = {name: module for module, names in _PUBLIC.items() for name in names}

__all__ = [
    "AdvantageConfig", "BradleyTerry", "CISPO", "CallPlan", "Cluster", "CosineReward", "CriticFree",
    "DAPO", "DPO", "DPOLoss", "DataflowGraph", "DatasetConfig", "DatasetMixture", "DeviceMesh",
    "Distillation", "Evaluation", "ExactMatch", "ExecutionPlan", "Expected", "Experiment", "FormatReward",
    "FunctionCall", "GRPO", "GSPO", "Generate", "HostFunction", "Interruption", "Layout", "LogProbs",
    "LoraConfig", "MathAnswer", "ModelConfig", "OnPolicy", "OptimizerConfig", "PPO",
    "PairwiseRewardModel", "ParallelStrategy", "PassRateLimit", "PolicyLoss", "PolicyLossConfig", "Pool",
    "RLOO", "ReMax", "ReasoningGym", "RegexMatch", "ReinforcePlusPlus", "RemoteJudge",
    "RepetitionPenalty", "Reward", "RewardKL", "RewardLimits", "RewardModel", "Role", "RolloutLog",
    "SEQUENCE", "SFT", "Samples", "SamplingConfig", "Sandbox", "ScaleRL", "ScoreShaping", "Scores",
    "SoftOverlongPenalty", "StepRunner", "TokenReward", "TopLogProbs", "TrainStep", "UnitTests",
    "ValueLoss", "Values", "graph_of", "prepare_once", "scalerl_actor",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that `import realhf` stays quick."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'realhf' has no attribute {name!r}")
    return getattr(importlib.import_module(f"realhf.{_MODULE_OF[name]}"), name)
