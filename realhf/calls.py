"""The kinds of work that an engine can do, and their settings. This module does not import torch.

Token-level arrays are aligned with the tokens: entry t of `logprobs` is log p(token t | tokens before t);
entry t of `values` is the value of the state in which token t is chosen. Both are 0 where `response_mask`
is 0: on prompts, and on tokens that were inserted into responses (see `data.responses`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from realhf.graph import DataflowGraph, FunctionCall
from realhf.settings.generation_settings import (
    CacheOnUpdate,
    CudaGraphs,
    KvCacheGib,
    MaxRows,
    PrefillTokens,
    WorkStealing,
)
from realhf.settings.interruption import InsertedPhrase
from realhf.settings.sampling_config import SamplingConfig
from realhf.user_input.field_types import check_types, require

if TYPE_CHECKING:
    from torch import Tensor

    from realhf.data.batch import Batch


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (Loshchilov & Hutter 2019), gradient clipping and a learning-rate schedule."""

    lr: float | None = None
    """The learning rate after warm-up; None: the usual one for what is learned, higher for adapters (see
    `learning_rates`)."""
    betas: tuple[float, float] = (0.9, 0.95)  # Decay of the averages of gradients and of their squares.
    eps: float = 1e-8  # Added to the root of the average square, by which updates are divided.
    weight_decay: float = 0.01
    """Share of a weight, times the learning rate, by which a step shrinks it. Norms, biases and other
    parameters with one dim do not shrink."""
    max_grad_norm: float = 1.0  # Gradients are scaled down to this global L2 norm.
    warmup_steps: int = 0  # Optimizer steps over which the learning rate rises linearly from 0.
    warmup_ratio: float = 0.0  # The same as a share of `total_steps`, rounded up; give one or the other.
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # How `lr` falls after warm-up.
    total_steps: int = 0
    """Optimizer steps until `linear` and `cosine` reach `min_lr_ratio`; 0: those of the run, if every train
    step runs once in each of its steps."""
    min_lr_ratio: float = 0.0  # Share of `lr` that remains at the end of the schedule.
    max_skipped: int = 3
    """Updates in a row whose gradients are not finite and which are skipped; one more ends the run. The
    metric `skipped_updates` counts them, and their samples are saved in the run directory."""
    offload: bool = False
    """Whether the moments and the master copy are in host memory between optimizer steps. In a step they pass
    through the device in parts. This saves device memory, costs time, and changes no result."""

    def __post_init__(self) -> None:
        check_types(self, "optimizer.")
        require(self.lr is None or self.lr >= 0, "optimizer.lr", self.lr, "not be negative")
        require(self.max_grad_norm > 0, "optimizer.max_grad_norm", self.max_grad_norm, "be above 0")
        require(self.max_skipped >= 0, "optimizer.max_skipped", self.max_skipped, "not be negative")
        for name in ("total_steps", "warmup_steps"):
            require(getattr(self, name) >= 0, f"optimizer.{name}", getattr(self, name), "not be negative")
        ratio = self.warmup_ratio
        require(0 <= ratio <= 1, "optimizer.warmup_ratio", ratio, "be at least 0 and at most 1")
        legal = not (ratio and self.warmup_steps)
        rule = f"be 0, as optimizer.warmup_steps is {self.warmup_steps}: give one or the other"
        require(legal, "optimizer.warmup_ratio", ratio, rule)


@dataclass(frozen=True)
class Work:
    """The base class of all work. A call's work must be of the call's kind (see `graph.KINDS`).

    Work that runs forward passes has `output`: what the model computes (`logprobs`, `values` or `scores`).
    """

    kind: ClassVar[str]

    @property
    def num_minibatches(self) -> int:
        """Number of parts into which the samples of a step are split, the same under every layout."""
        return 1

    @property
    def group_size(self) -> int:
        """Number of consecutive samples that the work needs together in one micro-batch."""
        return 1


@dataclass(frozen=True)
class Generate(Work):
    """Continues prompts; see GenerateOutputs for the columns that it returns.

    The call's first input is the prompts. A second one, if there is one, is a column with the most tokens of
    each sample's response (see TokenLimits); `sampling.max_new_tokens` is the limit of all.
    """

    kind = "generate"
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    seed: int = 0
    max_rows: MaxRows = 512
    kv_cache_gib: KvCacheGib = None
    takes_free_memory: bool = False
    """Whether keys and values may take all free memory that passes leave, if `max_rows` sequences need it. A
    plan's `max_rows` sets this, as the plan has counted them."""
    prefill_tokens: PrefillTokens = 8192
    work_stealing: WorkStealing = True
    deterministic: bool = False
    """Whether two runs under one plan agree bit for bit (see Experiment). Then `work_stealing` must be off,
    and `kv_cache_gib` given: timing and free memory decide which rows run together."""
    cuda_graphs: CudaGraphs = True
    cache_on_update: CacheOnUpdate = "recompute"
    interruption: InsertedPhrase | None = None  # A phrase that is inserted into over-long responses.
    tokenizer: str | None = None
    """Directory of the tokenizer, which `sampling.stop` and `sampling.bad_words` need."""

    def __post_init__(self) -> None:
        legal = self.tokenizer is not None or not self.sampling.reads_text
        rule = "be a directory for sampling.stop and sampling.bad_words"
        require(legal, "tokenizer", self.tokenizer, rule)
        if self.interruption is not None:
            after, size = self.interruption.after_tokens, len(self.interruption.phrase)
            most = self.sampling.max_new_tokens - size - 1
            why = f"the phrase (tokens: {size}) and an answer follow, within sampling.max_new_tokens"
            require(after <= most, "interruption.after_tokens", after, f"be at most {most}, as {why}")
        ways = ("recompute", "keep")
        rule = f"be one of {', '.join(ways)}"
        require(self.cache_on_update in ways, "cache_on_update", self.cache_on_update, rule)
        require(self.max_rows >= 1, "max_rows", self.max_rows, "be at least 1")
        gib = self.kv_cache_gib
        require(gib is None or 0 < gib < inf, "kv_cache_gib", gib, "be a number of GiB above 0")
        require(self.prefill_tokens >= 1, "prefill_tokens", self.prefill_tokens, "be at least 1")
        rule = "be false with deterministic, as timing decides which replica takes a prompt"
        require(not (self.deterministic and self.work_stealing), "work_stealing", "true", rule)
        rule = "be a number of GiB with deterministic, as the memory that is free differs between runs"
        require(gib is not None or not self.deterministic, "kv_cache_gib", gib, rule)


class GenerateOutputs(NamedTuple):
    """The keys of a generating call's outputs, which the call names by position."""

    sequences: str  # Prompt and response.
    mask: str  # The response mask: 1 on sampled tokens.
    logprobs: str  # The model's own at the sampling temperature, before filters, penalties and biases.
    finished: str  # 1.0 for samples that ended with an end-of-sequence token, or at a stop.
    versions: str | None = None
    """Each token's version, if wanted: the updates of the role's weights before it was sampled (int64, 0
    where the mask is 0)."""

    @classmethod
    def of(cls, call: FunctionCall) -> GenerateOutputs:
        """Return the keys of the outputs of a call."""
        return cls(*call.outputs)


_ANSWERS = GenerateOutputs("sequence_ids", "response_mask", "gen_logprobs", "finished", "versions")
"""The keys of answers in the shipped algorithms."""


def answer_keys(graph: DataflowGraph) -> GenerateOutputs | None:
    """Return the keys of a graph's answers; None if it has no answers, or if it is not clear which these are.

    They are `sequence_ids`, `response_mask` and so on, whichever calls write them, and where none does, the
    outputs of the only call that generates. A key that no call writes is among them, too.
    """
    generating = graph.of_kind("generate")
    own = GenerateOutputs.of(generating[0]) if len(generating) == 1 else None
    if graph.producer(_ANSWERS.mask) is None or (own or _ANSWERS).sequences in graph.inputs:
        return own
    known = {
        field: usual for field, usual in _ANSWERS._asdict().items() if graph.producer(usual) is not None}
    return (_ANSWERS if own is None else own)._replace(**known)


@dataclass(frozen=True)
class TokenLimits:
    """The column of a dataset that limits the tokens of each row's responses."""

    column: str

    def row_fault(self, row: Mapping[str, Any]) -> str | None:
        """Return a sentence if the row's limit cannot be used, else None."""
        value = row[self.column]
        if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
            return None
        return f"{self.column} is {value!r}: it must be a whole number of at least 1, the most new tokens"


@dataclass(frozen=True)
class LogProbs(Work):
    """Computes log-probs of the first input's tokens, where `response_mask` is 1 if that is an input."""

    kind = "forward"
    output: ClassVar[str] = "logprobs"
    temperature: float = 1.0


@dataclass(frozen=True)
class TopLogProbs(Work):
    """Finds the `k` most probable tokens in the place of each of the first input's tokens.

    The two outputs are columns of shape (tokens, k): token ids (int64) and log-probs, the most probable first
    and the lower id first where log-probs are equal. Both are 0 where `response_mask`, if that is an input,
    is 0, and at the first token of a sequence.
    """

    kind = "forward"
    output: ClassVar[str] = "logprobs"
    k: int = 64
    temperature: float = 1.0

    def __post_init__(self) -> None:
        require(self.k >= 1, "k", self.k, "be at least 1")


@dataclass(frozen=True)
class Values(Work):
    """Computes the values of the states in which the first input's tokens were chosen (score head)."""

    kind = "forward"
    output: ClassVar[str] = "values"


@dataclass(frozen=True)
class Scores(Work):
    """Computes a score per sequence of the first input: the score head at its last token, or its sigmoid."""

    kind = "forward"
    output: ClassVar[str] = "scores"
    probability: bool = False  # The score is a logit (outcome reward model) and its probability is wanted.


@dataclass(frozen=True)
class TrainStep(Work):
    """Takes one optimizer step per mini-batch; the first input holds the packed sequences.

    The router losses of models with experts (see `nn.moe.RouterLosses`) are averaged over layers and over the
    mini-batch's sequences or tokens.
    """

    kind = "train_step"
    loss: Loss
    minibatches: int = 1
    epochs: int = 1
    temperature: float = 1.0
    router_aux_loss_coef: float = 0.0  # Weight of the load-balancing loss.
    router_z_loss_coef: float = 0.0

    def __post_init__(self) -> None:
        for name in ("router_aux_loss_coef", "router_z_loss_coef"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "not be negative")
        require(self.minibatches >= 1, "minibatches", self.minibatches, "be at least 1")
        require(self.epochs >= 1, "epochs", self.epochs, "be at least 1")
        object.__setattr__(self, "loss", as_loss(self.loss))

    @property
    def num_minibatches(self) -> int:
        return self.minibatches

    @property
    def output(self) -> str:
        return self.loss.output

    @property
    def group_size(self) -> int:
        return self.loss.group_size


KEEP = "keep"
"""The column in which a filtering host function says which samples it keeps."""
DECISION = "decision"
"""The key under which a deciding host function returns its decision."""


@dataclass(frozen=True)
class HostFunction(Work):
    """Calls plain Python: `function(batch, context) -> {output key: column}`, or `(columns, metrics)`."""

    kind = "host"
    function: Any
    splittable: bool = False  # Whether it can run on any part of the samples, so that a plan may use dp.
    filters: bool = False
    """Whether it drops samples: it also returns a column "keep", one boolean per sample. Calls that read
    its outputs work on the samples that it has kept."""
    decides: bool = False
    """Whether it also returns a JSON value "decision", by which `Experiment.step` may branch (run.agree)."""
    example: Any = None  # A decision for trying out the step program without data.
    timeout_seconds: float | None = 1800.0
    """Longest time of a call; None: no limit. The limit interrupts Python code, waits and system calls."""

    def __post_init__(self) -> None:
        if self.timeout_seconds is not None:
            rule = "be above 0, or None for no limit"
            require(self.timeout_seconds > 0, "HostFunction.timeout_seconds", self.timeout_seconds, rule)
        if self.decides and self.splittable:
            raise ValueError("a HostFunction that decides needs all samples: it cannot be splittable")


def longest_response(graph: DataflowGraph) -> int:
    """Return the most tokens that a response of the graph's generate calls may have; 0 without such calls."""
    works = [call.work for call in graph.of_kind("generate") if call.work is not None]
    return max((work.sampling.max_new_tokens for work in works), default=0)


class Loss(ABC):
    """The base class of losses; a loss is usually a frozen dataclass.

    A loss adds up: what it returns for the parts of a mini-batch sums to the loss of the mini-batch, and so
    do its metrics. Those whose names end with "/max" are maxima instead. The metrics of a call are means, or
    maxima, over its mini-batches.
    """

    output: str
    """What the model must compute: `logprobs`, `values` or `scores`."""
    entropy: bool = False
    """Whether the outputs also have `entropy`: in nats, with its gradient, which costs time only if used."""
    learns: str = "policy"
    """What the model learns: a key of `learning_rates.LEARNING_RATES`, for optimizers without `lr`."""
    group_size: int = 1
    """Consecutive samples that the loss compares (see `sample_ids`). A part has all samples of a group,
    except for those that a filter has dropped."""
    token_ids: tuple[str, ...] = ()
    """For a loss of `logprobs`, the keys of columns of token ids, of shape (tokens, k). Then `logprobs_at` in
    the outputs has, with gradients, the log-probs of these tokens in the place of each token of the mask: the
    columns side by side, shape (tokens, sum of all k)."""

    @abstractmethod
    def totals(self, batch: Batch) -> dict[str, float]:
        """Return counts whose sums over the mini-batch normalise the loss, such as the number of response
        tokens. A mini-batch in which all of them are 0 has nothing to learn, and there is no update."""

    @abstractmethod
    def __call__(
        self, outputs: Mapping[str, Tensor], batch: Batch, totals: Mapping[str, float]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return this part's share of the loss (a scalar) and of each metric."""

    def summarize(self, means: Mapping[str, float], first: Mapping[str, float]) -> Mapping[str, float]:
        """Return the metrics of a call, given their means over mini-batches and those of the first."""
        return means

    def row_fault(self, row: Mapping[str, Any]) -> str | None:
        """Return a sentence if the loss cannot use this row of the dataset, else None."""
        return None


@dataclass(frozen=True)
class _AdaptedLoss(Loss):
    """A loss whose class does not inherit from Loss, with the defaults of Loss for what it lacks."""

    loss: Loss

    def __post_init__(self) -> None:
        for name in ("output", "entropy", "learns", "group_size", "token_ids", "summarize", "row_fault"):
            if hasattr(self.loss, name):
                vars(self)[name] = getattr(self.loss, name)

    def totals(self, batch: Batch) -> dict[str, float]:
        return self.loss.totals(batch)

    def __call__(
        self, outputs: Mapping[str, Tensor], batch: Batch, totals: Mapping[str, float]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return self.loss(outputs, batch, totals)


def as_loss(loss: Any) -> Loss:
    """Return the loss itself, or one with all members of Loss if its class does not inherit from Loss."""
    return loss if isinstance(loss, Loss) else _AdaptedLoss(loss)
