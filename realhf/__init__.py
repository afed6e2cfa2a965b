"""realhf: reinforcement learning of language models as a dataflow graph, every call in its own layout."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # For editors and type checkers. Python imports a name of _NAMES on its first use.
    from realhf.algorithms.advantages import AdvantageConfig as AdvantageConfig
    from realhf.algorithms.critic_free import CISPO as CISPO
    from realhf.algorithms.critic_free import DAPO as DAPO
    from realhf.algorithms.critic_free import GRPO as GRPO
    from realhf.algorithms.critic_free import GSPO as GSPO
    from realhf.algorithms.critic_free import RLOO as RLOO
    from realhf.algorithms.critic_free import SAPO as SAPO
    from realhf.algorithms.critic_free import CriticFree as CriticFree
    from realhf.algorithms.critic_free import ReinforcePlusPlus as ReinforcePlusPlus
    from realhf.algorithms.critic_free import ReMax as ReMax
    from realhf.algorithms.distillation import Distillation as Distillation
    from realhf.algorithms.kl import RewardKL as RewardKL
    from realhf.algorithms.on_policy import SEQUENCE as SEQUENCE
    from realhf.algorithms.on_policy import OnPolicy as OnPolicy
    from realhf.algorithms.on_policy import graph_of as graph_of
    from realhf.algorithms.pass_rates import PassRateLimit as PassRateLimit
    from realhf.algorithms.policy_loss import PolicyLoss as PolicyLoss
    from realhf.algorithms.policy_loss import PolicyLossConfig as PolicyLossConfig
    from realhf.algorithms.ppo import PPO as PPO
    from realhf.algorithms.ppo import ValueLoss as ValueLoss
    from realhf.algorithms.preferences import DPO as DPO
    from realhf.algorithms.preferences import KTO as KTO
    from realhf.algorithms.preferences import ORPO as ORPO
    from realhf.algorithms.preferences import BradleyTerry as BradleyTerry
    from realhf.algorithms.preferences import DPOLoss as DPOLoss
    from realhf.algorithms.preferences import KTOLoss as KTOLoss
    from realhf.algorithms.preferences import PairwiseRewardModel as PairwiseRewardModel
    from realhf.algorithms.preferences import RewardModel as RewardModel
    from realhf.algorithms.preferences import SimPO as SimPO
    from realhf.algorithms.preferences import num_pairs as num_pairs
    from realhf.algorithms.preferences import pair_indices as pair_indices
    from realhf.algorithms.preferences import split_pairs as split_pairs
    from realhf.algorithms.reward_models import GenerativeReward as GenerativeReward
    from realhf.algorithms.reward_models import ModelReward as ModelReward
    from realhf.algorithms.reward_models import ProcessReward as ProcessReward
    from realhf.algorithms.scalerl import ScaleRL as ScaleRL
    from realhf.algorithms.scalerl import scalerl_actor as scalerl_actor
    from realhf.algorithms.sft import SFT as SFT
    from realhf.calls import ForwardFunction as ForwardFunction
    from realhf.calls import Generate as Generate
    from realhf.calls import HostFunction as HostFunction
    from realhf.calls import Interruption as Interruption
    from realhf.calls import LogProbs as LogProbs
    from realhf.calls import Loss as Loss
    from realhf.calls import OptimizerConfig as OptimizerConfig
    from realhf.calls import SamplingConfig as SamplingConfig
    from realhf.calls import Scores as Scores
    from realhf.calls import TopLogProbs as TopLogProbs
    from realhf.calls import TrainFunction as TrainFunction
    from realhf.calls import TrainStep as TrainStep
    from realhf.calls import Values as Values
    from realhf.cluster import Cluster as Cluster
    from realhf.data.batch import Batch as Batch
    from realhf.data.batch import Packed as Packed
    from realhf.data.dataset import ArrayDataset as ArrayDataset
    from realhf.data.dataset import DatasetConfig as DatasetConfig
    from realhf.data.dataset import DatasetMixture as DatasetMixture
    from realhf.environments.adapters import GymnasiumText as GymnasiumText
    from realhf.environments.adapters import MessageEnvironment as MessageEnvironment
    from realhf.environments.adapters import OpenEnvironment as OpenEnvironment
    from realhf.environments.adapters import ReasoningGymTask as ReasoningGymTask
    from realhf.environments.adapters import SkyRLGym as SkyRLGym
    from realhf.environments.adapters import TextArena as TextArena
    from realhf.environments.adapters import TRLEnvironment as TRLEnvironment
    from realhf.environments.protocol import Environment as Environment
    from realhf.environments.protocol import Start as Start
    from realhf.environments.protocol import Turn as Turn
    from realhf.environments.tool_calls import python_tool as python_tool
    from realhf.errors import UserError as UserError
    from realhf.execution_plan import CallPlan as CallPlan
    from realhf.execution_plan import ExecutionPlan as ExecutionPlan
    from realhf.experiment import Evaluation as Evaluation
    from realhf.experiment import Expected as Expected
    from realhf.experiment import Experiment as Experiment
    from realhf.experiment import ModuleRole as ModuleRole
    from realhf.experiment import Role as Role
    from realhf.graph import DataflowGraph as DataflowGraph
    from realhf.graph import FunctionCall as FunctionCall
    from realhf.layout import DeviceMesh as DeviceMesh
    from realhf.layout import Layout as Layout
    from realhf.layout import ParallelStrategy as ParallelStrategy
    from realhf.models.lora import LoraConfig as LoraConfig
    from realhf.models.model_config import ModelConfig as ModelConfig
    from realhf.python import RunFailed as RunFailed
    from realhf.python import TrainingRun as TrainingRun
    from realhf.python import check as check
    from realhf.python import evaluate as evaluate
    from realhf.python import load as load
    from realhf.python import plan as plan
    from realhf.python import run as run
    from realhf.rewards.answers import ExactMatch as ExactMatch
    from realhf.rewards.answers import FormatReward as FormatReward
    from realhf.rewards.answers import RegexMatch as RegexMatch
    from realhf.rewards.limits import RewardLimits as RewardLimits
    from realhf.rewards.math_answer import MathAnswer as MathAnswer
    from realhf.rewards.puzzles import ReasoningGym as ReasoningGym
    from realhf.rewards.remote_judge import RemoteJudge as RemoteJudge
    from realhf.rewards.reward import Reward as Reward
    from realhf.rewards.sandbox import Sandbox as Sandbox
    from realhf.rewards.shaping import CosineReward as CosineReward
    from realhf.rewards.shaping import RepetitionPenalty as RepetitionPenalty
    from realhf.rewards.shaping import ScoreShaping as ScoreShaping
    from realhf.rewards.shaping import SoftOverlongPenalty as SoftOverlongPenalty
    from realhf.rewards.shaping import TokenReward as TokenReward
    from realhf.rewards.unit_tests import UnitTests as UnitTests
    from realhf.steps.hooks import EarlyStopping as EarlyStopping
    from realhf.steps.hooks import StepEvent as StepEvent
    from realhf.steps.rollout_log import RolloutLog as RolloutLog
    from realhf.steps.sample_pool import Pool as Pool
    from realhf.steps.sample_pool import Samples as Samples
    from realhf.steps.step_runner import StepRunner as StepRunner
    from realhf.user_input.files import prepare_once as prepare_once

_NAMES = {
    "realhf.algorithms.advantages": ("AdvantageConfig",),
    "realhf.algorithms.critic_free": (
        "CISPO", "DAPO", "GRPO", "GSPO", "RLOO", "SAPO", "CriticFree", "ReinforcePlusPlus", "ReMax"),
    "realhf.algorithms.distillation": ("Distillation",),
    "realhf.algorithms.kl": ("RewardKL",),
    "realhf.algorithms.on_policy": ("SEQUENCE", "OnPolicy", "graph_of"),
    "realhf.algorithms.pass_rates": ("PassRateLimit",),
    "realhf.algorithms.policy_loss": ("PolicyLoss", "PolicyLossConfig"),
    "realhf.algorithms.ppo": ("PPO", "ValueLoss"),
    "realhf.algorithms.preferences": (
        "DPO", "KTO", "ORPO", "BradleyTerry", "DPOLoss", "KTOLoss", "PairwiseRewardModel", "RewardModel",
        "SimPO", "num_pairs", "pair_indices", "split_pairs"),
    "realhf.algorithms.reward_models": ("GenerativeReward", "ModelReward", "ProcessReward"),
    "realhf.algorithms.scalerl": ("ScaleRL", "scalerl_actor"),
    "realhf.algorithms.sft": ("SFT",),
    "realhf.calls": (
        "ForwardFunction", "Generate", "HostFunction", "Interruption", "LogProbs", "Loss", "OptimizerConfig",
        "SamplingConfig", "Scores", "TopLogProbs", "TrainFunction", "TrainStep", "Values"),
    "realhf.cluster": ("Cluster",),
    "realhf.data.batch": ("Batch", "Packed"),
    "realhf.data.dataset": ("ArrayDataset", "DatasetConfig", "DatasetMixture"),
    "realhf.environments.adapters": (
        "GymnasiumText", "MessageEnvironment", "OpenEnvironment", "ReasoningGymTask", "SkyRLGym", "TextArena",
        "TRLEnvironment"),
    "realhf.environments.protocol": ("Environment", "Start", "Turn"),
    "realhf.environments.tool_calls": ("python_tool",),
    "realhf.errors": ("UserError",),
    "realhf.execution_plan": ("CallPlan", "ExecutionPlan"),
    "realhf.experiment": ("Evaluation", "Expected", "Experiment", "ModuleRole", "Role"),
    "realhf.graph": ("DataflowGraph", "FunctionCall"),
    "realhf.layout": ("DeviceMesh", "Layout", "ParallelStrategy"),
    "realhf.models.lora": ("LoraConfig",),
    "realhf.models.model_config": ("ModelConfig",),
    "realhf.python": ("RunFailed", "TrainingRun", "check", "evaluate", "load", "plan", "run"),
    "realhf.rewards.answers": ("ExactMatch", "FormatReward", "RegexMatch"),
    "realhf.rewards.limits": ("RewardLimits",),
    "realhf.rewards.math_answer": ("MathAnswer",),
    "realhf.rewards.puzzles": ("ReasoningGym",),
    "realhf.rewards.remote_judge": ("RemoteJudge",),
    "realhf.rewards.reward": ("Reward",),
    "realhf.rewards.sandbox": ("Sandbox",),
    "realhf.rewards.shaping": (
        "CosineReward", "RepetitionPenalty", "ScoreShaping", "SoftOverlongPenalty", "TokenReward"),
    "realhf.rewards.unit_tests": ("UnitTests",),
    "realhf.steps.hooks": ("EarlyStopping", "StepEvent"),
    "realhf.steps.rollout_log": ("RolloutLog",),
    "realhf.steps.sample_pool": ("Pool", "Samples"),
    "realhf.steps.step_runner": ("StepRunner",),
    "realhf.user_input.files": ("prepare_once",),
}
"""Module -> the public names that it defines: those of the imports above, for Python itself."""
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}
__all__ = sorted(_MODULE_OF)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that `import realhf` stays quick."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'realhf' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)
