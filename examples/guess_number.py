"""GRPO with an environment: a tiny model, drawn at random, learns to guess a number from hints.

    realhf run examples/guess_number.py
"""

import random
from pathlib import Path

from tiny_chat import write_model, write_rows

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

LARGEST = 6


class GuessNumber:
    """A number from 1 to LARGEST, which the model must guess. A wrong guess gets `+` or `-` as a hint."""

    def start(self, row: dict, seed: int) -> Start:
        self.number = random.Random(seed).randint(1, LARGEST)
        return Start("?")

    def step(self, message: dict) -> Turn:
        guess = message["content"]
        if guess == str(self.number):
            return Turn(reward=1.0, done=True)
        if not guess.isdigit() or int(guess) > LARGEST:
            return Turn("!", reward=-0.1)
        return Turn("+" if int(guess) < self.number else "-")


def write_task(directory: Path) -> None:
    """Write the model, whose tokens are characters, and rows."""
    write_model(directory / "model", "?+-!123456")
    rows = [{"prompt": "?", "row": i} for i in range(320)]  # The seed of each draws the number.
    write_rows(directory / "held_out.jsonl", rows[:64])
    write_rows(directory / "prompts.jsonl", rows[64:])


task = prepare_once("runs/guess_number/task", write_task)
experiment = GRPO(
    actor=Role(str(task / "model"), random_init=True, optimizer=OptimizerConfig(lr=3e-3)),
    dataset=DatasetConfig(str(task / "prompts.jsonl")),
    eval_dataset=DatasetConfig(str(task / "held_out.jsonl")),
    environment=Environment(GuessNumber, max_turns=3, max_tokens=40),
    sampling=SamplingConfig(max_new_tokens=3),
    loss=PolicyLossConfig(entropy_coef=0.06),
    steps=100, batch_size=16, group_size=16, eval_every=25)
