"""Variants: every strategy of one call with every combination of options that the search considers."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from realhf.graph import FunctionCall
from realhf.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.plan import CallPlan
from realhf.planner.cost.call_cost import CallCost, call_cost, offloaded
from realhf.planner.cost.rates import Rates
from realhf.planner.memory.candidate_memory import (
    CandidateMemory,
    Held,
    candidate_memory,
    running_bytes,
    state_bytes,
)
from realhf.planner.memory.communicator_memory import CommunicatorBytes, CommunicatorMemory, use_of
from realhf.planner.memory.model_states import HOST_SHARE, available_bytes, weights_bytes
from realhf.planner.search.enumeration import find_strategies
from realhf.planner.workload.problem import Problem

_HALVINGS = 5  # The number of values tried for the rows generated at once, each half of the one before.
_LARGEST_MICRO_BATCH = 1 << 17


@dataclass(frozen=True)
class Variant:
    """The cost of one call under one strategy on a mesh of a given shape. Bytes are those of the fullest
    rank.

    The ranks of `call_plan.layout` count from 0. Every rank always holds `home_bytes` if this layout is the
    home of the role, or `copy_bytes` if it holds a copy. While the call runs, `call_bytes` are added.
    `by_place` is for bounds (`candidate_memory.py`): the least of a rank at each place of the layout.
    `communicators` are in none of these.
    """

    call_plan: CallPlan
    cost: CallCost
    home_bytes: float
    copy_bytes: float
    call_bytes: float
    by_place: Held
    call_bytes_by_stage: tuple[float, ...]
    """What the call adds on each of the stages that tell variants apart."""
    communicators: CommunicatorBytes

    @cached_property
    def costs(self) -> tuple[float, ...]:
        """All numbers that make a variant better or worse than others with the same number of stages.

        More rows are among them, since how much of their cache is counted depends on the rest of the plan.
        """
        states = (self.home_bytes, self.copy_bytes)
        return (self.cost.seconds, *states, *self.call_bytes_by_stage, self.call_plan.max_rows or 0)


def find_variants(
    problem: Problem, rates: Rates, call: FunctionCall, communicators: Sequence[CommunicatorMemory], *,
    per_host: int, only: ParallelStrategy | None = None,
) -> dict[ParallelStrategy, list[Variant]]:  # fmt: skip
    """Return the variants of a call on meshes of the same size, `per_host` of their ranks on each host, by
    strategy. `communicators` has those of each placement on hosts, of which the least ones count.

    Each fits a device by itself, and no other variant with the same strategy beats it.
    """
    role = problem.model_role(call)
    work = problem.workloads[call.name]
    use = use_of(role, trains=call.kind == "train_step")
    size = communicators[0].num_ranks
    mesh = DeviceMesh(tuple(range(size)))
    max_dp = work.most_replicas(call.kind)
    strategies = find_strategies(role.config, size, cluster=problem.cluster, max_dp=max_dp)
    by_strategy = {}
    for strategy in [only] if only is not None else strategies:
        layout = Layout(strategy, mesh)
        variants = []
        costs: dict[int, CallCost] = {}  # By the number of the options.
        connected = None
        for number, call_plan, memory in _fitting(problem, call, layout):
            if connected is None:
                placed = [on_mesh.least(layout, use) for on_mesh in communicators]
                connected = CommunicatorBytes(*map(min, zip(*placed, strict=True)))
            if number not in costs:
                at_rest = replace(call_plan, offload=False) if call_plan.offload else call_plan
                costs[number] = call_cost(rates, call, role, work, at_rest, per_host=per_host)
            cost = costs[number]
            cost = offloaded(cost, rates, role, work, strategy) if call_plan.offload else cost
            variants.append(Variant(
                call_plan, cost, *memory.fullest, memory.by_place, memory.by_stage, connected))
        by_strategy[strategy] = _undominated(variants)
    return by_strategy


def _fitting(
    problem: Problem, call: FunctionCall, layout: Layout
) -> Iterator[tuple[int, CallPlan, CandidateMemory]]:
    """Yield the options of a call in a layout with which it fits a device by itself, with its memory. Options
    that differ only in offload have equal numbers."""
    capacity = available_bytes(problem.cluster)
    states = state_bytes(problem, call, layout.strategy)
    offloads = (False, True) if _can_offload(problem, call, layout.strategy) else (False,)
    held = states.home if call.kind == "train_step" else states.copy
    rests = 0.0 if len(offloads) > 1 else held
    if (rests + states.gradients).max() > capacity:
        return
    room = capacity - (0.0 if len(offloads) > 1 else held[0])
    plans = []
    running = []
    for call_plan in _options(problem, call, layout):
        if (needs := running_bytes(problem, call, call_plan, states, at_most=room)) is not None:
            plans.append(call_plan)
            running.append(needs)
    for offload in offloads if plans else ():
        memories = candidate_memory(problem, call, states, np.array(running), offload=offload)
        for number, (call_plan, memory) in enumerate(zip(plans, memories, strict=True)):
            if memory.alone <= capacity:
                yield number, replace(call_plan, offload=True) if offload else call_plan, memory


def _undominated(variants: Iterable[Variant]) -> list[Variant]:
    """Return the variants of one layout that no other one equals or beats in all its costs.

    The first of several variants with equal costs is kept.
    """
    kept: list[Variant] = []
    for variant in sorted(variants, key=lambda v: v.costs):  # A variant comes after all those that beat it.
        if not any(is_no_worse(other.costs, variant.costs) for other in kept):
            kept.append(variant)
    return kept


def is_no_worse(costs: tuple[float, ...], others: tuple[float, ...]) -> bool:
    return all(x <= y for x, y in zip(costs, others, strict=True))


def _options(problem: Problem, call: FunctionCall, layout: Layout) -> Iterator[CallPlan]:
    """Yield the call in this layout with every combination of micro-batching and recompute."""
    strategy = layout.strategy
    work = problem.workloads[call.name]
    longest = max(1, math.ceil(work.group_tokens))
    samples = work.most_samples(call.kind, strategy.dp)
    share = samples // work.group_size * longest
    largest = min(1 << (share - 1).bit_length(), _LARGEST_MICRO_BATCH)
    sizes = {largest, largest >> 2, largest >> 4, longest}
    if call.kind == "train_step":
        sizes.add(2 * longest)
    if call.kind == "generate":
        rows = min(work.max_rows, work.rounds * -(-samples // strategy.cp))
        counts = sorted({max(1, rows >> i) for i in range(_HALVINGS)})
        yield from (CallPlan(layout, max_rows=n) for n in counts)
        return
    rising = sorted({min(max(size, longest), largest) for size in sizes})
    yield from (CallPlan(layout, tokens) for tokens in rising)
    if call.kind == "train_step":  # Large micro-batches would use up the memory that recomputing saves.
        yield from (CallPlan(layout, tokens, recompute=True) for tokens in rising[:3])


def _can_offload(problem: Problem, call: FunctionCall, strategy: ParallelStrategy) -> bool:
    """Return whether hosts have enough memory to offload all frozen roles, if this one may be."""
    if not problem.may_offload(call):
        return False
    num_frozen = sum(role.is_frozen for role in problem.roles.values())
    num_shards = min(problem.cluster.devices_per_host, strategy.num_ranks)
    num_bytes = num_frozen * num_shards * weights_bytes(problem.model_role(call), strategy, 0)
    return num_bytes <= HOST_SHARE * problem.cluster.host_memory_bytes


