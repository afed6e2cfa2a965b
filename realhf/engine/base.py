"""BaseEngine: runs a call over mini-batches and micro-batches, independent of the model's implementation."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from realhf.calls import Generate, LogProbs, OptimizerConfig, Scores, TrainStep, Values
from realhf.data.batch import Batch, Packed
from realhf.dist.activity import Report, no_report, prefixed
from realhf.dist.parallel import ParallelGroups
from realhf.engine.optimizer import ShardedAdamW
from realhf.engine.pipeline import run_pipeline
from realhf.engine.protocol import CallResult, Metrics, Shards
from realhf.engine.router_losses import Routers
from realhf.graph import FunctionCall
from realhf.nn.context_parallel import token_range
from realhf.nn.parameters import ShardedParameters

Outputs = dict[str, torch.Tensor]


class BaseEngine(ABC):
    """The base class of engines; `trained` is the model itself or its adapters."""

    def __init__(
        self, parameters: ShardedParameters, *, trained: ShardedParameters, optimizer: OptimizerConfig | None
    ) -> None:
        self.groups: ParallelGroups = parameters.groups
        self._parameters = parameters
        self._trained = trained
        self._optimizer = None if optimizer is None else ShardedAdamW(trained, optimizer)

    @abstractmethod
    def _generate(self, call: FunctionCall, work: Generate, batch: Batch, report: Report) -> Batch:
        """Return the output columns of a generating call."""

    @abstractmethod
    def _micro_batches(self, lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
        """Return the indices of the samples of each micro-batch."""

    @abstractmethod
    def _compute(
        self, tokens: Packed, hidden: torch.Tensor | None,
        *, recompute: bool, routers: Routers | None, layer_done: Callable[[int], None] | None,
    ) -> torch.Tensor:  # fmt: skip
        """Run a micro-batch through this stage, from the previous stage's hidden states (None on the first).

        The backward pass may call `layer_done` with layers whose gradients are complete.
        """

    @abstractmethod
    def _finish(
        self, x: torch.Tensor, samples: Batch, finish: Callable[[Outputs, Batch], torch.Tensor],
        *, key: str, settings: dict[str, Any],
    ) -> torch.Tensor:  # fmt: skip
        """Compute the outputs of a micro-batch from the last stage's result, and return `finish` of them.

        `settings` name the outputs (`logprobs` and `entropy`, `values` or `scores`) and the temperature.
        """

    def _routers(
        self, work: TrainStep, *, num_sequences: float, num_tokens: float
    ) -> Routers | None:
        """Return the object that collects the router losses of a mini-batch; None if the engine has none."""
        return None

    @property
    def flat(self) -> torch.Tensor:
        return self._parameters.flat

    def shards(self) -> Shards:
        return self._parameters.shards()

    def optimizer_shards(self) -> Shards:
        assert self._optimizer is not None, "a frozen model has no optimizer"
        return self._optimizer.shards

    def load(self, directory: Path | None, *, seed: int) -> None:
        """Load weights from a Hugging Face directory; draw missing weights, or all, from `seed`."""
        self.load_base(directory, seed=seed)
        self.load_adapters(seed=seed)

    @abstractmethod
    def load_base(self, directory: Path | None, *, seed: int) -> None:
        """Load the weights as `load` does, without adapters and optimizer."""

    def load_adapters(self, *, seed: int) -> None:
        if self._optimizer is not None:
            self._optimizer.reload()

    def run(
        self, call: FunctionCall, minibatches: Sequence[Batch],
        *, micro_batch_tokens: int, recompute: bool = False, gather: bool = True, report: Report = no_report,
    ) -> CallResult:  # fmt: skip
        work = call.work
        minibatches = [batch.to(self.groups.world.device) for batch in minibatches]
        if call.kind == "train_step":
            passes = {"max_tokens": micro_batch_tokens, "recompute": recompute}
            metrics = self._train(call, work, minibatches, passes, gather=gather, report=report)
            return CallResult(Batch([]), metrics)
        (batch,) = minibatches
        if call.kind == "generate":
            return CallResult(self._generate(call, work, batch, report), {})
        columns = self._forward(call, work, batch, micro_batch_tokens, report)
        return CallResult(output_batch(call, batch.ids, columns), {})

    def _forward(
        self, call: FunctionCall, work: LogProbs | Values | Scores, batch: Batch, max_tokens: int,
        report: Report,
    ) -> list:
        output = work.output
        settings = {"output": output, "temperature": getattr(work, "temperature", 1.0)}
        with torch.no_grad():
            order, results = self._pipeline(
                batch, call, settings, lambda made, _: made[output], max_tokens=max_tokens,
                report=report)
        if not self.groups.is_last_stage:
            return []
        lengths = [1 if output == "scores" else batch[call.inputs[0]].lengths[i] for i in order]
        empty = torch.zeros(0, dtype=self._parameters.wide, device=self.flat.device)
        column = Packed(torch.cat([empty, *results]), lengths)
        column = column.select(sorted(range(len(order)), key=order.__getitem__))
        if isinstance(work, Scores):
            return [column.values.sigmoid() if work.probability else column.values]
        return [column]

    def _train(
        self, call: FunctionCall, work: TrainStep, batches: list[Batch], passes: dict[str, Any],
        *, gather: bool, report: Report,
    ) -> Metrics:  # fmt: skip
        """Train on each mini-batch in turn; `passes` are the settings of forward and backward passes."""
        assert self._optimizer is not None, f"call {call.name} trains a frozen model"
        self._trained.requires_grad_(True)
        history = []
        batches = batches * work.epochs
        for number, batch in enumerate(batches, start=1):
            prefix = f"mini-batch {number} of {len(batches)}, "
            metrics = self._compute_grads(
                call, work, batch, passes | {"report": prefixed(report, prefix)})
            report(f"{prefix}optimizer step")
            last = number == len(batches)
            history.append(metrics | self._optimizer.step(gather=gather or not last))
        self._trained.requires_grad_(False)
        means = {name: x / len(history) for name, x in _sum_dicts(history).items()}
        first = getattr(work.loss, "first_minibatch", {})
        return means | {name: history[0][metric] for metric, name in first.items() if metric in history[0]}

    def _compute_grads(
        self, call: FunctionCall, work: TrainStep, batch: Batch, passes: dict[str, Any]
    ) -> Metrics:
        """Compute the gradients of a mini-batch; return its loss and metrics on the last stage."""
        loss = work.loss
        control = self.groups.dp_control
        num_tokens = len(batch[call.inputs[0]].values)
        counts = {"samples": len(batch), "routed_tokens": num_tokens, **loss.totals(batch)}
        totals = _sum_dicts(control.all_gather_json(counts))
        assert totals["samples"] > 0, f"call {call.name} has a mini-batch without samples"
        sums: list[dict[str, torch.Tensor]] = []

        def finish(outputs: dict[str, torch.Tensor], samples: Batch) -> torch.Tensor:
            value, metrics = loss(outputs, samples, totals)
            # (With its graph, a loss would keep the hidden states from the previous stage in memory.)
            sums.append({name: x.detach() for name, x in {"loss": value, **metrics}.items()})
            return value

        settings = {"output": loss.output, "entropy": loss.entropy, "temperature": work.temperature}
        counts = {"num_sequences": totals["samples"], "num_tokens": totals["routed_tokens"]}
        routers = self._routers(work, **counts)
        self._pipeline(batch, call, settings, finish, routers=routers, **passes)
        assert self._optimizer is not None
        self._optimizer.finish_sums()
        router_metrics = {} if routers is None else routers.metrics()
        if not self.groups.is_last_stage:
            return {}
        local = _sum_dicts([{name: value.item() for name, value in part.items()} for part in sums])
        return _sum_dicts(control.all_gather_json(local | router_metrics))

    def _pipeline(
        self, batch: Batch, call: FunctionCall, settings: dict[str, Any],
        finish: Callable[[Outputs, Batch], torch.Tensor],
        *, max_tokens: int, report: Report, recompute: bool = False, routers: Routers | None = None,
    ) -> tuple[list[int], list[torch.Tensor]]:
        """Return the samples' indices in order of micro-batches, and `finish` of each one's outputs."""
        groups = self.groups
        key = call.inputs[0]
        parts = self._micro_batches(batch[key].lengths, max_tokens)
        micro = [batch.select(part) for part in parts]
        layer_done = self._optimizer.layer_is_done if self._optimizer is not None else None

        def forward(i: int, hidden: torch.Tensor | None) -> torch.Tensor:
            report(f"micro-batch {i + 1} of {len(micro)}")
            last = i == len(micro) - 1  # Gradients are complete once the last micro-batch has added its own.
            x = self._compute(
                micro[i][key], hidden, recompute=recompute, routers=routers,
                layer_done=layer_done if last else None)
            if not groups.is_last_stage:
                return x
            return self._finish(x, micro[i], finish, key=key, settings=settings)

        ranges = [token_range(len(samples[key].values), groups.cp) for samples in micro]
        shapes = [(stop - start, self._parameters.config.hidden_size) for start, stop in ranges]
        results = run_pipeline(forward, groups, hidden_shapes=shapes, dtype=self.flat.dtype)
        return [i for part in parts for i in part], results


def output_batch(call: FunctionCall, ids: list[int], columns: list) -> Batch:
    """Return the output columns in host memory, from which samples are sent; only the last stage has any."""
    fields = dict(zip(call.outputs, columns, strict=False))
    return Batch(ids, fields).to(torch.device("cpu")) if fields else Batch([])


def _sum_dicts(parts: Sequence[Metrics]) -> Metrics:
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: sum(part.get(name, 0.0) for part in parts) for name in names}
