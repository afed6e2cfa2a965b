"""The calls of the engine that are timed, on made-up sequences and prompts."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from realhf.calls import LogProbs, Loss, OptimizerConfig, Scores, TrainStep, Values, Work
from realhf.data.batch import Batch, Packed
from realhf.distributed.world import World
from realhf.engine.native import NativeEngine
from realhf.graph import FunctionCall
from realhf.layout import Layout
from realhf.models.param_spec import model_spec
from realhf.profiling.decoding import prompts
from realhf.profiling.sizes import MeasuredModel

_ANY_SIZE = 1 << 30


@dataclass(frozen=True)
class _MeanLoss(Loss):
    """The mean of an output, as the cheapest loss."""

    output: str
    entropy: bool

    def totals(self, batch: Batch) -> dict[str, float]:
        return {}

    def __call__(
        self, outputs: Mapping[str, torch.Tensor], batch: Batch, totals: Mapping[str, float]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = sum((output.mean() for output in outputs.values()), torch.zeros(()))
        return loss, {}


class EngineCalls:
    """Calls on a model shape, each as a function that runs it on a whole batch."""

    def __init__(self, model: MeasuredModel, world: World) -> None:
        self.model = model
        self.outputs = model.outputs
        self.trains = any(self.outputs.values())
        self.generates = [call.work for call in model.calls if call.kind == "generate"]
        self._losses = [call.work.loss for call in model.calls if call.kind == "train_step"]
        is_lm = "logprobs" in self.outputs or model.generates
        self.main = "logprobs" if is_lm else next(iter(self.outputs))
        """The output of the passes whose blocks are measured."""
        self._world = world

    def engine(self, blocks: int, output: str, layout: Layout, *, trains: bool) -> NativeEngine:
        """Return an engine with random weights."""
        config = self.model.with_blocks(blocks, "lm" if output == "logprobs" else "score")
        optimizer = OptimizerConfig(lr=0.0) if trains else None
        engine = NativeEngine(
            model_spec(config), layout, self._world, dtype=self.model.dtype, optimizer=optimizer)
        engine.load(None, seed=0)
        return engine

    def forward(
        self, engine: NativeEngine, output: str, batch: Batch, *, most_tokens: int = _ANY_SIZE
    ) -> Callable[[], object]:
        work = next(work for work in (LogProbs(), Values(), Scores()) if work.output == output)
        return _call(engine, work, batch, outputs=("out",), most_tokens=most_tokens)

    def train(
        self, engine: NativeEngine, output: str, batch: Batch, *, most_tokens: int = _ANY_SIZE
    ) -> Callable[[], object]:
        return _call(engine, TrainStep(_MeanLoss(output, self.finds_entropy(output))), batch,
                     most_tokens=most_tokens)

    def finds_entropy(self, output: str) -> bool:
        """Return whether a loss on this output needs the entropy of the model's distribution."""
        return any(loss.entropy for loss in self._losses if loss.output == output)

    def generate(
        self, engine: NativeEngine, rows: int, prompt: int, new: int, *, in_one_pass: bool = True
    ) -> Callable[[], object]:
        """Return a generation that decodes all rows at once, by default after one pass of their prompts."""
        work = self.generates[0]
        prefill_tokens = max(work.prefill_tokens, rows * prompt) if in_one_pass else work.prefill_tokens
        work = dataclasses.replace(
            work, sampling=dataclasses.replace(work.sampling, max_new_tokens=new), kv_cache_gib=None,
            prefill_tokens=prefill_tokens, interruption=None)
        outputs = ("sequence_ids", "response_mask", "gen_logprobs", "finished")
        batch = self._numbered(prompts(rows, prompt, vocab_size=self.model.config.vocab_size), engine)
        return _call(engine, work, batch, outputs=outputs)

    def _numbered(self, batch: Batch, engine: NativeEngine) -> Batch:
        """Return a batch whose samples have other numbers than those of other replicas."""
        first = engine.groups.at.dp * len(batch.ids)
        return Batch([first + i for i in range(len(batch.ids))], batch.fields)

    def sequences(self, tokens: int, length: int) -> Batch:
        """Return sequences of about one length that consist of responses; consecutive ones differ in
        length. If there are fewer tokens than that, there is one sequence."""
        length = min(tokens, length)
        count = tokens // length
        lengths = [length + (1, -1)[i % 2] for i in range(count // 2 * 2)] + [length] * (count % 2)
        ids = torch.arange(sum(lengths)) * 7919 % self.model.config.vocab_size
        mask = torch.ones(len(ids))
        fields = {"sequence_ids": Packed(ids, lengths), "response_mask": Packed(mask, lengths)}
        return Batch(list(range(count)), fields)


def _call(
    engine: NativeEngine, work: Work, batch: Batch, *, outputs: tuple[str, ...] = (),
    most_tokens: int = _ANY_SIZE,
) -> Callable[[], object]:
    """Return a function that runs the work on the batch in passes of at most so many tokens."""
    call = FunctionCall("profile", work.kind, tuple(batch.fields), outputs, role="role", work=work)
    if work.kind == "generate":
        return partial(engine.generate, call, batch)
    if work.kind == "train_step":
        return partial(engine.train, call, [batch], micro_batch_tokens=most_tokens, gather=False)
    return partial(engine.forward, call, batch, micro_batch_tokens=most_tokens)
