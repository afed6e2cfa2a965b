"""The kinds of work that an engine can do, and their settings: sampling, optimizers, losses. Free of torch.

Token-level arrays are aligned with the tokens: entry t of `logprobs` is log p(token t | tokens before t);
entry t of `values` is the value of the state in which token t is chosen. Both are 0 where `response_mask`
is 0: on prompts, and on tokens that were inserted into responses (see `data.batch`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache
from math import inf
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, NewType, get_args

from typing_extensions import Doc

from realhf.data.light_tokenizer import LightTokenizer, continuation
from realhf.graph import DataflowGraph, FunctionCall, Work
from realhf.user_input.field_types import check_types, require

if TYPE_CHECKING:
    from torch import Tensor

    from realhf.data.batch import Batch


@dataclass(frozen=True)
class SamplingConfig:
    """Settings of sampling; docs/generation.md says which options of transformers and vLLM they equal.

    `logit_bias`, the penalties, the bad words and `min_new_tokens` change the logits, in this order; then
    temperature, `top_k`, `top_p` and `min_p` apply. `temperature=0` is greedy: the last three have no effect.
    Lists become tuples, a text becomes a tuple of one, and a mapping becomes a tuple of pairs.
    """

    max_new_tokens: int = 256  # Most tokens of a response.
    temperature: float = 1.0  # Logits are divided by it; 0: always take the most probable token.
    top_k: int = 0  # Sample among this many most probable tokens; 0: among all.
    top_p: float = 1.0  # Sample among the most probable tokens that together have this probability.
    min_p: float = 0.0
    """Sample among the tokens with at least this share, from 0 to 1, of the highest probability."""
    stop: tuple[str, ...] = ()
    """Texts that end a response: its last token is the first with which its text contains one of them."""
    stop_token_ids: tuple[int, ...] = ()  # Tokens that end a response, as the model's eos tokens do.
    ignore_eos: bool = False  # Whether responses go on after the model's eos tokens.
    min_new_tokens: int = 0
    """A response has at least this many tokens before the one that ends it; at most `max_new_tokens`."""
    repetition_penalty: float = 1.0
    """Positive logits of tokens that are in the prompt or the response are divided by it, negative ones are
    multiplied by it; above 0, and 1 changes nothing."""
    presence_penalty: float = 0.0  # Subtracted from the logits of the response's tokens; from -2 to 2.
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit each time that the response has the token; from -2 to 2."""
    logit_bias: tuple[tuple[int, float], ...] = ()  # Pairs of a token id and what is added to its logit.
    bad_words: tuple[str, ...] = ()
    """Texts whose tokens, with and without a space before them, may not be sampled in this sequence."""
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    """Sequences of token ids: the last id of each may not be sampled directly after the others."""

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids", "logit_bias", "bad_words", "bad_word_ids"):
            object.__setattr__(self, name, _as_tuple(getattr(self, name)))
        check_types(self, "sampling.")
        require(self.max_new_tokens >= 1, "sampling.max_new_tokens", self.max_new_tokens, "be at least 1")
        require(
            0 <= self.temperature < inf, "sampling.temperature", self.temperature,
            "be a number of at least 0")
        require(self.top_k >= 0, "sampling.top_k", self.top_k, "not be negative")
        require(0 < self.top_p <= 1, "sampling.top_p", self.top_p, "be above 0 and at most 1")
        require(0 <= self.min_p <= 1, "sampling.min_p", self.min_p, "be from 0 to 1")
        require(
            0 <= self.min_new_tokens <= self.max_new_tokens, "sampling.min_new_tokens", self.min_new_tokens,
            f"be from 0 to sampling.max_new_tokens, {self.max_new_tokens}")
        require(
            0 < self.repetition_penalty < inf, "sampling.repetition_penalty", self.repetition_penalty,
            "be a number above 0")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            require(-2 <= value <= 2, f"sampling.{name}", value, "be from -2 to 2")
        self._check_words()

    def _check_words(self) -> None:
        """Raise ValueError unless the texts are not empty and the token ids not negative."""
        for name in ("stop", "bad_words", "bad_word_ids"):
            value = getattr(self, name)
            require(all(map(len, value)), f"sampling.{name}", value, "have no empty part")
        for name, token in self.token_ids:
            require(token >= 0, f"sampling.{name}", getattr(self, name), "have no negative token id")
        tokens = [token for token, _ in self.logit_bias]
        require(
            len(set(tokens)) == len(tokens), "sampling.logit_bias", self.logit_bias,
            "have each token id once")
        require(
            all(-inf < bias < inf for _, bias in self.logit_bias), "sampling.logit_bias", self.logit_bias,
            "have finite numbers")

    @property
    def token_ids(self) -> list[tuple[str, int]]:
        """Return all token ids in the settings, each with the name of its field."""
        named_ids = [("stop_token_ids", token) for token in self.stop_token_ids]
        named_ids += [("logit_bias", token) for token, _ in self.logit_bias]
        return named_ids + [("bad_word_ids", token) for tokens in self.bad_word_ids for token in tokens]

    @property
    def reads_text(self) -> bool:
        """Whether the settings have texts, for which a tokenizer is needed."""
        return bool(self.stop or self.bad_words)

    @property
    def penalizes(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def greedy(self) -> SamplingConfig:
        """Return these settings, but with the most probable token always taken."""
        return replace(self, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)


def _as_tuple(value: Any) -> Any:
    """Return a text as a tuple of one, a mapping as a tuple of pairs, and lists as tuples."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, Mapping):
        return tuple(value.items())
    return tuple(map(_as_part, value)) if isinstance(value, list | tuple) else value


def _as_part(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@dataclass(frozen=True)
class InsertedPhrase:
    """An Interruption in token ids: a generating call inserts `phrase` unless `end` has come before."""

    after_tokens: int
    phrase: tuple[int, ...]
    end: tuple[int, ...]


@dataclass(frozen=True)
class Interruption:
    """When thinking is interrupted, and by which text.

    If the first `after_tokens` tokens of a response do not contain the tokens of `end`, the tokens of
    `phrase` follow them instead of sampled ones, and then sampling goes on. Inserted tokens are part of the
    response that rewards see, and of its length. They are not trained on: their response mask and log-probs
    are 0.
    """

    after_tokens: int  # Tokens of a response before the phrase.
    phrase: str = "Okay, time is up. Let me stop thinking and formulate a final answer now. </think>"
    end: str = "</think>"
    """The text that ends thinking. The tokenizer should always split it alike, as it does a special token."""

    def __post_init__(self) -> None:
        check_types(self, "interruption.")
        require(self.after_tokens >= 1, "interruption.after_tokens", self.after_tokens, "be at least 1")

    def tokenized(self, tokenizer: str) -> InsertedPhrase:
        """Return the interruption in token ids of the tokenizer in this directory.

        Raises ValueError if its files cannot be read, or if it makes no tokens of a text.
        """
        ids = {name: _token_ids(tokenizer, getattr(self, name)) for name in ("phrase", "end")}
        for name, tokens in ids.items():
            require(bool(tokens), f"interruption.{name}", repr(getattr(self, name)), "have tokens")
        return InsertedPhrase(self.after_tokens, **ids)


@lru_cache(maxsize=16)
def _token_ids(tokenizer: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(continuation(LightTokenizer(tokenizer), text))
    except ValueError as error:
        raise ValueError(f"interruption needs the tokenizer: {error}") from error


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (Loshchilov & Hutter 2019), gradient clipping and a learning-rate schedule."""

    lr: float | None = None
    """The learning rate after warm-up; None: the usual one for what is learned, higher for adapters (see
    `LEARNING_RATES`)."""
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
        require(
            not (ratio and self.warmup_steps), "optimizer.warmup_ratio", ratio,
            f"be 0, as optimizer.warmup_steps is {self.warmup_steps}: give one or the other")


MOMENTS = ("exp_avg", "exp_avg_sq")
OPTIMIZER_STATE = ("master", *MOMENTS)
"""What AdamW has of every parameter, by the names in checkpoints: a master copy of the weight, and the
averages of its gradient and of the gradient's square."""


def states_of_weights(*, is_narrow: bool) -> tuple[str, ...]:
    """Return what AdamW has besides the weights; narrow ones are no master copy, so they need another."""
    return OPTIMIZER_STATE if is_narrow else MOMENTS


class LearningRates(NamedTuple):
    """The default learning rates of one kind of training, and where they are usual."""

    full: float
    lora: float
    source: str


LEARNING_RATES = {
    "policy": LearningRates(1e-6, 1e-5, "TRL's GRPO, RLOO and distillation, verl's actor"),
    "critic": LearningRates(1e-5, 1e-4, "verl's critic"),
    "completions": LearningRates(2e-5, 2e-4, "TRL's SFT"),
    "preferences": LearningRates(1e-6, 1e-5, "TRL's DPO"),
    "scores": LearningRates(1e-5, 1e-4, "InstructGPT's reward model (9e-6); TRL's has 1e-4"),
}
"""Kind of training, which a loss names as `learns` -> learning rates.

Adapters (LoRA) get ten times the rate of full training (Schulman et al. 2025, "LoRA Without Regret").
"""


def default_rates(loss: Loss | None) -> LearningRates:
    """Return the default learning rates for a loss; those of a policy for a model that no loss trains."""
    return LEARNING_RATES["policy" if loss is None else loss.learns]


def learning_rate(config: OptimizerConfig, step: int) -> float:
    """Return the learning rate of optimizer step `step`, counted from 0; `config` must give `lr`."""
    assert config.lr is not None
    if config.schedule != "constant":
        assert config.total_steps > 0
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    progress = min(1.0, (step - config.warmup_steps) / max(1, config.total_steps - config.warmup_steps))
    remaining = 1 - progress if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * remaining)


class Output(StrEnum):
    """A kind of result of a model. Log-probs come with `entropy` if the loss asks for it."""

    LOGPROBS = "logprobs"
    VALUES = "values"
    SCORES = "scores"

    @property
    def head(self) -> str:
        """The head that the model needs: that of a language model, or one that gives one number."""
        return "lm" if self is Output.LOGPROBS else "score"

    @property
    def per_sequence(self) -> bool:
        """Whether there is one for each sequence; else there is one for each token."""
        return self is Output.SCORES

    @property
    def needs_logits(self) -> bool:
        """Whether logits over the whole vocabulary are computed for it."""
        return self.head == "lm"


class ModelWork(Work):
    """The base class of work on a model."""

    @property
    def output(self) -> Output:
        """Return the kind of result that the model computes."""
        raise NotImplementedError

    @property
    def temperature(self) -> float:
        """The number by which logits are divided."""
        return 1.0


MaxRows = Annotated[int, Doc("Sequences that a rank decodes at once; the others wait for a free slot.")]
KvCacheGib = Annotated[
    float | None, Doc(
        "GiB of a rank for keys and values. None: enough for `max_rows` sequences of full length, but at "
        "most 90 % of a GPU's free memory less what passes need, or half of a host's free memory.")]
PrefillTokens = Annotated[int, Doc("Prompt tokens per forward pass; a longer prompt is processed in chunks.")]
WorkStealing = Annotated[
    bool, Doc(
        "Whether replicas that finish early take waiting prompts from others. Which prompts they take "
        "depends on timing; this changes the last bits of log-probs, and in bfloat16 a token now and then. "
        "Switch it off for runs that must repeat bit for bit.")]
CudaGraphs = Annotated[
    bool, Doc(
        "Whether a GPU records and replays decoding steps; not for experts in float32, nor where rotations "
        "depend on lengths.")]
CacheOnUpdate = Annotated[
    Literal["recompute", "keep"], Doc(
        "What happens to cached keys and values of unfinished samples when the weights change between rounds "
        "(see `rounds`). `recompute`: they are computed again. `keep`: they stay, computed by older weights; "
        "then the cache must hold all unfinished samples at once, and prompts stay on their replica (no work "
        "stealing).")]


GenerationWeights = Annotated[
    Literal["full", "int8"], Doc(
        "The precision of the weights that generate. `full`: the role's own. `int8`: linear layers and "
        "experts have whole numbers up to 127 and a scale for each output channel; all else keeps its "
        "precision. A reallocation then moves a half (bfloat16) to a quarter (float32) of the bytes. The "
        "trainer's log-probs differ from the generator's: limit the weights by `loss.proximal` and "
        "`loss.importance_cap`.")]


SampleId = NewType("SampleId", int)
"""The id of a sample, unique in the run."""


class Beginning(NamedTuple):
    """Samples that begin in this generation with the same tokens; or one that goes on from an earlier round.

    Its tokens are then the start, `num_before` tokens of earlier turns and answers, and `num_drawn` tokens of
    the turn in which the model is.
    """

    samples: list[SampleId]
    tokens: list[int]
    limit: int  # Most tokens that the model draws now; 0: none in this round.
    most: int  # Most tokens after the start.
    num_before: int = 0
    num_drawn: int = 0

    @property
    def num_start(self) -> int:
        return len(self.tokens) - self.num_before - self.num_drawn


class Observation(NamedTuple):
    """The environment's tokens after a turn of a sample, if there are any."""

    sample: SampleId
    tokens: list[int]
    limit: int = 0  # Most tokens that the model draws now; 0: none in this round.


@dataclass(frozen=True)
class EnvironmentReplies:
    """The replies of environments: samples that begin, and observations after turns of others."""

    beginnings: tuple[Beginning, ...] = ()
    observations: tuple[Observation, ...] = ()

    @property
    def samples(self) -> list[SampleId]:
        """The samples that wait no longer."""
        begun = [sample for group in self.beginnings for sample in group.samples]
        return begun + [observation.sample for observation in self.observations]

    def and_then(self, later: EnvironmentReplies) -> EnvironmentReplies:
        return EnvironmentReplies(self.beginnings + later.beginnings, self.observations + later.observations)

    def in_order(self) -> EnvironmentReplies:
        """Return the same, in an order that does not depend on what has arrived first."""
        return EnvironmentReplies(tuple(sorted(self.beginnings)), tuple(sorted(self.observations)))


class TurnSource(ABC):
    """The other side of a generation in turns: it gives a replica's samples their starts, takes each turn
    that the model has ended, and gives what follows it."""

    end_token_ids: Collection[int]
    """The tokens that end a turn."""

    @property
    @abstractmethod
    def num_samples(self) -> int:
        """Samples that begin in this generation, or go on in it."""

    @property
    @abstractmethod
    def method_seconds(self) -> tuple[float, int]:
        """Return the seconds of environments' methods so far and their number, as this rank knows."""

    @abstractmethod
    def turn_ended(self, sample: SampleId, tokens: list[int], *, finished: bool) -> None:
        """Take the tokens of a turn that is `finished`, or has as many tokens as it may get now."""

    @abstractmethod
    def poll(self, timeout: float) -> EnvironmentReplies:
        """Return what has arrived; wait for it at most so many seconds."""

    @property
    @abstractmethod
    def num_waiting(self) -> int:
        """Samples whose environments have not answered yet, or have not started."""

    @abstractmethod
    def results(self, samples: Sequence[SampleId]) -> tuple[list[dict[str, Any]], list[bool]]:
        """Return what each sample's environment has answered, as JSON, and whether it ended by itself.

        A sample whose `stop` is None goes on in the next round.
        """


class TurnSettings(NamedTuple):
    """The settings of a generation that environments must know."""

    seed: int
    max_new_tokens: int  # Of each turn.
    num_positions: int | None
    eos_token_ids: Collection[int]
    budget: int | None = None  # Most tokens that the model draws of each sample; None: there are no rounds.
    waits_for_all: bool = False  # Whether answers are taken up only when all of them are here.


class TurnSourceFactory(ABC):
    """Opens a TurnSource for each generation of a call: the setting `environment` of Generate."""

    @abstractmethod
    def most_tokens(self, max_new_tokens: int) -> int:
        """Return the most tokens of a response whose turns have at most `max_new_tokens` each."""

    @abstractmethod
    def most_drawn(self, max_new_tokens: int) -> int:
        """Return the most tokens that the model draws of a response."""

    @abstractmethod
    def start(
        self, rows: Mapping[SampleId, Mapping[str, Any]], settings: TurnSettings,
        *, unfinished: Mapping[SampleId, tuple[list[int], dict[str, Any]]] | None = None,
    ) -> TurnSource:
        """Return a source that starts an environment for each sample, given the row of each.

        The `unfinished` samples of an earlier round have their tokens and their rollouts so far.
        """


@dataclass(frozen=True)
class Generate(ModelWork):
    """Continues prompts; see GenerateOutputs for the columns that it returns.

    The call's first input is the prompts. A second one, if there is one, is a column with the most tokens of
    each sample's response (see TokenLimits); `sampling.max_new_tokens` is the limit of all.
    """

    kind = "generate"
    output: ClassVar[Output] = Output.LOGPROBS
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
    generation_weights: GenerationWeights = "full"
    interruption: InsertedPhrase | None = None  # A phrase that is inserted into over-long responses.
    tokenizer: str | None = None
    """Directory of the tokenizer, which `sampling.stop` and `sampling.bad_words` need."""
    environment: TurnSourceFactory | None = None
    """Answers what the model says, so that a response has several turns; None: a response is one turn. The
    inputs after the prompts are then columns of the rows, and there is one more output."""

    def __post_init__(self) -> None:
        require(
            self.tokenizer is not None or not self.sampling.reads_text, "tokenizer", self.tokenizer,
            "be a directory for sampling.stop and sampling.bad_words")
        if self.interruption is not None:
            after, size = self.interruption.after_tokens, len(self.interruption.phrase)
            most = self.sampling.max_new_tokens - size - 1
            why = f"the phrase (tokens: {size}) and an answer follow, within sampling.max_new_tokens"
            require(after <= most, "interruption.after_tokens", after, f"be at most {most}, as {why}")
        ways = ("recompute", "keep")
        require(
            self.cache_on_update in ways, "cache_on_update", self.cache_on_update,
            f"be one of {', '.join(ways)}")
        forms = get_args(get_args(GenerationWeights)[0])
        require(
            self.generation_weights in forms, "generation_weights", self.generation_weights,
            f"be one of {', '.join(forms)}")
        require(self.max_rows >= 1, "max_rows", self.max_rows, "be at least 1")
        gib = self.kv_cache_gib
        require(gib is None or 0 < gib < inf, "kv_cache_gib", gib, "be a number of GiB above 0")
        require(self.prefill_tokens >= 1, "prefill_tokens", self.prefill_tokens, "be at least 1")
        require(
            not (self.deterministic and self.work_stealing), "work_stealing", "true",
            "be false with deterministic, as timing decides which replica takes a prompt")
        require(
            gib is not None or not self.deterministic, "kv_cache_gib", gib,
            "be a number of GiB with deterministic, as the memory that is free differs between runs")

    @property
    def most_drawn_tokens(self) -> int:
        """The most tokens of a response that are drawn, as far as the settings tell."""
        if self.environment is not None:
            return self.environment.most_drawn(self.sampling.max_new_tokens)
        return self.sampling.max_new_tokens

    @property
    def most_response_tokens(self) -> int:
        """The most tokens of a response, as far as the settings tell."""
        if self.environment is not None:
            return self.environment.most_tokens(self.sampling.max_new_tokens)
        return self.sampling.max_new_tokens


class GenerateOutputs(NamedTuple):
    """The keys of a generating call's outputs, which the call names by position."""

    sequences: str  # Prompt and response.
    mask: str  # The response mask: 1 on sampled tokens.
    logprobs: str  # The model's own at the sampling temperature, before filters, penalties and biases.
    finished: str  # 1.0 for samples that ended with an end-of-sequence token, or at a stop.
    versions: str | None = None
    """Each token's version, if wanted: the updates of the role's weights before it was sampled (int64, 0
    where the mask is 0)."""
    rollout: str | None = None
    """What has become of each sample's turns with its environment, as JSON (see
    environments/rollouts.py): the last key of a call with an environment."""

    @classmethod
    def of(cls, call: FunctionCall) -> GenerateOutputs:
        if getattr(call.work, "environment", None) is None:
            return cls(*call.outputs)
        return cls(*call.outputs[:-1])._replace(rollout=call.outputs[-1])


_USUAL_KEYS = GenerateOutputs(
    "sequence_ids", "response_mask", "gen_logprobs", "finished", "versions", "rollout")
"""The keys of responses in the shipped algorithms."""


def response_keys(graph: DataflowGraph) -> GenerateOutputs | None:
    """Return the keys of a graph's responses; None if it has none, or if it is not clear which these are.

    They are `sequence_ids`, `response_mask` and so on, whichever calls write them, and where none does, the
    outputs of the only call that generates. A key that no call writes is among them, too.
    """
    generating = graph.of_kind("generate")
    own = GenerateOutputs.of(generating[0]) if len(generating) == 1 else None
    if graph.producer(_USUAL_KEYS.mask) is None or (own or _USUAL_KEYS).sequences in graph.inputs:
        return own
    known = {
        field: usual for field, usual in _USUAL_KEYS._asdict().items() if graph.producer(usual) is not None}
    return (_USUAL_KEYS if own is None else own)._replace(**known)


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
class LogProbs(ModelWork):
    """Computes log-probs of the first input's tokens, where `response_mask` is 1 if that is an input."""

    kind = "forward"
    output: ClassVar[Output] = Output.LOGPROBS
    temperature: float = 1.0
    entropy: bool = False  # Whether a second output has the entropy at each token, in nats.


@dataclass(frozen=True)
class TopLogProbs(ModelWork):
    """Finds the `k` most probable tokens in the place of each of the first input's tokens.

    The two outputs are columns of shape (tokens, k): token ids (int64) and log-probs, the most probable first
    and the lower id first where log-probs are equal. Both are 0 where `response_mask`, if that is an input,
    is 0, and at the first token of a sequence.
    """

    kind = "forward"
    output: ClassVar[Output] = Output.LOGPROBS
    k: int = 64
    temperature: float = 1.0

    def __post_init__(self) -> None:
        require(self.k >= 1, "k", self.k, "be at least 1")


@dataclass(frozen=True)
class Values(ModelWork):
    """Computes the values of the states in which the first input's tokens were chosen (score head)."""

    kind = "forward"
    output: ClassVar[Output] = Output.VALUES


@dataclass(frozen=True)
class Scores(ModelWork):
    """Computes a score per sequence of the first input: the score head at its last token, or its sigmoid."""

    kind = "forward"
    output: ClassVar[Output] = Output.SCORES
    probability: bool = False  # The score is a logit (outcome reward model) and its probability is wanted.


class Training(Work):
    """The base class of work that takes one optimizer step per mini-batch."""

    kind = "train_step"
    minibatches: int
    epochs: int
    shuffle_minibatches: bool
    """Whether each epoch cuts the samples into other mini-batches, in an order that depends on `seed`; else
    all epochs have the same, in the order of the samples."""
    seed: int

    def __post_init__(self) -> None:
        require(self.minibatches >= 1, "minibatches", self.minibatches, "be at least 1")
        require(self.epochs >= 1, "epochs", self.epochs, "be at least 1")

    def summarize(self, means: Mapping[str, float], first: Mapping[str, float]) -> Mapping[str, float]:
        """Return the metrics of a call, given their means over mini-batches and those of the first."""
        return means

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps that the work takes each time it runs."""
        return self.minibatches * self.epochs

    @property
    def repeats(self) -> int:
        """Times that each mini-batch is trained on; with shuffles, each epoch has mini-batches of its own."""
        return 1 if self.shuffle_minibatches else self.epochs

    @property
    def num_minibatches(self) -> int:
        return self.minibatches


@dataclass(frozen=True)
class TrainStep(Training, ModelWork):
    """Trains a language model on packed sequences, which the first input holds.

    The router losses of models with experts (see `nn.moe.RouterLosses`) are averaged over layers and over the
    mini-batch's sequences or tokens.
    """

    loss: Loss
    minibatches: int = 1
    epochs: int = 1
    temperature: float = 1.0
    router_aux_loss_coef: float = 0.0  # Weight of the load-balancing loss.
    router_z_loss_coef: float = 0.0
    shuffle_minibatches: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("router_aux_loss_coef", "router_z_loss_coef"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "not be negative")
        object.__setattr__(self, "loss", as_loss(self.loss))

    def summarize(self, means: Mapping[str, float], first: Mapping[str, float]) -> Mapping[str, float]:
        return self.loss.summarize(means, first)

    @property
    def has_router_losses(self) -> bool:
        return self.router_aux_loss_coef > 0 or self.router_z_loss_coef > 0

    @property
    def output(self) -> Output:
        return Output(self.loss.output)

    @property
    def group_size(self) -> int:
        return self.loss.group_size


@dataclass(frozen=True)
class ForwardFunction(Work):
    """Calls `function(module, batch, **modules)` without gradients, which returns columns by output key.

    `module` is that of the call's ModuleRole, and `modules` are those of the roles that the call reads. A
    column is a tensor with one entry for each row of the batch.
    """

    kind = "forward"
    function: Any


@dataclass(frozen=True)
class TrainFunction(Training):
    """Minimises the mean, over the rows of a mini-batch, of the losses that a function returns.

    `function(module, batch, **modules)` returns losses, a tensor with one entry for each row, or a pair of
    them and metrics of that form by name; `modules` are those of the roles that the call reads, whose own
    parameters get no gradients. Metrics are logged as means over rows, too, and those whose names end with
    "/max" as maxima.
    """

    function: Any
    minibatches: int = 1
    epochs: int = 1
    shuffle_minibatches: bool = False
    seed: int = 0
    weights: str | None = None  # Input key of the weights of the rows in these means; None: they are equal.
    noise: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Columns of standard normal numbers that the batch gets, by key, with the shape of a row's entry. They
    depend on the seed, the call, the optimizer step and the sample's id alone."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "noise", {key: tuple(shape) for key, shape in self.noise.items()})


@dataclass(frozen=True)
class HeldOutLosses(ForwardFunction):
    """Computes what a TrainFunction returns, without gradients and in evaluation mode.

    Its output has a dict for each row, the loss and the metrics by name. `function` is that of the training.
    """

    noise: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # As in the training.


KEEP = "keep"
"""The column in which a filtering host function says which samples pass."""
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
    its outputs work on the samples that have passed."""
    decides: bool = False
    """Whether it also returns a JSON value "decision", by which `Experiment.step` may branch (run.agree)."""
    example: Any = None  # A decision for trying out the step program without data.
    asks: tuple[str, ...] = ()
    """Calls of kind `forward` in the same part that the function may ask while it runs (`context.ask`)."""
    timeout_seconds: float | None = 1800.0
    """Longest time of a call; None: no limit. The limit interrupts Python code, waits and system calls."""

    def __post_init__(self) -> None:
        if self.timeout_seconds is not None:
            require(
                self.timeout_seconds > 0, "HostFunction.timeout_seconds", self.timeout_seconds,
                "be above 0, or None for no limit")
        if isinstance(self.asks, str):
            raise ValueError(f"HostFunction.asks is {self.asks!r}: it must be a tuple of names of calls")
        object.__setattr__(self, "asks", tuple(self.asks))
        if self.decides and self.splittable:
            raise ValueError("a HostFunction that decides needs all samples: it cannot be splittable")


def longest_response(graph: DataflowGraph) -> int:
    """Return the most tokens that a response of the graph's generate calls may have; 0 without such calls."""
    return max((work.most_response_tokens for work in graph.works(Generate)), default=0)


class Loss(ABC):
    """The base class of losses; a loss is usually a frozen dataclass.

    A loss adds up: what it returns for the parts of a mini-batch sums to the loss of the mini-batch, and so
    do its metrics. Those whose names end with "/max" are maxima instead. The metrics of a call are means, or
    maxima, over its mini-batches.
    """

    output: str
    """What the model must compute: one of `Output`."""
    entropy: bool = False
    """Whether the outputs also have `entropy`: in nats, with its gradient, which costs time only if used."""
    learns: str = "policy"
    """What the model learns: a key of `LEARNING_RATES`, for optimizers without `lr`."""
    group_size: int = 1
    """Consecutive samples that the loss compares (see `data.order`). A part has all samples of a group,
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


LOSS_FIELDS = tuple(Loss.__annotations__)
"""What a loss says about itself: the names of its fields."""


@dataclass(frozen=True)
class _AdaptedLoss(Loss):
    """A loss whose class does not inherit from Loss, with the defaults of Loss for what it lacks."""

    loss: Loss

    def __post_init__(self) -> None:
        for name in (*LOSS_FIELDS, "summarize", "row_fault"):
            if hasattr(self.loss, name):
                vars(self)[name] = getattr(self.loss, name)

    def totals(self, batch: Batch) -> dict[str, float]:
        return self.loss.totals(batch)

    def __call__(
        self, outputs: Mapping[str, Tensor], batch: Batch, totals: Mapping[str, float]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return self.loss(outputs, batch, totals)


def is_own(loss: Loss) -> bool:
    """Return whether a user has written the loss, or the function that it calls."""
    given = given_loss(loss)
    return getattr(given, "function", None) is not None or not type(given).__module__.startswith("realhf.")


def given_loss(loss: Loss) -> Any:
    """Return the object that was given as the loss: one without the base class is in an adapter."""
    return loss.loss if isinstance(loss, _AdaptedLoss) else loss


def as_loss(loss: Any) -> Loss:
    """Return the loss itself, or one with all members of Loss if its class does not inherit from Loss.

    Raises ValueError unless it names an output of models.
    """
    output = getattr(loss, "output", None)
    require(
        output in list(Output), f"{type(loss).__name__}.output", repr(output),
        f"be one of {', '.join(Output)}")
    return loss if isinstance(loss, Loss) else _AdaptedLoss(loss)
