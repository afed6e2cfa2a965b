"""Reallocations: starts and finishes this rank's reallocations, which run beside its calls.

They run in a thread on CPUs and on a second stream on GPUs. NCCL wants one thread that posts, in an order
that is equal on all ranks. So on CUDA the main thread posts reallocations too, at their place among the
calls, and only the device works on them meanwhile. CopyVersions tells which copies are outdated.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import torch

from realhf.distributed.pieces import Shards
from realhf.distributed.world import World
from realhf.engine.base import DTYPES
from realhf.layout import Layout
from realhf.realloc.execute import Reallocator, ReallocStats, Staging
from realhf.realloc.links import Links
from realhf.realloc.quantise import Int8Reallocator, make_int8_schedules
from realhf.realloc.schedule import Schedule, make_schedule
from realhf.runtime.compile.actions import Action, Reallocate, role_of
from realhf.runtime.compile.equal_programs import require_equal_schedules
from realhf.runtime.records.step_record import Event
from realhf.runtime.weights.engine_store import EngineStore, ParameterCatalog

_T = TypeVar("_T")
_R = TypeVar("_R", covariant=True)

Copy = tuple[str, Layout]
"""A parameter set and the layout in which it is held."""
LoadShards = Callable[[], AbstractContextManager[tuple[Shards | None, Shards | None]]]
"""Returns a context in which this rank's shards of a reallocation's source and target are on the device."""
AnyReallocator = Reallocator | Int8Reallocator
_NEVER = -1
"""Version of a copy that has never been made."""


@dataclass(frozen=True)
class FinishedReallocation:
    """A reallocation in which this rank took part; `start` is in Unix seconds."""

    action: Reallocate
    stats: ReallocStats
    start: float
    ended: Callable[[], float]
    """Returns the time of its end; on CUDA the host waits for it."""
    arrived: Callable[[], float] = lambda: 0.0
    """Returns the Unix time from which the call that needs the weights had them; 0 if the host waited."""

    def event(self, rank: int) -> Event:
        """Return the event of a StepRecord."""
        return {
            "rank": rank, "name": role_of(self.action.target_set), "kind": "realloc", "start": self.start,
            "transfer": f"{self.action.source}->{self.action.target}", "sent_bytes": self.stats.bytes_sent,
            "received_bytes": self.stats.bytes_received, "senders": list(self.stats.senders),
            "over_bound": self.stats.over_bound, "bound_seconds": self.stats.bound_seconds,
            "end": self.ended(),
        }


class InFlight(Protocol[_R]):
    """A task that has been submitted.

    Work that follows `result` sees the task's effects. `result` may be called again, and raises what the task
    has raised.
    """

    def result(self) -> _R: ...


class ThreadRunner:
    """A thread in which tasks run."""

    waits_for_ranks = False
    """Whether a reallocation starts only when all of its ranks have come to it."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "realloc")
        self._failure: Exception | None = None

    def submit(self, task: Callable[[], _T]) -> InFlight[_T]:
        """Run a task after the earlier tasks."""
        return self._pool.submit(task)

    def reallocate(
        self, action: Reallocate, reallocator: AnyReallocator, load: LoadShards
    ) -> InFlight[FinishedReallocation]:
        """Load the shards and move the parameters, after the earlier tasks."""

        def task() -> FinishedReallocation:
            if self._failure is not None:  # The ranks are out of step, so later messages would be mixed up.
                raise self._failure
            start = time.time()
            try:
                with load() as (source, target):
                    stats = reallocator.run(source, target)
            except Exception as error:
                self._failure = error
                raise
            end = time.time()
            return FinishedReallocation(action, stats, start, lambda: end)

        return self.submit(task)


@dataclass
class PostedTask(Generic[_T]):
    """A task whose work on the device has been posted."""

    value: _T
    posted_at: float
    """Unix time in seconds."""
    ended_at: float = 0.0
    """Unix time of the end; 0 if events tell it."""
    begin: torch.cuda.Event | None = None
    end: torch.cuda.Event | None = None
    asked: torch.cuda.Event | None = None
    """Where the stream that needs the results began to wait for them."""
    asked_at: float = 0.0
    """Unix time at which `result` was called first."""

    def result(self) -> _T:
        """Return the value. On CUDA the current stream waits for the work, and the host does not."""
        if self.end is not None:
            if self.asked is None:
                self.asked = torch.cuda.Event(enable_timing=True)
                self.asked.record()
                self.asked_at = time.time()
            torch.cuda.current_stream().wait_event(self.end)
        return self.value

    def ended(self) -> float:
        """Return the Unix time at which the work ended; the host waits for the device until then."""
        if self.begin is None or self.end is None:
            return self.ended_at
        self.end.synchronize()
        return self.posted_at + self.begin.elapsed_time(self.end) / 1000

    def arrived(self) -> float:
        """Return the Unix time from which the stream that needed the results had them; see `ended`."""
        if self.asked is None or self.end is None:
            return self.ended_at
        self.asked.synchronize()
        self.end.synchronize()
        return self.asked_at + max(0.0, self.asked.elapsed_time(self.end) / 1000)


@dataclass
class _PostedReallocation:
    """A reallocation that has been posted, with the shards that stay on the device until it has ended."""

    action: Reallocate
    start: float
    task: PostedTask[ReallocStats]
    shards: ExitStack

    def result(self) -> FinishedReallocation:
        stats = self.task.result()
        self.shards.close()
        return FinishedReallocation(self.action, stats, self.start, self.task.ended, self.task.arrived)


class StreamRunner:
    """A CUDA stream beside that of the calls, on which the caller's thread posts tasks.

    On a CPU, where the tests use it, a task has ended when `submit` returns.
    """

    waits_for_ranks = True

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def submit(self, task: Callable[[], _T]) -> PostedTask[_T]:
        """Post a task, whose work begins after the work so far on the current stream and on this one."""
        now = time.time()
        if self._stream is None:
            return PostedTask(task(), now, time.time())
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            value = task()
            end.record()
        return PostedTask(value, now, begin=begin, end=end)

    def reallocate(
        self, action: Reallocate, reallocator: AnyReallocator, load: LoadShards
    ) -> InFlight[FinishedReallocation]:
        """Load the shards on the stream of the calls, wait for the other ranks, and post the messages.

        The host waits, because a device that waited for a busy rank could do nothing else. The shards stay
        loaded until `result` is called.
        """
        start = time.time()
        with ExitStack() as stack:
            source, target = stack.enter_context(load())
            reallocator.wait_until_ready()
            task = self.submit(lambda: reallocator.post(source, target))
            return _PostedReallocation(action, start, task, stack.pop_all())


Runner = ThreadRunner | StreamRunner
"""Runs tasks and reallocations one after the other, in the order in which they are submitted."""


def make_runner(device: torch.device) -> Runner:
    return StreamRunner(device) if device.type == "cuda" else ThreadRunner()


class Arrivals:
    """Reallocations whose end has not been recorded yet.

    A call waits for the weights that it needs, runs and ends; then the times of their reallocations are read
    and recorded. On CUDA the host itself does not wait, and the times are known only then.
    """

    def __init__(self) -> None:
        self._unrecorded: list[FinishedReallocation] = []
        self._new: list[FinishedReallocation] = []
        self._waiting: list[tuple[Event, list[FinishedReallocation]]] = []
        """Events of calls, and the reallocations for which they waited."""

    def add(self, finished: Sequence[FinishedReallocation]) -> None:
        """Add reallocations for which the next call waits."""
        self._unrecorded += finished
        self._new += finished

    def delay(self, event: Event) -> None:
        """Let the event of a call that has ended begin when the device had the weights; `settle` then reads
        when that was."""
        if self._new:
            self._waiting.append((event, self._new))
        self._new = []

    def settle(self) -> None:
        """Correct the events of the calls so far; the host waits until their weights have arrived."""
        for event, reallocations in self._waiting:
            arrived = max(reallocation.arrived() for reallocation in reallocations)
            seconds = max(0.0, min(arrived, event["end"]) - event["start"])
            event["start"] += seconds
            event["waited"] += seconds
        self._waiting = []

    def take_events(self, rank: int) -> list[Event]:
        """Return the events of what has been added since the last call of this method."""
        events = [reallocation.event(rank) for reallocation in self._unrecorded]
        self._unrecorded = []
        return events


class Reallocations:
    """The reallocations in which this rank takes part. All ranks start theirs in the same order."""

    def __init__(
        self, world: World, catalog: ParameterCatalog, engines: EngineStore, runner: Runner,
        actions: Iterable[Reallocate], *, links: Links,
    ) -> None:
        """Make the schedules of all `actions` that `start` may be given."""
        self._rank = world.rank
        self._catalog = catalog
        self._engines = engines
        self._runner = runner
        self._in_flight: dict[Copy, InFlight[FinishedReallocation]] = {}
        self._reallocators: dict[Reallocate, AnyReallocator] = {}
        staging = Staging(world.device)
        mine = dict.fromkeys(_without_ahead(action) for action in actions if self._takes_part(action))
        schedules = {action: self._schedules(action, links) for action in mine}
        # Before ranks meet for their groups, where they would wait for each other forever.
        require_equal_schedules(world, {
            _named(action): " ".join(schedule.digest for schedule in of_action)
            for action, of_action in schedules.items()})
        for action, of_action in schedules.items():
            how: dict[str, Any] = {"staging": staging, "role": self._role(action)}
            how |= {"dtype": self._dtype(action), "posts": runner.waits_for_ranks}
            if len(of_action) == 2:
                self._reallocators[action] = Int8Reallocator(of_action, world, **how)
            else:
                self._reallocators[action] = Reallocator(
                    *of_action, world, follow_rate=_follow_rate(action), **how)

    def _role(self, action: Reallocate) -> str:
        return self._catalog.sets[action.target_set].role

    def _dtype(self, action: Reallocate) -> torch.dtype:
        return DTYPES[self._catalog.roles[self._role(action)].weights_dtype]

    def _schedules(
        self, action: Reallocate, links: Links
    ) -> tuple[Schedule] | tuple[Schedule, Schedule]:
        """Return the schedule of a reallocation, or the two of one to a copy in int8."""
        spec = self._catalog.specs[action.source_set]
        how: dict[str, Any] = {"source": action.source, "target": action.target, "links": links}
        how |= {"itemsize": self._dtype(action).itemsize, "sharded": action.sharded}
        if action.target.form == "int8" and not self._catalog.sets[action.target_set].is_adapters:
            return make_int8_schedules(spec, **how)
        return (make_schedule(spec, **how, forward=_follow_rate(action) == 1),)

    def _takes_part(self, action: Reallocate) -> bool:
        return self._rank in action.source or self._rank in action.target

    def start(self, action: Reallocate) -> None:
        """Start a reallocation, if this rank takes part in it."""
        if self._takes_part(action):
            target = (action.target_set, action.target)
            assert target not in self._in_flight, "a copy is updated twice at once"
            self._in_flight[target] = self._runner.reallocate(
                action, self._reallocators[_without_ahead(action)], lambda: self._load(action))

    @contextmanager
    def _load(self, action: Reallocate) -> Iterator[tuple[Shards | None, Shards | None]]:
        """Keep this rank's shards of an action's source and target on the device, and yield them."""
        source = (action.source_set, action.source)
        target = (action.target_set, action.target)
        with self._engines.in_use(source, target, written=target):
            yield self._engines.shards(*source, sharded=action.sharded), self._engines.shards(*target)

    @property
    def in_flight(self) -> list[list[str]]:
        """The copies whose reallocations this rank has started and not yet finished, as JSON."""
        return [[name, str(layout)] for name, layout in self._in_flight]

    def finish(self, name: str, layout: Layout | None = None) -> list[FinishedReallocation]:
        """Wait for the running reallocations of a parameter set to one layout, or to all; return them.

        The name of a role includes its adapters.
        """
        finished = []
        for set_name, target in list(self._in_flight):
            if name in (set_name, self._catalog.sets[set_name].role) and layout in (None, target):
                finished.append(self._in_flight.pop((set_name, target)).result())
        return finished

    def finish_all_but(self, in_flight: Collection[Sequence[str]]) -> None:
        """Wait for all running reallocations but these (see `in_flight`)."""
        copies = [tuple(copy) for copy in in_flight]
        for name, layout in list(self._in_flight):
            if (name, str(layout)) not in copies:
                self._in_flight.pop((name, layout)).result()

    def wait_for_followers(self) -> None:
        """Wait until the moving averages at home are complete, without finishing their reallocations."""
        for (name, _), reallocation in self._in_flight.items():
            if self._catalog.sets[name].follows is not None:
                reallocation.result()


def _follow_rate(action: Reallocate) -> float:
    return 1.0 if action.follow_rate is None else action.follow_rate


def _without_ahead(action: Reallocate) -> Reallocate:
    """Return the action that has the same schedule and does not run ahead."""
    return replace(action, ahead=False)


def _named(action: Reallocate) -> str:
    """Return a reallocation in words, the same on all ranks and different from all others."""
    target = f" for {action.target_set}" if action.target_set != action.source_set else ""
    sharded = " (optimizer's copy)" if action.sharded else ""
    return f"{action.source_set} from {action.source}{sharded} to {action.target}{target}"


class CopyVersions:
    """The version of each copy of a parameter set; all ranks count alike, and so agree.

    `homes` are complete at the start. A home in `sharded` is outdated after each update, which changes only
    the optimizer's copy, of which every replica has a part.
    """

    def __init__(self, homes: Collection[Copy], names: Iterable[str], *, sharded: Collection[Copy]) -> None:
        self._updates = dict.fromkeys(names, 0)
        self._versions = dict.fromkeys(homes, 0)
        self._sharded = frozenset(sharded)

    def count_update(self, home: Copy) -> None:
        """Count a train step of a parameter set."""
        self._updates[home[0]] += 1
        if home not in self._sharded:
            self._versions[home] += 1

    def begin(self, action: Reallocate) -> bool:
        """Mark the target of a reallocation as up to date; return False if it was already.

        The update of a moving average always returns True.
        """
        target = (action.target_set, action.target)
        if action.follow_rate is not None:
            self._updates[action.target_set] += 1
            self._versions[target] += 1
            return True
        version = self._newest(action)
        if self._versions.get(target, _NEVER) >= version:
            return False
        self._versions[target] = version
        return True

    def _newest(self, action: Reallocate) -> int:
        """Return the version that the action's source has."""
        if action.sharded:
            return self._updates[action.source_set]
        return self._versions[action.source_set, action.source]

    def to_json(self) -> dict[str, Any]:
        copies = [[name, str(layout), version] for (name, layout), version in self._versions.items()]
        return {"updates": self._updates.copy(), "copies": copies}

    def outdate_sharded(self) -> None:
        """Mark the homes in `sharded` as outdated, after optimizers were read from a checkpoint."""
        for name, _ in self._sharded:
            self._updates[name] += 1

    def restore(
        self, saved: Mapping[str, Any], actions: Iterable[Action], start: Callable[[Reallocate], object]
    ) -> None:
        """Continue with the versions of a checkpoint, when only the homes have its parameters.

        Call `start` with the `actions` whose targets were up to date in the checkpoint, to fill them again.
        """
        saved_versions = {(name, Layout.parse(layout)): version for name, layout, version in saved["copies"]}
        self._updates = dict(saved["updates"])
        self._versions = {
            home: _NEVER if home in self._sharded else saved_versions[home] for home in self._versions
        }
        for action in actions:
            if isinstance(action, Reallocate) and action.follow_rate is None:
                exists = action.sharded or (action.source_set, action.source) in self._versions
                if exists and saved_versions.get((action.target_set, action.target)) == self._newest(action):
                    start(action)
