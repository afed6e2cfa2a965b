"""ScaleRL ("The Art of Scaling Reinforcement Learning Compute for LLMs", 2025, arXiv:2510.13786).

The recipe: generation runs up to 8 updates ahead, and its cache outlives the weights (PipelineRL); CISPO's
loss, averaged over prompts; advantages r_i - mean of the group, divided by the deviation of the batch; logits
in float32; prompts whose samples all have the same score do not count; prompts that the model answers well
are dropped for good (see pass_rates.py); over-long thinking is interrupted by a phrase. docs/scaling.md says
how each part is done.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from realhf.algorithms.advantages import Normalize
from realhf.algorithms.critic_free import CISPO
from realhf.algorithms.pass_rates import COUNT, WANTED, PassRateLimit
from realhf.calls import OptimizerConfig
from realhf.data.dataset import DATASET_ROW
from realhf.experiment import Role, lagged_parts
from realhf.graph import DataflowGraph
from realhf.steps.sample_pool import Samples
from realhf.steps.step_runner import StepRunner
from realhf.user_input.field_types import require


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
    max_draws: int = 64
    """Most times that a step draws prompts from the dataset in the place of dropped ones."""

    def graph(self) -> DataflowGraph:
        require(self.max_draws >= 1, "max_draws", self.max_draws, "be at least 1")
        graph = super().graph()
        if self.pass_rate_limit is None:
            return graph
        *before, train = graph.calls
        return DataflowGraph((*before, *self.pass_rate_limit.calls(), train), (*graph.inputs, DATASET_ROW))

    def parts(self, graph: DataflowGraph) -> dict[str, tuple[str, ...]]:
        """Return the parts `select`, `rollout`, `score` and `train`.

        Passes are counted in the last one, so that no rank waits for scores before it generates.
        """
        parts = lagged_parts(graph)
        train = {"advantages", COUNT, *parts["train"]}
        names = [call.name for call in graph.order]
        cut = {
            "select": tuple(name for name in names if name == WANTED),
            "rollout": parts["rollout"],
            "score": tuple(name for name in parts["score"] if name not in train and name != WANTED),
            "train": tuple(name for name in names if name in train)}
        return {part: calls for part, calls in cut.items() if calls}

    def step(self, run: StepRunner) -> None:
        """Begin the next wanted prompts, and train on those whose answers are complete."""
        begun = self._next_prompts(run)
        generated = run.pool("generated")
        if self.overlaps:
            due = generated.take(self.batch_size) if len(generated) else None
            run("score", due)
            run.send("train", due)  # So that training does not wait for the next round of generation.
            generated.add(run("rollout", begun))
        else:
            due = run("rollout", begun)
            run("score", due)
        run("train", due)
        if self.pass_rate_limit is not None and due is not None:
            self.pass_rate_limit.count(run)

    def _next_prompts(self, run: StepRunner) -> Samples | None:
        if self.pass_rate_limit is None:
            return run.prompts(self.batch_size)
        return self.pass_rate_limit.take_wanted(
            run, self.batch_size, part="select", max_draws=self.max_draws)
