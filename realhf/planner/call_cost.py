"""Seconds of one call on a mesh, added up from the seconds of decoder blocks.

The pipeline schedule is 1F1B (Narayanan et al. 2021): the first micro-batch passes all stages, then one
finishes per slot of the slowest stage. Gradients are assumed to be reduced, and the parameters of ZeRO-1
gathered, after the backward pass. For large models the engine reduces most gradients during that pass
(ModelSpec.sections); how much this saves depends on the links. `EnginePath.overlap` is for engines whose
overlap is known.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from typing import NamedTuple

import numpy as np

from realhf.devices.chunk_sizes import LEAST_PREFIX, LEAST_SHARE
from realhf.execution_plan import CallPlan
from realhf.graph import FunctionCall
from realhf.layout import ParallelStrategy, even_split
from realhf.models.kv_blocks import DENSE, block_size, shared_tokens, tokens_read
from realhf.models.model_config import ModuleConfig, TransformersConfig
from realhf.planner.links import RankGroups, rank_groups
from realhf.planner.micro_batches import MeanMicroBatch, mean_micro_batch
from realhf.planner.problem import ModelRole, Workload
from realhf.planner.rates import Cost, Rates, SharedPrompts, expected_maximum
from realhf.planner.rows import RankRows
from realhf.planner.shard import (
    exchanged,
    held_params,
    num_states,
    packed_itemsize,
    packed_params,
    trained_params,
    weights_bytes,
)
from realhf.planner.shared_cores import SharedCores
from realhf.planner.slowest_replica import Rollout, decode_steps
from realhf.planner.turns import with_waits

_WAITING = "pipeline"  # The cause of the seconds in which ranks wait for others.
_HOST = "host"
_CHUNK_LAUNCHES = 15
"""Operators of a block for a row whose tokens are prefilled beside those that decode; an estimate."""
_ENVIRONMENTS = "environments"
"""The cause of the seconds by which waits for environments make a generation longer."""


_FUNCTION_SECONDS = 1e-3
"""Seconds of each call of a user's function on a module, besides products."""


@dataclass(frozen=True)
class CallCost:
    """Seconds of one call, also by cause: `compute`, `tensor parallel`, `pipeline`, and so on.

    They are those of the slowest replica; the mean over replicas is `mean_share` times as long.
    """

    seconds: float
    seconds_by_cause: Mapping[str, float] = field(default_factory=dict)
    num_micro_batches: int = 1
    mean_share: float = 1.0

    @property
    def limit(self) -> str:
        """The cause of most seconds."""
        return max(self.seconds_by_cause, key=self.seconds_by_cause.__getitem__, default="nothing")

    def plus(self, cause: str, seconds: float) -> "CallCost":
        by_cause = self.seconds_by_cause
        if seconds > 0:
            by_cause = {**by_cause, cause: by_cause.get(cause, 0.0) + seconds}
        return CallCost(self.seconds + seconds, by_cause, self.num_micro_batches, self.mean_share)


def call_cost(
    rates: Rates, call: FunctionCall, role: ModelRole, workload: Workload, call_plan: CallPlan,
    *, per_host: int,
) -> CallCost:
    """Return the cost of a call on contiguous ranks, with `per_host` of them on each host of the mesh."""
    strategy = call_plan.layout.strategy
    if isinstance(role.config, ModuleConfig):
        return _module_cost(rates, call, role, workload, call_plan)
    workload = workload.under(call_plan)
    groups = rank_groups(strategy, per_host)
    knows_prompts = "response_mask" in call.inputs
    estimate = _Estimate(rates, role, workload, call_plan, strategy, groups, knows_prompts)
    by_kind = {"generate": estimate.generate, "forward": estimate.forward, "train_step": estimate.train}
    num_samples = workload.num_samples * (workload.round.num_rows if call.kind == "generate" else 1)
    host = rates.call_seconds(call.kind, samples=math.ceil(num_samples / strategy.dp))
    cost = by_kind[call.kind]().plus(_HOST, host)
    waits = cost.seconds_by_cause.get(_ENVIRONMENTS, 0.0)
    if (cores := SharedCores(rates.cluster)).are_shared:
        on_host = min(strategy.num_ranks, per_host)
        busy = (math.ceil(on_host * number / strategy.dp) for number in range(1, strategy.dp + 1))
        working = {cause: taken for cause, taken in cost.seconds_by_cause.items() if cause != _ENVIRONMENTS}
        seconds, by_cause = cores.of_call(
            cost.seconds, working, waiting=_WAITING, mean_share=cost.mean_share,
            crowding=[rates.crowding(call.kind, num_busy) for num_busy in busy])
        waits = min(waits, by_cause[_WAITING])
        by_cause |= {_WAITING: by_cause[_WAITING] - waits, _ENVIRONMENTS: waits}
        cost = replace(cost, seconds=seconds, seconds_by_cause=by_cause)
    scale = workload.runs * rates.whole_call(call.kind, role, estimate.groups.tp, estimate.groups.ep)
    by_cause = {cause: seconds * scale for cause, seconds in cost.seconds_by_cause.items() if seconds > 0}
    seconds = cost.seconds * scale
    if waits > 0:  # Environments take as long as they take.
        seconds += waits * (workload.runs - scale)
        by_cause[_ENVIRONMENTS] = waits * workload.runs
    cost = CallCost(seconds, by_cause, cost.num_micro_batches, cost.mean_share)
    return offloaded(cost, rates, role, workload, strategy) if call_plan.offload else cost


def _module_cost(
    rates: Rates, call: FunctionCall, role: ModelRole, workload: Workload, call_plan: CallPlan
) -> CallCost:
    """Return the cost of a function on a module: as measured, or else of one product with each parameter and
    row, at the device's peak; and of each time that it is called. A call that is asked takes no more than it
    was measured to take."""
    strategy = call_plan.layout.strategy
    if workload.is_asked:  # The call that asks waits for it.
        return CallCost(workload.seconds, {"compute": workload.seconds})
    rows = workload.most_samples(call.kind, strategy.dp)
    parts = -(-rows // call_plan.micro_batch_tokens)
    calls = workload.minibatches * workload.epochs * parts
    seconds = workload.seconds_on(strategy.dp)
    if not seconds:
        products = 6 * workload.epochs if call.kind == "train_step" else 2
        peak = rates.cluster.peak_flops.get(role.dtype) or min(rates.cluster.peak_flops.values())
        seconds = products * role.spec.numel * workload.num_samples * workload.runs / strategy.dp / peak
    overhead = _FUNCTION_SECONDS * calls * workload.runs
    return CallCost(seconds + overhead, {"compute": seconds, _HOST: overhead}, parts)


def offloaded(
    cost: CallCost, rates: Rates, role: ModelRole, workload: Workload, strategy: ParallelStrategy
) -> CallCost:
    """Return the cost of a call whose weights must first be loaded from host memory."""
    weights = max(weights_bytes(role, strategy, stage) for stage in {0, strategy.pp - 1})
    return cost.plus("offload", rates.host_copy(weights) * workload.runs)


def update_seconds(rates: Rates, role: ModelRole, *, owned: float) -> float:
    """Return the seconds of an optimizer step on the owned parameters.

    With an offloaded optimizer, the states of one slice are updated while PCIe brings those of the next to
    the device and takes those of the previous back to the host, both at once. Where devices are processes,
    the memory that updates read and write also carries these copies, so the seconds add up.
    """
    update = rates.update(role, owned=owned)
    if not role.offloads_optimizer:
        return update
    states = owned * num_states(role) * role.wide_itemsize
    if rates.cluster.host_memory is None:
        return update + rates.traffic(4 * states)
    return max(update, rates.host_copy(states))


class _EqualStages(NamedTuple):
    """Stages that have the same work as `stage`, each with `num_layers` blocks."""

    stage: int
    num_layers: int
    num_stages: int


@lru_cache(maxsize=1 << 12)
def _equal_stages(num_layers: int, pp: int, num_dense: int) -> tuple[_EqualStages, ...]:
    """Return the stages of a pipeline in order, those with the same work as one entry.

    The first and the last stage are by themselves. The first `num_dense` blocks differ from the others.
    """
    by_work: dict[tuple[int, int, int], list[int]] = {}
    for stage in range(pp):
        first, stop = even_split(num_layers, pp, stage)
        dense = max(0, min(num_dense, stop) - first)
        by_work.setdefault((stage if stage in (0, pp - 1) else -1, stop - first, dense), []).append(stage)
    return tuple(sorted(
        _EqualStages(stages[0], work[1], len(stages)) for work, stages in by_work.items()))


@dataclass(frozen=True)
class _Estimate:
    """The estimated costs of a call, one method for each kind."""

    rates: Rates
    role: ModelRole
    work: Workload
    call_plan: CallPlan
    strategy: ParallelStrategy
    groups: RankGroups
    knows_prompts: bool  # Whether the call's inputs say where prompts end.

    def forward(self) -> CallCost:
        micro = self._micro_batch
        head = self.rates.head(
            self.role, self.groups.tp, tokens=micro.output_tokens, output=self.work.output)
        stage_costs = [self._block().times(stages.num_layers) for stages in self._stages]
        stage_costs[-1] = stage_costs[-1].plus(head)
        return self._pipelined(
            stage_costs, micro.num_micro_batches, tokens=micro.tokens, hops_per_slot=1, largest=micro.largest,
            mean_share=micro.mean_share)

    def train(self) -> CallCost:
        rates = self.rates
        role = self.role
        strategy = self.strategy
        micro = self._micro_batch
        block = self._block().times(2 if self.call_plan.recompute else 1).plus(self._block(backward=True))
        stage_costs = []
        for stages in self._stages:
            gradients = rates.accumulate(role, trained_params(role, strategy, stages.stage))
            stage_costs.append(block.times(stages.num_layers).plus(Cost(gradients)))
        for backward in (False, True):
            head = rates.head(
                role, self.groups.tp, tokens=micro.output_tokens, output=self.work.output,
                backward=backward)
            stage_costs[-1] = stage_costs[-1].plus(head)
        passes = self._pipelined(
            stage_costs, micro.num_micro_batches, tokens=micro.tokens, hops_per_slot=2, largest=micro.largest)
        steps = self.work.minibatches * self.work.epochs
        data, update = self._updates(steps)
        data = max(0.0, data - rates.path.overlap * passes.seconds)
        by_cause = {cause: seconds * steps for cause, seconds in passes.seconds_by_cause.items()}
        by_cause |= {"data parallel": data * steps, "optimizer": update * steps}
        step_seconds = passes.seconds + data + update
        mean_share = 1 - (1 - micro.mean_share) * passes.seconds / step_seconds
        return CallCost(steps * step_seconds, by_cause, passes.num_micro_batches, mean_share)

    def _updates(self, steps: int) -> tuple[float, float]:
        """Return the seconds in which an optimizer step exchanges gradients and parameters, and of the update
        itself, on average over `steps`. They do not depend on options, for which they are remembered."""
        rates = self.rates
        role = self.role
        strategy = self.strategy
        spans = (self.groups.replicas, self.groups.expert_replicas)
        key = (role, strategy, spans, steps)
        if key not in rates.known_updates:
            ends = {0, strategy.pp - 1}
            held = max((held_params(role.config, strategy, stage, role.lora) for stage in ends), key=sum)
            # Parameters are gathered between optimizer steps. After the last one, reallocations bring them.
            gathers = (steps - 1) / steps if strategy.num_replicas > 1 else 0.0
            data = 0.0
            owned = 0.0
            for numel, span in zip(held, spans, strict=True):
                if numel:
                    data += rates.reduce_scatter(numel * role.wide_itemsize, span)
                    data += gathers * rates.all_gather(numel * role.itemsize, span)
                    owned += numel / span.size
            rates.known_updates[key] = (data, update_seconds(rates, role, owned=owned))
        return rates.known_updates[key]

    def generate(self) -> CallCost:
        """Return the cost of a round of generation.

        The ranks of a cp group have rows of their own, as those of dp. So strategies that differ only in how
        many ranks are in either have equal costs, which are remembered, if they share prefixes alike.
        """
        samples = math.ceil(self.work.most_samples("generate", self.strategy.dp) / self.strategy.cp)
        groups = self.groups
        key = (
            self.role, self.work, self.strategy.pp, self.strategy.num_replicas, samples, groups.tp, groups.ep,
            groups.stages_meet_in_host, groups.num_sending, self._shares_prefixes)
        known = self.rates.known_generations
        if key not in known:
            known[key] = self._generation(samples)
        cost: CallCost = known[key]
        return cost

    def _generation(self, samples: int) -> CallCost:
        """Return the cost of prefill of prompts and histories, then decoding, of so many samples on a rank.

        Each stage works on one cohort of rows. While samples wait, every slot that the cache holds has a row;
        the last rows then finish one by one. The call ends with the slowest replica.
        """
        work = self.work
        pp = self.strategy.pp
        rank_rows = RankRows(self.role, work, self.strategy, self.rates.cluster.device_type == "cuda")
        live = samples * work.round.num_rows
        slots = min(live, work.max_rows)
        cohorts = min(pp, math.ceil(slots))
        if rank_rows.held < rank_rows.slots:
            slots = max(1.0, min(slots, rank_rows.held * rank_rows.num_cohorts))
        waves = live / slots  # How often all slots are filled.
        tokens, squared = prefilled(work, slots / cohorts, shares_prefixes=self._shares_prefixes)
        passes = max(1.0, tokens / work.prefill_tokens)
        block = self.rates.block(
            self.role, self.groups.tp, self.groups.ep, tokens=tokens / passes, squared=squared / passes
        ).times(passes)
        stage_costs = [block.times(stages.num_layers) for stages in self._stages]
        prefill = waves * self._pipelined(stage_costs, cohorts, tokens=tokens, hops_per_slot=1).seconds
        restarts = prefill / tokens * slots / cohorts * rank_rows.restarted_tokens
        rollout = self._rollout(live, slots)
        steps = decode_steps(rollout)
        context_K = steps.context_K * (work.lengths.mean / work.drawn_lengths.mean)
        rows_of = partial(
            self._decode, slots=slots, cohorts=cohorts, alike_rows=steps.ending.alike_rows)
        compute_K, communication_K, step_K = rows_of(steps.rows_K, context_K)
        decode, num_steps_K = steps.of_slowest(step_K)
        scale = decode / max(1e-30, float(step_K @ num_steps_K))
        by_cause = {
            "prefill": prefill,
            "restarts": restarts,
            "decode": scale * float(compute_K @ num_steps_K),
            self.groups.within_rows: scale * float(communication_K @ num_steps_K)}
        packing = 0.0
        if packed_itemsize(self.role.dtype, self.rates.cluster):
            packing = max(
                self.rates.packing(
                    self.role, self.groups.tp, self.groups.ep,
                    params=packed_params(self.role, self.strategy, stages.stage))
                for stages in self._stages)
            by_cause["packing"] = packing
        seconds = packing + prefill + restarts + decode
        by_cause[_WAITING] = max(0.0, seconds - sum(by_cause.values()))
        mean = packing + prefill + restarts + steps.of_mean(step_K)
        if work.turns is not None:
            turns = work.turns
            returns = live * turns.num_returns
            num_steps = float(num_steps_K.sum())
            history = work.prompt_tokens + work.lengths.mean / 2
            observed = self._continued(returns, turns.observation_tokens + 1, num_steps, context=history)
            host = live * turns.counts.mean * self.rates.efficiencies.turn_seconds
            # Rows that run share this work between turns, which takes time of decode steps.
            per_row = (observed + host) / (live * work.drawn_lengths.mean)
            waiting, under_way = with_waits(
                turns, rollout, lambda rows, tokens: rows_of(rows, tokens)[2] + per_row * rows,
                tokens=work.lengths.mean)
            waits = max(0.0, waiting - decode - observed - host)
            # Rows that go on take the blocks of others that wait, which are then computed again.
            lost = max(0.0, 1 - rank_rows.most_cached * rank_rows.num_cohorts / under_way) * returns
            again = self._continued(lost, history, num_steps)
            by_cause["prefill"] += observed
            by_cause["restarts"] += again
            by_cause |= {_HOST: host, _ENVIRONMENTS: waits}
            seconds += waits + observed + host + again
            mean += waits + observed + host + again
        mean *= min(1.0, work.num_samples / self.strategy.num_replicas / samples)
        return CallCost(seconds, by_cause, mean_share=mean / seconds)

    def _continued(self, rows: float, tokens: float, most_passes: float, *, context: float = 0.0) -> float:
        """Return the seconds to prefill some tokens of each row, which come after `context` others.

        A GPU prefills them in passes of their own, one for each row or decode step. On a CPU they join the
        rows that decode, whose step is paid for, but for attention.
        """
        if rows * tokens == 0:
            return 0.0
        work = self.work
        passes = max(1.0, rows * tokens / work.prefill_tokens)
        launches = 0.0
        if self.rates.cluster.device_type == "cuda":
            passes = max(passes, min(rows, most_passes))
        else:
            launches = rows * _CHUNK_LAUNCHES * self.rates.efficiencies.launch_seconds
        block = self.rates.block(
            self.role, self.groups.tp, self.groups.ep, tokens=rows * tokens / passes,
            squared=rows * (2 * tokens * context + tokens**2) / passes).times(passes)
        return (block.seconds + launches) * self.role.config.num_layers / self.strategy.pp

    def _rollout(self, live: float, slots: float) -> Rollout:
        """Return the rows of a replica that has `live` ones at most.

        If replicas take waiting prompts from each other, each has the mean number of rows.
        """
        work = self.work
        replicas = self.strategy.dp * self.strategy.cp
        shared = work.work_stealing and live > slots and replicas > 1
        if shared:
            live = max(slots, work.num_samples * work.round.num_rows / replicas)
        return Rollout(
            work.drawn_lengths, work.rounds, live, slots, replicas, shared, work.samples_per_prompt,
            work.alike)

    def _decode(
        self, rows_K: np.ndarray, context_K: np.ndarray, *, slots: float, cohorts: int, alike_rows: float
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the seconds of computation, of communication and of all together of each kind of step.

        `context_K` are tokens after the prompts.
        """
        rates = self.rates
        tp = self.groups.tp
        deepest = max(stages.num_layers for stages in self._stages)
        running = np.minimum(cohorts, rows_K)  # Cohorts that still have rows.
        rows = rows_K / running
        busiest = in_busiest_cohort(rows, slots / cohorts, cohorts, alike_rows)
        context = self.work.prompt_tokens + context_K
        longest = np.append(self.work.prompt_tokens + len(self.work.survival), context[1:])
        if rates.path.reads_blocks:
            context = cache_tokens_read(self.work, context, longest, rows, slots / cohorts, alike_rows)

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
        shares = self._shares_prefixes and self.knows_prompts
        micro = mean_micro_batch(
            self.work, self.strategy, limit, attention=self.role.attention_share,
            shares_prompts=shares and self.work.shared_prompt_tokens[0] > 0)
        if shares:
            saved = saved_by_sharing(self.work, micro.num_samples, micro.num_prompts)
            if saved.tokens >= LEAST_SHARE * micro.tokens:
                micro = micro._replace(
                    tokens=micro.tokens - saved.tokens, squared_tokens=micro.squared_tokens - saved.squared)
        if self.rates.path.of_role(self.role.config).pads_stages and self.strategy.pp > 1:
            micro = micro._replace(tokens=max(micro.tokens, limit / self.strategy.cp))
        if self.strategy.vp > 1:  # Empty micro-batches are added.
            micro = micro._replace(num_micro_batches=max(micro.num_micro_batches, self.strategy.pp))
        return micro

    @cached_property
    def _shares_prefixes(self) -> bool:
        """Whether what several sequences of a pass begin with is computed once."""
        config = self.role.config
        if isinstance(config, TransformersConfig) or self.strategy.cp > 1:
            return False
        longest = math.ceil(self.work.longest_prompt + self.work.max_new_tokens)
        return self.rates.path.of_role(config).shares_prefixes and config.can_share_prefixes(longest)

    @cached_property
    def _stages(self) -> tuple[_EqualStages, ...]:
        config = self.role.config
        num_dense = config.moe.num_dense_layers if config.moe else 0
        return _equal_stages(config.num_layers, self.strategy.pp, num_dense)

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
        return self.rates.send(
            num_bytes, within_host=self.groups.stages_meet_in_host, num_sending=self.groups.num_sending)

    def _pipelined(
        self, stage_costs: list[Cost], count: int, *, tokens: float, hops_per_slot: int, largest: float = 1.0,
        mean_share: float = 1.0,
    ) -> CallCost:
        """Return the cost of `count` micro-batches that each cross every stage border `hops_per_slot` times.

        `stage_costs` are those of a mean micro-batch, one for each of `_stages`. The largest micro-batch,
        which takes `largest` times as long, fills and drains the pipeline (a proportionate flow shop, Pinedo
        2016, 6.1).
        """
        pp = self.strategy.pp
        chunks = self.strategy.vp
        hop = self._hop(tokens) if pp > 1 else 0.0
        pairs = zip(stage_costs, self._stages, strict=True)
        through_all = sum(cost.seconds * stages.num_stages for cost, stages in pairs)
        through_all += hops_per_slot * (pp * chunks - 1) * hop
        slowest = max(stage_costs, key=lambda cost: cost.seconds)
        # There are as many micro-batches in flight as stages, so a round trip bounds the slot, too.
        # Stages between others send in both directions over the same links.
        slot = max(slowest.seconds, through_all / pp, chunks * hop * min(hops_per_slot, pp - 1))
        # Interleaved chunks fill and drain the pipeline in a fraction of the time.
        seconds = (through_all - slot) / chunks * largest + count * slot
        busy = slowest.times(count)
        by_cause = {
            "compute": busy.compute, self.groups.within: busy.communication, _WAITING: seconds - busy.seconds}
        return CallCost(seconds, by_cause, count, mean_share)


# Rows of a generation


class SavedTokens(NamedTuple):
    """Tokens that need not pass, and the difference of the sums of squared lengths with and without them."""

    tokens: float = 0.0
    squared: float = 0.0


def saved_by_sharing(work: Workload, num_samples: float, num_prompts: float) -> SavedTokens:
    """Return what is saved by a pass over some samples in which each prompt is computed once, and once what
    all of them begin with (engine/shared_prefixes.py)."""
    copies = max(0.0, num_samples - num_prompts)
    others = max(0.0, num_prompts - 1)
    prompt, squared_prompt = work.shared_prompt_tokens
    common = work.common_prompt_tokens if work.common_prompt_tokens >= LEAST_PREFIX else 0.0
    return SavedTokens(
        copies * prompt + others * common, copies * squared_prompt + others * common**2)


def prefilled(work: Workload, rows: float, *, shares_prefixes: bool = False) -> tuple[float, float]:
    """Return the tokens to prefill for rows of all ages, and the sum of their squared lengths.

    In the first round, the samples of a prompt share its prefill, and where a pass `shares_prefixes`, its
    prompts share what all of them begin with. In each later round, a row is prefilled with its prompt and the
    tokens of its earlier rounds. It is not known here that a prompt which begins later copies what it has in
    common with a row that runs.
    """
    rows_by_age = rows * (work.round.ages / work.round.num_rows)
    num_prompts = max(1.0, rows_by_age[0] / work.samples_per_prompt)
    tokens = num_prompts * work.prompt_tokens
    squared = tokens * work.prompt_tokens
    if shares_prefixes:
        in_pass = num_prompts / max(1.0, tokens / work.prefill_tokens)
        saved = saved_by_sharing(work, in_pass, in_pass)
        tokens -= num_prompts / in_pass * saved.tokens
        squared -= num_prompts / in_pass * saved.squared
    lengths = work.prompt_tokens + work.round_tokens * np.arange(1, work.rounds)
    tokens += float(rows_by_age[1:] @ lengths)
    return tokens, squared + float(rows_by_age[1:] @ lengths**2)


def in_busiest_cohort(rows: np.ndarray, slots: float, cohorts: int, alike_rows: float) -> np.ndarray:
    """Return the expected rows of the cohort that has most, if each has `rows` of its `slots` on average.

    The rows of a cohort are taken to be binomial, in groups of `alike_rows` that end together.
    """
    if cohorts == 1:
        return rows
    deviation = np.sqrt(np.maximum(0.0, rows * (1 - rows / slots)) * alike_rows)
    return np.minimum(slots, rows + expected_maximum(cohorts) * deviation)


def cache_tokens_read(
    work: Workload, context: np.ndarray, longest: np.ndarray, rows: np.ndarray, slots: float,
    alike_rows: float,
) -> np.ndarray:
    """Return the tokens of the cache that are read for each running row of decode steps.

    A step reads the blocks of all slots from the first running row to the last, also those of ended rows in
    between. If less than DENSE of these slots have running rows, the blocks of those are first copied
    together. Running rows are taken to have random slots, in groups of `alike_rows` that end together.
    """
    prompt = math.floor(work.longest_prompt)
    size = block_size([(prompt, work.samples_per_prompt)], max_new_tokens=work.max_new_tokens)
    shared = shared_tokens(math.floor(work.prompt_tokens), work.samples_per_prompt)
    longest = longest + work.longest_prompt - work.prompt_tokens
    own = tokens_read(context - shared, longest - shared, size)
    running = np.maximum(1.0, rows / alike_rows)  # In groups of neighbours, as are the next two.
    places = np.maximum(running, slots / alike_rows)
    span = 1 + (places + 1) * (running - 1) / (running + 1)  # The mean from the first to the last place.
    return shared + own * np.minimum(1 / DENSE, span / running)


def shared_prompts(work: Workload, rows: float, running: np.ndarray) -> SharedPrompts | None:
    """Return the prompts that `running` of `rows` read from the cache; None if no prompt fills a block."""
    tokens = shared_tokens(math.floor(work.prompt_tokens), work.samples_per_prompt)
    if not tokens:
        return None
    first_share = work.round.ages[0] / work.round.num_rows  # Rows in their first round share prompts.
    first_rows = rows * first_share
    num_prompts = max(1.0, first_rows / work.samples_per_prompt)
    ended = np.maximum(0.0, 1 - running / rows)  # The chance of a row to have ended.
    # A prompt is read until all of its rows have ended: together if they are alike, else one by one.
    is_read = 1 - work.alike * ended - (1 - work.alike) * ended ** (first_rows / num_prompts)
    return SharedPrompts(num_prompts * is_read + (1 - first_share) * running, tokens)
