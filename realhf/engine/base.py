"""Engine: holds a role's parameters on a rank and trains them; GeneratingEngine generates, too."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch

from realhf.calls import (
    GenerateOutputs,
    LogProbs,
    Loss,
    ModelWork,
    OptimizerConfig,
    Output,
    Scores,
    TopLogProbs,
    Training,
    TrainStep,
    is_own,
)
from realhf.data.batch import Batch, Packed
from realhf.data.order import groups_of
from realhf.distributed.pieces import Shards
from realhf.distributed.process import Report, no_report, prefixed
from realhf.distributed.world import ParallelGroups
from realhf.engine.optimizer import ShardedAdamW
from realhf.engine.own_loss import OwnLoss
from realhf.errors import warn
from realhf.graph import FunctionCall
from realhf.inference.cache_memory import CacheLimits
from realhf.inference.turns import EnvironmentTime
from realhf.nn.moe import RouterLosses
from realhf.nn.parameters import ShardedParameters
from realhf.nn.transformer import Transformer

Metrics = dict[str, float]
DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}


@dataclass(frozen=True)
class CallResult:
    """Output columns (at least on the result ranks) and metrics (the same on the last pipeline stage).

    After a round of a generation, `unfinished` are the samples that go on in the next one, with the same
    columns.
    """

    batch: Batch
    metrics: Metrics
    unfinished: Batch = field(default_factory=lambda: Batch([]))


NOTHING_BESIDE: Mapping[str, Engine] = MappingProxyType({})
"""The engines beside that of a call that reads no other role."""
Outputs = dict[str, torch.Tensor]


@dataclass(frozen=True)
class PassSettings:
    """The settings of the forward, and perhaps backward, passes of all micro-batches of a batch."""

    key: str  # Column of the packed sequences.
    output: Output
    temperature: float = 1.0
    top: int = 0  # Above 0: the most probable tokens instead of log-probs (see TopLogProbs).
    entropy: bool = False  # Whether entropies are wanted beside log-probs; a loss says so itself.
    loss: Loss | None = None  # Of the outputs; None: the outputs themselves are wanted.
    totals: Mapping[str, float] = field(default_factory=dict)
    """The totals of the loss, over the mini-batch of all replicas."""
    recompute: bool = False
    routers: Routers | None = None


class Engine(ABC):
    """A role's part on this rank under one layout. With an optimizer it can be trained, else it is frozen.

    All ranks of the layout construct engines in the same order, by `(spec, layout, world, dtype=...,
    optimizer=..., memory=..., lora=..., adapter_memory=..., float32_head=...)`: a subclass constructs the
    parameters, in `memory` and `adapter_memory` if these are given. With `lora`, the engine trains adapters
    instead of the model.
    """

    def __init__(
        self, parameters: ShardedParameters, *, adapters: ShardedParameters | None = None,
        optimizer: OptimizerConfig | None,
    ) -> None:
        """Take the parameters of this rank, and construct their optimizer.

        `parameters` are the regions of the model that `spec.held_by` assigns to this rank, end to end in one
        flat tensor of the role's dtype, which the engine may share with other engines of the rank.
        `adapters` (LoRA), in a flat tensor of their own, are trained if given, else the model is.
        `optimizer` has the settings of the training; None: the engine is frozen. Only an engine with an
        optimizer has gradients and AdamW's averages, and for half precision a master copy in float32; it
        shares them with no other engine.
        """
        self.groups: ParallelGroups = parameters.groups
        self._parameters = parameters
        self._adapters = adapters
        self._trained = parameters if adapters is None else adapters
        self._optimizer = None if optimizer is None else ShardedAdamW(self._trained, optimizer)

    @property
    def flat(self) -> torch.Tensor:
        """Memory of the parameters, without the adapters."""
        return self._parameters.flat

    @property
    def adapter_flat(self) -> torch.Tensor:
        assert self._adapters is not None, "a model without LoRA has no adapters"
        return self._adapters.flat

    def shards(self) -> Shards:
        """Return the parameters, without the adapters, for reallocation."""
        return self._parameters.pieces()

    def adapter_shards(self) -> Shards:
        """Return the parameters of the adapters."""
        assert self._adapters is not None, "a model without LoRA has no adapters"
        return self._adapters.pieces()

    def optimizer_shards(self) -> Shards:
        """Return the part of the optimizer's copy that this replica owns."""
        return self.optimizer.sources

    @property
    def optimizer(self) -> ShardedAdamW:
        """The optimizer, whose state checkpoints hold."""
        assert self._optimizer is not None, "a frozen model has no optimizer"
        return self._optimizer

    @abstractmethod
    def export_shards(self) -> Shards:
        """Return this rank's tensors for export: its part of the model, the adapters, or both merged."""

    def load(self, directory: Path | None, *, seed: int) -> None:
        """Load or draw the weights and the adapters."""
        self.load_base(directory, seed=seed)
        self.load_adapters(seed=seed)

    @abstractmethod
    def load_base(self, directory: Path | None, *, seed: int) -> None:
        """Load the weights, without adapters, from a Hugging Face directory; draw missing weights, or all,
        from `seed`. Raises ValueError that names the file."""

    def load_adapters(self, *, seed: int) -> None:
        """Initialise the adapters, and the optimizer's copy of the trained parameters, after `load_base`."""
        if self._optimizer is not None:
            self._optimizer.reload()

    def memory(self) -> Mapping[str, int]:
        """Return the bytes of the device that each part of this engine takes now, without empty parts.

        They are weights, adapters, gradients, optimizer, cache and merged weights, as the planner names them.
        Engines that share weights both count them.
        """
        adapters = self._adapters
        states = [] if self._optimizer is None else self._optimizer.held
        parts = {
            "weights": sum(map(_held_bytes, self._parameters.memory)),
            "adapters": 0 if adapters is None else _held_bytes(adapters.flat),
            "gradients": self._trained.grad_bytes,
            "optimizer": sum(state.nbytes for state in states if state.device == self.flat.device),
            **self.caches,
        }
        return {part: size for part, size in parts.items() if size}

    def release(self, *what: Literal["gradients", "cache", "graphs"]) -> None:
        """Free the memory of parts that come back by themselves when a call needs them.

        Gradients are free between train steps. With the caches of rows that have ended go merged weights; for
        rows between rounds there is `flush_cache`. Graphs are recorded decoding passes.
        """
        if "gradients" in what and self._optimizer is not None:
            self._trained.release_grads()

    @property
    def caches(self) -> Mapping[str, int]:
        """The bytes that generations leave for later ones, by part: caches, merged weights (LoRA), and what
        recorded passes take."""
        return {}

    @property
    def mapped_bytes(self) -> int:
        """The bytes of the device that this engine holds apart from torch's allocator."""
        return 0

    @abstractmethod
    def forward(
        self, call: FunctionCall, batch: Batch, *, micro_batch_tokens: int, report: Report = no_report,
        beside: Mapping[str, Engine] = NOTHING_BESIDE,
    ) -> Batch:
        """Run a forward call on this rank's share of the samples; return its output columns.

        `beside` are the engines of the roles that the call reads.
        """

    def train(
        self, call: FunctionCall, minibatches: Sequence[Batch],
        *, micro_batch_tokens: int, recompute: bool = False, gather: bool = True, report: Report = no_report,
        beside: Mapping[str, Engine] = NOTHING_BESIDE,
    ) -> Metrics:
        """Train on this rank's share of each mini-batch in turn; return the call's metrics.

        With `shuffle_minibatches`, the mini-batches of all epochs follow each other. `beside` are the engines
        of the roles that the call reads.

        With `recompute`, only every layer's input is kept for the backward pass. After training on several
        replicas without `gather`, only `optimizer_shards` are up to date. A mini-batch without samples, all
        of which filters have dropped, changes nothing, nor does one of failed rewards alone.
        """
        work = call.work_as(Training)
        assert self._optimizer is not None, f"call {call.name} trains a frozen model"
        batches = [batch.to(self.groups.world.device) for batch in minibatches] * work.repeats
        self._trained.hold_grads()  # All at once, before activations could split the memory.
        self._trained.requires_grad_(True)
        history = []
        num_empty = 0
        for number, batch in enumerate(batches, start=1):
            prefix = f"mini-batch {number} of {len(batches)}, "
            metrics = self._compute_grads(
                call, batch, max_tokens=micro_batch_tokens, recompute=recompute,
                report=prefixed(report, prefix), beside=beside)
            if metrics is None:
                num_empty += 1
                continue
            report(f"{prefix}optimizer step")
            is_last = number == len(batches)
            update = self._optimizer.step(gather=gather or not is_last)
            history.append(update if update["skipped_updates"] else metrics | update)
        self._trained.requires_grad_(False)
        taken = [metrics for metrics in history if not metrics["skipped_updates"]]
        means = {
            name: x if name.endswith("/max") else x / len(taken) for name, x in sum_metrics(taken).items()}
        means["skipped_updates"] = float(len(history) - len(taken))
        if num_empty:
            means["empty_updates"] = float(num_empty)
        return dict(work.summarize(means, history[0] if history else {}))

    @abstractmethod
    def _compute_grads(
        self, call: FunctionCall, batch: Batch, *, max_tokens: int, recompute: bool, report: Report,
        beside: Mapping[str, Engine],
    ) -> Metrics | None:
        """Compute the gradients of a mini-batch; return its loss and metrics on the last stage.

        Return None, on all ranks, if it has nothing to learn.
        """


class SequenceEngine(Engine):
    """An engine of a language model, through which packed sequences pass in micro-batches."""

    def __init__(
        self, parameters: ShardedParameters, *, adapters: ShardedParameters | None = None,
        optimizer: OptimizerConfig | None,
    ) -> None:
        super().__init__(parameters, adapters=adapters, optimizer=optimizer)
        self._own_losses: dict[str, OwnLoss] = {}
        """The losses of calls that users have written, each with the checks of its results."""

    @abstractmethod
    def _micro_batches(
        self, lengths: Sequence[int], groups: Sequence[Sequence[int]], max_tokens: int
    ) -> list[list[int]]:
        """Return the indices of the samples of each micro-batch, in which groups (see `groups_of`) are
        adjacent."""

    def _kept_together(
        self, samples: Batch, key: str, groups: Sequence[Sequence[int]], max_tokens: int
    ) -> Sequence[Sequence[int]]:
        """Return the groups, joined where it pays that samples are in one micro-batch and where they fit."""
        return groups

    @abstractmethod
    def _run_passes(
        self, micro_batches: list[Batch], settings: PassSettings, report: Report
    ) -> list[Outputs]:
        """Run micro-batches through the stages; if autograd is on, run backward passes and sum gradients.

        Return, on the last stage, the outputs of each micro-batch, or with `settings.loss` its value and
        metrics for each part of the samples (see `chunked_loss.run_head`).
        """

    def _routers(self, work: TrainStep, totals: Metrics) -> Routers | None:
        """Return the object that collects the router losses of a mini-batch; None if the model has none."""
        return None

    def forward(
        self, call: FunctionCall, batch: Batch, *, micro_batch_tokens: int, report: Report = no_report,
        beside: Mapping[str, Engine] = NOTHING_BESIDE,
    ) -> Batch:
        """Run a forward call on this rank's share of the samples; return its output columns.

        Raises FloatingPointError if there are NaN or infinite values in them.
        """
        batch = batch.to(self.groups.world.device)
        work = call.work_as(ModelWork)
        num_top = work.k if isinstance(work, TopLogProbs) else 0
        key = call.inputs[0]
        with_entropy = isinstance(work, LogProbs) and work.entropy
        settings = PassSettings(key, work.output, work.temperature, num_top, with_entropy)
        groups = self._kept_together(batch, key, groups_of(batch.ids, 1), micro_batch_tokens)
        micro_batches = self._micro_batches(batch[key].lengths, groups, micro_batch_tokens)
        with torch.no_grad():
            results = self._run_passes([batch.select(indices) for indices in micro_batches], settings, report)
        if not self.groups.is_last_stage:
            return Batch([])
        order = list(chain.from_iterable(micro_batches))
        lengths = [1 if work.output.per_sequence else batch[key].lengths[i] for i in order]
        empty = torch.zeros(0, dtype=self._parameters.wide, device=self.groups.world.device)
        nothing = [empty] * (1 + with_entropy)
        if num_top:
            nothing = [empty.view(0, num_top).long(), empty.view(0, num_top)]
        columns_of = [list(outputs.values()) for outputs in results]
        values = [torch.cat(parts) for parts in zip(nothing, *columns_of, strict=True)]
        in_order = sorted(range(len(order)), key=order.__getitem__)
        columns: list[Any] = [Packed(column, lengths).select(in_order) for column in values]
        del results, columns_of, values  # What follows needs memory, too.
        if isinstance(work, Scores):
            scores = [column.values for column in columns]
            columns = [score.sigmoid() for score in scores] if work.probability else scores
        outputs_on_host = output_batch(call, batch.ids, columns)
        for key in call.outputs:
            require_numbers(outputs_on_host, key, rank=self.groups.rank)
        return outputs_on_host

    def _compute_grads(
        self, call: FunctionCall, batch: Batch, *, max_tokens: int, recompute: bool, report: Report,
        beside: Mapping[str, Engine],
    ) -> Metrics | None:
        """Compute the gradients of a mini-batch; return its loss and metrics on the last stage.

        Return None, on all ranks, if it has no samples, or if all totals of its loss are 0.
        """
        work = call.work_as(TrainStep)
        loss = self._loss_of(call)
        control = self.groups.dp_control
        key = call.inputs[0]
        weights = loss.totals(batch) or {"samples": len(batch)}
        counts = {"samples": len(batch), "routed_tokens": len(batch[key].values), **weights}
        totals = sum_metrics(control.all_gather_json(counts))
        if not totals["samples"] or not any(totals[name] for name in weights):
            return None
        routers = self._routers(work, totals)
        settings = PassSettings(
            key, work.output, work.temperature, loss=loss, totals=totals, recompute=recompute,
            routers=routers)
        groups = self._kept_together(batch, key, groups_of(batch.ids, work.group_size), max_tokens)
        micro_batches = self._micro_batches(batch[key].lengths, groups, max_tokens)
        parts = self._run_passes([batch.select(indices) for indices in micro_batches], settings, report)
        router_metrics = {} if routers is None else routers.metrics()
        if not self.groups.is_last_stage:
            return {}
        local = sum_metrics([{name: value.item() for name, value in part.items()} for part in parts])
        return sum_metrics(control.all_gather_json(local | router_metrics))

    def _loss_of(self, call: FunctionCall) -> Loss:
        """Return the loss of a call; a user's own is checked, and one rank tells its faults."""
        loss = call.work_as(TrainStep).loss
        if not is_own(loss):
            return loss
        known = self._own_losses.get(call.name)
        if known is None or known.given is not loss:
            at = self.groups.at
            tells = self.groups.is_last_stage and at.dp == at.cp == at.tp == 0
            self._own_losses[call.name] = OwnLoss(
                loss, key=call.inputs[0],
                warn=(lambda sentence: warn(f"call {call.name!r}: {sentence}")) if tells else lambda _: None)
        return self._own_losses[call.name]


class GeneratingEngine(SequenceEngine):
    """An engine that also generates, and may keep caches of keys and values between rounds."""

    last_cache_bytes = 0
    """Bytes of the keys and values of the last call that generated."""
    last_packed_bytes = 0
    """Bytes of the packed copies of weights (nn/linear.py) in the last call that generated."""
    last_environment_time: EnvironmentTime | None = None
    """The time that environments took in the last call that generated; None: there are none."""

    @cached_property
    def cache_limits(self) -> CacheLimits:
        """The limits of the KV caches of its calls, which checkpoints hold."""
        return CacheLimits(self.groups)

    @abstractmethod
    def generate(
        self, call: FunctionCall, batch: Batch, *, unfinished: Batch | None = None, budget: int | None = None,
        version: int = 0, report: Report = no_report,
    ) -> CallResult:
        """Continue this rank's share of the prompts, and the `unfinished` samples of earlier rounds.

        Every sample gets at most `budget` tokens (None: as many as the call allows), which are of this
        `version`. If the call keeps its cache in rounds, the engine holds the unfinished samples itself;
        others may be passed. Raises FloatingPointError if a token was drawn from logits that are no numbers.
        """

    def settle_cache_limits(self) -> None:
        """Agree anew on the limits of caches, after the first step (see `EngineStore`)."""
        self.cache_limits.settle()

    @abstractmethod
    def flush_cache(self, call: str) -> None:
        """Free the cache that a call keeps between rounds, if there is one, with the samples in it.

        The next round must be given these samples again. All ranks of the layout call this between the same
        rounds.
        """


class Routers:
    """The router losses of a mini-batch: means over the layers with experts, and over all
    sequences (`samples`) or tokens (`routed_tokens`) of all dp replicas.

    These totals are known in advance, so that losses and gradients of micro-batches, replicas and stages
    simply add up.
    """

    def __init__(self, model: Transformer, work: TrainStep, totals: Mapping[str, float]) -> None:
        self._model = model
        self._work = work
        self._passes: list[RouterLosses] = []
        num_layers = sum(map(model.config.has_experts, range(model.config.num_layers)))
        self._per_sequence = 1 / max(1, num_layers * totals["samples"])
        self._per_token = 1 / max(1, num_layers * totals["routed_tokens"])

    def next_pass(self) -> RouterLosses:
        """Return the object that collects the next micro-batch's losses."""
        losses = RouterLosses(
            balance_scale=self._work.router_aux_loss_coef * self._per_sequence,
            z_scale=self._work.router_z_loss_coef * self._per_token)
        self._passes.append(losses)
        return losses

    def metrics(self) -> dict[str, float]:
        """Return this replica's part of both losses. Every stage and cp rank calls this after the backward
        passes."""
        sums = torch.zeros(2, dtype=torch.float64, device=self._model.flat.device)
        for losses in self._passes:
            sums += losses.sums().to(sums.device)
        for group in (self._model.groups.pp, self._model.groups.cp):
            group.all_reduce(sums)
        balance, z = sums.tolist()
        return {"router_aux_loss": balance * self._per_sequence, "router_z_loss": z * self._per_token}


def generated(call: FunctionCall, ended: Batch, unfinished: Batch, *, rank: int) -> CallResult:
    """Return the result of a generation. Raises FloatingPointError if log-probs are no numbers."""
    for samples in (ended, unfinished):
        require_numbers(samples, GenerateOutputs.of(call).logprobs, rank=rank)
    return CallResult(ended, {}, unfinished)


def output_batch(call: FunctionCall, ids: list[int], columns: list) -> Batch:
    """Return the output columns in host memory, from which samples are sent; only the last stage has any.

    The versions of tokens are added later (see Round.join).
    """
    versions = GenerateOutputs.of(call).versions if call.kind == "generate" else None
    fields = dict(zip([key for key in call.outputs if key != versions], columns, strict=False))
    return Batch(ids, fields).to(torch.device("cpu")) if fields else Batch([])


def require_numbers(samples: Batch, key: str, *, rank: int) -> None:
    """Raise FloatingPointError if a column in host memory has NaN or infinite values.

    The log-prob of a token may be minus infinity: it is then impossible.
    """
    column = samples.fields.get(key)
    values = column.values if isinstance(column, Packed) else column
    if values is None or not values.is_floating_point():
        return
    wrong = values.isnan() | (values == torch.inf)
    if not wrong.any():
        return
    rows = column.like(wrong).split() if isinstance(column, Packed) else wrong[:, None]
    first, at = next((i, int(row.flatten().nonzero()[0])) for i, row in enumerate(rows) if row.any())
    num_wrong = sum(bool(row.any()) for row in rows)
    where = f"token {at + 1} of " if isinstance(column, Packed) and values.dim() == 1 else ""
    raise FloatingPointError(
        f"rank {rank} computed {key} that are NaN or infinite for {num_wrong} of {len(samples)} samples, "
        f"first at {where}sample {samples.ids[first]}")


def _held_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor, or 0 while its memory is released."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def sum_metrics(parts: Sequence[Metrics]) -> Metrics:
    """Return the sums of metrics by name; the maxima of those whose names end with "/max"."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {
        name: (max if name.endswith("/max") else sum)(part.get(name, 0.0) for part in parts)
        for name in names}
