"""Evaluate: an experiment that only evaluates, for `realhf eval`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from realhf.algorithms.held_out import scored_answers
from realhf.algorithms.on_policy import graph_of
from realhf.calls import SamplingConfig
from realhf.experiment import Experiment, Role
from realhf.graph import DataflowGraph
from realhf.rewards.limits import RewardLimits


@dataclass
class Evaluate(Experiment):
    """Lets the frozen `actor` answer the prompts of `eval_dataset`, and scores the answers."""

    actor: Role = field(default_factory=lambda: Role(model=""))
    reward_function: Any = None
    reward_limits: RewardLimits = field(default_factory=RewardLimits)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)

    def roles(self) -> dict[str, Role]:
        return {"actor": self.actor}

    def graph(self) -> DataflowGraph:
        return self.eval_graph()

    def eval_graph(self) -> DataflowGraph:
        calls = scored_answers(
            self.reward_function, self.sampling, self.evaluation, tokenizer=self.tokenizer_dir(),
            limits=self.reward_limits)
        return graph_of(*calls)
