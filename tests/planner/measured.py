"""Runs calls of real engines and counts the tensor storage that exists at their peak."""

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from realhf.data.batch import Batch, Packed
from realhf.engine.native import NativeEngine
from realhf.engine.work import Generate, LogProbs, OptimizerConfig, SamplingConfig, Scores, TrainStep, Values
from realhf.graph import FunctionCall
from realhf.layout import Layout, even_split
from realhf.planner.problem import ModelRole, Workload


class Storages(TorchDispatchMode):
    """Counts the bytes of storage that come to life under it, and their peak; what autograd saves counts
    until autograd lets it go."""

    def __init__(self, explain=False):
        super().__init__()
        self.now = self.peak = 0
        self._live = {}
        self.explain, self.at_peak, self.where = explain, [], None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        old = {x.untyped_storage()._cdata for x in known} | self._live.keys()
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and (at := x.untyped_storage()._cdata) not in old:
                old.add(at)
                storage = x.untyped_storage()
                self._live[at] = (storage.nbytes(), str(func), tuple(x.shape), x.dtype)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._forget, at)
        if self.now > self.peak:
            self.peak = self.now
            if self.explain:
                self.at_peak, self.where = list(self._live.values()), str(func)
        return result

    def _forget(self, at):
        self.now -= self._live.pop(at)[0]


@dataclass(frozen=True)
class Case:
    """One call under one layout."""

    layout: str
    kind: str
    role: ModelRole
    workload: Workload
    micro_batch_tokens: int = 1 << 20
    recompute: bool = False
    work: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Mean:
    """The mean of an output over the response tokens, negative: a loss with no memory of its own."""

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
    if case.kind == "train_step":
        return TrainStep(Mean(w.output, w.entropy), minibatches=w.minibatches, epochs=w.epochs)
    return {"logprobs": LogProbs, "values": Values, "scores": Scores}[w.output]()


def _batches(case: Case, layout: Layout, dp_index: int) -> list[Batch]:
    """This dp replica's share of every mini-batch: equal lengths, every prompt `samples_per_prompt` times."""
    w, vocabulary, batches = case.workload, case.role.config.vocab_size, []
    prompt, response = round(w.prompt_tokens), round(w.response_tokens)
    for number in range(w.minibatches):
        first, last = even_split(w.num_samples, w.minibatches, number)
        start, stop = even_split(last - first, layout.dp, dp_index)
        ids = list(range(first + start, first + stop))
        seeds = [torch.Generator().manual_seed(i // w.samples_per_prompt) for i in ids]
        size = prompt if case.kind == "generate" else prompt + response
        rows = Packed.of([torch.randint(vocabulary, (size,), generator=seed) for seed in seeds])
        masks = [torch.tensor([0.0] * prompt + [1.0] * (size - prompt)) for _ in ids]
        batches.append(Batch(ids, {"tokens": rows, "response_mask": Packed.of(masks)}))
    return batches


def measure(world: Any, case: Case, explain: bool = False) -> Any:
    """(weights, training, call's peak) in bytes of this rank; None for one outside the layout."""
    layout = Layout.parse(case.layout)
    if world.rank not in layout:
        return None
    optimizer = OptimizerConfig() if case.role.trainable else None
    engine = NativeEngine(case.role.spec, layout, world, dtype=case.role.dtype, optimizer=optimizer)
    engine.load(None, seed=0)
    inputs = ("tokens",) if case.kind == "generate" else ("tokens", "response_mask")
    outputs = {"generate": ("out", "mask", "logprobs", "finished"), "forward": ("out",), "train_step": ()}
    call = FunctionCall("call", case.kind, inputs, outputs[case.kind], role="role", work=_work(case))
    batches = _batches(case, layout, layout.coordinate(world.rank).dp)
    options = {"micro_batch_tokens": case.micro_batch_tokens, "recompute": case.recompute}
    if case.kind == "train_step":  # Adam makes its moments in its first step.
        engine.run(call, batches, **options)
    with Storages(explain) as storages:
        engine.run(call, batches, **options)
    training = 0
    if optimizer is not None:
        adamw = engine._optimizer._adamw
        held = [engine.model.grad_buffer, engine._optimizer._master]
        held += [x for state in adamw.state.values() for x in state.values() if x.numel() > 1]
        training = sum(x.nbytes for x in held)
    if explain:
        return engine.model.flat.nbytes, training, storages.peak, storages.where, storages.at_peak
    return engine.model.flat.nbytes, training, storages.peak
