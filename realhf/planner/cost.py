"""Cost: seconds of one call on a mesh, from blocks up. What the engine does is counted, nothing is zeroed.

The pipeline is 1F1B (Narayanan et al. 2021): the first micro-batch passes all stages, then one leaves per
slot of the slowest stage. Gradients are taken to be reduced, and ZeRO-1's parameters gathered, after the
backward pass. Of large models the engine reduces most of them during it (ModelSpec.sections): what that saves
depends on the wires. `Assumptions.overlap` is for engines of which such a share is known.
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

_SPANS = 24  # Into which the steps of a generation are cut.


class Options(NamedTuple):
    """How a call runs in its layout, besides the layout; `max_rows` is for generating calls."""

    micro_batch_tokens: int = 16384
    max_rows: int | None = None
    recompute: bool = False
    offload: bool = False


class Spans(NamedTuple):
    """The groups of a strategy on contiguous ranks, `per_host` of them on each host."""

    tp: Span
    replicas: Span
    expert_replicas: Span
    cp: Span
    ep: Span
    stages_meet_in_host: bool

    @property
    def within(self) -> str:
        """What the messages inside a block are for."""
        axes = (("tensor", self.tp), ("context", self.cp), ("expert", self.ep))
        used = [name for name, span in axes if span.size > 1]
        return f"{' and '.join(used) or 'tensor'} parallel"


def spans(strategy: ParallelStrategy, per_host: int) -> Spans:
    s = strategy
    near = max(1, per_host // s.tp)  # Neighbours over dp and cp on one host.
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
    """Seconds of one call, and what they go to: `compute`, `tensor parallel`, `pipeline`, and so on."""

    seconds: float
    parts: Mapping[str, float] = field(default_factory=dict)
    num_micro_batches: int = 1

    @property
    def limit(self) -> str:
        """What takes the largest part."""
        return max(self.parts, key=lambda part: self.parts[part], default="nothing")


def call_cost(
    rates: Rates, call: FunctionCall, role: ModelRole, workload: Workload, strategy: ParallelStrategy,
    *, per_host: int, options: Options,
) -> CallCost:  # fmt: skip
    """Cost of a call on contiguous ranks, `per_host` of them on each host that the mesh touches."""
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


class _Pass(NamedTuple):
    """How a data-parallel rank's share of a mini-batch is cut; tokens are those of one rank over cp."""

    num_micro_batches: int
    tokens: float
    squared: float
    chosen: float  # Positions whose logits are computed.


def _cut(work: Workload, strategy: ParallelStrategy, options: Options) -> _Pass:
    samples = work.most_samples("train_step", strategy.dp)
    per_micro = max(1, options.micro_batch_tokens // max(1, math.ceil(work.tokens)))
    count = min(samples, max(math.ceil(samples / per_micro), min(strategy.pp, samples)))
    each = samples / count / strategy.cp
    chosen = work.response_tokens or work.tokens
    return _Pass(count, each * work.tokens, each * work.squared_tokens, each * chosen)


def _stages(role: ModelRole, strategy: ParallelStrategy) -> list[int]:
    """Blocks of each stage."""
    bounds = (even_split(role.config.num_layers, strategy.pp, i) for i in range(strategy.pp))
    return [stop - start for start, stop in bounds]


def _forward(
    rates: Rates, role: ModelRole, work: Workload, strategy: ParallelStrategy, groups: Spans, options: Options
) -> CallCost:
    cut = _cut(work, strategy, options)
    block = _block(rates, role, groups, cut)
    head = rates.head(role, groups.tp, tokens=cut.chosen, output=work.output)
    stages = [block.times(layers) for layers in _stages(role, strategy)]
    stages[-1] = stages[-1].plus(head)
    hop = rates.send(_hidden_bytes(role, cut.tokens), within_host=groups.stages_meet_in_host)
    hop = hop if strategy.pp > 1 else 0.0
    return _pipelined(stages, cut.num_micro_batches, groups, hop=hop, hops_per_slot=1)


def _block(rates: Rates, role: ModelRole, groups: Spans, cut: _Pass, *, backward: bool = False) -> Cost:
    """Of one micro-batch; strategies that differ in dp and pp only ask for the same."""
    key = (
        role.config, role.dtype, role.lora, groups.tp, groups.cp, groups.ep, cut.tokens, cut.squared,
        backward,
    )  # fmt: skip
    if key not in rates.known_blocks:
        cost = rates.block(
            role, groups.tp, groups.ep, tokens=cut.tokens, squared=cut.squared, backward=backward
        )
        rates.known_blocks[key] = cost.plus(Cost(0.0, _exchanges(rates, role, groups, cut.tokens)))
    return rates.known_blocks[key]


def _exchanges(rates: Rates, role: ModelRole, groups: Spans, tokens: float) -> float:
    """Seconds of the two all-to-alls over cp in a block, in either direction: there and back (`nn`)."""
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
    """`count` micro-batches through the stages; each crosses every border `hops_per_slot` times."""
    transit = hops_per_slot * (len(stages) - 1) * hop
    once = sum(stage.seconds for stage in stages) + transit
    slowest = max(stages, key=lambda stage: stage.seconds)
    # As many micro-batches are under way as there are stages: a round trip bounds the slot, too.
    slot = max(slowest.seconds, once / len(stages), hop)
    seconds = once + (count - 1) * slot
    busy = slowest.times(count)
    parts = {"compute": busy.compute, groups.within: busy.wires, "pipeline": seconds - busy.seconds}
    return CallCost(seconds, parts, count)


def _train(
    rates: Rates, role: ModelRole, work: Workload, strategy: ParallelStrategy, groups: Spans,
    options: Options,
) -> CallCost:  # fmt: skip
    cut = _cut(work, strategy, options)
    tp = groups.tp
    block = _block(rates, role, groups, cut).times(2 if options.recompute else 1)
    block = block.plus(_block(rates, role, groups, cut, backward=True))
    head = rates.head(role, tp, tokens=cut.chosen, output=work.output)
    head = head.plus(rates.head(role, tp, tokens=cut.chosen, output=work.output, backward=True))
    stages = []
    for stage, layers in enumerate(_stages(role, strategy)):
        gradients = rates.accumulate(role, trained_params(role, strategy, stage))
        stages.append(block.times(layers).plus(Cost(gradients)))
    stages[-1] = stages[-1].plus(head)
    hop = rates.send(_hidden_bytes(role, cut.tokens), within_host=groups.stages_meet_in_host)
    hop = hop if strategy.pp > 1 else 0.0
    one = _pipelined(stages, cut.num_micro_batches, groups, hop=hop, hops_per_slot=2)
    last = {0, strategy.pp - 1}
    held = max((held_params(role.config, strategy, stage, role.lora) for stage in last), key=sum)
    steps = work.minibatches * work.epochs
    # Parameters are gathered between optimizer steps; behind the last, reallocation brings them around.
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
    """One cohort of rows per stage. While samples wait, every slot has a row; the last `max_rows` samples
    then run out one by one. All begin with their prompts' prefill."""
    samples = math.ceil(work.most_samples("generate", strategy.dp) / strategy.cp)
    rows: float = min(samples, work.max_rows)
    cohorts = min(strategy.pp, math.ceil(rows))
    waves = samples / rows  # Times that all slots are filled.
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
    # Decode, in spans of steps that grow: what changes from step to step is averaged over each.
    alive = work.survival
    steps = np.arange(1, len(work.survival) + 1)
    starts = np.unique(np.geomspace(1, len(alive) + 1, _SPANS + 1).astype(int))[:-1] - 1
    somebody = 1 - (1 - alive) ** rows  # Share of steps in which anybody is still writing.
    weights = np.maximum(np.add.reduceat(somebody, starts), 1e-30)
    running, context = (
        np.add.reduceat(somebody * each, starts) / weights
        for each in (np.clip(rows * alive, 1.0, rows), work.prompt_tokens + steps)
    )
    # Before that: full slots, whose rows are on average as far as the mean of all their tokens.
    mean = float(alive.sum())
    weights = np.append(weights, (waves - 1) * mean)
    running = np.append(running, rows)
    context = np.append(context, work.prompt_tokens + float((alive * steps).sum()) / mean)
    shared = None
    saved = shared_tokens(math.floor(work.prompt_tokens), work.samples_per_prompt)
    if saved:
        ended = np.maximum(0.0, 1 - running / rows)
        prompts = distinct * (1 - ended ** (rows / distinct))  # That somebody still continues.
        shared = SharedPrompts(prompts, saved)
    compute, wires = rates.decode_block(
        role, groups.tp, groups.ep, rows=running, context=context, shared=shared
    )
    head = rates.decode_head(role, groups.tp, rows=running)
    slot = (compute + wires) * deepest + head
    step = slot * cohorts
    if pp > 1:
        hop = rates.send(_hidden_bytes(role, rows), within_host=groups.stages_meet_in_host)
        step = np.maximum(step, (compute + wires) * role.config.num_layers + head + pp * hop)
    parts = {
        "prefill": waves * prefill.seconds,
        "decode": float(((compute * deepest + head) * cohorts * weights).sum()),
        groups.within: float((wires * deepest * cohorts * weights).sum()),
    }
    seconds = waves * prefill.seconds + float((step * weights).sum())
    parts["pipeline"] = max(0.0, seconds - sum(parts.values()))
    return CallCost(seconds, parts)
