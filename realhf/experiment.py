"""Experiment: the roles, graph, data, evaluations and schedule that a user defines. Free of torch."""

import copy
import json
import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import islice, pairwise
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import networkx as nx

from realhf.calls import (
    HeldOutLosses,
    HostFunction,
    OptimizerConfig,
    SamplingConfig,
    TrainFunction,
    Training,
    TrainStep,
    default_rates,
)
from realhf.checkpoint.peft import resolved
from realhf.data.dataset import DatasetConfig, as_dataset
from realhf.data.row_files import commits_of_data
from realhf.graph import DataflowGraph, FunctionCall
from realhf.models.lora import LoraConfig
from realhf.models.model_config import MegatronConfig, ModelConfig, ModuleConfig, TransformersConfig
from realhf.steps.hooks import EarlyStopping, Hook
from realhf.steps.rollout_log import RolloutLog
from realhf.steps.sample_pool import PartExecutor
from realhf.steps.step_runner import StepRunner
from realhf.user_input.field_types import check_types, require
from realhf.user_input.hub import cached_name, commits_of, find_model

_SET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""Legal names of sets, which are also names of folders."""


@dataclass(frozen=True)
class Evaluation:
    """A set of held-out rows, the samples of each prompt, and how they are drawn and scored.

    Its rows are read in the order of the file.
    """

    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    samples: int = 1  # Samples of each prompt.
    sampling: SamplingConfig | None = None
    """How responses are drawn. None: greedily if `samples` is 1, else as in training."""
    max_rows: int = 0  # Most rows, spread evenly over those of the dataset; 0: all of them.
    function: Any = None
    """Scores the responses, in the place of the experiment's `eval_function` or `reward_function`."""
    correct_by: str | None = None
    """Name of the reward that decides which samples are right, in pass@k, majority@k and the other metrics of
    several samples; None: the first reward. The score is the weighted sum of all rewards."""
    correct_above: float | None = None
    """A sample counts as right if that reward is above this; None: what the reward itself says, else 0.5."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "dataset", as_dataset(self.dataset, "Evaluation.dataset"))
        check_types(self, "Evaluation.")
        require(self.samples >= 1, "Evaluation.samples", self.samples, "be at least 1")
        require(self.max_rows >= 0, "Evaluation.max_rows", self.max_rows, "not be negative")
        finite = self.correct_above is None or isfinite(self.correct_above)
        require(finite, "Evaluation.correct_above", self.correct_above, "be finite")
        if self.sampling is not None:
            self._require_random(self.sampling, "Evaluation.sampling.temperature")

    def sampling_for(self, training: SamplingConfig) -> SamplingConfig:
        """Return how responses are drawn in an experiment with this sampling. Raises ValueError if all
        samples of a prompt would be equal."""
        if self.sampling is not None:
            return self.sampling
        if self.samples == 1:
            return training.greedy()
        self._require_random(training, "sampling.temperature")
        return training

    def _require_random(self, sampling: SamplingConfig, name: str) -> None:
        require(
            self.samples == 1 or sampling.temperature > 0, name, sampling.temperature,
            f"be above 0, as Evaluation.samples is {self.samples}")

    def chosen_rows(self, num_rows: int, has: Callable[[int], bool] = lambda row: True) -> list[int]:
        """Return the numbers of the rows to evaluate: all, or `max_rows` of them, spread evenly.

        `has` says whether a row is not left out. For a row that is left out, a following one takes part:
        the first rows of equal stretches of the data set are tried, then the second ones, and so on.
        """
        count = self.max_rows if 0 < self.max_rows < num_rows else num_rows
        starts = [i * num_rows // count for i in range(count + 1)]
        longest = max(stop - start for start, stop in pairwise(starts))
        tried = (start + i for i in range(longest) for start, stop in pairwise(starts) if start + i < stop)
        return sorted(islice(filter(has, tried), count))


EvalSets = DatasetConfig | Evaluation | Mapping[str, DatasetConfig | Evaluation]
"""The held-out rows of an experiment: one set, or several by name."""


def named_sets(given: EvalSets | None) -> dict[str, Evaluation]:
    """Return the sets of an experiment by name; a single one has an empty name.

    Raises ValueError if a name is illegal, or a set has a field with an illegal value.
    """
    if given is None:
        return {}
    if isinstance(given, DatasetConfig):
        return {"": Evaluation(given)}
    sets = given if isinstance(given, Mapping) else {"": given}
    if not sets:
        raise ValueError("eval_dataset is an empty dict: it must have a set by name, or be None")
    evaluations = {}
    for name, entry in sets.items():
        if isinstance(given, Mapping) and not _SET_NAME.fullmatch(name):
            raise ValueError(
                f"eval_dataset has a set named {name!r}: a name must have letters, digits, '.', '_' and '-', "
                "and begin with a letter or a digit")
        evaluation = entry if isinstance(entry, Evaluation) else Evaluation(entry)
        check_types(evaluation.dataset, f"{set_field(name)}.")
        in_order = replace(evaluation.dataset, shuffle=False, replacement=False)
        evaluations[name] = replace(evaluation, dataset=in_order)
    return evaluations


def set_field(name: str) -> str:
    """Return how messages call the set of this name."""
    return f"eval_dataset.{name}" if name else "eval_dataset"


def metric_prefix(name: str) -> str:
    """Return the beginning of the names of a set's metrics."""
    return f"eval/{name}/" if name else "eval/"


def sampling_seed(seed: int, name: str) -> int:
    """Return the seed of a set's responses: different for each set, and different from that of training."""
    return seed ^ zlib.crc32(metric_prefix(name).encode())


Dtype = Literal["float32", "bfloat16", "float16", "float64"]
_CONFIGS: dict[str, type[ModelConfig]] = {
    "native": ModelConfig, "transformers": TransformersConfig, "megatron": MegatronConfig}
_SECONDS = {"m": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class Role:
    """A model in the experiment. It is trainable if it has an optimizer, and frozen otherwise.

    With `lora`, only its adapters are trained and exported, and the model itself never changes.
    """

    model: str  # Hugging Face model directory, or the hub's `org/name` or `org/name@revision`.
    """With `random_init` it may also be a config.json or a shipped name."""
    head: Literal["lm", "score"] = "lm"  # `score` computes one number per token (critics, reward models).
    dtype: Dtype | None = None
    """Type of the weights. None: the type that config.json names, or else float32; for a role that `follows`
    another, float32."""
    optimizer: OptimizerConfig | None = None  # Settings of training; None: the role is frozen.
    random_init: bool = False  # Draw the weights at random instead of reading them.
    follows: str | None = None  # The weights are a moving average of this role's, updated as it trains.
    follow_rate: float = 0.01  # Share of the followed role's weights in each update.
    lora: LoraConfig | None = None  # Adapters, if only they are to be trained.
    float32_head: bool = False
    """Whether a bfloat16 or float16 model multiplies hidden states with its head in float32, both when it
    generates and when it trains (MiniMax-M1, arXiv:2506.13585). The log-probs of the two then differ less."""
    engine: Literal["native", "transformers", "megatron", "module"] = "native"
    """`transformers` runs that library's own class of any family, in whole replicas (data parallelism).
    `megatron` trains and computes forward passes with Megatron-Core; the native engine generates for it.
    `module` is that of a ModuleRole."""

    is_language_model: ClassVar[bool] = True
    """Whether the model reads tokens."""

    def __post_init__(self) -> None:
        check_types(self)
        if self.engine == "module" and self.is_language_model:
            raise ValueError("engine is module: write ModuleRole(module=...), which names the class")
        if self.follows is not None and self.optimizer is not None:
            raise ValueError("a role that follows another cannot have an optimizer of its own")
        if self.follows is not None and self.lora is not None:
            raise ValueError("a role that follows another cannot have adapters (lora)")
        if self.engine != "native" and self.float32_head:
            raise ValueError(
                f"float32_head is true: the {self.engine} engine computes the head in the model's dtype; use "
                "engine native, or dtype float32")
        if self.float32_head and self.head != "lm":
            raise ValueError(f"float32_head is true: it is for head lm, and head is {self.head}")
        if self.engine != "native" and self.lora is not None:
            raise ValueError(f"the {self.engine} engine has no adapters (lora): use engine native for them")
        require(0 < self.follow_rate <= 1, "follow_rate", self.follow_rate, "be above 0 and at most 1")

    def config(self) -> ModelConfig:
        return _CONFIGS[self.engine].load(self.model, head=self.head)

    @property
    def weights_dtype(self) -> Dtype:
        """Return the type of the weights. Raises ValueError if config.json names one that is not legal."""
        if self.dtype is not None:
            return self.dtype
        if self.follows is not None:  # The average of small updates needs precision.
            return "float32"
        named = self.config().hf_dtype
        legal = get_args(Dtype)
        if named is not None and named not in legal:
            raise ValueError(
                f"dtype is not set, and config.json of {self.model} names {named!r}: "
                f"set it to one of {', '.join(legal)}")
        return named or "float32"

    def model_path(self, *, weights: bool = False) -> Path:
        """Return `model` as a path; a model of the hub is downloaded if it is not in the cache.

        Without `weights`, only its small files are downloaded.
        """
        return find_model(self.model, weights=weights)

    def base_name(self) -> str:
        """Return the name of the model that the role starts from: its name on the hub, or else its path.

        The `_name_or_path` of a config is not used, as it can name the model's own predecessor.
        """
        path = self.model_path().resolve()
        return cached_name(path) or str(path)

    def resolved_lora(self, *, weights: bool = False) -> LoraConfig | None:
        """Return `lora`, with the settings and the path of the PEFT directory that its adapters start from.

        Adapters of the hub are downloaded if they are not in the cache; without `weights`, only their
        settings are downloaded.
        """
        if self.lora is None or self.lora.adapter is None:
            return self.lora
        adapter = find_model(self.lora.adapter, weights=weights)
        return resolved(replace(self.lora, adapter=str(adapter)))

    @property
    def weights_source(self) -> tuple[str | bool, ...]:
        """Return the fields that decide which weights a role starts with (without adapters).

        Two roles that never change their weights have equal ones if these fields are equal.
        """
        return (self.model, self.head, self.weights_dtype, self.random_init, self.engine)


@dataclass(frozen=True)
class ModuleRole(Role):
    """A role whose model is any torch.nn.Module: `module(**arguments)` returns it, as its class does.

    Every rank of a layout holds all of it. The parameters and the floating-point buffers are its state, which
    moves between layouts, and which averages and checkpoints hold. Roles with the same module, arguments,
    `draw` and dtype begin with equal weights.
    """

    model: str = ""  # Directory of an export whose weights the role starts with; empty: the module's own.
    engine: Literal["native", "transformers", "megatron", "module"] = "module"
    module: Callable[..., Any] | None = None  # A class or function of a module, or of the experiment's file.
    arguments: dict[str, Any] = field(default_factory=dict)  # JSON values.
    draw: int = 0  # Another number draws other initial weights.

    is_language_model: ClassVar[bool] = False

    def __post_init__(self) -> None:
        try:
            self._check()
        except ValueError as error:
            name = getattr(self.module, "__name__", "...")
            raise ValueError(f"ModuleRole(module={name}): {error}") from error
        object.__setattr__(self, "random_init", not self.model)

    def _check(self) -> None:
        super().__post_init__()
        if self.module is None:
            raise ValueError("module is not given: it must be a class of modules, or return a module")
        require(self.engine == "module", "engine", self.engine, "be module, as the role has a module")
        require(self.lora is None, "lora", self.lora, "be None: adapters of a module are layers of its own")
        legal = ("float32", "float64")
        require(self.dtype in (None, *legal), "dtype", self.dtype, f"be {' or '.join(legal)} for a module")
        if self.optimizer is not None and self.optimizer.lr is None:
            raise ValueError("optimizer.lr is not given: a module has no usual learning rate")
        self.config()

    def config(self) -> ModuleConfig:
        assert self.module is not None
        return ModuleConfig.of(self.module, self.arguments, draw=self.draw)

    @property
    def weights_dtype(self) -> Dtype:
        return self.dtype or "float32"

    @property
    def weights_source(self) -> tuple[str | bool, ...]:
        return (*super().weights_source, json.dumps(self.config().to_hf()))


@dataclass(frozen=True)
class Expected:
    """Expectations of a run, lengths in tokens. Only the planner uses them."""

    prompt_tokens: int | None = None  # The mean; None: measured on the dataset.
    longest_prompt_tokens: int | None = None  # None: measured with the mean, or equal to the mean above.
    common_prompt_tokens: int | None = None
    """Tokens with which all prompts begin, such as a system message. None: measured with the mean, or 0."""
    response_tokens: int | None = None
    """The mean, with `turns` of each turn. None: that of `lengths_from`, or as many as sampling allows, or
    measured on the dataset."""
    response_p99: int | None = None
    """Tokens that 99 % of the responses do not exceed; the planner fits a long tail to it and the mean. None:
    a response ends with the same chance after each token."""
    length_correlation: float | None = None
    """How alike the lengths of responses to one prompt are: 0 (drawn independently) to 1 (equal). None: as
    measured in `lengths_from`, or as usual in our runs (planner/lengths.py)."""
    lengths_from: str | None = None
    """Directory of a run whose rollouts.jsonl has the lengths of responses; with an environment also the
    turns, what the environment has added between them, and its seconds."""
    turns: float | None = None
    """Mean number of turns of a rollout with an environment. None: as in `lengths_from`, else the planner
    counts single turns."""
    env_seconds: float | None = None
    """Mean seconds that the environment takes after a turn. None: as in `lengths_from`, else 0."""
    observation_tokens: float | None = None
    """Mean tokens that are added between two turns. None: as in `lengths_from`, else 0."""
    host_seconds: float = 0.0  # Duration of each call in plain Python, such as a reward function.
    call_seconds: dict[str, float] = field(default_factory=dict)
    """Call -> its seconds on one rank with all samples of a step, of a call in plain Python, such as one that
    plays with environments, or of a function on a module. `report` shows those of a run."""
    questions: dict[str, float] = field(default_factory=dict)
    """Host call -> the questions that it asks other calls in a step (`HostFunction.asks`). Each costs two
    messages if another rank answers."""
    question_bytes: float = 4096.0  # Mean size of a question with its answer.
    reward_seconds: float = 0.0  # Mean time in which the reward functions score one sample.
    reward_p99_seconds: float | None = None  # 99 % of the samples take no longer; None: all take the mean.
    seconds_from: str | None = None
    """Directory of a run that had each call on one rank: how long its calls in plain Python and functions on
    modules took in a step, and how much that varied. What is in `call_seconds` is not read there."""
    part_runs: dict[str, float] = field(default_factory=dict)
    """Part -> how often a step runs it on average, such as one that samples again; 1 for all others."""


@dataclass
class Experiment:
    """The base class of all experiments; an algorithm adds its settings and overrides `roles` and `graph`."""

    dataset: DatasetConfig = field(default_factory=DatasetConfig)  # Prompts (and answers) to train on.
    eval_dataset: EvalSets | None = None
    """Held-out rows: prompts to answer greedily, or completions whose loss is computed. An `Evaluation` sets
    more, such as the samples of each prompt; a dict holds several sets by name."""
    steps: int = 100  # Training steps of the run.
    dataset_epochs: float | None = None
    """Passes over the rows of `dataset`, in the place of `steps`: the last step completes them."""
    batch_size: int = 32  # Prompts per step.
    group_size: int = 1  # Samples per prompt: a step has `batch_size * group_size` samples.
    seed: int = 0  # Decides the order of rows, sampled tokens and random weights.
    deterministic: bool = False
    """Whether two runs under one plan, on equal machines, agree bit for bit. Generating calls then need
    `work_stealing=False` and `kv_cache_gib`; kernels are deterministic ones, which may be slower."""
    eval_every: int = 0  # Steps between evaluations; 0: only before the first and after the last step.
    eval_at_start: bool = True  # Whether there is an evaluation before the first step.
    export_every: int = 0  # Steps between Hugging Face exports; 0: only after the last step.
    checkpoint_every: int | str = "15m"  # Steps ("10"), minutes ("15m") or hours ("1h") between checkpoints.
    """Checkpoints for `realhf run --resume`; there is one after the last step, too. 0: none at all."""
    keep_checkpoints: int = 2  # The newest checkpoints that stay on the disk.
    keep_exports: int = 0
    """The newest exports that stay on the disk, beside that of `best_by`; 0: all of them."""
    best_by: str | None = None
    """Metric of evaluations, such as `eval/score`: each time that it is the best one so far, the model is
    exported, and the link hf/best points to it. Of a loss, the lowest value is the best one."""
    early_stopping: EarlyStopping | None = None  # Ends the run when evaluations no longer become better.
    on_step: Hook | None = None
    """Rank 0 calls it after every step with a `StepEvent`, by which it may stop the run and change learning
    rates and coefficients. With this or the next two fields, ranks wait for each other after every step."""
    on_evaluation: Hook | None = None  # The same after every evaluation behind a step.
    on_checkpoint: Hook | None = None  # The same when a checkpoint has become complete.
    push_to_hub: str | None = None
    """Name on the hub to which the last export, or that of `best_by`, is uploaded; a new one is private."""
    keep_checkpoint_every: int = 0  # Checkpoints of multiples of this step stay, too; 0: none.
    log_every: int = 1  # Steps between printed lines.
    rollouts: RolloutLog = field(default_factory=RolloutLog)  # Samples that are logged, to be read.
    max_lag: int = 0
    """The most updates between sampling a token and training on it. Above 0, generation runs ahead of
    training by that many batches."""
    rounds: int | None = None
    """How many rounds, one in each step, a response may take; weights may change between rounds. With
    `max_lag` rounds, generation and training overlap if each has devices of its own. With one more, long
    responses go on in the next step on the same devices. Others are illegal. None: `max_lag`, at least 1."""
    expected: Expected = field(default_factory=Expected)  # Lengths for the planner.
    tokenizer: str | None = None  # Directory or hub name of the tokenizer; None: that of the first role.

    def __post_init__(self) -> None:
        """Put a function that is given as `loss` into the settings that the experiment has by default."""
        own = {each.name: each for each in fields(self)}.get("loss")
        if own is None or not callable(own.default_factory):
            return
        given = getattr(self, "loss", None)
        default = own.default_factory()
        if callable(given) and not isinstance(given, type(default)) and hasattr(default, "with_function"):
            vars(self)["loss"] = default.with_function(given)

    if not TYPE_CHECKING:  # Type checkers would allow every attribute.
        def __setattr__(self, name: str, value: Any) -> None:
            """Set a field; rows in memory, and paths, become data sets."""
            if name in ("dataset", "eval_dataset"):
                value = as_dataset(value, name)
                if isinstance(value, Mapping) and name == "dataset":
                    raise ValueError("dataset is a dict: give arrays by column as ArrayDataset({...})")
                if isinstance(value, Mapping):
                    value = {key: as_dataset(held_out, set_field(key)) for key, held_out in value.items()}
            super().__setattr__(name, value)

    def roles(self) -> dict[str, Role]:
        """Return role name -> Role; the first trainable role is exported."""
        raise TypeError(f"{type(self).__name__} must define roles()")

    def graph(self) -> DataflowGraph:
        """Return the calls of one training step."""
        raise TypeError(f"{type(self).__name__} must define graph()")

    def doubts(self) -> Iterator[str]:
        """Yield a sentence about each setting that is legal and probably not meant."""
        yield from ()

    def absent_calls(self) -> dict[str, str]:
        """Return the calls that the graph would have under other settings, each with the reason, in words."""
        return {}

    def eval_graph(self) -> DataflowGraph | None:
        """Return the calls of an evaluation on `eval_dataset`; None: no evaluation.

        It is called for each set, on a copy of the experiment with that set as `self.evaluation`. The calls
        write `completion` and `score`, which go to eval.jsonl, or return metrics from host calls, which
        are logged as `eval/<name>`, or both. A host call that is not splittable sees all samples at once.

        Without a method of its own, an experiment of modules logs the losses of its TrainFunctions that read
        nothing but columns of the dataset.
        """
        return held_out_losses(self.graph())

    @property
    def evaluation(self) -> Evaluation:
        """The set for which `eval_graph` is called (else the first set, or without any the training rows)."""
        return next(iter(named_sets(self.eval_dataset).values()), Evaluation(self.dataset))

    def eval_graphs(self) -> dict[str, tuple[Evaluation, DataflowGraph]]:
        """Return each set of held-out rows and its graph, by name; a single set has an empty name."""
        graphs = {}
        for name, evaluation in named_sets(self.eval_dataset).items():
            about_set = copy.copy(self)
            about_set.eval_dataset = evaluation if name else self.eval_dataset
            graph = about_set.eval_graph()
            if graph is not None:
                graph = seeded(graph, sampling_seed(self.seed, name), deterministic=self.deterministic)
                graphs[name] = (evaluation, graph)
        return graphs

    def parts(self, graph: DataflowGraph) -> dict[str, tuple[str, ...]]:
        """Return name of a part -> the calls that it runs together. Each call is in one part only.

        Without lag there is one part, `step`. With lag there are `rollout` (generating calls, and the calls
        that these need), `train` (train steps, and the calls that need these) and `score` (all other calls).
        """
        if not self.max_lag:
            return {"step": tuple(call.name for call in graph.order)}
        return lagged_parts(graph)

    def step(self, run: StepRunner) -> None:
        """Run the parts of one step. Every rank executes this in the same way, see StepRunner.

        With lag, the step trains on the batch whose generation began `max_lag` steps ago.
        """
        if not self.max_lag:
            run("step", run.prompts(self.batch_size))
            return
        due = run.batch(run.number - self.max_lag)
        if self.overlaps:
            run("score", due)
            run.send("train", due)  # So that training does not wait for the next round of generation.
        run("rollout", run.prompts(self.batch_size))
        if not self.overlaps:
            run("score", due)
        run("train", due)

    def step_runner(
        self, graph: DataflowGraph, executor: PartExecutor, *, steps: int | None = None
    ) -> StepRunner:
        """Return a runner for `step`, in a run of `steps` steps (None: those of the experiment)."""
        return StepRunner(
            graph, self.parts(graph), executor, num_rounds=self.num_rounds, max_lag=self.max_lag,
            steps=self.steps if steps is None else steps, seed=self.seed)

    @property
    def has_own_program(self) -> bool:
        """Whether the experiment replaces the parts of a step, or the order in which they run."""
        methods = (getattr(self.parts, "__func__", None), getattr(self.step, "__func__", None))
        return methods != (Experiment.parts, Experiment.step)

    @property
    def num_rounds(self) -> int:
        """Rounds in which a response is generated."""
        return max(1, self.max_lag) if self.rounds is None else self.rounds

    @property
    def overlaps(self) -> bool:
        """Whether a step trains on the batch that the step before has completed, beside its own round."""
        return self.num_rounds == self.max_lag

    def check_lag(self) -> None:
        """Raise ValueError if `max_lag` or `rounds` is illegal."""
        lag = self.max_lag
        require(lag >= 0, "max_lag", lag, "not be negative")
        legal = sorted({max(1, lag), lag + 1})
        require(
            self.num_rounds in legal, "rounds", self.rounds,
            f"be {' or '.join(map(str, legal))} with max_lag {lag}")

    def seeded(self, graph: DataflowGraph) -> DataflowGraph:
        """Return the graph with the experiment's seed in every generating call.

        A deterministic experiment makes these calls deterministic. Raises ValueError if they cannot be.
        """
        return seeded(graph, self.seed, deterministic=self.deterministic)

    def checkpoint_period(self) -> tuple[int, float]:
        """Return the steps and the seconds between checkpoints; one of the two is 0 (it does not apply).

        Raises ValueError unless `checkpoint_every` is a number of steps, minutes or hours.
        """
        if match := re.fullmatch(r"(\d+)([mh]?)", str(self.checkpoint_every)):
            count = int(match[1])
            return (0, count * _SECONDS[match[2]]) if match[2] else (count, 0.0)
        legal = 'steps such as 10, minutes such as "15m", hours such as "1h", or 0 for none'
        raise ValueError(f"checkpoint_every is {self.checkpoint_every!r}: legal are {legal}")

    def tokenizer_dir(self) -> str:
        """Return the directory of the tokenizer; one of the hub is downloaded if it is not in the cache.

        It is empty if there is none, as no role is a language model.
        """
        if self.tokenizer:
            return str(find_model(self.tokenizer))
        models = [role.model for role in self.roles().values() if role.is_language_model]
        return str(find_model(models[0])) if models else ""

    def hub_names(self) -> dict[str, str]:
        """Return field -> its value, for the fields that name models, adapters and the tokenizer."""
        roles = self.roles()
        names = {f"{name}.model": role.model for name, role in roles.items() if role.is_language_model}
        names |= {f"{name}.lora.adapter": role.lora.adapter for name, role in roles.items()
                  if role.lora is not None and role.lora.adapter is not None}
        return names | ({"tokenizer": self.tokenizer} if self.tokenizer is not None else {})

    def hub_commits(self) -> dict[str, str]:
        """Return name -> commit of the models, adapters, tokenizers and data sets of the hub."""
        commits = commits_of(self.hub_names().values())
        held_out = [evaluation.dataset for evaluation in named_sets(self.eval_dataset).values()]
        for config in (self.dataset, *held_out):
            commits |= commits_of_data(config)
        return commits


def seeded(graph: DataflowGraph, seed: int, *, deterministic: bool = False) -> DataflowGraph:
    """Return the graph with this seed, and perhaps `deterministic`, in every generating call."""
    settings: dict[str, Any] = {"seed": seed} | ({"deterministic": True} if deterministic else {})
    generating = graph.of_kind("generate")
    return graph.replace(*(call.with_work(**settings) for call in generating))


def held_out_losses(graph: DataflowGraph) -> DataflowGraph | None:
    """Return a graph whose metrics are those of TrainFunctions and their losses; None if it would be empty.

    These TrainFunctions read nothing but columns of the dataset. A metric is called `<role>/loss`, for
    example, or `<call>/loss` if the role has several of them.
    """
    train = [
        call for call in graph.calls
        if isinstance(call.work, TrainFunction) and set(call.inputs) <= set(graph.inputs)]
    roles = [call.role for call in train]
    calls: list[FunctionCall] = []
    for call in train:
        work = call.work_as(TrainFunction)
        name = call.role if roles.count(call.role) == 1 else call.name
        losses = f"{call.name}/losses"
        weights = () if work.weights is None else (work.weights,)
        calls += [
            FunctionCall(
                f"{call.name}_held_out", role=call.role, reads=call.reads, inputs=call.inputs,
                outputs=(losses,), work=HeldOutLosses(work.function, work.noise)),
            FunctionCall(
                f"{call.name}_mean", inputs=(losses, *weights),
                work=HostFunction(partial(_means_of_rows, f"{name}/")))]
    read = tuple(key for key in graph.inputs if any(key in call.inputs for call in train))
    return DataflowGraph(tuple(calls), inputs=read) if calls else None


def _means_of_rows(prefix: str, batch: Any, context: Any) -> tuple[dict[str, Any], dict[str, float]]:
    """Return means of the numbers in the dicts of the first column, weighted by the second if there is one;
    and maxima, where names end with "/max"."""
    rows, *weights = batch.fields.values()
    shares = weights[0].double().tolist() if weights else [1.0] * len(rows)
    metrics = {}
    for name in rows[0] if rows else ():
        values = [row[name] for row in rows]
        mean = sum(value * share for value, share in zip(values, shares, strict=True)) / (sum(shares) or 1.0)
        metrics[f"{prefix}{name}"] = max(values) if name.endswith("/max") else mean
    return {}, metrics


def lagged_parts(graph: DataflowGraph) -> dict[str, tuple[str, ...]]:
    """Cut a graph into the parts `rollout`, `score` and `train`. Raises ValueError if that is impossible."""
    generating = {call.name for call in graph.of_kind("generate")}
    for call in graph.calls:
        if isinstance(call.work, HostFunction) and call.work.asks:
            generating |= {call.name, *call.work.asks}
    training = {call.name for call in graph.of_kind("train_step")}
    if not generating or not training:
        kind = "generate" if not generating else "train_step"
        asks = " and no host call that asks one" if not generating else ""
        raise ValueError(
            f"max_lag is above 0, and the graph has no call of kind {kind!r}{asks}: set max_lag to 0")
    rollout = generating.union(*(nx.ancestors(graph.nx_graph, name) for name in generating))
    train = training.union(*(nx.descendants(graph.nx_graph, name) for name in training))
    if both := [call.name for call in graph.order if call.name in rollout & train]:
        raise ValueError(
            f"max_lag is above 0, and generation needs the call {both[0]!r}, which needs training: "
            "set max_lag to 0")
    names = [call.name for call in graph.order]
    return {
        "rollout": tuple(name for name in names if name in rollout),
        "score": tuple(name for name in names if name not in rollout | train),
        "train": tuple(name for name in names if name in train),
    }


def resolved_roles(
    roles: Mapping[str, Role], graph: DataflowGraph, num_runs: Mapping[str, int]
) -> dict[str, Role]:
    """Return the roles with a dtype, and with optimizers whose learning rate is known at every step.

    `num_runs` counts the runs of each call. Raises ValueError if a role's config.json names a dtype that is
    not legal.
    """
    resolved = {}
    for name, role in roles.items():
        trains = graph.works(Training, role=name)
        optimizer = role.optimizer
        if optimizer is not None:
            num_steps = optimizer_steps(graph, name, num_runs)
            needs_total = optimizer.schedule != "constant" or optimizer.warmup_ratio > 0
            has_total = optimizer.total_steps or num_steps
            if trains and needs_total and not has_total:
                raise ValueError(
                    f"{name}.optimizer: when step() was tried without data, no call trained this role, so "
                    "that the length of its schedule is not known: set total_steps")
            optimizer = _resolved(optimizer, role, trains, num_steps=num_steps)
        resolved[name] = replace(role, dtype=role.weights_dtype, optimizer=optimizer)
    return resolved


def optimizer_steps(graph: DataflowGraph, role: str, num_runs: Mapping[str, int]) -> int:
    """Return the optimizer steps of a role in a whole run, in which each call runs `num_runs` times."""
    calls = [call for call in graph.of_kind("train_step") if call.role == role]
    return sum(num_runs[call.name] * call.work_as(Training).optimizer_steps for call in calls)


def _resolved(
    optimizer: OptimizerConfig, role: Role, trains: Sequence[Training], *, num_steps: int
) -> OptimizerConfig:
    """Return the settings of a role that takes `num_steps` optimizer steps in the whole run."""
    if optimizer.lr is None:
        losses = [work.loss for work in trains if isinstance(work, TrainStep)]
        rates = default_rates(losses[0] if losses else None)
        optimizer = replace(optimizer, lr=rates.full if role.lora is None else rates.lora)
    needs_total = optimizer.schedule != "constant" or optimizer.warmup_ratio > 0
    if needs_total and optimizer.total_steps == 0:
        optimizer = replace(optimizer, total_steps=num_steps)
    if optimizer.warmup_ratio > 0:
        warmup_steps = math.ceil(optimizer.warmup_ratio * optimizer.total_steps)
        optimizer = replace(optimizer, warmup_steps=warmup_steps, warmup_ratio=0.0)
    return optimizer
