"""Algorithms that compare scores with a baseline instead of learning values: CriticFree, and GRPO to DAPO."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import networkx as nx

from realhf.algorithms.advantages import (
    Baseline,
    Deviation,
    Normalize,
    SampleAdvantages,
    columns_read,
    compares_groups,
)
from realhf.algorithms.kl import RewardKL
from realhf.algorithms.on_policy import OnPolicy, graph_of
from realhf.algorithms.pass_rates import COUNT, WANTED
from realhf.algorithms.policy_loss import PolicyLossConfig
from realhf.calls import HostFunction
from realhf.environments.protocol import Environment
from realhf.experiment import Role
from realhf.graph import DataflowGraph, FunctionCall
from realhf.rewards.reward import column_key
from realhf.rewards.shaping import ScoreShaping, SoftOverlongPenalty, name_of
from realhf.steps.step_runner import StepRunner
from realhf.user_input.field_types import require, unused

if TYPE_CHECKING:
    from realhf.data.batch import Batch


_GREEDY = ("greedy_ids", "greedy_mask", "greedy_logprobs", "greedy_finished")
"""Keys of greedy responses."""


@dataclass
class CriticFree(OnPolicy):
    """Trains `actor` with advantages of whole responses. Its subclasses are other defaults of its fields.

    There is a reference model if `loss.kl_coef` or `reward_kl.kl_coef` is above 0.
    """

    group_size: int = 8  # Samples per prompt.
    baseline: Baseline = "group_mean"
    """What a score is compared with: the mean of the prompt's samples (`group_mean`), the mean of its other
    samples (`leave_one_out`), the score of the greedy response (`greedy`), or nothing (`none`)."""
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
    credits_turns: ClassVar[bool] = True
    advantages: Callable[..., Any] | None = None
    """A function f(scores, groups) of one's own in the place of `baseline` and `normalize`. Scores have the
    shape (prompts, samples), after shaping and the KL; it returns advantages of this shape, NaN for samples
    to leave out. Further parameters are columns of the dataset (docs/algorithms.md)."""
    filter_groups: bool = False
    """Whether prompts whose samples all have the same score are left out: their advantages are 0."""

    def roles(self) -> dict[str, Role]:
        return self.shared_roles(with_ref=self._needs_ref)

    @property
    def kl_in_reward(self) -> RewardKL:
        return self.reward_kl

    @property
    def _needs_ref(self) -> bool:
        return self.loss.needs_ref or self.reward_kl.kl_coef > 0

    def graph(self) -> DataflowGraph:
        filters = self.filter_groups and self.baseline != "greedy"
        compares = self.advantages is None and compares_groups(self.baseline, self.normalize)
        if self.group_size < 2 and (filters or compares):
            raise ValueError(
                f"group_size is {self.group_size}: it must be at least 2, "
                f"as {type(self).__name__} compares the samples of a prompt")
        before = (
            self.actor_generate(),
            *(self._greedy_calls() if self.baseline == "greedy" else ()),
            *self.reward_calls(),
            *self.token_rewards_call(),
            *([self.ref_forward()] if self._needs_ref else []),
            *self.actor_forward())
        graph = graph_of(*before, self._advantages_call(), self.actor_train())
        return self.with_checked_ages(self.with_pass_rates(graph))

    def doubts(self) -> Iterator[str]:
        yield from super().doubts()
        builtin = (self.advantages is None, "advantages is given, which takes its place")
        yield from unused(
            self, "", baseline=builtin, normalize=builtin,
            deviation=(self.normalize != "none", "normalize is none") if builtin[0] else builtin,
            kl_to_go=(self.reward_kl.kl_coef > 0, "reward_kl.kl_coef is 0"))

    def _advantages_call(self) -> FunctionCall:
        inputs = replace(self.advantage_inputs(), turn_credit=self._turn_credit())
        by_prompt = self.loss.average == "prompt"
        function = SampleAdvantages(
            self.group_size, self.baseline, self.normalize, self.deviation, inputs, self.reward_kl,
            kl_to_go=self.kl_to_go, filters=self.filter_groups, counts_prompt_tokens=by_prompt)
        columns: tuple[str, ...] = ()
        if self.advantages is not None:
            columns = columns_read(self.advantages)
            require(
                inputs.turn_credit is None and self.baseline != "greedy", "advantages",
                name_of(self.advantages),
                "be None with turns that have credit of their own, or with a greedy baseline")
            function = replace(
                function, baseline="none", normalize="none", function=self.advantages, columns=columns)
        greedy = ("greedy_score", "greedy_mask", "greedy_finished") if self.baseline == "greedy" else ()
        keys = ("score", "response_mask", "finished", *self.reward_kl.keys, *greedy, *inputs.keys,
                *map(column_key, columns))
        outputs = ("advantages", "prompt_tokens") if by_prompt else ("advantages",)
        work = HostFunction(function, filters=self.filter_groups)
        return FunctionCall("advantages", inputs=keys, outputs=outputs, work=work)

    def _turn_credit(self) -> Environment | None:
        """Return the environment if its turns get credit of their own."""
        environment = self.used_environment()
        if environment is None or environment.credit == "trajectory":
            return None
        require(
            self.baseline == "leave_one_out", "baseline", self.baseline,
            f"be leave_one_out with environment.credit {environment.credit!r}, as a turn is compared with "
            "the other samples alone")
        require(
            self.normalize in ("none", "group"), "normalize", self.normalize,
            f"be none or group with environment.credit {environment.credit!r}")
        return environment

    def _greedy_calls(self) -> tuple[FunctionCall, FunctionCall]:
        """Return the calls that answer the prompts greedily and score the responses."""
        require(
            self.used_environment() is None, "baseline", self.baseline,
            "not be greedy: with an environment, a greedy rollout would need one of its own")
        require(
            self.group_size == 1, "group_size", self.group_size, "be 1, as a prompt has one greedy response")
        require(
            not self.filter_groups, "filter_groups", self.filter_groups,
            "be false with a greedy baseline, which compares no groups")
        require(self.num_rounds == 1, "rounds", self.num_rounds, "be 1 with a greedy baseline")
        require(
            not self.reward_models, "reward_models", ", ".join(model.name for model in self.reward_models),
            "be empty with a greedy baseline, whose responses functions or one reward role score")
        generate = self.actor_generate()
        generate = replace(generate, name="greedy_generate", outputs=_GREEDY)
        generate = generate.with_work(sampling=self.greedy_sampling)
        reward = self.reward_forward()
        if reward.kind == "forward":
            inputs: tuple[str, ...] = _GREEDY[:1]
        else:
            columns = [key for key in reward.inputs if key not in ("sequence_ids", "response_mask")]
            reward = reward.with_work(function=GreedyScores(reward.work_as(HostFunction).function))
            inputs = (*columns, *_GREEDY[:2])
        return generate, replace(reward, name="greedy_reward", inputs=inputs, outputs=("greedy_score",))


@dataclass(frozen=True)
class GreedyScores:
    """Calls a reward's host function on greedy responses, which have other keys."""

    reward: Any

    def __call__(self, batch: Batch, context: Any) -> dict[str, Any]:
        responses = {"sequence_ids": batch["greedy_ids"], "response_mask": batch["greedy_mask"]}
        columns = self.reward(replace(batch, fields=batch.fields | responses), context)
        return {"greedy_score": columns["score"]}


@dataclass
class GRPO(CriticFree):
    """GRPO (Shao et al. 2024, "DeepSeekMath", arXiv:2402.03300).

    A_i = (r_i - mean of the group) / (std of the group + eps). Dr. GRPO (Liu et al. 2025, arXiv:2503.20783)
    is `normalize="none"` with `loss.average="constant"`: it divides neither by the deviation nor by lengths.
    """


@dataclass
class RLOO(CriticFree):
    """RLOO (Ahmadian et al. 2024, arXiv:2402.14740): REINFORCE with a leave-one-out baseline.

    A_i = r_i - mean of the other samples of the prompt, where r is the score minus the KL penalty of the
    whole response. As in TRL, the ratio is that of the whole response, and it is clipped.
    """

    group_size: int = 4  # Samples per prompt.
    baseline: Baseline = "leave_one_out"
    normalize: Normalize = "none"
    loss: PolicyLossConfig = field(default_factory=lambda: PolicyLossConfig(ratio="sequence"))
    reward_kl: RewardKL = field(default_factory=lambda: RewardKL(kl_coef=0.05))


@dataclass
class CISPO(CriticFree):
    """CISPO (MiniMax-M1, 2025, arXiv:2506.13585): REINFORCE with truncated importance weights of tokens.

    The loss is -(1/T) sum of min(rho, ratio_cap) A log p, where the weight is a constant and T counts the
    tokens of all samples of a prompt. No token loses its gradient, as those do that PPO clips.
    """

    loss: PolicyLossConfig = field(
        default_factory=lambda: PolicyLossConfig(objective="cispo", average="prompt"))

    def graph(self) -> DataflowGraph:
        require(
            self.loss.objective == "cispo" or self.loss.function is not None, "loss.objective",
            self.loss.objective,
            "be cispo: a new PolicyLossConfig must say objective='cispo', average='prompt'")
        return super().graph()


@dataclass
class GSPO(CriticFree):
    """GSPO (Zheng et al. 2025, "Group Sequence Policy Optimization", arXiv:2507.18071).

    GRPO with one ratio per response, (p_train(y) / p_generated(y))^(1/|y|), which is clipped much more
    narrowly, as it is a geometric mean. The paper's bounds are 3e-4 and 4e-4; ScaleRL uses about ten times
    as much.
    """

    loss: PolicyLossConfig = field(
        default_factory=lambda: PolicyLossConfig(ratio="sequence_mean", clip_low=3e-4, clip_high=4e-4))

    def graph(self) -> DataflowGraph:
        require(
            self.loss.ratio == "sequence_mean" or self.loss.function is not None, "loss.ratio",
            self.loss.ratio,
            "be sequence_mean: a new PolicyLossConfig must say that, and clip_low and clip_high")
        return super().graph()


@dataclass
class SAPO(CriticFree):
    """SAPO (Gao et al. 2025, "Soft Adaptive Policy Optimization", arXiv:2511.20347).

    GRPO with a soft gate in the place of the clip: the gradient of a token fades as its ratio leaves 1, and
    faster where the advantage is negative.
    """

    loss: PolicyLossConfig = field(default_factory=lambda: PolicyLossConfig(objective="sapo"))

    def graph(self) -> DataflowGraph:
        require(
            self.loss.objective == "sapo" or self.loss.function is not None, "loss.objective",
            self.loss.objective, "be sapo: a new PolicyLossConfig must say objective='sapo'")
        return super().graph()


@dataclass
class ReinforcePlusPlus(CriticFree):
    """REINFORCE++ (Hu 2025, arXiv:2501.03262): PPO's loss without a critic.

    The advantage of a token is the score minus the KL penalties from this token on, normalised over all
    response tokens of the batch. REINFORCE++-baseline subtracts the mean of the prompt's samples first, and
    takes the KL into the loss: `baseline="group_mean"`, `group_size=8`, `reward_kl.kl_coef=0` and
    `loss.kl_estimator="k2"`.
    """

    group_size: int = 1  # Samples per prompt.
    baseline: Baseline = "none"
    normalize: Normalize = "tokens"
    kl_to_go: bool = True
    loss: PolicyLossConfig = field(default_factory=lambda: PolicyLossConfig(average="token"))
    reward_kl: RewardKL = field(default_factory=lambda: RewardKL(kl_coef=0.01))


@dataclass
class ReMax(CriticFree):
    """ReMax (Li et al. 2023, arXiv:2310.10505): REINFORCE with the score of the greedy response as baseline.

    A = r(sampled response) - r(greedy response). The calls `greedy_generate` and `greedy_reward` make the
    baseline.
    """

    group_size: int = 1  # Samples per prompt; it must be 1.
    baseline: Baseline = "greedy"
    normalize: Normalize = "none"
    kl_to_go: bool = True
    loss: PolicyLossConfig = field(default_factory=lambda: PolicyLossConfig(average="token"))
    reward_kl: RewardKL = field(default_factory=lambda: RewardKL(kl_coef=0.01))


@dataclass
class DAPO(CriticFree):
    """DAPO (Yu et al. 2025, arXiv:2503.14476): dynamic sampling, a higher upper clip, a penalty on length.

    Prompts are sampled until the batch is full of groups whose responses differ in score, as the others teach
    nothing. The average is that of equation 8: over the tokens of a prompt's group, then over prompts. The
    authors' own code averages over all tokens of the batch (`loss.average="token"`).
    """

    filter_groups: bool = True
    loss: PolicyLossConfig = field(
        default_factory=lambda: PolicyLossConfig(clip_low=0.2, clip_high=0.28, average="prompt"))
    max_rounds: int = 4  # Most batches of prompts that a step samples.
    overlong_buffer: int = 0
    """Tokens before sampling.max_new_tokens over which responses lose up to 1 of their score; 0: none."""

    def shaping(self) -> ScoreShaping | None:
        if not self.overlong_buffer:
            return self.score_shaping
        require(
            0 < self.overlong_buffer <= self.sampling.max_new_tokens, "overlong_buffer", self.overlong_buffer,
            f"be from 0 to sampling.max_new_tokens, {self.sampling.max_new_tokens}")
        require(
            self.score_shaping is None, "overlong_buffer", self.overlong_buffer,
            "be 0 if score_shaping is given")
        return SoftOverlongPenalty(self.sampling.max_new_tokens, self.overlong_buffer)

    def graph(self) -> DataflowGraph:
        require(self.max_rounds >= 1, "max_rounds", self.max_rounds, "be at least 1")
        require(
            self.filter_groups, "filter_groups", self.filter_groups,
            "be true for DAPO, whose sampling goes on until the batch is full of groups that differ")
        require(
            self.max_lag == 0, "max_lag", self.max_lag,
            "be 0 for DAPO, which samples until its batch is full and then trains on it")
        return super().graph()

    def parts(self, graph: DataflowGraph) -> dict[str, tuple[str, ...]]:
        sample = nx.ancestors(graph.nx_graph, "advantages") | {"advantages", COUNT}
        names = [call.name for call in graph.order if call.name != WANTED]
        select = {} if self.pass_rate_limit is None else {"select": (WANTED,)}
        return select | {
            "sample": tuple(name for name in names if name in sample),
            "train": tuple(name for name in names if name not in sample),
        }

    def step(self, run: StepRunner) -> None:
        informative = run.pool("informative")
        informative.drop(max_age=0)  # What the last step has left over would be off-policy.
        for _ in range(self.max_rounds):
            if len(informative) >= self.batch_size:
                break
            samples = self.next_prompts(run)
            run("sample", samples)
            self.count_passes(run, samples)
            informative.add(samples, where="advantages")
        run("train", informative.take(self.batch_size))
