"""SFT: the model learns to write the completions of a dataset."""

from pathlib import Path

from reward import right_answer

from realhf import SFT, DatasetConfig, OptimizerConfig, Role, SamplingConfig

HERE = Path(__file__).parent
MODEL = None  # A Hugging Face model; None: the tiny one in model/, with random weights.
DATA = HERE / "train.jsonl"  # Rows with a prompt and a completion.
HELD_OUT = HERE / "held_out.jsonl"  # Rows whose loss is computed, and whose prompts are answered; or None.

experiment = SFT(
    actor=Role(
        model=str(MODEL or HERE / "model"),
        random_init=MODEL is None,
        optimizer=OptimizerConfig(  # lr=None: the usual rate, see `realhf check`.
            lr=None if MODEL else 3e-3, schedule="cosine", warmup_ratio=0.05
        ),
    ),
    dataset=DatasetConfig(str(DATA)),
    eval_dataset=None if HELD_OUT is None else DatasetConfig(str(HELD_OUT), shuffle=False),
    reward_function=right_answer,  # Scores greedy answers to the held-out prompts.
    sampling=SamplingConfig(max_new_tokens=256 if MODEL else 4),
    steps=200,
    batch_size=32,
    eval_every=0 if HELD_OUT is None else 50,
    log_every=20,
)
