"""MemoryCheck: what a plan needs in memory, rank by rank, and what to change where it does not fit.

A rank always holds what rests on it: the parameters of the roles that it owns, for trained ones gradients and
optimizer, and the copies of roles that it runs in other layouts. As its calls exclude each other, the largest
of them comes on top.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from realhf.cluster import Cluster
from realhf.graph import FunctionCall
from realhf.kv_blocks import SHARE_OF_FREE
from realhf.layout import Layout
from realhf.plan import CallPlan, ExecutionPlan
from realhf.planner.memory import call_bytes
from realhf.planner.model_states import training_bytes, weights_bytes
from realhf.planner.problem import Problem
from realhf.planner.shard import num_params
from realhf.realloc.schedule import STAGING_BYTES
from realhf.units import format_bytes

_FRAGMENTATION = 0.05  # Share of a device's memory that the allocator cannot use.
_CONTEXT_BYTES = 1 << 30  # Of libraries and of communication buffers; a Python process on CPU takes no less.


def available_bytes(cluster: Cluster) -> float:
    """Of a device's memory, what plans may use.

    The rest is for fragmentation (5 %), libraries and communication buffers (1 GiB) and what is on its way
    in a reallocation.
    """
    usable = (1 - _FRAGMENTATION) * cluster.device_memory_bytes - _CONTEXT_BYTES - STAGING_BYTES
    return max(0.0, usable)


class Peak(NamedTuple):
    """The most that one rank needs: while `call` runs. `parts` in bytes, what rests first."""

    rank: int
    call: str
    parts: Mapping[str, float]

    @property
    def num_bytes(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class MemoryCheck:
    """The peak of every rank, the most that a rank needs while each call runs, and what a device has."""

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
    """Memory of every rank under a plan."""
    homes = _homes(problem, plan)
    known: dict[tuple[str, int], dict[str, float]] = {}
    peaks = dict[int, Peak]()
    calls = dict[str, float]()
    for rank in sorted({rank for call in problem.model_calls for rank in plan[call.name].layout.ranks}):
        resting = _resting(problem, plan, homes, rank)
        here = []
        for call in (call for call in problem.model_calls if rank in plan[call.name].layout):
            running = _running(problem, plan, call, rank, known)
            here.append(Peak(rank, call.name, _together(problem, plan, call, resting, running)))
        peaks[rank] = max(here, key=lambda peak: peak.num_bytes)
        for peak in here:
            calls[peak.call] = max(calls.get(peak.call, 0.0), peak.num_bytes)
    return MemoryCheck(peaks, calls, available_bytes(problem.cluster))


def require_fit(problem: Problem, plan: ExecutionPlan) -> MemoryCheck:
    """The proof of a plan that fits. Raises ValueError that names call, rank, need and the nearest remedy."""
    proof = check_memory(problem, plan)
    if proof.fits:
        return proof
    peak = proof.fullest
    largest = sorted(peak.parts.items(), key=lambda part: -part[1])[:3]
    shown = ", ".join(f"{name} {format_bytes(size)}" for name, size in largest)
    raise ValueError(
        f"calls.{peak.call} needs {format_bytes(peak.num_bytes)} on rank {peak.rank} ({shown}), but "
        f"{format_bytes(proof.available)} of a device's {format_bytes(problem.cluster.device_memory_bytes)} "
        f"are available; {_remedy(problem, plan)}"
    )


def _homes(problem: Problem, plan: ExecutionPlan) -> dict[str, Layout]:
    homes: dict[str, Layout] = {}
    for call in problem.model_calls:
        assert call.role is not None
        if call.kind == "train_step" or call.role not in homes:
            homes[call.role] = plan[call.name].layout
    return homes


def _resting(
    problem: Problem, plan: ExecutionPlan, homes: Mapping[str, Layout], rank: int
) -> dict[str, float]:
    """What is on a rank all the time, by what it is."""
    parts: dict[str, float] = {}
    offloads = {call.role for call in problem.model_calls if plan[call.name].offload}
    holders: dict[tuple[object, ...], str] = {}  # Of frozen weights that several roles may share.
    for name, role in problem.roles.items():
        if role.source is not None and rank in homes[name] and name not in offloads:
            holders.setdefault((role.source, *_shard(homes[name], rank)), name)
    for name, role in problem.roles.items():
        home = homes[name]
        offloaded = name in offloads
        layouts = dict.fromkeys([home, *(plan[call.name].layout for call in problem.graph.of_role(name))])
        for layout in layouts if not offloaded else ():
            if rank not in layout:
                continue
            if layout != home and rank in home and _shard(layout, rank) == _shard(home, rank):
                continue  # The same memory.
            what = f"{name} weights" if layout == home else f"{name} copy"
            stage = layout.coordinate(rank).pp
            size = weights_bytes(role, layout.strategy, stage)
            if holders.get((role.source, *_shard(layout, rank)), name) != name:
                size -= num_params(role.spec, layout.strategy, stage) * role.itemsize
            parts[what] = parts.get(what, 0.0) + size
        if role.trainable and rank in home:
            stage = home.coordinate(rank).pp
            parts[f"{name} optimizer"] = training_bytes(role, home.strategy, stage)
    return parts


def _shard(layout: Layout, rank: int) -> tuple[int, ...]:
    """Ranks with equal shards have equal ones of these."""
    at = layout.coordinate(rank)
    return (layout.pp, at.pp, layout.tp, at.tp, layout.ep, at.dp % layout.ep)


def _running(
    problem: Problem, plan: ExecutionPlan, call: FunctionCall, rank: int,
    known: dict[tuple[str, int], dict[str, float]],
) -> dict[str, float]:  # fmt: skip
    """What a call adds on a rank, by part."""
    how = plan[call.name]
    role = problem.role_of(call)
    stage = how.layout.coordinate(rank).pp
    if (call.name, stage) not in known:
        work = problem.workloads[call.name]
        work = replace(work, max_rows=how.max_rows or work.max_rows)
        known[call.name, stage] = call_bytes(
            role, call.kind, work, how.layout.strategy, stage,
            micro_batch_tokens=how.micro_batch_tokens, recompute=how.recompute,
            fused=problem.cluster.device_type == "cuda",
        )  # fmt: skip
        if how.offload:
            weights = weights_bytes(role, how.layout.strategy, stage)
            known[call.name, stage]["loaded weights"] = weights
    return known[call.name, stage]


def _together(
    problem: Problem, plan: ExecutionPlan, call: FunctionCall, resting: Mapping[str, float],
    running: Mapping[str, float],
) -> dict[str, float]:  # fmt: skip
    """Return all that a rank holds while a call runs. A cache whose size nobody has set takes no more than a
    share of what is free, as in inference/cache_limit.py; its rows wait."""
    parts = {**resting, **running}
    work = problem.workloads[call.name]
    if "kv_cache" not in running or work.kv_cache_gib is not None:
        return parts
    resting_bytes = sum(resting.values()) + running.get("loaded weights", 0.0)
    free = max(0.0, available_bytes(problem.cluster) - resting_bytes)
    of_one_row = running["kv_cache"] / (plan[call.name].max_rows or work.max_rows)
    return parts | {"kv_cache": min(running["kv_cache"], max(SHARE_OF_FREE * free, of_one_row))}


def _remedy(problem: Problem, plan: ExecutionPlan) -> str:
    """The nearest changes of the plan under which every rank has enough."""
    made: list[str] = []
    for _ in range(2 * len(problem.model_calls)):
        proof = check_memory(problem, plan)
        if proof.fits:
            return f"it fits with {' and '.join(made)}"
        peak = proof.fullest
        for what, changed in _changes(problem, plan, peak):
            if check_memory(problem, changed).peaks[peak.rank].num_bytes <= proof.available:
                made = [*made, what]
                plan = changed
                break
        else:
            break
    return "neither smaller micro-batches, recompute nor offload help: spread the calls over more ranks"


def _changes(problem: Problem, plan: ExecutionPlan, peak: Peak) -> Iterator[tuple[str, ExecutionPlan]]:
    call = problem.graph[peak.call]
    how = plan[peak.call]

    def change(name: str, **fields: object) -> tuple[str, ExecutionPlan]:
        new: CallPlan = replace(plan[name], **fields)  # type: ignore[arg-type]
        text = ", ".join(f"{key}: {str(value).lower()}" for key, value in fields.items())
        return f"calls.{name}.{text}", ExecutionPlan({**plan.calls, name: new})

    work = problem.workloads[call.name]
    if call.kind == "generate":
        rows = how.max_rows or work.max_rows
        while (rows := rows // 2) >= 1:
            yield change(call.name, max_rows=rows)
    else:
        tokens = how.micro_batch_tokens
        while (tokens := tokens // 2) >= work.tokens:
            yield change(call.name, micro_batch_tokens=tokens)
    if call.kind == "train_step":
        yield change(call.name, recompute=True)
        yield change(call.name, recompute=True, micro_batch_tokens=max(1, int(work.tokens)))
    for other in problem.model_calls:
        alone = sum(c.role == other.role for c in problem.graph.calls) == 1
        role = problem.role_of(other)
        rests = not role.trainable and role.follows is None and peak.rank in plan[other.name].layout
        if alone and rests and problem.cluster.host_memory is not None:
            yield change(other.name, offload=True)
