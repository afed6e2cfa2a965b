"""Check of the memory that a whole plan needs on every rank, with remedies where it does not fit."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from realhf.cluster import Cluster
from realhf.plan import ExecutionPlan
from realhf.planner.memory.memory_account import MemoryAccount
from realhf.planner.memory.model_states import HOST_SHARE, available_bytes, fixed_reserve
from realhf.planner.workload.problem import PlannedCall, Problem
from realhf.user_input.units import format_bytes


class Peak(NamedTuple):
    """The largest need of one rank, and the call during which it occurs; `hosts` are those of its kind."""

    rank: int
    call: str
    bytes_by_use: Mapping[str, float]
    hosts: Cluster

    @property
    def num_bytes(self) -> float:
        return sum(self.bytes_by_use.values())

    @property
    def available(self) -> float:
        """The bytes of the rank's device that plans may use: all but the fixed parts of the reserve."""
        return available_bytes(self.hosts)

    @property
    def device_bytes(self) -> float:
        return self.hosts.device_memory_bytes

    @property
    def excess_bytes(self) -> float:
        """The bytes that the rank lacks; at most 0 if its need fits."""
        return self.num_bytes - self.available

    @property
    def reserve(self) -> Mapping[str, float]:
        return fixed_reserve(self.hosts)


@dataclass(frozen=True)
class MemoryCheck:
    """The peak of every rank, and that of the fullest rank, which has least left, during each call."""

    peaks: Mapping[int, Peak]
    by_call: Mapping[str, Peak]
    on_host: Mapping[str, float] = field(default_factory=dict)
    """Role -> the most bytes of a rank's offloaded optimizer in the memory of its host."""
    host_bytes: float = 0.0
    """The most bytes of offloaded optimizers on a host."""

    @property
    def fullest(self) -> Peak:
        return max(self.peaks.values(), key=lambda peak: peak.excess_bytes)

    @property
    def fits(self) -> bool:
        """Whether the plan leaves the whole reserve free on every rank, as all plans of the search do."""
        return self.fullest.excess_bytes <= 0

    @property
    def is_tight(self) -> bool:
        """Whether the plan does not fit, but would if the allocator could use all memory that is free."""
        return not self.fits and all(self.share(peak) <= 1 for peak in self.peaks.values())

    def share(self, peak: Peak) -> float:
        """Return the fraction of the device that is in use, with the reserve apart from fragmentation."""
        used = peak.num_bytes + sum(peak.reserve.values()) - peak.reserve["fragmentation"]
        return used / peak.device_bytes


def check_memory(problem: Problem, plan: ExecutionPlan, account: MemoryAccount | None = None) -> MemoryCheck:
    """Return the memory that a plan needs on every rank."""
    account = account or MemoryAccount(problem)
    memory = account.of_plan(plan)
    needs = memory.needs()
    names = list(needs)
    need = np.stack([needs[name] for name in names])
    busy = np.flatnonzero(np.isfinite(need).any(axis=0)).tolist()
    largest = need.argmax(axis=0)

    def peak(rank: int, name: str) -> Peak:
        kind = problem.cluster.kind_index((rank,))
        assert kind is not None
        return Peak(rank, name, memory.bytes_by_use(rank, name), problem.cluster.kinds[kind])

    fullest = zip(names, (need - account.available).argmax(axis=1).tolist(), strict=True)
    return MemoryCheck(
        {rank: peak(rank, names[largest[rank]]) for rank in busy},
        {name: peak(rank, name) for name, rank in fullest},
        {role: float(sizes.max()) for role, sizes in memory.on_host.items()},
        memory.host_bytes(problem.cluster.devices_per_host))


def require_fit(problem: Problem, plan: ExecutionPlan, *, allow_tight: bool = False) -> MemoryCheck:
    """Return the check of a plan that fits, or is tight if that is allowed.

    Raises ValueError for another one; the message names the call, the rank, its need and the nearest remedy.
    """
    account = MemoryAccount(problem)
    check = check_memory(problem, plan, account)
    _require_fit_on_hosts(problem, check)
    if check.fits or (allow_tight and check.is_tight):
        return check
    peak = check.fullest
    largest = sorted(peak.bytes_by_use.items(), key=lambda item: -item[1])[:3]
    shown = ", ".join(f"{name} {format_bytes(size)}" for name, size in largest)
    device = "a device's" if len(problem.cluster.kinds) == 1 else "its"
    raise ValueError(
        f"calls.{peak.call} needs {format_bytes(peak.num_bytes)} on rank {peak.rank} ({shown}), but "
        f"{format_bytes(peak.available)} of {device} {format_bytes(peak.device_bytes)} "
        f"are available; {_remedy(problem, plan, account)}")


def _require_fit_on_hosts(problem: Problem, check: MemoryCheck) -> None:
    """Raise ValueError if the offloaded optimizers of a host's ranks take more than its memory."""
    memory = problem.cluster.host_memory_bytes
    if check.host_bytes > HOST_SHARE * memory:
        role = max(check.on_host, key=lambda name: check.on_host[name])
        raise ValueError(
            f"{role}.optimizer.offload: the state takes {format_bytes(check.host_bytes)} of a host, "
            f"and {format_bytes(HOST_SHARE * memory)} are available there: use more hosts, or train adapters")


def _remedy(problem: Problem, plan: ExecutionPlan, account: MemoryAccount) -> str:
    """Return a sentence with the nearest changes of the plan that make it fit on every rank."""
    changes: list[str] = []
    for _ in range(2 * len(problem.model_calls)):
        check = check_memory(problem, plan, account)
        if check.fits:
            return f"it fits with {' and '.join(changes)}"
        peak = check.fullest
        for description, changed in _changes(problem, plan, peak):
            if check_memory(problem, changed, account).peaks[peak.rank].excess_bytes <= 0:
                changes.append(description)
                plan = changed
                break
        else:
            break
    return "neither smaller micro-batches, recompute nor offload help: spread the calls over more ranks"


def _planned_of(problem: Problem, plan: ExecutionPlan, peak: Peak) -> tuple[PlannedCall, str | None]:
    """Return the peak's call, and the name of the plan's entry that decides about it, if it has one."""
    calls = (*map(problem.planned, problem.model_calls), *problem.evaluations)
    planned = next(planned for planned in calls if planned.name == peak.call)
    return planned, next((name for name in planned.plan_names if name in plan.calls), None)


def _changes(problem: Problem, plan: ExecutionPlan, peak: Peak) -> Iterator[tuple[str, ExecutionPlan]]:
    """Yield changes that reduce the memory of the peak's call, or of what rests on its rank."""

    def change(name: str, **fields: Any) -> tuple[str, ExecutionPlan]:
        new = replace(plan[name], **fields)
        text = ", ".join(f"{key}: {str(value).lower()}" for key, value in fields.items())
        return f"calls.{name}.{text}", ExecutionPlan({**plan.calls, name: new})

    planned, name = _planned_of(problem, plan, peak)
    if name is not None:
        call_plan = plan[name]
        work = planned.workload
        if planned.kind == "generate":
            rows = call_plan.max_rows or work.max_rows
            while (rows := rows // 2) >= 1:
                yield change(name, max_rows=rows)
        else:
            tokens = call_plan.micro_batch_tokens
            while (tokens := tokens // 2) >= work.group_tokens:
                yield change(name, micro_batch_tokens=tokens)
        if planned.kind == "train_step":
            yield change(name, recompute=True)
            yield change(name, recompute=True, micro_batch_tokens=max(1, int(work.group_tokens)))
    for other in problem.model_calls:
        if problem.may_offload(other) and peak.rank in plan[other.name].layout:
            yield change(other.name, offload=True)
