"""CriticFree: the base of algorithms that compare scores with a baseline instead of learning values."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from realhf.algorithms.advantages import (
    AdvantageInputs,
    Baseline,
    Deviation,
    Normalize,
    SampleAdvantages,
    compares_groups,
)
from realhf.algorithms.kl import RewardKL
from realhf.algorithms.on_policy import OnPolicy, graph_of
from realhf.calls import HostFunction
from realhf.experiment import Role
from realhf.graph import DataflowGraph, FunctionCall
from realhf.user_input.field_types import require

if TYPE_CHECKING:
    from realhf.data.batch import Batch

_GREEDY = ("greedy_ids", "greedy_mask", "greedy_logprobs", "greedy_finished")
"""Keys of greedy answers."""


@dataclass
class CriticFree(OnPolicy):
    """Trains `actor` with advantages of whole responses. Its subclasses are other defaults of its fields.

    There is a reference model if `loss.kl_coef` or `reward_kl.kl_coef` is above 0.
    """

    group_size: int = 8  # Samples per prompt.
    baseline: Baseline = "group_mean"
    """What a score is compared with: the mean of the prompt's samples (`group_mean`), the mean of its other
    samples (`leave_one_out`), the score of the greedy answer (`greedy`), or nothing (`none`)."""
    normalize: Normalize = "group"
    """What the difference is divided by: the standard deviation of the prompt's scores (`group`), that of all
    differences, whose mean is subtracted, too (`batch`: each sample counts once; `tokens`: each response
    token does), or nothing (`none`)."""
    deviation: Deviation = "population"
    """Whether variances are divided by the number of samples, or by one less (`sample`, as in TRL)."""
    reward_kl: RewardKL = field(default_factory=RewardKL)
    """The KL to the reference as a penalty in the reward, and not in the loss (`loss.kl_coef`)."""
    kl_to_go: bool = False
    """Whether a token pays for the KL from itself on, and not for that of the whole response. Then
    `normalize` divides the scores only, unless it is `tokens`."""
    filter_groups: bool = False
    """Whether prompts whose samples all have the same score are left out: their advantages are 0."""

    def roles(self) -> dict[str, Role]:
        return self.shared_roles(with_ref=self._needs_ref)

    @property
    def _needs_ref(self) -> bool:
        return self.loss.kl_coef > 0 or self.reward_kl.kl_coef > 0

    def graph(self) -> DataflowGraph:
        filters = self.filter_groups and self.baseline != "greedy"
        if self.group_size < 2 and (filters or compares_groups(self.baseline, self.normalize)):
            raise ValueError(
                f"group_size is {self.group_size}: it must be at least 2, "
                f"as {type(self).__name__} compares the samples of a prompt")
        before = (
            self.actor_generate(),
            *(self._greedy_calls() if self.baseline == "greedy" else ()),
            self.reward_forward(),
            *self.token_rewards_call(),
            *([self.ref_forward()] if self._needs_ref else []),
            *self.actor_forward())
        return self.with_checked_ages(graph_of(*before, self._advantages_call(), self.actor_train()))

    def _advantages_call(self) -> FunctionCall:
        inputs = AdvantageInputs(
            self.shaping(), bool(self.token_rewards), self.age_limit(), self.reward_logs(),
            self.reward_limits)
        by_prompt = self.loss.average == "prompt"
        function = SampleAdvantages(
            self.group_size, self.baseline, self.normalize, self.deviation, inputs, self.reward_kl,
            kl_to_go=self.kl_to_go, filters=self.filter_groups, counts_prompt_tokens=by_prompt)
        greedy = ("greedy_score", "greedy_mask", "greedy_finished") if self.baseline == "greedy" else ()
        keys = ("score", "response_mask", "finished", *self.reward_kl.keys, *greedy, *inputs.keys)
        outputs = ("advantages", "prompt_tokens") if by_prompt else ("advantages",)
        work = HostFunction(function, filters=self.filter_groups)
        return FunctionCall("advantages", "host", keys, outputs, work=work)

    def _greedy_calls(self) -> tuple[FunctionCall, FunctionCall]:
        """Return the calls that answer the prompts greedily and score these answers."""
        rule = "be 1, as a prompt has one greedy answer"
        require(self.group_size == 1, "group_size", self.group_size, rule)
        rule = "be false with a greedy baseline, which compares no groups"
        require(not self.filter_groups, "filter_groups", self.filter_groups, rule)
        require(self.num_rounds == 1, "rounds", self.num_rounds, "be 1 with a greedy baseline")
        generate = self.actor_generate()
        work = replace(generate.work, sampling=self.greedy_sampling)
        generate = replace(generate, name="greedy_generate", outputs=_GREEDY, work=work)
        reward = self.reward_forward()
        if reward.kind == "forward":
            inputs: tuple[str, ...] = _GREEDY[:1]
        else:
            read_greedy = replace(reward.work, function=GreedyScores(reward.work.function))
            columns = [key for key in reward.inputs if key not in ("sequence_ids", "response_mask")]
            reward = replace(reward, work=read_greedy)
            inputs = (*columns, *_GREEDY[:2])
        return generate, replace(reward, name="greedy_reward", inputs=inputs, outputs=("greedy_score",))


@dataclass(frozen=True)
class GreedyScores:
    """Calls a reward's host function on greedy answers, which have other keys."""

    reward: Any

    def __call__(self, batch: Batch, context: Any) -> dict[str, Any]:
        answers = {"sequence_ids": batch["greedy_ids"], "response_mask": batch["greedy_mask"]}
        columns = self.reward(replace(batch, fields=batch.fields | answers), context)
        return {"greedy_score": columns["score"]}
