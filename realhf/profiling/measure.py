"""Measure a machine, model shapes and whole calls, and write a profile of them.

The parts of a model shape are timed with the engine's own entry points. Whole calls are compared with what
the measured parts add up to.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from realhf.calls import OptimizerConfig, Output
from realhf.distributed.world import World
from realhf.engine.native import NativeEngine
from realhf.engine.optimizer import ShardedAdamW
from realhf.execution_plan import CallPlan
from realhf.graph import FunctionCall
from realhf.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.models.kv_blocks import shared_tokens
from realhf.models.model_config import ModelConfig
from realhf.planner.call_cost import call_cost
from realhf.planner.problem import ModelRole, Problem, Workload
from realhf.planner.profile import (
    CALLS,
    DISTURBED,
    OF_MODEL,
    SHAPE,
    ModelTables,
    Profile,
    Table,
    shape_of,
)
from realhf.planner.profiled_rates import ProfiledRates
from realhf.planner.rates import Rates
from realhf.profiling.clock import Clock, describe, measure_memory
from realhf.profiling.engine_calls import (
    DecodingRows,
    EngineCalls,
    MeasuredModel,
    PackedModel,
    Sizes,
    cached_tokens,
    most_rows,
)
from realhf.profiling.machine import measure_cluster, measure_links

_FEW, MANY = 1, 3  # Blocks of the two models whose difference is measured.
_LONG_ENOUGH = 0.5  # If a pass takes more seconds, no larger one is measured; its time is extrapolated.
_BUDGET = 10.0  # Seconds for all timings of a bench, unless the least number of repetitions takes longer.
_SHORT_PROMPT = 16  # The most tokens of prompts that are read.
_DECODE_STEPS = 16  # Timed decode steps of a generation.
_BLOCK_STEPS = 4  # Timed decode steps of a model's blocks alone.
_TINY = 1e-7  # The least seconds; differences of noisy measurements can be less.
_LONGEST = 1.5  # Expected seconds of a timed call; if all samples take longer, there are fewer.
_CALL_BUDGET = 3.0  # Seconds for the repetitions of a call.
_NEW_TOKENS = (32, 256)  # New tokens of each row, at least and at most.
_ATTEMPTS = 3  # Most measurements of a model shape that other work disturbs.


def measure(world: World, problem: Problem) -> Profile:
    """Return the profile. Every rank must call this, and all get the same profile."""
    machine = describe(world)
    memory = measure_memory(world)
    sizes = _sizes(problem)
    clock = Clock(world)
    shapes = _models(problem)
    links = measure_links(clock, sizes)
    calls = dict[str, Table]()
    calm = dict[str, float]()
    splits = [(model, strategy) for model in shapes for strategy in _strategies(model.config, world)]
    models: list[ModelTables] = []
    for model, strategy in splits:
        number = shapes.index(model) + 1
        _say(world, f"model shape {number} of {len(shapes)} in {model.dtype}, split as {strategy}")
        bench = Bench(clock, model, strategy, sizes)
        models.append(bench.entry())
        calls = {**bench.calls(), **calls}
        calm = calm or bench.calm()
    _say(world, "the machine")
    cluster = measure_cluster(clock, sorted({model.dtype for model in shapes}))
    date = time.strftime("%Y-%m-%d %H:%M")
    profile = Profile(date, machine, cluster, links, calls, models, memory, calm)
    whole = [
        with_whole_calls(profile, entry, clock, model, strategy, sizes)
        for (model, strategy), entry in zip(splits, models, strict=True)]
    return replace(profile, models=whole)


def with_whole_calls(
    profile: Profile, entry: ModelTables, clock: Clock, model: MeasuredModel, strategy: ParallelStrategy,
    sizes: Sizes,
) -> ModelTables:
    """Return an entry of the profile with its whole calls.

    While these differ from what the parts add up to, as other work disturbed one of the two, both are
    measured again. The attempt in which they differ least counts.
    """
    attempts: list[ModelTables] = []
    where = f"in {model.dtype}, split as {strategy}"
    for attempt in range(_ATTEMPTS):
        if attempt:
            _say(clock.world, f"again, as whole calls differ from their parts, the model shape {where}")
            entry = Bench(clock, model, strategy, sizes).entry()
        _say(clock.world, f"whole calls {where}")
        rates = ProfiledRates(replace(profile, models=[*profile.models, entry]))  # The last one counts.
        entry = replace(entry, whole_calls=whole_calls(clock, model, strategy, sizes, rates))
        attempts.append(entry)
        if entry.disturbance <= DISTURBED:
            break
    return min(attempts, key=lambda entry: entry.disturbance)


def _say(world: World, what: str) -> None:
    if world.rank == 0:
        print(f"realhf: measuring {what}", file=sys.stderr, flush=True)


def _sizes(problem: Problem) -> Sizes:
    """Return the sizes of a step, of the call with the most tokens per sequence."""
    work = max((problem.workloads[call.name] for call in problem.model_calls), key=lambda work: work.tokens)
    longest = max(work.max_new_tokens, round(work.response_tokens))
    prompt = round(work.prompt_tokens)
    return Sizes(prompt, prompt + longest, work.num_samples, work.samples_per_prompt)


def _models(problem: Problem) -> list[MeasuredModel]:
    """Return the model shapes, each with all calls on it."""
    models: dict[Any, MeasuredModel] = {}
    for name, role in problem.roles.items():
        key = (shape_of(role.config), role.dtype)
        model = models.setdefault(key, MeasuredModel(role.config, role.dtype, ()))
        models[key] = replace(model, calls=(*model.calls, *problem.graph.of_role(name)))
    return list(models.values())


def _strategies(config: ModelConfig, world: World) -> Iterator[ParallelStrategy]:
    """Yield the legal splits of a block over ranks of one host: tp, or ep, by powers of two."""
    sizes = [2**i for i in range(world.ranks_per_host.bit_length()) if world.ranks_per_host % 2**i == 0]
    splits = [ParallelStrategy(tp=size) for size in sizes]
    splits += [ParallelStrategy(dp=size, ep=size) for size in sizes[1:]]
    for strategy in splits:
        try:
            config.check_layout(Layout(strategy, DeviceMesh(tuple(range(strategy.num_ranks)))))
        except ValueError:
            continue
        yield strategy


# Parts of a model


class Bench:
    """Measurements of one model shape under one tensor- and expert-parallel size, on all ranks.

    With expert parallelism only blocks are measured: the rest of a model is not split by it.
    """

    def __init__(self, clock: Clock, model: MeasuredModel, strategy: ParallelStrategy, sizes: Sizes) -> None:
        self._clock = clock
        self._model = model
        self._sizes = sizes
        num_ranks = strategy.num_ranks
        first = clock.world.rank - clock.world.rank % num_ranks
        self._layout = Layout(strategy, DeviceMesh(tuple(range(first, first + num_ranks))))
        self._only_blocks = strategy.ep > 1
        self._waits = num_ranks > 1
        self._calls = calls = EngineCalls(model, clock.world)
        self._main = calls.main
        self._outputs = calls.outputs
        self._trains = calls.trains
        self._engines = {n: self._engine(n, calls.main, trains=self._trains) for n in (_FEW, MANY)}
        decodes = self._engines if model.generates else {}
        self._decoders = {n: PackedModel(engine.model) for n, engine in decodes.items()}
        self._int8_engines: dict[int, NativeEngine] = {}
        if calls.generates_in_int8:
            int8 = replace(self._layout, form="int8")
            self._int8_engines = {n: self._engine(n, calls.main, trains=False, layout=int8) for n in decodes}
        self._tokens = self._pass_tokens()
        self._rows = self._chosen_rows()
        self._work = work = {**self._passes(), **self._decoding(), **self._updates()}
        self._seconds: dict[Any, float] = clock.seconds(work, budget=_BUDGET, waits=self._waits)
        kinds = dict.fromkeys(key if isinstance(key, str) else key[0] for key in work)
        self.noise = {
            kind: round(statistics.median(clock.noise[key] for key in work if kind in (key, key[0])), 4)
            for kind in kinds}
        """The relative interquartile range of each kind of work: the median over its sizes."""

    def _engine(
        self, blocks: int, output: Output, *, trains: bool, layout: Layout | None = None
    ) -> NativeEngine:
        return self._calls.engine(blocks, output, layout or self._layout, trains=trains)

    # The timed work, by keys

    def _pass_tokens(self) -> list[int]:
        """Return the sizes of passes to measure, up to one that takes too long."""
        chosen: list[int] = []
        way = self._calls.train if self._trains else self._calls.forward
        for tokens in sorted(set(self._sizes.pass_tokens)):
            batch = self._calls.sequences(tokens, self._sizes.sequence_tokens[-1], only_ends=True)
            run = way(self._engines[MANY], self._main, batch)
            chosen.append(tokens)
            seconds = min(self._clock.once(run, waits=self._waits) for _ in range(2))
            if max(self._clock.world.control.all_gather_json(seconds)) > _LONG_ENOUGH and len(chosen) > 2:
                break
        return chosen

    def _passes(self) -> dict[Any, Callable[[], object]]:
        """Return passes with and without outputs.

        Blocks are the difference of models with few and with many of them, which would be lost in the noise
        of a head over a large vocabulary. So their passes have an output for one token of each sequence.
        """
        work: dict[Any, Callable[[], object]] = {}
        lengths = self._sizes.sequence_tokens
        for tokens, length, (blocks, engine) in product(self._tokens, lengths, self._engines.items()):
            bare = self._calls.sequences(tokens, length, only_ends=True)
            key = (self._main, blocks, tokens, length)
            work["forward", *key] = self._calls.forward(engine, self._main, bare)
            if self._trains:
                work["train", *key] = self._calls.train(engine, self._main, bare)
        for output, trains in ({} if self._only_blocks else self._outputs).items():
            engine = self._engines[_FEW]
            if output != self._main:
                engine = self._engine(_FEW, output, trains=trains)
            for tokens in self._tokens:
                batch = self._calls.sequences(tokens, lengths[-1])
                work["forward head", output, tokens] = self._calls.forward(engine, output, batch)
                if trains:
                    work["train head", output, tokens] = self._calls.train(engine, output, batch)
        if not self._only_blocks:
            empty = self._calls.sequences(8, 4).select([])
            work["empty"] = self._calls.forward(self._engines[_FEW], self._main, empty)
        return work

    def _decoding(self) -> dict[Any, Callable[[], object]]:
        """Return the work of decoding.

        Each row has its own prompt; if samples of the experiment share prompts, also the other extreme is
        measured, in which all rows have the same one.
        """
        if not self._model.generates:
            return {}
        work: dict[Any, Callable[[], object]] = {}
        short, *_, long = self._prompts
        for rows in self._rows:
            for blocks, decoder in self._decoders.items():
                for prompt in self._prompts:
                    apart = DecodingRows(decoder.model, rows, prompt_tokens=prompt, num_prompts=rows)
                    work["decode", blocks, rows, prompt] = partial(apart.decode, steps=_BLOCK_STEPS)
                    if prompt == short and rows in self._counts and not self._only_blocks:
                        work["prefill", blocks, rows] = apart.reading()
                if self._shares:
                    sharing = DecodingRows(decoder.model, rows, prompt_tokens=long, num_prompts=1)
                    work["shared", blocks, rows] = partial(sharing.decode, steps=_BLOCK_STEPS)
            for blocks, engine in self._int8_engines.items():
                int8 = DecodingRows(engine.model, rows, prompt_tokens=short, num_prompts=rows)
                work["int8", blocks, rows] = partial(int8.decode, steps=_BLOCK_STEPS)
            for new in () if self._only_blocks else (1, 1 + _DECODE_STEPS):
                work["generate", rows, new] = self._calls.generate(self._engines[_FEW], rows, short, new)
        for blocks, decoder in self._decoders.items():
            work["packing", blocks] = decoder.pack
        return work

    def _updates(self) -> dict[Any, Callable[[], object]]:
        if not self._trains:
            return {}
        work: dict[Any, Callable[[], object]] = {}
        for blocks in self._engines:
            model = self._engine(blocks, self._main, trains=False).model
            work["update", blocks] = ShardedAdamW(model, OptimizerConfig(lr=0.0)).step
            assert model.grad_buffer is not None
            work["zero", blocks] = model.grad_buffer.zero_
        return work

    def _chosen_rows(self) -> list[int]:
        limits = [work.max_rows for work in self._calls.generates]
        fit = most_rows(self._engines[MANY].model, self._prompts[-1] + _DECODE_STEPS, self._clock.world)
        return sorted({min(rows, fit, *limits) for rows in self._sizes.rows})

    @property
    def _counts(self) -> list[int]:
        """The smallest and the largest number of rows."""
        return sorted({self._rows[0], self._rows[-1]})

    @property
    def _prompts(self) -> tuple[int, int, int]:
        short, longest = self._sizes.sequence_tokens
        short = min(short, _SHORT_PROMPT)
        long = max(longest - _DECODE_STEPS, short + 2 * _DECODE_STEPS)
        return short, (short + long) // 2, long

    @property
    def _shares(self) -> bool:
        return shared_tokens(self._prompts[-1], self._sizes.group_size) > 0

    # The tables

    def entry(self) -> ModelTables:
        """Return what was measured as an entry of a profile; whole calls are not yet in it."""
        shape = dict(zip(SHAPE, shape_of(self._model.config), strict=True))
        strategy = self._layout.strategy
        return ModelTables(shape, self._model.dtype, strategy.tp, self.tables(), strategy.ep, self.noise)

    def tables(self) -> dict[str, Table]:
        tables = self._pass_tables()
        if self._model.generates:
            tables |= self._decode_tables()
        if self._trains and not self._only_blocks:
            numels = tuple(float(engine.model.flat.numel()) for engine in self._engines.values())
            for name, key in (("update", "update"), ("zero_gradients", "zero")):
                times_of = [self._seconds[key, blocks] for blocks in self._engines]
                tables[name] = Table({"parameters": numels}, times_of)
        assert tables.keys() <= OF_MODEL.keys()
        return tables

    def _pass_tables(self) -> dict[str, Table]:
        lengths = self._sizes.sequence_tokens
        tokens = tuple(map(float, self._tokens))
        axes = {"sequence_tokens": tuple(map(float, lengths)), "tokens": tokens}
        blocks = [[self._block(number, length) for number in self._tokens] for length in lengths]
        ways = ("forward", "backward") if self._trains else ("forward",)
        tables = {
            f"block_{way}": Table(axes, [[times[i] for times in row] for row in blocks])
            for i, way in enumerate(ways)}
        for output, trains in ({} if self._only_blocks else self._outputs).items():
            heads = [self._head(output, *sized) for sized in zip(self._tokens, blocks[-1], strict=True)]
            for i, way in enumerate(("forward", "backward") if trains else ("forward",)):
                # Differences of noisy times can shrink as tokens grow, but the real times cannot.
                seconds = np.maximum.accumulate([head[i] for head in heads]).tolist()
                tables[f"{output}_{way}"] = Table({"tokens": tokens}, seconds)
        return tables

    def _block(self, tokens: int, length: int) -> tuple[float, float]:
        """Return the seconds of a block forward, and the additional seconds of forward and backward."""
        forward = max(_TINY, self._of_a_block(lambda blocks: ("forward", self._main, blocks, tokens, length)))
        if not self._trains:
            return forward, 0.0
        both = self._of_a_block(lambda blocks: ("train", self._main, blocks, tokens, length))
        # An optimizer step without gradients sets them to zero; after a backward pass it does not.
        zero = self._of_a_block(lambda blocks: ("zero", blocks))
        both -= self._of_a_block(lambda blocks: ("update", blocks)) - zero
        return forward, max(_TINY, both - forward)

    def _of_a_block(self, key: Callable[[int], Any]) -> float:
        return (self._seconds[key(MANY)] - self._seconds[key(_FEW)]) / (MANY - _FEW)

    def _head(self, output: Output, tokens: int, block: tuple[float, float]) -> tuple[float, float]:
        """Return the seconds of a micro-batch without its blocks: forward, and the rest of forward and
        backward."""
        extra = self._seconds["empty"] + _FEW * block[0]
        forward = max(_TINY, self._seconds["forward head", output, tokens] - extra)
        if not self._outputs[output]:
            return forward, 0.0
        extra += forward + _FEW * block[1] + self._seconds["update", _FEW] - self._seconds["zero", _FEW]
        return forward, max(_TINY, self._seconds["train head", output, tokens] - extra)

    def _decode_tables(self) -> dict[str, Table]:
        rows = tuple(map(float, self._rows))
        contexts = [cached_tokens(prompt, num_rows=1) for prompt in self._prompts]
        axes = {"context_tokens": tuple(contexts), "rows": rows}
        apart = [[self._decoding_block("decode", n, prompt) for n in self._rows] for prompt in self._prompts]
        tables = {"decode_block": Table(axes, apart)}
        if self._shares:  # Short prompts share no cache block.
            sharing = [self._decoding_block("shared", n) for n in self._rows]
            ends = (contexts[0], cached_tokens(self._prompts[-1], num_rows=self._rows[-1]))
            tables["decode_shared"] = Table({**axes, "context_tokens": ends}, [apart[0], sharing])
        if self._int8_engines:
            int8 = [self._decoding_block("int8", n) for n in self._rows]
            tables["decode_int8"] = Table({"rows": rows}, int8)
        if not self._only_blocks:
            tables["decode_head"] = Table({"rows": rows}, [self._decoding_head(n) for n in self._rows])
            if not self._waits and self._clock.world.ranks_per_host % 2 == 0:
                tables["decode_hop"] = self._decode_hops(tables)
        if packed := self._decoders[MANY].packed_params:
            points = (0.0, float(packed))
            tables["packing"] = Table({"parameters": points}, [0.0, self._seconds["packing", MANY]])
        return tables

    def _decode_hops(self, tables: Mapping[str, Table]) -> Table:
        """Time decode steps of two stages of a block each, on all pairs of ranks.

        The seconds of the table, by rows of a cohort, are what a stage takes besides its block and head.
        """
        first = self._clock.world.rank // 2 * 2
        layout = Layout(ParallelStrategy(pp=2), DeviceMesh((first, first + 1)))
        engine = self._engine(2, self._main, trains=False, layout=layout)
        counts = sorted({2, self._rows[-1]})
        short = self._prompts[0]
        work: dict[Any, Callable[[], object]] = {
            (rows, new): self._calls.generate(engine, rows, short, new)
            for rows in counts for new in (1, 1 + _DECODE_STEPS)}
        seconds = self._clock.seconds(work)
        # On shared cores, the times are means over both stages, of which only the last one has the head.
        heads = 0.5 if self._clock.crowding(self._clock.world.ranks_per_host) > 1 else 1.0
        hops = []
        for rows in counts:
            step = (seconds[rows, 1 + _DECODE_STEPS] - seconds[rows, 1]) / _DECODE_STEPS
            block = tables["decode_block"].at(short + 1.0, rows / 2)
            head = heads * tables["decode_head"].at(rows / 2)
            hops.append(max(_TINY, float(step / 2 - block - head)))
        return Table({"rows": tuple(rows / 2 for rows in counts)}, hops)

    def _decoding_block(self, name: str, *key: int) -> float:
        """Return the seconds of a block in one decode step."""
        return max(_TINY, self._of_a_block(lambda blocks: (name, blocks, *key)) / _BLOCK_STEPS)

    def _decoding_head(self, rows: int) -> float:
        """Return the seconds of a decode step without its blocks, as a mean over lengths of prompts."""
        short = self._prompts[0]
        times = self._seconds
        step = (times["generate", rows, 1 + _DECODE_STEPS] - times["generate", rows, 1]) / _DECODE_STEPS
        rests = [
            times["decode", _FEW, rows, prompt] / _BLOCK_STEPS
            - _FEW * self._decoding_block("decode", rows, prompt)
            for prompt in self._prompts]
        step += statistics.fmean(rests) - rests[0]
        return max(_TINY, step - _FEW * self._decoding_block("decode", rows, short))

    def calls(self) -> dict[str, Table]:
        """Return the seconds of calls besides passes and decode steps, by number of samples."""
        if self._only_blocks:
            return {}
        axes = {"samples": tuple(map(float, self._counts))}
        around = [self._seconds["empty"]] * len(axes["samples"])
        calls = {name: Table(axes, around) for name in ("forward", "train_step")}
        if self._model.generates:
            calls["generate"] = Table(axes, [self._around_generation(rows) for rows in self._counts])
        assert calls.keys() <= CALLS.keys()
        return calls

    def _around_generation(self, rows: int) -> float:
        reading = self._of_a_block(lambda blocks: ("prefill", blocks, rows))
        whole = self._seconds["generate", rows, 1] - self._seconds["packing", _FEW]
        return max(_TINY, whole - _FEW * reading - self._decoding_head(rows))

    def calm(self) -> dict[str, float]:
        """Return the seconds of passes and of decode steps on as many ranks of a host as it has cores,
        relative to those on all of its ranks; nothing if each rank has a core."""
        world = self._clock.world
        if self._waits or self._clock.crowding(world.ranks_per_host) == 1:
            return {}
        tokens = self._tokens[len(self._tokens) // 2]
        chosen: dict[str, list[tuple[Any, ...]]] = {
            "decode": [("decode", MANY, self._rows[-1], prompt) for prompt in self._prompts]}
        length = self._sizes.sequence_tokens[-1]
        chosen["passes"] = [(way, self._main, MANY, tokens, length) for way in ("forward", "train")]
        shares = {}
        for name, keys in chosen.items():
            work = {key: self._work[key] for key in keys if key in self._work}
            if work:
                shares[name] = self._clock.calm_share(work)
        return shares


# Whole calls


Timed = tuple[str, float, Callable[[], object]]


def whole_calls(
    clock: Clock, model: MeasuredModel, strategy: ParallelStrategy, sizes: Sizes, rates: Rates
) -> dict[str, float]:
    """Return the measured seconds of a call of each kind, relative to its price.

    All ranks of a host run it, as replicas of this strategy. All sequences are as long as the mean of the
    experiment. The mean over repetitions counts, since a step adds up calls, slow ones among them, and sums
    of medians would be too short. Every rank must call this.
    """
    return {
        kind: round(clock.mean_of_slowest(run, budget=_CALL_BUDGET) / price, 4)
        for kind, price, run in _timed_calls(clock, model, strategy, sizes, rates)}


def _timed_calls(
    clock: Clock, model: MeasuredModel, strategy: ParallelStrategy, sizes: Sizes, rates: Rates
) -> Iterator[Timed]:
    """Yield the kind of each call, its price, and the function that runs it."""
    world = clock.world
    calls = EngineCalls(model, world)
    replicas = world.ranks_per_host // strategy.num_ranks
    first = world.rank - world.rank % world.ranks_per_host
    mesh = DeviceMesh(tuple(range(first, first + world.ranks_per_host)))
    layout = Layout(ParallelStrategy(dp=replicas * strategy.dp, tp=strategy.tp, ep=strategy.ep), mesh)
    plan = CallPlan(layout)
    engine = calls.engine(MANY, calls.main, layout, trains=calls.trains)
    role = ModelRole(engine.model.config, model.dtype, trainable=calls.trains)

    def price(kind: str, workload: Workload) -> float:
        call = FunctionCall(kind, kind, (), role="role")
        cost = call_cost(rates, call, role, workload, plan, per_host=world.ranks_per_host)
        return float(cost.seconds)  # Tables are interpolated in NumPy, whose floats YAML cannot write.

    def sequences(samples: int) -> Workload:
        return Workload(samples, response_tokens=sizes.tokens, output=calls.main,
                        entropy=calls.finds_entropy(calls.main))

    ways = {"forward": calls.forward} | ({"train_step": calls.train} if calls.trains else {})
    for kind, way in ways.items():
        samples = max(1, sizes.samples // layout.dp)
        while (seconds := price(kind, sequences(samples * layout.dp))) > _LONGEST and samples > 1:
            samples = max(1, samples // 2)
        batch = calls.sequences(samples * sizes.tokens, sizes.tokens)
        yield kind, seconds, way(engine, calls.main, batch, most_tokens=plan.micro_batch_tokens)
    if calls.generates:
        generation = calls.generates[0]
        prompt = max(1, sizes.prompt_tokens)
        least, most = _NEW_TOKENS
        new = max(1, min(most, sizes.tokens - prompt))
        samples = max(1, min(generation.max_rows, sizes.samples // layout.dp))

        def rows() -> Workload:
            return Workload(
                samples * layout.dp, prompt, new, new, max_rows=generation.max_rows,
                prefill_tokens=generation.prefill_tokens)

        while (seconds := price("generate", rows())) > _LONGEST and max(samples, new // least) > 1:
            if new >= 2 * least:
                new //= 2
            else:
                samples = max(1, samples // 2)
        yield "generate", seconds, calls.generate(engine, samples, prompt, new, in_one_pass=False)
