"""Times the parts of one model shape by the engine's own entry points.

A block's seconds are the difference between models of three blocks and of one; what remains of the one
belongs to the head.
"""

import dataclasses
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from realhf.data.batch import Batch, Packed
from realhf.engine.native import NativeEngine
from realhf.engine.optimizer import ShardedAdamW
from realhf.engine.work import (
    LogProbs,
    OptimizerConfig,
    SamplingConfig,
    Scores,
    TrainStep,
    Values,
    Work,
)
from realhf.graph import FunctionCall
from realhf.layout import Layout
from realhf.model_config import ModelConfig
from realhf.param_spec import model_spec
from realhf.planner.profile import CALLS, OF_MODEL, Table
from realhf.profiling.clock import Clock

_FEW, _MANY = 1, 3  # Blocks of the two models whose difference is measured.
_LONG_ENOUGH = 0.7  # Seconds of a pass beyond which no larger one is measured: it goes on in proportion.
_LARGEST_PASS = 1 << 14  # Tokens.
_NUM_SIZES = 4
_DECODE_STEPS = 16
_ANY_SIZE = 1 << 30
_TINY = 1e-7  # Seconds: differences of noisy measurements are never less.


@dataclass(frozen=True)
class Model:
    """What to measure of a model shape; `calls` are the calls of the experiment that run it."""

    config: ModelConfig
    dtype: str
    calls: tuple[FunctionCall, ...]

    def with_blocks(self, count: int, head: str) -> ModelConfig:
        """It never ends a response by itself."""
        hf = {name: value for name, value in self.config.hf.items() if name != "eos_token_id"}
        return dataclasses.replace(self.config, num_layers=count, head=head, hf=hf)

    @property
    def outputs(self) -> dict[str, bool]:
        """Output that forward or train calls compute -> whether one of them goes backward."""
        found: dict[str, bool] = {}
        for call in self.calls:
            if call.kind != "generate":
                output, trains = _output(call.work), call.kind == "train_step"
                found[output] = found.get(output, False) or trains
        return found or {"logprobs": False}

    @property
    def generates(self) -> bool:
        return any(call.kind == "generate" for call in self.calls)


def _output(work: Work) -> str:
    if isinstance(work, TrainStep):
        return work.loss.output
    return {LogProbs: "logprobs", Values: "values", Scores: "scores"}[type(work)]


@dataclass(frozen=True)
class _MeanLoss:
    """The cheapest loss on an output."""

    output: str
    entropy: bool

    def totals(self, batch: Batch) -> dict[str, float]:
        return {}

    def __call__(
        self, outputs: Mapping[str, torch.Tensor], batch: Batch, totals: Mapping[str, float]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = sum((output.mean() for output in outputs.values()), torch.zeros(()))
        return loss, {}


@dataclass(frozen=True)
class Sizes:
    """Means of one step of the experiment: tokens per prompt and per whole sequence, samples."""

    prompt_tokens: int
    tokens: int
    samples: int

    @property
    def sequence_tokens(self) -> tuple[int, int]:
        longest = max(8, self.tokens)
        return max(4, longest // 4), longest

    @property
    def pass_tokens(self) -> list[int]:
        longest = self.sequence_tokens[-1]
        most = max(4, min(self.samples, _LARGEST_PASS // longest))
        counts = {round(2 * (most / 2) ** (i / (_NUM_SIZES - 1))) for i in range(_NUM_SIZES)}
        return [longest * count for count in sorted(counts)]

    @property
    def rows(self) -> list[int]:
        return sorted({1, max(2, self.samples // 16), max(4, self.samples // 4), max(8, self.samples)})


class Bench:
    """One model shape under one tensor-parallel size."""

    def __init__(self, clock: Clock, model: Model, tp: int, sizes: Sizes) -> None:
        self._clock, self._model, self._sizes = clock, model, sizes
        world = clock.world
        first = world.rank - world.rank % tp
        self._layout = Layout.parse(f"t{tp}@{first}-{first + tp - 1}" if tp > 1 else f"d1@{first}")
        self._outputs = model.outputs
        is_lm = "logprobs" in self._outputs or model.generates
        self._main = "logprobs" if is_lm else next(iter(self._outputs))
        self._trains = any(self._outputs.values())
        trains = self._trains
        self._few, self._many = (self._engine(n, self._main, trains=trains) for n in (_FEW, _MANY))
        self._updates: dict[str, Table] = {}
        self._update = self._time_updates() if self._trains else [0.0, 0.0]

    def _engine(self, count: int, output: str, *, trains: bool) -> NativeEngine:
        config = self._model.with_blocks(count, "lm" if output == "logprobs" else "score")
        optimizer = OptimizerConfig(lr=0.0) if trains else None
        engine = NativeEngine(
            model_spec(config), self._layout, self._clock.world, dtype=self._model.dtype, optimizer=optimizer)
        engine.load(None, seed=0)
        return engine

    def tables(self) -> dict[str, Table]:
        tables = self._passes()
        for output in self._outputs:
            if output != self._main:
                tables |= self._other_head(output, tables)
        if self._model.generates:
            tables |= self._decoding()
        if self._trains:
            tables |= self._updates
        assert tables.keys() <= OF_MODEL.keys()
        return tables

    # Passes

    def _passes(self) -> dict[str, Table]:
        """Blocks at sequences of two lengths, the head behind long sequences."""
        lengths = self._sizes.sequence_tokens
        measured: dict[str, list[list[float]]] = {"forward": [], "backward": []}
        heads: dict[str, list[float]] = {"forward": [], "backward": []}
        tokens: list[int] = []
        for length in reversed(lengths):
            rows: dict[str, list[float]] = {"forward": [], "backward": []}
            for number in tokens or self._sizes.pass_tokens:
                batch = self._sequences(number, length)
                forward, rest, head, head_rest = self._one_size(batch)
                rows["forward"].append(forward)
                rows["backward"].append(rest)
                if length == lengths[-1]:
                    heads["forward"].append(head)
                    heads["backward"].append(head_rest)
                    if _MANY * (forward + rest) > _LONG_ENOUGH and len(heads["forward"]) > 1:
                        break
            tokens = self._sizes.pass_tokens[: len(rows["forward"])]
            for way, row in rows.items():
                measured[way].insert(0, row)
        axes = {"sequence_tokens": tuple(map(float, lengths)), "tokens": tuple(map(float, tokens))}
        ways = ("forward", "backward") if self._trains else ("forward",)
        tables = {f"block_{way}": Table(axes, measured[way]) for way in ways}
        for way in ways:
            tables[f"{self._main}_{way}"] = Table({"tokens": axes["tokens"]}, heads[way])
        return tables

    def _one_size(self, batch: Batch) -> tuple[float, float, float, float]:
        """Block forward and the rest of forward and backward, head forward and the rest."""
        runs = [self._forward(engine, self._main, batch) for engine in (self._few, self._many)]
        runs.append(self._forward(self._few, self._main, batch.select([])))
        if self._trains:
            runs += [self._train(engine, self._main, batch) for engine in (self._few, self._many)]
        few, many, empty, *training = self._clock.seconds(*runs)
        forward = max(_TINY, (many - few) / (_MANY - _FEW))
        head = max(_TINY, few - forward * _FEW - empty)
        if not training:
            return forward, 0.0, head, 0.0
        few, many = (whole - update for whole, update in zip(training, self._update, strict=True))
        both = max(_TINY, (many - few) / (_MANY - _FEW))
        rest = max(_TINY, both - forward)
        return forward, rest, head, max(_TINY, few - (forward + rest) * _FEW - empty - head)

    def _other_head(self, output: str, tables: Mapping[str, Table]) -> dict[str, Table]:
        """By the whole of a pass less its block."""
        engine = self._engine(_FEW, output, trains=self._outputs[output])
        length, tokens = self._sizes.sequence_tokens[-1], tables["block_forward"].axes["tokens"]
        heads: dict[str, list[float]] = {"forward": [], "backward": []}
        for i, number in enumerate(tokens):
            batch = self._sequences(int(number), length)
            runs = [self._forward(engine, output, part) for part in (batch, batch.select([]))]
            if self._outputs[output]:
                runs.append(self._train(engine, output, batch))
            whole, empty, *training = self._clock.seconds(*runs)
            block = tables["block_forward"].seconds[-1][i]
            heads["forward"].append(max(_TINY, whole - block - empty))
            if training:
                blocks = block + tables["block_backward"].seconds[-1][i]
                rest = training[0] - self._update[0] - blocks - empty - heads["forward"][-1]
                heads["backward"].append(max(_TINY, rest))
        return {f"{output}_{way}": Table({"tokens": tokens}, row) for way, row in heads.items() if row}

    def _forward(self, engine: NativeEngine, output: str, batch: Batch) -> Callable[[], object]:
        work = {"logprobs": LogProbs(), "values": Values(), "scores": Scores()}[output]
        call = FunctionCall("profile", "forward", tuple(batch.fields), ("out",), role="role", work=work)
        return lambda: engine.run(call, [batch], micro_batch_tokens=_ANY_SIZE)

    def _train(self, engine: NativeEngine, output: str, batch: Batch) -> Callable[[], object]:
        losses = [c.work.loss for c in self._model.calls if c.kind == "train_step"]
        entropy = any(loss.entropy for loss in losses if loss.output == output)
        work = TrainStep(_MeanLoss(output, entropy))
        call = FunctionCall("profile", "train_step", tuple(batch.fields), role="role", work=work)
        return lambda: engine.run(call, [batch], micro_batch_tokens=_ANY_SIZE)

    def _sequences(self, tokens: int, length: int) -> Batch:
        """Sequences of about one length of which neighbours differ, all of it responses."""
        count = max(1, tokens // length)
        lengths = [length + (1, -1)[i % 2] for i in range(count // 2 * 2)] + [length] * (count % 2)
        ids = torch.arange(sum(lengths)) * 7919 % self._model.config.vocab_size
        mask = torch.ones(len(ids))
        fields = {"sequence_ids": Packed(ids, lengths), "response_mask": Packed(mask, lengths)}
        return Batch(list(range(count)), fields)

    # Generation

    def _decoding(self) -> dict[str, Table]:
        rows = [rows for rows in self._sizes.rows if rows <= self._max_rows]
        short, longest = self._sizes.sequence_tokens
        prompts = (short, max(longest, short + 2 * _DECODE_STEPS))
        blocks, heads = [], []
        for prompt in prompts:
            times = [self._decode(number, prompt) for number in rows]
            blocks.append([block for block, _ in times])
            heads.append([head for _, head in times])
        contexts = tuple(prompt + (1 + _DECODE_STEPS) / 2 for prompt in prompts)
        axes = {"context_tokens": contexts, "rows": tuple(map(float, rows))}
        head = [statistics.fmean(pair) for pair in zip(*heads, strict=True)]
        return {
            "decode_block": Table(axes, blocks),
            "decode_head": Table({"rows": axes["rows"]}, head),
        }

    def _decode(self, rows: int, prompt: int) -> tuple[float, float]:
        """Seconds per step of a block, and of the rest. All rows have the same prompt, so that it is
        prefilled but once."""
        runs = [
            self._generate(engine, rows, prompt, new)
            for engine in (self._few, self._many) for new in (1, 1 + _DECODE_STEPS)
        ]  # fmt: skip
        few, few_more, many, many_more = self._clock.seconds(*runs)
        few, many = (few_more - few) / _DECODE_STEPS, (many_more - many) / _DECODE_STEPS
        block = max(_TINY, (many - few) / (_MANY - _FEW))
        return block, max(_TINY, few - block * _FEW)

    @property
    def _max_rows(self) -> int:
        works = [call.work for call in self._model.calls if call.kind == "generate"]
        return max((work.max_rows for work in works), default=1)

    def _generate(self, engine: NativeEngine, rows: int, prompt: int, new: int) -> Callable[[], object]:
        works = [call.work for call in self._model.calls if call.kind == "generate"]
        sampling: SamplingConfig = dataclasses.replace(works[0].sampling, max_new_tokens=new)
        work = dataclasses.replace(works[0], sampling=sampling)
        outputs = ("sequence_ids", "response_mask", "gen_logprobs", "finished")
        call = FunctionCall("profile", "generate", ("prompt_ids",), outputs, role="role", work=work)
        ids = torch.arange(prompt).repeat(rows) % self._model.config.vocab_size
        batch = Batch(list(range(rows)), {"prompt_ids": Packed(ids, [prompt] * rows)})
        return lambda: engine.run(call, [batch], micro_batch_tokens=_ANY_SIZE)

    # What a call takes besides

    def calls(self) -> dict[str, Table]:
        """By samples; without what is counted as a pass or as a decode step."""
        counts = [self._sizes.rows[0], self._sizes.rows[-1]]
        axes = {"samples": tuple(map(float, counts))}
        empty = self._sequences(8, 4).select([])
        (seconds,) = self._clock.seconds(self._forward(self._few, self._main, empty))
        calls = {name: Table(axes, [seconds, seconds]) for name in ("forward", "train_step")}
        if self._model.generates:
            length = self._sizes.sequence_tokens[0]
            one = self._sequences(length, length)
            times = []
            for rows in counts:
                generation = self._generate(self._few, rows, length, 1)
                whole, prefill = self._clock.seconds(generation, self._forward(self._few, self._main, one))
                _, head = self._decode(rows, length)
                times.append(max(_TINY, whole - prefill - head))
            calls["generate"] = Table(axes, times)
        assert calls.keys() <= CALLS.keys()
        return calls

    # The optimizer

    def _time_updates(self) -> list[float]:
        config = OptimizerConfig(lr=0.0)
        models = [self._engine(count, self._main, trains=False).model for count in (_FEW, _MANY)]
        numels = tuple(float(model.flat.numel()) for model in models)
        steps = self._clock.seconds(*(ShardedAdamW(model, config).step for model in models))
        zeros = self._clock.seconds(*(model.zero_grad_buffer for model in models))
        axes = {"parameters": numels}
        self._updates = {"update": Table(axes, steps), "zero_gradients": Table(axes, zeros)}
        return steps
