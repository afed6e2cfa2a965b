"""The task of environments.py on credit: six questions in a row, and a reward for each right answer.

The environment variable TASK names a directory for the model and the rows.
"""

import os
import random
from pathlib import Path

from examples.tiny_chat import write_model, write_rows
from realhf import (
    GRPO,
    DatasetConfig,
    Environment,
    OptimizerConfig,
    PolicyLossConfig,
    Role,
    SamplingConfig,
    Start,
    Turn,
    prepare_once,
)

NUM_TURNS = 6
LETTERS = "abcdefgh"


class Questions:
    """Letters, one in each turn, which must be answered with their numbers in the alphabet."""

    def start(self, row: dict, seed: int) -> Start:
        rng = random.Random(seed)
        self.letters = [rng.choice(LETTERS) for _ in range(NUM_TURNS)]
        return Start(self.letters[-1])

    def step(self, message: dict) -> Turn:
        right = str(LETTERS.index(self.letters.pop()) + 1)
        reward = float(message["content"] == right)
        return Turn(self.letters[-1], reward) if self.letters else Turn(reward=reward, done=True)


def write_task(directory: Path) -> None:
    """Write the model and rows, of which each begins another rollout."""
    write_model(directory / "model", f"{LETTERS}12345678")
    rows = [{"prompt": "a", "row": i} for i in range(320)]
    write_rows(directory / "prompts.jsonl", rows[:256])
    write_rows(directory / "held_out.jsonl", rows[256:])


if "TASK" in os.environ:
    task = prepare_once(os.environ["TASK"], write_task)
    experiment = GRPO(
        actor=Role(str(task / "model"), random_init=True, optimizer=OptimizerConfig(lr=3e-3)),
        dataset=DatasetConfig(str(task / "prompts.jsonl")),
        eval_dataset=DatasetConfig(str(task / "held_out.jsonl")),
        environment=Environment(Questions, max_turns=NUM_TURNS, max_tokens=48),
        sampling=SamplingConfig(max_new_tokens=2),
        loss=PolicyLossConfig(entropy_coef=0.01),
        baseline="leave_one_out", normalize="none",
        steps=40, batch_size=8, group_size=8, eval_every=10)
