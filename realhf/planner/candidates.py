"""The candidates of one call: meshes, strategies on them, options, and the cost and memory of each.

Every mesh is on hosts of one kind. On up to `COMPLETE` devices of a kind they are all legal layouts on
contiguous ranks. On more devices they are fewer:

- Meshes inside a host have a size that divides the host's number of devices, and start at a multiple of it.
  Larger ones are ranges of whole hosts. On more than 8 hosts, meshes inside a host are on the first one only;
  ranges start and end at every eighth of the cluster, and smaller ones are aligned powers of two.
- The sizes tp and tp * cp either divide the number of devices of a host or are multiples of it. On more than
  8 hosts, tp takes at most 4 hosts, and cp is 1 or fills a host with tp.

A variant is one call under one strategy with one combination of options. Its memory is known at some places
of the layout, at most what the account counts there, as the bounds of a search need it.

The rows that a generation decodes at once are not among the options: a plan has the best number of those that
fit beside the rest of it (`SearchSpace.settled`). A variant says in `RowAxis` what some numbers cost.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from realhf.cluster import Cluster
from realhf.execution_plan import CallPlan
from realhf.graph import FunctionCall
from realhf.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.models.model_config import ModelConfig
from realhf.planner.call_cost import CallCost, call_cost, offloaded
from realhf.planner.call_memory import RunningMemory
from realhf.planner.communicator_memory import CommunicatorBytes, CommunicatorMemory, use_of
from realhf.planner.deadline import Deadline, part_of_work
from realhf.planner.micro_batches import ROUND_TO, UNEVEN
from realhf.planner.problem import ModelRole, PlannedCall, Problem, Workload, parameter_table
from realhf.planner.rates import Rates
from realhf.planner.rows import RankRows
from realhf.planner.shard import (
    HOST_SHARE,
    adapter_bytes,
    available_bytes,
    gradient_bytes,
    optimizer_bytes,
    weights_bytes,
)

COMPLETE = 8
"""Up to this many devices of a kind have all legal layouts on contiguous ranks enumerated, with 1, 2 or 4
chunks of a stage."""
_RANGE_ENDS = 8  # Ranges of hosts begin and end at this many positions, evenly spaced.
_MOST_HOSTS = 4  # The most hosts of a tp group, where ranges end at few positions.
_SMALLEST_RANGE = 4  # Smaller ranges are aligned powers of two, down to this fraction of the spacing.
_NUM_CHUNKS = (1, 2, 4)  # Of a pipeline stage, where the engine interleaves them.
_LARGEST_MICRO_BATCH = 1 << 17
_SPLITS = (1, 2, 3, 4, 6, 8, 12, 16)  # The numbers of micro-batches of a train step that are tried,
_FEW_SPLITS = (1, 4, 16)  # and those of a forward call, besides micro-batches of one group.
_PRICED = 7  # The numbers of rows that are priced in a layout, from the largest that fits on.
_STEPS = 4  # The numbers of rows between some and twice as many.
_EQUAL_WAVES = 12  # Among them are those with which all slots start up to so many rows each.
PARTS = 8  # The most parts into which the ranks of a layout are cut, in the order of pipeline stages.
PLACES = 2 * PARTS  # The places of a layout: any rank of each part, then the first rank of each part.


# Meshes and strategies


def find_meshes(cluster: Cluster) -> list[range]:
    """Return the ranges of ranks that plans may use, largest first. Each is on hosts of one kind."""
    meshes = [
        range(ranks.start + mesh.start, ranks.start + mesh.stop)
        for ranks, kind in cluster.ranks_by_kind for mesh in _meshes_on(kind)]
    return sorted(meshes, key=lambda mesh: (-len(mesh), mesh.start))


def _meshes_on(cluster: Cluster) -> list[range]:
    """Return the ranges of ranks on hosts of one kind."""
    devices = cluster.num_devices
    per_host = cluster.devices_per_host
    hosts = cluster.num_hosts
    if devices <= COMPLETE:
        return [range(first, stop) for first in range(devices) for stop in range(first + 1, devices + 1)]
    spacing = 1 << max(0, math.ceil(math.log2(hosts / _RANGE_ENDS)))
    split = devices if spacing == 1 else per_host  # Ranks of hosts that have meshes inside them.
    sizes = [n for n in _divisors(per_host) if n < per_host]
    meshes = [range(first, first + n) for n in sizes for first in range(0, split, n)]
    ends = sorted({*range(0, hosts, spacing), hosts})
    of_hosts = {(first, stop) for first in ends for stop in ends if first < stop}
    for n in (spacing >> i for i in range(1, spacing.bit_length()) if 1 << i <= _SMALLEST_RANGE):
        of_hosts |= {(first, first + n) for first in range(0, hosts - n + 1, n)}
    return [*meshes, *(range(first * per_host, stop * per_host) for first, stop in of_hosts)]


def find_strategies(
    config: ModelConfig, size: int, *, cluster: Cluster, max_dp: int
) -> Iterator[ParallelStrategy]:
    """Yield the strategies on `size` ranks that plans may use; at most `max_dp` ranks split the samples."""
    num_experts = config.moe.num_experts if config.moe else 1
    for tp in _divisors(size):
        for cp in _divisors(size // tp):
            if config.num_heads % (tp * cp) or not _is_enumerated(cluster, tp, cp):
                continue
            for dp in _divisors(size // tp // cp):
                pp = size // tp // cp // dp
                if dp > max_dp or pp > config.num_layers:
                    continue
                for ep in _divisors(dp):
                    if ep > num_experts:
                        continue
                    for vp in _NUM_CHUNKS if config.interleaves and pp > 1 else (1,):
                        strategy = ParallelStrategy(pp=pp, dp=dp, cp=cp, tp=tp, ep=ep, vp=vp)
                        if _is_legal(config, strategy):
                            yield strategy


def _is_enumerated(cluster: Cluster, tp: int, cp: int) -> bool:
    """Return whether strategies may have these sizes of tp and cp."""
    per_host = cluster.devices_per_host
    if cluster.num_devices <= COMPLETE:
        return True
    if cluster.num_hosts > _RANGE_ENDS and (tp > _MOST_HOSTS * per_host or cp not in (1, per_host // tp)):
        return False
    return all(per_host % n == 0 or n % per_host == 0 for n in (tp, tp * cp))


def pins_outside(problem: Problem) -> dict[str, Layout]:
    """Return the pinned layouts that the search would not enumerate without the pin."""
    meshes = set(find_meshes(problem.cluster))

    def is_outside(layout: Layout) -> bool:
        first, last = layout.ranks[0], layout.ranks[-1]
        kind = problem.cluster.kind_index(layout.ranks)
        return range(first, last + 1) not in meshes or kind is None or layout.vp not in _NUM_CHUNKS or (
            not _is_enumerated(problem.cluster.kinds[kind], layout.tp, layout.cp))

    return {name: layout for name, layout in problem.pins.items() if is_outside(layout)}


@lru_cache(maxsize=1 << 12)
def _divisors(number: int) -> tuple[int, ...]:
    return tuple(n for n in range(1, number + 1) if number % n == 0)


@lru_cache(maxsize=1 << 14)
def _is_legal(config: ModelConfig, strategy: ParallelStrategy) -> bool:
    try:
        config.check_layout(Layout(strategy, DeviceMesh(tuple(range(strategy.num_ranks)))))
    except ValueError:
        return False
    return True


# Variants of a call


class HeldBytes(NamedTuple):
    """Bytes of a rank: of the home of a role, of a copy of its weights, and of what a call adds."""

    home: Any
    copy: Any
    call: Any


class RowAxis(NamedTuple):
    """Seconds and bytes of a generation by the rows that decode at once, for G numbers that are the same in
    all layouts.

    `seconds_G` are the least with at most so many rows, and `by_place_GP` the least bytes that a rank at each
    place needs for so many; infinity where they do not fit a device.
    """

    seconds_G: np.ndarray
    by_place_GP: np.ndarray
    by_stage_GS: np.ndarray


@dataclass(frozen=True)
class Variant:
    """The cost of one call under one strategy on a mesh of a given shape. Bytes are those of the fullest
    rank.

    A generation has the least cost of any number of rows that may fit, and the plan and the bytes of one row.

    The ranks of `call_plan.layout` count from 0. Every rank always holds `home_bytes` if this layout is the
    home of the role, or `copy_bytes` if it holds a copy. While the call runs, `call_bytes` are added.
    `by_place` is for bounds: the least of a rank at each place of the layout.
    `communicators` are in none of these.
    """

    call_plan: CallPlan
    cost: CallCost
    home_bytes: float
    copy_bytes: float
    call_bytes: float
    by_place: HeldBytes
    call_bytes_by_stage: tuple[float, ...]
    """What the call adds on each of the stages that may differ (see `StateBytes.stages`)."""
    communicators: CommunicatorBytes
    rows: RowAxis | None = None

    @cached_property
    def costs(self) -> tuple[float, ...]:
        """All numbers that make a variant better or worse than others with the same number of stages."""
        states = (self.home_bytes, self.copy_bytes)
        if self.rows is None:
            return (self.cost.seconds, *states, *self.call_bytes_by_stage)
        return (*self.rows.seconds_G.tolist(), *states, *self.rows.by_stage_GS.ravel().tolist())


class _Prices:
    """The costs of a call in one layout, each computed once."""

    def __init__(
        self, rates: Rates, call: FunctionCall, role: ModelRole, work: Workload, per_host: int
    ) -> None:
        self._rates = rates
        self._call = call
        self._role = role
        self._work = work
        self._per_host = per_host
        self._known: dict[tuple[int, int | None, bool], CallCost] = {}

    def __call__(self, call_plan: CallPlan) -> CallCost:
        """Return the cost of the call with these options; the whole cache of its rows is taken to fit."""
        key = (call_plan.micro_batch_tokens, call_plan.max_rows, call_plan.recompute)
        if key not in self._known:
            at_rest = replace(call_plan, offload=False) if call_plan.offload else call_plan
            self._known[key] = call_cost(
                self._rates, self._call, self._role, self._work, at_rest, per_host=self._per_host)
        cost = self._known[key]
        strategy = call_plan.layout.strategy
        return offloaded(cost, self._rates, self._role, self._work, strategy) if call_plan.offload else cost


def find_variants(
    problem: Problem, rates: Rates, call: FunctionCall, communicators: Sequence[CommunicatorMemory], *,
    per_host: int, only: ParallelStrategy | None, deadline: Deadline,
) -> dict[ParallelStrategy, list[Variant]]:
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
    strategies = [only] if only is not None else list(
        find_strategies(role.config, size, cluster=problem.cluster, max_dp=max_dp))
    by_strategy = {}
    for number, strategy in enumerate(strategies):
        with part_of_work(number, len(strategies)):
            deadline.check()
        layout = Layout(strategy, mesh)
        variants = []
        cost_of = _Prices(rates, call, role, work, per_host)
        of_layout = None
        found: Iterable[tuple[CallPlan, CallCost, CandidateMemory, RowAxis | None]]
        if call.kind == "generate":
            found = _generations(problem, call, layout, cost_of)
        else:
            found = [(p, cost_of(p), memory, None) for p, memory in _fitting(problem, call, layout)]
        for call_plan, cost, memory, axis in found:
            if of_layout is None:
                placed = [on_mesh.least(layout, use) for on_mesh in communicators]
                of_layout = CommunicatorBytes(*map(min, zip(*placed, strict=True)))
            variants.append(Variant(
                call_plan, cost, *memory.fullest, memory.by_place, memory.by_stage, of_layout, axis))
        by_strategy[strategy] = _undominated(variants)
    return by_strategy


class _Room(NamedTuple):
    """The states of a call in a layout, and what they leave of a device for what the call adds."""

    states: "StateBytes"
    offloads: list[bool]
    at_most: float


def _room(problem: Problem, call: FunctionCall, layout: Layout) -> _Room | None:
    """Return the states of a call in a layout and whether its weights may be offloaded; None if they do not
    fit a device."""
    capacity = available_bytes(problem.cluster)
    states = state_bytes(problem, call, layout.strategy)
    may_offload = _can_offload(problem, call, layout.strategy)
    pinned = problem.pinned_options.get(call.name, {}).get("offload")
    offloads = [offload for offload in (False, True)[: 1 + may_offload] if pinned in (None, offload)]
    held = states.home if call.kind == "train_step" else states.copy
    rests = 0.0 if True in offloads else held
    if (rests + states.gradients).max() > capacity:
        return None
    return _Room(states, offloads, capacity - (0.0 if True in offloads else held[0]))


def _fitting(
    problem: Problem, call: FunctionCall, layout: Layout
) -> Iterator[tuple[CallPlan, "CandidateMemory"]]:
    """Yield the options of a call in a layout with which it fits a device by itself, with its memory."""
    if (room := _room(problem, call, layout)) is None:
        return
    plans = []
    running = []
    for call_plan in _pinned(problem, call, _options(problem, call, layout)):
        needs = running_bytes(problem, call, call_plan, room.states, at_most=room.at_most)
        if needs is not None:
            plans.append(call_plan)
            running.append(needs)
    for offload in room.offloads if plans else ():
        memories = candidate_memory(problem, call, room.states, np.array(running), offload=offload)
        for call_plan, memory in zip(plans, memories, strict=True):
            if memory.alone <= available_bytes(problem.cluster):
                yield replace(call_plan, offload=True) if offload else call_plan, memory


# Rows of a generation


def row_numbers(work: Workload, strategy: ParallelStrategy) -> list[int]:
    """Return the rising numbers of rows for which candidates have seconds and bytes, equally many in all
    layouts, so that some may be equal. The last one is `most_rows`."""
    samples = _most_samples(work, strategy)
    waves = _waves(_most_samples(work, None))
    numbers = [math.ceil(samples / n) for n in waves]
    if work.lengths.all_equal:  # With one row less than in equal waves, there is a further wave.
        numbers += [max(1, n - 1) for n, of in zip(numbers, waves, strict=True) if of <= _EQUAL_WAVES]
    elif work.work_stealing:  # With one row less than all, replicas may share the rows more evenly.
        numbers.append(max(1, samples - 1))
    return sorted(min(work.max_rows, n) for n in numbers)


@lru_cache(maxsize=64)
def _waves(samples: int) -> tuple[float, ...]:
    """Return numbers of waves in which so many samples may run, up to one row at once."""
    most = _STEPS * (samples - 1).bit_length()
    return tuple(sorted({*range(1, _EQUAL_WAVES + 1), *(2 ** (i / _STEPS) for i in range(most + 1))}))


def _most_samples(work: Workload, strategy: ParallelStrategy | None) -> int:
    """Return the most rows of a rank, if none ends before its last round; None: of a rank on its own."""
    dp, cp = (1, 1) if strategy is None else (strategy.dp, strategy.cp)
    return work.rounds * -(-work.most_samples("generate", dp) // cp)


def most_rows(work: Workload, strategy: ParallelStrategy) -> int:
    """Return the most rows of a rank that decode at once if the memory suffices."""
    return min(work.max_rows, _most_samples(work, strategy))


def rank_rows(problem: Problem, planned: PlannedCall, call_plan: CallPlan) -> RankRows:
    """Return the rows of a generation under a plan."""
    role = problem.roles[planned.role]
    is_cuda = problem.cluster.device_type == "cuda"
    return RankRows(role, planned.workload.under(call_plan), call_plan.layout.strategy, is_cuda)


def _with_least_cache(problem: Problem, planned: PlannedCall, layout: Layout, rows: int) -> CallPlan:
    """Return the plan of a generation that has at least so many slots, in the smallest cache that holds so
    many rows at once."""
    whole = CallPlan(layout, max_rows=rows)
    found = rank_rows(problem, planned, whole)
    if found.least_tokens >= found.whole_tokens:
        return whole
    return replace(whole, kv_cache_gib=found.gib_of(found.least_tokens))


def _generations(
    problem: Problem, call: FunctionCall, layout: Layout, cost_of: _Prices
) -> Iterator[tuple[CallPlan, CallCost, "CandidateMemory", RowAxis]]:
    """Yield a generation in a layout without and with offload, as far as it fits a device by itself: the plan
    of one row with its memory, the least cost of any number of rows, and what each number costs.

    Only the largest numbers that fit are priced. Smaller ones take at least as long as the least of these,
    and as much memory as one row.
    """
    planned = problem.planned(call)
    if (room := _room(problem, call, layout)) is None:
        return
    if has_pinned_rows(problem, call):
        yield from _with_pinned_rows(problem, call, layout, room, cost_of)
        return
    numbers = row_numbers(planned.workload, layout.strategy)
    distinct = sorted(set(numbers))
    needs: dict[int, list[float]] = {}  # By the index of the number.
    for index in reversed(range(len(distinct))):
        if index and len(needs) >= _PRICED:
            continue
        call_plan = _with_least_cache(problem, planned, layout, distinct[index])
        found = running_bytes(problem, call, call_plan, room.states, at_most=room.at_most)
        if found is not None:
            needs[index] = found
    if 0 not in needs:
        return
    one = _with_least_cache(problem, planned, layout, distinct[0])
    priced = sorted(needs)
    for offload in room.offloads:
        all_bytes = candidate_memory(
            problem, call, room.states, np.array([needs[index] for index in priced]), offload=offload)
        fitting = {
            index: memory for index, memory in zip(priced, all_bytes, strict=True)
            if memory.alone <= available_bytes(problem.cluster)}
        if 0 not in fitting:
            continue
        at_one = replace(one, offload=offload)
        axis, least = _row_axis(at_one, distinct, fitting, cost_of)
        which = np.searchsorted(distinct, numbers)
        yield at_one, least, fitting[0], RowAxis(*(array[which] for array in axis))


def has_pinned_rows(problem: Problem, call: FunctionCall) -> bool:
    """Return whether the user has fixed the rows of a generation or its cache."""
    return not {"max_rows", "kv_cache_gib"}.isdisjoint(problem.pinned_options.get(call.name, {}))


def _with_pinned_rows(
    problem: Problem, call: FunctionCall, layout: Layout, room: _Room, cost_of: _Prices
) -> Iterator[tuple[CallPlan, CallCost, "CandidateMemory", RowAxis]]:
    """Yield the same as `_generations` if rows and cache are those that the user has fixed."""
    work = problem.workloads[call.name]
    (call_plan,) = _pinned(problem, call, [CallPlan(layout, max_rows=most_rows(work, layout.strategy))])
    needs = running_bytes(problem, call, call_plan, room.states, at_most=room.at_most)
    count = len(row_numbers(work, layout.strategy))
    for offload in room.offloads if needs is not None else ():
        (memory,) = candidate_memory(problem, call, room.states, np.array([needs]), offload=offload)
        if memory.alone <= available_bytes(problem.cluster):
            whole = replace(call_plan, offload=offload)
            cost = cost_of(whole)
            axis = RowAxis(
                np.full(count, cost.seconds), np.tile(memory.by_place.call, (count, 1)),
                np.tile(memory.by_stage, (count, 1)))
            yield whole, cost, memory, axis


def _row_axis(
    call_plan: CallPlan, numbers: list[int], fitting: dict[int, "CandidateMemory"], cost_of: _Prices
) -> tuple[RowAxis, CallCost]:
    """Return the axis of a generation, given the memory of some of the numbers of rows that fit, by index;
    and the least cost.

    No cache makes as many rows faster than one with room for their full length.
    """
    last = max(fitting)
    first = min(set(fitting) - {0}, default=0)
    first = 0 if first == 1 else first  # Otherwise fewer rows are taken to be slower.
    costs = {
        index: cost_of(replace(call_plan, max_rows=numbers[index], kv_cache_gib=None))
        for index in range(first, min(last + 2, len(numbers)))}
    one = fitting[0]
    seconds = np.full(len(numbers), costs[first].seconds)
    by_place = np.full((len(numbers), PLACES), np.inf)
    by_stage = np.full((len(numbers), len(one.by_stage)), np.inf)
    by_place[: first + 1] = one.by_place.call
    by_stage[: first + 1] = one.by_stage
    for index in range(first + 1, len(numbers)):
        seconds[index] = min(costs.get(index, costs[max(costs)]).seconds, seconds[index - 1])
    for index in set(fitting) - {0}:
        by_place[index] = fitting[index].by_place.call
        by_stage[index] = fitting[index].by_stage
    at_least_place, at_least_stage = (
        np.minimum.accumulate(array[::-1])[::-1] for array in (by_place, by_stage))
    return RowAxis(seconds, at_least_place, at_least_stage), min(costs.values(), key=lambda c: c.seconds)


# Options of other calls


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
    share = min(samples // work.group_size * longest, _LARGEST_MICRO_BATCH)
    trains = call.kind == "train_step"
    sizes = {_rounded(share / number) for number in (_SPLITS if trains else _FEW_SPLITS)}
    sizes |= {longest, 2 * longest} if trains else {longest}
    rising = sorted({max(longest, min(size, _rounded(share))) for size in sizes})
    yield from (CallPlan(layout, tokens) for tokens in rising)
    if trains:  # Large micro-batches would use up the memory that recomputing saves.
        yield from (CallPlan(layout, tokens, recompute=True) for tokens in rising[:3])


def _rounded(tokens: float) -> int:
    """Return the size of micro-batches of so many tokens on average, with room for those that are larger."""
    return math.ceil(UNEVEN * tokens / ROUND_TO) * ROUND_TO


def _pinned(
    problem: Problem, call: FunctionCall, call_plans: Iterable[CallPlan]
) -> Iterator[CallPlan]:
    """Yield the plans of a call with the options that the user has fixed, each once."""
    fixed = {name: value for name, value in problem.pinned_options.get(call.name, {}).items()
             if name != "offload"}
    known: list[CallPlan] = []
    for call_plan in call_plans:
        call_plan = replace(call_plan, **fixed) if fixed else call_plan
        if not fixed or call_plan not in known:
            known.append(call_plan)
            yield call_plan


def _can_offload(problem: Problem, call: FunctionCall, strategy: ParallelStrategy) -> bool:
    """Return whether hosts have enough memory for the weights of this role, if they may be offloaded.

    What all roles offload to a host is counted in whole plans (MemoryAccount.excess).
    """
    if not problem.may_offload(call):
        return False
    num_shards = min(problem.cluster.devices_per_host, strategy.num_ranks)
    num_bytes = num_shards * weights_bytes(problem.model_role(call), strategy, 0)
    return num_bytes <= HOST_SHARE * problem.cluster.host_memory_bytes


# Their memory


def part_size(num_ranks: int) -> int:
    """Return the ranks of a part: a power of two, as most meshes begin at a multiple of one."""
    return 1 << (-(-num_ranks // PARTS) - 1).bit_length()


class StateBytes(NamedTuple):
    """Bytes of the home and of a copy on the stages that may differ, of which the first stage is the first.

    `own_home` and `own_copy` leave out what may be in the memory of another role with equal frozen weights.
    `by_place` has for each place which of these stages have no more bytes than any stage there.
    """

    stages: tuple[int, ...]
    by_place: np.ndarray
    home: np.ndarray
    copy: np.ndarray
    own_home: np.ndarray
    own_copy: np.ndarray
    gradients: np.ndarray  # They exist during train steps only.

    def least_by_place(self, by_stage: np.ndarray) -> np.ndarray:
        """Return the least bytes at each place, (..., PLACES), from those of stages, (..., stages)."""
        least: np.ndarray = np.where(self.by_place, by_stage[..., None, :], np.inf).min(axis=-1)
        return least


class CandidateMemory(NamedTuple):
    """The most bytes of a rank, and the least of a rank at each place.

    `by_stage` are the bytes that the call adds on each of the stages of `StateBytes`, and `alone` is what the
    fullest rank needs if it holds nothing else.
    """

    fullest: HeldBytes
    by_place: HeldBytes
    by_stage: tuple[float, ...]
    alone: float


def state_bytes(problem: Problem, call: FunctionCall, strategy: ParallelStrategy) -> StateBytes:
    """Return the bytes of the states of a call's role."""
    role = problem.model_role(call)
    stages, by_place = _distinct_stages(role, strategy, trains=call.kind == "train_step")
    copy = np.array([weights_bytes(role, strategy, stage) for stage in stages], float)
    adapters = np.array([adapter_bytes(role, strategy, stage) for stage in stages], float)
    training, gradients = np.zeros((2, len(stages)))
    if call.kind == "train_step":
        gradients += [gradient_bytes(role, strategy, stage) for stage in stages]
    if role.trainable and not problem.offloads_optimizer(role):
        training += [optimizer_bytes(role, strategy, stage) for stage in stages]
    equal = [name for name, other in problem.roles.items() if role.source and other.source == role.source]
    is_first = equal[:1] in ([], [call.role])
    own_home = (copy if is_first else adapters) + training
    own_copy = copy if len(equal) < 2 else adapters
    return StateBytes(stages, by_place, copy + training, copy, own_home, own_copy, gradients)


def candidate_memory(
    problem: Problem, call: FunctionCall, states: StateBytes, running: np.ndarray, *, offload: bool
) -> list[CandidateMemory]:
    """Return the bytes of a call with each of several options, which add `running`, (options, stages)."""
    rests = 0.0 if offload else 1.0
    home, copy, own_home, own_copy = (rests * array for array in states[2:6])
    if offload and not _may_share(problem, call):
        running = running + states.copy
    alone = (home if call.kind == "train_step" else copy) + running
    least_home, least_copy = map(states.least_by_place, (own_home, own_copy))
    columns = (running, running.max(axis=1), states.least_by_place(running), alone.max(axis=1))
    return [
        CandidateMemory(
            HeldBytes(home.max(), copy.max(), most), HeldBytes(least_home, least_copy, least),
            tuple(by_stage), need)
        for by_stage, most, least, need in zip(*(array.tolist() for array in columns), strict=True)]


def running_bytes(
    problem: Problem, call: FunctionCall, call_plan: CallPlan, states: StateBytes, *,
    at_most: float = math.inf,
) -> list[float] | None:
    """Return the least bytes that the call, or an evaluation in its layout, adds on each of the stages,
    without offloaded weights; None if it adds more than `at_most` on the first stage."""
    at_home = CallPlan(call_plan.layout)
    planned_calls = [(problem.planned(call), call_plan)]
    if problem.evaluations:
        planned_calls += [
            (beside, replace(call_plan, kv_cache_gib=None) if has_options else at_home)
            for beside, has_options in problem.evaluations_beside(call)]
    own, *others = [_least_running(problem, beside, plan) for beside, plan in planned_calls]
    needs: list[float] = []
    for stage, gradients in zip(states.stages, states.gradients.tolist(), strict=True):
        needs.append(max([own(stage) + gradients, *(bytes_on(stage) for bytes_on in others)]))
        if needs[0] > at_most:
            return None
    return needs


def _may_share(problem: Problem, call: FunctionCall) -> bool:
    """Return whether a role's weights may be in the memory of another role."""
    source = problem.model_role(call).source
    return source is not None and sum(role.source == source for role in problem.roles.values()) > 1


def _least_running(problem: Problem, planned: PlannedCall, call_plan: CallPlan) -> Callable[[int], float]:
    """Return a function that returns the least bytes that a call adds on a stage besides gradients."""
    running = RunningMemory(problem, planned, call_plan)
    waits = planned.kind == "generate" and planned.waits_for_blocks(call_plan)
    rows = call_plan.max_rows or planned.workload.max_rows

    def bytes_on(stage: int) -> float:
        memory = running.on(stage)
        if waits:
            memory = memory._replace(kv_cache=memory.kv_cache / rows)
        return float(memory.num_bytes)

    return bytes_on


def _distinct_stages(
    role: ModelRole, strategy: ParallelStrategy, *, trains: bool
) -> tuple[tuple[int, ...], np.ndarray]:
    """Return the stages that may have the most bytes, in order, and which of them have the least bytes at
    each place, (PLACES, stages).

    Between the ends, stages with equally many blocks of each kind differ only by the micro-batches in flight
    of a train step, of which later ones have fewer.
    """
    contents = _blocks_by_stage(role.config, strategy.pp, strategy.vp)
    return _stages_of(contents, strategy.num_ranks, trains)


@lru_cache(maxsize=1 << 10)
def _blocks_by_stage(config: ModelConfig, pp: int, vp: int) -> tuple[tuple[int, int], ...]:
    """Return the number of blocks and of experts' blocks on each stage."""
    strategy = ParallelStrategy(pp=pp, vp=vp)
    stages = (parameter_table(config).stage_layers(strategy, stage) for stage in range(pp))
    return tuple((len(layers), sum(map(config.has_experts, layers))) for layers in stages)


@lru_cache(maxsize=1 << 12)
def _stages_of(
    contents: tuple[tuple[int, int], ...], num_ranks: int, trains: bool
) -> tuple[tuple[int, ...], np.ndarray]:
    """Return `_distinct_stages` of stages with these numbers of blocks and of experts' blocks."""
    pp = len(contents)
    stands_for: dict[tuple[object, ...], int] = {}
    keys: list[tuple[object, ...]] = []
    for stage, blocks in enumerate(contents):
        is_end = stage in (0, pp - 1)
        part = stage * (num_ranks // pp) // part_size(num_ranks) if trains else 0
        keys.append((stage,) if is_end else (-1, blocks, part))
        stands_for[keys[-1]] = stage  # Later stages of a train step have fewer micro-batches in flight.
        first = (-2, blocks)
        if not is_end and first not in stands_for:  # The one with the most.
            stands_for[first] = stage
    stages = tuple(sorted({*stands_for.values()}))
    by_place = np.zeros((PLACES, len(stages)), bool)
    for place, there in enumerate(_stages_by_place(num_ranks, pp)):
        by_place[place, [stages.index(stands_for[keys[stage]]) for stage in there]] = True
    return stages, by_place


def _stages_by_place(num_ranks: int, pp: int) -> list[range]:
    """Return the stages of each place. Parts after the last rank count as the last rank."""
    size = part_size(num_ranks)
    per_stage = num_ranks // pp
    firsts = [min(part * size, num_ranks - 1) for part in range(PARTS)]
    stops = [min(first + size, num_ranks) for first in firsts]
    parts = [range(a // per_stage, -(-b // per_stage)) for a, b in zip(firsts, stops, strict=True)]
    return parts + [stages[:1] for stages in parts]
