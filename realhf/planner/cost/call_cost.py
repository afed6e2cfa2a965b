"""Seconds of one call on a mesh, added up from the seconds of decoder blocks.

The pipeline schedule is 1F1B (Narayanan et al. 2021): the first micro-batch passes all stages, then one
finishes per slot of the slowest stage. Gradients are assumed to be reduced, and the parameters of ZeRO-1
gathered, after the backward pass. For large models the engine reduces most gradients during that pass
(ModelSpec.sections); how much this saves depends on the links. `EnginePath.overlap` is for engines whose
overlap is known.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from realhf.cluster import Cluster
from realhf.graph import FunctionCall
from realhf.layout import ParallelStrategy, even_split
from realhf.plan import CallPlan
from realhf.planner.cost.generated_rows import cache_tokens_read, in_busiest_cohort, prefilled, shared_prompts
from realhf.planner.cost.rates import Cost, Rates, Span
from realhf.planner.memory.model_states import num_states, trained_params, weights_bytes
from realhf.planner.memory.shard import exchanged, held_params
from realhf.planner.workload.micro_batches import MeanMicroBatch, mean_micro_batch
from realhf.planner.workload.problem import ModelRole, Workload
from realhf.planner.workload.slowest_replica import DecodeSteps, Rollout, decode_steps

_WAITING = ("pipeline",)  # The parts of a cost in which ranks wait for others.


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


def ranks_per_host(cluster: Cluster, ranks: Iterable[int]) -> int:
    """Return the largest n for which no group lies on two hosts if a mesh is split into groups of n ranks.

    If the mesh begins or ends inside a host, n may be less than the mesh has on any host.
    """
    return math.gcd(*cluster.count_by_host(ranks).values())


@lru_cache(maxsize=1 << 14)
def spans(strategy: ParallelStrategy, per_host: int) -> Spans:
    """Return the rank groups of a strategy on a mesh with `per_host` ranks on each host."""
    s = strategy
    near = max(1, per_host // s.tp)  # Number of tp groups on one host.
    replicas = s.num_replicas
    experts = s.num_expert_replicas
    return Spans(
        tp=Span(s.tp, math.gcd(s.tp, per_host)),
        replicas=Span(replicas, min(replicas, near)),
        # The ranks of a cp group have the same experts, and next to it are groups with other experts.
        expert_replicas=Span(experts, min(experts, max(min(s.cp, near), near // s.ep))),
        cp=Span(s.cp, min(s.cp, near)),
        ep=Span(s.ep, max(1, min(s.ep, near // s.cp))),
        stages_meet_in_host=s.num_ranks <= per_host,
    )


@dataclass(frozen=True)
class CallCost:
    """Seconds of one call, also by part: `compute`, `tensor parallel`, `pipeline`, and so on.

    They are those of the slowest replica; a mean replica works `mean_share` as long.
    """

    seconds: float
    parts: Mapping[str, float] = field(default_factory=dict)
    num_micro_batches: int = 1
    mean_share: float = 1.0

    @property
    def details(self) -> tuple[int, float]:
        """All but the seconds and their parts."""
        return self.num_micro_batches, self.mean_share

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
    workload = workload.with_rows(call_plan.max_rows)
    estimate = _Estimate(rates, role, workload, call_plan, strategy, spans(strategy, per_host))
    by_kind = {"generate": estimate.generate, "forward": estimate.forward, "train_step": estimate.train}
    cost = by_kind[call.kind]()
    num_samples = workload.num_samples * (workload.round.num_rows if call.kind == "generate" else 1)
    host = rates.call_seconds(call.kind, samples=math.ceil(num_samples / strategy.dp))
    cost = CallCost(cost.seconds + host, {**cost.parts, "host": host}, *cost.details)
    if rates.cluster.cores_per_host is not None:
        on_host = min(strategy.num_ranks, per_host)
        busy = (math.ceil(on_host * number / strategy.dp) for number in range(1, strategy.dp + 1))
        cost = on_shared_cores(cost, [rates.crowding(call.kind, num_busy) for num_busy in busy])
    scale = workload.runs * rates.whole_call(call.kind, role, estimate.groups.tp, estimate.groups.ep)
    parts = {name: value * scale for name, value in cost.parts.items() if value > 0}
    cost = CallCost(cost.seconds * scale, parts, *cost.details)
    return offloaded(cost, rates, role, workload, strategy) if call_plan.offload else cost


def offloaded(
    cost: CallCost, rates: Rates, role: ModelRole, workload: Workload, strategy: ParallelStrategy
) -> CallCost:
    """Return the cost of a call whose weights must first be loaded from host memory."""
    weights = max(weights_bytes(role, strategy, stage) for stage in {0, strategy.pp - 1})
    loading = rates.host_copy(weights) * workload.runs
    parts = {**cost.parts, "offload": loading} if loading > 0 else cost.parts
    return CallCost(cost.seconds + loading, parts, *cost.details)


def update_seconds(rates: Rates, role: ModelRole, *, owned: float) -> float:
    """Return the seconds of an optimizer step on the owned parameters.

    States in host memory come up and go back while others are updated, both ways at once over PCIe; where
    devices are processes, the copies go through the same memory.
    """
    update = rates.update(role, owned=owned)
    if not role.offloads_optimizer:
        return update
    states = owned * num_states(role) * role.wide_itemsize
    if rates.cluster.host_memory is None:
        return update + rates.traffic(4 * states)
    return max(update, rates.host_copy(states))


def on_shared_cores(cost: CallCost, crowding: Sequence[float]) -> CallCost:
    """Return the cost of a call whose ranks share cores.

    While k replicas are at work, work takes `crowding[k - 1]` times as long. The slowest replica has the work
    1; the others are assumed to have works spread evenly around their mean: with mean 0.5 and two of them,
    0.25 and 0.75. Ranks that work use the cores of those that wait, so the call takes as long as with cores
    for all ranks, or as long as its work, whichever is longer.
    """
    replicas = len(crowding)
    works = np.ones(replicas)
    if replicas > 1:
        mean = max(0.0, (replicas * cost.mean_share - 1) / (replicas - 1))
        places = (np.arange(replicas - 1) + 0.5) / (replicas - 1)
        works[:-1] = mean + min(mean, 1 - mean) * (2 * places - 1)
    slowdown = float(np.diff(works, prepend=0.0) @ np.array(crowding)[::-1])
    parts = {name: value * slowdown for name, value in cost.parts.items() if name not in _WAITING}
    worked = sum(parts.values())
    seconds = max(cost.seconds * min(1.0, slowdown), worked)
    return replace(cost, seconds=seconds, parts={**parts, _WAITING[0]: seconds - worked})


class _Stages(NamedTuple):
    """Stages that have the same work as `stage`, each with `num_layers` blocks."""

    stage: int
    num_layers: int
    num_stages: int


@lru_cache(maxsize=1 << 12)
def _alike_stages(num_layers: int, pp: int, are_blocks_alike: bool) -> tuple[_Stages, ...]:
    """Return the stages of a pipeline; the first and the last one are by themselves, and come first and last.

    Unless blocks are alike, all are by themselves.
    """
    alike: dict[tuple[int, int], list[int]] = {}
    for stage in range(pp):
        first, stop = even_split(num_layers, pp, stage)
        is_alone = stage in (0, pp - 1) or not are_blocks_alike
        alike.setdefault((stage if is_alone else -1, stop - first), []).append(stage)
    return tuple(sorted(
        _Stages(stages[0], num_layers, len(stages)) for (_, num_layers), stages in alike.items()))


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
        stages = [self._block().times(alike.num_layers) for alike in self._stages]
        stages[-1] = stages[-1].plus(head)
        return self._pipelined(
            stages, micro.num_micro_batches, tokens=micro.tokens, hops_per_slot=1, largest=micro.largest,
            mean_share=micro.mean_share)

    def train(self) -> CallCost:
        rates = self.rates
        role = self.role
        strategy = self.strategy
        micro = self._micro_batch
        block = self._block().times(2 if self.call_plan.recompute else 1).plus(self._block(backward=True))
        stages = []
        for alike in self._stages:
            gradients = rates.accumulate(role, trained_params(role, strategy, alike.stage))
            stages.append(block.times(alike.num_layers).plus(Cost(gradients)))
        for backward in (False, True):
            head = rates.head(
                role, self.groups.tp, tokens=micro.output_tokens, output=self.work.output,
                backward=backward,
            )  # fmt: skip
            stages[-1] = stages[-1].plus(head)
        one = self._pipelined(stages, micro.num_micro_batches, tokens=micro.tokens, hops_per_slot=2,
                              largest=micro.largest)  # fmt: skip
        ends = {0, strategy.pp - 1}
        held = max((held_params(role.config, strategy, stage, role.lora) for stage in ends), key=sum)
        steps = self.work.minibatches * self.work.epochs
        # Parameters are gathered between optimizer steps. After the last one, reallocations bring them.
        gathers = (steps - 1) / steps if strategy.num_replicas > 1 else 0.0
        data = owned = 0.0
        for part, span in zip(held, (self.groups.replicas, self.groups.expert_replicas), strict=True):
            if part:
                data += rates.reduce_scatter(part * role.wide_itemsize, span)
                data += gathers * rates.all_gather(part * role.itemsize, span)
                owned += part / span.size
        data = max(0.0, data - rates.path.overlap * one.seconds)
        update = update_seconds(rates, role, owned=owned)
        parts = {name: part * steps for name, part in one.parts.items()}
        parts |= {"data parallel": data * steps, "optimizer": update * steps}
        seconds = one.seconds + data + update
        share = 1 - (1 - micro.mean_share) * one.seconds / seconds
        return CallCost(steps * seconds, parts, one.num_micro_batches, share)

    def generate(self) -> CallCost:
        """Return the cost of a round of generation: prefill of prompts and histories, then decoding.

        Each stage works on one cohort of rows. While samples wait, every slot has a row; the last `max_rows`
        samples then finish one by one. The call ends with the slowest replica.
        """
        work = self.work
        pp = self.strategy.pp
        samples = math.ceil(work.most_samples("generate", self.strategy.dp) / self.strategy.cp)
        live = samples * work.round.num_rows
        slots = min(live, work.max_rows)
        cohorts = min(pp, math.ceil(slots))
        waves = live / slots  # How often all slots are filled.
        tokens, squared = prefilled(work, slots / cohorts)
        passes = max(1.0, tokens / work.prefill_tokens)
        block = self.rates.block(
            self.role, self.groups.tp, self.groups.ep, tokens=tokens / passes, squared=squared / passes
        ).times(passes)
        stages = [block.times(alike.num_layers) for alike in self._stages]
        prefill = self._pipelined(stages, cohorts, tokens=tokens, hops_per_slot=1)
        steps = self._decode_steps(live, slots)
        compute, communication, step = self._decode(steps, slots, cohorts)
        decode, num_steps = steps.of_slowest(step)
        scale = decode / max(1e-30, float(step @ num_steps))
        parts = {
            "prefill": waves * prefill.seconds,
            "decode": scale * float(compute @ num_steps),
            self.groups.within: scale * float(communication @ num_steps),
        }
        seconds = waves * prefill.seconds + decode
        parts["pipeline"] = max(0.0, seconds - sum(parts.values()))
        mean = waves * prefill.seconds + steps.of_mean(step)
        mean *= min(1.0, work.num_samples / self.strategy.num_replicas / samples)
        return CallCost(seconds, parts, mean_share=mean / seconds)

    def _decode_steps(self, live: float, slots: float) -> DecodeSteps:
        """Return the decode steps of a replica that has `live` rows.

        Replicas share prompts that wait; then no replica has more than the mean of all.
        """
        work = self.work
        replicas = self.strategy.dp * self.strategy.cp
        shared = work.work_stealing and live > slots and replicas > 1
        if shared:
            live = max(slots, work.num_samples * work.round.num_rows / replicas)
        return decode_steps(Rollout(
            work.lengths, work.rounds, live, slots, replicas, shared, work.samples_per_prompt, work.alike))

    def _decode(
        self, steps: DecodeSteps, slots: float, cohorts: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the seconds of computation, of communication and of all together of each kind of step."""
        rates = self.rates
        tp = self.groups.tp
        deepest = max(alike.num_layers for alike in self._stages)
        running = np.minimum(cohorts, steps.rows)  # Cohorts that still have rows.
        rows = steps.rows / running
        busiest = in_busiest_cohort(rows, slots / cohorts, cohorts, steps.alike_rows)
        context = self.work.prompt_tokens + steps.context
        longest = np.append(self.work.prompt_tokens + len(self.work.survival), context[1:])
        if rates.path.reads_blocks:
            context = cache_tokens_read(self.work, context, longest, rows, slots / cohorts, steps.alike_rows)

        def block(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            return rates.decode_block(
                self.role, tp, self.groups.ep, rows=rows, context=context, longest=longest,
                shared=shared_prompts(self.work, slots / cohorts, rows))

        compute, communication = block(rows)
        head = rates.decode_head(self.role, tp, rows=rows)
        if self.strategy.pp > 1:
            head = head + rates.decode_hop(self.role, rows=rows)
        step = ((compute + communication) * deepest + head) * running
        if self.strategy.pp > 1:  # The busiest cohort passes all stages in a step.
            whole = sum(block(busiest)) * self.role.config.num_layers
            whole = whole + rates.decode_head(self.role, tp, rows=busiest)
            whole = whole + self.strategy.pp * rates.decode_hop(self.role, rows=busiest)
            step = np.maximum(step, whole + self.strategy.pp * self._hop(slots / cohorts))
        return (compute * deepest + head) * running, communication * deepest * running, step

    @cached_property
    def _micro_batch(self) -> MeanMicroBatch:
        limit = self.call_plan.micro_batch_tokens
        micro = mean_micro_batch(
            self.work, self.strategy, limit, attention=self.role.attention_share)
        if self.rates.path.of_role(self.role.config).pads_stages and self.strategy.pp > 1:
            micro = micro._replace(tokens=max(micro.tokens, limit / self.strategy.cp))
        if self.strategy.vp > 1:  # Empty micro-batches are added.
            micro = micro._replace(num_micro_batches=max(micro.num_micro_batches, self.strategy.pp))
        return micro

    @cached_property
    def _stages(self) -> tuple[_Stages, ...]:
        config = self.role.config
        return _alike_stages(config.num_layers, self.strategy.pp, config.moe is None)

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
        self, stages: list[Cost], count: int, *, tokens: float, hops_per_slot: int, largest: float = 1.0,
        mean_share: float = 1.0,
    ) -> CallCost:  # fmt: skip
        """Return the cost of `count` micro-batches that each cross every stage border `hops_per_slot` times.

        `stages` are those of a mean micro-batch, one for each of `_stages`. The largest one, which takes
        `largest` times as long, fills and drains the pipeline (a proportionate flow shop, Pinedo 2016, 6.1).
        """
        pp, chunks = self.strategy.pp, self.strategy.vp
        hop = self._hop(tokens) if pp > 1 else 0.0
        once = sum(stage.seconds * some.num_stages for stage, some in zip(stages, self._stages, strict=True))
        once += hops_per_slot * (pp * chunks - 1) * hop
        slowest = max(stages, key=lambda stage: stage.seconds)
        # There are as many micro-batches in flight as stages, so a round trip bounds the slot, too.
        slot = max(slowest.seconds, once / pp, chunks * hop)
        # Interleaved chunks fill and drain the pipeline in a fraction of the time.
        seconds = (once - slot) / chunks * largest + count * slot
        busy = slowest.times(count)
        waiting = seconds - busy.seconds
        parts = {"compute": busy.compute, self.groups.within: busy.communication, "pipeline": waiting}
        return CallCost(seconds, parts, count, mean_share)
