"""Measured work: sizes of model shapes, calls of the engine on drawn samples, and rows that decode.

Rows that decode are set up with the scheduler and the model but without reading prompts.
"""

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice

import torch

from realhf.calls import (
    Generate,
    LogProbs,
    Loss,
    ModelWork,
    OptimizerConfig,
    Output,
    SampleId,
    SamplingConfig,
    Scores,
    TrainStep,
    Values,
    Work,
)
from realhf.data.batch import Batch, Packed
from realhf.devices.pinned import upload
from realhf.distributed.world import World
from realhf.engine.native import NativeEngine
from realhf.graph import FunctionCall
from realhf.inference.cache_memory import CacheSizes, GenerationLimits
from realhf.inference.cpu_decoding import Decode, DecodingSteps
from realhf.inference.forward_batch import PagedBackends, Prefill, paged_rows
from realhf.inference.kv_cache import BlockManager, BlockTables, RowPages
from realhf.inference.page_pool import PagePool, page_pool
from realhf.inference.response_buffer import PromptGroup
from realhf.inference.scheduler import BufferRow, Prompt, Scheduler
from realhf.layout import Layout, even_split
from realhf.models.kv_blocks import block_size, shared_tokens, tokens_read
from realhf.models.model_config import ModelConfig
from realhf.models.param_spec import model_spec
from realhf.nn.attention import Segment
from realhf.nn.linear import PackedWeight
from realhf.nn.transformer import Transformer
from realhf.profiling.clock import device_bytes

_LARGEST_PASS = 1 << 14  # Tokens of the largest pass.
_NUM_SIZES = 4
_CACHE_SHARE = 1 / 8  # The fraction of a device's memory for the cache of measured rows.
_NEW_TOKENS = 16  # New tokens that each row has cache blocks for.
_ANY_SIZE = 1 << 30


# Sizes


@dataclass(frozen=True)
class MeasuredModel:
    """A model shape to measure; `calls` are the calls of the experiment that run it."""

    config: ModelConfig
    dtype: str
    calls: tuple[FunctionCall, ...]

    def with_blocks(self, count: int, head: str) -> ModelConfig:
        """Return the config with `count` blocks, with experts if the model has any, and no end-of-sequence
        token."""
        c = self.config
        moe = self.config.moe
        hf = {name: value for name, value in c.hf.items() if name != "eos_token_id"}
        return dataclasses.replace(
            c, num_layers=count, head=head, hf=hf, generation={},
            windows=tuple(islice(cycle(c.windows), count)) if c.windows else (),
            rope_layers=tuple(islice(cycle(c.rope_layers), count)) if c.rope_layers else (),
            moe=None if moe is None else dataclasses.replace(moe, num_dense_layers=0))

    @property
    def outputs(self) -> dict[Output, bool]:
        """The outputs of forward and train calls, each with whether one of them runs a backward pass."""
        trains: dict[Output, bool] = {}
        for work in (call.work_as(ModelWork) for call in self.calls):
            if not isinstance(work, Generate):
                trains[work.output] = trains.get(work.output, False) or isinstance(work, TrainStep)
        return trains or {Output.LOGPROBS: False}

    @property
    def generates(self) -> bool:
        return any(call.kind == "generate" for call in self.calls)


@dataclass(frozen=True)
class Sizes:
    """Means over one step of the experiment."""

    prompt_tokens: int
    tokens: int  # Of a whole sequence.
    samples: int
    group_size: int  # Samples per prompt.

    @property
    def sequence_tokens(self) -> tuple[int, int]:
        longest = max(8, self.tokens)
        return max(4, longest // 4), longest

    @property
    def pass_tokens(self) -> list[int]:
        longest = self.sequence_tokens[-1]
        most = max(4, min(self.samples, _LARGEST_PASS // longest))
        counts = {round(2 * (most / 2) ** (i / (_NUM_SIZES - 1))) for i in range(_NUM_SIZES)}
        # Small passes take longer for each token.
        return [max(4, longest // 4), longest, *(longest * count for count in sorted(counts))]

    @property
    def rows(self) -> list[int]:
        return sorted({1, max(2, self.samples // 16), max(4, self.samples // 4), max(8, self.samples)})


# Calls


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
        self.generates = [call.work for call in model.calls if isinstance(call.work, Generate)]
        self.generates_in_int8 = any(work.generation_weights == "int8" for work in self.generates)
        self._losses = [call.work.loss for call in model.calls if isinstance(call.work, TrainStep)]
        is_lm = Output.LOGPROBS in self.outputs or model.generates
        self.main = Output.LOGPROBS if is_lm else next(iter(self.outputs))
        """The output of the passes whose blocks are measured."""
        self._world = world

    def engine(self, blocks: int, output: Output, layout: Layout, *, trains: bool) -> NativeEngine:
        config = self.model.with_blocks(blocks, output.head)
        optimizer = OptimizerConfig(lr=0.0) if trains else None
        engine = NativeEngine(
            model_spec(config), layout, self._world, dtype=self.model.dtype, optimizer=optimizer)
        if not layout.form:  # Copies in another form are filled by reallocations; zeros decode as fast.
            engine.load(None, seed=0)
        return engine

    def forward(
        self, engine: NativeEngine, output: Output, batch: Batch, *, most_tokens: int = _ANY_SIZE
    ) -> Callable[[], object]:
        work = next(work for work in (LogProbs(), Values(), Scores()) if work.output == output)
        return _call(engine, work, batch, outputs=("out",), most_tokens=most_tokens)

    def train(
        self, engine: NativeEngine, output: Output, batch: Batch, *, most_tokens: int = _ANY_SIZE
    ) -> Callable[[], object]:
        return _call(engine, TrainStep(_MeanLoss(output, self.finds_entropy(output))), batch,
                     most_tokens=most_tokens)

    def finds_entropy(self, output: Output) -> bool:
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
            prefill_tokens=prefill_tokens, interruption=None, environment=None)
        outputs = ("sequence_ids", "response_mask", "gen_logprobs", "finished")
        batch = self._numbered(prompts(rows, prompt, vocab_size=self.model.config.vocab_size), engine)
        return _call(engine, work, batch, outputs=outputs)

    def _numbered(self, batch: Batch, engine: NativeEngine) -> Batch:
        """Return a batch whose samples have other numbers than those of other replicas."""
        first = engine.groups.at.dp * len(batch.ids)
        return Batch([first + i for i in range(len(batch.ids))], batch.fields)

    def sequences(self, tokens: int, length: int, *, only_ends: bool = False) -> Batch:
        """Return sequences of about one length that consist of responses; consecutive ones differ in
        length. If there are fewer tokens than that, there is one sequence.

        With `only_ends`, only their first and last tokens are responses, and only the last ones have an
        output. (What comes before a response may be shared by sequences.)
        """
        length = min(tokens, length)
        count = tokens // length
        lengths = [length + (1, -1)[i % 2] for i in range(count // 2 * 2)] + [length] * (count % 2)
        ids = torch.arange(sum(lengths)) * 7919 % self.model.config.vocab_size
        mask = torch.ones(len(ids))
        if only_ends:
            ends = torch.tensor(lengths).cumsum(0)
            mask.zero_()[torch.cat([ends - 1, ends - torch.tensor(lengths)])] = 1
        fields = {"sequence_ids": Packed(ids, lengths), "response_mask": Packed(mask, lengths)}
        return Batch(list(range(count)), fields)


def _call(
    engine: NativeEngine, work: Work, batch: Batch, *, outputs: tuple[str, ...] = (),
    most_tokens: int = _ANY_SIZE,
) -> Callable[[], object]:
    """Return a function that runs the work on the batch in passes of at most so many tokens."""
    call = FunctionCall("profile", inputs=tuple(batch.fields), outputs=outputs, role="role", work=work)
    if work.kind == "generate":
        return partial(engine.generate, call, batch)
    if work.kind == "train_step":
        return partial(engine.train, call, [batch], micro_batch_tokens=most_tokens, gather=False)
    return partial(engine.forward, call, batch, micro_batch_tokens=most_tokens)


# Decoding


def prompts(rows: int, length: int, *, vocab_size: int) -> Batch:
    """Return one prompt per row. They differ, since equal ones are read once and share blocks of the
    cache."""
    ids = torch.arange(length) + torch.arange(rows)[:, None]
    return Batch(list(range(rows)), {"prompt_ids": Packed(ids.flatten() % vocab_size, [length] * rows)})


def most_rows(model: Transformer, length: int, world: World) -> int:
    """Return how many rows of `length` tokens can be measured."""
    row_bytes = model.cache_token_bytes * length
    return max(1, min(world.control.all_gather_json(int(device_bytes(world) * _CACHE_SHARE / row_bytes))))


def cached_tokens(length: int, *, num_rows: int) -> float:
    """Return the tokens of the cache that a measured row reads, if its prompt of `length` tokens has
    `num_rows` rows."""
    size = block_size([(length, num_rows)], max_new_tokens=_NEW_TOKENS)
    shared = shared_tokens(length, num_rows)
    own = length + 1.0 - shared
    return float(shared + tokens_read(own, own, size))


class PackedModel:
    """A model with the weights of another one, which keeps the packed copies that a generation makes."""

    def __init__(self, model: Transformer) -> None:
        self.model = Transformer(model.spec, model.groups, dtype=model.flat.dtype, memory=model.flat)
        self._packing = ExitStack()  # Leaving it drops the copies.
        self._packing.enter_context(self.model.packed())
        rows = DecodingRows(self.model, 1, prompt_tokens=1, num_prompts=1)
        with torch.inference_mode():
            self.model.logits(rows.decode(steps=1))
        self._packed = [weight for weight in self.model.weights() if weight.packed_bytes]

    @property
    def packed_params(self) -> int:
        return sum(weight.numel() for weight in self._packed)

    def pack(self) -> list[PackedWeight]:
        """Make the copies once more."""
        return [PackedWeight(weight.detach()) for weight in self._packed]


class DecodingRows:
    """Rows that continue `num_prompts` prompts of one length; consecutive rows share a prompt.

    They run in inference mode, as generation does: an operation takes longer without it.

    The cached keys and values of the prompts are made up, since reading prompts takes much longer than the
    steps after them and has no effect on the time of these.
    """

    def __init__(self, model: Transformer, rows: int, *, prompt_tokens: int, num_prompts: int) -> None:
        bounds = [even_split(rows, num_prompts, i) for i in range(num_prompts)]
        row_prompts = [
            Prompt([0] * prompt_tokens, [BufferRow(row) for row in range(*pair)]) for pair in bounds]
        groups = [
            PromptGroup(prompt.tokens, [SampleId(row) for row in prompt.rows]) for prompt in row_prompts]
        work = Generate(SamplingConfig(max_new_tokens=_NEW_TOKENS), max_rows=rows)
        pool = page_pool(model, None) or PagePool(model)
        limits = GenerationLimits(
            [group.size for group in groups], work, token_bytes=1, num_cohorts=1,
            page_tokens=pool.page_tokens)
        sizes = CacheSizes([group.size for group in groups], limits)
        blocks = BlockManager(pool.lease(sizes.num_blocks, page_size=sizes.block_size))
        self._cache = pool.cache
        tables = sizes.tables(self._cache.num_blocks)
        scheduler = Scheduler(
            row_prompts, tables=tables, history=lambda _: [], blocks=blocks,
            prefill_tokens=rows * prompt_tokens)
        self._model = model
        device = model.flat.device
        for layer in self._cache.layers:
            layer.fill_(1.0)  # Memory pages that were never written would all map to one page.
        first = scheduler.plan()
        assert first is not None
        self._cache_positions = [chunk.cache_positions(tables.block_size) for chunk in first.chunks]
        scheduler.count([False] * rows)
        scheduler.plan()
        self.segment = next_tokens(tables, pool.backends, device)
        """The decode step after the prompts."""
        self._ids_B = torch.arange(rows, device=device) * 7919 % model.config.vocab_size

    def reading(self) -> Callable[[], object]:
        """Return a function that runs the pass of all prompts."""
        lens = list(map(len, self._cache_positions))
        device = self._ids_B.device
        batch = prompts(len(lens), lens[0], vocab_size=self._model.config.vocab_size)
        ids_T = batch["prompt_ids"].values.to(device)
        positions_T = torch.tensor([i for prompt in self._cache_positions for i in prompt], device=device)
        segment = Prefill(lens, positions_T, whole_lens=lens)
        run = partial(self._model.advance, ids_T, self._cache, [segment])
        return torch.inference_mode()(run)

    @torch.inference_mode()
    def decode(self, *, steps: int) -> torch.Tensor:
        """Run the same decode step `steps` times, without its head, and return its hidden states."""
        with self._model.gathering(len(self._ids_B)):
            for _ in range(steps):
                hidden_BH = self._model.advance(self._ids_B, self._cache, [self.segment])
        return hidden_BH


def next_tokens(tables: BlockTables, backends: PagedBackends | None, device: torch.device) -> Segment:
    """Return one new token of every running row, for the paged path or (`backends` is None) for a CPU."""
    if backends is None:
        return Decode(DecodingSteps(tables).advance())
    on_host = tables.advance_pages(len(tables.running()), tables.blocks_per_row)
    pages = RowPages(*(upload(array, device) for array in on_host))
    longest = int(on_host.lens_B.max())
    return paged_rows(backends, pages, page_size=tables.block_size, longest=longest)
