"""Problem: what is to be planned - the calls of a graph with their workloads, the roles, the cluster."""

import math
import sys
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import numpy as np

from realhf.cluster import Cluster
from realhf.graph import DataflowGraph, FunctionCall
from realhf.layout import Layout
from realhf.lora import LoraConfig, adapter_spec
from realhf.model_config import ModelConfig
from realhf.param_spec import ModelSpec, model_spec
from realhf.transformers_config import TransformersConfig

ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Workload:
    """What one call does in one step. Numbers of tokens are those of one sequence, means where they vary.

    Responses have the given mean and at most `max_new_tokens`; their lengths are taken to be geometric, cut
    off at that limit. Where the mean is the limit all are alike.
    """

    num_samples: int = 1
    prompt_tokens: float = 0.0
    response_tokens: float = 0.0  # Of the whole sequence when it is not split into prompt and response.
    max_new_tokens: int = 0
    samples_per_prompt: int = 1  # Neighbours with one prompt; neither mini-batches nor generation cut them.
    max_rows: int = 512  # Generation: rows that a rank decodes at once.
    kv_cache_gib: float | None = None  # Of a rank; None: what the rows need, at most a share of what is free.
    prefill_tokens: int = 8192  # Of prompts in one pass.
    minibatches: int = 1
    epochs: int = 1
    output: str = "logprobs"  # What a forward or train step computes: `logprobs`, `values` or `scores`.
    entropy: bool = False
    seconds: float = 0.0  # Of a host call.

    @property
    def tokens(self) -> float:
        """Of one sequence."""
        return self.prompt_tokens + self.response_tokens

    @property
    def prompts(self) -> int:
        return self.num_samples // self.samples_per_prompt

    def most_samples(self, kind: str, dp: int) -> int:
        """Of the data-parallel rank that has most, in one mini-batch of a call of this kind."""
        if kind == "generate":
            return math.ceil(self.prompts / dp) * self.samples_per_prompt
        return math.ceil(math.ceil(self.prompts / self.minibatches) * self.samples_per_prompt / dp)

    def most_replicas(self, kind: str) -> int:
        """Data-parallel ranks that all have something to do."""
        if kind == "generate":
            return max(1, self.prompts)
        return max(1, self.prompts // self.minibatches * self.samples_per_prompt)

    @property
    def survival(self) -> np.ndarray:
        """Share of responses that have at least t tokens, for t = 1 to the limit."""
        return _survival(self.response_tokens, max(1, self.max_new_tokens, round(self.response_tokens)))

    @cached_property
    def squared_tokens(self) -> float:
        """Mean of the squared length of a sequence: what causal attention's work grows with."""
        odd = 2 * np.arange(1, len(self.survival) + 1) - 1
        squared_response = float((odd * self.survival).sum())
        return self.prompt_tokens**2 + 2 * self.prompt_tokens * self.response_tokens + squared_response


@lru_cache(maxsize=64)
def _survival(mean: float, limit: int) -> np.ndarray:
    if mean >= limit:
        return np.ones(limit)
    if mean <= 1:
        return np.array([max(mean, 0.0)])
    steps = np.arange(limit)
    low = 0.0
    high = 1.0  # Bisection on the share that goes on after a token.
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if (middle**steps).sum() < mean else (low, middle)
    return low**steps


@dataclass(frozen=True)
class ModelRole:
    """A role as the planner sees it. With `lora`, its adapters are trained and moved, the weights rest."""

    config: ModelConfig
    dtype: str = "bfloat16"
    trainable: bool = False
    follows: str | None = None
    lora: LoraConfig | None = None
    source: Hashable = None
    """Frozen weights of equal sources are one memory where both have the same part; None: they share none."""

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def wide_itemsize(self) -> int:
        """Bytes of a gradient or optimizer value: float32, or float64 in a float64 model."""
        return max(4, self.itemsize)

    @cached_property
    def spec(self) -> ModelSpec:
        spec = model_spec(self.config)
        if isinstance(self.config, TransformersConfig):  # Nobody knows its layers.
            spec = replace(spec, section_numel=sys.maxsize)
        return spec

    @cached_property
    def trained_spec(self) -> ModelSpec:
        """The parameters that training changes, and that move in every step."""
        return self.spec if self.lora is None else adapter_spec(self.config, self.lora)

    @property
    def section_share(self) -> float:
        """Of the parameters that training changes, those of a section (ModelSpec.sections)."""
        return self.trained_spec.section_numel / self.trained_spec.numel


@dataclass(frozen=True)
class Problem:
    """`pins` fix layouts of calls; the calls of each tuple in `together` get one common layout."""

    graph: DataflowGraph
    roles: Mapping[str, ModelRole]
    workloads: Mapping[str, Workload]
    cluster: Cluster
    pins: Mapping[str, Layout] = field(default_factory=dict)
    together: tuple[tuple[str, ...], ...] = ()

    def __post_init__(self) -> None:
        names = [call.name for call in self.model_calls]
        chosen = [("--pin", name) for name in self.pins]
        chosen += [("--together", name) for group in self.together for name in group]
        host = [call.name for call in self.graph.calls if call.role is None]
        for option, name in chosen:
            if name in host:
                raise ValueError(f"{option} {name}: it is plain Python, which runs where its data is")
            if name not in names:
                raise ValueError(f"{option} {name}: there is no such call; there are {', '.join(names)}")
        if alone := [group for group in self.together if len(set(group)) < 2]:
            raise ValueError(f"--together {','.join(alone[0])}: name two calls or more, separated by commas")
        for name, layout in self.pins.items():
            if max(layout.ranks) >= self.cluster.num_devices:
                has = f"the cluster has {self.cluster.num_devices} devices"
                raise ValueError(f"--pin {name}={layout}: rank {max(layout.ranks)} does not exist, {has}")

    @property
    def model_calls(self) -> tuple[FunctionCall, ...]:
        """The calls that need a layout, in the order in which ranks run them."""
        return tuple(call for call in self.graph.order if call.role is not None)

    def role_of(self, call: FunctionCall) -> ModelRole:
        assert call.role is not None
        return self.roles[call.role]
