"""The search space: times and memory of many plans at once, computed on arrays.

Calls that must share a layout form a call group. A plan, `chosen`, has the index of one candidate for each
group. While a search builds plans, it decides for each group a mesh first and then a candidate, so arrays of
unfinished plans hold `choices`: a candidate, a mesh or OPEN (see `CallGroup`).

Shapes: K plans, U call groups, N calls in the order in which ranks run them. `plans` and `choices` are
(K, U).
"""

import gc
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from realhf.execution_plan import CallPlan, ExecutionPlan
from realhf.graph import FunctionCall
from realhf.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.planner.call_cost import CallCost
from realhf.planner.call_group import CallGroup, find_call_groups, placeholder_ranks
from realhf.planner.candidates import has_pinned_rows, most_rows, rank_rows, row_numbers
from realhf.planner.deadline import Deadline
from realhf.planner.links import ranks_per_host
from realhf.planner.memory_account import MemoryAccount
from realhf.planner.memory_bounds import MemoryBounds, RankBytes
from realhf.planner.micro_batches import micro_batch_sizes
from realhf.planner.problem import Problem
from realhf.planner.rates import Rates
from realhf.planner.reallocation import arrivals
from realhf.planner.rows import GIB, largest
from realhf.planner.shard import available_bytes
from realhf.planner.step_time import (
    CallTimes,
    cost_of,
    dependencies,
    have_common_ranks,
    host_anchor,
    one_step_periods,
    step_periods,
)

_SAME = 1e-9  # Relative difference below which two times are equal.
_MOST_TRIALS = 8  # Of sizes of micro-batches that may not fit, for each call.


class HostCall(NamedTuple):
    """A call in plain Python, by its position among all calls.

    It runs on the ranks that have the results of the call group `anchor`, or on rank 0 without one. If it is
    split over these ranks, `seconds` has its time by their number.
    """

    position: int
    anchor: int | None
    is_split: bool
    seconds: np.ndarray


class SettledCall(NamedTuple):
    """A call on a model of a complete plan, and its cost."""

    call_plan: CallPlan
    cost: CallCost


class SearchSpace:
    """The call groups of a problem, with the methods that compute the times and memory of plans.

    They check the deadline, and raise OutOfTime once it has passed; so does the enumeration of candidates.
    """

    def __init__(self, problem: Problem, rates: Rates, deadline: Deadline | None = None) -> None:
        """Enumerate the candidates; None: there is no deadline.

        If the deadline passes, `is_whole` is False, and candidates on meshes of some sizes are missing.
        """
        self.deadline = deadline or Deadline()
        self.problem = problem
        self.rates = rates
        self.calls = problem.calls
        self.needs = dependencies(problem, rates)
        self.capacity = available_bytes(problem.cluster)
        gc.disable()  # Python's collector would visit all candidates again and again while they are made.
        try:
            self.groups, self.is_whole = find_call_groups(problem, rates, self.deadline)
        finally:
            gc.enable()
        names = [call.name for call in self.calls]
        self.memory = MemoryBounds(MemoryAccount(problem, self.deadline), self.groups, names)
        self._settled: dict[tuple[int, ...], dict[int, SettledCall]] = {}
        self._costs: dict[tuple[object, ...], CallCost] = {}
        self._refined = False
        """Whether settled calls may differ from their candidates in micro-batches."""
        self._known_moves: dict[tuple[object, ...], tuple[float, ...]] = {}
        self._group_of = {call: u for u, group in enumerate(self.groups) for call in group.calls}
        self._host_calls = [self._host_call(i) for i, call in enumerate(self.calls) if call.role is None]

    @cached_property
    def open_groups(self) -> list[CallGroup]:
        """The groups with array entries for all choices, not only for candidates."""
        return [group.with_open_choices(u) for u, group in enumerate(self.groups)]

    def _host_call(self, position: int) -> HostCall:
        call = self.calls[position]
        anchor, is_split = host_anchor(self.problem, call)
        group = None if anchor is None else self._group_of[self.calls.index(self.problem.graph[anchor])]
        numbers = np.array([1])
        if is_split and group is not None:
            numbers = np.unique(self.groups[group].replicas).astype(int)
        seconds = np.zeros(1 + max(numbers, default=1))
        workload = self.problem.workloads[call.name]
        seconds[numbers] = [workload.seconds_on(n) for n in numbers.tolist()]
        if (best := self._best_slices(call)) is not None:
            seconds[1] = best[1]
        return HostCall(position, group, is_split, seconds)

    def _best_slices(self, call: FunctionCall) -> tuple[int, float] | None:
        """Return the best number of slices of a call whose environments take turns, and its seconds."""
        slices = self.problem.workloads[call.name].slices
        return None if slices is None else slices.best(cores=self.problem.cluster.cores_per_host)

    def call_plans(self, chosen: Sequence[int]) -> dict[str, CallPlan]:
        """Return the CallPlan of every call; `host_anchor` decides where calls in plain Python run."""
        plans: dict[str, CallPlan] = {}
        for i, (call_plan, cost) in self.settled(chosen).items():
            predicted = {"seconds": float(f"{cost.seconds:.6g}")}
            plans[self.calls[i].name] = replace(call_plan, predicted=predicted)
        for call in self.calls:
            if call.role is None:
                anchor, is_split = host_anchor(self.problem, call)
                ranks = plans[anchor].layout.result_ranks if anchor is not None else (0,)
                ranks = ranks if is_split else ranks[:1]
                call_plan = CallPlan(Layout(ParallelStrategy(dp=len(ranks)), DeviceMesh(ranks)))
                if (best := self._best_slices(call)) is not None:
                    seconds = float(f"{best[1]:.6g}")
                    call_plan = replace(call_plan, ring=best[0], predicted={"seconds": seconds})
                plans[call.name] = call_plan
        return {call.name: plans[call.name] for call in self.problem.graph.order}

    def call_times(self, choices: np.ndarray) -> CallTimes:
        """Return the times and ranks of every call.

        The ranks of a plain Python call are undecided if the layout of its group is.
        """
        # Plans are the last axis in memory, so that operations on all of them read contiguous memory.
        seconds, first, stop = (np.zeros((len(self.calls), len(choices))).T for _ in range(3))
        for group, choice in zip(self.open_groups, choices.T, strict=True):
            seconds[:, group.calls] = group.seconds[choice]
            first[:, group.calls] = group.first[choice, None]
            stop[:, group.calls] = group.stop[choice, None]
        for owner, call in enumerate(self._host_calls, start=len(self.groups)):
            i = call.position
            if call.anchor is None:
                seconds[:, i] = call.seconds[1]
                stop[:, i] = 1  # It runs on rank 0.
                continue
            group = self.groups[call.anchor]
            choice = choices[:, call.anchor]
            is_decided = group.is_candidate(choice)
            candidate = np.where(is_decided, choice, 0)
            result_first = group.result_first[candidate]
            nowhere = placeholder_ranks(owner)
            if call.is_split:
                seconds[:, i] = np.where(is_decided, call.seconds[group.replicas[candidate]], 0.0)
            else:
                seconds[:, i] = call.seconds[1]
            first[:, i] = np.where(is_decided, result_first, nowhere.start)
            call_stop = group.stop[candidate] if call.is_split else result_first + 1
            stop[:, i] = np.where(is_decided, call_stop, nowhere.stop)
        return CallTimes(seconds, first, stop)

    def settled(self, chosen: Sequence[int]) -> dict[int, SettledCall]:
        """Return the calls on models of a plan by their positions. Generations have the best rows for which
        there is memory; all rows if not even one fits, as if memory were no limit."""
        key = tuple(int(index) for index in chosen)
        if key not in self._settled:
            self.deadline.check()
            calls = {}
            for group, index in zip(self.groups, key, strict=True):
                variants = group.candidates[index].variants
                plans = group.call_plans(index)
                for i, variant, call_plan in zip(group.calls, variants, plans, strict=True):
                    calls[i] = SettledCall(call_plan, variant.cost)
            generations = [group.calls[table.column] for group in self.groups for table in group.row_tables]
            fits = not generations or self.memory.counted_excess(key) <= 0
            for i in generations:
                if has_pinned_rows(self.problem, self.calls[i]):
                    continue
                calls[i] = self._with_best_rows(calls, i) if fits else self._with_all_rows(calls[i], i)
            self._settled[key] = calls
        return self._settled[key]

    def refine(self, chosen: Sequence[int], *, reserve: float) -> None:
        """Settle the calls of a plan with the micro-batches with which each is fastest, of all sizes that fit
        beside the rest of the plan; the candidates have some of these sizes only.

        They leave `reserve` bytes free on every rank, or as many as are free now. If a faster call makes the
        step longer, which the order of calls can cause, all keep their sizes.
        """
        before = self.exact_periods(np.array(chosen)[None])
        key = tuple(int(index) for index in chosen)
        account = self.memory.account
        calls = dict(self.settled(chosen))

        def excess(plans: Mapping[int, SettledCall]) -> float:
            return account.excess(ExecutionPlan({self.calls[i].name: s.call_plan for i, s in plans.items()}))

        free = min(reserve, -excess(calls))
        for i, now in list(calls.items()):
            call = self.calls[i]
            pinned = self.problem.pinned_options.get(call.name, {})
            if call.kind == "generate" or "micro_batch_tokens" in pinned:
                continue
            layout = now.call_plan.layout
            faster = []
            for size in micro_batch_sizes(self.problem.workloads[call.name], layout.strategy):
                call_plan = replace(now.call_plan, micro_batch_tokens=size)
                cost = cost_of(self.problem, self.rates, call, call_plan, layout.ranks)
                if cost.seconds < now.cost.seconds * (1 - _SAME):
                    faster.append(SettledCall(call_plan, cost))
            for settled in sorted(faster, key=lambda settled: settled.cost.seconds)[:_MOST_TRIALS]:
                if -excess({**calls, i: settled}) >= free:
                    calls[i] = settled
                    break
        unrefined, self._settled[key] = self._settled[key], calls
        self._refined = True
        if self.exact_periods(np.array(chosen)[None]) > before:
            self._settled[key] = unrefined

    def _with_all_rows(self, settled: SettledCall, position: int) -> SettledCall:
        at_one = settled.call_plan
        most = most_rows(self.problem.workloads[self.calls[position].name], at_one.layout.strategy)
        call_plan = replace(at_one, max_rows=most, kv_cache_gib=None)
        return SettledCall(call_plan, self._cost(position, call_plan))

    def _with_best_rows(self, calls: Mapping[int, SettledCall], position: int) -> SettledCall:
        """Return a generation with the rows and the cache with which it is fastest beside the other calls."""
        planned = self.problem.planned(self.calls[position])
        at_one = calls[position].call_plan
        work = planned.workload
        most = most_rows(work, at_one.layout.strategy)
        plans = {self.calls[i].name: settled.call_plan for i, settled in calls.items()}
        room = self.memory.account.room_for(planned, plans)
        best = SettledCall(at_one, self._cost(position, at_one))
        whole = largest(most, lambda rows: room(replace(at_one, max_rows=rows, kv_cache_gib=None)) >= 0)
        samples = rank_rows(self.problem, planned, at_one).all_samples
        equal = -(-samples // -(-samples // whole)) if whole else 1  # In as many waves as with `whole` rows.
        fewer = [n for n in sorted(set(row_numbers(work, at_one.layout.strategy))) if n < most]
        for rows in dict.fromkeys(filter(None, (whole, equal, *[n for n in fewer if n < whole][-2:]))):
            best = self._better(best, position, replace(at_one, max_rows=rows, kv_cache_gib=None))
        if whole == most:
            return best
        for rows in (most, *reversed(fewer)):
            call_plan = replace(at_one, max_rows=rows, kv_cache_gib=None)
            of_rank = rank_rows(self.problem, planned, call_plan)
            counted = min(of_rank.gib_of(of_rank.whole_tokens), work.kv_cache_gib or math.inf)
            gib = of_rank.cache_for(counted * GIB + room(call_plan)) if rows > whole else None
            if gib is None or room(call_plan := replace(call_plan, kv_cache_gib=gib)) < 0:
                continue
            found = self._better(best, position, call_plan)
            if found is best and best.call_plan.kv_cache_gib is not None:
                break  # The times have one minimum.
            best = found
        return best

    def _better(self, best: SettledCall, position: int, call_plan: CallPlan) -> SettledCall:
        """Return a generation with these options if it is faster than the best one, else that one."""
        cost = self._cost(position, call_plan)
        return SettledCall(call_plan, cost) if cost.seconds < best.cost.seconds else best

    def _cost(self, position: int, call_plan: CallPlan) -> CallCost:
        """Return the cost of a generation, which is the same on all meshes of one shape."""
        ranks = call_plan.layout.ranks
        cluster = self.problem.cluster
        shape = (cluster.kind_index(ranks), ranks_per_host(cluster, ranks), call_plan.layout.strategy)
        key = (position, shape, call_plan.max_rows, call_plan.kv_cache_gib, call_plan.offload)
        if key not in self._costs:
            self._costs[key] = cost_of(self.problem, self.rates, self.calls[position], call_plan, ranks)
        return self._costs[key]

    def exact_times(self, plans: np.ndarray) -> CallTimes:
        """Return the times and ranks of every call of complete plans, as they are settled."""
        times = self.call_times(plans)
        differ = self._refined or any(group.row_tables for group in self.groups)
        for k in range(len(plans) if differ else 0):
            for i, settled in self.settled(plans[k].tolist()).items():
                times.seconds[k, i] = settled.cost.seconds
        return times

    def periods(
        self, choices: np.ndarray, *, moving: np.ndarray | None = None, exact: bool = True,
        of_ranks: RankBytes | None = None,
    ) -> np.ndarray:
        """Return the seconds per step of plans: lower bounds without `exact`, or where choices are open.

        They are lower bounds for plans with generations, too, as these may have as many rows as fit a device;
        or, if the plans' `rank_bytes` are given, as many as may fit beside the rest of the plan.
        """
        self.deadline.check()
        seconds, first, stop = self.call_times(choices)
        if of_ranks is not None:
            self.memory.raise_to_rows(seconds, choices, of_ranks)
        return step_periods(
            self.problem.cluster, self.needs, seconds, first, stop, moving=moving, exact=exact)

    def quick_periods(self, choices: np.ndarray) -> np.ndarray:
        """Return lower bounds of the seconds per step that take less time to compute than `periods`."""
        self.deadline.check()
        seconds, first, stop = self.call_times(choices)
        return one_step_periods(self.needs, seconds, have_common_ranks(first, stop))

    def moving(self, choices: np.ndarray, *, most_new: float = math.inf) -> np.ndarray:
        """Return the seconds from the end of training until each copy of the weights is complete, shape (K,
        number of `needs.weights`).

        Reallocations with an end whose choice is open take 0 seconds, and so do those that were not priced
        before, apart from the `most_new` that come first among the plans.
        """
        seconds = np.zeros((len(choices), len(self.needs.weights)))
        for trainer, numbers in self.needs.copies.items():
            groups = [
                self._group_of[call]
                for call in (trainer, *(self.needs.weights[number].user for number in numbers))]
            columns = [self.memory.layouts[u].layout[choices[:, u]] for u in groups]
            layouts = np.stack(columns, axis=1)  # Their numbers; -1 where they are not decided.
            rows = np.flatnonzero((layouts[:, :2] >= 0).all(axis=1))
            distinct, first, which = np.unique(
                layouts[rows], axis=0, return_index=True, return_inverse=True)
            of_distinct = np.zeros((len(distinct), len(numbers)))
            for row in np.argsort(first).tolist():
                if (key := (trainer, *distinct[row].tolist())) not in self._known_moves:
                    if most_new <= 0:
                        continue
                    most_new -= 1
                    self.deadline.check()
                    self._known_moves[key] = self._arrivals(trainer, numbers, choices[rows[first[row]]])
                of_distinct[row] = self._known_moves[key]
            seconds[rows[:, None], numbers] = of_distinct[which.ravel()]
        return seconds

    def _arrivals(self, trainer: int, numbers: Sequence[int], choices: np.ndarray) -> tuple[float, ...]:
        """Return the seconds until these copies (`needs.weights`) of what a call trains are complete."""
        needed = [self.needs.weights[number] for number in numbers]
        layouts = []
        for call in (trainer, *(copy.user for copy in needed)):
            u = self._group_of[call]
            is_decided = self.groups[u].is_candidate(choices[u])
            layouts.append(self.groups[u].candidates[choices[u]].layout if is_decided else None)
        used = [self.problem.used_role(self.calls[copy.user], copy.role) for copy in needed]
        copies = list(zip(used, layouts[1:], strict=True))
        assert layouts[0] is not None, "the home is decided"
        return tuple(arrivals(self.rates, self.problem, self.calls[trainer], layouts[0], copies))

    def is_decided(self, choices: np.ndarray) -> np.ndarray:
        """Return which choices are candidates of their groups, rather than meshes or open; shape (K, U)."""
        columns = [group.is_candidate(choice) for group, choice in zip(self.groups, choices.T, strict=True)]
        return np.stack(columns, axis=1)

    def bounds(self, plans: np.ndarray) -> np.ndarray:
        """Return lower bounds of the seconds per step of complete plans, with reallocations."""
        return self.periods(plans, moving=self.moving(plans), of_ranks=self.memory.rank_bytes(plans))

    def exact_periods(self, plans: np.ndarray) -> np.ndarray:
        """Return the seconds per step of complete plans, with the best rows for which there is memory."""
        seconds, first, stop = self.exact_times(plans)
        return step_periods(
            self.problem.cluster, self.needs, seconds, first, stop, moving=self.moving(plans))
