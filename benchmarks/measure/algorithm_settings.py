"""The experiments of algorithms.py and scaling_laws.py, on the demo's task and from one supervised model.

The environment names the experiment (ALGORITHM) and the directory with data and models (TASK).
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from examples.arithmetic import exact_answer
from realhf import (
    CISPO,
    DAPO,
    GRPO,
    GSPO,
    PPO,
    RLOO,
    DatasetConfig,
    Distillation,
    Experiment,
    OptimizerConfig,
    PolicyLossConfig,
    ReinforcePlusPlus,
    ReMax,
    RewardKL,
    Role,
    SamplingConfig,
    ScaleRL,
    scalerl_actor,
)

SAMPLES = 512  # Samples per step, of all algorithms.
GROUP = 8


def experiments(directory: Path) -> dict[str, Experiment]:
    """Return the experiments by name; the directory has `task`, `sft` and, for distillation, `GRPO`."""
    task = directory / "task"
    start = str(directory / "sft" / "hf" / "step_700")
    optimizer = OptimizerConfig(lr=4e-4, warmup_steps=20, betas=(0.9, 0.99), weight_decay=0.0)
    actor = Role(model=start, optimizer=optimizer)
    common: dict[str, Any] = {
        "actor": actor, "dataset": DatasetConfig(str(task / "prompts.jsonl")),
        "eval_dataset": DatasetConfig(str(task / "held_out.jsonl"), shuffle=False),
        "reward_function": exact_answer, "sampling": SamplingConfig(max_new_tokens=15), "steps": 60,
        "eval_every": 3, "checkpoint_every": 0, "minibatches": 2,
    }
    groups = common | {"batch_size": SAMPLES // GROUP, "group_size": GROUP}
    singles = common | {"batch_size": SAMPLES, "group_size": 1}
    critic = replace(actor, head="score")
    token = PolicyLossConfig(average="token")
    # With lag a lower learning rate is needed (see lag_scores.py).
    lagged = scalerl_actor(start, dtype="float32", optimizer=replace(optimizer, lr=1.5e-4))
    taught = {key: value for key, value in groups.items() if key != "reward_function"}
    teacher = Role(model=str(directory / "GRPO" / "hf" / "step_60"))
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
        "ScaleRL": ScaleRL(**groups | {"actor": lagged}),
        "Distillation": Distillation(
            **taught, eval_function=exact_answer, teachers=(teacher,), variant="sampled"),
    }


if "ALGORITHM" in os.environ:
    experiment = experiments(Path(os.environ["TASK"]))[os.environ["ALGORITHM"]]
