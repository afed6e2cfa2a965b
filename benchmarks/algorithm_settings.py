"""The experiments of algorithms.py: every RL algorithm on the demo's task, from one supervised model.

The environment names the experiment (ALGORITHM) and the directory with data and model (TASK).
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from arithmetic import exact_answer

from realhf import (
    CISPO,
    DAPO,
    GRPO,
    GSPO,
    PPO,
    RLOO,
    DatasetConfig,
    Experiment,
    OptimizerConfig,
    PolicyLossConfig,
    ReinforcePlusPlus,
    ReMax,
    RewardKL,
    Role,
    SamplingConfig,
)

SAMPLES = 512  # Samples per step, of all algorithms.
GROUP = 8


def experiments(task: Path, start: Path) -> dict[str, Experiment]:
    """Return the experiments by name; `start` is the model that all of them train."""
    actor = Role(
        model=str(start),
        optimizer=OptimizerConfig(lr=4e-4, warmup_steps=20, betas=(0.9, 0.99), weight_decay=0.0))
    common: dict[str, Any] = {
        "actor": actor, "dataset": DatasetConfig(str(task / "prompts.jsonl")),
        "eval_dataset": DatasetConfig(str(task / "held_out.jsonl"), shuffle=False),
        "reward_function": exact_answer, "sampling": SamplingConfig(max_new_tokens=15), "steps": 60,
        "eval_every": 3, "checkpoint_every": 0, "minibatches": 2,
    }  # fmt: skip
    groups = common | {"batch_size": SAMPLES // GROUP, "group_size": GROUP}
    singles = common | {"batch_size": SAMPLES, "group_size": 1}
    critic = replace(actor, head="score")
    token = PolicyLossConfig(average="token")
    return {
        "GRPO": GRPO(**groups, loss=token),
        "Dr. GRPO": GRPO(**groups, normalize="none", loss=PolicyLossConfig(average="constant")),
        "PPO": PPO(**groups, critic=critic),
        "RLOO": RLOO(**groups, reward_kl=RewardKL(kl_coef=0.005)),
        "ReMax": ReMax(**singles, reward_kl=RewardKL(kl_coef=0.005)),
        "REINFORCE++": ReinforcePlusPlus(**singles, reward_kl=RewardKL(kl_coef=0.005)),
        "DAPO": DAPO(**groups),
        "GSPO": GSPO(**groups),
        "CISPO": CISPO(**groups, normalize="batch"),
    }  # fmt: skip


if "ALGORITHM" in os.environ:
    directory = Path(os.environ["TASK"])
    made = experiments(directory / "task", directory / "sft" / "hf" / "step_700")
    experiment = made[os.environ["ALGORITHM"]]
