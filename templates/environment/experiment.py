"""GRPO with an environment: the model plays games of several turns, and learns from their rewards."""

from pathlib import Path

from environment import FindCoin

from realhf import GRPO, DatasetConfig, Environment, OptimizerConfig, PolicyLossConfig, Role, SamplingConfig

HERE = Path(__file__).parent
MODEL = None  # A Hugging Face model with a chat template; None: the tiny one in model/, with random weights.
DATA = HERE / "train.jsonl"  # Rows, each of which the environment's `start` gets.
HELD_OUT = HERE / "held_out.jsonl"  # Rows to play greedily before, during and after the training; or None.

experiment = GRPO(
    actor=Role(
        model=str(MODEL or HERE / "model"),
        random_init=MODEL is None,
        optimizer=OptimizerConfig(lr=None if MODEL else 3e-3),  # None: the usual rate, see `realhf check`.
    ),
    dataset=DatasetConfig(str(DATA)),
    eval_dataset=None if HELD_OUT is None else DatasetConfig(str(HELD_OUT), shuffle=False),
    environment=Environment(
        FindCoin,
        max_turns=3,  # Messages of the model in a game.
        max_tokens=1024 if MODEL else 64,  # Of a game after its start, those of the environment included.
    ),
    sampling=SamplingConfig(max_new_tokens=256 if MODEL else 1),  # Of each turn.
    loss=PolicyLossConfig(entropy_coef=0.0 if MODEL else 0.03),  # A random model must try many words.
    steps=60,
    batch_size=16,  # Rows per step.
    group_size=16,  # Games of each row, which start alike.
    eval_every=0 if HELD_OUT is None else 20,
    log_every=10,
)
