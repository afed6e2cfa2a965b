"""DPO: the model learns to prefer the chosen completions of a dataset to the rejected ones."""

from pathlib import Path

from reward import right_answer

from realhf import DPO, DatasetConfig, OptimizerConfig, Role, SamplingConfig

HERE = Path(__file__).parent
MODEL = None  # A Hugging Face model; None: the tiny one in model/, with random weights.
DATA = HERE / "train.jsonl"  # Rows with a prompt, a chosen and a rejected completion.
HELD_OUT = HERE / "held_out.jsonl"  # Rows whose loss is computed, and whose prompts are answered; or None.

experiment = DPO(
    actor=Role(
        model=str(MODEL or HERE / "model"),
        random_init=MODEL is None,
        optimizer=OptimizerConfig(lr=None if MODEL else 1e-3),  # None: the usual rate, see `realhf check`.
    ),
    dataset=DatasetConfig(str(DATA)),
    eval_dataset=None if HELD_OUT is None else DatasetConfig(str(HELD_OUT), shuffle=False),
    reward_function=right_answer,  # Scores greedy answers to the held-out prompts.
    sampling=SamplingConfig(max_new_tokens=256 if MODEL else 4),
    steps=100,
    batch_size=32,  # Pairs per step.
    eval_every=0 if HELD_OUT is None else 20,
    log_every=10,
)
