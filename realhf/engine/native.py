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
    """`batch` holds the call's output columns (complete on the ranks of the last pipeline stage, empty elsewhere);
    `metrics` are for the whole call and the same on all ranks of the last stage."""

    batch: Batch
    metrics: dict[str, float]


class NativeEngine:
    """A shard of a model. With an optimizer it can be trained; without, it is frozen."""

    def __init__(
        self,
        spec: ModelSpec,
        layout: Layout,
        world: World,
        *,
        dtype: str,
        optimizer: OptimizerConfig | None = None,
    ) -> None:
        self.groups = ParallelGroups.create(world, layout)
        self.model = Transformer(spec, self.groups, dtype=DTYPES[dtype], device=world.device)
        self.model.requires_grad_(False)
        self._optimizer = None if optimizer is None else ShardedAdamW(self.model, optimizer)

    def shards(self) -> dict[str, torch.Tensor]:
        """Parameter name -> this rank's region, for reallocation."""
        return self.model.shards()

    def load(self, directory: Path | None, *, seed: int) -> None:
        """Weights from a Hugging Face directory; what it lacks, or everything when there is none, is drawn from `seed`."""
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
        if isinstance(work, TrainStep):
            return self._train(call, work, minibatches, micro_batch_tokens)
        (batch,) = minibatches
        if isinstance(work, Generate):
            columns = generate(self.model, batch, work, prompt_key=call.inputs[0], stream=call.name)
        else:
            columns = self._forward(call, work, batch, micro_batch_tokens)
        return CallResult(
            Batch(batch.ids, dict(zip(call.outputs, columns, strict=False))) if columns else Batch([]), {}
        )

    def _forward(self, call: FunctionCall, work: Work, batch: Batch, max_tokens: int) -> list:
        output = {LogProbs: "logprobs", Values: "values", Scores: "scores"}[type(work)]
        temperature = work.temperature if isinstance(work, LogProbs) else 1.0
        tokens, mask = batch[call.inputs[0]], response_mask(batch)
        parts = micro_batches(tokens.lengths, max_tokens=max_tokens, at_least=self.groups.layout.pp)

        def head(i: int, hidden_TH: torch.Tensor) -> torch.Tensor:
            return compute_outputs(
                self.model,
                hidden_TH,
                tokens.select(parts[i]),
                mask=mask and mask.select(parts[i]),
                output=output,
                temperature=temperature,
            )[output]

        with torch.no_grad():
            results = self._pipeline([tokens.select(p) for p in parts], head, train=False)
        if not self.groups.is_last_stage:
            return []
        wide = torch.float64 if self.model.flat.dtype == torch.float64 else torch.float32
        empty = torch.zeros(0, dtype=wide, device=self.groups.world.device)
        if output == "scores":
            scores = torch.cat([results[i] for i in range(len(parts))]) if parts else empty
            return [scores[_inverse([i for p in parts for i in p])]]
        if not parts:
            return [Packed(empty, [])]
        packed = [Packed(results[i], [tokens.lengths[j] for j in part]) for i, part in enumerate(parts)]
        sequences = [s for p in packed for s in p.split()]
        return [Packed.of([sequences[i] for i in _inverse([i for p in parts for i in p]).tolist()])]

    def _train(
        self, call: FunctionCall, work: TrainStep, minibatches: Sequence[Batch], max_tokens: int
    ) -> CallResult:
        assert self._optimizer is not None, f"call {call.name} trains a frozen model"
        self.model.requires_grad_(True)
        history: list[dict[str, float]] = []
        for _ in range(work.epochs):
            for batch in minibatches:
                history.append(self._train_minibatch(call, work, batch, max_tokens))
        self.model.requires_grad_(False)
        names = dict.fromkeys(name for metrics in history for name in metrics)
        mean = {n: sum(m.get(n, 0.0) for m in history) / len(history) for n in names}
        return CallResult(Batch([]), mean)

    def _train_minibatch(
        self, call: FunctionCall, work: TrainStep, batch: Batch, max_tokens: int
    ) -> dict[str, float]:
        loss, groups = work.loss, self.groups
        totals = _sum_dicts(groups.dp_control.all_gather_json(loss.totals(batch)))
        tokens = batch[call.inputs[0]]
        parts = micro_batches(tokens.lengths, max_tokens=max_tokens, at_least=groups.layout.pp)
        samples = [batch.select(part).to(groups.world.device) for part in parts]
        sums: list[dict[str, torch.Tensor]] = []

        def head(i: int, hidden_TH: torch.Tensor) -> torch.Tensor:
            outputs = compute_outputs(
                self.model,
                hidden_TH,
                samples[i][call.inputs[0]],
                mask=response_mask(samples[i]),
                output=loss.output,
                temperature=work.temperature,
                entropy=loss.entropy,
            )
            value, metrics = loss(outputs, samples[i], totals)
            sums.append({"loss": value, **metrics})
            return value

        self._pipeline([s[call.inputs[0]] for s in samples], head, train=True)
        update = self._optimizer.step()  # type: ignore[union-attr]
        if not groups.is_last_stage:
            return update
        local = _sum_dicts([{name: value.item() for name, value in part.items()} for part in sums])
        return {**_sum_dicts(groups.dp_control.all_gather_json(local)), **update}

    def _pipeline(
        self, micro: Sequence[Packed], head: Callable[[int, torch.Tensor], torch.Tensor], *, train: bool
    ) -> dict[int, torch.Tensor]:
        groups, model, device = self.groups, self.model, self.groups.world.device

        def forward(i: int, hidden: torch.Tensor | None) -> torch.Tensor:
            x = micro[i].values.to(device) if hidden is None else hidden
            hidden_TH = model(x, micro[i].lengths)
            return head(i, hidden_TH) if groups.is_last_stage else hidden_TH

        if train:
            actions = one_forward_one_backward(len(micro), stage=groups.at.pp, num_stages=groups.layout.pp)
        else:
            actions = forward_only(len(micro))
        shapes = [(m.values.shape[0], model.spec.config.hidden_size) for m in micro]
        return run_pipeline(actions, groups, forward=forward, hidden_shapes=shapes, dtype=model.flat.dtype)


def _inverse(order: list[int]) -> torch.Tensor:
    """Where each index stands in `order`."""
    return torch.tensor(order, dtype=torch.long).argsort()


def _sum_dicts(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: sum(part.get(name, 0.0) for part in parts) for name in names}
