"""ScaleRL ("The Art of Scaling Reinforcement Learning Compute for LLMs", 2025, arXiv:2510.13786).

The recipe: generation runs up to 8 updates ahead, and its cache outlives the weights (PipelineRL); CISPO's
loss, averaged over prompts; advantages r_i - mean of the group, divided by the deviation of the batch; logits
in float32; prompts whose samples all have the same score do not count; prompts that the model answers well
are dropped for good; over-long thinking is interrupted by a phrase. docs/scaling.md says how each part is
done.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from realhf.algorithms.advantages import Normalize
from realhf.algorithms.critic_free import CISPO
from realhf.algorithms.pass_rates import PassRateLimit, lagged_parts_by_rates
from realhf.calls import OptimizerConfig
from realhf.experiment import Role
from realhf.graph import DataflowGraph
from realhf.steps.step_runner import StepRunner


def scalerl_actor(model: str = "", **changes: Any) -> Role:
    """Return the role of the recipe's actor, with changes of its fields."""
    optimizer = OptimizerConfig(lr=5e-7, eps=1e-15, weight_decay=0.01, warmup_steps=100)
    role = Role(model, dtype="bfloat16", float32_head=True, optimizer=optimizer)
    return replace(role, **changes)


@dataclass
class ScaleRL(CISPO):
    """The ScaleRL recipe with its published settings; `scalerl_actor` has those of the actor.

    `interruption` is None by default, because the phrase and its place depend on the model.
    """

    actor: Role = field(default_factory=scalerl_actor)
    batch_size: int = 48
    group_size: int = 16
    max_lag: int = 8
    cache_on_update: Literal["recompute", "keep"] = "keep"
    checkpoint_every: int | str = 50
    """Steps between checkpoints; minutes are not legal with kept caches, which a checkpoint drops."""
    normalize: Normalize = "batch"
    filter_groups: bool = True
    pass_rate_limit: PassRateLimit | None = field(default_factory=PassRateLimit)
    """Which prompts are dropped for good, because the model answers them well; None: none are."""

    def parts(self, graph: DataflowGraph) -> dict[str, tuple[str, ...]]:
        return lagged_parts_by_rates(graph)

    def step(self, run: StepRunner) -> None:
        self.lagged_step(run)
