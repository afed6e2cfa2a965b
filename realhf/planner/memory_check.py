"""Check of the memory that a whole plan needs on every rank, with remedies where it does not fit.

A rank always holds the parameters of the roles whose home it is part of, with gradients and optimizer for
trained ones, and copies of the roles that it runs in other layouts. A rank runs one call at a time, so only
the largest call is added.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from realhf.kv_blocks import SHARE_OF_FREE
from realhf.layout import Layout
from realhf.plan import CallPlan, ExecutionPlan, home_layouts
from realhf.planner.activation_memory import CallMemory
from realhf.planner.call_memory import running_memory
from realhf.planner.model_states import available_bytes, shard_of, training_bytes, weights_bytes
from realhf.planner.problem import Problem
from realhf.planner.shard import num_params
from realhf.units import format_bytes


class Peak(NamedTuple):
    """The largest need of one rank, and the call during which it occurs. `parts` are in bytes."""

    rank: int
    call: str
    parts: Mapping[str, float]

    @property
    def num_bytes(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class MemoryCheck:
    """The peak of every rank, the largest need of a rank during each call, and a device's available bytes."""

    peaks: Mapping[int, Peak]
    calls: Mapping[str, float]
    available: float

    @property
    def fullest(self) -> Peak:
        return max(self.peaks.values(), key=lambda peak: peak.num_bytes)

    @property
    def fits(self) -> bool:
        return self.fullest.num_bytes <= self.available


def check_memory(problem: Problem, plan: ExecutionPlan) -> MemoryCheck:
    """Return the memory that a plan needs on every rank."""
    homes = home_layouts(problem.graph, plan, problem.roles)
    running = {
        call.name: [running_memory(problem, call, plan[call.name], stage)
                    for stage in range(plan[call.name].layout.pp)]
        for call in problem.model_calls
    }  # fmt: skip
    peaks = dict[int, Peak]()
    calls = dict[str, float]()
    for rank in sorted({rank for name in running for rank in plan[name].layout.ranks}):
        resting = _resting(problem, plan, homes, rank)
        for name in (name for name in running if rank in plan[name].layout):
            memory = running[name][plan[name].layout.coordinate(rank).pp]
            peak = Peak(rank, name, _with_limited_cache(problem, resting, memory, name, plan[name]))
            calls[name] = max(calls.get(name, 0.0), peak.num_bytes)
            if rank not in peaks or peak.num_bytes > peaks[rank].num_bytes:
                peaks[rank] = peak
    return MemoryCheck(peaks, calls, available_bytes(problem.cluster))


def require_fit(problem: Problem, plan: ExecutionPlan) -> MemoryCheck:
    """Return the check of a plan that fits.

    Raises ValueError if it does not; the message names the call, the rank, its need and the nearest remedy.
    """
    check = check_memory(problem, plan)
    if check.fits:
        return check
    peak = check.fullest
    largest = sorted(peak.parts.items(), key=lambda part: -part[1])[:3]
    shown = ", ".join(f"{name} {format_bytes(size)}" for name, size in largest)
    raise ValueError(
        f"calls.{peak.call} needs {format_bytes(peak.num_bytes)} on rank {peak.rank} ({shown}), but "
        f"{format_bytes(check.available)} of a device's {format_bytes(problem.cluster.device_memory_bytes)} "
        f"are available; {_remedy(problem, plan)}"
    )


def _resting(
    problem: Problem, plan: ExecutionPlan, homes: Mapping[str, Layout], rank: int
) -> dict[str, float]:
    """Return the bytes that a rank always holds, by part."""
    parts: dict[str, float] = {}
    offloads = {call.role for call in problem.model_calls if plan[call.name].offload}
    holders: dict[tuple[object, ...], str] = {}  # The first role that holds each shard of a source.
    for name, role in problem.roles.items():
        if role.source is not None and rank in homes[name] and name not in offloads:
            holders.setdefault((role.source, *shard_of(homes[name], rank)), name)
    for name, role in problem.roles.items():
        home = homes[name]
        offloaded = name in offloads
        layouts = dict.fromkeys([home, *(plan[call.name].layout for call in problem.graph.of_role(name))])
        for layout in layouts if not offloaded else ():
            if rank not in layout:
                continue
            if layout != home and rank in home and shard_of(layout, rank) == shard_of(home, rank):
                continue  # Both are the same memory.
            use = f"{name} weights" if layout == home else f"{name} copy"
            stage = layout.coordinate(rank).pp
            size = weights_bytes(role, layout.strategy, stage)
            if holders.get((role.source, *shard_of(layout, rank)), name) != name:
                size -= num_params(role.spec, layout.strategy, stage) * role.itemsize
            parts[use] = parts.get(use, 0.0) + size
        if role.trainable and rank in home:
            stage = home.coordinate(rank).pp
            parts[f"{name} optimizer"] = training_bytes(role, home.strategy, stage)
    return parts


def _with_limited_cache(
    problem: Problem, resting: Mapping[str, float], running: CallMemory, name: str, call_plan: CallPlan,
) -> dict[str, float]:  # fmt: skip
    """Return all that a rank holds while a call runs, by part.

    A cache without a limit set by the user takes no more than a share of the free memory, as in
    inference/cache_limit.py; rows that it has no blocks for wait.
    """
    work = problem.workloads[name]
    if running.kv_cache and work.kv_cache_gib is None:
        resting_bytes = sum(resting.values()) + running.loaded_weights
        free = max(0.0, available_bytes(problem.cluster) - resting_bytes)
        of_one_row = running.kv_cache / (call_plan.max_rows or work.max_rows)
        limited = min(running.kv_cache, max(SHARE_OF_FREE * free, of_one_row))
        running = running._replace(kv_cache=limited)
    return {**resting, **running.by_use()}


def _remedy(problem: Problem, plan: ExecutionPlan) -> str:
    """Return a sentence with the nearest changes of the plan that make it fit on every rank."""
    changes: list[str] = []
    for _ in range(2 * len(problem.model_calls)):
        check = check_memory(problem, plan)
        if check.fits:
            return f"it fits with {' and '.join(changes)}"
        peak = check.fullest
        for description, changed in _changes(problem, plan, peak):
            if check_memory(problem, changed).peaks[peak.rank].num_bytes <= check.available:
                changes.append(description)
                plan = changed
                break
        else:
            break
    return "neither smaller micro-batches, recompute nor offload help: spread the calls over more ranks"


def _changes(problem: Problem, plan: ExecutionPlan, peak: Peak) -> Iterator[tuple[str, ExecutionPlan]]:
    """Yield changes that reduce the memory of the peak's call, or of what rests on its rank."""
    call = problem.graph[peak.call]
    call_plan = plan[peak.call]

    def change(name: str, **fields: Any) -> tuple[str, ExecutionPlan]:
        new = replace(plan[name], **fields)
        text = ", ".join(f"{key}: {str(value).lower()}" for key, value in fields.items())
        return f"calls.{name}.{text}", ExecutionPlan({**plan.calls, name: new})

    work = problem.workloads[call.name]
    if call.kind == "generate":
        rows = call_plan.max_rows or work.max_rows
        while (rows := rows // 2) >= 1:
            yield change(call.name, max_rows=rows)
    else:
        tokens = call_plan.micro_batch_tokens
        while (tokens := tokens // 2) >= work.group_tokens:
            yield change(call.name, micro_batch_tokens=tokens)
    if call.kind == "train_step":
        yield change(call.name, recompute=True)
        yield change(call.name, recompute=True, micro_batch_tokens=max(1, int(work.group_tokens)))
    for other in problem.model_calls:
        if problem.may_offload(other) and peak.rank in plan[other.name].layout:
            yield change(other.name, offload=True)
