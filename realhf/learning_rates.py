"""Learning rates: their schedule, and the defaults by what a role learns, for full training and adapters.

Adapters (LoRA) get ten times the rate of full training (Schulman et al. 2025, "LoRA Without Regret").
"""

import math
from typing import NamedTuple

from realhf.calls import Loss, OptimizerConfig


class LearningRates(NamedTuple):
    """The default learning rates of one kind of training, and where they are usual."""

    full: float
    lora: float
    source: str


LEARNING_RATES = {
    "policy": LearningRates(1e-6, 1e-5, "TRL's GRPO, RLOO and distillation, verl's actor"),
    "critic": LearningRates(1e-5, 1e-4, "verl's critic"),
    "completions": LearningRates(2e-5, 2e-4, "TRL's SFT"),
    "preferences": LearningRates(1e-6, 1e-5, "TRL's DPO"),
    "scores": LearningRates(1e-5, 1e-4, "InstructGPT's reward model (9e-6); TRL's has 1e-4"),
}
"""Kind of training, which a loss names as `learns` -> learning rates."""


def default_rates(loss: Loss | None) -> LearningRates:
    """Return the default learning rates for a loss; those of a policy for a model that no loss trains."""
    return LEARNING_RATES["policy" if loss is None else loss.learns]


def learning_rate(config: OptimizerConfig, step: int) -> float:
    """Return the learning rate of optimizer step `step`, counted from 0; `config` must give `lr`."""
    assert config.lr is not None
    if config.schedule != "constant":
        assert config.total_steps > 0
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    progress = min(1.0, (step - config.warmup_steps) / max(1, config.total_steps - config.warmup_steps))
    remaining = 1 - progress if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * remaining)
