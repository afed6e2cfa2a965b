"""GRPO with tools: the tiny model of examples/calculator_sft.py learns to calculate instead of guessing.

    realhf run examples/calculator.py
"""

from calculator_sft import write_task

from realhf import GRPO, DatasetConfig, Environment, OptimizerConfig, Role, SamplingConfig, prepare_once


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


def exact(completions: list[str], answer: list[str]) -> list[float]:
    """Return 1 for each response whose last turn is the answer."""
    turns = [text.rpartition("=")[2] for text in completions]
    return [float(last == right) for last, right in zip(turns, answer, strict=True)]


task = prepare_once("runs/calculator/task", write_task)
experiment = GRPO(
    actor=Role("runs/calculator_sft/hf/step_800", optimizer=OptimizerConfig(lr=1e-3)),
    dataset=DatasetConfig(str(task / "prompts.jsonl")),
    eval_dataset=DatasetConfig(str(task / "held_out.jsonl")),
    environment=Environment(tools=(add, multiply), max_turns=3, max_tokens=64),
    reward_function=exact,
    sampling=SamplingConfig(max_new_tokens=16),
    steps=40, batch_size=16, group_size=16, eval_every=10)
