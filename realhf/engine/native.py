"""NativeEngine: one role's shard on this rank, under one layout, and the calls that it can run."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from realhf.data.batch import Batch, Packed
from realhf.dist.group import World
from realhf.dist.parallel import ParallelGroups
from realhf.engine.generate import generate
from realhf.engine.micro_batch import attention_share, micro_batches
from realhf.engine.optimizer import ShardedAdamW
from realhf.engine.outputs import compute_outputs, loss_by_parts
from realhf.engine.pipeline import run_pipeline
from realhf.engine.routers import Routers
from realhf.engine.work import Generate, LogProbs, OptimizerConfig, Scores, TrainStep, Values, Work
from realhf.graph import FunctionCall
from realhf.layout import Layout, even_split
from realhf.lora import LoraConfig
from realhf.nn.context_parallel import token_range
from realhf.nn.hf import load_adapters, load_weights
from realhf.nn.lora import Adapters
from realhf.nn.parameters import ShardedParameters
from realhf.nn.transformer import Transformer
from realhf.param_spec import ModelSpec

Metrics = dict[str, float]
DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}


@dataclass(frozen=True)
class CallResult:
    """Output columns (on the last pipeline stage, else none) and metrics (the same on all of its ranks)."""

    batch: Batch
    metrics: Metrics


class NativeEngine:
    """A shard of a model, in `memory` where that is given. With an optimizer it can be trained; without, it
    is frozen. With `lora` it has adapters (in `adapter_memory`), and they are what is trained."""

    def __init__(
        self, spec: ModelSpec, layout: Layout, world: World,
        *, dtype: str, optimizer: OptimizerConfig | None = None, memory: torch.Tensor | None = None,
        lora: LoraConfig | None = None, adapter_memory: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        self.groups, self.adapters = ParallelGroups.create(world, layout), None
        if lora is not None:
            self.adapters = Adapters(
                spec.config, lora, self.groups, dtype=DTYPES[dtype], memory=adapter_memory)
        self.model = Transformer(
            spec, self.groups, dtype=DTYPES[dtype], memory=memory, adapters=self.adapters)
        self._trained: ShardedParameters = self.model if self.adapters is None else self.adapters
        self._optimizer = None if optimizer is None else ShardedAdamW(self._trained, optimizer)

    def shards(self) -> dict[str, torch.Tensor]:
        """Parameter name -> this rank's region, for reallocation; without the adapters."""
        return self.model.shards()

    def adapter_shards(self) -> dict[str, torch.Tensor]:
        """The same of the adapters."""
        assert self.adapters is not None, "a model without LoRA has no adapters"
        return self.adapters.shards()

    @property
    def adapter_flat(self) -> torch.Tensor:
        """The memory of the adapters."""
        assert self.adapters is not None, "a model without LoRA has no adapters"
        return self.adapters.flat

    def optimizer_shards(self) -> dict[str, torch.Tensor]:
        """Parameter name -> the rows of the optimizer's copy that this replica owns."""
        assert self._optimizer is not None, "a frozen model has no optimizer"
        return self._optimizer.shards

    def load(self, directory: Path | None, *, seed: int) -> None:
        """Weights from a Hugging Face directory; what it lacks, or everything, is drawn from `seed`."""
        self.load_base(directory, seed=seed)
        self.load_adapters(seed=seed)

    def load_base(self, directory: Path | None, *, seed: int) -> None:
        """The same without adapters."""
        self.model.init_random(seed, names=None if directory is None else load_weights(directory, self.model))

    def load_adapters(self, *, seed: int) -> None:
        """The adapters' first values, when the weights beneath are there; with the optimizer's copy of what
        is trained."""
        if self.adapters is not None:
            self.adapters.init_random(seed)
            for name, weight in self.adapters.of_layer(None).items():  # The head that is trained beside them.
                weight.data.copy_(self.model.of_layer(None)[name])
            if self.adapters.lora.adapter is not None:
                load_adapters(self.adapters.lora.adapter, self.adapters)
        if self._optimizer is not None:
            self._optimizer.reload()

    def export_shards(self) -> dict[str, torch.Tensor]:
        """What is exported of this rank: its part of the model, of its adapters, or of both as one model."""
        if self.adapters is None:
            return self.model.shards()
        merges = self.adapters.lora.export_merged
        return self.model.merged_model().shards() if merges else self.adapters.shards()

    def run(
        self, call: FunctionCall, minibatches: Sequence[Batch],
        *, micro_batch_tokens: int, recompute: bool = False, gather: bool = True,
    ) -> CallResult:  # fmt: skip
        """Does the call's work on this rank's share of the samples, one Batch per mini-batch.

        With `recompute` a train step keeps only every block's input for the backward pass. After one on
        several replicas without `gather` only `optimizer_shards` are up to date.
        """
        work = call.work
        minibatches = [batch.to(self.groups.world.device) for batch in minibatches]
        if isinstance(work, TrainStep):
            passes = {"max_tokens": micro_batch_tokens, "recompute": recompute}
            return CallResult(Batch([]), self._train(call, work, minibatches, passes, gather=gather))
        (batch,) = minibatches
        if isinstance(work, Generate):
            return CallResult(self._generate(call, work, batch), {})
        columns = self._forward(call, work, batch, micro_batch_tokens)
        return CallResult(_results(call, batch.ids, columns), {})

    def _generate(self, call: FunctionCall, work: Generate, batch: Batch) -> Batch:
        """Ranks over cp are replicas here: each continues a part of the prompts, and tells the others."""
        cp = self.groups.cp_control
        batch = batch.select(range(*even_split(len(batch), cp.size, cp.index)))
        merges = self.adapters is not None and self.adapters.lora.merge
        with self.model.merged() if merges else nullcontext():
            columns = generate(self.model, batch, work, prompt_key=call.inputs[0], stream=call.name)
        mine = _results(call, batch.ids, columns)
        if cp.size == 1 or not mine.fields:
            return mine
        others = [index for index in range(cp.size) if index != cp.index]
        sent = cp.send_bytes(mine.pack(), others)
        parts = {index: Batch.unpack(cp.recv_bytes(index)) for index in others} | {cp.index: mine}
        sent.wait()
        return Batch.concat([parts[index] for index in range(cp.size)])

    def _forward(self, call: FunctionCall, work: Work, batch: Batch, max_tokens: int) -> list:
        output = {LogProbs: "logprobs", Values: "values", Scores: "scores"}[type(work)]
        settings = {"output": output, "temperature": getattr(work, "temperature", 1.0)}
        with torch.no_grad():
            order, results = self._pipeline(
                batch, call, settings, lambda made, _: made[output], max_tokens=max_tokens)
        if not self.groups.is_last_stage:
            return []
        lengths = [1 if output == "scores" else batch[call.inputs[0]].lengths[i] for i in order]
        empty = torch.zeros(0, dtype=self.model.wide, device=self.model.flat.device)
        column = Packed(torch.cat([empty, *results]), lengths)
        column = column.select(sorted(range(len(order)), key=order.__getitem__))
        if isinstance(work, Scores):
            return [column.values.sigmoid() if work.probability else column.values]
        return [column]

    def _train(
        self, call: FunctionCall, work: TrainStep, batches: list[Batch], passes: dict[str, Any],
        *, gather: bool,
    ) -> Metrics:  # fmt: skip
        """`passes`: how forward and backward passes are to be done, for `_pipeline`."""
        assert self._optimizer is not None, f"call {call.name} trains a frozen model"
        self._trained.requires_grad_(True)
        history = []
        batches = batches * work.epochs
        for number, batch in enumerate(batches, start=1):
            metrics = self._compute_grads(call, work, batch, passes)
            last = number == len(batches)
            history.append(metrics | self._optimizer.step(gather=gather or not last))
        self._trained.requires_grad_(False)
        return {name: x / len(history) for name, x in _sum_dicts(history).items()}

    def _compute_grads(
        self, call: FunctionCall, work: TrainStep, batch: Batch, passes: dict[str, Any]
    ) -> Metrics:
        """Gradients of a mini-batch; its loss and metrics on the last stage."""
        loss, control = work.loss, self.groups.dp_control
        num_tokens = len(batch[call.inputs[0]].values)
        counts = {"samples": len(batch), "routed_tokens": num_tokens, **loss.totals(batch)}
        totals = _sum_dicts(control.all_gather_json(counts))
        assert totals["samples"] > 0, f"call {call.name} has a mini-batch without samples"
        sums: list[dict[str, torch.Tensor]] = []

        def finish(outputs: dict[str, torch.Tensor], samples: Batch) -> torch.Tensor:
            value, metrics = loss(outputs, samples, totals)
            # (Detached: with its graph, a loss would keep the hidden states that came from the stage before.)
            sums.append({name: x.detach() for name, x in {"loss": value, **metrics}.items()})
            return value

        settings = {"output": loss.output, "entropy": loss.entropy, "temperature": work.temperature}
        routers = Routers(
            self.model, work, num_sequences=totals["samples"], num_tokens=totals["routed_tokens"])
        self._pipeline(batch, call, settings, finish, routers=routers, **passes)
        router_metrics = routers.metrics()
        if not self.groups.is_last_stage:
            return {}
        local = _sum_dicts([{name: value.item() for name, value in part.items()} for part in sums])
        return _sum_dicts(control.all_gather_json(local | router_metrics))

    def _pipeline(
        self, batch: Batch, call: FunctionCall, settings: dict[str, Any],
        finish: Callable[[dict[str, torch.Tensor], Batch], torch.Tensor],
        *, max_tokens: int, recompute: bool = False, routers: Routers | None = None,
    ) -> tuple[list[int], list[torch.Tensor]]:
        """Indices of the samples in order of micro-batches, and `finish` of each micro-batch's outputs.

        The ranks of an ep group pass through the experts together: the last micro-batches of some are empty.
        """
        groups, model, key = self.groups, self.model, call.inputs[0]
        parts = micro_batches(
            batch[key].lengths, max_tokens=max_tokens, at_least=groups.layout.pp,
            attention=attention_share(model.spec))
        if groups.ep.size > 1:
            parts += [[]] * (max(groups.ep_control.all_gather_json(len(parts))) - len(parts))
        micro = [batch.select(part) for part in parts]

        def forward(i: int, hidden: torch.Tensor | None) -> torch.Tensor:
            tokens, mask = micro[i][key], micro[i].fields.get("response_mask")
            x = model(
                tokens.values if hidden is None else hidden, tokens.lengths, recompute=recompute,
                router_losses=None if routers is None else routers.next_pass())
            if not groups.is_last_stage:
                return x
            if x.requires_grad:
                return loss_by_parts(model, x, micro[i], finish, key=key, **settings)
            return finish(compute_outputs(model, x, tokens, mask=mask, **settings), micro[i])

        ranges = [token_range(len(samples[key].values), groups.cp) for samples in micro]
        shapes = [(stop - start, model.config.hidden_size) for start, stop in ranges]
        results = run_pipeline(forward, groups, hidden_shapes=shapes, dtype=model.flat.dtype)
        return [i for part in parts for i in part], results


def _results(call: FunctionCall, ids: list[int], columns: list) -> Batch:
    """Output columns in host memory, between which samples travel; none but on the last stage."""
    fields = dict(zip(call.outputs, columns, strict=False))
    return Batch(ids, fields).to(torch.device("cpu")) if fields else Batch([])


def _sum_dicts(parts: Sequence[Metrics]) -> Metrics:
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: sum(part.get(name, 0.0) for part in parts) for name in names}
