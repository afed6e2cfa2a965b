"""The planning problem: the calls of a graph with their workloads, the roles and the cluster."""

import math
import sys
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from realhf.calls import Output
from realhf.cluster import Cluster
from realhf.data.micro_batch import attention_share
from realhf.devices.chunk_sizes import LEAST_PREFIX
from realhf.execution_plan import CallPlan, ExecutionPlan
from realhf.graph import DataflowGraph, FunctionCall
from realhf.layout import Layout
from realhf.models.lora import LoraConfig, adapter_spec
from realhf.models.model_config import MegatronConfig, ModelConfig, ModuleConfig, TransformersConfig
from realhf.models.modules import module_spec
from realhf.models.param_spec import ModelSpec, model_spec
from realhf.planner.lengths import Lengths, RoundStatistics, geometric, steady_round
from realhf.planner.slices import SliceTimes
from realhf.planner.slowest_replica import ScoringTime, normal_maximum
from realhf.planner.turns import Turns

ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@lru_cache(maxsize=64)
def parameter_table(config: ModelConfig) -> ModelSpec:
    """Return the parameter table of a model; roles with equal configs share it."""
    return module_spec(config) if isinstance(config, ModuleConfig) else model_spec(config)


@dataclass(frozen=True)
class Workload:
    """The work of one call in one step. Numbers of tokens are per sequence, and means where they vary.

    Responses have the given mean and at most `max_new_tokens`. Without `response_lengths`, their lengths are
    assumed to be geometric, truncated at that limit; if the mean equals the limit, all lengths are equal.
    """

    num_samples: int = 1
    prompt_tokens: float = 0.0
    response_tokens: float = 0.0  # All tokens if the sequence is not split into prompt and response.
    max_new_tokens: int = 0
    samples_per_prompt: int = 1  # Consecutive samples of one prompt, which always stay together.
    alike: float = 0.0
    """Share of the prompts whose responses all have one length; those to other prompts are independent."""
    max_rows: int = 512  # Generation: the rows that a rank decodes at once.
    sorts_logits: bool = False  # Generation: whether top-p sampling sorts the logits of all rows.
    kv_cache_gib: float | None = None  # Per rank; None: as needed, up to a share of free memory.
    prefill_tokens: int = 8192  # Prompt tokens in one pass.
    rounds: int = 1  # Generation: the rounds, one in each step, in which a response is generated.
    minibatches: int = 1
    epochs: int = 1
    group_size: int = 1  # Consecutive samples that a micro-batch holds together.
    output: Output = Output.LOGPROBS  # What a model call computes.
    entropy: bool = False
    top_k: int = 0
    """Most probable tokens per token, whose ids and log-probs a forward call finds and a train step reads."""
    seconds: float = 0.0
    """Duration of a call in plain Python, or of functions on a module, on one rank in all of its runs."""
    seconds_deviation: float = 0.0  # Standard deviation of these seconds from step to step.
    questions: float = 0.0  # How many such a call asks other calls in all of its runs.
    question_bytes: float = 0.0  # Mean size of a question with its answer.
    slices: SliceTimes | None = None
    """What a run has measured of such a call whose environments take turns."""
    is_asked: bool = False  # A host call asks this call, which does nothing else.
    scoring: ScoringTime | None = None  # The time in which such a call scores answers, in addition.
    runs: float = 1.0  # How often the call runs in a step, on average.
    longest_prompt_tokens: float = 0.0  # 0: all prompts are as long as the mean.
    common_prompt_tokens: float = 0.0  # Those with which all prompts begin, such as a system message.
    prompt_lengths: Lengths | None = None  # None: all prompts are as long as the mean.
    response_lengths: Lengths | None = None  # Their mean is `response_tokens`, and limit `max_new_tokens`.
    work_stealing: bool = True  # Generation: whether replicas take waiting prompts from others.
    weights: str = "full"  # Generation: the precision of the weights (see calls.GenerationWeights).
    keeps_cache: bool = False  # Generation: keys and values of unfinished samples stay between rounds.
    turns: Turns | None = None
    """Generation: the turns of responses, whose lengths include what environments have answered."""

    def __post_init__(self) -> None:
        for lengths, mean in (
            (self.prompt_lengths, self.prompt_tokens), (self.response_lengths, self.response_tokens)
        ):
            assert lengths is None or math.isclose(lengths.mean, mean, rel_tol=1e-6)
        assert self.response_lengths is None or self.response_lengths.limit == self._longest_response

    def under(self, call_plan: CallPlan) -> "Workload":
        """Return this work with the rows and the cache that a plan says; its own ones where it says nothing.

        The cache of a plan is at most that of the experiment.
        """
        rows = self.max_rows if call_plan.max_rows is None else call_plan.max_rows
        limits = [gib for gib in (self.kv_cache_gib, call_plan.kv_cache_gib) if gib is not None]
        key = (rows, min(limits, default=None))
        if key == (self.max_rows, self.kv_cache_gib):
            return self
        if key not in self._by_limits:
            self._by_limits[key] = replace(self, max_rows=rows, kv_cache_gib=key[1])
        return self._by_limits[key]

    @cached_property
    def _by_limits(self) -> dict[tuple[int, float | None], "Workload"]:
        """Return the dictionary in which `under` remembers its results."""
        return {}

    @property
    def longest_prompt(self) -> float:
        """Tokens of the longest prompt, as far as it is known."""
        return max(self.longest_prompt_tokens, self.prompt_tokens)

    @property
    def tokens(self) -> float:
        """Tokens of a whole sequence."""
        return self.prompt_tokens + self.response_tokens

    @cached_property
    def prompts(self) -> int:
        return self.num_samples // self.samples_per_prompt

    def seconds_on(self, num_ranks: int) -> float:
        """Return the seconds of a call in plain Python that is split over some ranks: those of the slowest.

        The shares of the ranks are independent and normal, so that the variance is split, too.
        """
        waiting = self.seconds_deviation / math.sqrt(num_ranks) * normal_maximum(num_ranks)
        scoring = 0.0 if self.scoring is None else self.scoring.of_slowest(self.num_samples, num_ranks)
        return self.seconds / num_ranks + waiting + scoring * self.runs

    def most_samples(self, kind: str, dp: int) -> int:
        """Return the most samples of any data-parallel rank in one mini-batch of a call of this kind."""
        prompts = math.ceil(self.prompts / self.minibatches)
        if self._keeps_prompts(kind):
            return math.ceil(prompts / dp) * self.samples_per_prompt
        return math.ceil(prompts * self.samples_per_prompt / dp)

    def most_replicas(self, kind: str) -> int:
        """Return the largest number of data-parallel ranks that all have something to do."""
        prompts = self.prompts // self.minibatches
        return max(1, prompts if self._keeps_prompts(kind) else prompts * self.samples_per_prompt)

    def _keeps_prompts(self, kind: str) -> bool:
        """Return whether all samples of a prompt go to one data-parallel rank."""
        return kind == "generate" or self.group_size > 1

    @property
    def group_tokens(self) -> float:
        """Tokens of the samples that a micro-batch holds together."""
        return self.group_size * self.tokens

    @property
    def survival(self) -> np.ndarray:
        """Fraction of responses that have at least t tokens, for t from 1 to the limit."""
        return self.lengths.survival

    @cached_property
    def lengths(self) -> Lengths:
        """The distribution of the lengths of responses."""
        return self.response_lengths or geometric(self.response_tokens, self._longest_response)

    @property
    def drawn_lengths(self) -> Lengths:
        """The distribution of the tokens that the model draws for a response."""
        return self.lengths if self.turns is None else self.turns.drawn

    @cached_property
    def round(self) -> RoundStatistics:
        """The rows of a round of generation in the steady state."""
        return steady_round(self.lengths, self.rounds)

    @property
    def round_tokens(self) -> int:
        """The most tokens that a response gets in a round."""
        return -(-self._longest_response // self.rounds)

    @property
    def num_ages(self) -> int:
        """The number of rounds after which every response has ended."""
        return -(-self._longest_response // self.round_tokens)

    @cached_property
    def _longest_response(self) -> int:
        return max(1, self.max_new_tokens, round(self.response_tokens))

    @cached_property
    def squared_tokens(self) -> float:
        """Mean of the squared length of a sequence; the work of causal attention is proportional to it."""
        prompt = self.prompt_tokens
        squared = prompt**2 if self.prompt_lengths is None else self.prompt_lengths.squared_mean
        return squared + 2 * prompt * self.response_tokens + self.lengths.squared_mean

    @cached_property
    def shared_prompt_tokens(self) -> tuple[float, float]:
        """Mean length and mean squared length of prompts, of which those count 0 that are too short to pass
        once for several samples."""
        if self.prompt_lengths is not None:
            return self.prompt_lengths.sums_from(LEAST_PREFIX)
        prompt = self.prompt_tokens if self.prompt_tokens >= LEAST_PREFIX else 0.0
        return prompt, prompt**2

    @property
    def all_alike(self) -> bool:
        return self.lengths.all_equal and (self.prompt_lengths is None or self.prompt_lengths.all_equal)


@dataclass(frozen=True)
class ModelRole:
    """A role as the planner sees it. With `lora`, only its adapters are trained and moved."""

    config: ModelConfig
    dtype: str = "bfloat16"
    trainable: bool = False
    follows: str | None = None
    lora: LoraConfig | None = None
    source: Hashable = None
    """Roles with equal sources share the memory of frozen weights where their shards are equal; None shares
    nothing."""
    float32_head: bool = False  # The products of the head are computed in float32 (see experiment.Role).
    offloads_optimizer: bool = False  # The optimizer's state is in host memory between steps.
    int8: bool = False  # It is a copy for generation, whose linear layers and experts are in int8.

    @cached_property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @cached_property
    def generating(self) -> "ModelRole":
        """The role for generation, which the native engine does for Megatron-Core."""
        config = self.config
        return replace(self, config=config.native()) if isinstance(config, MegatronConfig) else self

    @cached_property
    def in_int8(self) -> "ModelRole":
        return replace(self.generating, int8=True)

    @cached_property
    def moved_share(self) -> float:
        """Bytes that a reallocation moves for a parameter of a linear layer, relative to one of the dtype.

        For a copy in int8, all ranks agree on the scales by a ring, which sends each twice.
        """
        if not self.int8 or self.lora is not None:
            return 1.0
        int8 = [param for param in self.spec.params if param.takes_int8]
        num_scales = sum(param.shape[0] for param in int8)
        return 1 / self.itemsize + 2 * num_scales / sum(param.numel for param in int8)

    @cached_property
    def wide_itemsize(self) -> int:
        """Bytes of a gradient or optimizer value: float32, or float64 in a float64 model."""
        return max(4, self.itemsize)

    @property
    def widens_head(self) -> bool:
        """Whether the head computes in a wider dtype than the other layers."""
        return self.float32_head and self.itemsize < 4

    @cached_property
    def spec(self) -> ModelSpec:
        spec = parameter_table(self.config)
        if isinstance(self.config, TransformersConfig):  # The layers of such a model are unknown.
            spec = replace(spec, section_numel=sys.maxsize)
        return spec

    @cached_property
    def trained_spec(self) -> ModelSpec:
        """The parameters that training changes and that are reallocated in every step."""
        return self.spec if self.lora is None else adapter_spec(self.config, self.lora)

    @cached_property
    def attention_share(self) -> float:
        """The s for which a sequence of n tokens costs as much as n + s n^2 tokens without attention."""
        return attention_share(self.spec)

    @property
    def is_frozen(self) -> bool:
        return not self.trainable and self.follows is None


class PlannedCall(NamedTuple):
    """A call of a step or of an evaluation, as far as memory is concerned."""

    name: str
    kind: str
    role: str
    workload: Workload
    plan_names: tuple[str, ...]
    """The names under which a plan may have its layout; the first that the plan has counts."""
    is_evaluation: bool = False
    reads: tuple[str, ...] = ()
    """Other roles, whose weights the call reads in its own layout."""

    def waits_for_blocks(self, call_plan: CallPlan) -> bool:
        """Return whether rows of a generation may wait for memory.

        Else the whole cache is allocated: as large as the user or the plan says, for as many rows as the plan
        promises, or for all rows if it is kept.
        """
        limits = (call_plan.max_rows, call_plan.kv_cache_gib)
        promised = limits != (None, None) and not self.is_evaluation
        return self.workload.kv_cache_gib is None and not promised and not self.workload.keeps_cache


@dataclass(frozen=True)
class Problem:
    """A graph to plan. `pins` fix the layouts of calls, and `pinned_options` fields of their CallPlans; the
    calls of each tuple in `together` share a layout.

    Ranks run the calls in `run_order`, or in graph order if it is empty. The calls in `ahead` work on samples
    that the other calls read in the next step.
    """

    graph: DataflowGraph
    roles: Mapping[str, ModelRole]
    workloads: Mapping[str, Workload]
    cluster: Cluster
    pins: Mapping[str, Layout] = field(default_factory=dict)
    together: tuple[tuple[str, ...], ...] = ()
    run_order: tuple[str, ...] = ()
    ahead: frozenset[str] = frozenset()
    evaluations: tuple[PlannedCall, ...] = ()
    """The calls on models of all evaluations, which take memory but no time of a step."""
    pinned_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert sorted(self.run_order) in ([], sorted(call.name for call in self.graph.calls))
        names = [call.name for call in self.model_calls]
        chosen = [("--pin", name) for name in dict.fromkeys((*self.pins, *self.pinned_options))]
        chosen += [("--together", name) for group in self.together for name in group]
        host = [call.name for call in self.graph.calls if call.role is None]
        for option, name in chosen:
            if name in host:
                raise ValueError(f"{option} {name}: it is plain Python, which runs where its data is")
            if name not in names:
                raise ValueError(f"{option} {name}: there is no such call; there are {', '.join(names)}")
        if alone := [group for group in self.together if len(set(group)) < 2]:
            raise ValueError(f"--together {','.join(alone[0])}: name two calls or more, separated by commas")
        for name, options in self.pinned_options.items():
            for option in options:
                if (why := self._refusal(self.graph[name], option)) is not None:
                    raise ValueError(f"--pin {name}: {option} has no meaning here, {why}")
        for name, layout in self.pins.items():
            if max(layout.ranks) >= self.cluster.num_devices:
                has = f"the cluster has {self.cluster.num_devices} devices"
                raise ValueError(f"--pin {name}={layout}: rank {max(layout.ranks)} does not exist, {has}")
            if self.cluster.kind_index(layout.ranks) is None:
                ranges = " or ".join(f"{r.start}-{r.stop - 1}" for r, _ in self.cluster.ranks_by_kind)
                rule = f"a layout is planned on hosts of one kind, here on ranks {ranges}"
                raise ValueError(f"--pin {name}={layout}: {rule}")

    @property
    def calls(self) -> tuple[FunctionCall, ...]:
        """All calls, in the order in which ranks run them."""
        return tuple(self.graph[name] for name in self.run_order) or self.graph.order

    @property
    def model_calls(self) -> tuple[FunctionCall, ...]:
        """The calls that need a layout, in the order in which ranks run them."""
        return tuple(call for call in self.calls if call.role is not None)

    def planned(self, call: FunctionCall) -> PlannedCall:
        assert call.role is not None
        return PlannedCall(
            call.name, call.kind, call.role, self.workloads[call.name], (call.name,), reads=call.reads)

    def planned_calls(
        self, plan: ExecutionPlan, homes: Mapping[str, Layout]
    ) -> list[tuple[PlannedCall, CallPlan]]:
        """Return all calls on models, those of evaluations last, with their plans.

        An evaluation's call that the plan does not name runs at the home of its role.
        """
        offloaded = {call.role for call in self.model_calls if plan[call.name].offload}
        calls = [(self.planned(call), plan[call.name]) for call in self.model_calls]
        for planned in self.evaluations:
            named = next((name for name in planned.plan_names if name in plan.calls), None)
            at_home = CallPlan(homes[planned.role], offload=planned.role in offloaded)
            call_plan = at_home if named is None else plan[named]
            if named is not None and not named.startswith("eval/"):
                call_plan = replace(call_plan, kv_cache_gib=None)  # That is for the samples of a step.
            calls.append((planned, call_plan))
        return calls

    def evaluations_beside(self, call: FunctionCall) -> list[tuple[PlannedCall, bool]]:
        """Return the evaluations' calls that run in a call's layout if the plan has the step's calls only.

        The flag says whether they also have its options; others run at the home of their role.
        """
        named = [(planned, True) for planned in self.evaluations if call.name in planned.plan_names]
        names = {other.name for other in self.model_calls}
        of_role = self.graph.of_role(call.role) if call.role is not None else ()
        owner = next((other for other in of_role if other.kind == "train_step"), next(iter(of_role), None))
        at_home = [p for p in self.evaluations if p.role == call.role and not names & {*p.plan_names}]
        return named + [(planned, False) for planned in at_home if owner is call]

    def offloads_optimizer(self, role: ModelRole) -> bool:
        """Return whether a role's optimizer lies outside its devices' memory.

        Where devices are processes, that is the host's memory, and offloading frees nothing.
        """
        return role.offloads_optimizer and self.cluster.host_memory is not None

    def _refusal(self, call: FunctionCall, option: str) -> str | None:
        """Return why a call cannot have an option of a CallPlan; None if it can."""
        if option == "max_rows" and call.kind != "generate":
            return "as only a generate call has rows"
        if option == "micro_batch_tokens" and call.kind == "generate":
            return "as a generate call has rows and no micro-batches"
        if option == "recompute" and call.kind != "train_step":
            return "as only a train_step keeps what it could recompute"
        if option == "offload" and not self.may_offload(call):
            return "as only a frozen role with one call, on devices with a host_memory link, can offload"
        return None

    def may_offload(self, call: FunctionCall) -> bool:
        """Return whether the weights may wait in host memory while other calls run.

        They must never change and serve no other call.
        """
        alone = sum(other.role == call.role for other in self.graph.calls) == 1
        return alone and self.model_role(call).is_frozen and self.cluster.host_memory is not None

    def used_role(self, call: FunctionCall, name: str) -> tuple[str, ModelRole]:
        """Return a role that a call uses, its own one or one that it reads, with its name."""
        return name, self.model_role(call) if name == call.role else self.roles[name]

    def model_role(self, call: FunctionCall) -> ModelRole:
        """Return the role of a call, as the engine that runs the call sees it."""
        assert call.role is not None
        role = self.roles[call.role]
        if call.kind != "generate":
            return role
        return role.in_int8 if self.workloads[call.name].weights == "int8" else role.generating
