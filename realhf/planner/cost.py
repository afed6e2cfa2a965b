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
from functools import cached_property
from typing import NamedTuple

import numpy as np

from realhf.graph import FunctionCall
from realhf.kv_blocks import shared_tokens
from realhf.layout import ParallelStrategy
from realhf.plan import CallPlan
from realhf.planner.micro_batches import MeanMicroBatch, mean_micro_batch
from realhf.planner.model_states import trained_params, weights_bytes
from realhf.planner.problem import ModelRole, Workload
from realhf.planner.rates import Cost, Rates, SharedPrompts, Span
from realhf.planner.shard import exchanged, held_params

_WAITING = ("pipeline",)  # The parts of a cost in which ranks wait for others.
_NUM_RANGES = 24  # The decode steps of a generation are averaged over this many ranges.


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
    rates: Rates, call: FunctionCall, role: ModelRole, workload: Workload, call_plan: CallPlan,
    *, per_host: int,
) -> CallCost:  # fmt: skip
    """Return the cost of a call on contiguous ranks, with `per_host` of them on each host of the mesh."""
    strategy = call_plan.layout.strategy
    workload = replace(workload, max_rows=call_plan.max_rows or workload.max_rows)
    estimate = _Estimate(rates, role, workload, call_plan, strategy, spans(strategy, per_host))
    by_kind = {"generate": estimate.generate, "forward": estimate.forward, "train_step": estimate.train}
    cost = by_kind[call.kind]()
    cost = on_shared_cores(cost, rates.cluster.crowding(min(strategy.num_ranks, per_host)))
    num_samples = workload.num_samples * (workload.round.num_rows if call.kind == "generate" else 1)
    samples = math.ceil(num_samples / strategy.dp)
    extra = {"host": rates.call_seconds(call.kind, samples=samples)}
    if call_plan.offload:
        weights = max(weights_bytes(role, strategy, stage) for stage in {0, strategy.pp - 1})
        extra["offload"] = rates.host_copy(weights)
    runs = workload.runs
    parts = {name: value * runs for name, value in {**cost.parts, **extra}.items() if value > 0}
    return CallCost((cost.seconds + sum(extra.values())) * runs, parts, cost.num_micro_batches)


def on_shared_cores(cost: CallCost, crowding: float) -> CallCost:
    """Return the cost of a call whose ranks share cores, so that work takes `crowding` times as long.

    Ranks that work use the cores of those that wait. So the call takes as long as with cores
    for all ranks, or as long as its work, whichever is longer.
    """
    if crowding == 1:
        return cost
    parts = {name: value * crowding for name, value in cost.parts.items() if name not in _WAITING}
    worked = sum(parts.values())
    seconds = max(cost.seconds, worked)
    return CallCost(seconds, {**parts, _WAITING[0]: seconds - worked}, cost.num_micro_batches)


@dataclass(frozen=True)
class _Estimate:
    """The estimated costs of a call, one method for each kind."""

    rates: Rates
    role: ModelRole
    work: Workload
    call_plan: CallPlan
    strategy: ParallelStrategy
    groups: Spans

    def forward(self) -> CallCost:
        micro = self._micro_batch
        head = self.rates.head(
            self.role, self.groups.tp, tokens=micro.output_tokens, output=self.work.output
        )
        stages = [self._block().times(layers) for layers in self._num_layers]
        stages[-1] = stages[-1].plus(head)
        return self._pipelined(stages, micro.num_micro_batches, tokens=micro.tokens, hops_per_slot=1)

    def train(self) -> CallCost:
        rates = self.rates
        role = self.role
        strategy = self.strategy
        micro = self._micro_batch
        block = self._block().times(2 if self.call_plan.recompute else 1).plus(self._block(backward=True))
        stages = []
        for stage, layers in enumerate(self._num_layers):
            gradients = rates.accumulate(role, trained_params(role, strategy, stage))
            stages.append(block.times(layers).plus(Cost(gradients)))
        for backward in (False, True):
            head = rates.head(
                role, self.groups.tp, tokens=micro.output_tokens, output=self.work.output,
                backward=backward,
            )  # fmt: skip
            stages[-1] = stages[-1].plus(head)
        one = self._pipelined(stages, micro.num_micro_batches, tokens=micro.tokens, hops_per_slot=2)
        ends = {0, strategy.pp - 1}
        held = max((held_params(role.config, strategy, stage, role.lora) for stage in ends), key=sum)
        steps = self.work.minibatches * self.work.epochs
        # Parameters are gathered between optimizer steps; after the last, reallocation distributes them.
        gathers = (steps - 1) / steps if strategy.num_replicas > 1 else 0.0
        data = owned = 0.0
        for part, span in zip(held, (self.groups.replicas, self.groups.expert_replicas), strict=True):
            if part:
                data += rates.reduce_scatter(part * role.wide_itemsize, span)
                data += gathers * rates.all_gather(part * role.itemsize, span)
                owned += part / span.size
        data = max(0.0, data - rates.assume.overlap * one.seconds)
        update = rates.update(role, owned=owned)
        parts = {name: part * steps for name, part in one.parts.items()}
        parts |= {"data parallel": data * steps, "optimizer": update * steps}
        return CallCost(steps * (one.seconds + data + update), parts, one.num_micro_batches)

    def generate(self) -> CallCost:
        """Return the cost of a round of generation: prefill of prompts and histories, then decoding.

        Each stage works on one cohort of rows. While samples wait, every slot has a row; the last `max_rows`
        samples then finish one by one.
        """
        rates = self.rates
        role = self.role
        work = self.work
        tp = self.groups.tp
        ep = self.groups.ep
        pp = self.strategy.pp
        samples = math.ceil(work.most_samples("generate", self.strategy.dp) / self.strategy.cp)
        live = samples * work.round.num_rows
        rows = min(live, work.max_rows)
        cohorts = min(pp, math.ceil(rows))
        waves = live / rows  # How often all slots are filled.
        rows = rows / cohorts
        tokens, squared = _prefill(work, rows)
        deepest = max(self._num_layers)
        block = rates.block(role, tp, ep, tokens=tokens, squared=squared)
        stages = [block.times(count) for count in self._num_layers]
        prefill = self._pipelined(stages, cohorts, tokens=tokens, hops_per_slot=1)
        weights, running, context = _decode_ranges(work, rows, waves)
        compute, communication = rates.decode_block(
            role, tp, ep, rows=running, context=context, shared=_shared_prompts(work, rows, running)
        )
        head = rates.decode_head(role, tp, rows=running)
        step = ((compute + communication) * deepest + head) * cohorts
        if pp > 1:
            whole = (compute + communication) * role.config.num_layers + head
            step = np.maximum(step, whole + pp * self._hop(rows))
        parts = {
            "prefill": waves * prefill.seconds,
            "decode": float(((compute * deepest + head) * cohorts * weights).sum()),
            self.groups.within: float((communication * deepest * cohorts * weights).sum()),
        }
        seconds = waves * prefill.seconds + float((step * weights).sum())
        parts["pipeline"] = max(0.0, seconds - sum(parts.values()))
        return CallCost(seconds, parts)

    @cached_property
    def _micro_batch(self) -> MeanMicroBatch:
        return mean_micro_batch(self.work, self.strategy, self.call_plan.micro_batch_tokens)

    @property
    def _num_layers(self) -> list[int]:
        """Number of blocks on each stage."""
        return [len(self.role.spec.stage_layers(self.strategy, stage)) for stage in range(self.strategy.pp)]

    def _block(self, *, backward: bool = False) -> Cost:
        """Return the cost of a block on one micro-batch.

        Costs are remembered, since strategies that differ only in dp and pp ask for the same ones.
        """
        rates = self.rates
        role = self.role
        tp, cp, ep = self.groups.tp, self.groups.cp, self.groups.ep
        tokens = self._micro_batch.tokens
        squared = self._micro_batch.squared_tokens
        key = (role.config, role.dtype, role.lora, tp, cp, ep, tokens, squared, backward)
        if key not in rates.known_blocks:
            cost = rates.block(role, tp, ep, tokens=tokens, squared=squared, backward=backward)
            rates.known_blocks[key] = cost.plus(Cost(0.0, self._exchanges(tokens)))
        return rates.known_blocks[key]

    def _exchanges(self, tokens: float) -> float:
        """Return the seconds of a block's two all-to-alls over cp, one before and one after attention."""
        config = self.role.config
        tp = self.groups.tp.size
        cp = self.groups.cp
        if cp.size == 1:
            return 0.0
        back = config.num_heads // tp * (config.head_dim if config.mla is None else config.mla.v_head_dim)
        elements = (exchanged(config, tp, cp.size), back)
        return sum(self.rates.all_to_all(tokens * width * self.role.itemsize, cp) for width in elements)

    def _hop(self, tokens: float) -> float:
        """Return the seconds to send hidden states to the next stage."""
        num_bytes = tokens * self.role.config.hidden_size * self.role.itemsize
        return self.rates.send(num_bytes, within_host=self.groups.stages_meet_in_host)

    def _pipelined(
        self, stages: list[Cost], count: int, *, tokens: float, hops_per_slot: int
    ) -> CallCost:
        """Return the cost of `count` micro-batches that each cross every stage border `hops_per_slot`
        times."""
        hop = self._hop(tokens) if len(stages) > 1 else 0.0
        once = sum(stage.seconds for stage in stages) + hops_per_slot * (len(stages) - 1) * hop
        slowest = max(stages, key=lambda stage: stage.seconds)
        # There are as many micro-batches in flight as stages, so a round trip bounds the slot, too.
        slot = max(slowest.seconds, once / len(stages), hop)
        seconds = once + (count - 1) * slot
        busy = slowest.times(count)
        waiting = seconds - busy.seconds
        parts = {"compute": busy.compute, self.groups.within: busy.communication, "pipeline": waiting}
        return CallCost(seconds, parts, count)


def _prefill(work: Workload, rows: float) -> tuple[float, float]:
    """Return the tokens to prefill for rows of all ages, and the sum of their squared lengths.

    Samples share their prompt in its first round. Later, each row is prefilled with what it has so far.
    """
    rows_by_age = rows * (work.round.ages / work.round.num_rows)
    tokens = max(1.0, rows_by_age[0] / work.samples_per_prompt) * work.prompt_tokens
    squared = tokens * work.prompt_tokens
    lengths = work.prompt_tokens + work.round_tokens * np.arange(1, work.rounds)
    tokens += float(rows_by_age[1:] @ lengths)
    return tokens, squared + float(rows_by_age[1:] @ lengths**2)


def _shared_prompts(work: Workload, rows: float, running: np.ndarray) -> SharedPrompts | None:
    """Return the prompts that `running` of some rows read from the cache; None if none has whole blocks."""
    saved = shared_tokens(math.floor(work.prompt_tokens), work.samples_per_prompt)
    if not saved:
        return None
    share = work.round.ages[0] / work.round.num_rows  # Rows in their first round; others share nothing.
    distinct = max(1.0, rows * share / work.samples_per_prompt)
    ended = np.maximum(0.0, 1 - running / rows)
    prompts = distinct * (1 - ended ** (rows * share / distinct))  # Prompts that some row still continues.
    return SharedPrompts(prompts + (1 - share) * running, saved)


def _decode_ranges(work: Workload, rows: float, waves: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return, for ranges of decode steps that grow in length: their expected number of steps, the mean
    number of running rows, and the mean context of a row. The last entry is for the steps in which all
    slots are full."""
    alive = work.round.survival
    steps = work.round.history + np.arange(1, len(alive) + 1)  # Tokens of a response at each step.
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
