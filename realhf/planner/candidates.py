"""Candidates: every way to run one call that the search considers (mesh, strategy, options), and its cost."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from realhf.cluster import Cluster
from realhf.graph import FunctionCall
from realhf.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.model_config import ModelConfig
from realhf.plan import CallPlan
from realhf.planner.candidate_memory import Held, candidate_memory, state_bytes
from realhf.planner.communicators import CommunicatorBytes, Communicators, use_of
from realhf.planner.cost import CallCost, call_cost
from realhf.planner.model_states import available_bytes, weights_bytes
from realhf.planner.problem import Problem
from realhf.planner.rates import Rates

_RANGE_ENDS = 8  # Ranges of hosts begin and end at this many positions, evenly spaced.
_SMALLEST_RANGE = 4  # Smaller ranges are aligned powers of two, down to this fraction of the spacing.
_HALVINGS = 5  # The number of values tried for the rows generated at once, each half of the one before.
_LARGEST_MICRO_BATCH = 1 << 17
_HOST_SHARE = 0.8  # The fraction of host memory that offloaded weights may take.


def find_meshes(cluster: Cluster) -> list[range]:
    """Return the ranges of ranks that plans may use, largest first.

    Inside a host these are all divisors of its number of devices, each at multiples of its own size; beyond a
    host they are ranges of whole hosts.
    """
    per_host = cluster.devices_per_host
    hosts = cluster.num_hosts
    spacing = 1 << max(0, math.ceil(math.log2(hosts / _RANGE_ENDS)))
    sizes = [n for n in range(1, per_host) if per_host % n == 0] if spacing == 1 else []
    meshes = [range(first, first + n) for n in sizes for first in range(0, cluster.num_devices, n)]
    ends = sorted({*range(0, hosts, spacing), hosts})
    ranges = {(a, b) for a in ends for b in ends if a < b}
    for n in (spacing >> i for i in range(1, spacing.bit_length()) if 1 << i <= _SMALLEST_RANGE):
        ranges |= {(a, a + n) for a in range(0, hosts - n + 1, n)}
    meshes += [range(a * per_host, b * per_host) for a, b in ranges]
    return sorted(meshes, key=lambda mesh: (-len(mesh), mesh.start))


@lru_cache(maxsize=4096)
def _is_legal(config: ModelConfig, strategy: ParallelStrategy) -> bool:
    try:
        config.check_layout(Layout(strategy, DeviceMesh(tuple(range(strategy.num_ranks)))))
    except ValueError:
        return False
    return True


def find_strategies(
    config: ModelConfig, size: int, *, per_host: int, max_dp: int
) -> Iterator[ParallelStrategy]:
    """Yield the legal strategies on `size` ranks; tensor parallelism stays inside a host."""
    for tp in (n for n in range(1, min(size, per_host) + 1) if size % n == 0 and per_host % n == 0):
        for pp in (n for n in range(1, config.num_layers + 1) if (size // tp) % n == 0):
            dp = size // tp // pp
            if dp > max_dp:
                continue
            max_ep = min(dp, config.moe.num_experts) if config.moe else 1
            for ep in (n for n in range(1, max_ep + 1) if dp % n == 0):
                strategy = ParallelStrategy(pp=pp, dp=dp, tp=tp, ep=ep)
                if _is_legal(config, strategy):
                    yield strategy


@dataclass(frozen=True)
class Variant:
    """The cost of one call under one strategy on a mesh of a given shape. Bytes are those of the fullest
    rank.

    The ranks of `call_plan.layout` count from 0. Every rank always holds `home_bytes` if this layout is the
    home of the role, or `copy_bytes` if it holds a copy. While the call runs, `call_bytes` are added.
    `start` and `least` are for bounds (`candidate_memory.py`): the same on the first stage, and on any.
    `communicators` are in none of these.
    """

    call_plan: CallPlan
    cost: CallCost
    home_bytes: float
    copy_bytes: float
    call_bytes: float
    start: Held
    least: Held
    communicators: CommunicatorBytes


def find_variants(
    problem: Problem, rates: Rates, call: FunctionCall, *, size: int, in_host: int,
    only: ParallelStrategy | None = None,
) -> dict[ParallelStrategy, list[Variant]]:  # fmt: skip
    """Return the variants of a call on meshes of `size` ranks, `in_host` of them on one host, by strategy.

    Each fits a device by itself, and no other variant with the same strategy beats it.
    """
    role = problem.model_role(call)
    work = problem.workloads[call.name]
    capacity = available_bytes(problem.cluster)
    per_host = problem.cluster.devices_per_host
    by_strategy = {}
    max_dp = work.most_replicas(call.kind)
    strategies = find_strategies(role.config, size, per_host=per_host, max_dp=max_dp)
    mesh = DeviceMesh(tuple(range(size)))
    for strategy in [only] if only is not None else strategies:
        states = state_bytes(problem, call, strategy)
        use = use_of(role, trains=call.kind == "train_step")
        communicators = Communicators(problem.cluster, size).least(Layout(strategy, mesh), use)
        variants = []
        for call_plan in _options(problem, call, Layout(strategy, mesh)):
            memory = candidate_memory(problem, call, call_plan, states)
            if memory.alone > capacity:
                continue
            cost = call_cost(rates, call, role, work, call_plan, per_host=in_host)
            bounds = (memory.start, memory.least, communicators)
            variants.append(Variant(call_plan, cost, *memory.fullest, *bounds))
        by_strategy[strategy] = [v for v in variants if not any(_beats(other, v) for other in variants)]
    return by_strategy


def _options(problem: Problem, call: FunctionCall, layout: Layout) -> Iterator[CallPlan]:
    """Yield the call in this layout with every combination of micro-batching, recompute and offload."""
    strategy = layout.strategy
    work = problem.workloads[call.name]
    longest = max(1, math.ceil(work.group_tokens))
    samples = work.most_samples(call.kind, strategy.dp)
    share = samples // work.group_size * longest
    largest = min(1 << (share - 1).bit_length(), _LARGEST_MICRO_BATCH)
    sizes = {largest, largest >> 2, largest >> 4, longest}
    if call.kind == "train_step":
        sizes.add(2 * longest)
    offloads = (False, True) if _can_offload(problem, call, strategy) else (False,)
    if call.kind == "generate":
        rows = min(work.max_rows, work.rounds * samples)
        counts = sorted({max(1, rows >> i) for i in range(_HALVINGS)})
        yield from (CallPlan(layout, max_rows=n, offload=offload) for offload in offloads for n in counts)
        return
    rising = sorted({min(max(size, longest), largest) for size in sizes})
    yield from (CallPlan(layout, tokens, offload=offload) for offload in offloads for tokens in rising)
    if call.kind == "train_step":  # Large micro-batches would use up the memory that recomputing saves.
        yield from (CallPlan(layout, tokens, recompute=True) for tokens in rising[:3])


def _can_offload(problem: Problem, call: FunctionCall, strategy: ParallelStrategy) -> bool:
    """Return whether hosts have enough memory to offload all frozen roles, if this one may be."""
    if not problem.may_offload(call):
        return False
    num_frozen = sum(role.is_frozen for role in problem.roles.values())
    num_shards = min(problem.cluster.devices_per_host, strategy.num_ranks)
    num_bytes = num_frozen * num_shards * weights_bytes(problem.model_role(call), strategy, 0)
    return num_bytes <= _HOST_SHARE * problem.cluster.host_memory_bytes


def _beats(a: Variant, b: Variant) -> bool:
    """Return whether `a` is nowhere worse than `b`, and is better somewhere or has simpler options."""
    key_a, key_b = (
        (v.cost.seconds, v.home_bytes, v.copy_bytes, v.call_bytes, *v.start, *v.least, v.call_plan.offload,
         v.call_plan.recompute, v.call_plan.max_rows or 0, v.call_plan.micro_batch_tokens)
        for v in (a, b)
    )  # fmt: skip
    return key_a < key_b and all(x <= y for x, y in zip(key_a[:10], key_b[:10], strict=True))
