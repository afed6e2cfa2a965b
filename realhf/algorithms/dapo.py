"""DAPO (Yu et al. 2025, arXiv:2503.14476): dynamic sampling, a higher upper clip, a soft penalty on length.

Prompts are sampled until the batch is full of groups whose answers differ in score, as the others teach
nothing. The average is that of equation 8: over the tokens of a prompt's group, then over prompts.
The authors' own code averages over all tokens of the batch (`loss.average="token"`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import networkx as nx

from realhf.algorithms.critic_free import CriticFree
from realhf.algorithms.policy_loss import PolicyLossConfig
from realhf.graph import DataflowGraph
from realhf.rewards.shaping import ScoreShaping, SoftOverlongPenalty
from realhf.steps.step_runner import StepRunner
from realhf.user_input.field_types import require


@dataclass
class DAPO(CriticFree):
    """GRPO whose batches have informative groups only, as far as `max_rounds` of sampling find them."""

    filter_groups: bool = True
    loss: PolicyLossConfig = field(
        default_factory=lambda: PolicyLossConfig(clip_low=0.2, clip_high=0.28, average="prompt"))
    max_rounds: int = 4  # Most batches of prompts that a step samples.
    overlong_buffer: int = 0
    """Tokens before sampling.max_new_tokens over which answers lose up to 1 of their score; 0: none."""

    def shaping(self) -> ScoreShaping | None:
        if not self.overlong_buffer:
            return self.score_shaping
        legal = 0 < self.overlong_buffer <= self.sampling.max_new_tokens
        rule = f"be from 0 to sampling.max_new_tokens, {self.sampling.max_new_tokens}"
        require(legal, "overlong_buffer", self.overlong_buffer, rule)
        legal = self.score_shaping is None
        require(legal, "overlong_buffer", self.overlong_buffer, "be 0 if score_shaping is given")
        return SoftOverlongPenalty(self.sampling.max_new_tokens, self.overlong_buffer)

    def graph(self) -> DataflowGraph:
        require(self.max_rounds >= 1, "max_rounds", self.max_rounds, "be at least 1")
        rule = "be true for DAPO, whose sampling goes on until the batch is full of groups that differ"
        require(self.filter_groups, "filter_groups", self.filter_groups, rule)
        rule = "be 0 for DAPO, which samples until its batch is full and then trains on it"
        require(self.max_lag == 0, "max_lag", self.max_lag, rule)
        return super().graph()

    def parts(self, graph: DataflowGraph) -> dict[str, tuple[str, ...]]:
        sample = nx.ancestors(graph.nx_graph, "advantages") | {"advantages"}
        names = [call.name for call in graph.order]
        return {
            "sample": tuple(name for name in names if name in sample),
            "train": tuple(name for name in names if name not in sample),
        }

    def step(self, run: StepRunner) -> None:
        informative = run.pool("informative")
        informative.drop(max_age=0)  # What the last step has left over would be off-policy.
        for _ in range(self.max_rounds):
            if len(informative) >= self.batch_size:
                break
            samples = run.prompts(self.batch_size)
            run("sample", samples)
            informative.add(samples, where="advantages")
        run("train", informative.take(self.batch_size))
