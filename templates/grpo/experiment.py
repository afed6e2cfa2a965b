"""GRPO: the model answers prompts, and learns from the rewards of its answers (reward.py)."""

from pathlib import Path

from reward import right_answer

from realhf import GRPO, DatasetConfig, OptimizerConfig, Role, SamplingConfig

HERE = Path(__file__).parent
MODEL = None  # A Hugging Face model; None: the tiny one in model/, with random weights.
DATA = HERE / "train.jsonl"  # Rows with a prompt, and an answer that the reward function reads.
HELD_OUT = HERE / "held_out.jsonl"  # Rows to answer greedily before, during and after the training; or None.

experiment = GRPO(
    actor=Role(
        model=str(MODEL or HERE / "model"),
        random_init=MODEL is None,
        optimizer=OptimizerConfig(lr=None if MODEL else 3e-3),  # None: the usual rate, see `realhf check`.
    ),
    dataset=DatasetConfig(str(DATA)),
    eval_dataset=None if HELD_OUT is None else DatasetConfig(str(HELD_OUT), shuffle=False),
    reward_function=right_answer,
    sampling=SamplingConfig(max_new_tokens=256 if MODEL else 4),
    steps=100,
    batch_size=32,  # Prompts per step.
    group_size=8,  # Answers to each prompt.
    eval_every=0 if HELD_OUT is None else 20,
    log_every=10,
)
