"""Default learning rates by what a role learns, for full training and for adapters (LoRA).

Adapters get ten times the rate of full training (Schulman et al. 2025, "LoRA Without Regret").
"""

from typing import NamedTuple


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
"""Kind of training, which a loss names in its field `learns` -> learning rates."""


def default_rates(loss: object) -> LearningRates:
    """Return the default learning rates for a loss: those of a policy unless it says what it `learns`."""
    return LEARNING_RATES[getattr(loss, "learns", "policy")]
