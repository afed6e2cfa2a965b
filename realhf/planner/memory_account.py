"""The bytes that every rank needs under a plan, by use: counted, checked with remedies, and shown.

`MemoryAccount` is the only place that adds up a rank's memory. `check_memory` and `require_fit` ask it for
given plans, and the search asks it when its bounds (`memory_bounds.py`) do not decide whether a plan fits.

A rank always holds the parameters of the roles whose home it is part of, with the optimizer of trained ones
unless it is offloaded, copies of the roles that it runs in other layouts, and its communicators. Equal shards
of frozen weights from one source count once (`runtime/weights/engine_store.py`). A rank runs one call at a
time, so only the largest call is added. Gradients exist during train steps only.

Arrays have one entry per rank of the cluster.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from realhf.cluster import Cluster
from realhf.execution_plan import CallPlan, ExecutionPlan, home_layouts
from realhf.layout import MAX_RANKS, Layout
from realhf.models.kv_blocks import cache_limit
from realhf.models.model_config import MegatronConfig
from realhf.planner import shard
from realhf.planner.call_memory import CallMemory, RunningMemory
from realhf.planner.communicator_memory import CommunicatorMemory, Use, use_of
from realhf.planner.deadline import Deadline
from realhf.planner.problem import PlannedCall, Problem
from realhf.planner.rows import GIB
from realhf.planner.shard import HOST_SHARE, available_bytes, fixed_reserve
from realhf.user_input.units import format_bytes

_STATES = {
    "weights": shard.base_weights_bytes, "adapters": shard.adapter_bytes,
    "gradients": shard.gradient_bytes, "optimizer": shard.optimizer_bytes}
_COLUMNS = ("weights", "gradients", "optimizer", "cache", "activations", "reserve")
_ENDINGS = {
    "weights": "weights", "copy": "weights", "merged": "weights", "packed": "weights",
    "gradients": "gradients", "optimizer": "optimizer", "cache": "cache", "kv_cache": "cache",
    "communicators": "reserve", "context": "reserve", "workspaces": "reserve", "staging": "reserve"}
"""The last word of a use -> its column; other uses are activations."""
_RESERVED = ("context", "workspaces", "staging")  # What of the reserve is in use.


# The account


class RankShards(NamedTuple):
    """Every rank's pipeline stage in a layout (-1 outside), and a number that is equal for equal shards."""

    stage: np.ndarray
    shard: np.ndarray

    @property
    def is_inside(self) -> np.ndarray:
        return self.stage >= 0

    def equals(self, other: "RankShards") -> np.ndarray:
        """Return which ranks hold the same shard in both layouts."""
        return self.is_inside & (self.shard == other.shard)


class CallBytes(NamedTuple):
    """The bytes that a call adds on every rank while it runs, by use; `is_here` is where it runs."""

    is_here: np.ndarray
    by_use: dict[str, np.ndarray]

    @property
    def num_bytes(self) -> np.ndarray:
        return sum(self.by_use.values(), start=np.zeros(len(self.is_here)))


@dataclass(frozen=True)
class PlanMemory:
    """The bytes that always rest on every rank, by use, and those that each call adds, by its name.

    `on_host` are the bytes of each rank in the memory of its host, by use: offloaded optimizers and frozen
    weights.
    """

    resting: Mapping[str, np.ndarray]
    running: Mapping[str, CallBytes]
    on_host: Mapping[str, np.ndarray]

    @property
    def resting_bytes(self) -> np.ndarray:
        return sum(self.resting.values(), start=np.zeros(1))

    def needs(self) -> dict[str, np.ndarray]:
        """Return the bytes of every rank while each call runs; -infinity where it does not run."""
        resting = self.resting_bytes
        return {
            name: np.where(call.is_here, resting + call.num_bytes, -np.inf)
            for name, call in self.running.items()}

    def excess(self, available: np.ndarray) -> float:
        """Return the most bytes that a rank lacks of what it has available; below 0 if none lacks any."""
        return float(max((need - available).max() for need in self.needs().values()))

    def bytes_by_use(self, rank: int, call: str) -> dict[str, float]:
        """Return the bytes that a rank needs while a call runs, by use, without uses that take nothing."""
        both = {**self.resting, **self.running[call].by_use}
        return {use: float(sizes[rank]) for use, sizes in both.items() if sizes[rank] > 0}


class MemoryAccount:
    """Counts the memory of plans of one problem; remembers what it has counted for calls and layouts."""

    def __init__(self, problem: Problem, deadline: Deadline | None = None) -> None:
        """Set up an account, which counts no more plans after the deadline: it raises OutOfTime."""
        self.problem = problem
        self.deadline = deadline or Deadline()
        self.num_ranks = problem.cluster.num_devices
        self.available = np.concatenate([
            np.full(len(ranks), shard.available_bytes(kind))
            for ranks, kind in problem.cluster.ranks_by_kind])
        self.available_on_hosts = np.concatenate([
            np.full(kind.num_hosts, HOST_SHARE * kind.host_memory_bytes) for kind in problem.cluster.kinds])
        self.communicators = CommunicatorMemory(problem.cluster, self.num_ranks)
        self._rank_shards: dict[Layout, RankShards] = {}
        self._kinds: dict[tuple[int, ...], int] = {}
        self._states: dict[tuple[str, str, Layout], np.ndarray] = {}
        self._tables: dict[tuple[object, ...], np.ndarray] = {}

    def of_plan(self, plan: ExecutionPlan) -> PlanMemory:
        self.deadline.check()
        return _PlanAccount(self, plan).total()

    def excess(self, plan: ExecutionPlan) -> float:
        """Return the most bytes that a device or a host lacks in a plan; at most 0 if none lacks any."""
        memory = self.of_plan(plan)
        on_hosts = float((self.on_hosts(memory) - self.available_on_hosts).max())
        return max(memory.excess(self.available), on_hosts if memory.on_host else -np.inf)

    def on_hosts(self, memory: PlanMemory) -> np.ndarray:
        """Return the bytes that are offloaded to each host."""
        total = sum(memory.on_host.values(), start=np.zeros(self.num_ranks))
        by_host: np.ndarray = total.reshape(-1, self.problem.cluster.devices_per_host).sum(axis=1)
        return by_host

    def rank_shards(self, layout: Layout) -> RankShards:
        """Return the stage and the shard of every rank."""
        if layout not in self._rank_shards:
            stage = np.full(self.num_ranks, -1)
            shard = np.full(self.num_ranks, -1)
            pp, dp, _, tp = np.indices(layout.grid.shape)
            kind = self._kinds.setdefault((layout.pp, layout.tp, layout.ep, layout.vp), len(self._kinds))
            stage[layout.grid] = pp
            index = (pp * layout.tp + tp) * layout.ep + dp % layout.ep
            shard[layout.grid] = kind * MAX_RANKS**2 + index
            self._rank_shards[layout] = RankShards(stage, shard)
        return self._rank_shards[layout]

    def state_bytes(self, state: str, role_name: str, layout: Layout) -> np.ndarray:
        """Return the bytes of a state of a role (see `_STATES`) on every rank of a layout."""
        key = (state, role_name, layout)
        if key not in self._states:
            role = self.problem.roles[role_name]
            role = role.in_int8 if layout.form == "int8" else role
            stages = range(layout.pp)
            by_stage = np.array([_STATES[state](role, layout.strategy, stage) for stage in stages], float)
            here = self.rank_shards(layout)
            self._states[key] = by_stage[here.stage] * here.is_inside
        return self._states[key]

    def room_for(self, planned: PlannedCall, plans: Mapping[str, CallPlan]) -> Callable[[CallPlan], float]:
        """Return a function that says how many bytes a plan leaves on the fullest rank if a generation of it
        has other rows and another cache; below 0 if it lacks some."""

        def left(call_plan: CallPlan) -> float:
            whole = ExecutionPlan({**plans, planned.name: call_plan})
            return -self.of_plan(whole).excess(self.available)

        now = plans[planned.name]
        if planned.workload.keeps_cache or now.offload or self.problem.evaluations:
            return left  # Its rows count in other calls, too, or its need depends on them.
        stage = self.rank_shards(now.layout).stage
        free = self.available - self.of_plan(ExecutionPlan(plans)).resting_bytes
        room = np.array([free[stage == number].min() for number in range(now.layout.pp)])

        def left_beside(call_plan: CallPlan) -> float:
            return float((room - self.running_table(planned, call_plan).sum(axis=0)).min())

        return left_beside

    def running_table(self, planned: PlannedCall, call_plan: CallPlan) -> np.ndarray:
        """Return the bytes of each use (CallMemory) on each stage, (uses, stages), with a whole cache."""
        limits = (call_plan.max_rows, call_plan.kv_cache_gib)
        options = (call_plan.micro_batch_tokens, call_plan.recompute, call_plan.offload)
        key = (planned.name, call_plan.layout.strategy, *limits, *options)
        if key not in self._tables:
            running = RunningMemory(self.problem, planned, call_plan)
            memories = [running.on(stage) for stage in range(call_plan.layout.pp)]
            self._tables[key] = np.array(memories).T
        return self._tables[key]


class _PlanAccount:
    """The count for one plan."""

    def __init__(self, account: MemoryAccount, plan: ExecutionPlan) -> None:
        self._account = account
        self._problem = problem = account.problem
        self._homes = home_layouts(problem.graph, plan, problem.roles)
        self._calls = problem.planned_calls(plan, self._homes)
        self._offloaded = {call.role for call in problem.model_calls if plan[call.name].offload}
        self._layouts: dict[str, list[Layout]] = {role: [home] for role, home in self._homes.items()}
        for planned, call_plan in self._calls:
            layout = call_plan.layout
            # A copy of its own, even where training is.
            if planned.workload.weights == "int8":
                layout = replace(layout, form="int8")
            elif planned.kind == "generate" and isinstance(
                problem.roles[planned.role].config, MegatronConfig):
                layout = replace(layout, form="native")
            for role in (planned.role, *planned.reads):
                used = layout if role == planned.role else call_plan.layout
                if used not in (layouts := self._layouts[role]):
                    layouts.append(used)

    def total(self) -> PlanMemory:
        """Return all that rests on the ranks, and what each call adds."""
        resting = dict(self._resting())
        held = sum(resting.values(), start=np.zeros(self._account.num_ranks))
        running = {}
        for planned, call_plan in self._calls:
            call = self._running(planned, call_plan, held)
            if planned.workload.keeps_cache:  # It stays between the rounds.
                resting[f"{planned.role} kept cache"] = call.by_use.pop("kv_cache")
            running[planned.name] = call
        on_host = {
            f"{name} optimizer": self._account.state_bytes("optimizer", name, self._layouts[name][0])
            for name, role in self._problem.roles.items()
            if role.trainable and self._problem.offloads_optimizer(role)}
        for name in self._problem.roles:
            if name in self._offloaded:
                on_host[f"{name} weights"] = self._account.state_bytes("weights", name, self._homes[name])
        return PlanMemory(resting, running, on_host)

    # What always rests on a rank

    def _resting(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the bytes that every rank always holds, by use."""
        size = self._account.state_bytes
        for name, role in self._problem.roles.items():
            home, *copies = self._layouts[name]
            if name not in self._offloaded:
                yield f"{name} weights", self._weights(name, home)
                if copies:
                    yield f"{name} copy", np.sum([self._weights(name, layout) for layout in copies], axis=0)
            if role.trainable and not self._problem.offloads_optimizer(role):
                yield f"{name} optimizer", size("optimizer", name, home)
        if self._problem.cluster.device_type == "cuda":
            yield "communicators", self._communicators()

    def _weights(self, name: str, layout: Layout) -> np.ndarray:
        """Return the bytes of a role's weights in a layout, apart from those in shared memory."""
        size = self._account.state_bytes
        weights = size("weights", name, layout) * ~self._is_shared(name, layout)
        if layout.form == "int8":
            weights = weights + self._quantised_source(name, layout)
        if self._problem.roles[name].lora is not None:
            shards = self._account.rank_shards
            is_apart = layout == self._homes[name] or ~shards(layout).equals(shards(self._homes[name]))
            weights = weights + size("adapters", name, layout) * is_apart
        return weights

    def _quantised_source(self, name: str, layout: Layout) -> np.ndarray:
        """Return the bytes at home of what is quantised for a copy in another place.

        Ranks that hold the same part in the copy quantise into it. Otherwise the replicas, which share the
        optimizer, each have an equal part.
        """
        home = self._homes[name]
        role = self._problem.roles[name]
        numel = np.array([
            shard.int8_params(role.generating.config, home.strategy, stage)[0] for stage in range(home.pp)])
        here = self._account.rank_shards(home)
        parts = home.strategy.num_replicas if role.trainable and role.lora is None else 1
        is_apart = here.is_inside & ~here.equals(self._account.rank_shards(layout))
        source: np.ndarray = numel[here.stage] / parts * is_apart
        return source

    def _is_shared(self, name: str, layout: Layout) -> np.ndarray:
        """Return which ranks have a role's weights in the memory of its home, or of equal frozen weights.

        When a home is made, only the homes of earlier roles exist.
        """
        shards = self._account.rank_shards
        here = shards(layout)
        is_home = layout == self._homes[name]
        is_apart = is_home or bool(layout.form)
        is_shared = np.zeros(len(here.stage), bool) if is_apart else here.equals(shards(self._homes[name]))
        if layout.form == "int8":
            return is_shared
        source = self._problem.roles[name].source
        for other, role in self._problem.roles.items() if source is not None else ():
            if other == name and is_home:
                break
            if other != name and role.source == source and other not in self._offloaded:
                is_shared = is_shared | here.equals(shards(self._homes[other]))
        return is_shared

    # Communicators

    def _communicators(self) -> np.ndarray:
        """Return the bytes of the communicators of all layouts and reallocations."""
        communicators = self._account.communicators
        uses: dict[Layout, Use] = {}
        moves: dict[tuple[int, ...], None] = {}
        for name, role in self._problem.roles.items():
            for layout in self._layouts[name]:
                use = use_of(role, trains=role.trainable and layout == self._homes[name])
                uses[layout] = use.joined(uses.get(layout, use))
            for source, target in self._moves(name):
                moves[tuple(dict.fromkeys((*source.ranks, *target.ranks)))] = None
        return sum(
            (communicators.of_layout(layout, use) for layout, use in uses.items()),
            start=communicators.of_moves(moves))

    def _moves(self, name: str) -> Iterator[tuple[Layout, Layout]]:
        """Yield the source and the target of each reallocation of a role in which something moves."""
        role = self._problem.roles[name]
        home, *copies = self._layouts[name]
        if role.trainable and home.strategy.num_replicas > 1:
            yield home, home
            yield from ((home, layout) for layout in copies)
        else:
            yield from ((home, layout) for layout in copies if self._lacks(home, layout))
        if role.follows is not None and self._lacks(self._homes[role.follows], home):
            yield self._homes[role.follows], home

    def _lacks(self, source: Layout, target: Layout) -> bool:
        """Return whether some rank of the target does not have its shard in the source."""
        here = self._account.rank_shards(target)
        return bool((here.is_inside & ~here.equals(self._account.rank_shards(source))).any())

    # What a call adds

    def _running(self, planned: PlannedCall, call_plan: CallPlan, held: np.ndarray) -> CallBytes:
        """Return what a call adds, with as much cache as it takes beside the bytes `held`."""
        here = self._account.rank_shards(call_plan.layout)
        table = self._account.running_table(planned, call_plan)
        sizes = CallMemory(*(table[:, here.stage] * here.is_inside))
        if call_plan.offload:
            is_apart = ~self._is_shared(planned.role, call_plan.layout)
            sizes = sizes._replace(loaded_weights=sizes.loaded_weights * is_apart)
        if planned.kind == "generate" and planned.waits_for_blocks(call_plan):
            sizes = self._with_cache(planned, call_plan, sizes, held)
        by_use = sizes.by_use()
        if planned.kind == "train_step":  # Other calls release the gradients.
            gradients = self._account.state_bytes("gradients", planned.role, call_plan.layout)
            by_use[f"{planned.role} gradients"] = gradients
        return CallBytes(here.is_inside, by_use)

    def _with_cache(
        self, planned: PlannedCall, call_plan: CallPlan, sizes: CallMemory, held: np.ndarray
    ) -> CallMemory:
        """Return the sizes with the cache that a run takes if no plan promises how many rows decode at once.

        The cache takes no more than `cache_limit` of what is free; further rows wait until blocks are free.
        """
        apart = sizes.loaded_weights + sizes.merged + sizes.packed
        free = np.maximum(0.0, self._account.available - held - apart)
        one_row = sizes.kv_cache / (call_plan.max_rows or planned.workload.max_rows)
        device = self._problem.cluster.device_type
        passes = sizes.num_bytes - sizes.kv_cache - apart
        limit = np.maximum(cache_limit(free, passes, device_type=device), one_row)
        return sizes._replace(kv_cache=np.minimum(sizes.kv_cache, limit))


def with_caches(problem: Problem, plan: ExecutionPlan) -> ExecutionPlan:
    """Return the plan with the cache that each generation gets beside the rest of it, where neither the plan
    nor the user says how large it is or how many rows it holds."""
    waiting = [
        call for call in problem.model_calls
        if call.kind == "generate" and problem.planned(call).waits_for_blocks(plan[call.name])]
    if not waiting:
        return plan
    account = MemoryAccount(problem)
    counted = account.of_plan(plan)
    changed = dict(plan.calls)
    for call in waiting:
        cache = counted.running[call.name].by_use["kv_cache"]
        is_fullest = account.rank_shards(plan[call.name].layout).stage == 0  # It has most layers.
        gib = float(cache[is_fullest].min()) / GIB
        changed[call.name] = replace(plan[call.name], kv_cache_gib=gib)
    return replace(plan, calls=changed)


# The check


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
    """Use -> the most bytes of a rank in the memory of its host: offloaded optimizers and frozen weights."""
    host_bytes: float = 0.0
    """What is offloaded to the fullest host, relative to what it has."""
    host_available: float = 0.0
    """What that host has available."""

    @property
    def fullest(self) -> Peak:
        return max(self.peaks.values(), key=lambda peak: peak.excess_bytes)

    @property
    def fits(self) -> bool:
        """Whether the plan leaves the whole reserve free on every rank and on every host, as all plans of the
        search do."""
        return self.fullest.excess_bytes <= 0 and self.fits_on_hosts

    @property
    def fits_on_hosts(self) -> bool:
        return self.host_bytes <= self.host_available

    @property
    def is_tight(self) -> bool:
        """Whether the plan does not fit, but would if the allocator could use all memory that is free."""
        is_full = self.fullest.excess_bytes > 0 and self.fits_on_hosts
        return is_full and all(self.share(peak) <= 1 for peak in self.peaks.values())

    def share(self, peak: Peak) -> float:
        """Return the fraction of the device that is in use, with the reserve apart from fragmentation."""
        used = peak.num_bytes + sum(peak.reserve.values()) - peak.reserve["fragmentation"]
        return used / peak.device_bytes

    def document(self) -> dict[str, Any]:
        """Return what every rank needs at its peak, and the fullest rank of each call, in bytes."""
        peaks = {
            str(rank): {"bytes": peak.num_bytes, "call": peak.call, "parts": dict(peak.bytes_by_use)}
            for rank, peak in self.peaks.items()}
        calls = {
            name: {"rank": peak.rank, "bytes": peak.num_bytes, "parts": dict(peak.bytes_by_use),
                   "device_share": self.share(peak)}
            for name, peak in self.by_call.items()}
        return {
            "available_bytes": self.fullest.available, "device_bytes": self.fullest.device_bytes,
            "on_host": dict(self.on_host), "reserve": dict(self.fullest.reserve), "fits": self.fits,
            "peaks": peaks, "calls": calls}

    def render(self) -> Group:
        """Return the table for people, and the sentence about the reserve."""
        table = Table(box=None, pad_edge=False, header_style="bold")
        for title in ("GB of memory", "rank", *_COLUMNS, "total", "of device"):
            table.add_column(title, justify="left" if title == "GB of memory" else "right")
        for name, peak in self.by_call.items():
            sizes = self.columns(peak)
            shown = [_gigabytes(size) if size else "-" for size in (*sizes.values(), sum(sizes.values()))]
            table.add_row(name, str(peak.rank), *shown, f"{self.share(peak):.0%}")
        return Group(table, *map(Text, [self.reserve_sentence(), *self.host_sentences()]))

    def columns(self, peak: Peak) -> dict[str, float]:
        """Return the bytes of a rank in the columns of the table."""
        by_column = dict.fromkeys(_COLUMNS, 0.0)
        reserved = {name: self.fullest.reserve[name] for name in _RESERVED}
        for use, size in {**peak.bytes_by_use, **reserved}.items():
            column = _ENDINGS.get(use.split()[-1], "activations")
            if use in ("gradients", "optimizer"):  # Those that exist only while the call runs.
                column = "activations"
            by_column[column] += size
        return by_column

    def reserve_sentence(self) -> str:
        """Return what a device holds in reserve, and whether the plan keeps to it."""
        reserve = self.fullest.reserve
        fragmentation = reserve["fragmentation"]
        connected = max(peak.bytes_by_use.get("communicators", 0.0) for peak in self.peaks.values())
        sizes = {name: reserve[name] for name in _RESERVED} | {"communicators (about)": connected}
        parts = [f"{name} {format_bytes(size)}" for name, size in sizes.items() if size]
        share = fragmentation / self.fullest.device_bytes
        free = f"{format_bytes(fragmentation)} ({share:.0%}) stay free for fragmentation"
        sentence = f"reserve: {', '.join(parts)}; {free}"
        if self.is_tight:
            sentence += f"; the plan is tight, as rank {self.fullest.rank} uses a part of that"
        return sentence

    def host_sentences(self) -> list[str]:
        """Return for each optimizer and frozen role that is offloaded what it takes of the host's memory."""
        sentences = []
        for use, size in self.on_host.items():
            role, what = use.split()
            is_there = "is in host memory between steps" if what == "optimizer" else (
                "are in host memory while other calls run")
            sentences.append(f"{role}'s {what} {is_there}: {format_bytes(size)} for a rank")
        return sentences


def check_memory(problem: Problem, plan: ExecutionPlan, account: MemoryAccount | None = None) -> MemoryCheck:
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
    on_hosts = account.on_hosts(memory)
    host = int((on_hosts - account.available_on_hosts).argmax())
    return MemoryCheck(
        {rank: peak(rank, names[largest[rank]]) for rank in busy},
        {name: peak(rank, name) for name, rank in fullest},
        {use: float(sizes.max()) for use, sizes in memory.on_host.items()},
        float(on_hosts[host]), float(account.available_on_hosts[host]))


def require_fit(problem: Problem, plan: ExecutionPlan, *, allow_tight: bool = False) -> MemoryCheck:
    """Return the check of a plan that fits, or is tight if that is allowed.

    Raises ValueError for another one; the message names the call, the rank, its need and the nearest remedy.
    """
    account = MemoryAccount(problem)
    check = check_memory(problem, plan, account)
    _require_fit_on_hosts(check)
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


def _require_fit_on_hosts(check: MemoryCheck) -> None:
    """Raise ValueError if what the ranks of a host offload takes more than its memory."""
    if not check.fits_on_hosts:
        uses = " and ".join(sorted(check.on_host, key=lambda use: -check.on_host[use]))
        raise ValueError(
            f"offloaded to host memory: {uses}, {format_bytes(check.host_bytes)} on one host, and "
            f"{format_bytes(check.host_available)} are available there: offload less, use more hosts, or "
            f"train adapters")


def _remedy(problem: Problem, plan: ExecutionPlan, account: MemoryAccount) -> str:
    """Return a sentence with the nearest changes that make a plan fit on every rank: changes of the plan, or
    else optimizers in host memory."""
    changes = _fitting_changes(problem, plan, account)
    offloaded = offloading_optimizers(problem)
    if changes is None and offloaded is not None:
        names, changed = offloaded
        others = _fitting_changes(changed, plan, MemoryAccount(changed))
        changes = None if others is None else [*names, *others]
    if changes is None:
        options = ["smaller micro-batches", "recompute", "offload", "optimizer.offload"]
        tried = options if offloaded is not None else options[:-1]
        return f"{', '.join(tried[:-1])} and {tried[-1]} do not make it fit: spread the calls over more ranks"
    return f"it fits with {' and '.join(changes)}"


def offloading_optimizers(problem: Problem) -> tuple[list[str], Problem] | None:
    """Return the fields of the experiment that put all optimizers in host memory, and the problem with these;
    None if that changes nothing."""
    names = [n for n, role in problem.roles.items() if role.trainable and not role.offloads_optimizer]
    if not names or problem.cluster.host_memory is None:
        return None
    roles = {
        name: replace(role, offloads_optimizer=role.offloads_optimizer or name in names)
        for name, role in problem.roles.items()}
    return [f"{name}.optimizer.offload" for name in names], replace(problem, roles=roles)


def _fitting_changes(problem: Problem, plan: ExecutionPlan, account: MemoryAccount) -> list[str] | None:
    """Return changes of a plan with which it fits on every rank and host; None if none are found."""
    changes: list[str] = []
    for _ in range(2 * len(problem.model_calls)):
        check = check_memory(problem, plan, account)
        if check.fits:
            return changes
        peak = check.fullest
        for description, changed in _changes(problem, plan, peak):
            if check_memory(problem, changed, account).peaks[peak.rank].excess_bytes <= 0:
                changes.append(description)
                plan = changed
                break
        else:
            break
    return None


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


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.3g}" if size >= 1e7 else "<0.01"
