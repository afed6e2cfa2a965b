"""OnPolicy: roles, settings and calls of algorithms that train a model on its own responses."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import networkx as nx

from realhf.algorithms.advantages import AdvantageInputs
from realhf.algorithms.kl import RewardKL
from realhf.algorithms.loss_functions import is_complete
from realhf.algorithms.mismatch import AgeLimit
from realhf.algorithms.pass_rates import WANTED, PassRateLimit, lagged_parts_by_rates, with_pass_rates
from realhf.algorithms.policy_loss import PolicyLoss, PolicyLossConfig
from realhf.algorithms.responses import REWARD_LOGS
from realhf.algorithms.reward_models import JoinedRewards, ModelReward, check_models
from realhf.calls import (
    CacheOnUpdate,
    CudaGraphs,
    Generate,
    GenerationWeights,
    HostFunction,
    Interruption,
    KvCacheGib,
    LogProbs,
    MaxRows,
    OptimizerConfig,
    PrefillTokens,
    SamplingConfig,
    Scores,
    TrainStep,
    WorkStealing,
)
from realhf.data.dataset import START_IDS, DatasetConfig
from realhf.data.rows import extra_columns
from realhf.environments.protocol import Environment
from realhf.environments.rollout_rewards import ROLLOUT, RolloutRewards
from realhf.environments.rollouts import EnvironmentTurnSourceFactory, WorkerPool
from realhf.environments.turn_tokens import call_end_in
from realhf.experiment import Experiment, Role
from realhf.graph import DataflowGraph, FunctionCall
from realhf.rewards.limits import RewardLimits
from realhf.rewards.reward import RewardFunctions, column_key, reward_columns
from realhf.rewards.scoring import RewardCall, decode_responses
from realhf.rewards.shaping import ScoreShaping, TokenReward, check_shaping, token_returns
from realhf.steps.sample_pool import Samples
from realhf.steps.step_runner import StepRunner
from realhf.user_input.field_types import require, unused

if TYPE_CHECKING:
    from realhf.data.batch import Batch

SEQUENCE = ("sequence_ids", "response_mask")
"""Keys of a sequence: token ids of prompt and response, and a mask that is 1 on response tokens."""
RESPONSE = (*SEQUENCE, "gen_logprobs", "finished")
"""Keys of a response, which `actor_generate` writes."""


@dataclass
class OnPolicy(Experiment):
    """The base of algorithms in which the actor answers prompts, responses are scored and the actor trains.

    A subclass defines `roles` and `graph`, and with them how scores become advantages.
    """

    actor: Role = field(default_factory=lambda: Role(model="", optimizer=OptimizerConfig()))
    ref: Role | None = None  # The reference model, if the loss needs one; None: the actor's initial weights.
    reward: Role | None = None  # A reward model, when there is no reward function.
    reward_scores: Scores = field(default_factory=Scores)
    """Whether the reward model's score is its logit or its probability."""
    reward_models: tuple[ModelReward, ...] = ()
    """Reward models beside reward functions, or several of them, each with a weight: ModelReward (outcome),
    ProcessReward, GenerativeReward."""
    reward_function: RewardFunctions | None = None
    """Scores the responses if there is no reward model: a function, or a list of functions and `Reward`s."""
    reward_limits: RewardLimits = field(default_factory=RewardLimits)
    """What happens when a reward function fails, or takes too long."""
    score_shaping: ScoreShaping | None = None
    """Changes the scores of training by the lengths of responses, such as `CosineReward`."""
    token_rewards: tuple[TokenReward, ...] = ()
    """Rewards of single tokens, each with its own discount, such as `RepetitionPenalty`; their returns are
    added to the advantages."""
    eval_function: RewardFunctions | None = None
    """Scores the responses to prompts of `eval_dataset`; None: the training reward scores them."""
    environment: Environment | None = None
    """Answers what the actor says, so that a response has several turns, in training and in evaluations. Its
    rewards count beside those of `reward_function`, which may then be absent; `sampling.max_new_tokens` is
    the limit of each turn."""
    tools: tuple[Callable[..., Any], ...] = ()
    """Functions that the actor may call until it answers without a call; short for an `environment` of them
    alone."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    max_new_tokens_key: str | None = None
    """Column of the dataset with the most new tokens of each prompt's responses, whole numbers of at least 1;
    `sampling.max_new_tokens` is the limit of all. None: there is no such column."""
    loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    minibatches: int = 1  # Optimizer steps per epoch of a step, each on an equal part of the samples.
    minibatch_size: int | None = None  # Prompts of each optimizer step; give this or `minibatches`.
    epochs: int = 1  # Times that a step trains on its samples.
    shuffle_minibatches: bool = False
    """Whether each epoch cuts the samples into other mini-batches, as in PPO's paper and code; otherwise all
    epochs have the same, in the order of the prompts."""
    max_rows: MaxRows = Generate.max_rows
    kv_cache_gib: KvCacheGib = Generate.kv_cache_gib
    prefill_tokens: PrefillTokens = Generate.prefill_tokens
    work_stealing: WorkStealing = Generate.work_stealing
    cuda_graphs: CudaGraphs = Generate.cuda_graphs
    cache_on_update: CacheOnUpdate = Generate.cache_on_update
    generation_weights: GenerationWeights = Generate.generation_weights
    interruption: Interruption | None = None
    """Ends over-long thinking by a phrase that is inserted into the response; None: nothing is inserted."""
    router_aux_loss_coef: float = 0.0
    """Weight of the routers' load-balancing loss, for an actor with experts."""
    router_z_loss_coef: float = 0.0  # Weight of the routers' z-loss, which keeps their logits small.

    pass_rate_limit: PassRateLimit | None = None
    """Which prompts are drawn, by how often they have been answered well; None: all of them, in turn."""
    max_draws: int = 64
    """Most times that a step draws prompts from the dataset in the place of those that the limit leaves."""

    def with_pass_rates(self, graph: DataflowGraph) -> DataflowGraph:
        """Return the graph with the calls of `pass_rate_limit`, if there is one."""
        require(self.max_draws >= 1, "max_draws", self.max_draws, "be at least 1")
        return graph if self.pass_rate_limit is None else with_pass_rates(graph, self.pass_rate_limit)

    def parts(self, graph: DataflowGraph) -> dict[str, tuple[str, ...]]:
        if self.pass_rate_limit is None:
            return super().parts(graph)
        if self.max_lag:
            return lagged_parts_by_rates(graph)
        return {"select": (WANTED,), "step": tuple(call.name for call in graph.order if call.name != WANTED)}

    def step(self, run: StepRunner) -> None:
        if self.pass_rate_limit is None:
            super().step(run)
        elif self.max_lag:
            self.lagged_step(run)
        elif (begun := run("step", self.next_prompts(run))) is not None:
            self.count_passes(run, begun)

    def lagged_step(self, run: StepRunner) -> None:
        """Begin the next wanted prompts, and train on those whose answers are complete."""
        begun = self.next_prompts(run)
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
        self.count_passes(run, due)

    def next_prompts(self, run: StepRunner) -> Samples | None:
        """Return the prompts that a step begins, chosen in the part `select` if there is a limit."""
        if self.pass_rate_limit is None:
            return run.prompts(self.batch_size)
        return self.pass_rate_limit.take_wanted(
            run, self.batch_size, part="select", max_draws=self.max_draws)

    def count_passes(self, run: StepRunner, samples: Samples | None) -> None:
        """Add the passes of samples, on which their part has just run, to the rates."""
        if self.pass_rate_limit is not None and samples is not None:
            self.pass_rate_limit.count(run)

    @property
    def has_own_program(self) -> bool:
        methods = (getattr(self.parts, "__func__", None), getattr(self.step, "__func__", None))
        return self.pass_rate_limit is not None or methods != (OnPolicy.parts, OnPolicy.step)

    def shared_roles(self, *, with_ref: bool) -> dict[str, Role]:
        """Return the roles actor, ref (if `with_ref`) and reward (if a model scores). Raises ValueError."""
        environment = self.used_environment()
        if environment is not None and self.reward is not None:
            raise ValueError("reward is set, and does not work with an environment yet: leave the role out")
        if self.reward_models and (self.reward is not None or environment is not None):
            other = "a reward role, which can be one of them" if environment is None else "an environment"
            raise ValueError(f"reward_models are given, and do not work beside {other}")
        check_models(self.reward_models, max_lag=self.max_lag)
        joined = self.reward_function is not None or bool(self.reward_models)
        if (self.reward is None) != joined and environment is None:
            given = "both are given" if joined else "none is given"
            raise ValueError(
                f"give either reward_function or a reward role, and {given}; reward models beside functions "
                "are reward_models=(ModelReward(role, weight=...),)")
        ref = self.ref or initial_reference(self.actor)
        named = {"actor": self.actor, "ref": ref if with_ref else None, "reward": self.reward}
        named |= {model.role_name: model.role for model in self.reward_models}
        return {name: role for name, role in named.items() if role is not None}

    def actor_generate(self) -> FunctionCall:
        """Return the call in which the actor answers the prompts. It writes `versions` if `with_versions`."""
        turn_sources = self._turn_source_factory()
        phrase = self.interruption
        sampling = self._turn_sampling(self.sampling)
        work = Generate(
            sampling=sampling, seed=self.seed, max_rows=self.max_rows, kv_cache_gib=self.kv_cache_gib,
            prefill_tokens=self.prefill_tokens, work_stealing=self.work_stealing,
            deterministic=self.deterministic, cuda_graphs=self.cuda_graphs,
            cache_on_update=self.cache_on_update, generation_weights=self.generation_weights,
            environment=turn_sources,
            interruption=None if phrase is None else phrase.tokenized(self.tokenizer_dir()),
            tokenizer=self.tokenizer_dir() if sampling.reads_text else None)
        limits = () if self.max_new_tokens_key is None else (column_key(self.max_new_tokens_key),)
        inputs: tuple[str, ...] = ("prompt_ids", *limits)
        outputs: tuple[str, ...] = (*RESPONSE, *self.version_keys)
        if turn_sources is not None:
            inputs = (START_IDS, *row_keys(self.dataset))
            outputs = (*outputs, ROLLOUT)
        return FunctionCall("actor_generate", inputs=inputs, outputs=outputs, role="actor", work=work)

    def _turn_sampling(self, sampling: SamplingConfig) -> SamplingConfig:
        """Return how turns are sampled, which may end with tool calls."""
        environment = self.used_environment()
        if environment is None or not environment.ends_at_call:
            return sampling
        end = call_end_in(self.tokenizer_dir(), json.dumps(self.dataset.chat_template_kwargs))
        if end is None or end in sampling.stop:  # A template without such an end is refused in the run.
            return sampling
        return replace(sampling, stop=(*sampling.stop, end))

    @cached_property
    def _worker_pool(self) -> WorkerPool:
        return WorkerPool()

    credits_turns: ClassVar[bool] = False
    """Whether the algorithm can give each turn a credit of its own."""

    def used_environment(self) -> Environment | None:
        """Return the environment, also one of `tools` alone. Raises ValueError if both are given."""
        if self.environment is not None and self.tools:
            raise ValueError("give either environment or tools, and not both: an environment has its own")
        return Environment(tools=self.tools) if self.tools else self.environment

    def _turn_source_factory(self) -> EnvironmentTurnSourceFactory | None:
        """Return how the actor's responses get several turns; None: they have one.

        Raises ValueError about settings that do not work with an environment yet.
        """
        environment = self.used_environment()
        if environment is None:
            return None
        unsupported = {
            "max_new_tokens_key": self.max_new_tokens_key, "token_rewards": self.token_rewards,
            "dataset.system_prompt (return it in Start.messages)": self.dataset.system_prompt,
            "dataset.tools (return them in Start.tools)": self.dataset.tools or self.dataset.tools_key}
        for name, value in unsupported.items():
            if value:
                raise ValueError(f"{name} is set, and does not work with an environment yet: leave it out")
        credit = environment.credit
        require(
            credit == "trajectory" or self.credits_turns, "environment.credit", credit,
            f"be trajectory with {type(self).__name__}, which does not compare turns of a group")
        require(
            self.num_rounds == 1 or self.cache_on_update != "keep", "cache_on_update", self.cache_on_update,
            "be recompute with an environment and rounds, between which a rollout may change its rank")
        engine = self.actor.engine
        require(engine != "transformers", "actor.engine", engine, "be native or megatron with an environment")
        return EnvironmentTurnSourceFactory(
            environment, self.tokenizer_dir(), dict(self.dataset.chat_template_kwargs), self.group_size,
            self._worker_pool)

    @property
    def kl_in_reward(self) -> RewardKL | None:
        """The KL to the reference as a penalty in the reward; None: the algorithm has no such penalty."""
        return None

    @property
    def with_versions(self) -> bool:
        """Whether generation records tokens' versions, so that their ages are known.

        It does with a lag and with `loss.max_age`. An experiment whose own `step` keeps samples overrides it.
        """
        return self.max_lag > 0 or self.loss.max_age is not None

    @property
    def version_keys(self) -> tuple[str, ...]:
        """Return the key `versions` if generation records tokens' versions, else nothing."""
        return ("versions",) if self.with_versions else ()

    def age_limit(self) -> AgeLimit | None:
        """Return how tokens are left out by age; None if their versions are not recorded.

        Raises ValueError if the lag makes every token too old.
        """
        if not self.with_versions:
            return None
        limit = self.loss.max_age
        if limit == 0 and self.max_lag > 0 and self.overlaps:
            raise ValueError(
                f"loss.max_age is 0: with max_lag {self.max_lag} and rounds {self.num_rounds}, "
                f"tokens are at least 1 update old; raise it, or set rounds to {self.max_lag + 1}")
        return AgeLimit(limit, self.loss.aged)

    def with_checked_ages(self, graph: DataflowGraph, *, ages_of: str = "advantages") -> DataflowGraph:
        """Return the graph. Raises ValueError if `loss.max_age` would not limit the ages at training.

        The call `ages_of` finds the ages, so it must be in the part that trains.
        """
        if self.loss.max_age is not None and self.has_own_program:
            for part, calls in self.parts(graph).items():
                if (ages_of in calls) != ("actor_train" in calls):
                    raise ValueError(
                        f"loss.max_age is {self.loss.max_age}: {ages_of!r} and 'actor_train' must be in one "
                        f"part, and the part {part!r} has only one of them")
        return graph

    def doubts(self) -> Iterator[str]:
        yield from super().doubts()
        yield from self.loss.doubts(max_lag=self.max_lag, longest=self.sampling.max_new_tokens)
        in_reward = self.kl_in_reward
        if in_reward is not None:
            prefix = f"{in_reward.field_of_experiment}."
            if self.loss.kl_coef > 0 and in_reward.kl_coef > 0:
                yield (
                    f"loss.kl_coef is {self.loss.kl_coef:g} and {prefix}kl_coef {in_reward.kl_coef:g}: the "
                    "KL to the reference counts twice, in the loss and in the reward; set one of them to 0")
            yield from unused(
                in_reward, prefix, kl_estimator=(in_reward.kl_coef > 0, f"{prefix}kl_coef is 0"),
                kl_horizon=(in_reward.kl_target is not None, f"{prefix}kl_target is None"))
        greedy = (self.sampling.temperature > 0, "sampling.temperature is 0")
        yield from unused(self.sampling, "sampling.", top_k=greedy, top_p=greedy, min_p=greedy)
        if self.loss.mask_truncated and self.sampling.ignore_eos and not self.sampling.stop:
            yield (
                "loss.mask_truncated is true and sampling.ignore_eos, too: all responses go on to the limit "
                "of their length, so that all of them count as cut and nothing is learned")
        several = (self.num_minibatches > 1, "minibatches is 1")
        yield from unused(self, "", shuffle_minibatches=several)
        by_function = (self.reward is None, "a reward model scores")
        yield from unused(self, "", reward_limits=by_function)

    def absent_calls(self) -> dict[str, str]:
        kind = type(self).__name__
        no_critic = f"{kind} has no critic: take the plan of a PPO experiment for PPO"
        return {
            "ref_forward": "no reference model takes part: set loss.kl_coef above 0",
            "actor_forward": "loss.proximal is 'generated': set it to 'recomputed'",
            "critic_forward": no_critic, "critic_train": no_critic}

    def advantage_inputs(self) -> AdvantageInputs:
        """Return what the call that computes advantages reads beside scores and KL."""
        return AdvantageInputs(
            self.shaping(), bool(self.token_rewards), self.age_limit(), self.reward_logs(),
            self.reward_limits, mask_truncated=self.loss.mask_truncated,
            top_entropy_quantile=self.loss.top_entropy_quantile)

    def actor_forward(self) -> tuple[FunctionCall, ...]:
        """Return the call that recomputes the actor's log-probs before its update, if they are needed."""
        if not self.loss.needs_actor_forward:
            return ()
        with_entropy = self.loss.top_entropy_quantile < 1
        work = LogProbs(temperature=self.temperature, entropy=with_entropy)
        outputs = ("prox_logprobs", "prox_entropy") if with_entropy else ("prox_logprobs",)
        return (FunctionCall("actor_forward", inputs=SEQUENCE, outputs=outputs, role="actor", work=work),)

    def ref_forward(self) -> FunctionCall:
        """Return the call that computes the reference's log-probs of the responses."""
        work = LogProbs(temperature=self.temperature)
        return FunctionCall("ref_forward", inputs=SEQUENCE, outputs=("ref_logprobs",), role="ref", work=work)

    def reward_calls(self) -> tuple[FunctionCall, ...]:
        """Return the calls that score the responses: those of reward models, and `reward_forward`."""
        return (*self._model_calls(), self.reward_forward())

    def _model_calls(self) -> list[FunctionCall]:
        tokenizer = self.tokenizer_dir() if self.reward_models else ""
        return [call for model in self.reward_models for call in model.calls(tokenizer=tokenizer)]

    def reward_forward(self) -> FunctionCall:
        """Return the call that scores the responses, by reward functions or the reward model."""
        if self.reward_function is not None or self.reward_models or self.used_environment() is not None:
            return self._reward_call(self.reward_function, self.dataset, self.reward_models)
        return FunctionCall(
            "reward_forward", inputs=SEQUENCE[:1], outputs=("score",), role="reward", work=self.reward_scores)

    def _reward_call(
        self, function: RewardFunctions | None, dataset: DatasetConfig, models: Sequence[ModelReward] = ()
    ) -> FunctionCall:
        columns = () if function is None else reward_columns(function, extra_columns(dataset))
        if self.used_environment() is not None:
            call: RewardCall = RolloutRewards(function, columns, self.reward_limits)
        elif models:
            call = JoinedRewards(function, models, columns, self.reward_limits)
        else:
            assert function is not None, "a graph without reward functions has a reward role"
            call = RewardCall(function, columns, self.reward_limits)
        work = HostFunction(call, splittable=True, timeout_seconds=None)  # Each reward has its own limit.
        return FunctionCall("reward_forward", inputs=call.inputs, outputs=call.outputs, work=work)

    def reward_logs(self) -> tuple[str, ...]:
        """Return the keys of what the call that scores writes for metrics, such as the scores by name."""
        return tuple(key for key in self.reward_forward().outputs if key in REWARD_LOGS)

    def token_rewards_call(self) -> tuple[FunctionCall, ...]:
        """Return the call that computes the returns of single tokens' rewards, if there are any."""
        if not self.token_rewards:
            return ()
        for token_reward in self.token_rewards:
            check_shaping("token_rewards", token_reward, needs="discount")
        work = HostFunction(TokenReturns(self.token_rewards), splittable=True)
        return (FunctionCall("token_rewards", inputs=SEQUENCE, outputs=("token_returns",), work=work),)

    def shaping(self) -> ScoreShaping | None:
        """Return what changes the scores of training."""
        if self.score_shaping is not None:
            check_shaping("score_shaping", self.score_shaping)
        return self.score_shaping

    def actor_train(self) -> FunctionCall:
        """Return the call that trains the actor on `advantages`."""
        loss = self.loss
        if loss.average == "constant" and loss.constant_length is None:
            environment = self.used_environment()
            most = None if environment is None else environment.max_tokens
            loss = replace(loss, constant_length=most or self.sampling.max_new_tokens)
        trained = loss.function if is_complete(loss.function) else PolicyLoss(loss)
        work = TrainStep(
            trained, self.num_minibatches, self.epochs, self.temperature, self.router_aux_loss_coef,
            self.router_z_loss_coef, self.shuffle_minibatches, self.seed)
        recomputed = ("prox_logprobs",) if self.loss.proximal == "recomputed" else ()
        reference = ("ref_logprobs",) if self.loss.kl_coef else ()
        by_prompt = ("prompt_tokens",) if self.loss.average == "prompt" else ()
        inputs = (
            *SEQUENCE, "gen_logprobs", "advantages", *recomputed, *reference, *by_prompt, *self.loss.columns)
        return FunctionCall("actor_train", inputs=tuple(dict.fromkeys(inputs)), role="actor", work=work)

    @property
    def num_minibatches(self) -> int:
        """Mini-batches of a step. Raises ValueError about a `minibatch_size` that does not fit."""
        size = self.minibatch_size
        if size is None:
            return self.minibatches
        if self.minibatches != type(self).minibatches:
            require(
                False, "minibatch_size", size,
                f"be None, as minibatches is {self.minibatches}: give one or the other")
        legal = [n for n in range(1, self.batch_size + 1) if self.batch_size % n == 0]
        require(
            size in legal, "minibatch_size", size,
            f"divide batch_size {self.batch_size}: legal are {', '.join(map(str, legal))}")
        return self.batch_size // size

    @property
    def temperature(self) -> float:
        """Temperature of the log-probs; 1 with greedy sampling, which does not change the distribution."""
        return self.sampling.temperature or 1.0

    @property
    def greedy_sampling(self) -> SamplingConfig:
        """The settings of sampling, but always with the most probable token."""
        return self.sampling.greedy()

    def eval_graph(self) -> DataflowGraph | None:
        """Return the calls that answer held-out prompts and score the responses.

        They are those of `graph` on which the scores depend, so that a subclass that answers in several calls
        is evaluated by the same calls. Each generating call has the sampling of the evaluation.
        """
        held_out = self.evaluation
        function = held_out.function or self.eval_function
        generating = self._generating_calls()
        if function is None and self.reward_models:
            joined = self._reward_call(self.reward_function, held_out.dataset, self.reward_models)
            return graph_of(*generating, *self._model_calls(), joined)
        function = function or self.reward_function
        if function is not None or self.used_environment() is not None:
            return graph_of(*generating, self._reward_call(function, held_out.dataset))
        work = HostFunction(_decode, splittable=True)
        decode = FunctionCall("eval_decode", inputs=SEQUENCE, outputs=("completion",), work=work)
        return graph_of(*generating, self.reward_forward(), decode)

    def _generating_calls(self) -> list[FunctionCall]:
        """Return the calls of the training graph that make the responses, as an evaluation runs them."""
        held_out = self.evaluation
        graph = self.graph()
        makers = [call for key in SEQUENCE if (call := graph.producer(key)) is not None]
        names = {call.name for call in makers}.union(*(nx.ancestors(graph.nx_graph, c.name) for c in makers))
        calls = [call for call in graph.order if call.name in names]
        columns = {column_key(name) for name in extra_columns(held_out.dataset)}
        needed = {key for call in calls for key in call.inputs}

        def evaluated(call: FunctionCall) -> FunctionCall:
            if call.kind != "generate":
                return call
            sampling = self._turn_sampling(held_out.sampling_for(call.work_as(Generate).sampling))
            tokenizer = self.tokenizer_dir() if sampling.reads_text else None
            prompts, *limits = call.inputs  # Training rows alone may have a column of limits.
            limits = [key for key in limits if key in columns or graph.producer(key) is not None]
            work = replace(call.work_as(Generate), sampling=sampling, tokenizer=tokenizer)
            if isinstance(work.environment, EnvironmentTurnSourceFactory):
                limits = list(row_keys(held_out.dataset))
                needed.add(ROLLOUT)
                work = replace(work, environment=replace(work.environment, group_size=held_out.samples))
            outputs = [key for i, key in enumerate(call.outputs) if i < len(RESPONSE) or key in needed]
            return replace(call, inputs=(prompts, *limits), outputs=tuple(outputs), work=work)

        return [evaluated(call) for call in calls]


@dataclass(frozen=True)
class TokenReturns:
    """A host function that computes the discounted sums of the rewards of response tokens."""

    token_rewards: tuple[TokenReward, ...]

    def __call__(self, batch: Batch, context: Any) -> tuple[dict[str, Any], dict[str, float]]:
        mask = batch["response_mask"]
        chosen_T = mask.in_response()
        pairs = zip(batch["sequence_ids"].split(), mask.like(chosen_T).split(), strict=True)
        responses = [tokens[chosen].tolist() for tokens, chosen in pairs]
        returns = token_returns(self.token_rewards, responses)
        returns_T = mask.values.new_zeros(mask.values.shape)
        returns_T[chosen_T] = mask.values.new_tensor([value for values in returns for value in values])
        firsts = [values[0] for values in returns if values]  # The discounted sums of whole responses.
        metrics = {"reward/token_return": sum(firsts) / len(firsts)} if firsts else {}
        return {"token_returns": mask.like(returns_T)}, metrics


def row_keys(dataset: DatasetConfig) -> tuple[str, ...]:
    """Return the keys of the columns of a dataset that the environment of each row gets."""
    return ("prompt", *(column_key(name) for name in extra_columns(dataset) if name != "prompt"))


def initial_reference(actor: Role) -> Role:
    """Return a frozen role with the actor's initial weights."""
    lora = actor.lora  # Without an adapter to start from, the base is the initial model.
    lora = lora if lora is not None and lora.adapter is not None else None
    return replace(actor, optimizer=None, lora=lora)


def graph_of(*calls: FunctionCall) -> DataflowGraph:
    """Return the graph of these calls; keys that no call writes come from the dataset."""
    written = {key for call in calls for key in call.outputs}
    read = dict.fromkeys(key for call in calls for key in call.inputs)
    return DataflowGraph(calls, tuple(key for key in read if key not in written))


def _decode(batch: Batch, context: Any) -> dict[str, list[str]]:
    return {"completion": decode_responses(batch, context)[1]}
