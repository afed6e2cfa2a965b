"""NativeEngine: one role's shard on this rank, under one layout, and the calls that it can run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from realhf.data.batch import Batch, Packed
from realhf.dist.group import World
from realhf.dist.parallel import ParallelGroups
from realhf.engine.generate import generate
from realhf.engine.micro_batch import micro_batches
from realhf.engine.optimizer import ShardedAdamW
from realhf.engine.outputs import compute_outputs, response_mask
from realhf.engine.pipeline import forward_only, one_forward_one_backward, run_pipeline
from realhf.engine.work import Generate, LogProbs, OptimizerConfig, Scores, TrainStep, Values, Work
from realhf.graph import FunctionCall
from realhf.layout import Layout
from realhf.nn.hf import load_weights, save_weights
from realhf.nn.transformer import Transformer
from realhf.param_spec import ModelSpec

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True)
class CallResult:
    """Output columns (on the last pipeline stage, else none) and metrics (the same on all of its ranks)."""

    batch: Batch
    metrics: dict[str, float]


class NativeEngine:
    """A shard of a model. With an optimizer it can be trained; without, it is frozen."""

    def __init__(
        self, spec: ModelSpec, layout: Layout, world: World,
        *, dtype: str, optimizer: OptimizerConfig | None = None,
    ) -> None:  # fmt: skip
        self.groups = ParallelGroups.create(world, layout)
        self.model = Transformer(spec, self.groups, dtype=DTYPES[dtype], device=world.device)
        self._optimizer = None if optimizer is None else ShardedAdamW(self.model, optimizer)

    def shards(self) -> dict[str, torch.Tensor]:
        """Parameter name -> this rank's region, for reallocation."""
        return self.model.shards()

    def load(self, directory: Path | None, *, seed: int) -> None:
        """Weights from a Hugging Face directory; what it lacks, or everything, is drawn from `seed`."""
        self.model.init_random(seed)
        if directory is not None:
            load_weights(directory, self.model)
        if self._optimizer is not None:
            self._optimizer.reload()

    def save(self, directory: Path) -> None:
        """Writes a Hugging Face directory; every rank of the layout must call this."""
        save_weights(directory, self.model)

    def run(self, call: FunctionCall, minibatches: Sequence[Batch], *, micro_batch_tokens: int) -> CallResult:
        """Does the call's work on this rank's share of the samples, one Batch per mini-batch."""
        work = call.work
        minibatches = [batch.to(self.groups.world.device) for batch in minibatches]
        if isinstance(work, TrainStep):
            return self._train(call, work, minibatches, micro_batch_tokens)
        (batch,) = minibatches
        if isinstance(work, Generate):
            columns = generate(self.model, batch, work, prompt_key=call.inputs[0], stream=call.name)
        else:
            columns = self._forward(call, work, batch, micro_batch_tokens)
        fields = dict(zip(call.outputs, columns, strict=False))
        return CallResult(Batch(batch.ids, fields) if fields else Batch([]), {})

    def _forward(self, call: FunctionCall, work: Work, batch: Batch, max_tokens: int) -> list:
        output = {LogProbs: "logprobs", Values: "values", Scores: "scores"}[type(work)]
        temperature = work.temperature if isinstance(work, LogProbs) else 1.0
        tokens, mask = batch[call.inputs[0]], response_mask(batch)
        parts = micro_batches(tokens.lengths, max_tokens=max_tokens, at_least=self.groups.layout.pp)
        micro = [tokens.select(part) for part in parts]

        def head(i: int, hidden_TH: torch.Tensor) -> torch.Tensor:
            some = None if mask is None else mask.select(parts[i])
            return compute_outputs(
                self.model, hidden_TH, micro[i], mask=some, output=output, temperature=temperature
            )[output]

        with torch.no_grad():
            results = self._pipeline(micro, head, train=False)
        if not self.groups.is_last_stage:
            return []
        by_sample: dict[int, torch.Tensor] = {}
        for i, part in enumerate(parts):
            sizes = [1] * len(part) if output == "scores" else micro[i].lengths
            by_sample |= zip(part, results[i].split(sizes), strict=True)
        empty = torch.zeros(0, dtype=self.model.wide, device=self.model.flat.device)
        column = Packed.of([by_sample[i] for i in range(len(batch))], empty=empty)
        if not isinstance(work, Scores):
            return [column]
        return [column.values.sigmoid() if work.probability else column.values]

    def _train(
        self, call: FunctionCall, work: TrainStep, batches: Sequence[Batch], max_tokens: int
    ) -> CallResult:
        assert self._optimizer is not None, f"call {call.name} trains a frozen model"
        self.model.requires_grad_(True)
        history: list[dict[str, float]] = []
        for _ in range(work.epochs):
            for batch in batches:
                metrics = self._compute_grads(call, work, batch, max_tokens)
                history.append({**metrics, **self._optimizer.step()})
        self.model.requires_grad_(False)
        return CallResult(Batch([]), {name: x / len(history) for name, x in _sum_dicts(history).items()})

    def _compute_grads(
        self, call: FunctionCall, work: TrainStep, batch: Batch, max_tokens: int
    ) -> dict[str, float]:
        """Gradients of a mini-batch; its loss and metrics on the last stage."""
        loss, groups = work.loss, self.groups
        totals = _sum_dicts(groups.dp_control.all_gather_json(loss.totals(batch)))
        key = call.inputs[0]
        parts = micro_batches(batch[key].lengths, max_tokens=max_tokens, at_least=groups.layout.pp)
        samples = [batch.select(part) for part in parts]
        sums: list[dict[str, torch.Tensor]] = []

        def head(i: int, hidden_TH: torch.Tensor) -> torch.Tensor:
            outputs = compute_outputs(
                self.model, hidden_TH, samples[i][key], mask=response_mask(samples[i]), output=loss.output,
                temperature=work.temperature, entropy=loss.entropy,
            )  # fmt: skip
            value, metrics = loss(outputs, samples[i], totals)
            sums.append({"loss": value, **metrics})
            return value

        self._pipeline([some[key] for some in samples], head, train=True)
        if not groups.is_last_stage:
            return {}
        local = _sum_dicts([{name: value.item() for name, value in part.items()} for part in sums])
        return _sum_dicts(groups.dp_control.all_gather_json(local))

    def _pipeline(
        self, micro: Sequence[Packed], head: Callable[[int, torch.Tensor], torch.Tensor], *, train: bool
    ) -> dict[int, torch.Tensor]:
        groups, model = self.groups, self.model

        def forward(i: int, hidden: torch.Tensor | None) -> torch.Tensor:
            hidden_TH = model(micro[i].values if hidden is None else hidden, micro[i].lengths)
            return head(i, hidden_TH) if groups.is_last_stage else hidden_TH

        if train:
            actions = one_forward_one_backward(len(micro), stage=groups.at.pp, num_stages=groups.layout.pp)
        else:
            actions = forward_only(len(micro))
        shapes = [(len(m.values), model.config.hidden_size) for m in micro]
        return run_pipeline(actions, groups, forward=forward, hidden_shapes=shapes, dtype=model.flat.dtype)


def _sum_dicts(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: sum(part.get(name, 0.0) for part in parts) for name in names}
