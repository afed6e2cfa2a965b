"""GRPO in gymnasium's FrozenLake: a tiny model, drawn at random, learns to cross lakes that it sees as text.

    realhf run examples/frozen_lake.py
"""

import random
from functools import partial
from pathlib import Path

from tiny_chat import write_model, write_rows

from realhf import (
    GRPO,
    DatasetConfig,
    Environment,
    GymnasiumText,
    OptimizerConfig,
    PolicyLossConfig,
    Role,
    SamplingConfig,
    prepare_once,
)

ACTIONS = ("left", "down", "right", "up")


def write_task(directory: Path) -> None:
    """Write the model, and maps of 3 x 3 fields, of which the held-out ones are in no training row."""
    from gymnasium.envs.toy_text.frozen_lake import generate_random_map

    words = (*ACTIONS, *(f"({action.title()})" for action in ACTIONS))
    write_model(directory / "model", "? \n[]SFHG", words=words)
    maps = sorted({tuple(generate_random_map(size=3, p=0.7, seed=seed)) for seed in range(1000)})
    random.Random(0).shuffle(maps)
    rows = [{"prompt": "?", "desc": field} for field in maps]
    write_rows(directory / "prompts.jsonl", rows[12:])
    write_rows(directory / "held_out.jsonl", rows[:12])


task = prepare_once("runs/frozen_lake/task", write_task)
# A row's column `desc` is the map. F is frozen, H a hole, G the goal, and the model stands at [].
lake = partial(
    GymnasiumText, "FrozenLake-v1", prompt="?", actions=ACTIONS, columns=("desc",), is_slippery=False,
    invalid_reply="?", invalid_reward=-0.1)
experiment = GRPO(
    actor=Role(str(task / "model"), random_init=True, optimizer=OptimizerConfig(lr=3e-3)),
    dataset=DatasetConfig(str(task / "prompts.jsonl")),
    eval_dataset=DatasetConfig(str(task / "held_out.jsonl")),
    environment=Environment(lake, max_turns=8, max_tokens=200),
    sampling=SamplingConfig(max_new_tokens=2),
    loss=PolicyLossConfig(entropy_coef=0.005),
    steps=100, batch_size=8, group_size=24, eval_every=20)
