"""Seconds of one call on a mesh, added up from the seconds of decoder blocks.

The pipeline schedule is 1F1B (Narayanan et al. 2021): the first micro-batch passes all stages, then one
finishes per slot of the slowest stage. Gradients are assumed to be reduced, and the parameters of ZeRO-1
gathered, after the backward pass. For large models the engine reduces most gradients during that pass
(ModelSpec.sections); how much this saves depends on the links. `Assumptions.overlap` is for engines whose
overlap is known.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from realhf.graph import FunctionCall
from realhf.kv_blocks import shared_tokens
from realhf.layout import ParallelStrategy, even_split
from realhf.planner.model_states import trained_params, weights_bytes
from realhf.planner.problem import ModelRole, Workload
from realhf.planner.rates import Cost, Rates, SharedPrompts, Span
from realhf.planner.shard import exchanged, held_params

_NUM_RANGES = 24  # The decode steps of a generation are averaged over this many ranges.


class Options(NamedTuple):
    """Settings of a call besides its layout; `max_rows` is for calls that generate."""

    micro_batch_tokens: int = 16384
    max_rows: int | None = None
    recompute: bool = False
    offload: bool = False


class Spans(NamedTuple):
    """The rank groups of a strategy on contiguous ranks, with `per_host` of the ranks on each host."""

    tp: Span
    replicas: Span
    expert_replicas: Span
    cp: Span
    ep: Span
    stages_meet_in_host: bool

    @property
    def within(self) -> str:
        """The name under which communication inside a block is reported."""
        axes = (("tensor", self.tp), ("context", self.cp), ("expert", self.ep))
        used = [name for name, span in axes if span.size > 1]
        return f"{' and '.join(used) or 'tensor'} parallel"


def spans(strategy: ParallelStrategy, per_host: int) -> Spans:
    s = strategy
    near = max(1, per_host // s.tp)  # Number of tp groups on one host.
    replicas = s.num_replicas
    experts = s.num_expert_replicas
    return Spans(
        tp=Span(s.tp, min(s.tp, per_host)),
        replicas=Span(replicas, min(replicas, near)),
        expert_replicas=Span(experts, max(1, min(experts, near // s.ep))),
        cp=Span(s.cp, min(s.cp, near)),
        ep=Span(s.ep, max(1, min(s.ep, near // s.cp))),
        stages_meet_in_host=s.num_ranks <= per_host,
    )


@dataclass(frozen=True)
class CallCost:
    """Seconds of one call, also by part: `compute`, `tensor parallel`, `pipeline`, and so on."""

    seconds: float
    parts: Mapping[str, float] = field(default_factory=dict)
    num_micro_batches: int = 1

    @property
    def limit(self) -> str:
        """The name of the largest part."""
        return max(self.parts, key=lambda part: self.parts[part], default="nothing")


def call_cost(
    rates: Rates, call: FunctionCall, role: ModelRole, workload: Workload, strategy: ParallelStrategy,
    *, per_host: int, options: Options,
) -> CallCost:  # fmt: skip
    """Return the cost of a call on contiguous ranks, with `per_host` of them on each host of the mesh."""
    groups = spans(strategy, per_host)
    if call.kind == "generate":
        workload = replace(workload, max_rows=options.max_rows or workload.max_rows)
        cost = _generate(rates, role, workload, strategy, groups)
    elif call.kind == "train_step":
        cost = _train(rates, role, workload, strategy, groups, options)
    else:
        cost = _forward(rates, role, workload, strategy, groups, options)
    samples = math.ceil(workload.num_samples / strategy.dp)
    extra = {"host": rates.call_seconds(call.kind, samples=samples)}
    if options.offload:
        weights = max(weights_bytes(role, strategy, stage) for stage in {0, strategy.pp - 1})
        extra["offload"] = rates.host_copy(weights)
    parts = {name: value for name, value in {**cost.parts, **extra}.items() if value > 0}
    return CallCost(cost.seconds + sum(extra.values()), parts, cost.num_micro_batches)


class _MicroBatches(NamedTuple):
    """The micro-batches into which a data-parallel rank splits its part of a mini-batch.

    Counts are per micro-batch and per rank of the cp group.
    """

    num_micro_batches: int
    tokens: float
    squared: float
    chosen: float  # Positions whose logits are computed.


def _micro_batches(work: Workload, strategy: ParallelStrategy, options: Options) -> _MicroBatches:
    samples = work.most_samples("train_step", strategy.dp)
    per_micro = max(1, options.micro_batch_tokens // max(1, math.ceil(work.tokens)))
    count = min(samples, max(math.ceil(samples / per_micro), min(strategy.pp, samples)))
    each = samples / count / strategy.cp
    chosen = work.response_tokens or work.tokens
    return _MicroBatches(count, each * work.tokens, each * work.squared_tokens, each * chosen)


def _stages(role: ModelRole, strategy: ParallelStrategy) -> list[int]:
    """Return the number of blocks on each stage."""
    bounds = (even_split(role.config.num_layers, strategy.pp, i) for i in range(strategy.pp))
    return [stop - start for start, stop in bounds]


def _forward(
    rates: Rates, role: ModelRole, work: Workload, strategy: ParallelStrategy, groups: Spans, options: Options
) -> CallCost:
    micro = _micro_batches(work, strategy, options)
    block = _block(rates, role, groups, micro)
    head = rates.head(role, groups.tp, tokens=micro.chosen, output=work.output)
    stages = [block.times(layers) for layers in _stages(role, strategy)]
    stages[-1] = stages[-1].plus(head)
    hop = rates.send(_hidden_bytes(role, micro.tokens), within_host=groups.stages_meet_in_host)
    hop = hop if strategy.pp > 1 else 0.0
    return _pipelined(stages, micro.num_micro_batches, groups, hop=hop, hops_per_slot=1)


def _block(
    rates: Rates, role: ModelRole, groups: Spans, micro: _MicroBatches, *, backward: bool = False
) -> Cost:
    """Return the cost of a block on one micro-batch.

    Costs are remembered, since strategies that differ only in dp and pp ask for the same ones.
    """
    key = (
        role.config, role.dtype, role.lora, groups.tp, groups.cp, groups.ep, micro.tokens, micro.squared,
        backward,
    )  # fmt: skip
    if key not in rates.known_blocks:
        cost = rates.block(
            role, groups.tp, groups.ep, tokens=micro.tokens, squared=micro.squared, backward=backward
        )
        rates.known_blocks[key] = cost.plus(Cost(0.0, _exchanges(rates, role, groups, micro.tokens)))
    return rates.known_blocks[key]


def _exchanges(rates: Rates, role: ModelRole, groups: Spans, tokens: float) -> float:
    """Return the seconds of a block's two all-to-alls over cp, one before and one after attention."""
    if groups.cp.size == 1:
        return 0.0
    config = role.config
    tp = groups.tp.size
    there = exchanged(config, tp, groups.cp.size)
    back = config.num_heads // tp * (config.head_dim if config.mla is None else config.mla.v_head_dim)
    return sum(rates.all_to_all(tokens * width * role.itemsize, groups.cp) for width in (there, back))


def _hidden_bytes(role: ModelRole, tokens: float) -> float:
    return tokens * role.config.hidden_size * role.itemsize


def _pipelined(stages: list[Cost], count: int, groups: Spans, *, hop: float, hops_per_slot: int) -> CallCost:
    """Return the cost of `count` micro-batches that each cross every stage border `hops_per_slot` times."""
    transit = hops_per_slot * (len(stages) - 1) * hop
    once = sum(stage.seconds for stage in stages) + transit
    slowest = max(stages, key=lambda stage: stage.seconds)
    # There are as many micro-batches in flight as stages, so a round trip bounds the slot, too.
    slot = max(slowest.seconds, once / len(stages), hop)
    seconds = once + (count - 1) * slot
    busy = slowest.times(count)
    parts = {"compute": busy.compute, groups.within: busy.communication, "pipeline": seconds - busy.seconds}
    return CallCost(seconds, parts, count)


def _train(
    rates: Rates, role: ModelRole, work: Workload, strategy: ParallelStrategy, groups: Spans,
    options: Options,
) -> CallCost:  # fmt: skip
    micro = _micro_batches(work, strategy, options)
    tp = groups.tp
    block = _block(rates, role, groups, micro).times(2 if options.recompute else 1)
    block = block.plus(_block(rates, role, groups, micro, backward=True))
    head = rates.head(role, tp, tokens=micro.chosen, output=work.output)
    head = head.plus(rates.head(role, tp, tokens=micro.chosen, output=work.output, backward=True))
    stages = []
    for stage, layers in enumerate(_stages(role, strategy)):
        gradients = rates.accumulate(role, trained_params(role, strategy, stage))
        stages.append(block.times(layers).plus(Cost(gradients)))
    stages[-1] = stages[-1].plus(head)
    hop = rates.send(_hidden_bytes(role, micro.tokens), within_host=groups.stages_meet_in_host)
    hop = hop if strategy.pp > 1 else 0.0
    one = _pipelined(stages, micro.num_micro_batches, groups, hop=hop, hops_per_slot=2)
    last = {0, strategy.pp - 1}
    held = max((held_params(role.config, strategy, stage, role.lora) for stage in last), key=sum)
    steps = work.minibatches * work.epochs
    # Parameters are gathered between optimizer steps; after the last, reallocation distributes them.
    gathers = (steps - 1) / steps if strategy.num_replicas > 1 else 0.0
    data = owned = 0.0
    for part, span in zip(held, (groups.replicas, groups.expert_replicas), strict=True):
        if part:
            data += rates.reduce_scatter(part * role.wide_itemsize, span)
            data += gathers * rates.all_gather(part * role.itemsize, span)
            owned += part / span.size
    data = max(0.0, data - rates.assume.overlap * one.seconds)
    update = rates.update(role, owned=owned)
    parts = {name: part * steps for name, part in one.parts.items()}
    parts |= {"data parallel": data * steps, "optimizer": update * steps}
    return CallCost(steps * (one.seconds + data + update), parts, one.num_micro_batches)


def _generate(
    rates: Rates, role: ModelRole, work: Workload, strategy: ParallelStrategy, groups: Spans
) -> CallCost:
    """Return the cost of generation: prefill of the prompts, then decoding.

    Each stage works on one cohort of rows. While samples wait, every slot has a row; the last `max_rows`
    samples then finish one by one.
    """
    samples = math.ceil(work.most_samples("generate", strategy.dp) / strategy.cp)
    rows: float = min(samples, work.max_rows)
    cohorts = min(strategy.pp, math.ceil(rows))
    waves = samples / rows  # How often all slots are filled.
    rows = rows / cohorts
    distinct = max(1.0, rows / work.samples_per_prompt)
    tokens = distinct * work.prompt_tokens
    squared = distinct * work.prompt_tokens**2
    layers = _stages(role, strategy)
    deepest = max(layers)
    pp = strategy.pp
    hop = rates.send(_hidden_bytes(role, tokens), within_host=groups.stages_meet_in_host) if pp > 1 else 0.0
    block = rates.block(role, groups.tp, groups.ep, tokens=tokens, squared=squared)
    stages = [block.times(count) for count in layers]
    prefill = _pipelined(stages, cohorts, groups, hop=hop, hops_per_slot=1)
    weights, running, context = _decode_ranges(work, rows, waves)
    shared = None
    saved = shared_tokens(math.floor(work.prompt_tokens), work.samples_per_prompt)
    if saved:
        ended = np.maximum(0.0, 1 - running / rows)
        prompts = distinct * (1 - ended ** (rows / distinct))  # Prompts that some row still continues.
        shared = SharedPrompts(prompts, saved)
    compute, communication = rates.decode_block(
        role, groups.tp, groups.ep, rows=running, context=context, shared=shared
    )
    head = rates.decode_head(role, groups.tp, rows=running)
    slot = (compute + communication) * deepest + head
    step = slot * cohorts
    if pp > 1:
        hop = rates.send(_hidden_bytes(role, rows), within_host=groups.stages_meet_in_host)
        step = np.maximum(step, (compute + communication) * role.config.num_layers + head + pp * hop)
    parts = {
        "prefill": waves * prefill.seconds,
        "decode": float(((compute * deepest + head) * cohorts * weights).sum()),
        groups.within: float((communication * deepest * cohorts * weights).sum()),
    }
    seconds = waves * prefill.seconds + float((step * weights).sum())
    parts["pipeline"] = max(0.0, seconds - sum(parts.values()))
    return CallCost(seconds, parts)


def _decode_ranges(work: Workload, rows: float, waves: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return, for ranges of decode steps that grow in length: their expected number of steps, the mean
    number of running rows, and the mean context of a row. The last entry is for the steps in which all
    slots are full."""
    alive = work.survival
    steps = np.arange(1, len(alive) + 1)
    starts = np.unique(np.geomspace(1, len(alive) + 1, _NUM_RANGES + 1).astype(int))[:-1] - 1
    active = 1 - (1 - alive) ** rows  # Probability that some row is still decoding.
    weights = np.maximum(np.add.reduceat(active, starts), 1e-30)
    running, context = (
        np.add.reduceat(active * each, starts) / weights
        for each in (np.clip(rows * alive, 1.0, rows), work.prompt_tokens + steps)
    )
    # While all slots are full, the context of their rows is the mean over all tokens.
    mean = float(alive.sum())
    weights = np.append(weights, (waves - 1) * mean)
    running = np.append(running, rows)
    return weights, running, np.append(context, work.prompt_tokens + float((alive * steps).sum()) / mean)
