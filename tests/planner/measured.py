"""Run calls of real engines and count the tensor storage that exists at their peak."""

from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

from realhf.calls import (
    Generate,
    LogProbs,
    OptimizerConfig,
    SamplingConfig,
    Scores,
    TopLogProbs,
    TrainStep,
    Values,
)
from realhf.data.batch import Batch, Packed
from realhf.devices import half_precision
from realhf.devices.reserved import FixedPlanes
from realhf.engine.native import NativeEngine
from realhf.graph import FunctionCall
from realhf.inference import kv_cache
from realhf.layout import Layout, even_split
from realhf.planner.problem import ModelRole, Workload
from tests.realloc.test_memory import Storages


@dataclass(frozen=True)
class Case:
    """One call under one layout."""

    layout: str
    kind: str
    role: ModelRole
    workload: Workload
    micro_batch_tokens: int = 1 << 20
    recompute: bool = False
    ragged: bool = False  # Responses have all lengths up to `max_new_tokens`.


@dataclass(frozen=True)
class Mean:
    """The negative mean of an output over the response tokens, a loss without memory of its own."""

    output: str
    entropy: bool

    def totals(self, batch: Batch) -> dict[str, float]:
        return {"tokens": float(batch["response_mask"].values.sum())}

    def __call__(self, outputs: Any, batch: Batch, totals: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        return -outputs[self.output].sum() / totals["tokens"], {}


def _work(case: Case) -> Any:
    w = case.workload
    if case.kind == "generate":
        return Generate(SamplingConfig(max_new_tokens=w.max_new_tokens), max_rows=w.max_rows)
    if case.kind == "forward" and w.top_k:
        return TopLogProbs(w.top_k)
    if case.kind == "train_step":
        return TrainStep(Mean(w.output, w.entropy), minibatches=w.minibatches, epochs=w.epochs)
    return {"logprobs": LogProbs, "values": Values, "scores": Scores}[w.output]()


def _batches(case: Case, layout: Layout, dp_index: int) -> list[Batch]:
    """Return the mini-batches of one dp replica; every prompt occurs `samples_per_prompt` times."""
    w, vocabulary, batches = case.workload, case.role.config.vocab_size, []
    response = round(w.response_tokens)
    for number in range(w.minibatches):
        first, last = even_split(w.num_samples, w.minibatches, number)
        start, stop = even_split(last - first, layout.dp, dp_index)
        ids = list(range(first + start, first + stop))
        seeds = [torch.Generator().manual_seed(i // w.samples_per_prompt) for i in ids]
        sizes = [0 if case.kind == "generate" else response for _ in ids]
        if case.ragged:
            sizes = [1 + 7 * i % w.max_new_tokens for i in ids]
        prompts = [_prompt_tokens(w, i // w.samples_per_prompt) for i in ids]
        shapes = [(prompt + size,) for prompt, size in zip(prompts, sizes, strict=True)]
        rows = Packed.of(
            [torch.randint(vocabulary, x, generator=seed) for x, seed in zip(shapes, seeds, strict=True)])
        masks = [
            torch.tensor([0.0] * prompt + [1.0] * size) for prompt, size in zip(prompts, sizes, strict=True)]
        batches.append(Batch(ids, {"tokens": rows, "response_mask": Packed.of(masks)}))
    return batches


def _prompt_tokens(w: Workload, number: int) -> int:
    """Return the length of a prompt: every second one is the longest, and the mean is as given."""
    mean = round(w.prompt_tokens)
    longest = round(w.longest_prompt)
    return longest if number % 2 else 2 * mean - longest


def measure(world: Any, case: Case) -> Any:
    """Return the bytes of weights, of training state and of the call's peak on this rank, or None outside the
    layout.

    It treats every CPU as one with bfloat16 units; CPUs without them also hold some operands in float32.
    """
    with patch.object(half_precision, "_has_units", lambda dtype: True):
        return _measure(world, case)


def _measure(world: Any, case: Case) -> Any:
    layout = Layout.parse(case.layout)
    if world.rank not in layout:
        return None
    optimizer = OptimizerConfig(lr=1e-5) if case.role.trainable else None
    settings = {"dtype": case.role.dtype, "optimizer": optimizer, "lora": case.role.lora,
                "float32_head": case.role.float32_head}
    engine = NativeEngine(case.role.spec, layout, world, **settings)
    engine.load(None, seed=0)
    inputs = ("tokens",) if case.kind == "generate" else ("tokens", "response_mask")
    outputs = {"generate": ("out", "mask", "logprobs", "finished"), "forward": ("out", "more")}
    call = FunctionCall("call", case.kind, inputs, outputs.get(case.kind, ()), role="role", work=_work(case))
    batches = _batches(case, layout, layout.coordinate(world.rank).dp)
    tokens = case.micro_batch_tokens
    # (A cache has addresses for more than it holds; here its size is that of its tensor.)
    with Storages() as storages, patch.object(kv_cache, "reserve_planes", FixedPlanes):
        if case.kind == "generate":
            engine.generate(call, batches[0])
        elif case.kind == "forward":
            engine.forward(call, batches[0], micro_batch_tokens=tokens)
        else:
            engine.train(call, batches, micro_batch_tokens=tokens, recompute=case.recompute)
    training = 0
    if optimizer is not None:
        held = [engine._trained.grad_buffer, *engine._optimizer.held]
        training = sum(x.nbytes for x in held)
    adapters = 0 if engine.adapters is None else engine.adapters.flat.nbytes
    return engine.model.flat.nbytes + adapters, training, storages.peak
