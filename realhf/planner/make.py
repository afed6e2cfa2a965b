"""Make a plan or price a given one: search for it, simulate its step, and explain why there is none.

On a cluster with several kinds of hosts, the search begins from plans on hosts of one kind alone.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from realhf.execution_plan import ExecutionPlan
from realhf.graph import FunctionCall
from realhf.layout import MAX_RANKS, DeviceMesh, Layout
from realhf.planner.call_cost import CallCost
from realhf.planner.deadline import Deadline, OutOfTime
from realhf.planner.memory_account import MemoryCheck, check_memory, offloading_optimizers, require_fit
from realhf.planner.problem import Problem
from realhf.planner.rates import Rates
from realhf.planner.reasons import Reason, find_reasons
from realhf.planner.reserves import ENOUGH_FREE, Preference, preferred
from realhf.planner.search import SAME, LocalSearch, NoPlan, ReportProgress, SearchResult, leanest, search
from realhf.planner.search_space import SearchSpace
from realhf.planner.shard import available_bytes
from realhf.planner.step_time import (
    contiguous_layouts,
    cost_of,
    dependencies,
    first_starts,
    have_common_ranks,
    moving_seconds,
    predict,
    step_periods,
    times_of_plan,
)
from realhf.user_input.units import format_bytes, format_seconds

_ENUMERATING = 0.5  # The fraction of the time limit after which no more meshes are enumerated.
_SEARCHING = 0.8  # The fraction of the time limit after which the search ends; then the plan is described.
_PREFERRING = 0.1  # The fraction in which a plan with reserves is looked for, out of the rest.
_ANY_PLAN = 0.999  # With this gap, a search ends with the first plan that fits.
_LEAST_SHARE = 0.01  # Shares of the enumeration below this say nothing about the rest.
_AMPLE = 2.0  # How many times as long as the estimate the limit should be that a sentence names.
_BY_KIND = 0.2  # The fraction in which plans on one kind of hosts are searched, if there are several.


class TooLittleTime(ValueError):
    """Layouts on all devices were not enumerated in time; a --time-limit of `limit_seconds` suffices."""

    def __init__(self, spent: float, limit_seconds: float) -> None:
        self.limit_seconds = limit_seconds
        self.reason = f"no plan was found in {format_seconds(spent)}, as enumerating layouts on all devices "
        self.reason += "takes longer"
        super().__init__(
            f"{self.reason}: give it more time, such as --time-limit {limit_seconds:g}")


@dataclass(frozen=True)
class TimelineEntry:
    """A call, or the reallocation of a role for a call, on `num_ranks` ranks from `first_rank` on.

    Seconds count from the start of the first call of a step; the end may lie in the next step.
    """

    name: str
    kind: str
    first_rank: int
    num_ranks: int
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """One step of the steady state. `idle` is the fraction of the step in which each device runs no call."""

    step_seconds: float
    timeline: tuple[TimelineEntry, ...]
    idle: np.ndarray


class PortTraffic(NamedTuple):
    """The seconds that a step takes where traffic of several activities meets at the port of a host.

    The step takes at least `least_seconds`, in which the port of the busiest host carries what passes it in
    `busiest_seconds` of every step. It takes about `most_seconds` if activities that overlap take turns.
    """

    busiest_seconds: float
    least_seconds: float
    most_seconds: float


class Heuristic(NamedTuple):
    """The plan that people set up by hand, as one candidate per call group; `fits` is about memory."""

    chosen: list[int]
    seconds: float
    fits: bool


@dataclass(frozen=True)
class PricedPlan:
    """A plan with its seconds and its memory under the cost model."""

    problem: Problem
    rates: Rates
    plan: ExecutionPlan
    costs: Mapping[str, CallCost]
    simulation: Simulation
    ports: PortTraffic
    memory: MemoryCheck

    @property
    def step_seconds(self) -> float:
        return self.simulation.step_seconds

    @cached_property
    def lacks(self) -> str | None:
        """Return the sentence with the numbers and the remedy if the plan does not fit in memory."""
        try:
            require_fit(self.problem, self.plan)
        except ValueError as error:
            return str(error)
        return None


@dataclass(frozen=True)
class Planned(PricedPlan):
    """A plan that was searched for, with all that is reported about it."""

    space: SearchSpace
    result: SearchResult
    reasons: Mapping[str, Reason]
    heuristic: Heuristic | None
    search_seconds: float
    preference: Preference | None = None
    """Why this is not the fastest plan that was found; None if it is."""


def make_plan(
    problem: Problem, rates: Rates, *, time_limit: float, gap: float = 0.0, max_iterations: int | None = None,
    progress: ReportProgress | None = None, should_stop: Callable[[], bool] | None = None,
    explain: bool = True, slack: float = 0.0, clock: Callable[[], float] = time.monotonic,
    parts: float = 1.0, start: ExecutionPlan | None = None,
) -> Planned:
    """Return the best plan found within `time_limit` seconds of the clock, or sooner when it is within `gap`
    of the lower bound over the plans enumerated, or when there is one and `should_stop` returns True.

    With `explain`, it has the reasons for the layouts, as far as the time allows. With `slack`, a plan with
    reserves or simpler layouts is preferred whose step is longer by at most this fraction. The search begins
    with the layouts of `start`, if they are given and among those enumerated.

    Raises ValueError when nothing fits, or nothing was found in time; if there was no time to enumerate,
    TooLittleTime with a limit that suffices, of which `time_limit` is one of so many parts.
    """
    deadline = Deadline(time_limit, clock)
    _require_supported(problem, rates)
    try:
        with deadline.sooner(_ENUMERATING * time_limit):
            space = SearchSpace(problem, rates, deadline)
    except OutOfTime as error:
        takes = deadline.spent / max(error.share, _LEAST_SHARE) / _ENUMERATING
        raise TooLittleTime(deadline.spent, _rounded_up(max(1.0, takes * _AMPLE) * parts)) from None
    _require_candidates(space)
    with deadline.sooner(_SEARCHING * time_limit - deadline.spent):
        baseline = None
        with suppress(OutOfTime):
            baseline = heuristic(space)
        starts = [] if baseline is None else [baseline.chosen]
        starts += [] if start is None else _as_candidates(space, start)
        starts += starts_by_kind(
            space, time_limit=_BY_KIND * time_limit, gap=gap, max_iterations=max_iterations,
            should_stop=should_stop)
        result = search(
            space, time_limit=time_limit, gap=gap, starts=starts, max_iterations=max_iterations,
            progress=progress, should_stop=should_stop)
    if isinstance(result, NoPlan):
        raise ValueError(_nothing_fits(space, is_proved=result.is_proved and space.is_whole))
    preference = None
    if slack > 0:
        preference = preferred(
            space, np.array(result.chosen), slack=slack, time_limit=_PREFERRING * time_limit,
            should_stop=should_stop)
    reserve = 0.0 if slack == 0 else ENOUGH_FREE * space.capacity
    with deadline.lifted():
        if preference is not None:
            fastest_seconds = _refined(space, preference.fastest, reserve)
            result = replace(result, chosen=preference.chosen)
        step_seconds = _refined(space, result.chosen, reserve)
    chosen = np.array(result.chosen)
    if preference is not None:
        is_longer = step_seconds > fastest_seconds * (1 + SAME)
        preference = replace(
            preference, step_seconds=step_seconds, fastest_seconds=fastest_seconds) if is_longer else None
    bound = min(result.lower_bound_seconds, step_seconds)
    result = replace(result, step_seconds=step_seconds, lower_bound_seconds=bound)
    figures = {name: getattr(result, name) for name in ("step_seconds", "lower_bound_seconds", "gap")}
    predicted = {name: float(f"{figure:.6g}") for name, figure in figures.items()}
    plan = ExecutionPlan(space.call_plans(result.chosen), predicted)
    priced = price(problem, rates, plan)
    assert priced.memory.fits, f"the search counts less memory than the check: {priced.memory.fullest}"
    reasons = find_reasons(space, chosen) if explain else {}
    deadline.lift()
    return Planned(
        problem, rates, plan, priced.costs, priced.simulation, priced.ports, priced.memory, space, result,
        reasons, baseline, deadline.spent, preference)


def _refined(space: SearchSpace, chosen: Sequence[int], reserve: float) -> float:
    """Refine the micro-batches of a plan, and return the seconds of its step."""
    space.refine(chosen, reserve=reserve)
    return float(space.exact_periods(np.array(chosen)[None])[0])


def _rounded_up(seconds: float) -> float:
    """Return seconds with one digit that is not 0, and not less."""
    unit = 10.0 ** math.floor(math.log10(seconds))
    return math.ceil(seconds / unit) * unit


def price(problem: Problem, rates: Rates, plan: ExecutionPlan) -> PricedPlan:
    """Return the seconds and the memory of a plan, also of one that does not fit.

    Raises ValueError if a call's layout is none that can be priced; the message names it.
    """
    _require_supported(problem, rates)
    for call in problem.model_calls:
        _require_priceable(problem, call, plan[call.name].layout)
    costs = predict(problem, rates, plan).calls
    simulation = simulate(problem, rates, plan, costs)
    ports = port_traffic(problem, rates, plan, costs, simulation)
    return PricedPlan(problem, rates, plan, costs, simulation, ports, check_memory(problem, plan))


def _require_priceable(problem: Problem, call: FunctionCall, layout: Layout) -> None:
    """Raise ValueError unless the layout is on contiguous ranks of one kind, with work for all replicas."""
    where = f"calls.{call.name}.layout {layout}"
    if layout.ranks != tuple(range(layout.ranks[0], layout.ranks[0] + len(layout.ranks))):
        raise ValueError(f"{where}: seconds are known for contiguous ranks only, in rising order")
    if problem.cluster.kind_index(layout.ranks) is None:
        ranges = " or ".join(f"{r.start}-{r.stop - 1}" for r, _ in problem.cluster.ranks_by_kind)
        raise ValueError(
            f"{where}: seconds are known on hosts of one kind only, here on ranks {ranges}")
    most = problem.workloads[call.name].most_replicas(call.kind)
    if layout.dp > most:
        raise ValueError(f"{where}: the call has work for {most} of its {layout.dp} replicas")


def heuristic(space: SearchSpace) -> Heuristic | None:
    """Return the baseline plan of ReaL (Mei et al. 2024), on the kind of hosts where its step is shortest.

    Every call runs on all devices there, with tensor parallelism inside hosts and a pipeline across them that
    is as deep as the model allows. Among its options it takes the fastest that fit together, or the fastest
    of all if none do. The result is None where a call fits in no layout on all devices.
    """
    by_kind = [_heuristic_on(space, ranks) for ranks, _ in space.problem.cluster.ranks_by_kind]
    return min(filter(None, by_kind), key=lambda plan: (not plan.fits, plan.seconds), default=None)


def _heuristic_on(space: SearchSpace, everywhere: range) -> Heuristic | None:
    """Return the baseline plan in which every call is on these ranks."""
    allowed = []
    for group in space.groups:
        on_all = [i for i, candidate in enumerate(group.candidates) if candidate.layout.ranks == everywhere]
        if not on_all:
            return None
        strategies = {group.candidates[i].layout.strategy for i in on_all}
        strategy = max(strategies, key=lambda s: (s.tp <= 8, s.tp, -s.dp, -s.cp, -s.ep))
        allowed.append(np.array([i for i in on_all if group.candidates[i].layout.strategy == strategy]))
    local = LocalSearch(space, allowed)
    pairs = zip(space.groups, allowed, strict=True)
    leanest_of_each = [indices[np.argmin((g.resting + g.running)[indices])] for g, indices in pairs]
    local.improve(np.array(leanest_of_each))
    if local.best is not None:
        return Heuristic(local.best.tolist(), local.best_score, True)
    fastest = [int(indices[0]) for indices in allowed]  # Candidates are in order of time.
    return Heuristic(fastest, float(space.exact_periods(np.array([fastest]))[0]), False)


def starts_by_kind(
    space: SearchSpace, *, time_limit: float, gap: float, max_iterations: int | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> list[list[int]]:
    """Return a plan on each kind of hosts that has one, found in an equal share of the time; none if there
    is one kind. Each search has the other limits to itself (see `search`)."""
    kinds = space.problem.cluster.ranks_by_kind
    if len(kinds) == 1:
        return []
    starts = []
    for ranks, _ in kinds:
        if (problem := _alone(space.problem, ranks)) is None:
            continue
        try:
            alone = SearchSpace(
                problem, space.rates.at(ranks), space.deadline.part(time_limit / len(kinds)))
        except OutOfTime:
            continue
        if not all(group.candidates for group in alone.groups):
            continue
        found = search(
            alone, time_limit=time_limit, gap=gap, max_iterations=max_iterations, should_stop=should_stop)
        if isinstance(found, SearchResult):
            starts.append(_located(space, alone, found.chosen, ranks.start))
    return starts


def _alone(problem: Problem, ranks: range) -> Problem | None:
    """Return the problem on the hosts with these ranks only, None if a call is pinned to other hosts."""
    if any(rank not in ranks for layout in problem.pins.values() for rank in layout.ranks):
        return None
    index = problem.cluster.kind_index(ranks)
    assert index is not None
    pins = {
        name: Layout(layout.strategy, DeviceMesh(tuple(rank - ranks.start for rank in layout.ranks)))
        for name, layout in problem.pins.items()}
    return replace(problem, cluster=problem.cluster.kinds[index], pins=pins)


def _located(space: SearchSpace, alone: SearchSpace, chosen: tuple[int, ...], first_rank: int) -> list[int]:
    """Return a plan for hosts of one kind as candidates of the whole space, in which their first rank is
    `first_rank`."""
    located = []
    for whole, group, index in zip(space.groups, alone.groups, chosen, strict=True):
        layout, variants = group.candidates[index]
        layout = layout._replace(first_rank=layout.first_rank + first_rank)
        plans = [variant.call_plan for variant in variants]
        located.append(next(
            i for i, other in enumerate(whole.candidates)
            if other.layout == layout and [variant.call_plan for variant in other.variants] == plans))
    return located


def _as_candidates(space: SearchSpace, plan: ExecutionPlan) -> list[list[int]]:
    """Return the candidates with a plan's layouts, and with its options as far as there are such; an empty
    list if a layout is not among the candidates."""
    chosen = []
    layouts = contiguous_layouts(space.problem, plan)
    for group in space.groups:
        wanted = [plan[space.calls[i].name].options for i in group.calls]
        layout = layouts[group.calls[0]]
        alike = {
            index: sum(v.call_plan.options == now for v, now in zip(candidate.variants, wanted, strict=True))
            for index, candidate in enumerate(group.candidates) if candidate.layout == layout}
        if not alike:
            return []
        chosen.append(max(alike, key=alike.__getitem__))
    return [chosen]


def simulate(
    problem: Problem, rates: Rates, plan: ExecutionPlan, costs: Mapping[str, CallCost]
) -> Simulation:
    """Return a step of a plan, late enough that the start has no effect."""
    calls = problem.calls
    needs = dependencies(problem, rates)
    times = times_of_plan(problem, rates, plan, {name: cost.seconds for name, cost in costs.items()})
    moving = moving_seconds(rates, problem, needs, contiguous_layouts(problem, plan))
    period = float(step_periods(problem.cluster, needs, *times, moving=moving)[0])
    busy = needs.busy(moving, times.first, times.stop)[0]
    durations = needs.durations(moving)[0]
    seconds, first, stop = (array[0] for array in times)
    shares = have_common_ranks(times.first, times.stop)[0]
    starts = first_starts(needs, seconds, shares, moving[0], busy, num_steps=4 * len(calls) + 4)[-1]
    starts = starts - starts.min()
    idle = np.ones(problem.cluster.num_devices)
    timeline = []
    for i, call in enumerate(calls):
        first_rank = int(first[i])
        num_ranks = int(stop[i]) - first_rank
        idle[first_rank : first_rank + num_ranks] -= seconds[i] / period
        end = starts[i] + seconds[i]
        timeline.append(TimelineEntry(call.name, call.kind, first_rank, num_ranks, starts[i], end))
    for (i, j, lag, role), arrived, amount in zip(needs.weights, moving[0], durations, strict=True):
        if amount > 0:
            ends = [starts[j] + seconds[j]]
            if lag and needs.in_place:
                ends += [starts[other] + seconds[other] for other in range(j) if shares[i, other]]
            start = max(ends) + arrived - amount - lag * period
            start += period if start < 0 else 0.0
            num_ranks = int(stop[i] - first[i])
            name = f"{role} for {calls[i].name}"
            timeline.append(TimelineEntry(name, "realloc", int(first[i]), num_ranks, start, start + amount))
    return Simulation(period, tuple(timeline), np.clip(idle, 0.0, 1.0))


# Ports of hosts


class _Activity(NamedTuple):
    """A call or a reallocation that sends for `port_seconds` through the port of each of some hosts."""

    hosts: frozenset[int]
    start: float
    end: float
    port_seconds: float

    def meets(self, other: "_Activity", *, period: float) -> bool:
        """Return whether both send from a host at the same time, in a step or in neighbouring ones."""
        shifts = range(math.floor((self.start - other.end) / period), 2 + math.ceil(self.end / period))
        return bool(self.hosts & other.hosts) and any(
            self.start < other.end + n * period and other.start + n * period < self.end for n in shifts)


def port_traffic(
    problem: Problem, rates: Rates, plan: ExecutionPlan, costs: Mapping[str, CallCost], simulation: Simulation
) -> PortTraffic:
    """Return estimates of a plan's seconds per step with the traffic that meets at ports of hosts.

    An activity alone never takes less than its own traffic at the ports. Two activities that overlap in
    `simulation`, on a host in common, delay each other at most by the lesser traffic of both: the port serves
    them in turns.
    """
    cluster = problem.cluster
    period = simulation.step_seconds
    if cluster.num_hosts == 1:
        return PortTraffic(0.0, period, period)
    calls = problem.calls
    needs = dependencies(problem, rates)
    of_models = {name: cost.seconds for name, cost in costs.items()}
    seconds, first, stop = times_of_plan(problem, rates, plan, of_models)
    layouts = contiguous_layouts(problem, plan)
    moving = moving_seconds(rates, problem, needs, layouts)
    ports = rates.ports
    receiving = dependencies(problem, ports).receiving
    moved = needs.durations(moving_seconds(ports, problem, needs, layouts))[0]

    def hosts(*calls: int) -> frozenset[int]:
        ranks = [(int(first[0, i]), int(stop[0, i])) for i in calls]
        return frozenset().union(*(
            range(a // cluster.devices_per_host, (b - 1) // cluster.devices_per_host + 1) for a, b in ranks))

    activities: list[_Activity] = []
    numbers = np.flatnonzero(needs.durations(moving)[0] > 0).tolist()
    for i, entry in enumerate(simulation.timeline[: len(calls)]):
        traffic = float(receiving[i])
        if i in layouts:
            traffic += cost_of(problem, ports, calls[i], plan[calls[i].name], layouts[i].ranks).seconds
        activities.append(_Activity(hosts(i), entry.start - needs.receiving[i], entry.end, traffic))
    for number, entry in zip(numbers, simulation.timeline[len(calls) :], strict=True):
        user, trainer, *_ = needs.weights[number]
        activities.append(_Activity(hosts(user, trainer), entry.start, entry.end, float(moved[number])))
    share_ranks = have_common_ranks(first, stop)[0]
    delays = np.zeros(len(activities))
    for a, mine in enumerate(activities):
        for b, other in enumerate(activities):
            take_turns = a == b or (max(a, b) < len(calls) and share_ranks[a, b])
            if not take_turns and mine.meets(other, period=period):
                delays[a] += min(mine.port_seconds, other.port_seconds)
    of_hosts = np.zeros(cluster.num_hosts)
    for activity in activities:
        of_hosts[list(activity.hosts)] += activity.port_seconds
    of_moves = np.zeros(moving.shape)
    of_moves[0, numbers] = delays[len(calls) :]
    for of_trainer in needs.copies.values():
        of_moves[:, of_trainer] = of_moves[:, of_trainer].cumsum(axis=1)
    slower = seconds + delays[: len(calls)]
    most = float(step_periods(cluster, needs, slower, first, stop, moving=moving + of_moves)[0])
    busiest = float(of_hosts.max())
    least = max(period, busiest)
    return PortTraffic(busiest, least, max(least, most))


# Problems without a plan


def _require_supported(problem: Problem, rates: Rates) -> None:
    """Raise ValueError for a dtype that the cluster does not list, or a batch with too few prompts to
    split."""
    for role in problem.roles.values():
        rates.peak(role)
    for call in problem.model_calls:
        work = problem.workloads[call.name]
        if work.minibatches > work.prompts:
            split = f"cuts a batch of {work.prompts} prompts into {work.minibatches} mini-batches"
            hint = "give at least one prompt to each (minibatches, batch_size)"
            raise ValueError(f"call {call.name} {split}: {hint}")


def _require_candidates(space: SearchSpace) -> None:
    """Raise ValueError about the first calls that fit nowhere, even alone on all devices."""
    problem = space.problem
    for group in space.groups:
        if group.candidates:
            continue
        calls = [space.calls[i].name for i in group.calls]
        names = " and ".join(calls)
        for name in calls:
            if (layout := problem.pins.get(name)) is not None:
                has = f"a device has {format_bytes(_available(problem, layout))} available"
                why = f"{has}: pin it to more ranks, or leave the pin out"
                pin = ",".join([str(layout), *(
                    f"{key}={value}" for key, value in problem.pinned_options.get(name, {}).items())])
                raise ValueError(f"--pin {name}={pin}: call {names} does not fit there, {why}")
        fixed = [f"{key}={value}" for name in calls
                 for key, value in problem.pinned_options.get(name, {}).items()]
        pinned = f" with {', '.join(fixed)}" if fixed else ""
        where = f"call {names} does not fit in any layout{pinned}, even alone"
        raise ValueError(f"{where}: {_devices(space)}{_remedies(space)}")


def _available(problem: Problem, layout: Layout) -> float:
    """Return what plans may use of the smallest device of a layout."""
    kinds = [kind for ranks, kind in problem.cluster.ranks_by_kind if {*ranks} & {*layout.ranks}]
    return min(map(available_bytes, kinds))


def _nothing_fits(space: SearchSpace, *, is_proved: bool) -> str:
    """Return the sentence about a problem without a plan, with remedies that were tried."""
    spent = format_seconds(space.deadline.spent)
    found = "no plan fits" if is_proved else f"no plan that fits was found in {spent}"
    sentence = f"{found}: {_devices(space)}{_remedies(space)}"
    with suppress(OutOfTime):
        plan = space.memory.least_plan(leanest(space).tolist())
        peak = check_memory(space.problem, plan, space.memory.account).fullest
        if peak.excess_bytes > 0:
            lacks = format_bytes(peak.excess_bytes)
            sentence += f"; the leanest plan tried lacks {lacks} on rank {peak.rank} during {peak.call}"
    return sentence


def _remedies(space: SearchSpace) -> str:
    """Return the end of a sentence: the first change with which a plan that fits was found in the time left.

    Tried are optimizers in host memory, and twice as many hosts.
    """
    problem = space.problem
    tried = [] if (offloaded := offloading_optimizers(problem)) is None else [offloaded]
    if len(problem.cluster.kinds) == 1 and 2 * problem.cluster.num_devices <= MAX_RANKS:
        larger = replace(problem.cluster, num_hosts=2 * problem.cluster.num_hosts)
        if problem.cluster.inter_host is not None:
            tried.append(([f"{larger.num_devices} devices"], replace(problem, cluster=larger)))
            if offloaded is not None:
                both = replace(offloaded[1], cluster=larger)
                tried.append(([*offloaded[0], f"{larger.num_devices} devices"], both))
    with suppress(OutOfTime, ValueError):  # A profile may not serve more hosts.
        for number, (names, changed) in enumerate(tried):
            rates = space.rates if changed.cluster == problem.cluster else space.rates.on(changed.cluster)
            there = SearchSpace(changed, rates, space.deadline)
            if not all(group.candidates for group in there.groups):
                continue
            share = space.deadline.left * (1.0 if number + 1 == len(tried) else 0.75)
            found = search(there, time_limit=share, gap=_ANY_PLAN)
            if isinstance(found, SearchResult):
                seconds = format_seconds(found.step_seconds)
                return f"; with {' and '.join(names)} a plan fits, of {seconds} per step"
        return "; optimizer.offload and twice as many hosts do not help" if len(tried) > 2 else ""
    return ""


def _devices(space: SearchSpace) -> str:
    """Return a sentence that compares the devices with the weights, gradients and optimizers of all roles."""
    problem = space.problem
    total = 0.0
    num_devices = problem.cluster.num_devices
    for role in problem.roles.values():
        total += role.spec.numel * role.itemsize
        total += 4 * role.wide_itemsize * role.trained_spec.numel if role.trainable else 0
    has = format_bytes(space.capacity)
    per_host = problem.cluster.devices_per_host
    at_most = "at most " * (len(problem.cluster.kinds) > 1)
    devices = f"{num_devices} device{'s' * (num_devices > 1)}"
    there_are = f"the cluster has {devices} with {at_most}{has} available on each"
    if space.capacity <= 0:
        whole = format_bytes(problem.cluster.device_memory_bytes)
        return f"{there_are} (of {whole}, less what is set aside): is a unit missing in device_memory_bytes?"
    takes = f"parameters, gradients and optimizers of all roles take {format_bytes(total)}"
    need = math.ceil(total / space.capacity)
    if need > num_devices:
        need = need if need <= per_host else math.ceil(need / per_host) * per_host
        return f"{there_are}; {takes}: on devices alone, they need at least {need}"
    return f"{there_are}; {takes}, and activations and KV cache do not fit beside"
